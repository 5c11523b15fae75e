"""Weights, patterns, lenses: what is read off a model."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext

import torch
from torch import Tensor

from adapters.inputs import arguments_of
from adapters.points import base_path, join
from tests.every_type.plain import Place, editing, outputs_inside, read_behind
from tests.every_type.subject import NEAR, Absent, Subject, Wrong, arranged, logits_of
from tests.every_type.sums import uncapped


def lens_is_the_model(subject: Subject) -> None:
    """The lens at each layer is what the plain model says when that stream is behind its last
    block.
    """
    subject.needs_tokens()
    with torch.no_grad():
        reading = subject.bridge.lens(subject.tokens)
        n = len(subject.paths)
        for layer in range(n + 1):
            stream = subject.stream(layer)
            with subject.edited(n, lambda x, stream=stream: stream):
                theirs = subject.run()
            subject.same(reading.logits(layer), theirs, f"layer {layer}")


def raw_lens_skips_the_norm(subject: Subject) -> None:
    """The raw lens of the last stream is what the plain model says when nothing behind the blocks
    changes it.
    """
    subject.needs_tokens()
    architecture = subject.bridge.architecture
    norm = architecture.stacks[-1].final_norm
    with torch.no_grad():
        reading = subject.bridge.lens(subject.tokens, kind="raw")
        stream = subject.stream(len(subject.paths))
        if "readout" in architecture.unknown or any(head.unembeds for head in architecture.heads):
            place = Place(architecture.readout.path, "input")
        elif norm is not None and not norm.path:
            raise Absent("the final norm is no module: no plain hook skips it")
        else:
            place = Place(join(base_path(subject.hf), norm.path), "output") if norm else None
        with (
            nullcontext()
            if place is None
            else editing(subject.hf, place, lambda x: stream.reshape(x.shape))
        ):
            theirs = subject.run()
    subject.same(reading.logits(-1).double(), uncapped(subject, theirs), "the end")


def last_stream_through_the_norm(subject: Subject) -> None:
    """`accumulated_resid(apply_ln=True)` is what is read behind the blocks; by ``W_U`` and ``b_U``,
    the logits.
    """
    with torch.no_grad():
        stream = subject.cache.accumulated_resid(apply_ln=True)[-1]
        if "readout" in subject.bridge.architecture.unknown:
            raise Absent("how logits are made of it is not known, which is said")
        if not any(head.unembeds for head in subject.bridge.architecture.heads):
            ours = (stream @ subject.bridge.W_U + subject.bridge.b_U).double()
            subject.same(ours, uncapped(subject), "logits")
            return
        # Another layer reads it, the first behind the blocks that is given all positions.
        read = [
            x
            for x in read_behind(subject.hf, subject.paths, subject.run)
            if x.numel() == stream.numel()
        ]
    if not read:
        raise Absent("no layer behind the blocks is given a stream")
    subject.same(stream, read[0], "what is read")


def accumulated_streams_are_the_models(subject: Subject) -> None:
    """`accumulated_resid` is what enters each layer, and what leaves the last."""
    stack = subject.cache.accumulated_resid()
    for layer in range(len(subject.paths) + 1):
        subject.same(stack[layer], subject.stream(layer), f"layer {layer}", near=None)


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


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, equation: str) -> Tensor:
    made = torch.einsum(equation, x.double(), weight.double())
    return made if bias is None else made + bias.double()


def _is_read(
    subject: Subject,
    plain: Mapping[Place, Tensor],
    weight: Tensor,
    bias: Tensor | None,
    equation: str,
    out: Tensor,
    what: str,
) -> None:
    """An activation is the product of a weight with what a module of the plain model is given."""
    read = [
        arranged(x, torch.empty(*out.shape[:2], len(weight)))
        for place, x in plain.items()
        if place.side == "input"
        and x.shape[-1] == len(weight)
        and x.numel() == len(weight) * out.shape[:2].numel()
    ]
    if not read:
        subject.not_seen.append(
            f"{what}: no module of the plain model is given {len(weight)} numbers"
        )
        return
    subject.compared += 1
    made = [_product(x, weight, bias, equation) for x in read]
    apart = min(float((each - out).abs().max()) for each in made)
    if not apart <= NEAR * float(out.abs().max()):
        raise Wrong(
            f"{what}: differs by {apart:.1e} from the product with what any module is given"
        )


@torch.no_grad()
def weights_explain_attention(subject: Subject) -> None:
    """Queries, keys and values are what the plain model's attention reads times ``W_Q``...; it puts
    out z ``W_O``.
    """
    for block, path, part in (
        (*layer, part) for layer in subject.layers for part in ("attn", "cross_attn")
    ):
        prefix = f"{block}.{part}"
        points = [f"{prefix}.hook_{x}" for x in ("q", "k", "v")]
        if not any(map(subject.named, (*points, f"{prefix}.hook_z"))):
            continue
        held, plain = _part(subject, block, part), outputs_inside(subject.hf, path, subject.run)
        for point in filter(subject.named, points):
            name = point[-1].upper()
            weight, out = _weight(held, f"W_{name}"), _kept(subject, point)[0]
            if weight is None:
                subject.not_seen.append(f"{prefix}.W_{name} is not offered")
                continue
            if len(weight) % out.shape[2]:
                raise Wrong(
                    f"{prefix}.W_{name} has {len(weight)} heads, the activation {out.shape[2]}"
                )
            out = out.repeat_interleave(len(weight) // out.shape[2], 2)
            weight = weight.permute(1, 0, 2)
            _is_read(
                subject, plain, weight, _weight(held, f"b_{name}"), "bpd,dhe->bphe", out, point
            )
        if subject.named(f"{prefix}.hook_z") and subject.named(f"{prefix}.hook_out"):
            written = subject.written(prefix)
            z, out = _kept(subject, f"{prefix}.hook_z", written)
            made = _product(z, held.W_O, _weight(held, "b_O"), "bphe,hed->bpd")
            subject.same(made, out.double(), written)


@torch.no_grad()
def weights_explain_mlps(subject: Subject) -> None:
    """Before its activation function an MLP has what it reads times ``W_in``; it puts out
    ``hook_post @ W_out``.
    """
    for block, path in subject.layers:
        prefix = f"{block}.mlp"
        if not subject.named(f"{prefix}.hook_post"):
            continue
        held, plain = _part(subject, block, "mlp"), outputs_inside(subject.hf, path, subject.run)
        if subject.named(f"{prefix}.hook_out"):
            written = subject.written(prefix)
            post, out = _kept(subject, f"{prefix}.hook_post", written)
            made = _product(post, held.W_out, _weight(held, "b_out"), "bpm,md->bpd")
            subject.same(made, out.double(), written)
        points = {"in": "hook_pre_linear", "gate": "hook_pre"}
        for name, point in (
            points if _weight(held, "W_gate") is not None else {"in": "hook_pre"}
        ).items():
            if subject.named(f"{prefix}.{point}"):
                out, weight = _kept(subject, f"{prefix}.{point}")[0], _weight(held, f"W_{name}")
                if weight is None:
                    subject.not_seen.append(f"{prefix}.W_{name} is not offered")
                    continue
                bias = _weight(held, f"b_{name}")
                _is_read(subject, plain, weight, bias, "bpd,dm->bpm", out, f"{prefix}.{point}")


def weights_explain_the_ends(subject: Subject) -> None:
    """Where a layer comes before the unembedding, the logits are what it puts out times ``W_U``,
    and ``b_U``.
    """
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
    """Attention patterns equal what the model returns when it computes them itself."""
    with subject.itself(), torch.no_grad():
        model = subject.case.model(attn_implementation="eager")
        torch.manual_seed(0)
        output = model(**arguments_of(model, *subject.inputs), output_attentions=True)
    if not torch.allclose(
        logits_of(output), subject.logits, rtol=1e-2, atol=1e-3 * float(subject.logits.abs().max())
    ):
        raise Absent("the model itself: its eager form computes something else")
    for stack, key in (
        ("blocks", "attentions"),
        ("encoder", "encoder_attentions"),
        ("decoder", "decoder_attentions"),
    ):
        attentions = getattr(output, key, None)
        if stack not in subject.stacks:
            continue
        if attentions is None:
            subject.not_seen.append(f"the model returns no patterns of {stack}")
            continue
        points = [
            i
            for i in range(len(subject.stacks[stack]))
            if subject.named(f"{stack}.{i}.attn.hook_pattern")
        ]
        if len(attentions) == len(subject.stacks[stack]):
            attentions = [attentions[i] for i in points]
        first = next((x for x in attentions if isinstance(x, Tensor)), None)
        another = (
            first is not None
            and subject.main == stack
            and first.shape[-2] != subject.stream(0).shape[1]
        )
        if (
            len(attentions) != len(points) or another
        ):  # those of another tower (BLIP returns its images')
            subject.not_seen.append(
                f"the model returns {len(attentions)} patterns of {len(points)} layers in {stack}"
            )
            continue
        for i, theirs in zip(points, attentions, strict=True):
            if isinstance(theirs, Tensor):
                if bool((theirs < 0).any()):  # what the softmax is given (ProphetNet's encoder)
                    theirs = theirs.softmax(-1)
                ours = subject.cache[f"{stack}.{i}.attn.hook_pattern"]
                subject.same(ours, theirs, f"{stack}.{i}.attn.hook_pattern")


PROPERTIES = {
    "lens": lens_is_the_model,
    "raw lens": raw_lens_skips_the_norm,
    "accumulated": accumulated_streams_are_the_models,
    "final norm": last_stream_through_the_norm,
    "W attention": weights_explain_attention,
    "W mlp": weights_explain_mlps,
    "W ends": weights_explain_the_ends,
    "patterns": patterns_are_the_models,
}
