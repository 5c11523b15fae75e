"""Runs: idle, padded, of some layers, continued, edited, lowered, traced."""

from __future__ import annotations

import inspect
from contextlib import suppress

import torch
from torch import Tensor

from adapters.inputs import arguments_of, with_stream
from bridge.patching import get_act_patch_attn_head_out_all_pos, get_act_patch_resid_pre
from tests.every_type.plain import Place, editing, outputs_inside
from tests.every_type.subject import Absent, Subject, Wrong, logits_of


def idle_is_the_model(subject: Subject) -> None:
    """`bridge(tokens)` is `hf(tokens)`, and a cached run, bit by bit; nothing is left behind."""
    with torch.no_grad():
        subject.same(subject.ours(), subject.logits, "logits", near=None)
        logits, _ = subject.ours(subject.bridge.run_with_cache)
        subject.same(logits, subject.logits, "logits of a cached run", near=None)
        torch.manual_seed(0)
        subject.same(
            logits_of(subject.bridge.core(**arguments_of(subject.hf, *subject.inputs))),
            subject.logits,
            "after",
            near=None,
        )
    left = [
        name
        for name, module in subject.bridge.original_model.named_modules()
        if module._forward_hooks or module._forward_pre_hooks
    ]
    before = [
        name
        for name, module in subject.hf.named_modules()
        if module._forward_hooks or module._forward_pre_hooks
    ]
    if left != before:
        raise Wrong(f"hooks are left at {left[:3]}")
    theirs, ours = subject.hf.state_dict(), subject.bridge.state_dict()
    if list(theirs) != list(ours):
        raise Wrong("another state dict")


def streams_are_the_models(subject: Subject) -> None:
    """What enters and leaves each block is what the hook points show."""
    for name, paths in subject.stacks.items():
        for layer in range(len(paths)):
            point = f"{name}.{layer}.hook_resid_pre"
            if point in subject.cache:
                subject.same(subject.cache[point], subject.stream(layer, name), point, near=None)
            else:
                subject.not_seen.append(f"there is no {point}")
        last = f"{name}.{len(paths) - 1}"
        for end in (f"{last}.hook_normalized_resid_post", f"{last}.hook_resid_post"):
            if end in subject.cache:
                subject.same(subject.cache[end], subject.stream(len(paths), name), end, near=None)
                break
        else:
            subject.not_seen.append(f"there is no {last}.hook_resid_post")


def _padded(subject: Subject, side: str) -> None:
    subject.needs_tokens()
    taken = inspect.signature(subject.hf.forward).parameters
    if "attention_mask" not in taken:
        raise Absent("the model takes no mask")
    tokens, n = subject.tokens, subject.tokens.shape[1]
    rows = [tokens[0], tokens[1, :6], tokens[2, :8]]
    padded, mask, at = torch.zeros_like(tokens), torch.zeros_like(tokens), []
    for i, row in enumerate(rows):
        where = slice(n - len(row), None) if side == "left" else slice(0, len(row))
        padded[i, where], mask[i, where] = row, 1
        at.append(where)
    written = subject.more.get("decoder_input_ids")
    if written is not None:
        at = [slice(None)] * len(rows)  # the decoder's rows are whole

    def alone(i: int) -> Tensor:
        return subject.run(
            rows[i][None], **({} if written is None else {"decoder_input_ids": written[i : i + 1]})
        )[0]

    with torch.no_grad():
        with subject.itself():
            singly = [alone(i) for i in range(len(rows))]
            subject.run(padded, attention_mask=mask)
        ours = subject.ours(tokens=padded, attention_mask=mask)
        size = max(float(x.abs().max()) for x in singly)
        if any(
            len(x) != len(ours[i, where])
            for i, (where, x) in enumerate(zip(at, singly, strict=True))
        ):
            raise Absent("it has no logits for each position")

        def apart(logits: Tensor) -> float:
            pairs = zip(at, singly, strict=True)
            return (
                max(float((logits[i, where] - x).abs().max()) for i, (where, x) in enumerate(pairs))
                / size
            )

        # What the model itself makes of the mask, and of every numbering of positions that leaves a
        # whole row alone.
        numbered = _numbered(subject, padded, mask) if "position_ids" in taken else []
        near = {"rtol": 1e-3, "atol": 1e-3 * size}
        theirs = [subject.run(padded, attention_mask=mask)]
        theirs += [logits for logits in numbered if torch.allclose(logits[0], singly[0], **near)]
    if min(map(apart, theirs)) <= 1e-3 or apart(ours) <= 1e-3:
        for i, (where, x) in enumerate(zip(at, singly, strict=True)):
            subject.same(ours[i, where], x, f"row {i}", near=1e-3, scale=size)
        return
    # It sees its padding whatever it is told (docs/limits.md). Then the run is the model's own.
    nearest = min(
        theirs, key=lambda x: float((x - ours)[mask.bool() if written is None else ...].abs().max())
    )
    for i, where in enumerate(at):
        subject.same(
            ours[i, where],
            nearest[i, where],
            f"row {i}, as the model itself",
            near=1e-3,
            scale=size,
        )
    subject.not_seen.append(
        "the model itself gives a padded row a different result, and a run returns the model's"
    )


