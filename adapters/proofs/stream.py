"""The residual stream: it adds up, and every part reads what it is declared to read and returns what is added."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

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
from adapters.proofs.evidence import Evidence, Findings, Hook, LayerStep, blocks_of, like
from adapters.views import SeveralStreams, constant_of, parameters_of, transformed

# ----------------------------------------------------------------------------------------------------------------------
# The first stream: the embeddings, or what is made of images or sound.
# ----------------------------------------------------------------------------------------------------------------------


CHAIN = "what leaves a block as the stream enters the next"
ENDS = "the stream begins with the embeddings and ends in the final norm"


def zeroed(findings: Findings, x: Tensor, y: Tensor | None) -> Tensor:
    """A stream with zeros at the positions where the model has set it to zero, between blocks that are no modules."""
    if y is None or y.shape != x.shape or not bool((zero := (y == 0).all(-1)).any()):
        return x
    findings.inconclusive(CHAIN, "the model sets the stream to zero where it sees padding")
    return x.masked_fill(zero[..., None], 0)


def prove_beginning(evidence: Evidence, findings: Findings) -> None:
    """What enters the first block is the sum of the embeddings, as it is declared.

    Args:
        evidence: a run with randomized activations.
        findings: what is found is added to it.
    """
    architecture = evidence.architecture
    for stack in evidence.stacks():
        if stack is not architecture.stack and stack.embedding.tokens:
            _own_embeddings(evidence, findings, stack)
    made = architecture.embedding
    if not made.tokens:
        _patches(evidence, findings, made)
        return
    given = evidence.entered(evidence.base, made.tokens)
    findings.holds(ENDS, "embed", given is not None and given.equal(evidence.text), "it is not given the tokens")
    first = f"{architecture.stack.name}.0.hook_resid_pre"
    stream = evidence.get(first)
    if stream is not None and architecture.stack.n_streams is not None:
        view = architecture.stack.stream_view
        if isinstance(view, SeveralStreams) and view.first:
            findings.inconclusive(ENDS, "what its other streams begin with, which is made of the first")
        else:
            findings.equal(ENDS, f"{first} (all streams alike)", stream, stream[:, :, :1].expand_as(stream))
        stream = stream[:, :, 0]
    if made.module is None:
        _sum_at_first_block(evidence, findings, first, stream)
    else:
        full = evidence.get("hook_full_embed")
        if full is not None and architecture.stack.every_block[0].ends:
            full = zeroed(findings, full, stream)
        findings.equal(ENDS, first, stream, full)
        _sum_of_embeddings(evidence, findings, made)


def _sum_at_first_block(evidence: Evidence, findings: Findings, first: str, stream: Tensor | None) -> None:
    """Without a module around the embeddings, their sum is what enters the first block.

    Args:
        evidence, findings: as for `prove_beginning`.
        first: the hook point of the first stream.
        stream: what it shows.
    """
    made, embed = evidence.architecture.embedding, evidence.get("hook_embed")
    text = _text_places(evidence, first, stream)
    if made.norm:
        rows = evidence.made(evidence.base, made.tokens)
        scaled = None if rows is None else rows * made.factor
        findings.equal(ENDS, "embed norm", evidence.entered(evidence.base, made.norm.path), scaled)
    if stream is None or embed is None:
        findings.holds(ENDS, first, False, "the embedding or the first block did not run")
        return
    embed = transformed(made.behind_embed, embed, evidence.module(evidence.base))
    rest = stream
    for name in _added_to_tokens(evidence, made):
        more = evidence.get(name)
        rest = rest if more is None else rest - more.to(stream)
    if text is not None:  # images have the other places
        findings.inconclusive(ENDS, "what is not made of tokens: images have its place")
        rest, embed = rest[text], embed[text]
    findings.equal(ENDS, first, rest, embed.to(rest.dtype), float(stream.abs().max()))


def _added_to_tokens(evidence: Evidence, made: Embedding) -> list[str]:
    """The hook points of what is added to the embeddings of tokens."""
    blocks = evidence.architecture.stack.every_block
    # Shortformer's positions are added to what queries and keys read.
    shifts = {part.qk_shift for block in blocks for part in block.attentions}
    own = [] if made.positions in shifts else ["hook_pos_embed"]
    return [*own, *(["embed.hook_token_type_embed"] if made.types else []), *map(more_embed_name, made.more)]


def _patches(evidence: Evidence, findings: Findings, made: Embedding) -> None:
    """The first stream of an image: patches at its last positions, and what is the same in each image.

    That is the class token, registers, and the embeddings of positions.
    """
    if made.module is None:
        return
    full = evidence.get("hook_full_embed")
    first = f"{evidence.architecture.stack.name}.0.hook_resid_pre"
    findings.equal(ENDS, first, evidence.get(first), full)
    if made.norm:
        findings.equal(ENDS, "embed.ln", evidence.made(evidence.base, made.norm.path), full)
        full = evidence.entered(evidence.base, made.norm.path)
    patches = evidence.get("hook_embed")
    if made.patches is None:
        return
    if full is None or patches is None:
        findings.holds(ENDS, "hook_embed", False, "the layer of patches or the first block did not run")
        return
    constant = full.clone()
    constant[:, -patches.shape[1] :] -= patches.to(full)
    expected = constant[:1].expand_as(constant)
    findings.equal(ENDS, "hook_embed", constant, expected, float(full.abs().max()))


def _text_places(evidence: Evidence, first: str, stream: Tensor | None) -> Tensor | None:
    """Where the first stream stays the same with other images, ``[batch, pos]``; None: everywhere."""
    others, seen = others_of(evidence.more), list[Tensor]()
    if stream is None or not others:
        return None

    def look(x: Tensor, hook: Hook) -> None:
        seen.append(x.detach().clone())

    with torch.no_grad():
        evidence.bridge.run_with_hooks(evidence.tokens, fwd_hooks=[(first, look)], **{**evidence.more, **others})
    return unchanged(stream, seen[0])


def _own_embeddings(evidence: Evidence, findings: Findings, stack: Stack) -> None:
    """The first stream of a stack with tokens of its own."""
    made = stack.embedding
    total, positions = evidence.get(f"{stack.name}_embed.hook_out"), evidence.get(f"{stack.name}_pos_embed.hook_out")
    begun = evidence.get(f"{stack.name}.0.hook_resid_pre")
    if total is None or begun is None or (positions is None) != (made.positions is None):
        findings.holds(ENDS, stack.name, False, "its embeddings or its first block did not run")
        return
    both = (evidence.entered, evidence.made)
    entered, normed = (each(evidence.base, made.norm.path) if made.norm else None for each in both)
    alone = entered is not None and positions is not None and torch.equal(entered, total)  # a norm of the tokens
    total = normed if alone and normed is not None else total
    for more in (positions, evidence.get(f"{stack.name}_token_type_embed.hook_out")):
        total = total if more is None else total + more.to(total)
    if entered is not None and not alone:
        findings.equal(ENDS, f"{stack.name}_embed.ln", entered, total)
        total = total if normed is None else normed
    findings.equal(ENDS, stack.name, begun, total, float(begun.abs().max()))


def _sum_of_embeddings(evidence: Evidence, findings: Findings, made: Embedding) -> None:
    """What the module of all embeddings makes is their sum, or the norm of it."""
    more = map(more_embed_name, made.more)
    project = made.project
    first = "embed.hook_projected" if project and not made.projects_sum else "embed.hook_embed"
    names = (first, "embed.hook_pos_embed", "embed.hook_token_type_embed", *more)
    norm = made.norm
    parts = [part for part in map(evidence.get, names) if part is not None]
    total: Tensor | None = sum((part.double() for part in parts[1:]), parts[0].double()).to(parts[0].dtype)
    full = evidence.get("hook_full_embed")
    if norm is not None:
        findings.equal(ENDS, "embed", evidence.entered(evidence.base, norm.path), total)
        total = evidence.made(evidence.base, norm.path)
    linear = evidence.call(evidence.base, project) if project else None
    if project:
        is_linear = linear is not None and linear.is_linear
        findings.holds(ENDS, "embed_project", is_linear, f"{project} is no linear layer that ran")
    if linear is not None and made.projects_sum:
        findings.equal(ENDS, "embed_project", linear.input, total)
        total = linear.result
    elif linear is not None:
        tokens, read = evidence.get("embed.hook_embed"), linear.input
        there = tokens is not None and read is not None and read[..., : tokens.shape[-1]].equal(tokens)
        findings.holds(ENDS, "embed_project", there, f"{project} does not read embed.hook_embed")
    findings.equal(ENDS, "hook_full_embed", full, total)


# ----------------------------------------------------------------------------------------------------------------------
# The end of the stream: its final norm, the heads behind it, and the logits.
# ----------------------------------------------------------------------------------------------------------------------


LOGITS = "the logits are what the output layer makes of the final norm, with the declared factors, bias and soft cap"


def prove_end(evidence: Evidence, findings: Findings, streams: Sequence[tuple[Stack, Tensor | None]]) -> None:
    """The final norm reads the last stream, the output layer reads that norm, and the logits are as the readout says.

    Args:
        evidence: a run with randomized activations.
        findings: what is found is added to it.
        streams: each list of blocks with what leaves its last block.
    """
    findings.claim(LOGITS)
    stream: Tensor | None = None
    for stack, last in streams:
        stream = last
        if isinstance(stack.collapse, str):
            entered = like(evidence.entered(evidence.base, stack.collapse), stream)
            findings.equal(ENDS, stack.collapse, entered, stream)
            stream = evidence.made(evidence.base, stack.collapse)
        elif stack.n_streams is not None and stack.final_norm:
            findings.inconclusive(ENDS, "how the model makes one stream of the last ones")
            stream = evidence.entered(evidence.base, stack.final_norm.path)
        stream = None if stream is None else mean_at(stack.pooled, stream)
        if stack.final_norm:
            stream = _normed(evidence, findings, stack.final_norm, stream)
    for head in evidence.architecture.heads:
        stream = _headed(evidence, findings, head, stream)
    _unembedded(evidence, findings, stream)
    _logits(evidence, findings)


def _normed(evidence: Evidence, findings: Findings, norm: Norm, stream: Tensor | None) -> Tensor | None:
    """What the final norm makes of the last stream."""
    if norm.kind.function:
        return None if stream is None else norm.kind.of(stream)
    findings.equal(ENDS, norm.path, evidence.entered(evidence.base, norm.path), stream)
    return evidence.made(evidence.base, norm.path)


def _headed(evidence: Evidence, findings: Findings, head: Head, stream: Tensor | None) -> Tensor | None:
    """What the output layer reads behind a head."""
    path, unembed = evidence.from_model(head.path), evidence.architecture.readout.path
    linear, module = evidence.call(evidence.from_model(head.linear)), evidence.call(path)
    if module is None:
        return stream
    ok = is_inside(evidence.from_model(head.linear), path) and linear is not None and linear.is_linear
    findings.holds(ENDS, head.name, ok, f"{head.linear} is no linear layer of it that ran")
    if not head.unembeds:
        return stream
    findings.equal(ENDS, head.name, module.input, stream)
    normed = evidence.call(evidence.from_model(head.norm.path)) if head.norm else None
    if is_inside(evidence.from_model("." + unembed), path) and not normed:
        return evidence.entered(evidence.from_model("." + unembed))  # the module holds the output layer, too
    return normed.result if normed else module.result


def _unembedded(evidence: Evidence, findings: Findings, stream: Tensor | None) -> None:
    """The output layer reads what the final norm makes, times the declared factor."""
    readout = evidence.architecture.readout
    if why := evidence.architecture.unknown.get("readout"):
        findings.inconclusive(ENDS, why)
        return
    unembed = evidence.call(evidence.from_model("." + readout.path)) if readout.path else None
    if unembed is None and evidence.architecture.pooled is not None:
        return  # one vector of each image, which its norm puts out
    last = unembed.input if unembed else evidence.made(evidence.base)
    stream = None if stream is None else mean_at(readout.pooled, stream)
    if last is None or stream is None or last.shape != stream.shape:
        if last is not None and not readout.path and evidence.base == core_path(evidence.bridge.original_model):
            # It has no base model whose output is the last stream.
            findings.inconclusive(ENDS, "what the model makes of the last stream, of which nothing is declared")
        else:
            findings.holds(ENDS, "unembed", False, "what it reads is not what the final norm makes")
        return
    if evidence.architecture.stack.every_block[0].ends:
        stream = zeroed(findings, stream, last)
    factor = readout.factor_in if unembed else 1.0
    findings.equal(ENDS, "unembed", last, (stream.double() * factor).to(last.dtype))


def _logits(evidence: Evidence, findings: Findings) -> None:
    """The logits are what the output layer puts out, as the readout and `cfg` say."""
    readout, made, seen = evidence.architecture.readout, evidence.get("unembed.hook_out"), evidence.output
    cap = evidence.bridge.cfg.output_logits_soft_cap
    said = cap if cap > 0 else None
    same = said == readout.soft_cap
    findings.holds(LOGITS, "cfg.output_logits_soft_cap", same, f"it says {cap}, and the declaration {readout.soft_cap}")
    if why := evidence.architecture.unknown.get("readout"):
        findings.inconclusive(LOGITS, why)
        return
    model = evidence.bridge.original_model
    if not readout.path or not has_module(model, evidence.from_model("." + readout.path)):
        return  # this class of models has none
    if made is None or seen is None or made.shape[:-1] != seen.shape[:-1] or made.shape[-1] < seen.shape[-1]:
        findings.holds(LOGITS, "unembed.hook_out", False, "the model returns nothing of its shape")
        return
    if float(seen.abs().max()) > 1e30:
        findings.holds(LOGITS, "unembed.hook_out", False, "a constant is in place of the logits of some tokens")
        return
    with torch.no_grad():
        expected = readout.logits(made.double(), evidence.bridge.core)[..., : seen.shape[-1]]
    findings.equal(LOGITS, "unembed.hook_out", seen, expected.to(seen.dtype))


READS = "each part reads the stream that it is declared to read, through its norm"
RETURNS = "what is added is what the part's last layer makes, through its norm, with its factor"


def prove_streams(evidence: Evidence, findings: Findings) -> None:
    """Sums, readers, results and ends of all streams.

    Args:
        evidence: any run.
        findings: what is found is added to it.
    """
    for claim in (CHAIN, READS, RETURNS, ENDS):
        findings.claim(claim)
    places = list(evidence.places())
    for place in places:
        if place.named.first:
            _sum(evidence, findings, place)
        _reads(evidence, findings, place)
        _returns(evidence, findings, place)
    for stack in evidence.stacks():
        _chain(evidence, findings, stack)
    prove_beginning(evidence, findings)
    prove_end(evidence, findings, [(stack, _last(evidence, stack)) for stack in evidence.stacks()])


def _sum(evidence: Evidence, findings: Findings, place: LayerStep) -> None:
    """Each stream is the one before it and what the steps between them add; the sum is the claim's name."""
    steps = place.stack.block_at(place.layer).named
    mix, kept = place.step.mix, _keeps(place)
    names = [place.named.onto, *(f"hook_{n.name}_out" for n in steps if n.after == place.named.after)]
    left = " + ".join(name.removeprefix("hook_") for name in names)
    on_stream = place.step.residual_transform
    if on_stream:
        left = f"({', '.join(parameters_of(on_stream)) or f'{constant_of(on_stream):g}'}) * {left}"
    claim = f"{left} = {place.named.after.removeprefix('hook_')}"
    at = place.prefix + place.named.after
    terms = [evidence.get(place.prefix + name) for name in names]
    if kept:
        terms[0] = _first_of_kept(evidence, place)
    there = [term for term in terms if term is not None]
    total = evidence.get(at)
    if len(there) < len(terms) or total is None:
        findings.holds(claim, at, False, "a term of it has no hook point that ran")
        return
    if mix and not kept:
        _mixed(evidence, findings, place, there)
        return
    added = transformed(on_stream, there[0].double(), evidence.module(place.path))
    for term in there[1:]:
        added = added + term.double()
    findings.equal(claim, at, total, added.to(total.dtype), max(float(term.abs().max()) for term in there))


