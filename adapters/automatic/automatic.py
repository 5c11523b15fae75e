"""Inference: from one recorded run of an unknown model to its `Architecture`, and to what it cannot say.

**In**: a Hugging Face model with weights, and what it takes (tokens are made up; images and sound may be given).

**Out**: `Inferred`: a declaration of the same nouns that families write by hand, and for each hook point that it does
not have the reason. `source_of` writes the declaration as the source of an adapter.

**How**, in order:

1. The model, or a probe copy of it with random numbers where a constant would tell nothing, is run once with everything
   that passes the borders of its modules recorded, graph included (`adapters.observe`).
2. The lists of blocks are those whose output i is input i + 1 (`blocks.py`); a residual stream runs through them.
3. Of each block, what is added to the stream is explained as a sum of recorded outputs, each with a factor or a
   parameter (`stream.py`); each addend is a part, with the norm it reads and writes through (`parts.py`).
4. Norms are found by trying: a module is one if `NormKind.of` makes what the module makes (`norms.py`).
5. A part is an attention if one softmax ran in it: queries, keys and values are the columns that reach each head's
   scores and `z`, by gradient (`attention.py`). It is an MLP if its neurons are reached one by one, or a mixture
   (`feed_forward.py`); else a `Mixer`, of which the ends alone are known.
6. What the layers say of all of the model (rotation, scale, cap, windows) is counted: `facts.py`.
7. The ends: embeddings, final norm, heads, readout (`ends.py`).

Nothing goes by a name: names are read where the configuration says a number that a run cannot show, and then the run
has to agree.

**It refuses** (`NotFound`) a model in which no list of blocks with a stream is found. What is found of the rest is
offered, and what is not is noted by name. Nothing of the model is changed.

**It does not prove**: whatever is inferred goes through `adapters.proofs.proofs.Proof` on the live model before it is
offered. **It does not know** of hooks, bridges or families.
"""

from __future__ import annotations

import inspect
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass, replace
from functools import partial
from typing import Any, Literal

from torch import nn

from adapters.architecture import Architecture, Block, Embedding, Head, NamedStep, Part, Readout, Stack, Step, Terms
from adapters.attention import Attention
from adapters.automatic.attention import FoundAttention, auxiliary_modules, of_attention, with_values
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
from adapters.automatic.feed_forward import FoundExpertModules, FoundMixture, FoundMLP, experts_of, list_of_experts
from adapters.automatic.norms import norm_kind, relative, with_gated
from adapters.automatic.parts import Addend, FoundPart, Norms, Sum, mixes_positions, modules_of, rerun
from adapters.automatic.stream import Mixed, Sums, collapse, first_of, with_streams
from adapters.config import act_fn_name, config_of
from adapters.feed_forward import MoE
from adapters.inputs import CannotBeMade, Given, sample_inputs, takes, text_places
from adapters.mixers import Mixer, functions_of
from adapters.norms import GEMMA_NORM, LAYER_NORM, NO_NORM, OPAQUE_NORM, RMS_NORM, Norm, NormKind
from adapters.observe.observe import (
    ModuleCall,
    NotFound,
    Recording,
    Softmax,
    evaluating,
    outside_of_modes,
    record,
)
from adapters.observe.probe_copy import model_or_probe_copy
from adapters.points import Border, base_path, core_path, is_inside, join
from adapters.views import PositionsFirst, SeveralStreams


@dataclass(frozen=True)
class Inferred:
    """What was inferred for a model.

    Attributes:
        architecture: the declaration.
        not_offered: hook points, or what their names begin with, that it does not have, and why.
    """

    architecture: Architecture
    not_offered: Mapping[str, str] = field(default_factory=dict)


