"""Activation patching: any activation, patched piece by piece, with a metric of each patched run.

Input: corrupted prompts, the cache of a clean run, a metric of logits, and the indices to patch.
Output: the metric of each patch, as a tensor with an axis for each index, or as a `PatchingResult`.

The mechanism, in order:

1. `Indices` lists the indices: all combinations of axes (layer, pos, head, ...), or the rows of a
   data frame.
2. Each index becomes a `PatchStep`: a hook point, a setter (`bridge.patching.setters`) and the
   clean activation. The positions that the ready-made setters write are known; a user's own setter
   may write anywhere.
3. `PatchedRuns` (`bridge.patching.runs`) runs the corrupted prompts once. Steps that change nothing
   in that run are skipped.
4. `PatchedRuns` yields each patch with its logits, from runs that many patches share. `Metrics`
   converts the logits to numbers.
5. `get_act_patch_resid_pre` and its siblings apply this to one kind of activation.
   `patch_everything` runs four of them and draws the result. `ablated` builds a cache of ablated
   activations, so that the same sweeps ablate.

It raises an error for an unknown activation or axis, a clean cache that lacks the activation,
prompts of different lengths, and a metric whose shape does not match `reduce`. It does not depend
on how runs are shared, nor on circuits.
"""

from __future__ import annotations

import importlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad
from tqdm.auto import tqdm

from bridge.arguments import TokenPositions, check_positive, positions_of, refuse_wrong_types
from bridge.bridge import TransformerBridge
from bridge.hooks.hooks import HookPoint
from bridge.hooks.names import WhenAsked, act_name
from bridge.patching.ablations import Noise, kind_of, mean_of_tokens, noise_of, takes_how
from bridge.patching.lazy_logits import LazyLogits
from bridge.patching.result import (
    Indices,
    Metric,
    Metrics,
    PatchingResult,
    Reduce,
    clean_activation,
    data_frame,
)
from bridge.patching.runs import Patch, PatchedRuns
from bridge.patching.setters import (
    PatchSetter,
    PatchStep,
    differences,
    layer_head_dest_src_pos_pattern_patch_setter,
    layer_head_pattern_patch_setter,
    layer_head_pos_pattern_patch_setter,
    layer_head_vector_patch_setter,
    layer_pos_head_vector_patch_setter,
    layer_pos_patch_setter,
)
from bridge.run.inputs import Prompts, prompts_with
from bridge.run.recorder import check_positions_of_chat


