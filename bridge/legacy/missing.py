"""What TransformerLens has and this package has not, and what to use in its place."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dis import opname
from inspect import currentframe
from typing import Any, NoReturn

from bridge.hooks.names import suggestion

_ROOM = __package__
_MMLU = "the package lm_eval evaluates model.original_model on MMLU"
_BERT = "HookedEncoder's parts are those of its model: model.blocks[0], model.mlm_head; none is made by itself"
_CONFIG, _LOADING = "get_pretrained_model_config gives a configuration", "such models say so when they are loaded"
#: The names that are left out on purpose, by the module or class that they would be in.
NOT_HERE = {
    _ROOM: {
        "factories": "modules are Hugging Face's own: components.MLP(cfg) makes one of a configuration",
        "lit": "there is no connection to LIT",
        "pretrained": "weights are not converted but viewed: HookedTransformer(hf_model).state_dict()",
        "model_bridge": "it is bridge.TransformerBridge",
        "HookedAudioEncoder": "there is no adapter for audio encoders",
    },
    "HookedTransformer": {
        "get_residual": "input_to_embed, or a run with stop_at_layer=0, gives the first residual stream",
        "get_pos_offset": "the model works its positions out itself",
        "move_model_modules_to_device": "model.to(device)",
        **dict.fromkeys(
            ("sample_datapoint", "load_sample_training_dataset"), "utils.get_dataset(name)[i]['text'] is a text"
        ),
        "check_hooks_to_add": "heavy hook points need no switch before hooks are added",
        **dict.fromkeys(
            (
                "fold_layer_norm",
                "center_writing_weights",
                "center_unembed",
                "fold_value_biases",
                "refactor_factored_attn_matrices",
            ),
            "model.process_weights(fold_ln=True, ...) and its other steps work on the model, not on a state dict",
        ),
    },
    f"{_ROOM}.components": {
        **dict.fromkeys(("BertBlock", "BertMLMHead", "BertNSPHead", "BertPooler"), _BERT),
        "TokenTypeEmbed": "the embeddings of an encoder are one part: HookedEncoder(...).embed",
        "T5Block": "HookedEncoderDecoder(...).encoder[0]",
        "GatedMLP4Bit": "quantised layers are Hugging Face's own, behind the same MLP",
        **dict.fromkeys(("bert_block", "bert_mlm_head", "bert_nsp_head", "bert_pooler", "token_typed_embed"), _BERT),
        "t5_block": "HookedEncoderDecoder(...).encoder[0]",
    },
    f"{_ROOM}.utilities": dict.fromkeys(("addmm", "attention"), "what they compute is Hugging Face's modules' own"),
    f"{_ROOM}.evals": dict.fromkeys(("MMLU_SUBJECTS", "MMLU_ANSWER_LETTERS"), _MMLU),
    f"{_ROOM}.loading_from_pretrained": {
        "get_num_params_of_pretrained": "get_pretrained_model_config(name).n_params",
        **dict.fromkeys(("convert_hf_model_config", "convert_neel_model_config", "get_basic_config"), _CONFIG),
        **dict.fromkeys(("NON_HF_HOSTED_MODEL_NAMES", "NEED_REMOTE_CODE_MODELS"), _LOADING),
    },
    f"{_ROOM}.utils": {
        "print_gpu_mem": "torch.cuda.memory_allocated() says it",
        "check_structure": "it was for debugging TransformerLens",
        "LocallyOverridenDefaults": "methods take prepend_bos= and padding_side=",
        "get_tokenizer_with_bos": "a model starts texts with BOS by itself, once",
        "get_input_with_manually_prepended_bos": "tokenizer.bos_token + text",
        "get_nested_attr": "operator.attrgetter('a.b.c')(obj)",
        "set_nested_attr": "setattr on what operator.attrgetter finds",
        "repeat_along_head_dimension": "tensor.unsqueeze(2).expand(-1, -1, n_heads, -1)",
        "select_compatible_kwargs": "inspect.signature says what a function takes",
    },
}


def why_not(where: str, name: str) -> str | None:
    """What to use in place of a name that is left out on purpose of a module or a class."""
    instead = NOT_HERE.get(where, {}).get(name) or NOT_HERE[_ROOM].get(name)
    if name.startswith("convert_") and name.endswith("_weights"):
        instead = NOT_HERE[_ROOM]["pretrained"]
    return None if instead is None else f"{where} has no {name}: {instead}. See docs/migration.md"


def explain_missing_name(module: str) -> Callable[[str], NoReturn]:
    """A module's ``__getattr__``. What it says is shown by ``from module import name``, too.

    Example:
        >>> from bridge.legacy.missing import explain_missing_name
        >>> explain_missing_name("bridge.legacy")("lit")
        Traceback (most recent call last):
        AttributeError: bridge.legacy has no lit: there is no connection to LIT. See docs/migration.md
    """

    def refuse(name: str) -> NoReturn:
        known = f"module {module!r} has no attribute {name!r}.{suggestion(name, dir(sys.modules[module]))}"
        # Of an AttributeError, that statement would show nothing.
        raise (ImportError if _is_imported() else AttributeError)(why_not(module, name) or known)

    return refuse


def _is_imported() -> bool:
    """Whether what asks for a name is ``from module import name``."""
    frame, ours = currentframe(), (_ROOM.partition(".")[0], "jaxtyping")  # in tests a type checker stands between
    while frame is not None and str(frame.f_globals.get("__name__")).partition(".")[0] in ours:
        frame = frame.f_back
    return frame is not None and opname[frame.f_code.co_code[frame.f_lasti]] == "IMPORT_FROM"


def not_done(name: str, why: str = _MMLU) -> Callable[..., Any]:
    """A function that can be imported, and says why it is not done when it is called."""

    def refuse(*args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(f"{name} is not done here: {why}. See docs/migration.md")

    refuse.__name__ = name
    return refuse
