"""The rows that are written, against plain Hugging Face and plain torch."""

import logging

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertForMaskedLM, T5Config, T5ForConditionalGeneration

from bridge import TransformerBridge, UnknownHookError
from bridge.harvest import HarvestError, Project, TopK, TopPositions, harvest
from tests.analysis.models import bridge_of
from tests.conftest import tiny
from tests.harvest.common import PATTERN, RESID, TEXTS, Z, documents, hidden, numbers, read


def packed(bridge, texts, size, bos, separator=None):
    """The inputs as the issue describes packing, the slow way: one list of tokens, cut up."""
    stream = []
    for number, ids in enumerate(documents(bridge, texts)):
        stream += [(token, number, place) for place, token in enumerate(ids)]
        if separator is not None:
            stream.append((separator, number, -1))
    room = size - (bos is not None)
    rows = [stream[start : start + room] for start in range(0, len(stream), room)]
    if bos is not None:
        rows = [[(bos, row[0][1], -1), *row] for row in rows]
    return rows


@pytest.mark.parametrize(
    ("bos", "separator"), [(True, None), (False, None), (True, "eos"), (False, 5)]
)
def test_packed_rows_are_the_models(embedded, tmp_path, bos, separator):
    separator_id = embedded.tokenizer.eos_token_id if separator == "eos" else separator
    bos_id = embedded.tokenizer.bos_token_id if bos else None
    harvest(
        embedded,
        TEXTS,
        hook_points=[RESID],
        out=tmp_path / "a",
        context_size=16,
        tokens_per_shard=100,
        batch_size=3,
        dtype="float32",
        prepend_bos=bos,
        separator=separator,
    )
    table = read(tmp_path / "a")
    rows = packed(embedded, TEXTS, 16, bos_id, separator_id)
    flat = [cell for row in rows for cell in row]
    assert table.column("token").to_pylist() == [cell[0] for cell in flat]
    assert table.column("document").to_pylist() == [cell[1] for cell in flat]
    assert table.column("position").to_pylist() == [cell[2] for cell in flat]
    assert table.column("sequence").to_pylist() == [
        number for number, row in enumerate(rows) for _ in row
    ]
    assert table.column("context_position").to_pylist() == [
        place for row in rows for place in range(len(row))
    ]
    expected = torch.cat(hidden(embedded, [[cell[0] for cell in row] for row in rows], 2)).numpy()
    np.testing.assert_allclose(numbers(table, RESID), expected, atol=2e-5)


def test_any_row_leads_back_to_its_text(embedded, tmp_path):
    harvest(embedded, TEXTS, hook_points=[RESID], out=tmp_path / "a", context_size=16, pack=False)
    table = read(tmp_path / "a").to_pylist()
    words = documents(embedded, TEXTS)
    for row in table:
        if row["position"] >= 0:
            assert words[row["document"]][row["position"]] == row["token"]
    own = [(row["document"], row["position"]) for row in table if row["position"] >= 0]
    assert sorted(own) == [
        (number, place) for number, ids in enumerate(words) for place in range(len(ids))
    ]


@pytest.mark.parametrize("family", ["gpt2", "llama", "gpt_neox"])
def test_padding_never_gets_in(family, tmp_path):
    model = tiny(family)
    bridge = TransformerBridge(model)
    source = [list(range(3, 3 + length)) for length in (2, 9, 1, 5, 7, 23)]
    points = [
        "blocks.1.hook_resid_post",
        "blocks.1.attn.hook_pattern",
        "blocks.1.attn.hook_attn_scores",
    ]
    harvest(
        bridge,
        source,
        hook_points=points,
        out=tmp_path / "a",
        context_size=10,
        pack=False,
        dtype="float32",
    )
    rows = read(tmp_path / "a").to_pylist()
    assert len(rows) == sum(map(len, source))
    eager = tiny(family, "eager")
    for row in rows:
        document = source[row["document"]]
        first = row["position"] - row["context_position"]
        alone = torch.tensor([document[first : first + 10]])
        with torch.no_grad():
            found = eager(alone, output_hidden_states=True, output_attentions=True)
        at = row["context_position"]
        np.testing.assert_allclose(row[points[0]], found.hidden_states[2][0, at].numpy(), atol=2e-5)
        pattern, scores = np.array(row[points[1]]), np.array(row[points[2]])
        assert pattern.shape == scores.shape == (4, 10)
        np.testing.assert_allclose(
            pattern[:, : alone.shape[1]], found.attentions[1][0, :, at].numpy(), atol=1e-5
        )
        assert not pattern[:, at + 1 :].any()
        assert np.isneginf(scores[:, at + 1 :]).all() and np.isfinite(scores[:, : at + 1]).all()


