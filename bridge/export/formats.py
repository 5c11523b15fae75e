"""The formats, what has to be installed for each, and what each cannot take."""

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
    """One of the formats.

    Attributes:
        name: as `export` takes it.
        packages: what it needs besides torch and transformers, by their names for import.
        extra: of this library, which installs them; "" where nothing is needed.
    """

    name: str
    packages: tuple[str, ...] = ()
    extra: str = ""

    def exporter(self) -> HfExporter:
        """transformers' exporter for it.

        Raises:
            ImportError: something is not installed.
        """
        missing = [name for name in self.packages if importlib.util.find_spec(name) is None]
        if missing:
            raise ImportError(
                f"format={self.name!r} needs {', '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not "
                f"installed: pip install 'transformer-bridge[{self.extra}]'"
            )
        _list_torch_functions()
        made: HfExporter = get_exporter_class(self.name)()
        return made


@functools.cache
def _list_torch_functions() -> None:
    """Lets torch's compiler list torch's functions and the methods of tensors, once, while they are torch's own.

    transformers' exporters put others in their place as they trace. From lists that are made then, torch's own are
    missing for the rest of the process, and no program that watches them could be compiled.
    """

    def look(x: Tensor) -> Tensor:
        with BaseTorchFunctionMode():
            return x.view(-1)

    torch.compile(look, backend="eager")(torch.ones(1))


FORMATS = {
    "dynamo": Format("dynamo"),
    "onnx": Format("onnx", ("onnx", "onnxscript", "onnxruntime"), "onnx"),
    "executorch": Format("executorch", ("executorch",), "executorch"),
    "openvino": Format("openvino", ("openvino",), "openvino"),
}


def format_of(name: str) -> Format:
    """The format of this name.

    Raises:
        ValueError: there is none.
    """
    if name not in FORMATS:
        raise ValueError(f"format is {name!r}; it must be one of {', '.join(map(repr, FORMATS))}")
    return FORMATS[name]


def check_can_take(format: Format, core: nn.Module, one_by_one: bool, options: dict[str, object]) -> None:
    """Refuses what a format cannot take, before anything is traced.

    Args:
        format: the format.
        core: the Hugging Face model.
        one_by_one: experts are computed one after the other, with numbers of rows that depend on the values.
        options: of the exporter's configuration.

    Raises:
        ValueError: it cannot.
    """
    parameter = next(core.parameters())
    if parameter.device.type == "meta":
        raise ValueError("the model has no weights (load_weights=False), so there is nothing to export")
    if one_by_one and format.name == "executorch":
        raise ValueError(
            "points inside experts have a row for each token that is sent there, a number that depends on the values, "
            "which format='executorch' cannot have; format='dynamo' and format='onnx' can"
        )
    if format.name == "executorch" and (
        options.get("backend", "xnnpack") != "xnnpack" or parameter.device.type != "cpu"
    ):
        raise ValueError(
            "transformers' ExecuTorch exporter moves the model's own parameters to another device, or another type, "
            "for that: load the model on the CPU, with backend='xnnpack', or export a model of its own with "
            "transformers.exporters.ExecutorchExporter"
        )


# ----------------------------------------------------------------------------------------------------------------------
# The example that a program is traced with.
# ----------------------------------------------------------------------------------------------------------------------


#: A function of which nothing more is known.
AnyFunction = Callable[..., Any]
#: What an exported program is traced with, and how its axes may change.
Example = dict[str, Any]


