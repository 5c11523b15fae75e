"""The options of a harvest that decide its rows, checked."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

import torch
from huggingface_hub import try_to_load_from_cache
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from bridge.bridge import TransformerBridge
from bridge.embedded import MODEL_DIR
from bridge.harvest.fingerprint import HarvestError, of_value
from bridge.harvest.packing import Tokenization
from bridge.hooks.arguments import shown
from bridge.hooks.context import HookFunction
from bridge.hooks.names import suggestion

if TYPE_CHECKING:
    from bridge.engine import Engine

# ----------------------------------------------------------------------------------------------------------------------
# What is made of activations before anything is written: fewer rows, or fewer numbers in a row.
# ----------------------------------------------------------------------------------------------------------------------


class Reduction(Protocol):
    """Makes columns of an activation's rows."""

    def columns(self, name: str, rows: Float[Tensor, "row *shape"]) -> dict[str, Tensor]:
        """The columns, by name.

        Args:
            name: the hook point's name.
            rows: the activation, ``[row, ...]``.
        """

    def describe(self) -> Any:
        """What it is, for the manifest: plain data that differs when the result would."""


@dataclass(frozen=True, eq=False)
class Project:
    """A linear map of the activation (of its last axes, as many as the matrix has but one).

    Args:
        matrix: ``[..., d_out]``.

    Example:
        >>> import torch
        >>> from bridge.harvest import Project
        >>> Project(torch.ones(4, 2)).columns("x", torch.ones(3, 4))["x"].shape
        torch.Size([3, 2])
    """

    matrix: Float[Tensor, "*d_in d_out"]

    def columns(self, name: str, rows: Float[Tensor, "row *shape"]) -> dict[str, Tensor]:
        """See `Reduction`."""
        inner = self.matrix.shape[:-1]
        if not inner or tuple(rows.shape[-len(inner) :]) != tuple(inner) or rows.ndim <= len(inner):
            raise HarvestError(
                f"the projection of {name} takes {list(inner)}; the activation's rows are {list(rows.shape[1:])}"
            )
        dtype = torch.promote_types(rows.dtype, self.matrix.dtype)  # neither is rounded
        matrix = self.matrix.to(rows.device, dtype).reshape(-1, self.matrix.shape[-1])
        flat = rows.reshape(*rows.shape[: rows.ndim - len(inner)], -1)
        return {name: flat.to(dtype) @ matrix}

    def describe(self) -> Any:
        """See `Reduction`."""
        return ["project", list(self.matrix.shape), of_value(self.matrix)]