def _numbered(subject: Subject, padded: Tensor, mask: Tensor) -> list[Tensor]:
    """What the model makes of rows whose tokens are numbered from 0, 1 and 2, where it can."""
    places = (mask.cumsum(-1) - 1).clamp_min(0)
    with suppress(Absent), subject.itself():
        return [
            subject.run(padded, attention_mask=mask, position_ids=places + first)
            for first in (0, 1, 2)
        ]
    return []


def padded_behind(subject: Subject) -> None:
    """A right-padded row gives the same result as without padding."""
    _padded(subject, "right")


def padded_in_front(subject: Subject) -> None:
    """A left-padded row gives the same result as without padding."""
    _padded(subject, "left")


def starts_at_a_layer(subject: Subject) -> None:
    """A run that starts at a layer, with what enters it, ends in the model's logits."""
    blocks, n = subject.bridge.architecture.stack, len(subject.paths)
    others = [
        part.keys_of
        for i in range(n)
        for part in blocks.block_at(i).attentions
        if part.keys_of is not None
    ]
    told = with_stream(subject.bridge.core, subject.tokens, subject.more)
    with torch.no_grad():
        for layer in [
            *range(min([n, *(each + 1 for each in others)])),
            n,
        ]:  # keys of a block that is left out
            logits = subject.bridge(subject.stream(layer), start_at_layer=layer, **told)
            subject.same(logits, subject.logits, f"from layer {layer}")


def stops_at_a_layer(subject: Subject) -> None:
    """A run that stops at a layer returns what would enter it."""
    with torch.no_grad():
        for layer in range(len(subject.paths) + 1):
            found = subject.ours(stop_at_layer=layer)
            subject.same(found, subject.stream(layer), f"at layer {layer}", near=None)


def goes_on_with_a_past(subject: Subject) -> None:
    """A prompt in two parts gives the logits that the model itself gives."""
    subject.needs_tokens()
    config = subject.hf.config.get_text_config(decoder=True)
    if not getattr(config, "use_cache", False) or not getattr(config, "is_decoder", True):
        raise Absent("the model keeps no past")
    written, cut = subject.more.get("decoder_input_ids", subject.tokens), 4

    def part(which: slice) -> tuple[Tensor, dict[str, Tensor]]:
        if "decoder_input_ids" in subject.more:
            return subject.tokens, {**subject.more, "decoder_input_ids": written[:, which]}
        subject.needs_plain_text()
        return subject.tokens[:, which], {}

    (tokens, more), (later, later_more) = part(slice(0, cut)), part(slice(cut, None))
    with torch.no_grad():
        with subject.itself():
            torch.manual_seed(0)
            first = subject.hf(**arguments_of(subject.hf, tokens, more), use_cache=True)
            past = getattr(first, "past_key_values", None)
            if past is None:
                raise Absent("the model keeps no past")
            arguments = arguments_of(subject.hf, later, later_more)
            theirs = logits_of(subject.hf(**arguments, past_key_values=past, use_cache=True))
        torch.manual_seed(0)
        logits, ours = subject.bridge(
            tokens, return_type="logits_and_cache", use_cache=True, **more
        )
        subject.same(logits, logits_of(first), "the first part", near=None)
        again, cache = subject.bridge.run_with_cache(
            later, past_key_values=ours, use_cache=True, **later_more
        )
        subject.same(again, theirs, "the rest")
    whole = subject.logits[:, -theirs.shape[1] :]
    if torch.allclose(
        theirs, whole, rtol=1e-3, atol=1e-3
    ):  # the model itself goes on as if there were one text
        for layer in range(len(subject.paths)):
            name = f"{subject.main}.{layer}.hook_resid_pre"
            if name in cache:
                subject.same(cache[name], subject.stream(layer)[:, cut:], name, near=1e-3)