@refuse_wrong_types
def generic_activation_patch(
    model: TransformerBridge,
    corrupted_tokens: Prompts,
    clean_cache: Mapping[str, Tensor],
    patching_metric: Metric | Mapping[str, Metric],
    patch_setter: PatchSetter,
    activation_name: str,
    index_axis_names: Sequence[str] | None = None,
    index_df: Any = None,
    return_index_df: bool = False,
    *,
    positions: Sequence[int | Sequence[int] | TokenPositions] | None = None,
    reduce: Reduce = "scalar",
    baseline: bool = False,
    attention_mask: Int[Tensor, "batch pos"] | None = None,
    patches_per_run: int | Literal["auto"] = "auto",
    max_bytes: int | None = None,
    verbose: bool = True,
    **model_kwargs: Any,
) -> Any:
    """Patch one piece of the clean run at a time into the corrupted run, and measure each patched
    run.

    Computation that a patch cannot change is skipped wherever possible (see
    `bridge.patching.runs`): patched runs start at the layer of their patch and, with the setters of
    `bridge.patching.setters`, at the first position that the patch changes; a patch that changes
    nothing is not run; logits are computed only where the metric reads them. The numbers equal
    those of complete runs up to the rounding of another batch size. The order in which the setter
    and the metric are called is not specified; the metric is called once more, for the unpatched
    run. A metric that needs gradients gets one run per patch, starting at the patch's layer.

    Args:
        model: the bridge.
        corrupted_tokens: the corrupted prompts, ``[batch, pos]``, a single one, ``[pos]``, or a
            processor's output.
        clean_cache: the activations of the clean run, with their batch axis.
        patching_metric: a function from logits ``[batch, pos, d_vocab]`` to one number, or to the
            form that `reduce` describes; or several metrics by name, which are all computed from
            each run.
        patch_setter: called as ``setter(corrupted_activation, index, clean_activation)``: one of
            `bridge.patching.setters`, or your own.
        activation_name: the short name of an activation inside blocks, such as ``"z"`` or
            ``"resid_pre"``; for a point in a basis ``"resid_pre.NAME"``.
        index_axis_names: the index axes, starting with the layer. All combinations are patched:
            ``"layer"``, ``"pos"``, ``"head"`` (or ``"head_index"``), ``"dest_pos"``, ``"src_pos"``,
            and for a point in a basis ``"feature"`` (last; after ``"head"`` if each head has
            features).
        index_df: alternatively, a pandas data frame with one index per row, starting with the
            layer.
        return_index_df: also return the data frame of indices. This needs pandas.
        positions: groups of positions, such as ``spans.sentences()``: the axis ``"pos"`` counts
            these, and a patch changes all positions of one.
        reduce: ``"scalar"``: the metric returns one number; ``"mean"``: one per row, ``[batch]``,
            which are averaged; ``"none"``: one per row, which are kept.
        baseline: also measure the unpatched corrupted run.
        attention_mask: ``[batch, pos]``, 1 for tokens and 0 for padding; None: no padding.
        patches_per_run: the number of patches in one batch; ``"auto"``: as many as fit into a
            quarter of the device's free memory and make runs faster. The setter and the metric
            still get each patch separately.
        max_bytes: the approximate memory for the patches of one run, instead of that quarter; a run
            has at least one patch. (The corrupted run additionally keeps its logits, a stream for
            each layer, and keys and values.)
        verbose: show a progress bar.
        model_kwargs: further model inputs for the corrupted prompts: ``pixel_values=``,
            ``token_type_ids=``.

    Returns:
        The metric of each patch: a float32 tensor with an axis for each name (one axis for a data
        frame's rows), and the data frame if `return_index_df`. With several metrics,
        ``reduce="none"`` or `baseline`, a `PatchingResult`. It is NaN where a hybrid's layer lacks
        the activation (attention in a layer with a mixer), or has fewer heads than another layer.

    Raises:
        ValueError: neither or both ways to pass the indices, an unknown axis, a patch that does not
            fit, a metric whose shape does not match `reduce`, no metric, or `return_index_df` with
            a `PatchingResult`, which contains the data frame.
        UnknownHookError: no layer of the model has such an activation, or a layer in the data frame
            lacks it.
        KeyError: the clean cache does not contain the activation.
        ImportError: a data frame is requested and pandas is not installed.

    Example:
        >>> from bridge import TransformerBridge
        >>> from bridge.patching import layer_pos_patch_setter
        >>> from bridge.patching import generic_activation_patch
        >>> bridge = TransformerBridge.boot_embedded()
        >>> clean, corrupted = bridge.to_tokens(["Mary and", "John and"])[:, None]
        >>> answer = bridge.to_single_token(" John")
        >>> _, cache = bridge.run_with_cache(clean)
        >>> metric = lambda logits: logits[0, -1, answer]
        >>> generic_activation_patch(
        ...     bridge,
        ...     corrupted,
        ...     cache,
        ...     metric,
        ...     layer_pos_patch_setter,
        ...     "mlp_out",
        ...     ("layer", "pos"),
        ...     verbose=False,
        ... ).shape
        torch.Size([4, 3])
    """
    _check_bounds(patches_per_run, max_bytes)
    model_kwargs["attention_mask"] = attention_mask
    prompts = prompts_with(model, corrupted_tokens, model_kwargs)
    tokens = prompts["input_ids"]
    metrics = Metrics(patching_metric, reduce, len(tokens), prompts.get("attention_mask"))
    as_result = metrics.several or baseline or reduce == "none"
    if as_result and return_index_df:
        raise ValueError(
            "return_index_df is for a tensor: a PatchingResult has the data frame as index_df"
        )
    for group in positions or ():
        check_positions_of_chat(group, attention_mask)
    groups = None if positions is None else _groups(positions, index_axis_names)
    n_groups = None if groups is None else len(groups)
    names = index_axis_names
    indices = Indices.of(model, tokens, activation_name, names, index_df, clean_cache, n_groups)
    if groups is not None and names is not None:
        patch_setter = _of_groups(patch_setter, groups, list(names).index("pos"))
    frame = indices.frame() if return_index_df else None
    steps = _steps(model, clean_cache, activation_name, indices, patch_setter)
    desc = f"patching {activation_name}"
    with tqdm(total=len(steps), desc=desc, unit="patch", disable=not verbose) as bar:
        sweep = _Sweep(model, prompts, steps, metrics, bar.update)
        values = _table(sweep.results(patches_per_run, max_bytes), indices, metrics, model)
    if not as_result:
        return (values[0], frame) if return_index_df else values[0]
    before = metrics.reduced(metrics(model(prompts)).to(values)) if baseline else None
    result = _as_result(values, indices, metrics, before)
    return result if metrics.several else result["metric"]


