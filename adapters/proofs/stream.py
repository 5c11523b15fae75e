"""Proofs of the residual stream: it adds up, and every part reads its declared input and returns
what is added to the stream.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from adapters.architecture import Embedding, Head, Stack, mean_at
from adapters.attention import Attention
from adapters.block import Mix
from adapters.building import more_embed_name
from adapters.feed_forward import MLP, MoE
from adapters.inputs import others_of, unchanged
from adapters.norms import Norm
from adapters.observe.observe import CallRecorder, ModuleCall
from adapters.points import call_number, core_path, has_module, is_inside, join, module_path
from adapters.proofs.evidence import (
    Claim,
    Evidence,
    Findings,
    Hook,
    LayerStep,
    StepClaim,
    blocks_of,
    largest,
    like,
)
from adapters.views import SeveralStreams, constant_of, parameters_of, transformed

CHAIN = "what leaves a block as the stream enters the next"
ENDS = "the stream begins with the embeddings and ends in the final norm"
LOGITS = (
    "the logits are what the output layer makes of the final norm, with the declared factors, bias"
    " and soft cap"
)
READS = "each part reads the stream that it is declared to read, through its norm"
RETURNS = "what is added is what the part's last layer makes, through its norm, with its factor"


def prove_streams(evidence: Evidence, findings: Findings) -> None:
    """Check the sums, readers, outputs and ends of all streams.

    Args:
        evidence: any run.
        findings: collects the results.
    """
    findings.claim(CHAIN, READS, RETURNS, ENDS)
    for place in evidence.places():
        if place.named.first:
            _Sum(evidence, findings, place).prove()
        _Reads(evidence, findings, place).prove()
        _Returns(evidence, findings, place).prove()
    for stack in evidence.stacks():
        _Chain(evidence, findings).prove(stack)
    _Beginning(evidence, findings).prove()
    findings.claim(LOGITS)
    _End(evidence, findings).prove()
    _Logits(evidence, findings).prove()


def _zeroed(findings: Findings, x: Tensor, y: Tensor | None) -> Tensor:
    """Return a stream with zeros where the model has zeroed it, between blocks that are not
    modules.
    """
    if y is None or y.shape != x.shape:
        return x
    zero = (y == 0).all(-1)
    if not bool(zero.any()):
        return x
    findings.inconclusive(CHAIN, "the model sets the stream to zero where it sees padding")
    return x.masked_fill(zero[..., None], 0)


class _StreamEnds(Claim):
    """The embeddings before the blocks, and the norms and heads after them."""

    name = ENDS

    @property
    def without_modules(self) -> bool:
        """Tell whether the blocks are not modules; the model may zero the stream between them."""
        return self.architecture.stack.every_block[0].ends is not None

    def passed(self, place: str, path: str, stream: Tensor | None) -> Tensor | None:
        """Check that a module of the base model reads a stream; return its output."""
        self.equal(place, self.input_of(path), stream)
        return self.output_of(path)


# --------------------------------------------------------------------------------------------------
# The first stream: the embeddings, or the embedding of images or sound.
# --------------------------------------------------------------------------------------------------


class _Beginning(_StreamEnds):
    """The first block's input is the declared sum of the embeddings."""

    def prove(self) -> None:
        """Check the first stream of every list of blocks."""
        architecture = self.architecture
        for stack in self.evidence.stacks():
            if stack is not architecture.stack and stack.embedding.tokens:
                self._prove_own_embeddings(stack)
        embedding = architecture.embedding
        first = f"{architecture.stack.name}.0.hook_resid_pre"
        if not embedding.tokens:
            self._prove_patches(embedding, first)
            return
        tokens = self.input_of(embedding.tokens)
        reads = tokens is not None and tokens.equal(self.evidence.text)
        self.holds("embed", reads, "it is not given the tokens")
        stream = self.get(first)
        if stream is not None and architecture.stack.n_streams is not None:
            stream = self._first_of_several(first, stream)
        if embedding.module is None:
            self._prove_sum_at_first_block(embedding, first, stream)
            return
        full = self.get("hook_full_embed")
        if full is not None and self.without_modules:
            full = _zeroed(self.findings, full, stream)
        self.equal(first, stream, full)
        self._prove_sum_of_module(embedding)

    def _first_of_several(self, first: str, streams: Tensor) -> Tensor:
        """Check that all streams start with the same values; return the first stream."""
        view = self.architecture.stack.stream_view
        stream = streams[:, :, :1]
        if isinstance(view, SeveralStreams) and view.first:
            self.inconclusive("what its other streams begin with, which is made of the first")
        else:
            self.equal(f"{first} (all streams alike)", streams, stream.expand_as(streams))
        return stream[:, :, 0]

    def _prove_own_embeddings(self, stack: Stack) -> None:
        """Check the first stream of a stack that has its own tokens."""
        name = stack.name
        norm = stack.embedding.norm
        total = self.get(f"{name}_embed.hook_out")
        positions = self.get(f"{name}_pos_embed.hook_out")
        types = self.get(f"{name}_token_type_embed.hook_out")
        stream = self.get(f"{name}.0.hook_resid_pre")
        has_positions = stack.embedding.positions is not None
        if total is None or stream is None or (positions is not None) != has_positions:
            self.fails(name, "its embeddings or its first block did not run")
            return
        entered = self.input_of(norm.path) if norm else None
        norms_tokens = entered is not None and has_positions and torch.equal(entered, total)
        if norm and norms_tokens:
            total = self.output_of(norm.path)
        for term in (positions, types):
            if total is not None and term is not None:
                total = total + term.to(total)
        if norm and entered is not None and not norms_tokens:
            total = self.passed(f"{name}_embed.ln", norm.path, total)
        self.equal(name, stream, total, largest(stream))

    def _prove_sum_at_first_block(
        self, embedding: Embedding, first: str, stream: Tensor | None
    ) -> None:
        """Check that the first block's input is the sum of the embeddings, if no module contains
        them.

        Args:
            embedding: the declaration.
            first: the hook point of the first stream.
            stream: its activation.
        """
        embed = self.get("hook_embed")
        text = self._text_places(first, stream)
        if embedding.norm:
            rows = self.output_of(embedding.tokens)
            scaled = None if rows is None else rows * embedding.factor
            self.passed("embed norm", embedding.norm.path, scaled)
        if stream is None or embed is None:
            self.fails(first, "the embedding or the first block did not run")
            return
        base = self.evidence.module(self.path)
        embed = transformed(embedding.behind_embed, embed, base)
        rest = stream
        for name in self._added_to_tokens(embedding):
            term = self.get(name)
            if term is not None:
                rest = rest - term.to(stream)
        if text is not None:  # images take the other positions
            self.inconclusive("what is not made of tokens: images have its place")
            rest = rest[text]
            embed = embed[text]
        self.equal(first, rest, embed.to(rest.dtype), largest(stream))

    def _added_to_tokens(self, embedding: Embedding) -> list[str]:
        """Return the hook points of the terms that are added to token embeddings."""
        # Shortformer adds its positions to the inputs of queries and keys.
        blocks = self.architecture.stack.every_block
        shifts = {part.qk_shift for block in blocks for part in block.attentions}
        names = [] if embedding.positions in shifts else ["hook_pos_embed"]
        if embedding.types:
            names.append("embed.hook_token_type_embed")
        return [*names, *map(more_embed_name, embedding.more)]

    def _text_places(self, first: str, stream: Tensor | None) -> Tensor | None:
        """Return a mask of the positions where the first stream does not depend on images,
        ``[batch, pos]``; None: everywhere.
        """
        others = others_of(self.evidence.more)
        if stream is None or not others:
            return None
        streams: list[Tensor] = []
        more = {**self.evidence.more, **others}

        def look(x: Tensor, hook: Hook) -> None:
            streams.append(x.detach().clone())

        with torch.no_grad():
            self.bridge.run_with_hooks(self.evidence.tokens, fwd_hooks=[(first, look)], **more)
        return unchanged(stream, streams[0])

    def _prove_patches(self, embedding: Embedding, first: str) -> None:
        """Check the first stream of an image: patches at the last positions, and terms that are
        equal in every image.

        The equal terms are the class token, registers and position embeddings.
        """
        if embedding.module is None:
            return
        norm = embedding.norm
        full = self.get("hook_full_embed")
        self.equal(first, self.get(first), full)
        if norm:
            self.equal("embed.ln", self.output_of(norm.path), full)
            full = self.input_of(norm.path)
        if embedding.patches is None:
            return
        patches = self.get("hook_embed")
        if full is None or patches is None:
            self.fails("hook_embed", "the layer of patches or the first block did not run")
            return
        constant = full.clone()
        constant[:, -patches.shape[1] :] -= patches.to(full)
        expected = constant[:1].expand_as(constant)
        self.equal("hook_embed", constant, expected, largest(full))

    def _prove_sum_of_module(self, embedding: Embedding) -> None:
        """Check that the output of the embedding module is the sum of the embeddings, or its
        norm.
        """
        project = embedding.project
        projects_tokens = project and not embedding.projects_sum
        names = [
            "embed.hook_projected" if projects_tokens else "embed.hook_embed",
            "embed.hook_pos_embed",
            "embed.hook_token_type_embed",
            *map(more_embed_name, embedding.more),
        ]
        terms = [term for term in map(self.get, names) if term is not None]
        summed = sum((term.double() for term in terms[1:]), terms[0].double())
        total: Tensor | None = summed.to(terms[0].dtype)
        if embedding.norm:
            total = self.passed("embed", embedding.norm.path, total)
        if project:
            total = self._prove_projection(embedding, project, total)
        self.equal("hook_full_embed", self.get("hook_full_embed"), total)

    def _prove_projection(
        self, embedding: Embedding, path: str, total: Tensor | None
    ) -> Tensor | None:
        """Check the layer that projects the embeddings to the stream's width; return the projected
        sum.
        """
        linear = self.call(path)
        is_linear = linear is not None and linear.is_linear
        self.holds("embed_project", is_linear, f"{path} is no linear layer that ran")
        if linear is None:
            return total
        if embedding.projects_sum:
            self.equal("embed_project", linear.input, total)
            return linear.result
        tokens = self.get("embed.hook_embed")
        read = linear.input
        reads = False
        if tokens is not None and read is not None:
            reads = read[..., : tokens.shape[-1]].equal(tokens)
        self.holds("embed_project", reads, f"{path} does not read embed.hook_embed")
        return total