def _halved(x: Tensor) -> Tensor:
    return x * 0.5


def places_of(subject: Subject, block: str, path: str, names: tuple[str, ...]) -> dict[str, Place]:
    """Where in the plain model the hook points of a block stand: found by what the model's modules
    put out.
    """
    found = outputs_inside(subject.hf, path, subject.run)
    places = {}
    for name in (f"{block}.{name}" for name in names):
        if name in subject.cache:
            x = subject.cache[name].reshape(-1)
            fits = [
                p
                for p, y in found.items()
                if y.numel() == x.numel() and torch.equal(y.reshape(-1), x)
            ]
            # What a module is given is also what the skip connection adds.
            for place in fits:
                if place.side == "output":
                    places[name] = place
    return places


def edits_mean_what_they_say(subject: Subject) -> None:
    """Halving what enters a block, or is added in it, gives the logits that a plain torch hook
    gives.
    """
    for block, path in subject.layers:
        places = {}
        if "not modules" not in subject.bridge.no_layer_runs and subject.named(
            f"{block}.hook_resid_pre"
        ):
            places[f"{block}.hook_resid_pre"] = subject.border(path)
        inside = ("hook_attn_out", "hook_mlp_out", "hook_mixer_out", "hook_cross_attn_out")
        for name, place in (places | places_of(subject, block, path, inside)).items():
            with torch.no_grad():
                with editing(subject.hf, place, _halved):
                    theirs = subject.run()
                ours = subject.ours(
                    subject.bridge.run_with_hooks, fwd_hooks=[(name, lambda x, hook: x * 0.5)]
                )
            subject.same(ours, theirs, f"{name} halved")


def patches_are_plain_hooks(subject: Subject) -> None:
    """A sweep of patches of the stream gives, for each, what a plain torch hook gives."""
    subject.needs_plain_text()
    subject.needs_blocks()
    n, clean, corrupted = len(subject.paths), subject.tokens[:1], subject.tokens[1:2]
    with torch.no_grad():
        _, cache = subject.ours(subject.bridge.run_with_cache, clean)

        def metric(logits: Tensor) -> Tensor:
            return logits[0, -1, 5] - logits[0, -1, 7]

        found = get_act_patch_resid_pre(subject.bridge, corrupted, cache, metric, verbose=False)
        expected = torch.full((n, clean.shape[1]), float("nan"))
        for layer in range(n):
            if not subject.named(f"blocks.{layer}.hook_resid_pre"):
                continue
            entering = [torch.zeros(0)]

            def keep(x: Tensor, entering: list[Tensor] = entering) -> None:
                entering[0] = x.clone()

            with subject.edited(layer, keep):
                subject.run(clean)
            for pos in range(clean.shape[1]):

                def put(x: Tensor, entering: list[Tensor] = entering, pos: int = pos) -> Tensor:
                    new, axis = x.clone(), 1 if x.shape[0] == 1 else 0
                    new.select(axis, pos).copy_(entering[0].select(axis, pos))
                    return new

                with subject.edited(layer, put):
                    expected[layer, pos] = metric(subject.run(corrupted))
    subject.same(found, expected, "the sweep", near=1e-3)


