"""Record one run of a model: the inputs and outputs of its modules, its softmaxes, and the graph.

**In**: a model and its inputs.

**Out**: a `Recording`: each `ModuleCall` in order of time, with the tensors at its border; each
`Softmax`, with its scores, queries and keys; and the times of top-k choices. Inference reads all of
it; proofs read only the calls.

**How**:

1. `CallRecorder` registers a hook before and after each module, which records input and output. An
   event counter at every border gives the order and the nesting of calls.
2. `record` also keeps the graph. A tensor at a border is kept with its numbers and its `mark`, a
   fingerprint of a few bytes that is equal for equal numbers. It is used to look up the readers of
   a tensor.
3. `AttentionRecorder` intercepts torch functions. It records softmaxes, also those computed by hand
   (`_SoftmaxByHand`), computes fused attention in full (`scores_of`, `pattern_of`, `result_of`),
   and detaches the pattern, so that the gradient of `z` reaches only the values.
4. Version counters show which tensors the model overwrites later: such hook points are declared to
   be copied.

**It raises** `NotFound` for a model that fails on its inputs, or replaces its modules in every run.
Hooks and modes are removed after the run, and after an error.

**It does not know** the role of a module. It uses no names, classes or declarations.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from adapters.attention import pattern_of, per_head, result_of, scores_of
from adapters.inputs import argument_names
from adapters.points import Border, Site, is_inside, join, token_embedding
from adapters.spread import Cut, Layout, SpreadModelError
from adapters.views import Args, Kwargs
from adapters.views.heads import KernelArguments
from adapters.views.views import place_of_input

#: A torch function.
Function = Callable[..., Any]

# --------------------------------------------------------------------------------------------------
# Parts of a recording: the calls of modules, the softmaxes, and the tensors at module borders.
# --------------------------------------------------------------------------------------------------


#: A fingerprint of a tensor's numbers, independent of its shape.
Mark = tuple[int, int]


def mark(x: Tensor) -> Mark:
    """Return a fingerprint of a tensor's numbers, a few bytes long."""
    data = x.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return x.numel(), hash(data.numpy().tobytes())


@dataclass(eq=False)
class BorderTensor:
    """A tensor at the border of a module.

    Attributes:
        key: its index in the output; None for the output itself, or the input.
        live: the tensor, with its graph.
        value: a copy of its numbers at that time.
        mark: see `mark`.
        node: its operation in autograd's graph.
    """

    key: int | None
    live: Tensor
    value: Tensor
    mark: Mark
    node: Any = None

    def transposed(self) -> BorderTensor:
        """Return the same tensor with its first two axes exchanged."""
        value = self.value.transpose(0, 1).contiguous()
        return BorderTensor(self.key, self.live.transpose(0, 1), value, mark(value), self.node)


def elements_of(output: Any) -> list[Any]:
    """Return the elements of a module's output, by position."""
    if isinstance(output, tuple | list):
        return list(output)
    if isinstance(output, Mapping):
        return list(output.values())
    return []


def _tensors(x: object) -> Iterator[Tensor]:
    """Yield a tensor, or the tensors among the elements of an output."""
    elements = [x] if isinstance(x, Tensor) else elements_of(x)
    for element in elements:
        if isinstance(element, Tensor):
            yield element