# --------------------------------------------------------------------------------------------------
# The end of the stream: its final norm, the following heads, and the logits.
# --------------------------------------------------------------------------------------------------


class _End(_StreamEnds):
    """The final norm reads the last stream, and the output layer reads that norm."""

    def prove(self) -> None:
        """Check the norms, heads and the output layer."""
        stream: Tensor | None = None
        for stack in self.evidence.stacks():
            stream = self._after_norm(stack, _last_stream(self.evidence, stack))
        for head in self.architecture.heads:
            stream = self._after_head(head, stream)
        self._prove_unembed(stream)

    def _after_norm(self, stack: Stack, stream: Tensor | None) -> Tensor | None:
        """Check the collapse of several streams, and the final norm; return its output."""
        norm = stack.final_norm
        collapse = stack.collapse
        if isinstance(collapse, str):
            self.equal(collapse, like(self.input_of(collapse), stream), stream)
            stream = self.output_of(collapse)
        elif stack.n_streams is not None and norm:
            self.inconclusive("how the model makes one stream of the last ones")
            stream = self.input_of(norm.path)
        if stream is not None:
            stream = mean_at(stack.pooled, stream)
        if norm is None:
            return stream
        if norm.kind.function:
            return None if stream is None else norm.kind.of(stream)
        return self.passed(norm.path, norm.path, stream)

    def _after_head(self, head: Head, stream: Tensor | None) -> Tensor | None:
        """Check a head and return the input of the next one or of the output layer."""
        from_model = self.evidence.from_model
        call = self.evidence.call
        path = from_model(head.path)
        linear_path = from_model(head.linear)
        module = call(path)
        linear = call(linear_path)
        if module is None:
            return stream
        is_linear = linear is not None and linear.is_linear
        inside = is_inside(linear_path, path)
        self.holds(
            head.name, inside and is_linear, f"{head.linear} is no linear layer of it that ran"
        )
        if not head.unembeds:
            return stream
        self.equal(head.name, module.input, stream)
        normed = call(from_model(head.norm.path)) if head.norm else None
        if normed:
            return normed.result
        unembed = self.evidence.unembed
        # The module may contain the output layer, too.
        return self.evidence.input_of(unembed) if is_inside(unembed, path) else module.result

    def _prove_unembed(self, stream: Tensor | None) -> None:
        """Check that the output layer reads the final norm's output, times the declared factor."""
        architecture = self.architecture
        readout = self.architecture.readout
        if why := architecture.unknown.get("readout"):
            self.inconclusive(why)
            return
        unembed = self.evidence.call(self.evidence.unembed) if readout.path else None
        if unembed is None and architecture.pooled is not None:
            return  # one vector of each image: the norm's output
        last = unembed.input if unembed else self.output_of("")
        if stream is not None:
            stream = mean_at(readout.pooled, stream)
        if last is None or stream is None or last.shape != stream.shape:
            no_base = self.path == core_path(self.bridge.original_model)
            if last is not None and not readout.path and no_base:
                # There is no base model whose output is the last stream.
                self.inconclusive(
                    "what the model makes of the last stream, of which nothing is declared"
                )
            else:
                self.fails("unembed", "what it reads is not what the final norm makes")
            return
        if self.without_modules:
            stream = _zeroed(self.findings, stream, last)
        factor = readout.factor_in if unembed else 1.0
        self.equal("unembed", last, (stream.double() * factor).to(last.dtype))