@pytest.mark.parametrize(
    "case", ["bert", "gemma2", "bloom", "mixtral", "opt", "phi3", "native-solu_ln"]
)
def test_every_family(case, tmp_path):
    bridge = bridge_of(case)
    source = [[5, 6, 7, 8], [9, 10, 11], [12, 13, 14, 15, 16, 17, 18]]
    points = ["embed.hook_in", "blocks.0.attn.hook_z", "blocks.1.hook_resid_post"]
    points = [name for name in points if name in bridge.hook_dict or name in bridge.names.aliases]
    harvest(
        bridge,
        source,
        hook_points=points,
        out=tmp_path / "a",
        pack=False,
        context_size=8,
        dtype="float32",
    )
    table = read(tmp_path / "a").to_pylist()
    for row in table:
        document = source[row["document"]]
        _, cache = bridge.run_with_cache(torch.tensor([document]), names_filter=points)
        for name in points:
            np.testing.assert_allclose(
                row[name], cache[name][0, row["position"]].detach().numpy(), atol=2e-5
            )


def test_bert_in_both_directions_by_hugging_face(tmp_path):
    sizes = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 28, "num_hidden_layers": 2}
    model = BertForMaskedLM(
        BertConfig(**sizes, num_attention_heads=4, max_position_embeddings=20)
    ).eval()
    source = [[5, 6, 7, 8], [9, 10], [12, 13, 14, 15, 16, 17, 18]]
    harvest(
        TransformerBridge(model),
        source,
        hook_points=["blocks.0.attn.hook_pattern"],
        out=tmp_path / "a",
        pack=False,
        context_size=9,
        dtype="float32",
    )
    model.set_attn_implementation("eager")
    for row in read(tmp_path / "a").to_pylist():
        with torch.no_grad():
            alone = model(
                torch.tensor([source[row["document"]]]), output_attentions=True
            ).attentions[0][0]
        pattern = np.array(row["blocks.0.attn.hook_pattern"])
        np.testing.assert_allclose(
            pattern[:, : alone.shape[1]], alone[:, row["position"]].numpy(), atol=1e-5
        )
        assert not pattern[:, alone.shape[1] :].any()


def test_encoder_of_an_encoder_decoder(tmp_path):
    config = T5Config(
        vocab_size=61,
        d_model=32,
        d_kv=8,
        d_ff=28,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
    )
    model = T5ForConditionalGeneration(config).eval()
    bridge = TransformerBridge(model)
    source = [[5, 6, 7, 8], [9, 10]]
    name = "encoder.0.hook_resid_post"
    harvest(
        bridge,
        source,
        hook_points=[name],
        out=tmp_path / "a",
        pack=False,
        context_size=9,
        dtype="float32",
    )
    for row in read(tmp_path / "a").to_pylist():
        with torch.no_grad():
            alone = model.encoder(
                torch.tensor([source[row["document"]]]), output_hidden_states=True
            ).hidden_states[1]
        np.testing.assert_allclose(row[name], alone[0, row["position"]].numpy(), atol=2e-5)
    with pytest.raises(HarvestError, match="no row for each token"):
        harvest(
            bridge,
            source,
            hook_points=["decoder.0.hook_resid_post"],
            out=tmp_path / "b",
            context_size=9,
        )
    assert not (tmp_path / "b").exists()


def test_the_model_stops_at_the_last_needed_layer(embedded, tmp_path):
    seen = []
    handles = [
        module.register_forward_hook(lambda module, args, out, path=path: seen.append(path))
        for path in embedded.block_paths
        for module in [embedded.original_model.get_submodule(path)]
    ]
    try:
        harvest(
            embedded,
            TEXTS[:3],
            hook_points=["blocks.1.attn.hook_z"],
            out=tmp_path / "a",
            context_size=16,
        )
    finally:
        for handle in handles:
            handle.remove()
    assert set(seen) == set(embedded.block_paths[:2])


def test_points_behind_the_blocks(embedded, tmp_path):
    names = ["ln_final.hook_normalized", "unembed.hook_out"]
    harvest(
        embedded,
        TEXTS[:3],
        hook_points=names,
        out=tmp_path / "a",
        context_size=16,
        dtype="float32",
        pack=False,
    )
    for row in read(tmp_path / "a").to_pylist()[::5]:
        ids = [embedded.tokenizer.bos_token_id, *documents(embedded, TEXTS)[row["document"]]]
        with torch.no_grad():
            logits = embedded.original_model(torch.tensor([ids])).logits[0, row["position"] + 1]
        np.testing.assert_allclose(row["unembed.hook_out"], logits.numpy(), atol=2e-4)


