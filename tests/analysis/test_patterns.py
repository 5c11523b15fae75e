"""Statistics of patterns that come in pieces: those of the whole, in memory that grows with the
prompt.
"""

import copy
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from bridge import TransformerBridge
from bridge.analysis.patterns import PatternStatistics
from bridge.interventions import Scale
from bridge.taps.attention_call import AttentionCall
from tests.conftest import tiny
from tests.taps.test_touching import BY_HAND, FAMILIES, inputs_of, peak_bytes
from tests.tiny_models import tiny_model


def patterns(name):
    return name.endswith("hook_pattern")


def assert_those_of(seen, cache, keys, top, mask=None):
    names = [name for name in cache if patterns(name)]
    assert list(seen.entropy) == names
    for name in names:
        whole = cache[name].float()
        expected = -(whole * whole.clamp_min(1e-30).log()).sum(-1)
        torch.testing.assert_close(seen.entropy[name], expected, atol=1e-5, rtol=1e-5)
        of_keys = None if name.startswith("decoder.") and ".attn." in name else mask
        of_queries = None if name.startswith("decoder.") else mask
        for i, row in enumerate(whole):
            places = range(row.shape[-1]) if of_keys is None else of_keys[i].nonzero().flatten()
            attention = row[..., [int(places[key]) for key in keys]]
            torch.testing.assert_close(seen.attention[name][i], attention, atol=2e-6, rtol=1e-5)
            received = (row if of_queries is None else row[:, of_queries[i].bool()]).sum(1)
            torch.testing.assert_close(seen.received[name][i], received, atol=1e-5, rtol=1e-5)
        values = whole.topk(top, -1).values
        torch.testing.assert_close(seen.top_weights[name], values, atol=2e-6, rtol=1e-5)
        torch.testing.assert_close(
            whole.gather(-1, seen.top_keys[name]), values, atol=4e-6, rtol=1e-5
        )


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(("family", "task"), FAMILIES)
@pytest.mark.parametrize("max_bytes", [1, 3000, 2**25, None])
def test_statistics_of_pieces_are_those_of_the_whole(family, task, attention, max_bytes):
    hf = tiny_model(family, task)
    hf.set_attn_implementation("eager" if family in BY_HAND else attention)
    bridge = TransformerBridge(hf)
    tokens, mask, more = inputs_of(task)
    for given in (more, more | {"attention_mask": mask}):
        _, cache = bridge.run_with_cache(tokens, names_filter=patterns, **given)
        seen = PatternStatistics(keys=[0, -1], top=3)
        logits = bridge.run_with_callback(tokens, seen, patterns, max_bytes=max_bytes, **given)
        assert torch.equal(logits, bridge(tokens, **given))
        assert_those_of(seen, cache, [0, -1], 3, given.get("attention_mask"))


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("max_bytes", [1, None])
def test_padding_is_neither_key_nor_query(side, max_bytes):
    bridge, name = TransformerBridge(tiny("llama")), "blocks.1.attn.hook_pattern"
    rows = [torch.arange(1, 8), torch.arange(20, 24)]
    tokens, mask = torch.zeros(2, 7, dtype=torch.long), torch.zeros(2, 7, dtype=torch.long)
    places = [slice(7 - len(row), 7) if side == "left" else slice(len(row)) for row in rows]
    for i, (row, place) in enumerate(zip(rows, places, strict=True)):
        tokens[i, place], mask[i, place] = row, 1
    seen = PatternStatistics(keys=[0, -1])
    bridge.run_with_callback(tokens, seen, patterns, max_bytes=max_bytes, attention_mask=mask)
    for i, (row, place) in enumerate(zip(rows, places, strict=True)):
        pattern = bridge.run_with_cache(row, names_filter=name)[1][name][0]
        torch.testing.assert_close(seen.attention[name][i][:, place], pattern[..., [0, -1]])
        torch.testing.assert_close(seen.received[name][i][:, place], pattern.sum(-2))
    short = PatternStatistics(keys=[5])
    with pytest.raises(ValueError, match="the shortest prompt has 4 tokens"):
        bridge.run_with_callback(tokens, short, patterns, attention_mask=mask)


def test_pieces_come_in_order_and_fit(tokens, monkeypatch):
    bridge, sizes, own = TransformerBridge(tiny("llama")), [], AttentionCall.scores

    def scores(self):
        found = own(self)
        sizes.append(found.shape[2])
        return found

    monkeypatch.setattr(AttentionCall, "scores", scores)
    shown = {}
    bridge.run_with_callback(
        tokens,
        lambda x, point: shown.setdefault(point.name, []).append(x),
        ["blocks.1.attn.hook_pattern", "blocks.1.hook_resid_pre", "blocks.2.attn.hook_attn_scores"],
        max_bytes=16 * 2 * 4 * 9 * 4,
    )
    assert sizes == [4, 4, 1] * 2 and len(shown["blocks.1.hook_resid_pre"]) == 1
    _, cache = bridge.run_with_cache(tokens)
    for name, pieces in shown.items():
        torch.testing.assert_close(torch.cat(pieces, 2), cache[name], atol=2e-6, rtol=1e-5)


def test_of_an_edited_pattern(tokens):
    bridge, name = TransformerBridge(tiny("llama")), "blocks.1.attn.hook_pattern"
    with bridge.hooks(fwd_hooks=[(name, Scale(0.5, heads=2))]):
        _, cache = bridge.run_with_cache(tokens, names_filter=patterns)
        seen = PatternStatistics(keys=[0], top=2)
        bridge.run_with_callback(tokens, seen, patterns, max_bytes=1)
    assert_those_of(seen, cache, [0], 2)
    torch.testing.assert_close(seen.received[name].sum(-1)[:, 2], torch.full((2,), 4.5))


