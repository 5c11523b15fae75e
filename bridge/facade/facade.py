"""A Hugging Face model with its hook points: construction, what an `nn.Module` does, copies.

A bridge is made of a model, and perhaps a tokenizer or a declaration. In order:

1. `adapters.map_model` says which module plays which part. If the class is not declared, the
   declaration is read from the cache folder, or inferred from one run; either is proved on this
   model, and what could not be proved is reported in one line.
2. `Names` makes hook points of the declared points, by canonical name and by every alias.
3. `Wiring` gets them. It attaches nothing until there is a listener.
4. The model itself answers as an `nn.Module`: parameters, mode, device, state dict.

The methods are in the other files of this room, by subject, in one line of classes: each has its
documentation and one line of code, which calls the room where the work is done. A model whose class
is not declared and of which nothing can be inferred raises an error, and so does a declaration that
does not hold. This room knows no architecture, and no hook point by name.
"""

from __future__ import annotations

import copy
import difflib
import json
import logging
import os
import platform
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from adapters import Architecture, ModelMap, Weights, map_model, proofs
from adapters import kept as folder
from adapters.architecture import NOT_PROVED
from adapters.config import ModelConfig, is_language_part
from adapters.imports import known_error
from adapters.inputs import CannotBeMade, Given
from adapters.kept import Declaration, DeclarationError, Identity, encoded, identity_of, points_of
from adapters.linear import has_weights
from adapters.model import Automatic, is_inferred
from adapters.observe.observe import WRONG, one_line
from adapters.plain_model import with_interface
from adapters.points import base_path, join
from adapters.registry import (
    UnsupportedModelError,
    has_declaration,
    inherits_declaration,
    is_declared,
)
from adapters.spread import Layout, layout_of, number_of
from bridge.hooks.hooks import HookPoint
from bridge.hooks.names import Names
from bridge.run.inputs import RunnableBridge
from bridge.version import __version__, built
from bridge.weights import NameTree
from bridge.wiring.compiled import strip
from bridge.wiring.wiring import Wiring
from weight_processing.process import read_record

# --------------------------------------------------------------------------------------------------
# What a bridge offers of a model, and what it does not.
# --------------------------------------------------------------------------------------------------


_ADAPTERS = {
    "none": "no adapter",
    "there": "an adapter, which was not used",
    "other options": "an adapter for other options than these",
}

#: What TransformerLens' bridge and nnsight have besides, and what to use.
_ELSEWHERE = {
    "model": "bridge.original_model, or bridge.core without what wraps it",
    "hf_model": "bridge.original_model, or bridge.core without what wraps it",
    "config": "bridge.core.config, Hugging Face's, or bridge.cfg, the facts read from the model",
    "layers": "bridge.blocks",
    "logit_lens": "bridge.lens(tokens), whose draw() shows it",
    "clear_hook_registry": "reset_hooks(including_permanent=True): hook points themselves stay",
    "composition_layer_indices": "[index for index, _ in bridge.blocks_with('attn')]",
    "QK_for_attn_layers": (
        "bridge.stack_params_for('attn', 'attn.W_Q') and '...W_K', and FactoredMatrix(W_Q, W_K.mT)"
    ),
    "OV_for_attn_layers": (
        "bridge.stack_params_for('attn', 'attn.W_V') and '...W_O', and FactoredMatrix(W_V, W_O)"
    ),
    "block_hooks": "[name for name in bridge.hook_dict if name.startswith('blocks.0.')]",
    "block_submodules": "dir(bridge.blocks[0])",
    "prepare_multimodal_inputs": (
        "bridge(**AutoProcessor.from_pretrained(name)(text, images, return_tensors='pt'))"
    ),
    "get_params": "tl_parameters(): zeros are not made up for what is missing",
    "lm_head": (
        "bridge.unembed, bridge.original_model.lm_head, or in a trace run.module('lm_head').output"
    ),
}


