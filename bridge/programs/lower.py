"""Lowering: hook points and their functions become code at the sites of shell modules."""

from __future__ import annotations

import contextlib
import threading
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from adapters.feed_forward import first_projection, gate_and_up, has_gate, joined, stacked
from adapters.imports import is_compiling
from adapters.observe.observe import Watch
from adapters.points import Site, call_number, has_module, module_path, token_embedding
from adapters.views import Args, Call, Kwargs
from bridge.hooks.context import Listener
from bridge.hooks.hooks import HookPoint, LeaderEdit, wants_gradients
from bridge.interventions.operations import Operation
from bridge.programs.program_pass import (
    AnyFunction,
    Function,
    LoweredPoint,
    LoweredSite,
    ProgramPass,
    current,
)
from bridge.run.inputs import RunnableBridge
from bridge.taps.attention_call import AttentionCall, implementation_of, is_looked_up, is_opaque
from bridge.taps.attention_tap import AttentionWatch, ObservedAttentionCall, show_scores_and_pattern
from bridge.taps.experts import RouterWatch
from bridge.taps.taps import CallWatch, Tap
from bridge.trace.coroutine import OutOfStepError
from bridge.trace.edit import BodyActivations, BodyInStep, Edit, assigned
from bridge.wiring.compiled import ForcedEager, strip

#: Hook points and their functions, in order.
Edits = Sequence[tuple[HookPoint, AnyFunction]]
#: The token embeddings, and the sites on their output that other views need.
Embeddings = tuple[nn.Module, tuple[Site, ...]]
#: Makes the replacement of a shell's forward from its hook points by channel and the function that
#: finds the current pass.
MakesTap = Callable[
    [nn.Module, Mapping[str, Sequence[LoweredPoint]], threading.local], "LoweredTap"
]
#: The dictionaries of torch hooks; a shell has copies of them.
HOOKS = (
    "_backward_pre_hooks",
    "_backward_hooks",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)


@dataclass
class Lowered:
    """A model of shells with the code of a program at its sites.

    Attributes:
        model: the shells.
        here: returns the pass that is running.
        embeddings: the token embeddings, and the sites on their output that other views need.
        steps: the program's hook points.
        one_by_one: whether experts run one after the other, with row counts that depend on the
            values.
    """

    model: nn.Module
    here: threading.local
    embeddings: Embeddings | None
    steps: tuple[LoweredPoint, ...]
    one_by_one: bool

    @property
    def taken(self) -> set[str]:
        """Return the declared inputs that functions take."""
        return {name for _, function in self._functions() for name in function.takes}

    @property
    def chooses_tokens(self) -> str | None:
        """Return a hook point whose operation needs the token's position in the sequence; None if
        there is none.
        """
        for hook, function in self._functions():
            if isinstance(function.fn, Operation) and function.fn.chooses_tokens:
                return hook.name
        return None

    def _functions(self) -> Iterator[tuple[HookPoint, Function]]:
        """Yield the functions of the program that are not bodies of edits."""
        for step in self.steps:
            for listener in step.changes:
                if isinstance(listener.fn, Function):
                    yield step.hook, listener.fn

    def take_embeddings(self, program_pass: ProgramPass, arguments: Kwargs) -> None:
        """Record the embeddings passed to the model in place of tokens, if any."""
        embeddings = arguments.get("inputs_embeds")
        if embeddings is not None and self.embeddings is not None:
            module, sites = self.embeddings
            for site in sites:
                program_pass.sources[site] = (module, embeddings)


