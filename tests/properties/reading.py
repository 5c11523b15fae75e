"""Weights, patterns, lenses: what is read off a model."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.properties.subject import Absent, Subject, Wrong
from tests.properties.sums import uncapped


def lens_is_the_model(subject: Subject) -> None:
    """The lens at each layer is what the plain model says when that stream stands behind its last block."""
    subject.needs_plain_text()
    with torch.no_grad():
        reading = subject.ours(subject.bridge.lens)
        n = len(subject.paths)
        for layer in range(n + 1):
            stream = subject.stream(layer)
            with subject.edited(n, lambda x, stream=stream: stream):
                theirs = subject.run()
            subject.same(reading.logits(layer), theirs, f"layer {layer}")


def raw_lens_is_the_unembedding(subject: Subject) -> None:
    """The raw lens is the model's unembedding of a stream that no norm has seen, without a soft cap."""
    subject.needs_plain_text()
    n = len(subject.paths)
    with torch.no_grad():
        reading = subject.ours(subject.bridge.lens, kind="raw")
        head, stream = subject.hf.get_output_embeddings(), subject.stream(n)
        if head is None:
            raise Absent("the model does not say what its unembedding is")
        handle = head.register_forward_pre_hook(lambda module, args: (stream.reshape(args[0].shape),))
        with subject.itself():
            theirs = subject.run()  # what follows the unembedding is a part of it, but for the cap
        handle.remove()
    plain, subject.__dict__["_plain"] = subject.__dict__.get("_plain"), (theirs, {})
    theirs = uncapped(subject)
    if plain is not None:
        subject.__dict__["_plain"] = plain
    else:
        del subject.__dict__["_plain"]
    subject.same(reading.logits(-1).double(), theirs, "the end", near=1e-3)


def last_stream_through_the_norm(subject: Subject) -> None:
    """`accumulated_resid(apply_ln=True)` times ``W_U``, with ``b_U``, are the model's logits, before a soft cap."""
    with torch.no_grad():
        stream = subject.cache.accumulated_resid(apply_ln=True)[-1]
        ours = (stream @ subject.bridge.W_U + subject.bridge.b_U).double()
    subject.same(ours, uncapped(subject), "logits")


def accumulated_streams_are_the_models(subject: Subject) -> None:
    """`accumulated_resid` is what enters each layer, and what leaves the last."""
    stack = subject.cache.accumulated_resid()
    for layer in range(len(subject.paths) + 1):
        subject.same(stack[layer], subject.stream(layer), f"layer {layer}", near=None)


def _as_product(subject: Subject, x: Tensor, weight: Tensor, bias: Tensor | None, equation: str, theirs: Tensor, what: str) -> None:
    ours = torch.einsum(equation, x.double(), weight.double())
    subject.same(ours if bias is None else ours + bias.double(), theirs.double(), what)


def _weight(part: object, name: str) -> Tensor | None:
    try:
        found = getattr(part, name)
    except AttributeError:
        return None
    return found if isinstance(found, Tensor) else None


