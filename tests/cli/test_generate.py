"""``python -m bridge generate``, and interventions from a file in the other commands."""

from __future__ import annotations

import pytest
import torch

from bridge import TransformerBridge
from bridge.cli.main import main
from bridge.interventions import Add, Interventions, Zero
from tests.conftest import tiny

POINT = "blocks.1.hook_resid_post"
TEXTS = ["When Mary and John went to the store, John gave a drink to", "Mary and"]


@pytest.fixture
def bridge():
    return TransformerBridge.boot_embedded()


@pytest.fixture
def saved(bridge, tmp_path):
    made = Interventions(
        [(POINT, Add(torch.arange(128.0).sin(), 2.0)), ("blocks.2.attn.hook_z", Zero(heads=1))],
        bridge,
    )
    made.save(tmp_path / "steer.safetensors")
    return made, str(tmp_path / "steer.safetensors")


def test_generate(bridge, saved, capsys):
    made, file = saved
    assert (
        main(["generate", "embedded", *TEXTS, "--interventions", file, "--max-new-tokens", "4"])
        == 0
    )
    with bridge.hooks(fwd_hooks=made):
        wanted = bridge.generate(TEXTS, 4, do_sample=False, verbose=False)
    steered = capsys.readouterr().out
    assert steered.splitlines() == wanted
    assert main(["generate", "embedded", *TEXTS, "--max-new-tokens", "4"]) == 0
    assert capsys.readouterr().out != steered


def test_harvest(bridge, saved, tmp_path):
    pytest.importorskip("pyarrow")
    from tests.harvest.common import numbers, read

    made, file = saved
    (tmp_path / "a.txt").write_text(TEXTS[0])
    end = "blocks.3.hook_resid_post"
    given = [
        "--points",
        end,
        "--out",
        str(tmp_path / "out"),
        "--dtype",
        "float32",
        "--context-size",
        "8",
        "--quiet",
    ]
    assert (
        main(["harvest", "embedded", str(tmp_path / "a.txt"), *given, "--interventions", file]) == 0
    )
    tokens = bridge.to_tokens(TEXTS[0])[:, :8]
    with bridge.hooks(fwd_hooks=made):
        _, cache = bridge.run_with_cache(tokens, names_filter=end)
    found = torch.tensor(numbers(read(tmp_path / "out"), end))[:8]
    torch.testing.assert_close(found.float(), cache[end][0], rtol=1e-6, atol=2e-5)


@pytest.mark.parametrize("command", ["generate", "export", "harvest"])
def test_a_file_of_another_model_is_refused_in_one_line(command, saved, tmp_path, capsys):
    tiny("llama").save_pretrained(tmp_path / "model")
    (tmp_path / "a.txt").write_text(TEXTS[0])
    more = {
        "generate": ["x"],
        "export": ["--out", str(tmp_path / "out")],
        "harvest": [str(tmp_path / "a.txt"), "--points", POINT, "--out", str(tmp_path / "out")],
    }[command]
    assert main([command, str(tmp_path / "model"), *more, "--interventions", saved[1]]) == 2
    said = capsys.readouterr().err
    assert (
        said.startswith("error: these interventions were made on")
        and "d_model 128 there, 32 here" in said
    )
    assert not (tmp_path / "out").exists()
    assert main([command, "embedded", *more, "--interventions", str(tmp_path / "nowhere")]) == 2
    assert "there is no file" in capsys.readouterr().err