@dataclass(eq=False)
class ModuleCall:
    """One call of a module.

    Attributes:
        path, module: the module and its path.
        args, kwargs: its arguments.
        output: its output.
        start, end: event numbers of the run.
        entered: its first argument, if that is a floating-point tensor and the graph is recorded.
        outputs: the floating-point tensors of its output, if the graph is recorded.
        changed: which of its borders (``input``, ``output``) were overwritten in place afterwards.
    """

    path: str
    module: nn.Module
    args: Args = ()
    kwargs: Kwargs = field(default_factory=dict)
    output: Any = None
    start: int = 0
    end: int = -1
    entered: BorderTensor | None = None
    outputs: list[BorderTensor] = field(default_factory=list)
    changed: tuple[Border, ...] = ()

    @property
    def returned(self) -> BorderTensor:
        """Return the first floating-point tensor of the output."""
        return self.outputs[0]

    @property
    def value(self) -> Tensor:
        """Return the numbers of `returned`."""
        return self.returned.value

    @property
    def input(self) -> Tensor | None:
        """Return the first tensor among the arguments."""
        return next(_tensors([*self.args, *self.kwargs.values()]), None)

    @property
    def result(self) -> Tensor | None:
        """Return the output, or the first tensor of a tuple."""
        return next(_tensors(self.output), None)

    @property
    def named_tensors(self) -> dict[str, Tensor]:
        """Return the tensors among the arguments, by name."""
        positional = zip(argument_names(self.module), self.args, strict=False)
        arguments = {**dict(positional), **self.kwargs}
        return {name: x for name, x in arguments.items() if isinstance(x, Tensor)}

    @property
    def has_one_argument(self) -> bool:
        """Tell whether it has one argument only."""
        if len(self.args) + len(self.kwargs) != 1:
            return False
        return "forward" not in self.module.__dict__

    @property
    def n_outputs(self) -> int:
        """Return the number of elements of the output."""
        if isinstance(self.output, Tensor):
            return 1
        return len(elements_of(self.output))

    @property
    def indices(self) -> Tensor | None:
        """Return the last integer tensor of the output, or None."""
        integers = [x for x in _tensors(self.output) if not x.is_floating_point()]
        return integers[-1] if integers else None

    @property
    def is_leaf(self) -> bool:
        return hasattr(self.module, "base_layer") or not any(True for _ in self.module.children())

    @property
    def is_linear(self) -> bool:
        """Tell whether the module multiplies its input by a matrix."""
        inner = getattr(self.module, "base_layer", self.module)
        weight = getattr(inner, "weight", None)
        if not (self.is_leaf and isinstance(weight, Tensor) and weight.ndim == 2):
            return False
        if isinstance(inner, nn.Embedding):
            return False
        return not self._weighs_heads(weight)

    def _weighs_heads(self, weight: Tensor) -> bool:
        """Tell whether a weight has one number for each column of each head, as in a
        norm (Cohere).
        """
        x = self.entered_value
        if x is None:
            return False
        if x.shape[-2:] != weight.shape:
            return False
        if len(self.outputs) != 1:
            return False
        return self.value.shape == x.shape

    def reads(self, mark: Mark) -> bool:
        """Tell whether the first argument has this mark, the fingerprint of its numbers."""
        if self.entered is None:
            return False
        return self.entered.mark == mark

    @property
    def only_output(self) -> BorderTensor | None:
        """Return the output, if it is a single floating-point tensor."""
        is_tensor = bool(self.outputs) and self.returned.key is None
        if is_tensor and self.n_outputs == 1:
            return self.returned
        return None

    def holds(self, other: ModuleCall) -> bool:
        """Tell whether another call ran inside this one."""
        if not (self.start <= other.start):
            return False
        return other.end <= self.end

    def element(self, key: int | None) -> BorderTensor:
        """Return the floating-point tensor at an index of the output."""
        return next(tensor for tensor in self.outputs if tensor.key == key)

    @property
    def entered_value(self) -> Tensor | None:
        """Return the numbers of `entered`, or None."""
        if self.entered is None:
            return None
        return self.entered.value


def tightest(around: Iterable[ModuleCall]) -> ModuleCall | None:
    """Return the innermost of nested calls; None for no calls."""
    return min(around, key=lambda call: call.end - call.start, default=None)


#: The calls of each module, by its path.
Calls = dict[str, list[ModuleCall]]


@dataclass(eq=False)
class Softmax:
    """A recorded softmax.

    Attributes:
        time: its event number.
        path: the path of the innermost running module.
        scores: its input, with the graph.
        pattern: its output.
        query, key: the factors of the query-key product, ``[batch, head, pos, d]``, if recorded.
    """

    time: int
    path: str
    scores: Tensor
    pattern: Tensor
    query: Tensor | None = None
    key: Tensor | None = None

    def factor(self, letter: str) -> Tensor | None:
        """Return the queries for ``q``, the keys for any other letter."""
        if letter == "q":
            return self.query
        return self.key


