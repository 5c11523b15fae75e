"""The facts of `cfg`, each by what it makes the model do, or by the steps that are proved with it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from adapters.architecture import Architecture, Block, NamedStep, Part
from adapters.attention import Attention
from adapters.config import config_of, forms_of
from adapters.feed_forward import MLP, MoE, keeps_experts
from adapters.inputs import arguments_of, takes
from adapters.mixers import Mixer
from adapters.observe.observe import AttentionRecorder, CallRecorder, Calls, Recording
from adapters.observe.recognised import recognise_norm
from adapters.points import INFER, has_module, is_inside, join, module_at, module_path
from adapters.proofs.evidence import Check, Evidence, Findings, LayerStep, add_numbered, like
from adapters.views import linearly, parameters_of, transformed
from adapters.weights import Weights

FACTS = "the facts of cfg"


def prove_facts(evidence: Evidence, findings: Findings) -> None:
    """What `cfg` says is what the model has and does. Rotation, scales and windows are proved with the scores.

    Args:
        evidence: a run with randomized activations.
        findings: what is found is added to it.
    """
    findings.claim(FACTS)
    cfg = evidence.bridge.cfg
    for name, seen in (*_sizes(evidence), *_forms(evidence)):
        said = getattr(cfg, name)
        findings.holds(FACTS, f"cfg.{name}", said == seen, f"it says {said!r}, and the model has {seen!r}")
    directions, cap = ("causal", "bidirectional"), cfg.attn_scores_soft_cap
    findings.holds(FACTS, "cfg.attention_dir", cfg.attention_dir in directions, f"it says {cfg.attention_dir!r}")
    findings.holds(FACTS, "cfg.attn_scores_soft_cap", cap == -1 or cap > 0, f"it says {cap!r}, and -1 is none")
    findings.holds(FACTS, "cfg.use_local_attn", not cfg.use_local_attn or bool(cfg.window_size), "no window is said")
    _epsilon(evidence, findings)
    _positions(evidence, findings)


def _last(evidence: Evidence, end: str, axis: int = -1) -> set[int]:
    """The sizes of an axis of all activations whose names end so."""
    return {x.shape[axis] for name, x in evidence.activations.items() if name.endswith(end) and ".mixer." not in name}


def _has_own_sizes(part: Part) -> bool:
    """Whether a part says numbers of heads or widths that are not those of `ModelConfig`."""
    if isinstance(part, MLP):
        return part.up.width is not None
    if not isinstance(part, Attention):
        return False
    heads = bool(part.config_values.keys() & {"n_heads", "n_key_value_heads"})
    return heads or any(each.width is not None for each in part.projections.values())


#: How the names of hook points end whose last axis is a size.
_SIZES = {
    "d_model": "hook_resid_pre", "d_head": ".hook_z", "d_shared_expert": "shared_expert.hook_post",
    "experts_per_token": "hook_expert_indices", "num_experts": "hook_router_logits", "d_vocab_out": "unembed.hook_out",
}  # fmt: skip


def _sizes(evidence: Evidence) -> Iterator[tuple[str, object]]:
    cfg, model = evidence.bridge.cfg, evidence.bridge.original_model
    first = evidence.architecture.stack
    sized = any(_has_own_sizes(place.step.part) for place in evidence.places())
    sized = sized or any(map(_has_own_sizes, (part for _, part in evidence.attentions())))

    def one(name: str, found: set[int]) -> Iterator[tuple[str, object]]:
        own = sized and getattr(cfg, name) in found  # layers that say their own sizes are held to them
        if found:
            yield name, getattr(cfg, name) if own else found.pop() if len(found) == 1 else sorted(found)

    yield "n_layers", len(first.modules(model.get_submodule(evidence.base)))
    yield from one("n_heads", _last(evidence, "hook_pattern", 1) or _last(evidence, ".hook_z", 2))
    yield from one("n_kv_heads", _last(evidence, ".hook_v", 2))
    yield from one("d_expert", _last_of_experts(evidence))
    for name, end in _SIZES.items():
        yield from one(name, _last(evidence, end))
    dense = {
        x.shape[-1]
        for name, x in evidence.activations.items()
        if name.endswith(".hook_post") and ".mlp" in name and "expert" not in name
    }
    yield from one("d_mlp", dense or _last_of_experts(evidence))
    tokens = evidence.architecture.token_embeddings
    embed = model.get_submodule(join(evidence.base, tokens)) if tokens else None
    if isinstance(table := getattr(embed, "weight", None), Tensor):
        yield "d_vocab", table.shape[0]
    yield "tie_word_embeddings", _tied(evidence, table if isinstance(table, Tensor) else None)


def _last_of_experts(evidence: Evidence) -> set[int]:
    return {x.shape[-1] for name, x in evidence.activations.items() if ".experts." in name and name.endswith("_post")}


def _tied(evidence: Evidence, table: Tensor | None) -> bool:
    """One tensor is both the embedding and the unembedding; without an unembedding, what the configuration says."""
    model, path = evidence.bridge.original_model, evidence.from_model("." + evidence.architecture.readout.path)
    if not evidence.architecture.readout.path or not has_module(model, path):
        return evidence.bridge.cfg.tie_word_embeddings
    weight = getattr(model.get_submodule(path), "weight", None)
    tables = [table]
    for stack in evidence.stacks():
        if tokens := stack.embedding.tokens:
            tables.append(getattr(model.get_submodule(join(evidence.base, tokens)), "weight", None))
    return any(each is not None and weight is each for each in tables)


def _ungated_experts(evidence: Evidence) -> bool:
    """Experts show what enters their activation function, and no gate."""
    shown = {name.rpartition(".")[2] for name in evidence.bridge.hook_dict if ".experts." in name}
    return "hook_pre" in shown and "hook_gate" not in shown


def _forms(evidence: Evidence) -> Iterator[tuple[str, object]]:
    """What the steps say, which are proved themselves."""
    architecture, cfg = evidence.architecture, evidence.bridge.cfg
    blocks = _blocks(evidence, architecture)
    parts = [step.part for block in blocks for step in block.steps]
    attentions = [part for _, part in evidence.attentions() if part.projections]
    if parts:
        said = forms_of(blocks)
        mixed = any(isinstance(part, MoE) for part in parts) and not _ungated_experts(evidence)
        yield from (said | {"gated_mlp": said["gated_mlp"] or mixed}).items()
        yield "normalization_type", _norm_type(evidence)
    final = architecture.stack.final_norm
    final_rms = final is not None and not final.kind.centered and not final.kind.identity
    if cfg.final_rms or not (cfg.normalization_type or "").startswith("RMS"):  # False says nothing where all are
        yield "final_rms", final_rms
    yield "post_embedding_ln", architecture.embedding.norm is not None and architecture.embedding.norm_of_sum is None
    by_scores = cfg.positional_embedding_type in ("alibi", "relative_positional_bias")  # told apart by them
    if attentions and not by_scores:
        yield "positional_embedding_type", _kind_of_positions(evidence, attentions)
    if cfg.attn_types is not None:
        yield "use_local_attn", "local" in cfg.attn_types


def _kind_of_positions(evidence: Evidence, attentions: list[Attention]) -> str:
    """How positions come in, other than by what is added to scores."""
    if any(part.rotary for part in attentions):
        return "rotary"
    if any(part.qk_shift for part in attentions):
        return "shortformer"
    base = evidence.module(evidence.base)
    return "standard" if evidence.architecture.embedding.adds_places(base) else "none"


def _blocks(evidence: Evidence, architecture: Architecture) -> list[Block]:
    first = architecture.stack
    return [first.block_at(i) for i in sorted({p.layer for p in evidence.places() if p.stack is first})]


def _norm_type(evidence: Evidence) -> str | None:
    """The name of the first norm's kind; a native model adds whether its norms have weights."""
    kind = evidence.architecture.norm_kind
    name, said = kind.name if kind else None, evidence.bridge.cfg.normalization_type
    if name and said == f"{name}Pre":
        norms = [place.step.pre for place in evidence.places() if place.step.pre]
        call = evidence.call(next(evidence.places()).path, norms[0].path) if norms else None
        if call is not None and getattr(call.module, "weight", None) is None:
            return said
    return name


