"""Runs: idle, padded, of some layers, continued, edited, lowered, traced."""

from __future__ import annotations

import inspect

import torch
from torch import Tensor

from adapters.inputs.made import arguments_of
from tests.properties.plain import Place, editing, outputs_inside
from tests.properties.subject import Absent, Subject, Wrong, logits_of


def idle_is_the_model(subject: Subject) -> None:
    """`bridge(tokens)` is `hf(tokens)`, and a cached run, bit by bit; nothing is left behind."""
    with torch.no_grad():
        subject.same(subject.ours(), subject.logits, "logits", near=None)
        logits, _ = subject.ours(subject.bridge.run_with_cache)
        subject.same(logits, subject.logits, "logits of a cached run", near=None)
        subject.same(logits_of(subject.bridge.core(**arguments_of(subject.hf, *subject.inputs))), subject.logits, "after", near=None)
    left = [name for name, module in subject.bridge.original_model.named_modules() if module._forward_hooks or module._forward_pre_hooks]
    before = [name for name, module in subject.hf.named_modules() if module._forward_hooks or module._forward_pre_hooks]
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
        last = f"{name}.{len(paths) - 1}"
        for end in (f"{last}.hook_normalized_resid_post", f"{last}.hook_resid_post"):
            if end in subject.cache:
                subject.same(subject.cache[end], subject.stream(len(paths), name), end, near=None)
                break


def _padded(subject: Subject, side: str) -> None:
    subject.needs_plain_text()
    if "attention_mask" not in inspect.signature(subject.hf.forward).parameters:
        raise Absent("the model takes no mask")
    tokens, short = subject.tokens, 6
    mask = torch.ones_like(tokens)
    rows = [tokens[0], tokens[1, :short], tokens[2, : short + 2]]
    padded = torch.zeros_like(tokens)
    at = []
    for i, row in enumerate(rows):
        where = slice(len(tokens[0]) - len(row), None) if side == "left" else slice(0, len(row))
        padded[i, where], mask[i], mask[i, where] = row, 0, 1
        at.append(where)
    with torch.no_grad():
        ours = subject.ours(tokens=padded, attention_mask=mask)
        alone = [subject.run(row[None])[0] for row in rows]
        theirs = subject.run(padded, attention_mask=mask)
        positions = (mask.cumsum(-1) - 1).clamp_min(0)
        if "position_ids" in inspect.signature(subject.hf.forward).parameters:
            theirs = subject.run(padded, attention_mask=mask, position_ids=positions)
    size = max(float(x.abs().max()) for x in alone)

    def apart(logits: Tensor) -> float:
        if logits.shape[1] != padded.shape[1]:
            raise Absent("it has no logits for each position")
        return max(float((logits[i, where] - x).abs().max()) for i, (where, x) in enumerate(zip(at, alone, strict=True)))

    # Some models cannot see padding (docs/limits.md): then theirs is not as alone either, whatever positions it has.
    if apart(theirs) <= 1e-3 * size:
        for i, (where, x) in enumerate(zip(at, alone, strict=True)):
            subject.same(ours[i, where], x, f"row {i}", near=1e-3, scale=size)
    elif apart(ours) > 1e-3 * size:
        plain = subject.run(padded, attention_mask=mask)
        for i, where in enumerate(at):
            near = min((theirs, plain), key=lambda x: float((x[i, where] - ours[i, where]).abs().max()))
            subject.same(ours[i, where], near[i, where], f"row {i}, as the model itself", scale=size)
    else:
        subject.compared += 1


def padded_behind(subject: Subject) -> None:
    """A row that is padded behind is as alone."""
    _padded(subject, "right")


def padded_in_front(subject: Subject) -> None:
    """A row that is padded in front is as alone."""
    _padded(subject, "left")


def starts_at_a_layer(subject: Subject) -> None:
    """A run that starts at a layer, with what enters it, ends in the model's logits."""
    with torch.no_grad():
        for layer in range(len(subject.paths) + 1):
            logits = subject.bridge(subject.stream(layer), start_at_layer=layer, **subject.more)
            subject.same(logits, subject.logits, f"from layer {layer}")


