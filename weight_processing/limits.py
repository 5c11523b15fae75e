"""Preconditions of transforms: reasons why one would not keep a model's function, known before it
is applied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from adapters import Architecture
from adapters.attention import AddedOutput, Gate, SinkGate
from adapters.norms import Norm, parameter_names
from adapters.views import Affine, parameters_of
from weight_processing.parts import (
    NormWithReaders,
    ProcessedParts,
    held_here,
    is_sharded,
    norm_parameters,
)
from weight_processing.saving import SavedBiases
from weight_processing.steps import REFACTOR, TRANSFORMS

#: Number of rows or columns of a matrix that are inspected.
_SAMPLE = 64
#: Operations between values and the output projection, in words.
_WORDS = {Gate: "gate", SinkGate: "gate", AddedOutput: "sum", Norm: "norm", Affine: "factor"}
_TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def no_processing(core: PreTrainedModel, architecture: Architecture) -> str:
    """Return why no transform can be applied to a model; "" if one can."""
    return _why_not_declared(core, architecture) or _why_not_stored(core)


def _why_not_declared(core: PreTrainedModel, architecture: Architecture) -> str:
    """Return the part of a declaration that HookedTransformer's weights cannot represent; "" if
    there is none.
    """
    if len(architecture.stacks) > 1 or architecture.norms_on_the_stream:
        return (
            f"{type(core).__name__} is not one stack of blocks, each reading the residual stream"
            " through a norm; HookedTransformer has no processing for it either"
        )
    if reason := architecture.why_no_sum():
        return reason
    blocks = architecture.stack.every_block
    adds_late = any(block.adds_late for block in blocks)
    if adds_late or any(parameters_of(step.output_transform) for step in architecture.steps()):
        return (
            "its blocks change what a part puts out by parameters of their own, or add it later"
            " than it was made"
        )
    if architecture.stack.shares_modules:
        return "its blocks are one module: what is folded into one would be folded into all of them"
    attentions = [part for block in blocks for part in block.attentions]
    if any(part.from_latents for part in attentions):
        return (
            "its queries, or its keys and values, are made from latents: no matrix of theirs reads"
            " the stream"
        )
    for part in attentions:
        has_own_number = part.config_values.keys() & {"n_heads", "n_key_value_heads"}
        if has_own_number or any(projection.width for projection in part.projections.values()):
            return (
                "its layers do not all have heads of one number and width, as HookedTransformer's"
                " have"
            )
    return ""


def _why_not_stored(core: PreTrainedModel) -> str:
    """Return why parameters are not plain, writable numbers; "" if they are."""
    meta = [name for name, parameter in core.named_parameters() if parameter.is_meta]
    if meta:
        return (
            f"{len(meta)} parameters, such as {meta[0]}, have no values (device meta: not loaded,"
            " or offloaded)"
        )
    has_quantizer = getattr(core, "hf_quantizer", None) is not None
    if not (has_quantizer or getattr(core, "is_quantized", False)):
        return ""
    # Parameters of a GGUF file are dequantised on loading, and are plain.
    if getattr(core, "quantization_method", None) == "gguf" and all(
        type(parameter) is nn.Parameter and parameter.is_floating_point()
        for parameter in core.parameters()
    ):
        return ""
    return "the weights are quantised; load the model without quantisation, or dequantise it"


def why_not(parts: ProcessedParts, step: str) -> str:
    """Return why a transform cannot be applied; "" if it can."""
    return _OWN[step](parts) or _sharded(parts, step) or _weights(parts, step) or _structure(parts)


def _sharded(parts: ProcessedParts, step: str) -> str:
    """Return why a transform cannot be applied under FSDP2, which shards only the parameters that
    existed at its setup; "" if it can.
    """
    if not is_sharded(parts.core):
        return ""
    weights = parts.weights
    embedding = parts.architecture.embedding.tokens
    unties = step in ("fold_ln", "center_writing_weights", "center_unembed")
    if unties and embedding and weights.has(parts.unembed):
        unembedding = weights.module(parts.unembed).weight
        if weights.module(embedding).weight is unembedding:
            return "embedding and unembedding are one matrix, and FSDP2 has no place for another"
    for holder in _holders_of_new_biases(parts, step):
        if not parts.has_bias(holder):
            return f"{holder} would be given a bias, for which FSDP2 has no place"
    return ""


def _holders_of_new_biases(parts: ProcessedParts, step: str) -> Iterator[str]:
    """Yield the paths of the modules to which a transform may add biases."""
    if step == "fold_ln":
        for norm in parts.norms:
            if parts.has_bias(norm.path):
                yield from (reader.holder for reader in norm.readers)
    elif step in ("fold_value_biases", REFACTOR):
        for _, path in parts.blocks:
            if parts.has_bias(parts.projection(path, "V")):
                yield parts.projection(path, "O")


def _weights(parts: ProcessedParts, step: str) -> str:
    """Return why a written matrix is not a view of a parameter of a plain layer; "" if all are."""
    stored = _stored(parts)
    parameters = TRANSFORMS[step].writes(parts)
    for place, names in parts.by_place(zip(parameters, parameters, strict=True)):
        with parts.around(place):
            if parts.spread:
                stored = _stored(parts)
            for name in names:
                if reason := _why_not_written(name, parameters[name], stored):
                    return reason
    return ""


def _stored(parts: ProcessedParts) -> set[int]:
    """Return the memory addresses of plain parameters."""
    return {
        p.untyped_storage().data_ptr() for p in parts.core.parameters() if type(p) is nn.Parameter
    }


def _structure(parts: ProcessedParts) -> str:
    if others := parts.undeclared():
        return (
            "the adapter does not say what these parameters read and write:"
            f" {', '.join(others[:3])}"
        )
    users: dict[int, list[str]] = {}
    for name, parameter in parts.core.named_parameters(remove_duplicate=False):
        held = held_here(parameter)
        if held.numel() and _is_plain(parameter):
            users.setdefault(held.data_ptr(), []).append(name)
    tokens = parts.architecture.embedding.tokens  # "": the stream begins with images or sound
    embedding = parts.weights.module(tokens).weight if tokens else None
    tied: list[str] = []
    if isinstance(embedding, Tensor) and _is_plain(embedding):
        tied = users.get(held_here(embedding).data_ptr(), [])
    may_be_tied = len(tied) == 2 and f"{parts.architecture.readout.path}.weight" in tied
    for names in users.values():
        if len(names) > 1 and not (may_be_tied and names is tied):
            return f"{names[0]} is used in more than one place"
    return ""


def _is_plain(parameter: Tensor) -> bool:
    """Tell whether a parameter is a plain one, whole or sharded."""
    return isinstance(parameter, DTensor) or type(parameter) is nn.Parameter


def _fold_ln(parts: ProcessedParts) -> str:
    if parts.cfg.normalization_type is None:
        return "it has no norms"
    if parts.shifted:
        return "queries and keys read the norm's output with position embeddings added to it"
    blocks = parts.stack.every_block
    if any(part.gate for block in blocks for part in block.attentions):
        return (
            "a gate behind its attention reads the norm, too, and HookedTransformer has no matrix"
            " for it"
        )
    kinds = [norm.kind for block in blocks for norm in block.norms]
    if any(kind.gate for kind in kinds):
        return "a gate is behind one of its norms, and reads what that makes with its weight"
    if any(kind.opaque for kind in kinds):
        return "one of its norms is none that is known"
    if "unembed.W_U" not in parts.getters:
        return (
            f"{type(parts.core).__name__} has no output layer into which the final norm could be"
            " folded"
        )
    for place, norms in parts.by_place((norm.name, norm) for norm in parts.norms):
        with parts.around(place):
            for norm in norms:
                if reason := _why_not_folded(parts, norm):
                    return reason
    return ""


def _why_not_folded(parts: ProcessedParts, norm: NormWithReaders) -> str:
    """Return why a norm cannot be folded into its readers; "" if it can."""
    if not norm.readers:
        return f"nothing is known to read {norm.name}"
    module = parts.weights.module(norm.path)
    weight, bias = norm_parameters(module)
    own = {id(None), *map(id, module._parameters.values())}
    if id(weight) not in own or id(bias) not in own:
        return (
            f"{norm.name} is a {type(module).__name__} whose weight is not a parameter of its own"
        )
    if bias is None or not bool(bias.any()):
        return ""
    bias_name = parameter_names(module)[1]
    if bias_name != "bias":
        return f"{norm.name} calls its bias {bias_name}, and what readers need is saved as bias"
    if norm.name == "ln_final" and parts.architecture.readout.factor_in != 1:
        return (
            f"{norm.name} has a bias, and its output is multiplied before the output layer reads it"
        )
    if not norm.kind.centered:
        return f"{norm.name} is an RMS norm with a bias, which HookedTransformer's has not"
    if norm.gated:
        return (
            f"{norm.name} has a bias and feeds a gated MLP: HookedTransformer's has no bias before"
            " the product"
        )
    if any(reader.bias is None for reader in norm.readers):
        return f"{norm.name} has a bias and feeds a mixture of experts, whose matrices have none"
    return ""


def _center_writing_weights(parts: ProcessedParts) -> str:
    steps = list(parts.architecture.steps())
    norms = [parts.final_norm, *(step.pre for step in steps)]
    kinds = [norm.kind for norm in norms if norm and not norm.kind.identity]
    if len(kinds) < len(norms):
        return (
            "something reads the residual stream without a norm, which would see the mean that is"
            " taken out"
        )
    if not all(kind.centered for kind in kinds):
        return "it has RMS norms, which do not subtract the mean of what they read"
    if any(step.post for step in steps):
        return "what attention and MLP write goes through a norm, whose output does not sum to zero"
    if parts.shifted:
        return "position embeddings are added to what queries and keys read, behind the norm"
    return ""


def _center_unembed(parts: ProcessedParts) -> str:
    if "unembed.W_U" not in parts.getters:
        return f"{type(parts.core).__name__} has no output layer"
    cap = parts.cfg.output_logits_soft_cap
    if cap > 0:
        return f"its logits go through a soft cap of {cap:g}, which is not linear"
    return ""


def _fold_value_biases(parts: ProcessedParts) -> str:
    attn = parts.stack.attn
    if attn is None:
        return "it has no attention"
    if any(block.attentions != (attn,) for block in parts.stack.every_block):
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
    if reason := _fold_value_biases(parts):
        return reason
    cfg, attn = parts.cfg, parts.attn
    if attn.rotary or cfg.positional_embedding_type == "rotary":
        return (
            "queries and keys are rotated by their positions, between which the product would have"
            " to be taken"
        )
    if attn.qk_norms:
        return "queries and keys go through norms"
    if cfg.n_kv_heads != cfg.n_heads:
        return f"{cfg.n_heads} query heads share {cfg.n_kv_heads} heads of keys and values"
    if cfg.d_head > cfg.d_model:
        return f"d_head={cfg.d_head} is more than d_model={cfg.d_model}"
    saved_biases = SavedBiases(parts.core)
    for _, path in parts.blocks:
        output = parts.projection(path, "O")
        if not parts.has_bias(output) or saved_biases.has_output(output):
            return "the output projection has no bias to take up those of the values"
    return ""


#: Functions that return why a transform would change the model's function; "" if it would not.
_OWN: Mapping[str, Callable[[ProcessedParts], str]] = {
    "fold_ln": _fold_ln,
    "center_writing_weights": _center_writing_weights,
    "center_unembed": _center_unembed,
    "fold_value_biases": _fold_value_biases,
    REFACTOR: _refactor,
}


def _why_not_written(name: str, get: Callable[[], Tensor], stored: set[int]) -> str:
    """Return why a matrix is not a writable view of a parameter; "" if it is."""
    try:
        weight = get()
    except TypeError as error:  # raised by `Weights.matrix` for LoRA and quantised layers
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
    """Tell whether the parameters look like the result of a transform, by all norms and biases and
    by samples of matrices.
    """
    if step == "fold_ln":
        tests = [(norm.name, partial(_is_folded, parts, norm)) for norm in parts.norms]
    elif step == "center_writing_weights":
        tests = [(name, partial(_is_centered, parts, name)) for name in parts.writers]
    elif step == "center_unembed":
        tests = [("", partial(_has_centered_rows, parts, "unembed.W_U"))]
    else:
        test = _is_refactored if step == REFACTOR else _has_no_value_bias
        tests = [(block, partial(test, parts, f"{block}.attn")) for block, _ in parts.blocks]
    for place, tests_there in parts.by_place(tests):
        with parts.around(place):
            if not all(test() for test in tests_there):
                return False
    return True


def _is_folded(parts: ProcessedParts, norm: NormWithReaders) -> bool:
    if not parts.is_plain(norm):
        return False
    return not norm.kind.centered or _sums_to_zero(norm.readers[0].weight()[..., :_SAMPLE], -2)


def _is_centered(parts: ProcessedParts, writer: str) -> bool:
    # The refactored output matrix of a head that writes nothing has arbitrary directions.
    return writer.endswith("W_O") or _has_centered_rows(parts, writer)


def _has_centered_rows(parts: ProcessedParts, name: str) -> bool:
    weight = parts.get(name)()
    return weight.ndim < 2 or _sums_to_zero(weight[:_SAMPLE], -1)


def _has_no_value_bias(parts: ProcessedParts, attn: str) -> bool:
    return not bool(parts.get(parts.find(attn, "b_V"))().any())


def _is_refactored(parts: ProcessedParts, attn: str) -> bool:
    W = parts.get(f"{attn}.W_O")()[0].float()
    return torch.allclose(W @ W.T, torch.eye(len(W), device=W.device), atol=0.05)


def _sums_to_zero(x: Tensor, dim: int) -> bool:
    """Tell whether the means are far below those of independent numbers of this size, or as small
    as rounding allows.

    In bfloat16, a mean over a whole vocabulary is smaller than the spacing of large numbers, so
    subtracting it does not change these. Measurements in half precision, for 64 to 262,144 numbers:
    if the mean was subtracted before, subtracting it again leaves 0.6 to 0.8 of it; if not, at most
    0.32.
    """
    x = x.detach().float()
    means = x.mean(dim, keepdim=True)
    size_of_means = _root_mean_square(means)
    if size_of_means <= 0.1 * _root_mean_square(x) / x.shape[dim] ** 0.5:
        return True
    again = (x - means).to(_stored_as(x)).float()
    return _root_mean_square(again.mean(dim)) > 0.5 * size_of_means


def _root_mean_square(x: Tensor) -> float:
    return float(x.square().mean().sqrt())


def _stored_as(x: Tensor) -> torch.dtype:
    """Return the narrowest dtype that represents nearly all of the numbers: they may have been
    rounded to it before a conversion.
    """
    narrow = (torch.bfloat16, torch.float16)
    return next((dtype for dtype in narrow if (x.to(dtype) == x).float().mean() > 0.9), x.dtype)