def patches_of_heads_are_plain_hooks(subject: Subject) -> None:
    """A sweep of patches of heads gives, for each, what a plain torch hook at the output layer's
    input gives.
    """
    subject.needs_plain_text()
    clean, corrupted = subject.tokens[:1], subject.tokens[1:2]
    with torch.no_grad():
        _, cache = subject.ours(subject.bridge.run_with_cache, clean)

        def metric(logits: Tensor) -> Tensor:
            return logits[0, -1, 5] - logits[0, -1, 7]

        expected: dict[tuple[int, int], Tensor] = {}
        for layer, path in enumerate(subject.paths):
            name = f"blocks.{layer}.attn.hook_z"
            if name not in cache:
                continue
            z = cache[name]
            inside = outputs_inside(subject.hf, path, lambda: subject.run(clean))
            fits = [
                p
                for p, y in inside.items()
                if p.side == "input"
                and y.numel() == z.numel()
                and torch.equal(y.reshape(-1), z.reshape(-1))
            ]
            if not fits:
                continue
            for head in range(z.shape[2]):

                def put(x: Tensor, z: Tensor = z, head: int = head) -> Tensor:
                    new = x.clone().reshape(z.shape)
                    new[:, :, head] = z[:, :, head]
                    return new.reshape(x.shape)

                with editing(subject.hf, fits[0], put):
                    expected[layer, head] = metric(subject.run(corrupted))
        if not expected:
            raise Absent("no module is given hook_z")
        found = get_act_patch_attn_head_out_all_pos(
            subject.bridge, corrupted, cache, metric, verbose=False
        )
    at = list(expected)
    subject.same(
        torch.stack([found[i] for i in at]),
        torch.stack([expected[i] for i in at]),
        "the sweep",
        near=1e-3,
    )


def programs_are_runs(subject: Subject) -> None:
    """A program's logits and captures are the model's, also of an edited run."""
    name = f"{next(iter(subject.stacks))}.1.hook_resid_pre"
    if not subject.named(name):
        raise Absent("its blocks have no hook points")
    program = subject.bridge.program(capture=[name])
    with torch.no_grad():
        torch.manual_seed(0)
        outputs = program(subject.tokens, **subject.more)
        subject.same(outputs["logits"], subject.logits, "logits", near=None)
        subject.same(outputs[name], subject.stream(1, name.partition(".")[0]), name, near=None)
        edited = subject.bridge.program(interventions=[(name, lambda x, hook: x * 0.5)])
        with subject.edited(1, _halved, name.partition(".")[0]):
            theirs = subject.run()
        torch.manual_seed(0)
        subject.same(
            edited(subject.tokens, **subject.more)["logits"], theirs, "logits of an edited run"
        )


def traces_are_runs(subject: Subject) -> None:
    """A trace reads what enters a block, and an edit there is a plain torch hook's."""
    stack = next(iter(subject.stacks))
    name = f"{stack}.1.hook_resid_pre"
    if not subject.named(name):
        raise Absent("its blocks have no hook points")
    with torch.no_grad():
        torch.manual_seed(0)
        with subject.bridge.trace(subject.tokens, **subject.more) as run:
            entering = run[name].clone()
        subject.same(entering, subject.stream(1, stack), name, near=None)
        subject.same(run.logits, subject.logits, "logits", near=None)
        with subject.edited(1, _halved, stack):
            theirs = subject.run()
        torch.manual_seed(0)
        with subject.bridge.trace(subject.tokens, **subject.more) as run:
            run[name] = run[name] * 0.5
        subject.same(run.logits, theirs, "logits of an edited run")


def _weighted(logits: Tensor) -> Tensor:
    """A number that all logits have a part in."""
    return (
        logits * torch.linspace(-1, 1, logits.numel(), dtype=logits.dtype).reshape(logits.shape)
    ).sum()


def _last(subject: Subject) -> tuple[str, int]:
    layer = len(subject.paths) - 1
    name = f"{subject.main}.{layer}.hook_resid_pre"
    if not subject.named(name):
        raise Absent("its blocks have no hook points")
    return name, layer


