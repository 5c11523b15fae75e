"""Right declarations with one claim changed: each is the declaration of another model, or says why
it is not.

Run as a script it tries them all: ``python -m tests.adapters.mutations [CASE...]`` prints how many
were refused for each family, and every one that was not.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

import adapters.model
from adapters import (
    MLP,
    Architecture,
    Attention,
    Block,
    Embedding,
    Mixer,
    MoE,
    Norm,
    Projection,
    Readout,
    Stack,
    Step,
    UnsupportedModelError,
    verify,
)
from adapters.architecture import tables
from adapters.attention import Gate
from adapters.config import ModelConfig
from adapters.feed_forward import CHOICE
from adapters.inputs import sample_inputs
from adapters.norms import GEMMA_NORM, LAYER_NORM, NO_NORM, RMS_NORM, NormKind
from adapters.observe.observe import CallRecorder
from adapters.points import has_module, join, module_path
from adapters.proofs.evidence import Report
from adapters.views import (
    Affine,
    AlibiScores,
    Call,
    Composed,
    Heads,
    HeadsOfBatch,
    MaskedScores,
    SinkScores,
    View,
    times,
)
from bridge import TransformerBridge


@dataclass(frozen=True)
class Mutation:
    """One changed claim.

    Attributes:
        name: what was changed, and where.
        declared: the changed declaration.
        same: why it is the declaration of the same model all the same; "" where it is not.
    """

    name: str
    declared: Architecture
    same: str = ""


@dataclass(frozen=True, repr=False)
class Rolled(View):
    """Another view's columns, moved by one along an axis."""

    inner: View
    axis: int
    identity = False

    def get(self, x: Tensor, call: Call) -> Tensor:
        return self.inner.get(x, call).roll(1, self.axis)

    def put(self, x: Tensor, new: Tensor, call: Call) -> Tensor:
        return self.inner.put(x, new.roll(-1, self.axis), call)


@dataclass(frozen=True, repr=False)
class Doubled(View):
    """Twice what another view shows."""

    inner: View
    identity = False

    def get(self, x: Tensor, call: Call) -> Tensor:
        return self.inner.get(x, call) * 2

    def put(self, x: Tensor, new: Tensor, call: Call) -> Tensor:
        return self.inner.put(x, new / 2, call)


Change = tuple[str, Any, str]
SMALL = "it offers less of the same model"
GIVEN = "what the experts are given is what the router chose: the same numbers, seen one step later"
BATCHED = "what has a batch axis already is shown as it is"


@dataclass(frozen=True)
class Facts:
    """What changes are made from.

    Attributes:
        cfg: of the model.
        tensors: the paths of the modules that return a tensor, not a tuple.
        dropouts: the paths of those that do nothing in evaluation mode.
        bare_norms: norms have no weights.
        model: the model.
        logits: it has an output layer that runs.
    """

    cfg: ModelConfig
    tensors: frozenset[str]
    dropouts: frozenset[str]
    bare_norms: bool
    model: nn.Module
    logits: bool

    def of_a_tensor(self, path: str) -> str:
        """Why another element of what a module in a block returns is the same: it returns a
        tensor.
        """
        tensor = any(found.endswith(f".{module_path(path)}") for found in self.tensors)
        return "it returns a tensor, of which no element is taken" if tensor else ""

    def behind_a_dropout(self, path: str) -> str:
        """Why what a module in a block returns is what entered it."""
        return (
            "a dropout stands between"
            if any(found.endswith(f".{module_path(path)}") for found in self.dropouts)
            else ""
        )


def _norm_changes(norm: Norm) -> Iterator[tuple[str, Norm]]:
    kinds: dict[str, NormKind] = {
        "LN": LAYER_NORM,
        "RMS": RMS_NORM,
        "RMS of 1 + weight": GEMMA_NORM,
        "none": NO_NORM,
    }
    for name, kind in kinds.items():
        if kind != norm.kind:
            yield f"{norm.path} is {name}", replace(norm, kind=kind)
    if norm.kind.gate:
        yield f"{norm.path} without its gate", Norm(f"{norm.path}.{norm.kind.inner}", RMS_NORM)


