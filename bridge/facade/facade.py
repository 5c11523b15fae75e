"""A Hugging Face model with its hook points: construction, what an `nn.Module` does, copies.

What comes in is a model, and perhaps a tokenizer or a declaration. What goes out is the object that users hold. In
order:

1. `adapters.map_model` says which module plays which part. Where the class is not declared, a declaration is read from
   the folder of those that were found before, or inferred from one run; either is proved on this model, and what could
   not be proved is said in one line.
2. `Names` makes hook points of the declared points, by canonical name and by every alias.
3. `Wiring` is given them. It attaches nothing until somebody listens.
4. What an `nn.Module` is asked (parameters, mode, device, state dict) is answered by the model itself.

The methods stand in the other files of this room, by subject, in one line of classes: each has its documentation and
one line of code, which calls the room where the work is done. Refused are models whose class is not declared and of
which nothing can be inferred, and declarations that do not hold. This room knows no architecture, and no hook point by
name.
"""

from __future__ import annotations

import copy
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
from adapters.registry import UnsupportedModelError, has_declaration, inherits_declaration, is_declared
from adapters.spread import Layout, layout_of, number_of
from bridge.hooks.hooks import HookPoint
from bridge.hooks.names import Names
from bridge.run.inputs import RunnableBridge
from bridge.version import __version__, built
from bridge.weights import NameTree
from bridge.wiring.compiled import strip
from bridge.wiring.wiring import Wiring
from weight_processing.process import read_record

# ----------------------------------------------------------------------------------------------------------------------
# What a bridge offers of a model, and what it does not.
# ----------------------------------------------------------------------------------------------------------------------


_ADAPTERS = {
    "none": "no adapter", "there": "an adapter, which was not used",
    "other options": "an adapter for other options than these",
}  # fmt: skip

#: What TransformerLens' bridge and nnsight have besides, and what to use.
_ELSEWHERE = {
    "clear_hook_registry": "reset_hooks(including_permanent=True): hook points themselves stay",
    "composition_layer_indices": "[index for index, _ in bridge.blocks_with('attn')]",
    "QK_for_attn_layers": "bridge.stack_params_for('attn', 'attn.W_Q') and '...W_K', and FactoredMatrix(W_Q, W_K.mT)",
    "OV_for_attn_layers": "bridge.stack_params_for('attn', 'attn.W_V') and '...W_O', and FactoredMatrix(W_V, W_O)",
    "block_hooks": "[name for name in bridge.hook_dict if name.startswith('blocks.0.')]",
    "block_submodules": "dir(bridge.blocks[0])",
    "prepare_multimodal_inputs": "bridge(**AutoProcessor.from_pretrained(name)(text, images, return_tensors='pt'))",
    "get_params": "tl_parameters(): zeros are not made up for what is missing",
    "lm_head": "bridge.unembed, bridge.original_model.lm_head, or in a trace run.module('lm_head').output",
}


@dataclass(frozen=True, repr=False)
class SupportReport:
    """What a bridge offers; printed, what it does not offer is listed with the reasons.

    Attributes:
        model: its name.
        names: the hook points, in the order of the computation.
        not_offered: hook points, or what their names begin with, that are missing, and why.
        inferred: all this was inferred from a run, and proved on the model, as `adapters.verify` does it. What did not
            hold is among `not_offered`, with the claim, and so is what stands on it.
        adapter: whether the model's class has an adapter: ``none``, one that is ``there`` (though it may not be asked,
            with ``automatic="always"``), or one that is for ``other options`` of its configuration.
        modules_without_points: of a model of images or sound and text, the modules that are not the text part, with
            their classes.
    """

    model: str
    names: tuple[str, ...]
    not_offered: Mapping[str, str]
    inferred: bool
    adapter: Literal["none", "there", "other options"]
    modules_without_points: Mapping[str, str] = field(default_factory=dict)

    @property
    def summary(self) -> str:
        """It in a sentence."""
        if not self.inferred:
            return f"{self.model}: {len(self.names)} hook points, as its adapter declares"
        count = len(self.not_offered)
        missing = dict.fromkeys(_told(why) for why in self.not_offered.values() if why.startswith(NOT_PROVED))
        left_out = f"; {count} things are not offered: print(bridge.offered())" if count else ""
        failed = f"; {', '.join(missing)}" if missing else ""
        return (
            f"{self.model} has {_ADAPTERS[self.adapter]}. One was inferred from a run and proved on it, with "
            f"{len(self.names)} hook points{failed}{left_out}"
        )

    def __repr__(self) -> str:
        why = [f"  not offered: {name}: {reason}" for name, reason in self.not_offered.items()]
        modules_without_points = [
            f"  has no hook points: {path} ({cls})" for path, cls in self.modules_without_points.items()
        ]
        return "\n".join([self.summary, *why, *modules_without_points])


