"""Makes docs/models.md: what a bridge offers of every text architecture of transformers, tried on a tiny instance.

``python benchmarks/models.py [TASK:TYPE ... | CLASS ...]``: without these, writes the page; else prints their rows.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import cast

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedModel

from adapters import UnsupportedModelError, verify
from adapters.attention import Attention
from adapters.feed_forward import MLP, MoE
from adapters.mixers.part import Mixer
from benchmarks.named_by_transformer_lens import NAMED
from bridge import TransformerBridge
from bridge.native.model import NativeModel
from tests.tiny_models import CANNOT_BE_BUILT, Task, config_for, model_class, tiny_model, tiny_of, types
from weight_processing.check import ProcessingError

PAGE = Path(__file__).resolve().parent.parent / "docs" / "models.md"
TITLES: dict[Task, str] = {
    "causal": "Causal language models",
    "masked": "Masked language models",
    "seq2seq": "Sequence-to-sequence models",
    "image_text": "The text of models of images and text",
    "speech": "Text from sound",
}
_BESIDE = "Classes without text, or without a head"
#: What is said of a type for which a class of another package needs to be there.
_MISSING_PACKAGE = "its class needs a package that is not installed"


@dataclass(frozen=True)
class Row:
    """What is known of one type.

    Attributes:
        type, cls: the model type and its class.
        how: ``declared``, ``inferred``, or ``–``.
        offered: ``full``, ``parts`` (what is added to the stream, but not all that is inside), ``stream``, ``–``.
        points: how many hook points there are.
        proved: `adapters.verify` proves all that is declared, without exception.
        processed: the transforms of `process_weights` that are done.
        reason: what is missing, and why.
    """

    type: str
    cls: str
    how: str = "–"
    offered: str = "–"
    points: int = 0
    proved: bool = False
    processed: str = "–"
    reason: str = ""

    def __str__(self) -> str:
        proved = "yes" if self.proved else "–"
        cells = (self.type, self.cls, self.how, self.offered, str(self.points), proved, self.processed, self.reason)
        return f"| {' | '.join(cell.replace('|', chr(92) + '|').replace(chr(10), ' ') for cell in cells)} |"


def row(model_type: str, task: Task) -> Row:
    """Tries one type."""
    try:
        name = model_class(model_type, task).__name__
    except ImportError:
        return Row(model_type, "–", reason=_MISSING_PACKAGE)
    if model_type in CANNOT_BE_BUILT:
        return Row(model_type, name, reason=f"no tiny instance: {CANNOT_BE_BUILT[model_type]}")
    return _tried(model_type, name, partial(tiny_model, model_type, task))


def row_of_class(name: str) -> Row:
    """Tries one class."""
    cls: type[PreTrainedModel] = getattr(transformers, name)
    return _tried(getattr(cls.config_class, "model_type", "–"), name, lambda: tiny_of(cls, config_for(cls)))


def _tried(model_type: str, name: str, build: Callable[[], PreTrainedModel]) -> Row:
    try:
        model = build()
    except (
        ValueError,
        TypeError,
        AttributeError,
        AssertionError,
        ImportError,
        ZeroDivisionError,
        StrictDataclassError,
    ) as error:
        return Row(model_type, name, reason=f"no tiny instance: {first_line(error.__cause__ or error)}")
    try:
        bridge = TransformerBridge(model)
    except (UnsupportedModelError, RuntimeError, ValueError, TypeError, AttributeError, IndexError) as error:
        said = str(error)
        why = said.partition(": so what plays")[0] if ": so what plays" in said else first_line(error)
        return Row(model_type, name, reason=why.rstrip("."))
    offered = bridge.offered()
    proved, reason = _proved(bridge)
    left_out = sorted(set(offered.not_offered.values()))
    reasons = [*left_out[:2], *([reason] if reason else [])]
    return Row(
        model_type,
        name,
        "inferred" if offered.inferred else "declared",
        how_much(bridge),
        len(offered.names),
        proved,
        _processed(bridge),
        "; ".join(shortened(each) for each in reasons),
    )


def first_line(error: BaseException) -> str:
    """The first line of an error's text."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def shortened(text: str, most: int = 130) -> str:
    """A text that is not too long."""
    return text if len(text) <= most else text[: most - 1].rstrip() + "…"


def how_much(bridge: TransformerBridge) -> str:
    """How much of a model has hook points."""
    not_offered = bridge.offered().not_offered
    blocks = [block for stack in bridge.architecture.stacks for block in stack.every_block]
    if any(not block.steps for block in blocks):
        return "stream" if any(name.endswith("hook_resid_pre") for name in bridge.hook_dict) else "–"
    opaque = any(isinstance(step.part, Mixer) and not step.part.mixes for block in blocks for step in block.steps)
    parts = [step.part for block in blocks for step in block.steps]
    known = any(isinstance(part, Attention | MLP | MoE) or (isinstance(part, Mixer) and part.modules) for part in parts)
    if opaque or not_offered:
        return "parts"
    return "full" if known else "parts"


