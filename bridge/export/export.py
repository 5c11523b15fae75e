"""Exporting a program."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from adapters.imports.versions import ExportedModel, HfExporter, decompose_for_generation
from bridge.export.example import Example, example_of
from bridge.export.formats import Format, check_can_take, format_of
from bridge.export.traced import Exportable, NamedArguments, restoring_model
from bridge.version import __version__

#: Where in an export's metadata ours is.
KEY = "transformer_bridge"


def export_program(
    program: Exportable,
    example: Tensor | Mapping[str, object],
    format: str,
    dynamic: bool,
    path: str | Path | None,
    options: Example,
) -> ExportedModel:
    """A program for another runtime; see `Program.export`.

    Args:
        program: the program.
        example, format, dynamic, path, options: as there.
    """
    found = format_of(format)
    check_can_take(found, program.core, program.one_by_one, options)
    exporter = found.exporter()
    arguments, shapes = example_of(example, program.inputs, dynamic)
    config = _config(exporter, found, {"dynamic": dynamic, **shapes, **options})
    with restoring_model(program.core, _experts(found)), _SuggestOtherFormats(found, program.core):
        traced: Any = NamedArguments(program, found.name)  # what exporters say they take is a PreTrainedModel
        exported = exporter.export(traced, arguments, config)
    _describe(exported, program, found)
    if path is not None:
        exported.save_pretrained(path)
    return exported


def export_for_generation(
    program: Exportable,
    example: Tensor | Mapping[str, object],
    format: str,
    dynamic: bool,
    path: str | Path | None,
    generation_config: GenerationConfig | None,
    multi_token_decode: bool,
    options: Example,
) -> ExportedModel:
    """A program for another runtime, for the prompt and for one token more; see `Program.export_for_generation`.

    Args:
        program: the program.
        example, format, dynamic, path, generation_config, multi_token_decode, options: as there.
    """
    found = format_of(format)
    check_can_take(found, program.core, program.one_by_one, options)
    exporter = found.exporter()
    arguments, _ = example_of(example, {}, dynamic)
    config = _config(exporter, found, {"dynamic": dynamic, **options})
    components = {}
    with restoring_model(program.core, _experts(found)), _SuggestOtherFormats(found, program.core):
        steps = decompose_for_generation(
            program.generating(program.inputs), arguments, generation_config, multi_token_decode
        )
        for name, (_, given) in steps.items():
            traced: Any = NamedArguments(program, found.name)
            made = exporter.export(traced, given | program.inputs, config)
            components[name] = made.components["model"]
    exported = ExportedModel(
        components, exporter.export_format, program.config, generation_config or program.core.generation_config
    )
    _describe(exported, program, found)
    if path is not None:
        exported.save_pretrained(path)
    return exported


def _config(exporter: HfExporter, format: Format, options: Example) -> Any:
    """The exporter's configuration.

    Raises:
        TypeError: an option that it has not.
    """
    known = [field.name for field in fields(exporter.config_class)]
    for name in options:
        if name not in known:
            raise TypeError(f"{name!r} is no option of format={format.name!r}, which takes {', '.join(known)}")
    return exporter.config_class(**options)


def _experts(format: Format) -> str | None:
    """How experts are computed while a program is traced: ExecuTorch has no grouped multiplication."""
    return "batched_mm" if format.name == "executorch" else None


def _describe(exported: ExportedModel, program: Exportable, format: Format) -> None:
    """Writes down what an exported program takes and returns, and what made it."""
    for component in exported.components.values():
        kwargs: Example = component.metadata.kwargs
        described = {
            "version": __version__,
            "model": type(program.core).__name__,
            "inputs": {name: kwargs[name].get("shape") for name in kwargs},
            "declared_inputs": list(program.inputs),
            "outputs": {"logits": "batch pos d_vocab_out", **program.axes},
            "interventions": list(program.changed),
        }
        component.metadata.export_config[KEY] = described
        if format.name == "onnx":
            component.program.metadata_props[KEY] = json.dumps(described)
        elif format.name == "openvino":
            component.program.set_rt_info(json.dumps(described), KEY)


class _SuggestOtherFormats:
    """Adds to an error inside of a ``with`` statement what the other formats would do.

    Args:
        format: the format that is tried.
        core: the Hugging Face model.
    """

    def __init__(self, format: Format, core: PreTrainedModel) -> None:
        self._format, self._core = format, core

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, where: TracebackType | None) -> None:
        if error is not None:
            others = "format='dynamo' takes most models" if self._format.name != "dynamo" else "program.compile() may"
            error.add_note(
                f"transformer-bridge: {type(self._core).__name__} could not be exported with "
                f"format={self._format.name!r}; {others}, and docs/export.md says what each format takes"
            )
