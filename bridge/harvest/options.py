"""The options of a harvest that decide its rows, checked."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

import torch
from huggingface_hub import try_to_load_from_cache
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from bridge.arguments import check_choice, shown
from bridge.bridge import TransformerBridge
from bridge.embedded import MODEL_DIR
from bridge.harvest.fingerprint import HarvestError, of_value
from bridge.harvest.packing import Tokenization
from bridge.hooks.context import HookFunction

if TYPE_CHECKING:
    from bridge.engine import Engine

# --------------------------------------------------------------------------------------------------
# What is made of activations before anything is written: fewer rows, or fewer numbers in a row.
# --------------------------------------------------------------------------------------------------


class Reduction(Protocol):
    """A map from an activation's rows to columns."""

    def columns(self, name: str, rows: Float[Tensor, "row *shape"]) -> dict[str, Tensor]:
        """Return the columns, by name.

        Args:
            name: the hook point's name.
            rows: the activation, ``[row, ...]``.
        """

    def describe(self) -> Any:
        """Return plain data for the manifest, which differs whenever the result would differ."""


@dataclass(frozen=True, eq=False)
class Project:
    """A linear map of the activation's last axes, which are all axes of the matrix except its last.

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
        outer = rows.shape[: rows.ndim - len(inner)]
        if not inner or not outer or [*rows.shape] != [*outer, *inner]:
            raise HarvestError(
                f"the projection of {name} takes {list(inner)}; the activation's rows are"
                f" {list(rows.shape[1:])}"
            )
        dtype = torch.promote_types(rows.dtype, self.matrix.dtype)  # neither is rounded
        matrix = self.matrix.to(rows.device, dtype).flatten(0, -2)
        flat = rows.reshape(*outer, -1)
        return {name: flat.to(dtype) @ matrix}

    def describe(self) -> Any:
        """See `Reduction`."""
        return ["project", list(self.matrix.shape), of_value(self.matrix)]


@dataclass(frozen=True, eq=False)
class TopK:
    """The largest values of a function of the activation, and their indices, for example a sparse
    code's active features.

    Columns ``{name}.values`` ``[k]``, from the largest, and ``{name}.indices`` ``[k]``.

    Args:
        k: the number of values.
        function: from an activation's rows ``[row, ...]`` to ``[row, feature]``; None: the
            activation itself.

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
            raise HarvestError(
                f"TopK's function at {name} returned {shown(scores)} for rows {list(rows.shape)};"
                " it must return [row, feature]"
            )
        if not 1 <= self.k <= scores.shape[1]:
            raise HarvestError(
                f"TopK's k at {name} is {self.k}; there are {scores.shape[1]} features"
            )
        best = scores.topk(self.k, dim=1)
        return {f"{name}.values": best.values, f"{name}.indices": best.indices}

    def describe(self) -> Any:
        """See `Reduction`."""
        return ["top_k", self.k, of_value(self.function)]


@dataclass(frozen=True, eq=False)
class TopPositions:
    """A selection of rows: in each document of an input, the positions at which a function of one
    activation is largest.

    Args:
        k: the number of positions (all positions of a shorter document).
        point: the hook point that is evaluated, one of the harvested ones.
        function: from its rows ``[row, ...]`` to ``[row]``.
    """

    k: int
    point: str
    function: Callable[[Tensor], Tensor]

    def describe(self) -> Any:
        """Return plain data for the manifest."""
        return ["top_positions", self.k, self.point, of_value(self.function)]


#: Which rows are written: of every token, one for each document in an input (the mean, or the last
#: token), or see `TopPositions`.
Rows = Literal["all", "mean", "last"] | TopPositions


