"""The norms that read the residual stream or stand on it, as maps of its terms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from adapters.architecture import Architecture, Step, feeds_forward
from adapters.norms import NormKind, at_least_float32, normalized
from adapters.paths import module_at
from adapters.points import Point
from adapters.views import Composed, Copied, linearly, transformed
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
            ValueError: a gate follows it, which makes of a sum no sum.
        """
        self.refuse_gate()
        x, weight = self.scaled(x, scale), self.weight
        return x if weight is None else x * weight.to(x.device)

    def refuse_gate(self) -> None:
        """Refuses a norm that a gate follows: what it makes of a sum is no sum of what it makes of the terms.

        Raises:
            ValueError: a gate follows it.
        """
        if self.kind.gate:
            raise ValueError(
                f"a gate follows {self.name}: what it makes of a sum is no sum of what it makes of the terms"
            )

    def recomputed(self, x: Float[Tensor, "*any d_model"]) -> Float[Tensor, "*any d_model"]:
        """The norm of a whole stream, by the model's own module, hooks left out."""
        weight = self.weight
        if self.kind.function:
            return normalized(self.kind, x)
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
    return StreamNorm(name, _computing(hook.point).kind, module_at(model.original_model, path_of_norm(hook.point)))


def path_of_norm(scale: Point) -> str:
    """Where the module of a norm is.

    Args:
        scale: the point of its scale.
    """
    return (scale.sources[0] if _computing(scale).shared else scale.site).path


def _computing(scale: Point) -> Any:
    """The view that computes a norm's scale."""
    view: Any = scale.view
    while isinstance(view, Composed | Copied):
        view = view.inner
    return view


@dataclass(frozen=True)
class PostNorm(StreamNorm):
    """A norm between a part and the residual stream, with what the block does to its output before it is added.

    Attributes:
        step: the residual step that it belongs to.
        block: the module of the block, whose parameters the step names.
    """

    step: Step
    block: nn.Module

    def linear(self, x: Float[Tensor, "*any d_model"], scale: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """What reaches the stream of a term of its input; `constant` is of no term."""
        return linearly(self.step.output_transform, super().linear(x, scale), self.block)

    @property
    def constant(self) -> Tensor | None:
        """What reaches the stream whatever its input is, ``[d_model]``; None for nothing."""
        bias, chain = self.bias, self.step.output_transform
        if bias is None and not any(link.plus for link in chain):
            return None
        return transformed(chain, next(self.block.parameters()).new_zeros(()) if bias is None else bias, self.block)


def post_norm(model: AnalysedModel, layer: int, part: str) -> PostNorm | None:
    """The norm that follows a layer's attention or MLP (Gemma 2); None where none does.

    Args:
        model: the bridge.
        layer: the block.
        part: ``attn`` or ``mlp``.

    Example:
        >>> from bridge import TransformerBridge
        >>> from bridge.analysis.residual_norms import post_norm
        >>> post_norm(TransformerBridge.boot_embedded(), 0, "attn") is None
        True
    """
    norm = norm_of(model, f"blocks.{layer}.ln{1 if part == 'attn' else 2}_post")
    if norm is None:
        return None
    block = module_at(model.original_model, model.hook_dict[f"blocks.{layer}.hook_resid_pre"].point.site.path)
    return PostNorm(norm.name, norm.kind, norm.module, model.architecture.step_at(layer, part), block)


def norm_before(model: AnalysedModel, layer: int, mlp_input: bool = False) -> StreamNorm | None:
    """The norm through which a layer reads the residual stream, or None where it reads it as it is.

    Args:
        model: the bridge.
        layer: from 0 to ``n_layers``, which means the unembedding.
        mlp_input: what the layer's MLP reads, not its attention.

    Raises:
        ValueError: it is not known what it reads through; or the layer has no MLP.

    Example:
        >>> from bridge import TransformerBridge
        >>> from bridge.analysis.residual_norms import norm_before
        >>> norm_before(TransformerBridge.boot_embedded(), 2, mlp_input=True).name
        'blocks.2.ln2'
    """
    architecture = model.architecture
    if layer == model.cfg.n_layers:
        if (norm := norm_of(model, "ln_final")) is None and (why := _why_unknown(architecture)):
            raise ValueError(f"{model.cfg.model_name}: {why}: nothing can be taken through its final norm")
        return norm
    steps = architecture.stack.block_at(layer).named
    reader = next(iter(steps), None)
    if reader is not None and mlp_input:  # what reads `resid_mid`; where all read one stream, the MLP
        second = (named for named in steps if named.after != steps[0].after)
        reader = next(second, next((named for named in steps if feeds_forward(named.step.part)), None))
    if reader is None:
        what = "MLP" if mlp_input else "part that reads the stream"
        raise ValueError(f"block {layer} of {model.cfg.model_name} has no {what} that is known")
    if reader.step.pre is None:  # it reads what enters it, or what a norm on the stream itself makes (BERT)
        before = next((n for n in steps if f"{n.norm}.hook_out" == reader.before), None)
        return norm_of(model, f"blocks.{layer}.{before.norm}") if before else None
    norm = norm_of(model, f"blocks.{layer}.{reader.norm}")
    if norm is None and not reader.step.pre.kind.identity:
        raise ValueError(
            f"what {reader.norm} of block {layer} of {model.cfg.model_name} computes is not known: nothing can be "
            "taken through it"
        )
    return norm


def _why_unknown(architecture: Architecture) -> str:
    """Why it is not known what the output layer reads; "" where it is the last stream as it is."""
    final = architecture.stack.final_norm
    if final is not None and final.kind.opaque:
        return f"what its final norm, {final.path}, computes is not known"
    return architecture.readout.unknown if final is None else ""


def gradients_of(x: Tensor) -> torch.set_grad_enabled:
    """Records gradients only where the activation has some: a recorded run's results do not hang on the weights.

    Args:
        x: the activation.

    Returns:
        What a ``with`` statement takes.

    Example:
        >>> import torch
        >>> from bridge.analysis.residual_norms import gradients_of
        >>> with gradients_of(torch.ones(2)):
        ...     (torch.ones(2, requires_grad=True) * 2).requires_grad
        False
    """
    return torch.set_grad_enabled(torch.is_grad_enabled() and x.requires_grad)
