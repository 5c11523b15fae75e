"""What the heads, the neurons and the biases of a layer write to the residual stream."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from adapters.architecture import Architecture, Step, feeds_forward
from adapters.linear import bias_of, head_results, weight_in_out
from adapters.norms import NormKind
from adapters.points import Point, module_at
from adapters.views import Composed, Copied, linearly, transformed
from bridge.analysis.analysis import AnalysedRun, Index, pick, require
from bridge.hooks.asked import StudiedBridge

# ----------------------------------------------------------------------------------------------------------------------
# The norms that read the residual stream or stand on it, as maps of its terms.
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StreamNorm:
    """A norm of the model, or, behind a part, with what the block does to its output before it is added.

    With its scale held at the value that it had in a run, a norm is linear but for its bias: what it makes of a sum is
    the sum of what it makes of the terms (Elhage et al. 2021, "A Mathematical Framework for Transformer Circuits";
    Kobayashi et al. 2021, "Incorporating Residual and Normalization Layers into Analysis of Masked Language Models").

    Attributes:
        name: its canonical name, such as ``blocks.0.ln1``.
        kind: what it computes.
        module: the model's own.
        step: of one between a part and the stream: the residual step that it belongs to.
        block: the module of that step's block, whose parameters the step names.
    """

    name: str
    kind: NormKind
    module: nn.Module
    step: Step | None = None
    block: nn.Module | None = None

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
        return self.kind.around(x) / scale

    def linear(self, x: Float[Tensor, "*any d_model"], scale: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """What the norm makes of a term of its input, up to the stream: `scaled`, times its weight.

        Its bias is of no term, nor is `constant`.

        Raises:
            ValueError: a gate follows it, which makes of a sum no sum.
        """
        self.refuse_gate()
        x, weight = self.scaled(x, scale), self.weight
        x = x if weight is None else x * weight.to(x.device)
        return x if self.step is None or self.block is None else linearly(self.step.output_transform, x, self.block)

    @property
    def constant(self) -> Tensor | None:
        """What reaches the stream from behind a part, whatever the norm's input is, ``[d_model]``; None for nothing."""
        bias, chain = self.bias, self.step.output_transform if self.step else ()
        if self.block is None or (bias is None and not any(link.plus for link in chain)):
            return None
        return transformed(chain, next(self.block.parameters()).new_zeros(()) if bias is None else bias, self.block)

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
            return self.kind.of(x)
        if weight is None:
            return self.module.forward(x)
        return self.module.forward(x.to(weight.device, weight.dtype)).to(x.device)


def norm_of(model: StudiedBridge, name: str) -> StreamNorm | None:
    """A norm by its canonical name.

    Args:
        model: the bridge.
        name: such as ``ln_final`` or ``blocks.0.ln2``.

    Returns:
        None where the model has no such norm.

    Example:
        >>> from bridge import TransformerBridge
        >>> from bridge.analysis.layer_outputs import norm_of
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


def post_norm(model: StudiedBridge, layer: int, part: str) -> StreamNorm | None:
    """The norm that follows a layer's attention or MLP (Gemma 2); None where none does.

    Args:
        model: the bridge.
        layer: the block.
        part: ``attn`` or ``mlp``.

    Example:
        >>> from bridge import TransformerBridge
        >>> from bridge.analysis.layer_outputs import post_norm
        >>> post_norm(TransformerBridge.boot_embedded(), 0, "attn") is None
        True
    """
    norm = norm_of(model, f"blocks.{layer}.ln{1 if part == 'attn' else 2}_post")
    if norm is None:
        return None
    block = module_at(model.original_model, model.hook_dict[f"blocks.{layer}.hook_resid_pre"].point.site.path)
    return replace(norm, step=model.architecture.step_at(layer, part), block=block)


def norm_before(model: StudiedBridge, layer: int, mlp_input: bool = False) -> StreamNorm | None:
    """The norm through which a layer reads the residual stream, or None where it reads it as it is.

    Args:
        model: the bridge.
        layer: from 0 to ``n_layers``, which means the unembedding.
        mlp_input: what the layer's MLP reads, not its attention.

    Raises:
        ValueError: it is not known what it reads through; or the layer has no MLP.

    Example:
        >>> from bridge import TransformerBridge
        >>> from bridge.analysis.layer_outputs import norm_before
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
    return architecture.unknown.get("readout", "") if final is None else ""


