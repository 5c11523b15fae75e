"""Weights, patterns, lenses: what is read off a model."""

from __future__ import annotations

import torch
from torch import Tensor

from adapters.inputs.made import arguments_of
from tests.properties.plain import outputs_inside
from tests.properties.subject import Absent, Subject, Wrong, logits_of
from tests.properties.sums import uncapped


def lens_is_the_model(subject: Subject) -> None:
    """The lens at each layer is what the plain model says when that stream is behind its last block."""
    subject.needs_tokens()
    with torch.no_grad():
        reading = subject.bridge.lens(subject.tokens)
        n = len(subject.paths)
        for layer in range(n + 1):
            stream = subject.stream(layer)
            with subject.edited(n, lambda x, stream=stream: stream):
                theirs = subject.run()
            subject.same(reading.logits(layer), theirs, f"layer {layer}")


def raw_lens_is_the_unembedding(subject: Subject) -> None:
    """The raw lens is ``W_U`` and ``b_U`` of a stream that no norm has seen; `final norm` says that these are right."""
    subject.needs_tokens()
    with torch.no_grad():
        reading = subject.bridge.lens(subject.tokens, kind="raw")
        stream = subject.stream(len(subject.paths)).double()
        if stream.shape[-1] != len(subject.bridge.W_U):
            raise Absent("the unembedding reads another width")
        theirs = stream @ subject.bridge.W_U.double() + subject.bridge.b_U.double()
    subject.same(reading.logits(-1).double(), theirs, "the end")


def last_stream_through_the_norm(subject: Subject) -> None:
    """`accumulated_resid(apply_ln=True)` is what is read behind the blocks; by ``W_U`` and ``b_U``, the logits."""
    with torch.no_grad():
        stream = subject.cache.accumulated_resid(apply_ln=True)[-1]
        if subject.bridge.architecture.readout.unknown:
            raise Absent("how logits are made of it is not known, which is said")
        if not any(head.unembeds for head in subject.bridge.architecture.heads):
            ours = (stream @ subject.bridge.W_U + subject.bridge.b_U).double()
            subject.same(ours, uncapped(subject), "logits")
            return
        # Another layer reads it: one that no block has.
        given = outputs_inside(subject.hf, "", subject.run)
    inside = tuple(f"{path.partition('@')[0]}." for path in subject.paths)
    read = [x for place, x in given.items() if place.side == "input" and not f"{place.path}.".startswith(inside)]
    fits = [x for x in read if x.shape == stream.shape]
    if not fits:
        raise Absent("no layer behind the blocks is given a stream")
    nearest = min(fits, key=lambda x: float((x - stream).abs().max()))
    subject.same(stream, nearest, "what is read")


def accumulated_streams_are_the_models(subject: Subject) -> None:
    """`accumulated_resid` is what enters each layer, and what leaves the last."""
    stack = subject.cache.accumulated_resid()
    for layer in range(len(subject.paths) + 1):
        subject.same(stack[layer], subject.stream(layer), f"layer {layer}", near=None)


def _as_product(
    subject: Subject, x: Tensor, weight: Tensor, bias: Tensor | None, equation: str, theirs: Tensor, what: str
) -> None:
    ours = torch.einsum(equation, x.double(), weight.double())
    subject.same(ours if bias is None else ours + bias.double(), theirs.double(), what)


def _weight(part: object, name: str) -> Tensor | None:
    try:
        found = getattr(part, name)
    except AttributeError:
        return None
    return found if isinstance(found, Tensor) else None


def _kept(subject: Subject, *names: str) -> list[Tensor]:
    with torch.no_grad():
        _, cache = subject.ours(subject.bridge.run_with_cache, names_filter=list(names))
    return [cache[name] for name in names]


def _part(subject: Subject, block: str, part: str) -> object:
    stack, _, layer = block.partition(".")
    return getattr(getattr(subject.bridge, stack)[int(layer)], part)