def _proved(bridge: TransformerBridge) -> tuple[bool, str]:
    """Whether everything is proved, and the first thing that is not."""
    try:
        report = verify(bridge)
    except (RuntimeError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        bridge.reset_hooks()
        return False, f"verification: {type(error).__name__}: {first_line(error)}"
    failed = [check for check in report.checks if not check.passed]
    return report.passed, f"not proved: {failed[0].name}: {failed[0].detail}" if failed else ""


def _processed(bridge: TransformerBridge) -> str:
    """Which transforms are done, with log probabilities as before."""
    try:
        bridge.process_weights()
    except (ProcessingError, RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"refused ({shortened(first_line(error), 60)})"
    done = [step for step, said in bridge.cfg.processed.items() if said == "done"]
    return ", ".join(done) or "none"


def rows(task: Task, known: Collection[str] = ()) -> list[Row]:
    """The rows of a task, by type, made on all cores.

    Args:
        task: the task.
        known: classes that have a row.
    """
    ours = NativeModel.config_class.model_type  # none of transformers'
    wanted = [each for each in types(task) if each != ours]
    wanted = [each for each in wanted if not known or model_class(each, task).__name__ not in known]
    with ProcessPoolExecutor(initializer=quiet, mp_context=get_context("spawn")) as pool:
        return list(pool.map(partial(row, task=task), wanted))


def named(found: Mapping[str, Row]) -> str:
    """How many of the classes that TransformerLens names are offered, and why the others are not.

    Args:
        found: rows by class.
    """
    seen = [found[name] for name in NAMED]
    offered = [each for each in seen if each.offered != "–"]
    full = sum(each.offered == "full" and each.proved for each in seen)
    parts = sum(each.offered in ("full", "parts") for each in seen)
    missing = "; ".join(f"{each.cls} ({shortened(each.reason)})" for each in seen if each.offered == "–")
    return (
        f"Of the {len(NAMED)} classes that TransformerLens 4.3.0 names and transformers has, {len(offered)} are "
        f"offered, {full} fully and proved, {parts} at least with the stream and its parts. The others: "
        f"{missing or 'none'}."
    )


def table(found: list[Row]) -> str:
    """The rows as a table."""
    head = "| type | class | adapter | offered | points | proved | processed | what is missing |"
    return "\n".join([head, "|---|---|---|---|---|---|---|---|", *map(str, found)])


def summary(found: list[Row]) -> str:
    """The rows in numbers."""
    full = sum(each.offered == "full" and each.proved for each in found)
    parts = sum(each.offered in ("full", "parts") for each in found)
    stream = sum(each.offered != "–" for each in found)
    how = Counter(each.how for each in found)
    return (
        f"Of {len(found)} types, {full} are fully offered and proved, {parts} at least with the stream and its parts, "
        f"{stream} at least with the stream; {how['declared']} have an adapter, for {how['inferred']} one is inferred."
    )


INTRODUCTION = """# Every model

<!-- Made by `make models`; a test compares some of its rows. -->

What `TransformerBridge(model)` offers of every text architecture of transformers {version}, tried on a tiny random
instance of each (`tests/tiny_models.py`): factors are not one, windows are shorter than the prompt, there is a layer of
each kind, and noise is on every parameter.

- **adapter**: *declared* by an adapter of ours, or *inferred* from one run, its hook points tried on the model
  (see [adapters](adapters.md)).
- **offered**: *full*: the stream, attention, MLP, mixture or mixer, with all that is inside; *parts*: the stream and
  what is added to it, and not all that is inside; *stream*: what enters and leaves the blocks.
- **proved**: `adapters.verify` proves every claim that is declared or inferred; where it does not, the last column says
  which.
- **processed**: the transforms of `process_weights` that are done, with the log probabilities as before.

{named}

"""


def quiet() -> None:
    """Neither transformers nor the bridge says anything while this runs."""
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity_error()
    logging.getLogger("bridge").setLevel(logging.ERROR)
    torch.set_num_threads(1)


def main(arguments: list[str]) -> None:
    """Writes the page, or prints some rows."""
    quiet()
    if arguments:
        for each in arguments:
            task, _, model_type = each.rpartition(":")
            whole = not task and each in dir(transformers)
            print(row_of_class(each) if whole else row(model_type, cast("Task", task or "causal")), flush=True)
        return
    text, by_class = "", dict[str, Row]()
    for task, title in TITLES.items():
        found = rows(task, by_class if task == "speech" else ())
        by_class |= {each.cls: each for each in reversed(found)}
        text += f"## {title}\n\n{summary(found)}\n\n{table(found)}\n\n"
        print(task, summary(found), flush=True)
    found = [row_of_class(name) for name in sorted({*NAMED} - by_class.keys())]
    by_class |= {each.cls: each for each in found}
    text += f"## {_BESIDE}\n\n{table(found)}\n"
    introduction = INTRODUCTION.format(version=transformers.__version__, named=named(by_class))
    PAGE.write_text(introduction + text, encoding="utf-8")
    print(named(by_class), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
