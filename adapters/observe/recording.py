"""The recorder: what entered and left modules in a run, its softmaxes, and the graph between them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from adapters.gathering import Alike, Cut
from adapters.layout import Layout, SpreadModelError
from adapters.observe.calls import BorderTensor, ModuleCall, Recording, Softmax, elements_of, mark
from adapters.observe.errors import WRONG, NotFound, one_line
from adapters.observe.functions import CHOICES, FLAT_PRODUCT, PRODUCTS, SOFTMAXES
from adapters.observe.softmaxes import SoftmaxByHand, may_be_step
from adapters.paths import token_embedding
from adapters.points import Site
from adapters.views.given import place_of_input
from adapters.views.kernel_arguments import KernelArguments


class Recorder:
    """Records the calls of modules inside a ``with`` statement.

    Args:
        modules: which, with their paths.
        recording: what it writes to.
        copies: keep what the tensors hold at the time of the call; False: the tensors themselves, with their graph.
        layout: how the model is spread over processes: what each has a part of is put together.
    """

    def __init__(
        self,
        modules: Iterable[tuple[str, nn.Module]],
        recording: Recording | None = None,
        *,
        copies: bool = True,
        layout: Layout | None = None,
    ) -> None:
        self.modules, self.copies, self._layout = list(modules), copies, layout
        self.recording = Recording() if recording is None else recording
        self.running: list[ModuleCall] = []
        self._time = 0

    def __enter__(self) -> Recording:
        with ExitStack() as attached:
            for path, module in self.modules:
                hook = module.register_forward_pre_hook(partial(self._enter, path), with_kwargs=True)
                attached.callback(hook.remove)
                attached.callback(module.register_forward_hook(self._note_output).remove)
            self._attached = attached.pop_all()
        return self.recording

    def __exit__(self, *error: object) -> None:
        self._attached.close()

    def tick(self) -> int:
        """The time of another event."""
        self._time += 1
        return self._time

    def _enter(self, path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if (cut := self._cut(path, "input")) is not None:
            args = (cut.whole(args[0]), *args[1:])
        # What enters may be changed in place while the module runs.
        call = ModuleCall(path, module, self._kept(args), {name: self._kept(x) for name, x in kwargs.items()})
        call.start = self.tick()
        self.enters(call)
        self.running.append(call)
        self.recording.add(call)

    def _note_output(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        while (call := self.running.pop()).module is not module:
            pass  # one that an error has left
        if (cut := self._cut(call.path, "output")) is not None:
            output = cut.whole(output)
        call.output, call.end = self._kept(output), self.tick()
        return self.leaves(call) if cut is None else cut.part(output)

    def _cut(self, path: str, kind: Literal["input", "output"]) -> Cut | None:
        """How what passes a module is spread over processes; None where it is whole, or nobody knows."""
        try:
            cut = None if self._layout is None else self._layout.cut(Site(path, kind))
            return None if isinstance(cut, Alike) else cut
        except SpreadModelError:
            return None

    def _kept(self, x: Any) -> Any:
        if isinstance(x, Tensor):
            return x.detach().clone() if self.copies else x
        return type(x)(map(self._kept, x)) if type(x) in (tuple, list) else x

    def enters(self, call: ModuleCall) -> None:
        """What else is done when a module begins."""

    def leaves(self, call: ModuleCall) -> Any:
        """What else is done when it ends, and what it is to return; None: what it does."""


class Watch(TorchFunctionMode):
    """Records the softmaxes of a run. What leaves one is detached: its pattern then is a constant of what follows.

    Args:
        recorder: records the run.
    """

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder, self.recording = recorder, recorder.recording
        self.products: list[tuple[Tensor, Tensor]] = []
        self._by_hand = SoftmaxByHand()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is scaled_dot_product_attention:
            return self._attention(KernelArguments(*args, **kwargs))
        if may_be_step(func, args):
            return self._by_hand.step(func, args, kwargs, lambda scores: scores, self._ended)
        if func in PRODUCTS and len(args) == 2 and all(isinstance(x, Tensor) and x.ndim == 4 for x in args):
            self.products.append((args[0], args[1].transpose(-1, -2)))
        elif func is FLAT_PRODUCT and len(args) == 3 and args[1].shape[0] % self.recording.batch == 0:
            rows = (self.recording.batch, -1)  # the heads stand in the batch
            self.products.append((args[1].unflatten(0, rows), args[2].transpose(-1, -2).unflatten(0, rows)))
        out = func(*args, **kwargs)
        if func in CHOICES:
            self.recording.choices.append(self.recorder.tick())
        if func not in SOFTMAXES or not isinstance(out, Tensor):
            return out
        scores = args[0] if args else kwargs["input"]
        self._add(scores, out, self.products if out.ndim > 1 else [], fused=False)
        if out.ndim > 1:
            self.products = []
        return out.detach() if out.ndim > 2 else out

    def _ended(self, scores: Tensor, pattern: Tensor) -> Tensor:
        """A softmax by hand has ended."""
        self._add(scores, pattern, self.products, fused=False)
        self.products, self._by_hand = [], SoftmaxByHand()
        return pattern.detach()

    def _add(self, scores: Tensor, pattern: Tensor, products: list[tuple[Tensor, Tensor]], *, fused: bool) -> None:
        running = self.recorder.running
        queries, keys = scores.shape[-2:] if scores.ndim > 1 else (0, 0)
        fitting = [(q, k) for q, k in products if q.shape[-2] == queries and keys - k.shape[-2] in (0, 1)]
        query, key = fitting[-1] if fitting else (None, None)
        path, time = running[-1].path if running else "", self.recorder.tick()
        self.recording.softmaxes.append(Softmax(time, path, scores, pattern.detach().clone(), query, key, fused))

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


class _GraphRecorder(Recorder):
    """Records what passes the borders of modules with the graph between them, and what is written over there."""

    def __init__(self, model: nn.Module, recording: Recording) -> None:
        super().__init__(_modules(model), recording, copies=False)
        self._embedding = token_embedding(model)
        self._watched: list[tuple[ModuleCall, Literal["input", "output"], Tensor, int]] = []

    def enters(self, call: ModuleCall) -> None:
        place = place_of_input(call.module, call.args, call.kwargs)
        call.entered = _seen(None, call.args[place] if isinstance(place, int) else call.kwargs.get(place or ""))
        if call.entered:
            self._watched.append((call, "input", call.entered.live, call.entered.live._version))

    def leaves(self, call: ModuleCall) -> Any:
        given = output = call.output
        if call.module is self._embedding and isinstance(output, Tensor) and output.is_leaf:
            # The graph begins here, also where no parameter is trained.
            given = output = call.output = output.detach().requires_grad_() * 1
        if isinstance(output, Tensor) and output.is_floating_point():
            given = output.clone()  # what the model writes over is not what is kept here
            self._watched.append((call, "output", given, given._version))
        elements = [(None, output)] if isinstance(output, Tensor) else list(enumerate(elements_of(output)))
        call.left = [seen for key, x in elements if (seen := _seen(key, x))]
        return given

    def note_changes(self) -> None:
        """Says of each call what of it was written over in the run."""
        for call, which, x, version in self._watched:
            if x._version != version:
                call.changed = (*call.changed, which)


def record(model: nn.Module, inputs: Mapping[str, Tensor]) -> Recording:
    """Runs a model once, and remembers what passed the borders of its modules. Nothing of the model is changed.

    Args:
        model: a Hugging Face model.
        inputs: of the model; ``input_ids`` is ``[batch, pos]``. Without them, positions are those of what its
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
    recorder = _GraphRecorder(model, recording)
    with torch.enable_grad(), recorder, Watch(recorder):
        try:
            model(**inputs)
        except WRONG as error:
            raise NotFound(
                f"it does not run on {' and '.join(inputs)} ({one_line(error)}): "
                "pass what it takes as inputs={name: tensor}"
            ) from error
    recorder.note_changes()
    return recording


def _modules(model: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """All modules with their paths; of one that another wraps (LoRA), not what is inside."""
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


def _seen(key: int | None, x: Any) -> BorderTensor | None:
    if not isinstance(x, Tensor) or not x.is_floating_point() or not x.ndim:
        return None
    value = x.detach().clone()
    return BorderTensor(key, x, value, mark(value))