def _groups(
    positions: Sequence[int | Sequence[int] | TokenPositions], axis_names: Sequence[str] | None
) -> list[Sequence[int]]:
    """Return the groups of positions that are patched together, each as a list.

    Raises:
        ValueError: `positions` is empty, or no axis of the sweep is called "pos".
    """
    if not positions or "pos" not in (axis_names or ()):
        raise ValueError(
            'positions are those of the axis "pos": give some, and index_axis_names with "pos"'
        )
    groups = [positions_of(group) for group in positions]
    return [[group] if isinstance(group, int) else list(group) for group in groups]


def _of_groups(setter: PatchSetter, groups: Sequence[Sequence[int]], slot: int) -> PatchSetter:
    """Return a setter whose index has the number of a group of positions.

    Args:
        setter: the setter of one position.
        groups: the groups.
        slot: the place of the position in the index.
    """

    def patch(corrupted: Tensor, index: Sequence[int], clean: Tensor) -> Tensor:
        for position in groups[index[slot]]:
            changed = setter(corrupted, [*index[:slot], position, *index[slot + 1 :]], clean)
            corrupted = corrupted if changed is None else changed
        return corrupted

    return patch


def _table(
    results: list[Tensor], indices: Indices, metrics: Metrics, model: TransformerBridge
) -> Float[Tensor, "metric ..."]:
    """Return the metrics of each patch, with an axis for each index; NaN where none was tried."""
    shape = (len(indices.rows), *metrics.shape)
    measured = torch.full(shape, math.nan, dtype=torch.float32, device=model.cfg.device)
    if results:
        tried = torch.tensor(indices.tried, device=measured.device)
        measured[tried] = torch.stack(results).to(measured)
    values = metrics.reduced(measured.movedim(1, 0))
    return values.reshape(values.shape[0], *indices.sizes, *values.shape[2:])


def _as_result(
    values: Tensor, indices: Indices, metrics: Metrics, baseline: Tensor | None
) -> PatchingResult:
    axes, names = list(indices.axis_names), list(metrics.names)
    return PatchingResult(
        values, axes, indices.as_passed, names, not metrics.by_row, baseline, has_metric_axis=True
    )


def _check_bounds(patches_per_run: int | Literal["auto"], max_bytes: int | None) -> None:
    """Raise an error for batches of no patch, or with two bounds.

    Raises:
        ValueError: a bound below 1, or both.
    """
    if patches_per_run != "auto" and patches_per_run < 1:
        raise ValueError(f'patches_per_run is {patches_per_run}; it must be 1 or more, or "auto"')
    if max_bytes is not None:
        check_positive("max_bytes", max_bytes)
        if patches_per_run != "auto":
            raise ValueError(
                f"patches_per_run is {patches_per_run} and max_bytes {max_bytes}: give one of them"
            )


def _steps(
    model: TransformerBridge,
    clean_cache: Mapping[str, Tensor],
    activation_name: str,
    indices: Indices,
    setter: PatchSetter,
) -> list[PatchStep]:
    clean: dict[HookPoint, Tensor] = {}  # read once: a cache may compute its entries on access
    steps = []
    for row in itertools.compress(indices.rows, indices.tried):
        hook = model.names.find(act_name(activation_name, row[0]))
        if hook not in clean:
            clean[hook] = clean_activation(clean_cache, hook)
        steps.append(PatchStep(hook, row, clean[hook], setter))
    return steps