@pytest.mark.parametrize("max_bytes", [1, 2**25, None])
def test_a_second_run_is_refused(max_bytes, tokens):
    bridge, name = TransformerBridge(tiny("llama")), "blocks.1.attn.hook_pattern"
    seen = PatternStatistics(keys=[0], top=1)
    bridge.run_with_callback(tokens, seen, name, max_bytes=max_bytes)
    kept = pickle.loads(pickle.dumps(seen))
    for statistics in (seen, kept, copy.deepcopy(seen)):
        for again, names in (
            (tokens, name),
            (tokens[:1], name),
            (tokens[:, :4], name),
            (tokens, patterns),
        ):
            with pytest.raises(ValueError, match="second run"):
                bridge.run_with_callback(again, statistics, names, max_bytes=max_bytes)
        assert statistics.entropy[name].shape == (2, 4, 9)
        torch.testing.assert_close(statistics.received[name].sum(-1), torch.full((2, 4), 9.0))
    by_hand = PatternStatistics()
    edit = [(name, lambda x, hook: by_hand(x, hook))]  # in a user's function, which is in no run
    bridge.run_with_hooks(tokens, fwd_hooks=edit)
    with pytest.raises(ValueError, match="second run"):
        bridge.run_with_hooks(tokens[:, :4], fwd_hooks=edit)


def test_memory_grows_with_the_prompt():
    config = LlamaConfig(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=16,
        num_key_value_heads=4,
        intermediate_size=64,
        vocab_size=61,
        max_position_embeddings=4096,
    )
    bridge = TransformerBridge(
        LlamaForCausalLM._from_config(config, attn_implementation="sdpa").eval()
    )
    above = []
    with torch.no_grad():
        for length in (1024, 4096):
            tokens = torch.randint(0, 61, (1, length))
            seen = PatternStatistics(keys=[0], top=1)
            peak = peak_bytes(
                lambda: bridge.run_with_callback(tokens, seen, patterns, max_bytes=2**20)  # noqa: B023
            )
            above.append(peak - peak_bytes(lambda: bridge(tokens)))  # noqa: B023
    # Two layers, and for each query of 16 heads four numbers, one of which is of 8 bytes.
    assert above[1] < 2**21 + 2 * 16 * 4096 * 24 * 1.5 and above[1] < 5 * above[0]


def test_what_is_refused(tokens):
    bridge = TransformerBridge(tiny("llama"))
    with pytest.raises(ValueError, match="is no pattern"):
        bridge.run_with_callback(tokens, PatternStatistics(), "blocks.1.attn.hook_attn_scores")
    for seen in (PatternStatistics(keys=[9]), PatternStatistics(top=10)):
        with pytest.raises(IndexError, match="has 9 keys"):
            bridge.run_with_callback(tokens, seen, patterns)
    with pytest.raises(ValueError, match="top is -1"):
        PatternStatistics(top=-1)
    with pytest.raises(ValueError, match="max_bytes"):
        bridge.run_with_callback(tokens, PatternStatistics(), patterns, max_bytes=0)
    assert not bridge.wiring.listening


@pytest.mark.parametrize("answers", [" John", [5, 7], [[1, 2, 3]] * 2])
def test_attribution_to_logits_needs_one_term_beside_the_stack(answers, embedded, monkeypatch):
    answers = answers if isinstance(answers, str) else torch.tensor(answers)
    with torch.no_grad():
        _, cache = embedded.run_with_cache(["Mary and", "John and"])
        stack = cache.get_full_resid_decomposition(expand_neurons=False)
        whole = cache.logit_attrs(stack, answers)
        monkeypatch.setattr("bridge.analysis.residual._AT_ONCE", stack[0].numel())
        torch.testing.assert_close(cache.logit_attrs(stack, answers), whole)
        peak = peak_bytes(lambda: cache.logit_attrs(stack, answers))
    assert len(stack) > 12
    assert peak < 4 * stack[0].numel() * 4 + whole.numel() * 4 * 3


HELD = """
import torch
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM
from bridge import TransformerBridge
from bridge.analysis.patterns import PatternStatistics

torch.set_grad_enabled(False)
config = LlamaConfig(
    hidden_size=64, num_hidden_layers=1, num_attention_heads=32, intermediate_size=64,
    vocab_size=61, max_position_embeddings=4096,
)
bridge, tokens = TransformerBridge(LlamaForCausalLM(config).eval()), torch.randint(3, 61, (1, 4096))
line = lambda what: float(Path("/proc/self/status").read_text().split(what)[1].split()[0]) / 1024
name = "blocks.0.attn.hook_pattern"
bridge.run_with_callback(tokens[:, :64], PatternStatistics(keys=[0], top=1), name, max_bytes=2**20)
Path("/proc/self/clear_refs").write_text("5")
before = line("VmRSS:")
bridge.run_with_callback(tokens, PatternStatistics(keys=[0], top=1), name, max_bytes=2**25)
print(line("VmHWM:") - before)
"""


@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="the process' own memory is read from Linux"
)
def test_the_process_holds_pieces_and_not_the_whole():
    """What stays of a piece must not stand in the room of the next: the heap would grow by each."""
    done = subprocess.run([sys.executable, "-c", HELD], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 400  # MB; a whole pattern takes 2,048