@dataclass(frozen=True, eq=False)
class TopK:
    """The largest values of a function of the activation, and where they are: a sparse code's active features, say.

    Columns ``{name}.values`` ``[k]``, from the largest, and ``{name}.indices`` ``[k]``.

    Args:
        k: how many.
        function: from an activation's rows ``[row, ...]`` to ``[row, feature]``; None: the activation itself.

    Example:
        >>> import torch
        >>> from bridge.harvest import TopK
        >>> TopK(1, lambda x: x * 2).columns("x", torch.tensor([[1.0, 3.0, 2.0]]))
        {'x.values': tensor([[6.]]), 'x.indices': tensor([[1]])}
    """

    k: int
    function: Callable[[Tensor], Tensor] | None = None

    def columns(self, name: str, rows: Float[Tensor, "row *shape"]) -> dict[str, Tensor]:
        """See `Reduction`."""
        scores = rows if self.function is None else self.function(rows)
        if not isinstance(scores, Tensor) or scores.ndim != 2 or len(scores) != len(rows):
            got = list(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
            raise HarvestError(
                f"TopK's function at {name} gave {got} for rows {list(rows.shape)}; it must give [row, feature]"
            )
        if not 1 <= self.k <= scores.shape[1]:
            raise HarvestError(f"TopK's k at {name} is {self.k}; there are {scores.shape[1]} features")
        best = scores.topk(self.k, dim=1)
        return {f"{name}.values": best.values, f"{name}.indices": best.indices}

    def describe(self) -> Any:
        """See `Reduction`."""
        return ["top_k", self.k, of_value(self.function)]


@dataclass(frozen=True, eq=False)
class TopPositions:
    """Of each document in an input, only the positions at which a function of one activation is largest.

    Args:
        k: how many positions (all of a shorter one).
        point: the hook point that is looked at, one of those harvested.
        function: from its rows ``[row, ...]`` to ``[row]``.
    """

    k: int
    point: str
    function: Callable[[Tensor], Tensor]

    def describe(self) -> Any:
        """What it is, for the manifest."""
        return ["top_positions", self.k, self.point, of_value(self.function)]


#: Which rows are written: of every token, one for each document in an input (the mean, or the last token), or see
#: `TopPositions`.
Rows = Literal["all", "mean", "last"] | TopPositions


@dataclass
class ChosenRows:
    """Which rows of a batch are written.

    Attributes:
        kept: ``[kept]``, the row whose ids stand for each row that is written.
        groups: ``[row]``, which written row a row goes into, for a mean; None where rows are only chosen.
    """

    kept: Int[Tensor, "kept"]
    groups: Int[Tensor, "row"] | None = None

    def apply(self, rows: Shaped[Tensor, "row *shape"]) -> Tensor:
        """The rows that are written.

        Args:
            rows: ``[row, ...]``, of every token.
        """
        if self.groups is None:
            return rows if len(self.kept) == len(rows) else rows[self.kept.to(rows.device)]
        if not rows.is_floating_point():
            raise HarvestError("a mean of whole numbers is no activation: leave that hook point out, or use rows='all'")
        groups = self.groups.to(rows.device)
        # A sum may lie beyond what the type holds, where the mean does not.
        dtype = torch.float32 if rows.device.type == "mps" else torch.float64
        sums = torch.zeros((len(self.kept), *rows.shape[1:]), dtype=dtype, device=rows.device)
        sums.index_add_(0, groups, rows.to(dtype))
        counts = torch.bincount(groups, minlength=len(self.kept)).to(sums.dtype)
        return sums / counts.reshape(-1, *[1] * (rows.ndim - 1))


def choose(rows: Rows, segments: Int[Tensor, "row"], activations: dict[str, Tensor]) -> ChosenRows:
    """Which rows of a batch are written.

    Args:
        rows: see `Rows`.
        segments: ``[row]``, numbers that change whenever another document or input begins.
        activations: each hook point's rows ``[row, ...]``.

    Raises:
        HarvestError: a function that gives something else than ``[row]``.
    """
    if rows == "all":
        return ChosenRows(torch.arange(len(segments)))
    _, groups, sizes = torch.unique_consecutive(segments, return_inverse=True, return_counts=True)
    last = sizes.cumsum(0) - 1
    if rows == "last":
        return ChosenRows(last)
    if rows == "mean":
        return ChosenRows(last, groups)
    assert isinstance(rows, TopPositions)
    scores = rows.function(activations[rows.point])
    if not isinstance(scores, Tensor) or scores.shape != segments.shape:
        got = list(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
        raise HarvestError(f"the function of TopPositions gave {got} for {len(segments)} rows; it must give [row]")
    scores = scores.cpu()
    kept = []
    for start, size in zip((last + 1 - sizes).tolist(), sizes.tolist(), strict=True):
        best = scores[start : start + size].topk(min(rows.k, size)).indices
        kept.append(start + best.sort().values)
    return ChosenRows(torch.cat(kept) if kept else last)


DType = Literal["float16", "float32", "float64"]
FileFormat = Literal["arrow", "parquet"]
#: Names of special tokens that `separator` may be.
Special = Literal["bos", "eos", "sep", "cls", "pad"]


@dataclass(frozen=True)
class HarvestOptions:
    """What decides the rows, in addition to the model, the tokenizer and the source. See `harvest` for the fields."""

    hook_points: tuple[str, ...]
    tokens: Tokenization
    dtype: DType
    tokens_per_shard: int
    max_tokens: int | None
    keep_special: bool
    rows: Rows
    reduce: Mapping[str, Reduction]
    interventions: tuple[tuple[str, HookFunction], ...]
    batch_size: int | None
    format: FileFormat

    def usual_batch_size(self, device: str) -> int:
        """Inputs in one forward pass: about 4,096 tokens on a CPU, 32,768 elsewhere."""
        return max(1, (4096 if device == "cpu" else 32768) // self.tokens.context_size)

    def describe(self, points: Sequence[str], batch_size: int, device: str) -> dict[str, Any]:
        """Plain data that differs when the rows would.

        Args:
            points: the hook points' canonical names.
            batch_size: the one that was chosen.
            device: the kind of device that computes.
        """
        rows = self.rows.describe() if isinstance(self.rows, TopPositions) else self.rows
        return {
            "hook_points": list(points),
            **asdict(self.tokens),
            **{name: getattr(self, name) for name in ("dtype", "tokens_per_shard", "max_tokens", "keep_special")},
            "rows": rows,
            "reduce": {name: reduction.describe() for name, reduction in sorted(self.reduce.items())},
            "interventions": [[name, of_value(function)] for name, function in self.interventions],
            "batch_size": batch_size,
            "device": device,
            "format": self.format,
        }


def check_number(name: str, value: object, least: int, none: bool = False) -> None:
    """Refuses what is no whole number, or too small a one.

    Raises:
        TypeError: it is no whole number.
        HarvestError: it is too small.
    """
    if none and value is None:
        return
    if type(value) is not int:
        raise TypeError(f"{name} is {value!r}; it must be a whole number{' or None' * none}")
    if value < least:
        raise HarvestError(f"{name} is {value}; it must be at least {least}")


def check_choice(name: str, value: object, choices: object) -> None:
    """Refuses what is none of the choices.

    Raises:
        HarvestError: it is none of them.
    """
    known = get_args(choices)
    if value not in known:
        near = suggestion(value, known) if isinstance(value, str) else ""
        raise HarvestError(f"{name} is {value!r}; it must be one of {', '.join(map(repr, known))}.{near}")


def check_kinds(
    hook_points: object,
    interventions: object,
    reduce: object,
    prepend_bos: object,
    pack: object,
    keep_special: object,
    checksums: object,
) -> None:
    """Refuses what is no list, mapping or truth value where `harvest` takes one.

    Raises:
        HarvestError: it is none.
    """
    for name, value in (("hook_points", hook_points), ("interventions", interventions)):
        if not isinstance(value, Sequence) or isinstance(value, str | bytes):
            kind = (
                "a list with at least one name" if name == "hook_points" else "a list of pairs (hook point, function)"
            )
            raise HarvestError(f"{name} is {shown(value)}; it must be {kind}")
    if reduce is not None and not isinstance(reduce, Mapping):
        raise HarvestError(f"reduce is {shown(reduce)}; it must be a mapping from hook points to reductions")
    for name, value in (
        ("pack", pack), ("keep_special", keep_special), ("prepend_bos", prepend_bos), ("checksums", checksums),
    ):  # fmt: skip
        if not isinstance(value, bool) and not (name == "prepend_bos" and value is None):
            raise HarvestError(f"{name} is {shown(value)}; it must be True or False")


def special_id(tokenizer: Any, separator: int | str | None) -> int | None:
    """The id of a separator.

    Args:
        tokenizer: a Hugging Face tokenizer, or None.
        separator: an id, one of the names in `Special`, or None.

    Raises:
        HarvestError: the tokenizer has no such token.
    """
    if separator is None or type(separator) is int:
        return separator
    check_choice("separator", separator, Special)
    found = getattr(tokenizer, f"{separator}_token_id", None)
    if found is None:
        raise HarvestError(f"separator is {separator!r}, and the tokenizer has no such token: give its id")
    return int(found)


def bos_id(tokenizer: Any, prepend_bos: bool | None, default: bool) -> int | None:
    """The id that every input starts with.

    Args:
        tokenizer: a Hugging Face tokenizer, or None.
        prepend_bos: whether there is one; None: `default`, where the tokenizer has a BOS (or CLS).
        default: what the model is used with.

    Raises:
        HarvestError: it was asked for, and there is no such token.
    """
    bos = None
    if tokenizer is not None:
        bos = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.cls_token_id
    if prepend_bos and bos is None:
        raise HarvestError("prepend_bos=True, but the tokenizer has no BOS token (nor CLS); use prepend_bos=False")
    wanted = default if prepend_bos is None else prepend_bos
    return bos if wanted else None


def _engine(model: object) -> Engine | None:
    """The engine, where a model is one. Nothing of that room is imported by those who have none."""
    there = sys.modules.get("bridge.engine.engine")
    return model if there is not None and isinstance(model, there.Engine) else None


@dataclass(frozen=True)
class ModelSource:
    """Where a model comes from: a bridge, or a name that is loaded where it is needed.

    Attributes:
        bridge: the bridge, or None.
        name: the name or path, or None.
        device, dtype: for a name; None: as Hugging Face chooses.
        engine: the engine that runs the model, whose bridge has no weights; None: the bridge does.
    """

    bridge: TransformerBridge | None
    name: str | None
    device: str | None
    dtype: str | None
    engine: Engine | None = None

    @classmethod
    def of(cls, model: object, device: torch.device | str | None, dtype: torch.dtype | str | None) -> ModelSource:
        """Where `model` comes from.

        Raises:
            TypeError: it is neither a bridge nor a name.
            HarvestError: a bridge in training mode or with hooks of its own, or a device or type for a bridge.
        """
        if isinstance(model, str):
            name = None if device is None else str(device)
            return cls(None, model, name, None if dtype is None else str(dtype).removeprefix("torch."))
        ran = _engine(model)
        bridge = model if ran is None else ran.bridge
        if not isinstance(bridge, TransformerBridge):
            raise TypeError(
                f"the model is {type(model).__name__}; it must be a TransformerBridge, an Engine, a path or a name"
            )
        if device is not None or dtype is not None:
            raise HarvestError(
                "device and model_dtype are for a model that is loaded by name: move the bridge yourself, and start an "
                "engine with what it takes"
            )
        if bridge.training and ran is None:
            raise HarvestError(
                "the model is in training mode, where dropout would change what is harvested: bridge.eval() first"
            )
        hooked = [hook.name for hook in bridge.hook_dict.values() if hook.fwd_hooks]
        if hooked:
            raise HarvestError(
                f"the bridge has hooks at {', '.join(hooked)}, which nobody would know of later: remove them "
                "(bridge.reset_hooks()), or give them as interventions="
            )
        return cls(bridge, None, None, None, ran)

    def load(self) -> TransformerBridge:
        """The bridge."""
        if self.bridge is not None:
            return self.bridge
        if self.name == "embedded":
            bridge: TransformerBridge = TransformerBridge.boot_embedded()
            if self.dtype is not None:
                bridge.to(getattr(torch, self.dtype))
            if self.device is not None:
                bridge.to(self.device)
            return bridge.eval()
        assert self.name is not None
        loaded: TransformerBridge = TransformerBridge.boot_transformers(self.name, device=self.device, dtype=self.dtype)
        return loaded.eval()

    @property
    def path(self) -> str | None:
        """The folder or hub name; None for a bridge."""
        if self.name == "embedded":
            return str(MODEL_DIR)
        return self.name

    @property
    def folder(self) -> str | None:
        """The folder that the model's files are in, where that can be had without loading it."""
        if self.path is None or os.path.isdir(self.path):
            return self.path
        config = try_to_load_from_cache(self.path, "config.json")  # of a hub name: in the folder of its commit
        return os.path.dirname(config) if isinstance(config, str) else None