@dataclass
class ChosenRows:
    """The rows of a batch that are written.

    Attributes:
        kept: ``[kept]``, for each written row, the row whose ids it gets.
        groups: ``[row]``, for a mean, the written row to which each row contributes; None if rows
            are only selected.
    """

    kept: Int[Tensor, "kept"]
    groups: Int[Tensor, "row"] | None = None

    def apply(self, rows: Shaped[Tensor, "row *shape"]) -> Tensor:
        """Return the rows that are written.

        Args:
            rows: ``[row, ...]``, a row for every token.
        """
        if self.groups is None:
            return rows if len(self.kept) == len(rows) else rows[self.kept.to(rows.device)]
        if not rows.is_floating_point():
            raise HarvestError(
                "a mean of whole numbers is no activation: leave that hook point out, or use"
                " rows='all'"
            )
        groups = self.groups.to(rows.device)
        # A sum may lie beyond what the type holds, where the mean does not.
        dtype = torch.float32 if rows.device.type == "mps" else torch.float64
        sums = torch.zeros((len(self.kept), *rows.shape[1:]), dtype=dtype, device=rows.device)
        sums.index_add_(0, groups, rows.to(dtype))
        counts = torch.bincount(groups, minlength=len(self.kept)).to(dtype)
        return sums / counts.reshape(-1, *[1] * (rows.ndim - 1))


def _scores(choice: TopPositions, activation: Tensor, rows: int) -> Tensor:
    """Return the values ``[row]`` of the choice's function, on the CPU.

    Raises:
        HarvestError: it returns a different shape.
    """
    scores = choice.function(activation)
    if not isinstance(scores, Tensor) or scores.shape != (rows,):
        raise HarvestError(
            f"the function of TopPositions returned {shown(scores)} for {rows} rows; it must return"
            " [row]"
        )
    return scores.cpu()


def choose(rows: Rows, segments: Int[Tensor, "row"], activations: dict[str, Tensor]) -> ChosenRows:
    """Choose the rows of a batch that are written.

    Args:
        rows: see `Rows`.
        segments: ``[row]``, numbers that change whenever another document or input begins.
        activations: each hook point's rows ``[row, ...]``.

    Raises:
        HarvestError: a function returns a shape other than ``[row]``.
    """
    if rows == "all":
        return ChosenRows(torch.arange(len(segments), device="cpu"))
    _, groups, sizes = torch.unique_consecutive(segments, return_inverse=True, return_counts=True)
    last = sizes.cumsum(0) - 1
    if rows == "last":
        return ChosenRows(last)
    if rows == "mean":
        return ChosenRows(last, groups)
    assert isinstance(rows, TopPositions)
    scores = _scores(rows, activations[rows.point], len(segments))
    kept = [last[:0]]
    start = 0
    for segment in scores.split(sizes.tolist()):
        best = segment.topk(min(rows.k, len(segment))).indices
        kept.append(start + best.sort().values)
        start += len(segment)
    return ChosenRows(torch.cat(kept))


# --------------------------------------------------------------------------------------------------
# The options, and their checks.
# --------------------------------------------------------------------------------------------------


DType = Literal["float16", "float32", "float64"]
FileFormat = Literal["arrow", "parquet"]
#: Names of special tokens that `separator` may be.
Special = Literal["bos", "eos", "sep", "cls", "pad"]