def example_of(
    given: Tensor | Mapping[str, object], inputs: Mapping[str, Tensor], dynamic: bool
) -> tuple[Example, Example]:
    """The arguments to trace with, and which of their axes may have other sizes.

    Args:
        given: tokens ``[batch, pos]``, or the model's arguments by name.
        inputs: examples of the declared inputs.
        dynamic: axes may have other sizes.

    Raises:
        TypeError: it is neither.
        ValueError: it has one position, which would be all that the exported program ever takes.
    """
    if isinstance(given, Tensor):
        given = {"input_ids": given}
    if not isinstance(given, Mapping) or not given:
        raise TypeError(
            f"the example is {type(given).__name__}; it must be tokens [batch, pos], or a mapping of the model's "
            "arguments, such as a tokenizer gives; bridge.to_tokens(text) makes tokens of text"
        )
    example: Example = {name: value for name, value in given.items() if value is not None}
    taken = [name for name in example if name in inputs]
    if taken:
        raise TypeError(f"{', '.join(taken)}: an example of a declared input is given where the program is made")
    if dynamic:
        example = {name: _two_rows(name, value, example) for name, value in example.items()}
        for name in ("input_ids", "decoder_input_ids"):
            if isinstance(example.get(name), Tensor) and example[name].shape[1] < 2:
                raise ValueError(f"{name} of the example has one position; with two or more, the length may change")
    example |= inputs
    if not dynamic:
        return example, {}
    shapes = {name: _any_size(value) for name, value in example.items()}
    return example, {"dynamic_shapes": shapes} if None not in shapes.values() else {}


def _two_rows(name: str, value: object, example: Example) -> object:
    """An argument of one row, as two: torch.export takes an axis of one for one that is always one."""
    first = next((x for x in example.values() if isinstance(x, Tensor) and x.ndim > 1), None)
    if isinstance(value, Tensor) and first is not None and first.shape[0] == 1 and value.ndim > 1 and len(value) == 1:
        return torch.cat([value, value])
    return value


def _any_size(value: object) -> dict[int, object] | None:
    if isinstance(value, Tensor):
        return dict.fromkeys(range(value.ndim), torch.export.Dim.AUTO)
    return None


# ----------------------------------------------------------------------------------------------------------------------
# What ExecuTorch 1.5 makes something else of, in words that it takes as they are meant.
#
# - Its check of the lowered program asks how long the first tensor of a split is, which fixes the number of rows as the
# example's (``executorch/exir/verification/arg_validator.py``): GPT-2 and NeoX then run with that number alone.
# - XNNPACK computes GELU by the error function, also where the model asks for the approximation by tanh (Gemma).
# ----------------------------------------------------------------------------------------------------------------------


def for_executorch(func: AnyFunction, args: Args, kwargs: Example) -> Any:
    """A function's result, where tensors are split by slices, and GELU by tanh is computed step by step."""
    return _IN_OTHER_WORDS.get(func, func)(*args, **kwargs)


def _split(tensor: Tensor, split_size_or_sections: int | Sequence[int], dim: int = 0) -> tuple[Tensor, ...]:
    total = tensor.shape[dim]
    if not isinstance(total, int):  # it may be of any size, and its number of parts with it
        return tensor.split(split_size_or_sections, dim)
    if isinstance(split_size_or_sections, Sequence):
        sizes = list(split_size_or_sections)
    else:
        sizes = [min(split_size_or_sections, total - i) for i in range(0, total, split_size_or_sections)]
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return tuple([tensor.narrow(dim, start, size) for start, size in zip(starts, sizes, strict=True)])


def _chunk(input: Tensor, chunks: int, dim: int = 0) -> tuple[Tensor, ...]:
    total = input.shape[dim]
    return _split(input, -(-total // chunks), dim) if isinstance(total, int) else input.chunk(chunks, dim)


def _gelu(input: Tensor, approximate: str = "none") -> Tensor:
    if approximate != "tanh":
        return functional.gelu(input, approximate=approximate)
    return 0.5 * input * (1 + torch.tanh(math.sqrt(2 / math.pi) * (input + 0.044715 * input * input * input)))


_IN_OTHER_WORDS: dict[AnyFunction, AnyFunction] = {
    torch.split: _split, Tensor.split: _split, torch.chunk: _chunk, Tensor.chunk: _chunk, functional.gelu: _gelu,
}  # fmt: skip
