"""The outputs of heads, neurons and biases of a layer to the residual stream."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from adapters.architecture import Architecture, Step, feeds_forward
from adapters.linear import bias_of, check_additive, head_results, weight_in_out
from adapters.norms import NormKind
from adapters.points import module_at
from adapters.views import Composed, Copied, linearly, transformed
from bridge.analysis.analysis import AnalysedRun, Index, pick, require
from bridge.hooks.studied_bridge import StudiedBridge

# --------------------------------------------------------------------------------------------------
# Norms that read the residual stream or are applied to it, as maps of its terms.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StreamNorm:
    """A norm of the model. For a norm after a part, also the rest of the map from its output to the
    stream.

    With its scale fixed at the value of a run, a norm is affine: without its bias, it maps a sum to
    the sum of its mapped terms (Elhage et al. 2021, "A Mathematical Framework for Transformer
    Circuits"; Kobayashi et al. 2021, "Incorporating Residual and Normalization Layers into Analysis
    of Masked Language Models").

    Attributes:
        name: its canonical name, such as ``blocks.0.ln1``.
        kind: the kind of norm.
        module: the model's module.
        step: for a norm between a part and the stream, the residual step that it belongs to.
        block: the module of that step's block, which has the parameters that the step names.
    """

    name: str
    kind: NormKind
    module: nn.Module
    step: Step | None = None
    block: nn.Module | None = None

    @property
    def scale_name(self) -> str:
        """Return the name of the hook point of the norm's scale."""
        return f"{self.name}.hook_scale"

    @property
    def weight(self) -> Tensor | None:
        """Return the norm's weight, ``[d_model]``, or None."""
        return self.kind.weight(self.module)

    @property
    def bias(self) -> Tensor | None:
        """Return the norm's bias, ``[d_model]``, or None."""
        return getattr(self.kind.normalizer(self.module), "bias", None)

    def scaled(
        self, x: Float[Tensor, "*any d_model"], scale: Float[Tensor, "..."]
    ) -> Float[Tensor, "..."]:
        """Return a term of the norm's input, centred (by a layer norm) and divided by a given
        scale.

        Raises:
            ValueError: its module computes another norm than the adapter declares.
        """
        if not self.kind.is_computed_by(self.module, x):
            raise ValueError(
                f"{self.name} is a {type(self.module).__name__} that does not compute the"
                f" {self.kind.name} norm that its adapter declares: nothing can be taken through"
                ' it. TransformerBridge(model, automatic="always") finds out what it computes'
            )
        return self.kind.around(x) / scale

    def linear(
        self, x: Float[Tensor, "*any d_model"], scale: Float[Tensor, "..."]
    ) -> Float[Tensor, "..."]:
        """Map a term of the norm's input to the stream: `scaled`, times the weight.

        Its bias belongs to no term, and neither does `constant`.

        Raises:
            ValueError: a gate follows it, so that it is not linear.
        """
        self.refuse_gate()
        x, weight = self.scaled(x, scale), self.weight
        x = x if weight is None else x * weight.to(x.device)
        if self.step is None or self.block is None:
            return x
        return linearly(self.step.output_transform, x, self.block)

    @property
    def constant(self) -> Tensor | None:
        """Return the constant that the norm and its part add to the stream, ``[d_model]``, or
        None.
        """
        bias, chain = self.bias, self.step.output_transform if self.step else ()
        if self.block is None or (bias is None and not any(link.plus for link in chain)):
            return None
        if bias is None:
            bias = next(self.block.parameters()).new_zeros(())
        return transformed(chain, bias, self.block)

    def refuse_gate(self) -> None:
        """Reject a norm that is followed by a gate, since it is not linear in the terms of its
        input.

        Raises:
            ValueError: a gate follows it.
        """
        if self.kind.gate:
            raise ValueError(
                f"a gate follows {self.name}: its output for a sum is not the sum of its outputs"
                " for the terms"
            )

    def recomputed(self, x: Float[Tensor, "*any d_model"]) -> Float[Tensor, "*any d_model"]:
        """Compute the norm of a whole stream with the model's own module, without hooks."""
        weight = self.weight
        if self.kind.function:
            return self.kind.of(x)
        if weight is None:
            return self.module.forward(x)
        return self.module.forward(x.to(weight.device, weight.dtype)).to(x.device)


def norm_of(model: StudiedBridge, name: str) -> StreamNorm | None:
    """Return a norm by its canonical name.

    Args:
        model: the bridge.
        name: such as ``ln_final`` or ``blocks.0.ln2``.

    Returns:
        None if the model has no such norm.

    Example:
        >>> from bridge import TransformerBridge
        >>> from bridge.analysis.layer_outputs import norm_of
        >>> norm_of(TransformerBridge.boot_embedded(), "ln_final").weight.shape
        torch.Size([128])
    """
    hook = model.hook_dict.get(f"{name}.hook_scale")
    if hook is None:
        return None
    assert hook.weights is not None
    view: Any = hook.point.view
    while isinstance(view, Composed | Copied):
        view = view.inner
    return StreamNorm(name, view.kind, hook.weights.module)


def post_norm(model: StudiedBridge, layer: int, part: str) -> StreamNorm | None:
    """Return the norm that follows a layer's attention or MLP (Gemma 2), or None.

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
    block = _module_at(model, f"blocks.{layer}.hook_resid_pre")
    return replace(norm, step=model.architecture.step_at(layer, part), block=block)


def norm_before(model: StudiedBridge, layer: int, mlp_input: bool = False) -> StreamNorm | None:
    """Return the norm through which a layer reads the residual stream, or None.

    Args:
        model: the bridge.
        layer: from 0 to ``n_layers``, which means the unembedding.
        mlp_input: the input of the layer's MLP, not its attention.

    Raises:
        ValueError: its norm is unknown, or the layer has no MLP.

    Example:
        >>> from bridge import TransformerBridge
        >>> from bridge.analysis.layer_outputs import norm_before
        >>> norm_before(TransformerBridge.boot_embedded(), 2, mlp_input=True).name
        'blocks.2.ln2'
    """
    architecture = model.architecture
    if layer == model.cfg.n_layers:
        if (norm := norm_of(model, "ln_final")) is None and (why := _why_unknown(architecture)):
            raise ValueError(
                f"{model.cfg.model_name}: {why}, so nothing can be passed through its final norm"
            )
        return norm
    steps = architecture.stack.block_at(layer).named
    readers = list(steps)
    if mlp_input:  # the reader of `resid_mid`; in a parallel block, the MLP
        readers = [named for named in steps if named.after != steps[0].after]
        readers = readers or [named for named in steps if feeds_forward(named.step.part)]
    if not readers:
        what = "MLP" if mlp_input else "part that reads the stream"
        raise ValueError(f"block {layer} of {model.cfg.model_name} has no {what} that is known")
    reader = readers[0]
    # It reads the block's input, or the output of a norm on the stream itself (BERT).
    if reader.step.pre is None:
        before = next((n for n in steps if f"{n.norm}.hook_out" == reader.before), None)
        return norm_of(model, f"blocks.{layer}.{before.norm}") if before else None
    norm = norm_of(model, f"blocks.{layer}.{reader.norm}")
    if norm is None and not reader.step.pre.kind.identity:
        raise ValueError(
            f"the computation of {reader.norm} in block {layer} of {model.cfg.model_name} is"
            " unknown, so nothing can be passed through it"
        )
    return norm


def _why_unknown(architecture: Architecture) -> str:
    """Return why the input of the output layer is unknown; "" if it is the unchanged last
    stream.
    """
    final = architecture.stack.final_norm
    if final is not None and final.kind.opaque:
        return f"the computation of its final norm, {final.path}, is unknown"
    return architecture.unknown.get("readout", "") if final is None else ""


def gradients_of(x: Tensor) -> torch.set_grad_enabled:
    """Return a context that records gradients only if the activation requires them.

    Args:
        x: the activation.

    Returns:
        A context manager.

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
    """Move the activation to the device of the module's parameters (a cache may be elsewhere)."""
    own = module.parameters() if module._modules else module._parameters.values()
    parameter = next((parameter for parameter in own if parameter is not None), None)
    return x if parameter is None or parameter.device.type == "meta" else x.to(parameter.device)


def results_of_layers(
    cache: AnalysedRun, z: Mapping[int, Float[Tensor, "*batch_pos n_heads d_head"]]
) -> Float[Tensor, "layer_head *batch_pos d_model"] | None:
    """Return the outputs of the heads of several layers in one tensor, without a copy for stacking
    them.

    All weights are looked up before the first product: lookups between products, whose weights fill
    the processor's caches, would take as long as the products.

    Args:
        cache: an `ActivationCache`.
        z: each layer's cached `hook_z`, or some positions of it.

    Returns:
        None if this is not possible and `written_by_heads` has to be called for each layer: a graph
        is recorded, an output projection is not a plain matrix, or layers differ in shape.

    Raises:
        ValueError: an output projection's weights have changed since the run.

    Example:
        >>> import torch
        >>> from bridge import TransformerBridge
        >>> from bridge.analysis.layer_outputs import results_of_layers
        >>> _, cache = TransformerBridge.boot_embedded().run_with_cache("Mary and")
        >>> with torch.no_grad():
        ...     results_of_layers(
        ...         cache, {layer: cache["z", layer][:, -1] for layer in (0, 1)}
        ...     ).shape
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
    kinds = {(x.shape, w.shape, x.dtype) for x, w in products}
    if len(kinds) > 1:
        return None
    results = first.new_empty(len(products), *first.shape[:2], weight.shape[-1])
    for (x, w), out in zip(products, results.unbind(), strict=True):
        torch.bmm(x, w, out=out)
    *batch_pos, _, _ = next(iter(z.values())).shape
    return results.view(-1, *batch_pos, weight.shape[-1])


def results_of_heads(
    cache: AnalysedRun, layer: int, pos_slice: Index = None
) -> Float[Tensor, "*batch_pos n_heads d_model"]:
    """Return each head's output without the bias: the cached `hook_result`, or one computed from
    `hook_z`.

    The output projection itself is called, so LoRA and quantised projections are included.

    Args:
        cache: an `ActivationCache`.
        layer: the block.
        pos_slice: which positions.

    Raises:
        MissingActivationsError: neither is cached.
        ValueError: it is not cached, and the output projection's weights have changed since the
            run.

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
    """Compute the output of each head of a layer from a given `hook_z`, without the output bias.

    Args:
        cache: an `ActivationCache`.
        layer: the block.
        z: the input of the output projection.

    Raises:
        ValueError: the output projection's weights have changed since the run.

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
    """Return each neuron's output: its activation times its row of ``W_out``, without the bias.

    Args:
        cache: an `ActivationCache`.
        layer: the block.
        neuron_slice, pos_slice: which neurons and positions; an int removes the axis.

    Returns:
        ``[*batch_pos, neuron, d_model]``.

    Raises:
        MissingActivationsError: `mlp.hook_post` is not cached.
        ValueError: the layer has no neurons that apply to all rows (a mixture of experts; attention
            only), or its weights have changed since the run.

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
            f"{cache.model.cfg.model_name} has no {name}: its MLPs (a mixture of experts, or none"
            " at all) cannot be split into neurons; expand_neurons=False keeps their outputs"
            " whole"
        )
    (post,) = require(cache, [name])
    post = pick(post, pos_slice, -2)  # before the neurons, since an int index removes their axis
    weight = rows_of_neurons(cache, layer, post, neuron_slice)
    with gradients_of(post):
        return pick(post, neuron_slice, -1)[..., None] * weight