@dataclass(frozen=True)
class HarvestOptions:
    """The options that decide the rows, in addition to the model, the tokenizer and the source. See
    `harvest` for the fields.
    """

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

    def __post_init__(self) -> None:
        check_choice("dtype", self.dtype, get_args(DType), HarvestError)
        check_choice("format", self.format, get_args(FileFormat), HarvestError)
        check_number("tokens_per_shard", self.tokens_per_shard, 1)
        check_number("max_tokens", self.max_tokens, 1, none=True)
        check_number("batch_size", self.batch_size, 1, none=True)
        if not isinstance(self.rows, TopPositions):
            check_choice("rows", self.rows, ("all", "mean", "last"), HarvestError)
        if not self.hook_points:
            raise HarvestError("hook_points is empty; it must be a list with at least one name")

    def with_special(self, **ids: Any) -> HarvestOptions:
        """Return a copy of the options with these special tokens.

        Args:
            ids: `bos` and `separator`, each an id or None; see `Tokenization`.
        """
        return replace(self, tokens=replace(self.tokens, **ids))

    def usual_batch_size(self, device: str) -> int:
        """Return the number of inputs in one forward pass: about 4,096 tokens on a CPU, 32,768
        elsewhere.
        """
        tokens = 4096 if device == "cpu" else 32768
        return max(1, tokens // self.tokens.context_size)

    def describe(self, points: Sequence[str], batch_size: int, device: str) -> dict[str, Any]:
        """Return plain data that differs whenever the rows would differ.

        Args:
            points: the hook points' canonical names.
            batch_size: the chosen batch size.
            device: the kind of device that computes.
        """
        reductions = sorted(self.reduce.items())
        tokens = asdict(replace(self.tokens, positions=None))
        del tokens["positions"]
        if self.tokens.positions is not None:  # a harvest that was begun before has no such option
            tokens["positions"] = of_value(self.tokens.positions)
        return {
            "hook_points": list(points),
            **tokens,
            "dtype": self.dtype,
            "tokens_per_shard": self.tokens_per_shard,
            "max_tokens": self.max_tokens,
            "keep_special": self.keep_special,
            "rows": self.rows.describe() if isinstance(self.rows, TopPositions) else self.rows,
            "reduce": {name: reduction.describe() for name, reduction in reductions},
            "interventions": [[name, of_value(function)] for name, function in self.interventions],
            "batch_size": batch_size,
            "device": device,
            "format": self.format,
        }


def check_number(name: str, value: object, least: int, none: bool = False) -> None:
    """Check that a number is an integer and not too small.

    Raises:
        TypeError: it is not an integer.
        HarvestError: it is too small.
    """
    if none and value is None:
        return
    if type(value) is not int:
        raise TypeError(f"{name} is {value!r}; it must be a whole number{' or None' * none}")
    if value < least:
        raise HarvestError(f"{name} is {value}; it must be at least {least}")


def check_kinds(
    hook_points: object,
    interventions: object,
    reduce: object,
    prepend_bos: object,
    pack: object,
    keep_special: object,
    checksums: object,
) -> None:
    """Check the lists, mappings and truth values of `harvest`.

    Raises:
        HarvestError: an argument has the wrong type.
    """
    lists = (
        ("hook_points", hook_points, "a list with at least one name"),
        ("interventions", interventions, "a list of pairs (hook point, function)"),
    )
    for name, value, kind in lists:
        if not isinstance(value, Sequence) or isinstance(value, str | bytes):
            raise HarvestError(f"{name} is {shown(value)}; it must be {kind}")
    if reduce is not None and not isinstance(reduce, Mapping):
        raise HarvestError(
            f"reduce is {shown(reduce)}; it must be a mapping from hook points to reductions"
        )
    flags = {
        "pack": pack,
        "keep_special": keep_special,
        "checksums": checksums,
        "prepend_bos": prepend_bos,
    }
    for name, value in flags.items():
        is_default = name == "prepend_bos" and value is None
        if not is_default and not isinstance(value, bool):
            raise HarvestError(f"{name} is {shown(value)}; it must be True or False")


def special_id(tokenizer: Any, separator: int | str | None) -> int | None:
    """Return the id of a separator.

    Args:
        tokenizer: a Hugging Face tokenizer, or None.
        separator: an id, one of the names in `Special`, or None.

    Raises:
        HarvestError: the tokenizer has no such token.
    """
    if separator is None or type(separator) is int:
        return separator
    check_choice("separator", separator, get_args(Special), HarvestError)
    token_id = getattr(tokenizer, f"{separator}_token_id", None)
    if token_id is None:
        raise HarvestError(
            f"separator is {separator!r}, and the tokenizer has no such token: give its id"
        )
    return int(token_id)


def bos_id(tokenizer: Any, prepend_bos: bool | None, default: bool) -> int | None:
    """Return the id that every input starts with.

    Args:
        tokenizer: a Hugging Face tokenizer, or None.
        prepend_bos: whether there is such an id; None: `default`, if the tokenizer has a BOS (or
            CLS).
        default: the model's default.

    Raises:
        HarvestError: ``prepend_bos=True``, and there is no such token.
    """
    bos = None
    if tokenizer is not None:
        bos = tokenizer.bos_token_id
        if bos is None:
            bos = tokenizer.cls_token_id
    if bos is None and prepend_bos:
        raise HarvestError(
            "prepend_bos=True, but the tokenizer has no BOS token (nor CLS); use prepend_bos=False"
        )
    prepend = default if prepend_bos is None else prepend_bos
    return bos if prepend else None


def _engine(model: object) -> Engine | None:
    """Return the model if it is an engine, without importing vLLM's module to check."""
    module = sys.modules.get("bridge.engine.engine")
    return model if module is not None and isinstance(model, module.Engine) else None


@dataclass(frozen=True)
class ModelSource:
    """The origin of a model: a bridge, or a name that is loaded when needed.

    Attributes:
        bridge: the bridge, or None.
        name: the name or path, or None.
        device, dtype: for a name; None: Hugging Face's default.
        engine: the engine that runs the model, whose bridge has no weights; None: the bridge does.
    """

    bridge: TransformerBridge | None
    name: str | None
    device: str | None
    dtype: str | None
    engine: Engine | None = None

    @classmethod
    def of(
        cls, model: object, device: torch.device | str | None, dtype: torch.dtype | str | None
    ) -> ModelSource:
        """Return the origin of `model`.

        Raises:
            TypeError: it is neither a bridge nor a name.
            HarvestError: a bridge in training mode or with added hooks, or a device or dtype for a
                bridge.
        """
        if isinstance(model, str):
            device_name = None if device is None else str(device)
            dtype_name = None if dtype is None else str(dtype).removeprefix("torch.")
            return cls(None, model, device_name, dtype_name)
        engine = _engine(model)
        bridge = model if engine is None else engine.bridge
        if not isinstance(bridge, TransformerBridge):
            raise TypeError(
                f"the model is {type(model).__name__}; it must be a TransformerBridge, an Engine, a"
                " path or a name"
            )
        if device is not None or dtype is not None:
            raise HarvestError(
                "device and model_dtype are for a model that is loaded by name: move the bridge"
                " yourself, and start an engine with what it takes"
            )
        if bridge.training and engine is None:
            raise HarvestError(
                "the model is in training mode, where dropout would change what is harvested:"
                " bridge.eval() first"
            )
        hooked = [hook.name for hook in bridge.hook_dict.values() if hook.fwd_hooks]
        if hooked:
            raise HarvestError(
                f"the bridge has hooks at {', '.join(hooked)}, which nobody would know of later:"
                " remove them (bridge.reset_hooks()), or give them as interventions="
            )
        return cls(bridge, None, None, None, engine)

    def load(self) -> TransformerBridge:
        """Return the bridge, loading it if necessary."""
        if self.bridge is not None:
            return self.bridge
        if self.name == "embedded":
            bridge = TransformerBridge.boot_embedded()
            if self.dtype is not None:
                bridge.to(getattr(torch, self.dtype))
            if self.device is not None:
                bridge.to(self.device)
        else:
            assert self.name is not None
            bridge = TransformerBridge.boot_transformers(
                self.name, device=self.device, dtype=self.dtype
            )
        return bridge.eval()

    @property
    def path(self) -> str | None:
        """The folder or hub name; None for a bridge."""
        if self.name == "embedded":
            return str(MODEL_DIR)
        return self.name

    @property
    def folder(self) -> str | None:
        """The folder of the model's files, if it is known without loading the model."""
        if self.path is None or os.path.isdir(self.path):
            return self.path
        if not self.path.strip():
            return None  # loading it raises an error
        # Of a hub name: the folder of its commit.
        config = try_to_load_from_cache(self.path, "config.json")
        return os.path.dirname(config) if isinstance(config, str) else None
