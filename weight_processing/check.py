"""The check that a processed model returns the same log probabilities as before."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from transformers import PreTrainedModel

from adapters.config import ModelConfig
from adapters.inputs import accepted_arguments, with_required_inputs
from adapters.observe.observe import evaluating

__all__ = ["ProcessingError"]

_HALF = (torch.float16, torch.bfloat16)
#: Maximum rounding error of a processed model in half precision, relative to the error before. Each
#: transform rounds the changed weights once more, about as much as the model rounds its
#: activations: all families have values from 1 to 2.
_TIMES = 3.0
_PIECE = 1 << 21
#: Backends with a setting for rounding float32 products; older versions of torch have one setting
#: for all.
_BACKENDS: tuple[Any, ...] = tuple(
    backend
    for backend in (torch.backends.cuda.matmul, getattr(torch.backends.mkldnn, "matmul", None))
    if hasattr(backend, "fp32_precision")
)


class ProcessingError(ValueError):
    """Error raised if a requested transform cannot be applied, or did not keep the model's
    function.
    """


def _products_are_rounded() -> bool:
    if not _BACKENDS:
        return torch.get_float32_matmul_precision() != "highest"
    return any(backend.fp32_precision not in ("ieee", "none") for backend in _BACKENDS)


@contextmanager
def _products_in_full() -> Iterator[None]:
    if not _products_are_rounded():
        yield
        return
    # torch refuses to read its old setting after a backend's was set.
    setting = None if _BACKENDS else torch.get_float32_matmul_precision()
    precisions = [backend.fp32_precision for backend in _BACKENDS]
    try:
        if setting is not None:
            torch.set_float32_matmul_precision("highest")
        for backend in _BACKENDS:
            backend.fp32_precision = "ieee"
        yield
    finally:
        if setting is not None:
            torch.set_float32_matmul_precision(setting)
        for backend, precision in zip(_BACKENDS, precisions, strict=True):
            # Inherit from `torch.backends.fp32_precision`, where the value may come from.
            backend.fp32_precision = "none"
            if backend.fp32_precision != precision:
                backend.fp32_precision = precision


def _in_float32(x: Tensor) -> Tensor:
    return x.float() if x.dtype in _HALF else x


def _product_in_float32(weight: Tensor, x: Tensor, *bias: Tensor) -> Tensor:
    """Multiply with a half-precision matrix, converting some of its columns at a time."""
    columns = max(1, _PIECE // weight.shape[0])
    pieces = [x.float() @ piece.float() for piece in weight.split(columns, 1)]
    product = pieces[0] if len(pieces) == 1 else torch.cat(pieces, 1)
    for b in bias:
        product = product + b.float()
    return product


class InFloat32(TorchDispatchMode):
    """Dispatch mode that computes with half-precision parameters in float32, converting one at a
    time.

    Example:
        >>> import torch
        >>> from weight_processing.check import InFloat32
        >>> with InFloat32():
        ...     x = torch.nn.functional.linear(
        ...         torch.ones(1), torch.tensor([[0.1]], dtype=torch.bfloat16)
        ...     )
        >>> x.dtype
        torch.float32
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("dtype") in _HALF:
            kwargs["dtype"] = torch.float32
        if func is torch.ops.aten.embedding.default:
            return _in_float32(func(*args, **kwargs))  # convert the rows, not the table
        if func.is_view or func._schema.is_mutable:
            return func(*args, **kwargs)
        products = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        if func in products and not kwargs and args[-1].dtype in _HALF:
            return _product_in_float32(*reversed(args))
        args, kwargs = tree_map_only(Tensor, _in_float32, (args, kwargs))
        return func(*args, **kwargs)


class _NarrowingDetector(TorchDispatchMode):
    """Dispatch mode that detects float32 computations in a float64 model, such as norms that always
    use float32.
    """

    detected = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if args and isinstance(args[0], Tensor) and isinstance(result, Tensor):
            narrows = args[0].dtype == torch.float64 and result.dtype == torch.float32
            self.detected = self.detected or narrows
        return result