def _keeps(place: LayerStep) -> bool:
    """Whether a step is the first of a block that mixes its streams itself, or parallel to that."""
    first = place.stack.block_at(place.layer).named[0]
    return first.step.mix is not None and first.step.mix.by_block and place.named.before == first.before


def _kept_streams(evidence: Evidence, place: LayerStep) -> Tensor | None:
    """The streams as a block that mixes them itself works on them."""
    first = place.stack.block_at(place.layer).named[0]
    keep, streams = (evidence.get(f"{place.prefix}{x}") for x in (f"hook_{first.name}_keep", "hook_resid_pre"))
    return None if keep is None or streams is None else Mix.kept(streams.double(), keep)


def _first_of_kept(evidence: Evidence, place: LayerStep) -> Tensor | None:
    streams = _kept_streams(evidence, place)
    return None if streams is None else streams[:, :, 0].to(evidence.get(f"{place.prefix}hook_resid_pre"))


def _mixed(evidence: Evidence, findings: Findings, place: LayerStep, there: list[Tensor]) -> None:
    """The same of several streams."""
    claim = f"streams + {place.named.name}_out, with weights = {place.named.after.removeprefix('hook_')}"
    after, total = _behind_mix(evidence, place, there), evidence.get(place.prefix + place.named.after)
    if after is None or total is None:
        wrong = "what mixes the streams did not run, has no hook point, or returns no weights"
        findings.holds(claim, place.prefix, False, wrong)
    else:
        findings.equal(claim, place.prefix + place.named.after, total, after.to(total.dtype))


