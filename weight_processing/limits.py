"""What can be known beforehand: why a transform would not leave a model's function as it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from adapters import Architecture, norms
from adapters.attention import AddedOutput, Gate, SinkGate
from adapters.norms import parameter_names
from adapters.views import Affine, parameters_of
from weight_processing.parts import NormWithReaders, ProcessedParts, held_here, is_sharded, norm_parameters
from weight_processing.saving import SavedBiases
from weight_processing.steps import TRANSFORMS

#: How many rows or columns of a matrix are looked at.
_SAMPLE = 64
#: What may stand between values and the output projection, in words.
_WORDS = {Gate: "gate", SinkGate: "gate", AddedOutput: "sum", norms.Norm: "norm", Affine: "factor"}
_REFACTOR = "refactor_factored_attn_matrices"
_TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def no_processing(core: PreTrainedModel, architecture: Architecture) -> str:
    """Why nothing of a model can be processed, "" where something can."""
    return _why_not_declared(core, architecture) or _why_not_stored(core)


def _why_not_declared(core: PreTrainedModel, architecture: Architecture) -> str:
    """What of a declaration HookedTransformer's weights have no place for; "" where all fits."""
    if len(architecture.stacks) > 1 or architecture.norms_on_the_stream:
        return (
            f"{type(core).__name__} is not one stack of blocks, each reading the residual stream through a norm; "
            "HookedTransformer has no processing for it either"
        )
    if reason := architecture.why_no_sum():
        return reason
    steps, blocks = list(architecture.steps()), architecture.stack.every_block
    if any(parameters_of(step.output_transform) for step in steps) or any(each.adds_late for each in blocks):
        return "its blocks change what a part puts out by parameters of their own, or add it later than it was made"
    if architecture.stack.shares_modules:
        return "its blocks are one module: what is folded into one would be folded into all of them"
    attentions = [part for block in blocks for part in block.attentions]
    if any(part.from_latents for part in attentions):
        return "its queries, or its keys and values, are made from latents: no matrix of theirs reads the stream"
    own_heads = any(part.config_values.keys() & {"n_heads", "n_key_value_heads"} for part in attentions)
    if own_heads or any(each.width for part in attentions for each in part.projections.values()):
        return "its layers do not all have heads of one number and width, as HookedTransformer's have"
    return ""


def _why_not_stored(core: PreTrainedModel) -> str:
    """Why parameters are no plain numbers that could be changed; "" where they are."""
    meta = [name for name, parameter in core.named_parameters() if parameter.is_meta]
    if meta:
        return f"{len(meta)} parameters, such as {meta[0]}, have no values (device meta: not loaded, or offloaded)"
    quantised = getattr(core, "is_quantized", False) or getattr(core, "hf_quantizer", None) is not None
    # Those of a GGUF file are dequantised while they are loaded, and are plain parameters.
    dequantised = getattr(core, "quantization_method", None) == "gguf" and all(
        type(parameter) is nn.Parameter and parameter.is_floating_point() for parameter in core.parameters()
    )
    if quantised and not dequantised:
        return "the weights are quantised; load the model without quantisation, or dequantise it"
    return ""


def why_not(parts: ProcessedParts, step: str) -> str:
    """Why a transform cannot be done, "" where it can."""
    return _OWN[step](parts) or _sharded(parts, step) or _weights(parts, step) or _structure(parts)


def _sharded(parts: ProcessedParts, step: str) -> str:
    """FSDP2 knows the parameters that there were when it was set up: others it would not bring to the processes."""
    if not is_sharded(parts.core):
        return ""
    embedding, unembedding = parts.architecture.embedding.tokens, "." + parts.architecture.readout.path
    has_bias, weights = parts.has_bias, parts.weights
    unties = step in ("fold_ln", "center_writing_weights", "center_unembed") and weights.has(unembedding)
    if embedding and unties and weights.module(embedding).weight is weights.module(unembedding).weight:
        return "embedding and unembedding are one matrix, and FSDP2 has no place for another"
    if step == "fold_ln":
        norms = [norm for norm in parts.norms if has_bias(norm.path)]
        lacking = [reader.holder for norm in norms for reader in norm.readers if not has_bias(reader.holder)]
    else:
        outputs = [path for _, path in parts.blocks if step in ("fold_value_biases", _REFACTOR)]
        lacking = [
            parts.output(path) for path in outputs if has_bias(parts.value(path)) and not has_bias(parts.output(path))
        ]
    return f"{lacking[0]} would be given a bias, for which FSDP2 has no place" if lacking else ""


