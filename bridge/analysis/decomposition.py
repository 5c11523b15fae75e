"""The residual stream as a sum of what wrote to it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from adapters.linear import bias_of, head_results, weight_in_out
from bridge.analysis.requirements import Activations, AnalysedModel, Index, layer_of, pick, plain, require
from bridge.analysis.residual_norms import StreamNorm, gradients_of, is_normed_stream, norm_of

Group = Literal["embed", "attn", "mlp", "bias"]
_EMBEDDINGS = {
    "embed": "hook_embed", "pos_embed": "hook_pos_embed", "token_type_embed": "embed.hook_token_type_embed",
}  # fmt: skip


@dataclass
class Term:
    """A part of the residual stream.

    Attributes:
        group: what kind of part wrote it.
        labels: one for each component.
        value: ``[component, *batch_pos, d_model]``.
    """

    group: Group
    labels: list[str]
    value: Tensor


def _module_at(model: AnalysedModel, name: str) -> nn.Module:
    return model.original_model.get_submodule(model.hook_dict[name].point.site.path)


def _to_module(x: Tensor, module: nn.Module) -> Tensor:
    """The activation where the module's parameters are (a cache may be kept elsewhere)."""
    parameter = next(module.parameters(), None)
    return x if parameter is None or parameter.device.type == "meta" else x.to(parameter.device)


def results_of_heads(
    cache: Activations, layer: int, pos_slice: Index = None
) -> Float[Tensor, "*batch_pos n_heads d_model"]:
    """What each head of a layer writes, without the output bias: the cached `hook_result`, or computed from `hook_z`.

    The output projection itself is asked, so LoRA and quantised ones count as they run.

    Args:
        cache: an `ActivationCache`.
        layer: the block.
        pos_slice: which positions.

    Raises:
        MissingActivationsError: neither is cached.

    Example:
        >>> from bridge import TransformerBridge
        >>> from bridge.analysis.decomposition import results_of_heads
        >>> _, cache = TransformerBridge.boot_embedded().run_with_cache("Mary and")
        >>> results_of_heads(cache, 1, pos_slice=-1).shape
        torch.Size([1, 4, 128])
    """
    name = f"blocks.{layer}.attn.hook_result"
    if name in cache:
        return pick(cache[name], pos_slice, -3)
    (z,) = require(cache, [f"blocks.{layer}.attn.hook_z"])
    z = pick(z, pos_slice, -3)
    module = _module_at(cache.model, f"blocks.{layer}.attn.hook_z")
    rows = _to_module(z, module).reshape(1, -1, *z.shape[-2:])
    with gradients_of(z):
        results = head_results(module, rows).reshape(*z.shape[:-1], -1).to(z.device)
    factor = cache.model.architecture.step_at(layer, "attn").last_factor
    return results if factor == 1 else results * factor