def _epsilon(evidence: Evidence, findings: Findings) -> None:
    cfg = evidence.bridge.cfg
    for place in evidence.places():
        norm = place.stack.block_at(place.layer).norm or next(iter(place.step.norms), None)
        call = evidence.call(place.path, norm.path) if norm and norm.kind.name else None
        if norm is not None and call is not None:
            seen = norm.kind.epsilon(call.module)
            findings.holds(FACTS, "cfg.eps", cfg.eps == seen, f"it says {cfg.eps!r}, and the first norm has {seen!r}")
            return


#: How fields of configurations end that say how many positions there are.
_LENGTH = re.compile(r"(position_embeddings|positions|ctx|seq_len|length)$")


def _lengths(config: PreTrainedConfig) -> set[int]:
    """How many positions a configuration, or the part of it that is about text, says there are, in its own words."""
    said = [*vars(config).items(), *vars(config.get_text_config()).items()]
    return {x for name, x in said if isinstance(x, int) and not isinstance(x, bool) and _LENGTH.search(name)}


def _positions(evidence: Evidence, findings: Findings) -> None:
    """Learned positions: as many as the model has, but for those that it puts before the first."""
    architecture, cfg, model = evidence.architecture, evidence.bridge.cfg, evidence.bridge.original_model
    if architecture.embedding.positions and cfg.n_ctx is not None:
        call = evidence.call(evidence.base, architecture.embedding.positions)
        table = getattr(call.module, "weight", None) if call else None
        if isinstance(table, Tensor):
            before = int(getattr(call.module, "offset", 0)) if call else 0
            seen = table.shape[0] - before
            row = call.result.flatten(0, -2)[0].to(table) if call and call.result is not None else table[0]
            first = (table == row).all(-1).nonzero().flatten().tolist()
            if first and cfg.n_ctx == len(table) - first[0]:
                seen = cfg.n_ctx  # the model counts from a later row
            findings.holds(FACTS, "cfg.n_ctx", cfg.n_ctx == seen, f"it says {cfg.n_ctx}, and the model has {seen}")
    elif cfg.n_ctx is not None:  # nothing ends there that a run could show
        told = _lengths(config_of(evidence.bridge.core))
        wrong = f"it says {cfg.n_ctx}, and the configuration {sorted(told)}"
        findings.holds(FACTS, "cfg.n_ctx", not told or cfg.n_ctx in told, wrong)
    start = cfg.decoder_start_token_id
    config = config_of(evidence.bridge.core)
    prepare = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    if start is None or not config.is_encoder_decoder:
        return
    labels = torch.ones(1, 2, dtype=torch.long, device=cfg.device)
    if prepare is not None:
        seen = int(prepare(labels=labels)[0, 0])
    elif (
        takes(evidence.bridge.core).main is not None
        and architecture.token_embeddings
        and getattr(config, "pad_token_id", None) is not None
    ):  # see what its labels become
        path = join(evidence.base, architecture.token_embeddings)
        with torch.no_grad(), CallRecorder([(path, model.get_submodule(path))]) as recording:
            evidence.bridge.core(**arguments_of(evidence.bridge.core, evidence.tokens[:1], {"labels": labels}))
        given = recording.of(path)[0].input
        seen = -1 if given is None else int(given[0, 0])
    else:
        return
    findings.holds(FACTS, "cfg.decoder_start_token_id", seen == start, f"it says {start}, and the model {seen}")


