"""Activation patching: any activation, patched piece by piece, and a metric of each patched run.

What comes in: corrupted prompts, the cache of a clean run, a metric of logits, and what to go through. What goes out:
the metric of each patch, as a tensor with an axis for each index, or as a `PatchingResult`.

The mechanism, in order:

1. `Indices` says what to go through: all combinations of axes (layer, pos, head, ...), or the rows of a data frame.
2. Each index becomes a `PatchStep`: a hook point, a setter (`bridge.patching.setters`) and the clean activation. Of
   the ready-made setters it is known which positions they write; a setter of the user's own may do anything.
3. `PatchedRuns` (`bridge.patching.runs`) runs the corrupted prompts once. Steps that change nothing there are left
   out.
4. It gives each patch with its logits, of runs that many patches share. `Metrics` makes numbers of these.
5. `get_act_patch_resid_pre` and its siblings are this for one kind of activation; `patch_everything` is four of them
   with a picture; `ablated` makes a cache of what an ablation puts in place, so that the same sweeps ablate.

It refuses an unknown activation or axis, a clean cache without it, prompts of another length, and a metric of another
shape than was said. It knows nothing of how runs are shared, nor of circuits.
"""

from __future__ import annotations

import importlib
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor
from tqdm.auto import tqdm

from bridge.bridge import TransformerBridge
from bridge.hooks.arguments import check_positive, refuse_wrong_types
from bridge.hooks.hooks import HookPoint
from bridge.hooks.names import WhenAsked, act_name
from bridge.interventions.operations import mean
from bridge.patching.lazy_logits import LazyLogits
from bridge.patching.result import Indices, Metric, Metrics, PatchingResult, Reduce, clean_activation, data_frame
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
    reduce: Reduce = "scalar",
    baseline: bool = False,
    attention_mask: Int[Tensor, "batch pos"] | None = None,
    patches_per_run: int | Literal["auto"] = "auto",
    max_bytes: int | None = None,
    verbose: bool = True,
    **model_kwargs: Any,
) -> Any:
    """Patches one piece of the clean run after another into the corrupted run, and measures each.

    Nothing is computed that a patch cannot change, wherever that can be done (see `bridge.patching.runs`): patched
    runs start at the layer of their patch and, with the setters of `bridge.patching.setters`, at the first position at
    which it changes anything; a patch that changes nothing is not run; logits are computed where the metric looks. The
    numbers are those of whole runs but for the rounding of another batch size. The setter and the metric are called in
    no promised order, and the metric once more, for the unpatched run. A metric that asks for gradients gets one run
    for each patch, from its layer on.

    Args:
        model: the bridge.
        corrupted_tokens: the corrupted prompts, ``[batch, pos]``, or one of them, ``[pos]``; or what a processor gives.
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
        max_bytes: about how much memory the patches of one run may take in place of that quarter; one patch is a run at
            least. (The corrupted run keeps its logits, a stream for each layer, and keys and values besides.)
        verbose: show a progress bar.
        model_kwargs: what else the model takes with the corrupted prompts: ``pixel_values=``, ``token_type_ids=``.

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
    if max_bytes is not None:
        check_positive("max_bytes", max_bytes)
        if patches_per_run != "auto":
            raise ValueError(f"patches_per_run is {patches_per_run} and max_bytes {max_bytes}: give one of them")
    prompts = prompts_with(model, corrupted_tokens, {"attention_mask": attention_mask, **model_kwargs})
    metrics = Metrics(patching_metric, reduce, len(prompts["input_ids"]))
    as_result = metrics.several or baseline or reduce == "none"
    if as_result and return_index_df:
        raise ValueError("return_index_df is for a tensor: a PatchingResult has the data frame as index_df")
    indices = Indices.of(model, prompts["input_ids"], activation_name, index_axis_names, index_df, clean_cache)
    frame = indices.frame() if return_index_df else None
    steps = _steps(model, clean_cache, activation_name, indices, patch_setter)
    with tqdm(total=len(steps), desc=f"patching {activation_name}", unit="patch", disable=not verbose) as bar:
        results = _measured(model, prompts, steps, metrics, (patches_per_run, max_bytes), bar.update)
    measured = torch.full((len(indices.rows), *metrics.shape), math.nan, dtype=torch.float32, device=model.cfg.device)
    if results:
        measured[torch.tensor(indices.tried, device=measured.device)] = torch.stack(results).to(measured)
    values = metrics.reduced(measured.movedim(1, 0))
    values = values.reshape(values.shape[0], *indices.sizes, *values.shape[2:])
    if not as_result:
        return (values[0], frame) if return_index_df else values[0]
    before = None
    if baseline:
        before = metrics.reduced(metrics(model(prompts)).to(measured))
    found = PatchingResult(
        values, list(indices.axis_names), indices.given, list(metrics.names), reduce != "none", before, True
    )
    return found if metrics.several else found["metric"]


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


def _measured(
    model: TransformerBridge,
    prompts: Mapping[str, Any],
    steps: Sequence[PatchStep],
    metric: Metrics,
    bounds: tuple[int | Literal["auto"], int | None],
    report: Callable[[int], object],
) -> list[Tensor]:
    """The metric of each patch, in the order of the patches; `report` is called with how many more are done."""
    together, max_bytes = bounds
    hooks = [step.hook for step in steps]
    compared = list(dict.fromkeys(step.hook.name for step in steps if step.region is not None))
    with torch.no_grad():
        runs = PatchedRuns(model, prompts, hooks, compared, together, max_bytes=max_bytes)
        unpatched = None if runs.corrupted is None else _without_gradients(metric, runs.corrupted.logits)
        if runs.corrupted is not None and unpatched is not None:
            patches = _changing(steps, runs.corrupted.kept)
            found = [unpatched] * len(steps)
            report(len(steps) - len(patches))
            for patch, logits in runs.logits(patches):
                numbers = metric(logits)
                if isinstance(logits, LazyLogits) and bool(numbers.isnan().any()) and not logits.computed:
                    numbers = metric(logits.whole())  # something may have read past what was computed
                found[patch.index] = numbers
                report(1)
            return found
    if unpatched is None and runs.corrupted is not None:  # streams that gradients go through
        runs = PatchedRuns(model, prompts, hooks, (), together, max_bytes=max_bytes)
    results: dict[int, Tensor] = {}
    for patch, logits in runs.logits([Patch(i, step.hook, 0, step.edit) for i, step in enumerate(steps)], joined=False):
        results[patch.index] = metric(logits)
        report(1)
    return [results[index] for index in range(len(steps))]


def _without_gradients(metric: Metrics, logits: Tensor) -> Tensor | None:
    """The metric of the unpatched run; None where it asks for gradients."""
    try:
        return metric(logits.clone())
    except RuntimeError:
        return None  # if it is for another reason, the plain way raises it again


def _changing(steps: Sequence[PatchStep], corrupted: Mapping[str, Tensor]) -> list[Patch]:
    """The patches that change anything, with where they do as far as that is known."""
    differs = {
        step.hook: differences(step.clean, corrupted[step.hook.name])
        for step in {step.hook: step for step in steps if step.region is not None}.values()
    }
    patches = []
    for index, step in enumerate(steps):
        changed = step.changed(differs.get(step.hook))
        if changed != []:
            patches.append(Patch(index, step.hook, changed[0] if changed else 0, step.edit, changed))
    return patches


def make_df_from_ranges(column_max_ranges: Sequence[int], column_names: Sequence[str]) -> Any:
    """A data frame of all combinations of indices, the last column running fastest.

    Args:
        column_max_ranges: for each column, how many values it has, from 0.
        column_names: the columns.

    Raises:
        ImportError: pandas is not installed; it is not one of this package's dependencies.
    """
    return data_frame(list(itertools.product(*map(range, column_max_ranges))), column_names)


# ----------------------------------------------------------------------------------------------------------------------
# Activation patching, ready made: `get_act_patch_resid_pre` and its siblings.
#
# Example:
# >>> from bridge import TransformerBridge
# >>> from bridge.patching import get_act_patch_attn_head_out_all_pos, get_act_patch_resid_pre
# >>> bridge = TransformerBridge.boot_embedded()
# >>> texts = [f"When Mary and John went to the store, {name} gave a drink to" for name in ("John", "Mary")]
# >>> clean, corrupted = bridge.to_tokens(texts)[:, None]
# >>> mary, john = bridge.to_single_token(" Mary"), bridge.to_single_token(" John")
# >>> metric = lambda logits: logits[0, -1, mary] - logits[0, -1, john]
# >>> _, cache = bridge.run_with_cache(clean)
# >>> get_act_patch_resid_pre(bridge, corrupted, cache, metric, verbose=False).shape  # layer pos
# torch.Size([4, 15])
# >>> get_act_patch_attn_head_out_all_pos(bridge, corrupted, cache, metric, verbose=False).shape  # layer head
# torch.Size([4, 4])
# ----------------------------------------------------------------------------------------------------------------------


_DOC = """Patches {what}, and measures each patch.