def lower(
    bridge: RunnableBridge,
    capture: Sequence[HookPoint],
    interventions: Edits,
    declared: Collection[str],
) -> Lowered:
    """Lower hook points to code at their sites in a model of shells.

    Args:
        bridge: the bridge; its currently active hooks become part of the program, before the
            interventions.
        capture: the hook points that the program returns.
        interventions: the hook points and their functions, in order.
        declared: the names of the declared inputs.

    Raises:
        ValueError: a hook point that a program does not support; or a backward hook or a module is
            installed there.
        TypeError: a function takes an input that is not declared.
    """
    original, prefix = as_written(bridge.original_model)
    model = shell_of(original)
    here = threading.local()
    changes = _listeners_by_point(bridge, interventions, declared)
    _refuse_edited_norms(changes)
    hooks = sorted({*changes, *capture}, key=lambda hook: hook.order)
    steps = tuple([LoweredPoint(hook, changes.get(hook, ()), hook in capture) for hook in hooks])
    sources = dict.fromkeys(site for step in steps for site in step.hook.point.sources)
    one_by_one = _install(steps, sources, model, prefix, here)
    embeddings = _embeddings(token_embedding(bridge.core), original, prefix, sources)
    return Lowered(model, here, embeddings, steps, one_by_one)


def _listeners_by_point(
    bridge: RunnableBridge, interventions: Edits, declared: Collection[str]
) -> dict[HookPoint, list[Listener]]:
    """Return the functions at each hook point: the currently active hooks, and the interventions. A
    linked point is edited before the point that feeds it.
    """
    hooks = bridge.wiring.points
    added = [(hook, listener.fn) for hook in hooks.values() for listener in _functions_at(hook)]
    changes: dict[HookPoint, list[Listener]] = {}
    for hook, listener in listeners_of([*added, *interventions], declared):
        changes.setdefault(hook, []).append(listener)
    for hook in list(changes):
        for follower in hook.point.linked:
            leader = Listener("leader", LeaderEdit(hook.name, follower))
            changes.setdefault(hooks[follower.name], []).insert(0, leader)
    return changes


def _install(
    steps: Sequence[LoweredPoint],
    sources: Collection[Site],
    model: nn.Module,
    prefix: str,
    here: threading.local,
) -> bool:
    """Install hook points at their sites; return whether experts run one after the other.

    Args:
        steps: the hook points.
        sources: the sites whose tensors views of other sites need.
        model: the shells.
        prefix: the path to the model, in the paths of sites.
        here: returns the pass that is running.
    """
    by_site: dict[Site, list[LoweredPoint]] = {}
    for step in steps:
        by_site.setdefault(step.hook.point.site, []).append(step)
    taps: dict[tuple[str, MakesTap], dict[str, list[LoweredPoint]]] = {}
    for site in dict.fromkeys([*by_site, *sources]):
        points = by_site.get(site, [])
        module = _module_at(model, site, prefix, points)
        if site.kind in _TAPS:
            _check_tap(module, points)
            taps.setdefault((site.path, _TAPS[site.kind]), {})[str(site.key)] = points
        elif site.kind in ("input", "output"):
            LoweredSite(site, module, points, site in sources, here)
        else:
            raise ValueError(
                f"{points[0].hook.name} is inside a mixer, or experts that are computed in batches,"
                " which a program cannot reach: use run_with_hooks"
            )
    for (path, make), points_by_channel in taps.items():
        make(model.get_submodule(path.removeprefix(prefix)), points_by_channel, here).install()
    return any(make is _LoweredExperts for _, make in taps)


def _embeddings(
    embedding: nn.Module | None, original: nn.Module, prefix: str, sources: Iterable[Site]
) -> Embeddings | None:
    """Return the token embeddings, and the sites on their output that other views need."""
    if embedding is None:
        return None
    modules = original.named_modules(remove_duplicate=False)
    paths = {f"{prefix}{path}" for path, module in modules if module is embedding}
    sites = [site for site in sources if site.kind == "output" and site.path in paths]
    return embedding, tuple(sites)


def _refuse_edited_norms(changed: Collection[HookPoint]) -> None:
    """Reject edits of both a norm and the per-head inputs, which are normalised again.

    Raises:
        ValueError: a block has both.
    """
    block_of = lambda hook: (hook.point.stack, hook.point.depth)
    norms = {block_of(hook): hook for hook in changed if hook.point.separate_consumers}
    for hook in changed:
        norm = norms.get(block_of(hook))
        if norm is not None and hook.point.flag == "use_split_qkv_input":
            raise ValueError(
                f"{norm.name} and {hook.name} cannot be changed in one program: what heads are"
                " given of their own is normed again, without that change. Make two programs, or"
                " change one of them"
            )


