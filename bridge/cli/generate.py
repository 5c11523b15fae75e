"""``python -m bridge generate``: text continued by a model, with interventions from a file."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from bridge.cli.parsers import add_command, add_model, add_tp


def add_generate(commands: Any) -> argparse.ArgumentParser:
    """Adds the command to the parser's commands."""
    parser = add_command(
        commands, "generate", "continue texts, with interventions from a file",
        'python -m bridge generate embedded "The capital of France is" --max-new-tokens 3',
    )  # fmt: skip
    add_model(parser)
    add_tp(parser)
    parser.add_argument("prompts", nargs="+", metavar="PROMPT", help="texts; several are generated together")
    add_interventions(parser)
    parser.add_argument("--max-new-tokens", type=int, default=20, metavar="TOKENS")
    parser.add_argument("--sample", action="store_true", help="sample (default: the likeliest token)")
    return parser


def add_interventions(parser: argparse.ArgumentParser) -> None:
    """Adds the option that takes a file of interventions."""
    parser.add_argument("--interventions", metavar="FILE", help="what Interventions.save wrote")


def run_generate(given: argparse.Namespace) -> int:
    """Runs the command and returns its exit status.

    Args:
        given: its arguments.
    """
    from bridge.cli.model import named_model
    from bridge.interventions import load

    bridge = named_model(given.model, given.tp, gguf_file=given.gguf_file)
    try:
        hooks = () if given.interventions is None else load(given.interventions, bridge)
        with bridge.hooks(fwd_hooks=hooks):
            texts = bridge.generate(given.prompts, given.max_new_tokens, do_sample=given.sample, verbose=False)
    except (FileNotFoundError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for text in texts:
        print(text)
    return 0