@dataclass(frozen=True)
class _Sweep:
    """The patches of a sweep, and what measures them.

    Attributes:
        model: the bridge.
        prompts: the corrupted prompts, as model inputs.
        steps: the patches.
        metrics: the metrics.
        report: called with the number of newly finished patches.
    """

    model: TransformerBridge
    prompts: Mapping[str, Any]
    steps: Sequence[PatchStep]
    metrics: Metrics
    report: Callable[[int], object]

    def results(self, together: int | Literal["auto"], max_bytes: int | None) -> list[Tensor]:
        """Return the metrics of each patch, in the order of the patches.

        Args:
            together, max_bytes: `patches_per_run` and `max_bytes` of `generic_activation_patch`.
        """
        hooks = [step.hook for step in self.steps]
        runs_of = partial(PatchedRuns, self.model, self.prompts, hooks, max_bytes=max_bytes)
        compared = dict.fromkeys(step.hook.name for step in self.steps if step.region is not None)
        with torch.no_grad():
            runs = runs_of(list(compared), together)
            corrupted = runs.corrupted
            if corrupted is not None:
                unpatched = self._without_gradients(corrupted.logits)
                if unpatched is not None:
                    patches = self._changing(corrupted.kept)
                    return self._of_shared_runs(runs.logits(patches), len(patches), unpatched)
        if corrupted is not None:  # the metric needs streams with gradients
            runs = runs_of((), together)
        patches = [Patch(index, step.hook, 0, step.edit) for index, step in enumerate(self.steps)]
        results: dict[int, Tensor] = {}
        for patch, logits in runs.logits(patches, joined=False):
            results[patch.index] = self.metrics(logits)
            self.report(1)
        return [results[index] for index in range(len(self.steps))]

    def _of_shared_runs(
        self, runs: Iterator[tuple[Patch, Tensor]], patches: int, unpatched: Tensor
    ) -> list[Tensor]:
        """Return the metrics of each patch; `unpatched` for patches without an effect."""
        results = [unpatched] * len(self.steps)
        self.report(len(self.steps) - patches)
        for patch, logits in runs:
            numbers = self.metrics(logits)
            if isinstance(logits, LazyLogits) and not logits.computed and numbers.isnan().any():
                # The metric may have read logits that were not computed yet.
                numbers = self.metrics(logits.whole())
            results[patch.index] = numbers
            self.report(1)
        return results

    def _without_gradients(self, logits: Tensor) -> Tensor | None:
        """Return the metrics of the unpatched run; None if a metric needs gradients."""
        try:
            return self.metrics(logits.clone())
        except RuntimeError:
            return None  # any other error is raised again by the plain run

    def _changing(self, corrupted: Mapping[str, Tensor]) -> list[Patch]:
        """Return the patches that change anything, with the positions that they change if these
        are known.
        """
        compared: dict[HookPoint, Tensor | None] = {}
        patches = []
        for index, step in enumerate(self.steps):
            if step.region is not None and step.hook not in compared:
                compared[step.hook] = differences(step.clean, corrupted[step.hook.name])
            changed = step.changed(compared.get(step.hook))
            if changed != []:
                start = changed[0] if changed else 0
                patches.append(Patch(index, step.hook, start, step.edit, changed))
        return patches


def make_df_from_ranges(column_max_ranges: Sequence[int], column_names: Sequence[str]) -> Any:
    """Return a data frame of all combinations of indices; the last column varies fastest.

    Args:
        column_max_ranges: the number of values of each column, which start from 0.
        column_names: the columns.

    Raises:
        ImportError: pandas is not installed; it is not one of this package's dependencies.
    """
    return data_frame(list(itertools.product(*map(range, column_max_ranges))), column_names)


# --------------------------------------------------------------------------------------------------
# Ready-made activation patching: `get_act_patch_resid_pre` and its siblings.
#
# Example:
#     >>> from bridge import TransformerBridge
#     >>> from bridge.patching import get_act_patch_attn_head_out_all_pos, get_act_patch_resid_pre
#     >>> bridge = TransformerBridge.boot_embedded()
#     >>> texts = [
#     ...     f"When Mary and John went to the store, {name} gave a drink to"
#     ...     for name in ("John", "Mary")
#     ... ]
#     >>> clean, corrupted = bridge.to_tokens(texts)[:, None]
#     >>> mary, john = bridge.to_single_token(" Mary"), bridge.to_single_token(" John")
#     >>> metric = lambda logits: logits[0, -1, mary] - logits[0, -1, john]
#     >>> _, cache = bridge.run_with_cache(clean)
#     >>> get_act_patch_resid_pre(  # layer pos
#     ...     bridge, corrupted, cache, metric, verbose=False
#     ... ).shape
#     torch.Size([4, 15])
#     >>> get_act_patch_attn_head_out_all_pos(  # layer head
#     ...     bridge, corrupted, cache, metric, verbose=False
#     ... ).shape
#     torch.Size([4, 4])
# --------------------------------------------------------------------------------------------------


