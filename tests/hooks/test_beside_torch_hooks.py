"""Hook points beside torch hooks of the user's own: their changes stay, or the run is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bridge import TransformerBridge
from bridge.modules import argument, element_of, with_argument, with_element
from tests.tiny_models import tiny_model

TOKENS = torch.randint(3, 20, (2, 6), generator=torch.Generator().manual_seed(0))


def changed(x: Tensor) -> Tensor:
    return x * 1.5 + 0.1


def attach(module: nn.Module, kind: str) -> Any:
    """Registers a torch hook that changes a module's input or output."""

    def on_input(module: nn.Module, args: Any, kwargs: Any) -> Any:
        x, place = argument(module, args, kwargs, None)
        return with_argument(args, kwargs, place, changed(x))

    def on_output(module: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, Tensor):
            return changed(output)
        return with_element(output, 0, changed(element_of(output, 0)))

    if kind == "input":
        return module.register_forward_pre_hook(on_input, with_kwargs=True)
    return module.register_forward_hook(on_output)


def edits(bridge: TransformerBridge) -> list[tuple[str, Any]]:
    """Runs that change nothing, with a hook that writes back, and with one at a gradient."""
    runs = []
    for name in bridge.hook_dict:
        if name.startswith("blocks.0."):
            write_back = [(name, lambda x, hook: x.clone())]
            look = [(name, lambda x, hook: None)]
            runs += [(name, {"fwd_hooks": write_back}), (name, {"bwd_hooks": look})]
    return runs


#: A norm for each part, fused projections, a norm that both parts share, and norms behind parts.
@pytest.mark.parametrize("model_type", ["llama", "gpt2", "phi", "gemma2"])
def test_no_change_of_a_torch_hook_is_lost(model_type: str) -> None:
    bridge = TransformerBridge(tiny_model(model_type))
    model = bridge.original_model
    paths = [path for path, _ in model.named_modules() if ".0." in f"{path}." and path]
    kept = refused = 0
    for path in paths:
        for kind in ("input", "output"):
            handle = attach(model.get_submodule(path), kind)
            try:
                plain = bridge(TOKENS)
            except (TypeError, RuntimeError, AttributeError, KeyError):  # it runs without tensors
                handle.remove()
                continue
            for name, hooks in edits(bridge):
                try:
                    logits = bridge.run_with_hooks(TOKENS, **hooks)
                except (RuntimeError, ValueError):
                    refused += 1
                    continue
                kept += 1
                torch.testing.assert_close(
                    logits, plain, atol=1e-4, rtol=1e-4, msg=f"{name} beside {path}'s {kind}"
                )
            handle.remove()
    assert kept > 10 * refused > 0
