"""From hook points with functions to shells with code at their sites."""

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
from bridge.programs.program_pass import AnyFunction, Function, LoweredPoint, LoweredSite, ProgramPass, current
from bridge.run.inputs import RunnableBridge
from bridge.taps.attention import AttentionWatch, ObservedAttentionCall, show_scores_and_pattern
from bridge.taps.attention_call import AttentionCall, implementation_of, is_looked_up, is_opaque
from bridge.taps.experts import RouterWatch
from bridge.taps.taps import CallWatch, Tap
from bridge.trace.coroutine import OutOfStepError
from bridge.trace.edit import BodyActivations, BodyInStep, Edit, assigned
from bridge.wiring.compiled import ForcedEager, strip

#: Makes what stands for the forward of a shell, of the hook points inside of it by channel, and where a pass is found.
MakesTap = Callable[[nn.Module, Mapping[str, Sequence[LoweredPoint]], threading.local], "LoweredTap"]
#: The dictionaries of torch hooks, of which a shell has copies.
HOOKS = (
    "_backward_pre_hooks", "_backward_hooks", "_forward_hooks", "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called", "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs",
)  # fmt: skip


@dataclass
class Lowered:
    """A model of shells, with the code of a program at its sites.

    Attributes:
        model: the shells.
        here: where a pass is found while it is under way.
        embeddings: the token embeddings, and the sites on their output that views elsewhere need.
        steps: the hook points of the program.
        one_by_one: experts are computed one after the other, with numbers of rows that depend on the values.
    """

    model: nn.Module
    here: threading.local
    embeddings: tuple[nn.Module, tuple[Site, ...]] | None
    steps: tuple[LoweredPoint, ...]
    one_by_one: bool

    @property
    def taken(self) -> set[str]:
        """The declared inputs that functions take."""
        functions = [listener.fn for step in self.steps for listener in step.changes]
        return {name for fn in functions if isinstance(fn, Function) for name in fn.takes}

    @property
    def chooses_tokens(self) -> str | None:
        """A hook point with an operation that has to know which tokens of the sequence it is shown; None: none has."""
        for step in self.steps:
            for change in [listener.fn for listener in step.changes]:
                if isinstance(change, Function) and isinstance(change.fn, Operation) and change.fn.chooses_tokens:
                    return step.hook.name
        return None

    def take_embeddings(self, program_pass: ProgramPass, arguments: Kwargs) -> None:
        """Notes what the model is given in place of the output of its token embeddings, if it is."""
        given = arguments.get("inputs_embeds")
        if given is not None and self.embeddings is not None:
            module, sites = self.embeddings
            for site in sites:
                program_pass.sources[site] = (module, given)


def lower(
    bridge: RunnableBridge,
    capture: Sequence[HookPoint],
    interventions: Sequence[tuple[HookPoint, AnyFunction]],
    declared: Collection[str],
) -> Lowered:
    """Puts the code of hook points to their sites in a model of shells.

    Args:
        bridge: the bridge; the hooks that it would run with now are part of the program, before the interventions.
        capture: what the program returns.
        interventions: the hook points and their functions, in turn.
        declared: the names of the declared inputs.

    Raises:
        ValueError: a hook point that no program can have; or a hook of gradients, or a module, is there.
        TypeError: a function that asks for what is not declared.
    """
    original, prefix = as_written(bridge.original_model)
    model = shell_of(original)
    here = threading.local()
    added = [(hook, listener.fn) for hook in bridge.wiring.points.values() for listener in _functions_at(hook)]
    changes: dict[HookPoint, list[Listener]] = {}
    for hook, listener in listeners_of([*added, *interventions], declared):
        changes.setdefault(hook, []).append(listener)
    for hook in list(changes):
        for follower in hook.point.linked:
            other = bridge.wiring.points[follower.name]
            changes.setdefault(other, []).insert(0, Listener("leader", LeaderEdit(hook.name, follower)))
    _refuse_edited_norms(changes)
    chosen = sorted({*changes, *capture}, key=lambda hook: hook.order)
    steps = tuple([LoweredPoint(hook, changes.get(hook, ()), hook in capture) for hook in chosen])
    by_site: dict[Site, list[LoweredPoint]] = {}
    for step in steps:
        by_site.setdefault(step.hook.point.site, []).append(step)
    sources = dict.fromkeys(site for step in steps for site in step.hook.point.sources)
    taps: dict[tuple[str, MakesTap], dict[str, list[LoweredPoint]]] = {}
    for site in dict.fromkeys([*by_site, *sources]):
        module = _module_at(model, site, prefix, by_site.get(site, ()))
        if site.kind not in (*_TAPS, "input", "output"):
            raise ValueError(
                f"{by_site[site][0].hook.name} is inside a mixer, or experts that are computed in batches, which a "
                "program cannot reach: use run_with_hooks"
            )
        if site.kind in _TAPS:
            _check_tap(module, by_site[site])
            taps.setdefault((site.path, _TAPS[site.kind]), {})[str(site.key)] = by_site[site]
        else:
            LoweredSite(site, module, by_site.get(site, ()), site in sources, here)
    for (path, tap), inside in taps.items():
        tap(model.get_submodule(path.removeprefix(prefix)), inside, here).install()
    core = bridge.core
    embedding = token_embedding(core)
    found = None
    if embedding is not None:
        paths = {path for path, module in original.named_modules(remove_duplicate=False) if module is embedding}
        sites = tuple(site for site in sources if site.kind == "output" and site.path.removeprefix(prefix) in paths)
        found = embedding, sites
    return Lowered(model, here, found, steps, any(tap is LoweredExperts for _, tap in taps))