def _told(reason: str) -> str:
    """The claim of a reason, without what was seen."""
    return reason.partition(":")[0] + ": " + reason.removeprefix(f"{NOT_PROVED}: ").partition(": ")[0]


def modules_without_points(model: nn.Module, used: Collection[str], path: str = "") -> dict[str, str]:
    """The outermost modules with parameters that neither are nor hold what is used, with the names of their classes.

    Args:
        model: the model, or the module in it at `path`.
        used: paths of modules.
        path: where to look.
    """
    if path in used or not any(True for _ in model.parameters()):
        return {}
    if path and not any(each.startswith(f"{path}.") for each in used):
        return {path: type(model).__name__}
    found: dict[str, str] = {}
    for name, child in model.named_children():
        found |= modules_without_points(child, used, join(path, name))
    return found


# ----------------------------------------------------------------------------------------------------------------------
# What a bug report needs to say.
# ----------------------------------------------------------------------------------------------------------------------


_LIBRARIES = (
    "torch", "transformers", "tokenizers", "safetensors", "jaxtyping", "beartype", "greenlet", "accelerate", "peft",
)  # fmt: skip


def report(
    model: nn.Module, core: nn.Module, offered: SupportReport, processed: Mapping[str, str], layout: Layout | None
) -> str:
    """Versions, the model's class, what is offered of it, and what was done to its weights.

    Args:
        model: the wrapped model.
        core: the Hugging Face model in it.
        offered: what the bridge offers.
        processed: what was done to the weights.
        layout: how the model is spread over processes.
    """
    config = getattr(core, "config", None)
    lines = [
        ("transformer-bridge", __version__),
        ("Python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
        *((name, found) for name in _LIBRARIES if (found := _version(name))),
        ("model", " in ".join(dict.fromkeys([_class(core), _class(model)]))),
        ("attention", str(getattr(config, "_attn_implementation", None))),
        ("parameters", ", ".join(sorted({f"{each.dtype} on {each.device}" for each in core.parameters()}))),
        ("processed", ", ".join(f"{name}: {state}" for name, state in processed.items()) or "no"),
    ]
    if layout is not None:
        lines.append(("spread", layout.said))
    if wrong := known_error(core):
        lines.append(("known", wrong))
    width = max(len(name) for name, _ in lines)
    return "\n".join([*(f"{name:<{width}}  {value}" for name, value in lines), repr(offered)])


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _class(model: nn.Module) -> str:
    return f"{type(model).__module__}.{type(model).__qualname__}"


_LOGGER = logging.getLogger("bridge")


#: Gives what is known of a model that processes share how they compare what hooks make of it.
Asking = Callable[[ModelMap], ModelMap]


def _asking(compares: bool, patience: float, found: ModelMap) -> ModelMap:
    return found if found.layout is None else replace(found, layout=found.layout.asking(compares, patience))


class WrappedModel(nn.Module, RunnableBridge):
    """What all methods of a bridge stand on. The class that users see is `TransformerBridge`.

    Args:
        hf_model, tokenizer, automatic, inputs, declaration, cache_declaration: as for `TransformerBridge`.
    """

    #: Whether attribution to logits counts the final norm's weight. HookedTransformer leaves it out.
    counts_norm_weights: bool = True
    original_model: nn.Module
    core: PreTrainedModel
    architecture: Architecture
    #: The class of its hook points.
    makes_points: type[HookPoint] = HookPoint
    #: Whether a run of some layers is refused where a hook of a ``with`` statement would never be called.
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
        self.__dict__.pop("wiring", None)  # there where a bridge is made anew in place (see `__setattr__`)
        super().__init__()
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
        hf_model = with_interface(hf_model) if automatic or declaration is not None else hf_model
        self.original_model = hf_model
        self.tokenizer: PreTrainedTokenizerBase | None = tokenizer
        asking = partial(_asking, compare_edits, patience)
        if declaration is not None:
            given = declaration if isinstance(declaration, Declaration) else Declaration.load(declaration)
            self._declared_by(given, identity_of(hf_model, built(), inputs), inputs, asking)
        elif cache_declaration and is_inferred(hf_model, automatic) and has_weights(hf_model):
            self._as_before_or_inferred(automatic, inputs, asking)
        else:
            self._look_up(automatic, inputs, asking)
        if self._inferred:
            _LOGGER.warning("%s", self.offered().summary)
        if tokenizer is not None:
            self.cfg.tokenizer_name = getattr(tokenizer, "name_or_path", None)

    def _look_up(self, automatic: Automatic, inputs: Given | None, asking: Asking) -> None:
        """Takes what the adapter of the model's class declares, or what is inferred."""
        found = asking(map_model(self.original_model, automatic=automatic, inputs=inputs))
        self._take(found)
        if parent := "" if found.inferred else inherits_declaration(found.core):
            found = self._proved(found, parent, automatic, inputs)
        if found.inferred:
            self._keep_what_holds(found, inputs)

    def _as_before_or_inferred(self, automatic: Automatic, inputs: Given | None, asking: Asking) -> None:
        """Takes what was inferred of such a model before, if that holds of this one; else infers it, and keeps that."""
        of = identity_of(self.original_model, built(), inputs)
        before = folder.kept(of)
        alike = _alike(before, layout_of(self.original_model))
        if before is not None and alike:
            try:
                return self._declared_by(before, of, inputs, asking)
            except DeclarationError as error:
                _LOGGER.info("%s; it is inferred anew", error)
        self._look_up(automatic, inputs, asking)
        folder.keep(self._declaration(of))

    def _declared_by(self, given: Declaration, of: Identity, inputs: Given | None, asking: Asking) -> None:
        """Takes a declaration that was kept.

        Raises:
            DeclarationError: it is of another model, or does not hold of this one.
        """
        if why := of.why_not(given.of):
            raise DeclarationError(f"{given.name} is not of this model: {why}")
        self._take(asking(given.map_of(self.original_model)))
        try:
            wrong = proofs.proofs.why_refuted(self, inputs)
        except WRONG as error:
            wrong = one_line(error)
        if wrong:
            raise DeclarationError(f"{given.name} does not hold of this {of.model}: {wrong}")

    def declaration(self) -> Declaration:
        """What plays which part in this model, as data: save it, and wrap the next such model by it.

        Example:
            >>> from bridge import TransformerBridge
            >>> bridge = TransformerBridge.boot_embedded()
            >>> again = TransformerBridge(bridge.original_model, declaration=bridge.declaration())
            >>> list(again.hook_dict) == list(bridge.hook_dict)
            True
        """
        return self._declaration(identity_of(self.original_model, built()))

    def _declaration(self, of: Identity) -> Declaration:
        points = "" if self.layout else points_of(self.hook_dict)
        return Declaration(self.architecture, of, self._inferred, points, self.not_offered, self.no_layer_runs)

    def _take(self, found: ModelMap) -> None:
        self.cfg: ModelConfig = found.cfg
        self.no_layer_runs = found.no_layer_runs
        self._wire(found)

    def _proved(self, found: ModelMap, parent: str, automatic: Automatic, inputs: Given | None) -> ModelMap:
        """What a subclass of another package's takes from its parent, if that holds of it; else what is inferred."""
        derived = f"{self.cfg.model_name} is a subclass of {parent}, whose adapter"
        try:
            wrong = proofs.proofs.why_refuted(self, inputs)
        except CannotBeMade as why:
            _LOGGER.warning("%s was not tried on it: %s", derived, why)
            return found
        if not wrong:
            return found
        said = f"{derived} does not hold of it ({wrong})"
        if not automatic:
            raise UnsupportedModelError(f"{said}. docs/adapters.md shows how to declare what it computes.")
        _LOGGER.warning("%s", said)
        found = map_model(self.original_model, automatic="always", inputs=inputs)
        self._take(found)
        return found

    def _wire(self, found: ModelMap) -> None:
        self.wiring = Wiring(self.original_model, found.points, self.makes_points, found.layout)
        self.block_paths, self.block_output = found.block_paths, found.block_output
        self._inferred, self.not_offered = found.inferred, found.not_offered
        # Kept out of the module tree: it is `original_model`, or a part of it.
        self.__dict__["core"] = found.core
        self.__dict__["architecture"] = found.architecture
        self.names = Names(self.wiring.points, found.not_offered)
        self.layout = found.layout
        self._read_weights()
        read_record(self)

    def _read_weights(self) -> None:
        """Says where weights are read, without a word of this bridge: with a cycle it would outlive its last user."""
        self._weights = cache(partial(Weights, self.architecture, self.original_model, self.cfg, self.not_offered))
        self._tree = NameTree(self.names, self._weights)

    def _keep_what_holds(self, found: ModelMap, inputs: Given | None) -> None:
        """Tries an inferred declaration on the model, and leaves out what does not hold."""
        proof = proofs.proofs.Proof(self, inputs).run()
        if not self.hook_dict.keys() - proof.not_offered.keys():
            why = next(iter(proof.not_offered.values()), "it has none")
            raise UnsupportedModelError(f"{why}: so no hook point that was inferred for {self.cfg.model_name} holds")
        self.no_layer_runs = proof.no_layer_runs
        found = found.without(proof.not_offered)
        self._wire(found)
        while not_proved := proof.not_proved():  # of what is left, until all of it is proved
            architecture = proofs.proofs.without_claims(found.architecture, not_proved)
            found = replace(found, architecture=architecture).without(not_proved)
            self._wire(found)

    def offered(self) -> SupportReport:
        """What the bridge offers, and what it does not, with the reasons. Print it.

        Of a model whose class has an adapter, that is what the adapter declares. Of any other it was inferred, and
        proved on the model, as `adapters.verify` does it: what does not hold is left out, and so is what stands on it.
        Of a model of images or sound and text it is the text's part: its other modules are listed by name.

        Example:
            >>> from transformers import OlmoConfig, OlmoForCausalLM
            >>> from bridge import TransformerBridge
            >>> sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}
            >>> bridge = TransformerBridge(OlmoForCausalLM(OlmoConfig(**sizes, vocab_size=61)), automatic="always")
            >>> bridge.offered().inferred, dict(bridge.offered().not_offered)
            (True, {})
        """
        adapter: Literal["none", "there", "other options"] = "there" if is_declared(self.core) else "none"
        if adapter == "none" and has_declaration(self.core):
            adapter = "other options"
        named = (self.cfg.model_name, tuple(self.hook_dict), self.not_offered, self._inferred, adapter)
        if not is_language_part(self.core):
            return SupportReport(*named)
        stacks, base = self.architecture.stacks, base_path(self.core)
        paths = [self.architecture.token_embeddings, *(stack.path for stack in stacks)]
        paths += [stack.final_norm.path for stack in stacks if stack.final_norm]
        used = {self.architecture.readout.path, *(join(base, path) for path in paths)}
        return SupportReport(*named, modules_without_points(self.core, used))

    def report(self) -> str:
        """What a bug report needs: versions, the model's class, what is offered of it, what was done to its weights.

        Example:
            >>> from bridge import TransformerBridge
            >>> print(TransformerBridge.boot_embedded().report().splitlines()[-1])
            embedded: 135 hook points, as its adapter declares
        """
        return report(self.original_model, self.core, self.offered(), self.cfg.processed, self.layout)

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
        """The model's own state dict."""
        return self.original_model.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """The model's own `load_state_dict`.

        Raises:
            ValueError: the names are the canonical ones, HookedTransformer's.
        """
        if state_dict and not state_dict.keys() - self.weights.getters.keys():
            raise ValueError(
                f"the state dict has HookedTransformer's names, such as {next(iter(state_dict))!r}, and this takes the "
                "model's own: bridge.legacy.HookedTransformer(bridge.original_model).load_state_dict takes them, and "
                "writes to the same model"
            )
        return self.original_model.load_state_dict(state_dict, *args, **kwargs)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """The model's parameters under its own names."""
        return self.original_model.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """The model's buffers under its own names."""
        return self.original_model.named_buffers(*args, **kwargs)

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Moves the model."""
        self.original_model.to(*args, **kwargs)
        return self

    def cuda(self, device: int | torch.device | str | None = None) -> Self:
        """Moves the model to a GPU."""
        return self.to(
            "cuda" if device is None else torch.device("cuda", device) if isinstance(device, int) else device
        )

    def cpu(self) -> Self:
        """Moves the model to the CPU."""
        return self.to("cpu")

    def mps(self) -> Self:
        """Moves the model to Apple's GPU."""
        return self.to("mps")

    def train(self, mode: bool = True) -> Self:
        """Sets the model's mode."""
        self.original_model.train(mode)
        return self

    def eval(self) -> Self:
        """Sets the model's mode to evaluation."""
        return self.train(False)

    def __repr__(self) -> str:
        cfg = self.cfg
        mlp = "no MLPs" if cfg.attn_only else f"d_mlp {cfg.d_mlp}"
        tokenizer = "no tokenizer" if self.tokenizer is None else type(self.tokenizer).__name__
        return "\n  ".join(
            [
                f"{type(self).__name__} of {cfg.model_name}",
                f"original_model  {type(self.original_model).__name__}, {cfg.n_params:,} parameters, "
                f"{cfg.dtype} on {cfg.device}",
                f"cfg             {cfg.n_layers} layers of {cfg.n_heads} heads, d_model {cfg.d_model}, {mlp}, "
                f"{cfg.d_vocab} tokens",
                f"hook_dict       {len(self.hook_dict)} hook points, from {next(iter(self.hook_dict), 'none')} on",
                f"tokenizer       {tokenizer}",
                *([] if self.layout is None else [f"spread          {self.layout.said}"]),
            ]
        )

    @property  # as many attributes of a bridge are read in every run, it has no `__getattribute__` of its own
    def training(self) -> bool:
        """Whether the model is in training mode."""
        model = self._modules.get("original_model", self.__dict__.get("original_model"))
        return True if model is None else model.training

    @training.setter
    def training(self, mode: bool) -> None:
        """The model's is the only one: see `train`."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("original_model", "core") and "wiring" in self.__dict__ and value is not getattr(self, name):
            raise AttributeError(
                "a bridge keeps the model that it was made around: its hook points and its cfg are that model's. "
                f"Make another for this one: {type(self).__name__}(model, tokenizer)"
            )
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("__") or "_tree" not in self.__dict__:
                raise
        if isinstance(getattr(type(self), name, None), property):
            return object.__getattribute__(self, name)  # it is there, and says itself what it lacks
        if name in _ELSEWHERE:
            raise AttributeError(f"the bridge has no {name!r}. Use {_ELSEWHERE[name]}")
        return self.__dict__["_tree"].get("", name, [own for own in dir(type(self)) if own[0] != "_"])

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
        """What plays which part in a copy of the model, without what was not proved of an inferred adapter."""
        found = map_model(model, architecture)
        return replace(found.without(self.not_offered), inferred=True) if self._inferred else found

    def rewrapped(self, model: nn.Module) -> Self:
        """A bridge of the same declaration, facts and class around another model, which has this one's modules.

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


def _alike(kept: Declaration | None, layout: Layout | None) -> bool:
    """Whether all processes that share a model have kept the same, or nothing: each may have a folder of its own."""
    if layout is None:
        return True
    said = "" if kept is None else json.dumps(encoded(kept.architecture))
    return layout.peers is not None and all(layout.peers.agree([number_of(said)])())
