"""Which models properties are tried on: each type as `tests.tiny_models` makes it, and with options
of its recipe.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedConfig

from adapters.registry import family_of
from bridge.native.native import NativeModel
from tests.every_type.subject import Case
from tests.tiny_models import CANNOT_BE_BUILT, Task, model_class, tiny_config, types

TASKS: tuple[Task, ...] = ("causal", "masked", "seq2seq", "image_text", "speech")
#: Options that change how the stream or the logits are made: each is tried the other way round.
SWITCHES = (
    "tie_word_embeddings",
    # biases
    "attention_bias",
    "mlp_bias",
    "use_bias",
    "bias",
    "qkv_bias",
    "use_qkv_bias",
    "enable_bias",
    "lm_head_bias",
    "add_bias_linear",
    "add_qkv_bias",
    "attention_out_bias",
    "no_bias",
    "use_conv_bias",
    "proj_bias",
    # norms, and where they stand
    "qk_layernorm",
    "use_qk_norm",
    "qk_norm",
    "use_qk_layernorm",
    "do_layer_norm_before",
    "normalize_before",
    "layer_norm_elementwise_affine",
    "normalize_embedding",
    "normalize_embeddings",
    "layernorm_embedding",
    "add_final_layer_norm",
    "emb_layer_norm_before",
    "apply_residual_connection_post_layernorm",
    "pre_norm",
    "ln_before_adapter",
    "norm_topk_prob",
    # order, heads, positions
    "use_parallel_residual",
    "parallel_attn",
    "new_decoder_architecture",
    "multi_query",
    "alibi",
    "scale_embedding",
    "scale_attn_by_inverse_layer_idx",
    "token_dropout",
    "use_sliding_window",
    "position_biased_input",
)
#: The same, for options that have a value.
VALUES: dict[str, Any] = {
    "final_logit_softcapping": 5.0,
    "attn_logit_softcapping": 3.0,
    "logits_soft_cap": 4.0,
    "logit_scale": 0.25,
    "clip_qkv": 1.0,
    "embedding_size": 16,
    "word_embed_proj_dim": 16,
    "num_key_value_heads": 1,
    "rescale_every": 1,
}
_GATED = {"feed_forward_proj": "gated-gelu"}


def usual(task: Task) -> list[Case]:
    """Each type of a task, as usual."""
    ours = NativeModel.config_class.model_type  # none of transformers'
    return [
        Case(name, task) for name in types(task) if name != ours and name not in CANNOT_BE_BUILT
    ]


def with_options(case: Case) -> Iterator[Case]:
    """A type with each option the other way round, one at a time.

    Args:
        case: the type as usual. A model of several parts has its options in them, and is tried as
            it is.
    """
    try:
        config = tiny_config(case.model_type, case.task)
    except (
        ValueError,
        TypeError,
        AttributeError,
        ImportError,
        AssertionError,
        ZeroDivisionError,
        StrictDataclassError,
    ):
        return  # there is no such model, and the type's own row says so
    for option in switched(config).items():
        yield Case(case.model_type, case.task, (option,))


def switched(config: PreTrainedConfig) -> dict[str, Any]:
    """The options of a configuration, with the other values. Of several parts, none: they have
    theirs.

    Args:
        config: as usual.
    """
    if config.get_text_config() is not config:
        return {}
    found = vars(config)
    values = {
        name: value
        for name, value in (VALUES | _GATED).items()
        if name in found and found[name] != value
    }
    return {
        name: not found[name] for name in SWITCHES if isinstance(found.get(name), bool)
    } | values


def family(case: Case) -> str:
    """What declares a type, ``inferred`` where nothing does; "" where its class needs a package
    that is missing.
    """
    try:
        return family_of(model_class(case.model_type, case.task)) or "inferred"
    except ImportError:
        return ""


def covering(properties: Sequence[str], parts: int = 4) -> list[tuple[Case, list[str]]]:
    """A part of all cases in which every family and every property occurs: the same one each time.

    The first type of each family, and every so many of the types that have none, each with a part
    of the properties, which come in turn.

    Args:
        properties: their names.
        parts: how many parts the properties are in; also how many types are passed over.
    """
    chosen: list[Case] = []
    seen: set[str] = set()
    for index, case in enumerate(case for task in TASKS for case in usual(task)):
        name = family(case)
        if (name == "inferred" and index % (2 * parts) == 0) or name not in {"", "inferred"} | seen:
            chosen.append(case)
            seen.add(name)
    return [
        (case, [name for j, name in enumerate(properties) if (i + j) % parts == 0])
        for i, case in enumerate(chosen)
    ]
