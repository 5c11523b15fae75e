"""The parts of a model as torch modules with HookedTransformer's names: they stand for the Hugging Face model's own."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NoReturn, Protocol, Self

import torch
from torch import Tensor, nn

from adapters.config import ModelConfig
from adapters.points import join
from bridge.hooks.arguments import check_choice
from bridge.hooks.hooks import Handle
from bridge.hooks.hooks import HookPoint as AnyHookPoint
from bridge.legacy.hook_points import CALLS, HookFunction, HookPoint
from bridge.legacy.HookedTransformerConfig import HookedTransformerConfig
from bridge.legacy.parameters import HoldsModel, HoldsParameters, PartParameters
from bridge.legacy.table import at, why_not
from bridge.weights import Component, NameTree

#: What HookedTransformer's attention keeps in addition to its parameters: read from the model, and fixed by it.
BUFFERS = ("mask", "IGNORE", "rotary_sin", "rotary_cos")
_ENDS = {"output": "hook_out", "input": "hook_in"}
_IN_TRACES = ("input", "inputs", "output", "outputs")


class HoldsParts(HoldsModel, Protocol):
    """The model that parts are of: `bridge.legacy.module_tree.ModuleTree`."""

    cfg: ModelConfig
    own_weights: dict[str, list[str]]
    parts: dict[str, Any]

    @property
    def tree(self) -> NameTree: ...
    def module_of(self, name: str) -> nn.Module: ...
    def find_module(self, name: str) -> nn.Module | None: ...
    def buffer_of(self, name: str, attribute: str) -> Tensor: ...
    def call_part(self, name: str, *inputs: Any, **kwargs: Any) -> Any: ...
    def call_in_place_of(self, part: Part) -> None: ...
    def put(self, parent: nn.Module, prefix: str, name: str, value: Any) -> None: ...
    def check_removal(self, prefix: str, name: str) -> None: ...
    def fits(self, name: str, value: Any) -> str | None: ...
    def write(self, weights: Mapping[str, Any]) -> None: ...


def _calls_it(register: str) -> Callable[..., Any]:
    """A method of `torch.nn.Module` that adds a hook to a part: the model calls this part from now on."""

    def added(part: Part, *args: Any, **kwargs: Any) -> Any:
        part.host.call_in_place_of(part)
        return getattr(nn.Module, register)(part, *args, **kwargs)

    return added


class Part(HoldsParameters, nn.Module):
    """A part of a model. Called by itself it computes what the model's module does, in HookedTransformer's terms.

    Its weights are views of the model's own parameters, its hook points are the model's. Assigning to a weight writes
    into the model; assigning a module to a part lets the model call that module in its place. Torch hooks on it are
    called in the model's runs. A deep copy is a module by itself, whose weights are its own.

    Args:
        cfg: a `HookedTransformerConfig` or its fields: the part of a model with one layer, and random weights.
        more, kwargs: what HookedTransformer's class takes besides; only ``length`` of norms counts.
    """

    #: Where it is in a model that is made for it, and what that model's configuration says.
    at: ClassVar[str] = ""
    fields: ClassVar[dict[str, Any]] = {}
    #: The model that it belongs to, and its name there, such as ``blocks.0.attn``.
    host: HoldsParts
    name: str

    def __init__(self, cfg: Any, *more: Any, **kwargs: Any) -> None:
        nn.Module.__init__(self)
        if not self.at:
            raise TypeError(f"{type(self).__name__} is a part of loaded models; none is made from a configuration")
        given = HookedTransformerConfig.unwrap(cfg)
        host = at("HookedTransformer:one_layer_model")(given, self.fields, *more, **kwargs)  # which has such parts
        self._belong({"host": host, "name": self.at, "given": given})
        host.adopt_part(self)

    @classmethod
    def of(cls, host: HoldsParts, name: str) -> Self:
        """The part of this name, without what is in it."""
        part = cls.__new__(cls)
        part.__setstate__({"host": host, "name": name})
        return part

    def __getstate__(self) -> dict[str, Any]:
        if "forward" in self.__dict__:
            raise TypeError(
                f"{self.name}.forward is a function of yours, which a copy of the model would share with this one: "
                "put a module in its place, which is copied"
            )
        return {key: self.__dict__[key] for key in ("host", "name", "given") if key in self.__dict__}

    def __setstate__(self, state: dict[str, Any]) -> None:
        nn.Module.__init__(self)
        self._belong(state)
        # The model of a copy may not be there in full yet; it will take what it finds here.
        self.host.__dict__.setdefault("parts", {})[self.name] = self

    def _belong(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _parameters=PartParameters(state["host"], state["name"], {}))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self.host) in memo:  # the model is being copied
            memo[id(self)] = new = type(self).of(memo[id(self.host)], self.name)
            return new
        mine, whole = {id(p) for p in self.parameters()}, self.host.original_model
        tensors = [*whole.parameters(), *whole.buffers()]
        shared: dict[int, Any] = {id(x): x for x in (*tensors, getattr(self.host, "tokenizer", None))}
        copied = copy.deepcopy(self.host, {key: x for key, x in shared.items() if key not in mine})
        memo[id(self)] = new = copied.parts[self.name]
        if "given" in self.__dict__:
            new.__dict__["given"] = copy.deepcopy(self.__dict__["given"], memo)
        return new

    @property
    def cfg(self) -> ModelConfig | HookedTransformerConfig:
        """The model's configuration, or what the part was made from."""
        return self.__dict__.get("given") or self.host.cfg

    @property
    def module(self) -> nn.Module:
        """The Hugging Face module that plays this part."""
        return self.host.module_of(self.name)

    @property
    def original_component(self) -> nn.Module:
        """The same."""
        return self.module

    def get_hooks(self) -> dict[str, HookPoint]:
        """The hook points that stand directly in it, by name."""
        return {name: point for name, point in self._modules.items() if isinstance(point, HookPoint)}

    def add_hook(self, hook_fn: HookFunction, hook_name: str = "output") -> Handle:
        """Adds a function at ``"output"`` or ``"input"``: its ``hook_out`` or ``hook_in``."""
        return self._end(hook_name).add_hook(hook_fn)

    def remove_hooks(self, hook_name: str | None = None) -> None:
        """Removes the functions that were added at ``"output"`` or ``"input"``; None: at both."""
        there = [name for name, end in _ENDS.items() if end in self.host.tree.children[self.name]]
        for name in there if hook_name is None else (hook_name,):
            self._end(name).remove_hooks("both")

    def _end(self, name: str) -> AnyHookPoint:
        check_choice("hook_name", name, _ENDS)
        return getattr(self, _ENDS[name])  # type: ignore[no-any-return]

    def forward(self, *inputs: Any, **kwargs: Any) -> Tensor:
        """What the part makes of tensors: a block of a residual stream, a norm or an MLP of what it reads, attention of
        what queries, keys and values read.
        """
        calls = CALLS.get()
        inner = calls.get(self)
        if inner is not None:
            return inner(one_input(self.name, inputs, kwargs))  # type: ignore[no-any-return]
        token = CALLS.set({**calls, self: None})
        try:
            return self.host.call_part(self.name, *inputs, **kwargs)
        finally:
            CALLS.reset(token)

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__") or "host" not in self.__dict__:
            raise AttributeError(attribute)
        for held in (self._modules, self.__dict__["_parameters"].own, self._buffers):
            if attribute in held:
                return held[attribute]
        if attribute in ("module", "original_component"):
            return self.host.module_of(self.name)  # which says why there is none
        if why := why_not("GeneralizedComponent", attribute):
            raise AttributeError(why)
        if attribute in _IN_TRACES:
            return getattr(Component(self.host.tree, self.name), attribute)
        return self.host.tree.get(self.name, attribute, dir(type(self)))

    def __setattr__(self, attribute: str, value: Any) -> None:
        if attribute in _IN_TRACES:
            setattr(Component(self.host.tree, self.name), attribute, value)
        else:
            self.host.put(self, self.name, attribute, value)

    def __delattr__(self, attribute: str) -> None:
        self.host.check_removal(self.name, attribute)
        super().__delattr__(attribute)

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self.host.tree.children.get(self.name, ())]

    def __repr__(self) -> str:
        return repr(Component(self.host.tree, self.name))

    # What torch asks of a module.

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name in self.host.own_weights.get(self.name, ()):
            weight = getattr(self, name)
            destination[prefix + name] = weight if keep_vars else weight.detach()

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, local_metadata: Any, strict: bool, missing_keys: list[str],
        unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        own = self.host.own_weights.get(self.name, ())
        missing_keys += [prefix + name for name in own if prefix + name not in state_dict]
        given = {join(self.name, name): state_dict[prefix + name] for name in own if prefix + name in state_dict}
        unfit = {name: why for name, value in given.items() if (why := self.host.fits(name, value)) is not None}
        error_msgs += unfit.values()
        self.host.write({name: value for name, value in given.items() if name not in unfit})
        theirs = {key: x for key, x in state_dict.items() if key.removeprefix(prefix) not in (*own, *BUFFERS)}
        super()._load_from_state_dict(
            theirs, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )  # of what the user gave it

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        module = self.host.find_module(self.name)
        if module is not None:
            module._apply(fn, recurse)
        self.own_state()._apply(fn, recurse=False)
        return self

    def train(self, mode: bool = True) -> Self:
        """Sets the mode of the Hugging Face module."""
        module = self.host.find_module(self.name)
        if module is not None:
            module.train(mode)
        return self

    register_forward_hook = _calls_it("register_forward_hook")
    register_forward_pre_hook = _calls_it("register_forward_pre_hook")
    register_full_backward_hook = _calls_it("register_full_backward_hook")
    register_full_backward_pre_hook = _calls_it("register_full_backward_pre_hook")


