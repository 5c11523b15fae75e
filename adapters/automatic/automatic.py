"""Infer the `Architecture` of an unknown model from one recorded run, and the reasons for gaps.

**In**: a Hugging Face model with weights, and its inputs (tokens are random; images and sound may
be passed).

**Out**: `Inferred`: a declaration built from the same classes that adapters of families use, and a
reason for each unavailable hook point. `source_of` writes the declaration as the source of an
adapter.

**How**, in order:

1. The model, or a probe copy of it in which constant parameters are replaced by random numbers, is
   run once. Everything at the borders of its modules is recorded, graph included
   (`adapters.observe`).
2. The lists of blocks are those in which output i is input i + 1 (`blocks.py`): a residual stream
   runs through them.
3. The terms that each block adds to the stream are explained as a sum of recorded outputs, each
   with a factor or a parameter (`stream.py`). Each term is a part, with the norms of its input and
   output (`parts.py`).
4. A module is a norm if `NormKind.of` reproduces its output (`norms.py`).
5. A part is an attention if one softmax ran in it: queries, keys and values are the columns that
   reach each head's scores and `z`, by gradient (`attention.py`). It is an MLP if each neuron
   depends on its own column only, or a mixture of experts (`feed_forward.py`). Otherwise it is a
   `Mixer`, of which only input and output are known.
6. Facts about the whole model (rotation, scale, cap, windows) are the most common values over its
   layers (`facts.py`).
7. Embeddings, final norm, heads and readout are inferred last (`ends.py`).

Names are not used, with one exception: the configuration may supply a number that a run cannot
show, and the run must agree with it.

**It raises** `NotFound` for a model without a list of blocks on a residual stream. Otherwise it
offers what was found, and records a reason for every gap. The model is not changed.

**It does not prove** anything: `adapters.proofs.proofs.Proof` checks the declaration on the live
model before it is offered. **It does not know** of hooks, bridges or families.
"""

from __future__ import annotations

import inspect
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass, replace
from functools import partial
from typing import Any, Literal

from torch import nn

from adapters.architecture import (
    Architecture,
    Block,
    Embedding,
    Head,
    NamedStep,
    Part,
    Readout,
    Stack,
    Step,
    Terms,
)
from adapters.attention import Attention
from adapters.automatic.attention import (
    FoundAttention,
    auxiliary_modules,
    of_attention,
    with_values,
)
from adapters.automatic.blocks import (
    FoundStack,
    alike,
    find_cycles,
    find_stacks,
    number_calls,
    number_norms,
    refuse_two_towers,
    why_no_layers,
)
from adapters.automatic.ends import (
    Pool,
    factor_between,
    find_embedding,
    find_final_norm,
    find_head,
    find_patches,
    find_pool,
    find_readout,
    find_unembedding,
    returned_by,
    taken_as,
    what_is_read,
)
from adapters.automatic.facts import Facts, all_rotated, all_sized
from adapters.automatic.feed_forward import (
    FoundExpertModules,
    FoundMixture,
    FoundMLP,
    experts_of,
    list_of_experts,
)
from adapters.automatic.norms import norm_kind, relative, with_gated
from adapters.automatic.parts import (
    Addend,
    FoundPart,
    Norms,
    Parts,
    Sum,
    mixes_positions,
    modules_of,
    rerun,
)
from adapters.automatic.stream import Mixed, Sums, collapse, first_of, with_streams
from adapters.config import act_fn_name, config_of
from adapters.feed_forward import MoE
from adapters.inputs import CannotBeMade, Given, sample_inputs, takes, text_places
from adapters.mixers import Mixer, functions_of
from adapters.norms import GEMMA_NORM, LAYER_NORM, NO_NORM, OPAQUE_NORM, RMS_NORM, Norm, NormKind
from adapters.observe.observe import (
    BorderTensor,
    ModuleCall,
    NotFound,
    Recording,
    evaluating,
    outside_of_modes,
    record,
)
from adapters.observe.probe_copy import model_or_probe_copy
from adapters.points import Border, base_path, core_path, is_inside, join
from adapters.views import Affine, PositionsFirst, SeveralStreams, View


@dataclass(frozen=True)
class Inferred:
    """Result of inference for a model.

    Attributes:
        architecture: the declaration.
        not_offered: unavailable hook points, or prefixes of their names, with the reasons.
    """

    architecture: Architecture
    not_offered: Mapping[str, str] = field(default_factory=dict)


