"""A hook that calls the Hugging Face model itself, not through the bridge, changes nothing of the
run it is in.
"""

import pytest
import torch

from bridge import TransformerBridge
from tests.adapters.test_verify_all import tiny

CASES = [
    "gpt2",
    "llama-gqa",
    "bloom",
    "gptj",
    "gpt_neo",
    "mixtral-gqa",
    "gpt_oss-gqa",
    "qwen2_moe-gqa",
]
TOKENS = torch.tensor([[3, 4, 5, 6, 7], [8, 9, 10, 11, 12]])


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_a_hook_that_calls_the_model_changes_no_other_hook(case):
    model = tiny(case)
    bridge = TransformerBridge(model)
    other = TOKENS.flip(1)
    names = [
        name
        for name, hook in bridge.hook_dict.items()
        if hook.point.depth == 1 and hook.point.axes[:5] == "batch"
    ]
    for name in names[::3]:
        expected = bridge.run_with_hooks(
            TOKENS, fwd_hooks=[(name, lambda x, hook: (x * 0.5).to(x.dtype))]
        )
        inside = []

        def calls(x, hook, inside=inside):
            if not inside:
                inside.append(1)
                model(other)
                inside.pop()

        def half(x, hook, inside=inside):
            return None if inside else (x * 0.5).to(x.dtype)

        got = bridge.run_with_hooks(
            TOKENS, fwd_hooks=[("blocks.1.hook_resid_pre", calls), (name, half)]
        )
        assert torch.equal(got, expected), name