def _functions_at(hook: HookPoint) -> Iterable[Listener]:
    """Return the currently active hook functions at a hook point.

    Raises:
        ValueError: a backward hook, or a module in place of the hook point.
    """
    if not hook.listeners:
        return ()
    active = hook.visible_listeners()
    if wants_gradients(active) or any(listener.kind in ("bwd", "rule") for listener in active):
        raise ValueError(
            f"{hook.name} has a hook or a rule of gradients, which a program has no place for:"
            " remove it (reset_hooks), or use tensor.register_hook on what the program returns"
        )
    if any(listener.kind == "follow" for listener in active):
        raise ValueError(
            f"{hook.name} has a module in its place, which a program has no place for: take it"
            " away, and give a function that calls it as an intervention"
        )
    return [listener for listener in active if listener.kind == "fwd"]


def _module_at(
    model: nn.Module, site: Site, prefix: str, steps: Sequence[LoweredPoint]
) -> nn.Module:
    path = site.path.removeprefix(prefix)
    names = ", ".join(step.hook.name for step in steps)
    if call_number(path) is not None:
        raise ValueError(
            f"{names or site.path}: {module_path(path)} runs several times, and a program has no"
            " place in one of them"
        )
    if path and not has_module(model, path):
        raise ValueError(
            f"{names}: the model has no module {site.path!r}, so a program cannot reach it"
        )
    return model.get_submodule(path)


def _check_tap(module: nn.Module, steps: Sequence[LoweredPoint]) -> None:
    """Check that attention is a torch function.

    Raises:
        ValueError: it is not.
    """
    implementation = implementation_of(module)
    if implementation is None or not is_opaque(implementation):
        return
    if is_looked_up(type(module).forward, implementation):
        raise ValueError(
            f"{steps[0].hook.name} is inside a kernel that is no torch function"
            f" (attn_implementation={implementation!r}), and cannot be lowered into a program; load"
            ' the model with attn_implementation="sdpa" or "eager", or use run_with_hooks'
        )


# --------------------------------------------------------------------------------------------------
# Shells: our own module objects around the model's parameters. Hooks on a shell are invisible to
# the model.
#
# A shell has the class of its module and shares its parameters, buffers and configuration. The
# dictionaries are the same objects, so a parameter replaced in the model is replaced in the shell
# too.
# --------------------------------------------------------------------------------------------------


def shell_of(model: nn.Module) -> nn.Module:
    """Return a model of shells with the user's torch hooks and without those of any bridge.

    Args:
        model: the original Hugging Face model (see `as_written`).

    Raises:
        ValueError: a module instance has its own forward, which is bound to the module and not to
            its shell.
    """
    shells: dict[int, nn.Module] = {}
    for path, module in model.named_modules():
        shell = module.__class__.__new__(module.__class__)
        shell.__dict__.update(module.__dict__)
        _take_over_forward(shell, module, path)
        shells[id(module)] = shell
    for shell in shells.values():
        fields = shell.__dict__
        for name, value in fields.items():
            if name in HOOKS:
                fields[name] = value.copy()
            elif name == "_modules":
                fields[name] = {key: _with_shells(child, shells) for key, child in value.items()}
            else:
                fields[name] = _with_shells(value, shells)
        fields["_compiled_call_impl"] = None
        # Checkpointed blocks are recomputed in backward, which a program does not support.
        if "gradient_checkpointing" in fields:
            fields["gradient_checkpointing"] = False
    shell = shells[id(model)]
    strip(shell)
    return shell


def as_written(model: nn.Module) -> tuple[nn.Module, str]:
    """Return a model without its `torch.compile` wrapper, and the path to it."""
    path = ""
    while "_orig_mod" in model._modules:
        model = model.get_submodule("_orig_mod")
        path = f"{path}_orig_mod."
    return model, path


