"""A program's run through `torch.compile`: one graph for all batch sizes and lengths.

torch's guards check before each call that the compiled code still matches the Python code. The
values that a function keeps (in its closure, defaults or attributes) are therefore inputs of the
graph, so another function with the same code and other values reuses it. Programs for which
`kind_of_program` is equal share a code object, to which torch attaches its graphs.
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

# --------------------------------------------------------------------------------------------------
# Blocks without hooks are compiled once for all of them, by torch's `nested_compile_region`.
# --------------------------------------------------------------------------------------------------


@torch.compiler.nested_compile_region
def _run(own: _LikeOthers, args: Args, kwargs: Kwargs) -> object:
    # Given a block itself, torch would trace only the first one, and have no guards on the others.
    return type(own.block).forward(own.block, *args, **kwargs)


class _LikeOthers:
    """The forward of a block without hooks.

    Args:
        block: the block's module object.
    """

    def __init__(self, block: nn.Module) -> None:
        self.block = block

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Run the block's own forward; when compiled, the code of the first block like it."""
        values = (*args, *kwargs.values())
        if torch.compiler.is_dynamo_compiling() and all(_is_plain(value) for value in values):
            return _run(self, args, kwargs)
        return type(self.block).forward(self.block, *args, **kwargs)


def compile_once(blocks: Iterable[nn.Module]) -> None:
    """Compile identical blocks once. Blocks with hooks inside are compiled one by one.

    Args:
        blocks: the module objects of a program.
    """
    for block in blocks:
        inner = [module for module in block.modules() if module is not block]
        if "forward" not in block.__dict__ and not any(_is_hooked(module) for module in inner):
            block.__dict__["forward"] = _LikeOthers(block).__call__


def compile_one_by_one(blocks: Iterable[nn.Module]) -> None:
    """Undo `compile_once`.

    Args:
        blocks: the same module objects.
    """
    for block in blocks:
        if isinstance(getattr(block.__dict__.get("forward"), "__self__", None), _LikeOthers):
            del block.__dict__["forward"]


def _is_hooked(module: nn.Module) -> bool:
    """Tell whether a module has hooks or a replaced forward."""
    return "forward" in module.__dict__ or any(getattr(module, hooks) for hooks in HOOKS)


def _is_plain(value: object) -> bool:
    """Tell whether an argument may enter a separately compiled region: not a key-value cache."""
    if isinstance(value, tuple):
        return all(isinstance(element, Tensor) for element in value)
    return value is None or isinstance(value, Tensor | bool)


# --------------------------------------------------------------------------------------------------
# A program in place of the model inside transformers' `generate`.
# --------------------------------------------------------------------------------------------------


#: Runs a program: tokens, the declared inputs, the model's further arguments.
Run = Callable[[Tensor | None, Mapping[str, Tensor], Kwargs], Kwargs]


def generating_model(
    model: PreTrainedModel, run: Run, inputs: Mapping[str, Tensor]
) -> PreTrainedModel:
    """Return a model whose forward runs a program, and whose `generate` is transformers' own.

    Args:
        model: the program's module objects.
        run: the function that runs the program.
        inputs: the declared inputs of every step.

    Raises:
        ValueError: the model has an encoder, which `generate` calls on its own.
    """
    if model.config.is_encoder_decoder:
        raise ValueError(
            f"{type(model).__name__} has an encoder, which generate runs by itself, outside of a"
            " program: use bridge.generate inside `with bridge.hooks(...)`"
        )
    other = copy.copy(model)

    def step(input_ids: Tensor | None = None, **kwargs: object) -> CausalLMOutputWithPast:
        kwargs.pop("return_dict", None)
        arguments = {name: value for name, value in kwargs.items() if value is not None}
        outputs = run(input_ids, inputs, arguments)
        fields = {"logits": outputs["logits"], "past_key_values": outputs.get("past_key_values")}
        known = CausalLMOutputWithPast.__dataclass_fields__
        return CausalLMOutputWithPast(**with_past_named(fields, known))

    functools.update_wrapper(step, model.forward)  # `generate` inspects its signature
    other.__dict__["forward"] = step
    return other


_LOGGER = logging.getLogger("bridge")

