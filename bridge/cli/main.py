"""The command line: ``python -m bridge demo | hooks | verify | declare | generate | harvest | export``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from bridge.cli.export import add_export, run_export
from bridge.cli.generate import add_generate, run_generate
from bridge.cli.harvest import add_harvest, run_harvest


def hooks(model: str) -> None:
    """Prints a model's hook points with their shapes and aliases, without loading its weights."""
    from bridge.cli.demo import table
    from bridge.cli.model import named_model
    from bridge.hooks.shapes import shape_text

    bridge = named_model(model, load_weights=None if model == "embedded" else False)
    cfg = bridge.cfg
    rows = [
        [name, shape_text(cfg, hook.point.axes), hook.point.group, ", ".join(hook.point.aliases)]
        for name, hook in bridge.hook_dict.items()
    ]
    print(f"{cfg.model_name}: {len(rows)} hook points")
    for line in table(["name", "shape", "group", "aliases"], rows):
        print(line)


def verify(model: str, quick: bool = False) -> bool:
    """Prints what `adapters.verify` finds, and says whether everything holds.

    Args:
        model: a hub name, a folder, or ``embedded``.
        quick: without gradients and the runs for each kind of hook point.
    """
    from adapters import verify as check
    from bridge.cli.model import named_model

    bridge = named_model(model)
    report = check(bridge, level="quick" if quick else "full")
    print(report)
    return report.passed


def declare(model: str) -> bool:
    """Prints what is inferred for a model as the source of an adapter, with its verification; says whether it holds."""
    from adapters import verify as check
    from adapters.automatic.source import source_of
    from bridge.bridge import TransformerBridge
    from bridge.cli.model import named_model

    bridge = TransformerBridge(named_model(model).original_model, automatic="always")
    names = [cls.__name__ for cls in type(bridge.core).__mro__]
    registered = next((name for name in names if name.endswith("PreTrainedModel")), names[0])
    print(source_of(bridge.architecture, registered, registered.removesuffix("PreTrainedModel")))
    found = check(bridge)
    for line in [*str(bridge.offered()).splitlines(), *str(found).splitlines()]:
        print(f"# {line}")
    return found.passed


def report(model: str | None, prompt: str | None, path: str) -> int:
    """Writes the demonstration as a page of pictures, and returns the exit status.

    Args:
        model, prompt: as for `bridge.cli.demo.demo`.
        path: the file to write.
    """
    if Path(path).suffix.lower() not in (".html", ".htm"):
        print(f"--report {path}: the page is HTML, so the file must end in .html", file=sys.stderr)
        return 2
    if not Path(path).absolute().parent.is_dir():
        print(f"--report {path}: there is no folder {Path(path).absolute().parent}", file=sys.stderr)
        return 2
    try:
        from bridge.cli.story import story
    except ImportError as error:  # the extra is not installed: the error says which command installs it
        print(error, file=sys.stderr)
        return 2
    Path(path).write_text(story(model, prompt), encoding="utf-8")
    print(f"wrote {path}: open it in a browser")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit status.

    Args:
        arguments: the command line; None: the process's own.
    """
    parser = argparse.ArgumentParser(prog="python -m bridge", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    demo_parser = commands.add_parser("demo", help="a logit lens, the heads that matter, and what ablating them does")
    demo_parser.add_argument("--model", help="a hub name or folder (default: the model that comes with the package)")
    demo_parser.add_argument("--prompt", help="the text to study (default: an indirect-object prompt)")
    demo_parser.add_argument("--report", metavar="FILE.html", help="write it as a page of pictures instead")
    for name, text in (
        ("hooks", "list the hook points of a model"),
        ("verify", "check what its adapter promises"),
        ("declare", "print an adapter for a model, inferred from a run of it, and verify it"),
    ):
        command = commands.add_parser(name, help=text)
        command.add_argument("model", help='a hub name, a folder, or "embedded" for the model in the package')
        if name == "verify":
            command.add_argument("--quick", action="store_true", help="what takes a few runs: no gradients")
    add_generate(commands)
    add_harvest(commands)
    add_export(commands)
    given = parser.parse_args(arguments)
    if given.command == "harvest":
        return run_harvest(given)
    from bridge.cli.model import CommandError

    try:
        return _run(given)
    except CommandError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except FileNotFoundError as error:
        print(error, file=sys.stderr)
        return 2
    except OSError as error:  # what transformers raises for what it cannot find or reach
        if given.model is None or Path(given.model).is_dir():
            raise
        print(
            f"{given.model}: there is no such folder here, and no model of this name could be had from the hub "
            f"({str(error).splitlines()[0]})",
            file=sys.stderr,
        )
        return 2


def _run(given: argparse.Namespace) -> int:
    """Runs the command that was given."""
    if given.command == "demo" and given.report:
        return report(given.model, given.prompt, given.report)
    if given.command == "demo":
        from bridge.cli.demo import demo

        demo(given.model, given.prompt)
    elif given.command == "hooks":
        hooks(given.model)
    elif given.command == "declare":
        return 0 if declare(given.model) else 1
    elif given.command == "generate":
        return run_generate(given)
    elif given.command == "export":
        return run_export(given)
    else:
        return 0 if verify(given.model, given.quick) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
