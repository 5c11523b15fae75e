"""The command line: one parser, and a command for each frequent task.

A command names a model (`bridge/cli/model.py`), makes the same calls as a Python user, and prints
the result. Errors in its arguments are reported in one line, without a traceback, and set the exit
status. Torch is loaded only by commands that need it, so that `--help` is fast.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

from bridge.cli.commands import (
    CommandError,
    add_command,
    add_export,
    add_generate,
    add_harvest,
    add_model,
    add_tp,
    check_arguments,
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


def hooks(arguments: argparse.Namespace) -> int:
    """Print a model's hook points with their shapes and aliases, without loading its weights."""
    from bridge.arguments import shape_text
    from bridge.cli.demo import table
    from bridge.cli.model import named_model

    load_weights = None if arguments.model == "embedded" or arguments.tp else False
    bridge = named_model(
        arguments.model, arguments.tp, gguf_file=arguments.gguf_file, load_weights=load_weights
    )
    cfg = bridge.cfg
    rows = []
    for name, hook in bridge.hook_dict.items():
        point = hook.point
        shape = shape_text(cfg, point.axes)
        rows.append([name, shape, point.group, ", ".join(point.aliases)])
    print(f"{cfg.model_name}: {len(rows)} hook points")
    for line in table(["name", "shape", "group", "aliases"], rows):
        print(line)
    return 0


def verify(arguments: argparse.Namespace) -> int:
    """Print the result of `adapters.verify`; the exit status tells whether everything holds."""
    from adapters import verify as check
    from bridge.cli.model import named_model

    result = check(
        named_model(arguments.model, arguments.tp, gguf_file=arguments.gguf_file),
        level="quick" if arguments.quick else "full",
    )
    print(result)
    return 0 if result.passed else 1


def declare(arguments: argparse.Namespace) -> int:
    """Print the inferred declaration of a model as the source of an adapter, with its
    verification.
    """
    from adapters import verify as check
    from adapters.automatic.automatic import source_of
    from bridge.bridge import TransformerBridge
    from bridge.cli.model import named_model

    loaded = named_model(arguments.model, gguf_file=arguments.gguf_file)
    bridge = TransformerBridge(loaded.original_model, automatic="always")
    names = [cls.__name__ for cls in type(bridge.core).__mro__]
    registered = next((name for name in names if name.endswith("PreTrainedModel")), names[0])
    print(source_of(bridge.architecture, registered, registered.removesuffix("PreTrainedModel")))
    result = check(bridge)
    for line in [*str(bridge.offered()).splitlines(), *str(result).splitlines()]:
        print(f"# {line}")
    return 0 if result.passed else 1


def demo(arguments: argparse.Namespace) -> int:
    """Print a model's predictions for a prompt, or write them as a page."""
    options = (arguments.model, arguments.prompt, arguments.gguf_file, arguments.tp)
    against = getattr(arguments, "against", None)
    if arguments.report is None:
        from bridge.cli.demo import demo as print_demo

        print_demo(*options, against)
        return 0
    try:
        from bridge.cli.story import story
    except ImportError as error:  # the extra is not installed: the error names it
        raise CommandError(str(error)) from error
    page = story(*options, against)
    if not _follows(arguments.tp):
        Path(arguments.report).write_text(page, encoding="utf-8")
    print(f"wrote {arguments.report}: open it in a browser")
    return 0


