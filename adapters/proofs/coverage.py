"""Nothing is left out: whatever computes something in a block that ran is claimed by a hook point, or named here.

And what is declared is there: what a patch to another layout has moved is said by the claim.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import torch
from torch import nn

from adapters.architecture import Part
from adapters.attention import Attention
from adapters.experts import keeps_experts
from adapters.feed_forward import MLP, MoE
from adapters.mixers.part import Mixer
from adapters.observe.calls import Calls, Recording
from adapters.observe.recognised import recognise_norm
from adapters.observe.recording import Recorder, Watch
from adapters.paths import INFER, has_module, is_inside, join, module_path
from adapters.proofs.evidence import Evidence, LayerStep, add_numbered
from adapters.proofs.report import Check, Findings
from adapters.views import parameters_of

CLAIM = "nothing in a block is left out: its layers, norms and softmaxes are claimed"

THERE = "what the declaration names is there"


def _plain_run(evidence: Evidence) -> tuple[Calls, Counter[str]]:
    """A run without hook points: the calls of all modules, and how many softmaxes each computed itself."""
    recording = Recording(*evidence.tokens.shape[:2])
    recorder = Recorder(evidence.bridge.original_model.named_modules(), recording, layout=evidence.bridge.layout)
    with torch.no_grad(), recorder, Watch(recorder):
        evidence.bridge.core(**evidence.arguments)  # not what compiles it
    return add_numbered(recording.by_path, evidence.bridge), Counter(each.path for each in recording.softmaxes)


def prove_coverage(evidence: Evidence, findings: Findings) -> None:
    """Every module in a block that has parameters or computes a norm, and every softmax, belongs to a hook point.

    Args:
        evidence: says what to run.
        findings: what is found is added to it.
    """
    findings.claim(CLAIM)
    calls, softmaxes = _plain_run(evidence)
    points = [hook.point for hook in evidence.bridge.hook_dict.values()]
    sites = {site.path for point in points for site in (point.site, *point.sources)}
    shown = {point.site.path for point in points if point.site.kind in ("attention", "softmax", "router")}
    by_block: dict[str, list[LayerStep]] = {}
    for place in evidence.places():
        by_block.setdefault(place.path, []).append(place)
    for block, places in by_block.items():
        opaque = [path for place in places for path in _opaque(place)]
        inside = {x for x in (*calls, *softmaxes) if x.startswith(f"{block}.") and not is_inside(x, *opaque)}
        _prove_layers(findings, [path for path in calls if path in inside], calls, places, sites)
        for path in [path for path in softmaxes if path in inside and not _is_activation(evidence, places, path)]:
            count = softmaxes[path]
            findings.holds(CLAIM, path, path in shown, "a softmax that no hook point shows")
            findings.holds(CLAIM, path, count == 1, f"{count} softmaxes, of which hook points show one")
        for place in places:
            part = place.named.step.part
            if isinstance(part, Mixer) and part.mixes:
                findings.inconclusive(CLAIM, f"what {place.module} computes inside is not offered")


def _prove_layers(
    findings: Findings, inside: list[str], calls: Calls, places: list[LayerStep], sites: set[str]
) -> None:
    """Hook points stand on every layer and norm of a block.

    Args:
        findings: what is found is added to it.
        inside: the paths of the modules in the block that ran.
        calls: the calls of all modules.
        places: the steps of the block.
        sites: where hook points stand.
    """
    claimed = sites | {path for place in places for path in (*_before_latents(place, calls), *_biases(place))}
    # What a layer is made of (LoRA, packed weights) is claimed with the layer.
    roles = [path for place in places for path in _roles(place)]
    for path in inside:
        computes = "" if is_inside(path.rpartition(".")[0], *roles) else _computes(path, calls)
        if computes:
            findings.holds(CLAIM, path, path in claimed, f"{computes} that no hook point stands on")


def _biases(place: LayerStep) -> list[str]:
    """Modules whose parameters are claimed otherwise than by a hook point."""
    part, step = place.named.step.part, place.named.step
    kept = parameters_of((*step.output_transform, *step.residual_transform))
    # Only of a module inside of the block: what a part's own module keeps is seen in the sum.
    return [join(place.path, path.rpartition(".")[0]) for path in kept] + _of_part(place, part)


def _of_part(place: LayerStep, part: Part) -> list[str]:
    if isinstance(part, MLP) and part.activation:
        return [join(place.module, part.activation)]
    if not isinstance(part, Attention):
        return []
    # An auxiliary module is declared by name, also where its hook point is not offered.
    auxiliary = [module_path(path) for path, _ in part.auxiliary_modules]
    return [join(place.module, path) for path in (*auxiliary, part.position_bias) if path]


def _roles(place: LayerStep) -> Iterator[str]:
    """The layers and norms that have a part of their own to play."""
    step, part = place.named.step, place.named.step.part
    yield from (join(place.module, path) for path in part.submodules.values() if path)
    first = place.stack.block_at(place.layer).norm
    yield from (join(place.path, norm.path) for norm in (*step.norms, *((first,) if first else ())))


def _opaque(place: LayerStep) -> list[str]:
    """Modules whose insides are claimed by other means: experts by their own hook points, a mixer by its ends."""
    part, mix = place.named.step.part, place.named.step.mix
    mixing = [join(place.path, mix.path)] if mix else []
    if isinstance(part, Mixer):
        entry = place.named.step.entry
        return [place.module, *([join(place.path, entry)] if entry else []), *mixing]
    if not isinstance(part, MoE):
        return mixing
    return [join(place.module, path) for path in (part.experts, part.router) if path] + mixing


def _before_latents(place: LayerStep, calls: Calls) -> list[str]:
    """The layers whose output, or its first columns, is what the norm of a latent reads; or the latent itself."""
    part = place.named.step.part
    if not isinstance(part, Attention):
        return []
    found = []
    for latent in (part.q.latent, part.k.latent):
        norm = calls.get(join(place.module, latent)) if latent else None
        entered = norm[0].input if norm else None
        if entered is None:
            continue
        flat = entered.reshape(-1, entered.shape[-1])
        for path, each in calls.items():
            made = each[0].result if path.startswith(f"{place.module}.") else None
            if made is not None and made.ndim > 1 and made.shape[-1] >= flat.shape[-1]:
                first = made.reshape(-1, made.shape[-1])[:, : flat.shape[-1]]
                if first.shape == flat.shape and torch.equal(first, flat):
                    found.append(path)
    return found


def _computes(path: str, calls: Calls) -> str:
    """What a module computes itself that has to be claimed; "" where that is nothing."""
    found = calls[path]
    if len(found) > 1 and all(f"{path}@{number}" in calls for number in range(len(found))):
        return ""  # each call is looked at by itself
    module, entered, left = found[0].module, found[0].input, found[0].result
    own = [p for p in module._parameters.values() if p is not None]
    if own:
        return f"a {type(module).__name__} with parameters"
    if any(True for _ in module.children()) or entered is None or left is None:
        return ""
    if entered.shape != left.shape or not entered.is_floating_point() or entered.shape[-1] < 4 or entered.equal(left):
        return ""
    # Many rows of one width all agree on a norm only if it is one.
    close = 1e-4 if entered.dtype in (torch.float32, torch.float64) else 1e-2
    return f"a norm ({type(module).__name__})" if recognise_norm(entered, left, tolerance=close) else ""


def _is_activation(evidence: Evidence, places: list[LayerStep], path: str) -> bool:
    """Whether a softmax is that of an activation function, which `act(pre) = post` speaks of."""
    mlps = [place.module for place in places if isinstance(place.named.step.part, MLP)]
    solu = (evidence.bridge.cfg.act_fn or "").startswith("solu")
    return solu and is_inside(path, *mlps)


def prove_modules(model: nn.Module, places: Iterator[LayerStep]) -> Check:
    """Every module in a block that the declaration says makes something is there.

    Args:
        model: the model.
        places: the declared steps of its blocks.
    """
    looked_for = 0
    moved: dict[str, list[str]] = {}
    for place in places:
        for what, inside, path in _claims(place):
            looked_for += 1
            if not has_module(model, join(place.path, inside, path)):
                said = f"{what} by {join(inside, path)}, and {_instead(model, join(place.path, inside), path)}"
                moved.setdefault(said, []).append(f"{place.prefix}{place.named.name}")
        part = place.named.step.part
        at = join(place.module, part.experts) if isinstance(part, MoE) else ""
        if at and has_module(model, at) and not keeps_experts(model.get_submodule(at)):
            kept = f"its experts in two parameters of {type(model.get_submodule(at)).__name__}, which has no such"
            moved.setdefault(kept, []).append(f"{place.prefix}{place.named.name}")
    if not moved:
        return Check(THERE, True, f"{looked_for} modules")
    more = {what: f" and {len(where) - 1} more" if len(where) > 1 else "" for what, where in moved.items()}
    found = "; ".join(f"{where[0]}{more[what]}: the declaration has {what}" for what, where in moved.items())
    return Check(THERE, False, f"{found}. {INFER}")


def _claims(place: LayerStep) -> Iterator[tuple[str, str, str]]:
    """What is made by which module: what it is, the module that it is in, from the block, and its path in that."""
    step, part = place.named.step, place.named.step.part
    for what, norm in (("the norm before it", step.pre), ("the norm behind it", step.post)):
        if norm and not norm.path.startswith("."):
            yield what, "", norm.path
    yield from ((what, part.path, path) for what, path in part.submodules.items() if not path.startswith("."))


def _instead(model: nn.Module, owner: str, path: str) -> str:
    """What is where a module should be."""
    if not has_module(model, owner):
        return f"there is no {owner}"
    found = model.get_submodule(owner)
    inside = ", ".join(name for name, _ in found.named_children()) or "nothing"
    return f"the {type(found).__name__} there has no {path}, but {inside}"