def test_interventions_are_active(embedded, tmp_path):
    def off(z, hook):
        z[:, :, 1] = 0

    kw = {"context_size": 16, "dtype": "float32", "hook_points": [RESID]}
    harvest(
        embedded, TEXTS[:4], out=tmp_path / "a", interventions=[("blocks.1.attn.hook_z", off)], **kw
    )
    table = read(tmp_path / "a")
    rows = [
        [cell[0] for cell in row]
        for row in packed(embedded, TEXTS[:4], 16, embedded.tokenizer.bos_token_id)
    ]
    handle = embedded.blocks[1].attn.hook_z.add_hook(off)
    expected = torch.cat(hidden(embedded, rows, 2)).numpy()
    handle.remove()
    np.testing.assert_allclose(numbers(table, RESID), expected, atol=2e-5)
    assert np.abs(expected - torch.cat(hidden(embedded, rows, 2)).numpy()).max() > 0.01
    with pytest.raises(HarvestError, match="would change nothing"):
        harvest(
            embedded,
            TEXTS[:4],
            out=tmp_path / "b",
            interventions=[("blocks.3.attn.hook_z", off)],
            **kw,
        )


def test_reductions(embedded, tmp_path):
    kw = {"context_size": 16, "dtype": "float32", "hook_points": [RESID, Z], "pack": False}
    harvest(embedded, TEXTS, out=tmp_path / "all", **kw)
    table = read(tmp_path / "all")
    activations, group = numbers(table, RESID), table.column("sequence").to_numpy()
    order = list(dict.fromkeys(group.tolist()))
    members = {number: np.flatnonzero(group == number) for number in order}

    harvest(embedded, TEXTS, out=tmp_path / "mean", rows="mean", **kw)
    means = np.stack([activations[members[number]].astype(np.float64).mean(0) for number in order])
    np.testing.assert_allclose(numbers(read(tmp_path / "mean"), RESID), means, atol=1e-5)

    harvest(embedded, TEXTS, out=tmp_path / "last", rows="last", **kw)
    last = read(tmp_path / "last")
    np.testing.assert_array_equal(
        numbers(last, RESID), np.stack([activations[members[n][-1]] for n in order])
    )
    assert last.column("token").to_pylist() == [
        table.column("token")[int(members[n][-1])].as_py() for n in order
    ]

    def size(rows):
        return rows.norm(dim=1)

    harvest(embedded, TEXTS, out=tmp_path / "top", rows=TopPositions(2, RESID, size), **kw)
    norms = np.linalg.norm(activations, axis=1)
    best = [np.sort(members[n][np.argsort(-norms[members[n]])[:2]]) for n in order]
    np.testing.assert_array_equal(
        numbers(read(tmp_path / "top"), RESID), activations[np.concatenate(best)]
    )

    matrix = torch.randn(4, 32, 5, generator=torch.Generator().manual_seed(0))
    code = torch.randn(128, 50, generator=torch.Generator().manual_seed(1))
    harvest(
        embedded,
        TEXTS,
        out=tmp_path / "made",
        reduce={Z: Project(matrix), RESID: TopK(3, lambda rows: torch.relu(rows @ code))},
        **kw,
    )
    made = read(tmp_path / "made")
    assert made.column_names[-3:] == [f"{RESID}.values", f"{RESID}.indices", Z]
    by_hand = np.einsum(
        "nhd,hdo->no", numbers(table, Z).astype(np.float64), matrix.double().numpy()
    )
    np.testing.assert_allclose(numbers(made, Z), by_hand, atol=1e-4)
    features = np.maximum(activations.astype(np.float64) @ code.double().numpy(), 0)
    indices = numbers(made, f"{RESID}.indices")
    np.testing.assert_allclose(
        numbers(made, f"{RESID}.values"), np.take_along_axis(features, indices, 1), atol=1e-3
    )
    np.testing.assert_allclose(
        np.sort(features, 1)[:, :-4:-1], np.take_along_axis(features, indices, 1), atol=1e-3
    )


