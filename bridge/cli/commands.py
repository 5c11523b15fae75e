"""The commands `generate`, `export` and `harvest`, and the arguments that commands share."""

from __future__ import annotations

import argparse
import difflib
import glob
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from bridge.bridge import TransformerBridge


class CommandError(Exception):
    """An error in a command's arguments: its message is for the user, and the exit status is 2."""


def check_arguments(arguments: argparse.Namespace) -> None:
    """Check a command's arguments before it imports torch, which takes seconds.

    Args:
        arguments: the parsed command line.

    Raises:
        CommandError: an empty prompt or answer, a report that cannot be written, files that do not
            exist, or no processes for `--tp`.
        FileNotFoundError: a path of a model that does not exist.
    """
    model = arguments.model
    other = model and model != "embedded" and not Path(model).exists()
    if other and difflib.get_close_matches(model, ["embedded"], cutoff=0.8):
        raise CommandError(f"there is no model {model!r} here: did you mean 'embedded'?")
    interventions = getattr(arguments, "interventions", None)
    if interventions is not None and not Path(interventions).is_file():
        raise CommandError(f"there is no file {interventions}")
    if model and model.startswith(("/", "./", "../")) and not Path(model).exists():
        raise FileNotFoundError(f"{model}: there is no such folder")
    if getattr(arguments, "tp", False) and int(os.environ.get("WORLD_SIZE", "1")) < 2:
        raise CommandError(
            "--tp spreads the model over several processes: start them with torchrun"
            " --nproc-per-node 2 -m bridge ..."
        )
    if arguments.command in ("ask", "demo"):
        _check_demo(arguments.prompt, arguments.report)
        if getattr(arguments, "against", None) == "":
            raise CommandError("--against is empty: give one token, such as ' Rome'")
    if arguments.command == "harvest" and arguments.check is None:
        _check_harvest(arguments)


def _check_demo(prompt: str | None, report: str | None) -> None:
    """Check the prompt, and the file of a report.

    Raises:
        CommandError: the prompt is empty, or the file cannot be written.
    """
    if prompt is not None and not prompt.strip():
        raise CommandError("the prompt is empty: give a text of one word at least")
    if report is None:
        return
    path = Path(report)
    if path.suffix.lower() not in (".html", ".htm"):
        raise CommandError(f"--report {report}: the page is HTML, so the file must end in .html")
    folder = path.absolute().parent
    if not folder.is_dir():
        raise CommandError(f"--report {report}: there is no folder {folder}")