def _take_over_forward(shell: nn.Module, module: nn.Module, path: str) -> None:
    """Remove our tap from a shell's forward. A module's own forward (such as a kernel) becomes the
    shell's.

    Raises:
        ValueError: the forward was replaced by other code.
    """
    forward: Any = shell.__dict__.pop("forward", None)
    while isinstance(forward, Tap | ForcedEager):
        forward = forward.original
    while hasattr(forward, "_torchdynamo_orig_callable"):  # left by torch.compile(model.forward)
        forward = forward._torchdynamo_orig_callable
    if isinstance(forward, types.MethodType) and forward.__self__ is module:
        if forward.__func__ is not type(module).forward:
            shell.__dict__["forward"] = types.MethodType(forward.__func__, shell)
        return
    if forward is not None and getattr(forward, "__func__", None) is not type(shell).forward:
        raise ValueError(
            f"{path or 'the model'} ({type(shell).__name__}) has a forward of its own, {forward!r}:"
            " accelerate puts one there where it moves weights between devices (device_map,"
            " cpu_offload). A program calls the class's forward: load the model on one device, and"
            " remove what replaces forwards"
        )


def _with_shells(value: Any, shells: dict[int, nn.Module]) -> Any:
    """Return a module's attribute with the model's modules replaced by their shells."""
    if isinstance(value, nn.Module):
        return shells.get(id(value), value)
    if isinstance(value, types.MethodType) and id(value.__self__) in shells:
        return types.MethodType(value.__func__, shells[id(value.__self__)])
    if type(value) not in (list, tuple, dict):
        return value
    items = list(value.values()) if type(value) is dict else value
    if not any(id(item) in shells for item in items):
        return value
    replaced = [_with_shells(item, shells) for item in items]
    if type(value) is dict:
        return dict(zip(value, replaced, strict=True))
    return type(value)(replaced)


# --------------------------------------------------------------------------------------------------
# Hook points inside a forward: the watches of `bridge.taps` observe the computation of a shell's
# own forward.
# --------------------------------------------------------------------------------------------------


class LoweredTap:
    """A replacement for the forward of a shell.

    Args:
        module: the shell.
        steps: the hook points inside its forward, by channel.
        here: returns the pass that is running.
        watch: makes the watch on the functions that the module calls; its channels are the keys of
            `steps`.
    """

    def __init__(
        self,
        module: nn.Module,
        steps: Mapping[str, Sequence[LoweredPoint]],
        here: threading.local,
        watch: Callable[[ObservedAttentionCall], AttentionWatch | CallWatch] | None = None,
    ) -> None:
        self.module = module
        self.here = here
        self._watch = watch
        self.steps = {channel: tuple(points) for channel, points in steps.items()}
        self.original = module.forward

    def install(self) -> None:
        """Install this object as the shell's forward."""
        self.module.__dict__["forward"] = self.__call__

    def show(self, channel: str, x: Tensor, call: Call, program_pass: ProgramPass) -> Tensor:
        """Run the hook points of a channel on a tensor, and return the result."""
        for step in self.steps.get(channel, ()):
            x = step.apply(x, call, program_pass)
        return x

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Run the module's forward."""
        assert self._watch is not None
        call = _CallInProgram(self, Call(self.module, args, kwargs))
        watch = self.here.watch = self._watch(call)
        try:
            return watch.output_of(lambda: self.original(*args, **kwargs))
        finally:
            self.here.watch = None


class _CallInProgram(ObservedAttentionCall):
    """One call of a tapped shell; the program listens at all of its points."""

    def __init__(self, tap: LoweredTap, call: Call) -> None:
        self.tap = tap
        self.module = tap.module
        self.call = call
        self.program_pass = current(tap.here)

    @property
    def in_user_function(self) -> bool:
        return self.program_pass.in_user_function

    def points(self, channel: str) -> Sequence[HookPoint]:
        return [step.hook for step in self.tap.steps.get(channel, ())]

    def active_points(self, channels: Sequence[str]) -> Sequence[HookPoint]:
        return [hook for channel in channels for hook in self.points(channel)]

    def show(self, channel: str, x: Tensor, private: bool = False) -> Tensor:
        return self.tap.show(channel, x, self.call, self.program_pass)

    def is_read_only(self, attention: AttentionCall) -> bool:
        steps = self.tap.steps
        if any(step.changes for name in ("scores", "pattern") for step in steps.get(name, ())):
            return False
        show_scores_and_pattern(self, attention)
        return True


