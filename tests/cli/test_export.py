"""``python -m bridge export``."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bridge import TransformerBridge
from bridge.cli import main as cli
from bridge.interventions import Add, Interventions, Zero


@pytest.mark.unchecked
def test_a_mistake_is_said_in_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    assert (
        cli.main(
            ["export", "embedded", "--capture", "blocks.3.hook_resid_pots", "--out", str(tmp_path)]
        )
        == 2
    )
    said = capsys.readouterr().err
    assert said.startswith("error: there is no hook point") and "blocks.3.hook_resid_post" in said
    assert cli.main(["export", str(tmp_path / "nowhere"), "--out", str(tmp_path)]) == 2
    assert list(tmp_path.iterdir()) == []


@torch.no_grad()
def test_what_is_exported_has_the_interventions_of_the_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    bridge = TransformerBridge.boot_embedded()
    vector = bridge.tokens_to_residual_directions(" Anna")
    hooks = Interventions(
        [("blocks.3.hook_resid_post", Add(vector, 20.0)), ("blocks.1.attn.hook_z", Zero(heads=0))],
        bridge,
    )
    hooks.save(tmp_path / "edit.safetensors")
    given = [
        "--interventions",
        str(tmp_path / "edit.safetensors"),
        "--capture",
        "blocks.2.hook_resid_post",
    ]
    assert cli.main(["export", "embedded", *given, "--static", "--out", str(tmp_path / "out")]) == 0
    assert "outputs  logits, blocks.2.hook_resid_post" in capsys.readouterr().out
    tokens = bridge.to_tokens("When Mary and John went to the store").expand(2, -1).contiguous()
    exported = torch.export.load(next((tmp_path / "out").glob("*.pt2"))).module()
    found = exported(input_ids=tokens, attention_mask=torch.ones_like(tokens))
    with bridge.hooks(fwd_hooks=hooks):
        right, cache = bridge.run_with_cache(tokens, names_filter="blocks.2.hook_resid_post")
    assert torch.allclose(found["logits"], right, atol=1e-4) and not torch.allclose(
        right, bridge(tokens), atol=1
    )
    assert torch.allclose(
        found["blocks.2.hook_resid_post"], cache["blocks.2.hook_resid_post"], atol=1e-4
    )


def test_a_file_of_something_else_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    (tmp_path / "no.safetensors").write_bytes(b"no file of safetensors")
    given = ["--interventions", str(tmp_path / "no.safetensors"), "--out", str(tmp_path / "out")]
    assert cli.main(["export", "embedded", *given]) == 2
    assert capsys.readouterr().err.startswith("error:") and not (tmp_path / "out").exists()
