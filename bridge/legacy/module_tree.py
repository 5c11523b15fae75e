"""A model as a tree of callable, replaceable modules with HookedTransformer's names."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, ItemsView, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any, ClassVar, NoReturn, Self, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers.activations import ACT2FN

from adapters import ModelMap, Weights
from adapters.config import ModelConfig
from adapters.inputs import PAST, text_alone
from adapters.points import Point, base_path, join
from adapters.views import Args, Call, Kwargs, View
from bridge.arguments import check_choice
from bridge.bridge import TransformerBridge
from bridge.hooks.context import (
    CURRENT,
    Listener,
    RunContext,
    Scope,
    setting,
    without_hooks,
)
from bridge.hooks.hooks import Handle, checked
from bridge.hooks.hooks import HookPoint as AnyHookPoint
from bridge.hooks.names import NamesFilter, suggestion
from bridge.legacy.hook_points import (
    CALLS,
    HookedRootModule,
    HookFunction,
    HookPoint,
    ListsHooks,
    point_named,
)
from bridge.legacy.HookedTransformerConfig import HookedModelConfig, HookedTransformerConfig
from bridge.legacy.table import locate, named, why_not
from bridge.legacy.utilities import SUPPORTED_ACTIVATIONS, position_embeddings
from bridge.modules import InForwardsPlace, first_parameter
from bridge.run.layer_range import StopRun
from bridge.run.parts import called, path_of_part, paths_of_parts, takes_one_tensor, unembedded
from bridge.run.run import points_that_run
from bridge.taps.taps import Tap
from bridge.weights import Component, NameTree
from weight_processing.saving import untie

# --------------------------------------------------------------------------------------------------
# A model's parameters in the module tree: Hugging Face's own, under HookedTransformer's names.
# --------------------------------------------------------------------------------------------------


#: The name under which a module is saved or copied.
State = dict[str, Any]


class PartParameters(MutableMapping[str, Any]):
    """The parameters of a part, as torch sees them: the user's own, and the Hugging Face model's,
    which stay in their modules and are looked up on access.

    Args:
        host: the module that holds the part.
        part: the part's name; "" for the model itself.
        own: the user's own parameters.
    """

    def __init__(self, host: ModuleTree, part: str, own: dict[str, nn.Parameter | None]) -> None:
        self.host, self.part, self.own = host, part, own

    def all(
        self, by_part: Mapping[str, Mapping[str, nn.Parameter]] | None = None
    ) -> dict[str, Any]:
        """Return both kinds; several parts in a row share one lookup."""
        if by_part is None:
            of_model = self.host.parameters_of(self.part)
        else:
            of_model = by_part.get(self.part, {})
        return {**of_model, **self.own}

    def items(self) -> ItemsView[str, Any]:
        """Return both kinds as items."""
        return self.all().items()

    def __getitem__(self, name: str) -> Any:
        if name in self.own:
            return self.own[name]
        return self.host.parameters_of(self.part)[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.all())

    def __len__(self) -> int:
        return len(self.all())

    def __contains__(self, name: object) -> bool:
        if name in self.own:
            return True
        if not self.part and "." not in str(name):
            # hot path: torch asks on every attribute access of the model
            return name in self.host.original_model._parameters
        return name in self.host.parameters_of(self.part)

    def __setitem__(self, name: str, value: Any) -> None:
        if name not in self.own and name in self:
            raise TypeError(
                f"{name} is a parameter of the Hugging Face model and cannot be exchanged here:"
                " functional_call, pruning and parametrizations take model.original_model and its"
                " names"
            )
        self.own[name] = value

    def __delitem__(self, name: str) -> None:
        self[name] = None
        del self.own[name]


class _HoldsParameters:
    """A module whose place in the tree also shows parameters of the Hugging Face model. It moves,
    saves and loads only the user's own parameters.
    """

    def own_state(self) -> nn.Module:
        """Return a module of the same parts that holds only the user's parameters and buffers."""
        own, state = nn.Module(), vars(self)
        for name in ("_modules", "_buffers", "_non_persistent_buffers_set"):
            own.__dict__[name] = state[name]
        own.__dict__["_parameters"] = state["_parameters"].own
        return own

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """Assign a module to an attribute."""
        setattr(self, name, module)

    def register_parameter(self, name: str, param: Tensor | None) -> None:
        """Register a user's parameter; an existing one stays."""
        current: Any = getattr(self, name, None)
        if not (_is_same(param, current) and param is not None and param.is_set_to(current)):
            nn.Module.register_parameter(self, name, param)  # type: ignore[arg-type]

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        """Register a user's buffer; an existing one stays."""
        if tensor is None or not _is_same(tensor, getattr(self, name, None)):
            nn.Module.register_buffer(self, name, tensor, persistent)  # type: ignore[arg-type]

    def _save_to_state_dict(self, destination: State, prefix: str, keep_vars: bool) -> None:
        self.own_state()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, *args: Any) -> None:
        self.own_state()._load_from_state_dict(*args)


def names_of(
    parameters: Mapping[str, nn.Parameter], weights: Weights, modules: Sequence[tuple[str, str]]
) -> Iterator[tuple[str, dict[str, str]]]:
    """Map the path of each parameter to its part and its name there.

    The name is that of the weight stored in it, or of several (``W_Q+W_K+W_V``); a tied embedding
    belongs to two parts. A parameter that is in no weight, or in many parts, belongs to the
    enclosing part, under the last component of its own name.

    Args:
        modules: the names of parts, and the paths of the modules that implement them.
    """
    addresses = _addresses(weights)
    for path, parameter in parameters.items():
        names = _weights_in(parameter, addresses)
        if len(names.keys() - {"unembed"}) > 1:
            names = {}
        enclosing = [(place, part) for part, place in modules if path.startswith(f"{place}.")]
        place, part = max(enclosing, key=lambda pair: len(pair[0]), default=("", ""))
        if not any(f"{name}.".startswith(part) for name in names):
            names[part] = path.removeprefix(f"{place}.") if place else path
        yield path, names


def _addresses(weights: Weights) -> dict[str, int]:
    """Return the address of each weight that is a plain matrix."""
    addresses = {}
    for name, get in weights.getters.items():
        try:
            addresses[name] = get().data_ptr()
        except (TypeError, RuntimeError):  # not a plain matrix, or removed
            continue
    return addresses


def _weights_in(parameter: nn.Parameter, addresses: Mapping[str, int]) -> dict[str, str]:
    """Map each part to the names of its weights that are stored in a parameter, joined by "+"."""
    if parameter.is_meta or type(parameter) is not nn.Parameter or not parameter.data_ptr():
        return {}
    start = parameter.data_ptr()
    end = start + parameter.numel() * parameter.element_size()
    names: dict[str, str] = {}
    for name, address in addresses.items():
        if start <= address < end:
            part, _, word = name.rpartition(".")
            names[part] = f"{names[part]}+{word}" if part in names else word
    return names


# --------------------------------------------------------------------------------------------------
# The parts of a model as torch modules with HookedTransformer's names; each represents a Hugging
# Face module.
# --------------------------------------------------------------------------------------------------


#: Constants of HookedTransformer's attention besides its parameters: computed from the model,
#: read-only.
BUFFERS = ("mask", "IGNORE", "rotary_sin", "rotary_cos")
_ENDS = {"output": "hook_out", "input": "hook_in"}
#: The components of weight and part names, in HookedTransformer's order, wherever they occur.
_WEIGHTS = (
    "W w b W_E W_pos W_token_type W_Q W_O b_Q b_O W_K _W_K W_V _W_V b_K _b_K b_V _b_V W_U b_U"
)
_OF_MLP = {False: "W_in b_in W_out b_out", True: "W_in W_out W_gate b_in b_out"}
_PARTS = (
    "embed pos_embed token_type_embed {blocks} q_norm k_norm rel_pos_bias ln experts W_in W_out"
    " W_gate blocks encoder encoder_final_ln decoder decoder_final_ln ln_final mlm_head unembed"
    " nsp_head pooler"
)
_IN_TRACES = ("input", "inputs", "output", "outputs")


