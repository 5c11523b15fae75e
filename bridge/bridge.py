"""`TransformerBridge`: a Hugging Face model, untouched, with hook points."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn

from adapters import Anatomy, Weights, anatomy
from adapters.config import ModelConfig
from bridge.analysis.weight_analysis import AnalysisMethods
from bridge.generation.generate import GenerationMethods
from bridge.generation.stream import StreamMethods
from bridge.hooks.hook_point import Handle, HookFunction, HookPoint
from bridge.hooks.names import Names, NamesFilter
from bridge.loading.boot import BootMethods
from bridge.processing import ProcessingMethods
from bridge.run.forward import RunMethods
from bridge.run.tokenization import TokenizerFacts, TokenMethods
from bridge.run.wiring import Wiring, strip
from bridge.weights.component_tree import Tree


class TransformerBridge(
    RunMethods,
    GenerationMethods,
    StreamMethods,
    TokenMethods,
    ProcessingMethods,
    AnalysisMethods,
    BootMethods,
    nn.Module,
):
    """Wraps a Hugging Face model without changing it.

    Its parameters, state dict, mode and device are the model's own. Hook points cost nothing until someone listens.

    Args:
        hf_model: any model of a supported family, or a subclass, or a PEFT model around one.
        tokenizer: its tokenizer; it is never changed. Without one, the bridge takes tokens only.

    Attributes:
        original_model: the model.
        core: the Hugging Face model, without what wraps it (PEFT, `torch.compile`).
        tokenizer: the tokenizer.
        cfg: the facts about the model.
        names: hook points by name and alias.

    Raises:
        UnsupportedModelError: there is no adapter for the model's class.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> from bridge import TransformerBridge
        >>> bridge = TransformerBridge(GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=10)))
        >>> bridge.blocks[1].attn.hook_z
        HookPoint(blocks.1.attn.hook_z: [batch pos n_heads d_head])
    """

    original_model: nn.Module

    def __init__(self, hf_model: Any, tokenizer: Any = None) -> None:
        super().__init__()
        if not isinstance(hf_model, nn.Module):
            raise TypeError(
                f"hf_model is {hf_model!r}, which is no model; "
                "TransformerBridge.boot_transformers(name_or_path) loads one by name"
            )
        found = anatomy(hf_model)
        self.original_model = hf_model
        self.tokenizer = tokenizer
        self.cfg: ModelConfig = found.cfg
        self.block_paths = found.block_paths
        self.block_output = found.block_output
        self.no_layer_runs = found.no_layer_runs
        self._facts: TokenizerFacts | None = None
        self._wire(found)
        self._read_record()
        if tokenizer is not None:
            self.cfg.tokenizer_name = getattr(tokenizer, "name_or_path", None)

    def _wire(self, found: Anatomy) -> None:
        self.wiring = Wiring(self.original_model, found.points)
        # Kept out of the module tree: it is `original_model`, or a part of it.
        self.__dict__["core"] = found.core
        self.__dict__["architecture"] = found.architecture
        self.names = Names(self.wiring.points)
        self._weights: Weights | None = None
        self._tree = Tree(self.names, lambda: self.weights)

    # The model's own, not prefixed copies.

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """The model's own state dict."""
        return self.original_model.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """The model's own `load_state_dict`."""
        return self.original_model.load_state_dict(*args, **kwargs)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """The model's parameters under its own names."""
        return self.original_model.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """The model's buffers under its own names."""
        return self.original_model.named_buffers(*args, **kwargs)

    def to(self, *args: Any, **kwargs: Any) -> TransformerBridge:
        """Moves the model."""
        self.original_model.to(*args, **kwargs)
        return self

    def train(self, mode: bool = True) -> TransformerBridge:
        """Sets the model's mode."""
        self.original_model.train(mode)
        return self

    def eval(self) -> TransformerBridge:
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
            ]
        )

    def __getattribute__(self, name: str) -> Any:
        if name == "training" and "_modules" in object.__getattribute__(self, "__dict__"):
            model = object.__getattribute__(self, "_modules").get("original_model")
            if model is not None:
                return model.training
        return super().__getattribute__(name)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("__") or "_tree" not in self.__dict__:
                raise
        if isinstance(getattr(type(self), name, None), property):
            return object.__getattribute__(self, name)  # it is there, and says itself what it lacks
        return self.__dict__["_tree"].get("", name)

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._tree.children[""]]

    # Hooks belong to the bridge on which they were added; a copy starts without any.

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        for name in ("wiring", "names", "core", "architecture", "_tree", "_weights", "_facts"):
            state.pop(name)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._facts = None
        self.cfg._model = self.original_model
        strip(self.original_model)
        self._wire(anatomy(self.original_model))

    def __copy__(self) -> TransformerBridge:
        new = type(self)(self.original_model, self.tokenizer)
        new.cfg = self.cfg
        return new

    def __deepcopy__(self, memo: dict[int, Any]) -> TransformerBridge:
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        new.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return new

    @property
    def hook_dict(self) -> dict[str, HookPoint]:
        """All hook points by canonical name, in the order of the computation."""
        return self.wiring.points

    def add_hook(
        self,
        name: NamesFilter | HookPoint,
        hook: HookFunction,
        dir: str = "fwd",
        is_permanent: bool = False,
        level: int | None = None,
        prepend: bool = False,
    ) -> list[Handle]:
        """Adds a function to hook points, for all runs of this thread until it is removed.

        Args:
            name: a name, an alias, a list of them, or a function of the name.
            hook: called as ``hook(activation, hook=point)``.
            dir, is_permanent, level, prepend: as for `HookPoint.add_hook`.

        Returns:
            A handle for each hook point, with `remove()`.

        Raises:
            UnknownHookError: a name that no hook point has.
            ValueError: a filter that matches nothing.
        """
        handles: list[Handle] = []
        try:
            for point in self._chosen(name):
                handles.append(point.add_hook(hook, dir, is_permanent, level, prepend))
        except (TypeError, ValueError):
            for handle in handles:
                handle.remove()
            raise
        return handles

    def add_perma_hook(self, name: NamesFilter | HookPoint, hook: HookFunction, dir: str = "fwd") -> list[Handle]:
        """Adds a hook that `reset_hooks` leaves alone unless told otherwise.

        Args:
            name, hook, dir: as for `add_hook`.
        """
        return self.add_hook(name, hook, dir, is_permanent=True)

    def reset_hooks(
        self,
        clear_contexts: bool = True,
        direction: Literal["fwd", "bwd", "both"] = "both",
        including_permanent: bool = False,
        level: int | None = None,
    ) -> None:
        """Removes this thread's hooks from all hook points.

        Args:
            clear_contexts: empty every hook point's `ctx`.
            direction: ``"fwd"``, ``"bwd"`` or ``"both"``.
            including_permanent: permanent ones too.
            level: only those that were added at this level.
        """
        if direction not in ("fwd", "bwd", "both"):
            raise ValueError(f'direction is {direction!r}; it must be "fwd", "bwd" or "both"')
        if clear_contexts:
            self._clear_contexts()
        for point in self.wiring.points.values():
            if point.listeners:
                point.remove_hooks(direction, including_permanent, level)

    def get_caching_hooks(
        self,
        names_filter: NamesFilter = None,
        incl_bwd: bool = False,
        device: torch.device | str | None = None,
        remove_batch_dim: bool = False,
        cache: dict[str, Tensor] | None = None,
        pos_slice: Any = None,
    ) -> tuple[dict[str, Tensor], list[tuple[str, HookFunction]], list[tuple[str, HookFunction]]]:
        """Hooks that fill a dictionary with activations, for `run_with_hooks` or `hooks`.

        Args:
            names_filter, incl_bwd, device, remove_batch_dim, pos_slice: as for `run_with_cache`.
            cache: the dictionary to fill; None: a new one.

        Returns:
            The dictionary, the forward hooks and the backward hooks.
        """
        from bridge.run.recorder import caching_functions

        cache = {} if cache is None else cache
        points = self.names.select(names_filter, self._is_heavy_on)
        forward, backward = caching_functions(cache, device, remove_batch_dim, pos_slice)
        return (
            cache,
            [(point.name, forward) for point in points],
            [(point.name, backward) for point in points] if incl_bwd else [],
        )

    def add_caching_hooks(
        self,
        names_filter: NamesFilter = None,
        incl_bwd: bool = False,
        device: torch.device | str | None = None,
        remove_batch_dim: bool = False,
        cache: dict[str, Tensor] | None = None,
        pos_slice: Any = None,
    ) -> dict[str, Tensor]:
        """Adds hooks that fill a dictionary with the activations of every run until `reset_hooks`.

        Args:
            names_filter, incl_bwd, device, remove_batch_dim, cache, pos_slice: as for `get_caching_hooks`.

        Returns:
            The dictionary.
        """
        cache, forward, backward = self.get_caching_hooks(
            names_filter, incl_bwd, device, remove_batch_dim, cache, pos_slice
        )
        for name, fn in forward:
            self.add_hook(name, fn)
        for name, fn in backward:
            self.add_hook(name, fn, "bwd")
        return cache

    def set_use_attn_result(self, use: bool) -> None:
        """Whether an unfiltered cache holds `attn.hook_result`."""
        self.cfg.use_attn_result = use

    def set_use_split_qkv_input(self, use: bool) -> None:
        """Whether an unfiltered cache holds `hook_q_input`, `hook_k_input` and `hook_v_input`."""
        self.cfg.use_split_qkv_input = use

    def set_use_attn_in(self, use: bool) -> None:
        """Whether an unfiltered cache holds `hook_attn_in`."""
        self.cfg.use_attn_in = use

    def set_use_hook_mlp_in(self, use: bool) -> None:
        """Whether an unfiltered cache holds `hook_mlp_in`."""
        self.cfg.use_hook_mlp_in = use