#: Number of code objects kept for future programs; a program keeps the ones it uses.
_KEPT = 16
#: Guards on the structure of the program's own module objects, which never changes (see
#: `_without_structure`).
_STRUCTURE = ("TYPE_MATCH", "NOT_PRESENT_IN_GENERIC_DICT")
_CODES: WeakKeyDictionary[Wiring, OrderedDict[Hashable, types.FunctionType]] = WeakKeyDictionary()


class CompiledRun:
    """A program's run, compiled on the first call.

    Args:
        run: the program's own run, which is compiled.
        lowered: the program's model, with code at its sites.
        wiring: the wiring of the bridge, whose programs share compiled code.
        blocks: the blocks among the program's module objects.
        options: options of `torch.compile`.
    """

    def __init__(
        self,
        run: Run,
        lowered: Lowered,
        wiring: Wiring,
        blocks: Sequence[nn.Module],
        options: Mapping[str, Any],
    ) -> None:
        assert isinstance(run, types.MethodType)
        self._own = run
        self._lowered = lowered
        self._blocks = blocks
        self._options = options
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
        """Return the compiled function, with the marked axes dynamic or, if torch rejects that,
        with sizes of torch's choice.
        """
        options: Kwargs = {"fullgraph": True, **self._options}
        if not self._any_size:
            options.setdefault("dynamic", True)
        elif "mode" not in options:  # torch accepts either
            own = {"guard_filter_fn": _without_structure(self._lowered.model)}
            options["options"] = own | (options.get("options") or {})
        compiled: Run = torch.compile(types.MethodType(function, self._own.__self__), **options)
        return compiled

    def __call__(
        self, input_ids: Tensor | None, inputs: Mapping[str, Tensor], kwargs: Kwargs
    ) -> Kwargs:
        """Run the program."""
        try:
            return self._called(input_ids, inputs, kwargs)
        except FailOnRecompileLimitHit:
            if not self._shares:
                raise
            # The shared code already has the largest number of graphs that torch allows
            self._shares = False
        except TorchDynamoException as error:
            if not self._any_size:
                raise
            self._any_size = False
            compile_one_by_one(self._blocks)
            _LOGGER.warning(
                "%s: compiled block by block, for one row and for several, as it cannot be compiled"
                " at once: %s",
                type(core_of(self._lowered.model)).__name__,
                str(error).strip().split("\n", 1)[0],
            )
        self._run = self._compiled(_copied(self._own))
        return self(input_ids, inputs, kwargs)

    def _called(
        self, input_ids: Tensor | None, inputs: Mapping[str, Tensor], kwargs: Kwargs
    ) -> Kwargs:
        if self._any_size:
            kwargs = _of_any_size({"input_ids": input_ids, **kwargs})
            input_ids = kwargs.pop("input_ids")
            inputs = {name: _marked(value, _longer(value)) for name, value in inputs.items()}
        with _compiling(self._any_size, self._lowered.one_by_one):
            return self._run(input_ids, inputs, kwargs)


@contextmanager
def _compiling(any_size: bool, row_counts: bool) -> Iterator[None]:
    """Set torch's compiler settings for a program. torch keeps them per thread.

    Args:
        any_size: treat a batch of one like any other size, and do not assume that equal sizes stay
            equal.
        row_counts: row counts depend on the values; torch compiles this only if told to.
    """
    before = shapes_config.backed_size_oblivious, shapes_config.use_duck_shape
    patch: Any = nullcontext()
    if row_counts:
        patch = dynamo_config.patch(capture_dynamic_output_shape_ops=True)
    if any_size:
        shapes_config.backed_size_oblivious = True
        shapes_config.use_duck_shape = False
    try:
        with patch:
            yield
    finally:
        shapes_config.backed_size_oblivious, shapes_config.use_duck_shape = before


def _of_any_size(arguments: Kwargs) -> Kwargs:
    """Return the model's arguments in a fixed order, with batch and position axes marked as
    dynamic.

    A single position stays static, because models branch on it. An axis of length one that is not
    the batch axis is broadcast.
    """
    tensors = {
        name: value
        for name, value in arguments.items()
        if isinstance(value, Tensor) and value.ndim > 1
    }
    rows = next(iter(tensors.values())).shape[0] if tensors else 0
    for name, tensor in tensors.items():
        batch = [0] if len(tensor) == rows else []
        arguments[name] = _marked(tensor, batch + [axis for axis in _longer(tensor) if axis < 2])
    return dict(sorted(arguments.items()))


