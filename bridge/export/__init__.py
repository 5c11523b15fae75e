"""Programs in other runtimes: `torch.export`, ONNX, ExecuTorch, OpenVINO."""

from typing import TYPE_CHECKING

from adapters.imports import lazily

if TYPE_CHECKING:
    from bridge.export import export as export

__getattr__, __dir__ = lazily(__name__, "export")