@dataclass(frozen=True, repr=False)
class _SupportReport:
    """The hook points of a bridge. Printing it lists the missing ones with the reasons.

    Attributes:
        model: its name.
        names: the hook points, in the order of the computation.
        not_offered: missing hook points, or prefixes of their names, and the reasons.
        inferred: whether the declaration was inferred from a run and checked on the model as by
            `adapters.verify`. Hook points that failed a check, and points that depend on them, are
            in `not_offered`, with the failed claim.
        adapter: whether the model's class has an adapter: ``none``; ``there`` (although
            ``automatic="always"`` ignores it); or one only for ``other options`` of the
            configuration.
        modules_without_points: for a model that reads images or sound besides text, the modules
            outside the text part, with their classes.
    """

    model: str
    names: tuple[str, ...]
    not_offered: Mapping[str, str]
    inferred: bool
    adapter: Literal["none", "there", "other options"]
    modules_without_points: Mapping[str, str] = field(default_factory=dict)

    @property
    def summary(self) -> str:
        """The report in one sentence."""
        if not self.inferred:
            return f"{self.model}: {len(self.names)} hook points, as its adapter declares"
        reasons = [why for why in self.not_offered.values() if why.startswith(NOT_PROVED)]
        claims = "".join(f", {claim}" for claim in dict.fromkeys(map(_claim, reasons)))
        failed = f"; {claims[2:]}" if claims else ""
        count = len(self.not_offered)
        missing = f"; {count} things are not offered: print(bridge.offered())" if count else ""
        return (
            f"{self.model} has {_ADAPTERS[self.adapter]}. One was inferred from a run and proved on"
            f" it, with {len(self.names)} hook points{failed}{missing}"
        )

    def __repr__(self) -> str:
        lines = [self.summary]
        for name, reason in self.not_offered.items():
            lines.append(f"  not offered: {name}: {reason}")
        for path, cls in self.modules_without_points.items():
            lines.append(f"  has no hook points: {path} ({cls})")
        return "\n".join(lines)


def _claim(reason: str) -> str:
    """Return the claim of a reason, without the measured values."""
    claim = reason.removeprefix(f"{NOT_PROVED}: ").partition(": ")[0]
    return f"{reason.partition(':')[0]}: {claim}"


def modules_without_points(
    model: nn.Module, used: Collection[str], path: str = ""
) -> dict[str, str]:
    """Return the outermost modules with parameters that neither are in `used` nor contain a module
    that is, with the names of their classes.

    Args:
        model: the model, or the module in it at `path`.
        used: paths of modules.
        path: the path of `model`.
    """
    if path in used or not any(True for _ in model.parameters()):
        return {}
    if path and not any(used_path.startswith(f"{path}.") for used_path in used):
        return {path: type(model).__name__}
    classes: dict[str, str] = {}
    for name, child in model.named_children():
        classes |= modules_without_points(child, used, join(path, name))
    return classes


# --------------------------------------------------------------------------------------------------
# Bug reports.
# --------------------------------------------------------------------------------------------------


_LIBRARIES = (
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "jaxtyping",
    "beartype",
    "greenlet",
    "accelerate",
    "peft",
)


def report(
    model: nn.Module,
    core: nn.Module,
    offered: _SupportReport,
    processed: Mapping[str, str],
    layout: Layout | None,
) -> str:
    """Return versions, the model's class, its hook points, and how its weights were processed.

    Args:
        model: the wrapped model.
        core: the Hugging Face model in it.
        offered: the bridge's hook points.
        processed: the processing of the weights.
        layout: the model's distribution over processes.
    """
    config = getattr(core, "config", None)
    libraries = {name: _version(name) for name in _LIBRARIES}
    parameters = sorted({f"{x.dtype} on {x.device}" for x in core.parameters()})
    lines = {
        "transformer-bridge": __version__,
        "Python": f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        **{name: number for name, number in libraries.items() if number},
        "model": " in ".join(dict.fromkeys([_class(core), _class(model)])),
        "attention": str(getattr(config, "_attn_implementation", None)),
        "parameters": ", ".join(parameters),
        "processed": ", ".join(f"{name}: {state}" for name, state in processed.items()) or "no",
    }
    if layout is not None:
        lines["spread"] = layout.description
    if wrong := known_error(core):
        lines["known"] = wrong
    width = max(map(len, lines))
    return "\n".join([*(f"{name:<{width}}  {text}" for name, text in lines.items()), repr(offered)])


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _class(model: nn.Module) -> str:
    return f"{type(model).__module__}.{type(model).__qualname__}"


_LOGGER = logging.getLogger("bridge")


#: Sets how processes that share a model compare the edits of their hooks.
Asking = Callable[[ModelMap], ModelMap]


