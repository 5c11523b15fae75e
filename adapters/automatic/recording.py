"""One recorded run: what entered and left every module, every softmax, and the graph between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from adapters.inputs.arguments import argument_names
from adapters.paths import token_embedding
from adapters.proofs.report import WRONG, said
from adapters.views.kernel_arguments import KernelArguments

#: What two tensors of the same numbers share, whatever their shapes.
Mark = tuple[int, int]


def mark(x: Tensor) -> Mark:
    """The numbers of a tensor in a few bytes."""
    data = x.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return x.numel(), hash(data.numpy().tobytes())


@dataclass(eq=False)
class Seen:
    """A tensor at the border of a module.

    Attributes:
        key: which element of the output it is (None: the output itself, or the input).
        live: the tensor, in the graph.
        value: its numbers at that time.
        mark: see `mark`.
    """

    key: int | None
    live: Tensor
    value: Tensor
    mark: Mark


@dataclass(eq=False)
class ModuleCall:
    """One call of a module.

    Attributes:
        path, module: which.
        start, end: when, in events of the run.
        entered: its first argument, where that is a tensor of numbers.
        left: what it returned: the tensors of numbers.
        n_left: how many elements its output has.
        indices: which elements of its output are tensors of integers; `integers` are these.
        alone: it was given one argument.
        given: the tensors among its arguments, by name.
        changed: what entered it (``input``), or left it (``output``), was written over in place afterwards.
    """

    path: str
    module: nn.Module
    start: int
    end: int = -1
    entered: Seen | None = None
    left: list[Seen] = field(default_factory=list)
    n_left: int = 1
    indices: list[int] = field(default_factory=list)
    alone: bool = False
    given: dict[str, Tensor] = field(default_factory=dict)
    changed: tuple[Literal["input", "output"], ...] = ()
    integers: list[Tensor] = field(default_factory=list)

    @property
    def indices_seen(self) -> Tensor:
        """The last tensor of integers that it returned."""
        return self.integers[-1]

    @property
    def is_leaf(self) -> bool:
        return hasattr(self.module, "base_layer") or not any(True for _ in self.module.children())

    @property
    def is_linear(self) -> bool:
        """It multiplies with a matrix."""
        inner = getattr(self.module, "base_layer", self.module)
        weight = getattr(inner, "weight", None)
        return self.is_leaf and isinstance(weight, Tensor) and weight.ndim == 2 and not isinstance(inner, nn.Embedding)

    def holds(self, other: ModuleCall) -> bool:
        """The other one was made while this one ran."""
        return self.start <= other.start and other.end <= self.end

    def output(self, key: int | None) -> Seen:
        """The element of its output."""
        return next(seen for seen in self.left if seen.key == key)


@dataclass(eq=False)
class Softmax:
    """One softmax.

    Attributes:
        time: when.
        path: the innermost module that ran.
        scores: what entered it, in the graph.
        pattern: what left it.
        query, key: the factors of the product that the scores are made from, ``[batch, head, pos, d]``, where seen.
        fused: it was inside of `scaled_dot_product_attention`.
    """

    time: int
    path: str
    scores: Tensor
    pattern: Tensor
    query: Tensor | None
    key: Tensor | None
    fused: bool


@dataclass(eq=False)
class Recording:
    """What one run was made of.

    Attributes:
        calls: of modules, by the time at which they began.
        softmaxes: in order.
        batch, pos: the shape of the tokens.
        choices: the times at which the best of something were chosen (`topk`).
        lengths: of the rows of tokens that it was given.
    """

    batch: int
    pos: int
    lengths: tuple[int, ...] = ()
    calls: list[ModuleCall] = field(default_factory=list)
    softmaxes: list[Softmax] = field(default_factory=list)
    choices: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._by_path: dict[str, list[ModuleCall]] = {}

    def of(self, path: str) -> list[ModuleCall]:
        """The calls of a module."""
        if not self._by_path:
            for call in self.calls:
                self._by_path.setdefault(call.path, []).append(call)
        return self._by_path.get(path, [])

    def numbered(self, call: ModuleCall) -> str:
        """The path of a call, with its number where its module runs several times."""
        calls = [other for other in self.calls if other.module is call.module]
        return call.path if len(calls) == 1 or "@" in call.path else f"{call.path}@{calls.index(call)}"

    def rename(self, call: ModuleCall, path: str) -> None:
        """Gives a call, and those inside of it, another path."""
        before = call.path
        for each in self.calls:
            if call.holds(each) and (each.path == before or each.path.startswith(f"{before}.")):
                each.path = path + each.path[len(before) :]
        for softmax in self.softmaxes:
            if call.start < softmax.time < call.end and (softmax.path + ".").startswith(f"{before}."):
                softmax.path = path + softmax.path[len(before) :]
        self._by_path.clear()

    def between(self, start: int, end: int) -> list[ModuleCall]:
        """The calls that began and ended between two times."""
        return [call for call in self.calls if start < call.start and call.end <= end]


class NotFound(Exception):
    """Something is not what a declaration could say; the message says what."""


def gradient_of(total: Tensor, live: Tensor) -> Tensor | None:
    """The gradient of a number with respect to what a module was given or returned; None where that has no part in it.

    Raises:
        NotFound: the model has written over what the gradient is made from.
    """
    if not total.requires_grad or not live.requires_grad:
        return None
    try:
        return torch.autograd.grad(total, [live], retain_graph=True, allow_unused=True)[0]
    except RuntimeError as error:
        raise NotFound(f"no gradient can be taken: {said(error)}") from None


def is_linear_through(made: Tensor, through: Tensor, source: Tensor) -> bool:
    """Whether `made` is linear in `through`, and `source` reaches it that way alone.

    Args:
        made: what is made.
        through: a tensor on the way.
        source: what that is made from.
    """
    total = made.pow(2).sum()
    reached, whole = gradient_of(total, through), gradient_of(total, source)
    if reached is None or whole is None:
        return False
    (via,) = torch.autograd.grad(through, [source], [reached], retain_graph=True)
    # Euler: along `through`, the square of what is linear in it grows by twice itself.
    grows = (reached * through).sum() / total - 2
    return abs(float(grows.detach())) < 1e-4 and bool(((via - whole).abs() <= 1e-4 * whole.abs().max()).all())


_SOFTMAXES = {torch.softmax, torch.nn.functional.softmax, Tensor.softmax}
_PRODUCTS = {torch.matmul, Tensor.matmul, Tensor.__matmul__}
_CHOICES = {torch.topk, Tensor.topk}


class _Watch(TorchFunctionMode):
    """Sees the softmaxes of a run. What leaves one is detached: its pattern then is a constant of what follows."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self.recording, self.stack, self.time = recording, list[ModuleCall](), 0
        self.products: list[tuple[Tensor, Tensor]] = []

    def tick(self) -> int:
        self.time += 1
        return self.time

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is scaled_dot_product_attention:
            return self._attention(KernelArguments(*args, **kwargs))
        if func in _PRODUCTS and len(args) == 2 and all(isinstance(x, Tensor) and x.ndim == 4 for x in args):
            self.products.append((args[0], args[1].transpose(-1, -2)))
        elif func is torch.baddbmm and len(args) == 3 and args[1].shape[0] % self.recording.batch == 0:
            rows = (self.recording.batch, -1)  # the heads stand in the batch
            self.products.append((args[1].unflatten(0, rows), args[2].transpose(-1, -2).unflatten(0, rows)))
        out = func(*args, **kwargs)
        if func in _CHOICES:
            self.recording.choices.append(self.tick())
        if func not in _SOFTMAXES or not isinstance(out, Tensor) or out.ndim < 2:
            return out
        scores = args[0] if args else kwargs["input"]
        self._add(scores, out, self.products, fused=False)
        self.products = []
        return out.detach() if out.ndim > 2 else out

    def _add(self, scores: Tensor, pattern: Tensor, products: list[tuple[Tensor, Tensor]], *, fused: bool) -> None:
        path = self.stack[-1].path if self.stack else ""
        queries, keys = scores.shape[-2:]
        query, key = next(
            ((q, k) for q, k in reversed(products) if q.shape[-2] == queries and k.shape[-2] in (keys, keys - 1)),
            (None, None),
        )
        self.recording.softmaxes.append(Softmax(self.tick(), path, scores, pattern.detach().clone(), query, key, fused))

    def _attention(self, given: KernelArguments) -> Tensor:
        """What the kernel computes, in full."""
        query, key, value, attn_mask, _, is_causal, scale, _ = given
        if key.shape[1] != query.shape[1]:
            key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
        scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
        if is_causal:
            attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attn_mask, torch.finfo(scores.dtype).min)
        elif attn_mask is not None:
            scores = scores + attn_mask
        pattern = scores.float().softmax(-1).to(scores.dtype)
        self._add(scores, pattern, [(query, key)], fused=True)
        return pattern.detach() @ value


