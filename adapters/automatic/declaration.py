"""From a recorded run to an `Architecture`, and what it cannot say, with the reasons."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor, nn

from adapters.architecture import Architecture, Block, Head, Opaque, Part, Stack, Step
from adapters.attention import Attention
from adapters.automatic.attention import FoundAttention
from adapters.automatic.blocks import FoundStack, find_stacks
from adapters.automatic.ends import find_embedding, find_final_norm, find_head, find_unembedding, soft_cap
from adapters.automatic.feed_forward import FoundMLP
from adapters.automatic.layouts import relative
from adapters.automatic.mixture import FoundMixture, experts_of
from adapters.automatic.norms import norm_kind
from adapters.automatic.parts import FoundPart, Norms, Parts, mixes_positions
from adapters.automatic.recording import ModuleCall, NotFound, Recording, record
from adapters.automatic.stream import Sum, Sums
from adapters.config import act_fn_name, config_of, first, rotary_values
from adapters.feed_forward import MLP, MoE
from adapters.mixers.part import Mixer, axes_of, functions_of
from adapters.norms import Norm
from adapters.paths import base_path, core_path, token_embedding
from adapters.proofs.twin import ROOM, trivial_parameters, twin, why_no_twin
from adapters.views import AlibiScores


class NotInferable(Exception):
    """No declaration could be inferred; the message says why."""


@dataclass(frozen=True)
class Inferred:
    """What was inferred for a model.

    Attributes:
        architecture: the declaration.
        not_offered: hook points, or what their names begin with, that it does not have, and why.
    """

    architecture: Architecture
    not_offered: Mapping[str, str] = field(default_factory=dict)


def infer(model: nn.Module) -> Inferred:
    """Infers what plays which part in a model, from one run of it on a few tokens. Nothing of it is changed.

    Args:
        model: a Hugging Face model with weights.

    Raises:
        NotInferable: no list of blocks that a residual stream runs through was found; the message says why.

    Example:
        >>> from transformers import OlmoConfig, OlmoForCausalLM
        >>> from adapters.automatic.declaration import infer
        >>> sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
        >>> infer(OlmoForCausalLM(OlmoConfig(**sizes, vocab_size=61))).architecture.stack.path
        'layers'
    """
    subject = _subject(model)
    was_training = subject.training
    subject.train(False)
    try:
        with torch.inference_mode(False), torch.enable_grad():  # wherever it is asked for: it goes by gradients
            return _Inference(subject, record(subject, sample_inputs(subject))).run()
    finally:
        subject.train(was_training)


def _subject(model: nn.Module) -> nn.Module:
    """What is run: the model; or its twin, where some of its parameters prove nothing, or half precision little."""
    parameters = list(model.parameters())
    half = [p for p in parameters if p.dtype in (torch.float16, torch.bfloat16)]
    if any(p.is_meta for p in parameters) or not (half or trivial_parameters(model)) or why_no_twin(model):
        return model
    return model if 4 * sum(p.numel() for p in half) > ROOM else twin(model)


def sample_inputs(model: nn.Module) -> dict[str, Tensor]:
    """A few tokens: three rows of eleven, numbers that are unlikely to be a model's number of heads.

    Raises:
        NotInferable: it has no weights to run.
    """
    parameter = next(model.parameters(), None)
    if parameter is None or parameter.is_meta:
        raise NotInferable("it has no weights, and what plays which part is found in a run")
    config = config_of(model)
    vocabulary = getattr(config, "vocab_size", None) or config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(min(3, vocabulary - 1), vocabulary, (3, 11), generator=generator)
    return {"input_ids": tokens.to(parameter.device)}


class _Inference:
    def __init__(self, model: nn.Module, recording: Recording) -> None:
        self.model, self.recording = model, recording
        self.base, self.core = base_path(model), core_path(model)
        self.not_offered: dict[str, str] = {}
        self.facts: dict[str, Counter[object]] = {}
        #: How far back each attention looks at most, None where it looks at the first token.
        self.windows: list[int | None] = []
        self.exact_rotation = False

    def fact(self, name: str, value: object) -> None:
        """Something that a layer says of the model."""
        self.facts.setdefault(name, Counter())[value] += 1

    def run(self) -> Inferred:
        stacks, reason = find_stacks(self.model, self.recording)
        if not stacks:
            raise NotInferable(reason)
        (found, *others) = stacks
        if others:
            raise NotInferable(f"it has {len(stacks)} lists of blocks ({', '.join(stack.path for stack in stacks)})")
        blocks = _all_rotated([self._block(found, index) for index in range(found.length)])
        usual = Counter(map(repr, blocks)).most_common(1)[0][0]
        block = next(each for each in blocks if repr(each) == usual)
        layers = {i: each for i, each in enumerate(blocks) if each != block}
        last = found.blocks[-1].end
        final = find_final_norm(self.recording, found.outputs[-1], last)
        if final is None and not (blocks[-1].steps and blocks[-1].steps[-1].stream_norm):
            self.not_offered["ln_final"] = "no norm that is known reads the last stream"
        embedding = find_embedding(self.model, self.recording, found.blocks[0])
        if embedding is None:
            raise NotInferable("no token embedding ran")
        self.not_offered |= embedding.missing
        stack = Stack(
            self.relative(found.path),
            block,
            layers,
            final_norm=final and Norm(self.relative(final.path), final.kind),
            output_key=found.outputs[0].key,
            output_length=found.blocks[0].n_left,
        )
        unembed = find_unembedding(self.model, self.recording, last)
        values = self._config_values(found, unembed)
        stack = replace(
            stack, block=_sized(stack.block, values), layers={i: _sized(b, values) for i, b in stack.layers.items()}
        )
        architecture = Architecture(
            stacks=(stack,),
            embed=self.relative(embedding.embed),
            unembed=relative(unembed.path, self.core) if unembed else "",
            pos_embed=embedding.pos_embed and self.relative(embedding.pos_embed),
            token_types=embedding.token_types and self.relative(embedding.token_types),
            embed_norm=embedding.norm and Norm(self.relative(embedding.norm.path), embedding.norm.kind),
            embeddings=embedding.module and self.relative(embedding.module),
            embed_factor=embedding.factor,
            heads=self._heads(found, final, unembed),
            config_values=values,
        )
        return Inferred(architecture, dict(self.not_offered))

    def _heads(self, found: FoundStack, final: Norm | None, unembed: ModuleCall | None) -> tuple[Head, ...]:
        """What stands between the last block and the output layer, where that does not read the last stream's norm."""
        if unembed is None or unembed.entered is None:
            return ()
        if final is not None and self.recording.of(final.path)[-1].left[0].mark == unembed.entered.mark:
            return ()
        head = find_head(self.recording, found.blocks[-1].end, unembed)
        if head is None:
            return ()
        around, linear, norm = ("." + relative(each, self.core) for each in head[:3])
        return (Head("mlm_head", around, linear=linear, norm=Norm(norm, head[3]), unembeds=True),)

    def relative(self, path: str) -> str:
        """A path of the model as one from its base model."""
        try:
            return relative(path, self.base)
        except ValueError:
            raise NotInferable(f"{path} stands outside of its base model, {self.base}") from None

    def _config_values(self, found: FoundStack, unembed: ModuleCall | None) -> dict[str, object]:
        values: dict[str, object] = {"d_model": found.d_model, "d_mlp": None, "act_fn": None}
        values |= {"n_heads": 0, "n_key_value_heads": None, "d_head": 0, "attn_scale": None}
        values |= {name: counts.most_common(1)[0][0] for name, counts in self.facts.items()}
        if values.get("positional_embedding_type") == "rotary":
            dims = [dim for dim in self.facts.get("rotary_dim", {}) if isinstance(dim, int)]
            said = self._rotary_values()
            values |= said
            # Where queries are scaled beside, a run of few tokens may not show that slow columns turn.
            if dims and (self.exact_rotation or "rotary_dim" not in said):
                values["rotary_dim"] = max(dims)
        values["tie_word_embeddings"] = unembed is not None and self._is_tied(unembed)
        values |= self._window_values()
        if values["d_mlp"] is None:
            values["d_mlp"] = values.get("d_expert")
        if values["n_key_value_heads"] == values["n_heads"]:
            values["n_key_value_heads"] = None
        if unembed and self.recording.logits is not None:
            cap = soft_cap(unembed.left[0].value, self.recording.logits)
            if cap is None:
                self.not_offered["cfg.output_logits_soft_cap"] = "something unknown stands behind the output layer"
            else:
                values["output_logits_soft_cap"] = cap
        return values

    def _is_tied(self, unembed: ModuleCall) -> bool:
        """One tensor is both the embedding and the unembedding."""
        embedding = token_embedding(self.model)
        weights = [getattr(module, "weight", None) for module in (embedding, unembed.module)]
        return weights[0] is not None and weights[0] is weights[1]

    def _window_values(self) -> dict[str, object]:
        """Sliding windows, where the run shows that they are not those that the configuration says."""
        config = config_of(self.model).get_text_config()
        said = None if getattr(config, "is_heterogeneous", False) else first(config, "sliding_window")
        if isinstance(said, int) and said < self.recording.pos and all(seen is None for seen in self.windows):
            return {"use_local_attn": False, "window_size": None, "attn_types": None}
        return {}

    def _rotary_values(self) -> dict[str, object]:
        """What the configuration says of the rotation that was seen, as far as it says it as transformers does."""
        config = config_of(self.model).get_text_config()
        if getattr(config, "is_heterogeneous", False):
            return {}  # another one for each layer
        parameters = getattr(config, "rope_parameters", None) or {}
        kinds = [each for each in parameters.values() if isinstance(each, Mapping)]
        if "rope_theta" in parameters or (kinds and "rope_theta" in parameters.get("full_attention", {})):
            return rotary_values(config)
        return {}

    def _block(self, stack: FoundStack, index: int) -> Block:
        """One block. What is not found out about it is noted by the name of the hook point that it costs."""
        if index not in stack.indices:
            self.not_offered[f"blocks.{index}"] = "it does not run with text alone"
            return Block(())
        place = stack.indices.index(index)
        call = stack.blocks[place]
        inside = self.recording.between(call.start, call.end)
        norms: Norms = {each: kind for each in inside if (kind := norm_kind(each)) is not None}
        sums = Sums(call, stack.outputs[place], self.recording, list(norms))
        found = sums.find()
        prefix = f"blocks.{index}"
        if found is None:
            self.not_offered[f"{prefix}.hook_resid_mid"] = (
                "what leaves the block is not what enters it and what its modules put out"
            )
            return Block(())
        parts = Parts(call, self.recording, norms, sums.values)
        steps: list[Step] = []
        notes: list[dict[str, str]] = []
        for total in found:
            for nth, (term, part) in enumerate(zip(total.terms, parts.of_sum(total), strict=True)):
                note = dict(part.missing)
                declared = self._part(part, norms, call, note)
                on_stream = self._norm_of(total, norms, call) if nth == len(total.terms) - 1 else None
                steps.append(
                    Step(
                        declared,
                        pre=_inside(part.pre, call),
                        post=_inside(part.post, call),
                        factor=term.factor,
                        stream_norm=on_stream,
                        parallel=nth > 0,
                    )
                )
                notes.append(note)
        block = Block(tuple(steps), _changed(call, inside))
        for named, note in zip(block.named, notes, strict=True):
            for what, why in note.items():
                if what == "entry":
                    self.not_offered[f"{prefix}.hook_{named.name}_in"] = why
                    if named.first and named.before.startswith("hook_resid_mid"):
                        self.not_offered[f"{prefix}.{named.before}"] = why
                else:
                    self.not_offered[f"{prefix}.{named.norm if what == 'pre' else named.name}"] = why
        return block

    @staticmethod
    def _norm_of(total: Sum, norms: Norms, block: ModuleCall) -> Norm | None:
        return None if total.norm is None else Norm(relative(total.norm.path, block.path), norms[total.norm])

    def _part(self, part: FoundPart, norms: Norms, block: ModuleCall, note: dict[str, str]) -> Part:
        """What a part is, as far as it can be said."""
        attends = [s for s in part.softmaxes if s.scores.ndim in (3, 4) and s.scores.shape[-2] > 1]
        mixes = mixes_positions(part)
        try:
            if attends and mixes is not False:
                return self._attention(part, norms, block.path)
            if mixes:
                return self._opaque(part, block, Mixer, note, "")
            if experts := experts_of(part, self.recording):
                return self._mixture(part, block.path, experts)
            return self._mlp(part, block.path)
        except NotFound as why:
            plays = "attn" if attends and mixes is not False else "mlp"
            return self._opaque(part, block, Opaque, note, str(why), plays)
        except ValueError as why:  # a path outside of the module that it should be in
            return self._opaque(part, block, Opaque, note, str(why), "attn" if attends else "mlp")

    def _attention(self, part: FoundPart, norms: Norms, block: str) -> Attention:
        found = FoundAttention(part, self.recording, norms, block)
        declared = found.declare()
        self.fact("n_heads", found.n_heads)
        self.fact("n_key_value_heads", len(found.found["k"][1]))
        self.fact("d_head", len(found.found["v"][1][0]))
        self.fact("attn_scale", found.scale())
        self.fact("attention_dir", "causal" if found.is_causal else "bidirectional")
        cap = getattr(config_of(self.model).get_text_config(), "attn_logit_softcapping", None)
        self.fact("attn_scores_soft_cap", found.soft_cap(cap))
        self.windows.append(found.window())
        if declared.rotary:
            self.fact("positional_embedding_type", "rotary")
            if (rotation := found.rotation()) is not None:
                self.fact("rotary_dim", rotation[0])
                self.fact("rotary_adjacent_pairs", rotation[1])
                self.exact_rotation |= rotation[2]
                self.fact("rotary_base", found.rotary_base(*rotation[:2]))
        elif isinstance(declared.scores, AlibiScores):
            self.fact("positional_embedding_type", "alibi")
        return declared

    def _mixture(self, part: FoundPart, block: str, experts: ModuleCall) -> MoE:
        found = FoundMixture(part, self.recording, block, experts)
        declared = found.declare()
        for name in ("num_experts", "experts_per_token", "d_expert"):
            self.fact(name, getattr(found, name))
        self.fact("gated_mlp", True)
        self.fact("d_shared_expert", found.d_shared)
        if found.act_fn:
            self.fact("act_fn", act_fn_name(found.act_fn))
        return declared

    def _mlp(self, part: FoundPart, block: str) -> Part:
        config = config_of(self.model)
        said = first(config.get_text_config(), "hidden_act", "hidden_activation", "activation_function")
        found = FoundMLP(part, block, said if isinstance(said, str) else None)
        declared = found.declare()
        self.fact("d_mlp", found.d_mlp)
        self.fact("act_fn", act_fn_name(found.act_fn))
        return declared

    def _modules_of(self, owner: ModuleCall) -> tuple[tuple[str, str], ...]:
        """The modules in a mixer that run once, with the axes of what they return."""
        found = []
        for call in self.recording.calls:
            once = owner.holds(call) and call is not owner and len(self.recording.of(call.path)) == 1
            if once and call.is_leaf and call.n_left == 1 and call.left and call.left[0].key is None:
                path, shape = relative(call.path, owner.path), call.left[0].value.shape
                if "." not in path and len(shape) > 1:
                    found.append((path, axes_of(path, shape, self.recording.batch, self.recording.pos)))
        return tuple(found)

    def _opaque(
        self,
        part: FoundPart,
        block: ModuleCall,
        kind: type[Mixer] | type[Opaque],
        note: dict[str, str],
        why: str,
        plays: str = "",
    ) -> Part:
        """A part of which only what enters and leaves it is said."""
        owner = part.owner or part.producer
        out, seen = part.out
        out_path = None if out is owner else relative(out.path, block.path)
        path = relative(owner.path, block.path)
        if why:
            note["inside"] = why
        if kind is Mixer:
            functions = functions_of(owner.module)
            modules = self._modules_of(owner)
            if not (functions or modules):
                note["inside"] = "it mixes positions without a softmax, and has no modules that run once"
            return Mixer(path, out_path, seen.key, modules, functions)
        return Opaque(path, "attn" if plays == "attn" else "mlp", out_path, seen.key)


