"""What is proved: a bridge, as far as proofs need one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, Self, runtime_checkable

from torch import Tensor, nn

from adapters.architecture import Architecture
from adapters.config import ModelConfig
from adapters.layout import Layout
from adapters.points import Point
from adapters.views import View


@runtime_checkable
class Hook(Protocol):
    """A hook point of a bridge, as far as it is needed here."""

    name: str
    point: Point
    view: View


#: What is called with an activation and its hook point; a tensor that it returns takes the activation's place.
HookFunction = Callable[[Tensor, Hook], Tensor | None]
#: One name or several, and the function.
NamedHook = tuple[str | list[str], HookFunction]


@runtime_checkable
class Cache(Protocol):
    """A cache, as far as it is needed here."""

    def __getitem__(self, name: str, /) -> Tensor: ...


@runtime_checkable
class Bridge(Protocol):
    """What is verified: a `bridge.TransformerBridge`, as far as it is needed here."""

    cfg: ModelConfig
    training: bool
    architecture: Architecture
    no_layer_runs: str
    layout: Layout | None

    @property
    def core(self) -> nn.Module: ...

    @property
    def original_model(self) -> nn.Module: ...

    @property
    def hook_dict(self) -> Mapping[str, Hook]: ...

    def __call__(
        self, input: Tensor, *, start_at_layer: int | None = None, stop_at_layer: int | None = None, **kwargs: Any
    ) -> Tensor: ...

    def run_with_hooks(self, input: Tensor, *, fwd_hooks: Sequence[NamedHook], **kwargs: Any) -> Tensor: ...

    def run_with_cache(
        self, input: Tensor, *, names_filter: Sequence[str] | None, **kwargs: Any
    ) -> tuple[Any, Cache]: ...

    def hooks(self, *, fwd_hooks: Sequence[NamedHook]) -> AbstractContextManager[object]: ...

    def rewrapped(self, model: nn.Module) -> Self:
        """A bridge of the same declaration and facts around another model."""
        ...

    def train(self, mode: bool = True) -> object: ...
