"""One use of every room in this version of transformers, torch and Python."""

from __future__ import annotations

import importlib.util
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    Qwen2MoeConfig,
)

from adapters import verify
from adapters.imports import (
    VersionError,
    checkpointing_method,
    has_transformers,
    older_than_declared,
)
from bridge import NativeConfig, TransformerBridge
from bridge.circuits import edge_attribution
from bridge.cli.main import main
from bridge.legacy import HookedTransformer
from bridge.patching import get_act_patch_resid_pre
from bridge.tasks import ioi
from tests.conftest import tiny
from tests.tiny_models import checkpoint, tiny_model

PROMPT = "When Mary and John went to the store, John gave a drink to"
SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "vocab_size": 61,
}


def missing(*packages: str) -> bool:
    return any(importlib.util.find_spec(name) is None for name in packages)


def test_hooks_gradients_and_weights(embedded: TransformerBridge) -> None:
    found: dict[str, Tensor] = {}
    hooks = [("blocks.1.attn.hook_q", lambda grad, hook: found.update(grad=grad))]
    embedded.run_with_hooks(PROMPT, return_type="loss", bwd_hooks=hooks).backward()
    assert found["grad"].abs().sum() > 0
    embedded.zero_grad(set_to_none=True)
    with torch.no_grad():
        _, cache = embedded.run_with_cache(PROMPT)
        z, W_O = cache["z", 2], embedded.W_O[2]
        by_hand = torch.einsum("bphd,hdm->bpm", z, W_O) + embedded.b_O[2]
        torch.testing.assert_close(cache["attn_out", 2], by_hand, atol=1e-5, rtol=1e-4)


def test_analysis(embedded: TransformerBridge) -> None:
    with torch.no_grad():
        _, cache = embedded.run_with_cache(PROMPT)
        parts, labels = cache.decompose_resid(return_labels=True)
        torch.testing.assert_close(parts.sum(0), cache["resid_post", -1], atol=1e-4, rtol=1e-4)
        assert len(labels) == len(parts)


def test_lens(embedded: TransformerBridge) -> None:
    with torch.no_grad():
        read = embedded.lens(PROMPT)
        torch.testing.assert_close(read.stack()[-1], embedded(PROMPT))


def test_trace(embedded: TransformerBridge) -> None:
    with torch.no_grad(), embedded.trace(PROMPT) as run:
        run["blocks.1.hook_mlp_out"] = torch.zeros_like(run["blocks.1.hook_mlp_out"])
        seen = run["blocks.2.hook_resid_pre"]
    hooks = [("blocks.1.hook_mlp_out", lambda x, hook: torch.zeros_like(x))]
    with torch.no_grad(), embedded.hooks(fwd_hooks=hooks):
        _, cache = embedded.run_with_cache(PROMPT)
    assert torch.equal(seen, cache["blocks.2.hook_resid_pre"])


def test_trace_while_training() -> None:
    bridge = TransformerBridge(tiny("llama").train())
    tokens = torch.tensor([[1, 2, 3]])
    with bridge.trace(tokens) as run:
        seen = run["blocks.1.hook_resid_pre"]
    assert torch.equal(seen, bridge.run_with_cache(tokens)[1]["blocks.1.hook_resid_pre"])
    checkpoint(bridge.core)
    with pytest.raises(RuntimeError, match="checkpointing"), bridge.trace(tokens):
        pass


def test_gradient_hooks_in_checkpointed_blocks() -> None:
    """A gradient that is halved where block 1 begins halves the weights' of block 0: checkpointed,
    or refused.
    """
    torch.manual_seed(0)
    bridge = TransformerBridge(LlamaForCausalLM(LlamaConfig(**SIZES)))
    tokens, weight = torch.tensor([[1, 2, 3]]), bridge.core.model.layers[0].mlp.down_proj.weight
    halve = ("blocks.1.hook_resid_pre", lambda gradient, hook: gradient * 0.5)

    def gradient() -> Tensor:
        bridge.core.zero_grad()
        bridge.run_with_hooks(tokens, bwd_hooks=[halve]).sum().backward()
        assert weight.grad is not None
        return weight.grad.clone()

    right = gradient()
    bridge.core.train()
    getattr(bridge.core, checkpointing_method())()
    if not has_transformers("5.23"):
        with pytest.raises(
            VersionError, match=r"with activation checkpointing needs transformers 5\.23"
        ) as refused:
            gradient()
        pytest.skip(f"refused by name: {refused.value}")
    torch.testing.assert_close(gradient(), right)


