"""`ModelConfig`: the properties of a model, in HookedTransformer's field names, read from the model
and never guessed.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from adapters.architecture import Architecture, Block, feeds_forward
from adapters.attention import Attention
from adapters.feed_forward import MLP
from adapters.imports import rotation_of
from adapters.linear import input_device
from adapters.mixers import Mixer
from adapters.points import core_of, has_module, module_at, path_from

# --------------------------------------------------------------------------------------------------
# The fields that several kinds of configuration share, with HookedTransformer's names and defaults.
# --------------------------------------------------------------------------------------------------


@dataclass(kw_only=True, repr=False, eq=False)
class ModelFields:
    """The fields that all configurations share: `ModelConfig`, a native model's, and
    HookedTransformer's.
    """

    def native(self) -> dict[str, Any]:
        """Return the fields of a configuration of `bridge.native` for the same model.

        Raises:
            TypeError: such a configuration cannot describe this model.
        """
        raise TypeError(
            f"{type(self).__name__} says what a model is, not what one is made of: boot_native"
            " takes a NativeConfig, its fields, or a HookedTransformerConfig"
        )

    n_key_value_heads: int | None = None
    attention_dir: str = "causal"
    attn_only: bool = False
    parallel_attn_mlp: bool = False
    gated_mlp: bool = False
    final_rms: bool = False
    rotary_dim: int | None = None
    use_attn_scale: bool = True
    scale_attn_by_inverse_layer_idx: bool = False
    use_qk_norm: bool = False
    use_local_attn: bool = False
    window_size: int | None = None
    attn_types: list[str] | None = None
    attn_scores_soft_cap: float = -1.0
    output_logits_soft_cap: float = -1.0
    use_normalization_before_and_after: bool = False
    num_experts: int | None = None
    experts_per_token: int | None = None
    tie_word_embeddings: bool = False
    tokenizer_name: str | None = None
    default_prepend_bos: bool = True
    use_attn_result: bool = False
    use_split_qkv_input: bool = False
    use_attn_in: bool = False
    use_hook_mlp_in: bool = False
    seed: int | None = None


@dataclass(kw_only=True, repr=False, eq=False)
class LoadedModelFields(ModelFields):
    """The further fields of a model that may have been loaded."""

    rotary_base_local: float | None = None
    rotary_adjacent_pairs: bool = False
    post_embedding_ln: bool = False
    relative_attention_num_buckets: int | None = None
    relative_attention_max_distance: int | None = None
    decoder_start_token_id: int | None = None
    tokenizer_prepends_bos: bool | None = None
    ungroup_grouped_query_attention: bool = False
    n_devices: int = 1
    from_checkpoint: bool = False
    checkpoint_index: int | None = None
    checkpoint_label_type: str | None = None
    checkpoint_value: int | None = None


#: A function of a model's facts and of the last record of transforms of its weights that returns
#: the current record.
ReadsRecord = Callable[["ModelConfig", dict[str, str]], dict[str, str]]


@dataclass(repr=False)
class ModelConfig(LoadedModelFields):
    """The properties of a model that interpretability code needs.

    Widths, counts and epsilons are read from the model's own modules and configuration. `device`,
    `dtype`, `n_params`, `d_vocab`, `d_vocab_out`, `normalization_type`, `tie_word_embeddings` and
    `processed` are read from the model on each access, since other code may have resized, loaded or
    processed it. ``use_attn_result``, ``use_split_qkv_input``, ``use_attn_in`` and
    ``use_hook_mlp_in`` say whether an unfiltered cache holds the heavy hook points. Where layers
    are mixtures of experts, `d_expert` and `d_shared_expert` are the widths of these, and `d_mlp`
    is that of the other layers (of an expert where there are no others). `positions_from_mask`: the
    first token of a left-padded row is at position 0, as in HookedTransformer; False leaves
    positions to the Hugging Face model, which counts padding too. For each requested transform of
    `process_weights`, `processed` tells that it is done, or why it is not.
    """

    model_name: str
    original_architecture: str
    n_layers: int
    n_heads: int
    d_model: int
    d_head: int
    d_mlp: int | None
    d_vocab: int
    d_vocab_out: int
    n_ctx: int | None
    act_fn: str | None
    normalization_type: str | None
    eps: float | None
    positional_embedding_type: str
    rotary_base: float | None = None
    attn_scale: float | None = None
    d_expert: int | None = None
    d_shared_expert: int | None = None
    tokenizer_appends_eos: bool | None = None
    positions_from_mask: bool = True
    processed: dict[str, str] = field(default_factory=dict, compare=False)
    extra: dict[str, object] = field(default_factory=dict)
    _model: nn.Module | None = field(default=None, repr=False, compare=False)
    #: The paths of the matrices that `d_vocab` and `d_vocab_out` are the rows of.
    _vocabularies: tuple[str, str] = field(default=("", ""), repr=False, compare=False)

    def __repr__(self) -> str:
        """Show the fields that differ from most models', one per line."""
        lines = [f"{type(self).__name__} of {self.model_name} ({self.original_architecture})"]
        for f in fields(self):
            if f.name[0] == "_" or f.name in _SHOWN_APART:
                continue
            usual = f.default_factory() if f.default_factory is not MISSING else f.default
            value = getattr(self, f.name)
            if value != usual:
                lines.append(f"{f.name} = {value!r}")
        if self._model is not None:
            lines.append(f"{self.n_params:,} parameters, {self.dtype} on {self.device}")
        return "\n  ".join(lines)

    @property
    def n_kv_heads(self) -> int:
        """Return the number of key and value heads, equal to `n_heads` without grouping."""
        return self.n_key_value_heads or self.n_heads

    @property
    def device(self) -> torch.device:
        """Return the device of the model's first parameter, or the device to which accelerate moves
        it when it is needed.
        """
        self._parameters()
        assert self._model is not None
        return input_device(self._model)

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the model's first floating-point parameter."""
        return next(p.dtype for p in self._parameters() if p.is_floating_point())

    @property
    def n_params(self) -> int:
        """Return the number of parameters in the model, with embeddings; shared parameters count
        once."""
        return sum(p.numel() for p in self._parameters())

    def attach(self, model: nn.Module) -> None:
        """Set the model that the live fields are read from."""
        self._model = model

    def watch(self, record: ReadsRecord) -> None:
        """Set the function that reads `processed` from the model whenever it is accessed.

        Args:
            record: returns the transforms applied to the model's weights.
        """
        self.__dict__["_record"] = record

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in self.__dict__.items() if name != "_record"}

    def __getattr__(self, name: str) -> Any:
        if name[0] == "_":
            raise AttributeError(name)
        if isinstance(getattr(type(self), name, None), property):
            return object.__getattribute__(self, name)  # it raises the error with the reason
        known = [attribute for attribute in dir(self) if attribute[0] != "_"]
        near = difflib.get_close_matches(name, known, cutoff=0.5)
        hint = f" Did you mean {' or '.join(near)}?" if near else ""
        if self._model is not None and hasattr(core_of(self._model).config, name):
            hint = f" The model's own configuration has it: bridge.core.config.{name}"
        raise AttributeError(f"a {type(self).__name__} has no {name!r}.{hint}")

    def _rows_at(self, which: int) -> int | None:
        """Return the current number of rows of the embedding (0) or the unembedding (1); None if
        that is not known.
        """
        path = self._vocabularies[which]
        if self._model is None or not path:
            return None
        core = core_of(self._model)
        return _rows(core.get_submodule(path)) if has_module(core, path) else None

    def _now(self, name: str, known: Any) -> object:
        """Return the current value of a live field, whose value was `known` when it was set."""
        if name == "processed":
            record: ReadsRecord | None = self.__dict__.get("_record")
            return known if record is None else record(self, known)
        if name == "normalization_type":
            is_folded = known in ("LN", "RMS") and self.processed.get("fold_ln") == "done"
            return f"{known}Pre" if is_folded else known
        if name == "tie_word_embeddings":
            return known if self._model is None else self._ties_now(core_of(self._model))
        rows = self._rows_at(("d_vocab", "d_vocab_out").index(name))
        return known if rows is None else rows

    def _ties_now(self, core: nn.Module) -> bool:
        """Tell whether embedding and unembedding are the same tensor; without an unembedding,
        return the configuration's value.
        """
        config = config_of(core)
        if not self._vocabularies[0]:  # it reads no tokens
            return False
        tables = []
        for path in self._vocabularies:
            module = core.get_submodule(path) if path and has_module(core, path) else None
            tables.append(getattr(module, "weight", None))
        embed, unembed = tables
        if not isinstance(embed, Tensor) or not isinstance(unembed, Tensor):
            return _ties(config, core)
        if unembed is embed or not config.is_encoder_decoder:
            return unembed is embed
        # A decoder may have embeddings of its own.
        embeddings = (module for module in core.modules() if isinstance(module, nn.Embedding))
        return any(unembed is embedding.weight for embedding in embeddings)

    def _parameters(self) -> Iterator[nn.Parameter]:
        if self._model is None:
            raise AttributeError(
                "this configuration belongs to no model: device, dtype and n_params are a model's"
            )
        return self._model.parameters()

    def to_dict(self) -> dict[str, Any]:
        """Return all fields, and `device`, `dtype` and `n_params`, as a plain dictionary."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name[0] != "_"}
        if self._model is not None:
            values |= {"device": self.device, "dtype": self.dtype, "n_params": self.n_params}
        return values

    def __contains__(self, name: str) -> bool:
        return name in {f.name for f in fields(self)}


_SHOWN_APART = ("model_name", "original_architecture", "device", "dtype", "n_params")


def _live(name: str) -> property:
    """Return a property for a field of `ModelConfig` that is read from the model on each access."""
    return property(
        lambda cfg: cfg._now(name, cfg.__dict__[name]),
        lambda cfg, value: cfg.__dict__.update({name: value}),
    )


for _field in ("d_vocab", "d_vocab_out", "normalization_type", "tie_word_embeddings", "processed"):
    setattr(ModelConfig, _field, _live(_field))


def act_fn_name(name: str | None) -> str | None:
    """Return HookedTransformer's name for an activation function, or Hugging Face's own where it
    has none.
    """
    return "silu" if name == "swish" else name or None


def config_of(model: nn.Module) -> PreTrainedConfig:
    """Return the configuration of a Hugging Face model.

    Raises:
        TypeError: it has none.
    """
    config = getattr(model, "config", None)
    if not isinstance(config, PreTrainedConfig):
        raise TypeError(
            f"{type(model).__name__} has no Hugging Face configuration, but config={config!r}"
        )
    return config


def is_language_part(model: nn.Module) -> bool:
    """Tell whether a model is declared by its text part: its configuration contains a text model's
    configuration.

    Args:
        model: the Hugging Face model, or its wrapper.
    """
    config = config_of(core_of(model))
    return type(config.get_text_config()) is not type(config)


def first(config: PreTrainedConfig, *names: str) -> Any:
    """Return the first of some fields of the configuration that exists and is not None."""
    for name in names:
        value = getattr(config, name, None)
        if value is not None:
            return value
    return None


def rotary_values(config: PreTrainedConfig) -> dict[str, object]:
    """Return `positional_embedding_type`, `rotary_dim` and `rotary_base` of a family with rotary
    embeddings.
    """
    parameters = rotation_of(config)
    local = None
    if "rope_theta" not in parameters:  # one set for each kind of layer (Gemma 3)
        local = parameters.get("sliding_attention", {}).get("rope_theta")
        parameters = parameters["full_attention"]
    d_head = first(config, "head_dim") or config.hidden_size // config.num_attention_heads
    return {
        "positional_embedding_type": "rotary",
        "rotary_dim": int(d_head * parameters.get("partial_rotary_factor", 1.0)),
        "rotary_base": parameters["rope_theta"],
        "rotary_base_local": local,
    }


def model_config(architecture: Architecture, model: nn.Module, root: nn.Module) -> ModelConfig:
    """Read a model's configuration from the model, its own configuration, and the steps of its
    blocks.

    Args:
        architecture: the adapter's declaration.
        model: the Hugging Face model.
        root: the base model in it.
    """
    hf = config_of(model)
    if not hasattr(hf, "vocab_size"):  # of a model of images and text
        hf = hf.get_text_config()
    declared = dict(architecture.config_values)
    layers = architecture.stack.modules(root)
    embed = architecture.token_embeddings
    unembed = architecture.readout.path
    context = first(hf, "max_position_embeddings", "n_positions", "seq_length")
    if isinstance(context, int) and context < 0:
        context = None  # XLNet has -1: no limit
    values: dict[str, Any] = {
        "model_name": getattr(hf, "_name_or_path", "") or type(model).__name__,
        "original_architecture": type(model).__name__,
        "n_layers": len(layers),
        "d_vocab": _rows(root.get_submodule(embed)) if embed else 0,
        "d_vocab_out": getattr(hf, "vocab_size", 0),
        "n_ctx": context,
        "act_fn": act_fn_name(first(hf, "hidden_act", "hidden_activation", "activation_function")),
        "tie_word_embeddings": bool(embed) and _ties(hf),
        **_widths(hf, declared),
        **_of_the_ends(architecture, root),
        **_of_the_steps(architecture, layers),
        **_windows(hf, len(layers)),
    }
    if unembed and has_module(model, unembed):
        values["d_vocab_out"] = _rows(model.get_submodule(unembed)) or values["d_vocab_out"]
    if values["attn_only"]:
        declared.pop("d_mlp", None)
    elif "d_mlp" not in declared:
        width = first(hf, "intermediate_size", "ffn_dim", "n_inner")
        values["d_mlp"] = width or 4 * values["d_model"]
    values |= declared
    if values.get("use_attn_scale", True):
        values.setdefault("attn_scale", math.sqrt(values["d_head"]))
    vocabularies = (path_from(model, embed) if embed else "", unembed)
    return ModelConfig(**values, _model=model, _vocabularies=vocabularies)


def _widths(hf: PreTrainedConfig, declared: dict[str, Any]) -> dict[str, Any]:
    """Return the numbers of heads and the widths, as declared or else from the configuration."""
    n_heads = declared.pop("n_heads") if "n_heads" in declared else hf.num_attention_heads
    d_model = declared.pop("d_model", None) or hf.hidden_size
    widths = {"n_heads": n_heads, "d_model": d_model}
    if "d_head" not in declared:
        widths["d_head"] = first(hf, "head_dim") or d_model // n_heads
    # A configuration may have another number for each layer, which is then declared.
    if "n_key_value_heads" not in declared:
        groups = first(hf, "num_key_value_heads", "num_kv_heads")
        widths["n_key_value_heads"] = None if groups == n_heads else groups
    return widths


def _of_the_ends(architecture: Architecture, root: nn.Module) -> dict[str, object]:
    """Return the fields determined by the embedding, the final norm and the readout."""
    embedding = architecture.embedding
    final_norm = architecture.stack.final_norm
    return {
        "positional_embedding_type": "standard" if embedding.adds_places(root) else "none",
        "final_rms": final_norm is not None and not final_norm.kind.centered,
        "post_embedding_ln": embedding.norm is not None and embedding.norm_of_sum is None,
        "output_logits_soft_cap": architecture.readout.soft_cap or -1.0,
    }


def _ties(hf: PreTrainedConfig, core: nn.Module | None = None) -> bool:
    # transformers' own list of tied parameters.
    if getattr(core, "all_tied_weights_keys", None) == {}:
        return False
    if hf.is_encoder_decoder and not hasattr(hf, "vocab_size"):  # of two models: the decoder's
        hf = hf.get_text_config(decoder=True)
    return bool(first(hf, "tie_word_embeddings"))


def _rows(module: nn.Module) -> int | None:
    """Return the number of rows of an embedding's or an output layer's matrix; None if it has no
    matrix.
    """
    weight = getattr(module, "weight", None)
    if isinstance(weight, Tensor) and weight.ndim == 2:
        return weight.shape[0]
    return None


def _of_the_steps(architecture: Architecture, layers: list[nn.Module]) -> dict[str, object]:
    """Return the fields determined by the steps of the blocks."""
    eps = None
    for layer, module in enumerate(layers):
        norms = architecture.stack.block_at(layer).norms
        if norms and norms[0].kind.name is not None:
            eps = norms[0].kind.stored_epsilon(module_at(module, norms[0].path))
            break
    kind = architecture.norm_kind
    forms = forms_of(architecture.stack.every_block)
    return {"normalization_type": kind.name if kind else None, "eps": eps, "d_mlp": None, **forms}


def forms_of(blocks: Sequence[Block]) -> dict[str, bool]:
    """Return the fields that describe the form of blocks' steps.

    Args:
        blocks: the declarations.
    """
    steps = [step for block in blocks for step in block.steps]
    parts = [step.part for step in steps]
    mixers = [part for part in parts if isinstance(part, Mixer) and part.mixes]
    return {
        "attn_only": not mixers and not any(map(feeds_forward, parts)),
        "parallel_attn_mlp": any(block.has_parallel_mlp for block in blocks),
        "gated_mlp": any(isinstance(part, MLP) and part.gate is not None for part in parts),
        "use_qk_norm": any(part.qk_norms for part in parts if isinstance(part, Attention)),
        "use_normalization_before_and_after": any(step.pre and step.post for step in steps),
    }


def _windows(hf: PreTrainedConfig, n_layers: int) -> dict[str, object]:
    """Return the fields about sliding windows: each layer has its own type, or all share the
    configured window.
    """
    if getattr(hf, "is_heterogeneous", False):  # each layer has its own configuration
        return {}
    window = first(hf, "sliding_window")
    kinds = first(hf, "layer_types")
    if kinds is None:
        kinds = ["sliding_attention"] * n_layers if window is not None else []
    types = ["local" if "sliding" in kind else "global" for kind in kinds]
    if "local" not in types:
        return {}
    return {"use_local_attn": True, "window_size": window, "attn_types": types}
