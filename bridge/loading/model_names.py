"""Short names of models, as HookedTransformer has them, and the hub names that they stand for."""

from __future__ import annotations

import itertools
import os
import re

#: The hub's organisations and their models. ``{a,b}`` stands for each of these in turn.
_HUB = {
    "": "gpt2 gpt2-{medium,large,xl} distilgpt2",
    "facebook": "opt-{125m,1.3b,2.7b,6.7b,13b,30b,66b}",
    "EleutherAI": "gpt-neo-{125M,1.3B,2.7B} gpt-j-6B gpt-neox-20b pythia-{14m,31m} pythia-160m-seed{1,2,3} "
    "pythia-{70m,160m,410m,1b,1.4b,2.8b,6.9b,12b}{,-deduped,-v0,-deduped-v0}",
    "stanford-crfm": "alias-gpt2-small-x21 battlestar-gpt2-small-x49 caprica-gpt2-small-x81 "
    "darkmatter-gpt2-small-x343 expanse-gpt2-small-x777 arwen-gpt2-medium-x21 beren-gpt2-medium-x49 "
    "celebrimbor-gpt2-medium-x81 durin-gpt2-medium-x343 eowyn-gpt2-medium-x777",
    "huggyllama": "llama-{7b,13b,30b,65b}",
    "meta-llama": "Llama-2-{7b,13b}{,-chat}-hf Llama-2-70b-chat-hf Meta-Llama-3-{8B,70B}{,-Instruct} "
    "Llama-3.1-{8B,70B}{,-Instruct} Llama-3.2-{1B,3B}{,-Instruct} Llama-3.3-70B-Instruct",
    "codellama": "CodeLlama-7b{,-Python,-Instruct}-hf",
    "google-bert": "bert-{base,large}-{cased,uncased}",
    "roneneldan": "TinyStories{,-Instruct}-{1M,3M,8M,28M,33M} TinyStories-{1Layer-21M,2Layers-33M} "
    "TinyStories-Instuct-1Layer-21M TinyStories-Instruct-2Layers-33M",
    "stabilityai": "stablelm-{base,tuned}-alpha-{3b,7b}",
    "mistralai": "Mistral-7B{,-Instruct}-v0.1 Mistral-Small-24B-Base-2501 Mistral-Nemo-Base-2407 "
    "Mixtral-8x7B{,-Instruct}-v0.1",
    "openai": "gpt-oss-20b",
    "bigscience": "bloom-{560m,1b1,1b7,3b,7b1}",
    "bigcode": "santacoder",
    "Qwen": "Qwen-{1_8B,7B,14B}{,-Chat} Qwen1.5-{0.5B,1.8B,4B,7B,14B}{,-Chat} Qwen2-{0.5B,1.5B,7B}{,-Instruct} "
    "Qwen2.5-{0.5B,1.5B,3B,7B,14B,32B,72B}{,-Instruct} QwQ-32B-Preview Qwen3-{0.6B,1.7B,4B,8B,14B} Qwen3-0.6B-Base",
    "microsoft": "phi-1 phi-1_5 phi-2 Phi-3-mini-4k-instruct phi-4",
    "swiss-ai": "Apertus-8B{,-Instruct}-2509",
    "google": "gemma-{2b,7b,2-2b,2-9b,2-27b}{,-it} gemma-3-270m{,-it} gemma-3-{1b,4b,12b,27b}-{pt,it} "
    "medgemma-4b-{pt,it} medgemma-27b{,-text}-it",
    "01-ai": "Yi-{6B,34B}{,-Chat}",
    "google-t5": "t5-{small,base,large}",
    "ai-forever": "mGPT",
    # In HookedTransformer's own format: see `OWN_FORMAT`.
    "NeelNanda": "SoLU_{1L_v9,2L_v10,4L_v11,6L_v13,8L_v21,10L_v22,12L_v23}_old "
    "SoLU_{1L512W,2L512W,3L512W,4L512W,6L768W,8L1024W,10L1280W,12L1536W}_C4_Code "
    "{GELU,Attn_Only}_{1,2,3,4}L512W_C4_Code Attn-Only-2L512W-Shortformer-6B-big-lr SoLU_{1,4}L512W_Wiki_Finetune",
    "ArthurConmy": "redwood_attn_2l",
    "Baidicoot": "Othello-GPT-Transformer-Lens",
}
#: What the hub names of models in HookedTransformer's own format begin with.
OWN_FORMAT = ("NeelNanda/", "ArthurConmy/redwood_attn_2l", "Baidicoot/Othello-GPT-Transformer-Lens")
#: Short names that no rule of `_short_names` gives.
_SHORT = {
    "gpt2": "gpt2-small",
    "distilgpt2": "distillgpt2 distill-gpt2 distil-gpt2 gpt2-xs",
    "facebook/opt-125m": "opt opt-small",
    "facebook/opt-1.3b": "opt-medium",
    "facebook/opt-2.7b": "opt-large",
    "facebook/opt-6.7b": "opt-xl",
    "facebook/opt-13b": "opt-xxl",
    "facebook/opt-30b": "opt-xxxl",
    "facebook/opt-66b": "opt-xxxxl",
    "EleutherAI/gpt-neo-125M": "neo neo-small gpt-neo-small",
    "EleutherAI/gpt-neo-1.3B": "neo-medium gpt-neo-medium",
    "EleutherAI/gpt-neo-2.7B": "neo-large gpt-neo-large",
    "EleutherAI/gpt-j-6B": "gpt-j gptj",
    "EleutherAI/gpt-neox-20b": "gpt-neox neox",
    "EleutherAI/pythia-70m": "pythia",
    "EleutherAI/pythia-70m-v0": "pythia-v0",
    "meta-llama/Llama-2-70b-chat-hf": "meta-llama-2-70b-chat-hf",
    "codellama/CodeLlama-7b-hf": "codellamallama-2-7b",
    "mistralai/Mixtral-8x7B-v0.1": "mixtral",
    "mistralai/Mixtral-8x7B-Instruct-v0.1": "mixtral-instruct",
    "openai/gpt-oss-20b": "gpt-oss",
    "Qwen/Qwen-1_8B": "qwen-1.8b",
    "Qwen/Qwen-1_8B-Chat": "qwen-1.8b-chat",
    "Qwen/QwQ-32B-Preview": "qwen-32b-preview",
    "microsoft/Phi-3-mini-4k-instruct": "phi-3",
    "NeelNanda/Attn-Only-2L512W-Shortformer-6B-big-lr": "attn-only-2l-demo attn-only-2l-shortformer-6b-big-lr "
    "attn-only-2l-induction-demo attn-only-demo",
    "Baidicoot/Othello-GPT-Transformer-Lens": "othello-gpt",
    "swiss-ai/Apertus-8B-2509": "apertus",
    "swiss-ai/Apertus-8B-Instruct-2509": "apertus-instruct",
}
#: The names that Pythia's models had at first: they counted parameters without the embeddings.
_PYTHIA_BEFORE = {
    "70m": "19m", "160m": "125m", "410m": "350m", "1b": "800m", "1.4b": "1.3b", "2.8b": "2.7b", "6.9b": "6.7b",
    "12b": "13b",
}  # fmt: skip
#: What short names of models in HookedTransformer's own format end with.
_OWN_ENDINGS = {
    "old": ("pile", "old"), "C4_Code": ("new", "c4-code"), "Wiki_Finetune": ("wiki", "wiki-finetune", "finetune"),
}  # fmt: skip