@dataclass(eq=False)
class Recording:
    """Record of one run.

    Attributes:
        batch, pos: the shape of the tokens; -1 if unknown.
        lengths: the lengths of the rows of tokens in its inputs.
        calls: the calls of modules, in order of their start.
        by_path: the same calls, by module path.
        softmaxes: the softmaxes, in order.
        choices: the event numbers of `topk` calls.
    """

    batch: int = -1
    pos: int = -1
    lengths: tuple[int, ...] = ()
    calls: list[ModuleCall] = field(default_factory=list)
    by_path: Calls = field(default_factory=dict)
    softmaxes: list[Softmax] = field(default_factory=list)
    choices: list[int] = field(default_factory=list)

    def add(self, call: ModuleCall) -> None:
        """Add a call at its start."""
        self.calls.append(call)
        self.by_path.setdefault(call.path, []).append(call)

    def turned(self, x: Tensor) -> bool:
        """Tell whether a tensor is ``[pos, batch, ...]``, with as many positions as a row of the
        input."""
        if x.ndim < 2:
            return False
        if x.shape[0] not in self.lengths:
            return False
        return x.shape[1] == self.batch != x.shape[0]

    def of(self, path: str) -> list[ModuleCall]:
        """Return the calls of a module."""
        return self.by_path.get(path, [])

    def numbered(self, call: ModuleCall) -> str:
        """Return the path of a call, with its number if its module runs several times."""
        calls = [other for other in self.calls if other.module is call.module]
        if len(calls) == 1 or "@" in call.path:
            return call.path
        return f"{call.path}@{calls.index(call)}"

    def first_choice(self, call: ModuleCall) -> int | None:
        """Return the event number of the first `topk` in a call, or None."""
        return next((time for time in self.choices if call.start < time < call.end), None)

    def rename(self, call: ModuleCall, path: str) -> None:
        """Change the path of a call and of the calls inside it."""
        before = call.path
        for inner in self.inside(call):
            if is_inside(inner.path, before):
                inner.path = path + inner.path[len(before) :]
        for softmax in self.softmaxes:
            if call.start < softmax.time < call.end and is_inside(softmax.path, before):
                softmax.path = path + softmax.path[len(before) :]
        self.by_path.clear()
        for other in self.calls:
            self.by_path.setdefault(other.path, []).append(other)

    def inside(self, call: ModuleCall) -> list[ModuleCall]:
        """Return the calls inside a call, that call included."""
        return [other for other in self.calls if call.holds(other)]

    def before(self, time: int) -> list[ModuleCall]:
        """Return the calls that ended before a time."""
        return [call for call in self.calls if -1 < call.end <= time]

    def after(self, time: int) -> list[ModuleCall]:
        """Return the calls that started after a time."""
        return [call for call in self.calls if call.start > time]

    def between(self, start: int, end: int) -> list[ModuleCall]:
        """Return the calls that started and ended between two times."""
        return [call for call in self.calls if start < call.start and call.end <= end]

    def softmaxes_between(self, start: int, end: int) -> list[Softmax]:
        """Return the softmaxes between two times, except those over one-dimensional tensors such as
        parameters.
        """
        during = [softmax for softmax in self.softmaxes if start < softmax.time < end]
        return [softmax for softmax in during if softmax.scores.ndim > 1]