def _weights(parts: ProcessedParts, step: str) -> str:
    """Every matrix that is written has to be a view of a parameter of a plain layer."""
    stored = _stored(parts)
    for place, getters in parts.by_place((name, (name, get)) for name, get in TRANSFORMS[step].writes(parts).items()):
        with parts.around(place):
            if parts.spread:
                stored = _stored(parts)
            for name, get in getters:
                if reason := _why_not_written(name, get, stored):
                    return reason
    return ""


def _stored(parts: ProcessedParts) -> set[int]:
    """Where plain parameters are in memory."""
    return {p.untyped_storage().data_ptr() for p in parts.core.parameters() if type(p) is nn.Parameter}


def _structure(parts: ProcessedParts) -> str:
    if others := parts.undeclared():
        return f"the adapter does not say what these parameters read and write: {', '.join(others[:3])}"
    places: dict[int, list[str]] = {}
    for name, parameter in parts.core.named_parameters(remove_duplicate=False):
        held = held_here(parameter)
        if held.numel() and (isinstance(parameter, DTensor) or type(parameter) is nn.Parameter):
            places.setdefault(held.data_ptr(), []).append(name)
    tokens = parts.architecture.embedding.tokens  # "": the stream begins with images or sound
    embedding = parts.weights.module(tokens).weight if tokens else None
    tied: list[str] = []
    if isinstance(embedding, Tensor) and (isinstance(embedding, DTensor) or type(embedding) is nn.Parameter):
        tied = places.get(held_here(embedding).data_ptr(), [])
    if len(tied) == 2 and f"{parts.architecture.readout.path}.weight" in tied:
        places = {where: names for where, names in places.items() if names is not tied}
    twice = [names for names in places.values() if len(names) > 1]
    return f"{twice[0][0]} is used in more than one place" if twice else ""


def _fold_ln(parts: ProcessedParts) -> str:
    if parts.cfg.normalization_type is None:
        return "it has no norms"
    if parts.shifted:
        return "queries and keys read the norm's output with position embeddings added to it"
    if any(part.gate for block in parts.architecture.stack.every_block for part in block.attentions):
        return "a gate behind its attention reads the norm, too, and HookedTransformer has no matrix for it"
    if any(norm.kind.gate for block in parts.architecture.stack.every_block for norm in block.norms):
        return "a gate is behind one of its norms, and reads what that makes with its weight"
    if any(norm.kind.opaque for block in parts.architecture.stack.every_block for norm in block.norms):
        return "one of its norms is none that is known"
    if "unembed.W_U" not in parts.weights.getters:
        return f"{type(parts.core).__name__} has no output layer into which the final norm could be folded"
    for place, at_place in parts.by_place((norm.name, norm) for norm in parts.norms):
        with parts.around(place):
            if reasons := [reason for norm in at_place if (reason := _why_not_folded(parts, norm))]:
                return reasons[0]
    return ""