def test_generation(embedded: TransformerBridge) -> None:
    tokens = embedded.to_tokens(PROMPT)
    own = embedded.core.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        max_new_tokens=5,
        do_sample=False,
        pad_token_id=0,
    )
    options = {"max_new_tokens": 5, "do_sample": False, "verbose": False}
    assert torch.equal(embedded.generate(tokens, **options), own)
    pieces = list(embedded.generate_stream(tokens, max_new_tokens=5, do_sample=False))
    assert (
        torch.cat(pieces, -1)[0].tolist()
        == own[0, -sum(piece.shape[-1] for piece in pieces) :].tolist()
    )


@pytest.mark.parametrize("name", ["past_key_values", "cache"])
@torch.no_grad()
def test_what_came_before_has_either_name(embedded: TransformerBridge, name: str) -> None:
    tokens = embedded.to_tokens("When Mary and John went to the store")
    whole, first = embedded(tokens), tokens[:, :4]
    point = "blocks.1.hook_resid_pre"
    after = embedded.run_with_cache(tokens, names_filter=point)[1][point][:, 4:]

    def past() -> dict[str, Any]:
        return {name: embedded(first, return_type="logits_and_cache")[1]}

    rest = tokens[:, 4:]
    seen = []
    found = [
        embedded(rest, **past()),
        embedded.run_with_hooks(
            rest, fwd_hooks=[(point, lambda x, hook: seen.append(x.clone()))], **past()
        ),
        embedded.run_with_cache(rest, **past())[0],
        embedded(after, start_at_layer=1, **past()),
        embedded.program()(rest, use_cache=True, **past())["logits"],
    ]
    with embedded.trace(rest, **past()) as run:
        seen.append(run[point].clone())
    for logits in (*found, run.logits):
        torch.testing.assert_close(logits, whole[:, 4:], atol=1e-4, rtol=1e-4)
    for stream in seen:
        torch.testing.assert_close(stream, after, atol=1e-4, rtol=1e-4)
    made = embedded.generate(tokens, 3, do_sample=False, verbose=False)
    assert torch.equal(embedded.generate(tokens, 3, do_sample=False, verbose=False, **past()), made)
    with pytest.raises(TypeError, match="'cash'"):
        embedded(rest, cash=past()[name])


def test_generate_batch(embedded: TransformerBridge) -> None:
    if not has_transformers("5.20"):
        with pytest.raises(
            VersionError, match=r"generate_batch needs transformers 5\.20 or later"
        ) as refused:
            embedded.generate_batch([PROMPT], 4)
        pytest.skip(f"refused by name: {refused.value}")
    (answer,) = embedded.generate_batch([PROMPT], 4, do_sample=False)
    alone = embedded.generate(
        PROMPT, max_new_tokens=4, do_sample=False, verbose=False, return_type="tokens"
    )
    assert answer.tokens.tolist() == alone[0, -len(answer.tokens) :].tolist()


def test_patching_circuits_and_tasks(embedded: TransformerBridge) -> None:
    pairs = ioi(embedded, 4)
    with torch.no_grad():
        _, clean = embedded.run_with_cache(pairs.clean)
        patched = get_act_patch_resid_pre(embedded, pairs.corrupted, clean, pairs.metric())
        right = pairs.metric()(embedded(pairs.clean))
    assert patched.shape == (embedded.cfg.n_layers, pairs.clean.shape[1]) and right > patched.min()
    assert len(edge_attribution(embedded, pairs.clean, pairs.corrupted, pairs.metric()).values) > 0


