"""What the layers of a recorded model say of all of it: the fields of `ModelConfig`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from adapters.architecture import Block, Part, Stack, Step
from adapters.attention import Attention, Projection
from adapters.automatic import measured
from adapters.automatic.attention import FoundAttention
from adapters.automatic.blocks import FoundStack
from adapters.automatic.measured import FoundTable, find_table
from adapters.config import config_of, first, rotary_values
from adapters.feed_forward import MLP
from adapters.imports.versions import rotation_of
from adapters.observe.calls import ModuleCall, Recording
from adapters.observe.errors import NotFound
from adapters.observe.gradients import gradient_of
from adapters.observe.tolerance import FITTED
from adapters.paths import token_embedding
from adapters.views import AlibiScores

#: Angles of half precision that differ by more, relatively, are of another base than the configuration says.
_OTHER_ANGLE = 0.02
#: So many rows of an embedding and an unembedding are compared.
_ROWS = 256


class _Scaling(NamedTuple):
    """What the products of queries and keys are divided by, None where it was not found.

    Attributes:
        by: it, wherever it was found.
        cap: the soft cap behind it; -1: none.
        alibi: it, where each head adds slopes (ALiBi).
        elsewhere: it, where queries alone, keys alone or places alone add to the scores.
    """

    by: float | None
    cap: float
    alibi: float | None
    elsewhere: float | None


class Facts:
    """Collects facts, layer by layer: what most layers say is said of the model.

    Args:
        model: the model.
        recording: of its run.
    """

    def __init__(self, model: nn.Module, recording: Recording) -> None:
        self.model, self.recording = model, recording
        self.counts: dict[str, Counter[object]] = {}
        #: How far back each attention looks at most, None where it looks at the first token.
        self.windows: list[int | None] = []
        self.exact_rotation = False

        #: The table of position biases that the layers of a stack share.
        self.table: FoundTable | None = None
        self._of_the_first: tuple[dict[str, Counter[object]], list[int | None]] | None = None

    def freeze_first_stack(self) -> None:
        """What is added from now on is said of the model only where its first stack says nothing."""
        self._of_the_first = {name: Counter(each) for name, each in self.counts.items()}, list(self.windows)

    def add(self, name: str, value: object) -> None:
        """Something that a layer says."""
        self.counts.setdefault(name, Counter())[value] += 1

    def at_layer(self, index: int) -> None:
        """A layer begins: those before it that have no attention have no window."""
        self.windows += [None] * (index - len(self.windows))

    def add_attention(self, found: FoundAttention, declared: Attention) -> Attention:
        """What an attention says, and its declaration with how its scores are seen, and its position bias."""
        own = dict(declared.config_values)
        declared = replace(declared, scores=measured.scores_view(found))
        self.add("n_heads", found.n_heads)
        self.add("n_key_value_heads", len(found.found["k"][1]))
        self.add("d_head", len(found.found["v"][1][0]))
        scaling = self._scaling(found, declared)
        self.add("attn_scores_soft_cap", scaling.cap)
        self.add("attn_scale", scaling.by)
        own["attn_scale"] = scaling.by
        self.add("attention_dir", "causal" if found.is_causal else "bidirectional")
        self.windows.append(measured.window(found))
        biased = scaling.elsewhere is not None and not declared.cross
        if declared.rotary:
            own |= self._add_rotation(found, declared)
            biased = biased and declared.k.latent is None
        elif scaling.alibi is not None or isinstance(declared.scores, AlibiScores):
            self.add("positional_embedding_type", "alibi")
            biased = False
        elif table := find_table(found, self.table):
            declared = replace(declared, position_bias=self._add_table(table))
            biased = False
        if biased:
            declared = replace(declared, score_bias_modules=measured.adding(found))
        return replace(declared, config_values=own)

    def _scaling(self, found: FoundAttention, declared: Attention) -> _Scaling:
        """What the products of queries and keys are divided by, and what is added to them."""
        told = getattr(config_of(self.model).get_text_config(), "attn_logit_softcapping", None)
        cap = measured.soft_cap(found, told)
        scale = measured.scale(found, cap)
        alibi = None if scale is not None or declared.rotary else measured.alibi_scale(found)
        biased = measured.scale(found, cap, biased=True) if scale is None and alibi is None else None
        elsewhere = measured.scale_elsewhere(found) if found.adds or not (scale or alibi) else None
        by = scale or alibi or biased or elsewhere
        if by is None and not told and (capped := measured.cap_that_is_not_said(found)):
            by, cap = capped
        return _Scaling(by, cap, alibi, elsewhere)

    def _add_rotation(self, found: FoundAttention, declared: Attention) -> dict[str, object]:
        """What a rotation says of the model; what it says of this attention is returned."""
        self.add("positional_embedding_type", "rotary")
        rotation, own = measured.rotation(found), dict[str, object]()
        if declared.k.latent is not None and declared.q.width and declared.k.width:
            own["rotary_dim"] = declared.q.width - declared.k.width  # the last, which all heads share
            self.add("rotary_dim", own["rotary_dim"])
        elif rotation is not None:
            self.add("rotary_dim", rotation[0])
            self.exact_rotation |= rotation[2]
            base = measured.rotary_base(found, *rotation[:2])
            self.add("rotary_base", base)
            if rotation[2]:
                own["rotary_dim"] = rotation[0]
            if getattr(config_of(self.model).get_text_config(), "is_heterogeneous", False):
                own["rotary_base"] = base
        if rotation is not None:
            self.add("rotary_adjacent_pairs", rotation[1])
        return own

    def _add_table(self, table: FoundTable) -> str:
        """What a table of position biases says; where it is, is returned."""
        self.table = table
        self.add("positional_embedding_type", "relative_positional_bias")
        self.add("relative_attention_num_buckets", table.buckets)
        most = getattr(config_of(self.model).get_text_config(), "relative_attention_max_distance", None)
        self.add("relative_attention_max_distance", most)
        return table.path

    def values(self, found: FoundStack, unembed: ModuleCall | None) -> dict[str, object]:
        """The fields of `ModelConfig`.

        Args:
            found: the first list of blocks.
            unembed: the call of the output layer.
        """
        if self._of_the_first is not None:
            counts, self.windows = self._of_the_first
            self.counts |= counts
        values: dict[str, object] = {"d_model": found.d_model, "d_mlp": None, "act_fn": None}
        values |= {"n_heads": 0, "n_key_value_heads": None, "d_head": 0, "attn_scale": None}
        values |= {name: counts.most_common(1)[0][0] for name, counts in self.counts.items()}
        if "attention_dir" not in values and _looks_ahead(found):
            values["attention_dir"] = "bidirectional"
        if values.get("positional_embedding_type") == "rotary":
            dims = [dim for dim in self.counts.get("rotary_dim", {}) if isinstance(dim, int)]
            said = self._rotary_values(values.get("rotary_base"), values.get("rotary_dim"))
            values |= said
            # Where queries are scaled elsewhere, a run of few tokens may not show that slow columns turn.
            if dims and (self.exact_rotation or "rotary_dim" not in said):
                values["rotary_dim"] = max(dims)
        if (start := getattr(config_of(self.model), "decoder_start_token_id", None)) is not None:
            values["decoder_start_token_id"] = start
        values["tie_word_embeddings"] = unembed is not None and self._is_tied(unembed)
        values |= self._window_values(len(found.blocks))
        if values["d_mlp"] is None:
            values["d_mlp"] = values.get("d_expert")
        if values["n_key_value_heads"] == values["n_heads"]:
            values["n_key_value_heads"] = None
        return values

    def _is_tied(self, unembed: ModuleCall) -> bool:
        """One tensor is both the embedding and the unembedding; or both are brought from one that is elsewhere."""
        modules = (token_embedding(self.model), unembed.module)
        first_weight, last = (getattr(module, "weight", None) for module in modules)
        if not isinstance(first_weight, Tensor) or not isinstance(last, Tensor) or first_weight is last:
            return first_weight is not None and first_weight is last
        config = config_of(self.model)
        said = any(first(each, "tie_word_embeddings") for each in (config, config.get_text_config()))
        return said and first_weight.shape == last.shape and torch.equal(first_weight[:_ROWS], last[:_ROWS])

    def _window_values(self, n_layers: int) -> dict[str, object]:
        """Sliding windows, where the run shows that they are not those that the configuration says, or it says none."""
        config = config_of(self.model).get_text_config()
        said = None if getattr(config, "is_heterogeneous", False) else first(config, "sliding_window")
        if isinstance(said, int) and said < self.recording.pos and all(seen is None for seen in self.windows):
            return {"use_local_attn": False, "window_size": None, "attn_types": None}
        seen = {window for window in self.windows if window is not None}
        whole = config_of(self.model)
        told = None if getattr(whole, "is_heterogeneous", False) else first(whole, "sliding_window", "layer_types")
        # A text as long as this one shows whether it is the window that the configuration tells.
        other = isinstance(told, int) and seen and told not in seen and told < self.recording.pos
        self.at_layer(n_layers)
        types = ["global" if window is None else "local" for window in self.windows]
        kinds = first(config, "layer_types") or ()
        unsaid = bool(kinds) and types != ["local" if "sliding" in kind else "global" for kind in kinds]
        if len(seen) == 1 and n_layers == len(self.windows) and (told is None or other or unsaid):
            return {"use_local_attn": True, "window_size": seen.pop(), "attn_types": types}
        return {}

    def _rotary_values(self, base: object, dim: object) -> dict[str, object]:
        """What the configuration says of the rotation that was seen, as far as it says it as transformers does.

        Args:
            base, dim: as they were seen.
        """
        config = config_of(self.model).get_text_config()
        if getattr(config, "is_heterogeneous", False):
            return {}  # another one for each layer
        parameters = rotation_of(config)
        kinds = [each for each in parameters.values() if isinstance(each, Mapping)]
        if "rope_theta" not in parameters and not (kinds and "rope_theta" in parameters.get("full_attention", {})):
            return {}
        said = rotary_values(config)
        if parameters.get("rope_type") == "default" and isinstance(base, float) and isinstance(dim, int):
            # Angles may be those of another number of columns than turn (Moonshine).
            whole = all(p.dtype == torch.float32 for p in self.model.parameters())
            off = abs((base / float(str(said["rotary_base"]))) ** (-2 / dim) - 1)
            if off > (FITTED if whole else _OTHER_ANGLE):
                return said | {"rotary_base": base, "rotary_dim": dim}
        return said


def _looks_ahead(found: FoundStack) -> bool:
    """Whether the first token's last stream is made of later ones: of blocks in which no attention was found."""
    last = found.outputs[-1].live
    first = last[0] if found.positions_first else last[:, 0]
    try:
        gradient = gradient_of(first.pow(2).sum(), found.stream.live)
    except NotFound:  # the model writes over what it would be made from (RWKV): nothing says that it does
        return False
    return gradient is not None and bool((gradient[1:] if found.positions_first else gradient[:, 1:]).any())