def attention_changes(part: Attention, facts: Facts) -> Iterator[Change]:
    """Everything that an attention claims, changed one at a time."""
    for a, b in ("qk", "kv", "qv"):
        yield (
            f"{a} and {b} exchanged",
            replace(part, **{a: getattr(part, b), b: getattr(part, a)}),
            "",
        )
    for letter in "qkv":
        projection: Projection = getattr(part, letter)
        heads = facts.cfg.n_heads if letter == "q" else facts.cfg.n_kv_heads
        view = projection.view or Heads(heads)
        one = "there is one head" if heads == 1 else ""
        yield (
            f"{letter} shifted by one head",
            replace(part, **{letter: replace(projection, view=Rolled(view, -2))}),
            one,
        )
        yield (
            f"{letter} shifted by one column",
            replace(part, **{letter: replace(projection, view=Rolled(view, -1))}),
            "",
        )
        yield (
            f"{letter} doubled",
            replace(part, **{letter: replace(projection, view=Doubled(view))}),
            "",
        )
        yield (
            f"{letter} from the output projection",
            replace(part, **{letter: Projection(part.o)}),
            "",
        )
        if projection.path != part.o:
            yield f"z from {projection.path}", replace(part, o=projection.path), ""
    rolled = {}
    for letter in "qk":
        heads = facts.cfg.n_heads if letter == "q" else facts.cfg.n_kv_heads
        each: Projection = getattr(part, letter)
        rolled[letter] = replace(each, view=Rolled(each.view or Heads(heads), -1))
    yield "q and k shifted by one column alike", replace(part, **rolled), ""
    yield (
        "rotary is not" if part.rotary else "not rotary is",
        replace(part, rotary=None if part.rotary else "last"),
        "",
    )
    if part.scores is None:
        yield "scores shown", replace(part, scores=MaskedScores()), ""
    else:
        yield "scores not shown", replace(part, scores=None), SMALL
    if isinstance(part.scores, AlibiScores):
        same = (
            "the model's own scores: they differ by a constant for each query, which is nothing to"
            " the softmax"
        )
        yield "other scores", replace(part, scores=MaskedScores()), same
    else:
        yield "other scores", replace(part, scores=AlibiScores()), ""
    yield "cross", replace(part, keys_from=None if part.cross else "encoder"), ""
    if isinstance(part.scores, SinkScores):
        yield "sinks left out", replace(part, scores=part.scores.inner), ""
    elif part.scores:
        yield "sinks", replace(part, scores=SinkScores(part.scores, "sinks")), ""
    if part.core:
        yield "core left out", replace(part, core=""), ""
    if part.qk_shift:
        yield "shift left out", replace(part, qk_shift=None), ""
    if part.position_bias:
        yield "position bias left out", replace(part, position_bias=None), ""
    for letter in "qk":
        projection = getattr(part, letter)
        if norm := projection.norm:
            yield (
                f"{letter}_norm left out",
                replace(part, **{letter: replace(projection, norm=None)}),
                "",
            )
            for text, changed in _norm_changes(norm):
                yield (
                    f"{letter}_norm: {text}",
                    replace(part, **{letter: replace(projection, norm=changed)}),
                    "",
                )
    if part.q.norm and part.k.norm:
        exchanged = replace(
            part, q=replace(part.q, norm=part.k.norm), k=replace(part.k, norm=part.q.norm)
        )
        yield "q_norm and k_norm exchanged", exchanged, ""
        for over in ("heads", "heads first", "width"):
            if over != part.norms_over:
                yield f"norms over {over}", replace(part, norms_over=over), ""