def infer(model: nn.Module, inputs: Given | None = None) -> Inferred:
    """Infer a model's declaration from one run on a few tokens. The model is not changed.

    Args:
        model: a Hugging Face model with weights.
        inputs: images or sound that it needs, by the model's argument names; None: random.

    Raises:
        NotFound: no list of blocks with a residual stream was found; the message says why.

    Example:
        >>> from transformers import OlmoConfig, OlmoForCausalLM
        >>> from adapters.automatic.automatic import infer
        >>> sizes = {
        ...     "hidden_size": 32,
        ...     "num_hidden_layers": 2,
        ...     "num_attention_heads": 4,
        ...     "intermediate_size": 48,
        ... }
        >>> infer(OlmoForCausalLM(OlmoConfig(**sizes, vocab_size=61))).architecture.stack.path
        'layers'
    """
    try:
        # Inference needs gradients, whatever mode the caller is in.
        with outside_of_modes(model):
            refuse_two_towers(model)
            with model_or_probe_copy(model) as subject, evaluating(subject):
                arguments = sample_inputs(subject, inputs)
                return _Inference(subject, arguments, record(subject, arguments)).run()
    except CannotBeMade as why:
        raise NotFound(str(why)) from None


class _Inference:
    def __init__(self, model: nn.Module, inputs: Given, recording: Recording) -> None:
        self.model = model
        self.inputs = inputs
        self.recording = recording
        self.base = base_path(model)
        self.core = core_path(model)
        #: Convert a path of the model to one relative to its base model.
        self.relative = partial(relative, base=self.base)
        self.config = config_of(model).get_text_config()
        self.not_offered: dict[str, str] = {}
        self.unknown: dict[str, str] = {}
        self.facts = Facts(model, recording)
        #: The attentions with their own keys in the current list of blocks, by block.
        self.attentions: dict[int, FoundAttention] = {}
        #: The borders in the blocks of the current list that the model overwrites in place.
        self.changed: dict[tuple[str, Border], None] = {}
        #: The input that its first blocks read instead of tokens.
        self.main = takes(model.get_submodule(self.core)).main

    def run(self) -> Inferred:
        """Infer the declaration, from the embedding to the readout."""
        stacks = self._lists_of_blocks()
        first = stacks[0]
        last = stacks[-1]
        decodes = first is not last
        number_norms(stacks, self.recording)
        encoder, last_norm = self._first_stack(first, "encoder" if decodes else "blocks")
        unembed = find_unembedding(self.model, self.recording, last.blocks[-1].end)
        pooled = None if decodes else self._pooled(first, last_norm)
        if pooled is not None:
            unembed = pooled.unembed
            encoder = self._with_pooled_norm(encoder, pooled)
        declared = [encoder]
        if decodes:
            self.facts.freeze_first_stack()
            decoder, last_norm = self._decoder(last, first)
            declared.append(decoder)
        values = self.facts.values(first, unembed)
        self._mark_positions_first(stacks, declared, unembed)
        heads: tuple[Head, ...] = ()
        readout = Readout()
        if pooled is not None:
            readout = self._pooled_readout(pooled)
        elif unembed is not None:
            stack = declared[-1]
            declared[-1], heads, readout = self._logits(last, stack, last_norm, unembed)
        architecture = Architecture(
            stacks=tuple(all_sized(stack, values) for stack in declared),
            readout=readout,
            heads=heads,
            no_layer_runs=why_no_layers(first, decodes, self.main),
            config_values=values,
            unknown=dict(self.unknown),
        )
        return Inferred(architecture, dict(self.not_offered))

    def _first_stack(self, stack: FoundStack, name: str) -> tuple[Stack, Norm | None]:
        """Return the declaration of the first list of blocks with its embedding, and its final
        norm.
        """
        embedding = self._embedding(stack).moved(self.relative)
        declared, final = self._stack(stack, name)
        changed = declared.changed_in_place + self._changed_before(stack.blocks[0].start)
        return replace(declared, embedding=embedding, changed_in_place=changed), final

    def _with_pooled_norm(self, stack: Stack, pooled: Pool) -> Stack:
        """Return the stack with the pooled vector's norm, if it has one, as its final norm."""
        if pooled.norm is None:
            return stack
        norm = Norm(self.relative(pooled.norm.path), pooled.norm.kind)
        return replace(stack, final_norm=norm, collapse=pooled.positions)

    def _pooled_readout(self, pooled: Pool) -> Readout:
        """Return the readout of the pooled vector."""
        path = ""
        if pooled.unembed is not None:
            path = relative(pooled.unembed.path, self.core)
        return Readout(path, pooled=None if pooled.norm else pooled.positions)

    def _mark_positions_first(
        self, stacks: Sequence[FoundStack], declared: list[Stack], unembed: ModuleCall | None
    ) -> None:
        """Declare where the tensors of stacks have positions before the batch."""
        for i, stack in enumerate(stacks):
            if not stack.positions_first:
                continue
            tokens = declared[i].embedding.tokens
            begins = bool(tokens) and self._is_positions_first(join(self.base, tokens))
            ends = False
            if unembed is not None and stack is stacks[-1]:
                ends = self._is_positions_first(unembed.path)
            declared[i] = replace(declared[i], stream_view=PositionsFirst(begins, ends))

    def _is_positions_first(self, path: str) -> bool:
        """Tell whether the output of a module outside the blocks has positions before the batch."""
        calls = self.recording.of(path)
        if not bool(calls):
            return False
        return self.recording.turned(calls[0].value)

    def _lists_of_blocks(self) -> list[FoundStack]:
        """Return the lists of blocks with a residual stream: one, or an encoder's and a decoder's.

        Raises:
            NotFound: there are none, or several that are not an encoder and a decoder.
        """
        stacks, reason = find_stacks(self.model, self.recording)
        if not stacks and (cycles := find_cycles(self.model, self.recording)):
            stacks = [cycles]
        decodes = "decoder_input_ids" in self.inputs
        more_than_text = any(x.is_floating_point() for x in self.inputs.values())
        if more_than_text and (self.main is None or (decodes and len(stacks) != 2)):
            # Keep only stacks over text: no image towers, no encoder of another modality.
            stacks = [stack for stack in stacks if self._is_over_text(stack)]
        if not stacks:
            raise NotFound(reason or "no list of blocks has a stream with the tokens' positions")
        if len(stacks) == 1 and self._is_over_text(stacks[0]):
            self.main = None
        if self.recording.pos < 0:  # the inputs are not tokens
            self.recording.pos = stacks[0].stream.value.shape[1]
        is_encoder_decoder = bool(getattr(config_of(self.model), "is_encoder_decoder", False))
        if len(stacks) > 1 and not (len(stacks) == 2 and is_encoder_decoder):
            paths = ", ".join(stack.path for stack in stacks)
            raise NotFound(f"it has {len(stacks)} lists of blocks ({paths})")
        return [with_streams(stack, self.recording) for stack in stacks]

    def _is_over_text(self, stack: FoundStack) -> bool:
        """Tell whether a stack has as many positions as a text of the inputs."""
        return stack.stream.value.shape[1] in self.recording.lengths

    def _embedding(self, stack: FoundStack) -> Embedding:
        """Return the embedding of the first stream; missing facts are recorded by hook name.

        Raises:
            NotFound: the model reads tokens, but no token embedding ran.
        """
        first = first_of(stack)
        if self.main is not None:
            return find_patches(self.recording, first)
        block = stack.blocks[0].module
        stream = stack.stream.value
        text = text_places(self.model, self.inputs, block, stream)
        missing: dict[str, str] = {}
        embedding = find_embedding(self.model, self.recording, first, missing, text=text)
        if embedding is None:
            raise NotFound("no token embedding ran")
        self.not_offered |= missing
        if missing:
            self.unknown["embedding"] = "; ".join(missing.values())
        return taken_as(embedding, self.model, self.inputs, first)

    def _logits(
        self, stack: FoundStack, declared: Stack, last_norm: Norm | None, unembed: ModuleCall
    ) -> tuple[Stack, tuple[Head, ...], Readout]:
        """Return the list of blocks with its final norm, and the heads and readout between the last
        stream and the logits.
        """
        end = stack.blocks[-1].end
        x = unembed.entered_value
        last, _ = collapse(self.recording, stack)
        if stack.positions_first and x is not None and not self.recording.turned(x):
            last = last.transposed()
        on_stream = _ends_in_norm(declared.block)
        normed, function = what_is_read(self.recording, unembed, last.value, last_norm, on_stream)
        if function is not None:
            declared = replace(declared, final_norm=function)
        factor = None if x is None else factor_between(normed, x)
        heads: tuple[Head, ...] = ()
        if x is not None and factor is None:
            head = find_head(self.recording, self.core, unembed, end)
            if head is not None:
                heads = (head,)
                factor = 1.0
        core = self.model.get_submodule(self.core)
        path = relative(unembed.path, self.core)
        readout, unknown = find_readout(self.recording, core, path, unembed, factor)
        if unknown:
            self.unknown["readout"] = unknown
            self.not_offered["logits of the stream"] = unknown
        else:
            self.not_offered.pop("ln_final", None)  # the output layer's input is known
        return declared, heads, readout

    def _pooled(self, stack: FoundStack, final: Norm | None) -> Pool | None:
        """Return the pooling of images or sound that the output layer reads after the last block,
        or None.
        """
        if self.main is None:
            return None
        last, _ = collapse(self.recording, stack)
        logits = returned_by(self.model, self.inputs)
        pooled = find_pool(self.recording, last, final, stack.blocks[-1].end, logits)
        if pooled is None:
            return None
        self.not_offered.pop("ln_final", None)  # the pooled input is known
        # Without an output layer, the model returns the vector next to the last stream.
        return pooled if pooled.unembed else None

    def _stack(self, stack: FoundStack, name: str) -> tuple[Stack, Norm | None]:
        """Return the declaration of a list of blocks, and its final norm with its path from the
        model.
        """
        self.facts.table = None
        self.changed.clear()
        self.attentions.clear()
        for call in stack.blocks:
            number_calls(call, self.recording)
        blocks = [self._block(stack, index, name) for index in range(stack.length)]
        blocks = all_rotated(alike(blocks, stack.members, self.not_offered, name))
        usual = Counter(map(repr, blocks)).most_common(1)[0][0]
        block = next(block for block in blocks if repr(block) == usual)
        layers = {index: other for index, other in enumerate(blocks) if other != block}
        last, collapsed_by = collapse(self.recording, stack)
        final, factor = self._final_norm(stack, last)
        if final is None and not _ends_in_norm(blocks[-1]):
            point = "ln_final" if name == "blocks" else f"{name}_final_ln"
            self.not_offered[point] = "no norm that is known reads the last stream"
        changed = tuple((join("*", path), border) for path, border in self.changed)
        declared = Stack(
            self.relative(stack.path),
            block,
            layers,
            final_norm=final and Norm(self.relative(final.path), final.kind),
            name=name,
            members=stack.members,
            output=(stack.outputs[0].key, stack.blocks[0].n_outputs),
            block_inputs=self._block_inputs(stack, factor),
            stream_view=_stream_view(stack),
            collapse=collapsed_by and self.relative(collapsed_by),
            changed_in_place=changed,
        )
        return declared, final

    def _final_norm(self, stack: FoundStack, last: BorderTensor) -> tuple[Norm | None, float]:
        """Return the norm that reads the last stream, and the stream's factor before it."""
        end = stack.blocks[-1].end
        final, factor = find_final_norm(self.recording, last, end)
        if final is None and stack.positions_first:
            return find_final_norm(self.recording, last.transposed(), end)
        return final, factor

    def _decoder(self, stack: FoundStack, encoder: FoundStack) -> tuple[Stack, Norm | None]:
        """Return the declaration of the decoder's list of blocks, with the embedding of its first
        stream, and its final norm.
        """
        declared, final = self._stack(stack, "decoder")
        missing: dict[str, str] = {}
        since = encoder.blocks[-1].end
        embedding = find_embedding(self.model, self.recording, stack.blocks[0], missing, since)
        if embedding is None:
            self.not_offered["decoder_embed"] = (
                "no token embedding ran between the encoder and the decoder"
            )
            return declared, final
        for point, why in missing.items():
            self.not_offered[f"decoder_{point.removeprefix('hook_')}"] = why
        return replace(declared, embedding=embedding.moved(self.relative)), final

    def _block_inputs(self, stack: FoundStack, last: float) -> dict[int, Terms]:
        """Return the inputs of blocks that differ from the previous block's output.

        Args:
            stack: the blocks.
            last: the factor of the stream after the last block.
        """
        inputs: dict[int, Terms] = {}
        for index, factor in stack.rescaled.items():
            inputs[index] = (("", factor),)
        if last != 1:
            inputs[stack.length] = (("", last),)
        for index, terms in stack.block_inputs.items():
            inputs[index] = tuple((self.relative(path), factor) for path, factor in terms)
        return inputs

    def _changed_before(self, start: int) -> tuple[tuple[str, Border], ...]:
        """Return the module borders before the blocks whose tensors the model
        overwrites in place.
        """
        borders: list[tuple[str, Border]] = []
        for call in self.recording.before(start):
            borders += [(self.relative(call.path), border) for border in call.changed]
        return tuple(borders)

    def _block(self, stack: FoundStack, index: int, name: str) -> Block:
        """Return the declaration of one block, without steps if it cannot be declared."""
        try:
            return self._with_steps(stack, index, name)
        except NotFound as why:
            self.not_offered[f"{name}.{index}.hook_resid_mid"] = str(why)
            return Block(())

    def _with_steps(self, stack: FoundStack, index: int, name: str) -> Block:
        """Return the declaration of one block. If a fact is missing, record which hook point
        becomes unavailable, and why.

        Raises:
            NotFound: its steps are unknown, or a module of them is outside the block.
        """
        if index not in stack.indices:
            self.not_offered[f"{name}.{index}"] = "it does not run with text alone"
            return Block(())
        self.facts.at_layer(index)
        place = stack.indices.index(index)
        call = stack.blocks[place]
        inside = self.recording.between(call.start, call.end)
        norms = with_gated(inside, _norms_of(inside))
        parts = self._parts(stack, place, norms)
        steps, notes = self._steps(parts, call, norms, index)
        self.changed |= dict.fromkeys(_changed(call, inside))
        ends = stack.ends[place] if stack.ends else None
        block = Block(tuple(steps), ends, norm=_norm(parts.norm, norms, call))
        for named, note in zip(block.named, notes, strict=True):
            self._leave_out(f"{name}.{index}", named, note)
        return block

    def _steps(
        self, parts: Parts, block: ModuleCall, norms: Norms, index: int
    ) -> tuple[list[Step], list[dict[str, str]]]:
        """Return the steps of a block, and for each the reasons for missing facts by subject."""
        steps: list[Step] = []
        notes: list[dict[str, str]] = []
        firsts: list[int] = []
        for total in parts.sums:
            firsts.append(len(steps))
            for term, part in zip(total.terms, parts.of_sum(total), strict=True):
                note = dict(part.missing)
                declared = self._part(part, norms, block, note, index)
                step = _step(declared, part, total, term, norms, block)
                if len(steps) > firsts[-1]:
                    earlier = parts.reads(term, total)
                    nth_sum = -1 if earlier is None else earlier
                    step = replace(step, parallel_to=firsts[nth_sum])
                steps.append(step)
                notes.append(note)
        return steps, notes

    def _parts(self, stack: FoundStack, place: int, norms: Norms) -> Parts:
        """Return the parts of a block.

        Raises:
            NotFound: the block's output is not the sum of its input and its parts' outputs.
        """
        call = stack.blocks[place]
        output = stack.outputs[place]
        parts: Parts
        if stack.n_streams is None:
            parts = Sums(call, output, self.recording, norms)
        else:
            parts = Mixed(call, output, self.recording, norms, stack.n_streams)
        if not parts.find():
            raise NotFound(
                "what leaves the block is not the sum of its input and its modules' outputs"
            )
        return parts

    def _leave_out(self, prefix: str, named: NamedStep, note: Mapping[str, str]) -> None:
        """Record which hook points of a step are unavailable because of missing facts."""
        own = f"{prefix}.hook_{named.name}_in"
        if named.through_one and not named.leads:
            shared = " and ".join(named.shared)
            self.not_offered[own] = f"one layer reads it for {named.name} and {shared}"
        names = {
            "pre": named.norm,
            "inside": named.name,
            "attn": named.name.replace("mixer", "attn"),
        }
        for fact, why in note.items():
            if fact == "entry":
                self.not_offered[own] = why
                if named.first and named.before.startswith("hook_resid_mid"):
                    self.not_offered[f"{prefix}.{named.before}"] = why
            else:
                part, dot, rest = fact.partition(".")
                self.not_offered[f"{prefix}.{names.get(part, part)}{dot}{rest}"] = why

    def _part(
        self, part: FoundPart, norms: Norms, block: ModuleCall, note: dict[str, str], index: int
    ) -> Part:
        """Return the declaration of a part, as complete as possible; raise `NotFound` if its kind,
        which decides its hook names, is unknown.
        """
        scores = [softmax.scores for softmax in part.softmaxes]
        attends = any(x.ndim in (3, 4) and x.shape[-2] > 1 for x in scores)
        mixes = self._mixes(part)
        if attends and (behind := self._mixer_behind(part)):
            # The addend is not an attention's.
            path = behind.out.path
            part.missing["entry"] = f"{path} and an attention before it read the stream"
            note["entry"] = part.missing["entry"]
            note["attn"] = f"its output is not added to the stream: {path} reads it"
            mixer = self._mixer(behind, norms, block, note)
            return self._with_attention(mixer, part, norms, block, note)
        try:
            if attends and mixes is not False:
                return self._attention(part, norms, block, index)
            if mixes:
                return self._mixer(part, norms, block, note)
            return self._mixture(part, block) or self._mlp(part, norms, block)
        except NotFound as why:
            if not attends or mixes is False:
                note["inside"] = str(why)
                return self._mixer(part, norms, block, note, "mlp")
            note["attn"] = str(why)
            mixer = self._mixer(part, norms, block, note, "attn")
            return self._with_attention(mixer, part, norms, block, note)

    def _mixes(self, part: FoundPart) -> bool | None:
        """Tell whether a part mixes positions; None if unknown."""
        positions = 0 if self.recording.turned(part.added.live) else 1
        return mixes_positions(part, positions, partial(rerun, self.model, self.inputs, positions))

    def _mixer_behind(self, part: FoundPart) -> FoundPart | None:
        """Return a part's last module (the one whose output is added to the stream) as a part of
        its own, if it mixes positions and contains none of the part's softmaxes; None otherwise.

        In Zamba 2, a mixer reads the attention's output, and only the mixer adds to the stream.
        """
        last = part.out
        if last.is_leaf:
            return None
        if any(last.start < softmax.time < last.end for softmax in part.softmaxes):
            return None
        alone = replace(part, owner=last, softmaxes=[])
        return alone if self._mixes(alone) else None

    def _attention(self, part: FoundPart, norms: Norms, block: ModuleCall, index: int) -> Attention:
        # Copy the dict to avoid a reference cycle that would keep the recording alive.
        attention = FoundAttention(part, self.recording, norms, block, dict(self.attentions))
        declared = with_values(attention, attention.declare())
        declared = self.facts.add_attention(attention, declared)
        modules = auxiliary_modules(attention, declared, norms)
        attention.declared = replace(declared, auxiliary_modules=modules)
        if attention.keys_of is None:
            self.attentions[index] = attention
        return attention.declared

    def _with_attention(
        self, mixer: Mixer, part: FoundPart, norms: Norms, block: ModuleCall, note: dict[str, str]
    ) -> Mixer:
        """Return a mixer with the attention inside it, as far as known: in full, or only the
        query-key product.
        """
        inside = self._around_softmax(part, block)
        if inside is None:
            return mixer
        try:
            declared, unknown = self._inner(inside, norms, block)
        except NotFound as why:
            unknown = str(why)
            try:
                declared = self._kernel(inside, norms, block)
            except NotFound as not_seen:
                note["attn"] += f"; {not_seen}"
                return mixer
        why_not = note.pop("attn")
        if mixer.plays != "attn":
            note["hook_attn_out"] = why_not
            why_not = unknown
        paths = {letter: getattr(declared, letter).path for letter in "qkv"}
        paths["z"] = declared.o
        for letter, path in paths.items():
            if not path:
                note[f"attn.hook_{letter}"] = why_not
        return replace(mixer, modules=(*mixer.modules, declared))

    def _around_softmax(self, part: FoundPart, block: ModuleCall) -> FoundPart | None:
        """Return, as a part, the module that computes the part's only softmax over scores; None if
        there is none.
        """
        softmaxes = of_attention([s for s in part.softmaxes if s.scores.ndim == 4])
        softmaxes = [s for s in softmaxes if s.scores.shape[2] == self.recording.pos]
        if len(softmaxes) != 1:
            return None
        softmax = softmaxes[0]
        calls = self.recording.of(softmax.path)
        around = [call for call in calls if call.start < softmax.time < call.end]
        if len(around) != 1:
            return None
        if not is_inside(around[0].path, block.path):
            return None
        return replace(part, owner=around[0], softmaxes=softmaxes, pre=None)

    def _kernel(self, part: FoundPart, norms: Norms, block: ModuleCall) -> Attention:
        """Return the query-key product of an attention inside a mixer."""
        attention = FoundAttention(part, self.recording, norms, block, {}, kernel_alone=True)
        return self.facts.add_attention(attention, attention.kernel())

    def _inner(self, part: FoundPart, norms: Norms, block: ModuleCall) -> tuple[Attention, str]:
        """Return an attention inside a mixer, and why its values and output projection are unknown;
        empty if they are known.

        Raises:
            NotFound: the projections of queries and keys are unknown.
        """
        assert part.owner is not None
        inside = self.recording.inside(part.owner)
        after = part.softmaxes[0].time
        linear = [call for call in inside if call.is_linear and call.start > after]
        if not linear:
            raise NotFound("no linear layer reads what it makes")
        part = replace(part, producer=linear[-1])
        attention = FoundAttention(part, self.recording, norms, block, {})
        unknown = ""
        try:
            declared = with_values(attention, attention.declare())
        except NotFound as why:
            unknown = str(why)
            declared = attention.without_values()
        declared = self.facts.add_attention(attention, declared)
        if unknown and declared.own("attn_scale", None) is None:
            raise NotFound("scores are not the product of what these projections make")
        modules = auxiliary_modules(attention, declared, norms)
        return replace(declared, auxiliary_modules=modules), unknown

    def _mixture(self, part: FoundPart, block: ModuleCall) -> MoE | None:
        """Return the declaration of a mixture of experts; None if the part is not one."""
        found_in = part, self.recording, block.path
        mixture: FoundMixture | FoundExpertModules
        if experts := experts_of(part, self.recording):
            mixture = FoundMixture(*found_in, experts, self.config)
        elif modules := list_of_experts(part, self.recording):
            mixture = FoundExpertModules(*found_in, modules, self.config)
        else:
            return None
        declared = mixture.declare()
        self.facts.add(
            num_experts=mixture.num_experts,
            experts_per_token=mixture.experts_per_token,
            d_expert=mixture.d_expert,
            gated_mlp=mixture.gated,
            d_shared_expert=mixture.d_shared,
        )
        if mixture.act_fn:
            self.facts.add(act_fn=act_fn_name(mixture.act_fn))
        return declared

    def _mlp(self, part: FoundPart, norms: Norms, block: ModuleCall) -> Part:
        functions = self.facts.counts.get("act_fn", ())
        usual = next((str(function) for function in functions if function), None)
        mlp = FoundMLP(part, block.path, self.config, norms, block.named_tensors, usual)
        declared = mlp.declare()
        self.facts.add(d_mlp=mlp.d_mlp)
        if mlp.act_fn or not usual:
            self.facts.add(act_fn=act_fn_name(mlp.act_fn))
        return declared

    def _mixer(
        self,
        part: FoundPart,
        norms: Norms,
        block: ModuleCall,
        note: dict[str, str],
        plays: Literal["mixer", "attn", "mlp"] = "mixer",
    ) -> Mixer:
        """Return the declaration of a part with only its input and output."""
        owner = part.owner or part.producer
        path = relative(owner.path, block.path)
        if plays != "mixer":
            return Mixer(path, plays)
        modules = modules_of(owner, self.recording, norms)
        has_inside = bool(modules or functions_of(owner.module))
        if not has_inside and any(True for _ in owner.module.parameters()):
            note["inside"] = (
                "it mixes positions without a softmax, and has no modules that run once"
            )
        return Mixer(path, modules=modules)