class LogProbCheck:
    """Comparison of the log probabilities of random tokens; without an output layer, of the model's
    output.

    In float32 they may change by 1e-4, and for large values by proportionally more; in float64 by
    1e-9, or by 1e-5 if the model computes something in float32 anyway (tiny Gemmas and Cohere have
    2e-8 to 4e-7).

    In half precision, a model's rounding error is measured by computing with the same weights in
    float32. The processed model may be `_TIMES` as far from that result, or differ by the dtype's
    eps, on average over all tokens. A mixture of experts that chooses among near equals can change
    much for some tokens: there the median over positions is used.

    Args:
        core: the Hugging Face model, unprocessed.
        cfg: its facts.
        without_hooks: opens the context in which the model is run, so that the user's hooks do not
            fire.

    Raises:
        ProcessingError: its log probabilities are not finite.
    """

    def __init__(
        self,
        core: PreTrainedModel,
        cfg: ModelConfig,
        without_hooks: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self.core, self.cfg, self.without_hooks = core, cfg, without_hooks
        dtypes = {parameter.dtype for parameter in core.parameters()}
        self.half = [dtype for dtype in dtypes if dtype in _HALF]
        self.rounds = bool(self.half) or _products_are_rounded()
        detector = _NarrowingDetector() if dtypes == {torch.float64} else None
        with self._exactly(), detector or nullcontext():
            self.expected = self._log_probs()
        self.tolerance = 1e-4
        if detector is not None:
            self.tolerance = 1e-5 if detector.detected else 1e-9
        self.own = self._distance() if self.rounds else 0.0
        if not (math.isfinite(self.own) and bool(self.expected.isfinite().all())):
            raise ProcessingError(
                f"the log probabilities of {cfg.model_name} for random tokens are not finite, so"
                " that they cannot be compared. Nothing was changed. With check=False they are not"
            )

    def compare(self, steps: list[str]) -> None:
        """Compare the model's current log probabilities with the original ones.

        Args:
            steps: the transforms applied since the last comparison.

        Raises:
            ProcessingError: the difference is larger than rounding explains.
        """
        difference = self._distance()
        if self.rounds:
            least = max((torch.finfo(dtype).eps for dtype in self.half), default=1e-4)
            allowed = max(_TIMES * self.own, least)
            cause = f"{_TIMES:g} times the model's own rounding"
        else:
            size = max(1.0, float(self.expected.abs().max()) / 10)
            allowed = self.tolerance * size
            cause = "rounding"
        if difference <= allowed:  # not if it is NaN
            return
        which = steps[0]
        if len(steps) > 1:
            which = f"one of {', '.join(steps)} (check='each' says which)"
        raise ProcessingError(
            f"log probabilities changed by {difference:.2g} (at most {allowed:.2g} is {cause})"
            f" through {which}. The model's weights have been changed: load it again. This is a"
            f" mistake of ours, or of the adapter for {type(self.core).__name__}; please report it."
        )

    def _distance(self) -> float:
        """Return the difference from the expected log probabilities: its maximum, or its root mean
        square if products are rounded.
        """
        difference = (self._log_probs() - self.expected).detach()
        if not self.rounds:
            return float(difference.abs().max())
        squares = difference.square().mean(-1).flatten()  # batch*pos
        typical = squares.median() if self.cfg.num_experts else squares.mean()
        return float(typical) ** 0.5

    @contextmanager
    def _exactly(self) -> Iterator[None]:
        """Compute with the same weights in float32, with full-precision products."""
        if not self.rounds:
            yield
            return
        config = self.core.config
        implementation = getattr(config, "_attn_implementation", "eager")
        replaced = implementation not in ("eager", "sdpa")
        try:
            if replaced:  # such as flash attention, which supports half precision only
                config._attn_implementation = "eager"
            with _products_in_full(), InFloat32():
                yield
        finally:
            if replaced:
                config._attn_implementation = implementation

    def _log_probs(self) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        shape = (2, min(16, self.cfg.n_ctx or 16))
        most = max(self.cfg.d_vocab, 1)  # models of images or sound alone have no tokens
        tokens = torch.randint(most, shape, generator=generator, device="cpu").to(self.cfg.device)
        has_decoder = bool(self.core.config.is_encoder_decoder)
        arguments: dict[str, Any] = {**with_required_inputs(self.core, tokens, has_decoder)}
        if "use_cache" in accepted_arguments(type(self.core).forward):
            arguments["use_cache"] = False
        with self.without_hooks(), evaluating(self.core):
            output = self.core(**arguments)
        logits = getattr(output, "logits", None)
        values = output[0] if logits is None else logits
        values = values.to(torch.promote_types(values.dtype, torch.float32))
        return values if logits is None else values.log_softmax(-1)