class _Logits(Claim):
    """The logits are the output layer's output with the factors of the readout and `cfg`."""

    name = LOGITS

    def prove(self) -> None:
        """Check the soft cap of `cfg`, and the logits."""
        architecture = self.architecture
        readout = self.architecture.readout
        cap = self.cfg.output_logits_soft_cap
        same = (cap if cap > 0 else None) == readout.soft_cap
        self.holds(
            "cfg.output_logits_soft_cap",
            same,
            f"it says {cap}, and the declaration {readout.soft_cap}",
        )
        if why := architecture.unknown.get("readout"):
            self.inconclusive(why)
            return
        model = self.bridge.original_model
        if not readout.path or not has_module(model, self.evidence.unembed):
            return  # this model class has no output layer
        point = "unembed.hook_out"
        output = self.get(point)
        logits = self.evidence.output
        if (
            output is None
            or logits is None
            or output.shape[:-1] != logits.shape[:-1]
            or output.shape[-1] < logits.shape[-1]
        ):
            self.fails(point, "the model returns nothing of its shape")
            return
        if largest(logits) > 1e30:
            self.fails(point, "a constant is in place of the logits of some tokens")
            return
        with torch.no_grad():
            expected = readout.logits(output.double(), self.bridge.core)
        expected = expected[..., : logits.shape[-1]]
        self.equal(point, logits, expected.to(logits.dtype))