def newer_attention_changes(part: Attention, facts: Facts) -> Iterator[Change]:
    """What only some attentions claim: gates, sinks, factors and norms around values, latents,
    widths.
    """
    if part.keys_of is not None:
        yield "makes its own keys", replace(part, keys_from=None), ""
        yield "keys of the block before", replace(part, keys_from=part.keys_of - 1), ""
    if part.z_transform:
        yield f"no {type(part.z_transform).__name__} of z", replace(part, z_transform=None), ""
    if isinstance(gate := part.z_transform, Gate):
        other = "tanh" if gate.function != "tanh" else "silu"
        yield (
            "gate through another function",
            replace(part, z_transform=replace(gate, function=other)),
            "",
        )
        view = gate.projection.view or Heads(facts.cfg.n_heads)
        shifted = replace(gate, projection=replace(gate.projection, view=Rolled(view, -2)))
        yield "gate shifted by one head", replace(part, z_transform=shifted), ""
        yield (
            "gate from the queries",
            replace(part, z_transform=replace(gate, projection=part.q)),
            "",
        )
    if isinstance(affine := part.z_transform, Affine):
        yield "factor of z times 1.1", replace(part, z_transform=Affine(affine.factor * 1.1)), ""
    if part.z_transform is None:
        yield "a factor of z", replace(part, z_transform=Affine(1.1)), ""
    if part.v.norm:
        yield "v_norm left out", replace(part, v=replace(part.v, norm=None)), ""
    if part.clamp is None:
        for bound in (30.0, 1e6):
            yield f"a clamp at {bound:g}", replace(part, clamp=(bound, "made")), ""
    if part.clamp:
        clip, where = part.clamp
        yield "clamp left out", replace(part, clamp=None), ""
        yield "clamp times 1.5", replace(part, clamp=(clip * 1.5, where)), ""
        if part.qk_norms:
            yield (
                "clamp elsewhere",
                replace(part, clamp=(clip, "made" if where == "normed" else "normed")),
                "",
            )
    latents = {"q": part.q.latent, "kv": part.k.latent}
    for name, latent in latents.items():
        if latent and latent.path:
            left = {letter: replace(part.projections[letter], latent=None) for letter in name}
            yield f"{name}_latent left out", replace(part, **left), ""
            for text, changed in _norm_changes(latent):
                norms = {
                    letter: replace(part.projections[letter], latent=changed) for letter in name
                }
                yield f"{name}_latent: {text}", replace(part, **norms), ""
    if part.q.latent and part.k.latent:
        exchanged = {
            letter: replace(each, latent=latents["kv" if letter == "q" else "q"])
            for letter, each in part.projections.items()
        }
        yield "latents exchanged", replace(part, **exchanged), ""
    for letter, each in part.projections.items():
        if each.width:
            yield (
                f"width of {letter} one more",
                replace(part, **{letter: replace(each, width=each.width + 1)}),
                "",
            )
    for which in ("n_heads", "n_key_value_heads"):
        if which in part.config_values:
            others = {name: value for name, value in part.config_values.items() if name != which}
            yield f"{which} of the model", replace(part, config_values=others), ""
    if part.q.norm and part.rotary:
        turned = "last" if part.rotary == "first" else "first"
        yield "norms before or behind the rotation", replace(part, rotary=turned), ""
    if isinstance(part.scores, Composed):
        yield "heads have an axis", replace(part, scores=part.scores.outer), ""
    elif part.scores:
        heads = HeadsOfBatch(facts.cfg.n_heads)
        yield "heads beside the batch", replace(part, scores=Composed(heads, part.scores)), ""


def mlp_changes(part: MLP, facts: Facts) -> Iterator[Change]:
    """Everything that an MLP claims, changed one at a time."""
    if part.gate:
        yield "gate and up exchanged", replace(part, gate=part.up, up=part.gate), ""
        yield "gate left out", replace(part, gate=None), ""
        yield "gate for up", replace(part, up=part.gate, gate=None), ""
        yield "up is the gate", replace(part, up=part.gate), ""
        yield (
            "gate shifted",
            replace(part, gate=replace(part.gate, view=Rolled(part.gate.view or View(), -1))),
            "",
        )
    else:
        yield "up is a gate too", replace(part, gate=part.up), ""
    yield (
        "up shifted",
        replace(part, up=replace(part.up, view=Rolled(part.up.view or View(), -1))),
        "",
    )
    yield "up doubled", replace(part, up=replace(part.up, view=Doubled(part.up.view or View()))), ""
    yield "post before up", replace(part, down=part.up.path), ""
    yield (
        "flat" if not part.flat else "not flat",
        replace(part, flat=not part.flat),
        "" if part.flat else BATCHED,
    )
    if part.ln:
        yield "norm left out", replace(part, ln=None), ""
        for text, norm in _norm_changes(part.ln):
            yield f"norm: {text}", replace(part, ln=norm), ""
    if part.given:
        yield "what it is multiplied with left out", replace(part, given=None), ""
    if part.activation:
        yield "learned activation left out", replace(part, activation=None), ""
    neurons = part.up.width or facts.cfg.d_mlp or 0
    yield "one neuron more", replace(part, up=replace(part.up, width=neurons + 1)), ""