def _attention(
    module: nn.Module, steps: Mapping[str, Sequence[LoweredPoint]], here: threading.local
) -> LoweredTap:
    is_sdpa = implementation_of(module) == "sdpa"
    kernel_alone = is_sdpa and is_looked_up(type(module).forward, "sdpa")
    return LoweredTap(module, steps, here, partial(AttentionWatch, kernel_alone=kernel_alone))


# --------------------------------------------------------------------------------------------------
# Experts of a mixture in a program: all run, one after the other, so that the code does not depend
# on the routing.
# --------------------------------------------------------------------------------------------------


class _LoweredExperts(LoweredTap):
    """Experts with one parameter for all of them. The channels are those of `bridge.taps.experts`.

    transformers' own loop skips experts without tokens, which is a data-dependent branch; here
    these experts get zero rows.
    """

    def install(self) -> None:
        """Install this object as the module's forward.

        Raises:
            ValueError: the experts' matrices are stacked, which a program does not support.
        """
        if stacked(self.module):
            name = next(iter(self.steps.values()))[0].hook.name
            raise ValueError(
                f"{name} is inside experts whose matrices are stacked, which a program cannot reach"
            )
        super().install()

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Run the module's forward."""
        module: Any = self.module
        program_pass = current(self.here)
        call = Call(module, args, kwargs)
        arguments: Any = (*args, *kwargs.values())
        hidden_states, top_k_index, top_k_weights = arguments
        total = torch.zeros_like(hidden_states)
        one_hot = torch.nn.functional.one_hot(top_k_index, num_classes=module.num_experts + 1)
        chosen = one_hot.permute(2, 1, 0)
        for expert in range(module.num_experts):
            rank, token = torch.where(chosen[expert])
            out = self._output_of(expert, hidden_states[token], call, program_pass)
            weighted = out * top_k_weights[token, rank, None]
            total.index_add_(0, token, weighted.to(total.dtype))
        return total

    def _output_of(self, expert: int, x: Tensor, call: Call, program_pass: ProgramPass) -> Tensor:
        """Return the output of one expert on its tokens."""
        module: Any = self.module
        show = lambda name, x: self.show(f"{expert}.{name}", x, call, program_pass)
        both = _linear(module, first_projection(module), show("in", x), expert)
        if not has_gate(module):
            post = module.act_fn(show("pre", both))
        else:
            if f"{expert}.gate" in self.steps or f"{expert}.pre" in self.steps:
                gate, up = gate_and_up(module, both)
                gate = show("gate", gate)
                both = joined(module, gate, show("pre", up))
            post = module._apply_gate(both)
        return show("out", _linear(module, "down_proj", show("post", post), expert))


def _linear(module: Any, name: str, x: Tensor, expert: int) -> Tensor:
    """Apply one projection of one expert, in the layout of its module."""
    weight: Tensor = getattr(module, name)[expert]
    bias = getattr(module, f"{name}_bias")[expert] if module.has_bias else None
    if not module.is_transposed:
        return torch.nn.functional.linear(x, weight, bias)
    out = x @ weight
    return out if bias is None else out + bias


_TAPS: Mapping[str, MakesTap] = {
    "attention": _attention,
    "softmax": _attention,
    "experts": _LoweredExperts,
    "router": partial(LoweredTap, watch=RouterWatch),
}


# --------------------------------------------------------------------------------------------------
# Bodies of `trace_edit` in a program.
#
# In eager mode the body runs once per pass, in step with the model, as in a run. Compiled or
# exported code cannot pause: there the body restarts at each of its hook points with the
# activations it received before, and stops when it requests the next one.
# --------------------------------------------------------------------------------------------------


#: Functions that return other numbers on each call.
_RANDOM = {
    torch.rand,
    torch.randn,
    torch.randint,
    torch.randperm,
    torch.rand_like,
    torch.randn_like,
    torch.randint_like,
    torch.bernoulli,
    torch.multinomial,
    torch.normal,
    torch.nn.functional.dropout,
    torch.dropout,
    Tensor.bernoulli,
    Tensor.bernoulli_,
    Tensor.multinomial,
    Tensor.normal_,
    Tensor.uniform_,
    Tensor.random_,
    Tensor.exponential_,
}


