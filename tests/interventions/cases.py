"""Each operation with the same by hand, as plain indexing of the tensor."""

from __future__ import annotations

import torch

from bridge.interventions import (
    Add,
    AddScaled,
    Cap,
    Clamp,
    Mean,
    ProjectOnto,
    ProjectOut,
    Replace,
    Scale,
    Set,
    Swap,
    Zero,
)

RESID, Z, PATTERN = "blocks.1.hook_resid_post", "blocks.1.attn.hook_z", "blocks.0.attn.hook_pattern"
LENGTH = 7


def add_some(x):
    x[:, [0, 3], 1:4] += 0.5


def scale(x):
    x[:, :, 1] *= 0.5


def clamp(x):
    x[:, 1:] = x[:, 1:].clamp(-0.5, 0.25)


def zero(x):
    x[:, [0, 1], :, 2] = 0


def mean(x):
    x[:, :, 0] = x.mean(2)


def cases(d_model: int, n_heads: int) -> dict[str, tuple[str, object, object]]:
    """By name: the hook point, the operation, and the function that changes its activation in
    place, by hand.

    Args:
        d_model, n_heads: of the model.
    """
    drawn = torch.Generator().manual_seed(0)
    vector, other = torch.randn(2, d_model, generator=drawn)
    source = torch.randn(1, LENGTH, d_model, generator=drawn)
    rows = torch.stack([vector, other])

    def set_(x):
        x[:, -2] = vector

    def add(x):
        x += 2 * vector

    def out(x):  # what least squares leaves
        x -= (
            torch.linalg.lstsq(rows.double().T, x.double().reshape(-1, d_model).T).solution.T
            @ rows.double()
        ).view_as(x)

    def onto(x):
        x.copy_(
            (x.double() @ vector.double())[..., None]
            * vector.double()
            / vector.double().square().sum()
        )

    def add_scaled(x):
        x += 0.5 * x.norm(dim=-1, keepdim=True) * vector / vector.norm()

    def replace(x):
        x[:, :LENGTH] = source

    def replace_one(x):
        x[:, 2] = source[:, 2]

    return {
        "Set": (RESID, Set(vector, positions=-2), set_),
        "Add": (RESID, Add(vector, 2.0), add),
        "Add, some": (RESID, Add(0.5, positions=(0, 3), features=slice(1, 4)), add_some),
        "AddScaled": (RESID, AddScaled(vector, 0.5), add_scaled),
        "Scale": (Z, Scale(0.5, heads=1), scale),
        "Clamp": (RESID, Clamp(-0.5, 0.25, positions=slice(1, None)), clamp),
        "Zero": (PATTERN, Zero(keys=2, heads=(0, 1)), zero),
        "Mean": (Z, Mean("heads", heads=0), mean),
        "ProjectOut": (RESID, ProjectOut(rows), out),
        "ProjectOnto": (RESID, ProjectOnto(vector), onto),
        "Cap": (RESID, Cap(vector, 0.1), capped(vector)),
        "Swap": (RESID, Swap(vector, other, 0.5), swapped(rows)),
        "Replace": (RESID, Replace(source), replace),
        "Replace, one": (RESID, Replace(source, positions=2), replace_one),
    }


def capped(vector):
    def cap(x):
        unit = vector.double() / vector.double().norm()
        along = x.double() @ unit
        x += (along.clamp(max=0.1) - along)[..., None] * unit

    return cap


def swapped(rows):
    def swap(x):
        dual = torch.linalg.pinv(rows.double())
        coordinates = x.double() @ dual
        x += 0.5 * (coordinates.flip(-1) - coordinates) @ rows.double()

    return swap


NAMES = list(cases(32, 4))


def by_hand(change):
    """A function as a hook."""

    def hook_function(x, hook):
        change(x)

    hook_function.harvest_id = getattr(change, "__name__", "")
    return hook_function
