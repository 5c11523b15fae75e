"""Proofs of the facts of `cfg`, of the completeness of a declaration, and of the canonical
weights.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from adapters.architecture import NamedStep, Part
from adapters.attention import Attention
from adapters.config import config_of, forms_of
from adapters.feed_forward import MLP, MoE, keeps_experts
from adapters.inputs import arguments_of, takes
from adapters.linear import OpaqueLayerError
from adapters.mixers import Mixer
from adapters.observe.observe import AttentionRecorder, CallRecorder, Recording
from adapters.observe.recognised import recognise_norm
from adapters.points import INFER, has_module, is_inside, join, module_at, module_path
from adapters.proofs.evidence import (
    Check,
    Claim,
    Evidence,
    Findings,
    LayerStep,
    StepClaim,
    add_numbered,
    like,
)
from adapters.tuners import holder_of_parameters
from adapters.views import linearly, parameters_of, transformed
from adapters.weights import Weights

FACTS = "the facts of cfg"


def prove_facts(evidence: Evidence, findings: Findings) -> None:
    """Check that each field of `cfg` matches the model. Rotation, scales and windows are checked
    with the scores.

    Args:
        evidence: a run with randomized activations.
        findings: collects the results.
    """
    findings.claim(FACTS)
    _Facts(evidence, findings).prove()


def _has_own_sizes(part: Part) -> bool:
    """Tell whether a part declares head counts or widths that differ from those of
    `ModelConfig`.
    """
    if isinstance(part, MLP):
        return part.up.width is not None
    if not isinstance(part, Attention):
        return False
    if part.config_values.keys() & {"n_heads", "n_key_value_heads"}:
        return True
    return any(projection.width is not None for projection in part.projections.values())


#: Endings of the names of hook points whose last axis has the size of a field.
_SIZES = {
    "d_model": "hook_resid_pre",
    "d_head": ".hook_z",
    "d_shared_expert": "shared_expert.hook_post",
    "experts_per_token": "hook_expert_indices",
    "num_experts": "hook_router_logits",
    "d_vocab_out": "unembed.hook_out",
}

#: Endings of configuration fields that hold a number of positions.
_LENGTH = re.compile(r"(position_embeddings|positions|ctx|seq_len|length)$")


class _Facts(Claim):
    """The fields of `cfg` match the model."""

    name = FACTS

    def prove(self) -> None:
        """Check every field that a run shows."""
        cfg = self.cfg
        for name, value in (*self._sizes(), *self._forms()):
            self.agrees(name, value)
        direction = cfg.attention_dir
        known = direction in ("causal", "bidirectional")
        self.holds("cfg.attention_dir", known, f"it says {direction!r}")
        cap = cfg.attn_scores_soft_cap
        self.holds(
            "cfg.attn_scores_soft_cap", cap == -1 or cap > 0, f"it says {cap!r}, and -1 is none"
        )
        has_window = not cfg.use_local_attn or bool(cfg.window_size)
        self.holds("cfg.use_local_attn", has_window, "no window is said")
        self._prove_epsilon()
        self._prove_length()
        self._prove_decoder_start()

    def agrees(self, name: str, value: object, what: str = "the model has") -> None:
        """Check a field of `cfg` against the model's value."""
        declared = getattr(self.cfg, name)
        self.holds(f"cfg.{name}", declared == value, f"it says {declared!r}, and {what} {value!r}")

    # ----------------------------------------------------------------------------------------------
    # Sizes.
    # ----------------------------------------------------------------------------------------------

    def _axis(self, end: str, axis: int = -1) -> set[int]:
        """Return the sizes of an axis of all activations whose names have this ending."""
        sizes: set[int] = set()
        for name, x in self.evidence.activations.items():
            if name.endswith(end) and ".mixer." not in name:
                sizes.add(x.shape[axis])
        return sizes

    def _sizes(self) -> Iterator[tuple[str, object]]:
        """Yield the sizes that activations show."""
        base = self.bridge.original_model.get_submodule(self.path)
        yield "n_layers", len(self.architecture.stack.modules(base))
        neurons: set[int] = set()
        of_experts: set[int] = set()
        for name, x in self.evidence.activations.items():
            if ".experts." in name and name.endswith("_post"):
                of_experts.add(x.shape[-1])
            elif ".mlp" in name and "expert" not in name and name.endswith(".hook_post"):
                neurons.add(x.shape[-1])
        sizes = {
            "n_heads": self._axis("hook_pattern", 1) or self._axis(".hook_z", 2),
            "n_kv_heads": self._axis(".hook_v", 2),
            "d_expert": of_experts,
            **{name: self._axis(end) for name, end in _SIZES.items()},
            "d_mlp": neurons or of_experts,
        }
        parts = [place.step.part for place in self.evidence.places()]
        parts += [part for _, part in self.evidence.attentions()]
        some_differ = any(map(_has_own_sizes, parts))
        for name, values in sizes.items():
            declared = getattr(self.cfg, name)
            if some_differ and declared in values:
                yield name, declared  # layers may declare sizes that differ from cfg
            elif values:
                yield name, min(values) if len(values) == 1 else sorted(values)
        tokens = self.architecture.token_embeddings
        table = self._weight(tokens) if tokens else None
        if table is not None:
            yield "d_vocab", table.shape[0]
        yield "tie_word_embeddings", self._is_tied(table)

    def _weight(self, path: str) -> Tensor | None:
        """Return the weight of a module of the base model."""
        module = self.bridge.original_model.get_submodule(join(self.path, path))
        weight = getattr(module, "weight", None)
        return weight if isinstance(weight, Tensor) else None

    def _is_tied(self, table: Tensor | None) -> bool:
        """Tell whether one tensor is both the embedding and the unembedding. Without an
        unembedding, return the value of the configuration.
        """
        model = self.bridge.original_model
        path = self.evidence.unembed
        if not self.architecture.readout.path or not has_module(model, path):
            return self.cfg.tie_word_embeddings
        tables = [table]
        for stack in self.evidence.stacks():
            if tokens := stack.embedding.tokens:
                tables.append(self._weight(tokens))
        weight = getattr(model.get_submodule(path), "weight", None)
        return any(table is not None and weight is table for table in tables)

    # ----------------------------------------------------------------------------------------------
    # Kinds of parts and norms.
    # ----------------------------------------------------------------------------------------------

    def _forms(self) -> Iterator[tuple[str, object]]:
        """Yield the facts that follow from the steps, which are proved separately."""
        architecture = self.architecture
        cfg = self.cfg
        first = architecture.stack
        layers = {place.layer for place in self.evidence.places() if place.stack is first}
        blocks = [first.block_at(layer) for layer in sorted(layers)]
        parts = [step.part for block in blocks for step in block.steps]
        if parts:
            forms = dict(forms_of(blocks))
            if any(isinstance(part, MoE) for part in parts) and not self._has_ungated_experts():
                forms["gated_mlp"] = True
            yield from forms.items()
            yield "normalization_type", self._norm_type()
        # False means nothing if all are RMS.
        if cfg.final_rms or not (cfg.normalization_type or "").startswith("RMS"):
            final = first.final_norm
            yield "final_rms", bool(final and not (final.kind.centered or final.kind.identity))
        embedding = architecture.embedding
        norms_tokens = embedding.norm is not None and embedding.norm_of_sum is None
        yield "post_embedding_ln", norms_tokens
        # The scores decide between these.
        in_scores = cfg.positional_embedding_type in ("alibi", "relative_positional_bias")
        attentions = [part for _, part in self.evidence.attentions() if part.projections]
        if attentions and not in_scores:
            yield "positional_embedding_type", self._kind_of_positions(attentions)
        if cfg.attn_types is not None:
            yield "use_local_attn", "local" in cfg.attn_types

    def _has_ungated_experts(self) -> bool:
        """Tell whether the experts have hook points for the input of their activation function, and
        none for a gate.
        """
        points = [name for name in self.bridge.hook_dict if ".experts." in name]
        names = {name.rpartition(".")[2] for name in points}
        return "hook_pre" in names and "hook_gate" not in names

    def _kind_of_positions(self, attentions: list[Attention]) -> str:
        """Return the kind of position embedding, except for biases of scores."""
        if any(part.rotary for part in attentions):
            return "rotary"
        if any(part.qk_shift for part in attentions):
            return "shortformer"
        base = self.evidence.module(self.path)
        return "standard" if self.architecture.embedding.adds_places(base) else "none"

    def _norm_type(self) -> str | None:
        """Return the name of the first norm's kind. A native model's name includes whether its
        norms have weights.
        """
        kind = self.architecture.norm_kind
        declared = self.cfg.normalization_type
        name = kind.name if kind else None
        if not name or declared != f"{name}Pre":
            return name
        places = list(self.evidence.places())
        norm = next((place.step.pre for place in places if place.step.pre), None)
        call = self.evidence.call(places[0].path, norm.path) if norm else None
        has_weight = call is None or getattr(call.module, "weight", None) is not None
        return name if has_weight else declared

    def _prove_epsilon(self) -> None:
        """Check the epsilon of the first norm that ran."""
        for place in self.evidence.places():
            norm = place.stack.block_at(place.layer).norm or next(iter(place.step.norms), None)
            call = self.evidence.call(place.path, norm.path) if norm and norm.kind.name else None
            if norm is not None and call is not None:
                self.agrees("eps", norm.kind.epsilon(call.module), "the first norm has")
                return

    # ----------------------------------------------------------------------------------------------
    # Positions, and the decoder's first token.
    # ----------------------------------------------------------------------------------------------

    def _prove_length(self) -> None:
        """Check the number of learned positions, excluding rows that the model reserves before the
        first one.
        """
        positions = self.architecture.embedding.positions
        n_ctx = self.cfg.n_ctx
        if n_ctx is None:
            return
        if not positions:  # no table limits the positions, so a run shows no limit
            lengths = _lengths(config_of(self.bridge.core))
            self.holds(
                "cfg.n_ctx",
                not lengths or n_ctx in lengths,
                f"it says {n_ctx}, and the configuration {sorted(lengths)}",
            )
            return
        call = self.call(positions)
        table = getattr(call.module, "weight", None) if call else None
        if call is None or not isinstance(table, Tensor):
            return
        length = table.shape[0] - int(getattr(call.module, "offset", 0))
        row = table[0] if call.result is None else call.result.flatten(0, -2)[0].to(table)
        first = (table == row).all(-1).nonzero().flatten().tolist()
        if first and n_ctx == len(table) - first[0]:
            length = n_ctx  # the model counts from a later row
        self.agrees("n_ctx", length)

    def _prove_decoder_start(self) -> None:
        """Check the decoder's start token."""
        declared = self.cfg.decoder_start_token_id
        if declared is None or not config_of(self.bridge.core).is_encoder_decoder:
            return
        token = self._decoder_start()
        if token is not None:
            self.holds(
                "cfg.decoder_start_token_id",
                token == declared,
                f"it says {declared}, and the model {token}",
            )

    def _decoder_start(self) -> int | None:
        """Return the token that the decoder begins with if it runs on labels; None if the model
        cannot run with labels as its only decoder input.
        """
        core = self.bridge.core
        model = self.bridge.original_model
        labels = torch.ones(1, 2, dtype=torch.long, device=self.cfg.device)
        prepare = getattr(model, "prepare_decoder_input_ids_from_labels", None)
        if prepare is not None:
            return int(prepare(labels=labels)[0, 0])
        tokens = self.architecture.token_embeddings
        has_padding = getattr(config_of(core), "pad_token_id", None) is not None
        if takes(core).main is None or not tokens or not has_padding:
            return None
        path = join(self.path, tokens)
        arguments = arguments_of(core, self.evidence.tokens[:1], {"labels": labels})
        with torch.no_grad(), CallRecorder([(path, model.get_submodule(path))]) as recording:
            core(**arguments)
        entered = recording.of(path)[0].input
        return -1 if entered is None else int(entered[0, 0])


