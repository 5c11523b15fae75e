"""Streams: pieces that join to exactly what `generate` returns, and that stop when the reader
does.
"""

import threading

import pytest
import torch

from bridge import TransformerBridge
from bridge.generation.generation import TextPieces
from tests.conftest import tiny, torch_hooks

GREEDY = {"do_sample": False, "verbose": False}


def test_pieces_join(embedded):
    prompt = "When Mary and John went to the store, John gave a drink to"
    pieces = list(embedded.generate_stream(prompt, max_new_tokens=10, stop_at_eos=False, **GREEDY))
    assert pieces[0] == prompt
    assert len(pieces) > 3
    assert "".join(pieces) == embedded.generate(
        prompt, max_new_tokens=10, stop_at_eos=False, **GREEDY
    )


@pytest.mark.parametrize("side", ["left", "right"])
def test_several_rows(embedded, side):
    texts = ["Mary", "When Mary and John went to the store, John", "Mary and John went"]
    options = {"max_new_tokens": 8, "padding_side": side, **GREEDY}
    pieces = list(embedded.generate_stream(texts, **options))
    assert ["".join(piece[i] for piece in pieces) for i in range(3)] == embedded.generate(
        texts, **options
    )
    tokens = torch.cat(
        list(
            embedded.generate_stream(
                texts, return_type="tokens", **(options | {"padding_side": "left"})
            )
        ),
        -1,
    )
    assert torch.equal(
        tokens,
        embedded.generate(texts, return_type="tokens", **(options | {"padding_side": "left"})),
    )


def test_characters_of_several_bytes_are_never_split():
    text = "naïve – 日本語 🙂!"
    encoded = list(text.encode())
    row = TextPieces(lambda ids: bytes(ids).decode(errors="replace"))
    pieces = [row.add([byte]) for byte in encoded] + [row.add([], last=True)]
    assert "".join(pieces) == text
    assert "\ufffd" not in "".join(pieces)
    broken = TextPieces(lambda ids: bytes(ids).decode(errors="replace"))
    assert "".join([broken.add([encoded[2]]), broken.add([], last=True)]) == "\ufffd"


def test_the_model_stops_when_the_reader_does(embedded):
    calls, before = [], threading.active_count()
    handle = embedded.original_model.register_forward_pre_hook(lambda *a: calls.append(1))
    for i, _ in enumerate(
        embedded.generate_stream("Mary", max_new_tokens=100, stop_at_eos=False, **GREEDY)
    ):
        if i == 2:
            break
    handle.remove()
    assert len(calls) < 50
    assert threading.active_count() == before
    assert embedded.step is None
    stream = embedded.generate_stream("Mary", max_new_tokens=50, **GREEDY)
    next(stream)
    stream.close()
    assert threading.active_count() == before


def test_errors_come_where_the_stream_is_read(embedded):
    def fail(x, hook):
        raise RuntimeError("deliberate")

    before = torch_hooks(
        embedded.original_model
    )  # transformers' own, where its hidden states were once asked for
    with (
        embedded.hooks(fwd_hooks=[("blocks.0.hook_resid_pre", fail)]),
        pytest.raises(RuntimeError, match="deliberate"),
    ):
        list(embedded.generate_stream("Mary", **GREEDY))
    assert torch_hooks(embedded.original_model) == before
    with pytest.raises(ValueError, match="return_cache is not for a stream"):
        embedded.generate_stream("Mary", return_cache=True)
    with pytest.raises(TypeError, match="'max_new_token'"):
        embedded.generate_stream("Mary", max_new_token=3)
    with pytest.raises(ValueError, match="cannot be right-padded"):
        embedded.generate_stream(["Mary", "Mary and"], return_type="tokens", padding_side="right")


def test_without_a_tokenizer():
    bridge = TransformerBridge(tiny("gpt2"))
    tokens = torch.tensor([[1, 2, 3]])
    pieces = list(bridge.generate_stream(tokens, max_new_tokens=4, stop_at_eos=False, **GREEDY))
    assert [piece.shape for piece in pieces] == [(1, 3), (1, 1), (1, 1), (1, 1), (1, 1)]
    assert torch.equal(
        torch.cat(pieces, -1),
        bridge.generate(tokens, max_new_tokens=4, stop_at_eos=False, **GREEDY),
    )


def test_hooks_of_other_threads_are_not_seen(embedded):
    plain = embedded.generate("Mary", max_new_tokens=6, **GREEDY)
    with embedded.hooks(fwd_hooks=[("blocks.2.hook_resid_post", lambda x, hook: x * -1)]):
        results = []
        thread = threading.Thread(
            target=lambda: results.append(
                "".join(embedded.generate_stream("Mary", max_new_tokens=6, **GREEDY))
            )
        )
        thread.start()
        thread.join()
        mine = "".join(embedded.generate_stream("Mary", max_new_tokens=6, **GREEDY))
    assert results == [plain]
    assert mine != plain


def test_what_the_reader_runs_between_two_pieces_is_no_part_of_the_stream(embedded):
    prompt = "When Mary and John went to the store, John gave a drink to"
    options = {"max_new_tokens": 12, "stop_at_eos": False, **GREEDY}
    plain = embedded.generate(prompt, **options)
    _, expected = embedded.run_with_cache("Mary and John")
    pieces = []
    for piece in embedded.generate_stream(prompt, **options):
        pieces.append(piece)
        _, cache = embedded.run_with_cache("Mary and John")
        assert all(torch.equal(cache[name], expected[name]) for name in expected)
        embedded.run_with_hooks(
            "Mary", fwd_hooks=[("blocks.1.hook_resid_post", lambda x, hook: x * 0)]
        )
        embedded("Mary and John", stop_at_layer=2)
    assert "".join(pieces) == plain
