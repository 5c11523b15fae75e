"""`Interventions`: several interventions in order, as hooks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

from torch import Tensor

from adapters.config import ModelConfig
from bridge.arguments import size_of
from bridge.hooks.context import HookFunction
from bridge.hooks.hooks import HookPoint
from bridge.hooks.studied_bridge import StudiedBridge
from bridge.interventions.files import read, save
from bridge.interventions.operations import Operation, ProjectOut, axis_of
from bridge.interventions.stored import Model, refusing

# --------------------------------------------------------------------------------------------------
# Checks of an operation's numbers against a model's sizes, as far as known before it runs.
# --------------------------------------------------------------------------------------------------


def check_sizes(operation: Operation, hook: HookPoint, cfg: ModelConfig) -> None:
    """Reject tensors and indices that do not fit the hook point.

    Args:
        operation: the operation at this hook point.
        hook: the hook point.
        cfg: the facts about the model.

    Raises:
        ValueError: a tensor has the wrong size.
        IndexError: there is no such head or feature.
    """
    axes = hook.point.axes.split()
    sizes = [size_of(cfg, axis) for axis in axes]
    broadcasts = not isinstance(operation, ProjectOut)
    for name, value in operation.tensors.items():
        if not _fits(value.shape, sizes if broadcasts else sizes[-1:], broadcasts):
            shown = [str(size or axis) for axis, size in zip(axes, sizes, strict=True)]
            raise ValueError(
                f"{name} of {type(operation).__name__} has shape {list(value.shape)}; {hook.name}"
                f" has [{', '.join(shown)}]"
            )
    for field in ("heads", "features"):
        index = getattr(operation, field)
        size = None if index is None else sizes[axis_of(field, hook)]
        if size is None or not isinstance(index, tuple):
            continue
        if min(index) < -size or max(index) >= size:
            raise IndexError(f"{field} is {index}; {hook.name} has {size} of them")


def _fits(shape: Sequence[int], sizes: Sequence[int | None], broadcasts: bool) -> bool:
    """Tell whether a tensor's last axes match the sizes of an activation, as far as known."""
    pairs = zip(reversed(shape), reversed(sizes), strict=False)
    return all(size in (None, own) or (own == 1 and broadcasts) for own, size in pairs)


class Interventions(tuple[tuple[str, HookFunction], ...]):
    """Pairs of a hook point and an operation, in the order in which they act, usable as hooks.

    Args:
        pairs: names of hook points, and operations. A function of your own may be among them; it
            cannot be saved.
        bridge: the model that they are made for: names and sizes are checked on it, and a saved
            file identifies it.

    Attributes:
        model: the identity of that model; None without one.

    Raises:
        UnknownHookError: a name that no hook point of the model has.
        ValueError: an operation that does not fit its hook point.
        TypeError: an item is not a pair of a name and a function.

    Example:
        >>> import torch
        >>> from bridge import TransformerBridge
        >>> from bridge.interventions import Add, Interventions, Zero
        >>> bridge = TransformerBridge.boot_embedded()
        >>> Interventions(
        ...     [("blocks.1.attn.hook_z", Zero(heads=2)), ("ln_final.hook_scale", Add(0.5))], bridge
        ... )
        Interventions([('blocks.1.attn.hook_z', Zero(heads=(2,))), ('ln_final.hook_scale',
        Add(value=0.5, scale=1.0))])
    """

    model: Model | None

    def __new__(
        cls, pairs: Iterable[tuple[str, HookFunction]] = (), bridge: StudiedBridge | None = None
    ) -> Interventions:
        checked: list[tuple[str, HookFunction]] = []
        for index, pair in enumerate(pairs):
            if not isinstance(pair, tuple | list) or len(pair) != 2 or not isinstance(pair[0], str):
                raise TypeError(
                    f"interventions[{index}] is {pair!r}; it must be a pair (name of a hook point,"
                    " operation)"
                )
            name, operation = pair
            if not callable(operation):
                raise TypeError(
                    f"the intervention at {name} is {operation!r}; it must be an operation, or a"
                    " function"
                )
            if bridge is not None:
                hook = bridge.names.find(name)
                name = hook.name
                if isinstance(operation, Operation):
                    operation.check_point(hook)
                    check_sizes(operation, hook, bridge.cfg)
            checked.append((name, operation))
        interventions = super().__new__(cls, checked)
        interventions.model = None if bridge is None else Model.of(bridge)
        return interventions

    def __repr__(self) -> str:
        return f"Interventions([{', '.join(map(repr, self))}])"

    def with_inputs(self, **inputs: Tensor | float) -> Interventions:
        """Return the interventions with named inputs replaced by numbers.

        Args:
            inputs: the numbers, by input name.

        Raises:
            TypeError: an input that no operation uses.
        """
        operations = [fn for _, fn in self if isinstance(fn, Operation)]
        known = {name for operation in operations for name in operation.inputs}
        for name in inputs:
            if name not in known:
                raise TypeError(
                    f"no operation asks for the input {name!r}; they ask for"
                    f" {', '.join(sorted(known)) or 'none'}"
                )
        filled = Interventions([(name, _filled(operation, inputs)) for name, operation in self])
        filled.model = self.model
        return filled

    def save(self, file: str | PathLike[str]) -> None:
        """Write the interventions to one safetensors file: tensors, and a header that describes
        them.

        Args:
            file: the path.

        Raises:
            TypeError: there is a function of your own among them, which cannot be saved as data.

        Example:
            >>> import tempfile
            >>> from pathlib import Path
            >>> from bridge import TransformerBridge
            >>> from bridge.interventions import Add, Interventions, load
            >>> bridge = TransformerBridge.boot_embedded()
            >>> made = Interventions(
            ...     [("blocks.2.hook_resid_post", Add(0.5, part="generated"))], bridge
            ... )
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     made.save(Path(folder) / "steer.safetensors")
            ...     load(Path(folder) / "steer.safetensors", bridge) == made
            True
        """
        save(file, self, self.model)


def _filled(operation: HookFunction, inputs: dict[str, Tensor | float]) -> HookFunction:
    if not isinstance(operation, Operation):
        return operation
    numbers: dict[str, Any] = {}
    for name in operation.numbers:
        value = getattr(operation, name)
        if isinstance(value, str) and value in inputs:
            numbers[name] = inputs[value]
    return replace(operation, **numbers) if numbers else operation


def load(file: str | PathLike[str], bridge: StudiedBridge) -> Interventions:
    """Read interventions that `Interventions.save` wrote.

    Args:
        file: the path.
        bridge: the model that they are for; hook points and sizes must fit it.

    Raises:
        FileNotFoundError: there is no such file.
        InterventionsFileError: the file contains something else, or something that this version
            does not support; the message says what.
        OtherModelError: they were made on a model of a different class, size or processing. (If
            only the name differs, there is a warning.)

    Example:
        >>> from bridge import TransformerBridge
        >>> from bridge.interventions import load
        >>> load("steer.safetensors", TransformerBridge.boot_embedded())
        Traceback (most recent call last):
        FileNotFoundError: there is no file steer.safetensors
    """
    pairs = read(file, lambda model: model.check(bridge))
    with refusing(Path(file)):
        return Interventions(pairs, bridge)
