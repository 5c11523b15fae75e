"""The first stream: the embeddings, or what is made of images or sound."""

from __future__ import annotations

import torch
from torch import Tensor

from adapters.architecture import Stack
from adapters.building.ends import more_embed_name
from adapters.inputs.places import others_of, unchanged
from adapters.paths import module_at
from adapters.proofs.evidence import Evidence
from adapters.proofs.protocol import Hook
from adapters.proofs.report import Findings
from adapters.stream_ends import Embedding
from adapters.views import transformed

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
    architecture = evidence.bridge.architecture
    for stack in evidence.stacks():
        if stack is not architecture.stack and stack.embedding.tokens:
            _own_embeddings(evidence, findings, stack)
    made = architecture.embedding
    if not made.tokens:
        _patches(evidence, findings, made)
        return
    tokens = evidence.call(evidence.base, made.tokens)
    given = tokens.input if tokens else None
    findings.holds(ENDS, "embed", given is not None and given.equal(evidence.text), "it is not given the tokens")
    first = f"{architecture.stack.name}.0.hook_resid_pre"
    stream = evidence.get(first)
    if stream is not None and architecture.stack.n_streams is not None:
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
    made, embed = evidence.bridge.architecture.embedding, evidence.get("hook_embed")
    text = _text_places(evidence, first, stream)
    if made.norm:
        tokens = evidence.call(evidence.base, made.tokens)
        rows = tokens.result if tokens else None
        scaled = None if rows is None else rows * made.factor
        findings.equal(ENDS, "embed norm", evidence.entered(evidence.base, made.norm.path), scaled)
    if stream is None or embed is None:
        findings.holds(ENDS, first, False, "the embedding or the first block did not run")
        return
    embed = transformed(made.behind_embed, embed, module_at(evidence.bridge.original_model, evidence.base))
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
    blocks = evidence.bridge.architecture.stack.every_block
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
    first = f"{evidence.bridge.architecture.stack.name}.0.hook_resid_pre"
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
    norm = evidence.call(evidence.base, made.norm.path) if made.norm else None
    entered = norm.input if norm else None
    if norm is not None and entered is not None and positions is not None and torch.equal(entered, total):
        total = norm.result if norm.result is not None else total  # of the tokens alone
        norm = None
    types = evidence.get(f"{stack.name}_token_type_embed.hook_out")
    total = total if positions is None else total + positions.to(total)
    total = total if types is None else total + types.to(total)
    if norm is not None:
        findings.equal(ENDS, f"{stack.name}_embed.ln", entered, total)
        total = norm.result if norm.result is not None else total
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
        weight = getattr(linear.module, "weight", None) if linear else None
        is_linear = isinstance(weight, Tensor) and weight.ndim == 2
        findings.holds(ENDS, "embed_project", is_linear, f"{project} is no linear layer that ran")
    if linear is not None and made.projects_sum:
        findings.equal(ENDS, "embed_project", linear.input, total)
        total = linear.result
    elif linear is not None:
        tokens, read = evidence.get("embed.hook_embed"), linear.input
        there = tokens is not None and read is not None and read[..., : tokens.shape[-1]].equal(tokens)
        findings.holds(ENDS, "embed_project", there, f"{project} does not read embed.hook_embed")
    findings.equal(ENDS, "hook_full_embed", full, total)
