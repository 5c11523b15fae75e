"""Recording: what entered and left every module in one run, its softmaxes, and the graph between them.

**In**: a model and its inputs.

**Out**: a `Recording`: each `ModuleCall` in order of time, with the tensors that crossed its border; each `Softmax`,
with the scores and the queries and keys that met before it; when a choice (a top-k) was made. Inference reads it, and
proofs read the calls alone.

**How**:

1. `CallRecorder` puts a hook before and behind each module, which notes what enters and leaves. A clock that ticks at
   every border says what ran inside of what, and before what.
2. `record` keeps the graph, too: a tensor at a border is kept with its numbers, and with its `mark`, a few bytes that
   are the same for all tensors of the same numbers, so that who reads what can be looked up.
3. `AttentionRecorder` sees torch's own functions. It records softmaxes, those by hand included (`SoftmaxByHand`),
   computes fused attention in full (`scores_of`, `pattern_of`, `result_of`), and lets the pattern out as a constant: so
   the gradient of `z` reaches the values alone.
4. Version counters tell what the model has written over since: such a place is declared to be copied.

**It refuses** (`NotFound`) a model that does not run on what it is given, or exchanges its modules in every run. Hooks
and modes are gone after the run, and after an error.

**It does not know** what a module is for. Nothing here goes by a name, a class or a declaration.
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
from adapters.points import Border, Site, is_inside, token_embedding
from adapters.spread import Cut, Layout, SpreadModelError
from adapters.views import Args, Kwargs
from adapters.views.attention import KernelArguments
from adapters.views.views import place_of_input

#: A function of torch's.
Function = Callable[..., Any]

# ----------------------------------------------------------------------------------------------------------------------
# What a recording is made of: the calls of modules, the softmaxes, and the tensors at the borders of modules.
# ----------------------------------------------------------------------------------------------------------------------


#: What two tensors of the same numbers share, whatever their shapes.
Mark = tuple[int, int]


def mark(x: Tensor) -> Mark:
    """The numbers of a tensor in a few bytes."""
    data = x.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return x.numel(), hash(data.numpy().tobytes())


@dataclass(eq=False)
class BorderTensor:
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

    def transposed(self) -> BorderTensor:
        """The same with its first two axes exchanged."""
        value = self.value.transpose(0, 1).contiguous()
        return BorderTensor(self.key, self.live.transpose(0, 1), value, mark(value))


def elements_of(output: Any) -> list[Any]:
    """The elements of what a module returned, by position."""
    if isinstance(output, tuple | list):
        return list(output)
    return list(output.values()) if isinstance(output, Mapping) else []


def _tensors(x: object) -> Iterator[Tensor]:
    yield from (value for value in ([x] if isinstance(x, Tensor) else elements_of(x)) if isinstance(value, Tensor))


@dataclass(eq=False)
class ModuleCall:
    """One call of a module.

    Attributes:
        path, module: which.
        args, kwargs: what it was called with.
        output: what it returned.
        start, end: when, in events of the run.
        entered: its first argument, where that is a tensor of numbers and the graph is recorded.
        left: likewise the tensors of numbers that it returned.
        changed: what entered it (``input``), or left it (``output``), was written over in place afterwards.
    """

    path: str
    module: nn.Module
    args: Args = ()
    kwargs: Kwargs = field(default_factory=dict)
    output: Any = None
    start: int = 0
    end: int = -1
    entered: BorderTensor | None = None
    left: list[BorderTensor] = field(default_factory=list)
    changed: tuple[Border, ...] = ()

    @property
    def returned(self) -> BorderTensor:
        """The first tensor of numbers that it returned."""
        return self.left[0]

    @property
    def input(self) -> Tensor | None:
        """The first tensor that it was given."""
        return next((x for x in (*self.args, *self.kwargs.values()) if isinstance(x, Tensor)), None)

    @property
    def result(self) -> Tensor | None:
        """What it returned, or the first tensor of a tuple."""
        return next(_tensors(self.output), None)

    @property
    def given(self) -> dict[str, Tensor]:
        """The tensors among its arguments, by name."""
        named = dict(zip(argument_names(self.module), self.args, strict=False)) | self.kwargs
        return {name: x for name, x in named.items() if isinstance(x, Tensor)}

    @property
    def alone(self) -> bool:
        """Whether it was given one argument."""
        return len(self.args) + len(self.kwargs) == 1 and "forward" not in self.module.__dict__

    @property
    def n_left(self) -> int:
        """How many elements its output has."""
        return 1 if isinstance(self.output, Tensor) else len(elements_of(self.output))

    @property
    def indices(self) -> list[int]:
        """Which elements of its output are tensors of integers."""
        elements = [self.output] if isinstance(self.output, Tensor) else elements_of(self.output)
        return [key for key, x in enumerate(elements) if isinstance(x, Tensor) and not x.is_floating_point()]

    @property
    def indices_seen(self) -> Tensor:
        """The last tensor of integers that it returned."""
        return [x for x in _tensors(self.output) if not x.is_floating_point()][-1]

    @property
    def is_leaf(self) -> bool:
        return hasattr(self.module, "base_layer") or not any(True for _ in self.module.children())

    @property
    def is_linear(self) -> bool:
        """It multiplies with a matrix."""
        inner = getattr(self.module, "base_layer", self.module)
        weight = getattr(inner, "weight", None)
        if not (self.is_leaf and isinstance(weight, Tensor) and weight.ndim == 2):
            return False
        return not isinstance(inner, nn.Embedding) and not self._weighs_heads(weight)

    def _weighs_heads(self, weight: Tensor) -> bool:
        """A weight is a number for each column of each head, as in a norm (Cohere)."""
        x = self.entered.value.shape if self.entered else ()
        return x[-2:] == weight.shape and len(self.left) == 1 and self.returned.value.shape == x

    def reads(self, mark: Mark) -> bool:
        """Its first argument has these numbers."""
        return self.entered is not None and self.entered.mark == mark

    @property
    def whole(self) -> BorderTensor | None:
        """The tensor of numbers that it returned, where that is all it did."""
        return self.returned if self.n_left == 1 and self.left and self.returned.key is None else None

    def holds(self, other: ModuleCall) -> bool:
        """The other one was made while this one ran."""
        return self.start <= other.start and other.end <= self.end

    def element(self, key: int | None) -> BorderTensor:
        """The tensor of numbers at a place of its output."""
        return next(seen for seen in self.left if seen.key == key)


def tightest(around: Iterable[ModuleCall]) -> ModuleCall | None:
    """Of calls around the same, the innermost; None of none."""
    return min(around, key=lambda call: call.end - call.start, default=None)


#: The calls of each module, by its path.
Calls = dict[str, list[ModuleCall]]


@dataclass(eq=False)
class Softmax:
    """One softmax.

    Attributes:
        time: when.
        path: the innermost module that ran.
        scores: what entered it, in the graph.
        pattern: what left it.
        query, key: the factors of the product that the scores are made from, ``[batch, head, pos, d]``, where seen.
    """

    time: int
    path: str
    scores: Tensor
    pattern: Tensor
    query: Tensor | None
    key: Tensor | None

    def factor(self, letter: str) -> Tensor | None:
        """The queries (``q``), or else the keys."""
        return self.query if letter == "q" else self.key


@dataclass(eq=False)
class Recording:
    """What one run was made of.

    Attributes:
        batch, pos: the shape of the tokens; -1 where it is not known.
        lengths: of the rows of tokens that it was given.
        calls: of modules, by the time at which they began.
        by_path: the same, by the path of the module.
        softmaxes: in order.
        choices: the times at which the best of something were chosen (`topk`).
    """

    batch: int = -1
    pos: int = -1
    lengths: tuple[int, ...] = ()
    calls: list[ModuleCall] = field(default_factory=list)
    by_path: Calls = field(default_factory=dict)
    softmaxes: list[Softmax] = field(default_factory=list)
    choices: list[int] = field(default_factory=list)

    def add(self, call: ModuleCall) -> None:
        """Adds a call that begins."""
        self.calls.append(call)
        self.by_path.setdefault(call.path, []).append(call)

    def turned(self, x: Tensor) -> bool:
        """Whether a tensor is ``[pos, batch, ...]``, of positions of a row of tokens that it was given."""
        return x.ndim > 1 and x.shape[0] in self.lengths and x.shape[1] == self.batch != x.shape[0]

    def of(self, path: str) -> list[ModuleCall]:
        """The calls of a module."""
        return self.by_path.get(path, [])

    def numbered(self, call: ModuleCall) -> str:
        """The path of a call, with its number where its module runs several times."""
        calls = [other for other in self.calls if other.module is call.module]
        return call.path if len(calls) == 1 or "@" in call.path else f"{call.path}@{calls.index(call)}"

    def rename(self, call: ModuleCall, path: str) -> None:
        """Gives a call, and those inside of it, another path."""
        before = call.path
        for each in self.calls:
            if call.holds(each) and is_inside(each.path, before):
                each.path = path + each.path[len(before) :]
        for softmax in self.softmaxes:
            if call.start < softmax.time < call.end and is_inside(softmax.path, before):
                softmax.path = path + softmax.path[len(before) :]
        self.by_path.clear()
        for each in self.calls:
            self.by_path.setdefault(each.path, []).append(each)

    def between(self, start: int, end: int) -> list[ModuleCall]:
        """The calls that began and ended between two times."""
        return [call for call in self.calls if start < call.start and call.end <= end]

    def softmaxes_between(self, start: int, end: int) -> list[Softmax]:
        """The softmaxes of rows between two times: not those of a few parameters."""
        return [each for each in self.softmaxes if start < each.time < end and each.scores.ndim > 1]


# ----------------------------------------------------------------------------------------------------------------------
# The modes that a model is observed in.
# ----------------------------------------------------------------------------------------------------------------------


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside a ``with`` statement; afterwards every module is in the mode in which it was.

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
    """Gradients, no inference mode and no autocast inside a ``with`` statement, wherever that stands.

    What models draw inside (Reformer, Big Bird), in evaluation mode too, changes nothing that is drawn afterwards.

    Args:
        model: the model, whose devices say which autocast it is.

    Example:
        >>> import torch
        >>> from adapters.observe.observe import outside_of_modes
        >>> with torch.inference_mode(), outside_of_modes(torch.nn.Linear(2, 2)):
        ...     torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        (True, False)
    """
    devices = {parameter.device for parameter in model.parameters()}
    kinds = {device.type for device in devices}
    with ExitStack() as stack:
        stack.callback(random.setstate, random.getstate())
        stack.enter_context(torch.random.fork_rng([device for device in devices if device.type == "cuda"]))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        for kind in filter(torch.amp.is_autocast_available, sorted(kinds)):
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield


# ----------------------------------------------------------------------------------------------------------------------
# Softmaxes that are no call of a softmax: ``exp(x - max) / sum``, and the exponential of a ``log_softmax``.
# ----------------------------------------------------------------------------------------------------------------------


_LOGARITHMS = {torch.log_softmax, torch.nn.functional.log_softmax, Tensor.log_softmax}
_MAXIMA = {torch.max, Tensor.max, torch.amax, Tensor.amax}
_DIFFERENCES = {torch.sub, Tensor.sub, Tensor.__sub__}
_EXPONENTIALS = {torch.exp, Tensor.exp}
_SUMS = {torch.sum, Tensor.sum}
_QUOTIENTS = {torch.div, Tensor.div, Tensor.__truediv__, torch.true_divide, Tensor.true_divide}
#: The functions that a softmax by hand is made of.
STEPS = _LOGARITHMS | _MAXIMA | _DIFFERENCES | _EXPONENTIALS | _SUMS | _QUOTIENTS


def may_be_step(func: Function, args: Args) -> bool:
    """Whether a function may be a step of a softmax: one of rows of a tensor of three axes or more."""
    return func in STEPS and bool(args) and isinstance(args[0], Tensor) and args[0].ndim > 2


@dataclass
class SoftmaxByHand:
    """Follows the torch functions of a module from one to the next, and finds the softmax among them."""

    _kept: list[Tensor] = field(default_factory=list)  # so that no other tensor takes the place of one
    #: What each is made of, by what it is (``maximum``, ``exponent``, ``logarithm``, ``share``, ``total``).
    _made_of: dict[tuple[str, int], Tensor] = field(default_factory=dict)

    def step(
        self,
        func: Function,
        args: Args,
        kwargs: Mapping[str, Any],
        begins: Callable[[Tensor], Tensor],
        ends: Callable[[Tensor, Tensor], Tensor],
    ) -> Any:
        """Calls a function that may be a step.

        Args:
            func, args, kwargs: the function, and what it is given.
            begins: called with the scores, before they become shares (a difference from the largest may be for
                something else); it returns what the model goes on with.
            ends: called with the scores and the pattern behind the last step; likewise.
        """
        x: Tensor = args[0]
        other = args[1] if len(args) > 1 else None
        if func in _LOGARITHMS:
            x = begins(x)
            return self._keep("logarithm", func(x, *args[1:], **kwargs), x)
        if func in _DIFFERENCES and self._of("maximum", other) is x:
            return self._keep("exponent", func(*args, **kwargs), x)
        share = self._of("share", x)
        if func in _QUOTIENTS and share is not None and self._of("total", other) is x:
            return ends(share, func(*args, **kwargs))
        if func in _EXPONENTIALS:
            if (scores := self._of("logarithm", x)) is not None:
                return ends(scores, func(*args, **kwargs))
            if (scores := self._of("exponent", x)) is not None:
                new = begins(scores)
                x = x if new is scores else new - new.amax(-1, keepdim=True)
                return self._keep("share", func(x, *args[1:], **kwargs), new)
        made = func(*args, **kwargs)
        if func in _MAXIMA:
            found = made if isinstance(made, Tensor) else made[0]
            if found.ndim == x.ndim and found.shape[-1] == 1:
                self._keep("maximum", found, x)
        elif func in _SUMS and share is not None and made.ndim == x.ndim:
            self._keep("total", made, x)
        return made

    def _of(self, what: str, made: object) -> Tensor | None:
        """What something is made of, where it is this."""
        return self._made_of.get((what, id(made)))

    def _keep(self, what: str, made: Tensor, of: Tensor) -> Tensor:
        self._kept += [made, of]
        self._made_of[what, id(made)] = of
        return made


# ----------------------------------------------------------------------------------------------------------------------
# The functions of torch that a run is recognised by.
# ----------------------------------------------------------------------------------------------------------------------


#: Those that compute a softmax. The fused kernel computes one, too, and is watched for by itself.
SOFTMAXES = {torch.softmax, torch.nn.functional.softmax, Tensor.softmax}
#: Those in which eager attention multiplies queries and keys.
PRODUCTS = {torch.matmul, Tensor.matmul, Tensor.__matmul__}
#: The one that does so with the heads in the batch, ``[(batch head), query, key]``, behind what it adds to.
FLAT_PRODUCT = torch.baddbmm
#: Those in which a linear layer multiplies its input with its matrix.
LINEAR_PRODUCTS = {torch.nn.functional.linear, *PRODUCTS}
#: Those that choose the best of something, as a router its experts.
CHOICES = {torch.topk, Tensor.topk}


# ----------------------------------------------------------------------------------------------------------------------
# What a run may raise that looks where a wrong declaration says, and what is said of it.
# ----------------------------------------------------------------------------------------------------------------------


#: What a run may raise that looks where a wrong declaration says.
WRONG = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError)


class NotFound(Exception):
    """Something is not what a declaration could say; the message says what."""


def one_line(error: BaseException) -> str:
    """An error in one line.

    Args:
        error: the error; one that says that the memory is full is no finding, and is raised again.
    """
    if isinstance(error, torch.OutOfMemoryError):
        raise error
    words = " ".join(str(error).split())
    return f"{type(error).__name__}: {words}"[:300] if words else type(error).__name__


class CallRecorder:
    """Records the calls of modules inside a ``with`` statement.

    Args:
        modules: which, with their paths.
        recording: what it writes to.
        copies: keep what the tensors hold at the time of the call; False: the tensors themselves, with their graph.
        layout: how the model is spread over processes: what each has a part of is put together.
        graph: record what passes borders with the graph between them, and what is written over there; the first module
            is the model.
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
        self.modules, self.copies, self._layout, self._graph = list(modules), copies, layout, graph
        self._embedding = token_embedding(self.modules[0][1]) if graph else None
        self._watched: list[tuple[ModuleCall, Border, Tensor, int]] = []
        self.recording = Recording() if recording is None else recording
        self.running: list[ModuleCall] = []
        self._time = 0
        #: Of each tensor that is still there, what it held.
        self._held: MutableMapping[Tensor, Tensor] = WeakTensorKeyDictionary()

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
        for call, which, x, version in self._watched:
            if x._version != version:
                call.changed = (*call.changed, which)

    def tick(self) -> int:
        """The time of another event."""
        self._time += 1
        return self._time

    def _enter(self, path: str, module: nn.Module, args: Args, kwargs: Kwargs) -> None:
        if (cut := self._cut(path, "input")) is not None:
            args = (cut.whole(args[0]), *args[1:])
        # What enters may be changed in place while the module runs.
        call = ModuleCall(path, module, self._kept(args), {name: self._kept(x) for name, x in kwargs.items()})
        call.start = self.tick()
        place = place_of_input(module, args, kwargs) if self._graph else None
        if place is not None:
            call.entered = _seen(None, args[place] if isinstance(place, int) else kwargs.get(place))
        if call.entered:
            self._watched.append((call, "input", call.entered.live, call.entered.live._version))
        self.running.append(call)
        self.recording.add(call)

    def _note_output(self, module: nn.Module, args: Args, output: Any) -> Any:
        while (call := self.running.pop()).module is not module:
            pass  # one that an error has left
        if (cut := self._cut(call.path, "output")) is not None:
            output = cut.whole(output)
        call.output, call.end = self._kept(output), self.tick()
        return (self._with_graph(call) if self._graph else None) if cut is None else cut.part(output)

    def _cut(self, path: str, kind: Border) -> Cut | None:
        """How what passes a module is spread over processes; None where it is whole, or nobody knows."""
        try:
            cut = None if self._layout is None else self._layout.cut(Site(path, kind))
            return None if cut is None or cut.is_whole else cut
        except SpreadModelError:
            return None

    def _kept(self, x: Any) -> Any:
        if isinstance(x, Tensor):
            return self.copied(x) if self.copies else x
        return type(x)(map(self._kept, x)) if type(x) in (tuple, list) else x

    def copied(self, x: Tensor) -> Tensor:
        """What a tensor holds now: one copy for all that read it, until it is changed."""
        copy = self._held.get(x) if type(x) is Tensor and not x.is_meta else None
        if copy is None or copy.shape != x.shape or not torch.equal(copy, x):  # a version says less: of `data`, nothing
            copy = self._held[x] = x.detach().clone()
        return copy

    def _with_graph(self, call: ModuleCall) -> Any:
        """Notes what leaves a module, in the graph; and what it is to return."""
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


