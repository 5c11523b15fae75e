"""Adding and removing hooks, and choosing hook points."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

import torch
from jaxtyping import Int
from torch import Tensor

from adapters.inputs import takes
from bridge.facade.facade import WrappedModel
from bridge.hooks.arguments import CannotBeDoneError, check_choice, refuse_wrong_types
from bridge.hooks.context import HookFunction
from bridge.hooks.hooks import Handle, HookPoint
from bridge.hooks.names import NamesFilter
from bridge.interventions.operations import Index
from bridge.interventions.touching import Touching
from bridge.run import tokenization
from bridge.run.recorder import PosSlice, caching_functions
from bridge.run.tokenization import Batch, TextOptions, TokenizerFacts, Tokens


class AddsHooks:
    """Adding and removing hooks: what a bridge shares with a user's own module that holds hook points."""

    def hook_points(self) -> Collection[HookPoint]:
        """All hook points."""
        raise NotImplementedError

    def select_hooks(self, names: NamesFilter | HookPoint) -> Sequence[HookPoint]:
        """The hook points that a filter chooses."""
        raise NotImplementedError

    def check_heads(self, hook: HookPoint, heads: Index) -> None:
        """Refuses heads that a hook point does not have, where it is known how many it has."""

    def add_hook(
        self,
        name: NamesFilter | HookPoint,
        hook: HookFunction | None = None,
        dir: str = "fwd",
        is_permanent: bool = False,
        level: int | None = None,
        prepend: bool = False,
        *,
        hook_fn: HookFunction | None = None,
        heads: Index = None,
        queries: Index = None,
        keys: Index = None,
    ) -> list[Handle]:
        """Adds a function to hook points, for all runs, of any thread, until it is removed.

        Args:
            name: a name, an alias, a list of them, or a function of the name.
            hook: called as ``hook(activation, hook=point)``.
            dir, is_permanent, level, prepend: as for `HookPoint.add_hook`.
            hook_fn: another name of `hook`.
            heads, queries, keys: which alone it is shown, and may change, as by `bridge.interventions.Touching`: of
                scores and patterns no others are made. None: all.

        Returns:
            A handle for each hook point, with `remove()`.

        Raises:
            UnknownHookError: a name that no hook point has.
            ValueError: a filter that matches nothing; heads of an activation without any.
            IndexError: there are no such heads.
            TypeError: not one function.
        """
        if (hook is None) == (hook_fn is None):
            raise TypeError("add_hook takes one function: as `hook`, or as `hook_fn`")
        function = hook_fn if hook is None else hook
        assert function is not None
        if isinstance(function, str | HookPoint):
            raise TypeError(f"add_hook takes the hook point first, then the function: add_hook({function!r}, function)")
        if not (heads is None and queries is None and keys is None):
            function = Touching(function, heads=heads, queries=queries, keys=keys)
        handles: list[Handle] = []
        try:
            for point in self.select_hooks(name):
                if heads is not None:
                    self.check_heads(point, heads)
                handles.append(point.add_hook(function, dir, is_permanent, level, prepend))
        except (TypeError, ValueError, IndexError):
            for handle in handles:
                handle.remove()
            raise
        return handles

    def add_perma_hook(
        self,
        name: NamesFilter | HookPoint,
        hook: HookFunction | None = None,
        dir: str = "fwd",
        *,
        hook_fn: HookFunction | None = None,
        heads: Index = None,
        queries: Index = None,
        keys: Index = None,
    ) -> list[Handle]:
        """Adds a hook that `reset_hooks` leaves alone unless told otherwise.

        Args:
            name, hook, dir, hook_fn, heads, queries, keys: as for `add_hook`.

        Example:
            >>> from bridge import TransformerBridge
            >>> bridge = TransformerBridge.boot_embedded()
            >>> (handle,) = bridge.add_perma_hook("blocks.0.hook_mlp_out", hook_fn=lambda x, hook: x * 0)
            >>> bridge.reset_hooks()
            >>> bool((bridge.run_with_cache("Mary")[1]["mlp_out", 0] == 0).all())
            True
            >>> handle.remove()
        """
        return self.add_hook(
            name, hook, dir, is_permanent=True, hook_fn=hook_fn, heads=heads, queries=queries, keys=keys
        )

    def reset_hooks(
        self,
        clear_contexts: bool = True,
        direction: Literal["fwd", "bwd", "both"] = "both",
        including_permanent: bool = False,
        level: int | None = None,
    ) -> None:
        """Removes the hooks that were added from all hook points. Those of a ``with`` statement go with it.

        Args:
            clear_contexts: empty every hook point's `ctx`.
            direction: ``"fwd"``, ``"bwd"`` or ``"both"``.
            including_permanent: permanent ones too.
            level: only those that were added at this level.
        """
        check_choice("direction", direction, ("fwd", "bwd", "both"))
        if clear_contexts:
            self.clear_contexts()
        for point in self.hook_points():
            if point.listeners:
                point.remove_hooks(direction, including_permanent, level)

    def clear_contexts(self) -> None:
        """Empties the `ctx` of all hook points."""
        for point in self.hook_points():
            point.clear_context()

    def get_caching_hooks(
        self,
        names_filter: NamesFilter = None,
        incl_bwd: bool = False,
        device: torch.device | str | None = None,
        remove_batch_dim: bool = False,
        cache: dict[str, Tensor] | None = None,
        pos_slice: PosSlice = None,
    ) -> tuple[dict[str, Tensor], list[tuple[str, HookFunction]], list[tuple[str, HookFunction]]]:
        """Hooks that fill a dictionary with activations, for `run_with_hooks` or `hooks`.

        Args:
            names_filter, incl_bwd, device, remove_batch_dim, pos_slice: as for `run_with_cache`.
            cache: the dictionary to fill; None: a new one.

        Returns:
            The dictionary, the forward hooks and the backward hooks.

        Raises:
            ValueError: positions of hook points in a module of the user's, of which nobody says which axis counts them.
        """
        cache = {} if cache is None else cache
        points = self.select_hooks(names_filter)
        if pos_slice is not None and (unsaid := [point.name for point in points if point.point.axes == "..."]):
            raise ValueError(
                f"pos_slice is {pos_slice!r}, and nothing says which axis of {', '.join(unsaid[:3])} counts positions: "
                "index what is kept"
            )
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
        pos_slice: PosSlice = None,
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


