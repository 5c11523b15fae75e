"""Exported programs in their runtimes, at other sizes than the example's, against the bridge's own
runs.

`make export` installs the runtimes and runs these, where nothing checks types: what does cannot be
traced. A format whose packages are not installed is skipped, and says so; torch's own is always
there.
"""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.exporters import ExportedModel

from bridge import TransformerBridge
from bridge.cli.main import main
from bridge.export.formats import FORMATS
from tests.adapters.test_verify_all import tiny
from tests.interventions.cases import LENGTH, NAMES, by_hand
from tests.interventions.cases import cases as operations

FAMILIES = ["gpt2", "llama-gqa", "gpt_neox", "gemma2-gqa", "qwen2_moe-gqa", "bert", "t5"]
#: How exactly each runtime computes; OpenVINO is asked for float32.
RUN: dict[str, dict[str, Any]] = {"openvino": {"config": {"INFERENCE_PRECISION_HINT": "f32"}}}

pytestmark = [
    # transformers' own code and that of the runtimes, which torch and Python have deprecated parts
    # of.
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::SyntaxWarning"),
]


def needs(format: str) -> pytest.MarkDecorator:
    missing = [name for name in FORMATS[format].packages if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(
        bool(missing), reason=f"{', '.join(missing)} not installed: make export"
    )


def cases() -> Iterator[Any]:
    for format in FORMATS:
        for family in FAMILIES:
            yield pytest.param(format, family, marks=needs(format), id=f"{format}-{family}")


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def arguments(bridge: TransformerBridge, rows: int, length: int) -> dict[str, Tensor]:
    """Tokens of which the first row is padded in front."""
    torch.manual_seed(length)
    tokens = torch.randint(3, 61, (rows, length))
    mask = torch.ones_like(tokens)
    mask[0, : length // 3] = 0
    given = {"input_ids": tokens, "attention_mask": mask}
    if bridge.core.config.is_encoder_decoder:
        given["decoder_input_ids"] = torch.randint(3, 61, (rows, length // 2 + 1))
    return given


def steer(activation: Tensor, hook: object, vector: Tensor, strength: Tensor) -> Tensor:
    return activation + vector * strength


def ablate(activation: Tensor, hook: object) -> Tensor:
    return activation * torch.tensor([1.0, 0.0, 1.0, 1.0])[:, None]


@pytest.mark.parametrize(("format", "family"), list(cases()))
def test_logits_patterns_and_streams_with_and_without_interventions(
    format: str, family: str, tmp_path: Path
):
    bridge = TransformerBridge(tiny(family))
    stack = "decoder" if family == "t5" else "blocks"
    names = [
        f"{stack}.1.attn.hook_pattern",
        f"{stack}.0.hook_attn_out",
        f"{stack}.1.hook_resid_post",
    ]
    names = [name for name in names if name in bridge.hook_dict]
    at = f"{stack}.0.hook_mlp_out"
    example = arguments(bridge, 2, 6)
    # Half a minute each for ExecuTorch: there two models show that one without interventions is
    # right, too.
    plain = (
        bridge.export(example, format, capture=names)
        if format != "executorch" or family in ("gpt2", "bert")
        else None
    )
    bridge.export(
        example,
        format,
        capture=names,
        interventions=[(at, steer), (f"{stack}.1.attn.hook_z", ablate)],
        inputs={"vector": torch.zeros(32), "strength": 1.0},
        path=tmp_path / "edited",
    )
    read = ExportedModel.from_pretrained(
        tmp_path / "edited", trust_remote_code=True, **RUN.get(format, {})
    )
    if plain is not None:
        plain.to(**RUN.get(format, {}))
        assert list(plain(**example)) == [
            "logits",
            *sorted(names, key=list(bridge.hook_dict).index),
        ]
    rows = (3, 1)
    for n, length in zip(rows, (11, 5), strict=True):
        given = arguments(bridge, n, length)
        tokens, more = (
            given["input_ids"],
            {name: value for name, value in given.items() if name != "input_ids"},
        )
        vector, strength = torch.randn(32), torch.tensor(0.7)
        hooks = [(at, lambda a, hook, v=vector: a + v * 0.7), (f"{stack}.1.attn.hook_z", ablate)]
        for exported, fwd_hooks, inputs in (
            (plain, [], {}),
            (read, hooks, {"vector": vector, "strength": strength}),
        ):
            if exported is None:
                continue
            with bridge.hooks(fwd_hooks):
                logits, cache = bridge.run_with_cache(tokens, names_filter=names, **more)
            made = exported(**given, **inputs)
            torch.testing.assert_close(made["logits"], logits, rtol=0, atol=1e-4)
            for name in names:
                torch.testing.assert_close(
                    made[name], cache[name], rtol=0, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}"
                )
        assert (
            bridge(tokens, **more) - logits
        ).abs().max() > 1e-3  # the interventions do something


@pytest.mark.parametrize(
    "format", [pytest.param(name, marks=needs(name)) for name in FORMATS if name != "executorch"]
)
def test_what_an_export_says_of_itself(format: str, tmp_path: Path):
    from bridge import __version__

    bridge = TransformerBridge(tiny("gpt2"))
    bridge.export(
        arguments(bridge, 2, 6),
        format,
        capture=["blocks.0.hook_resid_post"],
        interventions=[("blocks.1.hook_mlp_out", steer)],
        inputs={"vector": torch.zeros(32), "strength": 1.0},
        path=tmp_path,
    )
    manifest = json.loads((tmp_path / "export.json").read_text())
    said = manifest["components"]["model"]["metadata"]["export_config"]["transformer_bridge"]
    assert said["version"] == __version__ and said["model"] == "GPT2LMHeadModel"
    assert said["outputs"] == {
        "logits": "batch pos d_vocab_out",
        "blocks.0.hook_resid_post": "batch pos d_model",
    }
    assert said["interventions"] == ["blocks.1.hook_mlp_out"] and said["declared_inputs"] == [
        "vector",
        "strength",
    ]
    assert said["inputs"] == {
        "input_ids": [2, 6],
        "attention_mask": [2, 6],
        "vector": [32],
        "strength": [],
    }
    if format == "onnx":
        import onnxruntime

        session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
        assert [x.name for x in session.get_inputs()] == [
            "input_ids",
            "attention_mask",
            "vector",
            "strength",
        ]
        assert [x.name for x in session.get_outputs()] == ["logits", "blocks.0.hook_resid_post"]
        assert json.loads(session.get_modelmeta().custom_metadata_map["transformer_bridge"]) == said


@pytest.mark.parametrize(
    "format", [pytest.param(name, marks=needs(name)) for name in ("dynamo", "onnx")]
)
def test_for_generation(format: str):
    bridge = TransformerBridge(tiny("llama-gqa"))
    program = bridge.program(
        capture=["blocks.1.hook_resid_post"],
        interventions=[("blocks.0.hook_resid_post", steer)],
        inputs={"vector": torch.zeros(32), "strength": 1.0},
    )
    exported = program.export_for_generation(arguments(bridge, 2, 6), format)
    assert list(exported.components) == ["prefill", "decode"]
    tokens, vector = torch.randint(3, 61, (2, 9)), torch.randn(32)
    inputs = {"vector": vector, "strength": torch.tensor(0.5)}
    mask = torch.ones_like(tokens)
    first = exported.runners["prefill"](
        input_ids=tokens[:, :8],
        attention_mask=mask[:, :8],
        position_ids=torch.arange(8).expand(2, -1),
        past_key_values=DynamicCache(config=bridge.core.config),
        **inputs,
    )
    whole = program(tokens, attention_mask=mask, **inputs)
    torch.testing.assert_close(first["logits"], whole["logits"][:, :8], rtol=0, atol=1e-4)
    second = exported.runners["decode"](
        input_ids=tokens[:, 8:],
        attention_mask=mask,
        position_ids=torch.full((2, 1), 8),
        past_key_values=first["past_key_values"],
        **inputs,
    )
    for name in ("logits", "blocks.1.hook_resid_post"):
        torch.testing.assert_close(second[name], whole[name][:, 8:], rtol=0, atol=1e-4)


def test_the_body_of_an_edit_is_exported():
    bridge = TransformerBridge(tiny("llama-gqa"))

    def body(run: Any) -> None:
        early = run["blocks.0.hook_mlp_out"]
        run["blocks.1.hook_resid_post"] += early * 2

    edit = bridge.trace_edit(body)
    exported = bridge.export(arguments(bridge, 2, 6), interventions=edit)
    given = arguments(bridge, 3, 8)
    wanted = bridge.run_with_hooks(
        given["input_ids"], fwd_hooks=edit, attention_mask=given["attention_mask"]
    )
    torch.testing.assert_close(exported(**given)["logits"], wanted, rtol=0, atol=1e-5)
    assert not torch.allclose(
        bridge(given["input_ids"], attention_mask=given["attention_mask"]), wanted
    )


def test_a_text_is_an_example_and_the_model_is_left_as_it_was():
    bridge = TransformerBridge.boot_embedded()
    before = {name: (p.data_ptr(), p.requires_grad) for name, p in bridge.core.named_parameters()}
    config = bridge.core.config.to_dict()
    exported = bridge.export("Mary and John", capture="blocks.3.hook_resid_post")
    tokens = bridge.to_tokens(
        ["The cat sat on the mat.", "Two of them went home again."], padding_side="right"
    )
    made = exported(input_ids=tokens, attention_mask=torch.ones_like(tokens))
    torch.testing.assert_close(made["logits"], bridge(tokens), rtol=0, atol=1e-5)
    assert before == {
        name: (p.data_ptr(), p.requires_grad) for name, p in bridge.core.named_parameters()
    }
    assert bridge.core.config.to_dict() == config and not bridge.core.__dict__.get("forward")
    assert torch.nn.functional.scaled_dot_product_attention.__module__ == "torch._C._nn"


@pytest.mark.parametrize(
    "format", [pytest.param(name, marks=needs(name)) for name in ("dynamo", "onnx")]
)
def test_from_the_command_line(format: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    bridge = TransformerBridge.boot_embedded().eval()
    name, at = "blocks.3.hook_resid_post", "blocks.1.hook_resid_post"
    arguments = [
        "export",
        "embedded",
        "--format",
        format,
        "--capture",
        name,
        "--steer",
        at,
        "--out",
        str(tmp_path),
    ]
    assert main(arguments) == 0
    assert f"outputs  logits, {name}" in capsys.readouterr().out
    exported = ExportedModel.from_pretrained(tmp_path, trust_remote_code=True)
    tokens = bridge.to_tokens(
        ["The cat sat on the mat.", "Two of them went home again."], padding_side="right"
    )
    vector = torch.randn(bridge.cfg.d_model)
    made = exported(
        input_ids=tokens,
        attention_mask=torch.ones_like(tokens),
        vector=vector,
        strength=torch.tensor(0.5),
    )
    with bridge.hooks([(at, lambda activation, hook: activation + 0.5 * vector)]):
        logits, cache = bridge.run_with_cache(tokens, names_filter=name)
    torch.testing.assert_close(made["logits"], logits, rtol=0, atol=1e-4)
    torch.testing.assert_close(made[name], cache[name], rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    "format", [pytest.param(name, marks=needs(name)) for name in ("dynamo", "onnx", "openvino")]
)
def test_points_inside_experts(format: str):
    bridge = TransformerBridge(tiny("mixtral-gqa"))
    names = [
        f"blocks.1.mlp.experts.{e}.hook_{part}" for e in range(4) for part in ("in", "post", "out")
    ]
    exported = bridge.export(torch.randint(3, 61, (2, 7)), format, capture=names).to(
        **RUN.get(format, {})
    )
    tokens = torch.randint(3, 61, (3, 9))
    made = exported(input_ids=tokens)
    logits, cache = bridge.run_with_cache(tokens, names_filter=names)
    torch.testing.assert_close(made["logits"], logits, rtol=0, atol=1e-4)
    for name in names:
        torch.testing.assert_close(
            made[name], cache[name], rtol=0, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_the_page():
    """The code of docs/export.md that the other tests of pages leave out, with what comes before
    it.
    """
    page = (Path(__file__).parents[2] / "docs" / "export.md").read_text()
    blocks = re.findall(r"```(?:python|py)\n(.*?)```", page, flags=re.DOTALL)
    compiled = [block for block in blocks if "MyAttention" not in block and '"onnx"' not in block]
    assert any("compile(" in block for block in compiled) and len(compiled) == 3
    exec("\n".join(compiled), {})


AFTERWARDS = """
import torch
from bridge import TransformerBridge
from tests.adapters.test_verify_all import tiny

program = TransformerBridge(tiny("llama-gqa")).program(capture=["blocks.1.attn.hook_pattern"])
tokens = torch.tensor([[5, 6, 7, 8]])
program.export({"input_ids": tokens}, "executorch", dynamic=False)
compiled = program.compile(backend="eager")
assert torch.equal(compiled(tokens)["logits"], program(tokens)["logits"])
"""


@needs("executorch")
def test_a_program_compiles_after_an_export():
    subprocess.run([sys.executable, "-c", AFTERWARDS], check=True, cwd=Path(__file__).parents[2])


@needs("onnx")
def test_the_page_s_export(tmp_path: Path):
    page = (Path(__file__).parents[2] / "docs" / "export.md").read_text()
    blocks = re.findall(r"```(?:python|py)\n(.*?)```", page, flags=re.DOTALL)
    exec(
        blocks[0] + next(block for block in blocks if '"onnx"' in block), {"folder": str(tmp_path)}
    )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("format", ["dynamo", pytest.param("onnx", marks=needs("onnx"))])
def test_every_operation_exported(format: str, name: str):
    bridge = TransformerBridge(tiny("llama-gqa"))
    point, operation, change = operations(32, 4)[name]
    same_length = name.startswith("Replace")
    exported = bridge.export(
        torch.randint(3, 61, (2, LENGTH)),
        format,
        interventions=[(point, operation)],
        dynamic=not same_length,
    )
    for length in (LENGTH,) if same_length else (LENGTH, LENGTH + 4):
        tokens = torch.randint(3, 61, (2, length))
        wanted = bridge.run_with_hooks(tokens, fwd_hooks=[(point, by_hand(change))])
        torch.testing.assert_close(exported(input_ids=tokens)["logits"], wanted, rtol=0, atol=1e-4)
        assert (wanted - bridge(tokens)).abs().max() > 1e-3