def _lengths(config: PreTrainedConfig) -> set[int]:
    """Return the numbers of positions that a configuration, or its text configuration, contains
    under any of the known names.
    """
    lengths: set[int] = set()
    for fields in (vars(config), vars(config.get_text_config())):
        for name, value in fields.items():
            if type(value) is int and _LENGTH.search(name):
                lengths.add(value)
    return lengths


# --------------------------------------------------------------------------------------------------
# Coverage: a hook point claims every module and softmax that computes something in a block that
# ran, or an exception is listed here.
#
# Presence: every declared module exists. If a patch has moved one, the check reports the new
# layout.
# --------------------------------------------------------------------------------------------------


LEFT_OUT = "nothing in a block is left out: its layers, norms and softmaxes are claimed"

THERE = "what the declaration names is there"


def prove_coverage(evidence: Evidence, findings: Findings) -> None:
    """Check that every softmax in a block, and every module in it that has parameters or computes a
    norm, belongs to a hook point.

    Args:
        evidence: provides the model and the inputs to run.
        findings: collects the results.
    """
    findings.claim(LEFT_OUT)
    _Coverage(evidence, findings).prove()


class _Coverage(Claim):
    """Every module and softmax in a block that computes something is claimed."""

    name = LEFT_OUT

    def prove(self) -> None:
        """Run the model without hook points, and check every block."""
        inputs = self.evidence
        recording = Recording(*inputs.tokens.shape[:2])
        modules = self.bridge.original_model.named_modules()
        recorder = CallRecorder(modules, recording, layout=self.bridge.layout)
        with torch.no_grad(), recorder, AttentionRecorder(recorder):
            self.bridge.core(**inputs.arguments)  # the core itself, not a compiled wrapper
        self.calls = add_numbered(recording.by_path, self.bridge)
        self.softmaxes = Counter(softmax.path for softmax in recording.softmaxes)
        points = [hook.point for hook in self.bridge.hook_dict.values()]
        self.sites = {site.path for point in points for site in (point.site, *point.sources)}
        kinds = ("attention", "softmax", "router")
        self.shown = {point.site.path for point in points if point.site.kind in kinds}
        by_block: dict[str, list[LayerStep]] = {}
        for place in inputs.places():
            by_block.setdefault(place.path, []).append(place)
        for block, places in by_block.items():
            self._prove_block(block, places)

    def _prove_block(self, block: str, places: list[LayerStep]) -> None:
        """Check the modules and the softmaxes of a block.

        Args:
            block: its path.
            places: its steps.
        """
        opaque: list[str] = []
        for place in places:
            opaque += _opaque(place)
            if self.findings.is_left_out(place.part.removesuffix(".")):
                opaque.append(place.module)

        def counts(path: str) -> bool:
            return path.startswith(f"{block}.") and not is_inside(path, *opaque)

        self._prove_layers(list(filter(counts, self.calls)), places)
        for path in filter(counts, self.softmaxes):
            if not self._is_activation(places, path):
                count = self.softmaxes[path]
                self.holds(path, path in self.shown, "a softmax that no hook point shows")
                self.holds(path, count == 1, f"{count} softmaxes, of which hook points show one")
        for place in places:
            part = place.step.part
            if isinstance(part, Mixer) and part.mixes:
                self.inconclusive(f"what {place.module} computes inside is not offered")

    def _prove_layers(self, paths: list[str], places: list[LayerStep]) -> None:
        """Check that every layer and norm of a block is the site of a hook point.

        Args:
            paths: the paths of the modules in the block that ran.
            places: the steps of the block.
        """
        claimed = set(self.sites)
        named: list[str] = []
        for place in places:
            claimed.update(self._before_latents(place), _claimed_otherwise(place))
            named += _named_modules(place)
        for path in paths:
            # Modules inside a layer (LoRA, packed weights) are claimed with the layer.
            if is_inside(path.rpartition(".")[0], *named):
                continue
            computes = self._computes(path)
            if computes:
                self.holds(path, path in claimed, f"{computes} that no hook point stands on")

    def _before_latents(self, place: LayerStep) -> list[str]:
        """Return the layers whose output, or its first columns, is the input of a latent's norm; or
        the latent itself.
        """
        part = place.step.part
        paths = list[str]()
        if not isinstance(part, Attention):
            return paths
        for latent in (part.q.latent, part.k.latent):
            norm = (
                self.calls.get(join(place.module, latent.path)) if latent and latent.path else None
            )
            entered = norm[0].input if norm else None
            if entered is None:
                continue
            rows = entered.reshape(-1, entered.shape[-1])
            for path, calls in self.calls.items():
                output = calls[0].result if path.startswith(f"{place.module}.") else None
                if output is not None and output.ndim > 1:
                    first = output.flatten(0, -2)[:, : rows.shape[-1]]
                    if torch.equal(first, rows):
                        paths.append(path)
        return paths

    def _computes(self, path: str) -> str:
        """Return a description of the module's own computation that needs a claim; "" if there is
        none.
        """
        calls = self.calls[path]
        count = len(calls)
        if count > 1 and all(f"{path}@{number}" in self.calls for number in range(count)):
            return ""  # each call is checked separately
        call = calls[0]
        module = call.module
        entered = call.input
        output = call.result
        kind = type(module).__name__
        if any(parameter is not None for parameter in module._parameters.values()):
            return f"a {kind} with parameters"
        if module._modules or entered is None or output is None:
            return ""
        if entered.shape != output.shape or entered.shape[-1] < 4 or entered.equal(output):
            return ""
        if not entered.is_floating_point():
            return ""
        # Many rows of one width match a norm only if the module is one.
        precise = entered.dtype in (torch.float32, torch.float64)
        norm = recognise_norm(entered, output, tolerance=1e-4 if precise else 1e-2)
        return f"a norm ({kind})" if norm else ""

    def _is_activation(self, places: list[LayerStep], path: str) -> bool:
        """Tell whether a softmax belongs to an activation function, which the claim `act(pre) =
        post` covers.
        """
        mlps = [place.module for place in places if isinstance(place.step.part, MLP)]
        return (self.cfg.act_fn or "").startswith("solu") and is_inside(path, *mlps)


