"""A model as a tree of modules: its parts, which can be called, its hook points, and what users put in their place."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, ItemsView, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, NoReturn, Self

import torch
from jaxtyping import Float
from torch import Tensor, nn

from adapters import ModelMap, Weights
from adapters.config import ModelConfig
from adapters.inputs import PAST, text_alone
from adapters.points import Point, base_path, core_path, join
from adapters.views import Args, Call, Kwargs, View
from bridge.bridge import TransformerBridge
from bridge.hooks.arguments import check_choice
from bridge.hooks.context import CURRENT, Listener, Scope, forward_pass, setting, without_hooks
from bridge.hooks.hooks import Handle, checked
from bridge.hooks.hooks import HookPoint as AnyHookPoint
from bridge.hooks.modules import InForwardsPlace, first_parameter
from bridge.hooks.names import NamesFilter, suggestion
from bridge.legacy.hook_points import CALLS, HookedRootModule, HookFunction, HookPoint, ListsHooks, point_named
from bridge.legacy.HookedTransformerConfig import HookedModelConfig, HookedTransformerConfig
from bridge.legacy.table import at, named, why_not
from bridge.legacy.utilities import position_embeddings
from bridge.run.layer_range import StopRun
from bridge.run.run import points_that_run
from bridge.taps.taps import Tap
from bridge.weights import Component, NameTree
from weight_processing.saving import untie

# ----------------------------------------------------------------------------------------------------------------------
# A model's parameters in its tree of parts: Hugging Face's own, under HookedTransformer's names.
# ----------------------------------------------------------------------------------------------------------------------


#: What a module is saved or copied as, by name.
State = dict[str, Any]


class PartParameters(MutableMapping[str, Any]):
    """Where torch looks for a part's parameters: those that a user gave it, and the Hugging Face model's that stand
    there, which stay where they are, and are looked for when they are asked for.

    Args:
        host: what the part belongs to.
        part: its name; that of the model itself is "".
        own: what a user gave it.
    """

    def __init__(self, host: ModuleTree, part: str, own: dict[str, nn.Parameter | None]) -> None:
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

    def _save_to_state_dict(self, destination: State, prefix: str, keep_vars: bool) -> None:
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


# ----------------------------------------------------------------------------------------------------------------------
# The parts of a model as torch modules with HookedTransformer's names: they stand for the Hugging Face model's own.
# ----------------------------------------------------------------------------------------------------------------------


#: What HookedTransformer's attention keeps in addition to its parameters: read from the model, and fixed by it.
BUFFERS = ("mask", "IGNORE", "rotary_sin", "rotary_cos")
_ENDS = {"output": "hook_out", "input": "hook_in"}
#: The words of weights' and parts' names in the order in which HookedTransformer has them, wherever they stand.
_WEIGHTS = "W w b W_E W_pos W_token_type W_Q W_O b_Q b_O W_K _W_K W_V _W_V b_K _b_K b_V _b_V W_U b_U"
_OF_MLP = {False: "W_in b_in W_out b_out", True: "W_in W_out W_gate b_in b_out"}
_PARTS = (
    "embed pos_embed token_type_embed {blocks} q_norm k_norm rel_pos_bias ln experts W_in W_out W_gate blocks encoder "
    "encoder_final_ln decoder decoder_final_ln ln_final mlm_head unembed nsp_head pooler"
)
_IN_TRACES = ("input", "inputs", "output", "outputs")


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
    fields: ClassVar[Kwargs] = {}
    #: The model that it belongs to, and its name there, such as ``blocks.0.attn``.
    host: ModuleTree
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
    def of(cls, host: ModuleTree, name: str) -> Self:
        """The part of this name, without what is in it."""
        part = cls.__new__(cls)
        part.__setstate__({"host": host, "name": name})
        return part

    def __getstate__(self) -> State:
        if "forward" in self.__dict__:
            raise TypeError(
                f"{self.name}.forward is a function of yours, which a copy of the model would share with this one: "
                "put a module in its place, which is copied"
            )
        return {key: self.__dict__[key] for key in ("host", "name", "given") if key in self.__dict__}

    def __setstate__(self, state: State) -> None:
        nn.Module.__init__(self)
        self._belong(state)
        # The model of a copy may not be there in full yet; it will take what it finds here.
        self.host.__dict__.setdefault("parts", {})[self.name] = self

    def _belong(self, state: State) -> None:
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
        with setting(CALLS, {**calls, self: None}):
            return self.host.call_part(self.name, *inputs, **kwargs)

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

    def _save_to_state_dict(self, destination: State, prefix: str, keep_vars: bool) -> None:
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

    def __init__(self, host: ModuleTree, name: str) -> None:
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

    add_module = HoldsParameters.add_module  # type: ignore[assignment]

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


# ----------------------------------------------------------------------------------------------------------------------
# Modules of users where the model calls its own.
# ----------------------------------------------------------------------------------------------------------------------


#: What a call must not do twice: add keys and values to a cache.
_CACHES = (*PAST, "past_key_value", "layer_past")


class ReplacedForward(InForwardsPlace):
    """The forward of a Hugging Face module in whose place another module is called.

    The Hugging Face module stays where it is, with its torch hooks, weights and path. Torch calls nothing in place of a
    forward (a hook that comes before it can change what it reads alone), so this is done as taps do it.

    Args:
        module: the Hugging Face module.
        part: the part that it plays.
        replacement: what is called: the part itself, or a module of the user's, which may call the part.
        view: how what the module returns is seen as what the part makes.
        of_attention: it is called with what queries, keys and values read.
    """

    def __init__(
        self, module: nn.Module, part: nn.Module, replacement: Callable[[], nn.Module], view: View, of_attention: bool
    ) -> None:
        self.module = module
        self.part, self.replacement, self.view, self.of_attention = part, replacement, view, of_attention
        own = self.module.__dict__.get("forward")
        if isinstance(own, Tap):  # which still wraps it
            self.inner: Callable[..., Any] = own.original
            own.original = own.own = self
        else:
            self.inner = self.module.forward
            self.module.__dict__["forward"] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        calls = CALLS.get()
        if self.part in calls and calls[self.part] is None:  # the part is being called by itself
            return self.inner(*args, **kwargs)
        name = "" if args else first_parameter(type(self.module).forward)
        x, call, made = args[0] if args else kwargs[name], Call(self.module, args, kwargs), []

        def inner(given: Tensor) -> Tensor:
            made.append(self.inner(given, *args[1:], **kwargs) if args else self.inner(**{**kwargs, name: given}))
            return self.view.get(_first(made[-1]), call)

        with setting(CALLS, {**calls, self.part: inner}):
            if self.of_attention:
                out = self.replacement()(
                    query_input=x, key_input=x, value_input=x, past_kv_cache_entry=None, attention_mask=None
                )
            else:
                out = self.replacement()(x)
        if not made:
            made.append(self._without(args, kwargs))
        out = self.view.put(_first(made[-1]), out, call)
        return out if isinstance(made[-1], Tensor) else type(made[-1])((out, *made[-1][1:]))

    @torch.no_grad()
    def _without(self, args: Args, kwargs: Kwargs) -> Any:
        """What the module returns, where the user's module does not call it and knows nothing of what follows the
        first tensor."""
        return self.inner(*args, **{key: value for key, value in kwargs.items() if key not in _CACHES})


def _first(made: Any) -> Tensor:
    return made if isinstance(made, Tensor) else made[0]  # type: ignore[no-any-return]


# ----------------------------------------------------------------------------------------------------------------------
# ``transformer_lens.components``'s names: the classes of parts, which stand for the Hugging Face model's own.
# ----------------------------------------------------------------------------------------------------------------------


_RELATIVE = ("relative_attention_num_buckets", "relative_attention_max_distance")


class CanBeUsedAsMLP(Part):
    """What stands where a block has its MLP. `W_gate` is None without a gate."""

    at, fields = "blocks.0.mlp", {"attn_only": False}

    def __getattr__(self, attribute: str) -> Any:
        if attribute == "W_gate" and not self.host.cfg.gated_mlp and "W_gate" not in self._modules:
            return None
        return super().__getattr__(attribute)


class AbstractAttention(Part):
    """Attention of any kind."""

    def __getattr__(self, attribute: str) -> Any:
        if attribute in BUFFERS:
            return self.host.buffer_of(self.name, attribute)
        return super().__getattr__(attribute)

    def __setattr__(self, attribute: str, value: Any) -> None:
        if attribute not in BUFFERS:
            super().__setattr__(attribute, value)
        elif not torch.equal(getattr(self, attribute), value):
            raise TypeError(f"{self.name}.{attribute} is the model's own: other values would change nothing")

    @property
    def layer_id(self) -> int:
        """The index of its block."""
        return int(self.name.split(".")[1])

    @property
    def attn_type(self) -> str:
        """``"global"`` or ``"local"``."""
        types = self.host.cfg.attn_types
        return "global" if types is None else types[self.layer_id]


class T5Attention(AbstractAttention):
    """Attention of T5. In the first layer of each stack it holds the biases of relative positions for all of them."""

    def __getattr__(self, attribute: str) -> Any:
        if attribute in ("has_relative_attention_bias", *_RELATIVE):
            return getattr(self.module, attribute)
        return super().__getattr__(attribute)

    def compute_relative_attention_bias(self, query_length: int, key_length: int) -> Float[Tensor, "1 head q k"]:
        """The biases, as the model's own module computes them."""
        module: Any = self.module
        return module.compute_bias(query_length, key_length)  # type: ignore[no-any-return]


