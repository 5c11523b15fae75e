"""Which model interventions were made on, and whether another one is like it."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Protocol

from transformers import PreTrainedModel

from adapters.config import ModelConfig
from bridge.hooks.names import Names


class HasHookPoints(Protocol):
    """What is asked of a bridge: its hook points by name, and the facts about its model."""

    names: Names
    cfg: ModelConfig
    core: PreTrainedModel


class OtherModelError(ValueError):
    """Interventions that were made on a model of another class, other sizes or another processing."""


@dataclass(frozen=True)
class Model:
    """The model that interventions were made on.

    Attributes:
        name: what it is called.
        kind: its class.
        sizes: its numbers of layers, heads, features, tokens.
        processed: what was done to its weights.
    """

    name: str
    kind: str
    sizes: Mapping[str, int | None]
    processed: Mapping[str, str]

    @classmethod
    def of(cls, bridge: HasHookPoints) -> Model:
        """The model of a bridge."""
        cfg = bridge.cfg
        sizes = {name: getattr(cfg, name) for name in ("n_layers", "n_heads", "d_model", "d_head", "d_mlp", "d_vocab")}
        return cls(str(cfg.model_name), type(bridge.core).__name__, sizes, dict(cfg.processed))

    def as_data(self) -> dict[str, object]:
        """Itself as JSON knows it."""
        return asdict(self)

    @classmethod
    def from_data(cls, data: object) -> Model:
        """The reverse of `as_data`.

        Raises:
            ValueError: it is something else.
        """
        names = [field.name for field in fields(cls)]
        if not isinstance(data, dict) or sorted(data) != sorted(names):
            raise ValueError(f"the model has to be described by {', '.join(names)}")
        name, kind, sizes, processed = (data[part] for part in names)
        texts = isinstance(name, str) and isinstance(kind, str) and isinstance(processed, dict)
        if not texts or not all(isinstance(value, str) for value in processed.values()):
            raise ValueError("the model's name, class and processing have to be text")
        if not isinstance(sizes, dict) or not all(size is None or type(size) is int for size in sizes.values()):
            raise ValueError("the model's sizes have to be whole numbers")
        return cls(name, kind, sizes, processed)

    def check(self, bridge: HasHookPoints) -> None:
        """Refuses a model that is not like this one, and warns of one that is only called otherwise.

        Raises:
            OtherModelError: its class, sizes or processing differ.
        """
        other = Model.of(bridge)
        differences = [
            f"{what} {mine!r} there, {its!r} here"
            for what, mine, its in (
                ("class", self.kind, other.kind),
                *((size, self.sizes.get(size), other.sizes[size]) for size in other.sizes),
                ("processing", dict(self.processed), dict(other.processed)),
            )
            if mine != its
        ]
        if differences:
            raise OtherModelError(
                f"these interventions were made on {self.name}, which is another model than {other.name}: "
                f"{'; '.join(differences)}"
            )
        if self.name != other.name:
            warnings.warn(
                f"these interventions were made on {self.name}, and this model is {other.name}: their sizes are the "
                "same, what their features mean may not be",
                stacklevel=4,
            )
