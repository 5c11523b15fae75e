"""The residual stream as a sum of what wrote to it."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from adapters.architecture import Embedding, NamedStep, feeds_forward
from adapters.building import more_embed_name
from adapters.config import is_language_part
from adapters.linear import weight_in_out
from adapters.mixers import Mixer
from bridge.analysis.analysis import AnalysedRun, Index, layer_of, pick, plain, refuse_no_sum, require
from bridge.analysis.layer_outputs import (
    StreamNorm,
    bias_written,
    gradients_of,
    neuron_labels,
    norm_of,
    post_norm,
    results_of_heads,
    results_of_layers,
    results_of_neurons,
)
from bridge.hooks.names import last_stream

Group = Literal["embed", "attn", "mixer", "mlp", "bias"]


@dataclass
class StreamTerm:
    """A part of the residual stream.

    Attributes:
        group: what kind of part wrote it.
        labels: one for each component.
        value: ``[component, *batch_pos, d_model]``.
        fresh: its memory is its own, not that of a cached activation.
    """

    group: Group
    labels: list[str]
    value: Tensor
    fresh: bool = False


@dataclass
class StreamTerms:
    """The terms of the residual stream that enters a layer, in the order in which the model adds them.

    Where norms stand on the stream itself (BERT), every term is what they leave of it, their scales held at those of
    the run, and their biases are one more term, the last. Of the text in a model of images, what these put into the
    stream is a term besides the embeddings, ``images``; where they are added before a later layer too, ``1_images``.

    Args:
        cache: an `ActivationCache`.
        layer, mlp_input: what enters this layer's attention, or its MLP (then with the layer's own attention).
        groups: which kinds of terms.
        heads, neurons: take attention apart into heads, MLPs into neurons.
        biases: add up the output biases of what is taken apart in one more term, the last.
        post_norms: take heads and neurons through the norm that follows attention or MLP (Gemma 2).
        pos_slice, neuron_slice: which positions and neurons.

    Attributes:
        terms: the terms. A whole output is the cached tensor itself.
        end: the layer, counted from 0.

    Raises:
        MissingActivationsError: the cache does not hold what this needs.
        ValueError: there is no such layer.

    Example:
        >>> from bridge import TransformerBridge
        >>> from bridge.analysis.decomposition import StreamTerms
        >>> _, cache = TransformerBridge.boot_embedded().run_with_cache("Mary and")
        >>> [term.labels for term in StreamTerms(cache, 1).terms]
        [['embed'], ['0_attn_out'], ['0_mlp_out']]
    """

    cache: AnalysedRun
    layer: int | None = None
    mlp_input: bool = False
    _: KW_ONLY
    groups: Sequence[Group] = ("embed", "attn", "mixer", "mlp", "bias")
    heads: bool = False
    neurons: bool = False
    biases: bool = False
    post_norms: bool = False
    pos_slice: Index = None
    neuron_slice: Index = None

    def __post_init__(self) -> None:
        self.model = self.cache.model
        self.end = layer_of(self.model, self.layer, self.mlp_input)
        self.terms: list[StreamTerm] = []
        self.bias: Tensor | None = None
        self.begins = self.model.architecture.embedding
        if not self.begins.tokens:  # images, whose first stream is one term
            self.begins = Embedding(module=self.begins.module)
        #: Embeddings are asked for, of the text in a model that is given images or sound, too.
        self.sees = "embed" in self.groups and is_language_part(self.model.original_model)
        refuse_no_sum(self.model, of_normed=True)
        for layer in range(self.model.cfg.n_layers):
            steps = self.steps(layer)
            if not steps:
                raise ValueError(
                    f"what block {layer} of {self.model.cfg.model_name} writes to the residual stream is not known: it "
                    "cannot be taken apart. bridge.offered() says why"
                )
            for named in steps:
                self.is_offered(f"blocks.{layer}.hook_{named.name}_out")
                if self.heads and named.name == "attn":
                    self.is_offered(f"blocks.{layer}.attn.hook_z")
        if "embed" in self.groups:
            self.is_offered(self.embeddings()["embed"])
        names = list(self.names())
        read = dict(zip(names, require(self.cache, names), strict=True))
        with gradients_of(next(iter(read.values()), torch.empty(0))):
            if together := self.heads_together(read):
                self.terms = [together]
            else:
                self.go()

    def is_offered(self, name: str) -> None:
        """Refuses a model of which not all that is written to the stream can be seen."""
        if name not in self.model.hook_dict and name not in self.model.names.aliases:
            raise ValueError(
                f"{self.model.cfg.model_name} has no {name}: without what is written there, the rest is not the "
                "residual stream. bridge.offered() says why it is missing"
            )

    def steps(self, layer: int) -> tuple[NamedStep, ...]:
        """The residual steps of a block."""
        return self.model.architecture.stack.block_at(layer).named

    def before_mlp(self, layer: int) -> list[NamedStep]:
        """The steps of a block that add to `resid_mid`; where all read one stream, those that are no MLP."""
        steps = self.steps(layer)
        first = [named for named in steps if named.after == steps[0].after]
        return first if len(first) < len(steps) else [named for named in steps if group_of(named) != "mlp"]

    def fine(self, named: NamedStep) -> bool:
        """Whether a part is taken apart into heads or neurons.

        Raises:
            ValueError: it would have to be, and is the second of its kind in a block.
        """
        group = group_of(named)
        if not {"attn": self.heads, "mlp": self.neurons}.get(group, False):
            return False
        if named.name != group:
            what, rest = ("neurons", "expand_neurons=False") if group == "mlp" else ("heads", "decompose_resid()")
            raise ValueError(
                f"{self.model.cfg.model_name} has {named.name} as well as {group} in a block: it is not taken apart "
                f"into {what}; {rest} takes its output whole"
            )
        return True

    def names(self) -> Iterator[str]:
        """The activations that the walk to the layer needs."""
        layer, mlp_input = self.end, self.mlp_input
        if "embed" in self.groups:
            yield from self.embeddings().values()
            if self.sees:
                yield from (f"blocks.{i}.hook_resid_pre" for i in range(min(layer + 1, self.model.cfg.n_layers)))
                ends = range(1, min(layer, self.model.cfg.n_layers - 1) + 1)
                yield from (last_stream(self.model.hook_dict, i) for i in ends)
        if self.begins.norm_of_sum and {"embed", "bias"} & {*self.groups}:
            yield "embed.ln.hook_scale"
        for index in range(layer + mlp_input):
            prefix = f"blocks.{index}"
            for named in self.steps(index) if index < layer else self.before_mlp(index):
                if group_of(named) in self.groups:
                    yield from self.names_of(prefix, index, named)
                if named.step.stream_norm and index < layer:
                    yield f"{prefix}.{named.norm}.hook_scale"

    def names_of(self, prefix: str, layer: int, named: NamedStep) -> Iterator[str]:
        """The activations that tell what a part writes."""
        if not self.fine(named):
            yield f"{prefix}.hook_{named.name}_out"
            return
        if named.name == "attn":
            result = f"{prefix}.attn.hook_result"
            yield result if result in self.cache else f"{prefix}.attn.hook_z"
        if norm := self.post_norm(layer, named.name):
            yield norm.scale_name

    def embeddings(self) -> dict[str, str]:
        """The hook points of the embeddings that are added to the residual stream, by label."""
        begins = self.begins
        if not begins.tokens:
            return {"embed": "hook_full_embed"}
        found = {"embed": "embed.hook_projected" if begins.project and not begins.projects_sum else "hook_embed"}
        if (
            begins.positions and self.model.cfg.positional_embedding_type != "shortformer"
        ):  # which queries and keys read
            found["pos_embed"] = "hook_pos_embed"
        if begins.types:
            found["token_type_embed"] = "embed.hook_token_type_embed"
        for path in begins.more:
            name = more_embed_name(path)
            found[name.removeprefix("embed.").removesuffix(".hook_out")] = name
        return found

    def post_norm(self, layer: int, part: str) -> StreamNorm | None:
        """The norm between a part and the residual stream, where that is to be gone through."""
        return post_norm(self.model, layer, part) if self.post_norms else None

    def scale(self, norm: StreamNorm) -> Tensor:
        """The scale that a norm had in the run, at the wanted positions. Its weight has to be that of the run, too."""
        self.cache.module_of_the_run(norm.scale_name)
        return pick(require(self.cache, [norm.scale_name])[0], self.pos_slice, -2)

    def begin(self) -> None:
        """The embeddings, through the norm and the projection of their sum."""
        if "embed" in self.groups:
            for label, name in self.embeddings().items():
                self.terms.append(StreamTerm("embed", [label], pick(self.cache[name], self.pos_slice, -2)[None]))
        elif "bias" not in self.groups:
            return
        if self.begins.norm_of_sum:
            self.through("embed.ln")
        if self.begins.projects_sum:
            self.project()

    def project(self) -> None:
        """Takes all terms through the linear layer that reads their sum; its bias is of no term."""
        module = self.cache.module_of_the_run("hook_full_embed")
        weight = weight_in_out(module)
        if weight is None:
            raise ValueError(
                f"{self.begins.project} of {self.model.cfg.model_name} is a {type(module).__name__}, whose weight is "
                "no plain matrix: its embeddings cannot be taken apart"
            )
        for term in self.terms:
            term.value = term.value @ weight.to(term.value)
        if self.bias is not None:
            self.bias = self.bias @ weight.to(self.bias)
        if isinstance(bias := getattr(module, "bias", None), Tensor):
            self.add_constant(bias)

    def add_constant(self, constant: Tensor) -> None:
        """Adds to the term of constants, where that is asked for."""
        if "bias" in self.groups:
            self.bias = constant if self.bias is None else self.bias + constant.to(self.bias)

    def images(self, layer: int) -> None:
        """What images, or sound, put into the stream before a layer: in place of their tokens, or on top of them."""
        if not self.sees or layer == self.model.cfg.n_layers:
            return
        entering = pick(self.cache[f"blocks.{layer}.hook_resid_pre"], self.pos_slice, -2)
        if layer:
            before = pick(self.cache[last_stream(self.model.hook_dict, layer)], self.pos_slice, -2)
        else:
            before = sum((term.value[0] for term in self.terms), torch.zeros_like(entering))
            before = before if self.bias is None else before + self.bias
        if not torch.allclose(before, entering, rtol=1e-5, atol=1e-5 * float(entering.abs().max())):
            label = f"{layer}_images" if layer else "images"
            self.terms.append(StreamTerm("embed", [label], (entering - before)[None]))

    def write(self, layer: int, named: NamedStep) -> None:
        group, part = group_of(named), named.name
        if group not in self.groups:
            return
        if not self.fine(named):
            out = pick(self.cache[f"blocks.{layer}.hook_{part}_out"], self.pos_slice, -2)
            self.terms.append(StreamTerm(group, [f"{layer}_{part}_out"], out[None]))
            return
        if group == "attn":
            value = results_of_heads(self.cache, layer, self.pos_slice).movedim(-2, 0)
            labels = [f"L{layer}H{head}" for head in range(len(value))]
        else:
            kept = plain(self.neuron_slice)
            kept = [kept] if isinstance(kept, int) else kept
            value = results_of_neurons(self.cache, layer, kept, self.pos_slice).movedim(-2, 0)
            labels = neuron_labels(self.model, layer, kept)
        if self.biases and (result := f"blocks.{layer}.attn.hook_result") in self.cache:
            self.cache.module_of_the_run(result)  # of heads that are read as they are, the bias is not
        bias = bias_written(self.model, layer, "attn" if group == "attn" else "mlp") if self.biases else None
        norm = self.post_norm(layer, part)
        if norm:
            scale = self.scale(norm)
            value = norm.linear(value, scale)
            bias = None if bias is None else norm.linear(bias.to(scale.device), scale)
        self.terms.append(StreamTerm(group, labels, value))
        for more in (bias, norm.constant if norm and self.biases else None):
            if more is not None:
                self.add_constant(more.to(value.device))

    def through(self, name: str) -> None:
        """Takes all terms through a norm; its bias is a term of its own."""
        norm = norm_of(self.model, name)
        if norm is None:
            raise ValueError(
                f"what {name} of {self.model.cfg.model_name} computes is not known: its residual stream cannot be "
                "taken apart"
            )
        scale = self.scale(norm)
        for term in self.terms:
            term.value = norm.linear(term.value, scale)
        if self.bias is not None:
            self.bias = norm.linear(self.bias, scale)
        if norm.bias is not None:
            self.add_constant(norm.bias.to(scale.device))

    def heads_together(self, read: Mapping[str, Tensor]) -> StreamTerm | None:
        """All heads as one term, where nothing else is asked for and no norm follows them.

        Args:
            read: all that the walk needs, by name.
        """
        z_alone = bool(read) and all(name.endswith(".attn.hook_z") for name in read)
        if self.biases or list(self.groups) != ["attn"] or not z_alone:
            return None
        z = {self.model.hook_dict[name].point.depth: pick(x, self.pos_slice, -3) for name, x in read.items()}
        value = results_of_layers(self.cache, z)
        if value is None:
            return None
        heads = range(len(value) // len(z))
        return StreamTerm("attn", [f"L{layer}H{head}" for layer in z for head in heads], value, fresh=True)

    def go(self) -> None:
        """Adds the terms, from the embeddings to the layer."""
        self.begin()
        for index in range(self.end):
            self.images(index)
            for named in self.steps(index):
                self.write(index, named)
                if named.step.stream_norm:
                    self.through(f"blocks.{index}.{named.norm}")
        self.images(self.end)
        for named in self.before_mlp(self.end) if self.mlp_input else ():
            self.write(self.end, named)
        if "bias" in self.groups and (self.biases or self.bias is not None):
            like = self.terms[0].value[0] if self.terms else self.like()
            value = torch.zeros_like(like) if self.bias is None else self.bias.expand(like.shape)
            self.terms.append(StreamTerm("bias", ["bias" if self.biases else "norm_bias"], value[None]))

    def like(self) -> Float[Tensor, "*batch_pos d_model"]:
        """What the terms are of, at the wanted positions."""
        return pick(stream_at(self.cache, self.end), self.pos_slice, -2)

    def stacked(self) -> tuple[Float[Tensor, "component *batch_pos d_model"], list[str]]:
        """The terms as one tensor, and their labels."""
        labels = [label for term in self.terms for label in term.labels]
        if not self.terms:
            like = self.like()
            return like.new_zeros((0, *like.shape)), labels
        dtype = functools.reduce(torch.promote_types, [term.value.dtype for term in self.terms])
        device = self.terms[0].value.device
        values = [term.value.to(device, dtype) for term in self.terms]
        return values[0] if len(values) == 1 and self.terms[0].fresh else torch.cat(values), labels


def group_of(named: NamedStep) -> Group:
    """The kind of terms that a step adds."""
    part = named.step.part
    if isinstance(part, Mixer) and part.mixes:
        return "mixer"
    return "mlp" if feeds_forward(part) else "attn"


def at_the_end(
    cache: AnalysedRun, stack: Float[Tensor, "component *batch_pos d_model"], name: str, pos_slice: Index = None
) -> Float[Tensor, "component *batch_pos d_model"]:
    """What becomes of terms of the residual stream by its end: what the norms make of them that stand on it behind.

    Args:
        cache: an `ActivationCache`.
        stack: the terms.
        name: the hook point that they are terms of: on the stream, or what is added to it. What is written by heads
            (``attn.hook_z``) or neurons (``mlp.hook_post``) goes through the norm that follows these, too.
        pos_slice: which positions the terms are of.

    Raises:
        MissingActivationsError: the cache does not hold the `hook_scale` of such a norm.
        ValueError: the stream is no sum.

    Example:
        >>> import torch
        >>> from bridge import TransformerBridge
        >>> from bridge.analysis.decomposition import at_the_end
        >>> _, cache = TransformerBridge.boot_embedded().run_with_cache("Mary and")
        >>> stack = cache["attn_out", 2][None]
        >>> torch.equal(at_the_end(cache, stack, "blocks.2.hook_attn_out"), stack)  # no norm stands on this stream
        True
    """
    model = cache.model
    refuse_no_sum(model, of_normed=True)
    here, begins = model.hook_dict[name], model.architecture.embedding
    behind = lambda norm: model.hook_dict[f"{norm}.hook_scale"].order > here.order
    norms: list[StreamNorm | None] = []
    if name.endswith((".attn.hook_z", ".mlp.hook_post")):
        norms.append(post_norm(model, here.point.depth, name.split(".")[2]))
    elif here.point.depth < 0 and begins.projects_sum:
        raise ValueError(f"what stands at {name} goes through {begins.project} first: take blocks.0.hook_resid_pre")
    if begins.norm_of_sum and behind("embed.ln"):
        norms.append(norm_of(model, "embed.ln"))
    for layer in range(model.cfg.n_layers):
        steps = model.architecture.stack.block_at(layer).named
        on_it = (f"blocks.{layer}.{named.norm}" for named in steps if named.step.stream_norm)
        norms += [norm_of(model, norm) for norm in on_it if behind(norm)]
    for norm in norms:
        if norm is not None:
            (scale,) = require(cache, [norm.scale_name])
            stack = norm.linear(stack, pick(scale, pos_slice, -2))
    return stack


def stream_at(cache: AnalysedRun, layer: int) -> Float[Tensor, "*batch_pos d_model"]:
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
    names = [last_stream(cache.model.hook_dict, layer)] if layer else []
    if layer < cache.model.cfg.n_layers:
        names.append(f"blocks.{layer}.hook_resid_pre")
    held = next((name for name in names if name in cache), names[0])
    return require(cache, [held])[0]
