"""``python -m bridge harvest``: the command line of `bridge.harvest`, which is an extra."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from bridge.cli.generate import add_interventions
from bridge.cli.parsers import add_command, add_tp

#: The options that `bridge.harvest.harvest` takes under the same names.
_OPTIONS = (
    "hook_points", "out", "context_size", "dtype", "tokens_per_shard", "max_tokens", "column", "prepend_bos",
    "separator", "pack", "keep_special", "rows", "batch_size", "device", "model_dtype", "format", "engine", "workers",
    "address", "gpus_per_worker", "progress",
)  # fmt: skip


def add_harvest(commands: Any) -> argparse.ArgumentParser:
    """Adds the command.

    Args:
        commands: what the parser's `add_subparsers` gave.
    """
    parser = add_command(
        commands, "harvest", "write a model's activations over files, or check a folder of them (--check)",
        "python -m bridge harvest embedded texts.txt --points blocks.1.hook_resid_post --out shards",
    )  # fmt: skip
    parser.add_argument("model", nargs="?", help='a hub name, a folder, or "embedded"')
    parser.add_argument("files", nargs="*", help="paths or globs: .txt (a document a line), .jsonl, .parquet")
    parser.add_argument("--check", metavar="FOLDER", help="compare a folder with its manifest, and do nothing else")
    parser.add_argument("--points", dest="hook_points", nargs="+", metavar="NAME", help="hook points")
    add_interventions(parser)
    parser.add_argument("--out", metavar="FOLDER", help="where the shards go; the same command goes on there")
    parser.add_argument("--context-size", type=int, default=128, metavar="TOKENS")
    parser.add_argument("--dtype", default="float16", choices=["float16", "float32", "float64"])
    parser.add_argument("--tokens-per-shard", type=int, default=2**20, metavar="TOKENS")
    parser.add_argument("--max-tokens", type=int, metavar="TOKENS", help="stop after this many")
    parser.add_argument("--column", default="text", metavar="NAME", help="of JSONL and Parquet (default: text)")
    parser.add_argument(
        "--bos", dest="prepend_bos", action=argparse.BooleanOptionalAction, help="start every input with BOS"
    )
    parser.add_argument("--separator", metavar="TOKEN", help="behind every document: an id, or eos, bos, sep, cls, pad")
    off: dict[str, Any] = {"action": "store_false"}
    parser.add_argument("--no-pack", dest="pack", **off, help="no input holds parts of two documents")
    parser.add_argument("--no-special", dest="keep_special", **off, help="write no rows for BOS and separators")
    parser.add_argument("--rows", default="all", choices=["all", "mean", "last"])
    parser.add_argument("--batch-size", type=int, metavar="INPUTS")
    add_tp(parser)
    parser.add_argument("--device", help="such as cuda")
    parser.add_argument("--model-dtype", help="such as bfloat16")
    parser.add_argument("--format", default="arrow", choices=["arrow", "parquet"])
    parser.add_argument("--engine", default="local", choices=["local", "ray"])
    parser.add_argument("--workers", type=int, default=2, help="for Ray")
    parser.add_argument("--address", help="of a Ray cluster")
    parser.add_argument("--gpus-per-worker", type=float, default=0, help="for Ray")
    parser.add_argument("--quiet", dest="progress", **off, help="no line that shows how far it is")
    parser.set_defaults(parser=parser)
    return parser


def run_harvest(given: argparse.Namespace) -> int:
    """Runs the command and returns its exit status.

    Args:
        given: its arguments.
    """
    from bridge.harvest import Files, HarvestError, WriteError, check, harvest
    from bridge.hooks.names import UnknownHookError
    from bridge.interventions import InterventionsFileError, OtherModelError

    try:
        if given.check is not None:
            found = check(given.check)
            print(found)
            return 0 if found.passed else 1
        needed = {"model": given.model, "files": given.files, "points": given.hook_points, "out": given.out}
        lacking = [name for name, value in needed.items() if not value]
        if lacking:
            given.parser.error(f"harvest needs {', '.join(lacking)} (or --check FOLDER)")
        options: dict[str, Any] = {name: getattr(given, name) for name in _OPTIONS}
        if given.separator is not None and given.separator.isdigit():
            options["separator"] = int(given.separator)
        if given.tp:
            options |= {"device": None, "model_dtype": None}
        hooks = _interventions(given.model, given.interventions)
        model = _spread(given) if given.tp else given.model
        report = harvest(model, Files(*given.files), interventions=hooks, **options)
    except (
        HarvestError, WriteError, FileNotFoundError, UnknownHookError, InterventionsFileError, OtherModelError
    ) as error:  # fmt: skip
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(report)
    return 0


def _spread(given: argparse.Namespace) -> Any:
    """The model over the processes of torchrun, each on a device of its own."""
    from bridge.cli.model import CommandError, named_model

    if given.device is not None:
        raise CommandError(
            f"--tp puts each process's part on a device of its own, so --device {given.device} says too much"
        )
    return named_model(given.model, tp=True, dtype=given.model_dtype)


def _interventions(model: str, file: str | None) -> Sequence[Any]:
    """The interventions of a file, looked at on the model without its weights, which the harvest loads itself."""
    from bridge.cli.model import named_model
    from bridge.interventions import load

    if file is None:
        return ()
    return load(file, named_model(model, load_weights=None if model == "embedded" else False))