def gradients_of(x: Tensor) -> torch.set_grad_enabled:
    """Records gradients only where the activation has some: a recorded run's results do not hang on the weights.

    Args:
        x: the activation.

    Returns:
        What a ``with`` statement takes.

    Example:
        >>> import torch
        >>> from bridge.analysis.layer_outputs import gradients_of
        >>> with gradients_of(torch.ones(2)):
        ...     (torch.ones(2, requires_grad=True) * 2).requires_grad
        False
    """
    return torch.set_grad_enabled(torch.is_grad_enabled() and x.requires_grad)


def _module_at(model: StudiedBridge, name: str) -> nn.Module:
    return module_at(model.original_model, model.hook_dict[name].point.site.path)


def _to_module(x: Tensor, module: nn.Module) -> Tensor:
    """The activation where the module's parameters are (a cache may be kept elsewhere)."""
    own = module.parameters() if module._modules else module._parameters.values()
    parameter = next((parameter for parameter in own if parameter is not None), None)
    return x if parameter is None or parameter.device.type == "meta" else x.to(parameter.device)


def results_of_layers(
    cache: AnalysedRun, z: Mapping[int, Float[Tensor, "*batch_pos n_heads d_head"]]
) -> Float[Tensor, "layer_head *batch_pos d_model"] | None:
    """What the heads of several layers write, in one tensor: nothing is copied to stack them.

    All is looked up before the first product: between products, whose weights fill the processor's caches, it would
    take as long as these.

    Args:
        cache: an `ActivationCache`.
        z: each layer's cached `hook_z`, or some positions of it.

    Returns:
        None where this is not possible and `written_by_heads` is to be asked for each: a graph is recorded, an output
        projection is no plain matrix, or layers differ in shape.

    Raises:
        ValueError: an output projection has other weights now than in the run.

    Example:
        >>> import torch
        >>> from bridge import TransformerBridge
        >>> from bridge.analysis.layer_outputs import results_of_layers
        >>> _, cache = TransformerBridge.boot_embedded().run_with_cache("Mary and")
        >>> with torch.no_grad():
        ...     results_of_layers(cache, {layer: cache["z", layer][:, -1] for layer in (0, 1)}).shape
        torch.Size([8, 1, 128])
    """
    if torch.is_grad_enabled():
        return None
    products: list[tuple[Tensor, Tensor]] = []
    for layer, read in z.items():
        weight = weight_in_out(cache.module_of_the_run(f"blocks.{layer}.attn.hook_z"))
        if weight is None or weight.dtype != read.dtype or weight.device != read.device:
            return None
        if _factor(cache.model, layer, "attn") != 1:
            return None
        heads = read.reshape(-1, *read.shape[-2:]).transpose(0, 1)
        products.append((heads, weight.view(*read.shape[-2:], -1)))
    first, weight = products[0]
    if any(x.shape != first.shape or w.shape != weight.shape or x.dtype != first.dtype for x, w in products):
        return None
    made = first.new_empty(len(products), *first.shape[:2], weight.shape[-1])
    for (x, w), out in zip(products, made.unbind(), strict=True):
        torch.bmm(x, w, out=out)
    *batch_pos, _, _ = next(iter(z.values())).shape
    return made.view(-1, *batch_pos, weight.shape[-1])