def infer(model: nn.Module, inputs: Given | None = None) -> Inferred:
    """Infers what plays which part in a model, from one run of it on a few tokens. Nothing of it is changed.

    Args:
        model: a Hugging Face model with weights.
        inputs: images or sound that it needs, by the names of its own arguments; None: made up.

    Raises:
        NotFound: no list of blocks that a residual stream runs through was found; the message says why.

    Example:
        >>> from transformers import OlmoConfig, OlmoForCausalLM
        >>> from adapters.automatic.automatic import infer
        >>> sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
        >>> infer(OlmoForCausalLM(OlmoConfig(**sizes, vocab_size=61))).architecture.stack.path
        'layers'
    """
    try:
        # Wherever it is asked for: it goes by gradients.
        with outside_of_modes(model):
            refuse_two_towers(model)
            with model_or_probe_copy(model) as subject, evaluating(subject):
                given = sample_inputs(subject, inputs)
                return _Inference(subject, given, record(subject, given)).run()
    except CannotBeMade as why:
        raise NotFound(str(why)) from None


class _Inference:
    def __init__(self, model: nn.Module, given: Given, recording: Recording) -> None:
        self.model, self.given, self.recording = model, given, recording
        self.base, self.core = base_path(model), core_path(model)
        #: A path of the model as one from its base model.
        self.relative = partial(relative, base=self.base)
        self.config = config_of(model).get_text_config()
        self.not_offered: dict[str, str] = {}
        self.unknown: dict[str, str] = {}
        self.facts = Facts(model, recording)
        #: The attentions of the list of blocks that is being looked at which make their own keys, by block.
        self.attentions: dict[int, FoundAttention] = {}
        #: What the model writes over in the blocks of the list that is being looked at.
        self.changed: dict[tuple[str, Border], None] = {}
        #: What its first blocks read in place of tokens.
        self.main = takes(model.get_submodule(self.core)).main

    def run(self) -> Inferred:
        stacks = self._lists_of_blocks()
        (found, *others) = stacks
        number_norms(stacks, self.recording)
        missing: dict[str, str] = {}
        embedding = self._embedding(found, missing)
        self.not_offered |= missing
        if missing:
            self.unknown["embedding"] = "; ".join(missing.values())
        first_stack, last_norm = self._stack(found, "encoder" if others else "blocks")
        unembed = find_unembedding(self.model, self.recording, stacks[-1].blocks[-1].end)
        pooled = self._pooled(found, last_norm) if self.main is not None and not others else None
        if pooled is not None:
            unembed = pooled.unembed
            if pooled.norm is not None:
                norm = Norm(self.relative(pooled.norm.path), pooled.norm.kind)
                first_stack = replace(first_stack, final_norm=norm, collapse=pooled.positions)
        declared = [first_stack]
        for other in others:
            self.facts.freeze_first_stack()
            decoder, last_norm = self._decoder(other, found)
            declared.append(decoder)
        values = self.facts.values(found, unembed)
        declared[0] = replace(
            declared[0],
            embedding=embedding.moved(self.relative),
            changed_in_place=(*declared[0].changed_in_place, *self._changed_before(found.blocks[0].start)),
        )
        for i, each in enumerate(stacks):
            if each.positions_first:
                tokens = declared[i].embedding.tokens
                begins = bool(tokens) and self._is_positions_first(join(self.base, tokens))
                ends = each is stacks[-1] and unembed is not None and self._is_positions_first(unembed.path)
                declared[i] = replace(declared[i], stream_view=PositionsFirst(begins, ends))
        heads: tuple[Head, ...] = ()
        readout = Readout()
        if pooled is not None:
            path = "" if unembed is None else relative(unembed.path, self.core)
            readout = Readout(path, pooled=None if pooled.norm else pooled.positions)
        elif unembed is not None:
            declared[-1], heads, readout = self._logits(stacks[-1], declared[-1], last_norm, unembed)
        architecture = Architecture(
            stacks=tuple(all_sized(stack, values) for stack in declared),
            readout=readout,
            heads=heads,
            no_layer_runs=why_no_layers(found, bool(others), self.main),
            config_values=values,
            unknown=dict(self.unknown),
        )
        return Inferred(architecture, dict(self.not_offered))

    def _is_positions_first(self, path: str) -> bool:
        """Whether a module outside of the blocks puts out positions before the batch."""
        calls = self.recording.of(path)
        return bool(calls) and self.recording.turned(calls[0].returned.value)

    def _lists_of_blocks(self) -> list[FoundStack]:
        """The lists of blocks that a stream runs through: one, or an encoder's and a decoder's.

        Raises:
            NotFound: there are none, or several that are not these.
        """
        stacks, reason = find_stacks(self.model, self.recording)
        if not stacks and (cycles := find_cycles(self.model, self.recording)):
            stacks = [cycles]
        more_than_text = any(x.is_floating_point() for x in self.given.values())
        if more_than_text and (self.main is None or ("decoder_input_ids" in self.given and len(stacks) != 2)):
            # Not towers of images, nor an encoder of another kind than text's: the decoder alone.
            stacks = [each for each in stacks if each.stream.value.shape[1] in self.recording.lengths]
        if not stacks:
            raise NotFound(reason or "no list of blocks is run through by a stream of the tokens' positions")
        if self.main is not None and len(stacks) == 1 and stacks[0].stream.value.shape[1] in self.recording.lengths:
            self.main = None
        if self.recording.pos < 0:  # it was not given them as tokens
            self.recording.pos = stacks[0].stream.value.shape[1]
        two = len(stacks) == 2 and bool(getattr(config_of(self.model), "is_encoder_decoder", False))
        if len(stacks) > 1 and not two:
            raise NotFound(f"it has {len(stacks)} lists of blocks ({', '.join(stack.path for stack in stacks)})")
        return [with_streams(each, self.recording) for each in stacks]

    def _embedding(self, found: FoundStack, missing: dict[str, str]) -> Embedding:
        """What the first stream begins with; what cannot be found of it is noted, by hook name.

        Raises:
            NotFound: the model reads tokens, and no embedding of them ran.
        """
        if self.main is not None:
            return find_patches(self.recording, first_of(found))
        text = text_places(self.model, self.given, found.blocks[0].module, found.stream.value)
        embedding = find_embedding(self.model, self.recording, first_of(found), missing, text=text)
        if embedding is None:
            raise NotFound("no token embedding ran")
        return taken_as(embedding, self.model, self.given, first_of(found))

    def _logits(
        self, found: FoundStack, stack: Stack, last_norm: Norm | None, unembed: ModuleCall
    ) -> tuple[Stack, tuple[Head, ...], Readout]:
        """What stands between the last stream and the logits, and the list of blocks with its final norm."""
        last, _ = collapse(self.recording, found)
        on_stream = bool(stack.block.steps and stack.block.steps[-1].stream_norm)
        if found.positions_first and unembed.entered and not self.recording.turned(unembed.entered.value):
            last = last.transposed()
        normed, function = what_is_read(self.recording, unembed, last.value, last_norm, on_stream)
        factor = None if unembed.entered is None else factor_between(normed, unembed.entered.value)
        between = factor is None and unembed.entered
        head = find_head(self.recording, self.core, unembed, found.blocks[-1].end) if between else None
        readout, unknown = find_readout(self.model, self.core, self.given, unembed, 1.0 if head else factor)
        if unknown:
            self.unknown["readout"] = self.not_offered["logits of the stream"] = unknown
        else:
            self.not_offered.pop("ln_final", None)  # it is known what the output layer reads
        return stack if function is None else replace(stack, final_norm=function), (head,) if head else (), readout

    def _pooled(self, found: FoundStack, final: Norm | None) -> Pool | None:
        """The one vector of each image, or sound, that the output layer reads behind the last block."""
        (last, _), after = collapse(self.recording, found), found.blocks[-1].end
        pooled = find_pool(self.recording, last, final, after, returned_by(self.model, self.given))
        if pooled is None:
            return None
        self.not_offered.pop("ln_final", None)  # it is known what is read
        return pooled if pooled.unembed else None  # else the model returns it besides the last stream

    def _stack(self, found: FoundStack, name: str) -> tuple[Stack, Norm | None]:
        """A list of blocks, and its final norm with its path from the model."""
        self.facts.table = None
        self.changed.clear()
        self.attentions.clear()
        for call in found.blocks:
            number_calls(call, self.recording)
        blocks = [self._block(found, index, name) for index in range(found.length)]
        blocks = all_rotated(alike(blocks, found.members, self.not_offered, name))
        usual = Counter(map(repr, blocks)).most_common(1)[0][0]
        block = next(each for each in blocks if repr(each) == usual)
        layers = {i: each for i, each in enumerate(blocks) if each != block}
        last, path = collapse(self.recording, found)
        final, factor = find_final_norm(self.recording, last, found.blocks[-1].end)
        if final is None and found.positions_first:
            final, factor = find_final_norm(self.recording, last.transposed(), found.blocks[-1].end)
        if final is None and not (blocks[-1].steps and blocks[-1].steps[-1].stream_norm):
            what = "ln_final" if name == "blocks" else f"{name}_final_ln"
            self.not_offered[what] = "no norm that is known reads the last stream"
        several = None if found.n_streams is None else SeveralStreams(found.n_streams)
        stack = Stack(
            self.relative(found.path),
            block,
            layers,
            final_norm=final and Norm(self.relative(final.path), final.kind),
            name=name,
            members=found.members,
            output=(found.outputs[0].key, found.blocks[0].n_left),
            block_inputs=self._block_inputs(found, factor),
            stream_view=PositionsFirst() if found.positions_first else several,
            collapse=path and self.relative(path),
            changed_in_place=tuple((join("*", at), which) for at, which in self.changed),
        )
        return stack, final

    def _decoder(self, found: FoundStack, encoder: FoundStack) -> tuple[Stack, Norm | None]:
        """The list of blocks that runs behind the encoder's, with the embeddings that make its first stream."""
        stack, final = self._stack(found, "decoder")
        missing: dict[str, str] = {}
        embedding = find_embedding(self.model, self.recording, found.blocks[0], missing, encoder.blocks[-1].end)
        if embedding is None:
            self.not_offered["decoder_embed"] = "no token embedding ran between the encoder and the decoder"
            return stack, final
        for what, why in missing.items():
            self.not_offered[f"decoder_{what.removeprefix('hook_')}"] = why
        return replace(stack, embedding=embedding.moved(self.relative)), final

    def _block_inputs(self, found: FoundStack, last: float) -> dict[int, Terms]:
        """What blocks are given that is not what left the one before.

        Args:
            found: the blocks.
            last: what the stream is multiplied with behind the last.
        """
        factors = found.rescaled if last == 1 else {**found.rescaled, found.length: last}
        inputs: dict[int, Terms] = {i: (("", factor),) for i, factor in factors.items()}
        summed = {i: tuple((self.relative(path), w) for path, w in each) for i, each in found.block_inputs.items()}
        return inputs | summed

    def _changed_before(self, start: int) -> tuple[tuple[str, Border], ...]:
        """What the model writes over, at the borders of the modules that run before the blocks."""
        before = [call for call in self.recording.calls if -1 < call.end <= start and call.changed]
        return tuple((self.relative(call.path), which) for call in before for which in call.changed)

    def _block(self, stack: FoundStack, index: int, name: str) -> Block:
        """One block, without steps where it cannot be declared."""
        try:
            return self._with_steps(stack, index, name)
        except NotFound as why:
            self.not_offered[f"{name}.{index}.hook_resid_mid"] = str(why)
            return Block(())

    def _with_steps(self, stack: FoundStack, index: int, name: str) -> Block:
        """One block. What is not found out about it is noted by the name of the hook point that it costs.

        Raises:
            NotFound: what its steps are is not known, or something of them stands outside of it.
        """
        if index not in stack.indices:
            self.not_offered[f"{name}.{index}"] = "it does not run with text alone"
            return Block(())
        self.facts.at_layer(index)
        place = stack.indices.index(index)
        call = stack.blocks[place]
        inside = self.recording.between(call.start, call.end)
        norms = with_gated(inside, {each: kind for each in inside if (kind := norm_kind(each)) is not None})
        several, prefix, given = stack.n_streams, f"{name}.{index}", (call, stack.outputs[place], self.recording, norms)
        found = Sums(*given) if several is None else Mixed(*given, several)
        if not found.find():
            raise NotFound("what leaves the block is not what enters it and what its modules put out")
        steps: list[Step] = []
        notes: list[dict[str, str]] = []
        firsts: list[int] = []
        for total in found.sums:
            firsts.append(len(steps))
            for nth, (term, part) in enumerate(zip(total.terms, found.of_sum(total), strict=True)):
                note, earlier = dict(part.missing), found.reads(term, total)
                parallel_to = firsts[-1 if earlier is None else earlier] if nth else None
                step = _step(self._part(part, norms, call, note, index), part, total, term, norms, call)
                steps.append(replace(step, parallel_to=parallel_to))
                notes.append(note)
        ends = stack.ends[place] if stack.ends else None
        self.changed |= dict.fromkeys(_changed(call, inside))
        block = Block(tuple(steps), ends, norm=_norm(found.norm, norms, call))
        for named, note in zip(block.named, notes, strict=True):
            self._leave_out(prefix, named, note)
        return block

    def _leave_out(self, prefix: str, named: NamedStep, note: Mapping[str, str]) -> None:
        """Notes the hook points of a step that what was not found out about it costs."""
        own = f"{prefix}.hook_{named.name}_in"
        if named.through_one and not named.leads:
            self.not_offered[own] = f"one layer reads it for {named.name} and {' and '.join(named.shared)}"
        for what, why in note.items():
            if what == "entry":
                self.not_offered[own] = why
                if named.first and named.before.startswith("hook_resid_mid"):
                    self.not_offered[f"{prefix}.{named.before}"] = why
            else:
                of = {"pre": named.norm, "inside": named.name, "attn": named.name.replace("mixer", "attn")}
                first, dot, rest = what.partition(".")
                self.not_offered[f"{prefix}.{of.get(first, first)}{dot}{rest}"] = why

    def _part(self, part: FoundPart, norms: Norms, block: ModuleCall, note: dict[str, str], index: int) -> Part:
        """What a part is, as far as it can be said; `NotFound` where nothing says which names it has."""
        attends = [s for s in part.softmaxes if s.scores.ndim in (3, 4) and s.scores.shape[-2] > 1]
        mixes = self._mixes(part)
        if behind := self._mixer_behind(part, attends):  # what it adds is no attention's
            part.missing["entry"] = note["entry"] = f"{behind.out.path} and an attention before it read the stream"
            note["attn"] = f"what it makes is not added to the stream: {behind.out.path} reads it"
            return self._with_attention(self._mixer(behind, norms, block, note), part, norms, block, note)
        try:
            if attends and mixes is not False:
                return self._attention(part, norms, block, index)
            if mixes:
                return self._mixer(part, norms, block, note)
            if experts := experts_of(part, self.recording):
                return self._mixture(FoundMixture(part, self.recording, block.path, experts, self.config))
            if modules := list_of_experts(part, self.recording):
                return self._mixture(FoundExpertModules(part, self.recording, block.path, modules, self.config))
            return self._mlp(part, norms, block)
        except NotFound as why:
            if not attends or mixes is False:
                note["inside"] = str(why)
                return self._mixer(part, norms, block, note, "mlp")
            note["attn"] = str(why)
            return self._with_attention(self._mixer(part, norms, block, note, "attn"), part, norms, block, note)

    def _mixes(self, part: FoundPart) -> bool | None:
        """Whether a part mixes positions; None where it cannot be told."""
        positions = 0 if self.recording.turned(part.added.live) else 1
        return mixes_positions(part, positions, partial(rerun, self.model, self.given, positions))

    def _mixer_behind(self, part: FoundPart, attends: Sequence[Softmax]) -> FoundPart | None:
        """What adds to the stream, where that mixes positions itself, behind all softmaxes of its part (Zamba 2)."""
        last = part.out
        if not attends or last.is_leaf or any(last.start < each.time < last.end for each in attends):
            return None
        alone = replace(part, owner=last, softmaxes=[])
        return alone if self._mixes(alone) else None

    def _attention(self, part: FoundPart, norms: Norms, block: ModuleCall, index: int) -> Attention:
        # A copy: in a circle with those that hold it, the whole run would stay there.
        found = FoundAttention(part, self.recording, norms, block, dict(self.attentions))
        declared = self.facts.add_attention(found, with_values(found, found.declare()))
        found.declared = replace(declared, auxiliary_modules=auxiliary_modules(found, declared, norms))
        if found.keys_of is None:
            self.attentions[index] = found
        return found.declared

    def _with_attention(
        self, mixer: Mixer, part: FoundPart, norms: Norms, block: ModuleCall, note: dict[str, str]
    ) -> Mixer:
        """A mixer with the attention inside of it, as far as that is known: in full, or where queries and keys meet."""
        softmaxes = of_attention([s for s in part.softmaxes if s.scores.ndim == 4])
        softmaxes = [s for s in softmaxes if s.scores.shape[2] == self.recording.pos]
        around = [c for s in softmaxes for c in self.recording.of(s.path) if c.start < s.time < c.end]
        if len(softmaxes) != 1 or len(around) != 1 or not is_inside(around[0].path, block.path):
            return mixer
        inside = replace(part, owner=around[0], softmaxes=softmaxes, pre=None)
        try:
            declared, unknown = self._inner(inside, norms, block)
        except NotFound as why:
            found = FoundAttention(inside, self.recording, norms, block, {}, kernel_alone=True)
            try:
                declared, unknown = self.facts.add_attention(found, found.kernel()), str(why)
            except NotFound as unseen:
                note["attn"] += f"; {unseen}"
                return mixer
        why_not = note.pop("attn")
        if mixer.plays != "attn":
            note["hook_attn_out"] = why_not
        of = {letter: getattr(declared, letter).path for letter in "qkv"} | {"z": declared.o}
        why_not = why_not if mixer.plays == "attn" else unknown
        note |= {f"attn.hook_{letter}": why_not for letter, path in of.items() if not path}
        return replace(mixer, modules=(*mixer.modules, declared))

    def _inner(self, part: FoundPart, norms: Norms, block: ModuleCall) -> tuple[Attention, str]:
        """An attention in a mixer; and why its values, and what reads ``pattern @ v``, are not known, if they are not.

        Raises:
            NotFound: what makes queries and keys is not known.
        """
        owner, after = part.owner, part.softmaxes[0].time
        assert owner is not None
        last = [c for c in self.recording.calls if owner.holds(c) and c.is_linear and c.start > after]
        if not last:
            raise NotFound("no linear layer reads what it makes")
        found, unknown = FoundAttention(replace(part, producer=last[-1]), self.recording, norms, block, {}), ""
        try:
            declared = with_values(found, found.declare())
        except NotFound as why:
            declared, unknown = found.without_values(), str(why)
        declared = self.facts.add_attention(found, declared)
        if unknown and "attn_scale" not in {k for k, v in declared.config_values.items() if v is not None}:
            raise NotFound("scores are not the product of what these projections make")
        return replace(declared, auxiliary_modules=auxiliary_modules(found, declared, norms)), unknown

    def _mixture(self, found: FoundMixture | FoundExpertModules) -> MoE:
        declared = found.declare()
        self.facts.add(
            num_experts=found.num_experts,
            experts_per_token=found.experts_per_token,
            d_expert=found.d_expert,
            gated_mlp=found.gated,
            d_shared_expert=found.d_shared,
        )
        if found.act_fn:
            self.facts.add(act_fn=act_fn_name(found.act_fn))
        return declared

    def _mlp(self, part: FoundPart, norms: Norms, block: ModuleCall) -> Part:
        said = next((str(each) for each in self.facts.counts.get("act_fn", ()) if each), None)
        found = FoundMLP(part, block.path, self.config, norms, block.given, said)
        declared = found.declare()
        self.facts.add(d_mlp=found.d_mlp)
        if found.act_fn or not said:
            self.facts.add(act_fn=act_fn_name(found.act_fn))
        return declared

    def _mixer(
        self,
        part: FoundPart,
        norms: Norms,
        block: ModuleCall,
        note: dict[str, str],
        plays: Literal["mixer", "attn", "mlp"] = "mixer",
    ) -> Mixer:
        """A part of which only what enters and leaves it is said."""
        owner = part.owner or part.producer
        path = relative(owner.path, block.path)
        if plays != "mixer":
            return Mixer(path, plays)
        modules = modules_of(owner, self.recording, norms)
        if not (modules or functions_of(owner.module)) and any(True for _ in owner.module.parameters()):
            note["inside"] = "it mixes positions without a softmax, and has no modules that run once"
        return Mixer(path, modules=modules)