def _refuse_edited_norms(changed: Collection[HookPoint]) -> None:
    """Refuses edits of a norm and of inputs that heads have of their own, which are normed again.

    Raises:
        ValueError: there are both in one block.
    """
    norms = {(hook.point.stack, hook.point.depth): hook for hook in changed if hook.point.separate_consumers}
    for hook in changed:
        norm = norms.get((hook.point.stack, hook.point.depth))
        if norm is not None and hook.point.flag == "use_split_qkv_input":
            raise ValueError(
                f"{norm.name} and {hook.name} cannot be changed in one program: what heads are given of their own is "
                "normed again, without that change. Make two programs, or change one of them"
            )


def _functions_at(hook: HookPoint) -> Iterable[Listener]:
    """The functions that a run would call now at a hook point.

    Raises:
        ValueError: one is given gradients, or is a module that was put there.
    """
    if not hook.listeners:
        return ()
    active = hook.visible_listeners()
    if wants_gradients(active) or any(listener.kind == "bwd" for listener in active):
        raise ValueError(
            f"{hook.name} has a hook that is given gradients, which a program has no place for: remove it "
            "(reset_hooks), or use tensor.register_hook on what the program returns"
        )
    if any(listener.kind == "follow" for listener in active):
        raise ValueError(
            f"{hook.name} has a module in its place, which a program has no place for: take it away, and give a "
            "function that calls it as an intervention"
        )
    return [listener for listener in active if listener.kind == "fwd"]


def _module_at(model: nn.Module, site: Site, prefix: str, steps: Sequence[LoweredPoint]) -> nn.Module:
    path = site.path.removeprefix(prefix)
    if call_number(path) is not None:
        names = ", ".join(step.hook.name for step in steps) or site.path
        raise ValueError(f"{names}: {module_path(path)} runs several times, and a program has no place in one of them")
    if path and not has_module(model, path):
        names = ", ".join(step.hook.name for step in steps)
        raise ValueError(f"{names}: {site.path!r} is no module of the model, so a program cannot reach it")
    return model.get_submodule(path)


def _check_tap(module: nn.Module, steps: Sequence[LoweredPoint]) -> None:
    """Refuses attention that is no torch function.

    Raises:
        ValueError: it is none.
    """
    implementation = implementation_of(module)
    if implementation is None or not is_opaque(implementation):
        return
    if is_looked_up(type(module).forward, implementation):
        raise ValueError(
            f"{steps[0].hook.name} is inside a kernel that is no torch function "
            f"(attn_implementation={implementation!r}), and cannot be lowered into a program; load the model with "
            'attn_implementation="sdpa" or "eager", or use run_with_hooks'
        )


# ----------------------------------------------------------------------------------------------------------------------
# Module objects of our own around a model's own parameters: what is put before or behind them, the model does not see.
#
# A shell is of the class of the module that it stands for, and shares its parameters, buffers and configuration: the
# very dictionaries, so that a parameter that is replaced in the model is replaced here too.
# ----------------------------------------------------------------------------------------------------------------------