def _claimed_otherwise(place: LayerStep) -> list[str]:
    """Return the modules whose parameters are claimed by other means than a hook point."""
    step = place.step
    part = place.step.part
    # Only for modules inside the block: the sum of the stream covers parameters of a part's own
    # module.
    parameters = parameters_of((*step.output_transform, *step.residual_transform))
    paths = [join(place.path, parameter.rpartition(".")[0]) for parameter in parameters]
    if isinstance(part, MLP) and isinstance(part.activation, str):
        paths.append(join(place.module, part.activation))
    elif isinstance(part, Attention):
        # An auxiliary module is declared by name, even if its hook point is not available.
        for path, _ in part.auxiliary_modules:
            paths.append(join(place.module, module_path(path)))
        if part.position_bias:
            paths.append(join(place.module, part.position_bias))
    return paths


def _named_modules(place: LayerStep) -> list[str]:
    """Return the paths of the layers and norms that the declaration names."""
    step = place.step
    first = place.stack.block_at(place.layer).norm
    norms = step.norms if first is None else (*step.norms, first)
    inside = [join(place.module, path) for path in step.part.submodules.values() if path]
    return inside + [join(place.path, norm.path) for norm in norms]


def _opaque(place: LayerStep) -> list[str]:
    """Return the modules whose contents are claimed by other means: experts by their own hook
    points, a mixer by its input and output.
    """
    part = place.step.part
    mix = place.step.mix
    entry = place.step.entry
    paths: list[str] = []
    if mix:
        # If the block itself mixes its streams, a module in it computes the weights; all of that
        # module's layers run twice.
        paths.append(mix.path.rpartition(".")[0] if mix.by_block else mix.path)
    if isinstance(part, Mixer):
        paths += [part.path, entry or ""]
        paths += [inner.path for inner in part.attentions if not inner.o]
    elif isinstance(part, MoE):
        paths += [join(part.path, path) for path in (part.experts, part.router) if path]
    return [join(place.path, path) for path in paths if path]