_DOC = """Patches {what}, and measures each patch.

Args:
    model: the bridge.
    corrupted_tokens: the corrupted prompts, ``[batch, pos]``, or one of them, ``[pos]``.
    clean_cache: the activations of the clean run, with their batch axis.
    patching_metric: from logits ``[batch, pos, d_vocab]`` to one number.
    options: `index_df`, `return_index_df`, `reduce`, `baseline`, `attention_mask`,
        `patches_per_run`, `max_bytes`, `verbose` and `model_kwargs` of `generic_activation_patch`.

Returns:
    ``[{axes}]``{note}.

Raises:
    As `generic_activation_patch`.
"""
_GROUPED = "; with grouped keys and values, `head` counts key heads"


def _patcher(name: str, what: str, setter: PatchSetter, *axes: str) -> Callable[..., Any]:
    """Return a function that patches one kind of activation piece by piece."""

    def patch(
        model: TransformerBridge,
        corrupted_tokens: Prompts,
        clean_cache: Mapping[str, Tensor],
        patching_metric: Metric | Mapping[str, Metric],
        **options: Any,
    ) -> Any:
        if options.get("index_df") is None:
            options.setdefault("index_axis_names", axes)
        return generic_activation_patch(
            model, corrupted_tokens, clean_cache, patching_metric, setter, name, **options
        )

    shown = ", ".join(axis.replace("head_index", "head") for axis in axes)
    patch.__doc__ = _DOC.format(what=what, axes=shown, note=_GROUPED if name in ("k", "v") else "")
    return patch


def _head_by_pos(name: str, what: str) -> Callable[..., Any]:
    return _patcher(
        name,
        f"{what} of each head at each position",
        layer_pos_head_vector_patch_setter,
        "layer",
        "pos",
        "head",
    )


def _head_all_pos(name: str, what: str) -> Callable[..., Any]:
    return _patcher(
        name,
        f"{what} of each head at all positions",
        layer_head_vector_patch_setter,
        "layer",
        "head",
    )


def _stream(name: str, what: str) -> Callable[..., Any]:
    return _patcher(name, f"{what} at each position", layer_pos_patch_setter, "layer", "pos")


get_act_patch_resid_pre = _stream("resid_pre", "the residual stream before each block")
get_act_patch_resid_mid = _stream("resid_mid", "the residual stream between attention and MLP")
get_act_patch_attn_out = _stream("attn_out", "what each layer's attention adds")
get_act_patch_mixer_out = _stream("mixer_out", "what each mixer of a hybrid adds")
get_act_patch_mlp_out = _stream("mlp_out", "what each MLP adds")

get_act_patch_attn_head_out_by_pos = _head_by_pos("z", "the output (z)")
get_act_patch_attn_head_q_by_pos = _head_by_pos("q", "the query")
get_act_patch_attn_head_k_by_pos = _head_by_pos("k", "the key")
get_act_patch_attn_head_v_by_pos = _head_by_pos("v", "the value")
get_act_patch_attn_head_pattern_by_pos = _patcher(
    "pattern",
    "each query's row of each head's attention pattern",
    layer_head_pos_pattern_patch_setter,
    *("layer", "head_index", "dest_pos"),
)
get_act_patch_attn_head_pattern_dest_src_pos = _patcher(
    "pattern",
    "each entry of each head's attention pattern",
    layer_head_dest_src_pos_pattern_patch_setter,
    *("layer", "head_index", "dest_pos", "src_pos"),
)

get_act_patch_attn_head_out_all_pos = _head_all_pos("z", "the output (z)")
get_act_patch_attn_head_q_all_pos = _head_all_pos("q", "the queries")
get_act_patch_attn_head_k_all_pos = _head_all_pos("k", "the keys")
get_act_patch_attn_head_v_all_pos = _head_all_pos("v", "the values")
get_act_patch_attn_head_pattern_all_pos = _patcher(
    "pattern",
    "each head's attention pattern",
    layer_head_pattern_patch_setter,
    "layer",
    "head_index",
)


