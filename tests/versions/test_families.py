"""Every declared family in this version of transformers: what a user does first with a model."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from adapters import verify
from adapters.imports import known_error
from bridge import TransformerBridge
from tests.adapters.test_verify_all import USUAL, tiny

CASES = (
    *USUAL,
    "gpt_oss-gqa",
    "qwen2_moe-gqa",
    "qwen3_moe-gqa",
    "smollm3-gqa",
    "gemma2-mha-bias-untied",
)


@pytest.mark.parametrize("case", CASES)
def test_family(case: str) -> None:
    hf = tiny(case)
    bridge = TransformerBridge(hf)
    tokens = torch.randint(3, 60, (2, 9), generator=torch.Generator().manual_seed(0))
    more = {"decoder_input_ids": tokens} if case == "t5" else {}
    layer = "decoder.1" if case == "t5" else "blocks.1"
    with torch.no_grad():
        own = hf(input_ids=tokens, **more).logits
        assert torch.equal(bridge(tokens, **more), own)
        logits, cache = bridge.run_with_cache(tokens, **more)
        assert torch.equal(logits, own) and all(torch.isfinite(cache[name]).any() for name in cache)
        eager = tiny(case, attn_implementation="eager")
        shown = eager(input_ids=tokens, output_attentions=True, **more)
        pattern = cache[f"{layer}.attn.hook_pattern"]
        wrong = known_error(hf)
        if not wrong:
            attentions = shown.decoder_attentions if case == "t5" else shown.attentions
            torch.testing.assert_close(pattern, attentions[1], atol=1e-5, rtol=1e-4)

        def zero(x: Tensor, hook: object) -> Tensor:
            return torch.zeros_like(x)

        first = "encoder.0" if case == "t5" else "blocks.0"
        last = "hook_normalized_resid_post" if case == "bert" else "hook_resid_post"
        edited = bridge.run_with_hooks(tokens, fwd_hooks=[(f"{first}.{last}", zero)], **more)
        handle = hf.get_submodule(bridge.block_paths[0]).register_forward_hook(_zeros)
        assert torch.equal(edited, hf(input_ids=tokens, **more).logits) and not torch.equal(
            edited, own
        )
        handle.remove()
    if case not in ("bert", "t5"):
        generated = bridge.generate(tokens, max_new_tokens=4, do_sample=False, verbose=False)
        right = hf.generate(
            tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=4, do_sample=False
        )
        assert generated.tolist() == right.tolist()
    report = verify(bridge, level="quick")
    if wrong:
        assert not report.passed and wrong in str(report)
        assert verify(TransformerBridge(eager), level="quick").passed
        pytest.xfail(wrong)
    assert report.passed, str(report)


def _zeros(
    module: nn.Module, args: object, output: Tensor | tuple[Tensor, ...]
) -> Tensor | tuple[Tensor, ...]:
    if isinstance(output, Tensor):
        return torch.zeros_like(output)
    return torch.zeros_like(output[0]), *output[1:]