def _why_not_folded(parts: ProcessedParts, norm: NormWithReaders) -> str:
    """Why one norm cannot be folded into what reads it; empty where it can."""
    if not norm.readers:
        return f"nothing is known to read {norm.name}"
    module = parts.weights.module(norm.path)
    weight, bias = norm_parameters(module)
    if any(x is not None and id(x) not in map(id, module._parameters.values()) for x in (weight, bias)):
        return f"{norm.name} is a {type(module).__name__} whose weight is not a parameter of its own"
    if bias is None or not bool(bias.any()):
        return ""
    if parameter_names(module)[1] != "bias":
        return f"{norm.name} calls its bias {parameter_names(module)[1]}, and what readers need is saved as bias"
    if norm.name == "ln_final" and parts.architecture.readout.factor_in != 1:
        return f"{norm.name} has a bias, and its output is multiplied before the output layer reads it"
    if not norm.kind.centered:
        return f"{norm.name} is an RMS norm with a bias, which HookedTransformer's has not"
    if norm.gated:
        return f"{norm.name} has a bias and feeds a gated MLP: HookedTransformer's has no bias before the product"
    if any(reader.bias is None for reader in norm.readers):
        return f"{norm.name} has a bias and feeds a mixture of experts, whose matrices have none"
    return ""


def _center_writing_weights(parts: ProcessedParts) -> str:
    final = parts.final_kind
    steps = list(parts.architecture.steps())
    kinds = [step.pre.kind for step in steps if step.pre and not step.pre.kind.identity]
    if final is None or len(kinds) < len(steps):
        return "something reads the residual stream without a norm, which would see the mean that is taken out"
    if not all(kind.centered for kind in (*kinds, final)):
        return "it has RMS norms, which do not subtract the mean of what they read"
    if any(step.post for step in steps):
        return "what attention and MLP write goes through a norm, whose output does not sum to zero"
    if parts.shifted:
        return "position embeddings are added to what queries and keys read, behind the norm"
    return ""


def _center_unembed(parts: ProcessedParts) -> str:
    if "unembed.W_U" not in parts.weights.getters:
        return f"{type(parts.core).__name__} has no output layer"
    if parts.cfg.output_logits_soft_cap > 0:
        return f"its logits go through a soft cap of {parts.cfg.output_logits_soft_cap:g}, which is not linear"
    return ""


def _fold_value_biases(parts: ProcessedParts) -> str:
    attn = parts.architecture.stack.attn
    if attn is None:
        return "it has no attention"
    if any(block.attentions != (attn,) for block in parts.architecture.stack.every_block):
        return "its layers do not have one attention each, the same in all of them"
    if attn.sinks or isinstance(attn.z_transform, SinkGate):
        return "it has attention sinks: the rows of its pattern do not sum to one"
    if attn.clip is not None:
        return f"its values are clamped to {attn.clip:g}, biases included"
    if attn.z_transform or attn.v.norm:
        between = "norm" if attn.v.norm else _WORDS[type(attn.z_transform)]
        return f"a {between} stands between its values and its output projection"
    return ""


def _refactor(parts: ProcessedParts) -> str:
    cfg, attn = parts.cfg, parts.architecture.stack.attn
    if attn is None or (reason := _fold_value_biases(parts)):
        return reason if attn else "it has no attention"
    if attn.rotary or cfg.positional_embedding_type == "rotary":
        return "queries and keys are rotated by their positions, between which the product would have to be taken"
    if attn.qk_norms:
        return "queries and keys go through norms"
    if cfg.n_kv_heads != cfg.n_heads:
        return f"{cfg.n_heads} query heads share {cfg.n_kv_heads} heads of keys and values"
    if cfg.d_head > cfg.d_model:
        return f"d_head={cfg.d_head} is more than d_model={cfg.d_model}"
    outputs, saved_biases = [parts.output(path) for _, path in parts.blocks], SavedBiases(parts.core)
    if not all(parts.has_bias(path) and not saved_biases.has_output(path) for path in outputs):
        return "the output projection has no bias to take up those of the values"
    return ""


#: Why each transform would change what a model computes; "" where it would not.
_OWN: Mapping[str, Callable[[ProcessedParts], str]] = {
    "fold_ln": _fold_ln,
    "center_writing_weights": _center_writing_weights,
    "center_unembed": _center_unembed,
    "fold_value_biases": _fold_value_biases,
    _REFACTOR: _refactor,
}


