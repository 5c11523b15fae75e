"""A model's parameters in its tree of parts: Hugging Face's own, under HookedTransformer's names."""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, Protocol

from torch import nn

from adapters import Weights


class HoldsModel(Protocol):
    """What knows a Hugging Face model's parameters by its parts."""

    @property
    def original_model(self) -> nn.Module: ...
    def parameters_of(self, part: str) -> Mapping[str, nn.Parameter]: ...


class PartParameters(MutableMapping[str, Any]):
    """Where torch looks for a part's parameters: those that a user gave it, and the Hugging Face model's that stand
    there, which stay where they are, and are looked for when they are asked for.

    Args:
        host: what the part belongs to.
        part: its name; that of the model itself is "".
        own: what a user gave it.
    """

    def __init__(self, host: HoldsModel, part: str, own: dict[str, nn.Parameter | None]) -> None:
        self.host, self.part, self.own = host, part, own

    def all(self, by_part: Mapping[str, Mapping[str, nn.Parameter]] | None = None) -> dict[str, Any]:
        """Both kinds; of several parts in a row, by what was found for all of them at once."""
        theirs = self.host.parameters_of(self.part) if by_part is None else by_part.get(self.part, {})
        return {**theirs, **self.own}

    def items(self) -> ItemsView[str, Any]:
        """Both kinds."""
        return self.all().items()

    def __getitem__(self, name: str) -> Any:
        return self.own[name] if name in self.own else self.host.parameters_of(self.part)[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.all())

    def __len__(self) -> int:
        return len(self.all())

    def __contains__(self, name: object) -> bool:
        if name in self.own:
            return True
        if not self.part and "." not in str(name):  # torch asks so at every look-up of an attribute of the model
            return name in self.host.original_model._parameters
        return name in self.host.parameters_of(self.part)

    def __setitem__(self, name: str, value: Any) -> None:
        if name not in self.own and name in self:
            raise TypeError(
                f"{name} is a parameter of the Hugging Face model and cannot be exchanged here: functional_call, "
                "pruning and parametrizations take model.original_model and its names"
            )
        self.own[name] = value

    def __delitem__(self, name: str) -> None:
        self[name] = None
        del self.own[name]


class HoldsParameters:
    """A module in whose place in the tree torch finds parameters of the Hugging Face model, too. It moves, saves and
    loads those alone that a user gave it."""

    def own_state(self) -> nn.Module:
        """A module of the same parts, which has the parameters and buffers that a user gave it."""
        mine, state = nn.Module(), vars(self)
        mine.__dict__ |= {name: state[name] for name in ("_modules", "_buffers", "_non_persistent_buffers_set")}
        mine.__dict__["_parameters"] = state["_parameters"].own
        return mine

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """The same as an assignment."""
        setattr(self, name, module)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        self.own_state()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, *args: Any) -> None:
        self.own_state()._load_from_state_dict(*args)


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
