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


def halved(x: Tensor) -> Tensor:
    return 0.5 * x + 0.5 * x.detach()


def by_tensor_hook(module: nn.Module, args: Any, output: Tensor) -> None:
    output.register_hook(lambda gradient: gradient / 2)


#: Torch hooks that change a gradient, and no value.
GRADIENTS_ALONE: dict[str, Any] = {
    "forward hook": lambda module: module.register_forward_hook(
        lambda module, args, output: halved(output)
    ),
    "tensor hook": lambda module: module.register_forward_hook(by_tensor_hook),
    "backward hook": lambda module: module.register_full_backward_hook(
        lambda module, grad_input, grad_output: (grad_input[0] / 2,)
    ),
    "backward pre-hook": lambda module: module.register_full_backward_pre_hook(
        lambda module, grad_output: (grad_output[0] / 2,)
    ),
}


class Halved(nn.Module):
    """A module that does in its forward what those hooks do."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.eps = getattr(inner, "variance_epsilon", None)

    @property
    def weight(self) -> nn.Parameter:
        return self.inner.weight

    def forward(self, x: Tensor) -> Tensor:
        return halved(self.inner(x))


def gradients(bridge: TransformerBridge, name: str) -> list[Tensor]:
    """The gradients at a hook point; HookedTransformer's norms give theirs three times."""
    listed: list[Tensor] = []
    with bridge.hooks(bwd_hooks=[(name, lambda gradient, hook: listed.append(gradient.clone()))]):
        bridge(TOKENS)[0, -1, 3].backward()
    return listed


@pytest.mark.parametrize("how", list(GRADIENTS_ALONE))
@pytest.mark.parametrize("part", ["input_layernorm", "self_attn.v_proj", "mlp.up_proj"])
def test_no_change_of_a_gradient_alone_is_lost(how: str, part: str) -> None:
    """Each gradient in the block, beside the hook, is that of the model with the module halved."""
    path = f"model.layers.0.{part}"
    hooked = TransformerBridge(tiny_model("llama"))
    module = hooked.original_model.get_submodule(path)
    GRADIENTS_ALONE[how](module)
    right = TransformerBridge(tiny_model("llama"))
    right.original_model.set_submodule(path, Halved(right.original_model.get_submodule(path)))
    refused = 0
    for name, point in hooked.hook_dict.items():
        # At the module's own output it depends on the order of the hooks.
        if not name.startswith("blocks.0.") or point.point.site.path == path:
            continue
        try:
            beside = gradients(hooked, name)
        except RuntimeError as error:
            refused += "a torch hook" in str(error)
            continue
        torch.testing.assert_close(beside, gradients(right, name), atol=1e-6, rtol=1e-5, msg=name)
    assert (refused > 0) == (part != "mlp.up_proj")


def test_a_norm_that_was_replaced() -> None:
    model = tiny_model("llama")
    norm = model.model.layers[0].input_layernorm
    model.model.layers[0].input_layernorm = nn.Sequential(norm)
    bridge = TransformerBridge(model)
    assert bridge.offered().inferred
    torch.testing.assert_close(bridge(TOKENS), model(TOKENS).logits)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("change", [lambda x: x * 0.5, lambda x: x * 1.05, lambda x: x * torch.nan])
def test_small_changes_and_other_precisions(dtype: torch.dtype, change: Any) -> None:
    bridge = TransformerBridge(tiny_model("llama").to(dtype))
    norm = bridge.original_model.model.layers[0].input_layernorm
    handle = norm.register_forward_hook(lambda module, args, output: None)
    edit = [("blocks.0.ln1.hook_scale", lambda x, hook: x.clone())]
    bridge.run_with_hooks(TOKENS, fwd_hooks=edit)  # a hook that only looks
    handle.remove()
    norm.register_forward_hook(lambda module, args, output: change(output))
    with pytest.raises(RuntimeError, match="a torch hook changes this output"):
        bridge.run_with_hooks(TOKENS, fwd_hooks=edit)