def test_special_tokens_can_be_left_out(embedded, tmp_path):
    kw = {"context_size": 16, "hook_points": [RESID], "separator": "eos"}
    harvest(embedded, TEXTS, out=tmp_path / "with", **kw)
    harvest(embedded, TEXTS, out=tmp_path / "without", keep_special=False, **kw)
    rows = [row for row in read(tmp_path / "with").to_pylist() if row["position"] >= 0]
    assert read(tmp_path / "without").to_pylist() == rows


def test_long_documents_are_nothing_to_warn_of(embedded, tmp_path, monkeypatch, caplog):
    """A document may be longer than the model's context: it is cut into several inputs."""
    monkeypatch.setattr(embedded.tokenizer, "model_max_length", 4)
    monkeypatch.setattr(
        embedded.tokenizer, "deprecation_warnings", {}
    )  # those that were given before
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    caplog.set_level(logging.WARNING, "transformers")
    harvest(embedded, TEXTS, out=tmp_path / "acts", context_size=16, hook_points=[RESID])
    assert not [record for record in caplog.records if "longer than" in record.getMessage()]


def test_float16_that_cannot_hold_a_value_is_an_error(embedded, tmp_path):
    def huge(x, hook):
        return x * 1e6

    kw = {
        "hook_points": [RESID],
        "context_size": 16,
        "interventions": [("blocks.0.hook_resid_pre", huge)],
    }
    with pytest.raises(HarvestError, match=r"float16 cannot hold .* dtype='float32'"):
        harvest(embedded, TEXTS[:2], out=tmp_path / "a", **kw)
    assert harvest(embedded, TEXTS[:2], out=tmp_path / "b", dtype="float32", **kw).rows


@pytest.mark.parametrize(
    ("computed", "stored", "factor", "says"),
    [
        ("float64", "float32", 1e300, "float32 cannot hold .* dtype='float64'"),
        ("float64", "float16", 1e30, "float16 cannot hold .* dtype='float32'"),
        ("float64", "float16", 1e300, "float16 cannot hold .* dtype='float64'"),
        ("bfloat16", "float16", 1e30, "float16 cannot hold .* dtype='float32'"),
    ],
)
@pytest.mark.parametrize("rows", ["all", "mean"])
@pytest.mark.parametrize("reduce", [None, Project(torch.eye(32)), TopK(2)])
def test_every_narrowing_that_cannot_hold_a_value_is_an_error(
    tmp_path, computed, stored, factor, says, rows, reduce
):
    bridge = TransformerBridge(tiny("llama", dtype=getattr(torch, computed)))
    point = "blocks.0.hook_resid_post"
    kw = {
        "hook_points": [point],
        "context_size": 8,
        "prepend_bos": False,
        "rows": rows,
        "dtype": stored,
        "reduce": {point: reduce} if reduce else None,
    }
    # The largest negative number, too: an upper end alone would not see it.
    larger = (
        [(point, lambda x, hook: -x.abs() * factor)]
        if reduce is None
        else [(point, lambda x, hook: x * factor)]
    )
    with pytest.raises(HarvestError, match=says):
        harvest(bridge, [[5, 6, 7]], out=tmp_path / "a", interventions=larger, **kw)
    harvest(bridge, [[5, 6, 7]], out=tmp_path / "b", **kw)
    wide = kw | {"dtype": says.split("'")[1]}
    harvest(bridge, [[5, 6, 7]], out=tmp_path / "c", interventions=larger, **wide)
    for column in read(tmp_path / "c").column_names:
        assert np.isfinite(numbers(read(tmp_path / "c"), column)).all()


def test_a_mean_is_computed_in_float64(tmp_path):
    """A sum beyond float32 whose mean is not, and digits that float32 has not."""
    bridge = TransformerBridge(tiny("llama", dtype=torch.float64))
    point = "blocks.0.hook_resid_post"
    large = [
        (
            point,
            lambda x, hook: (
                torch.full_like(x, 3e38) + torch.arange(3, dtype=x.dtype)[:, None] * 1e30
            ),
        )
    ]
    kw = {
        "hook_points": [point],
        "context_size": 8,
        "prepend_bos": False,
        "rows": "mean",
        "interventions": large,
    }
    harvest(bridge, [[5, 6, 7]], out=tmp_path / "a", dtype="float64", **kw)
    np.testing.assert_allclose(
        numbers(read(tmp_path / "a"), point), np.full((1, 32), 3e38 + 1e30), rtol=1e-14
    )
    harvest(bridge, [[5, 6, 7]], out=tmp_path / "b", dtype="float32", **kw)
    assert np.isfinite(numbers(read(tmp_path / "b"), point)).all()