def _parser() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """Return the parser of the command line, and those of its commands by name."""
    parser = argparse.ArgumentParser(
        prog="python -m bridge",
        description=(
            "Look inside a Hugging Face language model. `COMMAND --help` shows an example of each"
            " command."
        ),
        epilog=_STATUS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"transformer-bridge {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_demos(commands)
    _add_model_commands(commands)
    add_generate(commands).set_defaults(run=run_generate)
    add_harvest(commands).set_defaults(run=run_harvest)
    add_export(commands).set_defaults(run=run_export)
    return parser, dict(commands.choices)


def _add_demos(commands: Any) -> None:
    """Add the commands that study a prompt."""
    ask = add_command(
        commands,
        "ask",
        "what a model says next, where that comes up, and which heads carry it",
        'python -m bridge ask embedded "The capital of France is" --report page.html',
    )
    add_model(ask)
    ask.add_argument("prompt", help="the text")
    against = "compare the model's answer with this one, such as ' Rome' (default: the second one)"
    ask.add_argument("--against", metavar="ANSWER", help=against)
    ready_made = add_command(
        commands,
        "demo",
        "a logit lens, the heads that matter, and what ablating them does",
        "python -m bridge demo --report page.html",
    )
    add = ready_made.add_argument
    add("--model", help="a hub name or folder (default: the model that comes with the package)")
    add("--gguf-file", metavar="NAME", help="a GGUF file of it")
    add("--prompt", help="the text to study (default: an indirect-object prompt)")
    report = "write it as a page of pictures instead"
    for command in (ask, ready_made):
        command.add_argument("--report", metavar="FILE.html", help=report)
        add_tp(command)
        command.set_defaults(run=demo)


def _add_model_commands(commands: Any) -> None:
    """Add the commands that describe a model."""
    inferred = "print an adapter for a model, inferred from a run of it, and verify it"
    simple: tuple[tuple[str, str, Callable[[argparse.Namespace], int]], ...] = (
        ("hooks", "list the hook points of a model", hooks),
        ("verify", "check what its adapter promises", verify),
        ("declare", inferred, declare),
    )
    for name, text, run in simple:
        command = add_command(commands, name, text, f"python -m bridge {name} embedded")
        add_model(command)
        command.set_defaults(run=run)
        if name != "declare":
            add_tp(command)
        if name == "verify":
            quick = "what takes a few runs: no gradients"
            command.add_argument("--quick", action="store_true", help=quick)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status.

    Args:
        arguments: the command line; None: the process's own.
    """
    if arguments is None:
        arguments = sys.argv[1:]
        warnings.showwarning = _print_warning  # type: ignore[assignment]
    parser, commands = _parser()
    if arguments and arguments[0] not in commands:
        similar = difflib.get_close_matches(arguments[0], commands, 1)
        if similar:
            parser.error(f"there is no command {arguments[0]!r}: did you mean {similar[0]!r}?")
    namespace, unknown = parser.parse_known_args(arguments)
    if unknown:
        commands[namespace.command].error(_why_unknown(unknown, commands[namespace.command]))
    try:
        return _done(namespace)
    except KeyboardInterrupt:
        hint = ""
        if namespace.command == "harvest":
            hint = f": what is whole in {namespace.out} is kept, the same command goes on"
        print(f"\ninterrupted{hint}", file=sys.stderr)
        return 130


def _done(namespace: argparse.Namespace) -> int:
    """Check the parsed command, run it, and return its exit status."""
    silent: Any = nullcontext()
    if _follows(getattr(namespace, "tp", False)):
        silent = redirect_stdout(StringIO())
    try:
        check_arguments(namespace)
        with silent:
            status = int(namespace.run(namespace))
            sys.stdout.flush()
            return status
    except CommandError as error:
        return _refused(f"error: {error}")
    except FileNotFoundError as error:
        return _refused(error)
    except OSError as error:  # transformers raises it for files that it cannot find or download
        if isinstance(error, BrokenPipeError) and _nobody_reads():
            return 141
        if namespace.model is None or Path(namespace.model).is_dir():
            raise
        return _refused(
            f"{namespace.model}: there is no such folder here, and no model of this name could"
            f" be loaded from the hub ({str(error).splitlines()[0]})"
        )


def _why_unknown(unknown: Sequence[str], command: argparse.ArgumentParser) -> str:
    """Return the message about arguments that a command does not take."""
    options = re.findall(r"--[\w-]+", command.format_help())
    hints = []
    for text in unknown:
        name = text.partition("=")[0]
        if name.startswith("-") and (similar := difflib.get_close_matches(name, options, 1)):
            hints.append(f"{name}: did you mean {similar[0]}?")
    return f"unrecognized arguments: {' '.join(unknown)}{''.join(f'; {hint}' for hint in hints)}"


def _print_warning(message: Warning | str, *where: Any, **more: Any) -> None:
    """Print a warning without the place in our code that it comes from."""
    print(f"warning: {message}", file=sys.stderr)


def _follows(tp: bool) -> bool:
    """Tell whether this is one of several processes and not the first, which prints and writes."""
    return tp and os.environ.get("RANK", "0") != "0"


def _nobody_reads() -> bool:
    """Tell whether the reader of the output has left, as in `... | head`; the remaining output is
    then discarded.
    """
    try:
        print(flush=True)  # the failed output is discarded by now: try again
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return True
    return False


def _refused(message: Any) -> int:
    print(message, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