def number_from(least: int) -> Callable[[str], int]:
    """Return the type of an option that is a whole number.

    Args:
        least: the smallest number.
    """

    def number(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(f"{text} is no whole number from {least} on")
        return value

    return number


def add_command(commands: Any, name: str, text: str, example: str) -> argparse.ArgumentParser:
    """Add a command whose help ends with an example.

    Args:
        commands: the result of the parser's `add_subparsers`.
        name: the name of the command.
        text: the description of the command.
        example: an example command line.
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
    """Add the option that spreads the model over processes."""
    text = (
        "spread the model over the processes of `torchrun --nproc-per-node N -m bridge ...`; the"
        " first one prints"
    )
    parser.add_argument("--tp", action="store_true", help=text)


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that name a model."""
    parser.add_argument(
        "model", help='a hub name, a folder, or "embedded" for the model in the package'
    )
    parser.add_argument(
        "--gguf-file", metavar="NAME", help="a GGUF file of the folder or repository"
    )


# --------------------------------------------------------------------------------------------------
# ``python -m bridge generate``: continue text with a model, with interventions from a file.
# --------------------------------------------------------------------------------------------------


def add_generate(commands: Any) -> argparse.ArgumentParser:
    """Add the command to the parser's commands."""
    parser = add_command(
        commands,
        "generate",
        "continue texts, with interventions from a file",
        'python -m bridge generate embedded "The capital of France is" --max-new-tokens 3',
    )
    add_model(parser)
    add_tp(parser)
    parser.add_argument(
        "prompts", nargs="+", metavar="PROMPT", help="texts; several are generated together"
    )
    add_interventions(parser)
    parser.add_argument("--max-new-tokens", type=number_from(1), default=20, metavar="TOKENS")
    parser.add_argument(
        "--sample", action="store_true", help="sample (default: the likeliest token)"
    )
    return parser


def add_interventions(parser: argparse.ArgumentParser) -> None:
    """Add the option that takes a file of interventions."""
    parser.add_argument("--interventions", metavar="FILE", help="what Interventions.save wrote")


def run_generate(arguments: argparse.Namespace) -> int:
    """Run the command and return its exit status.

    Args:
        arguments: its arguments.
    """
    from bridge.cli.model import named_model
    from bridge.interventions import load

    bridge = named_model(arguments.model, arguments.tp, gguf_file=arguments.gguf_file)
    try:
        hooks = () if arguments.interventions is None else load(arguments.interventions, bridge)
        with bridge.hooks(fwd_hooks=hooks):
            texts = bridge.generate(
                arguments.prompts,
                arguments.max_new_tokens,
                do_sample=arguments.sample,
                verbose=False,
            )
    except (FileNotFoundError, ValueError) as error:
        raise CommandError(str(error)) from error
    for text in texts:
        print(text)
    return 0


# --------------------------------------------------------------------------------------------------
# ``python -m bridge export``: export a model with activations as outputs to another runtime.
# --------------------------------------------------------------------------------------------------


FORMATS = ("dynamo", "onnx", "executorch", "openvino")


def add_export(commands: Any) -> argparse.ArgumentParser:
    """Add the command to the parser's commands."""
    parser = add_command(
        commands,
        "export",
        "a model with its activations as outputs, for another runtime",
        "python -m bridge export embedded --capture blocks.1.hook_resid_post --out exported",
    )
    add_model(parser)
    parser.add_argument("--format", default="dynamo", choices=FORMATS)
    parser.add_argument(
        "--capture", nargs="+", default=[], metavar="NAME", help="hook points that become outputs"
    )
    parser.add_argument(
        "--steer",
        metavar="NAME",
        help=(
            "a hook point to which `strength` times `vector` is added: two more inputs of what is"
            " exported"
        ),
    )
    add_interventions(parser)
    parser.add_argument("--out", required=True, metavar="FOLDER", help="where it is saved")
    parser.add_argument(
        "--prompt", default="When Mary and John went to the store", help="the example to trace with"
    )
    parser.add_argument(
        "--static",
        action="store_true",
        help="for the example's numbers of rows and positions alone",
    )
    parser.add_argument(
        "--generation",
        action="store_true",
        help="two programs: for a prompt, and for a token more with its past",
    )
    return parser


def run_export(arguments: argparse.Namespace) -> int:
    """Run the command and return its exit status.

    Args:
        arguments: its arguments.
    """
    import torch

    from bridge.cli.model import named_model
    from bridge.hooks.names import UnknownHookError
    from bridge.interventions import Add, load

    bridge = named_model(arguments.model, gguf_file=arguments.gguf_file)
    try:
        hooks = () if arguments.interventions is None else load(arguments.interventions, bridge)
        inputs = {}
        if arguments.steer is not None:
            hooks = (*hooks, (arguments.steer, Add("vector", "strength")))
            inputs = {
                "vector": torch.zeros(bridge.cfg.d_model, device="cpu"),
                "strength": torch.tensor(1.0, device="cpu"),
            }
        program = bridge.program(arguments.capture, hooks, inputs)
        make = program.export_for_generation if arguments.generation else program.export
        make(
            _example(bridge, arguments.prompt),
            arguments.format,
            dynamic=not arguments.static,
            path=arguments.out,
        )
    except (ImportError, FileNotFoundError, UnknownHookError, ValueError) as error:
        raise CommandError(str(error)) from error
    print(f"wrote {arguments.out}: {arguments.format} of {bridge.cfg.model_name}")
    print(f"  inputs   {', '.join(('input_ids', 'attention_mask', *program.inputs))}")
    print(f"  outputs  {', '.join(('logits', *program.captured))}")
    return 0


def _example(bridge: TransformerBridge, prompt: str) -> dict[str, Tensor]:
    """Return tokens of the prompt, or, for a model without a tokenizer, some tokens."""
    import torch

    if bridge.tokenizer is None:
        tokens = torch.arange(8, device="cpu").reshape(2, 4) % bridge.cfg.d_vocab
    else:
        tokens = bridge.to_tokens(prompt).expand(2, -1).contiguous()
    example = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    if bridge.core.config.is_encoder_decoder:
        example["decoder_input_ids"] = tokens
    return example


# --------------------------------------------------------------------------------------------------
# ``python -m bridge harvest``: the command line of `bridge.harvest`, which is an extra.
# --------------------------------------------------------------------------------------------------


#: The options that `bridge.harvest.harvest` takes under the same names.
_OPTIONS = (
    "hook_points",
    "out",
    "context_size",
    "dtype",
    "tokens_per_shard",
    "max_tokens",
    "column",
    "prepend_bos",
    "separator",
    "pack",
    "keep_special",
    "rows",
    "batch_size",
    "device",
    "model_dtype",
    "format",
    "engine",
    "workers",
    "address",
    "gpus_per_worker",
    "progress",
    "checksums",
)


def add_harvest(commands: Any) -> argparse.ArgumentParser:
    """Add the command.

    Args:
        commands: the result of the parser's `add_subparsers`.
    """
    parser = add_command(
        commands,
        "harvest",
        "write a model's activations over files, or check a folder of them (--check)",
        "python -m bridge harvest embedded texts.txt --points blocks.1.hook_resid_post --out"
        " shards",
    )
    add = parser.add_argument
    add("model", nargs="?", help='a hub name, a folder, or "embedded"')
    add("files", nargs="*", help="paths or globs: .txt (a document a line), .jsonl, .parquet")
    add("--check", metavar="FOLDER", help="compare a folder with its manifest, and do nothing else")
    add("--points", dest="hook_points", nargs="+", metavar="NAME", help="hook points")
    add_interventions(parser)
    out = "where the shards go, or a URL; the same command goes on there"
    add("--out", metavar="FOLDER", help=out)
    _add_row_options(parser)
    add("--batch-size", type=number_from(1), metavar="INPUTS")
    add_tp(parser)
    add("--device", help="such as cuda")
    add("--model-dtype", help="such as bfloat16")
    add("--format", default="arrow", choices=["arrow", "parquet"])
    add("--engine", default="local", choices=["local", "ray"])
    add("--workers", type=number_from(1), default=2, help="for Ray")
    add("--address", help="of a Ray cluster")
    add("--gpus-per-worker", type=float, default=0, help="for Ray")
    add("--checksums", action="store_true", help="read the shards that are there, and mend them")
    quiet = "no progress bar (there is none either where the output is not a terminal)"
    add("--quiet", dest="progress", action="store_const", const=False, help=quiet)
    parser.set_defaults(parser=parser)
    return parser


def _add_row_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that decide a harvest's rows."""
    add = parser.add_argument
    off: dict[str, Any] = {"action": "store_false"}
    add("--context-size", type=number_from(2), default=128, metavar="TOKENS")
    add("--dtype", default="float16", choices=["float16", "float32", "float64"])
    add("--tokens-per-shard", type=number_from(1), default=2**20, metavar="TOKENS")
    add("--max-tokens", type=number_from(1), metavar="TOKENS", help="stop after this many")
    add("--column", default="text", metavar="NAME", help="of JSONL and Parquet (default: text)")
    bos = "start every input with BOS"
    add("--bos", dest="prepend_bos", action=argparse.BooleanOptionalAction, help=bos)
    separator = "behind every document: an id, or eos, bos, sep, cls, pad"
    add("--separator", metavar="TOKEN", help=separator)
    add("--no-pack", dest="pack", **off, help="no input holds parts of two documents")
    add("--no-special", dest="keep_special", **off, help="write no rows for BOS and separators")
    add("--rows", default="all", choices=["all", "mean", "last"])


def run_harvest(arguments: argparse.Namespace) -> int:
    """Run the command and return its exit status.

    Args:
        arguments: its arguments.
    """
    from bridge.harvest import Files, HarvestError, WriteError, check, harvest
    from bridge.hooks.names import UnknownHookError
    from bridge.interventions import InterventionsFileError, OtherModelError

    try:
        if arguments.check is not None:
            result = check(arguments.check)
            print(result)
            return 0 if result.passed else 1
        hooks = _harvest_hooks(arguments)
        model, options = _harvest_model(arguments)
        report = harvest(model, Files(*arguments.files), interventions=hooks, **options)
    except (
        HarvestError,
        WriteError,
        FileNotFoundError,
        UnknownHookError,
        InterventionsFileError,
        OtherModelError,
    ) as error:
        raise CommandError(str(error)) from error
    print(report)
    return 0


def _check_harvest(arguments: argparse.Namespace) -> None:
    """Check the arguments that a harvest cannot do without, and contradictory ones.

    Raises:
        CommandError: files that do not exist; a device for a model that is spread over processes.
    """
    needed = {
        "model": arguments.model,
        "files": arguments.files,
        "points": arguments.hook_points,
        "out": arguments.out,
    }
    missing = [name for name, value in needed.items() if not value]
    if missing:
        arguments.parser.error(f"harvest needs {', '.join(missing)} (or --check FOLDER)")
    for pattern in arguments.files:
        if "://" not in pattern and not glob.glob(pattern, recursive=True):
            raise CommandError(f"no file matches {pattern!r}")
    if arguments.tp and arguments.device is not None:
        raise CommandError(
            "--tp puts each process's part on a device of its own, so --device"
            f" {arguments.device} says too much"
        )


def _harvest_hooks(arguments: argparse.Namespace) -> Sequence[Any]:
    """Return the interventions, checked on a model without weights: `harvest` loads these."""
    from bridge.cli.model import named_model
    from bridge.interventions import load

    if arguments.interventions is None:
        return ()
    load_weights = None if arguments.model == "embedded" else False
    bare = named_model(arguments.model, load_weights=load_weights)
    return load(arguments.interventions, bare)


def _harvest_model(arguments: argparse.Namespace) -> tuple[Any, dict[str, Any]]:
    """Return the model, and the options of `harvest`."""
    from bridge.cli.model import named_model

    options: dict[str, Any] = {name: getattr(arguments, name) for name in _OPTIONS}
    separator = arguments.separator
    if separator is not None and separator.isdigit():
        options["separator"] = int(separator)
    if not arguments.tp:
        return arguments.model, options
    model = named_model(arguments.model, tp=True, dtype=arguments.model_dtype)
    return model, options | {"device": None, "model_dtype": None}
