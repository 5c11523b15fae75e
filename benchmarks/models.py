"""Makes docs/models.md: what a bridge offers of every text architecture of transformers, tried on a tiny instance.

``python benchmarks/models.py [TYPE ...]``: without types, writes the page; with types, prints their rows.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError

from adapters import UnsupportedModelError, verify
from adapters.architecture import Opaque
from adapters.attention import Attention
from adapters.feed_forward import MLP, MoE
from adapters.mixers.part import Mixer
from bridge import TransformerBridge
from bridge.native.model import NativeModel
from tests.tiny_models import CANNOT_BE_BUILT, Task, model_class, tiny_model, types
from weight_processing.check import ProcessingError

PAGE = Path(__file__).resolve().parent.parent / "docs" / "models.md"
TITLES: dict[Task, str] = {
    "causal": "Causal language models",
    "masked": "Masked language models",
    "seq2seq": "Sequence-to-sequence models",
    "image_text": "The text of models of images and text",
}
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
    try:
        model = tiny_model(model_type, task)
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
        why = said.split("None could be inferred either: ")[-1] if "either: " in said else first_line(error)
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
    opaque = any(isinstance(step.part, Opaque) for block in blocks for step in block.steps)
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


def rows(task: Task) -> list[Row]:
    """The rows of a task, by type, made on all cores."""
    ours = NativeModel.config_class.model_type  # none of transformers'
    with ProcessPoolExecutor(initializer=quiet, mp_context=get_context("spawn")) as pool:
        return list(pool.map(partial(row, task=task), [each for each in types(task) if each != ours]))


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

- **adapter**: *declared* by an adapter of ours, or *inferred* from one run and proved on the model (see
  [adapters](adapters.md)).
- **offered**: *full*: the stream, attention, MLP, mixture or mixer, with all that is inside; *parts*: the stream and
  what is added to it, and not all that is inside; *stream*: what enters and leaves the blocks.
- **proved**: `adapters.verify` proves every claim that is declared or inferred.
- **processed**: the transforms of `process_weights` that are done, with the log probabilities as before.

"""


def quiet() -> None:
    """Neither transformers nor the bridge says anything while this runs."""
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity_error()
    logging.getLogger("bridge").setLevel(logging.ERROR)
    torch.set_num_threads(1)


def main(arguments: list[str]) -> None:
    """Writes the page, or prints the rows of some causal types."""
    quiet()
    if arguments:
        for model_type in arguments:
            print(row(model_type, "causal"), flush=True)
        return
    text = INTRODUCTION.format(version=transformers.__version__)
    for task, title in TITLES.items():
        found = rows(task)
        text += f"## {title}\n\n{summary(found)}\n\n{table(found)}\n\n"
        PAGE.write_text(text.rstrip() + "\n", encoding="utf-8")  # as far as it is: the next takes minutes, too
        print(task, summary(found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
