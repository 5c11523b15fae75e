"""A weight as a sum of rank-one components and a rest: `bridge.add_components`.

Input: a linear layer, and the factors of its components, ``V [d_in, component]`` and ``U
[component, d_out]``. Its output is ``x @ V @ U`` plus what the other part of the weight, and the
bias, contribute. Output: a basis of the layer's output that is read at the layer's input: the
activation is ``x @ V``, and an edit of it is a mask of the components.

The rest needs no weight: it is the layer's output without the components (the error of the basis),
so the layer may be quantised or have a LoRA adapter.
"""

from __future__ import annotations

from collections.abc import Mapping

from jaxtyping import Float
from torch import Tensor, nn

from adapters.linear import weight_in_out
from bridge.hooks.hooks import HookPoint


class Components(nn.Module):
    """Rank-one components of a weight, as a basis.

    Args:
        V: the directions that the components read, ``[d_in, component]``.
        U: the directions that they write, ``[component, d_out]``.
        bias: what the layer adds besides its weight, ``[d_out]``; None: nothing.

    Raises:
        ValueError: the numbers of components differ.

    Example:
        >>> import torch
        >>> from bridge.bases import Components
        >>> components = Components(torch.eye(3)[:, :2], torch.ones(2, 4))
        >>> components.decode(components.encode(torch.tensor([1.0, 2.0, 5.0])))
        tensor([3., 3., 3., 3.])
    """

    V: Tensor
    U: Tensor
    bias: Tensor | None

    def __init__(
        self,
        V: Float[Tensor, "d_in _"],
        U: Float[Tensor, "_ d_out"],
        bias: Float[Tensor, " d_out"] | None = None,
    ) -> None:
        super().__init__()
        if V.ndim != 2 or U.ndim != 2 or V.shape[1] != U.shape[0]:
            raise ValueError(
                f"V has the shape {list(V.shape)} and U {list(U.shape)}; they are [d_in, component]"
                " and [component, d_out]"
            )
        self.register_buffer("V", V)
        self.register_buffer("U", U)
        self.register_buffer("bias", bias)

    def encode(self, x: Float[Tensor, "*rows d_in"]) -> Float[Tensor, "*rows component"]:
        """Return each component's activation."""
        return x @ self.V

    def decode(self, features: Float[Tensor, "*rows component"]) -> Float[Tensor, "*rows d_out"]:
        """Return what the components write together, plus the bias."""
        written = features @ self.U
        return written if self.bias is None else written + self.bias


#: The hook point, and the border of a module, at which a weight's layer is found.
_AT = {
    "attn.W_Q": ("attn.hook_q", "output"),
    "attn.W_K": ("attn.hook_k", "output"),
    "attn.W_V": ("attn.hook_v", "output"),
    "attn.W_O": ("attn.hook_z", "input"),
    "mlp.W_in": ("mlp.hook_pre_linear", "output"),
    "mlp.W_gate": ("mlp.hook_pre", "output"),
    "mlp.W_out": ("mlp.hook_post", "input"),
}


def layer_of(weight: str, hooks: Mapping[str, HookPoint]) -> str:
    """Return the path of the linear layer that has a weight.

    Args:
        weight: a module's path, or a weight's name such as ``"blocks.1.mlp.W_out"``.
        hooks: the model's hook points, by name.

    Raises:
        ValueError: there is none, or the weight is a part of a fused one.
    """
    block, part = weight.rsplit(".", 2)[0], ".".join(weight.split(".")[-2:])
    if part not in _AT:
        return weight
    point, border = _AT[part]
    has_gate = f"{block}.mlp.hook_pre_linear" in hooks
    if part == "mlp.W_in" and not has_gate:
        point = "mlp.hook_pre"
    hook = hooks.get(f"{block}.{point}") if has_gate or part != "mlp.W_gate" else None
    if hook is None or hook.point.site.kind != border:
        raise ValueError(
            f"no linear layer with the weight {weight} was found: give its path in"
            " original_model.named_modules()"
        )
    path = hook.point.site.path
    fused = [
        name
        for name, (other, _) in _AT.items()
        if other != point and _is_at(hooks.get(f"{block}.{other}"), path, border)
    ]
    if fused:
        raise ValueError(
            f"{weight} is one part of the weight of {path}, as {', '.join(fused)} is: give this"
            " path, and the factors of the whole"
        )
    return path


def _is_at(hook: HookPoint | None, path: str, border: str) -> bool:
    return hook is not None and (hook.point.site.path, hook.point.site.kind) == (path, border)


def components_of(module: nn.Module, path: str, V: Tensor, U: Tensor, rest: str) -> Components:
    """Return components of a linear layer's weight, as a basis.

    Args:
        module: the layer.
        path: its path, for the error.
        V, U, rest: as for `TransformerBridge.add_components`.

    Raises:
        ValueError: it is no linear layer, or of another size; or `rest` is ``"drop"``, and what the
            layer adds besides its weight is not known.
    """
    bias = None
    if rest == "drop":
        if weight_in_out(module) is None:
            raise ValueError(
                f"{path} is a {type(module).__name__}, so what it adds besides its weight is not"
                ' known: rest="keep", or components of a plain linear layer'
            )
        bias = getattr(module, "bias", None)
    components = Components(V, U, None if bias is None else bias.detach())
    sizes = sizes_of(module)
    if sizes is None:
        raise ValueError(f"{path} is a {type(module).__name__}, which is no linear layer")
    own = (components.V.shape[0], components.U.shape[1])
    if own != sizes:
        raise ValueError(
            f"the components go from {own[0]} to {own[1]} numbers, and {path} from {sizes[0]} to"
            f" {sizes[1]}"
        )
    return components


def sizes_of(module: nn.Module) -> tuple[int, int] | None:
    """Return a linear layer's d_in and d_out; None for any other module."""
    weight = weight_in_out(module)
    if weight is not None:
        return weight.shape[0], weight.shape[1]
    d_in, d_out = getattr(module, "in_features", None), getattr(module, "out_features", None)
    if isinstance(d_in, int) and isinstance(d_out, int):  # LoRA, quantised
        return d_in, d_out
    return None