def _behind_mix(evidence: Evidence, place: LayerStep, there: list[Tensor]) -> Tensor | None:
    """The streams behind a step, made of what it reads and of its result; None where they cannot be made."""
    mix = place.step.mix
    if mix is None or len(there) != 2:
        return None
    made, result = (x.double() for x in there)
    if mix.by_block:
        streams, write = _kept_streams(evidence, place), evidence.get(f"{place.prefix}hook_{place.named.name}_write")
        return None if streams is None or write is None else Mix.corrected(streams, made, result, write)
    call = evidence.call(place.path, mix.path)
    if call is None or not isinstance(call.output, tuple | list):
        return None
    return mix.of(made, result, call.output[mix.write], None if mix.keep is None else call.output[mix.keep])


def _reads(evidence: Evidence, findings: Findings, place: LayerStep) -> None:
    step, part = place.step, place.step.part
    read = evidence.get(place.prefix + place.named.before)
    if _keeps(place):
        read = _first_of_kept(evidence, place)
    elif step.mix and not step.mix.by_block:
        mixing = evidence.call(place.path, step.mix.path)
        entered = like(evidence.entered(place.path, step.mix.path), read)
        findings.equal(READS, f"{place.prefix}{step.mix.path}", entered, read)
        out = mixing.output if mixing else None
        read = out[step.mix.read] if isinstance(out, tuple | list) else None
    if step.pre:
        calls = evidence.calls.get(join(place.path, step.pre.path), ())
        if not calls:
            findings.holds(READS, f"{place.prefix}{place.named.norm}", False, f"{step.pre.path} did not run")
            return
        # A norm that runs again reads something else then.
        call = next((c for c in calls if _same(c.input, read, findings.tolerance)), calls[0])
        findings.equal(READS, f"{place.prefix}{place.named.norm}", like(call.input, read), read)
        read = call.result
    entries = _entries(place)
    if not entries:
        findings.inconclusive(READS, f"what {place.part.removesuffix('.')} reads")
    for entry in entries:
        seen = like(evidence.entered(place.path, entry), read)
        findings.equal(READS, f"{place.prefix}hook_{place.named.name}_in ({entry})", seen, like(read, seen))
    if isinstance(part, Attention) and part.cross:
        _reads_encoder(evidence, findings, place, part)