def listeners_of(
    interventions: Edits, declared: Collection[str]
) -> Iterator[tuple[HookPoint, Listener]]:
    """Yield interventions as listeners of a program, with edit bodies as `LoweredBody`.

    Args:
        interventions: hook points and functions.
        declared: the names of the declared inputs.

    Raises:
        TypeError: see `Function`.
    """
    bodies: dict[Edit, LoweredBody] = {}
    for hook, fn in interventions:
        lowered: LoweredBody | Function
        if isinstance(fn, Edit):
            lowered = bodies.setdefault(fn, LoweredBody(fn))
        else:
            lowered = Function(fn, hook, declared)
        yield hook, Listener("fwd", lowered)


class LoweredBody:
    """The body of an edit in a program.

    Args:
        edit: the edit.
    """

    def __init__(self, edit: Edit) -> None:
        self.edit = edit

    def __call__(self, act: Tensor, hook: HookPoint, program_pass: ProgramPass) -> Tensor | None:
        """Run the body at a hook point and return the edited activation; None if it is unchanged or
        edited in place.
        """
        if is_compiling():
            return self._rerun(act, hook, program_pass)
        # Resume the paused body.
        body = program_pass.bodies.get(self)
        if not isinstance(body, BodyInStep):
            body = program_pass.bodies[self] = BodyInStep(self.edit, None)
        return body.visit(hook, act)

    def _rerun(self, act: Tensor, hook: HookPoint, program_pass: ProgramPass) -> Tensor | None:
        """Rerun the body up to this hook point."""
        received = program_pass.received.setdefault(self, {})
        received[hook.name] = act
        again = _ReplayedActivations(self.edit, received, hook)
        with Watch.calling(self._refuse_random), contextlib.suppress(_PointNotReached):
            self.edit.body(again)
        return again.result

    def _refuse_random(self, func: AnyFunction, args: Args, kwargs: Kwargs) -> Any:
        if func in _RANDOM and len(self.edit.points) > 1:
            raise ValueError(
                f"{self.edit!r} draws random numbers ({getattr(func, '__name__', func)}), and asks"
                " for several points: in a compiled or exported program its body runs once for"
                " each of them, with other numbers each time. Give the numbers to the program as"
                " an input"
            )
        return func(*args, **kwargs)


class _PointNotReached(Exception):
    """Raised when the body requests a hook point that has not been reached."""


class _ReplayedActivations(BodyActivations):
    """The activations of a body that is rerun up to a hook point.

    Args:
        edit: the edit.
        values: the activations so far, the last one at `hook`.
        hook: the hook point that the model has reached.

    Attributes:
        result: the activation at `hook` after the body ran; None if the body does not request it.
    """

    def __init__(self, edit: Edit, values: dict[str, Tensor], hook: HookPoint) -> None:
        self._edit = edit
        self._hook = hook
        self._values = {name: act.clone() for name, act in values.items()}
        self._position = 0
        self.result: Tensor | None = None

    def _reach(self, name: str) -> str:
        """Move on to a hook point, and return its name."""
        hook = self._edit.find(name)
        if hook.name not in self._values:
            raise _PointNotReached
        position = list(self._values).index(hook.name)
        if position < self._position:
            raise OutOfStepError(f"{hook.name} has passed. Ask for points in the model's order")
        self._position = position
        return hook.name

    def _note(self, name: str) -> Tensor:
        """Return the activation at a hook point; at the current one, also store it as the
        result."""
        if name == self._hook.name:
            self.result = self._values[name]
        return self._values[name]

    def __getitem__(self, name: str) -> Tensor:
        return self._note(self._reach(name))

    def __setitem__(self, name: str, value: Tensor) -> None:
        reached = self._reach(name)
        hook = self._edit.find(name)
        self._values[reached] = assigned(value, self._values[reached], hook)
        self._note(reached)