def results_of_heads(
    cache: AnalysedRun, layer: int, pos_slice: Index = None
) -> Float[Tensor, "*batch_pos n_heads d_model"]:
    """What each head of a layer writes, without the output bias: the cached `hook_result`, or computed from `hook_z`.

    The output projection itself is asked, so LoRA and quantised ones count as they run.

    Args:
        cache: an `ActivationCache`.
        layer: the block.
        pos_slice: which positions.

    Raises:
        MissingActivationsError: neither is cached.
        ValueError: it is not cached, and the output projection has other weights now than in the run.

    Example:
        >>> from bridge import TransformerBridge
        >>> from bridge.analysis.layer_outputs import results_of_heads
        >>> _, cache = TransformerBridge.boot_embedded().run_with_cache("Mary and")
        >>> results_of_heads(cache, 1, pos_slice=-1).shape
        torch.Size([1, 4, 128])
    """
    name = f"blocks.{layer}.attn.hook_result"
    if name in cache:
        return pick(cache[name], pos_slice, -3)
    (z,) = require(cache, [f"blocks.{layer}.attn.hook_z"])
    return written_by_heads(cache, layer, pick(z, pos_slice, -3))


def written_by_heads(
    cache: AnalysedRun, layer: int, z: Float[Tensor, "*any n_heads d_head"]
) -> Float[Tensor, "*any n_heads d_model"]:
    """What each head of a layer writes for a `hook_z` that is given, without the output bias.

    Args:
        cache: an `ActivationCache`.
        layer: the block.
        z: what the output projection reads.

    Raises:
        ValueError: the output projection has other weights now than in the run.

    Example:
        >>> import torch
        >>> from bridge import TransformerBridge
        >>> from bridge.analysis.layer_outputs import written_by_heads
        >>> _, cache = TransformerBridge.boot_embedded().run_with_cache("Mary and")
        >>> written_by_heads(cache, 1, torch.ones(7, 4, 32)).shape
        torch.Size([7, 4, 128])
    """
    module = cache.module_of_the_run(f"blocks.{layer}.attn.hook_z")
    rows = _to_module(z, module).reshape(1, -1, *z.shape[-2:])
    factor = _factor(cache.model, layer, "attn")
    with gradients_of(z):
        results = head_results(module, rows).reshape(*z.shape[:-1], -1).to(z.device)
    return results if factor == 1 else results * factor


def results_of_neurons(
    cache: AnalysedRun, layer: int, neuron_slice: Index = None, pos_slice: Index = None
) -> Float[Tensor, "*batch_pos_neuron d_model"]:
    """What each neuron of a layer writes, without the output bias: its activation times its row of ``W_out``.

    Args:
        cache: an `ActivationCache`.
        layer: the block.
        neuron_slice, pos_slice: which neurons and positions; an int takes the axis away.

    Returns:
        ``[*batch_pos, neuron, d_model]``.

    Raises:
        MissingActivationsError: `mlp.hook_post` is not cached.
        ValueError: the layer has no neurons that write to all rows alike (a mixture of experts; attention only), or
            other weights now than in the run.

    Example:
        >>> from bridge import TransformerBridge
        >>> from bridge.analysis.layer_outputs import results_of_neurons
        >>> _, cache = TransformerBridge.boot_embedded().run_with_cache("Mary and")
        >>> results_of_neurons(cache, 1, neuron_slice=(0, 5), pos_slice=-1).shape
        torch.Size([1, 5, 128])
    """
    name = f"blocks.{layer}.mlp.hook_post"
    if name not in cache.model.hook_dict:
        raise ValueError(
            f"{cache.model.cfg.model_name} has no {name}: its MLPs (a mixture of experts, or none at all) cannot be "
            "taken apart into neurons; expand_neurons=False takes their outputs whole"
        )
    (post,) = require(cache, [name])
    post = pick(post, pos_slice, -2)  # before the neurons, whose axis may go
    weight = rows_of_neurons(cache, layer, post, neuron_slice)
    with gradients_of(post):
        return pick(post, neuron_slice, -1)[..., None] * weight


