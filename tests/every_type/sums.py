"""What the residual stream and the logits are the sum of."""

from __future__ import annotations

import torch
from torch import Tensor

from bridge.analysis.logit_lens import head_contributions
from tests.every_type.plain import Place, editing, outputs_inside, seen
from tests.every_type.subject import Subject, Wrong

#: Fields of configurations that name a soft cap on the logits.
_CAPS = (
    "final_logit_softcapping",
    "logits_soft_cap",
    "output_logit_soft_cap",
    "final_logits_soft_cap",
    "logit_softcap",
)


def uncapped(subject: Subject, logits: Tensor | None = None) -> Tensor:
    """The plain model's logits, or those of another run of it, before a soft cap, in float64."""
    logits = (subject.logits if logits is None else logits).double()
    config = subject.hf.config.get_text_config()
    for name in _CAPS:
        if cap := getattr(config, name, None):
            logits = torch.atanh(logits / cap) * cap
    return logits


def terms_sum_to_the_stream(subject: Subject) -> None:
    """`decompose_resid` of each layer sums to what enters it."""
    for layer in range(len(subject.paths) + 1):
        terms = subject.cache.decompose_resid(layer)
        subject.same(
            terms.sum(0), subject.stream(layer), f"layer {layer}", scale=float(terms.abs().max())
        )


def terms_sum_inside_blocks(subject: Subject) -> None:
    """`decompose_resid(mlp_input=True)` sums to the stream between attention and MLP."""
    for layer in range(len(subject.paths)):
        if f"blocks.{layer}.hook_resid_mid" not in subject.cache:
            continue
        terms = subject.cache.decompose_resid(layer, mlp_input=True)
        middle = subject.cache[f"blocks.{layer}.hook_resid_mid"]
        found = outputs_inside(subject.hf, subject.paths[layer], subject.run)
        given = [x for x in found.values() if x.numel() == middle.numel()]
        turned = [
            x.transpose(0, 1) for x in given if x.ndim == 3
        ]  # positions before the batch (XLNet)
        if not any(torch.equal(x.reshape(-1), middle.reshape(-1)) for x in (*given, *turned)):
            raise Wrong(f"layer {layer}: no module of the model is given hook_resid_mid")
        subject.same(terms.sum(0), middle, f"layer {layer}", scale=float(terms.abs().max()))


def heads_and_biases_sum_to_the_stream(subject: Subject) -> None:
    """`get_full_resid_decomposition` of each layer sums to what enters it."""
    for layer in range(len(subject.paths) + 1):
        terms = subject.cache.get_full_resid_decomposition(
            layer, expand_neurons=False, post_norms=True
        )
        subject.same(
            terms.sum(0), subject.stream(layer), f"layer {layer}", scale=float(terms.abs().max())
        )


def neurons_sum_to_the_stream(subject: Subject) -> None:
    """`get_full_resid_decomposition` with neurons sums to the last stream."""
    n = len(subject.paths)
    terms = subject.cache.get_full_resid_decomposition(n, expand_neurons=True, post_norms=True)
    subject.same(terms.sum(0), subject.stream(n), "the end", scale=float(terms.abs().max()))


def heads_sum_to_what_attention_writes(subject: Subject) -> None:
    """The heads' parts, and the bias, sum to what attention writes; one part is what goes with that
    head's z.
    """
    for block, path in subject.layers:
        for part in ("attn", "cross_attn"):
            if subject.named(f"{block}.{part}.hook_result"):
                _heads_of(subject, f"{block}.{part}", path, part)


def _heads_of(subject: Subject, prefix: str, path: str, part: str) -> None:
    names = [f"{prefix}.hook_result", f"{prefix}.hook_z", subject.written(prefix)]
    with torch.no_grad():
        _, cache = subject.ours(subject.bridge.run_with_cache, names_filter=names)
    result, z, written = (cache[name] for name in names)
    stack, _, layer = prefix.removesuffix(f".{part}").partition(".")
    bias = getattr(getattr(getattr(subject.bridge, stack)[int(layer)], part), "b_O", None)
    subject.same(result.sum(-2) if bias is None else result.sum(-2) + bias, written, prefix)
    place = place_given(subject, path, z)
    if place is None:
        return
    output = {"": Place(place.path, "output")}
    with torch.no_grad():
        _, whole = seen(subject.hf, output, subject.run)
        for head in range(z.shape[-2]):

            def off(x: Tensor, head: int = head) -> Tensor:
                new = x.clone().reshape(z.shape)
                new[..., head, :] = 0
                return new.reshape(x.shape)

            with editing(subject.hf, place, off):
                _, without = seen(subject.hf, output, subject.run)
            of_head = (whole[""] - without[""]).reshape(written.shape)
            factor = float(
                (of_head * result[..., head, :]).sum() / (of_head * of_head).sum()
            )  # behind the layer
            subject.same(
                result[..., head, :], of_head * factor, f"{prefix}, head {head}", near=1e-3
            )