def _same(x: Tensor | None, y: Tensor | None, tolerance: float) -> bool:
    x = like(x, y)
    if x is None or y is None or x.shape != y.shape:
        return False
    return float((x.double() - y.double()).abs().max()) <= tolerance * float(y.abs().max())


def _entries(place: LayerStep) -> list[str]:
    """The modules, relative to the block, that are given what a part reads."""
    step = place.step
    part, pre = step.part, step.pre
    if isinstance(part, Attention) and pre and pre.path.startswith(f"{part.path}."):  # it norms its own input
        inside = [projection.path for projection in part.projections.values() if projection.latent is None]
        return [join(part.path, path) for path in dict.fromkeys(inside)]
    if step.entry is not None:
        return [step.entry] if step.entry else []
    return [part.path] if part.path else list(step.readers)


def _reads_encoder(evidence: Evidence, findings: Findings, place: LayerStep, part: Attention) -> None:
    first = evidence.architecture.stack
    if place.stack is first:
        _reads_second_input(evidence, findings, place, part)
        return
    read = next((left for *_, left, _ in reversed(list(streams_of(evidence, first)))), None)
    if first.final_norm:
        read = evidence.made(evidence.base, first.final_norm.path)
    for projection in (part.k, part.v):
        entered = evidence.entered(place.module, projection.path)
        findings.equal(READS, f"{place.part}({projection.path})", entered, read)


