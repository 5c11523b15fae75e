"""Whether a processed model still gives the log probabilities that it gave before."""

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
#: How much larger than before the rounding error of a model in half precision may be. Each transform rounds the weights
#: that it changes once more, about as the model rounds its activations: 1 to 2 are measured over all families.
_TIMES = 3.0
_PIECE = 1 << 21
#: Where torch keeps whether float32 products may be rounded; its older versions have one setting for all.
_BACKENDS: tuple[Any, ...] = tuple(
    backend
    for backend in (torch.backends.cuda.matmul, getattr(torch.backends.mkldnn, "matmul", None))
    if hasattr(backend, "fp32_precision")
)


class ProcessingError(ValueError):
    """A transform that was asked for cannot be done, or did not leave the model's function as it was."""


def _products_are_rounded() -> bool:
    if not _BACKENDS:
        return torch.get_float32_matmul_precision() != "highest"
    return any(backend.fp32_precision not in ("ieee", "none") for backend in _BACKENDS)


@contextmanager
def _products_in_full() -> Iterator[None]:
    if not _products_are_rounded():
        yield
        return
    found = [backend.fp32_precision for backend in _BACKENDS] or torch.get_float32_matmul_precision()
    try:
        if isinstance(found, str):
            torch.set_float32_matmul_precision("highest")
        for backend in _BACKENDS:
            backend.fp32_precision = "ieee"
        yield
    finally:
        if isinstance(found, str):
            torch.set_float32_matmul_precision(found)
        else:
            for backend, value in zip(_BACKENDS, found, strict=True):
                backend.fp32_precision = "none"  # as `torch.backends.fp32_precision` says: it may be where this is from
                if backend.fp32_precision != value:
                    backend.fp32_precision = value


class InFloat32(TorchDispatchMode):
    """Computes with a model's half-precision parameters in float32, holding one of them at a time in that type.

    Example:
        >>> import torch
        >>> from weight_processing.check import InFloat32
        >>> with InFloat32():
        ...     x = torch.nn.functional.linear(torch.ones(1), torch.tensor([[0.1]], dtype=torch.bfloat16))
        >>> x.dtype
        torch.float32
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("dtype") in _HALF:
            kwargs["dtype"] = torch.float32
        if func is torch.ops.aten.embedding.default:
            rows = func(*args, **kwargs)  # they are converted, not the table
            return rows.float() if rows.dtype in _HALF else rows
        if func.is_view or func._schema.is_mutable:
            return func(*args, **kwargs)
        products = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        if func in products and not kwargs and args[-1].dtype in _HALF:
            *bias, x, weight = args
            n = max(1, _PIECE // weight.shape[0])
            pieces = [x.float() @ piece.float() for piece in weight.split(n, 1)]
            return sum((b.float() for b in bias), pieces[0] if len(pieces) == 1 else torch.cat(pieces, 1))
        args, kwargs = tree_map_only(Tensor, lambda x: x.float() if x.dtype in _HALF else x, (args, kwargs))
        return func(*args, **kwargs)


class _Narrows(TorchDispatchMode):
    """Whether a model of float64 computes something in float32, as norms do whose class says so."""

    found = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        given = isinstance(args[0], Tensor) and args[0].dtype == torch.float64 if args else False
        self.found = self.found or (given and isinstance(made, Tensor) and made.dtype == torch.float32)
        return made


class LogProbCheck:
    """Compares the log probabilities of random tokens (of a model without an output layer: what it returns).

    In float32 they may change by 1e-4, and for large values by as much more; in float64 by 1e-9, or by 1e-5 where the
    model computes something in float32 all the same (2e-8 to 4e-7 are measured of tiny Gemmas and Cohere). In half
    precision a model is as far from what its weights mean as its rounding makes it: that is measured, by computing with
    the same weights in float32. The processed model may be `_TIMES` as far from that, or by the type's eps, on the
    average over all tokens. Where a mixture of experts chooses among near equals, rounding changes some tokens by much:
    there it is the median over the positions.

    Args:
        core: the Hugging Face model, unprocessed.
        cfg: the facts about it.
        without_hooks: opens the context in which the model is run: the user's hooks are not for these runs.

    Raises:
        ProcessingError: its log probabilities are no finite numbers.
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
        self.own = 0.0
        with self._exactly(), _Narrows() if dtypes == {torch.float64} else nullcontext() as narrows:
            self.right = self._log_probs()
        self.allowed = 1e-4 if narrows is None else 1e-5 if narrows.found else 1e-9
        if self.rounds:
            self.own = self._distance()
        if not (math.isfinite(self.own) and bool(self.right.isfinite().all())):
            raise ProcessingError(
                f"the log probabilities of {cfg.model_name} for random tokens are not finite, so that they cannot be "
                "compared. Nothing was changed. With check=False they are not"
            )

    def compare(self, steps: list[str]) -> None:
        """Compares what the model gives now.

        Args:
            steps: the transforms that may be at fault.

        Raises:
            ProcessingError: there is more of a difference than rounding makes.
        """
        difference = self._distance()
        if self.rounds:
            least = max((torch.finfo(dtype).eps for dtype in self.half), default=1e-4)
            allowed, how = max(_TIMES * self.own, least), f"{_TIMES:g} times the model's own rounding"
        else:
            size = max(1.0, float(self.right.abs().max()) / 10)
            allowed, how = self.allowed * size, "rounding"
        if not difference <= allowed:  # nan is no agreement
            which = steps[0] if len(steps) == 1 else f"one of {', '.join(steps)} (check='each' says which)"
            raise ProcessingError(
                f"log probabilities changed by {difference:.2g} (at most {allowed:.2g} is {how}) through {which}. The "
                "model's weights have been changed: load it again. This is a mistake of ours, or of the adapter for "
                f"{type(self.core).__name__}; please report it."
            )

    def _distance(self) -> float:
        difference = (self._log_probs() - self.right).detach()
        if not self.rounds:
            return float(difference.abs().max())
        squares = difference.square().mean(-1).flatten()  # batch*pos
        return float(squares.median() if self.cfg.num_experts else squares.mean()) ** 0.5

    @contextmanager
    def _exactly(self) -> Iterator[None]:
        """The same weights, computed with in float32, and that in full."""
        if not self.rounds:
            yield
            return
        config = self.core.config
        implementation = getattr(config, "_attn_implementation", "eager")
        replaced = implementation not in ("eager", "sdpa")
        try:
            if replaced:  # such as flash attention, which knows half precision only
                config._attn_implementation = "eager"
            with _products_in_full(), InFloat32():
                yield
        finally:
            if replaced:
                config._attn_implementation = implementation

    def _log_probs(self) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        shape = (2, min(16, self.cfg.n_ctx or 16))
        most = max(self.cfg.d_vocab, 1)  # images and sound alone have no tokens
        tokens = torch.randint(most, shape, generator=generator, device="cpu").to(self.cfg.device)
        given = with_required_inputs(self.core, tokens, bool(self.core.config.is_encoder_decoder))
        cache = {"use_cache": False} if "use_cache" in accepted_arguments(type(self.core).forward) else {}
        with self.without_hooks(), evaluating(self.core):
            output = self.core(**given, **cache)
        logits = getattr(output, "logits", None)
        value = output[0] if logits is None else logits
        value = value.to(torch.promote_types(value.dtype, torch.float32))
        return value if logits is None else value.log_softmax(-1)