def _kind(name: str, doc: str, at: str, base: type[Part] = Part, **fields: Any) -> type[Part]:
    fields.setdefault("attn_only", base is not CanBeUsedAsMLP)
    return type(name, (base,), {"__doc__": doc, "__module__": __name__, "at": at, "fields": fields})


MLP = _kind("MLP", "A feed-forward layer.", "blocks.0.mlp", CanBeUsedAsMLP, gated_mlp=False)
GatedMLP = _kind("GatedMLP", "A feed-forward layer with a gate.", "blocks.0.mlp", CanBeUsedAsMLP, gated_mlp=True)
MoE = _kind("MoE", "A mixture of experts.", "", CanBeUsedAsMLP)
Attention = _kind(
    "Attention", "Attention with keys and values for each head.", "blocks.0.attn", AbstractAttention,
    n_key_value_heads=None,
)  # fmt: skip
GroupedQueryAttention = _kind(
    "GroupedQueryAttention", "Attention with keys and values for groups of heads.", "blocks.0.attn", AbstractAttention
)
Norm = _kind("Norm", "A norm of any kind.", "")
LayerNorm = _kind("LayerNorm", "A layer norm with weights.", "ln_final", Norm, normalization_type="LN")
LayerNormPre = _kind("LayerNormPre", "A layer norm without weights.", "ln_final", Norm, normalization_type="LNPre")
RMSNorm = _kind("RMSNorm", "A root mean square norm with weights.", "ln_final", Norm, normalization_type="RMS")
RMSNormPre = _kind("RMSNormPre", "One without weights.", "ln_final", Norm, normalization_type="RMSPre")
Embed = _kind("Embed", "The token embedding.", "embed")
PosEmbed = _kind("PosEmbed", "The position embedding.", "pos_embed", positional_embedding_type="standard")
BertEmbed = _kind("BertEmbed", "The embeddings of an encoder: tokens, positions and token types.", "")
Unembed = _kind("Unembed", "From the residual stream to logits.", "unembed")


