"""``python -m bridge export``: a model with its activations as outputs, for another runtime."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from bridge.cli.generate import add_interventions
from bridge.cli.parsers import add_command, add_model

if TYPE_CHECKING:
    from torch import Tensor

    from bridge.bridge import TransformerBridge

FORMATS = ("dynamo", "onnx", "executorch", "openvino")


def add_export(commands: Any) -> argparse.ArgumentParser:
    """Adds the command to the parser's commands."""
    parser = add_command(
        commands, "export", "a model with its activations as outputs, for another runtime",
        "python -m bridge export embedded --capture blocks.1.hook_resid_post --out exported",
    )  # fmt: skip
    add_model(parser)
    parser.add_argument("--format", default="dynamo", choices=FORMATS)
    parser.add_argument("--capture", nargs="+", default=[], metavar="NAME", help="hook points that become outputs")
    parser.add_argument(
        "--steer",
        metavar="NAME",
        help="a hook point to which `strength` times `vector` is added: two more inputs of what is exported",
    )
    add_interventions(parser)
    parser.add_argument("--out", required=True, metavar="FOLDER", help="where it is saved")
    parser.add_argument("--prompt", default="When Mary and John went to the store", help="the example to trace with")
    parser.add_argument("--static", action="store_true", help="for the example's numbers of rows and positions alone")
    parser.add_argument(
        "--generation", action="store_true", help="two programs: for a prompt, and for a token more with its past"
    )
    return parser


def run_export(given: argparse.Namespace) -> int:
    """Runs the command and returns its exit status.

    Args:
        given: its arguments.
    """
    import torch

    from bridge.cli.model import named_model
    from bridge.hooks.names import UnknownHookError
    from bridge.interventions import Add, load

    bridge = named_model(given.model, gguf_file=given.gguf_file)
    try:
        hooks = () if given.interventions is None else load(given.interventions, bridge)
        inputs = {}
        if given.steer is not None:
            hooks = (*hooks, (given.steer, Add("vector", "strength")))
            inputs = {"vector": torch.zeros(bridge.cfg.d_model), "strength": torch.tensor(1.0)}
        program = bridge.program(given.capture, hooks, inputs)
        make = program.export_for_generation if given.generation else program.export
        make(_example(bridge, given.prompt), given.format, dynamic=not given.static, path=given.out)
    except (ImportError, FileNotFoundError, UnknownHookError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"wrote {given.out}: {given.format} of {bridge.cfg.model_name}")
    print(f"  inputs   {', '.join(('input_ids', 'attention_mask', *program.inputs))}")
    print(f"  outputs  {', '.join(('logits', *program.captured))}")
    return 0


def _example(bridge: TransformerBridge, prompt: str) -> dict[str, Tensor]:
    """Tokens of the prompt, or, for a model without a tokenizer, some tokens."""
    import torch

    if bridge.tokenizer is None:
        tokens = torch.arange(8).reshape(2, 4) % bridge.cfg.d_vocab
    else:
        tokens = bridge.to_tokens(prompt).expand(2, -1).contiguous()
    example = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    if bridge.core.config.is_encoder_decoder:
        example["decoder_input_ids"] = tokens
    return example
