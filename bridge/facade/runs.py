"""Running a model: plainly, with a cache, with hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from bridge.cache.activation_cache import ActivationCache
from bridge.facade.hooks import HookMethods
from bridge.facade.tokens import TokenMethods
from bridge.hooks.hook_point import HookPoint
from bridge.hooks.names import NamesFilter, named_one_by_one
from bridge.run.forward import run_model
from bridge.run.hooked import check_specs, clear_all_contexts, hooked, points_of_run, runs_some_layers
from bridge.run.loss import lm_loss
from bridge.run.positions import PosSlice
from bridge.run.protocol import HookSpec, Input
from bridge.run.recorder import Recorder, watching
from bridge.run.request import Request


class RunMethods(HookMethods, TokenMethods):
    """The methods of a bridge that run its model."""

    def loss_fn(
        self,
        logits: Float[Tensor, "batch pos d_vocab"],
        tokens: Int[Tensor, "batch pos"],
        attention_mask: Int[Tensor, "batch pos"] | None = None,
        per_token: bool = False,
    ) -> Float[Tensor, "..."]:
        """The loss of predicting each next token.

        Args:
            logits: what the model predicts.
            tokens: what stands there.
            attention_mask: 0 for padding, whose loss does not count.
            per_token: ``[batch, pos-1]`` in place of the mean.
        """
        return lm_loss(logits, tokens.to(logits.device), attention_mask, per_token)

    def forward(
        self,
        input: Input | None = None,
        return_type: str | None = "logits",
        loss_per_token: bool = False,
        prepend_bos: bool | None = None,
        padding_side: str | None = None,
        attention_mask: Tensor | NDArray[Any] | None = None,
        start_at_layer: int | None = None,
        stop_at_layer: int | None = None,
        **model_kwargs: Any,
    ) -> Any:
        """Runs the model.

        Args:
            input: text, texts, tokens ``[pos]`` or ``[batch, pos]``, or embeddings ``[batch, pos, d_model]``. With
                `start_at_layer`, the residual stream ``[batch, pos, d_model]`` that enters that layer. What a tokenizer
                gives is taken, too: as it is, or by names (``bridge(**tokenizer(text, return_tensors="pt"))``).
            return_type: ``"logits"`` ``[batch, pos, d_vocab]``; ``"loss"``, in nats; ``"both"``, a pair of them;
                ``"predictions"``, the most likely next token of each row as text; ``"logits_and_cache"``, the logits
                and the model's cache of keys and values, to be passed as `past_key_values` next time; None, nothing.
            loss_per_token: the loss as ``[batch, pos-1]`` in place of the mean.
            prepend_bos: start texts with BOS; None: ``cfg.default_prepend_bos``, where the tokenizer has a BOS.
            padding_side: where shorter texts are padded; None: the tokenizer's own side.
            attention_mask: ``[batch, pos]``, 1 for tokens and 0 for padding; for texts it is worked out.
            start_at_layer: the first block to run (``n_layers``: only what follows the blocks, as a logit lens does).
            stop_at_layer: the first block not to run: returns the residual stream that would enter it
                (``n_layers``: the one after the last block).
            model_kwargs: anything else that the Hugging Face model's forward takes.

        Returns:
            What `return_type` or `stop_at_layer` says.

        Raises:
            TypeError: an argument that neither the bridge nor the model knows, or an input of a wrong type.
            ValueError: a layer out of range, a prompt that is too long, a loss without tokens.

        Example:
            >>> from bridge import TransformerBridge
            >>> bridge = TransformerBridge.boot_embedded()
            >>> bridge("When Mary and John went to the store, John gave a drink to", return_type="predictions")
            ' Mary'
        """
        asked = Request(input, prepend_bos, padding_side, attention_mask, start_at_layer, stop_at_layer, model_kwargs)
        return run_model(self, asked, return_type, loss_per_token)

    def run_with_cache(
        self,
        input: Input | None = None,
        *,
        return_cache_object: bool = True,
        remove_batch_dim: bool = False,
        names_filter: NamesFilter | HookPoint = None,
        incl_bwd: bool = False,
        pos_slice: PosSlice = None,
        device: torch.device | str | None = None,
        reset_hooks_end: bool = True,
        clear_contexts: bool = False,
        **forward_kwargs: Any,
    ) -> tuple[Any, ActivationCache | dict[str, Tensor]]:
        """Runs the model and keeps activations.

        Args:
            input: as for `forward`.
            return_cache_object: an `ActivationCache` rather than a plain dictionary.
            remove_batch_dim: drop the batch axis of a single prompt.
            names_filter: which hook points: a name or alias, a list of them, a function of the name; None: all but the
                heavy ones that are not switched on by the ``set_use_*`` methods.
            incl_bwd: also run the loss (``return_type="loss"``) backward and keep gradients, under name + ``_grad``.
                No parameter's ``.grad`` is touched.
            pos_slice: which positions to keep (of the queries, for scores and patterns): an index, a slice, a tuple
                ``(start, stop)``, which means the same, or a list of indices. Scores and patterns of other queries are
                not computed where the kernel does not; they differ from a part of the whole by rounding.
            device: where to keep them; None: where they are. The model does not wait for the copies.
            reset_hooks_end: False leaves the caching hooks: later runs fill the same cache, until `reset_hooks`.
            clear_contexts: empty every hook point's `ctx` afterwards.
            forward_kwargs: as for `forward`.

        Returns:
            What `forward` returns, and the activations, detached.

        Raises:
            UnknownHookError: a name that no hook point has.
            ValueError: a filter that matches nothing; a hook point outside of the layers that run; gradients of
                something that is no single number.
            RuntimeError: a named hook point did not run; or a cached tensor was changed in place afterwards.

        Example:
            >>> from bridge import TransformerBridge
            >>> bridge = TransformerBridge.boot_embedded()
            >>> logits, cache = bridge.run_with_cache("Mary and John", names_filter="blocks.0.hook_resid_pre")
            >>> cache["resid_pre", 0].shape[-1] == bridge.cfg.d_model
            True
        """
        points = self.points_of_run(names_filter, forward_kwargs)
        part = runs_some_layers(forward_kwargs)
        recorder = Recorder(points, pos_slice, device, incl_bwd, check=not part, everything=names_filter is None)
        with recorder.attached(self.wiring):
            output = self.forward(input, **forward_kwargs)
            if incl_bwd:
                recorder.backward(output)
        cache = ActivationCache(recorder.finish(named_one_by_one(names_filter)), self)
        if remove_batch_dim:
            cache.remove_batch_dim()
        if not reset_hooks_end:
            self.add_caching_hooks(
                [hook.name for hook in points], incl_bwd, device, remove_batch_dim, cache.cache_dict, pos_slice
            )
        if clear_contexts:
            clear_all_contexts(self)
        return output, cache if return_cache_object else cache.cache_dict

    def run_with_callback(
        self,
        input: Input,
        callback: Callable[[Tensor, HookPoint], None],
        names_filter: NamesFilter | HookPoint = None,
        **forward_kwargs: Any,
    ) -> Any:
        """Runs the model and gives each activation to a function as it comes, in place of a cache.

        Nothing is kept, and nothing is copied: what the function keeps of a tensor, it has to copy.

        Args:
            input: as for `forward`.
            callback: called as ``callback(activation, point)``, in the order of the computation. It must not change
                the activation; `run_with_hooks` is for that.
            names_filter: which hook points, as for `run_with_cache`.
            forward_kwargs: as for `forward`.

        Returns:
            What `forward` returns.

        Raises:
            UnknownHookError: a name that no hook point has.
            ValueError: a filter that matches nothing; a hook point outside of the layers that run.

        Example:
            >>> from bridge import TransformerBridge
            >>> bridge = TransformerBridge.boot_embedded()
            >>> norms = {}
            >>> def measure(activation, point):
            ...     norms[point.name] = activation.norm(dim=-1).mean().item()
            >>> _ = bridge.run_with_callback("Mary and John", measure, lambda name: name.endswith("hook_resid_post"))
            >>> len(norms) == bridge.cfg.n_layers
            True
        """
        with watching(self.wiring, self.points_of_run(names_filter, forward_kwargs), callback):
            return self.forward(input, **forward_kwargs)

    def run_with_hooks(
        self,
        input: Input | None = None,
        *,
        fwd_hooks: Sequence[HookSpec] = (),
        bwd_hooks: Sequence[HookSpec] = (),
        reset_hooks_end: bool = True,
        clear_contexts: bool = False,
        **forward_kwargs: Any,
    ) -> Any:
        """Runs the model with functions that see, and may change, its activations.

        Args:
            input: as for `forward`.
            fwd_hooks: pairs of a hook point (name, alias, or function of the name) and a function called as
                ``fn(activation, hook=point)``, which may return a new activation.
            bwd_hooks: the same for gradients. A loss may be run backward later: the gradients of this run still reach
                them.
            reset_hooks_end: take these hooks away afterwards. Hooks that were there before stay.
            clear_contexts: empty every hook point's `ctx` afterwards.
            forward_kwargs: as for `forward`.

        Returns:
            What `forward` returns.

        Raises:
            UnknownHookError: a name that no hook point has.
            ValueError: a filter that matches nothing, or a hook point outside of the layers that run; a function that
                returned a wrong shape.

        Example:
            >>> from bridge import TransformerBridge
            >>> bridge = TransformerBridge.boot_embedded()
            >>> off = bridge.run_with_hooks("Mary", fwd_hooks=[("blocks.0.hook_mlp_out", lambda x, hook: x * 0)])
        """
        check_specs("fwd_hooks", fwd_hooks)
        check_specs("bwd_hooks", bwd_hooks)
        for names, _ in (*fwd_hooks, *bwd_hooks):
            self.points_of_run(names, forward_kwargs)
        with self.hooks(fwd_hooks, bwd_hooks, reset_hooks_end, clear_contexts):
            return self.forward(input, **forward_kwargs)

    @contextmanager
    def hooks(
        self,
        fwd_hooks: Sequence[HookSpec] = (),
        bwd_hooks: Sequence[HookSpec] = (),
        reset_hooks_end: bool = True,
        clear_contexts: bool = False,
    ) -> Iterator[Self]:
        """Hooks for all runs that start inside a ``with`` statement.

        Other threads and asyncio tasks do not see them. A worker of yours does when it runs in a copy of this context:
        ``contextvars.copy_context().run(...)`` or `asyncio.to_thread`.

        Args:
            fwd_hooks, bwd_hooks, reset_hooks_end, clear_contexts: as for `run_with_hooks`.

        Yields:
            The bridge.

        Example:
            >>> from bridge import TransformerBridge
            >>> bridge = TransformerBridge.boot_embedded()
            >>> with bridge.hooks(fwd_hooks=[("blocks.0.hook_mlp_out", lambda x, hook: x * 0)]):
            ...     loss = bridge("Mary and John", return_type="loss")
        """
        with hooked(self, fwd_hooks, bwd_hooks, reset_hooks_end, clear_contexts):
            yield self

    def points_of_run(self, names: NamesFilter | HookPoint, forward_kwargs: dict[str, Any]) -> list[HookPoint]:
        """The hook points that a run with these arguments shows.

        Args:
            names: as for `run_with_cache`.
            forward_kwargs: the arguments of `forward`; of them, the layers that it starts and stops at count.

        Raises:
            UnknownHookError: a name that no hook point has.
            ValueError: a filter that matches nothing; a hook point outside of the layers that run.
        """
        return points_of_run(self, names, forward_kwargs)