def results_of_neurons(
    cache: Activations, layer: int, neuron_slice: Index = None, pos_slice: Index = None
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
        ValueError: the layer has no neurons that write to all rows alike (a mixture of experts; attention only).

    Example:
        >>> from bridge import TransformerBridge
        >>> from bridge.analysis.decomposition import results_of_neurons
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
    module = _module_at(cache.model, name)
    with gradients_of(post):
        weight = _rows_of(module, post, neuron_slice).to(post.device)
        results = pick(post, neuron_slice, -1)[..., None] * weight
    factor = cache.model.architecture.step_at(layer, "mlp").last_factor
    return results if factor == 1 else results * factor


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
        >>> from bridge.analysis.decomposition import bias_written
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
    return bias_of(module, like)[0, 0].to(bias.device) * model.architecture.step_at(layer, part).last_factor


@dataclass
class _Walk:
    """Collects terms in the order in which the model adds them. The arguments are those of `terms_of`."""

    cache: Activations
    groups: Sequence[Group]
    heads: bool
    neurons: bool
    biases: bool
    post_norms: bool
    pos_slice: Index
    neuron_slice: Index

    def __post_init__(self) -> None:
        self.model = self.cache.model
        self.terms: list[Term] = []
        self.bias: Tensor | None = None
        stack = self.model.architecture.stack
        for layer in range(self.model.cfg.n_layers):
            steps = stack.block_at(layer).named
            names = [named.name for named in steps]
            if names not in (["attn", "mlp"], ["attn"], ["mlp"]):
                raise ValueError(
                    f"block {layer} of {self.model.cfg.model_name} writes {', '.join(names)} to the residual stream: "
                    "only blocks of attention and then an MLP can be taken apart"
                )
            if any((named.step.stream_norm is not None) != is_normed_stream(self.model) for named in steps):
                raise ValueError(
                    f"some blocks of {self.model.cfg.model_name} have norms on the residual stream, others have not: "
                    "they cannot be taken apart together"
                )

    def names(self, layer: int, mlp_input: bool) -> Iterator[str]:
        """The activations that the walk to a layer needs."""
        if "embed" in self.groups:
            yield from self.embeddings().values()
        if is_normed_stream(self.model):
            yield "embed.ln.hook_scale"
        for index in range(layer + mlp_input):
            prefix, whole = f"blocks.{index}", index < layer
            for part, fine in (("attn", self.heads), ("mlp", self.neurons))[: 1 + whole]:
                if part not in self.groups or f"{prefix}.hook_{part}_out" not in self.model.hook_dict:
                    continue
                if not fine:
                    yield f"{prefix}.hook_{part}_out"
                elif part == "attn":
                    result = f"{prefix}.attn.hook_result"
                    yield result if result in self.cache else f"{prefix}.attn.hook_z"
                norm = self.post_norm(index, part) if fine else None
                if norm:
                    yield norm.scale_name
            if is_normed_stream(self.model) and whole:
                yield from (f"{prefix}.ln1.hook_scale", f"{prefix}.ln2.hook_scale")

    def embeddings(self) -> dict[str, str]:
        """The hook points of the embeddings that are added to the residual stream, by label."""
        known = self.model.hook_dict.keys() | self.model.names.aliases.keys()
        found = {label: name for label, name in _EMBEDDINGS.items() if name in known}
        if self.model.cfg.positional_embedding_type == "shortformer":  # added to what queries and keys read
            found.pop("pos_embed")
        return found

    def post_norm(self, layer: int, part: str) -> StreamNorm | None:
        """The norm between a part and the residual stream, where that is to be gone through."""
        return norm_of(self.model, f"blocks.{layer}.ln{1 if part == 'attn' else 2}_post") if self.post_norms else None

    def scale(self, norm: StreamNorm) -> Tensor:
        return pick(require(self.cache, [norm.scale_name])[0], self.pos_slice, -2)

    def embed(self) -> None:
        for label, name in self.embeddings().items():
            self.terms.append(Term("embed", [label], pick(self.cache[name], self.pos_slice, -2)[None]))

    def write(self, layer: int, part: Literal["attn", "mlp"]) -> None:
        if part not in self.groups or f"blocks.{layer}.hook_{part}_out" not in self.model.hook_dict:
            return
        if not (self.heads if part == "attn" else self.neurons):
            out = pick(self.cache[f"blocks.{layer}.hook_{part}_out"], self.pos_slice, -2)
            self.terms.append(Term(part, [f"{layer}_{part}_out"], out[None]))
            return
        if part == "attn":
            value = results_of_heads(self.cache, layer, self.pos_slice).movedim(-2, 0)
            labels = [f"L{layer}H{head}" for head in range(len(value))]
        else:
            kept = plain(self.neuron_slice)
            kept = [kept] if isinstance(kept, int) else kept
            value = results_of_neurons(self.cache, layer, kept, self.pos_slice).movedim(-2, 0)
            labels = neuron_labels(self.model, layer, kept)
        bias = bias_written(self.model, layer, part) if self.biases else None
        norm = self.post_norm(layer, part)
        if norm:
            scale = self.scale(norm)
            value = norm.linear(value, scale)
            bias = None if bias is None else norm.linear(bias.to(scale.device), scale)
            factor = self.model.architecture.step_at(layer, part).factor  # which is behind the norm
            value, bias = value * factor, None if bias is None else bias * factor
        self.terms.append(Term(part, labels, value))
        for more in (bias, norm.bias * factor if norm and norm.bias is not None and self.biases else None):
            if more is not None:
                more = more.to(value.device)
                self.bias = more if self.bias is None else self.bias + more

    def norm_stream(self, name: str) -> None:
        """Takes all terms through a norm that stands on the stream; its bias is a term of its own."""
        norm = norm_of(self.model, name)
        if not is_normed_stream(self.model) or norm is None:
            return
        scale = self.scale(norm)
        for term in self.terms:
            term.value = norm.linear(term.value, scale)
        if self.bias is not None:
            self.bias = norm.linear(self.bias, scale)
        if norm.bias is not None and "bias" in self.groups:
            bias = norm.bias.to(scale.device)
            self.bias = bias if self.bias is None else self.bias + bias

    def go(self, layer: int, mlp_input: bool) -> None:
        if "embed" in self.groups:
            self.embed()
        self.norm_stream("embed.ln")
        for index in range(layer):
            self.write(index, "attn")
            self.norm_stream(f"blocks.{index}.ln1")
            self.write(index, "mlp")
            self.norm_stream(f"blocks.{index}.ln2")
        if mlp_input:
            self.write(layer, "attn")


def terms_of(
    cache: Activations,
    layer: int | None = None,
    mlp_input: bool = False,
    *,
    groups: Sequence[Group] = ("embed", "attn", "mlp", "bias"),
    heads: bool = False,
    neurons: bool = False,
    biases: bool = False,
    post_norms: bool = False,
    pos_slice: Index = None,
    neuron_slice: Index = None,
) -> list[Term]:
    """The terms of the residual stream that enters a layer, in the order in which the model adds them.

    Where norms stand on the stream itself (BERT), every term is what they leave of it, their scales held at those of
    the run, and their biases are one more term, the last.

    Args:
        cache: an `ActivationCache`.
        layer, mlp_input: what enters this layer's attention, or its MLP (then with the layer's own attention).
        groups: which kinds of terms.
        heads, neurons: take attention apart into heads, MLPs into neurons.
        biases: add up the output biases of what is taken apart in one more term, the last.
        post_norms: take heads and neurons through the norm that follows attention or MLP (Gemma 2).
        pos_slice, neuron_slice: which positions and neurons.

    Returns:
        The terms. A whole output is the cached tensor itself.

    Raises:
        MissingActivationsError: the cache does not hold what this needs.
        ValueError: there is no such layer.

    Example:
        >>> from bridge import TransformerBridge
        >>> from bridge.analysis.decomposition import terms_of
        >>> _, cache = TransformerBridge.boot_embedded().run_with_cache("Mary and")
        >>> [term.labels for term in terms_of(cache, 1)]
        [['embed'], ['0_attn_out'], ['0_mlp_out']]
    """
    layer = layer_of(cache.model, layer, mlp_input)
    walk = _Walk(cache, groups, heads, neurons, biases, post_norms, pos_slice, neuron_slice)
    first = require(cache, walk.names(layer, mlp_input))[:1]
    with gradients_of(first[0] if first else torch.empty(0)):
        walk.go(layer, mlp_input)
        if "bias" in groups and (biases or walk.bias is not None):
            like = walk.terms[0].value[0] if walk.terms else pick(stream_at(cache, layer), pos_slice, -2)
            value = torch.zeros_like(like) if walk.bias is None else walk.bias.expand(like.shape)
            walk.terms.append(Term("bias", ["bias" if biases else "norm_bias"], value[None]))
    return walk.terms


def stacked(
    cache: Activations, terms: Sequence[Term], layer: int, pos_slice: Index = None
) -> tuple[Float[Tensor, "component *batch_pos d_model"], list[str]]:
    """The terms as one tensor, and their labels.

    Args:
        cache: the `ActivationCache` that they are of.
        terms: from `terms_of`.
        layer, pos_slice: what they are terms of; an empty stack takes its shape from there.

    Example:
        >>> from bridge import TransformerBridge
        >>> from bridge.analysis.decomposition import stacked, terms_of
        >>> _, cache = TransformerBridge.boot_embedded().run_with_cache("Mary and")
        >>> stacked(cache, terms_of(cache, 1), 1)[0].shape
        torch.Size([3, 1, 3, 128])
    """
    labels = [label for term in terms for label in term.labels]
    if not terms:
        like = pick(stream_at(cache, layer), pos_slice, -2)
        return like.new_zeros((0, *like.shape)), labels
    dtype = terms[0].value.dtype
    for term in terms[1:]:
        dtype = torch.promote_types(dtype, term.value.dtype)
    device = terms[0].value.device
    return torch.cat([term.value.to(device, dtype) for term in terms]), labels


def stream_at(cache: Activations, layer: int) -> Float[Tensor, "*batch_pos d_model"]:
    """The residual stream that enters a layer (for ``n_layers``: what the final norm or the head reads).

    Args:
        cache: an `ActivationCache`.
        layer: from 0 to ``n_layers``.

    Raises:
        MissingActivationsError: no hook point that shows it is cached.

    Example:
        >>> from bridge import TransformerBridge
        >>> from bridge.analysis.decomposition import stream_at
        >>> _, cache = TransformerBridge.boot_embedded().run_with_cache("Mary and")
        >>> stream_at(cache, 4).shape
        torch.Size([1, 3, 128])
    """
    after = "hook_normalized_resid_post" if is_normed_stream(cache.model) else "hook_resid_post"
    names = [f"blocks.{layer - 1}.{after}"] if layer else []
    if layer < cache.model.cfg.n_layers:
        names.append(f"blocks.{layer}.hook_resid_pre")
    held = next((name for name in names if name in cache), names[0])
    return require(cache, [held])[0]


def neuron_labels(model: AnalysedModel, layer: int, neuron_slice: Index = None) -> list[str]:
    """The labels of a layer's neurons, such as ``L0N5``.

    Args:
        model: the bridge.
        layer: the block.
        neuron_slice: which neurons.

    Example:
        >>> from bridge import TransformerBridge
        >>> from bridge.analysis.decomposition import neuron_labels
        >>> neuron_labels(TransformerBridge.boot_embedded(), 2, [7, 9])
        ['L2N7', 'L2N9']
    """
    chosen = pick(torch.arange(model.cfg.d_mlp or 0), neuron_slice, 0)
    return [f"L{layer}N{neuron}" for neuron in chosen.reshape(-1).tolist()]