def rows_of_neurons(
    cache: AnalysedRun, layer: int, like: Float[Tensor, "*any d_mlp"], index: Index = None
) -> Float[Tensor, "*neuron d_model"]:
    """What each neuron of a layer writes where its activation is 1: its row of ``W_out``, with the layer's factor.

    Args:
        cache: an `ActivationCache`.
        layer: the block.
        like: an activation of the neurons, for its type and device.
        index: which neurons.

    Raises:
        ValueError: the layer has other weights now than in the run.

    Example:
        >>> from bridge import TransformerBridge
        >>> from bridge.analysis.layer_outputs import rows_of_neurons
        >>> _, cache = TransformerBridge.boot_embedded().run_with_cache("Mary and")
        >>> rows_of_neurons(cache, 1, cache["post", 1]).shape
        torch.Size([344, 128])
    """
    module = cache.module_of_the_run(f"blocks.{layer}.mlp.hook_post")
    with gradients_of(like):
        weight = _rows_of(module, like, index).to(like.device)
    factor = _factor(cache.model, layer, "mlp")
    return weight if factor == 1 else weight * factor


def _rows_of(module: nn.Module, like: Tensor, index: Index) -> Tensor:
    """Rows of a linear layer's weight, ``[d_in, d_out]``; for one that is no plain matrix, by asking it."""
    weight = weight_in_out(module)
    if weight is not None:
        return pick(weight, index, 0)
    width = like.shape[-1]
    chosen = torch.arange(width) if index is None else pick(torch.arange(width), index, 0)
    units = _to_module(nn.functional.one_hot(chosen.reshape(1, -1), width).to(like), module)
    rows = (module.forward(units) - module.forward(torch.zeros_like(units)))[0]
    return rows.reshape(*chosen.shape, -1)


def bias_written(model: StudiedBridge, layer: int, part: Literal["attn", "mlp"]) -> Float[Tensor, " d_model"] | None:
    """The output bias of a layer's attention or MLP; None where there is none (a mixture of experts).

    Args:
        model: the bridge.
        layer: the block.
        part: ``attn`` or ``mlp``.

    Example:
        >>> from bridge import TransformerBridge
        >>> from bridge.analysis.layer_outputs import bias_written
        >>> bias_written(TransformerBridge.boot_embedded(), 0, "attn").shape
        torch.Size([128])
    """
    name = f"blocks.{layer}.attn.b_O" if part == "attn" else f"blocks.{layer}.mlp.b_out"
    if name not in model.weights.getters:
        return None
    bias = model.weights[name]
    module = _module_at(model, f"blocks.{layer}.attn.hook_z" if part == "attn" else f"blocks.{layer}.mlp.hook_post")
    width = getattr(module, "in_features", None)
    if weight_in_out(module) is not None or width is None:
        return bias
    like = _to_module(torch.zeros(1, 1, width, dtype=bias.dtype), module)  # LoRA may have a bias of its own
    step, own = model.architecture.step_at(layer, part), bias_of(module, like)[0, 0].to(bias.device)
    return own if step.post else step.added(own, _module_at(model, f"blocks.{layer}.hook_resid_pre"))


def _factor(model: StudiedBridge, layer: int, part: str) -> float:
    """What the result of a part's last matrix is multiplied with.

    Raises:
        ValueError: that is no constant.
    """
    factor = model.architecture.step_at(layer, part).last_factor
    if factor is None:
        raise ValueError(
            f"block {layer} of {model.cfg.model_name} multiplies what its {part} puts out with parameters of its own: "
            f"it cannot be taken apart into heads or neurons. hook_{part}_out is what is added, whole"
        )
    return factor


def neuron_labels(model: StudiedBridge, layer: int, neuron_slice: Index = None) -> list[str]:
    """The labels of a layer's neurons, such as ``L0N5``.

    Args:
        model: the bridge.
        layer: the block.
        neuron_slice: which neurons.

    Example:
        >>> from bridge import TransformerBridge
        >>> from bridge.analysis.layer_outputs import neuron_labels
        >>> neuron_labels(TransformerBridge.boot_embedded(), 2, [7, 9])
        ['L2N7', 'L2N9']
    """
    chosen = pick(torch.arange(model.cfg.d_mlp or 0), neuron_slice, 0)
    return [f"L{layer}N{neuron}" for neuron in chosen.reshape(-1).tolist()]
