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
try:
    import transformer_lens.components
except ModuleNotFoundError as error:
    print(error)
"""


def run(program):
    return subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True)


def test_every_way_to_import_it():
    done = run(PROGRAM)
    assert done.returncode == 0, done.stderr
    assert "No module named 'transformer_lens.components'" in done.stdout


@pytest.mark.parametrize("first", ["", "import bridge.legacy\n"])
def test_the_other_one_must_not_be_there_yet(first):
    done = run(f"{first}import sys, types; sys.modules['transformer_lens'] = types.ModuleType('transformer_lens')\n"
               "import bridge.legacy.as_transformer_lens")  # fmt: skip
    assert done.returncode == 1
    assert "transformer_lens has been imported already" in done.stderr