def prove_modules(model: nn.Module, places: Iterator[LayerStep]) -> Check:
    """Check that every module that the declaration names in a block exists.

    Args:
        model: the model.
        places: the declared steps of its blocks.
    """
    count = 0
    missing: dict[str, list[str]] = {}
    for place in places:
        where = f"{place.prefix}{place.named.name}"
        for function, inside, path in _named_with_functions(place):
            count += 1
            if not has_module(model, join(place.path, inside, path)):
                instead = _instead(model, join(place.path, inside), path)
                detail = f"{function} by {join(inside, path)}, and {instead}"
                missing.setdefault(detail, []).append(where)
        part = place.step.part
        path = join(place.module, part.experts) if isinstance(part, MoE) else ""
        if path and has_module(model, path):
            experts = holder_of_parameters(model.get_submodule(path))
            if not keeps_experts(experts):
                kind = type(experts).__name__
                detail = f"its experts in two parameters of {kind}, which has no such"
                missing.setdefault(detail, []).append(where)
    if not missing:
        return Check(THERE, True, f"{count} modules")
    details: list[str] = []
    for detail, prefixes in missing.items():
        more = f" and {len(prefixes) - 1} more" if len(prefixes) > 1 else ""
        details.append(f"{prefixes[0]}{more}: the declaration has {detail}")
    return Check(THERE, False, f"{'; '.join(details)}. {INFER}")


