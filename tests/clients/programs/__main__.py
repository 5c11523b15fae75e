"""Runs functions of one checkout, and stores numbers.

`python -m tests.clients.programs NAME FOLDER FILE [ours [OPTIONS]]`.
"""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import sys
from types import ModuleType
from unittest.mock import MagicMock

import torch

#: What programs import for pictures, logs and tables of results, and nothing that is run here
#: needs.
UNUSED = (
    "wandb",
    "pygraphviz",
    "cmapy",
    "plotly",
    "networkx",
    "matplotlib",
    "seaborn",
    "zstandard",
    "tracr",
    "jax",
    "chex",
    "haiku",
    "cloudpickle",
)


class Nothing(ModuleType):
    """A module that has every name."""

    __path__ = ()

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock()


class Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules of packages that are not used."""

    def __init__(self, packages: tuple[str, ...]) -> None:
        self.packages = packages

    def find_spec(self, name, path=None, target=None):
        return (
            importlib.machinery.ModuleSpec(name, self)
            if name.partition(".")[0] in self.packages
            else None
        )

    def create_module(self, spec):
        return Nothing(spec.name)

    def exec_module(self, module):
        pass


def main(name: str, folder: str, file: str, whose: str = "theirs", options: str = "{}") -> None:
    """Runs one program with the one library or the other; `options` are those of its `numbers`, in
    JSON.
    """
    torch.set_num_threads(1)
    if whose == "ours":
        import bridge.legacy.as_transformer_lens  # noqa: F401  # before the program imports the other one
    import transformer_lens

    is_ours = transformer_lens.__name__.startswith("bridge")
    assert is_ours == (whose == "ours"), transformer_lens.__file__
    sys.meta_path.append(Absent(UNUSED))  # behind the finders of what is installed
    sys.path.insert(0, folder)
    program = importlib.import_module(f"tests.clients.programs.{name}")
    torch.manual_seed(0)
    found = program.numbers(**json.loads(options))
    torch.save(
        {key: torch.as_tensor(value).detach().double() for key, value in found.items()}, file
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