# --------------------------------------------------------------------------------------------------
# The steps of a block: the sums between them, their inputs and their outputs.
# --------------------------------------------------------------------------------------------------


class _BlockClaim(StepClaim):
    """A claim about the streams around one step of a block."""

    def __init__(self, evidence: Evidence, findings: Findings, place: LayerStep) -> None:
        super().__init__(evidence, findings, place)
        self.prefix = place.prefix
        self.steps = place.stack.block_at(place.layer).named

    @property
    def keeps_streams(self) -> bool:
        """Tell whether a step is the first of a block that mixes its streams itself, or parallel to
        the first.
        """
        first = self.steps[0]
        mix = first.step.mix
        return mix is not None and mix.by_block and self.place.named.before == first.before

    @property
    def kept_streams(self) -> Tensor | None:
        """Return the streams of a block that mixes them itself, after its mixing."""
        keep = self.get(f"hook_{self.steps[0].name}_keep")
        streams = self.get("hook_resid_pre")
        if keep is None or streams is None:
            return None
        return Mix.kept(streams.double(), keep)

    @property
    def first_kept_stream(self) -> Tensor | None:
        """Return the first of these streams."""
        streams = self.kept_streams
        return None if streams is None else streams[:, :, 0].to(self.get("hook_resid_pre"))