def get_act_patch_attn_head_all_pos_every(
    model: TransformerBridge,
    corrupted_tokens: Prompts,
    clean_cache: Mapping[str, Tensor],
    metric: Metric,
    **options: Any,
) -> Float[Tensor, "5 layer head"]:
    """Patch each head at all positions: its output, queries, keys, values and pattern.

    Args:
        model, corrupted_tokens, clean_cache, metric, options: as for
            `get_act_patch_attn_head_out_all_pos`.

    Returns:
        ``[5, layer, head]``. With grouped keys and values, both have zeros after the last key head.

    Raises:
        As `generic_activation_patch`.
        TypeError: several metrics, `baseline`, or ``reduce="none"``.
    """
    patchers = (
        get_act_patch_attn_head_out_all_pos,
        get_act_patch_attn_head_q_all_pos,
        get_act_patch_attn_head_k_all_pos,
        get_act_patch_attn_head_v_all_pos,
        get_act_patch_attn_head_pattern_all_pos,
    )
    return _stacked(patchers, model, corrupted_tokens, clean_cache, metric, options)


def get_act_patch_attn_head_by_pos_every(
    model: TransformerBridge,
    corrupted_tokens: Prompts,
    clean_cache: Mapping[str, Tensor],
    metric: Metric,
    **options: Any,
) -> Float[Tensor, "5 layer pos head"]:
    """Patch each head at each position: its output, query, key, value, and its pattern row of that
    query.

    Args:
        model, corrupted_tokens, clean_cache, metric, options: as for
            `get_act_patch_attn_head_out_by_pos`.

    Returns:
        ``[5, layer, pos, head]``. With grouped keys and values, both have zeros after the last key
        head.

    Raises:
        As `generic_activation_patch`.
        TypeError: several metrics, `baseline`, or ``reduce="none"``.
    """
    patchers = (
        get_act_patch_attn_head_out_by_pos,
        get_act_patch_attn_head_q_by_pos,
        get_act_patch_attn_head_k_by_pos,
        get_act_patch_attn_head_v_by_pos,
        _head_pattern_by_pos,
    )
    return _stacked(patchers, model, corrupted_tokens, clean_cache, metric, options)


def _head_pattern_by_pos(*arguments: Any, **options: Any) -> Tensor:
    patched: Tensor = get_act_patch_attn_head_pattern_by_pos(*arguments, **options)
    return patched.transpose(1, 2)


def get_act_patch_block_every(
    model: TransformerBridge,
    corrupted_tokens: Prompts,
    clean_cache: Mapping[str, Tensor],
    metric: Metric,
    **options: Any,
) -> Float[Tensor, "3 layer pos"]:
    """Patch the residual stream before each block, its attention output, and its MLP output.

    Args:
        model, corrupted_tokens, clean_cache, metric, options: as for `get_act_patch_resid_pre`.

    Returns:
        ``[3, layer, pos]``.

    Raises:
        As `generic_activation_patch`.
        TypeError: several metrics, `baseline`, or ``reduce="none"``.
    """
    patchers = (get_act_patch_resid_pre, get_act_patch_attn_out, get_act_patch_mlp_out)
    return _stacked(patchers, model, corrupted_tokens, clean_cache, metric, options)


def _stacked(
    patchers: Sequence[Callable[..., Tensor]],
    model: TransformerBridge,
    corrupted_tokens: Prompts,
    clean_cache: Mapping[str, Tensor],
    metric: Metric,
    options: Mapping[str, Any],
) -> Tensor:
    """Stack the results of all kinds along a new first axis; missing key heads are filled with
    zeros.

    Raises:
        TypeError: more than one number per patch, which cannot be stacked into one tensor.
    """
    if isinstance(metric, Mapping) or options.get("baseline") or options.get("reduce") == "none":
        raise TypeError(
            "several metrics, baseline=True and reduce='none' are for one kind of activation: call "
            "get_act_patch_attn_head_out_all_pos and its siblings one by one"
        )
    results = [patch(model, corrupted_tokens, clean_cache, metric, **options) for patch in patchers]
    heads = max(result.shape[-1] for result in results)
    return torch.stack([pad(result, (0, heads - result.shape[-1])) for result in results])


# --------------------------------------------------------------------------------------------------
# Replacements of ablated activations, in the form of a clean cache.
# --------------------------------------------------------------------------------------------------