def mixture_changes(part: MoE, facts: Facts) -> Iterator[Change]:
    """Everything that a mixture claims, changed one at a time."""
    other = "probabilities" if part.chosen_by in ("logits", "scores", "in turn") else "logits"
    yield f"chosen by {other}", replace(part, chosen_by=other), ""
    if part.margin:
        yield "margin times 2", replace(part, margin=part.margin * 2), ""
    yield "factor times 2", replace(part, factor=part.factor * 2), ""
    if part.chosen_by == "probabilities":
        same = "it says how the choice is proved, not what it is"
        yield (
            "chosen by corrected probabilities",
            replace(part, chosen_by="corrected probabilities"),
            same,
        )
    yield "flat or not", replace(part, flat=not part.flat), "" if part.flat else BATCHED
    for returns in (CHOICE, ("logits",), ("every weight", "logits"), ("indices", "weights")):
        same = GIVEN if returns == ("logits",) and part.chosen_by.endswith("probabilities") else ""
        if returns != part.router_returns:
            yield (
                f"router returns {', '.join(returns)}",
                replace(part, router_returns=returns),
                same,
            )
    if part.shared:
        yield (
            "shared expert times 2",
            replace(part, shared_transform=(*part.shared_transform, *times(2.0))),
            "",
        )
        yield "shared expert left out", replace(part, shared=None), ""
        for text, changed, same in mlp_changes(part.shared, facts):
            yield f"shared: {text}", replace(part, shared=changed), same
    if part.shared_gate:
        left = tuple(each for each in part.shared_transform if not isinstance(each, Gate))
        yield "shared gate left out", replace(part, shared_transform=left), ""


def _with(step: Step, which: str, value: Any) -> Step:
    """A step with another norm behind its part, or another chain behind that; or with another
    field.
    """
    if which == "post":
        return replace(step, result_chain=(*((value,) if value else ()), *step.output_transform))
    if which == "output_transform":
        return replace(step, result_chain=(*((step.post,) if step.post else ()), *value))
    return replace(step, **{which: value})


def kernel_changes(part: Attention, facts: Facts) -> Iterator[Change]:
    """What an attention claims whose queries and keys are known where they meet alone."""
    scale = part.own("attn_scale", facts.cfg.attn_scale)
    yield (
        "scale times 1.1",
        replace(part, config_values={**part.config_values, "attn_scale": scale * 1.1}),
        "",
    )
    for which in ("n_heads", "n_key_value_heads"):
        others = {
            **part.config_values,
            which: part.own(which, getattr(facts.cfg, which) or facts.cfg.n_heads) * 2,
        }
        yield f"{which} times 2", replace(part, config_values=others), ""
    yield "other scores", replace(part, scores=AlibiScores()), ""
    if isinstance(part.scores, SinkScores):
        yield "sinks left out", replace(part, scores=part.scores.inner), ""
    elif part.scores:
        yield "sinks", replace(part, scores=SinkScores(part.scores, "sinks")), ""
    biases = None if part.score_bias_modules is not None else ()
    what = "what is added to scores left out" if biases is None else "something is added to scores"
    yield what, replace(part, score_bias_modules=biases), ""


def mixer_changes(part: Mixer, facts: Facts) -> Iterator[Change]:
    """What the attentions inside of a mixer claim, changed one at a time."""
    for index, each in enumerate(part.modules):
        if not isinstance(each, Attention):
            continue
        changes = chain(attention_changes(each, facts), newer_attention_changes(each, facts))
        for text, changed, same in changes if each.projections else kernel_changes(each, facts):
            if changed.cross:
                continue  # no mixer takes it
            if changed.o or not any(
                word in text for word in ("v ", "of z", "output projection", " and v")
            ):
                yield (
                    f"inside: {text}",
                    replace(part, modules=_put(part.modules, index, changed)),
                    same,
                )


def _put(of: tuple[Any, ...], index: int, new: Any) -> tuple[Any, ...]:
    return (*of[:index], new, *of[index + 1 :])