def _longer(x: Tensor) -> list[int]:
    """Return the axes longer than one."""
    return [axis for axis, size in enumerate(x.shape) if size > 1]


def _marked(x: Tensor, axes: Collection[int]) -> Tensor:
    """Return a tensor whose given axes are marked as dynamic. Axes of length one stay static."""
    x = x.view_as(x)  # marks are attributes, so do not mark the user's own tensor
    for axis, size in enumerate(x.shape):
        if axis in axes:
            maybe_mark_dynamic(x, axis)
        elif size == 1:
            mark_static(x, axis)
    return x


def _copied(run: Callable[..., Any]) -> types.FunctionType:
    """Return a function with a code object of its own: torch attaches graphs to code objects, up to
    a limit.
    """
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
    """Return a filter for torch's guards that drops those on the structure of the program's own
    module objects: their classes, and whether they have a forward of their own. These guards take a
    third of a small model's run time, and `kind_of_program` has compared both.

    Args:
        model: the module objects.
    """
    own: set[int] = set()
    for module in model.modules():
        parts = (module, module._modules, module._parameters, module._buffers)
        own |= {id(part) for part in parts}

    def kept(entries: Sequence[Any]) -> list[bool]:
        return [
            not (entry.guard_type in _STRUCTURE and id(entry.value) in own) for entry in entries
        ]

    return kept


def kind_of_program(lowered: Lowered) -> Hashable:
    """Return a key that is equal for programs that may share compiled code.

    torch's guards cover every other difference. The key contains what they ignore (torch hooks on a
    module, see `torch._dynamo.config.skip_nnmodule_hook_guards`; the structure of the modules), and
    what they would check on every call needlessly.

    Args:
        lowered: the program.
    """
    steps = []
    modules = []
    for step in lowered.steps:
        changes = tuple([_kind(change.fn) for change in step.changes])
        steps.append((step.hook.name, step.captured, changes))
    for path, module in lowered.model.named_modules(remove_duplicate=False):
        kinds = [_kind_of_hook(hook) for name in HOOKS for hook in getattr(module, name).values()]
        forward = module.__dict__.get("forward")
        modules.append((path, type(module), _kind(forward), tuple(kinds)))
    return tuple(steps), tuple(modules)


def _kind_of_hook(hook: object) -> Hashable:
    """Return the key of a torch hook: a user's hook by itself, a program's hook by its site."""
    site = getattr(hook, "__self__", None)
    return (site.site,) if isinstance(site, LoweredSite) else (hook,)


def _kind(fn: object) -> Hashable:
    """Return a function's code and values, without the tensors and floats that it keeps."""
    if isinstance(fn, Function):
        return (_kind(fn.fn), fn.takes)
    if isinstance(fn, LoweredBody):
        return (_kind(fn.edit.body), tuple([hook.name for hook in fn.edit.points]))
    if isinstance(fn, types.MethodType):
        owner = fn.__self__
        kept_owner = type(owner) if isinstance(owner, LoweredTap) else _value(owner)
        return (kept_owner, _kind(fn.__func__))
    code: Any = type(fn)
    kept: list[object] = []
    if isinstance(fn, Operation):
        kept = [getattr(fn, field.name) for field in fields(fn)]
    elif isinstance(fn, functools.partial):
        keywords = dict(sorted(fn.keywords.items()))
        code = (_kind(fn.func), *keywords)
        kept = [*fn.args, *keywords.values()]
    elif isinstance(fn, types.FunctionType):
        code = fn.__code__
        cells = [cell.cell_contents for cell in fn.__closure__ or ()]
        kept = [*cells, *(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values()]
    return (code, _value(tuple(kept)))


def _value(value: object) -> Hashable:
    """Return the part of a function's kept value that compiled code depends on."""
    if isinstance(value, tuple):
        return tuple(map(_value, value))
    if isinstance(value, int | str | slice | None):
        return repr(value)
    return value.__code__ if isinstance(value, types.FunctionType) else (type(value),)