def _why_not_written(name: str, get: Callable[[], Tensor], stored: set[int]) -> str:
    """Why a matrix is no view of a parameter that can be written to; empty where it is one."""
    try:
        weight = get()
    except TypeError as error:  # what `Weights.matrix` says of LoRA and quantised layers
        return str(error)
    if type(weight) not in (Tensor, nn.Parameter):
        return f"{name} is a {type(weight).__name__}: quantised, not a plain tensor"
    if weight.dtype not in _TYPES:
        return f"{name} is of type {weight.dtype}"
    if weight.is_inference():
        return f"{name} was made under torch.inference_mode and cannot be written to outside of it"
    if weight.untyped_storage().data_ptr() not in stored:
        return f"{name} is computed from the model's parameters: writing to it would change nothing"
    return ""


def is_as_left(parts: ProcessedParts, step: str) -> bool:
    """Whether the parameters look as a transform leaves them: by all the norms and biases, by samples of matrices."""
    for place, at_place in parts.by_place(_LOOKS[step](parts)):
        with parts.around(place):
            if not all(look() for look in at_place):
                return False
    return True


def _is_centered(name: str, get: Callable[[], Tensor]) -> bool:
    # A head that writes nothing has any directions whatever in its output matrix, once that is refactored.
    return name.endswith("W_O") or get().ndim < 2 or _sums_to_zero(get()[:_SAMPLE], -1)


def _is_folded(parts: ProcessedParts, norm: NormWithReaders) -> bool:
    plain = parts.is_plain(norm)
    return plain and (not norm.kind.centered or _sums_to_zero(norm.readers[0].weight()[..., :_SAMPLE], -2))


def _has_no_value_bias(parts: ProcessedParts, block: str) -> bool:
    return not bool(parts.get(parts.find(f"{block}.attn", "b_V"))().any())


def _is_refactored(parts: ProcessedParts, block: str) -> bool:
    W = parts.get(f"{block}.attn.W_O")()[0].float()
    return torch.allclose(W @ W.T, torch.eye(len(W), device=W.device), atol=0.05)


#: What each transform leaves, by the names of the weights: whether it is there.
_LOOKS: Mapping[str, Callable[[ProcessedParts], list[tuple[str, Callable[[], bool]]]]] = {
    "fold_ln": lambda parts: [(norm.name, partial(_is_folded, parts, norm)) for norm in parts.norms],
    "center_writing_weights": lambda parts: [(each[0], partial(_is_centered, *each)) for each in parts.writers.items()],
    "center_unembed": lambda parts: [("", lambda: _sums_to_zero(parts.get("unembed.W_U")()[:_SAMPLE], -1))],
    "fold_value_biases": lambda parts: [(name, partial(_has_no_value_bias, parts, name)) for name, _ in parts.blocks],
    _REFACTOR: lambda parts: [(name, partial(_is_refactored, parts, name)) for name, _ in parts.blocks],
}


def _sums_to_zero(x: Tensor, dim: int) -> bool:
    """Whether the means are far below those of independent numbers of this size, or as small as rounding lets them be.

    In bfloat16 a mean over a whole vocabulary is smaller than the steps between large numbers, so that these stay as
    they are when it is taken out. Measured in half precision, for 64 to 262,144 numbers: taking the mean out once more
    leaves 0.6 to 0.8 of it; taking it out for the first time, at most 0.32.
    """
    x = x.detach().float()
    means, size = x.mean(dim, keepdim=True), _root_mean_square(x)
    left = _root_mean_square(means)
    if left <= 0.1 * size / x.shape[dim] ** 0.5:
        return True
    again = (x - means).to(_stored_as(x)).float()
    return _root_mean_square(again.mean(dim)) > 0.5 * left


def _root_mean_square(x: Tensor) -> float:
    return float(x.square().mean().sqrt())


def _stored_as(x: Tensor) -> torch.dtype:
    """The narrowest type that holds nearly all the numbers, which may have been converted since they were rounded."""
    narrow = (torch.bfloat16, torch.float16)
    return next((dtype for dtype in narrow if (x.to(dtype) == x).float().mean() > 0.9), x.dtype)
