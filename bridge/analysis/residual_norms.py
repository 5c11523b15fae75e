"""The norms that read the residual stream or stand on it, as maps of its terms."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from adapters.norms import NormKind, at_least_float32
from adapters.paths import module_at
from adapters.views import Composed
from bridge.analysis.requirements import AnalysedModel


@dataclass(frozen=True)
class StreamNorm:
    """A norm of the model.

    With its scale held at the value that it had in a run, a norm is linear but for its bias: what it makes of a sum is
    the sum of what it makes of the terms (Elhage et al. 2021, "A Mathematical Framework for Transformer Circuits";
    Kobayashi et al. 2021, "Incorporating Residual and Normalization Layers into Analysis of Masked Language Models").

    Attributes:
        name: its canonical name, such as ``blocks.0.ln1``.
        kind: what it computes.
        module: the model's own.
    """

    name: str
    kind: NormKind
    module: nn.Module

    @property
    def scale_name(self) -> str:
        """The hook point of its scale."""
        return f"{self.name}.hook_scale"

    @property
    def weight(self) -> Tensor | None:
        """What it multiplies with, ``[d_model]``, or None."""
        return self.kind.weight(self.module)

    @property
    def bias(self) -> Tensor | None:
        """What it adds, ``[d_model]``, or None."""
        return getattr(self.kind.normalizer(self.module), "bias", None)

    def scaled(self, x: Float[Tensor, "*any d_model"], scale: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """A term of the norm's input, centred (by a layer norm) and divided by a scale that is given."""
        x = at_least_float32(x)
        return (x - x.mean(-1, keepdim=True) if self.kind.centered else x) / scale

    def linear(self, x: Float[Tensor, "*any d_model"], scale: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """What the norm makes of a term of its input: `scaled`, times its weight. Its bias is of no term.

        Raises:
            ValueError: a gate stands behind it, which makes of a sum no sum.
        """
        if self.kind.gate:
            raise ValueError(
                f"a gate stands behind {self.name}: what it makes of a sum is no sum of what it makes of the terms"
            )
        x, weight = self.scaled(x, scale), self.weight
        return x if weight is None else x * weight.to(x.device)

    def recomputed(self, x: Float[Tensor, "*any d_model"]) -> Float[Tensor, "*any d_model"]:
        """The norm of a whole stream, by the model's own module, hooks left out."""
        weight = self.weight
        if weight is None:
            return self.module.forward(x)
        return self.module.forward(x.to(weight.device, weight.dtype)).to(x.device)


def norm_of(model: AnalysedModel, name: str) -> StreamNorm | None:
    """A norm by its canonical name.

    Args:
        model: the bridge.
        name: such as ``ln_final`` or ``blocks.0.ln2``.

    Returns:
        None where the model has no such norm.

    Example:
        >>> from bridge import TransformerBridge
        >>> from bridge.analysis.residual_norms import norm_of
        >>> norm_of(TransformerBridge.boot_embedded(), "ln_final").weight.shape
        torch.Size([128])
    """
    hook = model.hook_dict.get(f"{name}.hook_scale")
    if hook is None:
        return None
    view: Any = hook.point.view.inner if isinstance(hook.point.view, Composed) else hook.point.view
    site = hook.point.sources[0] if view.shared else hook.point.site
    return StreamNorm(name, view.kind, module_at(model.original_model, site.path))


def is_normed_stream(model: AnalysedModel) -> bool:
    """Whether norms stand on the residual stream itself (BERT), not on branches from it.

    Args:
        model: the bridge.

    Example:
        >>> from bridge import TransformerBridge
        >>> from bridge.analysis.residual_norms import is_normed_stream
        >>> is_normed_stream(TransformerBridge.boot_embedded())
        False
    """
    return "blocks.0.hook_normalized_resid_post" in model.hook_dict


def norm_before(model: AnalysedModel, layer: int, mlp_input: bool = False) -> StreamNorm | None:
    """The norm through which a layer reads the residual stream, or None where it reads it as it is.

    Args:
        model: the bridge.
        layer: from 0 to ``n_layers``, which means the unembedding.
        mlp_input: what the layer's MLP reads, not its attention.

    Example:
        >>> from bridge import TransformerBridge
        >>> from bridge.analysis.residual_norms import norm_before
        >>> norm_before(TransformerBridge.boot_embedded(), 2, mlp_input=True).name
        'blocks.2.ln2'
    """
    if layer == model.cfg.n_layers:
        return norm_of(model, "ln_final")
    if is_normed_stream(model):
        return norm_of(model, f"blocks.{layer}.ln1") if mlp_input else None
    return norm_of(model, f"blocks.{layer}.ln{2 if mlp_input else 1}")


@contextmanager
def gradients_of(x: Tensor) -> Iterator[None]:
    """Records gradients only where the activation has some: a recorded run's results do not hang on the weights.

    Args:
        x: the activation.

    Example:
        >>> import torch
        >>> from bridge.analysis.residual_norms import gradients_of
        >>> with gradients_of(torch.ones(2)):
        ...     (torch.ones(2, requires_grad=True) * 2).requires_grad
        False
    """
    with torch.set_grad_enabled(torch.is_grad_enabled() and x.requires_grad):
        yield
