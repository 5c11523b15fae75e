"""The commands that write files or text: `generate`, `export`, `harvest`; and the arguments that commands share."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from bridge.bridge import TransformerBridge


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


# ----------------------------------------------------------------------------------------------------------------------
# ``python -m bridge generate``: text continued by a model, with interventions from a file.
# ----------------------------------------------------------------------------------------------------------------------


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
    from bridge.cli.model import CommandError, named_model
    from bridge.interventions import load

    bridge = named_model(given.model, given.tp, gguf_file=given.gguf_file)
    try:
        hooks = () if given.interventions is None else load(given.interventions, bridge)
        with bridge.hooks(fwd_hooks=hooks):
            texts = bridge.generate(given.prompts, given.max_new_tokens, do_sample=given.sample, verbose=False)
    except (FileNotFoundError, ValueError) as error:
        raise CommandError(str(error)) from error
    for text in texts:
        print(text)
    return 0


# ----------------------------------------------------------------------------------------------------------------------
# ``python -m bridge export``: a model with its activations as outputs, for another runtime.
# ----------------------------------------------------------------------------------------------------------------------


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

    from bridge.cli.model import CommandError, named_model
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
        raise CommandError(str(error)) from error
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


# ----------------------------------------------------------------------------------------------------------------------
# ``python -m bridge harvest``: the command line of `bridge.harvest`, which is an extra.
# ----------------------------------------------------------------------------------------------------------------------


#: The options that `bridge.harvest.harvest` takes under the same names.
_OPTIONS = (
    "hook_points", "out", "context_size", "dtype", "tokens_per_shard", "max_tokens", "column", "prepend_bos",
    "separator", "pack", "keep_special", "rows", "batch_size", "device", "model_dtype", "format", "engine", "workers",
    "address", "gpus_per_worker", "progress", "checksums",
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
    parser.add_argument("--out", metavar="FOLDER", help="where the shards go, or a URL; the same command goes on there")
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
    parser.add_argument("--checksums", action="store_true", help="read the shards that are there, and mend them")
    parser.add_argument("--quiet", dest="progress", **off, help="no line that shows how far it is")
    parser.set_defaults(parser=parser)
    return parser


def run_harvest(given: argparse.Namespace) -> int:
    """Runs the command and returns its exit status.

    Args:
        given: its arguments.
    """
    from bridge.cli.model import CommandError, named_model
    from bridge.harvest import Files, HarvestError, WriteError, check, harvest
    from bridge.hooks.names import UnknownHookError
    from bridge.interventions import InterventionsFileError, OtherModelError, load

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
        hooks: Sequence[Any] = ()
        if given.interventions is not None:  # on the model without its weights, which the harvest loads itself
            bare = named_model(given.model, load_weights=None if given.model == "embedded" else False)
            hooks = load(given.interventions, bare)
        model = given.model
        if given.tp:
            if given.device is not None:
                raise CommandError(
                    f"--tp puts each process's part on a device of its own, so --device {given.device} says too much"
                )
            model = named_model(model, tp=True, dtype=given.model_dtype)
            options |= {"device": None, "model_dtype": None}
        report = harvest(model, Files(*given.files), interventions=hooks, **options)
    except (
        HarvestError, WriteError, FileNotFoundError, UnknownHookError, InterventionsFileError, OtherModelError
    ) as error:  # fmt: skip
        raise CommandError(str(error)) from error
    print(report)
    return 0