class Watch(TorchFunctionMode):
    """Sees the torch functions that modules call while it is active; `calling` or a subclass says what is done."""

    #: The functions that `call` does something about; None: it is asked about all.
    looked_at: Collection[Function] | None = None
    #: What is called in place of each of them, with it and its arguments; None: a subclass says it (`call`).
    _instead: Callable[[Function, Args, Kwargs], Any] | None = None

    @classmethod
    def calling(cls, instead: Callable[[Function, Args, Kwargs], Any]) -> Self:
        """One that calls something in place of each function."""
        made = cls()
        made._instead = instead
        return made

    @property
    def in_user_function(self) -> bool:
        """Whether a user's function is being called: what it computes is not the model's."""
        return False

    def __torch_function__(self, func: Function, types: Any, args: Args = (), kwargs: Kwargs | None = None) -> Any:
        kwargs = {} if kwargs is None else kwargs
        if func is Tensor.unflatten:  # torch.compile cannot call this one as a function
            return args[0].unflatten(*args[1:], **kwargs)
        if (self.looked_at is not None and func not in self.looked_at) or self.in_user_function:
            return func(*args, **kwargs)
        return self.call(func, args, kwargs)

    def call(self, func: Function, args: Args, kwargs: Kwargs) -> Any:
        """Calls a function of the module's, or does something else in its place."""
        if self._instead is None:
            raise NotImplementedError
        return self._instead(func, args, kwargs)