def _named_with_functions(place: LayerStep) -> Iterator[tuple[str, str, str]]:
    """Yield the declared modules: a description, the path of the enclosing module from the block,
    and the path inside of it.
    """
    step = place.step
    part = place.step.part
    for description, norm in (("the norm before it", step.pre), ("the norm behind it", step.post)):
        if norm and not norm.path.startswith("."):
            yield description, "", norm.path
    for function, path in part.submodules.items():
        if not path.startswith("."):
            yield function, part.path, path


def _instead(model: nn.Module, owner: str, path: str) -> str:
    """Describe the modules at the place where a declared module is missing."""
    if not has_module(model, owner):
        return f"there is no {owner}"
    module = model.get_submodule(owner)
    inside = ", ".join(name for name, _ in module.named_children()) or "nothing"
    return f"the {type(module).__name__} there has no {path}, but {inside}"


# --------------------------------------------------------------------------------------------------
# The canonical weights produce the activations: the input, times the matrix, plus the bias.
# --------------------------------------------------------------------------------------------------


WEIGHTS = "weights and biases make the activations of their names"


def prove_weights(
    evidence: Evidence,
    findings: Findings,
    weights: Weights | None = None,
    *,
    of_each_kind: bool = False,
) -> None:
    """Check queries, keys, values, attention outputs and the layers of MLPs against the product of
    their input with the named weights.

    Args:
        evidence: a run.
        findings: collects the results.
        weights: the weights to check; None: the declared ones.
        of_each_kind: check only the first block of each declared kind with the same modules.
    """
    findings.claim(WEIGHTS)
    bridge = evidence.bridge
    weights = weights or Weights(bridge.architecture, bridge.original_model, bridge.cfg)
    findings.attempt(WEIGHTS, partial(_prove_embedding, evidence, findings, weights))
    kinds: list[tuple[str, NamedStep, str]] = []
    for place in evidence.places():
        if of_each_kind:
            block = module_at(bridge.original_model, place.path)
            kind = (place.stack.name, place.named, str(block))
            if kind in kinds:
                continue
            kinds.append(kind)
        _Layers(evidence, findings, place).prove(weights)