def weights_explain_attention(subject: Subject) -> None:
    """Queries, keys and values are what attention reads times ``W_Q``...; what it puts out is z times ``W_O``."""
    for block, part in ((block, part) for block, _ in subject.layers for part in ("attn", "cross_attn")):
        prefix = f"{block}.{part}"
        for x in ("q", "k", "v"):
            if not subject.named(f"{prefix}.hook_{x}") or not subject.named(f"{prefix}.{x}.hook_in"):
                continue
            held = _part(subject, block, part)
            weight = getattr(held, f"W_{x.upper()}")
            read, out = _kept(subject, f"{prefix}.{x}.hook_in", f"{prefix}.hook_{x}")
            if len(weight) % out.shape[2]:
                raise Wrong(f"{prefix}.W_{x.upper()} has {len(weight)} heads, the activation {out.shape[2]}")
            out = out.repeat_interleave(len(weight) // out.shape[2], 2)
            bias = _weight(held, f"b_{x.upper()}")
            _as_product(subject, read, weight, bias, "bpd,hde->bphe", out, f"{prefix}.hook_{x}")
        if subject.named(f"{prefix}.hook_z") and subject.named(f"{prefix}.hook_out"):
            held = _part(subject, block, part)
            z, out = _kept(subject, f"{prefix}.hook_z", f"{prefix}.hook_out")
            _as_product(subject, z, held.W_O, _weight(held, "b_O"), "bphe,hed->bpd", out, f"{prefix}.hook_out")


def weights_explain_mlps(subject: Subject) -> None:
    """Before its activation function an MLP has what it reads times ``W_in``; it puts out ``hook_post @ W_out``."""
    for block, _ in subject.layers:
        prefix = f"{block}.mlp"
        if not subject.named(f"{prefix}.hook_post"):
            continue
        held = _part(subject, block, "mlp")
        if subject.named(f"{prefix}.hook_out"):
            post, out = _kept(subject, f"{prefix}.hook_post", f"{prefix}.hook_out")
            _as_product(subject, post, held.W_out, _weight(held, "b_out"), "bpm,md->bpd", out, f"{prefix}.hook_out")
        if subject.named(f"{prefix}.in.hook_in"):
            gated = subject.named(f"{prefix}.hook_pre_linear")
            pre = f"{prefix}.hook_pre_linear" if gated else f"{prefix}.hook_pre"
            read, before = _kept(subject, f"{prefix}.in.hook_in", pre)
            _as_product(subject, read, held.W_in, _weight(held, "b_in"), "bpd,dm->bpm", before, pre)


def weights_explain_the_ends(subject: Subject) -> None:
    """Where a layer comes before the unembedding, the logits are what it puts out times ``W_U``, and ``b_U``."""
    bridge, head = subject.bridge, subject.hf.get_output_embeddings()
    between = any(each.unembeds for each in bridge.architecture.heads)  # else `final norm` says it
    if between and head is not None and subject.named("unembed.hook_out"):
        read: list[Tensor] = []
        handle = head.register_forward_pre_hook(lambda module, args: read.append(args[0]))
        with torch.no_grad():
            subject.run()
        handle.remove()
        if read:
            ours = read[-1].double() @ bridge.W_U.double() + bridge.b_U.double()
            subject.same(ours, uncapped(subject), "logits")


def patterns_are_the_models(subject: Subject) -> None:
    """Attention patterns are those that the model returns when it computes them itself."""
    with subject.itself(), torch.no_grad():
        model = subject.case.model(attn_implementation="eager")
        torch.manual_seed(0)
        output = model(**arguments_of(model, *subject.inputs), output_attentions=True)
    if not torch.allclose(logits_of(output), subject.logits, rtol=1e-2, atol=1e-3 * float(subject.logits.abs().max())):
        raise Absent("the model itself: its eager form computes something else")
    for stack, key in (("blocks", "attentions"), ("encoder", "encoder_attentions"), ("decoder", "decoder_attentions")):
        attentions = getattr(output, key, None)
        if stack not in subject.stacks or attentions is None:
            continue
        points = [i for i in range(len(subject.stacks[stack])) if subject.named(f"{stack}.{i}.attn.hook_pattern")]
        if len(attentions) == len(subject.stacks[stack]):
            attentions = [attentions[i] for i in points]
        first = next((x for x in attentions if isinstance(x, Tensor)), None)
        another = first is not None and subject.main == stack and first.shape[-2] != subject.stream(0).shape[1]
        if len(attentions) != len(points) or another:  # those of another tower (BLIP returns its images')
            continue
        for i, theirs in zip(points, attentions, strict=True):
            if isinstance(theirs, Tensor):
                if bool((theirs < 0).any()):  # what the softmax is given (ProphetNet's encoder)
                    theirs = theirs.softmax(-1)
                ours = subject.cache[f"{stack}.{i}.attn.hook_pattern"]
                subject.same(ours, theirs, f"{stack}.{i}.attn.hook_pattern")


PROPERTIES = {
    "lens": lens_is_the_model,
    "raw lens": raw_lens_is_the_unembedding,
    "accumulated": accumulated_streams_are_the_models,
    "final norm": last_stream_through_the_norm,
    "W attention": weights_explain_attention,
    "W mlp": weights_explain_mlps,
    "W ends": weights_explain_the_ends,
    "patterns": patterns_are_the_models,
}