def _norms_of(calls: Sequence[ModuleCall]) -> dict[ModuleCall, NormKind]:
    """Return the calls that are norms, with what they compute."""
    norms = {}
    for call in calls:
        if kind := norm_kind(call):
            norms[call] = kind
    return norms


def _ends_in_norm(block: Block) -> bool:
    """Tell whether a block's last step is a norm on the stream."""
    return bool(block.steps and block.steps[-1].stream_norm)


def _stream_view(stack: FoundStack) -> View | None:
    """Return the view of a stack's stream, if it is not ``[batch, pos, d_model]``."""
    if stack.positions_first:
        return PositionsFirst()
    if stack.n_streams is None:
        return None
    return SeveralStreams(stack.n_streams)


def _step(
    declared: Part, part: FoundPart, total: Sum, term: Addend, norms: Norms, block: ModuleCall
) -> Step:
    """Return the residual step of a part."""
    to_block = partial(relative, base=block.path)
    stream_norm = None
    if term is total.terms[-1]:
        stream_norm = _norm(total.norm, norms, block)
    if part.pre and stream_norm:
        raise NotFound(
            f"{part.pre.path} norms what {part.out.path} reads, and {stream_norm.path} the stream"
            " behind it: one step has one of them"
        )
    chain: tuple[Norm | Affine, ...] = term.transform
    if post := _inside(part.post, block):
        chain = (post, *chain)
    sum_module = None if total.sum_module is None else to_block(total.sum_module.path)
    out = to_block(part.out.path)
    return Step(
        declared,
        pre=_inside(part.pre, block),
        result_chain=chain,
        stream_norm=stream_norm,
        residual_transform=total.residual_transform if term is total.terms[0] else (),
        residual_sum_module=sum_module,
        mix=total.mix and replace(total.mix, path=to_block(total.mix.path)),
        out=None if out == declared.path else out,
        out_element=part.added.key or 0,
        entry=_entry(declared, part, block),
    )