def step_changes(step: Step, index: int, facts: Facts) -> Iterator[Change]:
    """A step's own claims, and those of its part."""
    part = step.part
    inside: Iterator[Change] = iter(())
    if isinstance(part, Attention):
        inside = chain(attention_changes(part, facts), newer_attention_changes(part, facts))
    elif isinstance(part, MLP):
        inside = mlp_changes(part, facts)
    elif isinstance(part, MoE):
        inside = mixture_changes(part, facts)
    elif isinstance(part, Mixer):
        inside = mixer_changes(part, facts)
    for text, changed, same in inside:
        yield text, replace(step, part=changed), same
    for which in ("pre", "post", "stream_norm"):
        norm = getattr(step, which)
        if norm:
            yield f"{which} norm left out", _with(step, which, None), ""
            for text, kind in _norm_changes(norm):
                yield f"{which}: {text}", _with(step, which, kind), ""
    if step.pre and not step.post:
        yield "pre norm for post", _with(replace(step, pre=None), "post", step.pre), ""
    if step.pre and step.post:
        yield "norms exchanged", _with(replace(step, pre=step.post), "post", step.pre), ""
    if step.out_element != 1:
        yield (
            "second element",
            replace(step, out_element=1),
            facts.of_a_tensor(step.out or part.path),
        )
    if step.out and not (isinstance(part, MLP) and not part.path):
        yield "out of the module", replace(step, out=None), facts.behind_a_dropout(step.out)
    if isinstance(part, MLP):
        yield "out of up", replace(step, out=join(part.path, part.up.path)), ""
    for factor in (0.5, 2.0, -1.0):
        yield (
            f"factor times {factor}",
            _with(step, "output_transform", (*times(factor), *step.output_transform)),
            "",
        )
    for which in ("residual_transform", "output_transform"):
        links = getattr(step, which)
        if links:
            yield f"{which} left out", _with(step, which, ()), ""
            yield f"{which} times 2", _with(step, which, (*links, *times(2.0))), ""
        for place, link in enumerate(links if len(links) > 1 else ()):
            left = links[:place] + links[place + 1 :]
            yield f"{which} without {link}", _with(step, which, left), ""
    if step.mix:
        yield "mix left out", replace(step, mix=None), ""
        if step.mix.keep is not None:
            returns = tuple("" if each == "keep" else each for each in step.mix.returns)
            yield "streams not mixed", replace(step, mix=replace(step.mix, returns=returns)), ""
    if step.parallel and step.parallel_to != index - 1:
        yield "reads what the step before reads", replace(step, parallel_to=index - 1), ""
    if index:
        other = replace(
            step, parallel_to=None if step.parallel else index - 1, residual_transform=()
        )
        yield "sequential for parallel" if step.parallel else "parallel", other, ""


def block_changes(block: Block, facts: Facts) -> Iterator[Change]:
    """A block with one step changed, or its steps in another order."""
    for index, step in enumerate(block.steps):
        for text, changed, same in step_changes(step, index, facts):
            steps = (*block.steps[:index], changed, *block.steps[index + 1 :])
            yield f"{type(step.part).__name__}: {text}", replace(block, steps=steps), same
    if len(block.steps) > 1:
        first, second, *rest = block.steps
        if not second.parallel:
            yield "steps in another order", replace(block, steps=(second, first, *rest)), ""
            if first.pre and second.pre:
                exchanged = (replace(first, pre=second.pre), replace(second, pre=first.pre), *rest)
                yield "norms of two steps exchanged", replace(block, steps=exchanged), ""
        for index in range(1, len(block.steps)):
            left = block.steps[:index] + block.steps[index + 1 :]
            yield f"step {index} left out", replace(block, steps=left), ""
    if block.norm:
        yield "norm before the first step left out", replace(block, norm=None), ""


def stack_changes(stack: Stack, facts: Facts) -> Iterator[Change]:
    """A list of blocks with one claim changed."""
    n = facts.cfg.n_layers
    kinds = {None: stack.block, **stack.layers}
    for index, block in kinds.items():
        if index is None and len(stack.layers) >= n and all(i in stack.layers for i in range(n)):
            continue  # no layer looks like it
        for text, changed, same in block_changes(block, facts):
            where = "" if index is None else f"layer {index}: "
            new = (
                replace(stack, block=changed)
                if index is None
                else replace(stack, layers={**stack.layers, index: changed})
            )
            yield f"{where}{text}", new, same
    if stack.layers:
        yield "all layers alike", replace(stack, layers={}), ""
        yield (
            "other layers",
            replace(stack, layers={n - 1 - i: block for i, block in stack.layers.items()}),
            "",
        )
    for which, without in (
        ("block_inputs", {}),
        ("stream_view", None),
        ("collapse", None),
    ):
        if getattr(stack, which):
            yield f"{which} left out", replace(stack, **{which: without}), ""
    several = {index: inputs for index, inputs in stack.block_inputs.items() if len(inputs) > 1}
    if several:
        last, (one, other) = max(several.items())
        exchanged = {**stack.block_inputs, last: ((other[0], one[1]), other)}
        yield "block_inputs of another", replace(stack, block_inputs=exchanged), ""
    if stack.final_norm:
        yield "final norm left out", replace(stack, final_norm=None), ""
        for text, norm in _norm_changes(stack.final_norm):
            yield f"final: {text}", replace(stack, final_norm=norm), ""
    key, length = stack.output
    yield "other output", replace(stack, output=(0 if key is None else None, length)), ""
    yield "second output", replace(stack, output=(1, length)), ""
    yield "longer output", replace(stack, output=(key, length + 1)), ""


