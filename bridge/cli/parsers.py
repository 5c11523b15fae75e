"""What the commands' parsers have in common."""

from __future__ import annotations

import argparse
from typing import Any


def add_command(commands: Any, name: str, text: str, example: str) -> argparse.ArgumentParser:
    """Adds a command whose help ends with an example.

    Args:
        commands: what the parser's `add_subparsers` gave.
        name: of the command.
        text: what it does.
        example: a line that can be run.
    """
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=text,
        description=f"{text[0].upper()}{text[1:]}.",
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    return parser


def add_tp(parser: argparse.ArgumentParser) -> None:
    """Adds the option that spreads the model over processes."""
    text = "spread the model over the processes of `torchrun --nproc-per-node N -m bridge ...`; the first one prints"
    parser.add_argument("--tp", action="store_true", help=text)


def add_model(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that name a model."""
    parser.add_argument("model", help='a hub name, a folder, or "embedded" for the model in the package')
    parser.add_argument("--gguf-file", metavar="NAME", help="a GGUF file of the folder or repository")