#: What attention is recognised by: all other functions of a module go by.
_OF_ATTENTION: set[Any] = {scaled_dot_product_attention, *SOFTMAXES, *PRODUCTS, FLAT_PRODUCT, *STEPS}


class SeesAttention(Watch):
    """Recognises attention among the torch functions that a module calls: its kernel, its product, its softmax."""

    looked_at: Collection[Function] | None = _OF_ATTENTION

    #: What follows a softmax by hand, while one is under way.
    by_hand: SoftmaxByHand | None = None

    def call(self, func: Function, args: Args, kwargs: Kwargs) -> Any:
        """Calls a function of the module's: what is attention is told to the methods below."""
        if func is scaled_dot_product_attention:
            return self.scaled_dot_product(func, KernelArguments(*args, **kwargs))
        if func in SOFTMAXES:
            return self.softmax(func, args, kwargs)
        if may_be_step(func, args) and self.follows_steps:
            self.by_hand = self.by_hand or SoftmaxByHand()
            return self.by_hand.step(func, args, kwargs, self.begins, self.ends)
        if func in PRODUCTS and len(args) == 2 and all(isinstance(x, Tensor) and x.ndim == 4 for x in args):
            query, key = args[0], args[1].transpose(-1, -2)
            new = self.product(query, key)
            if new[0] is query and new[1] is key:
                return func(*args, **kwargs)
            return func(new[0], new[1].transpose(-1, -2), **kwargs)
        if func is FLAT_PRODUCT and len(args) == 3 and (apart := self.flat_heads(args[1])) is not None:
            query, key = args[1].unflatten(0, apart), args[2].transpose(-1, -2).unflatten(0, apart)
            new = self.product(query, key)
            if new[0] is query and new[1] is key:
                return func(*args, **kwargs)
            return func(args[0], new[0].flatten(0, 1), new[1].transpose(-1, -2).flatten(0, 1), **kwargs)
        return func(*args, **kwargs)

    @property
    def follows_steps(self) -> bool:
        """Whether it looks for a softmax by hand now."""
        return True

    def scaled_dot_product(self, kernel: Callable[..., Tensor], given: KernelArguments) -> Tensor:
        """What a call of `scaled_dot_product_attention` returns, by this kernel."""
        raise NotImplementedError

    def softmax(self, func: Function, args: Args, kwargs: Kwargs) -> Any:
        """What a call of a softmax returns."""
        raise NotImplementedError

    def begins(self, scores: Tensor) -> Tensor:
        """What the model goes on with, where a softmax by hand was given scores."""
        return scores

    def ends(self, scores: Tensor, pattern: Tensor) -> Tensor:
        """What it goes on with, where a softmax by hand has made the pattern."""
        raise NotImplementedError

    def product(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """The queries and keys, ``[batch, head, pos, d_head]``, that are multiplied: these, or others."""
        raise NotImplementedError

    def flat_heads(self, query: Tensor) -> tuple[int, int] | None:
        """How many batches and heads an axis of both holds (-1: the rest); None: it holds none."""
        raise NotImplementedError


class AttentionRecorder(SeesAttention):
    """Records the softmaxes of a run. What leaves one is detached: its pattern then is a constant of what follows.

    Args:
        recorder: records the run.
    """

    looked_at = None  # those that choose are noted too

    def __init__(self, recorder: CallRecorder) -> None:
        super().__init__()
        self.recorder, self.recording = recorder, recorder.recording
        self.products: list[tuple[Tensor, Tensor]] = []

    def call(self, func: Function, args: Args, kwargs: Kwargs) -> Any:
        """As `SeesAttention` does, and notes when the best of something are chosen."""
        made = super().call(func, args, kwargs)
        if func in CHOICES:
            self.recording.choices.append(self.recorder.tick())
        return made

    def softmax(self, func: Function, args: Args, kwargs: Kwargs) -> Any:
        """Records it."""
        out = func(*args, **kwargs)
        if not isinstance(out, Tensor):
            return out
        scores = args[0] if args else kwargs["input"]
        self._add(scores, out, self.products if out.ndim > 1 else [])
        if out.ndim > 1:
            self.products = []
        return out.detach() if out.ndim > 2 else out

    def product(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Keeps them for the softmax that follows."""
        self.products.append((query, key))
        return query, key

    def flat_heads(self, query: Tensor) -> tuple[int, int] | None:
        """The heads stand in the batch, where it can be one."""
        return None if query.shape[0] % self.recording.batch else (self.recording.batch, -1)

    def ends(self, scores: Tensor, pattern: Tensor) -> Tensor:
        """A softmax by hand has ended."""
        self._add(scores, pattern, self.products)
        self.products, self.by_hand = [], None
        return pattern.detach()

    def _add(self, scores: Tensor, pattern: Tensor, products: list[tuple[Tensor, Tensor]]) -> None:
        running = self.recorder.running
        queries, keys = scores.shape[-2:] if scores.ndim > 1 else (0, 0)
        fitting = [(q, k) for q, k in products if q.shape[-2] == queries and keys - k.shape[-2] in (0, 1)]
        query, key = fitting[-1] if fitting else (None, None)
        path, time = running[-1].path if running else "", self.recorder.tick()
        self.recording.softmaxes.append(Softmax(time, path, scores, pattern.detach().clone(), query, key))

    def scaled_dot_product(self, kernel: Callable[..., Tensor], given: KernelArguments) -> Tensor:
        """Computes in full what the kernel would."""
        query, key, value, attn_mask, _, is_causal, scale, _ = given
        if is_causal:
            attn_mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
        scores = scores_of(query, key, query.shape[-1] ** -0.5 if scale is None else scale, mask=attn_mask)
        pattern = pattern_of(scores)
        self._add(scores, pattern, [(query, per_head(key, query.shape[1]))])
        return result_of(pattern.detach(), value)


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
    recorder = CallRecorder(_modules(model), recording, copies=False, graph=True)
    with torch.enable_grad(), recorder, AttentionRecorder(recorder):
        try:
            model(**inputs)
        except WRONG as error:
            raise NotFound(
                f"it does not run on {' and '.join(inputs)} ({one_line(error)}): "
                "pass what it takes as inputs={name: tensor}"
            ) from error
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
