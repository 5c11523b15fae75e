"""Patched runs: many runs of the same prompts, each with one activation patched, in few passes.

Input: prompts (usually corrupted ones) and `Patch`es. Each patch names its hook point and computes
the patched activation from the original one. Output: each patch with its logits, equal to those of
a complete run up to the rounding of another batch size. Activation patching
(`bridge.patching.patching`) measures metrics of these logits, and exact edge effects of circuits
(`bridge.circuits`) are patches of component inputs.

The mechanism, in order:

1. `CorruptedRun` runs the prompts once. It keeps the residual stream before each layer, keys and
   values, and the activations that the patches compare with. It checks whether resuming from these
   reproduces the logits.
2. A patch in layer l changes nothing below l, and in a causal model a patch at position p changes
   nothing before p. `groups` therefore groups patches by starting position, with the cheapest cut.
3. `PatchedRuns.logits` takes each group through the layers as one batch. A patch joins the batch at
   its layer, starting from the corrupted stream; keys and values before the first position are
   those of the corrupted run.
4. A patch in a basis is applied at the point that the basis encodes: the activation that all
   patches there share is encoded once.
5. The last block runs, and logits are computed, only where the metric reads them (`LazyLogits`).
6. If sharing could change the results, each patch gets a run of its own, which starts at the
   patch's layer if that was verified. This is the case with user hooks or dropout (each run has its
   own), a point without a batch axis, a basis that mixes the rows of a batch, a metric that needs
   gradients, or too few patches to pay for the first run.

It raises an error for several patches at a point without a batch axis. It does not depend on
setters, metrics, edges or results.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Literal, TypeVar

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
from bridge.modules import close
from bridge.patching.lazy_logits import LazyLogits, lazy
from bridge.rows import OF_ROWS, tiled
from bridge.run.layer_range import StopRun
from bridge.run.recorder import free_memory

T = TypeVar("T")

#: The fixed cost of a run for each layer, in tokens of one layer: mostly reading the weights. (A
#: sweep of 12-layer GPT-2 on two cores takes the same time with 60 as with 160, 3 % more with 40, 6
#: % more with 20.)
RUN_COST = 80
#: The largest number of logits that are computed for all patches at once.
MOST_LOGITS = 2**25
#: The number of position sets whose logits are cached for neighbouring patches; a metric that reads
#: more sets recomputes them.
MOST_KEPT = 4
#: The largest number of distinct starting positions.
MOST_STARTS = 128

#: With fewer patches, each is a complete run: joined runs cost about two and a half runs in
#: advance.
WORTHWHILE = 5

#: Returns the patched activation for the one in the run; None if it changed that in place.
Edit = Callable[[Tensor], Tensor | None]


@dataclass(frozen=True)
class Patch:
    """A patch of one activation.

    Attributes:
        index: its place in the caller's list.
        hook: the patched hook point.
        start: the first changed position; 0 if it is not known.
        edit: called with the first position that runs; returns the function that patches the
            activation.
        changed: the changed positions; None if they are not known.
        basis: the point in a basis whose activation is patched, if `hook` is the point that the
            basis encodes.
    """

    index: int
    hook: HookPoint
    start: int
    edit: Callable[[int], Edit]
    changed: list[int] | None = None
    basis: HookPoint | None = None

    @property
    def layer(self) -> int:
        """Return the layer of the patch."""
        return self.hook.point.depth


# --------------------------------------------------------------------------------------------------
# State that patched runs reuse from the corrupted run: the stream of each layer, keys and values.
# --------------------------------------------------------------------------------------------------


class CorruptedRun:
    """A run of the corrupted prompts, with the activations that later runs reuse.

    Args:
        model: the bridge.
        prompts: the tokens, ``[batch, pos]``, and the other model inputs, by name.
        layers: the layers at which patched runs will start, from 0.
        keep: hook points whose activations are kept.

    Attributes:
        logits: ``[batch, pos, d_vocab]``.
        streams: the residual stream before each layer, from the lowest of these layers on,
            ``[batch, pos, d_model]``.
        kept: the kept activations, by name.
        handed_on: the names of a block's output and of the next block's input, if both are the same
            tensor.
        positions: whether running layer by layer reproduces the logits for runs that start after
            the first positions.
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
        names, pairs = self._stream_names(layers)
        logits, cache = self._run(prompts, [*names.values(), *pairs, *keep])
        self.logits: Float[Tensor, "batch pos d_vocab"] = logits
        self.kept = {name: cache[name] for name in keep}
        self.streams = {layer: cache[name] for layer, name in names.items()}
        self.handed_on: dict[str, str] = {}
        for end, after in pairs.items():
            if _same(cache[end], cache[after]):
                self.handed_on[end] = after
        #: A classifier has one row of scores per prompt, which cannot be computed for some
        #: positions.
        self.by_position = logits.ndim == 3 and logits.shape[:2] == (self.batch, self.length)
        self._streams_known = bool(self.streams) and self.by_position
        self.positions = self._continues() and self._reproduces_logits(self.length // 2)

    def _run(
        self, prompts: Mapping[str, Any], names: Sequence[str]
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Run the prompts; return logits and activations, and keep the keys and values."""
        options: dict[str, Any] = {}
        if self._may_cache(prompts):
            options["return_type"] = "logits_and_cache"
        cache: Mapping[str, Tensor] = {}
        if read := list(dict.fromkeys(names)):
            output, cache = self.model.run_with_cache(prompts, names_filter=read, **options)
        else:
            output = self.model(prompts, **options)
        logits, past = output if options else (output, None)
        self._past = _plain_cache(past, self.length)
        return logits, cache

    def _stream_names(self, layers: Sequence[int]) -> tuple[dict[int, str], dict[str, str]]:
        """Return the hook points of the streams, and for the outputs of some layers the input of
        the next one; nothing if a layer has no such hook point.
        """
        known, first = self.model.hook_dict, min(layers, default=0)
        n_layers = self.model.cfg.n_layers
        names = {layer: f"blocks.{layer}.hook_resid_pre" for layer in range(first, n_layers)}
        if any(name not in known for name in names.values()):
            return {}, {}
        pairs = {}
        for layer in layers:
            end = f"blocks.{layer}.hook_resid_post"
            if end in known and layer + 1 in names:
                pairs[end] = names[layer + 1]
        return names, pairs

    def _may_cache(self, prompts: Mapping[str, Any]) -> bool:
        """Tell whether keys and values of the first positions can be reused.

        Only a causal model can continue from the keys and values of earlier tokens. A single run
        does not show at which positions images change the masks.
        """
        model = self.model
        causal = model.cfg.attention_dir == "causal" and not model.core.config.is_encoder_decoder
        tokens_alone = prompts.keys() <= {"input_ids", *OF_ROWS}
        return self.length > 1 and causal and gives_cache(model.core) and tokens_alone

    def _continues(self) -> bool:
        """Tell whether there are streams, and keys and values, to continue from."""
        return self._streams_known and self._past is not None

    @cached_property
    def steps(self) -> bool:
        """Tell whether running layer by layer over all positions reproduces the logits; checked on
        first access.
        """
        return self._streams_known and self._reproduces_logits(0)

    def _reproduces_logits(self, start: int) -> bool:
        """Check that each layer, run alone from its stream, gives the next layer's stream, and the
        last one the logits.

        The last layer is checked first, so that a layer that depends on state left by an earlier
        layer does not find that state.
        """
        right = self.logits[:, start:]
        compare: Callable[[Tensor, Tensor], bool] = self._gives_logits  # for the last layer
        for layer in sorted(self.streams, reverse=True):
            options = self.options(layer, layer + 1, 1, start)
            stream = self.streams[layer][:, start:]
            output = self.model(stream, start_at_layer=layer, stop_at_layer=layer + 1, **options)
            if not compare(output, right):
                return False
            right, compare = stream, close
        return True

    def _gives_logits(self, end: Tensor, right: Tensor) -> bool:
        """Tell whether a final stream gives these logits; in chunks, as logits need the most
        memory.
        """
        width = max(1, MOST_LOGITS // (self.batch * right.shape[-1]))
        chunks = zip(end.split(width, 1), right.split(width, 1), strict=False)
        same_length = end.shape[1] == right.shape[1]
        return same_length and all(close(self.logits_of(part), logits) for part, logits in chunks)

    @cached_property
    def ends_early(self) -> bool:
        """Tell whether running the last block at the last position alone reproduces the logits;
        checked on first access.
        """
        last, layer = self.length - 1, self.model.cfg.n_layers - 1
        if not self._streams_known or self._past is None or len(self._past.layers) != layer + 1:
            return False
        end = self.last_block(self.streams[layer], 0, last)
        return end.shape[1] == 1 and close(self.logits_of(end), self.logits[:, last:])

    def last_block(
        self, rows: Float[Tensor, "rows pos d_model"], start: int, begin: int
    ) -> Float[Tensor, "rows later d_model"]:
        """Return the stream after the last block at some positions; for earlier ones only keys and
        values are computed.

        Args:
            rows: the stream before the block.
            start: the position of their first column.
            begin: the first requested column.
        """
        layer, repeats = self.model.cfg.n_layers - 1, len(rows) // self.batch
        options = self.options(layer, layer + 1, repeats, start)
        run = partial(self.model, start_at_layer=layer, stop_at_layer=layer + 1)
        if begin:
            before = dict(options)
            if "input_ids" in options:
                before["input_ids"] = options["input_ids"][:, :begin]
                options["input_ids"] = options["input_ids"][:, begin:]
            if "attention_mask" in options:
                before["attention_mask"] = options["attention_mask"][:, : start + begin]
            keys = _KeysAlone(self._prefix(range(layer, layer + 1), repeats, start))
            run(rows[:, :begin], **(before | {"past_key_values": keys}))
            cache = options["past_key_values"] = self._prefix(range(0), repeats, start + begin)
            cache.layers[layer] = keys.layers[layer]
        return run(rows[:, begin:], **options)

    def logits_of(
        self, stream: Float[Tensor, "batch pos d_model"]
    ) -> Float[Tensor, "batch pos d_vocab"]:
        """Return the logits computed from the final stream at these positions.

        Args:
            stream: the residual stream after the last block.
        """
        return self.model(stream, start_at_layer=self.model.cfg.n_layers)

    def options(self, layer: int, stop: int, repeats: int, start: int) -> dict[str, Any]:
        """Return the arguments of a run of some layers from a position on: row arguments, and the
        earlier keys and values.

        The streams already contain images and sound; whether the layers need any other part of them
        is tested.

        Args:
            layer, stop: the layers that run.
            repeats: the number of times that the prompts are repeated in the batch.
            start: the first position that runs.
        """
        options = tiled(self.of_rows, repeats) | text_alone(self.model.core)
        if self._tokens is not None:
            options["input_ids"] = self._tokens[:, start:].repeat(repeats, 1)
        if start:
            options["past_key_values"] = self._prefix(range(layer, stop), repeats, start)
        return options

    def _prefix(self, layers: range, repeats: int, start: int) -> DynamicCache:
        """Return the keys and values of the first positions; only those of the layers that run are
        repeated.
        """
        assert self._past is not None
        # A layer may have several attentions (LongCat).
        several = len(self._past.layers) != self.model.cfg.n_layers
        cache = copy.copy(self._past)
        cache.layers = []
        for index, layer in enumerate(self._past.layers):
            assert isinstance(layer, DynamicLayer)
            assert layer.keys is not None and layer.values is not None
            new = copy.copy(layer)
            new.keys, new.values = layer.keys[:, :, :start], layer.values[:, :, :start]
            if several or index in layers:
                new.keys, new.values = (x.repeat(repeats, 1, 1, 1) for x in (new.keys, new.values))
            if isinstance(new, DynamicSlidingWindowLayer):
                new.cumulative_length = start
            cache.layers.append(new)
        return cache


class _KeysAlone(DynamicCache):
    """A cache that ends a run as soon as it holds a layer's keys and values.

    Args:
        cache: the cache that receives the keys and values.
    """

    def __init__(self, cache: DynamicCache) -> None:
        self.__dict__.update(cache.__dict__)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        super().update(key_states, value_states, *args, **kwargs)
        raise StopRun(key_states)


def _same(one: Tensor, other: Tensor) -> bool:
    return one.device == other.device and torch.equal(one, other)


def _plain_cache(cache: Any, length: int) -> DynamicCache | None:
    """Return the cache if it is of the usual kind and holds every position, else None."""
    if type(cache) is not DynamicCache:
        return None
    for layer in cache.layers:
        known = type(layer) in (DynamicLayer, DynamicSlidingWindowLayer)
        if not known or not isinstance(layer, DynamicLayer):
            return None
        if layer.keys is None or layer.keys.ndim != 4 or layer.keys.shape[-2] != length:
            return None
    return cache


def may_start_later(model: TransformerBridge) -> bool:
    """Tell whether the layers below a patch can be skipped: no hooks, no dropout, and the model
    supports it.

    Args:
        model: the bridge.
    """
    blocks = model.architecture.stack.every_block
    parts = itertools.chain.from_iterable(block.attentions for block in blocks)
    if model.no_layer_runs or any(part.keys_of is not None for part in parts):
        return False
    # The bridge's own listeners use torch hooks, too; listeners without torch hooks are checked one
    # by one.
    if any(point.listeners for point in model.hook_dict.values()):
        return False
    return not any(
        module.training or module._forward_hooks or module._forward_pre_hooks
        for module in model.original_model.modules()
    )


# --------------------------------------------------------------------------------------------------
# The engine.
# --------------------------------------------------------------------------------------------------


class PatchedRuns:
    """The patched runs of some prompts.

    Args:
        model: the bridge.
        prompts: the tokens, ``[batch, pos]``, and the other model inputs, by name.
        hooks: the hook point of each patch.
        keep: hook points whose activations in the unpatched run are kept.
        together: the largest number of patches in one batch; ``"auto"``: as many as fit into a
            quarter of the free memory and make runs faster (one if user hooks may see batches).
        size: the largest size of a patched activation, relative to a stream.
        max_bytes: the approximate memory for the patches of one batch, instead of that quarter. A
            batch has at least one patch.

    Attributes:
        corrupted: the unpatched run; None if it does not pay off, or if nothing can be reused from
            it.
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
        points = list(dict.fromkeys(hooks))
        in_blocks = [hook for hook in points if hook.point.stack == "blocks"]
        batched = all(hook.point.axes.startswith("batch") for hook in points)
        self._batched = batched and len(in_blocks) == len(points)
        reads = read_by(points)
        activations: Mapping[str, Tensor] = {}
        if len(hooks) >= WORTHWHILE and may_start_later(model):
            layers = [hook.point.depth for hook in in_blocks]
            self.corrupted = CorruptedRun(model, prompts, layers, [*keep, *reads.values()])
            activations = self.corrupted.kept
        elif reads and together not in ("auto", 1):
            names = list(dict.fromkeys(reads.values()))
            _, activations = model.run_with_cache(prompts, names_filter=names)
        #: Hook points in a basis whose result for a row depends on the other rows.
        self.mixing: set[HookPoint] = set()
        #: The same for positions.
        self._moving: set[HookPoint] = set()
        if activations:
            self._find_mixing({hook: activations[name] for hook, name in reads.items()})

    @torch.no_grad()
    def _find_mixing(self, read: Mapping[HookPoint, Tensor]) -> None:
        """Find the bases that mix rows or positions, from the activations that they read."""
        self.mixing = {hook for hook, act in read.items() if not by_row(hook, act)}
        self._moving = {hook for hook, act in read.items() if not by_position(hook, act)}

    def logits(
        self, patches: Sequence[Patch], joined: bool = True
    ) -> Iterator[tuple[Patch, Tensor]]:
        """Yield each patch and its logits ``[batch, pos, d_vocab]``, in the order of the runs.

        Args:
            patches: the patches.
            joined: whether patches may share runs with others. Logits of shared runs have no
                gradient.

        Raises:
            ValueError: several patches share a batch at a point without a batch axis.
        """
        run = self.corrupted
        if run is not None and run.by_position and joined and self._batched and not self.mixing:
            known = [self._where_known(patch, run) for patch in patches]
            # If no patch changes the first positions, no run includes all positions.
            if not starts_at_first(known, run.length) or run.steps:
                return self._joined(known, run)
        return self._apart(patches)

    def _where_known(self, patch: Patch, run: CorruptedRun) -> Patch:
        """Return the patch; its changed positions are unknown where positions mix in this run."""
        if patch.hook in self._moving:
            return replace(patch, start=0, changed=None)
        return patch if run.positions else replace(patch, start=0)

    def _joined(
        self, patches: Sequence[Patch], run: CorruptedRun
    ) -> Iterator[tuple[Patch, LazyLogits]]:
        patches = [self._later(self._below_basis(patch), run) for patch in patches]
        for start, group in groups(patches, run.length, run.batch, self.n_layers):
            group.sort(key=_order)
            for some in _batches(group, self._most(run, run.length - start), self.n_layers - 1):
                stop = self._stop(some, run)
                rows = self._through(some, run, start, stop)
                ends = _Ends(run, rows, start, stop < self.n_layers)
                for number, patch in enumerate(some):
                    yield patch, ends.logits(number)

    def _apart(self, patches: Sequence[Patch]) -> Iterator[tuple[Patch, Tensor]]:
        """Yield each patch from a run of its own through all positions, from its layer on if that
        was verified.
        """
        together = 1 if self.together == "auto" or self.mixing else self.together
        later = self.corrupted if self.corrupted is not None and self.corrupted.steps else None
        for hook, group in itertools.groupby(patches, key=lambda patch: patch.hook):
            layer = hook.point.depth if hook.point.stack == "blocks" else 0
            for some in chunks(list(group), together):
                inputs: Any = tiled(self.prompts, len(some))
                options: dict[str, Any] = {}
                if later is not None and layer > 0:
                    inputs = later.streams[layer].repeat(len(some), 1, 1)
                    options = later.options(layer, self.n_layers, len(some), 0)
                    options["start_at_layer"] = layer
                patch_rows = _apart([patch.edit(0) for patch in some], self.batch)
                hooks = [(hook, patch_rows)]
                logits = self.model.run_with_hooks(inputs, fwd_hooks=hooks, **options)
                yield from zip(some, logits.split(self.batch), strict=True)

    def _most(self, run: CorruptedRun, length: int) -> int:
        """Return the largest number of patches in one batch."""
        if self.together != "auto":
            return self.together
        size = run.logits.element_size()
        tokens = tokens_per_run(self.model.cfg, run.logits.device, run.length, size, self.max_bytes)
        return max(1, tokens // (run.batch * length * self.size))

    def _later(self, patch: Patch, run: CorruptedRun) -> Patch:
        """Convert a patch of a block's output into one of the next block's input, so that this
        block is skipped.
        """
        after = run.handed_on.get(patch.hook.name)
        return patch if after is None else replace(patch, hook=self.model.hook_dict[after])

    def _below_basis(self, patch: Patch) -> Patch:
        """Convert a patch in a basis into a patch of the basis's underlying point, if both are
        equivalent.

        All patches that join at a layer start from the same activation, so it is encoded once
        instead of once per patch.
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
        """Return the layer by which all patches have joined; the last block then runs only where
        logits are read.
        """
        last = self.n_layers - 1
        early = all(patch.layer < last and not patch.hook.point.linked for patch in patches)
        return last if early and run.ends_early else self.n_layers

    def _through(
        self, patches: Sequence[Patch], run: CorruptedRun, start: int, end: int
    ) -> Float[Tensor, "rows pos d_model"]:
        """Return the residual stream before a layer, patch by patch. The patches are sorted by
        layer.
        """
        rows = run.logits.new_empty(0)  # no patch has joined yet
        by_layer = {
            layer: list(group)
            for layer, group in itertools.groupby(patches, key=lambda patch: patch.layer)
        }
        stops = [*by_layer, end][1:]
        for (layer, joining), stop in zip(by_layer.items(), stops, strict=True):
            before = len(rows)
            fresh = run.streams[layer][:, start:].repeat(len(joining), 1, 1)
            rows = torch.cat([rows, fresh]) if before else fresh
            hooks = _joint_hooks(joining, start, before, run.batch, len(rows))
            options = run.options(layer, stop, len(rows) // run.batch, start)
            options |= {"start_at_layer": layer, "stop_at_layer": stop}
            rows = self.model.run_with_hooks(rows, fwd_hooks=hooks, **options)
        return rows


# --------------------------------------------------------------------------------------------------
# Grouping of patches.
# --------------------------------------------------------------------------------------------------


def groups(
    patches: Sequence[Patch], length: int, batch: int, n_layers: int
) -> list[tuple[int, list[Patch]]]:
    """Group patches that run together; each group comes with its starting position.

    Fewer groups need fewer runs, but more groups start later. `RUN_COST` decides which cut costs
    least.

    Args:
        patches: the patches.
        length: the number of positions.
        batch: the number of prompts.
        n_layers: the number of layers.

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
    # best[i]: the minimal cost from the i-th start on, and the end of its first group.
    best: list[tuple[float, int]] = [(0.0, 0)] * (len(starts) + 1)
    for first in reversed(range(len(starts))):
        costs, together = [], 0
        for end in range(first + 1, len(starts) + 1):
            together += work[end - 1]
            costs.append((fixed + together * (length - starts[first]) + best[end][0], end))
        best[first] = min(costs)
    grouped, first = [], 0
    while first < len(starts):
        end = best[first][1]
        joined = itertools.chain.from_iterable(by_start[start] for start in starts[first:end])
        grouped.append((starts[first], list(joined)))
        first = end
    return grouped


def starts_at_first(patches: Sequence[Patch], length: int) -> bool:
    """Tell whether a group of these patches starts at the first position.

    Args:
        patches: the patches.
        length: the number of positions.

    Example:
        >>> from bridge.patching.runs import starts_at_first
        >>> starts_at_first([], 10)
        False
    """
    return any(patch.start < -(-length // MOST_STARTS) for patch in patches)


def _batches(patches: Sequence[Patch], most: int, last: int) -> Iterator[Sequence[Patch]]:
    """Yield the patches that run together.

    Patches join at later layers, where a new run begins, so state that later hook points take over
    from earlier ones would be lost there. Patches of the last layer run through all of it; other
    patches do not.

    Args:
        patches: the patches, sorted by layer.
        most: the largest number of patches that run together.
        last: the last layer.
    """
    alone = any(patch.hook.point.linked for patch in patches)

    def joins(patch: Patch) -> int:
        return patch.layer if alone else patch.layer == last

    for _, group in itertools.groupby(patches, key=joins):
        yield from chunks(list(group), most)


def chunks(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """Yield consecutive items, at most `size` at a time.

    Args:
        items: the items.
        size: the largest number of them.

    Example:
        >>> from bridge.patching.runs import chunks
        >>> list(chunks("abcde", 2))
        ['ab', 'cd', 'e']
    """
    for first in range(0, len(items), size):
        yield items[first : first + size]


def _order(patch: Patch) -> tuple[int, int, bool, int]:
    """Return the order of patches in a batch: by layer and hook point."""
    return patch.layer, patch.hook.order, patch.basis is not None, patch.index


def _joint_hooks(
    patches: Sequence[Patch], start: int, before: int, batch: int, rows: int
) -> list[tuple[HookPoint, Callable[..., Tensor]]]:
    """Return the hooks of patches that join at a layer, each with rows of its own.

    Args:
        patches: the patches, in the order of their rows.
        start: the first position that runs.
        before: the number of rows before theirs.
        batch: the number of prompts.
        rows: the number of all rows.
    """
    hooks: list[tuple[HookPoint, Callable[..., Tensor]]] = []
    grouped = itertools.groupby(patches, key=lambda patch: (patch.hook, patch.basis))
    for (hook, basis), group in grouped:
        some = list(group)
        if basis is None:
            put = _patching([patch.edit(start) for patch in some], before, batch, rows)
        else:
            put = _patching_features(basis, some, start, before, batch)
        hooks.append((hook, put))
        before += batch * len(some)
    return hooks


def _apart(edits: Sequence[Edit], batch: int) -> Callable[..., Tensor]:
    """Return a hook that gives each patch its own rows; it copies its input where gradients may be
    needed.
    """

    def put(activation: Tensor, hook: HookPoint) -> Tensor:
        if 0 in activation.stride():  # a broadcast view of one stream per head
            activation = activation.clone()
        if len(edits) == 1:
            patched = edits[0](activation)
            return activation if patched is None else patched
        if len(activation) != batch * len(edits):
            raise ValueError(_no_batch_axis(hook))
        rows = []
        for edit, part in zip(edits, activation.split(batch), strict=True):
            patched = edit(part)
            rows.append(part if patched is None else patched)
        return torch.cat(rows)

    return put


def _no_batch_axis(hook: HookPoint) -> str:
    return f"{hook.name} has no batch axis ({hook.point.axes}): use patches_per_run=1"


def _patching(edits: Sequence[Edit], before: int, batch: int, rows: int) -> Callable[..., Tensor]:
    """Return a hook that gives each patch its own rows of the batch, from `before` on."""

    def put(activation: Tensor, hook: HookPoint) -> Tensor:
        if len(activation) != rows:
            raise ValueError(_no_batch_axis(hook))
        if 0 in activation.stride():  # a broadcast view of one stream per head
            activation = activation.clone()
        parts = activation[before : before + batch * len(edits)].split(batch)
        for part, edit in zip(parts, edits, strict=True):
            patched = edit(part)
            if patched is not None and patched is not part:
                part.copy_(patched)
        return activation

    return put


def _patching_features(
    basis: HookPoint, patches: Sequence[Patch], start: int, before: int, batch: int
) -> Callable[..., Tensor]:
    """Return a hook that patches the features of its activation.

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
        places, changed = [], []
        for number, patch in enumerate(patches):
            features = old.clone()
            patched = patch.edit(start)(features)
            features = features if patched is None else patched
            row, position = _changed_places(patch, old, features, start)
            places.append((row + before + number * batch, row, position))
            changed.append(features[row, position])
        into, row, position = (torch.cat(indices) for indices in zip(*places, strict=True))
        if len(into):
            decoded = _decode_rows(view, torch.cat(changed), own)
            new[into, position] += decoded - kept[row, position]
        return new

    return put


def _changed_places(patch: Patch, old: Tensor, new: Tensor, start: int) -> tuple[Tensor, ...]:
    """Return the rows and positions at which a patch changes features."""
    if patch.changed is None:
        changed = (new != old).flatten(2).any(-1)
    else:
        changed = torch.zeros(old.shape[:2], dtype=torch.bool, device=old.device)
        changed[:, [position - start for position in patch.changed]] = True
    return changed.nonzero(as_tuple=True)


def _decode_rows(view: InBasis, features: Tensor, like: Tensor) -> Tensor:
    """Decode features of some positions, packed into rows of the length of an activation."""
    n, length = len(features), like.shape[1]
    filler = features.new_zeros(-n % length, *features.shape[1:])
    packed = torch.cat([features, filler]).unflatten(0, (-1, length))
    decoded = view.decoded(packed, like[:1].expand(len(packed), *like.shape[1:]))
    return decoded.flatten(0, 1)[:n]


class _Ends:
    """The final streams of patched runs; their logits are computed on request.

    Args:
        run: the corrupted run.
        rows: the residual stream after the last block, ``[patch * batch, pos, d_model]``, or before
            it.
        start: the first position of the rows.
        before_last: whether the rows are the stream before the last block.
    """

    def __init__(self, run: CorruptedRun, rows: Tensor, start: int, before_last: bool) -> None:
        self.run, self.rows, self.start = run, rows, start
        self._begin = rows.shape[1] if before_last else 0
        self._after = rows
        #: By columns: which chunk of the patches was computed last, and its logits.
        self._computed: dict[tuple[int, ...], tuple[int, Tensor]] = {}

    def logits(self, number: int) -> LazyLogits:
        """Return the lazy logits of one patch."""
        return lazy(partial(self._logits_at, number), self.run.logits.shape, self.run.logits)

    def _logits_at(self, number: int, positions: list[int]) -> Tensor:
        later = [place for place, position in enumerate(positions) if position >= self.start]
        columns = tuple(positions[place] - self.start for place in later)
        if not columns:
            return self.run.logits[:, positions]
        new = self._patched_logits(number, columns)
        if len(columns) == len(positions):
            return new.clone()  # a metric may change its logits in place
        logits = self.run.logits[:, positions]
        logits[:, later] = new
        return logits

    def _patched_logits(self, number: int, columns: tuple[int, ...]) -> Tensor:
        """Return one patch's logits at some of its positions, computed together with those of
        neighbouring patches.
        """
        batch, d_vocab = self.run.batch, self.run.logits.shape[-1]
        patches = len(self.rows) // batch
        ends = self._ends(min(columns))
        read = [column - self._begin for column in columns]
        if columns not in self._computed and len(self._computed) == MOST_KEPT:
            return self.run.logits_of(ends[number * batch : (number + 1) * batch, read])
        most = max(1, MOST_LOGITS // (batch * len(columns) * d_vocab))
        together = -(-patches // -(-patches // most))  # chunks of equal size
        chunk, within = divmod(number, together)
        if self._computed.get(columns, (-1,))[0] != chunk:
            rows = ends[chunk * together * batch : (chunk + 1) * together * batch]
            self._computed[columns] = chunk, self.run.logits_of(rows[:, read])
        return self._computed[columns][1][within * batch : (within + 1) * batch]

    def _ends(self, begin: int) -> Tensor:
        """Return the stream after the last block, from this column or an earlier one, which is
        stored as `_begin`.
        """
        if begin < self._begin:
            # A metric that reads an earlier position once may do so again, so compute all columns
            # then.
            self._begin = begin if self._begin == self.rows.shape[1] else 0
            self._after = self.run.last_block(self.rows, self.start, self._begin)
        return self._after


# --------------------------------------------------------------------------------------------------
# Memory limits of one run.
# --------------------------------------------------------------------------------------------------


#: The share of free memory that a run may use.
SHARE = 0.25
#: The number of tokens above which a larger batch was not faster, on a CPU (12-layer GPT-2) and on
#: other devices.
MOST_TOKENS, MOST_TOKENS_ELSEWHERE = 4096, 65536


def tokens_per_run(
    cfg: ModelConfig, device: torch.device, length: int, itemsize: int, max_bytes: int | None = None
) -> int:
    """Return the largest number of tokens in one run, over all prompts of its batch.

    Args:
        cfg: the model's configuration.
        device: the model's device.
        length: the number of tokens of a prompt.
        itemsize: the bytes of one number.
        max_bytes: the memory limit; None: `SHARE` of the free memory.

    Example:
        >>> import torch
        >>> from bridge import TransformerBridge
        >>> from bridge.patching.runs import tokens_per_run
        >>> tokens_per_run(TransformerBridge.boot_embedded().cfg, torch.device("cpu"), 15, 4) > 0
        True
    """
    # The peak memory of one block per token: streams, projections, the MLP's hidden layer, scores
    # twice.
    numbers = 16 * cfg.d_model + 6 * (cfg.d_mlp or 0) + 3 * cfg.n_heads * length
    most = MOST_TOKENS if device.type == "cpu" else MOST_TOKENS_ELSEWHERE
    room = SHARE * free_memory(device) if max_bytes is None else max_bytes
    return max(1, min(most, int(room / (numbers * itemsize))))
