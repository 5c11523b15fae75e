"""What the heads, the neurons and the biases of a layer write to the residual stream."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from adapters.linear import bias_of, head_results, weight_in_out
from adapters.paths import module_at
from bridge.analysis.requirements import AnalysedModel, AnalysedRun, Index, pick, require
from bridge.analysis.residual_norms import gradients_of


def _module_at(model: AnalysedModel, name: str) -> nn.Module:
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


def bias_written(model: AnalysedModel, layer: int, part: Literal["attn", "mlp"]) -> Float[Tensor, " d_model"] | None:
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


def _factor(model: AnalysedModel, layer: int, part: str) -> float:
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


def neuron_labels(model: AnalysedModel, layer: int, neuron_slice: Index = None) -> list[str]:
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