@takes_how
@refuse_wrong_types
def ablated(
    cache: Mapping[str, Tensor], ablation: str | Noise, seed: int = 0
) -> Mapping[str, Tensor]:
    """Return ablated activations to use in place of a clean cache, so that a sweep ablates piece by
    piece.

    Args:
        cache: the activations of a run, with their batch axis: of the same prompts or, for a mean,
            of others. What `run_with_cache` returns knows where its rows are padded.
        ablation: ``"zero"``; ``"mean"``, over the rows of the batch that have a token there,
            position by position; ``"resample"``, from another row, with all rows shifted by the
            same number; ``"noise"``, or `Noise`, the activation plus Gaussian noise.
        seed: the seed of that shift for ``"resample"``, and of the noise for ``"noise"``.

    Raises:
        ValueError: an unknown ablation, or one that needs training (``"optimal"``); no other row to
            resample from, or rows with different padding; the mean of a pattern of padded rows, or
            of some of their positions; noise for an activation without axes ``[batch, pos, ...]``.

    Example:
        >>> from bridge import TransformerBridge
        >>> from bridge.patching import ablated, get_act_patch_attn_head_out_all_pos
        >>> bridge = TransformerBridge.boot_embedded()
        >>> tokens = bridge.to_tokens(["Mary and John went", "Tom and James went"])
        >>> _, cache = bridge.run_with_cache(tokens)
        >>> metric = lambda logits: logits[:, -1].max(-1).values.mean()
        >>> zeroed = ablated(cache, "zero")
        >>> get_act_patch_attn_head_out_all_pos(
        ...     bridge, tokens, zeroed, metric, verbose=False
        ... ).shape  # layer head
        torch.Size([4, 4])
    """
    kind = kind_of(ablation)
    if kind == "zero":
        return WhenAsked(cache, lambda name, x: torch.zeros_like(x[:1]))
    if kind == "mean":
        return WhenAsked(cache, lambda name, x: mean_of_tokens(x, _mask_at(cache, name)))
    if kind == "noise":
        noise = noise_of(ablation, seed)
        return WhenAsked(cache, lambda name, x: noise.added_to(x, name))

    def resample(name: str, x: Tensor) -> Tensor:
        if len(x) < 2:
            raise ValueError(
                "resampling takes from another row of the batch, and this cache has only one"
            )
        by = int(
            torch.randint(
                1, len(x), (), generator=torch.Generator().manual_seed(seed), device="cpu"
            )
        )
        masks: Mapping[str, Tensor] = getattr(cache, "masks", {})
        if not all(torch.equal(mask, mask[:1].expand_as(mask)) for mask in masks.values()):
            raise ValueError(
                "the rows of this cache are padded differently, so another row may have padding"
                " where one has a token: resample from rows of one length"
            )
        return x.roll(by, 0)

    return WhenAsked(cache, resample)


def _mask_at(cache: Mapping[str, Tensor], name: str) -> Tensor | None:
    """Return what is padding in a cached activation, ``[batch, pos]``; None if nothing is known."""
    mask_of: Callable[[str], Tensor | None] | None = getattr(cache, "mask_of", None)
    return None if mask_of is None else mask_of(name)


# --------------------------------------------------------------------------------------------------
# Residual stream, attention, MLPs and heads patched in one call, with one picture of all results.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False, repr=False)
class PatchedEverything:
    """The logit differences after patching each clean activation into the corrupted run; a picture
    in a notebook.

    Attributes:
        stream, attn_out, mlp_out: the logit difference with the stream before a layer, its
            attention output, or its MLP output taken from the clean run at one position, ``[layer,
            pos]``.
        heads: the same for a head's output at all positions, ``[layer, head]``.
        clean, corrupted: the logit difference of both unpatched runs.
        tokens: the text of each position of the clean prompt.
    """

    stream: Float[Tensor, "layer pos"]
    attn_out: Float[Tensor, "layer pos"]
    mlp_out: Float[Tensor, "layer pos"]
    heads: Float[Tensor, "layer head"]
    clean: float
    corrupted: float
    tokens: list[str]
    picture: ClassVar[str] = "patching"

    def __repr__(self) -> str:
        best = ""
        if self.clean != self.corrupted:
            shares = (self.heads - self.corrupted) / (self.clean - self.corrupted)
            shares = shares.nan_to_num(nan=-torch.inf)
            layer, head = divmod(int(shares.argmax()), shares.shape[1])
            best = f", best head L{layer}H{head} restores {float(shares.max()):.0%}"
        return (
            f"PatchedEverything({len(self.stream)} layers, {len(self.tokens)} positions; clean"
            f" {self.clean:+.2f}, corrupted {self.corrupted:+.2f}{best})"
        )

    def draw(self, title: str = "Activation patching") -> Any:
        """Return one picture of all sweeps: 0 is the corrupted run, 1 the clean run.

        Args:
            title: the picture's title.

        Raises:
            ImportError: the dependencies of pictures are not installed.
            ValueError: both runs have the same logit difference, so there is nothing to restore.
        """
        pictures = importlib.import_module("bridge.pictures")
        draw = partial(
            pictures.patching,
            clean=self.clean,
            corrupted=self.corrupted,
            metric="logit difference",
        )
        every = torch.stack([self.stream, self.attn_out, self.mlp_out])
        names = ["stream", "what attention adds", "what the MLP adds"]
        by_position = draw(every, "layer pos", self.tokens, panels=names, title="By position")
        title_of_heads = "Each head's output, at all positions"
        by_head = draw(self.heads, "layer head", title=title_of_heads)
        return pictures.together([by_position, by_head], title)

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> Any:
        return self.draw()._repr_mimebundle_()