Args:
    model: the bridge.
    corrupted_tokens: the corrupted prompts, ``[batch, pos]``, or one of them, ``[pos]``.
    clean_cache: the activations of the clean run, with their batch axis.
    patching_metric: from logits ``[batch, pos, d_vocab]`` to one number.
    options: `index_df`, `return_index_df`, `reduce`, `baseline`, `attention_mask`, `patches_per_run`, `max_bytes`,
        `verbose` and `model_kwargs` of `generic_activation_patch`.

Returns:
    ``[{axes}]``{note}.

Raises:
    As `generic_activation_patch`.
"""
_GROUPED = "; with grouped keys and values, `head` counts key heads"


def _patcher(name: str, what: str, setter: PatchSetter, *axes: str) -> Callable[..., Any]:
    """A function that patches one kind of activation piece by piece."""

    def patch(
        model: TransformerBridge,
        corrupted_tokens: Prompts,
        clean_cache: Mapping[str, Tensor],
        patching_metric: Metric | Mapping[str, Metric],
        **options: Any,
    ) -> Any:
        if options.get("index_df") is None:
            options.setdefault("index_axis_names", axes)
        return generic_activation_patch(model, corrupted_tokens, clean_cache, patching_metric, setter, name, **options)

    shown = ", ".join(axis.replace("head_index", "head") for axis in axes)
    patch.__doc__ = _DOC.format(what=what, axes=shown, note=_GROUPED if name in ("k", "v") else "")
    return patch


def _head_by_pos(name: str, what: str) -> Callable[..., Any]:
    return _patcher(
        name, f"{what} of each head at each position", layer_pos_head_vector_patch_setter, "layer", "pos", "head"
    )


def _head_all_pos(name: str, what: str) -> Callable[..., Any]:
    return _patcher(name, f"{what} of each head at all positions", layer_head_vector_patch_setter, "layer", "head")


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
    "pattern", "each head's attention pattern", layer_head_pattern_patch_setter, "layer", "head_index"
)


def get_act_patch_attn_head_all_pos_every(
    model: TransformerBridge,
    corrupted_tokens: Prompts,
    clean_cache: Mapping[str, Tensor],
    metric: Metric,
    **options: Any,
) -> Float[Tensor, "5 layer head"]:
    """Patches each head at all positions: its output, queries, keys, values and pattern.

    Args:
        model, corrupted_tokens, clean_cache, metric, options: as for `get_act_patch_attn_head_out_all_pos`.

    Returns:
        ``[5, layer, head]``. With grouped keys and values, those two have zeros behind the last key head.

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
    """Patches each head at each position: its output, query, key, value, and its pattern of that query.

    Args:
        model, corrupted_tokens, clean_cache, metric, options: as for `get_act_patch_attn_head_out_by_pos`.

    Returns:
        ``[5, layer, pos, head]``. With grouped keys and values, those two have zeros behind the last key head.

    Raises:
        As `generic_activation_patch`.
        TypeError: several metrics, `baseline`, or ``reduce="none"``.
    """
    patchers = (
        get_act_patch_attn_head_out_by_pos,
        get_act_patch_attn_head_q_by_pos,
        get_act_patch_attn_head_k_by_pos,
        get_act_patch_attn_head_v_by_pos,
        lambda *given, **more: get_act_patch_attn_head_pattern_by_pos(*given, **more).transpose(1, 2),
    )
    return _stacked(patchers, model, corrupted_tokens, clean_cache, metric, options)


