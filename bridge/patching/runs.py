"""Patched runs: many runs of the same prompts, each with one activation patched, in as few runs as it takes.

What comes in: prompts (corrupted ones, as a rule), and `Patch`es: each says at which hook point it stands and makes
the patched activation from the one that it is given. What goes out: each patch with its logits, those of a whole run
but for the rounding of another batch size. Activation patching (`bridge.patching.patching`) measures metrics of them,
and exact edges of circuits (`bridge.circuits`) are patches of what a part reads.

The mechanism, in order:

1. `CorruptedRun` runs the prompts once. It keeps the residual stream before each layer, keys and values, and what the
   patches want to compare with. It tries whether going on from these gives the same logits again.
2. A patch in layer l changes nothing below l, and a patch at position p nothing before p (a causal model). So patches
   are cut into `groups` that start at the same position, the cut that costs least.
3. `PatchedRuns.logits` takes each group through the layers as one batch. A patch joins it at its layer, from the
   corrupted stream there; keys and values before the first position are those of the corrupted run.
4. A patch in a basis is made on the point that the basis stands on: what all patches there begin with is encoded once.
5. The last block runs, and logits are computed, where the metric looks (`LazyLogits`).
6. Where that would not give what whole runs give, each patch is a run of its own, from its layer on if that much was
   tried: hooks of the user or dropout (each run has its own), a point without a batch axis, a basis that mixes the
   rows of a batch, a metric that asks for gradients, or too few patches to be worth the first run.

It refuses several patches at a point without a batch axis. It knows nothing of setters, metrics, edges or results.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from adapters.config import ModelConfig
from adapters.inputs import gives_blocks_tokens, gives_cache, text_alone
from adapters.views.basis import InBasis, dense
from bridge.bases.bases import by_position, by_row, read_by
from bridge.bridge import TransformerBridge
from bridge.hooks.hooks import HookPoint
from bridge.hooks.modules import close
from bridge.hooks.rows import OF_ROWS, tiled
from bridge.patching.lazy_logits import LazyLogits, lazy
from bridge.run.layer_range import StopRun
from bridge.run.recorder import free_memory

#: What a run costs besides its tokens, for each layer, in tokens of one layer: reading the weights, mostly. (A sweep of
#: 12-layer GPT-2 on two cores takes the same time with 60 as with 160, 3 % more with 40, 6 % more with 20.)
RUN_COST = 80
#: More logits than this are not computed for all patches at once.
MOST_LOGITS = 2**25
#: Sets of positions whose logits are kept for neighbouring patches; a metric that looks at more pays for each.
MOST_KEPT = 4
#: Starting positions that are told apart.
MOST_STARTS = 128

#: Fewer patches than these are whole runs: joined runs need about two and a half before the first patch.
WORTHWHILE = 5

#: Makes the patched activation from the one in the run; None: what it did in place.
Edit = Callable[[Tensor], Tensor | None]


@dataclass(frozen=True)
class Patch:
    """One patch.

    Attributes:
        index: its place in the caller's list.
        hook: where it stands.
        start: the first position that it changes; 0 where that is not known.
        edit: called with the first position that runs; gives what makes the patched activation.
        changed: the positions that it changes; None where they are not known.
        basis: the point in a basis whose activation is patched, where `hook` is one that shows what it stands on.
    """

    index: int
    hook: HookPoint
    start: int
    edit: Callable[[int], Edit]
    changed: list[int] | None = None
    basis: HookPoint | None = None

    @property
    def layer(self) -> int:
        """The layer of the patch."""
        return self.hook.point.depth


# ----------------------------------------------------------------------------------------------------------------------
# What the corrupted run leaves for the patched ones: the stream of each layer, and keys and values.
# ----------------------------------------------------------------------------------------------------------------------


class CorruptedRun:
    """One run of the corrupted prompts, and what later runs take from it.

    Args:
        model: the bridge.
        prompts: the tokens, ``[batch, pos]``, and what else the model is given, by name.
        layers: the layers at which patched runs will start, from 0.
        keep: hook points whose activations are wanted.

    Attributes:
        logits: ``[batch, pos, d_vocab]``.
        streams: the residual stream before each layer from the lowest of these on, ``[batch, pos, d_model]``.
        kept: the wanted activations, by name.
        handed_on: where the next block is given the same that a block leaves: the names of these two hook points.
        positions: whether going from layer to layer gives these logits again for runs that start behind the first
            positions.
    """

    def __init__(
        self,
        model: TransformerBridge,
        prompts: Mapping[str, Any],
        layers: Sequence[int],
        keep: Sequence[str] = (),
    ) -> None:
        self.model = model
        self.batch, self.length = prompts["input_ids"].shape
        self.of_rows = {name: prompts[name] for name in OF_ROWS if name in prompts}
        self._tokens = prompts["input_ids"] if gives_blocks_tokens(model.core) else None
        first, n_layers = min(layers, default=0), model.cfg.n_layers
        names = {layer: f"blocks.{layer}.hook_resid_pre" for layer in range(first, n_layers)}
        self._streams_known = all(name in model.hook_dict for name in names.values())
        self.streams: dict[int, Tensor] = {}
        self.kept: dict[str, Tensor] = {}
        self.handed_on: dict[str, str] = {}
        ends = {f"blocks.{layer}.hook_resid_post": names.get(layer + 1) for layer in layers}
        pairs = {end: after for end, after in ends.items() if after in model.hook_dict and end in model.hook_dict}
        wanted = dict.fromkeys([*(names.values() if self._streams_known else ()), *pairs, *keep])
        options: dict[str, Any] = {}
        # Of images and the like no one run tells which positions they change the masks of: no keys and values then.
        # And what reads from left to right alone goes on from keys and values of earlier tokens.
        causal = model.cfg.attention_dir == "causal" and not model.core.config.is_encoder_decoder
        may_cache = self.length > 1 and causal and gives_cache(model.core)
        caching = may_cache and prompts.keys() <= {"input_ids", *OF_ROWS}
        if caching:
            options["return_type"] = "logits_and_cache"
        if wanted:
            output, cache = model.run_with_cache(prompts, names_filter=list(wanted), **options)
            self.kept = {name: cache[name] for name in keep}
            if self._streams_known:
                self.streams = {layer: cache[name] for layer, name in names.items()}
                self.handed_on = {end: after for end, after in pairs.items() if _same(cache[end], cache[after])}
        else:
            output = model(prompts, **options)
        self.logits: Float[Tensor, "batch pos d_vocab"] = output[0] if caching else output
        self._past: DynamicCache | None = _plain_cache(output[1], self.length) if caching else None
        #: A classifier has one row of scores for each prompt: no part of it is of some positions.
        self.by_position = self.logits.ndim == 3 and self.logits.shape[:2] == (self.batch, self.length)
        self._streams_known = self._streams_known and self.by_position
        self.positions = self._streams_known and self._past is not None and self._reproduces_logits(self.length // 2)

    @cached_property
    def steps(self) -> bool:
        """Whether going from layer to layer gives these logits again for runs of all positions; tried when asked."""
        return self._streams_known and self._reproduces_logits(0)

    def _reproduces_logits(self, start: int) -> bool:
        """Whether each layer of the corrupted run alone, from its stream, gives the next, and the last one the logits.

        The last layer comes first, so that a layer that waits for what an earlier one leaves it does not find that.
        """
        n_layers = self.model.cfg.n_layers
        right = self.logits[:, start:]
        for layer in sorted(self.streams, reverse=True):
            options = self.options(layer, layer + 1, 1, start)
            stream = self.streams[layer][:, start:]
            found = self.model(stream, start_at_layer=layer, stop_at_layer=layer + 1, **options)
            if layer < n_layers - 1:
                same = close(found, right)
            else:  # logits of some positions after the other: they are the largest of all
                width = max(1, MOST_LOGITS // (self.batch * self.logits.shape[-1]))
                parts = zip(found.split(width, 1), right.split(width, 1), strict=False)
                same = found.shape[1] == right.shape[1] and all(close(self.logits_of(x), y) for x, y in parts)
            if not same:
                return False
            right = stream
        return True

    @cached_property
    def ends_early(self) -> bool:
        """Whether the last block at the last position alone gives these logits again; tried when asked."""
        last, layer = self.length - 1, self.model.cfg.n_layers - 1
        if not self._streams_known or self._past is None or len(self._past.layers) != layer + 1:
            return False
        found = self.last_block(self.streams[layer], 0, last)
        return found.shape[1] == 1 and close(self.logits_of(found), self.logits[:, last:])

    def last_block(
        self, rows: Float[Tensor, "rows pos d_model"], start: int, begin: int
    ) -> Float[Tensor, "rows later d_model"]:
        """The stream after the last block at some positions alone: of those before, it makes keys and values, no more.

        Args:
            rows: the stream before the block.
            start: the position of their first column.
            begin: the first column that is wanted.
        """
        layer, repeats = self.model.cfg.n_layers - 1, len(rows) // self.batch
        options = self.options(layer, layer + 1, repeats, start)
        if begin:
            before = {name: value for name, value in options.items() if name != "past_key_values"}
            if "input_ids" in before:
                before["input_ids"] = before["input_ids"][:, :begin]
                options["input_ids"] = options["input_ids"][:, begin:]
            if "attention_mask" in before:
                before["attention_mask"] = before["attention_mask"][:, : start + begin]
            keys = _KeysAlone(self._prefix(range(layer, layer + 1), repeats, start))
            self.model(rows[:, :begin], start_at_layer=layer, stop_at_layer=layer + 1, past_key_values=keys, **before)
            cache = options["past_key_values"] = self._prefix(range(0), repeats, start + begin)
            cache.layers[layer] = keys.layers[layer]
        return self.model(rows[:, begin:], start_at_layer=layer, stop_at_layer=layer + 1, **options)

    def logits_of(self, stream: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_vocab"]:
        """What follows the blocks, at these positions.

        Args:
            stream: the residual stream after the last block.
        """
        return self.model(stream, start_at_layer=self.model.cfg.n_layers)

    def options(self, layer: int, stop: int, repeats: int, start: int) -> dict[str, Any]:
        """The arguments of a run of some layers from a position on: those of rows, and the keys and values before.

        Images and sound are in the streams already; whether anything else of them counts is tried.

        Args:
            layer, stop: the layers that run.
            repeats: how many times the prompts are in the batch.
            start: the first position that runs.
        """
        options = tiled(self.of_rows, repeats) | text_alone(self.model.core)
        if self._tokens is not None:
            options["input_ids"] = self._tokens[:, start:].repeat(repeats, 1)
        if start:
            options["past_key_values"] = self._prefix(range(layer, stop), repeats, start)
        return options

    def _prefix(self, layers: range, repeats: int, start: int) -> DynamicCache:
        """Keys and values of the first positions; only those of the layers that run are repeated."""
        assert self._past is not None
        several = len(self._past.layers) != self.model.cfg.n_layers  # attentions in a layer (LongCat)
        cache = copy.copy(self._past)
        cache.layers = []
        for index, layer in enumerate(self._past.layers):
            assert isinstance(layer, DynamicLayer) and layer.keys is not None and layer.values is not None
            new = copy.copy(layer)
            new.keys, new.values = layer.keys[:, :, :start], layer.values[:, :, :start]
            if several or index in layers:
                new.keys, new.values = (x.repeat(repeats, 1, 1, 1) for x in (new.keys, new.values))
            if isinstance(new, DynamicSlidingWindowLayer):
                new.cumulative_length = start
            cache.layers.append(new)
        return cache


class _KeysAlone(DynamicCache):
    """A cache that ends a run as soon as it has a layer's keys and values.

    Args:
        cache: where they go.
    """

    def __init__(self, cache: DynamicCache) -> None:
        self.__dict__.update(cache.__dict__)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        super().update(key_states, value_states, *args, **kwargs)
        raise StopRun(key_states)


def _same(one: Tensor, other: Tensor) -> bool:
    return one.device == other.device and torch.equal(one, other)


def _plain_cache(cache: Any, length: int) -> DynamicCache | None:
    """The cache, if it is the usual kind and holds every position."""
    if type(cache) is not DynamicCache:
        return None
    for layer in cache.layers:
        if not isinstance(layer, DynamicLayer) or type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            return None
        if layer.keys is None or layer.keys.ndim != 4 or layer.keys.shape[-2] != length:
            return None
    return cache


def may_start_later(model: TransformerBridge) -> bool:
    """Whether leaving out the layers below a patch changes nothing: no hooks, no dropout, and the model can do it.

    Args:
        model: the bridge.
    """
    if model.no_layer_runs or any(
        part.keys_of is not None for block in model.architecture.stack.every_block for part in block.attentions
    ):
        return False
    # Listeners of the bridge are behind torch hooks, too; those that do not are asked for one by one.
    if any(point.listeners for point in model.hook_dict.values()):
        return False
    return not any(
        module.training or module._forward_hooks or module._forward_pre_hooks
        for module in model.original_model.modules()
    )


# ----------------------------------------------------------------------------------------------------------------------
# The engine.
# ----------------------------------------------------------------------------------------------------------------------


class PatchedRuns:
    """The patched runs of some prompts.

    Args:
        model: the bridge.
        prompts: the tokens, ``[batch, pos]``, and what else the model is given, by name.
        hooks: where patches will stand, a hook point for each patch.
        keep: hook points whose activations in the unpatched run are wanted.
        together: how many patches may be one batch; ``"auto"``: as many as a quarter of the free memory holds, and as
            make runs faster (where hooks of the user may see batches, one).
        size: how many times as large as a stream a patched activation is, at most.
        max_bytes: about how much memory the patches of one batch may take in place of that quarter. A single patch is
            a batch at least.

    Attributes:
        corrupted: the unpatched run; None where it is not worth it, or nothing can be taken from it.
    """

    def __init__(
        self,
        model: TransformerBridge,
        prompts: Mapping[str, Any],
        hooks: Sequence[HookPoint],
        keep: Sequence[str] = (),
        together: int | Literal["auto"] = "auto",
        size: int = 1,
        max_bytes: int | None = None,
    ) -> None:
        self.max_bytes = max_bytes
        self.model, self.prompts, self.batch = model, prompts, len(prompts["input_ids"])
        self.together, self.size, self.n_layers = together, size, model.cfg.n_layers
        self.corrupted: CorruptedRun | None = None
        each = list(dict.fromkeys(hooks))
        reads = read_by(each)
        #: The hook points in a basis that makes something else of a row, or a position, where others are about.
        self.mixing: set[HookPoint] = set()
        self._moving: set[HookPoint] = set()
        seen: Mapping[str, Tensor] = {}
        if len(hooks) >= WORTHWHILE and may_start_later(model):
            layers = [hook.point.depth for hook in each if hook.point.stack == "blocks"]
            self.corrupted = CorruptedRun(model, prompts, layers, [*keep, *reads.values()])
            seen = self.corrupted.kept
        elif reads and together not in ("auto", 1):
            names = list(dict.fromkeys(reads.values()))
            _, seen = model.run_with_cache(prompts, names_filter=names)
        if seen:
            with torch.no_grad():
                self.mixing = {hook for hook, name in reads.items() if not by_row(hook, seen[name])}
                self._moving = {hook for hook, name in reads.items() if not by_position(hook, seen[name])}
        self._batched = all(hook.point.axes.startswith("batch") and hook.point.stack == "blocks" for hook in each)

    def logits(self, patches: Sequence[Patch], joined: bool = True) -> Iterator[tuple[Patch, Tensor]]:
        """Each patch and its logits ``[batch, pos, d_vocab]``, in the order of the runs.

        Args:
            patches: the patches.
            joined: whether patches may join the runs of others. The logits of those have no gradient.

        Raises:
            ValueError: several are to be one batch at a point without a batch axis.
        """
        run = self.corrupted
        if run is not None and run.by_position and joined and self._batched and not self.mixing:
            known = [self._where_known(patch, run) for patch in patches]
            # Where each patch leaves the first positions alone, no run has all of them.
            if not starts_at_first(known, run.length) or run.steps:
                return self._joined(known, run)
        return self._apart(patches)

    def _where_known(self, patch: Patch, run: CorruptedRun) -> Patch:
        """A patch of which nothing is claimed that does not hold in this run."""
        if patch.hook in self._moving:
            return replace(patch, start=0, changed=None)
        return patch if run.positions else replace(patch, start=0)

    def _joined(self, patches: Sequence[Patch], run: CorruptedRun) -> Iterator[tuple[Patch, LazyLogits]]:
        patches = [self._later(self._below_basis(patch), run) for patch in patches]
        for start, group in groups(patches, run.length, run.batch, self.n_layers):
            group.sort(key=lambda patch: (patch.layer, patch.hook.order, patch.basis is not None, patch.index))
            for some in _batches(group, self._most(run, run.length - start), self.n_layers - 1):
                stop = self._stop(some, run)
                ends = _Ends(run, self._through(some, run, start, stop), start, stop < self.n_layers)
                for number, patch in enumerate(some):
                    yield patch, ends.logits(number)

    def _apart(self, patches: Sequence[Patch]) -> Iterator[tuple[Patch, Tensor]]:
        """Each patch by a run through all positions, from its layer on where that was tried."""
        together = 1 if self.together == "auto" or self.mixing else self.together
        later = self.corrupted is not None and self.corrupted.steps
        for hook, group in itertools.groupby(patches, key=lambda patch: patch.hook):
            some = list(group)
            for at in range(0, len(some), together):
                part = some[at : at + together]
                given: Any = tiled(self.prompts, len(part))
                options: dict[str, Any] = {}
                if later and self.corrupted is not None and hook.point.depth > 0 and hook.point.stack == "blocks":
                    layer = hook.point.depth
                    given = self.corrupted.streams[layer].repeat(len(part), 1, 1)
                    options = {**self.corrupted.options(layer, self.n_layers, len(part), 0), "start_at_layer": layer}
                hooked = _apart([patch.edit(0) for patch in part], self.batch)
                logits = self.model.run_with_hooks(given, fwd_hooks=[(hook, hooked)], **options)
                yield from zip(part, logits.split(self.batch), strict=True)

    def _most(self, run: CorruptedRun, length: int) -> int:
        """How many patches may be one batch."""
        if self.together != "auto":
            return self.together
        size = run.logits.element_size()
        tokens = tokens_per_run(self.model.cfg, run.logits.device, run.length, size, self.max_bytes)
        return max(1, tokens // (run.batch * length * self.size))

    def _later(self, patch: Patch, run: CorruptedRun) -> Patch:
        """A patch of what a block leaves as one of what the next block is given: this block need not run."""
        after = run.handed_on.get(patch.hook.name)
        return patch if after is None else replace(patch, hook=self.model.hook_dict[after])

    def _below_basis(self, patch: Patch) -> Patch:
        """A patch in a basis as one of the point that the basis stands on, where that is the same.

        All patches that join at a layer begin with the same activation: there it is encoded once, not for each.
        """
        view, hooks = patch.hook.view, self.model.hook_dict
        if not isinstance(view, InBasis) or patch.hook.point.linked:
            return patch
        if not view.edits_alone or patch.hook in self._moving:
            return patch
        base = hooks[patch.hook.name.rpartition(".")[0]]
        own = [hook for hook in hooks.values() if hook.name.startswith(f"{base.name}.")]
        if isinstance(base.view, InBasis) or any(hook.listeners for hook in own):
            return patch
        return replace(patch, hook=base, basis=patch.hook)

    def _stop(self, patches: Sequence[Patch], run: CorruptedRun) -> int:
        """The layer before which patches are all made: the last block is then run where logits are looked at."""
        early = all(patch.layer < self.n_layers - 1 and not patch.hook.point.linked for patch in patches)
        return self.n_layers - 1 if early and run.ends_early else self.n_layers

    def _through(
        self, patches: Sequence[Patch], run: CorruptedRun, start: int, end: int
    ) -> Float[Tensor, "rows pos d_model"]:
        """The residual stream before a layer, patch by patch. The patches are sorted by layer."""
        rows: Tensor | None = None
        done = 0
        while done < len(patches):
            layer = patches[done].layer
            joining = [patch for patch in patches[done:] if patch.layer == layer]
            done += len(joining)
            stop = patches[done].layer if done < len(patches) else end
            fresh = run.streams[layer][:, start:].repeat(len(joining), 1, 1)
            before = 0 if rows is None else len(rows)
            rows = fresh if rows is None else torch.cat([rows, fresh])
            hooks = []
            for (hook, basis), group in itertools.groupby(joining, key=lambda patch: (patch.hook, patch.basis)):
                some = list(group)
                if basis is None:
                    edits = [patch.edit(start) for patch in some]
                    hooks.append((hook, _patching(edits, before, run.batch, len(rows))))
                else:
                    hooks.append((hook, _patching_features(basis, some, start, before, run.batch)))
                before += run.batch * len(some)
            rows = self.model.run_with_hooks(
                rows,
                fwd_hooks=hooks,
                start_at_layer=layer,
                stop_at_layer=stop,
                **run.options(layer, stop, len(rows) // run.batch, start),
            )
        assert rows is not None
        return rows


# ----------------------------------------------------------------------------------------------------------------------
# Which patches go together.
# ----------------------------------------------------------------------------------------------------------------------


def groups(patches: Sequence[Patch], length: int, batch: int, n_layers: int) -> list[tuple[int, list[Patch]]]:
    """Patches that go together, each group with the position that it starts at.

    Fewer groups are fewer runs, more groups start later: the cut that costs least by `RUN_COST`.

    Args:
        patches: the patches.
        length: how many positions there are.
        batch: how many prompts.
        n_layers: how many layers.

    Example:
        >>> from bridge.patching.runs import groups
        >>> groups([], 10, 1, 4)
        []
    """
    width = -(-length // MOST_STARTS)
    by_start: dict[int, list[Patch]] = {}
    for patch in patches:
        by_start.setdefault(patch.start // width * width, []).append(patch)
    starts = sorted(by_start)
    work = [sum(n_layers - patch.layer for patch in by_start[start]) * batch for start in starts]
    fixed = RUN_COST * (n_layers - min((patch.layer for patch in patches), default=0))
    # best[i]: the least cost of everything from the i-th start on, and where its first group ends.
    best: list[tuple[float, int]] = [(0.0, 0)] * (len(starts) + 1)
    for first in range(len(starts) - 1, -1, -1):
        options, together = [], 0
        for end in range(first + 1, len(starts) + 1):
            together += work[end - 1]
            options.append((fixed + together * (length - starts[first]) + best[end][0], end))
        best[first] = min(options)
    found, first = [], 0
    while first < len(starts):
        end = best[first][1]
        found.append((starts[first], [patch for start in starts[first:end] for patch in by_start[start]]))
        first = end
    return found


def starts_at_first(patches: Sequence[Patch], length: int) -> bool:
    """Whether a group of these patches starts at the first position.

    Args:
        patches: the patches.
        length: how many positions there are.

    Example:
        >>> from bridge.patching.runs import starts_at_first
        >>> starts_at_first([], 10)
        False
    """
    return any(patch.start < -(-length // MOST_STARTS) for patch in patches)


def _batches(patches: Sequence[Patch], most: int, last: int) -> Iterator[Sequence[Patch]]:
    """The patches that run together.

    Others join them at later layers, where a new run begins: what hook points in later layers take over from an earlier
    one would be lost there. Those of the last layer go through all of it, the others do not.

    Args:
        patches: the patches, sorted by layer.
        most: how many may run together.
        last: the last layer.
    """
    alone = any(patch.hook.point.linked for patch in patches)
    for _, group in itertools.groupby(patches, key=lambda patch: patch.layer if alone else patch.layer == last):
        part = list(group)
        for at in range(0, len(part), most):
            yield part[at : at + most]


def _apart(edits: Sequence[Edit], batch: int) -> Callable[..., Tensor]:
    """A hook that gives each patch its rows, and leaves alone what it was given where a gradient may be asked for."""

    def put(activation: Tensor, hook: HookPoint) -> Tensor:
        if 0 in activation.stride():  # each head's view of one stream
            activation = activation.clone()
        if len(edits) == 1:
            patched = edits[0](activation)
            return activation if patched is None else patched
        if len(activation) != batch * len(edits):
            raise ValueError(_no_batch_axis(hook))
        parts = activation.split(batch)
        made = [edit(part) for edit, part in zip(edits, parts, strict=True)]
        return torch.cat([part if new is None else new for new, part in zip(made, parts, strict=True)])

    return put


def _no_batch_axis(hook: HookPoint) -> str:
    return f"{hook.name} has no batch axis ({hook.point.axes}): use patches_per_run=1"


def _patching(edits: Sequence[Edit], before: int, batch: int, rows: int) -> Callable[..., Tensor]:
    """A hook that gives each patch its own rows of the batch, from `before` on."""

    def put(activation: Tensor, hook: HookPoint) -> Tensor:
        if len(activation) != rows:
            raise ValueError(_no_batch_axis(hook))
        if 0 in activation.stride():  # each head's view of one stream
            activation = activation.clone()
        parts = activation[before : before + batch * len(edits)].split(batch)
        for part, function in zip(parts, edits, strict=True):
            made = function(part)
            if made is not None and made is not part:
                part.copy_(made)
        return activation

    return put


def _patching_features(
    basis: HookPoint, patches: Sequence[Patch], start: int, before: int, batch: int
) -> Callable[..., Tensor]:
    """A hook that patches the features of what it sees.

    Args:
        basis: the point in the basis.
        patches: the patches.
        start: the first position that runs.
        before, batch: as for `_patching`.
    """
    view = basis.view
    assert isinstance(view, InBasis)

    def put(activation: Tensor, hook: HookPoint) -> Tensor:
        own = activation[before : before + batch]
        old = dense(view.encode(own))
        kept = view.decoded(old, own)
        new = activation.clone()
        places, rows = [], []
        for number, patch in enumerate(patches):
            features = old.clone()
            made = patch.edit(start)(features)
            features = features if made is None else made
            if patch.changed is None:
                where = (features != old).flatten(2).any(-1)
            else:
                where = torch.zeros(own.shape[:2], dtype=torch.bool, device=own.device)
                where[:, [position - start for position in patch.changed]] = True
            changed = where.nonzero(as_tuple=True)
            places.append((changed[0] + before + number * batch, changed[0], changed[1]))
            rows.append(features[changed])
        into, row, position = (torch.cat(parts) for parts in zip(*places, strict=True))
        if len(into):  # only what changed is decoded, in rows of as many positions as there are
            n, length = len(into), own.shape[1]
            filler = old.new_zeros(-n % length, *old.shape[2:])
            packed = torch.cat([*rows, filler]).unflatten(0, (-1, length))
            found = view.decoded(packed, own[:1].expand(len(packed), *own.shape[1:])).flatten(0, 1)[:n]
            new[into, position] += found - kept[row, position]
        return new

    return put


class _Ends:
    """The ends of patched runs, and their logits where they are asked for.

    Args:
        run: the corrupted run.
        rows: the residual stream after the last block, ``[patch * batch, pos, d_model]``, or before it.
        start: the position that the rows start at.
        before_last: whether it is before it.
    """

    def __init__(self, run: CorruptedRun, rows: Tensor, start: int, before_last: bool) -> None:
        self.run, self.rows, self.start = run, rows, start
        self._begin = rows.shape[1] if before_last else 0
        self._after = rows
        self._found: dict[tuple[int, ...], tuple[int, Tensor]] = {}

    def logits(self, number: int) -> LazyLogits:
        """The logits of one patch."""
        return lazy(partial(self._at, number), self.run.logits.shape, self.run.logits)

    def _at(self, number: int, positions: list[int]) -> Tensor:
        later = [place for place, position in enumerate(positions) if position >= self.start]
        wanted = tuple(positions[place] - self.start for place in later)
        if not wanted:
            return self.run.logits[:, positions]
        new = self._new(number, wanted)
        if len(wanted) == len(positions):
            return new.clone()  # what a metric does to its logits is its own
        whole = self.run.logits[:, positions]
        whole[:, later] = new
        return whole

    def _new(self, number: int, wanted: tuple[int, ...]) -> Tensor:
        """One patch's logits at some of the positions that ran, computed with those of neighbouring patches."""
        batch, d_vocab = self.run.batch, self.run.logits.shape[-1]
        patches = len(self.rows) // batch
        ends = self._ends(min(wanted))
        columns = [column - self._begin for column in wanted]
        if wanted not in self._found and len(self._found) == MOST_KEPT:
            return self.run.logits_of(ends[number * batch : (number + 1) * batch, columns])
        most = max(1, MOST_LOGITS // (batch * len(wanted) * d_vocab))
        together = -(-patches // -(-patches // most))  # parts of one size
        part, within = divmod(number, together)
        if self._found.get(wanted, (-1,))[0] != part:
            rows = ends[part * together * batch : (part + 1) * together * batch]
            self._found[wanted] = part, self.run.logits_of(rows[:, columns])
        return self._found[wanted][1][within * batch : (within + 1) * batch]

    def _ends(self, begin: int) -> Tensor:
        """The stream after the last block, from this column on or an earlier one, which is then `_begin`."""
        if begin < self._begin:
            # A metric that looks farther to the front once may do so again: then it is all of them.
            self._begin = begin if self._begin == self.rows.shape[1] else 0
            self._after = self.run.last_block(self.rows, self.start, self._begin)
        return self._after


# ----------------------------------------------------------------------------------------------------------------------
# How much one run may hold at once.
# ----------------------------------------------------------------------------------------------------------------------


#: What a run may take of the memory that is free.
SHARE = 0.25
#: Tokens beyond which a larger batch was not faster on a processor (12-layer GPT-2), and on other devices.
MOST_TOKENS, MOST_TOKENS_ELSEWHERE = 4096, 65536


def tokens_per_run(
    cfg: ModelConfig, device: torch.device, length: int, itemsize: int, max_bytes: int | None = None
) -> int:
    """How many tokens one run may have, all prompts of its batch together.

    Args:
        cfg: the facts about the model.
        device: where it is.
        length: how many tokens a prompt has.
        itemsize: bytes of one number.
        max_bytes: how much memory it may take; None: `SHARE` of what is free.

    Example:
        >>> import torch
        >>> from bridge import TransformerBridge
        >>> from bridge.patching.runs import tokens_per_run
        >>> tokens_per_run(TransformerBridge.boot_embedded().cfg, torch.device("cpu"), 15, 4) > 0
        True
    """
    # What one block holds of a token at most: streams, projections, the MLP's inside, scores twice.
    numbers = 16 * cfg.d_model + 6 * (cfg.d_mlp or 0) + 3 * cfg.n_heads * length
    most = MOST_TOKENS if device.type == "cpu" else MOST_TOKENS_ELSEWHERE
    room = SHARE * free_memory(device) if max_bytes is None else max_bytes
    return max(1, min(most, int(room / (numbers * itemsize))))
