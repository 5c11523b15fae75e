"""docs/hook_points.md lists every name that an adapter makes, and no other."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from adapters import map_model
from tests.tiny_models import Task, tiny_model

PAGE = Path(__file__).parents[2] / "docs" / "hook_points.md"
#: One model of nearly every file of `adapters/families`.
CAUSAL = """
    gpt2 gpt_neo gptj gpt_neox opt bloom llama mixtral dbrx qwen2 qwen2_moe gemma2 gemma3_text phi
    phi3 helium gpt_oss granite olmo2 cohere glm4 exaone4 hunyuan_v1_moe starcoder2 stablelm
    apertus persimmon deepseek_v3 dots1 laguna codegen gpt_bigcode mpt falcon openai-gpt xglm
    moshi modernbert-decoder flint
"""
TYPES: dict[str, Task] = dict.fromkeys(CAUSAL.split(), "causal")
TYPES |= {
    "bert": "masked",
    "t5": "seq2seq",
    "bart": "seq2seq",
    "mbart": "seq2seq",
    "whisper": "speech",
}
#: These have all the names of the list between them.
FEW = ("gpt2", "gemma2", "opt", "laguna", "qwen2_moe", "deepseek_v3", "bert", "t5", "mbart")


@cache
def listed() -> dict[str, set[str]]:
    """The names on the page, by the part that they stand in."""
    found: dict[str, set[str]] = {}
    for parts, names in re.findall(
        r"^\| (.+?) \| (.+) \|$", PAGE.read_text().split("## All names")[1], re.MULTILINE
    ):
        for part in re.findall(r"`([^`]+)`", parts) or ([""] if parts == "–" else []):
            found[part] = set(re.findall(r"`(hook_\w+)`", names))
    return found


def names(model_type: str) -> Iterator[tuple[str, str]]:
    """The names that an adapter makes: the part, as the page calls it, and what is behind it."""
    for point in map_model(tiny_model(model_type, TYPES[model_type])).points:
        part, _, name = point.name.rpartition(".")
        part = re.sub(r"^(blocks|encoder|decoder)\.\d+", "blocks.i", part).replace(
            "cross_attn", "attn"
        )
        part = re.sub(r"\.experts\.\d+", ".experts.e", part)
        is_norm = re.search(r"(^|\.)(ln\d?(_post)?|[qk]_norm|ln_final|\w+_final_ln)$", part)
        yield "ln" if is_norm else re.sub(r"^blocks\.i\.", "", part), name


@pytest.mark.parametrize("model_type", sorted(TYPES))
def test_every_name_is_on_the_page(model_type: str) -> None:
    missing = {
        f"{part}.{name}" for part, name in names(model_type) if name not in listed().get(part, ())
    }
    assert not missing, f"add them to docs/hook_points.md: {sorted(missing)}"


def test_every_name_on_the_page_is_there() -> None:
    made = {each for model_type in FEW for each in names(model_type)}
    assert {(part, name) for part, all_of in listed().items() for name in all_of} - made == set()