def shell_of(model: nn.Module) -> nn.Module:
    """A model of shells, with the user's torch hooks and without those of any bridge.

    Args:
        model: the Hugging Face model, as it was written (see `as_written`).

    Raises:
        ValueError: a module has a forward of its own, which belongs to the module and not to a shell of it.
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
            if name == "_modules":
                fields[name] = {
                    key: None if child is None else shells[id(child)] for key, child in shell._modules.items()
                }
            elif name in HOOKS:
                fields[name] = value.copy()
            else:
                fields[name] = _with_shells(value, shells)
        fields["_compiled_call_impl"] = None
        if "gradient_checkpointing" in fields:  # a block that backward computes again is no part of the program
            fields["gradient_checkpointing"] = False
    shell = shells[id(model)]
    strip(shell)
    return shell


def as_written(model: nn.Module) -> tuple[nn.Module, str]:
    """A model without what `torch.compile` has put around it, and the path to it."""
    path = ""
    while "_orig_mod" in model._modules:
        model, path = model.get_submodule("_orig_mod"), f"{path}_orig_mod."
    return model, path


def _take_over_forward(shell: nn.Module, module: nn.Module, path: str) -> None:
    """Takes a tap of ours from before a forward. One of the module's own (a kernel's) becomes the shell's.

    Raises:
        ValueError: someone else's stands there.
    """
    forward: Any = shell.__dict__.pop("forward", None)
    while isinstance(forward, Tap | ForcedEager):
        forward = forward.original
    while hasattr(forward, "_torchdynamo_orig_callable"):  # what torch.compile(model.forward) left there
        forward = forward._torchdynamo_orig_callable
    if isinstance(forward, types.MethodType) and forward.__self__ is module:
        if forward.__func__ is not type(module).forward:
            shell.__dict__["forward"] = types.MethodType(forward.__func__, shell)
        return
    if forward is not None and getattr(forward, "__func__", None) is not type(shell).forward:
        raise ValueError(
            f"{path or 'the model'} ({type(shell).__name__}) has a forward of its own, {forward!r}: accelerate puts "
            "one there where it moves weights between devices (device_map, cpu_offload). A program calls the class's "
            "forward: load the model on one device, and remove what replaces forwards"
        )


def _with_shells(value: Any, shells: dict[int, nn.Module]) -> Any:
    """What a module keeps in an attribute, with shells in the place of the model's modules."""
    if isinstance(value, nn.Module):
        return shells.get(id(value), value)
    if isinstance(value, types.MethodType) and id(value.__self__) in shells:
        return types.MethodType(value.__func__, shells[id(value.__self__)])
    if type(value) in (list, tuple) and any(id(item) in shells for item in value):
        return type(value)([_with_shells(item, shells) for item in value])
    if type(value) is dict and any(id(item) in shells for item in value.values()):
        return {key: _with_shells(item, shells) for key, item in value.items()}
    return value


# ----------------------------------------------------------------------------------------------------------------------
# Places inside a forward in a program: the watches of `bridge.taps` see what a shell's own forward computes.
# ----------------------------------------------------------------------------------------------------------------------


class LoweredTap:
    """Stands for the forward of a shell.

    Args:
        module: the shell.
        steps: the hook points inside its forward, by channel.
        here: finds the pass that is under way.
        watch: makes what sees the functions that the module calls, whose channels these are.
    """

    def __init__(
        self,
        module: nn.Module,
        steps: Mapping[str, Sequence[LoweredPoint]],
        here: threading.local,
        watch: Callable[[ObservedAttentionCall], AttentionWatch | CallWatch] | None = None,
    ) -> None:
        self.module, self.here, self._watch = module, here, watch
        self.steps = {channel: tuple(points) for channel, points in steps.items()}
        self.original = module.forward

    def install(self) -> None:
        """Puts it in the place of the shell's forward."""
        self.module.__dict__["forward"] = self.__call__

    def show(self, channel: str, x: Tensor, call: Call, program_pass: ProgramPass) -> Tensor:
        """What the points of a channel make of a tensor."""
        for step in self.steps.get(channel, ()):
            x = step.apply(x, call, program_pass)
        return x

    def __call__(self, *args: object, **kwargs: object) -> object:
        """The module's forward."""
        assert self._watch is not None
        watch = self.here.watch = self._watch(_CallInProgram(self, Call(self.module, args, kwargs)))
        try:
            return watch.output_of(lambda: self.original(*args, **kwargs))
        finally:
            self.here.watch = None