class TransformerBlock(Part):
    """One layer."""

    at = "blocks.0"


_NORMS = {"LN": LayerNorm, "LNPre": LayerNormPre, "RMS": RMSNorm, "RMSPre": RMSNormPre}
_BY_NAME = {"embed": Embed, "pos_embed": PosEmbed, "unembed": Unembed}


def kind_of(name: str, inside: set[str], cfg: ModelConfig) -> type[Part]:
    """The class of a part."""
    last = name.rpartition(".")[2]
    if last.isdigit():
        return TransformerBlock if name.count(".") == 1 else Part
    if last == "embed" and "embed" in inside:
        return BertEmbed
    if last in ("attn", "cross_attn"):
        if cfg.relative_attention_num_buckets is not None:
            return T5Attention
        return GroupedQueryAttention if cfg.n_key_value_heads is not None else Attention
    if last == "mlp":
        return MoE if "experts" in inside else GatedMLP if "W_gate" in inside else MLP
    if last.startswith("ln") or last.endswith("_ln"):
        return _NORMS.get(str(cfg.normalization_type), Part)
    return _BY_NAME.get(last, Part)


#: HookedTransformer's name of the point at the tokens, which it has where the configuration says so.
_TOKENS = "embed.hook_in"
#: The embedding, by either of its names, and the unembedding: they may be one parameter.
ENDS = ("embed.W_E", "embed.embed.W_E", "unembed.W_U")


@functools.cache
def _ranks(blocks: str, gated: bool) -> tuple[dict[str, int], dict[str, int]]:
    """The places of weights' words, and of parts' words, in HookedTransformer's order."""
    words = f"{_WEIGHTS} {_OF_MLP[gated]}".split(), _PARTS.format(blocks=blocks).split()
    return tuple({word: place for place, word in enumerate(each)} for each in words)  # type: ignore[return-value]


def _renamed(point: Point) -> Point:
    if point.name != _TOKENS:
        return point
    return replace(point, name="hook_tokens", aliases=(*point.aliases, _TOKENS), group="heavy", flag="use_hook_tokens")


