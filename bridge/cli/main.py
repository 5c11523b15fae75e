"""The command line: one parser, and a command for each thing that is done often.

A command names a model (`bridge/cli/model.py`), calls what a user would call in Python, and prints what it returns.
What is wrong with its arguments is said in one line, without a traceback, and the exit status says so. Torch is loaded
by the command that needs it, so that `--help` is quick.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

from bridge.cli.commands import (
    add_command,
    add_export,
    add_generate,
    add_harvest,
    add_model,
    add_tp,
    run_export,
    run_generate,
    run_harvest,
)
from bridge.version import __version__

_STATUS = """exit status:
  0    done
  1    a check found something that does not hold (verify, declare, harvest --check)
  2    what was given cannot be done: the message says why
  130  interrupted (Ctrl-C)
  141  nobody reads what is printed any more (... | head)
"""


def hooks(given: argparse.Namespace) -> int:
    """Prints a model's hook points with their shapes and aliases, without loading its weights."""
    from bridge.cli.demo import table
    from bridge.cli.model import named_model
    from bridge.hooks.arguments import shape_text

    load_weights = None if given.model == "embedded" or given.tp else False
    bridge = named_model(given.model, given.tp, gguf_file=given.gguf_file, load_weights=load_weights)
    cfg = bridge.cfg
    rows = [
        [name, shape_text(cfg, hook.point.axes), hook.point.group, ", ".join(hook.point.aliases)]
        for name, hook in bridge.hook_dict.items()
    ]
    print(f"{cfg.model_name}: {len(rows)} hook points")
    for line in table(["name", "shape", "group", "aliases"], rows):
        print(line)
    return 0


def verify(given: argparse.Namespace) -> int:
    """Prints what `adapters.verify` finds; the status says whether everything holds."""
    from adapters import verify as check
    from bridge.cli.model import named_model

    found = check(
        named_model(given.model, given.tp, gguf_file=given.gguf_file), level="quick" if given.quick else "full"
    )
    print(found)
    return 0 if found.passed else 1


def declare(given: argparse.Namespace) -> int:
    """Prints what is inferred for a model as the source of an adapter, with its verification."""
    from adapters import verify as check
    from adapters.automatic.automatic import source_of
    from bridge.bridge import TransformerBridge
    from bridge.cli.model import named_model

    loaded = named_model(given.model, gguf_file=given.gguf_file)
    bridge = TransformerBridge(loaded.original_model, automatic="always")
    names = [cls.__name__ for cls in type(bridge.core).__mro__]
    registered = next((name for name in names if name.endswith("PreTrainedModel")), names[0])
    print(source_of(bridge.architecture, registered, registered.removesuffix("PreTrainedModel")))
    found = check(bridge)
    for line in [*str(bridge.offered()).splitlines(), *str(found).splitlines()]:
        print(f"# {line}")
    return 0 if found.passed else 1


def demo(given: argparse.Namespace) -> int:
    """Prints what a model does with a prompt, or writes it as a page."""
    from bridge.cli.demo import demo as told
    from bridge.cli.model import CommandError

    if given.report is None:
        told(given.model, given.prompt, given.gguf_file, given.tp)
        return 0
    path = Path(given.report)
    if path.suffix.lower() not in (".html", ".htm"):
        raise CommandError(f"--report {given.report}: the page is HTML, so the file must end in .html")
    if not path.absolute().parent.is_dir():
        raise CommandError(f"--report {given.report}: there is no folder {path.absolute().parent}")
    try:
        from bridge.cli.story import story
    except ImportError as error:  # the extra is not installed: the error says which command installs it
        raise CommandError(str(error)) from error
    page = story(given.model, given.prompt, given.gguf_file, given.tp)
    if not _follows(given.tp):
        path.write_text(page, encoding="utf-8")
    print(f"wrote {given.report}: open it in a browser")
    return 0


def _parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bridge",
        description="Look inside a Hugging Face language model. `COMMAND --help` shows an example of each command.",
        epilog=_STATUS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"transformer-bridge {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    asked = add_command(
        commands, "ask", "what a model says next, where that comes up, and which heads carry it",
        'python -m bridge ask embedded "The capital of France is" --report page.html',
    )  # fmt: skip
    add_model(asked)
    asked.add_argument("prompt", help="the text")
    shown = add_command(
        commands, "demo", "a logit lens, the heads that matter, and what ablating them does",
        "python -m bridge demo --report page.html",
    )  # fmt: skip
    shown.add_argument("--model", help="a hub name or folder (default: the model that comes with the package)")
    shown.add_argument("--gguf-file", metavar="NAME", help="a GGUF file of it")
    shown.add_argument("--prompt", help="the text to study (default: an indirect-object prompt)")
    for command in (asked, shown):
        command.add_argument("--report", metavar="FILE.html", help="write it as a page of pictures instead")
        add_tp(command)
        command.set_defaults(run=demo)
    simple: tuple[tuple[str, str, Callable[[argparse.Namespace], int]], ...] = (
        ("hooks", "list the hook points of a model", hooks),
        ("verify", "check what its adapter promises", verify),
        ("declare", "print an adapter for a model, inferred from a run of it, and verify it", declare),
    )
    for name, text, run in simple:
        command = add_command(commands, name, text, f"python -m bridge {name} embedded")
        add_model(command)
        command.set_defaults(run=run)
        if name != "declare":
            add_tp(command)
        if name == "verify":
            command.add_argument("--quick", action="store_true", help="what takes a few runs: no gradients")
    add_generate(commands).set_defaults(run=run_generate)
    add_harvest(commands).set_defaults(run=run_harvest)
    add_export(commands).set_defaults(run=run_export)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit status.

    Args:
        arguments: the command line; None: the process's own.
    """
    given = _parser().parse_args(arguments)
    try:
        return _done(given)
    except KeyboardInterrupt:
        kept = f": what is whole in {given.out} is kept, the same command goes on" if given.command == "harvest" else ""
        print(f"\ninterrupted{kept}", file=sys.stderr)
        return 130


def _done(given: argparse.Namespace) -> int:
    """Runs the command that was given, and returns its exit status."""
    from bridge.cli.model import CommandError  # imports torch, which --help and --version do without

    silent = redirect_stdout(StringIO()) if _follows(getattr(given, "tp", False)) else nullcontext()
    try:
        with silent:
            status = int(given.run(given))
            sys.stdout.flush()
            return status
    except CommandError as error:
        return _refused(f"error: {error}")
    except FileNotFoundError as error:
        return _refused(error)
    except OSError as error:  # what transformers raises for what it cannot find or reach
        if isinstance(error, BrokenPipeError) and _nobody_reads():
            return 141
        if given.model is None or Path(given.model).is_dir():
            raise
        return _refused(
            f"{given.model}: there is no such folder here, and no model of this name could be had from the hub "
            f"({str(error).splitlines()[0]})"
        )


def _follows(tp: bool) -> bool:
    """Whether this is one of several processes, and not the first, which prints and writes."""
    return tp and os.environ.get("RANK", "0") != "0"


def _nobody_reads() -> bool:
    """Whether the reader of the output has left, as in `... | head`. What is left to be written then goes nowhere."""
    try:
        print(flush=True)  # what could not be written is given up by then: ask anew
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return True
    return False


def _refused(message: Any) -> int:
    print(message, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