def place_given(subject: Subject, path: str, x: Tensor) -> Place | None:
    """The innermost module of a block of the plain model that is given this tensor."""
    inside = outputs_inside(subject.hf, path, subject.run)
    found = [
        place
        for place, y in inside.items()
        if place.side == "input"
        and y.numel() == x.numel()
        and torch.equal(y.reshape(-1), x.reshape(-1))
    ]
    return max(found, key=lambda place: place.path.count("."), default=None)


def stacked_heads_are_the_heads(subject: Subject) -> None:
    """`stack_head_results`, with the remainder, sums to the last stream."""
    n = len(subject.paths)
    terms = subject.cache.stack_head_results(n, incl_remainder=True, post_norms=True)
    subject.same(terms.sum(0), subject.stream(n), "the end", scale=float(terms.abs().max()))


def constant_of(subject: Subject, one: int, other: int) -> Tensor:
    """What the difference of two logits has that no term of the stream adds."""
    bridge = subject.bridge
    direction = (bridge.W_U[:, one] - bridge.W_U[:, other]).double()
    constant = (bridge.b_U[one] - bridge.b_U[other]).double()
    bias = getattr(getattr(bridge, "ln_final", None), "b", None)
    return constant if bias is None else constant + bias.double() @ direction


def attributions_sum_to_the_logits(subject: Subject) -> None:
    """`logit_attrs` of all terms, with the constants, is the difference of two logits."""
    stack = subject.cache.decompose_resid()
    for one, other in ((5, 7), (11, 60)):
        parts = subject.cache.logit_attrs(stack, one, other).double()
        whole = uncapped(subject)
        whole = whole[..., one] - whole[..., other]
        with torch.no_grad():
            constant = constant_of(subject, one, other)
        subject.same(
            parts.sum(0) + constant,
            whole,
            f"logits {one} and {other}",
            scale=float(parts.abs().max()),
        )


def attributions_of_heads_sum_to_the_logits(subject: Subject) -> None:
    """`logit_attrs` of heads, MLPs, embeddings and biases, with the constants, is the difference of
    two logits.
    """
    stack = subject.cache.get_full_resid_decomposition(expand_neurons=False, post_norms=True)
    parts = subject.cache.logit_attrs(stack, 5, 7).double()
    whole = uncapped(subject)
    whole = whole[..., 5] - whole[..., 7]
    with torch.no_grad():
        constant = constant_of(subject, 5, 7)
    subject.same(parts.sum(0) + constant, whole, "logits 5 and 7", scale=float(parts.abs().max()))


def head_contributions_are_the_attributions(subject: Subject) -> None:
    """`head_contributions` is what each head adds to the logits: of each, what `logit_attrs` says
    of it.
    """
    subject.needs_plain_text()
    one, other = (torch.full((subject.tokens.shape[0],), token) for token in (5, 7))
    found = head_contributions(subject.bridge, subject.tokens, one, other)  # batch layer head
    stack, labels = subject.cache.stack_head_results(
        pos_slice=-1, post_norms=True, return_labels=True
    )
    parts = subject.cache.logit_attrs(stack, 5, 7, pos_slice=-1)
    for part, label in zip(parts, labels, strict=True):
        layer, number = map(int, label[1:].split("H"))
        subject.same(found[:, layer, number], part, label, scale=float(parts.abs().max()))


PROPERTIES = {
    "terms": terms_sum_to_the_stream,
    "terms mid": terms_sum_inside_blocks,
    "full terms": heads_and_biases_sum_to_the_stream,
    "neurons": neurons_sum_to_the_stream,
    "heads": heads_sum_to_what_attention_writes,
    "head stack": stacked_heads_are_the_heads,
    "attributions": attributions_sum_to_the_logits,
    "head attributions": attributions_of_heads_sum_to_the_logits,
    "head contributions": head_contributions_are_the_attributions,
}