def test_weight_processing() -> None:
    bridge = TransformerBridge(tiny("llama"))
    tokens = torch.randint(0, 61, (2, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        before = bridge(tokens).log_softmax(-1)
        bridge.process_weights()
        torch.testing.assert_close(bridge(tokens).log_softmax(-1), before, atol=1e-4, rtol=1e-4)


def test_programs(embedded: TransformerBridge) -> None:
    tokens = embedded.to_tokens(PROMPT)
    program = embedded.program(
        ["blocks.3.hook_resid_post"], [("blocks.1.hook_mlp_out", lambda x, hook: x * 0.5)]
    )
    with torch.no_grad():
        right = embedded.run_with_hooks(
            tokens, fwd_hooks=[("blocks.1.hook_mlp_out", lambda x, hook: x * 0.5)]
        )
        torch.testing.assert_close(program(tokens)["logits"], right)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # torch's own, while it traces
def test_export(embedded: TransformerBridge) -> None:
    tokens = embedded.to_tokens(PROMPT)
    old = Version(torch.__version__) < Version("2.11")
    needed = "transformers 5.23" if not has_transformers("5.23") else "torch 2.11" if old else ""
    if needed:
        with pytest.raises(
            VersionError, match=f"exporting a program needs {needed} or later"
        ) as refused:
            embedded.export(tokens)
        pytest.skip(f"refused by name: {refused.value}")
    exported = embedded.export(tokens, "dynamo")
    with torch.no_grad():
        torch.testing.assert_close(exported(input_ids=tokens)["logits"], embedded(tokens))


def test_native_and_loading(tmp_path: Path) -> None:
    config = NativeConfig(n_layers=2, d_model=16, n_heads=2, d_vocab=9, n_ctx=8, act_fn="relu")
    bridge = TransformerBridge.boot_native(config)
    bridge.core.save_pretrained(tmp_path)
    again = TransformerBridge.boot_transformers(str(tmp_path))
    tokens = torch.tensor([[1, 2, 3]])
    assert torch.equal(again(tokens), bridge(tokens))


def test_patched_loading(tmp_path: Path) -> None:
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(tmp_path)
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    class Ours(LlamaRMSNorm):
        pass

    if not has_transformers("5.21"):
        with pytest.raises(
            VersionError, match=r"loading with patches needs transformers 5\.21"
        ) as refused:
            TransformerBridge.boot_transformers(str(tmp_path), patches={"LlamaRMSNorm": Ours})
        pytest.skip(f"refused by name: {refused.value}")
    bridge = TransformerBridge.boot_transformers(str(tmp_path), patches={"LlamaRMSNorm": Ours})
    assert type(bridge.core.model.norm).__name__ == "Ours"
    assert type(LlamaForCausalLM(LlamaConfig(**SIZES)).model.norm) is LlamaRMSNorm


def test_inference_and_proof() -> None:
    torch.manual_seed(0)
    bridge = TransformerBridge(
        MambaForCausalLM(MambaConfig(vocab_size=61, hidden_size=32, num_hidden_layers=2)).eval()
    )
    assert bridge.offered().inferred and verify(bridge, level="quick").passed
    llama = TransformerBridge(tiny("llama"), automatic="always")
    assert llama.offered().inferred and not llama.offered().not_offered and verify(llama).passed


@pytest.mark.parametrize("model_type", ["deepseek_v3", "dots1", "granitemoe", "moshi"])
def test_what_was_another_class_before_is_inferred(model_type: str) -> None:
    """What we declare is proved, and so is what is inferred in its place."""
    model = tiny_model(model_type)
    older = "".join(older_than_declared(cls.__name__) for cls in type(model).__mro__)
    bridge = TransformerBridge(model)
    assert bridge.offered().inferred == bool(older) and verify(bridge, level="quick").passed


def test_experts() -> None:
    mixed = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "num_key_value_heads": 2,
    }
    from transformers import Qwen2MoeForCausalLM

    bridge = TransformerBridge(Qwen2MoeForCausalLM(Qwen2MoeConfig(**SIZES, **mixed)).eval())
    with torch.no_grad():
        _, cache = bridge.run_with_cache(torch.tensor([[3, 4, 5]]))
    assert any("expert" in name for name in cache)


def test_legacy(embedded: TransformerBridge) -> None:
    from bridge.embedded import MODEL_DIR

    model = HookedTransformer.from_pretrained_no_processing(str(MODEL_DIR))
    with torch.no_grad():
        assert torch.equal(model(PROMPT), embedded(PROMPT))


def test_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr("sys.stdout", out)
    assert main(["hooks", "embedded"]) == 0
    assert "blocks.0.attn.hook_pattern" in out.getvalue()


@pytest.mark.skipif(missing("pyarrow", "xxhash"), reason="needs the extra harvest")
def test_harvest(embedded: TransformerBridge, tmp_path: Path) -> None:
    from bridge.harvest import Activations, harvest

    point, out = "blocks.2.hook_resid_post", tmp_path / "out"
    texts = [PROMPT, "Mary and John"]
    harvest(
        embedded, texts, hook_points=[point], out=out, context_size=16, pack=False, dtype="float32"
    )
    rows = Activations(out)
    with torch.no_grad():
        seen = torch.cat([embedded.run_with_cache(text)[1][point][0] for text in texts])
    assert len(rows) == len(seen)
    torch.testing.assert_close(rows[:][point], seen, atol=1e-5, rtol=1e-4)


@pytest.mark.skipif(missing("altair", "vl_convert"), reason="needs the extra pictures")
def test_pictures(embedded: TransformerBridge, tmp_path: Path) -> None:
    from bridge import pictures

    lens = embedded.lens(PROMPT)
    pictures.logit_lens(lens.stack(), embedded.to_str_tokens(PROMPT), embedded).save(
        tmp_path / "lens.svg"
    )
    assert (tmp_path / "lens.svg").read_text().startswith("<svg")