def _asking(compares: bool, patience: float, model_map: ModelMap) -> ModelMap:
    layout = model_map.layout
    if layout is None:
        return model_map
    return replace(model_map, layout=layout.asking(compares, patience))


class WrappedModel(nn.Module, RunnableBridge):
    """The base of all methods of a bridge. The class for users is `TransformerBridge`.

    Args:
        hf_model, tokenizer, automatic, inputs, declaration, cache_declaration: as for
        `TransformerBridge`.
    """

    #: Whether attribution to logits counts the final norm's weight. HookedTransformer leaves it
    #: out.
    counts_norm_weights: bool = True
    original_model: nn.Module
    core: PreTrainedModel
    architecture: Architecture
    #: The class of its hook points.
    makes_points: type[HookPoint] = HookPoint
    #: Whether a run of some layers is refused where a hook of a ``with`` statement would never be
    #: called.
    refuses_silent_hooks = True

    def __init__(
        self,
        hf_model: nn.Module,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        automatic: Automatic = True,
        inputs: Given | None = None,
        declaration: Declaration | str | os.PathLike[str] | None = None,
        cache_declaration: bool = True,
        compare_edits: bool = True,
        patience: float = 60.0,
    ) -> None:
        # A bridge may be initialised again in place (see `__setattr__`).
        self.__dict__.pop("wiring", None)
        super().__init__()
        _check_model(hf_model, tokenizer)
        if automatic or declaration is not None:
            hf_model = with_interface(hf_model)
        self.original_model = hf_model
        self.tokenizer: PreTrainedTokenizerBase | None = tokenizer
        asking = partial(_asking, compare_edits, patience)
        if declaration is not None:
            if not isinstance(declaration, Declaration):
                declaration = Declaration.load(declaration)
            self._declared_by(declaration, identity_of(hf_model, built(), inputs), inputs, asking)
        elif cache_declaration and is_inferred(hf_model, automatic) and has_weights(hf_model):
            self._as_before_or_inferred(automatic, inputs, asking)
        else:
            self._look_up(automatic, inputs, asking)
        if self._inferred:
            _LOGGER.warning("%s", self.offered().summary)
        if tokenizer is not None:
            self.cfg.tokenizer_name = getattr(tokenizer, "name_or_path", None)

    def _look_up(self, automatic: Automatic, inputs: Given | None, asking: Asking) -> None:
        """Set up the bridge with the adapter of the model's class, or an inferred one."""
        model_map = asking(map_model(self.original_model, automatic=automatic, inputs=inputs))
        self._take(model_map)
        if parent := "" if model_map.inferred else inherits_declaration(model_map.core):
            model_map = self._proved(model_map, parent, automatic, inputs)
        if model_map.inferred:
            self._keep_what_holds(model_map, inputs)

    def _as_before_or_inferred(
        self, automatic: Automatic, inputs: Given | None, asking: Asking
    ) -> None:
        """Set up the bridge with a cached declaration, if it holds; otherwise infer one and cache
        it."""
        identity = identity_of(self.original_model, built(), inputs)
        cached = folder.kept(identity)
        alike = _alike(cached, layout_of(self.original_model))
        if cached is not None and alike:
            try:
                return self._declared_by(cached, identity, inputs, asking)
            except DeclarationError as error:
                _LOGGER.info("%s; it is inferred anew", error)
        self._look_up(automatic, inputs, asking)
        folder.keep(self._declaration(identity))

    def _declared_by(
        self, declaration: Declaration, of: Identity, inputs: Given | None, asking: Asking
    ) -> None:
        """Set up the bridge with a declaration.

        Raises:
            DeclarationError: it belongs to another model, or does not hold for this one.
        """
        if why := of.why_not(declaration.of):
            raise DeclarationError(f"{declaration.name} is not of this model: {why}")
        self._take(asking(declaration.map_of(self.original_model)))
        try:
            wrong = proofs.proofs.why_refuted(self, inputs)
        except WRONG as error:
            wrong = one_line(error)
        if wrong:
            raise DeclarationError(f"{declaration.name} does not hold of this {of.model}: {wrong}")

    def declaration(self) -> Declaration:
        """Return the roles of this model's modules, as data: save it, and pass it when you wrap the
        next such model.

        Example:
            >>> from bridge import TransformerBridge
            >>> bridge = TransformerBridge.boot_embedded()
            >>> again = TransformerBridge(bridge.original_model, declaration=bridge.declaration())
            >>> list(again.hook_dict) == list(bridge.hook_dict)
            True
        """
        return self._declaration(identity_of(self.original_model, built()))

    def _declaration(self, of: Identity) -> Declaration:
        declared = [name for name, hook in self.hook_dict.items() if hook.point.declared]
        points = "" if self.layout else points_of(declared)
        return Declaration(
            self.architecture, of, self._inferred, points, self.not_offered, self.no_layer_runs
        )

    def _take(self, model_map: ModelMap) -> None:
        self.cfg: ModelConfig = model_map.cfg
        self.no_layer_runs = model_map.no_layer_runs
        self._wire(model_map)

    def _proved(
        self, model_map: ModelMap, parent: str, automatic: Automatic, inputs: Given | None
    ) -> ModelMap:
        """Return the map for a subclass from another package: its parent's, if it holds; otherwise
        an inferred one."""
        derived = f"{self.cfg.model_name} is a subclass of {parent}, whose adapter"
        try:
            wrong = proofs.proofs.why_refuted(self, inputs)
        except CannotBeMade as why:
            _LOGGER.warning("%s was not tried on it: %s", derived, why)
            return model_map
        if not wrong:
            return model_map
        message = f"{derived} does not hold of it ({wrong})"
        if not automatic:
            raise UnsupportedModelError(
                f"{message}. docs/adapters.md shows how to declare what it computes."
            )
        _LOGGER.warning("%s", message)
        model_map = map_model(self.original_model, automatic="always", inputs=inputs)
        self._take(model_map)
        return model_map

    def _wire(self, model_map: ModelMap) -> None:
        self.wiring = Wiring(
            self.original_model, model_map.points, self.makes_points, model_map.layout
        )
        self.block_paths, self.block_output = model_map.block_paths, model_map.block_output
        self._inferred, self.not_offered = model_map.inferred, model_map.not_offered
        # Kept out of the module tree: it is `original_model`, or a part of it.
        self.__dict__["core"] = model_map.core
        self.__dict__["architecture"] = model_map.architecture
        self.names = Names(self.wiring.points, model_map.not_offered)
        self.layout = model_map.layout
        self._read_weights()
        read_record(self)

    def _read_weights(self) -> None:
        """Set where weights are read. Hold no reference to the bridge, because a reference cycle
        would keep it alive."""
        read = partial(Weights, self.architecture, self.original_model, self.cfg, self.not_offered)
        self._weights = cache(read)
        self._tree = NameTree(self.names, self._weights)

    def _keep_what_holds(self, model_map: ModelMap, inputs: Given | None) -> None:
        """Check an inferred declaration on the model, and remove what does not hold."""
        proof = proofs.proofs.Proof(self, inputs).run()
        if not self.hook_dict.keys() - proof.not_offered.keys():
            why = next(iter(proof.not_offered.values()), "it has none")
            raise UnsupportedModelError(
                f"{why}: so no hook point that was inferred for {self.cfg.model_name} holds"
            )
        self.no_layer_runs = proof.no_layer_runs
        model_map = model_map.without(proof.not_offered)
        self._wire(model_map)
        while not_proved := proof.not_proved():  # of what is left, until all of it is proved
            architecture = proofs.proofs.without_claims(model_map.architecture, not_proved)
            model_map = replace(model_map, architecture=architecture).without(not_proved)
            self._wire(model_map)

    def offered(self) -> _SupportReport:
        """Return the hook points of the bridge, and the missing ones with the reasons. Print the
        result to read it.

        If the model's class has an adapter, it declares them. Otherwise they were inferred and
        checked on the model as by `adapters.verify`; points that failed a check are missing, and so
        are points that depend on them. If a model reads images or sound besides text, the points
        belong to the text part; the other modules are listed by name.

        Example:
            >>> from transformers import OlmoConfig, OlmoForCausalLM
            >>> from bridge import TransformerBridge
            >>> sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
            >>> config = OlmoConfig(**sizes, intermediate_size=48, vocab_size=61)
            >>> bridge = TransformerBridge(OlmoForCausalLM(config), automatic="always")
            >>> bridge.offered().inferred, dict(bridge.offered().not_offered)
            (True, {})
        """
        adapter: Literal["none", "there", "other options"] = "none"
        if is_declared(self.core):
            adapter = "there"
        elif has_declaration(self.core):
            adapter = "other options"
        name, points = self.cfg.model_name, tuple(self.hook_dict)
        support = _SupportReport(name, points, self.not_offered, self._inferred, adapter)
        if not is_language_part(self.core):
            return support
        stacks, base = self.architecture.stacks, base_path(self.core)
        paths = [self.architecture.token_embeddings, *(stack.path for stack in stacks)]
        paths += [stack.final_norm.path for stack in stacks if stack.final_norm]
        used = {self.architecture.readout.path, *(join(base, path) for path in paths)}
        return replace(support, modules_without_points=modules_without_points(self.core, used))

    def report(self) -> str:
        """Return the text for a bug report: versions, the model's class, its hook points, and how
        its weights were processed.

        Example:
            >>> from bridge import TransformerBridge
            >>> print(TransformerBridge.boot_embedded().report().splitlines()[-1])
            embedded: 135 hook points, as its adapter declares
        """
        return report(
            self.original_model, self.core, self.offered(), self.cfg.processed, self.layout
        )

    @property
    def weights(self) -> Weights:
        """The canonical weights by HookedTransformer's state-dict names."""
        return self._weights()

    @property
    def hook_dict(self) -> dict[str, HookPoint]:
        """All hook points by canonical name, in the order of the computation."""
        return self.wiring.points

    # The model's own, not prefixed copies.

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """Return the model's own state dict."""
        return self.original_model.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """Call the model's own `load_state_dict`.

        Raises:
            ValueError: the names are HookedTransformer's, not the model's own.
        """
        if state_dict and not state_dict.keys() - self.weights.getters.keys():
            raise ValueError(
                f"the state dict has HookedTransformer's names, such as {next(iter(state_dict))!r},"
                " and this takes the model's own:"
                " bridge.legacy.HookedTransformer(bridge.original_model).load_state_dict takes"
                " them, and writes to the same model"
            )
        return self.original_model.load_state_dict(state_dict, *args, **kwargs)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Return the model's parameters under its own names."""
        return self.original_model.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """Return the model's buffers under its own names."""
        return self.original_model.named_buffers(*args, **kwargs)

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Move the model."""
        self.original_model.to(*args, **kwargs)
        return self

    def cuda(self, device: int | torch.device | str | None = None) -> Self:
        """Move the model to a GPU."""
        if isinstance(device, int):
            device = torch.device("cuda", device)
        return self.to("cuda" if device is None else device)

    def cpu(self) -> Self:
        """Move the model to the CPU."""
        return self.to("cpu")

    def mps(self) -> Self:
        """Move the model to Apple's GPU."""
        return self.to("mps")

    def train(self, mode: bool = True) -> Self:
        """Set the model's mode."""
        self.original_model.train(mode)
        return self

    def eval(self) -> Self:
        """Set the model's mode to evaluation."""
        return self.train(False)

    def __repr__(self) -> str:
        cfg, model = self.cfg, self.original_model
        mlp = "no MLPs" if cfg.attn_only else f"d_mlp {cfg.d_mlp}"
        tokenizer = "no tokenizer" if self.tokenizer is None else type(self.tokenizer).__name__
        first = next(iter(self.hook_dict), "none")
        lines = [
            f"{type(self).__name__} of {cfg.model_name}",
            f"original_model  {type(model).__name__}, {cfg.n_params:,} parameters, {cfg.dtype} on"
            f" {cfg.device}",
            f"cfg             {cfg.n_layers} layers of {cfg.n_heads} heads, d_model"
            f" {cfg.d_model}, {mlp}, {cfg.d_vocab} tokens",
            f"hook_dict       {len(self.hook_dict)} hook points, from {first} on",
            f"tokenizer       {tokenizer}",
        ]
        if self.layout is not None:
            lines.append(f"spread          {self.layout.description}")
        return "\n  ".join(lines)

    # A property, since `__getattribute__` would slow down every run.
    @property
    def training(self) -> bool:
        """Whether the model is in training mode."""
        model = self._modules.get("original_model", self.__dict__.get("original_model"))
        return True if model is None else model.training

    @training.setter
    def training(self, mode: bool) -> None:
        """Set the model's mode, as `train` does."""

    def __setattr__(self, name: str, value: Any) -> None:
        is_model = name in ("original_model", "core") and "wiring" in self.__dict__
        if is_model and value is not getattr(self, name):
            raise AttributeError(
                "a bridge keeps the model that it was made around: its hook points and its cfg are"
                f" that model's. Make another for this one: {type(self).__name__}(model, tokenizer)"
            )
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("__") or "_tree" not in self.__dict__:
                raise
        if isinstance(getattr(type(self), name, None), property):
            return object.__getattribute__(self, name)  # it raises the error with the reason
        if name == "accepts_loss_kwargs":  # only transformers' Trainer reads it, when it is made
            raise TypeError(
                "transformers.Trainer trains the Hugging Face model, in which hooks of the bridge"
                " run and whose weights are the bridge's: Trainer(model=bridge.original_model, ...)"
            )
        tree = self.__dict__["_tree"]
        others = () if name in tree.children[""] else self._names_near(name)
        return tree.get("", name, others, self.call_part)

    def _names_near(self, name: str) -> list[str]:
        """Return the names to suggest for a missing attribute.

        Raises:
            AttributeError: it has another name, or is a fact of `cfg`.
        """
        missing = f"the bridge has no {name!r}."
        if name in _ELSEWHERE:
            raise AttributeError(f"{missing} Use {_ELSEWHERE[name]}")
        facts = [fact for fact in dir(self.cfg) if fact[0] != "_"]
        if name in facts:
            raise AttributeError(f"{missing} Use bridge.cfg.{name}")
        if near := difflib.get_close_matches(name, facts, 1, 0.85):
            raise AttributeError(f"{missing} Did you mean bridge.cfg.{near[0]}?")
        return [attribute for attribute in (*dir(type(self)), *vars(self)) if attribute[0] != "_"]

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._tree.children[""]]

    # Hooks belong to the bridge on which they were added; a copy starts without any.

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        for name in ("wiring", "names", "core", "_tree", "_weights"):
            state.pop(name)
        if not self._inferred:  # declared anew by its adapter
            state.pop("architecture")
        state.pop("_facts", None)  # found out anew by the tokenizer's part
        state.pop("_places", None)  # likewise by the first trace
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.cfg.attach(self.original_model)
        strip(self.original_model)
        self._wire(self._map_copy(self.original_model, self.__dict__.get("architecture")))

    def _map_copy(self, model: nn.Module, architecture: Architecture | None) -> ModelMap:
        """Return a copy's map, without the unproved parts of an inferred adapter."""
        model_map = map_model(model, architecture)
        if not self._inferred:
            return model_map
        return replace(model_map.without(self.not_offered), inferred=True)

    def rewrapped(self, model: nn.Module) -> Self:
        """Return a bridge of the same class, declaration and facts around another model with the
        same modules.

        Args:
            model: the model.
        """
        new = type(self).__new__(type(self))
        state = self.__getstate__()
        state["_modules"] = {**state["_modules"], "original_model": model}
        nn.Module.__setstate__(new, state)
        new.cfg = copy.copy(self.cfg)
        new.cfg.attach(model)
        new._wire(self._map_copy(model, self.architecture))
        return new

    def __copy__(self) -> Self:
        new = self.rewrapped(self.original_model)
        new.cfg = self.cfg
        new._read_weights()
        return new

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        new.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return new


def _check_model(hf_model: object, tokenizer: object) -> None:
    """Check that these are a model, and a tokenizer or None."""
    if not isinstance(hf_model, nn.Module):
        raise TypeError(
            f"hf_model is {hf_model!r}, which is no model; "
            "TransformerBridge.boot_transformers(name_or_path) loads one by name"
        )
    if tokenizer is not None and not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise TypeError(
            f"tokenizer is {tokenizer!r}, which is no Hugging Face tokenizer; "
            "transformers.AutoTokenizer.from_pretrained(name_or_path) loads one"
        )


def _alike(cached: Declaration | None, layout: Layout | None) -> bool:
    """Tell whether all processes that share a model have cached the same declaration, or none has:
    each process may have a different folder.
    """
    if layout is None:
        return True
    text = "" if cached is None else json.dumps(encoded(cached.architecture))
    return layout.peers is not None and all(layout.peers.agree([number_of(text)])())
