"""The residual stream as a sum of what wrote to it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from adapters.config import is_language_part
from bridge.analysis.layer_outputs import bias_written, neuron_labels, results_of_heads, results_of_neurons
from bridge.analysis.requirements import Activations, Index, layer_of, pick, plain, refuse_no_sum, require
from bridge.analysis.residual_norms import StreamNorm, gradients_of, is_normed_stream, norm_of

Group = Literal["embed", "attn", "mixer", "mlp", "bias"]
#: The parts that a block may have: attention, a mixer, or both, and MLPs behind them, or these alone.
_LAYERS = re.compile(r"((attn|mixer|attn\+mixer|mixer\+attn)(\+|$))?(mlp(\+mlp_2)?)?(?<=.)")
_GROUPS: Mapping[str, Group] = {"attn": "attn", "mixer": "mixer", "mlp": "mlp", "mlp_2": "mlp"}
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
        #: It is the text of a model that is given images or sound, too.
        self.sees = is_language_part(self.model.original_model)
        stack = self.model.architecture.stack
        refuse_no_sum(self.model, of_normed=True)
        for layer in range(self.model.cfg.n_layers):
            steps = stack.block_at(layer).named
            names = [named.name for named in steps]
            if not _LAYERS.fullmatch("+".join(names)):
                raise ValueError(
                    f"block {layer} of {self.model.cfg.model_name} writes {', '.join(names) or 'what is not known'} to "
                    "the residual stream: only blocks of an attention, a mixer and then MLPs can be taken apart"
                )
            for name in names:
                self.is_offered(f"blocks.{layer}.hook_{name}_out")
            if any((named.step.stream_norm is not None) != is_normed_stream(self.model) for named in steps):
                raise ValueError(
                    f"some blocks of {self.model.cfg.model_name} have norms on the residual stream, others have not: "
                    "they cannot be taken apart together"
                )

        if "embed" in self.groups:
            self.is_offered("hook_embed")

    def is_offered(self, name: str) -> None:
        """Refuses a model of which not all that is written to the stream can be seen."""
        if name not in self.model.hook_dict and name not in self.model.names.aliases:
            raise ValueError(
                f"{self.model.cfg.model_name} has no {name}: without what is written there, the rest is not the "
                "residual stream. bridge.offered() says why it is missing"
            )

    def parts(self, layer: int, whole: bool) -> list[str]:
        """What a block writes, in order; of the last one all that its MLP reads, if it is not meant whole."""
        names = [named.name for named in self.model.architecture.stack.block_at(layer).named]
        return [name for name in names if (whole or _GROUPS[name] != "mlp") and _GROUPS[name] in self.groups]

    def fine(self, part: str) -> bool:
        """Whether a part is taken apart into heads or neurons."""
        if self.neurons and part == "mlp_2":
            raise ValueError(
                f"{self.model.cfg.model_name} has two MLPs in a block, which are not taken apart into neurons; "
                "expand_neurons=False takes their outputs whole"
            )
        return {"attn": self.heads, "mlp": self.neurons}.get(part, False)

    def names(self, layer: int, mlp_input: bool) -> Iterator[str]:
        """The activations that the walk to a layer needs."""
        if "embed" in self.groups:
            yield from self.embeddings().values()
            if self.sees:
                yield from (f"blocks.{i}.hook_resid_pre" for i in range(min(layer + 1, self.model.cfg.n_layers)))
                yield from (f"blocks.{i}.hook_resid_post" for i in range(min(layer, self.model.cfg.n_layers - 1)))
        if is_normed_stream(self.model):
            yield "embed.ln.hook_scale"
        for index in range(layer + mlp_input):
            prefix, whole = f"blocks.{index}", index < layer
            for part in self.parts(index, whole):
                if not (fine := self.fine(part)):
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

    def images(self, layer: int) -> None:
        """What images, or sound, put into the stream before a layer: in place of their tokens, or on top of them."""
        if not self.sees or "embed" not in self.groups or layer == self.model.cfg.n_layers:
            return
        entering = pick(self.cache[f"blocks.{layer}.hook_resid_pre"], self.pos_slice, -2)
        if layer:
            before = pick(self.cache[f"blocks.{layer - 1}.hook_resid_post"], self.pos_slice, -2)
        else:
            before = sum((term.value[0] for term in self.terms), torch.zeros_like(entering))
        if not torch.allclose(before, entering, rtol=1e-5, atol=1e-5 * float(entering.abs().max())):
            label = f"{layer}_images" if layer else "images"
            self.terms.append(Term("embed", [label], (entering - before)[None]))

    def write(self, layer: int, part: str) -> None:
        group = _GROUPS[part]
        if not self.fine(part):
            out = pick(self.cache[f"blocks.{layer}.hook_{part}_out"], self.pos_slice, -2)
            self.terms.append(Term(group, [f"{layer}_{part}_out"], out[None]))
            return
        if group == "attn":
            value = results_of_heads(self.cache, layer, self.pos_slice).movedim(-2, 0)
            labels = [f"L{layer}H{head}" for head in range(len(value))]
        else:
            kept = plain(self.neuron_slice)
            kept = [kept] if isinstance(kept, int) else kept
            value = results_of_neurons(self.cache, layer, kept, self.pos_slice).movedim(-2, 0)
            labels = neuron_labels(self.model, layer, kept)
        bias = bias_written(self.model, layer, "attn" if group == "attn" else "mlp") if self.biases else None
        norm = self.post_norm(layer, part)
        if norm:
            scale = self.scale(norm)
            value = norm.linear(value, scale)
            bias = None if bias is None else norm.linear(bias.to(scale.device), scale)
            factor = self.model.architecture.step_at(layer, part).factor  # which is behind the norm
            value, bias = value * factor, None if bias is None else bias * factor
        self.terms.append(Term(group, labels, value))
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
            self.images(index)
            written = self.parts(index, whole=True)
            for part in written:
                if _GROUPS[part] != "mlp":
                    self.write(index, part)
            self.norm_stream(f"blocks.{index}.ln1")
            for part in written:
                if _GROUPS[part] == "mlp":
                    self.write(index, part)
            self.norm_stream(f"blocks.{index}.ln2")
        self.images(layer)
        for part in self.parts(layer, whole=False) if mlp_input else ():
            self.write(layer, part)


def terms_of(
    cache: Activations,
    layer: int | None = None,
    mlp_input: bool = False,
    *,
    groups: Sequence[Group] = ("embed", "attn", "mixer", "mlp", "bias"),
    heads: bool = False,
    neurons: bool = False,
    biases: bool = False,
    post_norms: bool = False,
    pos_slice: Index = None,
    neuron_slice: Index = None,
) -> list[Term]:
    """The terms of the residual stream that enters a layer, in the order in which the model adds them.

    Where norms stand on the stream itself (BERT), every term is what they leave of it, their scales held at those of
    the run, and their biases are one more term, the last. Of the text in a model of images, what these put into the
    stream is a term beside the embeddings, ``images``; where they are added before a later layer too, ``1_images``.

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
