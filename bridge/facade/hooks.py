"""Adding and removing hooks, and choosing hook points."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal

import torch
from jaxtyping import Int
from torch import Tensor

from adapters.inputs import takes
from bridge.arguments import CannotBeDoneError, check_choice, refuse_wrong_types
from bridge.facade.facade import WrappedModel
from bridge.hooks.context import HookFunction
from bridge.hooks.hooks import Handle, HookPoint
from bridge.hooks.names import NamesFilter
from bridge.interventions.operations import Index
from bridge.interventions.touching import Touching
from bridge.run import tokenization
from bridge.run.recorder import PosSlice, caching_functions
from bridge.run.spans import Chat, Spans, spans_of
from bridge.run.tokenization import (
    Batch,
    Text,
    TextOptions,
    Texts,
    TokenizerFacts,
    Tokens,
)


class AddsHooks:
    """Methods that add and remove hooks, shared by bridges and users' own modules with hook
    points."""

    def hook_points(self) -> Collection[HookPoint]:
        """Return all hook points."""
        raise NotImplementedError

    def select_hooks(self, names: NamesFilter | HookPoint) -> Sequence[HookPoint]:
        """Return the hook points that a filter selects."""
        raise NotImplementedError

    def check_heads(self, hook: HookPoint, heads: Index) -> None:
        """Reject heads that a hook point does not have, if its number of heads is known."""

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
        """Add a function to hook points, for all runs in all threads, until it is removed.

        Args:
            name: a name, an alias, a list of them, or a function of the name.
            hook: called as ``hook(activation, hook=point)``.
            dir, is_permanent, level, prepend: as for `HookPoint.add_hook`.
            hook_fn: another name for `hook`. heads, queries, keys: show the function only these,
                and let it change only these, as `bridge.interventions.Touching` does; other scores
                and patterns are not even computed. None: all.

        Returns:
            A handle for each hook point, with `remove()`.

        Raises:
            UnknownHookError: a name that no hook point has.
            ValueError: a filter that matches nothing; heads of an activation that has none.
            IndexError: there are no such heads.
            TypeError: no function, or two.
        """
        if (hook is None) == (hook_fn is None):
            raise TypeError("add_hook takes one function: as `hook`, or as `hook_fn`")
        function = hook_fn if hook is None else hook
        assert function is not None
        if isinstance(function, str | HookPoint):
            raise TypeError(
                f"add_hook takes the hook point first, then the function: add_hook({function!r},"
                " function)"
            )
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
        """Add a hook that `reset_hooks` leaves alone unless told otherwise.

        Args:
            name, hook, dir, hook_fn, heads, queries, keys: as for `add_hook`.

        Example:
            >>> from bridge import TransformerBridge
            >>> bridge = TransformerBridge.boot_embedded()
            >>> zero = lambda x, hook: x * 0
            >>> (handle,) = bridge.add_perma_hook("blocks.0.hook_mlp_out", hook_fn=zero)
            >>> bridge.reset_hooks()
            >>> bool((bridge.run_with_cache("Mary")[1]["mlp_out", 0] == 0).all())
            True
            >>> handle.remove()
        """
        return self.add_hook(
            name,
            hook,
            dir,
            is_permanent=True,
            hook_fn=hook_fn,
            heads=heads,
            queries=queries,
            keys=keys,
        )

    def reset_hooks(
        self,
        clear_contexts: bool = True,
        direction: Literal["fwd", "bwd", "both"] = "both",
        including_permanent: bool = False,
        level: int | None = None,
    ) -> None:
        """Remove added hooks from all hook points. (Hooks of a ``with`` statement end with that
        statement.)

        Args:
            clear_contexts: empty every hook point's `ctx`.
            direction: ``"fwd"``, ``"bwd"`` or ``"both"``.
            including_permanent: also remove permanent hooks.
            level: remove only hooks that were added at this level.
        """
        check_choice("direction", direction, ("fwd", "bwd", "both"))
        if clear_contexts:
            self.clear_contexts()
        for point in self.hook_points():
            if point.listeners:
                point.remove_hooks(direction, including_permanent, level)

    def clear_contexts(self) -> None:
        """Empty the `ctx` of all hook points."""
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
        """Return hooks that fill a dictionary with activations, for `run_with_hooks` or `hooks`.

        Args:
            names_filter, incl_bwd, device, remove_batch_dim, pos_slice: as for `run_with_cache`.
            cache: the dictionary to fill; None: a new one.

        Returns:
            The dictionary, the forward hooks and the backward hooks.

        Raises:
            ValueError: positions are selected at hook points of a user's own module, whose position
                axis is unknown.
        """
        cache = {} if cache is None else cache
        points = self.select_hooks(names_filter)
        unknown = [point.name for point in points if point.point.axes == "..."]
        if pos_slice is not None and unknown:
            raise ValueError(
                f"pos_slice is {pos_slice!r}, and nothing says which axis of"
                f" {', '.join(unknown[:3])} counts positions: index what is kept"
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
        """Add hooks that fill a dictionary with the activations of every run until `reset_hooks`.

        Args:
            names_filter, incl_bwd, device, remove_batch_dim, cache, pos_slice: as for
            `get_caching_hooks`.

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
    """A bridge's methods for selecting hook points, adding hooks for all runs, and converting text
    to tokens and back.
    """

    _facts: TokenizerFacts | None = None

    def hook_points(self) -> Collection[HookPoint]:
        """Return all hook points, in the order of the computation."""
        return self.hook_dict.values()

    def select_hooks(self, names: NamesFilter | HookPoint) -> list[HookPoint]:
        """Return the hook points that a filter selects, in the order of the computation.

        Args:
            names: a name, an alias, a list of them, a hook point; a function, which is called with
                every name and alias, and selects a point if it accepts any of its names; None: all
                except extra points, and heavy points that the ``set_use_*`` methods have not
                enabled.

        Raises:
            UnknownHookError: a name that no hook point has.
            ValueError: a filter that matches nothing, or a hook point of another bridge.

        Example:
            >>> from bridge import TransformerBridge
            >>> bridge = TransformerBridge.boot_embedded()
            >>> hooks = bridge.select_hooks(lambda name: name.endswith("ln1.hook_scale"))
            >>> [hook.name for hook in hooks][:2]
            ['blocks.0.ln1.hook_scale', 'blocks.1.ln1.hook_scale']
        """
        if isinstance(names, HookPoint):
            if self.hook_dict.get(names.name) is not names:
                self.wiring.check_registered(names)
                raise ValueError(f"{names!r} belongs to another bridge")
            return [names]
        return self.names.select(names, lambda flag: bool(getattr(self.cfg, flag)))

    def get_hook_point(self, hook_name: str) -> HookPoint:
        """Return the hook point of a name or an alias.

        Args:
            hook_name: the name, such as ``blocks.0.attn.hook_q``.

        Raises:
            UnknownHookError: there is no such hook point.
        """
        return self.names.find(hook_name)

    def set_use_attn_result(self, use_attn_result: bool) -> None:
        """Set whether an unfiltered cache holds `attn.hook_result`."""
        self.cfg.use_attn_result = use_attn_result

    def set_use_split_qkv_input(self, use_split_qkv_input: bool) -> None:
        """Set whether an unfiltered cache holds `hook_q_input`, `hook_k_input` and
        `hook_v_input`.
        """
        self.cfg.use_split_qkv_input = use_split_qkv_input

    def set_use_attn_in(self, use_attn_in: bool) -> None:
        """Set whether an unfiltered cache holds `hook_attn_in`."""
        self.cfg.use_attn_in = use_attn_in

    def set_use_hook_mlp_in(self, use_hook_mlp_in: bool) -> None:
        """Set whether an unfiltered cache holds `hook_mlp_in`."""
        self.cfg.use_hook_mlp_in = use_hook_mlp_in

    # Text to tokens and back; the tokenizer is never changed.

    @property
    def tokenizer_facts(self) -> TokenizerFacts:
        """The tokenizer's own behaviour.

        Raises:
            ValueError: the bridge has no tokenizer.
        """
        tokenizer, facts = self.tokenizer, self._facts
        if tokenizer is None:
            inputs = takes(self.core)
            if inputs.tokens is None:
                raise CannotBeDoneError(
                    f"{type(self.core).__name__} reads {inputs.main}, not text: it has no tokens."
                    f" Give the bridge that tensor, as in bridge.run_with_cache({inputs.main}=...)"
                )
            raise CannotBeDoneError(
                "this bridge has no tokenizer, so it takes tokens only; TransformerBridge(model,"
                " tokenizer) gives one"
            )
        if facts is None or facts.tokenizer is not tokenizer:
            self._facts = facts = TokenizerFacts(tokenizer)
            self.cfg.tokenizer_prepends_bos = facts.adds_bos
            self.cfg.tokenizer_appends_eos = tokenizer.eos_token_id in facts.ending
        return facts

    def batch_of(
        self,
        texts: Sequence[Text],
        prepend_bos: bool | None = None,
        padding_side: str | None = None,
        longest: int | None = None,
    ) -> Batch:
        """Return texts as token rows of one length, with the mask of padding.

        An `UnknownWordWarning` names words that the tokenizer does not know, here and wherever you
        pass text.

        Args:
            texts: one or more texts or chats.
            prepend_bos: start each text with BOS; None: ``cfg.default_prepend_bos``, if the
                tokenizer has a BOS.
            padding_side: the side on which shorter rows are padded; None: the tokenizer's.
            longest: the maximum number of tokens in a row; longer rows are truncated (but keep EOS
                or SEP at their end).

        Raises:
            ValueError: no tokenizer, no texts, BOS requested from a tokenizer without one, or an
                unknown side.
        """
        return tokenization.batch_of(self, texts, TextOptions(prepend_bos, padding_side, longest))

    def to_tokens(
        self,
        input: Texts,
        prepend_bos: bool | None = None,
        padding_side: str | None = None,
        move_to_device: bool = True,
        truncate: bool = True,
    ) -> Int[Tensor, "batch pos"]:
        """Convert text to tokens.

        Args:
            input: a text or several; or a chat (messages with ``role`` and ``content``) or several,
                formatted by the tokenizer's chat template. It goes up to where the answer starts,
                unless its last message is an answer.
            prepend_bos: start each text with BOS; None: ``cfg.default_prepend_bos``, if the
                tokenizer has a BOS.
            padding_side: the side on which shorter rows are padded; None: the tokenizer's.
            move_to_device: put the tokens on the model's device.
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
        return tokenization.to_tokens(
            self, input, TextOptions(prepend_bos, padding_side), move_to_device, truncate
        )

    @refuse_wrong_types
    def spans(self, chat: Chat, answer: str | None = None) -> Spans:
        """Return the spans of a chat: each of its tokens in one, with its role, turn, kind
        (content, thinking, template), sentence and text.

        Spans are accepted wherever positions are. Texts are located by rendering the chat again
        with a mark in the place of each; they are not searched for. A sentence ends after ``.``,
        ``?`` or ``!`` and whitespace, or at an empty line, and has at least ten characters. A token
        with characters of two spans belongs to that of its first character that is not whitespace.
        Template text belongs to a message as far as the chat that ends there has it, and else to
        the next message.

        Args:
            chat: messages, as for `to_tokens`.
            answer: text that the model generated after the chat, with its thinking, if templates
                would drop that. `Spans.tokens` includes it.

        Returns:
            The spans; their positions are those of the tokens that `to_tokens` returns.

        Raises:
            ValueError: no chat template; a slow tokenizer; a template that changes a text; a chat
                longer than the model's context.

        Example:
            >>> from bridge import TransformerBridge
            >>> bridge = TransformerBridge.boot_embedded()
            >>> bridge.tokenizer.chat_template = (
            ...     "{% for m in messages %}{{ m.role }}: {{ m.content }} {% endfor %}"
            ... )
            >>> chat = [{"role": "user", "content": "Mary and John went to the store. John left."}]
            >>> spans = bridge.spans(chat)
            >>> [span.text for span in spans["user"].sentences()]
            [' Mary and John went to the store.', ' John left.']
            >>> spans.find("store").positions
            [8]
        """
        spans = spans_of(self.tokenizer_facts.tokenizer, chat, answer)
        longest, length = self.cfg.n_ctx, spans.tokens.shape[1]
        if longest is not None and length > longest:
            raise ValueError(
                f"the chat has {length} tokens; {self.cfg.model_name} has a context of {longest}:"
                " leave earlier messages out"
            )
        return spans

    def to_string(
        self, tokens: Int[Tensor, "..."] | Sequence[int] | Sequence[Int[Tensor, "..."]] | int
    ) -> str | list[str]:
        """Convert tokens to text: one string for one row, a list for a batch.

        Args:
            tokens: ids, ``[]``, ``[pos]`` or ``[batch, pos]``, or a list of these.

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
        input: Texts | Tokens,
        prepend_bos: bool | None = None,
        padding_side: str | None = None,
    ) -> list[str] | list[list[str]]:
        """Return a text or a row of tokens as the text of each token; a list of lists for several.

        Args:
            input: a text or a chat, several, or tokens ``[pos]``, ``[1, pos]`` or ``[batch, pos]``.
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
        """Return the id of a text that is one token.

        Raises:
            ValueError: it is empty, more than one token, or contains a word that the tokenizer does
                not know.

        Example:
            >>> from bridge import TransformerBridge
            >>> bridge = TransformerBridge.boot_embedded()
            >>> bridge.to_single_str_token(bridge.to_single_token(" Mary"))
            ' Mary'
        """
        return tokenization.to_single_token(self, string)

    def to_answer_token(self, answer: str) -> int:
        """Return the id of a text that is compared as the next token of a prompt.

        A warning (`MissingSpaceWarning`) names both tokens if a word lacks the space with which it
        follows another: ``"Mary"`` is another token than ``" Mary"``.

        Args:
            answer: the text.

        Raises:
            ValueError: as `to_single_token`.

        Example:
            >>> from bridge import TransformerBridge
            >>> TransformerBridge.boot_embedded().to_answer_token(" Mary")
            7
        """
        return tokenization.to_answer_token(self, answer)

    @refuse_wrong_types
    def to_single_str_token(self, int_token: int) -> str:
        """Return the text of one token.

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
        """Return the position of a token in a text.

        Args:
            single_token: the token, as text or id.
            input: a text, or tokens ``[pos]`` or ``[1, pos]``.
            mode: ``"first"`` or ``"last"`` occurrence.
            prepend_bos, padding_side: as for `to_tokens`, for a text.

        Raises:
            ValueError: the token does not occur, there are several rows, or the mode is unknown.

        Example:
            >>> from bridge import TransformerBridge
            >>> bridge = TransformerBridge.boot_embedded()
            >>> prompt = "When Mary and John went to the store, John gave"
            >>> bridge.get_token_position(" John", prompt, mode="last")
            10
        """
        options = TextOptions(prepend_bos, padding_side)
        return tokenization.get_token_position(self, single_token, input, mode, options)