def _prove_embedding(evidence: Evidence, findings: Findings, weights: Weights) -> None:
    """Check that the hook point of the token embedding has the rows of `W_E`."""
    names = ("hook_embed", "embed.hook_embed")
    name = next((name for name in names if name in evidence.activations), "")
    stack = evidence.architecture.token_stack
    if not name or stack is None or stack is not evidence.architecture.stack:
        return
    if stack.embedding.norm and stack.embedding.module is None:
        return  # its activation is a norm of them
    get = weights.getters.get("embed.W_E") or weights.getters["embed.embed.W_E"]
    table = get()
    ids = evidence.text.clamp(max=len(table) - 1)
    findings.equal(WEIGHTS, name, evidence.get(name), table[ids])


class _Layers(StepClaim):
    """The layers of a part multiply by the weights of their names."""

    name = WEIGHTS

    def prove(self, weights: Weights) -> None:
        """Check the layers of an attention, an MLP or a shared expert."""
        self.getters = weights.getters
        part = self.step.part
        if isinstance(part, Attention):
            for letter in "qkv":
                name = letter.upper()
                self.attempt(self.prove_first, f"hook_{letter}", f"W_{name}", f"b_{name}")
            self.attempt(self.prove_last, "W_O", "b_O", "hook_z")
        elif isinstance(part, MLP):
            self.prove_mlp(part, "")
        elif isinstance(part, MoE) and part.shared:
            self.prove_mlp(part.shared, "shared_expert.")

    def attempt(self, prove: Callable[..., None], *arguments: str) -> None:
        """Run the proof of a layer; see `Findings.attempt`."""
        self.findings.attempt(WEIGHTS, partial(prove, *arguments))

    def prove_mlp(self, part: MLP, inside: str) -> None:
        """Check an MLP's first layers, and its last one."""
        first = [("hook_pre", "in")]
        if part.gate:
            first = [("hook_pre", "gate"), ("hook_pre_linear", "in")]
        for point, weight in first:
            names = (f"{inside}{point}", f"{inside}W_{weight}", f"{inside}b_{weight}")
            self.attempt(self.prove_first, *names)
        self.attempt(self.prove_last, f"{inside}W_out", f"{inside}b_out", f"{inside}hook_post")

    def weight(self, name: str) -> Tensor | None:
        """Return a weight; None if the layer has no plain one, which is recorded."""
        full = self.point(name)
        owner, _, last = full.rpartition(".")
        get = self.getters.get(full) or self.getters.get(f"{owner}._{last}")
        if get is None:
            return None
        try:
            return get().detach()
        except OpaqueLayerError as error:
            self.findings.refused(WEIGHTS, full, str(error))
            return None

    def observed(self, point: str) -> tuple[Tensor, Tensor] | None:
        """Return the input of the module at a hook point's site, and its output as the hook point
        converts it, without replacements.
        """
        hook = self.bridge.hook_dict.get(self.point(point))
        if hook is None:
            return None
        path = hook.point.site.path
        call = self.evidence.call(path)
        call_of_view = self.evidence.call_at(hook)
        if call is None or call.input is None or call_of_view is None:
            return None
        if not isinstance(call.output, Tensor):
            return None
        return call.input, hook.view.get(self.evidence.raw[path][0].output, call_of_view)

    def prove_first(self, point: str, matrix_name: str, bias_name: str) -> None:
        """Check a first layer: queries, keys or values of each head, the input of the activation
        function, or the factor of its output.
        """
        observed = self.observed(point)
        matrix = self.weight(matrix_name)
        bias = self.weight(bias_name)
        if matrix is None or observed is None:
            return
        entered, output = observed
        if matrix.ndim == 3:
            expected = torch.einsum("bpm,hmd->bphd", _precise(entered), _precise(matrix))
        else:
            expected = _precise(entered) @ _precise(matrix)
        if bias is not None:
            expected = expected + _precise(bias)
        expected = expected.to(output.dtype)
        of_heads = matrix.ndim == 3
        self.equal(self.point(point), output, expected if of_heads else like(expected, output))

    def prove_last(self, matrix_name: str, bias_name: str, point: str) -> None:
        """Check the output of a part's last layer, including the step's factor."""
        matrix = self.weight(matrix_name)
        bias = self.weight(bias_name)
        hook = self.bridge.hook_dict.get(self.point(point))
        call = self.evidence.call(hook.point.site.path) if hook else None
        if matrix is None or bias is None or call is None:
            return
        if call.input is None or call.result is None:
            return
        entered = _precise(call.input.flatten(0, -2))
        expected = entered @ _precise(matrix).flatten(0, -2) + _precise(bias)
        step = self.step
        block = self.evidence.module(self.path)
        if isinstance(step.part, MoE) and "shared" in matrix_name:  # one of several terms
            output = linearly(step.behind_last, call.result * step.part.shared_factor, block)
        else:
            output = transformed(step.behind_last, call.result, block)
        self.equal(self.point(matrix_name), like(expected.to(output.dtype), output), output)


def _precise(x: Tensor) -> Tensor:
    """Return numbers that can be summed: half precision and integers are converted to single
    precision.
    """
    return x if x.dtype in (torch.float32, torch.float64) else x.float()
