"""A sweep of patches through one compiled program: each row of a batch says at which layer its activation is other."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from bridge.hooks.hook_point import HookPoint
from bridge.patching.measured import mixing_rows
from bridge.patching.memory import tokens_per_run
from bridge.patching.steps import Patches, PatchStep

#: How `torch.compile` is told to compile.
Options = Mapping[str, object]


def compiled_sweep(patches: Patches, patches_per_run: int | None, options: Options) -> list[Tensor]:
    """The metric of each patch.

    Each patched activation is made from the corrupted run's, which a run with one patch has at that place. The program
    puts it in at its layer; it computes all layers of every patch, without the run's machinery between them.

    Args:
        patches: the patches.
        patches_per_run: how many patches are one batch; None: as many as a quarter of the free memory holds.
        options: of `torch.compile`.

    Raises:
        ValueError: the activations have no batch axis, or other shapes in other layers; or a basis mixes rows.
    """
    model, tokens, steps, attention_mask = patches.model, patches.tokens, patches.steps, patches.attention_mask
    hooks, batch = patches.hooks, len(tokens)
    names = [hook.name for hook in hooks]
    given = {} if attention_mask is None else {"attention_mask": attention_mask}
    if mixed := mixing_rows(patches):
        raise ValueError(
            f"the basis of {mixed[0]} mixes the rows of a batch, which are patches here: use compiled=False"
        )
    with torch.no_grad():
        logits, cache = model.run_with_cache(tokens, names_filter=names, attention_mask=attention_mask)
        shapes = {tuple(cache[name].shape) for name in names}
        if len(shapes) > 1 or not all(hook.point.axes.startswith("batch") for hook in hooks):
            raise ValueError(
                f"a compiled sweep needs activations of one shape with a batch axis; those at {names[0]} and elsewhere "
                f"have {sorted(shapes)}: use compiled=False"
            )
        of_a_run = tokens_per_run(model.cfg, tokens.device, tokens.shape[1], logits.element_size())
        most = patches_per_run or max(1, of_a_run // tokens.numel())
        most = min(most, len(steps))
        layers = {name: number for number, name in enumerate(names)}

        def put(activation: Tensor, hook: HookPoint, value: Tensor, place: Tensor) -> Tensor:
            here = (place == layers[hook.name]).view(-1, *[1] * (activation.ndim - 1))
            return torch.where(here, value.to(activation), activation)

        example = {
            "value": cache[names[0]].repeat_interleave(most, 0),
            "place": torch.zeros(most * batch, dtype=torch.long),
        }
        program = model.program(interventions=[(names, put)], inputs=example).compile(**options)
        rows = {name: tensor.repeat(most, 1) for name, tensor in {"input_ids": tokens, **given}.items()}
        found: list[Tensor] = []
        for at in range(0, len(steps), most):
            some = list(steps[at : at + most])
            some += [some[-1]] * (most - len(some))  # as many rows each time: nothing is compiled again
            value = torch.cat([_patched(step, cache[step.hook.name]) for step in some])
            place = torch.tensor([layers[step.hook.name] for step in some], device=tokens.device)
            made = program(**rows, value=value, place=place.repeat_interleave(batch))["logits"]
            found += [patches.metric(part) for part in made.split(batch)[: len(steps) - at]]
            patches.report(min(most, len(steps) - at))
    return found


def _patched(step: PatchStep, corrupted: Tensor) -> Tensor:
    """The activation with the patch in it."""
    activation = corrupted.clone()
    made = step.whole(activation)
    return activation if made is None else made