def _reads_second_input(evidence: Evidence, findings: Findings, place: LayerStep, part: Attention) -> None:
    """Without an encoder in the declaration: keys and values are made from one thing, which is not made of text."""
    key, value = (evidence.entered(place.module, each.path) for each in (part.k, part.v))
    if not evidence.arguments.keys() - {"input_ids", "attention_mask"} or key is None or value is None:
        findings.holds(READS, place.part, False, "there is no second input that it could read")
        return
    findings.equal(READS, f"{place.part}({part.v.path})", value, key)
    first = f"{place.stack.name}.0.hook_resid_pre"
    path = join(place.module, part.k.path)

    def other(x: Tensor, hook: Hook) -> Tensor:
        return x.flip(1) * 0.5

    watched = [(path, evidence.bridge.original_model.get_submodule(path))]
    with torch.no_grad(), CallRecorder(watched, layout=evidence.bridge.layout) as recording:
        evidence.bridge.run_with_hooks(evidence.tokens, fwd_hooks=[(first, other)], **evidence.more)
    findings.equal(READS, f"{place.part}({part.k.path})", recording.of(path)[0].input, key)


def _returns(evidence: Evidence, findings: Findings, place: LayerStep) -> None:
    step, part = place.step, place.step.part
    at = place.result
    added, block = evidence.get(at), evidence.module(place.path)
    raw = evidence.get(f"{place.part}hook_out") if step.changes_its_result else None
    if isinstance(part, Attention | MLP):
        made = evidence.made(place.module, part.o if isinstance(part, Attention) else part.down)
        if step.changes_its_result:
            findings.equal(RETURNS, at, raw, like(made, raw))
        else:
            findings.equal(RETURNS, at, added, like(None if made is None else step.added(made, block), added))
    if step.post:
        findings.equal(RETURNS, at, evidence.entered(place.path, step.post.path), raw)
        raw = evidence.made(place.path, step.post.path)
    if step.changes_its_result:
        made = None if raw is None else step.added(raw, block)
        findings.equal(RETURNS, at, like(added, made), made)
    if step.stream_norm:
        total = evidence.get(place.prefix + place.named.after)
        findings.equal(RETURNS, at, evidence.entered(place.path, step.stream_norm.path), total)
    as_it_is = step.out_element == 0 and not step.result_chain
    if isinstance(part, MoE) and added is not None and as_it_is:
        findings.equal(RETURNS, at, added, like(evidence.made(place.module), added))