def _step(declared: Part, part: FoundPart, total: Sum, term: Addend, norms: Norms, block: ModuleCall) -> Step:
    """The residual step of a part, which its block computes one after the other."""
    post, at = _inside(part.post, block), partial(relative, base=block.path)
    entry = None if part.entry is None else at(part.entry.path)
    if isinstance(declared, Mixer):
        outside = at(part.reader.path) if part.reader and not part.owner else None
        entry = "" if "entry" in part.missing else outside
    return Step(
        declared,
        pre=_inside(part.pre, block),
        result_chain=(*((post,) if post else ()), *term.transform),
        stream_norm=_norm(total.norm, norms, block) if term is total.terms[-1] else None,
        residual_transform=total.residual_transform if term is total.terms[0] else (),
        residual_sum_module=None if total.sum_module is None else at(total.sum_module.path),
        mix=total.mix and replace(total.mix, path=at(total.mix.path)),
        out=None if at(part.out.path) == declared.path else at(part.out.path),
        out_element=part.added.key or 0,
        entry=entry,
    )


def _changed(block: ModuleCall, inside: Sequence[ModuleCall]) -> tuple[tuple[str, Border], ...]:
    """What the model writes over, at the borders of modules that hook points may stand on: those of the block."""
    own = [call for call in (block, *inside) if is_inside(call.path, block.path)]
    return tuple((relative(call.path, block.path), which) for call in own for which in call.changed)