# ----------------------------------------------------------------------------------------------------------------------
# Nothing is left out: whatever computes something in a block that ran is claimed by a hook point, or named here.
#
# And what is declared is there: what a patch to another layout has moved is said by the claim.
# ----------------------------------------------------------------------------------------------------------------------


LEFT_OUT = "nothing in a block is left out: its layers, norms and softmaxes are claimed"

THERE = "what the declaration names is there"


def _plain_run(evidence: Evidence) -> tuple[Calls, Counter[str]]:
    """A run without hook points: the calls of all modules, and how many softmaxes each computed itself."""
    recording = Recording(*evidence.tokens.shape[:2])
    recorder = CallRecorder(evidence.bridge.original_model.named_modules(), recording, layout=evidence.bridge.layout)
    with torch.no_grad(), recorder, AttentionRecorder(recorder):
        evidence.bridge.core(**evidence.arguments)  # not what compiles it
    return add_numbered(recording.by_path, evidence.bridge), Counter(each.path for each in recording.softmaxes)


def prove_coverage(evidence: Evidence, findings: Findings) -> None:
    """Every module in a block that has parameters or computes a norm, and every softmax, belongs to a hook point.

    Args:
        evidence: says what to run.
        findings: what is found is added to it.
    """
    findings.claim(LEFT_OUT)
    calls, softmaxes = _plain_run(evidence)
    points = [hook.point for hook in evidence.bridge.hook_dict.values()]
    sites = {site.path for point in points for site in (point.site, *point.sources)}
    shown = {point.site.path for point in points if point.site.kind in ("attention", "softmax", "router")}
    by_block: dict[str, list[LayerStep]] = {}
    for place in evidence.places():
        by_block.setdefault(place.path, []).append(place)
    for block, places in by_block.items():
        opaque = [path for place in places for path in _opaque(place)]
        opaque += [place.module for place in places if findings.is_left_out(place.part.removesuffix("."))]
        inside = {x for x in (*calls, *softmaxes) if x.startswith(f"{block}.") and not is_inside(x, *opaque)}
        _prove_layers(findings, [path for path in calls if path in inside], calls, places, sites)
        for path in [path for path in softmaxes if path in inside and not _is_activation(evidence, places, path)]:
            count = softmaxes[path]
            findings.holds(LEFT_OUT, path, path in shown, "a softmax that no hook point shows")
            findings.holds(LEFT_OUT, path, count == 1, f"{count} softmaxes, of which hook points show one")
        for place in places:
            part = place.step.part
            if isinstance(part, Mixer) and part.mixes:
                findings.inconclusive(LEFT_OUT, f"what {place.module} computes inside is not offered")


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
            findings.holds(LEFT_OUT, path, path in claimed, f"{computes} that no hook point stands on")