def streams_of(
    evidence: Evidence, stack: Stack
) -> Iterator[tuple[str, Tensor | None, Tensor | None, ModuleCall | None]]:
    """Each block's prefix, what entered it, what left it as the stream, and its call."""
    for index in blocks_of(evidence.bridge, stack):
        prefix = f"{stack.name}.{index}."
        normed = evidence.get(f"{prefix}hook_normalized_resid_post")
        after = normed if normed is not None else evidence.get(f"{prefix}hook_resid_post")
        call = evidence.call(evidence.base, stack.place_of(index))
        yield prefix, evidence.get(f"{prefix}hook_resid_pre"), after, call


def _chain(evidence: Evidence, findings: Findings, stack: Stack) -> None:
    """What leaves a block enters the next, as the declared element of what it returns."""
    before: Tensor | None = None
    indices = blocks_of(evidence.bridge, stack)
    for index, (prefix, entered, left, call) in zip(indices, streams_of(evidence, stack), strict=True):
        if before is not None and stack.every_block[0].ends:
            before = zeroed(findings, before, entered)
        if index in stack.block_inputs:
            before = _entered(evidence, stack.block_inputs[index], before)
            findings.holds(CHAIN, f"{prefix}hook_resid_pre", before is not None, "what it is the sum of did not run")
        if before is not None:
            findings.equal(CHAIN, f"{prefix}hook_resid_pre", entered, before)
        before = left
        if stack.every_block[0].ends:
            continue  # no module returns it
        output = call.output if call else None
        several = isinstance(output, tuple | list | Mapping)
        length = len(output) if isinstance(output, tuple | list | Mapping) else 1
        key, expected = stack.output
        fits = length == expected and several == (key is not None)
        seen = f"{length} elements in a {type(output).__name__}, for {expected} with key {key}"
        findings.holds(CHAIN, f"{prefix}(output)", fits, seen)


def _last(evidence: Evidence, stack: Stack) -> Tensor | None:
    """What leaves the last block, as the final norm reads it."""
    left = [left for _, _, left, _ in streams_of(evidence, stack)]
    last, behind = (left[-1], blocks_of(evidence.bridge, stack)[-1] + 1) if left else (None, 0)
    return _entered(evidence, stack.block_inputs.get(behind, (("", 1.0),)), last)


def _entered(evidence: Evidence, sources: Sequence[tuple[str, float]], before: Tensor | None) -> Tensor | None:
    """The sum of what calls outside of the blocks put out, or, without a path, of what left the block before."""
    total: Tensor | None = None
    for path, factor in sources:
        calls = evidence.calls.get(join(evidence.base, module_path(path)), ()) if path else ()
        number = call_number(path) or 0
        made = calls[number].result if number < len(calls) else None if path else before
        if made is None:
            return None
        total = made * factor if total is None else total + made * factor
    return total