class _Sum(_BlockClaim):
    """A stream is the previous one plus the outputs of the steps between them. The claim is named
    after the sum.
    """

    def prove(self) -> None:
        """Check the stream after a step and the steps parallel to it."""
        named = self.place.named
        mix = self.step.mix
        scaling = self.step.residual_transform
        outputs = [f"hook_{step.name}_out" for step in self.steps if step.after == named.after]
        names = [named.onto, *outputs]
        shown = " + ".join(name.removeprefix("hook_") for name in names)
        if scaling:
            factor = ", ".join(parameters_of(scaling)) or f"{constant_of(scaling):g}"
            shown = f"({factor}) * {shown}"
        self.name = f"{shown} = {named.after.removeprefix('hook_')}"
        point = self.point(named.after)
        total = self.get(named.after)
        stream = self.first_kept_stream if self.keeps_streams else self.get(named.onto)
        added = [term for term in map(self.get, outputs) if term is not None]
        if stream is None or len(added) < len(outputs) or total is None:
            self.fails(point, "a term of it has no hook point that ran")
            return
        if mix and not self.keeps_streams:
            self._prove_mixed(mix, stream, added, total)
            return
        expected = transformed(scaling, stream.double(), self.evidence.module(self.path))
        for term in added:
            expected = expected + term.double()
        size = max(largest(term) for term in (stream, *added))
        self.equal(point, total, expected.to(total.dtype), size)

    def _prove_mixed(self, mix: Mix, stream: Tensor, added: list[Tensor], total: Tensor) -> None:
        """Check the sum of several streams."""
        named = self.place.named
        after = named.after.removeprefix("hook_")
        self.name = f"streams + {named.name}_out, with weights = {after}"
        expected = None
        if len(added) == 1:
            expected = self._mixed(mix, stream.double(), added[0].double())
        if expected is None:
            self.fails(
                self.prefix,
                "what mixes the streams did not run, has no hook point, or returns no weights",
            )
        else:
            self.equal(self.point(named.after), total, expected.to(total.dtype))

    def _mixed(self, mix: Mix, stream: Tensor, result: Tensor) -> Tensor | None:
        """Return the streams after a step, computed from its input and its output; None if they
        cannot be computed.
        """
        if mix.by_block:
            streams = self.kept_streams
            write = self.get(f"hook_{self.place.named.name}_write")
            if streams is None or write is None:
                return None
            return Mix.corrected(streams, stream, result, write)
        call = self.call(mix.path)
        if call is None or not isinstance(call.output, tuple | list):
            return None
        keep = None if mix.keep is None else call.output[mix.keep]
        return mix.of(stream, result, call.output[mix.write], keep)


