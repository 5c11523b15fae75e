"""The facts of `cfg`, each by what it makes the model do, or by the steps that are proved with it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from adapters.architecture import Architecture, Block, Part
from adapters.attention import Attention
from adapters.config import config_of, forms_of
from adapters.feed_forward import MLP, MoE
from adapters.inputs.arguments import takes
from adapters.inputs.made import arguments_of
from adapters.observe.recording import Recorder
from adapters.paths import has_module, join, module_at
from adapters.proofs.evidence import Evidence
from adapters.proofs.report import Findings

CLAIM = "the facts of cfg"


def prove_facts(evidence: Evidence, findings: Findings) -> None:
    """What `cfg` says is what the model has and does. Rotation, scales and windows are proved with the scores.

    Args:
        evidence: a run with randomized activations.
        findings: what is found is added to it.
    """
    findings.claim(CLAIM)
    cfg = evidence.bridge.cfg
    for name, seen in (*_sizes(evidence), *_forms(evidence)):
        said = getattr(cfg, name)
        findings.holds(CLAIM, f"cfg.{name}", said == seen, f"it says {said!r}, and the model has {seen!r}")
    directions, cap = ("causal", "bidirectional"), cfg.attn_scores_soft_cap
    findings.holds(CLAIM, "cfg.attention_dir", cfg.attention_dir in directions, f"it says {cfg.attention_dir!r}")
    findings.holds(CLAIM, "cfg.attn_scores_soft_cap", cap == -1 or cap > 0, f"it says {cap!r}, and -1 is none")
    findings.holds(CLAIM, "cfg.use_local_attn", not cfg.use_local_attn or bool(cfg.window_size), "no window is said")
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


def _sizes(evidence: Evidence) -> Iterator[tuple[str, object]]:
    cfg, model = evidence.bridge.cfg, evidence.bridge.original_model
    first = evidence.bridge.architecture.stack
    sized = any(_has_own_sizes(place.named.step.part) for place in evidence.places())

    def one(name: str, found: set[int]) -> Iterator[tuple[str, object]]:
        own = sized and getattr(cfg, name) in found  # layers that say their own sizes are held to them
        if found:
            yield name, getattr(cfg, name) if own else found.pop() if len(found) == 1 else sorted(found)

    yield "n_layers", len({place.layer for place in evidence.places() if place.stack is first}) or cfg.n_layers
    yield from one("d_model", _last(evidence, "hook_resid_pre"))
    yield from one("n_heads", _last(evidence, "hook_pattern", 1) or _last(evidence, ".hook_z", 2))
    yield from one("d_head", _last(evidence, ".hook_z"))
    yield from one("n_kv_heads", _last(evidence, ".hook_v", 2))
    yield from one("d_expert", _last_of_experts(evidence))
    yield from one("d_shared_expert", _last(evidence, "shared_expert.hook_post"))
    yield from one("experts_per_token", _last(evidence, "hook_expert_indices"))
    yield from one("num_experts", _last(evidence, "hook_router_logits"))
    dense = {
        x.shape[-1]
        for name, x in evidence.activations.items()
        if name.endswith(".hook_post") and ".mlp" in name and "expert" not in name
    }
    yield from one("d_mlp", dense or _last_of_experts(evidence))
    tokens = evidence.bridge.architecture.token_embeddings
    embed = model.get_submodule(join(evidence.base, tokens)) if tokens else None
    if isinstance(table := getattr(embed, "weight", None), Tensor):
        yield "d_vocab", table.shape[0]
    yield from one("d_vocab_out", _last(evidence, "unembed.hook_out"))
    yield "tie_word_embeddings", _tied(evidence, table if isinstance(table, Tensor) else None)


def _last_of_experts(evidence: Evidence) -> set[int]:
    return {x.shape[-1] for name, x in evidence.activations.items() if ".experts." in name and name.endswith("_post")}


def _tied(evidence: Evidence, table: Tensor | None) -> bool:
    """One tensor is both the embedding and the unembedding; without an unembedding, what the configuration says."""
    model, path = evidence.bridge.original_model, evidence.from_model("." + evidence.bridge.architecture.readout.path)
    if not evidence.bridge.architecture.readout.path or not has_module(model, path):
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
    architecture, cfg = evidence.bridge.architecture, evidence.bridge.cfg
    blocks = _blocks(evidence, architecture)
    parts = [step.part for block in blocks for step in block.steps]
    attentions = [part for part in parts if isinstance(part, Attention)]
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
    base = module_at(evidence.bridge.original_model, evidence.base)
    return "standard" if evidence.bridge.architecture.embedding.adds_places(base) else "none"


def _blocks(evidence: Evidence, architecture: Architecture) -> list[Block]:
    first = architecture.stack
    return [first.block_at(i) for i in sorted({p.layer for p in evidence.places() if p.stack is first})]


def _norm_type(evidence: Evidence) -> str | None:
    """The name of the first norm's kind; a native model adds whether its norms have weights."""
    kind = evidence.bridge.architecture.norm_kind
    name, said = kind.name if kind else None, evidence.bridge.cfg.normalization_type
    if name and said == f"{name}Pre":
        norms = [place.named.step.pre for place in evidence.places() if place.named.step.pre]
        call = evidence.call(next(evidence.places()).path, norms[0].path) if norms else None
        if call is not None and getattr(call.module, "weight", None) is None:
            return said
    return name


def _epsilon(evidence: Evidence, findings: Findings) -> None:
    cfg = evidence.bridge.cfg
    for place in evidence.places():
        norm = place.stack.block_at(place.layer).norm or next(iter(place.named.step.norms), None)
        call = evidence.call(place.path, norm.path) if norm and norm.kind.name else None
        if norm is not None and call is not None:
            seen = norm.kind.epsilon(call.module)
            findings.holds(CLAIM, "cfg.eps", cfg.eps == seen, f"it says {cfg.eps!r}, and the first norm has {seen!r}")
            return


def _positions(evidence: Evidence, findings: Findings) -> None:
    """Learned positions: as many as the model has, but for those that it puts before the first."""
    architecture, cfg, model = evidence.bridge.architecture, evidence.bridge.cfg, evidence.bridge.original_model
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
            findings.holds(CLAIM, "cfg.n_ctx", cfg.n_ctx == seen, f"it says {cfg.n_ctx}, and the model has {seen}")
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
        with torch.no_grad(), Recorder([(path, model.get_submodule(path))]) as recording:
            evidence.bridge.core(**arguments_of(evidence.bridge.core, evidence.tokens[:1], {"labels": labels}))
        given = recording.of(path)[0].input
        seen = -1 if given is None else int(given[0, 0])
    else:
        return
    findings.holds(CLAIM, "cfg.decoder_start_token_id", seen == start, f"it says {start}, and the model {seen}")