def _expanded(pattern: str) -> list[str]:
    """The names that ``a-{b,c}`` stands for."""
    parts = [part.split(",") if i % 2 else [part] for i, part in enumerate(re.split(r"[{}]", pattern))]
    return ["".join(choice) for choice in itertools.product(*parts)]


def _short_names(hub: str) -> list[str]:
    organisation, _, last = hub.rpartition("/")
    names = {hub, last, last.removesuffix("-hf"), re.sub(r"-v0\.1$|-2509$", "", last), *_SHORT.get(hub, "").split()}
    if organisation == "stanford-crfm":
        size = "small" if "small" in last else "medium"
        letter = last[0]  # they were named in alphabetical order, each size from a
        names |= {f"{start}-{size}-{letter}" for start in ("stanford-gpt2", "gpt2-stanford", "gpt2-mistral")}
        names |= {f"gpt2-medium-small-{letter}"} if size == "medium" else set()
    if organisation == "huggyllama":
        names.add(last + "-hf")
    if (match := re.match(r"pythia-([\d.]+[mb])(.*)", last)) and (before := _PYTHIA_BEFORE.get(match[1])):
        names |= {f"{start}pythia-{before}{match[2]}" for start in ("", "EleutherAI/")}
    if last.startswith("TinyStories"):
        short = re.sub(r"(\d)Layers?", r"\1L", last).replace("Instuct", "Instruct")
        names.add(short.replace("TinyStories", "tiny-stories"))
    if match := re.fullmatch(r"(SoLU|GELU|Attn_Only)_(\d+)L(\w*?)_(old|C4_Code|Wiki_Finetune)", last):
        short = f"{match[1].lower().replace('_', '-')}-{match[2]}l"
        names |= {f"{short}-{end}" for end in _OWN_ENDINGS[match[4]]} | ({short} if match[4] == "C4_Code" else set())
    if organisation == "stabilityai":
        names.add(last.replace("-alpha", ""))
    return sorted(names)


#: The models' names on the hub.
OFFICIAL_MODEL_NAMES = [
    f"{organisation}/{name}" if organisation else name
    for organisation, patterns in _HUB.items()
    for pattern in patterns.split()
    for name in _expanded(pattern)
]
#: For each of these, the other names that it goes by.
MODEL_ALIASES = {hub: [name for name in _short_names(hub) if name != hub] for hub in OFFICIAL_MODEL_NAMES}
#: Every name of a model, in small letters, and the hub name that it stands for.
BY_NAME = {name.lower(): hub for hub in OFFICIAL_MODEL_NAMES for name in (hub, *MODEL_ALIASES[hub])}


def hub_name(name: str) -> str:
    """The hub name that a short name stands for. Any other name, such as a folder's, stays as it is.

    Args:
        name: of a model; small and capital letters are the same.

    Example:
        >>> from bridge.loading.model_names import hub_name
        >>> hub_name("pythia-70m"), hub_name("somebody/some-model")
        ('EleutherAI/pythia-70m', 'somebody/some-model')
    """
    return name if os.path.isdir(name) else BY_NAME.get(name.lower(), name)
