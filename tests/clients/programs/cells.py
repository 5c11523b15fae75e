"""Notebooks and `# %%` files as programs: each cell in turn, and the numbers that its names hold
afterwards.

Nothing is fetched: models are looked up in a small hub of random ones (`HF_HUB_CACHE`), saved
weights are the model's own, and what only draws is replaced.
"""

import json
import os
import random
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from types import ModuleType

import numpy as np
import torch

from tests.clients.programs import hub
from tests.clients.programs.__main__ import Absent

#: What draws, logs, or fetches; whether installed or not.
PICTURES = (
    "IPython",
    "circuitsvis",
    "gdown",
    "ipywidgets",
    "neel_plotly",
    "plotly",
    "pysvelte",
    "torchtyping",
    "wandb",
    "dotenv",
)
#: What HookedTransformer's `state_dict` has besides weights.
_NOT_OURS = (".mask", ".IGNORE")
#: What a cell may stop with that needs what is not here: data, a network, a model that was trained.
STOPS = (AssertionError, LookupError, NameError, OSError, RuntimeError, TypeError, ValueError)
#: Of a tensor, as many numbers as are compared.
KEPT = 2000


def cells_of(file: Path) -> list[str]:
    """The cells of a notebook, or of a file of `# %%` cells, without a notebook's commands."""
    if file.suffix == ".py":
        return file.read_text().split("\n# %%")
    book = json.loads(file.read_text())
    codes = ["".join(cell["source"]) for cell in book["cells"] if cell["cell_type"] == "code"]
    return [re.sub(r"^(\s*)[%!].*", r"\1pass", code, flags=re.MULTILINE) for code in codes]


def _is_number(value: object) -> bool:
    return isinstance(value, (float, int, np.number)) and not isinstance(value, bool)


def _kept(value: object) -> torch.Tensor | None:
    """What of a value is compared: a tensor's numbers at even steps, in float64."""
    if isinstance(value, np.ndarray) and value.dtype.kind in "fiu":
        value = torch.from_numpy(value.copy())
    if _is_number(value):
        value = torch.tensor(float(value))
    if not isinstance(value, torch.Tensor) or not value.numel() or value.is_complex():
        return None
    flat = value.detach().flatten().double()
    return flat[:: max(1, len(flat) // KEPT)]


def _numbers_of(name: str, value: object) -> dict[str, torch.Tensor]:
    if isinstance(value, (torch.nn.Module, ModuleType, type)):
        return {}
    if hasattr(value, "get_corner"):  # a FactoredMatrix, whose product may be too large
        value = [value.norm(), value.get_corner()]
    if isinstance(value, (list, tuple)):
        value = dict(enumerate(value))
    if isinstance(value, Mapping) or hasattr(value, "cache_dict"):
        parts = {
            f"{name}[{key}]": _kept(part)
            for key, part in value.items()
            if not str(key).endswith(_NOT_OURS)
        }
        return {key: part for key, part in sorted(parts.items()) if part is not None}
    kept = _kept(value)
    return {} if kept is None else {name: kept}


def _stand_ins(names: dict) -> None:
    """What would draw, or ask a network."""
    for name in [name for name in sys.modules if name.partition(".")[0] in PICTURES]:
        del sys.modules[name]
    sys.meta_path.insert(0, Absent(PICTURES))
    names["display"] = lambda *args, **options: None
    import huggingface_hub
    import tqdm
    import tqdm.notebook
    from transformer_lens import utils

    def saved(*args: object, **options: object) -> str:
        file = Path(tempfile.mkdtemp()) / "model.pth"
        torch.save(names["model"].state_dict(), file)
        return str(file)

    fetched = utils.download_file_from_hf

    def weights(repo_name: str, *args: object, **options: object) -> object:
        there = hub.place(repo_name).exists()
        return fetched(repo_name, *args, **options) if there else names["model"].state_dict()

    hub.offline()
    tqdm.notebook.tqdm = tqdm.tqdm
    huggingface_hub.hf_hub_download = saved
    utils.download_file_from_hf = weights
    os.system = lambda command: 1


def numbers(
    file: str, skip: Sequence[int] = (), edits: Mapping[str, str] | None = None
) -> dict[str, torch.Tensor]:
    """Runs a file's cells, each after the same seed, and returns numbers by cell and name.

    Args:
        file: in the folder that is imported from.
        skip: cells that may stop, whose numbers are not compared.
        edits: what is written in the place of what.
    """
    program = ModuleType("__main__")
    names = program.__dict__
    place = Path(sys.path[0]) / file
    names["__file__"] = str(place)
    sys.modules["__main__"] = program
    _stand_ins(names)
    os.chdir(place.parent)
    sys.path.insert(0, str(place.parent))
    found, before = {}, {}
    for i, cell in enumerate(cells_of(place)):
        for old, new in (edits or {}).items():
            cell = cell.replace(old, new)
        torch.manual_seed(i), np.random.seed(i), random.seed(i)
        with suppress(*STOPS) if i in skip else nullcontext():
            exec(compile(cell, f"{place.name} [{i}]", "exec"), names)
        for name, value in list(names.items()):
            if name.startswith("_") or before.get(name, numbers) is value:
                continue
            before[name] = value
            if i not in skip:
                found |= {
                    f"[{i}] {key}": number for key, number in _numbers_of(name, value).items()
                }
    return found