def embedding_changes(embedding: Embedding) -> Iterator[tuple[str, Embedding]]:
    """How the stream begins, with one claim changed."""
    if not embedding.tokens:  # the first blocks read no tokens
        return
    for name in ("norm", "project"):
        if getattr(embedding, name):
            yield f"{name} of the embedding left out", replace(embedding, **{name: None})
    for name in ("positions", "types", "more"):
        if getattr(embedding, name):
            left = tuple(
                (what, path) for what, path in embedding.added if what not in (name, f"row {name}")
            )
            yield f"{name} of the embedding left out", replace(embedding, added=left)
    if embedding.norm:
        for text, norm in _norm_changes(embedding.norm):
            yield f"embedding: {text}", replace(embedding, norm=norm)
    if embedding.behind_embed:
        left = embedding.transform[: len(embedding.transform) - len(embedding.behind_embed)]
        yield "parameters of the embedding left out", replace(embedding, transform=left)
    yield (
        "embedding times 2",
        replace(embedding, transform=(*times(2 * embedding.factor), *embedding.behind_embed)),
    )
    if embedding.positions:
        other = tables(embedding.tokens, embedding.types, embedding.more)
        exchanged = replace(embedding, tokens=embedding.positions, added=other)
        yield "embeddings exchanged", exchanged
    if embedding.module is not None:
        yield "embeddings as one left out", replace(embedding, module=None)


def readout_changes(readout: Readout, facts: Facts) -> Iterator[tuple[str, Readout]]:
    """How logits are made, with one claim changed."""
    if not facts.logits:  # the model has no output layer
        return
    behind = readout.output_transform
    yield "factor_in times 2", replace(readout, factor_in=readout.factor_in * 2)
    if readout.factor_in != 1:
        yield "factor_in left out", replace(readout, factor_in=1.0)
    yield (
        "factor_out times 2",
        replace(readout, output_transform=replace(behind, factor=behind.factor * 2)),
    )
    if readout.factor_out != 1:
        yield "factor_out left out", replace(readout, output_transform=replace(behind, factor=1.0))
    if readout.bias and readout.bias_of(facts.model) is not None:
        yield (
            "bias of the logits left out",
            replace(readout, output_transform=replace(behind, plus=None)),
        )
    yield (
        "another soft cap",
        replace(readout, soft_cap=10.0 if readout.soft_cap is None else readout.soft_cap * 0.8),
    )
    if readout.soft_cap is not None:
        yield "soft cap left out", replace(readout, soft_cap=None)


def architecture_changes(declared: Architecture, facts: Facts) -> Iterator[Mutation]:
    """Everything that a declaration claims about modules, changed one at a time."""
    for index, stack in enumerate(declared.stacks):
        for text, changed, same in stack_changes(stack, facts):
            stacks = (*declared.stacks[:index], changed, *declared.stacks[index + 1 :])
            yield Mutation(f"{stack.name}: {text}", replace(declared, stacks=stacks), same)
    for index, stack in enumerate(declared.stacks):
        for text, embedding in embedding_changes(stack.embedding):
            stacks = (
                *declared.stacks[:index],
                replace(stack, embedding=embedding),
                *declared.stacks[index + 1 :],
            )
            yield Mutation(
                text if index == 0 else f"{stack.name}: {text}", replace(declared, stacks=stacks)
            )
    for text, readout in readout_changes(declared.readout, facts):
        yield Mutation(text, replace(declared, readout=readout))
    if any(head.unembeds for head in declared.heads):
        left = tuple(head for head in declared.heads if not head.unembeds)
        yield Mutation("head before the logits left out", replace(declared, heads=left))
    if declared.no_layer_runs:
        yield Mutation("layer runs", replace(declared, no_layer_runs=""))
    else:
        yield Mutation("no layer runs", replace(declared, no_layer_runs="who knows"), SMALL)


