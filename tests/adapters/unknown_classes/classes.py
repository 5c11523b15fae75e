"""All classes, by name, and what is offered of each."""

from __future__ import annotations

from torch import nn

from tests.adapters.unknown_classes import (
    chatglm,
    module_list_mixtures,
    odd_parts,
    placed_otherwise,
    plain_modules,
    remote_structures,
    softmaxes,
    torch_modules,
)

#: Offered in full: everything that they show is a hook point, and nothing is left out.
FULL: dict[str, type[nn.Module]] = {
    "old Mixtral": module_list_mixtures.OldMixtral,
    "keys and values of the first layer": remote_structures.SharedValues,
    "Qwen MoE": module_list_mixtures.QwenMoe,
    "DeepSeek V3": module_list_mixtures.DeepseekMoe,
    "Bailing": module_list_mixtures.BailingMoe,
    "Hunyuan": module_list_mixtures.HunyuanMoe,
    "Nemotron-H": module_list_mixtures.NemotronMoe,
    "softmax by hand": softmaxes.ByHand,
    "log_softmax().exp()": softmaxes.OfLogarithms,
    "nn.MultiheadAttention": torch_modules.Multihead,
    "nn.TransformerEncoderLayer": torch_modules.EncoderLayersAfter,
    "nn.TransformerEncoderLayer, norms first": torch_modules.EncoderLayersFirst,
    "ChatGLM 2": chatglm.ChatGLM,
    "layers as attributes": placed_otherwise.Attributes,
    "phi-1": placed_otherwise.PhiSequential,
    "one block called several times": placed_otherwise.OneBlock,
    "LLaDA": placed_otherwise.LLaDA,
    "blocks that return dictionaries": placed_otherwise.Dictionaries,
    "arguments of any name": placed_otherwise.AnyNames,
    "Dream": placed_otherwise.Dream,
    "MPT, clipped": odd_parts.MptClipped,
    "MPT, normed": odd_parts.MptNormed,
    "MPT, both": odd_parts.MptBoth,
    "MiniCPM": odd_parts.MiniCPM,
    "InternLM 2": odd_parts.InternLM,
    "OpenELM": odd_parts.OpenELM,
    "Baichuan 2": odd_parts.Baichuan,
    "nanoGPT": plain_modules.NanoGPT,
    "a hundred lines": plain_modules.HundredLines,
    "fused gate and up": remote_structures.Fused,
    "gate and up in turn": remote_structures.FusedInTurn,
    "latents by hand": remote_structures.Latents,
    "scaled logits": remote_structures.ScaledLogits,
    "norms on both sides, capped scores": remote_structures.Sandwich,
    "two blocks in turn": remote_structures.TiedLayers,
}
_BETWEEN = "what enters its output projection is not pattern @ v: something unknown stands between"
#: Offered in part, and why not in full.
PART: dict[str, tuple[type[nn.Module], str]] = {
    "PaLM": (odd_parts.Palm, r"one layer reads it for mlp and attn"),
    "heads that are modules": (plain_modules.Lecture, r"it computes 4 softmaxes"),
    "differences of patterns": (remote_structures.Differential, r"it computes 2 softmaxes"),
    "values mixed with the first layer's": (remote_structures.ValueResidual, _BETWEEN),
    "sigmoid attention": (softmaxes.Sigmoids, ""),  # it has the names of a mixer
}
#: Refused, and why.
REFUSED: dict[str, tuple[type[nn.Module], str]] = {
    "nanochat": (
        odd_parts.Nanochat,
        r"what leaves a block of module\.transformer\.h is not what enters the next",
    ),
    "attention alone": (
        plain_modules.AttentionOnly,
        r"what leaves a block of module\.layers is not what enters the next",
    ),
}
CLASSES: dict[str, type[nn.Module]] = {
    **FULL,
    **{name: cls for name, (cls, _) in PART.items()},
    **{name: cls for name, (cls, _) in REFUSED.items()},
}
