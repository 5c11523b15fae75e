"""A model's parameters in its tree of parts: Hugging Face's own, under HookedTransformer's names."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor, nn

from adapters import Weights


class ParametersOfPart(ChainMap[str, Any]):
    """What torch finds in a module: the parameters that a user gave it, and the model's, which stay where they are."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name in self.maps[1]:
            raise TypeError(
                f"{name} is a parameter of the Hugging Face model and cannot be exchanged here: functional_call, "
                "pruning and parametrizations take model.original_model and its names"
            )
        super().__setitem__(name, value)

    def __delitem__(self, name: str) -> None:
        self[name] = None
        super().__delitem__(name)


#: The module whose own parameters alone are meant, here and in no other thread.
_OWN_ONLY: ContextVar[nn.Module | None] = ContextVar("own_only", default=None)


class HoldsParameters(nn.Module):
    """A module in whose place in the tree torch finds parameters of the Hugging Face model, too."""

    def parameters_here(self) -> Mapping[str, nn.Parameter]:
        """The Hugging Face model's parameters that stand here, by name."""
        raise NotImplementedError

    @property
    def _parameters(self) -> Any:  # type: ignore[override]
        own = self.__dict__["_parameters"]
        return own if _OWN_ONLY.get() is self else ParametersOfPart(own, dict(self.parameters_here()))

    @_parameters.setter
    def _parameters(self, own: dict[str, nn.Parameter | None]) -> None:
        self.__dict__["_parameters"] = own

    @contextmanager
    def _own_only(self) -> Iterator[None]:
        """For assignments, and for state dicts, in which parts have HookedTransformer's weights."""
        token = _OWN_ONLY.set(self)
        try:
            yield
        finally:
            _OWN_ONLY.reset(token)

    def __setattr__(self, name: str, value: Any) -> None:
        with self._own_only():
            super().__setattr__(name, value)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """The same as an assignment."""
        setattr(self, name, module)

    def apply_to_own(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Changes the parameters and buffers that a user gave it."""
        with self._own_only():
            super()._apply(fn, recurse=False)

    def _save_to_state_dict(self, *args: Any, **kwargs: Any) -> None:
        with self._own_only():
            super()._save_to_state_dict(*args, **kwargs)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        with self._own_only():
            super()._load_from_state_dict(*args, **kwargs)


def names_of(
    parameters: Mapping[str, nn.Parameter], weights: Weights, modules: Sequence[tuple[str, str]]
) -> Iterator[tuple[str, dict[str, str]]]:
    """For the path of each parameter, the part that it stands in, and its name there.

    That is the name of the weight that is stored in it, or of several (``W_Q+W_K+W_V``); a tied embedding is in two
    parts. One that is in no weight, or in many parts, stands in the part around it, under the end of its own name.

    Args:
        modules: names of parts, and the paths of the modules that play them.
    """
    at = {}
    for name, get in weights.getters.items():
        try:
            at[name] = get().data_ptr()
        except (TypeError, RuntimeError):  # it is no plain matrix, or is gone: a parameter there keeps its name
            continue
    for path, parameter in parameters.items():
        start = 0 if parameter.is_meta or type(parameter) is not nn.Parameter else parameter.data_ptr()
        end = start + parameter.numel() * parameter.element_size() * (start > 0)
        inside: dict[str, list[str]] = {}
        for name, place in at.items():
            if start <= place < end:
                part, _, word = name.rpartition(".")
                inside.setdefault(part, []).append(word)
        found = {part: "+".join(words) for part, words in inside.items()}
        if len(found.keys() - {"unembed"}) > 1:
            found = {}
        above = [(where, name) for name, where in modules if path.startswith(f"{where}.")]
        where, around = max(above, key=lambda pair: len(pair[0]), default=("", ""))
        if not any(f"{part}.".startswith(around) for part in found):
            found[around] = path.removeprefix(f"{where}.") if where else path
        yield path, found