class ModuleTree(HoldsParameters, TransformerBridge, ListsHooks):
    """A bridge that is a tree of modules, whose parts can be called, replaced and copied."""

    #: The class whose names it has, of which some are left out; and the order in which its blocks have their parts.
    name_before = "HookedTransformer"
    parts_of_blocks: ClassVar[str] = "ln1 ln1_post ln2 ln2_post attn mlp"
    makes_points = HookPoint
    refuses_silent_hooks = False  # they do not fire, as in HookedTransformer
    #: Hook points that HookedTransformer lacks, while a user's own have their names.
    gave_way: dict[str, AnyHookPoint]
    #: What stands in the forward of Hugging Face modules, by part.
    calls: dict[str, ReplacedForward]
    #: The parts by name, and the names of the weights that stand directly in each.
    parts: dict[str, Any]
    own_weights: dict[str, list[str]]
    #: For the path of each parameter, the part that it stands in (where tied, two), and its name there.
    parameter_names: dict[str, dict[str, str]]

    def _wire(self, found: ModelMap) -> None:
        if not isinstance(self.cfg, HookedModelConfig):
            self.cfg = HookedModelConfig.of(self.cfg)
        mine = self.__dict__
        if "original_model" in self._modules:  # the tree holds the parts; what they stand for is not in it twice
            mine["original_model"] = self._modules.pop("original_model")
        super()._wire(replace(found, points=[_renamed(point) for point in found.points]))
        if hasattr(type(self), "set_ungroup_grouped_query_attention"):
            self.cfg.__dict__["acts"] = self.set_ungroup_grouped_query_attention
        if not isinstance(self._parameters, PartParameters):
            mine["_parameters"] = PartParameters(self, "", self._parameters)
        mine["calls"], mine["spliced"], mine["gave_way"] = {}, {}, {}
        self._grow()
        self.setup()

    @property
    def tree(self) -> NameTree:
        """Names and weights by the parts of their names."""
        return self._tree

    def _grow(self) -> None:
        """Makes the tree: a module for each part, with the hook points in it."""
        known = self.__dict__.setdefault("parts", {})
        for part in known.values():
            for key in [key for key, module in part._modules.items() if self._is_own(part.name, key, module)]:
                del part._modules[key]
        names = sorted([*self.weights.getters, *self.wiring.points], key=self.place_of)
        inside: dict[str, set[str]] = {}
        self.__dict__["own_weights"], self.__dict__["parameter_names"] = {}, {}
        for name in names:
            path, _, last = name.rpartition(".")
            if name in self.weights.getters:
                self.own_weights.setdefault(path, []).append(last)
            while path:
                inside.setdefault(path, set()).add(last)
                path, _, last = path.rpartition(".")
        for name in names:
            parent: nn.Module = self
            *above, last = name.split(".")
            for depth, word in enumerate(above):
                path = ".".join(above[: depth + 1])
                if word not in parent._modules:
                    parent._modules[word] = known.get(path) or self._new(path, inside[path])
                parent = parent._modules[word]  # type: ignore[assignment]
            if name in self.wiring.points:
                parent._modules[last] = self.wiring.points[name]  # type: ignore[assignment]

    def place_of(self, name: str) -> list[tuple[int, int]]:
        """Where a name of a weight, or of what stands in the tree, is in HookedTransformer's order: what a part has
        itself comes before the parts inside of it, and what HookedTransformer does not have at the end."""
        weights, parts = _ranks(self.parts_of_blocks, bool(self.cfg.gated_mlp))
        *above, last = name.split(".")
        inside = [(1, int(word) if word.isdigit() else parts.get(word, len(parts))) for word in above]
        return [*inside, (0, weights.get(last.partition("+")[0], len(weights)))]

    def _new(self, path: str, inside: set[str]) -> nn.Module:
        if all(word.isdigit() for word in inside):
            self.parts[path] = made = Blocks(self, path)
            return made
        return kind_of(path, inside, self.cfg).of(self, path)

    @property
    def context_level(self) -> int:
        """How many ``with`` statements of hooks are open where it is asked for."""
        return len(CURRENT.get().visible - {None})

    def points_of_run(self, names: NamesFilter | AnyHookPoint, forward_kwargs: Kwargs) -> list[AnyHookPoint]:
        """The chosen hook points that lie in the layers that run: the others do not fire, as in HookedTransformer."""
        return points_that_run(self, self.select_hooks(names), forward_kwargs)

    def process_weights(self, *args: Any, **kwargs: Any) -> Any:
        """As for `TransformerBridge.process_weights`; the part of a folded norm gives way to one of another class."""
        done = super().process_weights(*args, **kwargs)
        for name, part in [*self.parts.items()]:
            kind = kind_of(name, {*part._modules, *self.own_weights.get(name, ())}, self.cfg)
            path, _, last = name.rpartition(".")
            parent: nn.Module = self.parts[path] if path else self
            if isinstance(part, Part) and kind is not type(part) and parent._modules.get(last) is part:
                parent._modules[last] = new = kind.of(self, name)
                new.__dict__ |= part.__dict__  # hook points and all that it was given: whoever has the old one goes on
                if name in self.calls:
                    self.calls[name].part = new
        return done

    def adopt_part(self, part: Part) -> None:
        """Lets a part stand where this model has one of its name, which was made with the model."""
        part._modules.update(self.parts[part.name]._modules)
        self.parts[part.name] = part
        path, _, last = part.name.rpartition(".")
        self.get_submodule(path)._modules[last] = part

    # Parts by themselves.

    def _paths(self) -> Iterator[tuple[str, str]]:
        """The names of parts, and the paths of the modules that play them."""
        declared, base = self.architecture, base_path(self.original_model)
        for stack in declared.stacks:
            for i in range(len(stack.modules(self.original_model.get_submodule(base)))):
                path = join(base, stack.place_of(i))
                yield f"{stack.name}.{i}", path
                for part, place in stack.block_at(i).module_paths.items():
                    yield f"{stack.name}.{i}.{part}", join(path, place)
            if stack.final_norm:
                name = "ln_final" if stack.name == "blocks" else f"{stack.name}_final_ln"
                yield name, join(base, stack.final_norm.path)
        for name, below in (("embed", declared.embedding.tokens), ("pos_embed", declared.embedding.positions)):
            if below:
                yield name, join(base, below)
        if declared.readout.path:
            yield "unembed", join(core_path(self.original_model), declared.readout.path)

    def find_module(self, name: str) -> nn.Module | None:
        """The Hugging Face module that plays a part; None where no module plays it alone."""
        path = dict(self._paths()).get(name)
        return None if path is None else self.original_model.get_submodule(path)

    def module_of(self, name: str) -> nn.Module:
        """The Hugging Face module that plays a part."""
        found = self.find_module(name)
        if found is None:
            raise AttributeError(f"{name} is not one module of the model.{suggestion(name, dict(self._paths()))}")
        return found

    def call_part(self, name: str, *inputs: Any, **kwargs: Any) -> Tensor:
        """What a part of the model makes of tensors: ``embed`` and ``pos_embed`` of tokens, a block of a residual
        stream, norms, attention, MLP and ``unembed`` of what they read. Hooks inside of it act. Attention is run within
        its block, where hook points that come before it see zeros.

        Raises:
            TypeError: the part cannot be called by itself, or not with these.
        """
        above, _, last = name.rpartition(".")
        if above == "blocks":
            given = text_alone(self.core) | kwargs
            return self(*inputs, start_at_layer=int(last), stop_at_layer=int(last) + 1, **given)  # type: ignore[no-any-return]
        if name == "pos_embed":
            return position_embeddings(self.weights["pos_embed.W_pos"], *inputs, **kwargs)
        if last == "attn":
            return self._attend(name, *inputs, **kwargs)
        if last not in ("embed", "mlp", "unembed") and not last.startswith("ln"):
            raise TypeError(f"{name} cannot be called by itself: run the model, with start_at_layer and stop_at_layer")
        if last == "unembed":
            return self._unembed(*inputs, **kwargs)
        if last == "mlp" and not self._takes_one_tensor(name):
            return self._run_in_block(name, *inputs, **kwargs)
        return self._called(self.module_of(name), *inputs, **kwargs)

    def _unembed(self, x: Tensor) -> Tensor:
        """The logits before a soft cap, as ``x @ W_U + b_U``."""
        readout = replace(self.architecture.readout, soft_cap=None)
        # HookedEncoderDecoder has the factor of T5 in what its unembedding reads.
        x = x if len(self.architecture.stacks) > 1 else x * readout.factor_in
        return readout.logits(self._called(self.module_of("unembed"), x), self.core)

    def _called(self, module: nn.Module, *inputs: Any, **kwargs: Any) -> Tensor:
        with forward_pass():
            made = module(*inputs, **kwargs)
        return _first(made)

    def _takes_one_tensor(self, name: str) -> bool:
        module = self.find_module(name)
        if module is None:
            return False
        given = list(inspect.signature(type(module).forward).parameters.values())[2:]
        return all(p.default is not p.empty or p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in given)

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
        """What attention makes of what queries, keys and values read; others than the values' are projected in runs of
        their own."""
        if past_kv_cache_entry is not None or additive_attention_mask is not None:
            raise TypeError(f"{name} by itself takes no cache and no additive mask: run the model with past_kv_cache")
        for given in (query_input, key_input, value_input):
            if given is not None and given.ndim != 3:
                raise TypeError(
                    f"{name} by itself reads [batch, pos, d_model], not {list(given.shape)}: in the model, hooks on "
                    "hook_q_input, hook_k_input and hook_v_input change what each head reads"
                )
        value = query_input if value_input is None else value_input
        edits: list[tuple[AnyHookPoint, Any]] = []
        for letter, given in (("q", query_input), ("k", query_input if key_input is None else key_input)):
            if given is not value and not torch.equal(given, value):
                point, kept = self.names.find(f"{name}.hook_{letter}"), list[Tensor]()
                keep = [(point, lambda x, hook, kept=kept: kept.append(x))]
                with without_hooks():
                    self._run_in_block(name, given, keep, attention_mask)
                edits.append((point, lambda x, hook, kept=kept: kept[0]))
        return self._run_in_block(name, value, edits, attention_mask)

    def _run_in_block(
        self,
        name: str,
        x: Tensor,
        edits: Sequence[tuple[AnyHookPoint, Any]] = (),
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        """The model runs the block, where attention or MLP is given the tensor, and is left after that."""
        layer, scope, module = int(name.split(".")[1]), Scope(), self.find_module(name)
        if module is None:  # where it begins
            module = self.original_model.get_submodule(self.names.find(f"{name}.hook_pre").point.site.path)

        def enter(module: nn.Module, args: Any, kwargs: Any) -> Any:
            if scope not in CURRENT.get().visible:
                return None
            if args:
                return (x, *args[1:]), kwargs
            return args, kwargs | {first_parameter(type(module).forward): x}

        def leave(out: Tensor, hook: AnyHookPoint) -> None:
            raise StopRun(out)

        members = [(point, Listener("fwd", edit, scope)) for point, edit in edits]
        members.append((self.names.find(f"{name}.hook_out"), Listener("fwd", leave, scope)))
        masked = text_alone(self.core) | ({} if attention_mask is None else {"attention_mask": attention_mask})
        handle = module.register_forward_pre_hook(enter, with_kwargs=True, prepend=True)
        try:
            for point, listener in members[:-1]:  # before the user's own, which see what was projected
                self.wiring.add(point, listener, prepend=True)
            with self.wiring.scoped(members, scope):
                made: Tensor = self(torch.zeros_like(x), start_at_layer=layer, stop_at_layer=layer + 1, **masked)
        finally:
            handle.remove()
        return made

    def buffer_of(self, name: str, buffer: str) -> Tensor:
        """What HookedTransformer's attention keeps besides its parameters: ``mask`` (what positions see, ``[n_ctx,
        n_ctx]``), ``IGNORE``, ``rotary_sin`` and ``rotary_cos`` (the model's own, ``[n_ctx, rotary_dim]``)."""
        n, device = self.cfg.n_ctx or 0, self.cfg.device
        if buffer == "IGNORE":
            return torch.tensor(-torch.inf, device=device)
        if buffer == "mask":
            seen, window = torch.ones(n, n, dtype=torch.bool, device=device), self.cfg.window_size
            seen = seen.tril() if self.cfg.attention_dir == "causal" else seen
            return seen.triu(1 - window) if window and self.parts[name].attn_type == "local" else seen
        rotary = getattr(self.original_model.get_submodule(base_path(self.original_model)), "rotary_emb", None)
        if rotary is None:
            raise AttributeError(f"{self.cfg.model_name} has no table of rotations: {name} has no {buffer}")
        cos, sin = rotary(torch.zeros(1, device=device, dtype=self.cfg.dtype), torch.arange(n, device=device)[None])
        return cos[0] if buffer == "rotary_cos" else sin[0]  # type: ignore[no-any-return]

    # What is put in.

    def setup(self) -> None:
        """Names all modules, and finds the hook points in modules that were put in since.

        Raises:
            ValueError: a hook point in them has the name of one of the model's own.

        Example:
            >>> from torch import nn
            >>> from bridge.embedded import MODEL_DIR
            >>> from bridge.legacy import HookedTransformer, HookPoint
            >>> model = HookedTransformer.from_pretrained(str(MODEL_DIR), device="cpu")
            >>> model.blocks[0].mlp = nn.Sequential(model.blocks[0].mlp, HookPoint())
            >>> list(model.run_with_cache("Mary and", names_filter="blocks.0.mlp.1")[1])
            ['blocks.0.mlp.1']
        """
        points, here = self.wiring.points, self._hook_points_put_in()
        placed = {name: point for name, point in points.items() if getattr(point, "is_standalone", False)}
        for name, point in placed.items():
            if here.get(name) is not point:
                self._take_out(name)
        for name, point in here.items():
            if points.get(name, point) is not point:
                self._make_way(name)
        for name, point in here.items():
            if name not in points:
                self._place(name, point)
        if placed or here:
            in_order = sorted(points.items(), key=lambda item: item[1].order)
            points.clear()
            points.update(in_order)
        self.names.refresh()
        self._tree.refresh()

    def _hook_points_put_in(self) -> dict[str, HookPoint]:
        """The hook points in modules that were put in, by name."""
        named = (*self.named_modules(), *self.original_model.named_modules())
        return {name: module for name, module in named if isinstance(module, HookPoint) and module.is_standalone}

    def _take_out(self, name: str) -> None:
        """Takes a user's hook point out; one that it stood in the place of is there again."""
        point = self.wiring.points.pop(name)
        assert isinstance(point, HookPoint)
        point.keep_listeners(point.leave())
        if name in self.gave_way:
            self.wiring.points[name] = self.gave_way.pop(name)

    def _make_way(self, name: str) -> None:
        """Takes a hook point that HookedTransformer does not have away, whose name one of the user's has.

        Raises:
            ValueError: HookedTransformer has it.
        """
        if self.wiring.points[name].point.group != "extra":
            raise ValueError(f"{name} is a hook point of the model already: give the other one another name")
        self.gave_way[name] = self.wiring.points.pop(name)

    def _place(self, name: str, point: HookPoint) -> None:
        depth = self.cfg.n_layers if name.startswith(("ln_final.", "unembed.")) else -1
        place = point_named(name, depth, [stack.name for stack in self.architecture.stacks])
        others = self.wiring.points.values()
        order = max((hook.order for hook in others if hook.point.depth == place.depth), default=len(others))
        hooks = point.leave()
        point.name, point.point, point.order = name, place, order
        self.wiring.adopt(point)
        point.join(self.wiring, hooks)

    def put(self, parent: nn.Module, prefix: str, name: str, value: Any) -> None:
        """Assigns to what is in a part (of this name; of the model itself, which is called ""): a tensor to a weight, a
        module to a part or a hook point, in whose place it is called, or anything to any other attribute.

        Raises:
            AttributeError: there is no such part, but one with a similar name.
            TypeError: what is there cannot be set to this.
            ValueError: a weight of another shape.
        """
        full, was = join(prefix, name), parent._modules.get(name)
        point = self.wiring.points.get(full)
        if full in self.weights.getters:
            self._set_weight(full, value)
        elif self._has(full):
            if not isinstance(value, nn.Module):
                raise TypeError(f"{full} cannot be set to {type(value).__name__}: a module can take its place")
            if point is not None:
                return self._splice(parent, name, point, value)
            if isinstance(self.parts[full], Blocks):
                self.parts[full].refuse()
            if name == "pos_embed":
                raise TypeError(
                    f"{full} cannot be replaced, as the model calls its own with positions, not tokens: assign to "
                    f"{full}.W_pos, or model.add_hook('hook_pos_embed', lambda x, hook: ...) returns what is added"
                )
            self.call_in_place_of(self.parts[full])
            parent._modules[name] = value
            try:
                self.setup()
            except ValueError:
                parent._modules[name] = was
                self.setup()
                raise
        else:
            self._set_other(parent, prefix, name, value)

    def _set_other(self, parent: nn.Module, prefix: str, name: str, value: Any) -> None:
        """Sets what is neither a weight nor the model's own part or hook point."""
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
        why = self.fits(name, value)
        if why is not None:
            raise ValueError(why) if "shape" in why else TypeError(why)
        self.write({name: value})

    def _has(self, name: str) -> bool:
        """Whether a part or a hook point of this name is the Hugging Face model's."""
        point = self.wiring.points.get(name)
        return name in self.parts or (point is not None and not getattr(point, "is_standalone", False))

    def call_in_place_of(self, part: Part) -> None:
        """Lets the model call what stands in a part's place, where it calls its own module."""
        if part.name in self.calls:
            return
        path, _, last = part.name.rpartition(".")
        parent = self.parts[path] if path else self
        view, out = View(), self.names.aliases.get(f"{part.name}.hook_out", f"{part.name}.hook_out")
        if last in ("attn", "mlp") and out in self.wiring.points:
            site, at = self.wiring.points[out].point.site, dict(self._paths()).get(part.name, "")
            if site.path == at and site.kind == "output":
                view = self.wiring.points[out].point.view
            elif site.path.startswith(f"{at}."):
                raise TypeError(
                    f"{part.name} cannot be replaced: {type(part.module).__name__} does more than {out} shows, such as "
                    f"adding the residual stream; use hooks on {out}"
                )
        of_attention = isinstance(part, AbstractAttention)
        self.calls[part.name] = ReplacedForward(part.module, part, lambda: parent._modules[last], view, of_attention)  # type: ignore[arg-type,return-value]

    def _splice(self, parent: nn.Module, name: str, point: AnyHookPoint, module: nn.Module) -> None:
        """Calls a module with the activation at a hook point; later computation uses what it returns."""
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
            with setting(CALLS, {**CALLS.get(), hook: None}):  # it may call the hook point, whose hooks the model runs
                return checked(module(activation.clone()), activation, listener, point)

        listener = Listener("follow", call)  # no hook of the user's: it stays, and what it computes is of the run
        self.wiring.add(point, listener)
        return Handle(point, listener, self.wiring)

    def __getattr__(self, name: str) -> Any:
        if why := why_not(self.name_before, name):
            raise AttributeError(why)
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, nn.Module) and name in self._modules and "spliced" in self.__dict__:
            self.put(self, "", name, value)
        else:
            super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        self.check_removal("", name)
        super().__delattr__(name)

    def check_removal(self, prefix: str, name: str) -> None:
        """Looks whether something may be taken out of a part of this name.

        Raises:
            TypeError: the Hugging Face model has it, and would go on to call it.
        """
        full = join(prefix, name)
        if self._has(full):
            raise TypeError(f"{full} is the Hugging Face model's: put a module in its place, such as nn.Identity()")

    # Weights.

    @property
    def W_gate(self) -> Tensor | None:  # type: ignore[override]
        """The gates' weights of all layers; None without gates."""
        return super().W_gate if self.cfg.gated_mlp else None

    def fits(self, name: str, value: Tensor) -> str | None:
        """Why a weight cannot be set to a value; None where it can, or has it."""
        here = self.weights[name]
        if here.shape != value.shape:
            return f"{name} has shape {list(here.shape)}, not {list(value.shape)}"
        if not self._is_stored(here) and not torch.equal(here.to(value), value):
            kind = type(self.core).__name__
            return f"{name} is fixed in {kind}, or computed from its parameters: other values have no place"
        return None

    def _is_stored(self, weight: Tensor) -> bool:
        at = weight.untyped_storage().data_ptr()
        return any(p.untyped_storage().data_ptr() == at for p in self.original_model.parameters())

    @torch.no_grad()
    def write(self, weights: Mapping[str, Tensor]) -> None:
        """Writes weights into the model, where `fits` finds a place."""
        ends = [name for name in ENDS if name in self.weights.getters]
        if set(ends) & set(weights) and len(ends) == 2:
            now = [self.weights[name].detach() for name in ends]
            embed, unembed = (weights.get(name, value).to(value) for name, value in zip(ends, now, strict=True))
            if now[0].data_ptr() == now[1].data_ptr() and not torch.equal(embed.T, unembed):
                untie(self.core, self.architecture)
        for name, value in weights.items():
            here = self.weights[name]
            if self._is_stored(here):
                here.copy_(value)

    # What torch asks of a module.

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The Hugging Face model's parameters, and those of modules that were put in, by their places in the tree. One
        has the name of the weight that is stored in it, or of several, and its own shape."""
        by_part = self._sort_parameters()

        def members(module: nn.Module) -> ItemsView[str, Any]:
            held: Any = module._parameters
            mine = isinstance(held, PartParameters) and held.host is self
            return held.all(by_part).items() if mine else held.items()

        yield from self._named_members(members, prefix, recurse, remove_duplicate)

    def parameters_of(self, part: str) -> Mapping[str, nn.Parameter]:
        """The Hugging Face model's parameters that stand in a part; in the model itself, called "", the rest."""
        return self._sort_parameters().get(part, {}) if "parts" in self.__dict__ else {}

    def _sort_parameters(self) -> dict[str, dict[str, nn.Parameter]]:
        given = dict(self.original_model.named_parameters())
        if not given.keys() <= self.parameter_names.keys():
            modules = [(name, path) for name, path in self._paths() if name in self.parts]
            places = self.parameter_names | dict(names_of(given, self.weights, modules))
            names = {path: join(*min(inside.items())) for path, inside in places.items()}
            in_order = sorted(places, key=lambda path: self.place_of(names[path]))
            self.__dict__["parameter_names"] = {path: places[path] for path in in_order}
        found: dict[str, dict[str, nn.Parameter]] = {}
        for path, inside in self.parameter_names.items():
            for part, name in inside.items():
                if path in given:
                    found.setdefault(part, {})[name] = given[path]
        return found

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The weights by HookedTransformer's names: views of the model's own parameters."""
        return nn.Module.state_dict(self, *args, **kwargs)

    def to(self, *args: Any, print_details: bool = True, **kwargs: Any) -> Self:
        """Moves the model and what was put in, or changes the type of their weights."""
        given = [x for x in args if x is not None and not isinstance(x, bool)]
        self.original_model.to(*given, **kwargs)  # which may refuse
        return nn.Module.to(self, *given, **kwargs)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        self.original_model._apply(fn, recurse)
        for *_, module in self._user_modules():
            module._apply(fn, recurse)
        for holder in (self, *self.parts.values()):
            if isinstance(holder, HoldsParameters):
                holder.own_state()._apply(fn, recurse=False)
        return self

    @property
    def mod_dict(self) -> dict[str, nn.Module]:  # type: ignore[override]
        """All modules by name."""
        return {name: module for name, module in self.named_modules() if name}

    def __getstate__(self) -> State:
        state = super().__getstate__()
        for name in ("parts", "own_weights", "parameter_names", "calls", "spliced", "gave_way"):
            state.pop(name)
        theirs = {(name, key): module for name, key, module in self._user_modules()}
        in_place = {at for at in theirs if at[0] or join(*at) in self.parts or join(*at) in self.hook_dict}
        state["put_in"] = [(*at, theirs[at]) for at in theirs if at in in_place]
        state["_modules"] = {at[1]: module for at, module in theirs.items() if at not in in_place}
        state["given"] = {}
        for name, part in self.parts.items():
            if "forward" in part.__dict__:
                part.__getstate__()  # which says why it cannot be copied
            state["given"][name] = getattr(part._parameters, "own", {}), part._buffers
        state["_parameters"] = self.__dict__["_parameters"].own
        return state

    def __setstate__(self, state: State) -> None:
        put_in, given = state.pop("put_in"), state.pop("given")
        super().__setstate__(state)
        for name, (parameters, buffers) in given.items():
            self.parts[name]._parameters.update(parameters)
            self.parts[name]._buffers.update(buffers)
        for name, key, module in put_in:
            self.put(self.parts[name] if name else self, name, key, module)
        self.setup()

    def _user_modules(self) -> Iterator[tuple[str, str, nn.Module]]:
        """The modules that were put in: the part each stands in, its name there, and the module."""
        for name, part in {"": self, **self.parts}.items():
            for key, module in part._modules.items():
                if module is not None and not self._is_own(name, key, module):
                    yield name, key, module

    def _is_own(self, name: str, key: str, module: nn.Module | None) -> bool:
        """Whether what stands in a part is what the model has there, rather than the user's."""
        of_model = isinstance(module, HookPoint) and not module.is_standalone
        return of_model or module is self.parts.get(join(name, key))


HookedRootModule.register(ModuleTree)  # which programs ask for by isinstance
__getattr__ = named(__name__)
