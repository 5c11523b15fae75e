"""Recording the activations of a generation, step by step."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from bridge.hooks.context import CURRENT, of_the_next_run
from bridge.hooks.hook_point import HookPoint
from bridge.hooks.listener import Listener, Scope
from bridge.wiring.wiring import Wiring

_logger = logging.getLogger(__name__)


class StepRecorder:
    """Keeps what hook points see at every step, and puts the steps together.

    Args:
        points: the hook points.
        device: where to keep them; None: where they are.
        caching: the model keeps keys and values, so that each step processes new tokens only.
        encoder_decoder: it is the decoder's sequence that grows.
    """

    def __init__(
        self, points: Sequence[HookPoint], device: torch.device | str | None, caching: bool, encoder_decoder: bool
    ) -> None:
        self.points = points
        self.device = device
        self.caching = caching
        self.pos, self.key_pos = ("decoder_pos", "decoder_key_pos") if encoder_decoder else ("pos", "key_pos")
        self.seen = 0  # tokens before the present step
        self.new = 0  # tokens of the present step
        self.steps = 0  # whose activations are kept
        self._parts: dict[HookPoint, list[Tensor]] = {}
        self._from_start: set[HookPoint] = set()  # ran at the prompt
        self._versions: list[tuple[HookPoint, Tensor, int]] = []

    @contextmanager
    def attached(self, wiring: Wiring, core: nn.Module) -> Iterator[None]:
        """Listens in the generation that starts inside the ``with`` statement."""
        scope = Scope()
        listener = Listener("read", self._read, scope)

        def begin(module: nn.Module, args: Any, kwargs: Any) -> None:
            if scope in CURRENT.get().visible:
                self._begin(args, kwargs)

        wiring.listen(self.points, listener)
        handle = core.register_forward_pre_hook(begin, with_kwargs=True, prepend=True)
        try:
            with of_the_next_run(scope):
                yield
        finally:
            handle.remove()
            wiring.stop_listening(self.points, listener)

    def _begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        names = ("decoder_input_ids", "decoder_inputs_embeds") if self.pos == "decoder_pos" else ()
        given = [kwargs.get(name) for name in (*names, "input_ids", "inputs_embeds")]
        tokens = args[0] if args else next(value for value in given if value is not None)
        self.seen = self.seen + self.new if self.caching else 0
        self.new = tokens.shape[1]
        self.steps += 1
        if not self.caching:
            self.steps = 1
            self._parts.clear()  # this step processes everything again
            self._versions.clear()

    def _read(self, act: Tensor, hook: HookPoint) -> None:
        axes = hook.point.axes.split()
        act = act.detach()
        total = self.seen + self.new
        if self.key_pos in axes:
            axis = axes.index(self.key_pos)
            keys = act.shape[axis]
            if self.pos not in axes:  # keys and values of the whole past: these are the new ones
                start = self.seen if keys >= total else keys - self.new
                act = act.narrow(axis, start, self.new).clone()
            elif keys > total:  # a cache of fixed size
                act = act.narrow(axis, 0, total)
            elif keys < total:  # a window that has moved on
                act = self._widen(act, axis, (total - keys, 0), hook)
        if self.pos in axes and act.shape[axes.index(self.pos)] > self.new:  # of the past too (keys from a latent)
            axis = axes.index(self.pos)
            if act.shape[axis] < total and ".attn." not in hook.name:  # no window of keys
                raise ValueError(
                    f"{hook.name} has {act.shape[axis]} positions in a step of {self.new} after {self.seen} tokens: "
                    "its steps make no sequence. Generate the rows one by one (transformers' RWKV mixes the rows of a "
                    "batch), or use run_with_cache on the finished sequence"
                )
            start = self.seen if act.shape[axis] >= total else act.shape[axis] - self.new
            act = act.narrow(axis, start, self.new).clone()
        kept = act if self.device is None else act.to(self.device)
        if kept.is_inference():  # nothing counts what is written to it later
            kept = kept.clone()
        else:
            self._versions.append((hook, kept, kept._version))
        self._parts.setdefault(hook, []).append(kept)
        if not self.seen:
            self._from_start.add(hook)

    def _widen(self, act: Tensor, axis: int, by: tuple[int, int], hook: HookPoint) -> Tensor:
        """Adds keys that no query of this step attends to."""
        nothing = float("-inf") if hook.name.endswith("hook_attn_scores") else 0.0
        return pad(act, (0, 0) * (act.ndim - 1 - axis) + by, value=nothing)

    def behind(self, values: dict[str, Tensor], padding: Sequence[int]) -> dict[str, Tensor]:
        """The activations with the padding in front of each row moved behind it, as in the tokens that are returned.

        Args:
            values: by canonical name.
            padding: how many tokens of padding stand in front of each row.
        """
        moved = dict(values)
        for hook in self.points:
            axes = hook.point.axes.split()
            grows = [axes.index(axis) for axis in (self.pos, self.key_pos) if axis in axes]
            if hook.name in values and grows and axes[0] == "batch":
                rows = [
                    row.roll([-by] * len(grows), [axis - 1 for axis in grows])
                    for row, by in zip(values[hook.name], padding, strict=True)
                ]
                moved[hook.name] = torch.stack(rows)
        return moved

    def _put_together(self, hook: HookPoint) -> Tensor | str:
        """The steps of a hook point as one activation; or why they make none."""
        if hook not in self._from_start:
            return "did not run on this prompt"
        total = self.seen + self.new
        parts, axes = self._parts[hook], hook.point.axes.split()
        grows = next((axes.index(axis) for axis in (self.pos, self.key_pos) if axis in axes), None)
        if grows is None:
            along = any("pos" in axis for axis in axes)  # of the encoder, which runs once
            if not along and (len(parts) < self.steps or len({part.shape for part in parts}) > 1):
                return "has no axis of positions, and is no state that each step makes anew"
            return parts[-1]
        if {self.pos, self.key_pos} <= set(axes):
            key = axes.index(self.key_pos)
            parts = [self._widen(part, key, (0, total - part.shape[key]), hook) for part in parts]
        whole = torch.cat(parts, dim=grows)
        if whole.shape[grows] != total:
            return f"was computed at {whole.shape[grows]} of {total} tokens"
        return whole

    def finish(self, processed: int, explicit: bool) -> dict[str, Tensor]:
        """The activations of every token that was processed, by canonical name.

        Hook points are left out that did not run on the prompt (those of the embedding, where embeddings were given),
        and those whose steps cannot be put together (a convolution that runs on the prompt alone).

        Args:
            processed: how many tokens of each row the model must have processed.
            explicit: the hook points were named one by one: each of them has to be there.

        Raises:
            ValueError: they were others.
            RuntimeError: a point was named that would be left out; or an activation was changed in place after it was
                recorded.
        """
        total = self.seen + self.new
        if total != processed:
            raise ValueError(
                f"the steps of this generation processed {total} tokens, and its sequence has {processed} that should "
                "have been: use run_with_cache on the finished sequence"
            )
        for hook, value, version in self._versions:
            if value._version != version:
                raise RuntimeError(
                    f"{hook.name} was changed in place after it was recorded, by the model or by a hook; "
                    "its adapter has to declare that it is to be copied"
                )
        made = {hook.name: self._put_together(hook) for hook in self.points}
        missing = "; ".join(f"{name} {why}" for name, why in made.items() if isinstance(why, str))
        if explicit and missing:
            raise RuntimeError(f"{missing}: use run_with_cache on the finished sequence")
        if missing:
            _logger.warning("left out of the cache of a generation: %s", missing)
        return {name: value for name, value in made.items() if isinstance(value, Tensor)}