def _biases(place: LayerStep) -> list[str]:
    """Modules whose parameters are claimed otherwise than by a hook point."""
    part, step = place.step.part, place.step
    kept = parameters_of((*step.output_transform, *step.residual_transform))
    # Only of a module inside of the block: what a part's own module keeps is seen in the sum.
    return [join(place.path, path.rpartition(".")[0]) for path in kept] + _of_part(place, part)


def _of_part(place: LayerStep, part: Part) -> list[str]:
    if isinstance(part, MLP) and isinstance(part.activation, str):
        return [join(place.module, part.activation)]
    if not isinstance(part, Attention):
        return []
    # An auxiliary module is declared by name, also where its hook point is not offered.
    auxiliary = [module_path(path) for path, _ in part.auxiliary_modules]
    return [join(place.module, path) for path in (*auxiliary, part.position_bias) if path]


def _roles(place: LayerStep) -> Iterator[str]:
    """The layers and norms that have a part of their own to play."""
    step, part = place.step, place.step.part
    yield from (join(place.module, path) for path in part.submodules.values() if path)
    first = place.stack.block_at(place.layer).norm
    yield from (join(place.path, norm.path) for norm in (*step.norms, *((first,) if first else ())))


def _opaque(place: LayerStep) -> list[str]:
    """Modules whose insides are claimed by other means: experts by their own hook points, a mixer by its ends."""
    part, mix = place.step.part, place.step.mix
    # Of streams that the block itself mixes, the module in it that makes the weights, all of whose layers run twice.
    path = mix.path.rpartition(".")[0] if mix and mix.by_block else mix.path if mix else ""
    mixing = [join(place.path, path)] if path else []
    if isinstance(part, Mixer):
        entry = place.step.entry
        inside = [join(place.path, each.path) for each in part.attentions if not each.o]
        return [place.module, *([join(place.path, entry)] if entry else []), *mixing, *inside]
    if not isinstance(part, MoE):
        return mixing
    return [join(place.module, path) for path in (part.experts, part.router) if path] + mixing