def _all_rotated(blocks: list[Block]) -> list[Block]:
    """Where some layers rotate queries and keys, the others show them as they are."""
    if not any(part.rotary for block in blocks for part in block.attentions):
        return blocks
    return [
        replace(block, steps=tuple(
            replace(step, part=replace(step.part, rotary=True)) if isinstance(step.part, Attention) else step
            for step in block.steps
        ))
        for block in blocks
    ]  # fmt: skip


def _sized(block: Block, values: Mapping[str, object]) -> Block:
    """A block whose parts say their sizes only where these are not those of the model."""
    n_heads, d_head = values["n_heads"], values["d_head"]
    n_kv_heads = values["n_key_value_heads"] or n_heads

    def own(part: Part) -> Part:
        if isinstance(part, MLP):
            return replace(part, d_mlp=None if part.d_mlp == values["d_mlp"] else part.d_mlp)
        if not isinstance(part, Attention):
            return part
        return replace(
            part,
            n_heads=None if part.n_heads == n_heads else part.n_heads,
            n_kv_heads=None if part.n_kv_heads == n_kv_heads else part.n_kv_heads,
            d_q=None if part.d_q == d_head else part.d_q,
            d_k=None if part.d_k == d_head else part.d_k,
            d_v=None if part.d_v == d_head else part.d_v,
        )

    return replace(block, steps=tuple(replace(step, part=own(step.part)) for step in block.steps))


def _changed(block: ModuleCall, inside: Sequence[ModuleCall]) -> tuple[tuple[str, Literal["input", "output"]], ...]:
    """What the model writes over, at the borders of modules that hook points may stand on."""
    return tuple((relative(call.path, block.path), which) for call in (block, *inside) for which in call.changed)


def _inside(norm: Norm | None, block: ModuleCall) -> Norm | None:
    return norm and Norm(relative(norm.path, block.path), norm.kind)