def stops_at_a_layer(subject: Subject) -> None:
    """A run that stops at a layer returns what would enter it."""
    with torch.no_grad():
        for layer in range(len(subject.paths) + 1):
            found = subject.ours(stop_at_layer=layer)
            subject.same(found, subject.stream(layer), f"at layer {layer}", near=None)


def goes_on_with_a_past(subject: Subject) -> None:
    """A prompt in two parts gives the logits that the model itself gives."""
    subject.needs_plain_text()
    tokens, cut = subject.tokens, 7
    config = subject.hf.config.get_text_config()
    if not getattr(config, "use_cache", False) or not getattr(config, "is_decoder", True):
        raise Absent("the model keeps no past")
    with torch.no_grad():
        with subject.itself():
            torch.manual_seed(0)
            first = subject.hf(tokens[:, :cut], use_cache=True)
            past = getattr(first, "past_key_values", None)
            if past is None:
                raise Absent("the model keeps no past")
            theirs = logits_of(subject.hf(tokens[:, cut:], past_key_values=past, use_cache=True))
        torch.manual_seed(0)
        logits, ours = subject.bridge(tokens[:, :cut], return_type="logits_and_cache", use_cache=True)
        subject.same(logits, logits_of(first), "the first part", near=None)
        _, cache = subject.bridge.run_with_cache(tokens[:, cut:], past_key_values=ours, use_cache=True)
        subject.same(_, theirs, "the rest")
    for layer in range(len(subject.stacks.get("blocks", ()))):
        name = f"blocks.{layer}.hook_resid_pre"
        if name in cache and torch.allclose(theirs, subject.logits[:, cut:], rtol=1e-3, atol=1e-3):
            subject.same(cache[name], subject.stream(layer)[:, cut:], name, near=1e-3)


def _halved(x: Tensor) -> Tensor:
    return x * 0.5


def places_of(subject: Subject, layer: int, names: tuple[str, ...]) -> dict[str, Place]:
    """Where in the plain model the hook points of a block stand: found by what the model's modules put out."""
    found = outputs_inside(subject.hf, subject.paths[layer], subject.run)
    places = {}
    for name in names:
        full = f"blocks.{layer}.{name}"
        if full not in subject.cache:
            continue
        x = subject.cache[full]
        fits = [
            place for place, y in found.items()
            if y.numel() == x.numel() and torch.equal(y.reshape(-1), x.reshape(-1))
        ]
        outputs = [place for place in fits if place.side == "output"]
        if outputs:
            places[full] = outputs[0]
    return places


def edits_mean_what_they_say(subject: Subject) -> None:
    """Halving what enters a block, leaves it, or is added in it gives the logits that a plain torch hook gives."""
    n = len(subject.paths)
    for layer in range(n):
        with torch.no_grad():
            if subject.named(name := f"blocks.{layer}.hook_resid_pre"):
                with subject.edited(layer, _halved):
                    theirs = subject.run()
                ours = subject.ours(subject.bridge.run_with_hooks, fwd_hooks=[(name, lambda x, hook: x * 0.5)])
                subject.same(ours, theirs, f"{name} halved")
            for name, place in places_of(subject, layer, ("hook_attn_out", "hook_mlp_out", "hook_mixer_out")).items():
                with editing(subject.hf, place, _halved):
                    theirs = subject.run()
                ours = subject.ours(subject.bridge.run_with_hooks, fwd_hooks=[(name, lambda x, hook: x * 0.5)])
                subject.same(ours, theirs, f"{name} halved")


def patches_are_plain_hooks(subject: Subject) -> None:
    """A sweep of patches of the stream gives, for each, what a plain torch hook gives."""
    from bridge.patching import get_act_patch_resid_pre

    subject.needs_plain_text()
    n, clean, corrupted = len(subject.paths), subject.tokens[:1], subject.tokens[1:2]
    with torch.no_grad():
        _, cache = subject.ours(subject.bridge.run_with_cache, clean)

        def metric(logits: Tensor) -> Tensor:
            return logits[0, -1, 5] - logits[0, -1, 7]

        found = get_act_patch_resid_pre(subject.bridge, corrupted, cache, metric, verbose=False)
        expected = torch.full((n, clean.shape[1]), float("nan"))
        for layer in range(n):
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
    """A sweep of patches of heads gives, for each, what a plain torch hook at the output layer's input gives."""
    from bridge.patching import get_act_patch_attn_head_out_all_pos

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
            fits = [p for p, y in inside.items() if p.side == "input" and y.numel() == z.numel() and torch.equal(y.reshape(-1), z.reshape(-1))]
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
        found = get_act_patch_attn_head_out_all_pos(subject.bridge, corrupted, cache, metric, verbose=False)
    at = list(expected)
    subject.same(torch.stack([found[i] for i in at]), torch.stack([expected[i] for i in at]), "the sweep", near=1e-3)


