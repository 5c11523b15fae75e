"""The formats, what has to be installed for each, and what each cannot take."""

from __future__ import annotations

import functools
import importlib.util
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.overrides import BaseTorchFunctionMode

from adapters.imports.versions import HfExporter, get_exporter_class


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