def _entry(declared: Part, part: FoundPart, block: ModuleCall) -> str | None:
    """Return the path of the module through which a part reads the stream, if that is not the
    part's own module; empty if there is none.
    """
    entry = part.entry
    if isinstance(declared, Mixer):
        if "entry" in part.missing:
            return ""
        entry = None if part.owner else part.reader
    if entry is None:
        return None
    return relative(entry.path, block.path)


def _changed(block: ModuleCall, inside: Sequence[ModuleCall]) -> tuple[tuple[str, Border], ...]:
    """Return the borders inside a block whose tensors the model overwrites in place."""
    borders: list[tuple[str, Border]] = []
    for call in (block, *inside):
        if is_inside(call.path, block.path):
            path = relative(call.path, block.path)
            borders += [(path, border) for border in call.changed]
    return tuple(borders)


def _norm(norm: ModuleCall | None, norms: Norms, block: ModuleCall) -> Norm | None:
    if norm is None:
        return None
    return Norm(relative(norm.path, block.path), norms[norm])


def _inside(norm: Norm | None, block: ModuleCall) -> Norm | None:
    return norm and Norm(relative(norm.path, block.path), norm.kind)


# --------------------------------------------------------------------------------------------------
# An inferred declaration as the source of an adapter's file.
# --------------------------------------------------------------------------------------------------