def _norm(norm: ModuleCall | None, norms: Norms, block: ModuleCall) -> Norm | None:
    return None if norm is None else Norm(relative(norm.path, block.path), norms[norm])


def _inside(norm: Norm | None, block: ModuleCall) -> Norm | None:
    return norm and Norm(relative(norm.path, block.path), norm.kind)


# ----------------------------------------------------------------------------------------------------------------------
# An inferred declaration as the source of an adapter's file.
# ----------------------------------------------------------------------------------------------------------------------


#: The kinds of norms that have a name.
_KINDS = {
    LAYER_NORM: "LAYER_NORM", RMS_NORM: "RMS_NORM", GEMMA_NORM: "GEMMA_NORM", NO_NORM: "NO_NORM",
    OPAQUE_NORM: "OPAQUE_NORM",
}  # fmt: skip
#: Where the names in a declaration come from.
_MODULES = {
    "adapters.architecture": (
        "Architecture", "Block", "Embedding", "Head", "Mix", "Readout", "Stack", "Step",
    ),
    "adapters.attention": ("AddedOutput", "Attention", "Gate", "Projection", "SinkGate"),
    "adapters.feed_forward": ("MLP", "MoE"),
    "adapters.mixers": ("Mixer",),
    "adapters.norms": ("Norm", "NormKind", *_KINDS.values()),
    "adapters.registry": ("register",),
    "adapters.views": (
        "Affine", "AlibiScores", "Composed", "FilledScores", "Heads", "HeadsOfBatch", "MaskedScores", "OneHead",
        "PositionsFirst", "SeveralStreams", "SinkScores", "columns", "gathered", "interleaved",
    ),
}  # fmt: skip
_WIDTH = 110