def _before_latents(place: LayerStep, calls: Calls) -> list[str]:
    """The layers whose output, or its first columns, is what the norm of a latent reads; or the latent itself."""
    part = place.step.part
    if not isinstance(part, Attention):
        return []
    found = []
    for latent in (part.q.latent, part.k.latent):
        norm = calls.get(join(place.module, latent.path)) if latent and latent.path else None
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
    mlps = [place.module for place in places if isinstance(place.step.part, MLP)]
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
        part = place.step.part
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
    step, part = place.step, place.step.part
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


# ----------------------------------------------------------------------------------------------------------------------
# The canonical weights are those that make the activations: what is read, times the matrix, plus the bias.
# ----------------------------------------------------------------------------------------------------------------------


WEIGHTS = "weights and biases make the activations of their names"


def prove_weights(
    evidence: Evidence, findings: Findings, weights: Weights | None = None, *, of_each_kind: bool = False
) -> None:
    """Queries, keys, values, what attention adds, and the layers of MLPs, from what was read and the weights' names.

    Args:
        evidence: a run.
        findings: what is found is added to it.
        weights: which ones; None: those that the declaration makes.
        of_each_kind: in the first block of each kind that is declared, not in all of them: of the same modules, too.
    """
    findings.claim(WEIGHTS)
    bridge = evidence.bridge
    weights = weights or Weights(bridge.architecture, bridge.original_model, bridge.cfg)
    findings.attempt(WEIGHTS, partial(_embedded, evidence, findings, weights))
    seen: list[tuple[str, NamedStep, str]] = []
    for place in evidence.places():
        if of_each_kind:
            kind = (place.stack.name, place.named, str(module_at(bridge.original_model, place.path)))
            if kind in seen:
                continue
            seen.append(kind)
        part = place.step.part
        proof = _Layer(evidence, findings, weights, place)
        if isinstance(part, Attention):
            for letter in "qkv":
                findings.attempt(WEIGHTS, partial(proof.projection, letter))
            findings.attempt(WEIGHTS, partial(proof.last, "W_O", "b_O", "hook_z"))
        elif isinstance(part, MLP):
            proof.mlp(part, "")
        elif isinstance(part, MoE) and part.shared:
            proof.mlp(part.shared, "shared_expert.")


def _embedded(evidence: Evidence, findings: Findings, weights: Weights) -> None:
    """The rows of `W_E` are what the hook point of the token embedding shows."""
    name = next((n for n in ("hook_embed", "embed.hook_embed") if n in evidence.activations), "")
    stack = evidence.architecture.token_stack
    if (
        not name
        or stack is not evidence.architecture.stack
        or (stack.embedding.norm and stack.embedding.module is None)
    ):
        return  # it shows a norm of them
    get = weights.getters.get("embed.W_E") or weights.getters["embed.embed.W_E"]
    ids = evidence.text.clamp(max=len(get()) - 1)
    findings.equal(WEIGHTS, name, evidence.get(name), get()[ids])