# --------------------------------------------------------------------------------------------------
# Modes for observing a model.
# --------------------------------------------------------------------------------------------------


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Switch to evaluation mode inside a ``with`` statement, and restore every module's mode
    afterwards.

    Args:
        model: the model.

    Example:
        >>> from torch import nn
        >>> from adapters.observe.observe import evaluating
        >>> with evaluating(model := nn.Dropout()):
        ...     inside = model.training
        >>> inside, model.training
        (False, True)
    """
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def outside_of_modes(model: nn.Module) -> Iterator[None]:
    """Enable gradients, and disable inference mode and autocast, inside a ``with`` statement.

    Random state is restored afterwards: some models draw random numbers in evaluation mode too
    (Reformer, BigBird).

    Args:
        model: the model; autocast is disabled for its device types.

    Example:
        >>> import torch
        >>> from adapters.observe.observe import outside_of_modes
        >>> with torch.inference_mode(), outside_of_modes(torch.nn.Linear(2, 2)):
        ...     torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        (True, False)
    """
    devices = {parameter.device for parameter in model.parameters()}
    accelerators = [device for device in devices if device.type == "cuda"]
    with ExitStack() as stack:
        stack.callback(random.setstate, random.getstate())
        stack.enter_context(torch.random.fork_rng(accelerators))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        for kind in sorted({device.type for device in devices}):
            if torch.amp.is_autocast_available(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


# --------------------------------------------------------------------------------------------------
# Softmaxes computed by hand: ``exp(x - max) / sum``, and the exponential of a ``log_softmax``.
# --------------------------------------------------------------------------------------------------


_LOGARITHMS = {torch.log_softmax, torch.nn.functional.log_softmax, Tensor.log_softmax}
_MAXIMA = {torch.max, Tensor.max, torch.amax, Tensor.amax}
_DIFFERENCES = {torch.sub, Tensor.sub, Tensor.__sub__}
_EXPONENTIALS = {torch.exp, Tensor.exp}
_SUMS = {torch.sum, Tensor.sum}
_QUOTIENTS = {torch.div, Tensor.div, Tensor.__truediv__, torch.true_divide, Tensor.true_divide}
#: The functions that compute the steps of a softmax by hand.
STEPS = _LOGARITHMS | _MAXIMA | _DIFFERENCES | _EXPONENTIALS | _SUMS | _QUOTIENTS


def may_be_step(func: Function, args: Args) -> bool:
    """Tell whether a function may be a step of a softmax over the rows of a tensor with three axes
    or more.
    """
    if func not in STEPS:
        return False
    if not bool(args):
        return False
    if not isinstance(args[0], Tensor):
        return False
    return args[0].ndim > 2


class _SoftmaxByHand:
    """Tracker that recognises a softmax computed by hand in a module's torch functions."""

    def __init__(self) -> None:
        #: Keeps tensors alive, so that an id is not reused.
        self._alive: list[Tensor] = []
        #: The source of each intermediate tensor, by its kind (``maximum``, ``exponent``,
        #: ``logarithm``, ``share``, ``total``) and id.
        self._sources: dict[tuple[str, int], Tensor] = {}

    def step(
        self,
        func: Function,
        args: Args,
        kwargs: Mapping[str, Any],
        begins: Callable[[Tensor], Tensor],
        ends: Callable[[Tensor, Tensor], Tensor],
    ) -> Any:
        """Call a function that may be a step.

        Args:
            func, args, kwargs: the function and its arguments.
            begins: called with the scores before they are exponentiated (subtracting the maximum
                alone may have another purpose). Its result replaces the scores.
            ends: called with the scores and the pattern after the last step. Its result replaces
                the pattern.
        """
        x: Tensor = args[0]
        other = args[1] if len(args) > 1 else None
        share = self._source("share", x)
        if func in _LOGARITHMS:
            x = begins(x)
            return self._keep("logarithm", func(x, *args[1:], **kwargs), x)
        if func in _EXPONENTIALS:
            return self._exponential(func, args, kwargs, begins, ends)
        result = func(*args, **kwargs)
        if func in _DIFFERENCES and self._source("maximum", other) is x:
            return self._keep("exponent", result, x)
        if func in _QUOTIENTS and share is not None and self._source("total", other) is x:
            return ends(share, result)
        if func in _SUMS and share is not None and result.ndim == x.ndim:
            self._keep("total", result, x)
        if func in _MAXIMA:
            maximum = result if isinstance(result, Tensor) else result[0]
            if maximum.ndim == x.ndim and maximum.shape[-1] == 1:
                self._keep("maximum", maximum, x)
        return result

    def _exponential(
        self,
        func: Function,
        args: Args,
        kwargs: Mapping[str, Any],
        begins: Callable[[Tensor], Tensor],
        ends: Callable[[Tensor, Tensor], Tensor],
    ) -> Any:
        """Call an exponential, of the pattern's logarithm or of scores minus their maximum."""
        x = args[0]
        if (scores := self._source("logarithm", x)) is not None:
            return ends(scores, func(*args, **kwargs))
        if (scores := self._source("exponent", x)) is None:
            return func(*args, **kwargs)
        new = begins(scores)
        if new is not scores:
            x = new - new.amax(-1, keepdim=True)
        return self._keep("share", func(x, *args[1:], **kwargs), new)

    def _source(self, kind: str, x: object) -> Tensor | None:
        """Return the source of an intermediate tensor of this kind, or None."""
        return self._sources.get((kind, id(x)))

    def _keep(self, kind: str, x: Tensor, source: Tensor) -> Tensor:
        self._alive += [x, source]
        self._sources[kind, id(x)] = source
        return x


# --------------------------------------------------------------------------------------------------
# The torch functions by which attention and routers are recognised.
# --------------------------------------------------------------------------------------------------


