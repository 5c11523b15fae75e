"""Running a model: plainly, with a cache, with hooks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from bridge.cache.activation_cache import ActivationCache
from bridge.hooks.hook_point import STATE, HookFunction, HookPoint, Listener
from bridge.hooks.modules import uncompiled
from bridge.hooks.names import Names, NamesFilter
from bridge.run import layer_range as layers
from bridge.run.loss import lm_loss
from bridge.run.model_inputs import Inputs, check_arguments, prepare
from bridge.run.wiring import Wiring

#: What a run takes: a text, texts, tokens ``[pos]`` or ``[batch, pos]`` (a tensor, or lists of ids), or embeddings
#: ``[batch, pos, d_model]``.
Input = str | Sequence[Any] | Int[Tensor, "..."] | Float[Tensor, "..."]
#: Which hook point (a name, an alias, a function of the name) gets which function.
HookSpec = tuple[NamesFilter | HookPoint, HookFunction]

RETURN_TYPES = ("logits", "loss", "both", "predictions", "logits_and_cache", None)
_OURS = (
    "return_type", "loss_per_token", "prepend_bos", "padding_side", "attention_mask", "start_at_layer",
    "stop_at_layer", "names_filter", "incl_bwd", "pos_slice", "device", "remove_batch_dim", "return_cache_object",
    "fwd_hooks", "bwd_hooks", "reset_hooks_end", "clear_contexts",
)  # fmt: skip


class RunMethods:
    """The methods of a bridge that run its model."""

    original_model: Any
    core: Any
    tokenizer: Any
    cfg: Any
    names: Names
    wiring: Wiring
    block_paths: list[str]
    block_output: tuple[int | None, int]
    no_layer_runs: str

    def forward(
        self,
        input: Input,
        return_type: str | None = "logits",
        loss_per_token: bool = False,
        prepend_bos: bool | None = None,
        padding_side: str | None = None,
        attention_mask: Tensor | None = None,
        start_at_layer: int | None = None,
        stop_at_layer: int | None = None,
        **model_kwargs: Any,
    ) -> Any:
        """Runs the model.

        Args:
            input: text, texts, tokens ``[pos]`` or ``[batch, pos]``, or embeddings ``[batch, pos, d_model]``. With
                `start_at_layer`, the residual stream ``[batch, pos, d_model]`` that enters that layer.
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
        check_arguments(self.core, model_kwargs, _OURS)
        if return_type not in RETURN_TYPES:
            raise ValueError(f"return_type is {return_type!r}; it must be one of {', '.join(map(repr, RETURN_TYPES))}")
        if return_type == "logits_and_cache":
            model_kwargs.setdefault("use_cache", True)
        start, stop = layers.check_layers(start_at_layer, stop_at_layer, self.cfg.n_layers)
        if self.no_layer_runs and (start is not None or stop is not None):
            raise ValueError(f"{self.cfg.model_name} cannot start or stop at a layer: {self.no_layer_runs}")
        if stop is None:
            self._check_result(return_type, start is not None, input, model_kwargs)
        with ExitStack() as stack:
            stack.enter_context(STATE.fresh())
            if start is not None:
                input = self._start(stack, input, start)
                model_kwargs.setdefault("use_cache", False)
            inputs = prepare(self, input, prepend_bos, padding_side, attention_mask, model_kwargs)
            if self.wiring.listening or start is not None or stop is not None:
                stack.enter_context(uncompiled(self.original_model))
            if stop is not None:
                return self._stopped(inputs, stop)
            output = self.original_model(**inputs.kwargs)
        return self._result(output, inputs, return_type, loss_per_token)

    def _check_result(self, return_type: str | None, residual: bool, input: Any, model_kwargs: dict[str, Any]) -> None:
        """Refuses what the run could not give, before it runs."""
        if return_type not in ("loss", "both", "predictions") or "labels" in model_kwargs:
            return
        if "unembed.hook_out" not in self.wiring.points:
            raise ValueError(
                f"{type(self.core).__name__} has no unembedding and predicts no tokens, so there is no {return_type!r}"
            )
        if return_type == "predictions":
            return
        if residual or (isinstance(input, Tensor) and input.is_floating_point()):
            raise ValueError("a loss needs tokens: embeddings or a residual stream do not say what comes next")
        if self.cfg.attention_dir == "bidirectional" and not self.core.config.is_encoder_decoder:
            raise ValueError("a model that reads in both directions has no next-token loss; pass labels")

    def _start(self, stack: ExitStack, input: Any, start: int) -> Tensor:
        d_model = self.cfg.d_model
        if not isinstance(input, Tensor) or input.ndim != 3 or input.shape[-1] != d_model:
            shape = list(input.shape) if isinstance(input, Tensor) else type(input).__name__
            raise ValueError(
                f"with start_at_layer the input is the residual stream, [batch, pos, {d_model}], not {shape}"
            )
        blocks = [self.original_model.get_submodule(path) for path in self.block_paths]
        stack.enter_context(layers.starting_at(start))
        if start == 0:
            stack.enter_context(layers.entering(blocks[0], input))
        else:
            stack.enter_context(layers.skipping(blocks[:start], input, *self.block_output))
        return layers.placeholder(input)

    def _stopped(self, inputs: Inputs, stop: int) -> Tensor:
        last = stop == self.cfg.n_layers
        block = self.original_model.get_submodule(self.block_paths[stop - last])
        with layers.stopping(block, last, self.block_output[0]) as found:
            self.original_model(**inputs.kwargs)
        return found[0]

    def _result(self, output: Any, inputs: Inputs, return_type: str | None, loss_per_token: bool) -> Any:
        if return_type is None:
            return None
        logits = output.logits if hasattr(output, "logits") else output[0]
        if return_type == "logits":
            return logits
        if return_type == "logits_and_cache":
            return logits, output.past_key_values
        if return_type == "predictions":
            return self._predictions(logits, inputs)
        if "labels" in inputs.kwargs:
            loss = output.loss
        else:
            assert inputs.tokens is not None
            loss = lm_loss(logits, inputs.tokens, inputs.mask, loss_per_token)
        return loss if return_type == "loss" else (logits, loss)

    def _predictions(self, logits: Tensor, inputs: Inputs) -> str | list[str]:
        if inputs.mask is None:
            last = torch.full((logits.shape[0],), logits.shape[1] - 1, device=logits.device)
        else:
            last = inputs.mask.shape[1] - 1 - inputs.mask.flip(-1).argmax(-1)
        best = logits[torch.arange(len(last), device=logits.device), last].argmax(-1)
        texts = [self.to_single_str_token(token) for token in best.tolist()]  # type: ignore[attr-defined]
        return texts[0] if len(texts) == 1 else texts

    def run_with_cache(
        self,
        input: Input,
        *,
        return_cache_object: bool = True,
        remove_batch_dim: bool = False,
        names_filter: NamesFilter = None,
        incl_bwd: bool = False,
        pos_slice: int | slice | Sequence[int] | None = None,
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
            pos_slice: which positions to keep (of the queries, for scores and patterns).
            device: where to keep them; None: where they are.
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
        from bridge.run.recorder import Recorder

        points = self._points(names_filter, forward_kwargs)
        recorder = Recorder(points, pos_slice, device, incl_bwd, check=not self._partial(forward_kwargs))
        with recorder.attached(self.wiring):
            output = self.forward(input, **forward_kwargs)  # type: ignore[arg-type]
            if incl_bwd:
                recorder.backward(output)
        explicit = isinstance(names_filter, str) or (names_filter is not None and not callable(names_filter))
        activations = recorder.finish(explicit)
        cache = ActivationCache(activations, self)
        if remove_batch_dim:
            cache.remove_batch_dim()
        if not reset_hooks_end:
            self.add_caching_hooks(  # type: ignore[attr-defined]
                [hook.name for hook in points], incl_bwd, device, remove_batch_dim, cache.cache_dict, pos_slice
            )
        if clear_contexts:
            self._clear_contexts()
        return output, cache if return_cache_object else cache.cache_dict

    def run_with_hooks(
        self,
        input: Input,
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
            bwd_hooks: the same for gradients, for a loss that is run backward later: keep ``reset_hooks_end``; the
                gradients of this run still reach them.
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
        for names, _ in (*fwd_hooks, *bwd_hooks):
            self._points(self._own(names).name if isinstance(names, HookPoint) else names, forward_kwargs)
        checkpointing = getattr(self.core, "is_activation_checkpointing", False) and self.core.training
        if checkpointing and torch.is_grad_enabled() and (fwd_hooks or bwd_hooks) and reset_hooks_end:
            raise RuntimeError(
                "with activation checkpointing, backward runs the blocks again, when these hooks are gone: "
                "use `with bridge.hooks(...)` around forward and backward, or switch checkpointing off"
            )
        with self.hooks(fwd_hooks, bwd_hooks, reset_hooks_end, clear_contexts):
            return self.forward(input, **forward_kwargs)  # type: ignore[arg-type]

    @contextmanager
    def hooks(
        self,
        fwd_hooks: Sequence[HookSpec] = (),
        bwd_hooks: Sequence[HookSpec] = (),
        reset_hooks_end: bool = True,
        clear_contexts: bool = False,
    ) -> Iterator[Any]:
        """Hooks for all runs of this thread inside a ``with`` statement.

        Args:
            fwd_hooks, bwd_hooks, reset_hooks_end, clear_contexts: as for `run_with_hooks`.

        Example:
            >>> from bridge import TransformerBridge
            >>> bridge = TransformerBridge.boot_embedded()
            >>> with bridge.hooks(fwd_hooks=[("blocks.0.hook_mlp_out", lambda x, hook: x * 0)]):
            ...     loss = bridge("Mary and John", return_type="loss")
        """
        chosen = [
            (hook, fn, direction)
            for direction, specs in (("fwd", fwd_hooks), ("bwd", bwd_hooks))
            for names, fn in specs
            for hook in self._chosen(names)
        ]
        handles = []
        try:
            for hook, fn, direction in chosen:
                handles.append(hook.add_hook(fn, direction))  # type: ignore[arg-type]
            yield self
        finally:
            if reset_hooks_end:
                for handle in handles:
                    handle.remove()
            if clear_contexts:
                self._clear_contexts()

    def _own(self, hook: HookPoint) -> HookPoint:
        """The hook point itself.

        Raises:
            ValueError: it belongs to another bridge.
        """
        if self.wiring.points.get(hook.name) is not hook:
            raise ValueError(f"{hook!r} belongs to another bridge")
        return hook

    def _chosen(self, names: NamesFilter | HookPoint) -> list[HookPoint]:
        if isinstance(names, HookPoint):
            return [self._own(names)]
        return self.names.select(names, self._is_heavy_on)

    def _is_heavy_on(self, hook: HookPoint) -> bool:
        return bool(getattr(self.cfg, hook.point.flag or ""))

    def _partial(self, forward_kwargs: dict[str, Any]) -> bool:
        return any(forward_kwargs.get(name) is not None for name in ("start_at_layer", "stop_at_layer"))

    def _points(self, names: NamesFilter, forward_kwargs: dict[str, Any]) -> list[HookPoint]:
        """The chosen hook points, of which those named one by one must lie in the layers that run."""
        points = self.names.select(names, self._is_heavy_on)
        running = self._running(points, forward_kwargs)
        if len(running) == len(points):
            return points
        layers_that_run = ", ".join(
            f"{name}={forward_kwargs.get(name)}" for name in ("start_at_layer", "stop_at_layer")
        )
        if names is not None and not callable(names):
            outside = next(hook for hook in points if hook not in running)
            raise ValueError(f"{outside.name} does not run with {layers_that_run}")
        if not running:
            raise ValueError(f"none of the chosen hook points runs with {layers_that_run}")
        return running

    def _running(self, points: list[HookPoint], forward_kwargs: dict[str, Any]) -> list[HookPoint]:
        """Those of the hook points that lie in the layers that run."""
        start, stop = layers.check_layers(
            forward_kwargs.get("start_at_layer"), forward_kwargs.get("stop_at_layer"), self.cfg.n_layers
        )
        if start is None and stop is None:
            return points
        first, last = start if start is not None else -1, stop if stop is not None else self.cfg.n_layers + 1
        return [hook for hook in points if first <= hook.point.depth < last]

    def _clear_contexts(self) -> None:
        for hook in self.wiring.points.values():
            hook.clear_context()

    def _listen(self, hook: HookPoint, kind: Any, fn: Any, permanent: bool = False, level: int | None = None) -> Any:
        return self.wiring.add(hook, Listener(kind, fn, STATE.owner, permanent, level))