def one_input(name: str, inputs: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """What a part reads, where it reads one tensor."""
    reads = [*inputs, *(kwargs[key] for key in ("query_input", "key_input", "value_input") if key in kwargs)]
    if not reads:
        reads = [value for value in kwargs.values() if isinstance(value, Tensor)]
    first: Tensor = reads[0]
    for other in reads[1:3]:
        if isinstance(other, Tensor) and other is not first and not torch.equal(other, first):
            raise TypeError(
                f"inside a run, {name} reads one tensor: inputs of queries, keys and values differ by hooks on "
                "hook_q_input, hook_k_input and hook_v_input"
            )
    return first


class Blocks(nn.ModuleList):
    """The blocks of a model, or the experts of a mixture. Each can be replaced; their number is the model's."""

    def __init__(self, host: HoldsParts, name: str) -> None:
        super().__init__()
        self.__dict__.update(host=host, name=name)

    def __getitem__(self, index: Any) -> Any:
        return nn.ModuleList([*self][index]) if isinstance(index, slice) else super().__getitem__(index)

    def __setitem__(self, index: Any, module: nn.Module) -> None:
        self.__dict__["host"].put(self, self.__dict__["name"], str(range(len(self))[index]), module)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__.get("_modules", ()):  # so do torch's and other people's ways to exchange a module
            self[int(name)] = value
        elif isinstance(value, nn.Module):
            self.refuse()
        else:
            super().__setattr__(name, value)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """The same as an assignment."""
        setattr(self, name, module)

    def refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        """What would change their number.

        Raises:
            TypeError: always, with what to do instead.
        """
        raise TypeError(
            f"{self.__dict__['name']} are as many as the model has: stop_at_layer=n runs the first n, "
            "from_pretrained(first_n_layers=n) loads them; each can be replaced, as by nn.Identity()"
        )

    __delattr__ = __delitem__ = __iadd__ = append = extend = insert = pop = refuse  # type: ignore[assignment]