#: Functions that compute a softmax. The fused kernel is handled separately.
SOFTMAXES = {torch.softmax, torch.nn.functional.softmax, Tensor.softmax}
#: Functions with which eager attention multiplies queries and keys.
PRODUCTS = {torch.matmul, Tensor.matmul, Tensor.__matmul__}
#: The same with heads in the batch axis, ``[(batch head), query, key]``. Its first argument is the
#: tensor that the product is added to.
FLAT_PRODUCT = torch.baddbmm
#: Functions with which a linear layer multiplies its input and its matrix.
LINEAR_PRODUCTS = {torch.nn.functional.linear, *PRODUCTS}
#: Functions that select the top k, as a router selects experts.
CHOICES = {torch.topk, Tensor.topk}


# --------------------------------------------------------------------------------------------------
# Errors that a wrong declaration may cause in a run, and their messages.
# --------------------------------------------------------------------------------------------------


#: Errors that a wrong declaration may cause in a run.
WRONG = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError)


class NotFound(Exception):
    """Error: something could not be inferred, or cannot be declared; the message says what."""


def one_line(error: BaseException) -> str:
    """Format an error as one line.

    Args:
        error: the error. `OutOfMemoryError` says nothing about the model, and is raised again.
    """
    if isinstance(error, torch.OutOfMemoryError):
        raise error
    words = " ".join(str(error).split())
    if words:
        return f"{type(error).__name__}: {words}"[:300]
    return type(error).__name__


class CallRecorder:
    """Recorder of module calls inside a ``with`` statement.

    Args:
        modules: the modules, with their paths.
        recording: the recording to write to.
        copies: keep copies of the tensors at the time of the call; False: keep the tensors, with
            their graph.
        layout: how the model is spread over processes. Sharded tensors are gathered.
        graph: record the tensors at module borders with their graph, and in-place changes of them.
            The first module must be the model.
    """

    def __init__(
        self,
        modules: Iterable[tuple[str, nn.Module]],
        recording: Recording | None = None,
        *,
        copies: bool = True,
        layout: Layout | None = None,
        graph: bool = False,
    ) -> None:
        self.modules = list(modules)
        self.copies = copies
        self._layout = layout
        self._graph = graph
        self._embedding = token_embedding(self.modules[0][1]) if graph else None
        self._watched: list[tuple[ModuleCall, Border, Tensor, int]] = []
        self.recording = Recording() if recording is None else recording
        self.running: list[ModuleCall] = []
        self._time = 0
        #: The copy of each tensor that is still alive.
        self._held: MutableMapping[Tensor, Tensor] = WeakTensorKeyDictionary()

    def __enter__(self) -> Recording:
        with ExitStack() as attached:
            for path, module in self.modules:
                hook = module.register_forward_pre_hook(
                    partial(self._enter, path), with_kwargs=True
                )
                attached.callback(hook.remove)
                attached.callback(module.register_forward_hook(self._note_output).remove)
            self._attached = attached.pop_all()
        return self.recording

    def __exit__(self, *error: object) -> None:
        self._attached.close()
        for call, which, x, version in self._watched:
            if x._version != version:
                call.changed = (*call.changed, which)

    def tick(self) -> int:
        """Return the number of the next event."""
        self._time += 1
        return self._time

    def _enter(self, path: str, module: nn.Module, args: Args, kwargs: Kwargs) -> None:
        if (cut := self._cut(path, "input")) is not None:
            args = (cut.whole(args[0]), *args[1:])
        # The module may change its input in place.
        kept_kwargs = {name: self._kept(x) for name, x in kwargs.items()}
        call = ModuleCall(path, module, self._kept(args), kept_kwargs)
        call.start = self.tick()
        place = place_of_input(module, args, kwargs) if self._graph else None
        if place is not None:
            x = args[place] if isinstance(place, int) else kwargs.get(place)
            call.entered = _border_tensor(None, x)
        if call.entered:
            self._watch(call, "input", call.entered.live)
        self.running.append(call)
        self.recording.add(call)

    def _watch(self, call: ModuleCall, border: Border, x: Tensor) -> None:
        """Note the version of a tensor, to see at the end whether it was overwritten."""
        self._watched.append((call, border, x, x._version))

    def _note_output(self, module: nn.Module, args: Args, output: Any) -> Any:
        while (call := self.running.pop()).module is not module:
            pass  # a call that ended in an error
        if (cut := self._cut(call.path, "output")) is not None:
            output = cut.whole(output)
        call.output = self._kept(output)
        call.end = self.tick()
        if cut is not None:
            return cut.part(output)
        if self._graph:
            return self._with_graph(call)
        return None

    def _cut(self, path: str, kind: Border) -> Cut | None:
        """Return how a tensor at a module's border is sharded over processes; None if it is whole
        or the layout is unknown.
        """
        try:
            cut = None if self._layout is None else self._layout.cut(Site(path, kind))
            if cut is None or cut.is_whole:
                return None
            return cut
        except SpreadModelError:
            return None

    def _kept(self, x: Any) -> Any:
        if isinstance(x, Tensor):
            if self.copies:
                return self.copied(x)
            return x
        if type(x) in (tuple, list):
            return type(x)(map(self._kept, x))
        return x

    def copied(self, x: Tensor) -> Tensor:
        """Return a copy of a tensor's current numbers, shared by all readers until the tensor
        changes.
        """
        copy = self._held.get(x) if type(x) is Tensor and not x.is_meta else None
        # Versions do not count changes of `.data`.
        if copy is None or copy.shape != x.shape or not torch.equal(copy, x):
            copy = self._held[x] = x.detach().clone()
        return copy

    def _with_graph(self, call: ModuleCall) -> Any:
        """Record a module's output with its graph, and return the replacement of the output."""
        output = call.output
        if not isinstance(output, Tensor):
            elements = enumerate(elements_of(output))
            tensors = [_border_tensor(key, x) for key, x in elements]
            call.outputs = [tensor for tensor in tensors if tensor is not None]
            return output
        if call.module is self._embedding and output.is_leaf:
            # Start the graph here, even if no parameter is trained.
            output = call.output = output.detach().requires_grad_() * 1
        if (tensor := _border_tensor(None, output)) is not None:
            call.outputs = [tensor]
        if not output.is_floating_point():
            return output
        clone = output.clone()  # the model may overwrite the clone, not the recorded tensor
        self._watch(call, "output", clone)
        return clone