def rows_of_neurons(
    cache: AnalysedRun, layer: int, like: Float[Tensor, "*any d_mlp"], index: Index = None
) -> Float[Tensor, "*neuron d_model"]:
    """Return each neuron's output at activation 1: its row of ``W_out``, times the layer's factor.

    Args:
        cache: an `ActivationCache`.
        layer: the block.
        like: an activation of the neurons, for its dtype and device.
        index: which neurons.

    Raises:
        TypeError: the outputs of the layer's neurons do not sum to the layer's.
        ValueError: the layer's weights have changed since the run.

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
    """Return rows of a linear layer's weight, ``[d_in, d_out]``; call the layer if it has no plain
    matrix.
    """
    weight = weight_in_out(module)
    if weight is not None:
        return pick(weight, index, 0)
    check_additive(module, _to_module(like, module))
    width = like.shape[-1]
    chosen = (
        torch.arange(width, device="cpu")
        if index is None
        else pick(torch.arange(width, device="cpu"), index, 0)
    )
    units = _to_module(nn.functional.one_hot(chosen.reshape(1, -1), width).to(like), module)
    rows = (module.forward(units) - module.forward(torch.zeros_like(units)))[0]
    return rows.reshape(*chosen.shape, -1)


def bias_written(
    model: StudiedBridge, layer: int, part: Literal["attn", "mlp"]
) -> Float[Tensor, " d_model"] | None:
    """Return the output bias of a layer's attention or MLP; None for a mixture of experts.

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
    weight, source = ("b_O", "hook_z") if part == "attn" else ("b_out", "hook_post")
    name = f"blocks.{layer}.{part}.{weight}"
    if name not in model.weights.getters:
        return None
    bias = model.weights[name]
    module = _module_at(model, f"blocks.{layer}.{part}.{source}")
    width = getattr(module, "in_features", getattr(module, "nx", None))
    if weight_in_out(module) is not None or width is None:
        return bias
    # LoRA may have a bias of its own.
    zeros = _to_module(torch.zeros(1, 1, width, dtype=bias.dtype, device="cpu"), module)
    step = model.architecture.step_at(layer, part)
    own = bias_of(module, zeros)[0, 0].to(bias.device)
    if step.post:
        return own
    return step.added(own, _module_at(model, f"blocks.{layer}.hook_resid_pre"))


def _factor(model: StudiedBridge, layer: int, part: str) -> float:
    """Return the factor that multiplies the result of a part's last matrix.

    Raises:
        ValueError: the factor is not a constant.
    """
    factor = model.architecture.step_at(layer, part).last_factor
    if factor is None:
        raise ValueError(
            f"block {layer} of {model.cfg.model_name} multiplies what its {part} puts out with"
            " its own parameters: it cannot be split into heads or neurons."
            f" hook_{part}_out shows its whole contribution"
        )
    return factor


def neuron_labels(model: StudiedBridge, layer: int, neuron_slice: Index = None) -> list[str]:
    """Return the labels of a layer's neurons, such as ``L0N5``.

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
    chosen = pick(torch.arange(model.cfg.d_mlp or 0, device="cpu"), neuron_slice, 0)
    return [f"L{layer}N{neuron}" for neuron in chosen.reshape(-1).tolist()]