#: Wrong values for the facts of `cfg`, beside those that a type has.
OTHERS: dict[str, tuple[Any, ...]] = {
    "act_fn": ("relu", "gelu", "gelu_new", "silu", "quick_gelu", "tanh", "no_such_function"),
    "normalization_type": ("LN", "RMS", "LNPre", None),
    "positional_embedding_type": (
        "standard",
        "rotary",
        "alibi",
        "relative_positional_bias",
        "shortformer",
        "none",
    ),
    "attention_dir": ("causal", "bidirectional"),
    "attn_scores_soft_cap": (-1.0, 5.0, 50.0),
    "output_logits_soft_cap": (-1.0, 5.0, 30.0),
    "rotary_base": (1e3, 5e5),
    "rotary_base_local": (1e3, 5e5),
    "rotary_dim": (2, 4, 6),
    "window_size": (2, 5),
    "eps": (1e-3, 1e-7),
    "attn_types": (["local", "global"], ["global", "local"], ["local"] * 2, ["global"] * 2),
}
#: Fields of `ModelConfig` that say nothing about what the model computes, and why.
NOT_CLAIMS = {
    "model_name": "a name",
    "original_architecture": "a name",
    "tokenizer_name": "the tokenizer's",
    "default_prepend_bos": "the tokenizer's",
    "tokenizer_prepends_bos": "the tokenizer's",
    "tokenizer_appends_eos": "the tokenizer's",
    "use_attn_result": "a setting",
    "use_split_qkv_input": "a setting",
    "use_attn_in": "a setting",
    "use_hook_mlp_in": "a setting",
    "ungroup_grouped_query_attention": "a setting",
    "positions_from_mask": "a setting",
    "tie_word_embeddings": "read from the model",
    "d_vocab": "read from the model",
    "d_vocab_out": "read from the model",
    "normalization_type": "read from the model",
    "n_devices": "where it is",
    "seed": "how it was made",
    "from_checkpoint": "how it was made",
    "checkpoint_index": "how it was made",
    "checkpoint_label_type": "how it was made",
    "checkpoint_value": "how it was made",
    "processed": "what was done to it",
    "extra": "anything",
    "_model": "itself",
}
#: Activation functions that compute the same to within a millionth.
ALIKE = ({"gelu_new", "gelu_fast", "gelu_pytorch_tanh", "gelu_python_tanh"}, {"silu", "swish"})