def test_a_projection_keeps_the_digits_of_its_matrix():
    rows = torch.tensor([[1.0, -1.0]], dtype=torch.bfloat16)
    matrix = torch.tensor([[1.0001], [1.0]])
    made = Project(matrix).columns("x", rows)["x"]
    torch.testing.assert_close(made, torch.tensor([[1e-4]]), rtol=1e-2, atol=0.0)


def test_the_batch_is_halved_when_memory_runs_out(embedded, tmp_path, monkeypatch):
    from bridge.harvest import rows

    plain, sizes = rows.run, []

    def run(bridge, model_pass, *args):
        sizes.append(len(model_pass.tokens))
        if sizes[-1] > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        plain(bridge, model_pass, *args)

    kw = {"hook_points": [RESID], "context_size": 16, "dtype": "float32"}
    harvest(embedded, TEXTS, out=tmp_path / "a", batch_size=9, **kw)
    monkeypatch.setattr(rows, "run", run)
    harvest(embedded, TEXTS, out=tmp_path / "b", batch_size=9, **kw)
    assert sizes[:3] == [9, 4, 2] and set(sizes[3:]) <= {1, 2}
    np.testing.assert_allclose(
        numbers(read(tmp_path / "b"), RESID), numbers(read(tmp_path / "a"), RESID), atol=2e-5
    )
    assert read(tmp_path / "b").column("token") == read(tmp_path / "a").column("token")


def test_a_batch_of_one_that_does_not_fit_is_an_error(embedded, tmp_path, monkeypatch):
    from bridge.harvest import rows

    def run(*args):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(rows, "run", run)
    with pytest.raises(torch.OutOfMemoryError):
        harvest(embedded, TEXTS, out=tmp_path / "a", hook_points=[RESID], context_size=16)
    assert not list((tmp_path / "a").glob(".shard*"))


@pytest.mark.unchecked
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "bfloat16"}, "must be 'float16', 'float32' or 'float64'"),
        ({"hook_points": []}, "at least one name"),
        ({"hook_points": RESID}, "must be a list"),
        ({"context_size": 100_000}, "has a context of"),
        ({"rows": "first"}, "rows is 'first'"),
        ({"separator": "mask"}, "separator is 'mask'"),
        ({"reduce": {Z: TopK(1)}}, "which hook_points does not"),
        ({"reduce": {RESID: Project(torch.ones(3, 2))}}, r"takes \[3\]"),
        ({"reduce": {RESID: TopK(1000)}}, "there are 128 features"),
        ({"source": [[1, 100_000]]}, "a token id is 100000"),
        ({"source": "a text"}, "give \\[text\\]"),
        ({"source": [["a", "b"]]}, "must be a text, a chat or a row of token ids"),
        ({"source": []}, "has no tokens"),
        ({"batch_size": 0}, "at least 1"),
        ({"engine": "dask"}, "engine is 'dask'"),
        ({"device": "cpu"}, "move the bridge yourself"),
    ],
)
def test_bad_input(embedded, tmp_path, change, message):
    kw = {
        "source": TEXTS[:2],
        "hook_points": [RESID],
        "out": tmp_path / "a",
        "context_size": 16,
    } | change
    with pytest.raises(HarvestError, match=message):
        harvest(embedded, kw.pop("source"), **kw)


def test_unknown_name_and_training_mode(embedded, tmp_path):
    with pytest.raises(UnknownHookError, match="Did you mean"):
        harvest(embedded, TEXTS, hook_points=["blocks.1.hook_resid_pots"], out=tmp_path / "a")
    assert not (tmp_path / "a").exists()
    bridge = TransformerBridge(tiny("gpt2"))
    with (
        bridge.hooks([("blocks.0.hook_mlp_out", lambda x, hook: x * 0)]),
        pytest.raises(HarvestError, match="has hooks"),
    ):
        harvest(bridge, [[1, 2]], hook_points=["blocks.0.hook_resid_post"], out=tmp_path / "a")
    bridge.train()
    with pytest.raises(HarvestError, match="training mode"):
        harvest(bridge, [[1, 2]], hook_points=["blocks.0.hook_resid_post"], out=tmp_path / "a")


def test_pattern_rows_have_a_key_axis(embedded, tmp_path):
    harvest(
        embedded,
        TEXTS[:5],
        hook_points=[PATTERN],
        out=tmp_path / "a",
        context_size=16,
        dtype="float32",
    )
    pattern = numbers(read(tmp_path / "a"), PATTERN)
    np.testing.assert_allclose(pattern.sum(-1), 1, atol=1e-5)