def get_act_patch_block_every(
    model: TransformerBridge,
    corrupted_tokens: Prompts,
    clean_cache: Mapping[str, Tensor],
    metric: Metric,
    **options: Any,
) -> Float[Tensor, "3 layer pos"]:
    """Patches the residual stream before each block, what its attention adds, and what its MLP adds.

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
    """Results of all kinds along a first axis; fewer key heads than query heads are filled up with zeros.

    Raises:
        TypeError: what gives more than a number for each patch, of which no one tensor can be made.
    """
    if isinstance(metric, Mapping) or options.get("baseline") or options.get("reduce") == "none":
        raise TypeError(
            "several metrics, baseline=True and reduce='none' are for one kind of activation: call "
            "get_act_patch_attn_head_out_all_pos and its siblings one by one"
        )
    every = [patch(model, corrupted_tokens, clean_cache, metric, **options) for patch in patchers]
    heads = max(result.shape[-1] for result in every)
    return torch.stack([torch.nn.functional.pad(result, (0, heads - result.shape[-1])) for result in every])


# ----------------------------------------------------------------------------------------------------------------------
# What an ablation puts in the place of an activation: zeros, the mean over prompts, another prompt's.
# ----------------------------------------------------------------------------------------------------------------------


@refuse_wrong_types
def ablated(cache: Mapping[str, Tensor], how: str, seed: int = 0) -> Mapping[str, Tensor]:
    """Activations to patch with, in the place of a clean cache, so that a sweep ablates piece by piece.

    Args:
        cache: the activations of a run, with their batch axis: of the prompts themselves, or, for a mean, of others.
        how: ``"zero"``; ``"mean"``, over the rows of the batch, position by position; ``"resample"``, each row's from
            another row, all rows moved by the same number.
        seed: for ``"resample"``: which number.

    Raises:
        ValueError: `how` is none of these, or there is no other row to resample from.

    Example:
        >>> from bridge import TransformerBridge
        >>> from bridge.patching import ablated, get_act_patch_attn_head_out_all_pos
        >>> bridge = TransformerBridge.boot_embedded()
        >>> tokens = bridge.to_tokens(["Mary and John went", "Tom and James went"])
        >>> _, cache = bridge.run_with_cache(tokens)
        >>> metric = lambda logits: logits[:, -1].max(-1).values.mean()
        >>> zeroed = ablated(cache, "zero")
        >>> get_act_patch_attn_head_out_all_pos(bridge, tokens, zeroed, metric, verbose=False).shape  # layer head
        torch.Size([4, 4])
    """
    if how == "zero":
        return WhenAsked(cache, lambda name, x: torch.zeros_like(x[:1]))
    if how == "mean":
        return WhenAsked(cache, lambda name, x: mean(x, 0))
    if how != "resample":
        raise ValueError(f'how is {how!r}; it must be "zero", "mean" or "resample"')

    def resample(name: str, x: Tensor) -> Tensor:
        if len(x) < 2:
            raise ValueError("resampling takes from another row of the batch, and this cache has only one")
        by = int(torch.randint(1, len(x), (), generator=torch.Generator().manual_seed(seed)))
        return x.roll(by, 0)

    return WhenAsked(cache, resample)


# ----------------------------------------------------------------------------------------------------------------------
# Stream, attention, MLPs and heads patched in one call, with a picture of all.
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class PatchedEverything:
    """What each activation of the clean run brings back in the corrupted one; in a notebook, a picture of it.

    Attributes:
        stream, attn_out, mlp_out: the logit difference with the stream before a layer, what its attention adds, or what
            its MLP adds, taken from the clean run at one position, ``[layer, pos]``.
        heads: the same for a head's output at all positions, ``[layer, head]``.
        clean, corrupted: the logit difference of both runs, unpatched.
        tokens: the text of each position of the clean prompt.
    """

    stream: Float[Tensor, "layer pos"]
    attn_out: Float[Tensor, "layer pos"]
    mlp_out: Float[Tensor, "layer pos"]
    heads: Float[Tensor, "layer head"]
    clean: float
    corrupted: float
    tokens: list[str]

    def draw(self, title: str = "Activation patching") -> Any:
        """One picture of all: 0 is the corrupted run, 1 the clean one.

        Args:
            title: over the picture.

        Raises:
            ImportError: what pictures need is not installed.
            ValueError: both runs have the same logit difference, so that there is nothing to be restored.
        """
        pictures = importlib.import_module("bridge.pictures")
        ends: dict[str, Any] = {"clean": self.clean, "corrupted": self.corrupted, "metric": "logit difference"}
        every = torch.stack([self.stream, self.attn_out, self.mlp_out])
        names = ["stream", "what attention adds", "what the MLP adds"]
        by_position = pictures.patching(every, "layer pos", self.tokens, panels=names, title="By position", **ends)
        by_head = pictures.patching(self.heads, "layer head", title="Each head's output, at all positions", **ends)
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
    """Which activations carry the answer: the stream, attention and MLPs by position, and each head.

    Args:
        model: the bridge.
        clean: the prompt with the right answer.
        corrupted: one of as many tokens, with another answer.
        answers: the clean prompt's next token and the corrupted one's; their logits' difference is the metric.
        verbose: show progress bars.
        model_kwargs: what else the model takes with each of both prompts, such as ``pixel_values=``.

    Raises:
        ValueError: prompts of different lengths, an answer that is not one token, two that are the same.

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
    read = [model.to_tokens(each) if isinstance(each, str) else each for each in (clean, corrupted)]
    one, other = (prompts_with(model, each, model_kwargs) for each in read)
    tokens = one["input_ids"]
    if tokens.shape != other["input_ids"].shape:
        raise ValueError(
            f"clean has {tokens.shape[1]} tokens and corrupted {other['input_ids'].shape[1]}: prompts need one length, "
            "as an activation is put into its own place"
        )
    right, wrong = (model.to_single_token(each) if isinstance(each, str) else each for each in answers)
    if right == wrong:
        raise ValueError(f"answers are {answers!r}, one token: give the clean prompt's answer and the corrupted one's")

    def difference(logits: Tensor) -> float:
        return float(logits[0, -1, right] - logits[0, -1, wrong])

    logits, cache = model.run_with_cache(one)
    every = get_act_patch_block_every(model, other, cache, difference, verbose=verbose)
    heads = get_act_patch_attn_head_out_all_pos(model, other, cache, difference, verbose=verbose)
    stream, attn_out, mlp_out = every
    clean_and_corrupted = difference(logits), difference(model(other))
    return PatchedEverything(stream, attn_out, mlp_out, heads, *clean_and_corrupted, texts_of(model, tokens[0]))


def texts_of(model: TransformerBridge, tokens: Int[Tensor, " pos"]) -> list[str]:
    """The text of each token of a prompt; its number where there is no tokenizer.

    Args:
        model: the bridge.
        tokens: ``[pos]``.
    """
    if model.tokenizer is None:
        return [str(token) for token in tokens.tolist()]
    return [model.to_single_str_token(token) for token in tokens.tolist()]