def fact_changes(declared: Architecture, facts: Facts) -> Iterator[Mutation]:
    """Every fact of `cfg`, changed one at a time."""
    cfg = facts.cfg
    for name, value in cfg.to_dict().items():
        if name in NOT_CLAIMS or name in ("device", "dtype", "n_params"):
            continue
        if name in OTHERS:
            values: tuple[Any, ...] = OTHERS[name]
        elif isinstance(value, bool):
            values = (not value,)
        elif isinstance(value, int):
            values = (value + 1, value * 2)
        elif isinstance(value, float):
            values = (value * 0.5, value * 1.25)
        else:
            values = (3,) if value is None else ()
        if name == "n_ctx" and value is not None:
            values = (*values, value // 2)
        if name.endswith("soft_cap") and value > 0:
            values = (*values, value * 1.005)
        if name == "relative_attention_max_distance" and value is not None:
            values = (*values, value - 1)
        for other in values:
            if other != value:
                values_of = {**declared.config_values, name: other}
                yield Mutation(
                    f"cfg.{name} = {other!r}",
                    replace(declared, config_values=values_of),
                    same_fact(facts, name, other),
                )


def same_fact(facts: Facts, name: str, other: object) -> str:
    """Why a changed fact is no claim of this model; "" where it is one."""
    cfg = facts.cfg
    if (
        name == "normalization_type"
        and facts.bare_norms
        and other == f"{cfg.normalization_type}Pre"
    ):
        return "the norms have no weights, which is what it says"
    rotary = cfg.positional_embedding_type == "rotary"
    if name == "act_fn" and (cfg.attn_only or any({other, cfg.act_fn} <= alike for alike in ALIKE)):
        return "the same function"
    if name.startswith("rotary_") and not rotary:
        return "nothing is rotated"
    if name in ("rotary_base", "rotary_adjacent_pairs") and cfg.rotary_dim == 2:
        return "one pair turns, whose speed is one"
    if name == "rotary_base_local" and "local" not in (cfg.attn_types or ()):
        return "no layer has a window"
    if (
        name == "rotary_base"
        and cfg.rotary_base_local is not None
        and set(cfg.attn_types or ()) == {"local"}
    ):
        return "all layers have a window"
    if name == "final_rms" and (cfg.normalization_type or "").startswith("RMS") and not other:
        return "all norms are RMS norms, the last as well"
    if (
        name in ("d_expert", "experts_per_token", "num_experts", "d_shared_expert")
        and getattr(cfg, name) is None
    ):
        return "there are no experts"
    if name.startswith("relative_attention") and getattr(cfg, name) is None:
        return "there is no position bias"
    if name == "attn_scale" and not cfg.use_attn_scale:
        return "it is not used"
    if name == "use_attn_scale" and cfg.attn_scale == 1.0:
        return "the scale is one"
    if name == "use_local_attn" and not other and cfg.attn_types is None:
        return "no layer has a window"
    if name == "use_local_attn" and cfg.attn_types is None:
        return "cfg says of no layer that it has a window"
    if name == "window_size" and "local" not in (cfg.attn_types or ()):
        return "no layer has a window"
    if name == "attn_types" and not cfg.use_local_attn:
        return "no layer has a window"
    if name == "decoder_start_token_id" and cfg.decoder_start_token_id is None:
        return "it has no decoder"
    return ""


def mutations(model: PreTrainedModel) -> Iterator[Mutation]:
    """The changed declarations of a model; of one without an adapter, of what is inferred for
    it.
    """
    bridge = TransformerBridge(model)
    declared, cfg = bridge.architecture, bridge.cfg
    with torch.no_grad(), CallRecorder(model.named_modules()) as recording:
        model(**sample_inputs(model))
    tensors = frozenset(
        path for path, found in recording.by_path.items() if isinstance(found[0].output, Tensor)
    )
    dropouts = frozenset(path for path, m in model.named_modules() if isinstance(m, nn.Dropout))
    norms = [
        path for block in declared.stack.every_block for path in (norm.path for norm in block.norms)
    ]
    bare = all(
        getattr(m, "weight", m) is None
        for path, m in model.named_modules()
        if any(path.endswith(f".{n}") for n in norms)
    )
    logits = bool(declared.readout.path) and has_module(model, declared.readout.path)
    facts = Facts(cfg, tensors, dropouts, bare, model, logits)
    yield from architecture_changes(declared, facts)
    yield from fact_changes(declared, facts)


@contextmanager
def declared_as(architecture: Architecture) -> Iterator[None]:
    """Whatever is wrapped has this declaration, also one that no file could hold and no registry
    would take.
    """
    with (
        mock.patch.object(adapters.model, "declaration_for", return_value=architecture),
        mock.patch.object(adapters.model, "is_declared", return_value=True),
    ):
        yield


#: What a bridge may say of a declaration that cannot be that of the model.
REFUSALS = (
    UnsupportedModelError,
    ValueError,
    TypeError,
    AttributeError,
    RuntimeError,
    IndexError,
    KeyError,
)


def tried(
    model: PreTrainedModel, mutation: Mutation, level: str = "quick first"
) -> Report | Exception:
    """What comes of a changed declaration: a report, or that it cannot be wrapped.

    Args:
        model, mutation: what is tried.
        level: ``quick first``, or ``full`` for a report of all claims that are broken.
    """
    with declared_as(mutation.declared):
        try:
            bridge = TransformerBridge(model, automatic=False)
        except REFUSALS as error:
            return error
        # Both levels make the same checks, in the same order: what the first refuses, the second
        # would.
        report = verify(bridge, level="quick") if level == "quick first" else None
        return verify(bridge) if report is None or report.passed else report


def main(cases: Sequence[str]) -> int:
    from tests.adapters.test_verify_all import ALIKE as FAMILIES
    from tests.adapters.test_verify_all import OTHER, USUAL, tiny

    wrong = 0
    totals: Counter[str] = Counter()
    for case in [case for case in (*USUAL, *FAMILIES, *OTHER) if not cases or case in cases]:
        model = tiny(case)
        count: Counter[str] = Counter()
        named: Counter[str] = Counter()
        for mutation in mutations(model):
            try:
                found = tried(model, mutation)
            except Exception as error:  # noqa: BLE001 shown, and counted as a fault of ours
                print(
                    f"  {case}: {mutation.name}: RAISED {type(error).__name__}: {str(error)[:200]}",
                    flush=True,
                )
                count["raised"] += 1
                continue
            refused = isinstance(found, Exception) or not found.passed
            if mutation.same:
                count["same"] += 1
                continue
            count["refused" if refused else "accepted"] += 1
            if not refused:
                print(f"  {case}: {mutation.name}: ACCEPTED", flush=True)
            named[
                (
                    "cannot be wrapped"
                    if isinstance(found, Exception)
                    else found.failed[0].name
                    if refused
                    else "-"
                )
            ] += 1
        totals += count
        wrong += count["accepted"] + count["raised"]
        print(f"{case:36} {dict(count)}", flush=True)
    print("total", dict(totals))
    return wrong


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(min(main(sys.argv[1:]), 1))
