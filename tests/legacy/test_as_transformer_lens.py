"""Programs that import `transformer_lens` itself, each in a process of its own: it goes for a whole one."""

import subprocess
import sys

import pytest

PROGRAM = """
import bridge.legacy.as_transformer_lens
import transformer_lens
import transformer_lens.utils as utils
import transformer_lens.utilities.devices
from transformer_lens import HookedTransformer, patching
from transformer_lens.hook_points import HookPoint
from transformer_lens.HookedTransformer import HookedTransformer as again
import bridge.legacy, bridge.legacy.as_transformer_lens

assert transformer_lens is bridge.legacy
assert utils is bridge.legacy.utils and utils.__name__ == "bridge.legacy.utils"
assert HookedTransformer is again is bridge.legacy.HookedTransformer is transformer_lens.HookedTransformer
assert transformer_lens.utilities.devices.get_device is utils.get_device
assert patching.__spec__.name == "bridge.legacy.patching"
from transformer_lens.components.mlps.can_be_used_as_mlp import CanBeUsedAsMLP
from transformer_lens.components import MLP

assert issubclass(MLP, CanBeUsedAsMLP)
for line in (
    "import transformer_lens.lit.model", "from transformer_lens import lit", "from transformer_lens import factories",
    "from transformer_lens import HookedAudioEncoder", "from transformer_lens.components import BertBlock",
    "import bridge.legacy.lit", "from transformer_lens.pretrained.weight_conversions.gemma import convert",
    "from transformer_lens.HookedAudioEncoder import HookedAudioEncoder", "from transformer_lens.tools import x",
):
    try:
        exec(line)
    except ImportError as error:
        print(line, "->", error)
"""


def run(program):
    return subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True)


def test_every_way_to_import_it():
    done = run(PROGRAM)
    assert done.returncode == 0, done.stderr
    answers = dict(line.split(" -> ") for line in done.stdout.splitlines())
    assert len(answers) == 9
    unexplained = [line for line, answer in answers.items() if "docs/migration.md" not in answer]
    assert unexplained == ["from transformer_lens.tools import x"]
    assert "no connection to LIT" in answers["from transformer_lens import lit"]


@pytest.mark.parametrize("first", ["", "import bridge.legacy\n"])
def test_the_other_one_must_not_be_there_yet(first):
    done = run(f"{first}import sys, types; sys.modules['transformer_lens'] = types.ModuleType('transformer_lens')\n"
               "import bridge.legacy.as_transformer_lens")  # fmt: skip
    assert done.returncode == 1
    assert "transformer_lens has been imported already" in done.stderr
