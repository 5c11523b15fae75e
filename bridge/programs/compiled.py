"""A program's run through `torch.compile`: one graph for all numbers of rows and positions, shared by like programs.

torch checks before each call, by its guards, that what it compiled is what the code would do now. So the values that a
function keeps (in its closure, its defaults, its attributes) are inputs of the graph, and another function of the same
code with other values needs no other graph: programs alike in what `kind_of_program` says share a code object, to which
torch attaches its graphs.
"""

from __future__ import annotations

import copy
import functools
import logging
import types
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import fields
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch._dynamo import config as dynamo_config
from torch._dynamo import mark_static, maybe_mark_dynamic
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
from torch.fx.experimental import _config as shapes_config
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from adapters.inputs import with_past_named
from adapters.points import core_of
from adapters.views import Args, Kwargs
from bridge.interventions.operations import Operation
from bridge.programs.lower import HOOKS, Lowered, LoweredBody, LoweredTap
from bridge.programs.program_pass import Function, LoweredSite
from bridge.wiring.wiring import Wiring

# ----------------------------------------------------------------------------------------------------------------------
# Blocks that a program only runs are compiled once for all of them, by torch's `nested_compile_region`.
# ----------------------------------------------------------------------------------------------------------------------


@torch.compiler.nested_compile_region
def _run(each: LikeOthers, args: Args, kwargs: Kwargs) -> object:
    # Given a block itself, torch would trace the first one alone, and have no guards on what the others are.
    return type(each.block).forward(each.block, *args, **kwargs)


class LikeOthers:
    """The forward of a block in which a program has nothing to do.

    Args:
        block: the block's module object.
    """

    def __init__(self, block: nn.Module) -> None:
        self.block = block

    def __call__(self, *args: object, **kwargs: object) -> object:
        """The block's own forward; compiled, the code of the first block that is like it."""
        given = (*args, *kwargs.values())
        if torch.compiler.is_dynamo_compiling() and all(_is_plain(value) for value in given):
            return _run(self, args, kwargs)
        return type(self.block).forward(self.block, *args, **kwargs)


def compile_once(blocks: Iterable[nn.Module]) -> None:
    """Has blocks compiled once for all that are alike. Those with hooks inside are compiled one by one.

    Args:
        blocks: the module objects of a program.
    """
    for block in blocks:
        if "forward" not in block.__dict__ and not any(_is_seen(part) for part in block.modules() if part is not block):
            block.__dict__["forward"] = LikeOthers(block).__call__


def compile_one_by_one(blocks: Iterable[nn.Module]) -> None:
    """Takes that back.

    Args:
        blocks: likewise.
    """
    for block in blocks:
        if isinstance(getattr(block.__dict__.get("forward"), "__self__", None), LikeOthers):
            del block.__dict__["forward"]


def _is_seen(module: nn.Module) -> bool:
    """Whether something stands at a module, or in the place of its forward."""
    return "forward" in module.__dict__ or any(getattr(module, hooks) for hooks in HOOKS)


def _is_plain(value: object) -> bool:
    """Whether an argument may cross into code that is compiled by itself: no cache of keys and values."""
    if isinstance(value, tuple):
        return all(isinstance(each, Tensor) for each in value)
    return value is None or isinstance(value, Tensor | bool)


# ----------------------------------------------------------------------------------------------------------------------
# A program in the place of the model inside of transformers' `generate`.
# ----------------------------------------------------------------------------------------------------------------------


#: What runs a program: tokens, the declared inputs, the model's further arguments.
Run = Callable[[Tensor | None, Mapping[str, Tensor], Kwargs], Kwargs]


def generating_model(model: PreTrainedModel, run: Run, inputs: Mapping[str, Tensor]) -> PreTrainedModel:
    """A model whose forward is a program's, and whose `generate` is transformers' own.

    Args:
        model: the program's module objects.
        run: runs the program.
        inputs: the declared inputs of every step.

    Raises:
        ValueError: the model has an encoder, which `generate` calls by itself.
    """
    if model.config.is_encoder_decoder:
        raise ValueError(
            f"{type(model).__name__} has an encoder, which generate runs by itself, outside of a program: use "
            "bridge.generate inside `with bridge.hooks(...)`"
        )
    other = copy.copy(model)

    def step(input_ids: Tensor | None = None, **given: object) -> CausalLMOutputWithPast:
        given.pop("return_dict", None)
        made = run(input_ids, inputs, {name: value for name, value in given.items() if value is not None})
        found = {"logits": made["logits"], "past_key_values": made.get("past_key_values")}
        return CausalLMOutputWithPast(**with_past_named(found, CausalLMOutputWithPast.__dataclass_fields__))

    functools.update_wrapper(step, model.forward)  # whose signature `generate` asks for
    other.__dict__["forward"] = step
    return other