class HookMethods(WrappedModel, AddsHooks):
    """The methods of a bridge that choose hook points, add hooks for all runs, and turn text into tokens and back."""

    _facts: TokenizerFacts | None = None

    def hook_points(self) -> Collection[HookPoint]:
        """All hook points, in the order of the computation."""
        return self.hook_dict.values()

    def select_hooks(self, names: NamesFilter | HookPoint) -> list[HookPoint]:
        """The hook points that a filter chooses, in the order of the computation.

        Args:
            names: a name, an alias, a list of them, a hook point; a function, which is asked about every name and
                every alias that there is, and chooses a point when it accepts any of its names; None: all but the
                heavy ones that are not switched on by the ``set_use_*`` methods, and the extra ones.

        Raises:
            UnknownHookError: a name that no hook point has.
            ValueError: a filter that matches nothing, or a hook point of another bridge.

        Example:
            >>> from bridge import TransformerBridge
            >>> bridge = TransformerBridge.boot_embedded()
            >>> [hook.name for hook in bridge.select_hooks(lambda name: name.endswith("ln1.hook_scale"))][:2]
            ['blocks.0.ln1.hook_scale', 'blocks.1.ln1.hook_scale']
        """
        if isinstance(names, HookPoint):
            if self.hook_dict.get(names.name) is not names:
                raise ValueError(f"{names!r} belongs to another bridge")
            return [names]
        return self.names.select(names, lambda flag: bool(getattr(self.cfg, flag)))

    def get_hook_point(self, hook_name: str) -> HookPoint:
        """The hook point of a name or an alias.

        Args:
            hook_name: such as ``blocks.0.attn.hook_q``.

        Raises:
            UnknownHookError: there is none.
        """
        return self.names.find(hook_name)

    def set_use_attn_result(self, use_attn_result: bool) -> None:
        """Whether an unfiltered cache holds `attn.hook_result`."""
        self.cfg.use_attn_result = use_attn_result

    def set_use_split_qkv_input(self, use_split_qkv_input: bool) -> None:
        """Whether an unfiltered cache holds `hook_q_input`, `hook_k_input` and `hook_v_input`."""
        self.cfg.use_split_qkv_input = use_split_qkv_input

    def set_use_attn_in(self, use_attn_in: bool) -> None:
        """Whether an unfiltered cache holds `hook_attn_in`."""
        self.cfg.use_attn_in = use_attn_in

    def set_use_hook_mlp_in(self, use_hook_mlp_in: bool) -> None:
        """Whether an unfiltered cache holds `hook_mlp_in`."""
        self.cfg.use_hook_mlp_in = use_hook_mlp_in

    # Text to tokens and back; the tokenizer is never changed.

    @property
    def tokenizer_facts(self) -> TokenizerFacts:
        """What the tokenizer does by itself.

        Raises:
            ValueError: the bridge has no tokenizer.
        """
        taken = takes(self.core)
        if self.tokenizer is None and taken.tokens is None:
            raise CannotBeDoneError(
                f"{type(self.core).__name__} reads {taken.main}, not text: it has no tokens. Give the bridge that "
                f"tensor, as in bridge.run_with_cache({taken.main}=...)"
            )
        if self.tokenizer is None:
            raise CannotBeDoneError(
                "this bridge has no tokenizer, so it takes tokens only; TransformerBridge(model, tokenizer) gives one"
            )
        if self._facts is None or self._facts.tokenizer is not self.tokenizer:
            self._facts = TokenizerFacts(self.tokenizer)
            self.cfg.tokenizer_prepends_bos = self._facts.adds_bos
            self.cfg.tokenizer_appends_eos = self.tokenizer.eos_token_id in self._facts.ending
        return self._facts

    def batch_of(
        self,
        texts: Sequence[str],
        prepend_bos: bool | None = None,
        padding_side: str | None = None,
        longest: int | None = None,
    ) -> Batch:
        """Texts as token rows of one length, with the mask that says which tokens are padding.

        Words that the tokenizer does not know are named in an `UnknownWordWarning`, here and wherever a text is given.

        Args:
            texts: one or more.
            prepend_bos: start each with BOS; None: ``cfg.default_prepend_bos``, where the tokenizer has a BOS.
            padding_side: where shorter rows are padded; None: the tokenizer's own side.
            longest: how many tokens a row may have; longer ones lose what is beyond (but for EOS or SEP at their end).

        Raises:
            ValueError: no tokenizer, no texts, BOS asked for where there is none, or an unknown side.
        """
        return tokenization.batch_of(self, texts, TextOptions(prepend_bos, padding_side, longest))

    def to_tokens(
        self,
        input: str | Sequence[str] | Sequence[Mapping[str, Any]],
        prepend_bos: bool | None = None,
        padding_side: str | None = None,
        move_to_device: bool = True,
        truncate: bool = True,
    ) -> Int[Tensor, "batch pos"]:
        """Text as tokens.

        Args:
            input: a text or several; or a chat (messages with ``role`` and ``content``), by the tokenizer's template
                for chats, with what comes before the answer.
            prepend_bos: start each with BOS; None: ``cfg.default_prepend_bos``, where the tokenizer has a BOS.
            padding_side: where shorter rows are padded; None: the tokenizer's own side.
            move_to_device: put the tokens where the model is.
            truncate: cut rows that are longer than the model's context.

        Returns:
            ``[batch, pos]``, also for a single text.

        Raises:
            ValueError: as `batch_of`.

        Example:
            >>> from bridge import TransformerBridge
            >>> bridge = TransformerBridge.boot_embedded()
            >>> bridge.to_tokens("Mary and John").shape
            torch.Size([1, 4])
        """
        return tokenization.to_tokens(self, input, TextOptions(prepend_bos, padding_side), move_to_device, truncate)

    def to_string(
        self, tokens: Int[Tensor, "..."] | Sequence[int] | Sequence[Int[Tensor, "..."]] | int
    ) -> str | list[str]:
        """Tokens as text: one string for one row, a list for a batch.

        Args:
            tokens: ids, ``[]``, ``[pos]`` or ``[batch, pos]``, or a list of such.

        Example:
            >>> from bridge import TransformerBridge
            >>> bridge = TransformerBridge.boot_embedded()
            >>> bridge.to_string(bridge.to_tokens("Mary and John", prepend_bos=False)[0])
            'Mary and John'
        """
        return tokenization.to_string(self, tokens)

    @refuse_wrong_types
    def to_str_tokens(
        self,
        input: str | Sequence[str] | Tokens,
        prepend_bos: bool | None = None,
        padding_side: str | None = None,
    ) -> list[str] | list[list[str]]:
        """A text or a row of tokens as the text of each token; a list of lists for several.

        Args:
            input: a text, several, or tokens ``[pos]``, ``[1, pos]`` or ``[batch, pos]``.
            prepend_bos, padding_side: as for `to_tokens`.

        Example:
            >>> from bridge import TransformerBridge
            >>> bridge = TransformerBridge.boot_embedded()
            >>> bridge.to_str_tokens("Mary and John")
            ['<bos>', 'Mary', ' and', ' John']
        """
        return tokenization.to_str_tokens(self, input, TextOptions(prepend_bos, padding_side))

    @refuse_wrong_types
    def to_single_token(self, string: str) -> int:
        """The id of a text that is one token.

        Raises:
            ValueError: it is none, or more than one, or has a word that the tokenizer does not know.

        Example:
            >>> from bridge import TransformerBridge
            >>> bridge = TransformerBridge.boot_embedded()
            >>> bridge.to_single_str_token(bridge.to_single_token(" Mary"))
            ' Mary'
        """
        return tokenization.to_single_token(self, string)

    @refuse_wrong_types
    def to_single_str_token(self, int_token: int) -> str:
        """The text of one token.

        Args:
            int_token: its id.
        """
        return tokenization.to_single_str_token(self, int_token)

    def get_token_position(
        self,
        single_token: str | int,
        input: str | Int[Tensor, "..."],
        mode: str = "first",
        prepend_bos: bool | None = None,
        padding_side: str | None = None,
    ) -> int:
        """Where a token stands in a text.

        Args:
            single_token: the token, as text or id.
            input: a text, or tokens ``[pos]`` or ``[1, pos]``.
            mode: ``"first"`` or ``"last"`` of several places.
            prepend_bos, padding_side: as for `to_tokens`, for a text.

        Raises:
            ValueError: it does not stand there; there is more than one row; or an unknown mode.

        Example:
            >>> from bridge import TransformerBridge
            >>> bridge = TransformerBridge.boot_embedded()
            >>> bridge.get_token_position(" John", "When Mary and John went to the store, John gave", mode="last")
            10
        """
        options = TextOptions(prepend_bos, padding_side)
        return tokenization.get_token_position(self, single_token, input, mode, options)
