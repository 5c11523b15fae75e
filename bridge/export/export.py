"""Exporting a program."""

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
from adapters.views.attention import KernelArguments
from bridge.export.formats import Example, Format, check_can_take, example_of, for_executorch, format_of
from bridge.taps.taps import PatchedFunction, calling_instead
from bridge.version import __version__

# ----------------------------------------------------------------------------------------------------------------------
# Attention while a program is traced for another runtime.
#
# transformers' exporters put a function of their own in the place of `scaled_dot_product_attention`, which turns
# masks of truth values into numbers to be added. A query that may attend to nothing (padding in front) then attends
# to everything alike, while torch's kernel gives it zero, and a pattern would be another one. What comes before their
# function shows the call to the taps of the program as the model made it, and puts the zeros back. It does so in the
# context that traces, and in no other: a thread that calls attention meanwhile calls what was there.
# ----------------------------------------------------------------------------------------------------------------------


_NAME = "scaled_dot_product_attention"


#: What sees the attention that a tapped module is computing now, if any does.
UnderWay = Callable[[], SeesAttention | None]


@contextmanager
def attention_as_called(under_way: UnderWay) -> Iterator[None]:
    """While the body of a ``with`` statement runs, its calls of attention are seen as the model makes them.

    Args:
        under_way: finds what sees them.
    """

    def instead(own: Callable[..., Any], name: str, args: Args, kwargs: Kwargs) -> object:
        if name != _NAME:
            return own(*args, **kwargs)
        given, watch = KernelArguments(*args, **kwargs), under_way()
        kernel = _with_zeros(own)
        return given.of(kernel) if watch is None else watch.scaled_dot_product(kernel, given)

    patched = PatchedFunction.install(vars(functional), _NAME)
    try:
        with calling_instead(instead):
            yield
    finally:
        patched.uninstall()


def _with_zeros(theirs: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Their function, whose result is zero where a query attends to nothing."""

    def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *args: Any, **kwargs: Any) -> Tensor:
        made = theirs(query, key, value, mask, *args, **kwargs)
        if isinstance(mask, Tensor) and mask.dtype == torch.bool:
            attends = mask.to(made.dtype).sum(-1, keepdim=True) > 0
            made = torch.where(attends, made, torch.zeros((), dtype=made.dtype, device=made.device))
        return made

    return attend


# ----------------------------------------------------------------------------------------------------------------------
# The module that is given to transformers' exporters.
# ----------------------------------------------------------------------------------------------------------------------


class Exportable(Protocol):
    """A program, as export needs it.

    Attributes:
        model: the module objects.
        inputs: an example of each declared input.
        captured, changed: names of hook points.
    """

    model: nn.Module
    inputs: dict[str, Tensor]
    captured: tuple[str, ...]

    @property
    def axes(self) -> dict[str, str]:
        """The axes of what it captures, by name."""

    @property
    def one_by_one(self) -> bool:
        """Numbers of rows depend on the values."""

    def attention_under_way(self) -> SeesAttention | None:
        """What sees the attention that a tapped module is computing now."""

    @property
    def changed(self) -> tuple[str, ...]:
        """The hook points with interventions."""

    @property
    def core(self) -> PreTrainedModel:
        """The Hugging Face model among the module objects."""

    @property
    def config(self) -> PreTrainedConfig:
        """Its configuration."""

    def generating(self, inputs: Mapping[str, object]) -> PreTrainedModel:
        """What runs it in `generate`."""

    def run_lowered(self, input_ids: Tensor | None, inputs: Mapping[str, Tensor], given: Example) -> Example:
        """The run itself."""


class NamedArguments(nn.Module):
    """A program whose every argument has a name, and nothing else of the program.

    Args:
        program: the program.
        format: the name of the format that it is traced for.
    """

    def __init__(self, program: Exportable, format: str) -> None:
        super().__init__()
        self.model = program.model
        self.config = program.config
        self.training = program.model.training
        self._run, self._declared, self._format = program.run_lowered, tuple(program.inputs), format
        self._attention = program.attention_under_way

    def forward(self, **given: Any) -> Example:
        """Runs the program."""
        inputs = {name: given.pop(name) for name in self._declared}
        tokens = given.pop("input_ids", None)
        if self._format == "dynamo":  # attention stays torch's own
            return self._run(tokens, inputs, given)
        others = Watch.calling(for_executorch) if self._format == "executorch" else nullcontext()
        with attention_as_called(self._attention), others:
            return self._run(tokens, inputs, given)


@contextmanager
def restoring_model(core: PreTrainedModel, experts: str | None) -> Iterator[None]:
    """Puts back what exporters change in a model: its mode, what wants gradients, how experts are computed.

    Args:
        core: the Hugging Face model among a program's module objects.
        experts: how experts are to be computed meanwhile; None: as they are.
    """
    wanted = [(parameter, parameter.requires_grad) for parameter in core.parameters()]
    before: Any = core.get_experts_implementation()
    settable = experts is not None and core._can_set_experts_implementation()
    try:
        if settable and experts is not None:
            core.set_experts_implementation(experts)
        with torch.no_grad():
            yield
    finally:
        if settable:
            core.set_experts_implementation(before)
        for parameter, wants in wanted:
            parameter.requires_grad_(wants)


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
    with restoring_model(program.core, _experts(found)), _suggesting_other_formats(found, program.core):
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
    with restoring_model(program.core, _experts(found)), _suggesting_other_formats(found, program.core):
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


@contextmanager
def _suggesting_other_formats(format: Format, core: PreTrainedModel) -> Iterator[None]:
    """Adds to an error inside of a ``with`` statement what the other formats would do.

    Args:
        format: the format that is tried.
        core: the Hugging Face model.
    """
    try:
        yield
    except BaseException as error:
        others = "format='dynamo' takes most models" if format.name != "dynamo" else "program.compile() may"
        error.add_note(
            f"transformer-bridge: {type(core).__name__} could not be exported with format={format.name!r}; {others}, "
            "and docs/export.md says what each format takes"
        )
        raise
