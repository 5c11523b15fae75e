"""From hook points with functions to shells with code at their sites."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from adapters.paths import call_number, has_module, module_path, token_embedding
from adapters.points import Site
from adapters.views import Kwargs
from bridge.hooks.hook_point import HookPoint
from bridge.hooks.linked_points import LeaderEdit
from bridge.hooks.listener import Listener
from bridge.hooks.results import wants_gradients
from bridge.interventions.operation import Operation
from bridge.programs.edits import listeners_of
from bridge.programs.functions import Function
from bridge.programs.mixtures import LoweredExperts
from bridge.programs.program_pass import AnyFunction, ProgramPass
from bridge.programs.shells import shell_of, written
from bridge.programs.sites import LoweredSite
from bridge.programs.steps import LoweredPoint
from bridge.programs.taps import LoweredAttention, LoweredRouter, LoweredTap
from bridge.run.protocol import RunnableBridge
from bridge.taps.kernels import implementation_of, is_looked_up, is_opaque

_TAPS: Mapping[str, type[LoweredTap]] = {
    "attention": LoweredAttention,
    "softmax": LoweredAttention,
    "experts": LoweredExperts,
    "router": LoweredRouter,
}


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
        ValueError: a hook point that no program can have; or a hook of gradients, or a module, is there; or the model
            is spread over processes.
        TypeError: a function that asks for what is not declared.
    """
    bridge.wiring.refuse_spread("a program")
    original, prefix = written(bridge.original_model)
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
    taps: dict[tuple[str, type[LoweredTap]], dict[str, list[LoweredPoint]]] = {}
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