def source_of(architecture: Architecture, class_name: str, model_name: str) -> str:
    """The file of an adapter that declares this.

    Sizes are written as the model has them: a family's adapter takes them from the configuration, and says only what
    differs from its nearest relative. It is a first draft, and true of this configuration.

    Args:
        architecture: what is declared.
        class_name: the class that it is registered for, usually the family's ``...PreTrainedModel``.
        model_name: for the first line.
    """
    constants = _shared_parts(architecture)
    body = _written(architecture, 4, constants)
    lines = [f"{name} = {_written(part, 0, {})}" for part, name in constants.items()]
    function = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", class_name.removesuffix("PreTrainedModel")).lower()
    declared = [
        f'@register("{class_name}")',
        f"def {function}(config: PreTrainedConfig) -> Architecture:",
        f"    return {body}",
    ]
    text = "\n".join([*lines, "", "", *declared]) + "\n"
    imports = [
        f"from {module} import {', '.join(used)}"
        for module, names in _MODULES.items()
        if (used := [name for name in names if re.search(rf"\b{name}\b", text)])
    ]
    head = [
        f'"""{model_name}."""',
        "",
        "from __future__ import annotations",
        "",
        "from transformers import PreTrainedConfig",
    ]
    return "\n".join([*head, "", *imports, "", text])