_LOGGER = logging.getLogger("bridge")

#: How many code objects are kept for programs to come; programs keep those that they use.
_KEPT = 16
#: Guards on how the program's own module objects are built, which nobody changes (see `_without_structure`).
_STRUCTURE = ("TYPE_MATCH", "NOT_PRESENT_IN_GENERIC_DICT")
_CODES: WeakKeyDictionary[Wiring, OrderedDict[Hashable, types.FunctionType]] = WeakKeyDictionary()


class CompiledRun:
    """A run of a program, compiled when it is first called.

    Args:
        run: a program's own, which is compiled.
        lowered: the program's model, with code at its sites.
        wiring: of its bridge, whose programs share what is compiled.
        blocks: of the model, among the program's module objects.
        options: of `torch.compile`.
    """

    def __init__(
        self, run: Run, lowered: Lowered, wiring: Wiring, blocks: Sequence[nn.Module], options: Mapping[str, Any]
    ) -> None:
        assert isinstance(run, types.MethodType)
        self._own, self._lowered, self._blocks, self._options = run, lowered, blocks, options
        compile_once(blocks)
        self._shares = self._any_size = True
        codes = _CODES.setdefault(wiring, OrderedDict())
        kind = (kind_of_program(lowered), repr(options))
        function = codes.pop(kind, None) or _copied(run)
        codes[kind] = function
        while len(codes) > _KEPT:
            codes.popitem(last=False)
        self._run = self._compiled(function)

    def _compiled(self, function: types.FunctionType) -> Run:
        """What torch compiles: with sizes as they are marked, or, where that is not possible, as it chooses."""
        options: Kwargs = {"fullgraph": True, **self._options}
        if not self._any_size:
            options.setdefault("dynamic", True)
        elif "mode" not in options:  # torch takes either
            own = {"guard_filter_fn": _without_structure(self._lowered.model)}
            options["options"] = own | (options.get("options") or {})
        made: Run = torch.compile(types.MethodType(function, self._own.__self__), **options)
        return made

    def __call__(self, input_ids: Tensor | None, inputs: Mapping[str, Tensor], given: Kwargs) -> Kwargs:
        """Runs the program."""
        try:
            return self._called(input_ids, inputs, given)
        except FailOnRecompileLimitHit:
            if not self._shares:
                raise
            self._shares = False  # the shared code has as many graphs as torch allows
        except TorchDynamoException as error:
            if not self._any_size:
                raise
            self._any_size = False
            compile_one_by_one(self._blocks)
            _LOGGER.warning(
                "%s: compiled block by block, for one row and for several, as it cannot be compiled at once: %s",
                type(core_of(self._lowered.model)).__name__,
                str(error).strip().split("\n", 1)[0],
            )
        self._run = self._compiled(_copied(self._own))
        return self(input_ids, inputs, given)

    def _called(self, input_ids: Tensor | None, inputs: Mapping[str, Tensor], given: Kwargs) -> Kwargs:
        if self._any_size:
            arguments = _of_any_size({"input_ids": input_ids, **given})
            input_ids = arguments.pop("input_ids")
            inputs, given = {name: _marked(value, _longer(value)) for name, value in inputs.items()}, arguments
        with _compiling(self._any_size, self._lowered.one_by_one):
            return self._run(input_ids, inputs, given)


@contextmanager
def _compiling(any_size: bool, row_counts: bool) -> Iterator[None]:
    """While a program may be compiled. torch keeps these settings for each thread.

    Args:
        any_size: one row is like any number of rows, and sizes that are equal may differ later.
        row_counts: numbers of rows depend on the values, which torch compiles where it is told to.
    """
    before = shapes_config.backed_size_oblivious, shapes_config.use_duck_shape
    if any_size:
        shapes_config.backed_size_oblivious, shapes_config.use_duck_shape = True, False
    try:
        with dynamo_config.patch(capture_dynamic_output_shape_ops=True) if row_counts else nullcontext():
            yield
    finally:
        shapes_config.backed_size_oblivious, shapes_config.use_duck_shape = before