def programs_are_runs(subject: Subject) -> None:
    """A program's logits and captures are the model's, also of an edited run."""
    name = f"{next(iter(subject.stacks))}.1.hook_resid_pre"
    if not subject.named(name):
        raise Absent("its blocks have no hook points")
    program = subject.bridge.program(capture=[name])
    arguments = {key: value for key, value in subject.more.items()}
    with torch.no_grad():
        torch.manual_seed(0)
        outputs = program(subject.tokens, **arguments)
        subject.same(outputs["logits"], subject.logits, "logits", near=None)
        subject.same(outputs[name], subject.stream(1, name.partition(".")[0]), name, near=None)
        if list(subject.stacks) == ["blocks"]:
            edited = subject.bridge.program(interventions=[(name, lambda x, hook: x * 0.5)])
            with subject.edited(1, _halved):
                theirs = subject.run()
            torch.manual_seed(0)
            subject.same(edited(subject.tokens, **arguments)["logits"], theirs, "logits of an edited run")


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
        place = Place(subject.stacks[stack][1], "input")
        with editing(subject.hf, place, _halved):
            theirs = subject.run()
        torch.manual_seed(0)
        with subject.bridge.trace(subject.tokens, **subject.more) as run:
            run[name] = run[name] * 0.5
        subject.same(run.logits, theirs, "logits of an edited run")


def _loss(subject: Subject, logits: Tensor) -> Tensor:
    return -logits[:, :-1].log_softmax(-1).gather(-1, subject.tokens[:, 1:, None]).mean()


def _gradient_at(subject: Subject) -> tuple[str, int]:
    if subject.tokens.is_floating_point() or list(subject.stacks) != ["blocks"]:
        raise Absent("its loss is not that of the next token")
    layer = len(subject.paths) - 1
    name = f"blocks.{layer}.hook_resid_pre"
    if not subject.named(name):
        raise Absent("its blocks have no hook points")
    return name, layer


def gradients_are_the_models(subject: Subject) -> None:
    """The gradient at a hook point is the one that torch gives there, of the plain model's loss."""
    name, layer = _gradient_at(subject)
    kept: list[Tensor] = []

    def keep(x: Tensor) -> Tensor:
        kept.append(x.detach().requires_grad_())
        return kept[0] * 1

    with subject.itself(), subject.edited(layer, keep):
        _loss(subject, subject.run()).backward()
    subject.hf.zero_grad()
    _, cache = subject.ours(subject.bridge.run_with_cache, names_filter=name, return_type="loss", incl_bwd=True)
    theirs = kept[0].grad
    assert theirs is not None
    subject.same(cache[f"{name}_grad"], theirs, name, near=1e-3)


def gradients_are_slopes(subject: Subject) -> None:
    """The gradient at a hook point is the slope of the plain model's loss along it, by finite difference in float64."""
    name, layer = _gradient_at(subject)
    double = subject.in_double()
    _, cache = double.ours(double.bridge.run_with_cache, names_filter=name, return_type="loss", incl_bwd=True)
    gradient = cache[f"{name}_grad"]
    direction = gradient / gradient.norm()
    size = float(double.stream(layer).norm()) * 1e-3  # norms compute in float32 in most models

    def loss(step: float) -> Tensor:
        def move(x: Tensor) -> Tensor:
            along = direction.transpose(0, 1) if x.shape[0] != direction.shape[0] else direction
            return x + (step * along).reshape(x.shape)

        with torch.no_grad(), double.edited(layer, move):
            return _loss(double, double.run())

    near, far = ((loss(step) - loss(-step)) / (2 * step) for step in (size, 2 * size))
    slope = (4 * near - far) / 3  # without the third derivative
    subject.same(gradient.norm(), slope, name, near=2e-3)


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
}