def _shared_parts(architecture: Architecture) -> dict[Any, str]:
    """Parts that stand in blocks of several kinds, with a name for each."""
    counts: Counter[Any] = Counter()
    for stack in architecture.stacks:
        for block in {id(block): block for block in stack.every_block}.values():
            counts.update(dict.fromkeys((step.part for step in block.steps if _is_hashable(step.part)), 1))
    shared = [part for part, count in counts.items() if count > 1]
    names = Counter(type(part).__name__ for part in shared)
    seen: Counter[str] = Counter()
    found = {}
    for part in shared:
        kind = type(part).__name__
        seen[kind] += 1
        found[part] = kind.upper() + (f"_{seen[kind]}" if names[kind] > 1 else "")
    return found


def _is_hashable(value: object) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def _written(value: Any, indent: int, constants: Mapping[Any, str]) -> str:
    """A value as Python source, in lines that are not too long."""
    if _is_hashable(value) and value in constants:
        return constants[value]
    if isinstance(value, NormKind) and value in _KINDS:
        return _KINDS[value]
    if is_dataclass(value) and not isinstance(value, type):
        inside = [_argument(field, getattr(value, field.name), indent + 4, constants) for field in fields(value)]
        return _joined(f"{type(value).__name__}(", [each for each in inside if each], ")", indent)
    if isinstance(value, Mapping):
        pairs = (f"{_written(k, 0, {})}: {_written(v, indent + 4, constants)}" for k, v in value.items())
        return _joined("{", pairs, "}", indent)
    if isinstance(value, tuple):
        inside = [_written(each, indent + 4, constants) for each in value]
        return _joined(
            "(", [*inside[:-1], inside[-1] + ("," if len(inside) == 1 else "")] if inside else [], ")", indent
        )
    if isinstance(value, list):
        return f"[{', '.join(_written(each, 0, {}) for each in value)}]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    if value is None or isinstance(value, bool | int | float):
        return repr(value)
    names = inspect.signature(type(value)).parameters
    inner = [_written(getattr(value, name), indent + 4, constants) for name in names]
    return _joined(f"{type(value).__name__}(", inner, ")", indent)


def _argument(field: Field[Any], value: Any, indent: int, constants: Mapping[Any, str]) -> str:
    """A field as an argument; "" where it has its default."""
    default = field.default
    if field.default_factory is not MISSING:
        default = field.default_factory()
    if default is not MISSING and value == default:
        return ""
    text = _written(value, indent, constants)
    return (
        text
        if field.name in ("name", "path", "kind", "part", "steps") and default is MISSING
        else f"{field.name}={text}"
    )


def _joined(start: str, inside: Iterable[str], end: str, indent: int) -> str:
    inside = list(inside)
    line = f"{start}{', '.join(inside)}{end}"
    if len(line) + indent <= _WIDTH and "\n" not in line:
        return line
    pad = " " * (indent + 4)
    return f"{start}\n" + "".join(f"{pad}{each.rstrip(',')},\n" for each in inside) + " " * indent + end