def _of_any_size(arguments: Kwargs) -> Kwargs:
    """The model's arguments, in one order, with rows and positions marked as of any number.

    One position stays one: models ask whether there are more. An axis of one that is not the rows' is broadcast.
    """
    tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor) and value.ndim > 1}
    rows = next(iter(tensors.values())).shape[0] if tensors else 0
    for name, value in tensors.items():
        some = [0] if len(value) == rows else []
        arguments[name] = _marked(value, some + [axis for axis in _longer(value) if axis < 2])
    return dict(sorted(arguments.items()))


def _longer(x: Tensor) -> list[int]:
    """The axes of more than one."""
    return [axis for axis, size in enumerate(x.shape) if size > 1]


def _marked(x: Tensor, axes: Collection[int]) -> Tensor:
    """A tensor of which some axes may be of other sizes in other calls. Others, of one, stay one."""
    x = x.view_as(x)  # marks are attributes, and the tensor is the user's
    for axis, size in enumerate(x.shape):
        if axis in axes:
            maybe_mark_dynamic(x, axis)
        elif size == 1:
            mark_static(x, axis)
    return x


def _copied(run: Callable[..., Any]) -> types.FunctionType:
    """A function with a code object of its own: torch attaches its graphs to that, up to a limit."""
    function: Any = run.__func__ if isinstance(run, types.MethodType) else run
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    copied = types.FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied


def _without_structure(model: nn.Module) -> Callable[[Sequence[Any]], list[bool]]:
    """Which of torch's guards are kept: not those on the classes of a program's own module objects and on whether one
    has a forward of its own. They are a third of a small model's run, and `kind_of_program` has compared both.

    Args:
        model: the module objects.
    """
    own: set[int] = set()
    for module in model.modules():
        own |= {id(part) for part in (module, module._modules, module._parameters, module._buffers)}

    def kept(entries: Sequence[Any]) -> list[bool]:
        return [not (entry.guard_type in _STRUCTURE and id(entry.value) in own) for entry in entries]

    return kept


def kind_of_program(lowered: Lowered) -> Hashable:
    """What programs have to have in common, so that one may be compiled for the other.

    Whatever else differs, torch's guards see. What is here, they do not look at (torch hooks on a module, see
    `torch._dynamo.config.skip_nnmodule_hook_guards`; how the modules are built), or would see at each call in vain.

    Args:
        lowered: the program.
    """
    steps = [
        (step.hook.name, step.captured, tuple([_kind(change.fn) for change in step.changes])) for step in lowered.steps
    ]
    modules = []
    for path, module in lowered.model.named_modules(remove_duplicate=False):
        forward = module.__dict__.get("forward")
        hooks = [hook for each in HOOKS for hook in getattr(module, each).values()]
        modules.append((path, type(module), _kind(forward), tuple([_kind_of_hook(hook) for hook in hooks])))
    return tuple(steps), tuple(modules)


def _kind_of_hook(hook: object) -> Hashable:
    """A torch hook of the user's as such, and one of a program by its site."""
    site = getattr(hook, "__self__", None)
    return (site.site,) if isinstance(site, LoweredSite) else (hook,)


def _kind(fn: object) -> Hashable:
    """The code of a function without the tensors and fractions that it keeps."""
    if isinstance(fn, Function):
        return (_kind(fn.fn), fn.takes)
    if isinstance(fn, LoweredBody):
        return (_kind(fn.edit.body), tuple([hook.name for hook in fn.edit.points]))
    if isinstance(fn, Operation):
        return (type(fn), tuple([_value(getattr(fn, field.name)) for field in fields(fn)]))
    if isinstance(fn, functools.partial):
        kept = [*fn.args, *[value for _, value in sorted(fn.keywords.items())]]
        return (_kind(fn.func), tuple(sorted(fn.keywords)), tuple(map(_value, kept)))
    if isinstance(fn, types.MethodType):
        return (type(fn.__self__) if isinstance(fn.__self__, LoweredTap) else _value(fn.__self__), _kind(fn.__func__))
    if isinstance(fn, types.FunctionType):
        cells = [cell.cell_contents for cell in fn.__closure__ or ()]
        kept = [*cells, *(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values()]
        return (fn.__code__, tuple(map(_value, kept)))
    return (type(fn),)


def _value(value: object) -> Hashable:
    """What is in the code, of a value that a function keeps."""
    if isinstance(value, tuple):
        return tuple(map(_value, value))
    if isinstance(value, int | str | slice | None):
        return repr(value)
    return value.__code__ if isinstance(value, types.FunctionType) else (type(value),)