class Watch(TorchFunctionMode):
    """Mode that intercepts the torch functions that modules call; `calling` or a subclass defines
    the action.
    """

    #: The functions that `call` handles; None: all.
    looked_at: Collection[Function] | None = None
    #: Called instead of each function, with the function and its arguments; None: a subclass
    #: overrides `call`.
    _instead: Callable[[Function, Args, Kwargs], Any] | None = None

    @classmethod
    def calling(cls, instead: Callable[[Function, Args, Kwargs], Any]) -> Self:
        """Return a mode that calls `instead` in place of each function."""
        mode = cls()
        mode._instead = instead
        return mode

    @property
    def in_user_function(self) -> bool:
        """Tell whether a user's function is running: its computation is not the model's."""
        return False

    def __torch_function__(
        self, func: Function, types: Any, args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        kwargs = {} if kwargs is None else kwargs
        if func is Tensor.unflatten:  # torch.compile cannot call it as a function
            return args[0].unflatten(*args[1:], **kwargs)
        if (self.looked_at is not None and func not in self.looked_at) or self.in_user_function:
            return func(*args, **kwargs)
        return self.call(func, args, kwargs)

    def call(self, func: Function, args: Args, kwargs: Kwargs) -> Any:
        """Call the function, or its replacement."""
        if self._instead is None:
            raise NotImplementedError
        return self._instead(func, args, kwargs)


#: Functions by which attention is recognised; all others are called unchanged.
_OF_ATTENTION: set[Any] = {
    scaled_dot_product_attention,
    *SOFTMAXES,
    *PRODUCTS,
    FLAT_PRODUCT,
    *STEPS,
}


class SeesAttention(Watch):
    """Mode that recognises attention among a module's torch functions: its kernel, its product, its
    softmax.
    """

    looked_at: Collection[Function] | None = _OF_ATTENTION

    #: The state of a softmax by hand that is in progress.
    by_hand: _SoftmaxByHand | None = None

    def call(self, func: Function, args: Args, kwargs: Kwargs) -> Any:
        """Call a module's function; pass the steps of attention to the methods below."""
        if func is scaled_dot_product_attention:
            return self.scaled_dot_product(func, KernelArguments(*args, **kwargs))
        if func in SOFTMAXES:
            return self.softmax(func, args, kwargs)
        if may_be_step(func, args) and self.follows_steps:
            self.by_hand = self.by_hand or _SoftmaxByHand()
            return self.by_hand.step(func, args, kwargs, self.begins, self.ends)
        if func in PRODUCTS and len(args) == 2:
            return self._product_of_heads(func, args, kwargs)
        if func is FLAT_PRODUCT and len(args) == 3:
            return self._flat_product(func, args, kwargs)
        return func(*args, **kwargs)

    def _product_of_heads(self, func: Function, args: Args, kwargs: Kwargs) -> Any:
        """Multiply ``[batch, head, pos, d_head]`` by ``[batch, head, d_head, pos]``, or call a
        product of other tensors.
        """
        if not all(isinstance(x, Tensor) and x.ndim == 4 for x in args):
            return func(*args, **kwargs)
        query = args[0]
        key = args[1].transpose(-1, -2)
        new_query, new_key = self.product(query, key)
        if new_query is query and new_key is key:
            return func(*args, **kwargs)
        return func(new_query, new_key.transpose(-1, -2), **kwargs)

    def _flat_product(self, func: Function, args: Args, kwargs: Kwargs) -> Any:
        """Multiply ``[(batch head), pos, d_head]`` by ``[(batch head), d_head, pos]``, or call a
        product of other tensors.
        """
        sizes = self.flat_heads(args[1])
        if sizes is None:
            return func(*args, **kwargs)
        query = args[1].unflatten(0, sizes)
        key = args[2].transpose(-1, -2).unflatten(0, sizes)
        query, key = self.product(query, key)
        return func(args[0], query.flatten(0, 1), key.transpose(-1, -2).flatten(0, 1), **kwargs)

    @property
    def follows_steps(self) -> bool:
        """Tell whether to track softmaxes by hand now."""
        return True

    def scaled_dot_product(
        self, kernel: Callable[..., Tensor], arguments: KernelArguments
    ) -> Tensor:
        """Return the result of a `scaled_dot_product_attention` call with this kernel."""
        raise NotImplementedError

    def softmax(self, func: Function, args: Args, kwargs: Kwargs) -> Any:
        """Return the result of a softmax call."""
        raise NotImplementedError

    def begins(self, scores: Tensor) -> Tensor:
        """Return the scores with which a softmax by hand continues."""
        return scores

    def ends(self, scores: Tensor, pattern: Tensor) -> Tensor:
        """Return the pattern with which the model continues after a softmax by hand."""
        raise NotImplementedError

    def product(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Return the queries and keys to multiply, ``[batch, head, pos, d_head]``: the arguments,
        or replacements.
        """
        raise NotImplementedError

    def flat_heads(self, query: Tensor) -> tuple[int, int] | None:
        """Return the sizes of batch and heads in a joint axis (-1: the rest); None if the axis is
        not joint.
        """
        raise NotImplementedError


class AttentionRecorder(SeesAttention):
    """Recorder of a run's softmaxes. Their outputs are detached, so that patterns are constants of
    the later computation.

    Args:
        recorder: the recorder of the run.
    """

    looked_at = None  # top-k functions are recorded too

    def __init__(self, recorder: CallRecorder) -> None:
        super().__init__()
        self.recorder = recorder
        self.recording = recorder.recording
        self.products: list[tuple[Tensor, Tensor]] = []

    def call(self, func: Function, args: Args, kwargs: Kwargs) -> Any:
        """Call the function as `SeesAttention` does, and record when a top-k is computed."""
        result = super().call(func, args, kwargs)
        if func in CHOICES:
            self.recording.choices.append(self.recorder.tick())
        return result

    def softmax(self, func: Function, args: Args, kwargs: Kwargs) -> Any:
        """Record a softmax."""
        pattern = func(*args, **kwargs)
        if not isinstance(pattern, Tensor):
            return pattern
        scores = args[0] if args else kwargs["input"]
        if pattern.ndim < 2:
            self._add(scores, pattern, [])
            return pattern
        self._add(scores, pattern, self.products)
        self.products = []
        if pattern.ndim > 2:
            return pattern.detach()
        return pattern

    def product(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Keep the factors for the softmax that follows."""
        self.products.append((query, key))
        return query, key

    def flat_heads(self, query: Tensor) -> tuple[int, int] | None:
        """Return the sizes into which to split a joint axis of batch and heads: the recording's
        batch size, and -1 for the heads. Return None if the axis is not a multiple of that size.
        """
        if query.shape[0] % self.recording.batch:
            return None
        return (self.recording.batch, -1)

    def ends(self, scores: Tensor, pattern: Tensor) -> Tensor:
        """Record a softmax by hand."""
        self._add(scores, pattern, self.products)
        self.products = []
        self.by_hand = None
        return pattern.detach()

    def _add(self, scores: Tensor, pattern: Tensor, products: list[tuple[Tensor, Tensor]]) -> None:
        """Record a softmax, with the most recent product that has its shape."""
        running = self.recorder.running
        softmax = Softmax(
            self.recorder.tick(),
            running[-1].path if running else "",
            scores,
            pattern.detach().clone(),
        )
        if scores.ndim > 1:
            n_queries, n_keys = scores.shape[-2:]
            for query, key in products:
                n_sinks = n_keys - key.shape[-2]
                if query.shape[-2] == n_queries and n_sinks in (0, 1):
                    softmax.query = query
                    softmax.key = key
        self.recording.softmaxes.append(softmax)

    def scaled_dot_product(
        self, kernel: Callable[..., Tensor], arguments: KernelArguments
    ) -> Tensor:
        """Compute the kernel's result with explicit scores and pattern."""
        query = arguments.query
        key = arguments.key
        mask = arguments.attn_mask
        scale = arguments.scale
        if arguments.is_causal:
            shape = query.shape[-2], key.shape[-2]
            mask = torch.ones(shape, dtype=torch.bool, device=query.device).tril()
        if scale is None:
            scale = query.shape[-1] ** -0.5
        scores = scores_of(query, key, scale, mask=mask)
        pattern = pattern_of(scores)
        self._add(scores, pattern, [(query, per_head(key, query.shape[1]))])
        return result_of(pattern.detach(), arguments.value)


def record(model: nn.Module, inputs: Mapping[str, Tensor]) -> Recording:
    """Run a model once and record the tensors at the borders of its modules. The model is not
    changed.

    Args:
        model: a Hugging Face model.
        inputs: the model's inputs; ``input_ids`` is ``[batch, pos]``. Without tokens, the number of
            positions depends on the first blocks (images, sound) and is not known yet.

    Raises:
        NotFound: the model replaces modules in every run, or fails on these inputs.
    """
    for _ in range(2):  # a model may replace modules in its first run (BigBird)
        before = [module for _, module in _modules(model)]
        recording = _recorded(model, inputs)
        after = [module for _, module in _modules(model)]
        if all(module is other for module, other in zip(after, before, strict=False)):
            return recording
    raise NotFound(
        f"{type(model).__name__} exchanges modules for others in every run: there is no place for"
        " hooks"
    )


def _recorded(model: nn.Module, inputs: Mapping[str, Tensor]) -> Recording:
    tokens = inputs.get("input_ids")
    if tokens is None:
        first_input = next(iter(inputs.values()))
        recording = Recording(first_input.shape[0])
    else:
        recording = Recording(*tokens.shape)
    texts = [inputs[name] for name in ("input_ids", "decoder_input_ids") if name in inputs]
    recording.lengths = tuple(text.shape[1] for text in texts)
    recorder = CallRecorder(_modules(model), recording, copies=False, graph=True)
    frozen = [p for p in model.parameters() if p.is_floating_point() and not p.requires_grad]
    with torch.enable_grad(), recorder, AttentionRecorder(recorder):
        for p in frozen:
            p.requires_grad_()
        try:
            model(**inputs)
        except WRONG as error:
            raise NotFound(
                f"it does not run on {' and '.join(inputs)} ({one_line(error)}): "
                "pass what it takes as inputs={name: tensor}"
            ) from error
        finally:
            for p in frozen:
                p.requires_grad_(False)
    return recording


def _modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield all modules with their paths, except submodules of a wrapped layer (LoRA)."""
    visited: set[int] = set()
    pending = [("", model)]
    while pending:
        path, module = pending.pop()
        if id(module) in visited:
            continue
        visited.add(id(module))
        yield path, module
        if not hasattr(module, "base_layer"):
            for name, child in module.named_children():
                pending.append((join(path, name), child))


def _border_tensor(key: int | None, x: Any) -> BorderTensor | None:
    """Return a floating-point tensor with its numbers, or None for anything else."""
    if not isinstance(x, Tensor):
        return None
    if not x.is_floating_point():
        return None
    if not x.ndim:
        return None
    value = x.detach().clone()
    return BorderTensor(key, x, value, mark(value), x.grad_fn)