def _calls_it(register: str) -> Callable[..., Any]:
    """Wrap a hook method of `torch.nn.Module`: from then on the model calls this part."""

    def call_and_register(part: Part, *args: Any, **kwargs: Any) -> Any:
        part.host.call_in_place_of(part)
        return getattr(nn.Module, register)(part, *args, **kwargs)

    return call_and_register


class Part(_HoldsParameters, nn.Module):
    """A part of a model. Calling it computes what the model's module computes, in
    HookedTransformer's layout.

    Its weights are views of the model's own parameters, and its hook points are the model's.
    Assigning to a weight writes into the model; assigning a module to a part makes the model call
    that module instead. Torch hooks on a part are called in the model's runs. A deep copy is an
    independent module with its own weights.

    Args:
        cfg: a `HookedTransformerConfig` or its fields: the part belongs to a model with one layer
            and random weights.
        more, kwargs: further arguments of HookedTransformer's class; only ``length`` of norms has
            an effect.
    """

    #: Its name in a model built for it, and the fields of that model's configuration.
    default_name: ClassVar[str] = ""
    fields: ClassVar[Kwargs] = {}
    #: What HookedTransformer's component computes with, read from the model: functions of the part.
    constants: ClassVar[dict[str, Callable[[Any], Any]]] = {}
    #: The model that it belongs to, and its name there, such as ``blocks.0.attn``.
    host: ModuleTree
    name: str

    def __init__(self, cfg: Any, *more: Any, **kwargs: Any) -> None:
        nn.Module.__init__(self)
        if not self.default_name:
            raise TypeError(
                f"{type(self).__name__} is a part of loaded models; none is made from a"
                " configuration"
            )
        own_cfg = HookedTransformerConfig.unwrap(cfg)
        one_layer_model = locate("HookedTransformer:one_layer_model")
        host = one_layer_model(own_cfg, self.fields, *more, **kwargs)
        self._belong({"host": host, "name": self.default_name, "own_cfg": own_cfg})
        host.adopt_part(self)

    @classmethod
    def of(cls, host: ModuleTree, name: str) -> Self:
        """Return the part with this name, without its children."""
        part = cls.__new__(cls)
        part.__setstate__({"host": host, "name": name})
        return part

    def __getstate__(self) -> State:
        if "forward" in self.__dict__:
            raise TypeError(
                f"{self.name}.forward is a function of yours, which a copy of the model would share"
                " with this one: put a module in its place, which is copied"
            )
        state = self.__dict__
        return {key: state[key] for key in ("host", "name", "own_cfg") if key in state}

    def __setstate__(self, state: State) -> None:
        nn.Module.__init__(self)
        self._belong(state)
        # The model of a copy may still be incomplete; it adopts this part later.
        self.host.__dict__.setdefault("parts", {})[self.name] = self

    def _belong(self, state: State) -> None:
        self.__dict__.update(state, _parameters=PartParameters(state["host"], state["name"], {}))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        host = self.host
        if id(host) in memo:  # the model is being copied
            copied = type(self).of(memo[id(host)], self.name)
            memo[id(self)] = copied
            return copied
        model, tokenizer = host.original_model, getattr(host, "tokenizer", None)
        own = {id(parameter) for parameter in self.parameters()}
        tensors = (*model.parameters(), *model.buffers(), tokenizer)
        shared: dict[int, Any] = {id(x): x for x in tensors if id(x) not in own}
        part = copy.deepcopy(host, shared).parts[self.name]
        memo[id(self)] = part
        if "own_cfg" in self.__dict__:
            part.__dict__["own_cfg"] = copy.deepcopy(self.__dict__["own_cfg"], memo)
        return part

    @property
    def cfg(self) -> ModelConfig | HookedTransformerConfig:
        """Return the model's configuration, or the one that the part was made from."""
        return self.__dict__.get("own_cfg") or self.host.cfg

    @property
    def module(self) -> nn.Module:
        """Return the Hugging Face module that implements this part."""
        return self.host.module_of(self.name)

    @property
    def original_component(self) -> nn.Module:
        """Return the Hugging Face module, as `module`."""
        return self.module

    def get_hooks(self) -> dict[str, HookPoint]:
        """Return the part's own hook points, by name."""
        return {name: x for name, x in self._modules.items() if isinstance(x, HookPoint)}

    def add_hook(self, hook_fn: HookFunction, hook_name: str = "output") -> Handle:
        """Add a function at ``"output"`` or ``"input"``: its ``hook_out`` or ``hook_in``."""
        return self._end(hook_name).add_hook(hook_fn)

    def remove_hooks(self, hook_name: str | None = None) -> None:
        """Remove the functions added at ``"output"`` or ``"input"``; None: at both."""
        if hook_name is not None:
            self._end(hook_name).remove_hooks("both")
            return
        for name, point in _ENDS.items():
            if point in self.host.tree.children[self.name]:
                self._end(name).remove_hooks("both")

    def _end(self, name: str) -> AnyHookPoint:
        check_choice("hook_name", name, _ENDS)
        return getattr(self, _ENDS[name])  # type: ignore[no-any-return]

    def forward(self, *inputs: Any, **kwargs: Any) -> Tensor:
        """Call the part: a block on a residual stream, a norm or an MLP on its input, attention on
        the inputs of queries, keys and values.
        """
        calls = CALLS.get()
        inner = calls.get(self)
        if inner is not None:
            return inner(one_input(self.name, inputs, kwargs))  # type: ignore[no-any-return]
        with setting(CALLS, {**calls, self: None}):
            return self.host.call_part(self.name, *inputs, **kwargs)

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__") or "host" not in self.__dict__:
            raise AttributeError(attribute)
        for entries in (self._modules, self.__dict__["_parameters"].own, self._buffers):
            if attribute in entries:
                return entries[attribute]
        if attribute in ("module", "original_component"):
            return self.host.module_of(self.name)  # raises the error that says why there is none
        if why := why_not("GeneralizedComponent", attribute):
            raise AttributeError(why)
        if attribute in self.constants:
            return self.constants[attribute](self)
        if attribute in _IN_TRACES:
            return getattr(Component(self.host.tree, self.name), attribute)
        return self.host.tree.get(self.name, attribute, dir(type(self)))

    def __setattr__(self, attribute: str, value: Any) -> None:
        if attribute in _IN_TRACES:
            setattr(Component(self.host.tree, self.name), attribute, value)
        elif attribute in self.constants and attribute not in self._modules:
            self._check_constant(attribute, value)
        else:
            self.host.put(self, self.name, attribute, value)

    def _check_constant(self, attribute: str, value: Any) -> None:
        if not _is_same(value, getattr(self, attribute)):
            raise TypeError(
                f"{self.name}.{attribute} is the model's own: another value would change nothing;"
                f" use a hook inside {self.name}, or put a module in its place"
            )

    def __delattr__(self, attribute: str) -> None:
        self.host.check_removal(self.name, attribute)
        super().__delattr__(attribute)

    def __dir__(self) -> list[str]:
        return [
            *super().__dir__(),
            *self.constants,
            *self.host.tree.children.get(self.name, ()),
        ]

    def __repr__(self) -> str:
        return repr(Component(self.host.tree, self.name))

    # Methods that torch calls on a module.

    def _save_to_state_dict(self, destination: State, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name in self.host.own_weights.get(self.name, ()):
            weight = getattr(self, name)
            destination[prefix + name] = weight if keep_vars else weight.detach()

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        weights = self.host.own_weights.get(self.name, ())
        fitting = {}
        for name in weights:
            key, full = prefix + name, join(self.name, name)
            if key not in state_dict:
                missing_keys.append(key)
                continue
            why = self.host.fits(full, state_dict[key])
            if why is None:
                fitting[full] = state_dict[key]
            else:
                error_msgs.append(why)
        self.host.write(fitting)
        of_model = {prefix + name for name in (*weights, *BUFFERS)}
        of_user = {key: x for key, x in state_dict.items() if key not in of_model}
        super()._load_from_state_dict(
            of_user, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        module = self.host.find_module(self.name)
        if module is not None:
            module._apply(fn, recurse)
        self.own_state()._apply(fn, recurse=False)
        return self

    def train(self, mode: bool = True) -> Self:
        """Set the mode of the Hugging Face module."""
        module = self.host.find_module(self.name)
        if module is not None:
            module.train(mode)
        return self

    register_forward_hook = _calls_it("register_forward_hook")
    register_forward_pre_hook = _calls_it("register_forward_pre_hook")
    register_full_backward_hook = _calls_it("register_full_backward_hook")
    register_full_backward_pre_hook = _calls_it("register_full_backward_pre_hook")


def one_input(name: str, inputs: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """Return the single tensor input of a part."""
    names = ("query_input", "key_input", "value_input")
    tensors = [*inputs, *(kwargs[name] for name in names if name in kwargs)]
    if not tensors:
        tensors = [value for value in kwargs.values() if isinstance(value, Tensor)]
    first: Tensor = tensors[0]
    for other in tensors[1:3]:
        if isinstance(other, Tensor) and other is not first and not torch.equal(other, first):
            raise TypeError(
                f"inside a run, {name} reads one tensor: inputs of queries, keys and values differ"
                " by hooks on hook_q_input, hook_k_input and hook_v_input"
            )
    return first


class Blocks(nn.ModuleList):
    """The blocks of a model, or the experts of a mixture. Each can be replaced; their number is
    fixed.
    """

    def __init__(self, host: ModuleTree, name: str) -> None:
        super().__init__()
        self.__dict__.update(host=host, name=name)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return nn.ModuleList([*self][index])
        return super().__getitem__(index)

    def __setitem__(self, index: Any, module: nn.Module) -> None:
        place = range(len(self))[index]
        self.__dict__["host"].put(self, self.__dict__["name"], str(place), module)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__.get("_modules", ()):
            # torch and other libraries also replace modules this way
            self[int(name)] = value
        elif isinstance(value, nn.Module):
            self.refuse()
        else:
            super().__setattr__(name, value)

    add_module = _HoldsParameters.add_module  # type: ignore[assignment]

    def refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Reject a change of their number.

        Raises:
            TypeError: always, with the alternative.
        """
        raise TypeError(
            f"{self.__dict__['name']} are as many as the model has: stop_at_layer=n runs the first"
            " n, from_pretrained(first_n_layers=n) loads them; each can be replaced, as by"
            " nn.Identity()"
        )

    __delattr__ = __delitem__ = __iadd__ = append = extend = insert = pop = refuse  # type: ignore[assignment]


# --------------------------------------------------------------------------------------------------
# The user's modules that the model calls in place of its own.
# --------------------------------------------------------------------------------------------------


#: The names of the input of parts that read one tensor, in HookedTransformer's components.
_ONE_INPUT = ("tokens", "x", "residual")
#: What a call must not repeat: appending keys and values to a cache.
_CACHES = (*PAST, "past_key_value", "layer_past")


class ReplacedForward(InForwardsPlace):
    """The forward of a Hugging Face module that calls a replacement module.

    The Hugging Face module keeps its place, torch hooks, weights and path. Torch has no hook that
    replaces a forward (a forward pre-hook can only change its inputs), so the forward is
    overridden, as for taps.

    Args:
        part: the part that it implements.
        parent: the module with the part as a child; the child is called: the part itself, or the
            user's module, which may call the part.
        view: the view that converts the module's output to the part's.
    """

    def __init__(self, part: Part, parent: nn.Module, view: View) -> None:
        self.module = part.module
        self.part, self.parent, self.view = part, parent, view
        own = self.module.__dict__.get("forward")
        if isinstance(own, Tap):  # the part still wraps it
            self.original: Callable[..., Any] = own.original
            own.original = own.own = self
        else:
            self.original = self.module.forward
            self.module.__dict__["forward"] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        calls = CALLS.get()
        if self.part in calls and calls[self.part] is None:  # the part itself is being called
            return self.original(*args, **kwargs)
        name = "" if args else first_parameter(type(self.module).forward)
        x = args[0] if args else kwargs[name]
        call = Call(self.module, args, kwargs)
        outputs: list[Any] = []

        def inner(x: Tensor) -> Tensor:
            if args:
                outputs.append(self.original(x, *args[1:], **kwargs))
            else:
                outputs.append(self.original(**{**kwargs, name: x}))
            return self.view.get(_first(outputs[-1]), call)

        with setting(CALLS, {**calls, self.part: inner}):
            replaced = self._replacement_output(x)
        output = outputs[-1] if outputs else self._without(args, kwargs)
        replaced = self.view.put(_first(output), replaced, call)
        return replaced if isinstance(output, Tensor) else type(output)((replaced, *output[1:]))

    def _replacement_output(self, x: Tensor) -> Tensor:
        """Call the replacement; attention, with the inputs of queries, keys and values."""
        replacement: Any = self.parent._modules[self.part.name.rpartition(".")[2]]
        if not isinstance(self.part, AbstractAttention):
            return replacement(x)  # type: ignore[no-any-return]
        return replacement(  # type: ignore[no-any-return]
            query_input=x, key_input=x, value_input=x, past_kv_cache_entry=None, attention_mask=None
        )

    @torch.no_grad()
    def _without(self, args: Args, kwargs: Kwargs) -> Any:
        """Return the module's remaining outputs if the user's module does not call it and returns
        only the first tensor.
        """
        uncached = {key: value for key, value in kwargs.items() if key not in _CACHES}
        return self.original(*args, **uncached)


def _first(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output[0]  # type: ignore[no-any-return]


# --------------------------------------------------------------------------------------------------
# The class names of ``transformer_lens.components``; each class represents a Hugging Face module.
# --------------------------------------------------------------------------------------------------


_RELATIVE = ("relative_attention_num_buckets", "relative_attention_max_distance")


def _attn_scale(part: AbstractAttention) -> float:
    """Return the divisor of attention scores."""
    cfg = part.host.cfg
    scale = float(cfg.attn_scale or 1.0) if cfg.use_attn_scale else 1.0
    if getattr(cfg, "scale_attn_by_inverse_layer_idx", False):
        scale *= part.layer_id + 1
    return scale


def _epsilon(part: Part) -> float:
    """Return the epsilon of a norm, which is that of its view."""
    view = part.host.names.find(f"{part.name}.hook_scale").point.view
    return view.kind.epsilon(part.module)  # type: ignore[attr-defined,no-any-return]


def _activation(part: Part) -> Callable[..., Tensor]:
    """Return the activation function of an MLP.

    Raises:
        AttributeError: it is not a named function of one tensor.
    """
    host, layer = part.host, int(part.name.split(".")[1])
    name: Any = host.cfg.act_fn
    own: Any = getattr(host.architecture.stack.block_at(layer).mlp, "activation", None)
    for functions in (SUPPORTED_ACTIVATIONS, ACT2FN):
        if own is None and name in functions:
            return functions[name]
    if own in dict(part.module.named_modules()):
        return part.module.get_submodule(own)
    raise AttributeError(
        f"{part.name}.act_fn is no function with a name: hook_pre shows its input, hook_post its"
        " output"
    )


class CanBeUsedAsMLP(Part):
    """A module in the place of a block's MLP. `W_gate` is None without a gate."""

    default_name, fields = "blocks.0.mlp", {"attn_only": False}
    constants: ClassVar = {"act_fn": _activation, "d_mlp": lambda part: part.W_in.shape[-1]}

    def __getattr__(self, attribute: str) -> Any:
        if attribute == "W_gate" and not self.host.cfg.gated_mlp and "W_gate" not in self._modules:
            return None
        return super().__getattr__(attribute)


class AbstractAttention(Part):
    """Attention of any kind."""

    constants: ClassVar = {
        "attn_scale": _attn_scale,
        "q_norm": lambda part: None,
        "k_norm": lambda part: None,
    }

    def __getattr__(self, attribute: str) -> Any:
        if attribute in BUFFERS:
            return self.host.buffer_of(self.name, attribute)
        return super().__getattr__(attribute)

    def __setattr__(self, attribute: str, value: Any) -> None:
        if attribute not in BUFFERS:
            super().__setattr__(attribute, value)
        elif not torch.equal(getattr(self, attribute), value):
            raise TypeError(
                f"{self.name}.{attribute} is the model's own: other values would change nothing"
            )

    @property
    def layer_id(self) -> int:
        """Return the index of its block."""
        return int(self.name.split(".")[1])

    @property
    def attn_type(self) -> str:
        """Return ``"global"`` or ``"local"``."""
        types = self.host.cfg.attn_types
        return "global" if types is None else types[self.layer_id]


class _T5Attention(AbstractAttention):
    """Attention of T5. The first layer of each stack holds the relative position biases for all
    layers.
    """

    def __getattr__(self, attribute: str) -> Any:
        if attribute in ("has_relative_attention_bias", *_RELATIVE):
            return getattr(self.module, attribute)
        return super().__getattr__(attribute)

    def compute_relative_attention_bias(
        self, query_length: int, key_length: int
    ) -> Float[Tensor, "1 head q k"]:
        """Return the relative position biases, computed by the model's own module."""
        module: Any = self.module
        return module.compute_bias(query_length, key_length)  # type: ignore[no-any-return]


def _kind(
    name: str, doc: str, default_name: str, base: type[Part] = Part, **fields: Any
) -> type[Part]:
    """Make a class of parts, with the name and the fields of a model that is built for one."""
    fields.setdefault("attn_only", base is not CanBeUsedAsMLP)
    constants = base.constants | fields.pop("constants", {})
    attributes = {"__doc__": doc, "__module__": __name__, "constants": constants}
    return type(name, (base,), attributes | {"default_name": default_name, "fields": fields})


MLP = _kind("MLP", "A feed-forward layer.", "blocks.0.mlp", CanBeUsedAsMLP, gated_mlp=False)
GatedMLP = _kind(
    "GatedMLP", "A feed-forward layer with a gate.", "blocks.0.mlp", CanBeUsedAsMLP, gated_mlp=True
)
MoE = _kind(
    "MoE",
    "A mixture of experts.",
    "",
    CanBeUsedAsMLP,
    constants={
        "d_mlp": attrgetter("host.cfg.d_mlp"),
        "num_experts": attrgetter("host.cfg.num_experts"),
        "experts_per_token": attrgetter("host.cfg.experts_per_token"),
    },
)
Attention = _kind(
    "Attention",
    "Attention with keys and values for each head.",
    "blocks.0.attn",
    AbstractAttention,
    n_key_value_heads=None,
)
GroupedQueryAttention = _kind(
    "GroupedQueryAttention",
    "Attention with keys and values for groups of heads.",
    "blocks.0.attn",
    AbstractAttention,
    constants={"repeat_kv_heads": lambda part: part.host.cfg.n_heads // part.host.cfg.n_kv_heads},
)
Norm = _kind("Norm", "A norm of any kind.", "", constants={"eps": _epsilon})
_LENGTH = {"length": lambda part: part.w.shape[-1]}
LayerNorm = _kind(
    "LayerNorm",
    "A layer norm with weights.",
    "ln_final",
    Norm,
    normalization_type="LN",
    constants=_LENGTH,
)
LayerNormPre = _kind(
    "LayerNormPre", "A layer norm without weights.", "ln_final", Norm, normalization_type="LNPre"
)
RMSNorm = _kind(
    "RMSNorm",
    "A root mean square norm with weights.",
    "ln_final",
    Norm,
    normalization_type="RMS",
    constants=_LENGTH,
)
RMSNormPre = _kind(
    "RMSNormPre", "One without weights.", "ln_final", Norm, normalization_type="RMSPre"
)
Embed = _kind("Embed", "The token embedding.", "embed")
PosEmbed = _kind(
    "PosEmbed", "The position embedding.", "pos_embed", positional_embedding_type="standard"
)
BertEmbed = _kind(
    "BertEmbed", "The embeddings of an encoder: tokens, positions and token types.", ""
)
Unembed = _kind("Unembed", "From the residual stream to logits.", "unembed")


class TransformerBlock(Part):
    """One layer."""

    default_name = "blocks.0"
    constants: ClassVar = {"normalization_type": attrgetter("host.cfg.normalization_type")}

    def apply_mlp(self, normalized_resid: Tensor) -> Tensor:
        """Return the MLP's output, with hooks at ``hook_mlp_out``."""
        mlp_out = self.mlp(normalized_resid)
        if "ln2_post" in self._modules:
            mlp_out = self.ln2_post(mlp_out)
        return self.hook_mlp_out(mlp_out)  # type: ignore[no-any-return]


_NORMS = {"LN": LayerNorm, "LNPre": LayerNormPre, "RMS": RMSNorm, "RMSPre": RMSNormPre}
_BY_NAME = {"embed": Embed, "pos_embed": PosEmbed, "unembed": Unembed}


def kind_of(name: str, inside: set[str], cfg: ModelConfig) -> type[Part]:
    """Return the class of a part."""
    last = name.rpartition(".")[2]
    if last.isdigit():
        return TransformerBlock if name.count(".") == 1 else Part
    if last == "embed" and "embed" in inside:
        return BertEmbed
    if last in ("attn", "cross_attn"):
        if cfg.relative_attention_num_buckets is not None:
            return _T5Attention
        return GroupedQueryAttention if cfg.n_key_value_heads is not None else Attention
    if last == "mlp":
        if "experts" in inside:
            return MoE
        return GatedMLP if "W_gate" in inside else MLP
    if last.startswith("ln") or last.endswith("_ln"):
        return _NORMS.get(str(cfg.normalization_type), Part)
    return _BY_NAME.get(last, Part)


#: HookedTransformer's name of the hook point at the tokens, which exists only if the configuration
#: enables it.
_TOKENS = "embed.hook_in"
#: The embedding, by either name, and the unembedding: they may be tied.
ENDS = ("embed.W_E", "embed.embed.W_E", "unembed.W_U")


@functools.cache
def _ranks(blocks: str, gated: bool) -> tuple[dict[str, int], dict[str, int]]:
    """Return the ranks of weight and part name components in HookedTransformer's order."""
    weights = f"{_WEIGHTS} {_OF_MLP[gated]}".split()
    parts = _PARTS.format(blocks=blocks).split()
    return (
        {word: rank for rank, word in enumerate(weights)},
        {word: rank for rank, word in enumerate(parts)},
    )


def _renamed(point: Point) -> Point:
    if point.name != _TOKENS:
        return point
    aliases = (*point.aliases, _TOKENS)
    return replace(
        point, name="hook_tokens", aliases=aliases, group="heavy", flag="use_hook_tokens"
    )


def _is_same(value: Any, current: Any) -> bool:
    """Tell whether a value is the current one, or a tensor with the same memory or the same
    numbers."""
    if not (isinstance(value, Tensor) and isinstance(current, Tensor)):
        return value is current or bool(value == current)
    alike = (value.dtype, value.device) == (current.dtype, current.device)
    return alike and (value.is_set_to(current) or torch.equal(value, current))


def _address(point: AnyHookPoint) -> tuple[str, str]:
    """Return the path of the module at a hook point, and whether it is its input or output."""
    return point.point.site.path, point.point.site.kind


def _children(names: Sequence[str]) -> dict[str, set[str]]:
    """Map each dotted path above the names to the words that follow it."""
    children: dict[str, set[str]] = {}
    for path in names:
        while path:
            path, _, last = path.rpartition(".")
            children.setdefault(path, set()).add(last)
    return children


def _replacing_input(x: Tensor, scope: Scope, caller: RunContext) -> Callable[..., Any]:
    """Return a torch hook that replaces a module's input in the runs of a scope. From there on, the
    runs see the hooks that the caller sees.
    """
    own: frozenset[Scope | None] = caller.own if caller.run is None else frozenset()

    def enter(module: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs] | None:
        now = CURRENT.get()
        if scope not in now.visible:
            return None
        CURRENT.set(RunContext(caller.shared | {scope}, own, now.run, now.generation))
        if args:
            return (x, *args[1:]), kwargs
        return args, kwargs | {first_parameter(type(module).forward): x}

    return enter


def _stop(activation: Tensor, hook: AnyHookPoint) -> None:
    """End a run at a hook point, with its activation as the result."""
    raise StopRun(activation)


class ModuleTree(_HoldsParameters, TransformerBridge, ListsHooks):
    """A bridge that is a module tree: its parts can be called, replaced and copied."""

    #: The HookedTransformer class that it follows, which lacks some names; and the order of the
    #: parts in its blocks.
    name_before = "HookedTransformer"
    parts_of_blocks: ClassVar[str] = "ln1 ln1_post ln2 ln2_post attn mlp"
    makes_points = HookPoint
    refuses_silent_hooks = False  # they do not fire, as in HookedTransformer
    #: Hook points that HookedTransformer lacks, hidden while a user's own hook points have their
    #: names.
    gave_way: dict[str, AnyHookPoint]
    #: The replaced forwards of Hugging Face modules, by part.
    calls: dict[str, ReplacedForward]
    #: The parts by name, and the names of the weights directly in each.
    parts: dict[str, Any]
    own_weights: dict[str, list[str]]
    #: Maps the path of each parameter to its part (two if tied) and its name there.
    parameter_names: dict[str, dict[str, str]]

    def _wire(self, model_map: ModelMap) -> None:
        if not isinstance(self.cfg, HookedModelConfig):
            self.cfg = HookedModelConfig.of(self.cfg)
        state = self.__dict__
        if "original_model" in self._modules:
            # The tree holds the parts; do not register the modules behind them twice.
            state["original_model"] = self._modules.pop("original_model")
        super()._wire(replace(model_map, points=[_renamed(x) for x in model_map.points]))
        if hasattr(type(self), "set_ungroup_grouped_query_attention"):
            self.cfg.__dict__["acts"] = self.set_ungroup_grouped_query_attention
        if not isinstance(self._parameters, PartParameters):
            state["_parameters"] = PartParameters(self, "", self._parameters)
        state["calls"], state["spliced"], state["gave_way"] = {}, {}, {}
        self._grow()
        self.setup()

    @property
    def tree(self) -> NameTree:
        """Return names and weights, nested by the components of their names."""
        return self._tree

    def _grow(self) -> None:
        """Build the tree: a module for each part, with its hook points."""
        parts = self.__dict__.setdefault("parts", {})
        for part in parts.values():
            for key, module in [*part._modules.items()]:
                if self._is_own(part.name, key, module):
                    del part._modules[key]
        points = self.wiring.points
        names = sorted([*self.weights.getters, *points], key=self.place_of)
        self._list_own_weights(names)
        children = _children(names)
        for name in names:
            parent: nn.Module = self
            path = ""
            *above, last = name.split(".")
            for word in above:
                path = join(path, word)
                modules: dict[str, Any] = parent._modules
                if word not in modules:
                    modules[word] = parts.get(path) or self._new(path, children[path])
                parent = modules[word]
            if name in points:
                parent._modules[last] = points[name]  # type: ignore[assignment]

    def _list_own_weights(self, names: Sequence[str]) -> None:
        """List the weights of each part, and forget where its parameters are."""
        self.__dict__["own_weights"], self.__dict__["parameter_names"] = {}, {}
        for name in names:
            if name in self.weights.getters:
                part, _, last = name.rpartition(".")
                self.own_weights.setdefault(part, []).append(last)

    def place_of(self, name: str) -> list[tuple[int, int]]:
        """Return the sort key of a weight or tree entry in HookedTransformer's order: a part's own
        entries come before its children, and entries that HookedTransformer lacks come last.
        """
        weights, parts = _ranks(self.parts_of_blocks, bool(self.cfg.gated_mlp))
        *above, last = name.split(".")
        key = []
        for word in above:
            rank = int(word) if word.isdigit() else parts.get(word, len(parts))
            key.append((1, rank))
        return [*key, (0, weights.get(last.partition("+")[0], len(weights)))]

    def _new(self, path: str, children: set[str]) -> nn.Module:
        if not all(child.isdigit() for child in children):
            return kind_of(path, children, self.cfg).of(self, path)
        blocks = Blocks(self, path)
        self.parts[path] = blocks
        return blocks

    @property
    def context_level(self) -> int:
        """Return the number of open ``with`` statements of hooks in this context."""
        return len(CURRENT.get().visible - {None})

    def points_of_run(
        self, names: NamesFilter | AnyHookPoint, forward_kwargs: Kwargs
    ) -> list[AnyHookPoint]:
        """Return the selected hook points in the layers that run; as in HookedTransformer, the
        others do not fire.
        """
        return points_that_run(self, self.select_hooks(names), forward_kwargs)

    def process_weights(self, *args: Any, **kwargs: Any) -> Any:
        """Process the weights, as `TransformerBridge.process_weights`. A part whose norm is folded
        is replaced by one of another class.
        """
        done = super().process_weights(*args, **kwargs)
        for name, part in [*self.parts.items()]:
            kind = kind_of(name, {*part._modules, *self.own_weights.get(name, ())}, self.cfg)
            path, _, last = name.rpartition(".")
            parent: nn.Module = self.parts[path] if path else self
            is_used = isinstance(part, Part) and parent._modules.get(last) is part
            if is_used and kind is not type(part):
                parent._modules[last] = new = kind.of(self, name)
                # The old object keeps its hook points and the user's modules.
                new.__dict__ |= part.__dict__
                if name in self.calls:
                    self.calls[name].part = new
        return done

    def adopt_part(self, part: Part) -> None:
        """Replace the model's own part of the same name with this one; the model was made
        around it.
        """
        part._modules.update(self.parts[part.name]._modules)
        self.parts[part.name] = part
        path, _, last = part.name.rpartition(".")
        self.get_submodule(path)._modules[last] = part

    # Calling parts on their own.

    @property
    def library_forward(self) -> Callable[..., Any]:
        """Return the forward of this library's class, whatever a subclass or an instance has."""
        kinds = (kind for kind in type(self).__mro__ if "forward" in vars(kind))
        ours: Any = next(kind for kind in kinds if kind.__module__.startswith("bridge."))
        return ours.forward  # type: ignore[no-any-return]

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model itself. (A user's own `forward` may call single parts instead.)"""
        return self.library_forward(self, *args, **kwargs)

    def _paths(self) -> Iterator[tuple[str, str]]:
        """Yield the names of parts and the paths of the modules that implement them."""
        yield from paths_of_parts(self)

    def find_module(self, name: str) -> nn.Module | None:
        """Return the Hugging Face module that implements a part; None if no single module does."""
        path = path_of_part(self, name, dict(self._paths()))
        return None if path is None else self.original_model.get_submodule(path)

    def module_of(self, name: str) -> nn.Module:
        """Return the Hugging Face module that implements a part."""
        module = self.find_module(name)
        if module is None:
            raise AttributeError(
                f"{name} is not one module of the model.{suggestion(name, dict(self._paths()))}"
            )
        return module

    def call_part(self, name: str, *inputs: Any, **kwargs: Any) -> Tensor:
        """Call a part of the model: ``embed`` and ``pos_embed`` on tokens, a block on a residual
        stream, norms, attention, MLP and ``unembed`` on their inputs. Hooks inside it run.
        Attention runs within its block. The hooks that run are those inside the part and at its
        output.

        Raises:
            TypeError: the part cannot be called on its own, or not with these inputs.
        """
        inside = {point for point in self.wiring.points if point.startswith(f"{name}.")}
        at_end = self._points_at_end(name)
        silent: dict[nn.Module, Callable[..., Any] | None] = {
            cast(nn.Module, point): None
            for point in self.wiring.points.values()
            if point.listeners and point.name not in inside and point not in at_end
        }
        with setting(CALLS, CALLS.get() | silent):
            output = self._output_of(name, *inputs, **kwargs)
        for point in at_end:
            point.note_shown(output)
        return output

    def _points_at_end(self, name: str) -> list[Any]:
        """Return the hook points that show the output of a part when it is called by itself."""
        path = dict(self._paths()).get(name, "no module")
        fires = name == "pos_embed" or name.endswith(".attn")
        fires = fires or (name.endswith(".mlp") and not self._takes_one_tensor(name))
        known = {f"{name}.hook_out", self.names.aliases.get(f"{name}.hook_out")}
        at_end = []
        for point in self.wiring.points.values():
            place, kind = _address(point)
            at_module = f"{place}.".startswith(f"{path}.")
            is_output = point.view.identity and (place, kind) == (path, "output")
            if is_output or (point.name in known and (fires or at_module)):
                at_end.append(point)
        return at_end

    def _output_of(self, name: str, *inputs: Any, **kwargs: Any) -> Tensor:
        above, _, last = name.rpartition(".")
        if above == "blocks":
            return self._run_block(int(last), *inputs, **kwargs)
        if name == "pos_embed":
            positions = position_embeddings(self.weights["pos_embed.W_pos"], *inputs, **kwargs)
            return self.names.find("hook_pos_embed")(positions)
        if last == "attn":
            return self._attend(name, *inputs, **kwargs)
        inputs += tuple(kwargs.pop(key) for key in _ONE_INPUT if key in kwargs)
        if last not in ("embed", "mlp", "unembed") and not last.startswith("ln"):
            raise TypeError(
                f"{name} cannot be called by itself: run the model, with start_at_layer and"
                " stop_at_layer"
            )
        if last == "unembed":
            return self._unembed(*inputs, **kwargs)
        if last == "mlp" and not self._takes_one_tensor(name):
            return self._run_in_block(name, *inputs, **kwargs)
        return called(self.module_of(name), *inputs, **kwargs)

    def _run_block(
        self,
        layer: int,
        resid_pre: Tensor,
        shortformer_pos_embed: Tensor | None = None,
        past_kv_cache_entry: Any = None,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        if past_kv_cache_entry is not None:
            raise TypeError(
                f"blocks.{layer} by itself takes no past_kv_cache_entry: run the model with"
                " past_kv_cache, as super().forward does in a subclass"
            )
        given = {
            "shortformer_pos_embed": shortformer_pos_embed,
            "attention_mask": attention_mask,
            "start_at_layer": layer,
            "stop_at_layer": layer + 1,
        }
        kwargs |= {key: value for key, value in given.items() if value is not None}
        return self._run(resid_pre, **text_alone(self.core) | kwargs)  # type: ignore[no-any-return]

    def _unembed(self, x: Tensor) -> Tensor:
        """Return the logits before a soft cap, as ``x @ W_U + b_U``."""
        # HookedEncoderDecoder applies T5's scale to the unembedding's input.
        return unembedded(self, x, scaled=len(self.architecture.stacks) == 1)

    def _takes_one_tensor(self, name: str) -> bool:
        module = self.find_module(name)
        return module is not None and takes_one_tensor(module)

    def _attend(
        self,
        name: str,
        query_input: Tensor,
        key_input: Tensor | None = None,
        value_input: Tensor | None = None,
        past_kv_cache_entry: Any = None,
        additive_attention_mask: Tensor | None = None,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        """Run attention on the inputs of queries, keys and values. Inputs that differ from the
        values' are projected in separate runs.
        """
        if past_kv_cache_entry is not None or additive_attention_mask is not None:
            raise TypeError(
                f"{name} by itself takes no cache and no additive mask: run the model with"
                " past_kv_cache"
            )
        for x in (query_input, key_input, value_input):
            if x is not None and x.ndim != 3:
                raise TypeError(
                    f"{name} by itself reads [batch, pos, d_model], not {list(x.shape)}: in the"
                    " model, hooks on hook_q_input, hook_k_input and hook_v_input change what each"
                    " head reads"
                )
        key = query_input if key_input is None else key_input
        value = query_input if value_input is None else value_input
        edits: list[tuple[AnyHookPoint, Any]] = []
        for letter, x in (("q", query_input), ("k", key)):
            if x is not value and not torch.equal(x, value):
                point = self.names.find(f"{name}.hook_{letter}")
                edits.append((point, self._projection(point, name, x, attention_mask)))
        return self._run_in_block(name, value, edits, attention_mask)

    def _projection(
        self, point: AnyHookPoint, name: str, x: Tensor, attention_mask: Tensor | None
    ) -> Callable[[Tensor, AnyHookPoint], Tensor]:
        """Return a hook that replaces queries or keys by those of another input of attention."""
        projected: list[Tensor] = []

        def keep(activation: Tensor, hook: AnyHookPoint) -> None:
            projected.append(activation)

        with without_hooks():
            self._run_in_block(name, x, [(point, keep)], attention_mask)
        return lambda activation, hook: projected[0]

    def _run_in_block(
        self,
        name: str,
        x: Tensor,
        edits: Sequence[tuple[AnyHookPoint, Any]] = (),
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        """Run the block in the model with the tensor as the input of attention or MLP, and stop
        after that part.
        """
        module = self.find_module(name)
        if module is None:  # at the part's input
            site = self.names.find(f"{name}.hook_pre").point.site
            module = self.original_model.get_submodule(site.path)
        scope = Scope()
        editors = [(point, Listener("fwd", edit, scope)) for point, edit in edits]
        end = (self.names.find(f"{name}.hook_out"), Listener("fwd", _stop, scope))
        layer = int(name.split(".")[1])
        options: Kwargs = {"start_at_layer": layer, "stop_at_layer": layer + 1}
        options |= text_alone(self.core)
        if attention_mask is not None:
            options["attention_mask"] = attention_mask
        enter = _replacing_input(x, scope, CURRENT.get())
        handle = module.register_forward_pre_hook(enter, with_kwargs=True, prepend=True)
        try:
            for point, listener in editors:
                # before the user's own hooks, which see the projected tensors
                self.wiring.add(point, listener, prepend=True)
            # What comes before the part reads zeros, which no hook may see
            with without_hooks(), self.wiring.scoped([*editors, end], scope):
                return self._run(torch.zeros_like(x), **options)  # type: ignore[no-any-return]
        finally:
            handle.remove()

    def buffer_of(self, name: str, buffer: str) -> Tensor:
        """Return a constant of HookedTransformer's attention: ``mask`` (``[n_ctx, n_ctx]``, True
        where a position may attend), ``IGNORE``, ``rotary_sin`` and ``rotary_cos`` (the model's
        own, ``[n_ctx, rotary_dim]``).
        """
        cfg = self.cfg
        n, device = cfg.n_ctx or 0, cfg.device
        if buffer == "IGNORE":
            return torch.tensor(-torch.inf, device=device)
        if buffer == "mask":
            mask = torch.ones(n, n, dtype=torch.bool, device=device)
            if cfg.attention_dir == "causal":
                mask = mask.tril()
            if cfg.window_size and self.parts[name].attn_type == "local":
                mask = mask.triu(1 - cfg.window_size)
            return mask
        base = self.original_model.get_submodule(base_path(self.original_model))
        rotary = getattr(base, "rotary_emb", None)
        if rotary is None:
            raise AttributeError(
                f"{cfg.model_name} has no table of rotations: {name} has no {buffer}"
            )
        x = torch.zeros(1, device=device, dtype=cfg.dtype)
        cos, sin = rotary(x, torch.arange(n, device=device)[None])
        return cos[0] if buffer == "rotary_cos" else sin[0]  # type: ignore[no-any-return]

    # The user's modules in the tree.

    def setup(self) -> None:
        """Name all modules, and find the hook points in modules added since the last call.

        Raises:
            ValueError: a new hook point has the name of one of the model's own.

        Example:
            >>> from torch import nn
            >>> from bridge.embedded import MODEL_DIR
            >>> from bridge.legacy import HookedTransformer, HookPoint
            >>> model = HookedTransformer.from_pretrained(str(MODEL_DIR), device="cpu")
            >>> model.blocks[0].mlp = nn.Sequential(model.blocks[0].mlp, HookPoint())
            >>> list(model.run_with_cache("Mary and", names_filter="blocks.0.mlp.1")[1])
            ['blocks.0.mlp.1']
        """
        points, present = self.wiring.points, self._user_hook_points()
        placed = {name: x for name, x in points.items() if getattr(x, "is_standalone", False)}
        for name, point in placed.items():
            if present.get(name) is not point:
                self._take_out(name)
        for name, point in present.items():
            if points.get(name, point) is not point:
                self._make_way(name)
        for name, point in present.items():
            if name not in points:
                self._place(name, point)
        if placed or present:
            in_order = sorted(points.items(), key=lambda item: item[1].order)
            points.clear()
            points.update(in_order)
        self.names.refresh()
        self._tree.refresh()

    def _user_hook_points(self) -> dict[str, HookPoint]:
        """Return the hook points in the user's modules, by name."""
        modules = (*self.named_modules(), *self.original_model.named_modules())
        return {name: x for name, x in modules if isinstance(x, HookPoint) and x.is_standalone}

    def _take_out(self, name: str) -> None:
        """Remove a user's hook point, and restore the one that it replaced."""
        point = self.wiring.points.pop(name)
        assert isinstance(point, HookPoint)
        point.keep_listeners(point.leave())
        if name in self.gave_way:
            self.wiring.points[name] = self.gave_way.pop(name)

    def _make_way(self, name: str) -> None:
        """Hide a hook point that HookedTransformer lacks because one of the user's has its name.

        Raises:
            ValueError: HookedTransformer has it.
        """
        if self.wiring.points[name].point.group != "extra":
            raise ValueError(
                f"{name} is a hook point of the model already: give the other one another name"
            )
        self.gave_way[name] = self.wiring.points.pop(name)

    def _place(self, name: str, point: HookPoint) -> None:
        depth = self.cfg.n_layers if name.startswith(("ln_final.", "unembed.")) else -1
        place = point_named(name, depth, [stack.name for stack in self.architecture.stacks])
        others = self.wiring.points.values()
        orders = [hook.order for hook in others if hook.point.depth == place.depth]
        hooks = point.leave()
        point.name, point.point, point.order = name, place, max(orders, default=len(others))
        self.wiring.adopt(point)
        point.join(self.wiring, hooks)

    def put(self, parent: nn.Module, prefix: str, name: str, value: Any) -> None:
        """Assign to an attribute of a part ("" is the model itself): a tensor to a weight, a module
        to a part or hook point, which it replaces, or anything to any other attribute.

        Raises:
            AttributeError: there is no such part, but one with a similar name.
            TypeError: the attribute does not accept this value.
            ValueError: a weight of another shape.
        """
        full = join(prefix, name)
        if isinstance(value, nn.Module) and parent._modules.get(name) is value:
            return  # registered again, as wrappers of modules do
        if full in self.weights.getters:
            self._set_weight(full, value)
        elif not self._has(full):
            self._set_other(parent, prefix, name, value)
        elif not isinstance(value, nn.Module):
            raise TypeError(
                f"{full} cannot be set to {type(value).__name__}: a module can take its place"
            )
        elif full in self.wiring.points:
            self._splice(parent, name, self.wiring.points[full], value)
        else:
            self._replace_part(parent, name, self.parts[full], value)

    def _replace_part(
        self, parent: nn.Module, name: str, part: Part | Blocks, module: nn.Module
    ) -> None:
        """Make the model call a module in place of a part."""
        if isinstance(part, Blocks):
            part.refuse()
        if name == "pos_embed":
            raise TypeError(
                f"{part.name} cannot be replaced, as the model calls its own with positions, not"
                f" tokens: assign to {part.name}.W_pos, or model.add_hook('hook_pos_embed', lambda"
                " x, hook: ...) returns what is added"
            )
        self.call_in_place_of(part)
        before = parent._modules.get(name)
        parent._modules[name] = module
        try:
            self.setup()
        except ValueError:
            parent._modules[name] = before
            self.setup()
            raise

    def _set_other(self, parent: nn.Module, prefix: str, name: str, value: Any) -> None:
        """Set an attribute that is neither a weight nor the model's own part or hook point."""
        known = [*parent._modules, *self._tree.children.get(prefix, ())]
        is_new = isinstance(value, nn.Module | Tensor) and parent._modules.get(name) is None
        hint = suggestion(name, known) if is_new else ""
        if hint and not isinstance(value, HookPoint):
            raise AttributeError(f"{prefix or 'the model'} has no {name!r}.{hint}")
        nn.Module.__setattr__(parent, name, value)
        if name == "forward" and isinstance(parent, Part):
            self.call_in_place_of(parent)

    def _set_weight(self, name: str, value: Any) -> None:
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} cannot be set to {type(value).__name__}: weights take tensors")
        if _is_same(value, self.weights[name]):
            return
        why = self.fits(name, value)
        if why is not None:
            raise ValueError(why) if "shape" in why else TypeError(why)
        self.write({name: value})

    def _has(self, name: str) -> bool:
        """Tell whether a part or hook point of this name belongs to the Hugging Face model."""
        point = self.wiring.points.get(name)
        return name in self.parts or (
            point is not None and not getattr(point, "is_standalone", False)
        )

    def call_in_place_of(self, part: Part) -> None:
        """Make the model call the replacement of a part instead of its own module."""
        if part.name not in self.calls:
            path = part.name.rpartition(".")[0]
            parent = self.parts[path] if path else self
            self.calls[part.name] = ReplacedForward(part, parent, self._view_of_output(part))

    def _view_of_output(self, part: Part) -> View:
        """Return the view of the output of a part's module.

        Raises:
            TypeError: the module does more than its hook point shows.
        """
        name = f"{part.name}.hook_out"
        name = self.names.aliases.get(name, name)
        if not part.name.endswith((".attn", ".mlp")) or name not in self.wiring.points:
            return View()
        point = self.wiring.points[name].point
        path = dict(self._paths()).get(part.name, "")
        if point.site.path == path and point.site.kind == "output":
            return point.view
        if point.site.path.startswith(f"{path}."):
            raise TypeError(
                f"{part.name} cannot be replaced: {type(part.module).__name__} does more than"
                f" {name} shows, such as adding the residual stream; use hooks on {name}"
            )
        return View()

    def _splice(self, parent: nn.Module, name: str, point: AnyHookPoint, module: nn.Module) -> None:
        """Call a module with the activation at a hook point; the model continues with its
        output.
        """
        if point.name in self.spliced:
            self.spliced.pop(point.name).remove()
        if isinstance(module, HookPoint) and not module._modules:
            hooks = module.leave() if module is not point else ()
            parent._modules[name] = point  # type: ignore[assignment]
            for listener in hooks:
                self.wiring.add(point, listener)
        else:
            parent._modules[name] = module
            self.spliced[point.name] = self._put_at(point, module)
        self.setup()

    def _put_at(self, point: AnyHookPoint, module: nn.Module) -> Handle:
        def call(activation: Tensor, hook: HookPoint) -> Tensor:
            # The module may call the hook point, whose hooks the model runs.
            with setting(CALLS, {**CALLS.get(), hook: None}):
                return checked(module(activation.clone()), activation, listener, point)

        # Not a user's hook: it is permanent, and its computation belongs to the run.
        listener = Listener("follow", call)
        self.wiring.add(point, listener)
        return Handle(point, listener, self.wiring)

    def __getattr__(self, name: str) -> Any:
        if why := why_not(self.name_before, name):
            raise AttributeError(why)
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, nn.Module) and name in self._modules and "spliced" in self.__dict__:
            self.put(self, "", name, value)
        elif isinstance(value, nn.Module) and value is self.__dict__.get(name):
            return  # the Hugging Face model, registered again
        elif isinstance(getattr(type(self), name, None), property) and (
            isinstance(value, Tensor) and _is_same(value, getattr(self, name))
        ):
            return  # computed from the weights of the parts
        else:
            super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        self.check_removal("", name)
        super().__delattr__(name)

    def check_removal(self, prefix: str, name: str) -> None:
        """Check that an entry may be removed from a part.

        Raises:
            TypeError: it belongs to the Hugging Face model, which would continue to call it.
        """
        full = join(prefix, name)
        if self._has(full):
            raise TypeError(
                f"{full} is the Hugging Face model's: put a module in its place, such as"
                " nn.Identity()"
            )

    # Weights.

    @property
    def W_gate(self) -> Tensor | None:  # type: ignore[override]
        """Return the gate weights of all layers; None without gates."""
        return super().W_gate if self.cfg.gated_mlp else None

    def fits(self, name: str, value: Tensor) -> str | None:
        """Return why a weight cannot be set to a value; None if it can, or already has it."""
        weight = self.weights[name]
        if weight.shape != value.shape:
            return f"{name} has shape {list(weight.shape)}, not {list(value.shape)}"
        if self._is_stored(weight) or torch.equal(weight.to(value), value):
            return None
        return (
            f"{name} is fixed in {type(self.core).__name__}, or computed from its parameters: other"
            " values have no place"
        )

    def _is_stored(self, weight: Tensor) -> bool:
        address = weight.untyped_storage().data_ptr()
        parameters = self.original_model.parameters()
        return any(x.untyped_storage().data_ptr() == address for x in parameters)

    @torch.no_grad()
    def write(self, weights: Mapping[str, Tensor]) -> None:
        """Write weights into the model, where `fits` allows it."""
        ends = [name for name in ENDS if name in self.weights.getters]
        if set(ends) & set(weights) and len(ends) == 2:
            embed, unembed = (self.weights[name].detach() for name in ends)
            if embed.data_ptr() == unembed.data_ptr():
                new_embed = weights.get(ends[0], embed).to(embed)
                new_unembed = weights.get(ends[1], unembed).to(unembed)
                if not torch.equal(new_embed.T, new_unembed):
                    untie(self.core, self.architecture)
        for name, value in weights.items():
            weight = self.weights[name]
            if self._is_stored(weight):
                weight.copy_(value)

    # Methods that torch calls on a module.

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the Hugging Face model's parameters and the user's modules' parameters by their
        place in the tree. A parameter has the name of the weight or weights stored in it, and its
        own shape.
        """
        by_part = self._sort_parameters()

        def members(module: nn.Module) -> ItemsView[str, Any]:
            parameters: Any = module._parameters
            if isinstance(parameters, PartParameters) and parameters.host is self:
                parameters = parameters.all(by_part)
            return parameters.items()  # type: ignore[no-any-return]

        yield from self._named_members(members, prefix, recurse, remove_duplicate)

    def parameters_of(self, part: str) -> Mapping[str, nn.Parameter]:
        """Return the Hugging Face model's parameters in a part; for the model itself, "", the
        remaining ones.
        """
        return self._sort_parameters().get(part, {}) if "parts" in self.__dict__ else {}

    def _sort_parameters(self) -> dict[str, dict[str, nn.Parameter]]:
        """Return the Hugging Face model's parameters by their part and their name there."""
        parameters = dict(self.original_model.named_parameters())
        if not parameters.keys() <= self.parameter_names.keys():
            modules = [pair for pair in self._paths() if pair[0] in self.parts]
            names = self.parameter_names | dict(names_of(parameters, self.weights, modules))

            def place(entry: tuple[str, dict[str, str]]) -> list[tuple[int, int]]:
                part, name = min(entry[1].items())
                return self.place_of(join(part, name))

            self.__dict__["parameter_names"] = dict(sorted(names.items(), key=place))
        by_part: dict[str, dict[str, nn.Parameter]] = {}
        for path, name_by_part in self.parameter_names.items():
            for part, name in name_by_part.items():
                if path in parameters:
                    by_part.setdefault(part, {})[name] = parameters[path]
        return by_part

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the weights by HookedTransformer's names: views of the model's own parameters."""
        return nn.Module.state_dict(self, *args, **kwargs)

    def to(
        self, *args: Any, print_details: bool = True, device_or_dtype: Any = None, **kwargs: Any
    ) -> Self:
        """Move the model and the user's modules, or change the dtype of their weights."""
        given = (*args, device_or_dtype)
        targets = [x for x in given if x is not None and not isinstance(x, bool)]
        self.original_model.to(*targets, **kwargs)  # raises if the model cannot be moved
        return nn.Module.to(self, *targets, **kwargs)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        self.original_model._apply(fn, recurse)
        for *_, module in self._user_modules():
            module._apply(fn, recurse)
        for holder in (self, *self.parts.values()):
            if isinstance(holder, _HoldsParameters):
                holder.own_state()._apply(fn, recurse=False)
        return self

    @property
    def mod_dict(self) -> dict[str, nn.Module]:  # type: ignore[override]
        """Return all modules by name."""
        return {name: module for name, module in self.named_modules() if name}

    def __getstate__(self) -> State:
        state = super().__getstate__()
        for name in ("parts", "own_weights", "parameter_names", "calls", "spliced", "gave_way"):
            state.pop(name)
        state["_modules"], state["replacements"], state["of_user"] = {}, [], {}
        for name, key, module in self._user_modules():
            if name or key in self.parts or key in self.hook_dict:
                state["replacements"].append((name, key, module))
            else:
                state["_modules"][key] = module
        for name, part in self.parts.items():
            if "forward" in part.__dict__:
                part.__getstate__()  # raises the error that says why it cannot be copied
            state["of_user"][name] = getattr(part._parameters, "own", {}), part._buffers
        state["_parameters"] = self.__dict__["_parameters"].own
        return state

    def __setstate__(self, state: State) -> None:
        replacements, of_user = state.pop("replacements"), state.pop("of_user")
        super().__setstate__(state)
        for name, (parameters, buffers) in of_user.items():
            self.parts[name]._parameters.update(parameters)
            self.parts[name]._buffers.update(buffers)
        for name, key, module in replacements:
            self.put(self.parts[name] if name else self, name, key, module)
        self.setup()

    def _user_modules(self) -> Iterator[tuple[str, str, nn.Module]]:
        """Yield the user's modules: the part that holds each, its name there, and the module."""
        for name, part in {"": self, **self.parts}.items():
            for key, module in part._modules.items():
                if module is not None and not self._is_own(name, key, module):
                    yield name, key, module

    def _is_own(self, name: str, key: str, module: nn.Module | None) -> bool:
        """Tell whether an entry of a part is the model's own rather than the user's."""
        of_model = isinstance(module, HookPoint) and not module.is_standalone
        return of_model or module is self.parts.get(join(name, key))


HookedRootModule.register(ModuleTree)  # programs test for it with isinstance
__getattr__ = named(__name__)