def weights_explain_attention(subject: Subject) -> None:
    """Queries, keys and values are what attention reads times ``W_Q``...; what it puts out is z times ``W_O``."""
    bridge = subject.bridge
    for layer in range(len(subject.paths)):
        prefix = f"blocks.{layer}.attn"
        for x in ("q", "k", "v"):
            if not subject.named(f"{prefix}.hook_{x}") or not subject.named(f"{prefix}.{x}.hook_in"):
                continue
            part = bridge.blocks[layer].attn
            weight = getattr(part, f"W_{x.upper()}")
            with torch.no_grad():
                _, cache = subject.ours(bridge.run_with_cache, names_filter=[f"{prefix}.{x}.hook_in", f"{prefix}.hook_{x}"])
                out = cache[f"{prefix}.hook_{x}"]
                if weight.shape[0] != out.shape[2]:
                    if weight.shape[0] % out.shape[2]:
                        raise Wrong(f"{prefix}.W_{x.upper()} has {weight.shape[0]} heads, the activation {out.shape[2]}")
                    repeat = weight.shape[0] // out.shape[2]
                    out = out.repeat_interleave(repeat, 2)
                read = cache[f"{prefix}.{x}.hook_in"]
                _as_product(subject, read, weight, _weight(part, f"b_{x.upper()}"), "bpd,hde->bphe", out, f"{prefix}.hook_{x}")
    for layer in range(len(subject.paths)):
        prefix = f"blocks.{layer}.attn"
        if subject.named(f"{prefix}.hook_z") and subject.named(f"{prefix}.hook_out"):
            part = bridge.blocks[layer].attn
            with torch.no_grad():
                _, cache = subject.ours(bridge.run_with_cache, names_filter=[f"{prefix}.hook_z", f"{prefix}.hook_out"])
                _as_product(
                    subject, cache[f"{prefix}.hook_z"], part.W_O, _weight(part, "b_O"), "bphe,hed->bpd",
                    cache[f"{prefix}.hook_out"], f"{prefix}.hook_out",
                )


def weights_explain_mlps(subject: Subject) -> None:
    """What an MLP computes before its activation function is what it reads times ``W_in``; what it puts out, ``W_out``."""
    bridge = subject.bridge
    for layer in range(len(subject.paths)):
        prefix = f"blocks.{layer}.mlp"
        names = [name for name in ("hook_in", "hook_pre", "hook_pre_linear", "hook_post", "hook_out") if subject.named(f"{prefix}.{name}")]
        if "hook_post" not in names or any(".experts." in name and name.startswith(prefix) for name in bridge.hook_dict):
            continue
        part = bridge.blocks[layer].mlp
        with torch.no_grad():
            _, cache = subject.ours(bridge.run_with_cache, names_filter=[f"{prefix}.{name}" for name in names])
            if "hook_out" in names:
                _as_product(
                    subject, cache[f"{prefix}.hook_post"], part.W_out, _weight(part, "b_out"), "bpm,md->bpd",
                    cache[f"{prefix}.hook_out"], f"{prefix}.hook_out",
                )
            if subject.named(f"{prefix}.in.hook_in"):
                _, read = subject.ours(bridge.run_with_cache, names_filter=f"{prefix}.in.hook_in")
                gated = "hook_pre_linear" in names
                _as_product(
                    subject, read[f"{prefix}.in.hook_in"], part.W_in, _weight(part, "b_in"), "bpd,dm->bpm",
                    cache[f"{prefix}.hook_pre_linear" if gated else f"{prefix}.hook_pre"], f"{prefix}.hook_pre",
                )


def weights_explain_the_ends(subject: Subject) -> None:
    """The logits are what the unembedding reads times ``W_U``; the embedding of a token is its row of ``W_E``."""
    bridge, head = subject.bridge, subject.hf.get_output_embeddings()
    if head is not None and subject.named("unembed.hook_out"):
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
    model = subject.case.model()
    try:
        model.set_attn_implementation("eager")
    except (ValueError, AttributeError, NotImplementedError) as error:
        raise Absent("its attention has no eager form") from error
    with torch.no_grad():
        torch.manual_seed(0)
        from adapters.inputs.made import arguments_of

        output = model(**arguments_of(model, *subject.inputs), output_attentions=True)
    for stack, key in (("blocks", "attentions"), ("encoder", "encoder_attentions"), ("decoder", "decoder_attentions")):
        attentions = getattr(output, key, None)
        if stack not in subject.stacks or attentions is None:
            continue
        points = [i for i in range(len(subject.stacks[stack])) if subject.named(f"{stack}.{i}.attn.hook_pattern")]
        if len(attentions) == len(subject.stacks[stack]):
            attentions = [attentions[i] for i in points]
        if len(attentions) != len(points):
            continue
        for i, theirs in zip(points, attentions, strict=True):
            if isinstance(theirs, Tensor):
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