def all_rotated(blocks: list[Block]) -> list[Block]:
    """Where some layers rotate queries and keys, the others show them as they are, if they meet as in those."""
    parts = [part for block in blocks for part in block.attentions]
    scales = {part.own("attn_scale", None) for part in parts if part.rotary}
    if not scales:
        return blocks

    def shown(step: Step) -> Step:
        part = step.part
        if not isinstance(part, Attention) or part.rotary or part.own("attn_scale", None) not in scales:
            return step
        return replace(step, part=replace(part, rotary="last"))

    return [replace(block, steps=tuple(map(shown, block.steps))) for block in blocks]


def with_sizes(block: Block, values: Mapping[str, object]) -> Block:
    """A block whose parts say their sizes only where these are not those of the model."""
    n_heads, d_head = values["n_heads"], values["d_head"]
    usual = {**values, "n_key_value_heads": values["n_key_value_heads"] or n_heads}
    usual["attn_scale"] = values["attn_scale"] or (float(str(d_head)) ** 0.5 if d_head else None)

    def sized(projection: Projection, width: object) -> Projection:
        return replace(projection, width=None if projection.width == width else projection.width)

    def own(part: Part) -> Part:
        if isinstance(part, MLP):
            return replace(part, up=sized(part.up, values["d_mlp"]))
        if not isinstance(part, Attention):
            return part
        q, k, v = (sized(each, d_head) for each in part.projections.values())
        others = {name: x for name, x in part.config_values.items() if x is not None and x != usual.get(name)}
        return replace(part, q=q, k=k, v=v, config_values=others)

    return replace(block, steps=tuple(replace(step, part=own(step.part)) for step in block.steps))


def all_sized(stack: Stack, values: Mapping[str, object]) -> Stack:
    """A stack of such blocks."""
    layers = {i: with_sizes(each, values) for i, each in stack.layers.items()}
    return replace(stack, block=with_sizes(stack.block, values), layers=layers)
