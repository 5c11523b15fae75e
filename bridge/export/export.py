"""Export a program."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import fields
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

from adapters.imports import ExportedModel, HfExporter, decompose_for_generation
from adapters.observe.observe import SeesAttention, Watch
from adapters.views import Args, Kwargs
from adapters.views.heads import KernelArguments
from bridge.export.formats import (
    Example,
    Format,
    check_can_take,
    example_of,
    for_executorch,
    format_of,
)
from bridge.taps.taps import INSTEAD, PatchedFunction
from bridge.version import __version__

# --------------------------------------------------------------------------------------------------
# Attention while a program is traced for another runtime.
#
# transformers' exporters replace `scaled_dot_product_attention` with a function that converts
# boolean masks to additive ones. A query with nothing to attend to (left-padded) then attends to
# everything alike, while torch's kernel returns zero, so the pattern would differ. Our wrapper
# shows the original call to the program's taps and restores the zeros. It is active only in the
# context that traces: another thread that calls attention meanwhile calls the original function.
# --------------------------------------------------------------------------------------------------


_NAME = "scaled_dot_product_attention"


@contextmanager
def attention_as_called(under_way: Callable[[], SeesAttention | None]) -> Iterator[None]:
    """Show taps the attention calls that the model makes inside the ``with`` statement, before
    exporters change them.

    Args:
        under_way: returns the watch on the attention that a tapped module is currently computing,
            if any.
    """

    def instead(own: Callable[..., Any], name: str, args: Args, kwargs: Kwargs) -> object:
        if name != _NAME:
            return own(*args, **kwargs)
        arguments = KernelArguments(*args, **kwargs)
        kernel = _with_zeros(own)
        watch = under_way()
        if watch is None:
            return arguments.of(kernel)
        return watch.scaled_dot_product(kernel, arguments)

    restore = PatchedFunction.install(vars(functional), _NAME, instead)
    before = INSTEAD.set(instead)
    try:
        yield
    finally:
        INSTEAD.reset(before)
        restore()


def _with_zeros(theirs: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap the exporters' function so that queries with nothing to attend to give zero."""

    def attend(
        query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        z = theirs(query, key, value, mask, *args, **kwargs)
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
            return z
        attends = mask.to(z.dtype).sum(-1, keepdim=True) > 0
        zero = torch.zeros((), dtype=z.dtype, device=z.device)
        return torch.where(attends, z, zero)

    return attend


# --------------------------------------------------------------------------------------------------
# The module that transformers' exporters receive.
# --------------------------------------------------------------------------------------------------


class _Exportable(Protocol):
    """The interface of a program that export needs.

    Attributes:
        model: the module objects.
        inputs: an example of each declared input.
        captured, changed: the names of hook points.
    """

    model: nn.Module
    inputs: dict[str, Tensor]
    captured: tuple[str, ...]

    @property
    def axes(self) -> dict[str, str]:
        """Return the axes of the captured activations, by name."""

    @property
    def one_by_one(self) -> bool:
        """Tell whether experts run one after the other, with row counts that depend on the
        values."""

    def attention_under_way(self) -> SeesAttention | None:
        """Return the watch on the attention that a tapped module is currently computing."""

    @property
    def changed(self) -> tuple[str, ...]:
        """Return the hook points with interventions."""

    @property
    def core(self) -> PreTrainedModel:
        """Return the Hugging Face model among the module objects."""

    @property
    def config(self) -> PreTrainedConfig:
        """Return the model's configuration."""

    def generating(self, inputs: Mapping[str, object]) -> PreTrainedModel:
        """Return a model that runs the program in `generate`."""

    def run_lowered(
        self, input_ids: Tensor | None, inputs: Mapping[str, Tensor], arguments: Example, /
    ) -> Example:
        """Run the program."""


class _NamedArguments(nn.Module):
    """A program as a module with only named arguments and no other state.

    Args:
        program: the program.
        format: the name of the export format.
    """

    def __init__(self, program: _Exportable, format: str) -> None:
        super().__init__()
        self.model = program.model
        self.config = program.config
        self.training = program.model.training
        self._run, self._declared, self._format = program.run_lowered, tuple(program.inputs), format
        self._attention = program.attention_under_way

    def forward(self, **arguments: Any) -> Example:
        """Run the program."""
        inputs = {name: arguments.pop(name) for name in self._declared}
        tokens = arguments.pop("input_ids", None)
        if self._format == "dynamo":  # attention stays torch's own
            return self._run(tokens, inputs, arguments)
        others = Watch.calling(for_executorch) if self._format == "executorch" else nullcontext()
        with attention_as_called(self._attention), others:
            return self._run(tokens, inputs, arguments)


#: The key of our entry in an export's metadata.
KEY = "transformer_bridge"


def export_program(
    program: _Exportable,
    example: Tensor | Mapping[str, object],
    format: str,
    dynamic: bool,
    path: str | Path | None,
    options: Example,
) -> ExportedModel:
    """Export a program to another runtime; see `Program.export`.

    Args:
        program: the program.
        example, format, dynamic, path, options: as for `Program.export`.
    """
    chosen, exporter = _exporter(program, format, options)
    arguments, shapes = example_of(example, program.inputs, dynamic)
    config = _config(exporter, chosen, {"dynamic": dynamic, **shapes, **options})
    with _restoring_model(program.core, chosen):
        traced: Any = _NamedArguments(program, format)  # exporters declare a PreTrainedModel
        exported = exporter.export(traced, arguments, config)
    return _described(exported, program, chosen, path)


def export_for_generation(
    program: _Exportable,
    example: Tensor | Mapping[str, object],
    format: str,
    dynamic: bool,
    path: str | Path | None,
    generation_config: GenerationConfig | None,
    multi_token_decode: bool,
    options: Example,
) -> ExportedModel:
    """Export a program to another runtime, for the prompt and for each further token; see
    `Program.export_for_generation`.

    Args:
        program: the program.
        example, format, dynamic, path, generation_config, multi_token_decode, options: as for
            `Program.export_for_generation`.
    """
    chosen, exporter = _exporter(program, format, options)
    arguments, _ = example_of(example, {}, dynamic)
    config = _config(exporter, chosen, {"dynamic": dynamic, **options})
    components = {}
    with _restoring_model(program.core, chosen):
        steps = decompose_for_generation(
            program.generating(program.inputs), arguments, generation_config, multi_token_decode
        )
        for name, (_, step_arguments) in steps.items():
            traced: Any = _NamedArguments(program, format)
            step = exporter.export(traced, step_arguments | program.inputs, config)
            components[name] = step.components["model"]
    exported = ExportedModel(
        components,
        exporter.export_format,
        program.config,
        generation_config or program.core.generation_config,
    )
    return _described(exported, program, chosen, path)


def _exporter(program: _Exportable, format: str, options: Example) -> tuple[Format, HfExporter]:
    """Return a format and its exporter; check that they take the program."""
    chosen = format_of(format)
    check_can_take(chosen, program.core, program.one_by_one, options)
    return chosen, chosen.exporter()


def _config(exporter: HfExporter, format: Format, options: Example) -> Any:
    """Return the exporter's configuration.

    Raises:
        TypeError: an unknown option.
    """
    known = [field.name for field in fields(exporter.config_class)]
    for name in options:
        if name not in known:
            raise TypeError(
                f"format={format.name!r} has no option {name!r}; it takes {', '.join(known)}"
            )
    return exporter.config_class(**options)


def _described(
    exported: ExportedModel, program: _Exportable, format: Format, path: str | Path | None
) -> ExportedModel:
    """Describe the inputs, outputs and origin of an exported program in it, and save it."""
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
    if path is not None:
        exported.save_pretrained(path)
    return exported


@contextmanager
def _restoring_model(core: PreTrainedModel, format: Format) -> Iterator[None]:
    """Restore, on exit, what exporters change in a model: its mode, `requires_grad`, and the
    experts' implementation. Add a note to an error that tells whether other formats would work.

    Args:
        core: the Hugging Face model among a program's module objects.
        format: the format being exported.
    """
    gradients = [(parameter, parameter.requires_grad) for parameter in core.parameters()]
    experts: Any = core.get_experts_implementation()
    # ExecuTorch has no grouped matrix multiplication.
    set_experts = format.name == "executorch" and core._can_set_experts_implementation()
    try:
        if set_experts:
            core.set_experts_implementation("batched_mm")
        with torch.no_grad():
            yield
    except BaseException as error:
        others = "format='dynamo' takes most models"
        if format.name == "dynamo":
            others = "program.compile() may"
        error.add_note(
            f"transformer-bridge: {type(core).__name__} could not be exported with"
            f" format={format.name!r}; {others}, and docs/export.md says what each format takes"
        )
        raise
    finally:
        if set_experts:
            core.set_experts_implementation(experts)
        for parameter, requires_grad in gradients:
            parameter.requires_grad_(requires_grad)