class _CallInProgram(ObservedAttentionCall):
    """One call of a tapped shell: the program listens to all of its points."""

    def __init__(self, tap: LoweredTap, call: Call) -> None:
        self.tap, self.module, self.call, self.program_pass = tap, tap.module, call, current(tap.here)

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
        if any(step.changes for channel in ("scores", "pattern") for step in self.tap.steps.get(channel, ())):
            return False
        show_scores_and_pattern(self, attention)
        return True


def _attention(module: nn.Module, steps: Mapping[str, Sequence[LoweredPoint]], here: threading.local) -> LoweredTap:
    kernel_alone = implementation_of(module) == "sdpa" and is_looked_up(type(module).forward, "sdpa")
    return LoweredTap(module, steps, here, partial(AttentionWatch, kernel_alone=kernel_alone))


# ----------------------------------------------------------------------------------------------------------------------
# The experts of a mixture in a program: all, one after the other, so that no code depends on which were chosen.
# ----------------------------------------------------------------------------------------------------------------------


class LoweredExperts(LoweredTap):
    """Experts whose weights are in one parameter for all. Its channels are those of `bridge.taps.experts`.

    transformers' own loop over the experts leaves out those that no token was sent to, which is a question to the
    values; here these have no rows.
    """

    def install(self) -> None:
        """Takes the place of the module's forward.

        Raises:
            ValueError: the experts are kept in another way than in one parameter for each projection and expert.
        """
        if stacked(self.module):
            name = next(iter(self.steps.values()))[0].hook.name
            raise ValueError(f"{name} is inside experts whose matrices are stacked, which a program cannot reach")
        super().install()

    def __call__(self, *args: object, **kwargs: object) -> object:
        """The module's forward."""
        module: Any = self.module
        program_pass = current(self.here)
        call = Call(module, args, kwargs)
        given: Any = (*args, *kwargs.values())
        hidden_states, top_k_index, top_k_weights = given
        total = torch.zeros_like(hidden_states)
        chosen = torch.nn.functional.one_hot(top_k_index, num_classes=module.num_experts + 1).permute(2, 1, 0)
        for e in range(module.num_experts):
            rank, token = torch.where(chosen[e])
            both = _linear(
                module, first_projection(module), self.show(f"{e}.in", hidden_states[token], call, program_pass), e
            )
            if not has_gate(module):
                both = self.show(f"{e}.pre", both, call, program_pass)
            elif f"{e}.gate" in self.steps or f"{e}.pre" in self.steps:
                gate, up = gate_and_up(module, both)
                gate, up = (
                    self.show(f"{e}.gate", gate, call, program_pass),
                    self.show(f"{e}.pre", up, call, program_pass),
                )
                both = joined(module, gate, up)
            made = module._apply_gate(both) if has_gate(module) else module.act_fn(both)
            post = self.show(f"{e}.post", made, call, program_pass)
            out = self.show(f"{e}.out", _linear(module, "down_proj", post, e), call, program_pass)
            total.index_add_(0, token, (out * top_k_weights[token, rank, None]).to(total.dtype))
        return total


def _linear(module: Any, name: str, x: Tensor, expert: int) -> Tensor:
    """One projection of one expert, as its module keeps it."""
    weight: Tensor = getattr(module, name)[expert]
    if module.is_transposed:
        made = x @ weight
        return made + getattr(module, f"{name}_bias")[expert] if module.has_bias else made
    return torch.nn.functional.linear(x, weight, getattr(module, f"{name}_bias")[expert] if module.has_bias else None)


_TAPS: Mapping[str, MakesTap] = {
    "attention": _attention,
    "softmax": _attention,
    "experts": LoweredExperts,
    "router": partial(LoweredTap, watch=RouterWatch),
}


# ----------------------------------------------------------------------------------------------------------------------
# Bodies of `trace_edit` in a program.
#
# Outside of compiled code the body runs once in each pass, in step with the model, as in a run. Code that is compiled
# or exported cannot pause: there the body runs anew at each of its points, with the activations that it was given
# before, and is left where it asks for the next one.
# ----------------------------------------------------------------------------------------------------------------------


