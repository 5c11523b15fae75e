"""Chats in a harvest, and rows of some of their spans."""

import itertools
import json

import pytest
import torch
from jaxtyping import TypeCheckError

from bridge import TransformerBridge
from bridge.harvest import Files, HarvestError, MixError, harvest
from tests.harvest.common import RESID, TEXTS, numbers, read

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }} {% endfor %}"
CHATS = [
    [
        {"role": "user", "content": "Mary and John went to the store."},
        {"role": "assistant", "content": answer},
    ]
    for answer in ("John gave a drink to Mary.", "Mary.")
]
OPTIONS = {"hook_points": [RESID], "prepend_bos": False, "dtype": "float32"}


@pytest.fixture
def bridge():
    bridge = TransformerBridge.boot_embedded()
    bridge.tokenizer.chat_template = TEMPLATE
    return bridge


@pytest.mark.parametrize("pack", [True, False])
def test_rows_are_those_of_the_chats(bridge, tmp_path, pack):
    file = tmp_path / "chats.jsonl"
    file.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in CHATS))
    lists = harvest(bridge, CHATS, out=tmp_path / "a", pack=pack, **OPTIONS)
    harvest(bridge, Files(file), out=tmp_path / "b", pack=pack, column="messages", **OPTIONS)
    table = read(tmp_path / "a")
    assert table.equals(read(tmp_path / "b")) and lists.rows == table.num_rows
    ids = [bridge.to_tokens(chat)[0].tolist() for chat in CHATS]
    assert table.column("token").to_pylist() == [*itertools.chain(*ids)]
    assert table.column("position").to_pylist() == [i for row in ids for i in range(len(row))]
    if not pack:
        with torch.no_grad():
            _, cache = bridge.run_with_cache(CHATS[1], names_filter=RESID)
        rows = numbers(table, RESID)[len(ids[0]) :]
        torch.testing.assert_close(
            torch.as_tensor(rows).float(), cache[RESID][0], atol=1e-5, rtol=1e-4
        )


@pytest.mark.parametrize("rows", ["all", "mean", "last"])
def test_rows_of_spans(bridge, tmp_path, rows):
    def choose(spans):
        return spans["assistant"].content

    options = {"rows": rows, "pack": False, **OPTIONS}
    harvest(bridge, CHATS, out=tmp_path / "a", positions=choose, **options)
    table = read(tmp_path / "a")
    expected, places = [], []
    for chat in CHATS:
        chosen = choose(bridge.spans(chat)).positions
        with torch.no_grad():
            _, cache = bridge.run_with_cache(chat, names_filter=RESID)
        own = cache[RESID][0, chosen]
        own = {"all": own, "mean": own.mean(0, keepdim=True), "last": own[-1:]}[rows]
        expected.append(own)
        places += chosen if rows == "all" else chosen[-1:]
    values = torch.as_tensor(numbers(table, RESID)).float()
    torch.testing.assert_close(values, torch.cat(expected), atol=1e-5, rtol=1e-4)
    assert table.column("position").to_pylist() == places


def test_positions_of_every_document(bridge, tmp_path):
    spans = bridge.spans(CHATS[0]).find("John went")
    harvest(bridge, CHATS, out=tmp_path / "a", positions=spans, **OPTIONS)
    harvest(bridge, CHATS, out=tmp_path / "b", positions=spans.positions, **OPTIONS)
    table = read(tmp_path / "a")
    assert table.equals(read(tmp_path / "b"))
    assert table.column("position").to_pylist() == spans.positions * 2
    with pytest.raises(HarvestError, match="every token was left out"):
        harvest(bridge, TEXTS, out=tmp_path / "c", positions=[10**6], **OPTIONS)


def test_a_harvest_of_other_positions_or_another_template_is_another_one(bridge, tmp_path):
    harvest(bridge, CHATS, out=tmp_path, positions=[1], **OPTIONS)
    assert harvest(bridge, CHATS, out=tmp_path, positions=[1], **OPTIONS).made == 0
    with pytest.raises(MixError):
        harvest(bridge, CHATS, out=tmp_path, positions=[2], **OPTIONS)
    bridge.tokenizer.chat_template = TEMPLATE.replace(":", "")
    with pytest.raises(MixError):
        harvest(bridge, CHATS, out=tmp_path, positions=[1], **OPTIONS)


def test_bad_input(bridge, tmp_path):
    with pytest.raises(HarvestError, match="document 0 is a chat, and inputs begin with BOS"):
        harvest(bridge, CHATS, out=tmp_path / "a", **OPTIONS | {"prepend_bos": True})
    with pytest.raises(HarvestError, match=r"document 0 is none"):
        harvest(bridge, ["Mary"], out=tmp_path / "b", positions=len, **OPTIONS)
    with pytest.raises(HarvestError, match=r"positions returned 5; it must return spans"):
        harvest(bridge, CHATS, out=tmp_path / "b2", positions=len, **OPTIONS)
    for wrong in ([], [-1], "user", 3, bridge.spans(CHATS[0])[:0]):
        with pytest.raises((ValueError, TypeCheckError), match=r"positions|has no tokens"):
            harvest(bridge, CHATS, out=tmp_path / "c", positions=wrong, **OPTIONS)
    bridge.tokenizer.chat_template = None
    with pytest.raises(HarvestError, match="no tokenizer with a chat template"):
        harvest(bridge, CHATS, out=tmp_path / "d", **OPTIONS)