#: Norm kinds that have a name.
_KINDS = {
    LAYER_NORM: "LAYER_NORM",
    RMS_NORM: "RMS_NORM",
    GEMMA_NORM: "GEMMA_NORM",
    NO_NORM: "NO_NORM",
    OPAQUE_NORM: "OPAQUE_NORM",
}
#: The modules from which a declaration's names are imported.
_MODULES = {
    "adapters.architecture": (
        "Architecture",
        "Block",
        "Embedding",
        "Head",
        "Mix",
        "Readout",
        "Stack",
        "Step",
    ),
    "adapters.attention": ("AddedOutput", "Attention", "Gate", "Projection", "SinkGate"),
    "adapters.feed_forward": ("MLP", "MoE"),
    "adapters.mixers": ("Mixer",),
    "adapters.norms": ("Norm", "NormKind", *_KINDS.values()),
    "adapters.registry": ("register",),
    "adapters.views": (
        "Affine",
        "AlibiScores",
        "Composed",
        "FilledScores",
        "Heads",
        "HeadsOfBatch",
        "MaskedScores",
        "OneHead",
        "PositionsFirst",
        "SeveralStreams",
        "SinkScores",
        "columns",
        "gathered",
        "interleaved",
    ),
}
_WIDTH = 110


def source_of(architecture: Architecture, class_name: str, model_name: str) -> str:
    """Return the source file of an adapter that declares this architecture.

    The source is a first draft for this configuration: it contains the model's sizes as numbers. A
    family's adapter should read them from the configuration, and declare only the differences from
    its nearest relative.

    Args:
        architecture: the architecture.
        class_name: the class for which it is registered, usually the family's
            ``...PreTrainedModel``.
        model_name: the model's name, for the first line.
    """
    constants = _shared_parts(architecture)
    body = _written(architecture, 4, constants)
    lines = [f"{name} = {_written(part, 0, {})}" for part, name in constants.items()]
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", class_name.removesuffix("PreTrainedModel"))
    declared = [
        f'@register("{class_name}")',
        f"def {words.lower()}(config: PreTrainedConfig) -> Architecture:",
        f"    return {body}",
    ]
    text = "\n".join([*lines, "", "", *declared]) + "\n"
    imports = []
    for module, names in _MODULES.items():
        used = [name for name in names if re.search(rf"\b{name}\b", text)]
        if used:
            imports.append(f"from {module} import {', '.join(used)}")
    head = [
        f'"""{model_name}."""',
        "",
        "from __future__ import annotations",
        "",
        "from transformers import PreTrainedConfig",
    ]
    return "\n".join([*head, "", *imports, "", text])


