"""Several interventions in order, as hooks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

from torch import Tensor

from adapters.config import ModelConfig
from bridge.hooks.arguments import size_of
from bridge.hooks.asked import StudiedBridge
from bridge.hooks.context import HookFunction
from bridge.hooks.hooks import HookPoint
from bridge.interventions.files import Model, read, refusing, save
from bridge.interventions.operations import Operation, ProjectOut, axis_of

# ----------------------------------------------------------------------------------------------------------------------
# Whether the numbers of an operation fit the sizes of a model, as far as these are known before it runs.
# ----------------------------------------------------------------------------------------------------------------------


def check_sizes(operation: Operation, hook: HookPoint, cfg: ModelConfig) -> None:
    """Refuses tensors and indices that cannot fit.

    Args:
        operation: at this hook point.
        hook: the hook point.
        cfg: the facts about the model.

    Raises:
        ValueError: a tensor of another size.
        IndexError: there is no such head or feature.
    """
    known = [size_of(cfg, axis) for axis in hook.point.axes.split()]
    for name in operation.numbers:
        if isinstance(getattr(operation, name), Tensor):
            _check_tensor(operation, name, hook, known)
    for field in ("heads", "features"):
        index = getattr(operation, field)
        size = None if index is None else known[axis_of(field, hook)]
        if size is not None and isinstance(index, tuple) and not all(-size <= one < size for one in index):
            raise IndexError(f"{field} is {index}; {hook.name} has {size} of them")


def _check_tensor(operation: Operation, name: str, hook: HookPoint, known: list[int | None]) -> None:
    """Refuses a tensor whose last axes are not those of the hook point, as far as their sizes are known."""
    value, broadcasts = getattr(operation, name), not isinstance(operation, ProjectOut)
    sizes = known if broadcasts else known[-1:]
    for size, its in zip(reversed(sizes), reversed(value.shape), strict=False):
        if size is not None and its != size and not (its == 1 and broadcasts):
            axes = zip(hook.point.axes.split(), known, strict=True)
            raise ValueError(
                f"{name} of {type(operation).__name__} has shape {list(value.shape)}; {hook.name} has "
                f"[{', '.join(axis if n is None else str(n) for axis, n in axes)}]"
            )


class Interventions(tuple[tuple[str, HookFunction], ...]):
    """Pairs of a hook point and an operation, in the order in which they act: hooks, as every method takes them.

    Args:
        pairs: names of hook points, and operations. A function of your own may be among them; it cannot be saved.
        bridge: the model that they are made for: names and sizes are checked on it, and a file says which it is.

    Attributes:
        model: what is known of that model; None without one.

    Raises:
        UnknownHookError: a name that no hook point of the model has.
        ValueError: an operation that does not fit its hook point.
        TypeError: not a pair of a name and a function.

    Example:
        >>> import torch
        >>> from bridge import TransformerBridge
        >>> from bridge.interventions import Add, Interventions, Zero
        >>> bridge = TransformerBridge.boot_embedded()
        >>> Interventions([("blocks.1.attn.hook_z", Zero(heads=2)), ("ln_final.hook_scale", Add(0.5))], bridge)
        Interventions([('blocks.1.attn.hook_z', Zero(heads=(2,))), ('ln_final.hook_scale', Add(value=0.5, scale=1.0))])
    """

    model: Model | None

    def __new__(
        cls, pairs: Iterable[tuple[str, HookFunction]] = (), bridge: StudiedBridge | None = None
    ) -> Interventions:
        checked: list[tuple[str, HookFunction]] = []
        for index, pair in enumerate(pairs):
            if not isinstance(pair, tuple | list) or len(pair) != 2 or not isinstance(pair[0], str):
                raise TypeError(
                    f"interventions[{index}] is {pair!r}; it must be a pair (name of a hook point, operation)"
                )
            name, operation = pair
            if not callable(operation):
                raise TypeError(f"the intervention at {name} is {operation!r}; it must be an operation, or a function")
            if bridge is not None:
                hook = bridge.names.find(name)
                name = hook.name
                if isinstance(operation, Operation):
                    operation.check_point(hook)
                    check_sizes(operation, hook, bridge.cfg)
            checked.append((name, operation))
        made = super().__new__(cls, checked)
        made.model = None if bridge is None else Model.of(bridge)
        return made

    def __repr__(self) -> str:
        return f"Interventions([{', '.join(map(repr, self))}])"

    def with_inputs(self, **inputs: Tensor | float) -> Interventions:
        """The same with numbers in the place of inputs that operations ask for by name.

        Args:
            inputs: by name.

        Raises:
            TypeError: an input that no operation asks for.
        """
        asked = {name for _, operation in self if isinstance(operation, Operation) for name in operation.inputs}
        for name in inputs:
            if name not in asked:
                raise TypeError(
                    f"no operation asks for the input {name!r}; they ask for {', '.join(sorted(asked)) or 'none'}"
                )
        made = Interventions([(name, _filled(operation, inputs)) for name, operation in self])
        made.model = self.model
        return made

    def save(self, file: str | PathLike[str]) -> None:
        """Writes them to one file of safetensors: tensors, and in the header what they are numbers of.

        Args:
            file: the path.

        Raises:
            TypeError: a function of your own is among them, which is no data.

        Example:
            >>> import tempfile
            >>> from pathlib import Path
            >>> from bridge import TransformerBridge
            >>> from bridge.interventions import Add, Interventions, load
            >>> bridge = TransformerBridge.boot_embedded()
            >>> made = Interventions([("blocks.2.hook_resid_post", Add(0.5, part="generated"))], bridge)
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     made.save(Path(folder) / "steer.safetensors")
            ...     load(Path(folder) / "steer.safetensors", bridge) == made
            True
        """
        save(file, self, self.model)


def _filled(operation: HookFunction, inputs: dict[str, Tensor | float]) -> HookFunction:
    if not isinstance(operation, Operation):
        return operation
    given: dict[str, Any] = {
        name: inputs[value] for name in operation.numbers if (value := getattr(operation, name)) in inputs
    }
    return replace(operation, **given) if given else operation


def load(file: str | PathLike[str], bridge: StudiedBridge) -> Interventions:
    """Reads interventions that `Interventions.save` wrote.

    Args:
        file: the path.
        bridge: the model that they are for: points and sizes have to be its own.

    Raises:
        FileNotFoundError: there is no such file.
        InterventionsFileError: it holds something else, or what this version does not know; the error says what.
        OtherModelError: they were made on a model of another class, other sizes or another processing. (Another name
            alone is a warning.)

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
