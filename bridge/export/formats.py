"""The export formats, the packages that each needs, and the limits of each."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import BaseTorchFunctionMode

from adapters.imports import HfExporter, get_exporter_class
from adapters.views import Args


@dataclass(frozen=True)
class Format:
    """An export format.

    Attributes:
        name: the name that `export` takes.
        packages: the packages it needs besides torch and transformers, by import name.
        extra: the extra of this library that installs them; "" if none is needed.
    """

    name: str
    packages: tuple[str, ...] = ()
    extra: str = ""

    def exporter(self) -> HfExporter:
        """Return transformers' exporter for the format.

        Raises:
            ImportError: a package is not installed.
        """
        missing = [name for name in self.packages if importlib.util.find_spec(name) is None]
        if missing:
            verb = "is" if len(missing) == 1 else "are"
            raise ImportError(
                f"format={self.name!r} needs {', '.join(missing)}, which {verb} not installed: pip"
                f" install 'transformer-bridge[{self.extra}]'"
            )
        _list_torch_functions()
        exporter: HfExporter = get_exporter_class(self.name)()
        return exporter


@functools.cache
def _list_torch_functions() -> None:
    """Make torch's compiler list torch's functions and tensor methods once, before they are
    replaced.

    transformers' exporters replace some of them while tracing. Lists made then would lack torch's
    own functions for the rest of the process, and no program with taps on them could be compiled.
    """

    def look(x: Tensor) -> Tensor:
        with BaseTorchFunctionMode():
            return x.view(-1)

    torch.compile(look, backend="eager")(torch.ones(1, device="cpu"))


FORMATS = {
    "dynamo": Format("dynamo"),
    "onnx": Format("onnx", ("onnx", "onnxscript", "onnxruntime"), "onnx"),
    "executorch": Format("executorch", ("executorch",), "executorch"),
    "openvino": Format("openvino", ("openvino",), "openvino"),
}


def format_of(name: str) -> Format:
    """Return the format of this name.

    Raises:
        ValueError: there is no such format.
    """
    if name not in FORMATS:
        raise ValueError(f"format is {name!r}; it must be one of {', '.join(map(repr, FORMATS))}")
    return FORMATS[name]


def check_can_take(
    format: Format, core: nn.Module, one_by_one: bool, options: dict[str, object]
) -> None:
    """Check that a format supports a program, before anything is traced.

    Args:
        format: the format.
        core: the Hugging Face model.
        one_by_one: experts run one after the other, with row counts that depend on the values.
        options: options of the exporter's configuration.

    Raises:
        ValueError: it does not support it.
    """
    parameter = next(core.parameters())
    if parameter.device.type == "meta":
        raise ValueError(
            "the model has no weights (load_weights=False), so there is nothing to export"
        )
    if format.name != "executorch":
        return
    if one_by_one:
        raise ValueError(
            "points inside experts have a row for each token that is sent there, a number that"
            " depends on the values, which format='executorch' cannot have; format='dynamo' and"
            " format='onnx' can"
        )
    if options.get("backend", "xnnpack") != "xnnpack" or parameter.device.type != "cpu":
        raise ValueError(
            "transformers' ExecuTorch exporter moves the model's own parameters to another device,"
            " or another type, for that: load the model on the CPU, with backend='xnnpack', or"
            " export a model of its own with transformers.exporters.ExecutorchExporter"
        )


# --------------------------------------------------------------------------------------------------
# The example inputs for tracing.
# --------------------------------------------------------------------------------------------------


#: A function of unknown type.
AnyFunction = Callable[..., Any]
#: The example inputs for tracing, and their dynamic axes.
Example = dict[str, Any]


def example_of(
    example: Tensor | Mapping[str, object], inputs: Mapping[str, Tensor], dynamic: bool
) -> tuple[Example, Example]:
    """Return the arguments to trace with, and their dynamic axes.

    Args:
        example: tokens ``[batch, pos]``, or the model's arguments by name.
        inputs: examples of the declared inputs.
        dynamic: whether axes may have other sizes.

    Raises:
        TypeError: the example is neither.
        ValueError: it has one position, so the exported program would accept only one.
    """
    if isinstance(example, Tensor):
        example = {"input_ids": example}
    if not isinstance(example, Mapping) or not example:
        raise TypeError(
            f"the example is {type(example).__name__}; it must be tokens [batch, pos], or a mapping"
            " of the model's arguments, such as a tokenizer gives; bridge.to_tokens(text) makes"
            " tokens of text"
        )
    arguments: Example = {name: value for name, value in example.items() if value is not None}
    declared = [name for name in arguments if name in inputs]
    if declared:
        raise TypeError(
            f"{', '.join(declared)}: an example of a declared input is given where the program is"
            " made"
        )
    if not dynamic:
        return {**arguments, **inputs}, {}
    _repeat_single_rows(arguments)
    for name in ("input_ids", "decoder_input_ids"):
        tokens = arguments.get(name)
        if isinstance(tokens, Tensor) and tokens.shape[1] < 2:
            raise ValueError(
                f"{name} of the example has one position; with two or more, the length may change"
            )
    arguments |= inputs
    shapes = {}
    for name, value in arguments.items():
        if not isinstance(value, Tensor):
            return arguments, {}
        shapes[name] = dict.fromkeys(range(value.ndim), torch.export.Dim.AUTO)
    return arguments, {"dynamic_shapes": shapes}


def _repeat_single_rows(arguments: Example) -> None:
    """Repeat arguments of one row to two: torch.export treats an axis of length one as static."""
    batched = {}
    for name, value in arguments.items():
        if isinstance(value, Tensor) and value.ndim > 1:
            batched[name] = value
    if batched and len(next(iter(batched.values()))) != 1:
        return
    for name, value in batched.items():
        if len(value) == 1:
            arguments[name] = torch.cat([value, value])


# --------------------------------------------------------------------------------------------------
# ExecuTorch 1.5 computes some functions incorrectly; here they are rewritten in operations that it
# handles.
#
# - Its check of the lowered program reads the length of a split's first tensor, which fixes the
#   batch size to the example's (``executorch/exir/verification/arg_validator.py``): GPT-2 and NeoX
#   then run only with that size.
# - XNNPACK computes GELU with the error function, even if the model uses the tanh approximation
#   (Gemma).
# --------------------------------------------------------------------------------------------------


def for_executorch(func: AnyFunction, args: Args, kwargs: Example) -> Any:
    """Call a function with tensor splits as slices and tanh-GELU as elementary operations, for
    ExecuTorch.
    """
    return _IN_OTHER_WORDS.get(func, func)(*args, **kwargs)


def _split(
    tensor: Tensor, split_size_or_sections: int | Sequence[int], dim: int = 0
) -> tuple[Tensor, ...]:
    total = tensor.shape[dim]
    if not isinstance(total, int):  # it may have any size, and so any number of parts
        return tensor.split(split_size_or_sections, dim)
    if isinstance(split_size_or_sections, Sequence):
        sizes = list(split_size_or_sections)
    else:
        size = split_size_or_sections
        sizes = [min(size, total - start) for start in range(0, total, size)]
    parts = []
    start = 0
    for size in sizes:
        parts.append(tensor.narrow(dim, start, size))
        start += size
    return tuple(parts)


def _chunk(input: Tensor, chunks: int, dim: int = 0) -> tuple[Tensor, ...]:
    total = input.shape[dim]
    if not isinstance(total, int):
        return input.chunk(chunks, dim)
    return _split(input, -(-total // chunks), dim)


def _gelu(input: Tensor, approximate: str = "none") -> Tensor:
    if approximate != "tanh":
        return functional.gelu(input, approximate=approximate)
    inner = input + 0.044715 * input * input * input
    return 0.5 * input * (1 + torch.tanh(math.sqrt(2 / math.pi) * inner))


_IN_OTHER_WORDS: dict[AnyFunction, AnyFunction] = {
    torch.split: _split,
    Tensor.split: _split,
    torch.chunk: _chunk,
    Tensor.chunk: _chunk,
    functional.gelu: _gelu,
}
