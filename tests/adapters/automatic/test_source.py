"""The source of an inferred adapter is a file that declares the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from adapters import registry
from adapters.architecture import Architecture
from adapters.automatic.automatic import infer, source_of
from bridge.cli.main import main
from tests.tiny_models import tiny_model


def declared_by(source: str, model_type: str, tmp_path: Path) -> Architecture:
    """What a file declares for a tiny model, when it is imported."""
    (tmp_path / "adapter_of_mine.py").write_text(source)
    namespace: dict[str, object] = {"__name__": "adapter_of_mine"}
    exec(compile(source, str(tmp_path / "adapter_of_mine.py"), "exec"), namespace)
    return registry.declaration_for(tiny_model(model_type))


@pytest.mark.parametrize(
    ("model_type", "name"),
    [
        ("olmo2", "Olmo2"),
        ("deepseek_v3", "DeepseekV3"),
        ("falcon", "Falcon"),
        ("granite", "Granite"),
        ("mamba2", "Mamba2"),
        ("roberta", "Roberta"),
        ("bamba", "Bamba"),
    ],
)
def test_the_source_declares_what_was_inferred(model_type: str, name: str, tmp_path: Path) -> None:
    found = infer(tiny_model(model_type)).architecture
    source = source_of(found, f"{name}PreTrainedModel", name)
    assert max(map(len, source.splitlines())) <= 120
    assert declared_by(source, model_type, tmp_path) == found


def test_the_command_prints_it_with_its_verification(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_model("olmo").save_pretrained(tmp_path / "model")
    assert main(["declare", str(tmp_path / "model")]) == 0
    said = capsys.readouterr().out
    assert (
        '@register("OlmoPreTrainedModel")\ndef olmo(config: PreTrainedConfig) -> Architecture:'
        in said
    )
    assert "One was inferred from a run" in said and ": verified\n#   ok " in said
