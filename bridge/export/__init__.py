"""Programs in other runtimes: `torch.export`, ONNX, ExecuTorch, OpenVINO, through transformers' exporters."""