@torch.no_grad()
@refuse_wrong_types
def patch_everything(
    model: TransformerBridge,
    clean: str | Prompts,
    corrupted: str | Prompts,
    answers: tuple[str, str] | tuple[int, int],
    verbose: bool = False,
    **model_kwargs: Any,
) -> PatchedEverything:
    """Patch the residual stream, attention and MLPs by position, and each head, to find which
    activations carry the answer.

    Args:
        model: the bridge.
        clean: the prompt with the right answer.
        corrupted: a prompt with the same number of tokens and another answer.
        answers: the next token of the clean prompt and of the corrupted one; the metric is the
            difference of their logits.
        verbose: show progress bars.
        model_kwargs: further model inputs for both prompts, such as ``pixel_values=``.

    Raises:
        ValueError: prompts of different lengths, an answer that is not one token, or two equal
            answers.

    Example:
        >>> from bridge import TransformerBridge
        >>> from bridge.patching import patch_everything
        >>> bridge = TransformerBridge.boot_embedded()
        >>> text = "When Mary and John went to the store, {} gave a drink to"
        >>> clean, corrupted = text.format("John"), text.format("Mary")
        >>> found = patch_everything(bridge, clean, corrupted, (" Mary", " John"))
        >>> found.heads.shape, found.clean > 0 > found.corrupted
        (torch.Size([4, 4]), True)
        >>> found.draw()
        Picture('Activation patching')
    """
    inputs = []
    for prompt in (clean, corrupted):
        tokens = model.to_tokens(prompt) if isinstance(prompt, str) else prompt
        inputs.append(prompts_with(model, tokens, model_kwargs))
    one, other = inputs
    shapes = [batch["input_ids"].shape for batch in inputs]
    if shapes[0] != shapes[1]:
        raise ValueError(
            f"clean has {shapes[0][1]} tokens and corrupted {shapes[1][1]}:"
            " prompts need one length, as an activation is put into its own place"
        )
    right, wrong = (
        model.to_answer_token(answer) if isinstance(answer, str) else answer for answer in answers
    )
    if right == wrong:
        raise ValueError(
            f"answers are {answers!r}, one token: give the clean prompt's answer and the corrupted"
            " one's"
        )

    def difference(logits: Tensor) -> float:
        return float(logits[0, -1, right] - logits[0, -1, wrong])

    logits, cache = model.run_with_cache(one)
    every = get_act_patch_block_every(model, other, cache, difference, verbose=verbose)
    heads = get_act_patch_attn_head_out_all_pos(model, other, cache, difference, verbose=verbose)
    stream, attn_out, mlp_out = every
    before = difference(logits), difference(model(other))
    return PatchedEverything(
        stream, attn_out, mlp_out, heads, *before, texts_of(model, one["input_ids"][0])
    )


def texts_of(model: TransformerBridge, tokens: Int[Tensor, " pos"]) -> list[str]:
    """Return the text of each token of a prompt; its id if there is no tokenizer.

    Args:
        model: the bridge.
        tokens: ``[pos]``.
    """
    if model.tokenizer is None:
        return [str(token) for token in tokens.tolist()]
    return [model.to_single_str_token(token) for token in tokens.tolist()]