class _Reads(_BlockClaim):
    """The modules of a part receive its declared input."""

    name = READS

    def prove(self) -> None:
        """Check the inputs of the mixing, of the norm, and of the part's modules."""
        step = self.step
        part = step.part
        read = self._stream
        if step.pre:
            norm = self._norm_call(step.pre, read)
            if norm is None:
                return
            read = norm.result
        entries = self._entries
        if not entries:
            self.inconclusive(f"what {self.place.part.removesuffix('.')} reads")
        for entry in entries:
            entered = like(self.input_of(entry), read)
            point = f"{self.prefix}hook_{self.place.named.name}_in ({entry})"
            self.equal(point, entered, like(read, entered))
        if isinstance(part, Attention) and part.cross:
            if self.place.stack is self.architecture.stack:
                self._prove_second_input(part)
            else:
                self._prove_encoder(part)

    @property
    def _stream(self) -> Tensor | None:
        """Return the stream that the part reads; if it is mixed from several, check the mixing
        module's input."""
        mix = self.step.mix
        if self.keeps_streams:
            return self.first_kept_stream
        streams = self.get(self.place.named.before)
        if mix is None or mix.by_block:
            return streams
        entered = like(self.input_of(mix.path), streams)
        self.equal(self.point(mix.path), entered, streams)
        mixing = self.call(mix.path)
        output = mixing.output if mixing else None
        return output[mix.read] if isinstance(output, tuple | list) else None

    def _norm_call(self, norm: Norm, read: Tensor | None) -> ModuleCall | None:
        """Check the input of the part's norm; return its call, None if it did not run."""
        point = self.point(self.place.named.norm)
        calls = self.evidence.calls.get(join(self.path, norm.path), ())
        if not calls:
            self.fails(point, f"{norm.path} did not run")
            return None
        # A norm that runs several times has a different input each time.
        tolerance = self.findings.tolerance
        call = next((call for call in calls if _same(call.input, read, tolerance)), calls[0])
        self.equal(point, like(call.input, read), read)
        return call

    @property
    def _entries(self) -> list[str]:
        """Return the modules, relative to the block, that receive the part's input."""
        step = self.step
        part = step.part
        pre = step.pre
        if isinstance(part, Attention) and pre and pre.path.startswith(f"{part.path}."):
            # It normalises its own input.
            projections = part.projections.values()
            paths = [projection.path for projection in projections if projection.latent is None]
            return [join(part.path, path) for path in dict.fromkeys(paths)]
        if step.entry is not None:
            return [step.entry] if step.entry else []
        return [part.path] if part.path else list(step.readers)

    def _prove_encoder(self, part: Attention) -> None:
        """Check that keys and values of cross-attention read the encoder's output."""
        encoder = self.architecture.stack
        if encoder.final_norm:
            read = self.evidence.output_of(self.evidence.base, encoder.final_norm.path)
        else:
            blocks = _block_streams(self.evidence, encoder)
            read = blocks[-1].output if blocks else None
        for projection in (part.k, part.v):
            entered = self.input_of(part.path, projection.path)
            self.equal(f"{self.place.part}({projection.path})", entered, read)

    def _prove_second_input(self, part: Attention) -> None:
        """Check cross-attention without a declared encoder: keys and values have one input, which
        does not depend on the text.
        """
        key = self.input_of(part.path, part.k.path)
        value = self.input_of(part.path, part.v.path)
        others = self.evidence.arguments.keys() - {"input_ids", "attention_mask"}
        if not others or key is None or value is None:
            self.fails(self.place.part, "there is no second input that it could read")
            return
        self.equal(f"{self.place.part}({part.v.path})", value, key)
        first = f"{self.place.stack.name}.0.hook_resid_pre"
        path = join(self.place.module, part.k.path)

        def change(x: Tensor, hook: Hook) -> Tensor:
            return x.flip(1) * 0.5

        watched = [(path, self.bridge.original_model.get_submodule(path))]
        hooks = [(first, change)]
        more = self.evidence.more
        with torch.no_grad(), CallRecorder(watched, layout=self.bridge.layout) as recording:
            self.bridge.run_with_hooks(self.evidence.tokens, fwd_hooks=hooks, **more)
        self.equal(f"{self.place.part}({part.k.path})", recording.of(path)[0].input, key)


def _same(x: Tensor | None, y: Tensor | None, tolerance: float) -> bool:
    """Tell whether two tensors agree."""
    x = like(x, y)
    if x is None or y is None or x.shape != y.shape:
        return False
    return largest(x.double() - y.double()) <= tolerance * largest(y)