def _shared_parts(architecture: Architecture) -> dict[Any, str]:
    """Return the parts that occur in several kinds of blocks, with a name for each."""
    counts: Counter[Any] = Counter()
    for stack in architecture.stacks:
        for block in {id(block): block for block in stack.every_block}.values():
            counts.update({step.part for step in block.steps if _is_hashable(step.part)})
    shared = [part for part, count in counts.items() if count > 1]
    totals = Counter(type(part).__name__ for part in shared)
    numbers: Counter[str] = Counter()
    names = {}
    for part in shared:
        kind = type(part).__name__
        numbers[kind] += 1
        names[part] = kind.upper()
        if totals[kind] > 1:
            names[part] += f"_{numbers[kind]}"
    return names


def _is_hashable(value: object) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def _written(value: Any, indent: int, constants: Mapping[Any, str]) -> str:
    """Return a value as Python source, with long lines wrapped."""
    if _is_hashable(value) and value in constants:
        return constants[value]
    if isinstance(value, NormKind) and value in _KINDS:
        return _KINDS[value]
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if value is None or isinstance(value, bool | int | float):
        is_finite = value is None or math.isfinite(value)
        return repr(value) if is_finite else f'float("{value}")'
    if isinstance(value, list):
        return f"[{', '.join(_written(item, 0, {}) for item in value)}]"
    write = partial(_written, indent=indent + 4, constants=constants)
    if isinstance(value, Mapping):
        pairs = [f"{_written(key, 0, {})}: {write(item)}" for key, item in value.items()]
        return _joined("{", pairs, "}", indent)
    if isinstance(value, tuple):
        items = list(map(write, value))
        if len(items) == 1:
            items[0] += ","
        return _joined("(", items, ")", indent)
    return _joined(f"{type(value).__name__}(", _arguments(value, write), ")", indent)


def _arguments(value: Any, write: Callable[[Any], str]) -> list[str]:
    """Return the arguments of the call that makes a value."""
    if not is_dataclass(value):
        names = inspect.signature(type(value)).parameters
        return [write(getattr(value, name)) for name in names]
    arguments = []
    for each_field in fields(value):
        if argument := _argument(each_field, getattr(value, each_field.name), write):
            arguments.append(argument)
    return arguments


def _argument(field: Field[Any], value: Any, write: Callable[[Any], str]) -> str:
    """Return a field as an argument; "" if it has its default."""
    default = field.default
    if field.default_factory is not MISSING:
        default = field.default_factory()
    if default is MISSING and field.name in ("name", "path", "kind", "part", "steps"):
        return write(value)
    if value == default:
        return ""
    return f"{field.name}={write(value)}"


def _joined(start: str, items: Sequence[str], end: str, indent: int) -> str:
    """Return items in brackets, one per line if they do not fit on one line."""
    line = f"{start}{', '.join(items)}{end}"
    if len(line) + indent <= _WIDTH and "\n" not in line:
        return line
    pad = " " * indent
    lines = [f"{pad}    {item.rstrip(',')},\n" for item in items]
    return f"{start}\n{''.join(lines)}{pad}{end}"
