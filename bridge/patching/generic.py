"""Any activation, patched piece by piece."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from jaxtyping import Int
from torch import Tensor
from tqdm.auto import tqdm

from bridge.bridge import TransformerBridge
from bridge.hooks.act_names import act_name
from bridge.hooks.arguments import refuse_wrong_types
from bridge.hooks.hook_point import HookPoint
from bridge.patching.compiled import compiled_sweep
from bridge.patching.indices import Indices, clean_activation
from bridge.patching.measured import measure as measure_patches
from bridge.patching.metrics import Metric, Metrics, Reduce
from bridge.patching.result import PatchingResult, data_frame
from bridge.patching.setters import PatchSetter
from bridge.patching.steps import Patches, PatchStep
from bridge.run.checks import as_tokens


@refuse_wrong_types
def generic_activation_patch(
    model: TransformerBridge,
    corrupted_tokens: Int[Tensor, "..."],
    clean_cache: Mapping[str, Tensor],
    patching_metric: Metric | Mapping[str, Metric],
    patch_setter: PatchSetter,
    activation_name: str,
    index_axis_names: Sequence[str] | None = None,
    index_df: Any = None,
    return_index_df: bool = False,
    *,
    reduce: Reduce = "scalar",
    baseline: bool = False,
    attention_mask: Int[Tensor, "batch pos"] | None = None,
    patches_per_run: int | Literal["auto"] = "auto",
    compiled: bool | Mapping[str, object] = False,
    verbose: bool = True,
) -> Any:
    """Patches one piece of the clean run after another into the corrupted run, and measures each.

    Nothing is computed that a patch cannot change, wherever that can be done (see `bridge.patching.sweep`): patched
    runs start at the layer of their patch and, with the setters of `bridge.patching.setters`, at the first position at
    which it changes anything; a patch that changes nothing is not run; logits are computed where the metric looks. The
    numbers are those of whole runs but for the rounding of another batch size. The setter and the metric are called in
    no promised order, and the metric once more, for the unpatched run. A metric that asks for gradients gets one run
    for each patch, from its layer on.

    Args:
        model: the bridge.
        corrupted_tokens: the corrupted prompts, ``[batch, pos]``, or one of them, ``[pos]``.
        clean_cache: the activations of the clean run, with their batch axis.
        patching_metric: from logits ``[batch, pos, d_vocab]`` to one number, or as `reduce` says; or several by name,
            all of them of each run.
        patch_setter: called as ``setter(corrupted_activation, index, clean_activation)``; those of
            `bridge.patching.setters`, or one of your own.
        activation_name: the short name of an activation inside blocks, such as ``"z"`` or ``"resid_pre"``; of a point
            in a basis ``"resid_pre.NAME"``.
        index_axis_names: what to go through, the layer first: all combinations of ``"layer"``, ``"pos"``, ``"head"``
            (or ``"head_index"``), ``"dest_pos"``, ``"src_pos"``, and of a point in a basis ``"feature"`` (last; of
            features of each head after ``"head"``).
        index_df: instead, a pandas data frame with an index in each row, the layer first.
        return_index_df: also return the data frame of indices. This needs pandas.
        reduce: ``"scalar"``: the metric gives one number; ``"mean"``: one for each row, ``[batch]``, which are
            averaged; ``"none"``: one for each row, which are kept.
        baseline: measure the unpatched corrupted run, too.
        attention_mask: ``[batch, pos]``, 1 for tokens and 0 for padding; None: no padding.
        patches_per_run: how many patches to run as one batch; ``"auto"``: as many as a quarter of the device's free
            memory holds, and as make runs faster. Each is still given to the setter and the metric alone.
        compiled: run all patches through one compiled program (`TransformerBridge.program`), or the options that
            `torch.compile` is to have for it. It computes all layers and positions of each patch, and compiling takes
            seconds: on a processor it was slower wherever it was measured (docs/performance.md).
        verbose: show a progress bar.

    Returns:
        The metric of each patch: a float32 tensor with an axis for each name (one axis for a data frame's rows), and
        the data frame if it was asked for; with several metrics, ``reduce="none"`` or `baseline`, a `PatchingResult`.
        Where a hybrid's layer has no such activation (attention, in one with a mixer), or fewer heads than another
        layer, it is NaN.

    Raises:
        ValueError: neither or both ways to give the indices, an unknown axis, a patch that does not fit, a metric of
            another shape than `reduce` says, no metric, or a `return_index_df` where the result has it.
        UnknownHookError: the model has no such activation in any layer, or in one that the data frame names.
        KeyError: the clean cache does not hold it.
        ImportError: a data frame is asked for and pandas is not installed.

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
        ...     bridge, corrupted, cache, metric, layer_pos_patch_setter, "mlp_out", ("layer", "pos"), verbose=False
        ... ).shape
        torch.Size([4, 3])
    """
    if patches_per_run != "auto" and patches_per_run < 1:
        raise ValueError(f'patches_per_run is {patches_per_run}; it must be 1 or more, or "auto"')
    tokens = as_tokens(corrupted_tokens).to(model.cfg.device)
    metrics = Metrics(patching_metric, reduce, len(tokens))
    as_result = metrics.several or baseline or reduce == "none"
    if as_result and return_index_df:
        raise ValueError("return_index_df is for a tensor: a PatchingResult has the data frame as index_df")
    indices = _indices(model, tokens, activation_name, index_axis_names, index_df, clean_cache)
    frame = indices.frame() if return_index_df else None
    steps = _steps(model, clean_cache, activation_name, indices, patch_setter)
    with tqdm(total=len(steps), desc=f"patching {activation_name}", unit="patch", disable=not verbose) as bar:
        patches = Patches(model, tokens, steps, metrics, attention_mask, bar.update)
        if compiled is False:
            results = measure_patches(patches, patches_per_run)
        else:
            together = None if patches_per_run == "auto" else patches_per_run
            results = compiled_sweep(patches, together, compiled if isinstance(compiled, Mapping) else {})
    measured = torch.full((len(indices.rows), *metrics.shape), math.nan, dtype=torch.float32, device=model.cfg.device)
    if results:
        measured[torch.tensor(indices.tried, device=measured.device)] = torch.stack(results).to(measured)
    values = metrics.reduced(measured.movedim(1, 0))
    values = values.reshape(values.shape[0], *indices.sizes, *values.shape[2:])
    if not as_result:
        return (values[0], frame) if return_index_df else values[0]
    before = None
    if baseline:
        before = metrics.reduced(metrics(model(tokens, attention_mask=attention_mask)).to(measured))
    found = PatchingResult(
        values, list(indices.axis_names), indices.given, list(metrics.names), reduce != "none", before, True
    )
    return found if metrics.several else found["metric"]


def _indices(
    model: TransformerBridge,
    tokens: Tensor,
    activation_name: str,
    axis_names: Sequence[str] | None,
    table: Any,
    clean_cache: Mapping[str, Tensor],
) -> Indices:
    """What to go through, in the one way or the other."""
    if table is not None and axis_names is not None:
        raise ValueError("give either index_axis_names or index_df: each of them says which indices to go through")
    if table is not None:
        return Indices.of_frame(table)
    if axis_names is None:
        raise ValueError("give index_axis_names, or a data frame of indices as index_df")
    return Indices.of_axes(model, tokens, activation_name, axis_names, clean_cache)


def _steps(
    model: TransformerBridge,
    clean_cache: Mapping[str, Tensor],
    activation_name: str,
    indices: Indices,
    setter: PatchSetter,
) -> list[PatchStep]:
    clean: dict[HookPoint, Tensor] = {}  # taken once: a cache may compute what it holds when it is asked
    steps = []
    for row in itertools.compress(indices.rows, indices.tried):
        hook = model.names.find(act_name(activation_name, row[0]))
        if hook not in clean:
            clean[hook] = clean_activation(clean_cache, hook)
        steps.append(PatchStep(hook, row, clean[hook], setter))
    return steps


def make_df_from_ranges(column_max_ranges: Sequence[int], column_names: Sequence[str]) -> Any:
    """A data frame of all combinations of indices, the last column running fastest.

    Args:
        column_max_ranges: for each column, how many values it has, from 0.
        column_names: the columns.

    Raises:
        ImportError: pandas is not installed; it is not one of this package's dependencies.
    """
    return data_frame(list(itertools.product(*map(range, column_max_ranges))), column_names)