class _Returns(_BlockClaim):
    """The term that is added to the stream is the output of the part's last layer."""

    name = RETURNS

    def prove(self) -> None:
        """Check the part's output, the norm and the factors after it, and the norm of the sum."""
        step = self.step
        part = step.part
        point = self.place.result
        added = self.evidence.get(point)
        block = self.evidence.module(self.path)
        changed = step.changes_its_result
        output = self.evidence.get(f"{self.place.part}hook_out") if changed else None
        if isinstance(part, Attention | MLP):
            last = part.o if isinstance(part, Attention) else part.down
            result = self.output_of(part.path, last)
            if changed:
                self.equal(point, output, like(result, output))
            else:
                expected = None if result is None else step.added(result, block)
                self.equal(point, added, like(expected, added))
        if step.post:
            self.equal(point, self.input_of(step.post.path), output)
            output = self.output_of(step.post.path)
        if changed:
            expected = None if output is None else step.added(output, block)
            self.equal(point, like(added, expected), expected)
        if step.stream_norm:
            total = self.get(self.place.named.after)
            self.equal(point, self.input_of(step.stream_norm.path), total)
        unchanged = step.out_element == 0 and not step.result_chain
        if isinstance(part, MoE) and added is not None and unchanged:
            self.equal(point, added, like(self.output_of(part.path), added))


# --------------------------------------------------------------------------------------------------
# The streams between the blocks.
# --------------------------------------------------------------------------------------------------


class _BlockStreams(NamedTuple):
    """The streams before and after a block, and its call."""

    layer: int
    prefix: str
    entered: Tensor | None
    output: Tensor | None
    call: ModuleCall | None


def _block_streams(evidence: Evidence, stack: Stack) -> list[_BlockStreams]:
    """Return the streams before and after each block."""
    blocks: list[_BlockStreams] = []
    for index in blocks_of(evidence.bridge, stack):
        prefix = f"{stack.name}.{index}."
        entered = evidence.get(f"{prefix}hook_resid_pre")
        output = evidence.get(f"{prefix}hook_normalized_resid_post")
        if output is None:
            output = evidence.get(f"{prefix}hook_resid_post")
        call = evidence.call(evidence.base, stack.place_of(index))
        blocks.append(_BlockStreams(index, prefix, entered, output, call))
    return blocks


def _last_stream(evidence: Evidence, stack: Stack) -> Tensor | None:
    """Return the last block's output, as the final norm reads it."""
    blocks = _block_streams(evidence, stack)
    if not blocks:
        return None
    last = blocks[-1]
    sources = stack.block_inputs.get(last.layer + 1, (("", 1.0),))
    return _sum_of_outputs(evidence, sources, last.output)


def _sum_of_outputs(
    evidence: Evidence, sources: Sequence[tuple[str, float]], before: Tensor | None
) -> Tensor | None:
    """Return the sum of the outputs of calls outside of the blocks; a source without a path is the
    output of the previous block.
    """
    total: Tensor | None = None
    for path, factor in sources:
        output = before
        if path:
            calls = evidence.calls.get(join(evidence.base, module_path(path)), ())
            number = call_number(path) or 0
            output = calls[number].result if number < len(calls) else None
        if output is None:
            return None
        total = output * factor if total is None else total + output * factor
    return total


class _Chain(Claim):
    """A block's output enters the next block, as the declared element of its return value."""

    name = CHAIN

    def prove(self, stack: Stack) -> None:
        """Check the streams between the blocks of a list."""
        before: Tensor | None = None
        without_modules = stack.every_block[0].ends is not None
        for block in _block_streams(self.evidence, stack):
            point = f"{block.prefix}hook_resid_pre"
            if before is not None and without_modules:
                before = _zeroed(self.findings, before, block.entered)
            if block.layer in stack.block_inputs:
                sources = stack.block_inputs[block.layer]
                before = _sum_of_outputs(self.evidence, sources, before)
                ran = before is not None
                self.holds(point, ran, "what it is the sum of did not run")
            if before is not None:
                self.equal(point, block.entered, before)
            before = block.output
            if not without_modules:  # otherwise no module returns its output
                output = block.call.output if block.call else None
                self._prove_output(f"{block.prefix}(output)", output, stack.output)

    def _prove_output(self, place: str, output: object, declared: tuple[int | None, int]) -> None:
        """Check the number of elements that a block returns, and whether they are in a tuple."""
        key, expected = declared
        several = isinstance(output, tuple | list | Mapping)
        length = len(output) if isinstance(output, tuple | list | Mapping) else 1
        fits = length == expected and several == (key is not None)
        kind = type(output).__name__
        self.holds(place, fits, f"{length} elements in a {kind}, for {expected} with key {key}")