#: What makes other numbers at each call.
_RANDOM = {
    torch.rand, torch.randn, torch.randint, torch.randperm, torch.rand_like, torch.randn_like, torch.randint_like,
    torch.bernoulli, torch.multinomial, torch.normal, torch.nn.functional.dropout, torch.dropout,
    Tensor.bernoulli, Tensor.bernoulli_, Tensor.multinomial, Tensor.normal_, Tensor.uniform_, Tensor.random_,
    Tensor.exponential_,
}  # fmt: skip


def listeners_of(
    interventions: Sequence[tuple[HookPoint, AnyFunction]], declared: Collection[str]
) -> Iterator[tuple[HookPoint, Listener]]:
    """Interventions as listeners of a program, with bodies of edits as bodies.

    Args:
        interventions: hook points and functions.
        declared: the names of the declared inputs.

    Raises:
        TypeError: see `Function`.
    """
    bodies: dict[Edit, LoweredBody] = {}
    for hook, fn in interventions:
        if isinstance(fn, Edit):
            yield hook, Listener("fwd", bodies.setdefault(fn, LoweredBody(fn)))
        else:
            yield hook, Listener("fwd", Function(fn, hook, declared))


class LoweredBody:
    """The body of an edit in a program.

    Args:
        edit: the edit.
    """

    def __init__(self, edit: Edit) -> None:
        self.edit = edit

    def __call__(self, given: Tensor, hook: HookPoint, program_pass: ProgramPass) -> Tensor | None:
        """What becomes of an activation; None where the body leaves it, or changes it in place."""
        return (self._in_new_step if is_compiling() else self._in_step)(given, hook, program_pass)

    def _in_step(self, given: Tensor, hook: HookPoint, program_pass: ProgramPass) -> Tensor | None:
        """With the body paused in between."""
        body = program_pass.bodies.get(self)
        if not isinstance(body, BodyInStep):
            body = program_pass.bodies[self] = BodyInStep(self.edit, None)
        return body.visit(hook, given)

    def _in_new_step(self, given: Tensor, hook: HookPoint, program_pass: ProgramPass) -> Tensor | None:
        """With the body run up to it once more."""
        seen = program_pass.given.setdefault(self, {})
        seen[hook.name] = given
        again = ReplayedActivations(self.edit, seen, hook)
        with Watch.calling(self._refuse_random), contextlib.suppress(_PointNotReached):
            self.edit.body(again)
        return again.result

    def _refuse_random(self, func: AnyFunction, args: Args, kwargs: Kwargs) -> Any:
        if func in _RANDOM and len(self.edit.points) > 1:
            raise ValueError(
                f"{self.edit!r} draws random numbers ({getattr(func, '__name__', func)}), and asks for several "
                "points: in a compiled or exported program its body runs once for each of them, with other numbers "
                "each time. Give the numbers to the program as an input"
            )
        return func(*args, **kwargs)


class _PointNotReached(Exception):
    """The body asks for a point that has not come yet."""


class ReplayedActivations(BodyActivations):
    """What a body is given that is run up to a point once more.

    Args:
        edit: the edit.
        values: what it was given so far, the last at `hook`.
        hook: the point that the model is at.

    Attributes:
        result: the activation at `hook` as the body leaves it; None where it does not ask for it.
    """

    def __init__(self, edit: Edit, values: dict[str, Tensor], hook: HookPoint) -> None:
        self._edit, self._hook = edit, hook
        self._given = {name: act.clone() for name, act in values.items()}
        self._at = 0
        self.result: Tensor | None = None

    def _reach(self, name: str) -> str:
        hook = self._edit.find(name)
        if hook.name not in self._given:
            raise _PointNotReached
        at = list(self._given).index(hook.name)
        if at < self._at:
            raise OutOfStepError(f"{hook.name} has passed. Ask for points in the model's order")
        self._at = at
        return hook.name

    def _note(self, name: str) -> None:
        if name == self._hook.name:
            self.result = self._given[name]

    def __getitem__(self, name: str) -> Tensor:
        found = self._reach(name)
        self._note(found)
        return self._given[found]

    def __setitem__(self, name: str, value: Tensor) -> None:
        found = self._reach(name)
        self._given[found] = assigned(value, self._given[found], self._edit.find(name))
        self._note(found)