def _plain_gradient(subject: Subject, layer: int) -> Tensor:
    kept: list[Tensor] = []

    def keep(x: Tensor) -> Tensor:
        kept.append(x.detach().requires_grad_())
        return kept[0] * 1

    with subject.itself(), subject.edited(layer, keep):
        _weighted(subject.run()).backward()
    subject.hf.zero_grad()
    if kept[0].grad is None:
        raise Absent("the model itself: it has no gradient there")
    return kept[0].grad


def _gradient(subject: Subject, name: str) -> Tensor:
    found: list[Tensor] = []

    def keep(gradient: Tensor, hook: object) -> None:
        found.append(gradient.clone())

    _weighted(subject.ours(subject.bridge.run_with_hooks, bwd_hooks=[(name, keep)])).backward()
    subject.bridge.zero_grad()
    if len(found) != 1:
        raise Wrong(f"{name}: {len(found)} gradients")
    return found[0]


def gradients_are_the_models(subject: Subject) -> None:
    """The gradient at a hook point is the one that torch gives there in the plain model."""
    name, layer = _last(subject)
    theirs = _plain_gradient(subject, layer)
    subject.same(_gradient(subject, name), theirs, name, near=1e-3)


def gradients_are_slopes(subject: Subject) -> None:
    """The gradient at a hook point is a slope of the plain model, by finite difference in
    float64.
    """
    name, layer = _last(subject)
    if float(subject.logits.abs().max()) > 1e30:
        raise Absent(
            "the model replaces the logits of some tokens by a constant too large for a difference"
            " to show"
        )
    double = subject.in_double()
    plain = _plain_gradient(double, layer)
    direction = plain / plain.norm()
    size = float(double.stream(layer).norm()) * 1e-3  # norms compute in float32 in most models

    def value(step: float) -> Tensor:
        with (
            torch.no_grad(),
            double.edited(layer, lambda x: x + (step * direction).reshape(x.shape)),
        ):
            return _weighted(double.run())

    near, far = ((value(step) - value(-step)) / (2 * step) for step in (size, 2 * size))
    slope = (4 * near - far) / 3  # without the third derivative
    if abs(float(slope - plain.norm())) > 2e-3 * float(slope):
        raise Absent("the model itself: its gradient is no slope")
    gradient = _gradient(double, name)
    if gradient.shape != direction.shape:
        direction = direction.transpose(0, 1)
    subject.same((gradient * direction).sum(), slope, name, near=2e-3)


def cached_gradients_are_of_the_loss(subject: Subject) -> None:
    """`incl_bwd` keeps the gradient of the loss of the next token."""
    name, layer = _last(subject)
    subject.needs_plain_text()
    kept: list[Tensor] = []

    def keep(x: Tensor) -> Tensor:
        kept.append(x.detach().requires_grad_())
        return kept[0] * 1

    with subject.itself(), subject.edited(layer, keep):
        chances = subject.run()[:, :-1].log_softmax(-1)
        (-chances.gather(-1, subject.tokens[:, 1:, None]).mean()).backward()
    subject.hf.zero_grad()
    theirs = kept[0].grad
    assert theirs is not None
    _, cache = subject.ours(
        subject.bridge.run_with_cache, names_filter=name, return_type="loss", incl_bwd=True
    )
    subject.same(cache[f"{name}_grad"], theirs, name, near=1e-3)


PROPERTIES = {
    "idle": idle_is_the_model,
    "streams": streams_are_the_models,
    "padding right": padded_behind,
    "padding left": padded_in_front,
    "start": starts_at_a_layer,
    "stop": stops_at_a_layer,
    "past": goes_on_with_a_past,
    "edits": edits_mean_what_they_say,
    "patches": patches_are_plain_hooks,
    "head patches": patches_of_heads_are_plain_hooks,
    "programs": programs_are_runs,
    "traces": traces_are_runs,
    "gradients": gradients_are_the_models,
    "slopes": gradients_are_slopes,
    "loss gradients": cached_gradients_are_of_the_loss,
}
