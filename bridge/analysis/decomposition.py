"""Decomposition of the residual stream into the terms that were written to it."""

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
from bridge.analysis.analysis import (
    AnalysedRun,
    Index,
    layer_of,
    pick,
    plain,
    refuse_no_sum,
    require,
)
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
from bridge.hooks.studied_bridge import StudiedBridge

Group = Literal["embed", "attn", "mixer", "mlp", "bias"]


@dataclass
class _StreamTerm:
    """A part of the residual stream.

    Attributes:
        group: the kind of part that wrote it.
        labels: one for each component.
        value: ``[component, *batch_pos, d_model]``.
        fresh: whether its memory is separate from cached activations.
    """

    group: Group
    labels: list[str]
    value: Tensor
    fresh: bool = False


@dataclass
class StreamTerms:
    """The terms of the residual stream before a layer, in the order in which the model adds them.

    If norms are applied to the stream itself (BERT), each term is passed through them, with the
    scales of the run; their biases form one more term, the last. If images or sound write to the
    stream of a text, their contribution is a separate term, ``images``; ``1_images`` if they are
    also added before a later layer.

    Args:
        cache: an `ActivationCache`.
        layer, mlp_input: decompose the input of this layer's attention, or of its MLP (which
            includes the layer's own attention).
        groups: the kinds of terms to include.
        heads, neurons: split attention into heads, MLPs into neurons.
        biases: sum the output biases of the decomposed parts in one more term, the last.
        post_norms: pass heads and neurons through the norm that follows attention or MLP (Gemma 2).
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
        self.terms: list[_StreamTerm] = []
        self.bias: Tensor | None = None
        self.begins = self.model.architecture.embedding
        if not self.begins.tokens:  # images, whose first stream is a single term
            self.begins = Embedding(module=self.begins.module)
        #: Whether embeddings are requested; for a model given images or sound, those of the text
        #: too.
        self.sees = "embed" in self.groups and is_language_part(self.model.original_model)
        refuse_no_sum(self.model, of_normed=True)
        self.check_offered()
        names = list(self.names())
        activations = dict(zip(names, require(self.cache, names), strict=True))
        with gradients_of(next(iter(activations.values()), torch.empty(0, device="cpu"))):
            if heads := self.heads_together(activations):
                self.terms = [heads]
            else:
                self.go()

    def check_offered(self) -> None:
        """Reject a model in which something is added to the residual stream without a hook
        point."""
        for layer in range(self.model.cfg.n_layers):
            steps = self.steps(layer)
            if not steps:
                raise ValueError(
                    f"the terms that block {layer} of {self.model.cfg.model_name} adds to the"
                    " residual stream are unknown: it cannot be decomposed. bridge.offered() says"
                    " why"
                )
            for named in steps:
                self.check_name(f"blocks.{layer}.hook_{named.name}_out")
                if self.heads and named.name == "attn":
                    self.check_name(f"blocks.{layer}.attn.hook_z")
        if "embed" in self.groups:
            self.check_name(self.embeddings()["embed"])

    def check_name(self, name: str) -> None:
        """Reject a model that has no such hook point, although something is added to the stream
        there."""
        if name not in self.model.hook_dict and name not in self.model.names.aliases:
            raise ValueError(
                f"{self.model.cfg.model_name} has no {name}: without its contribution, the"
                " terms do not sum to the residual stream. bridge.offered() says why it is missing"
            )

    def steps(self, layer: int) -> tuple[NamedStep, ...]:
        """Return the residual steps of a block."""
        return self.model.architecture.stack.block_at(layer).named

    def before_mlp(self, layer: int) -> list[NamedStep]:
        """Return the steps that add to `resid_mid`; in a parallel block, all steps but the MLPs."""
        steps = self.steps(layer)
        first = [named for named in steps if named.after == steps[0].after]
        if len(first) < len(steps):
            return first
        return [named for named in steps if group_of(named) != "mlp"]

    def fine(self, named: NamedStep) -> bool:
        """Tell whether to decompose a part into heads or neurons.

        Raises:
            ValueError: it should be decomposed, but is the second part of its kind in a block.
        """
        group = group_of(named)
        if not {"attn": self.heads, "mlp": self.neurons}.get(group, False):
            return False
        if named.name != group:
            what, instead = "heads", "decompose_resid()"
            if group == "mlp":
                what, instead = "neurons", "expand_neurons=False"
            raise ValueError(
                f"{self.model.cfg.model_name} has {named.name} as well as {group} in a block: it"
                f" cannot be split into {what}; {instead} keeps its output whole"
            )
        return True

    def names(self) -> Iterator[str]:
        """Return the activations that a decomposition up to the layer needs."""
        layer, mlp_input = self.end, self.mlp_input
        if "embed" in self.groups:
            yield from self.embeddings().values()
            if self.sees:
                last = min(layer, self.model.cfg.n_layers - 1)
                yield from (f"blocks.{i}.hook_resid_pre" for i in range(last + 1))
                yield from (last_stream(self.model.hook_dict, i) for i in range(1, last + 1))
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
        """Return the names of the activations that hold the output of a part."""
        if not self.fine(named):
            yield f"{prefix}.hook_{named.name}_out"
            return
        if named.name == "attn":
            result = f"{prefix}.attn.hook_result"
            yield result if result in self.cache else f"{prefix}.attn.hook_z"
        if norm := self.post_norm(layer, named.name):
            yield norm.scale_name

    def embeddings(self) -> dict[str, str]:
        """Return the hook points of the embeddings in the residual stream, by label."""
        begins = self.begins
        if not begins.tokens:
            return {"embed": "hook_full_embed"}
        is_projected = begins.project and not begins.projects_sum
        names = {"embed": "embed.hook_projected" if is_projected else "hook_embed"}
        # Shortformer's positions are read by queries and keys.
        if begins.positions and self.model.cfg.positional_embedding_type != "shortformer":
            names["pos_embed"] = "hook_pos_embed"
        if begins.types:
            names["token_type_embed"] = "embed.hook_token_type_embed"
        for path in begins.more:
            name = more_embed_name(path)
            names[name.removeprefix("embed.").removesuffix(".hook_out")] = name
        return names

    def post_norm(self, layer: int, part: str) -> StreamNorm | None:
        """Return the norm between a part and the residual stream, if it is to be applied."""
        return post_norm(self.model, layer, part) if self.post_norms else None

    def scale(self, norm: StreamNorm) -> Tensor:
        """Return a norm's scale in the run, at the chosen positions; its weight must not have
        changed since.
        """
        self.cache.module_of_the_run(norm.scale_name)
        return pick(require(self.cache, [norm.scale_name])[0], self.pos_slice, -2)

    def begin(self) -> None:
        """Add the embeddings, mapped through the norm and the projection of their sum."""
        if "embed" in self.groups:
            for label, name in self.embeddings().items():
                self.terms.append(_StreamTerm("embed", [label], self.picked(name)[None]))
        elif "bias" not in self.groups:
            return
        if self.begins.norm_of_sum:
            self.through("embed.ln")
        if self.begins.projects_sum:
            self.project()

    def project(self) -> None:
        """Map all terms through the linear layer that reads their sum; its bias belongs to no
        term.
        """
        module = self.cache.module_of_the_run("hook_full_embed")
        weight = weight_in_out(module)
        if weight is None:
            raise ValueError(
                f"{self.begins.project} of {self.model.cfg.model_name} is a"
                f" {type(module).__name__}, whose weight is not a plain matrix: its embeddings"
                " cannot be decomposed"
            )
        for term in self.terms:
            term.value = term.value @ weight.to(term.value)
        if self.bias is not None:
            self.bias = self.bias @ weight.to(self.bias)
        if isinstance(bias := getattr(module, "bias", None), Tensor):
            self.add_constant(bias)

    def add_constant(self, constant: Tensor) -> None:
        """Add a vector to the term of constants, if that term is requested."""
        if "bias" in self.groups:
            self.bias = constant if self.bias is None else self.bias + constant.to(self.bias)

    def images(self, layer: int) -> None:
        """Add the contribution of images or sound to the stream before a layer, which is added to
        the tokens' or replaces it.
        """
        if not self.sees or layer == self.model.cfg.n_layers:
            return
        entering = self.picked(f"blocks.{layer}.hook_resid_pre")
        if layer:
            before = self.picked(last_stream(self.model.hook_dict, layer))
        else:
            before = sum((term.value[0] for term in self.terms), torch.zeros_like(entering))
            before = before if self.bias is None else before + self.bias
        if not torch.allclose(before, entering, rtol=1e-5, atol=1e-5 * float(entering.abs().max())):
            label = f"{layer}_images" if layer else "images"
            self.terms.append(_StreamTerm("embed", [label], (entering - before)[None]))

    def picked(self, name: str) -> Tensor:
        """Return an activation on the stream, at the chosen positions."""
        return pick(self.cache[name], self.pos_slice, -2)

    def write(self, layer: int, named: NamedStep) -> None:
        """Add the output of a step, whole or as heads or neurons, if it is requested."""
        group, part = group_of(named), named.name
        if group not in self.groups:
            return
        if not self.fine(named):
            out = self.picked(f"blocks.{layer}.hook_{part}_out")
            self.terms.append(_StreamTerm(group, [f"{layer}_{part}_out"], out[None]))
            return
        term = self.head_term(layer) if group == "attn" else self.neuron_term(layer)
        bias = self.bias_of(layer, "attn" if group == "attn" else "mlp")
        constant: Tensor | None = None
        norm = self.post_norm(layer, part)
        if norm:
            scale = self.scale(norm)
            term.value = norm.linear(term.value, scale)
            bias = None if bias is None else norm.linear(bias.to(scale.device), scale)
            constant = norm.constant if self.biases else None
        self.terms.append(term)
        for vector in (bias, constant):
            if vector is not None:
                self.add_constant(vector.to(term.value.device))

    def head_term(self, layer: int) -> _StreamTerm:
        """Return the outputs of a layer's heads."""
        value = results_of_heads(self.cache, layer, self.pos_slice).movedim(-2, 0)
        return _StreamTerm("attn", [f"L{layer}H{head}" for head in range(len(value))], value)

    def neuron_term(self, layer: int) -> _StreamTerm:
        """Return the outputs of a layer's neurons."""
        chosen = plain(self.neuron_slice)
        chosen = [chosen] if isinstance(chosen, int) else chosen
        value = results_of_neurons(self.cache, layer, chosen, self.pos_slice).movedim(-2, 0)
        return _StreamTerm("mlp", neuron_labels(self.model, layer, chosen), value)

    def bias_of(self, layer: int, part: Literal["attn", "mlp"]) -> Tensor | None:
        """Return the output bias of a part that is decomposed, if biases are requested."""
        if not self.biases:
            return None
        result = f"blocks.{layer}.attn.hook_result"
        if result in self.cache:
            self.cache.module_of_the_run(result)  # unchanged heads are read without the bias
        return bias_written(self.model, layer, part)

    def through(self, name: str) -> None:
        """Map all terms through a norm; its bias becomes a term of its own."""
        norm = norm_of(self.model, name)
        if norm is None:
            raise ValueError(
                f"the computation of {name} in {self.model.cfg.model_name} is unknown: its residual"
                " stream cannot be decomposed"
            )
        scale = self.scale(norm)
        for term in self.terms:
            term.value = norm.linear(term.value, scale)
        if self.bias is not None:
            self.bias = norm.linear(self.bias, scale)
        if norm.bias is not None:
            self.add_constant(norm.bias.to(scale.device))

    def heads_together(self, activations: Mapping[str, Tensor]) -> _StreamTerm | None:
        """Return all heads as one term, if nothing else is requested and no norm follows.

        Args:
            activations: all activations that the terms are computed from, by name.
        """
        z_alone = all(name.endswith(".attn.hook_z") for name in activations)
        if self.biases or list(self.groups) != ["attn"] or not activations or not z_alone:
            return None
        hooks = self.model.hook_dict
        z = {
            hooks[name].point.depth: pick(x, self.pos_slice, -3) for name, x in activations.items()
        }
        value = results_of_layers(self.cache, z)
        if value is None:
            return None
        heads = range(len(value) // len(z))
        labels = [f"L{layer}H{head}" for layer in z for head in heads]
        return _StreamTerm("attn", labels, value, fresh=True)

    def go(self) -> None:
        """Add the terms, from the embeddings up to the layer."""
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
            label = "bias" if self.biases else "norm_bias"
            self.terms.append(_StreamTerm("bias", [label], value[None]))

    def like(self) -> Float[Tensor, "*batch_pos d_model"]:
        """Return the tensor whose shape the terms have, at the chosen positions."""
        return pick(stream_at(self.cache, self.end), self.pos_slice, -2)

    def stacked(self) -> tuple[Float[Tensor, "component *batch_pos d_model"], list[str]]:
        """Return the terms as one tensor, and their labels."""
        labels = [label for term in self.terms for label in term.labels]
        if not self.terms:
            like = self.like()
            return like.new_zeros((0, *like.shape)), labels
        dtype = functools.reduce(torch.promote_types, [term.value.dtype for term in self.terms])
        device = self.terms[0].value.device
        values = [term.value.to(device, dtype) for term in self.terms]
        is_own = len(values) == 1 and self.terms[0].fresh
        return values[0] if is_own else torch.cat(values), labels


def group_of(named: NamedStep) -> Group:
    """Return the kind of terms that a step adds."""
    part = named.step.part
    if isinstance(part, Mixer) and part.mixes:
        return "mixer"
    return "mlp" if feeds_forward(part) else "attn"


def at_the_end(
    cache: AnalysedRun,
    stack: Float[Tensor, "component *batch_pos d_model"],
    name: str,
    pos_slice: Index = None,
) -> Float[Tensor, "component *batch_pos d_model"]:
    """Map terms of the residual stream to its end, through the norms that later blocks apply to it.

    Args:
        cache: an `ActivationCache`.
        stack: the terms.
        name: the hook point whose terms they are: on the stream, or added to it. Outputs of heads
            (``attn.hook_z``) or neurons (``mlp.hook_post``) are also mapped through the norm that
            follows them.
        pos_slice: the positions of the terms.

    Raises:
        MissingActivationsError: the cache does not hold the `hook_scale` of such a norm.
        ValueError: the stream is not a sum of terms.

    Example:
        >>> import torch
        >>> from bridge import TransformerBridge
        >>> from bridge.analysis.decomposition import at_the_end
        >>> _, cache = TransformerBridge.boot_embedded().run_with_cache("Mary and")
        >>> stack = cache["attn_out", 2][None]
        >>> torch.equal(
        ...     at_the_end(cache, stack, "blocks.2.hook_attn_out"), stack
        ... )  # no norm stands on this stream
        True
    """
    model = cache.model
    refuse_no_sum(model, of_normed=True)
    here, begins = model.hook_dict[name], model.architecture.embedding
    norms: list[StreamNorm | None] = []
    if name.endswith((".attn.hook_z", ".mlp.hook_post")):
        norms.append(post_norm(model, here.point.depth, name.split(".")[2]))
    elif here.point.depth < 0 and begins.projects_sum:
        raise ValueError(
            f"what stands at {name} goes through {begins.project} first: take"
            " blocks.0.hook_resid_pre"
        )
    for norm_name in _norms_of_stream(model):
        if model.hook_dict[f"{norm_name}.hook_scale"].order > here.order:
            norms.append(norm_of(model, norm_name))
    for norm in norms:
        if norm is not None:
            (scale,) = require(cache, [norm.scale_name])
            stack = norm.linear(stack, pick(scale, pos_slice, -2))
    return stack


def _norms_of_stream(model: StudiedBridge) -> Iterator[str]:
    """Yield the names of the norms that are applied to the residual stream itself."""
    if model.architecture.embedding.norm_of_sum:
        yield "embed.ln"
    for layer in range(model.cfg.n_layers):
        for named in model.architecture.stack.block_at(layer).named:
            if named.step.stream_norm:
                yield f"blocks.{layer}.{named.norm}"


def tolerance_of_sum(dtype: torch.dtype) -> float:
    """Return the tolerance between a sum of terms and the stream, relative to the largest number.

    Args:
        dtype: of the terms. Some norms compute in float32 for any input type.
    """
    return {torch.float64: 1e-5, torch.float32: 1e-3}.get(dtype, 30 * torch.finfo(dtype).eps)


def stream_names(model: StudiedBridge, layer: int) -> list[str]:
    """Return the hook points that show the residual stream entering a layer."""
    names = [last_stream(model.hook_dict, layer)] if layer else []
    if layer < model.cfg.n_layers:
        names.append(f"blocks.{layer}.hook_resid_pre")
    return names


def stream_at(cache: AnalysedRun, layer: int) -> Float[Tensor, "*batch_pos d_model"]:
    """Return the residual stream that enters a layer (for ``n_layers``: what the final norm or the
    head reads).

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
    names = stream_names(cache.model, layer)
    held = next((name for name in names if name in cache), names[0])
    return require(cache, [held])[0]
