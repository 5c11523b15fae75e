"""How much each tolerance of inference may vary before a tiny model is inferred differently: a
table.

    python tools/tolerances.py [EVERY]

Every EVERY-th type of `tests/tiny_models.py` (7) is inferred with each constant times 1/1000 to
1000, one constant at a time. What it is compared with is what is inferred with the constants as
they are.
"""

from __future__ import annotations

import importlib
import logging
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import pytest
import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from torch import nn

from adapters.automatic.automatic import Inferred, infer
from adapters.observe.observe import NotFound
from tests.tiny_models import Task, tiny_model, types

FACTORS = (1e-3, 1e-2, 1e-1, 1 / 3, 3, 10, 100, 1000)
CONSTANTS = (
    ("adapters.observe.recognised", "TOLERANCES"),
    ("adapters.observe.recognised", "_WORKED_OUT"),
    ("adapters.observe.recognised", "FITTED"),
    ("adapters.observe.recognised", "NEGLIGIBLE"),
    ("adapters.automatic.facts", "_FAR_BELOW"),
)
TASKS: tuple[Task, ...] = ("causal", "masked", "seq2seq")


@contextmanager
def scaled(module: str, name: str, factor: float) -> Iterator[None]:
    """Inside, a constant is another, in every file that imported it."""
    old = getattr(importlib.import_module(module), name)
    new = (
        {key: value * factor for key, value in old.items()}
        if isinstance(old, Mapping)
        else old * factor
    )
    files = [
        file
        for path, file in sys.modules.items()
        if path.startswith("adapters.") and vars(file).get(name) is old
    ]
    try:
        for file in files:
            setattr(file, name, new)
        yield
    finally:
        for file in files:
            setattr(file, name, old)


def inferred(model: nn.Module) -> Inferred | str:
    """What is inferred for a model, or why nothing is."""
    try:
        return infer(model)
    except NotFound as why:
        return str(why)


def models(every: int) -> dict[str, nn.Module]:
    """Tiny models of a sample of the types."""
    names = [(task, name) for task in TASKS for name in types(task)][::every]
    found: dict[str, nn.Module] = {}
    for task, name in names:
        try:
            found[f"{task}:{name}"] = tiny_model(name, task)
        except (ImportError, ValueError, StrictDataclassError, pytest.skip.Exception) as why:
            print(f"{name} cannot be made: {why}", file=sys.stderr)
    return found


def main() -> None:
    """Prints the table."""
    sample = models(int(sys.argv[1]) if len(sys.argv) > 1 else 7)
    usual = {name: inferred(model) for name, model in sample.items()}
    print(f"{len(sample)} types; how many are inferred differently with a constant times")
    print("| constant | " + " | ".join(f"{factor:.3g}" for factor in FACTORS) + " |")
    print("|---" * (len(FACTORS) + 1) + "|")
    for module, name in CONSTANTS:
        counts = []
        for factor in FACTORS:
            with scaled(module, name, factor):
                other = [case for case, model in sample.items() if inferred(model) != usual[case]]
            counts.append(str(len(other)))
            print(f"{name} x {factor:.3g}: {' '.join(other)}", file=sys.stderr)
        print(f"| `{name}` | " + " | ".join(counts) + " |", flush=True)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    main()