@dataclass
class _Layer:
    evidence: Evidence
    findings: Findings
    weights: Weights
    place: LayerStep

    def weight(self, name: str) -> Tensor | None:
        """A weight; None, and said so, where the layer has no plain one."""
        full = f"{self.place.part}{name}"
        head, _, last = full.rpartition(".")
        get = self.weights.getters.get(full) or self.weights.getters.get(f"{head}._{last}")
        if get is None:
            return None
        try:
            return get().detach()
        except TypeError as error:  # merged or quantised layers have none, and say how to get one
            self.findings.inconclusive(WEIGHTS, str(error))
            return None

    def own(self, point: str) -> tuple[Tensor, Tensor] | None:
        """What the module of a hook point read, and what it made as the hook point shows it: nothing replaced."""
        hook = self.evidence.bridge.hook_dict.get(f"{self.place.part}{point}")
        call = self.evidence.call(hook.point.site.path) if hook else None
        seen_by = self.evidence.seen_by(hook) if hook else None
        if hook is None or call is None or call.input is None or not isinstance(call.output, Tensor) or not seen_by:
            return None
        return call.input, hook.view.get(self.evidence.raw[hook.point.site.path][0].output, seen_by)

    def projection(self, letter: str) -> None:
        """Queries, keys or values of each head."""
        at, found = f"{self.place.part}hook_{letter}", self.own(f"hook_{letter}")
        matrix, bias = self.weight(f"W_{letter.upper()}"), self.weight(f"b_{letter.upper()}")
        if matrix is None or bias is None or found is None:
            return
        read, made = found
        expected = torch.einsum("bpm,hmd->bphd", _precise(read), _precise(matrix)) + _precise(bias)
        self.findings.equal(WEIGHTS, at, made, expected.to(made.dtype))

    def last(self, matrix_name: str, bias_name: str, point: str) -> None:
        """What the last layer of a part makes, with the step's factor."""
        matrix, bias = self.weight(matrix_name), self.weight(bias_name)
        hook = self.evidence.bridge.hook_dict.get(f"{self.place.part}{point}")
        call = self.evidence.call(hook.point.site.path) if hook else None
        if matrix is None or bias is None or call is None or call.input is None or call.result is None:
            return
        entered = _precise(call.input.flatten(0, -2))
        expected = entered @ _precise(matrix).flatten(0, -2) + _precise(bias)
        step = self.place.step
        block = self.evidence.module(self.place.path)
        if isinstance(step.part, MoE) and "shared" in matrix_name:  # one of several terms
            made = linearly(step.behind_last, call.result * step.part.shared_factor, block)
        else:
            made = transformed(step.behind_last, call.result, block)
        self.findings.equal(WEIGHTS, f"{self.place.part}{matrix_name}", like(expected.to(made.dtype), made), made)

    def mlp(self, part: MLP, inside: str) -> None:
        """An MLP's first layers, and its last."""
        first = (("hook_pre", "W_gate", "b_gate"), ("hook_pre_linear", "W_in", "b_in")) if part.gate else ()
        for point, matrix, bias in first or (("hook_pre", "W_in", "b_in"),):
            self.findings.attempt(WEIGHTS, partial(self.first, inside, point, matrix, bias))
        self.findings.attempt(WEIGHTS, partial(self.last, f"{inside}W_out", f"{inside}b_out", f"{inside}hook_post"))

    def first(self, inside: str, point: str, matrix_name: str, bias_name: str) -> None:
        """What enters the activation function, or is multiplied with what it makes."""
        found, matrix = self.own(f"{inside}{point}"), self.weight(f"{inside}{matrix_name}")
        bias = self.weight(f"{inside}{bias_name}")
        if matrix is None or found is None:
            return
        read, made = found
        expected = _precise(read) @ _precise(matrix)
        if bias is not None:
            expected = expected + _precise(bias)
        expected = expected.to(made.dtype)
        self.findings.equal(WEIGHTS, f"{self.place.part}{inside}{point}", made, like(expected, made))


def _precise(x: Tensor) -> Tensor:
    """Numbers that can be summed up: those of half precision, and integers, in single."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()