def record(model: nn.Module, inputs: Mapping[str, Tensor]) -> Recording:
    """Runs a model once, and remembers what passed the borders of its modules. Nothing of the model is changed.

    Args:
        model: a Hugging Face model.
        inputs: what it is given; ``input_ids`` is ``[batch, pos]``. Without them, positions are those of what its
            first blocks make of images or sound, which is not known yet.

    Raises:
        NotFound: it exchanges modules for others in every run, or does not run on this.
    """
    for _ in range(2):  # it may exchange some in its first run (BigBird)
        before = [module for _, module in _modules(model)]
        recording = _recorded(model, inputs)
        if all(module is other for (_, module), other in zip(_modules(model), before, strict=False)):
            return recording
    raise NotFound(f"{type(model).__name__} exchanges modules for others in every run: there is no place for hooks")


def _recorded(model: nn.Module, inputs: Mapping[str, Tensor]) -> Recording:
    tokens = inputs.get("input_ids")
    recording = Recording(*(next(iter(inputs.values())).shape[0], -1) if tokens is None else tokens.shape)
    recording.lengths = tuple(x.shape[1] for name, x in inputs.items() if name in ("input_ids", "decoder_input_ids"))
    watch = _Watch(recording)
    embedding = token_embedding(model)
    handles = []
    watched: list[tuple[ModuleCall, Literal["input", "output"], Tensor, int]] = []

    def enters(path: str, names: list[str]) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            call = ModuleCall(path, module, watch.tick())
            call.entered = _seen(None, args[0] if args else kwargs.get(names[0] if names else ""))
            if call.entered:
                watched.append((call, "input", call.entered.live, call.entered.live._version))
            call.alone = len(args) + len(kwargs) == 1 and "forward" not in module.__dict__
            named = dict(zip(names, args, strict=False)) | kwargs
            call.given = {name: x for name, x in named.items() if isinstance(x, Tensor)}
            watch.stack.append(call)
            recording.calls.append(call)

        return hook

    def leaves(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        call = watch.stack.pop()
        if module is embedding and isinstance(output, Tensor) and output.is_leaf:
            output = output.detach().requires_grad_() * 1  # the graph begins here, also where no parameter is trained
        call.end = watch.tick()
        given = output
        if isinstance(output, Tensor) and output.is_floating_point():
            given = output.clone()  # what the model writes over is not what is kept here
            watched.append((call, "output", given, given._version))
        elements = [(None, output)] if isinstance(output, Tensor) else list(enumerate(elements_of(output)))
        call.n_left = 1 if isinstance(output, Tensor) else len(elements)
        call.left = [seen for key, x in elements if (seen := _seen(key, x))]
        call.indices = [key or 0 for key, x in elements if isinstance(x, Tensor) and not x.is_floating_point()]
        call.integers = [x for _, x in elements if isinstance(x, Tensor) and not x.is_floating_point()]
        return given

    try:
        for path, module in list(_modules(model)):
            handles.append(module.register_forward_pre_hook(enters(path, argument_names(module)), with_kwargs=True))
            handles.append(module.register_forward_hook(leaves))
        with torch.enable_grad(), watch:
            try:
                model(**inputs)
            except WRONG as error:
                raise NotFound(
                    f"it does not run on {' and '.join(inputs)} ({said(error)}): "
                    "pass what it takes as inputs={name: tensor}"
                ) from error
        for call, which, x, version in watched:
            if x._version != version:
                call.changed = (*call.changed, which)
    finally:
        for handle in handles:
            handle.remove()
    return recording


def _modules(model: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """All modules with their paths; of one that another stands before (LoRA), not what is inside."""
    seen: set[int] = set()
    pending = [(path, model)]
    while pending:
        path, module = pending.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        yield path, module
        if not hasattr(module, "base_layer"):
            pending += [(f"{path}.{name}" if path else name, child) for name, child in module.named_children()]


def elements_of(output: Any) -> list[Any]:
    """The elements of what a module returned, by position."""
    if isinstance(output, tuple | list):
        return list(output)
    return list(output.values()) if isinstance(output, Mapping) else []


def _seen(key: int | None, x: Any) -> Seen | None:
    if not isinstance(x, Tensor) or not x.is_floating_point() or not x.ndim:
        return None
    value = x.detach().clone()
    return Seen(key, x, value, mark(value))
