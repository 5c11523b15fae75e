"""Programs that import `transformer_lens` itself, each in a process of its own: it goes for a whole
one.
"""

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
assert utils is bridge.legacy.utils and utils.__name__ == "bridge.legacy.utilities"
assert HookedTransformer is again is bridge.legacy.HookedTransformer is transformer_lens.HookedTransformer
assert transformer_lens.utilities.devices.get_device is utils.get_device
assert patching.__spec__.name == "bridge.legacy.studies"
from transformer_lens.components.mlps.can_be_used_as_mlp import CanBeUsedAsMLP
from transformer_lens.components import MLP

assert issubclass(MLP, CanBeUsedAsMLP)
for line in (
    "import transformer_lens.lit.model", "from transformer_lens import lit", "from transformer_lens import factories",
    "from transformer_lens import HookedAudioEncoder", "from transformer_lens.components import BertBlock",
    "import bridge.legacy.lit", "from transformer_lens.pretrained.weight_conversions.gemma import convert",
    "from transformer_lens.HookedAudioEncoder import HookedAudioEncoder",
    "from transformer_lens.tools.analysis import fit_das",
    "from transformer_lens.nothing import x",
):
    try:
        exec(line)
    except ImportError as error:
        print(line, "->", error)
"""


VERSION_4 = """
import importlib.metadata
import bridge.legacy.as_transformer_lens
import bridge.legacy
import transformer_lens
from transformer_lens import TransformerBridge, TransformerBridgeConfig, TransformerLensKeyValueCache
from transformer_lens.cache.key_value_cache import TransformerLensKeyValueCache as cache
from transformer_lens.config import TransformerBridgeConfig as config
from transformer_lens.hook_points import HookPoint
from transformer_lens.HookedRootModule import HookedRootModule
from transformer_lens.model_bridge import AttentionBridge, BlockBridge, MLPBridge, TransformerBridge as bridge_class
from transformer_lens.model_bridge.generalized_components.base import GeneralizedComponent
from transformer_lens.model_bridge.sources import build_bridge_from_module
from transformer_lens.utilities import Slice, get_device, test_prompt, to_numpy
from transformer_lens.utilities.devices import get_device as again
import transformer_lens.utilities.tensors as tensors

assert tensors.to_numpy is to_numpy and get_device is again
assert TransformerBridge is bridge_class is bridge.legacy.TransformerBridge
assert TransformerBridgeConfig is config and TransformerLensKeyValueCache is cache
assert HookedRootModule is transformer_lens.HookedRootModule
model = TransformerBridge.boot_native(TransformerBridgeConfig(n_layers=1, d_model=8, d_head=4, n_ctx=5, d_vocab=9))
assert all(isinstance(point, HookPoint) for point in model.hook_dict.values())
assert isinstance(model.blocks[0], BlockBridge) and isinstance(model.blocks[0].attn, AttentionBridge)
assert isinstance(model.blocks[0].mlp, MLPBridge) and isinstance(model.blocks[0].ln1, GeneralizedComponent)
again = build_bridge_from_module(model.original_model, model_name="again")
assert again.original_model is model.original_model and again.cfg.model_name == "again"
assert importlib.metadata.version("transformer-lens") == "4.3.0" == importlib.metadata.version("transformer_lens")
with bridge.legacy.as_transformer_lens.version("2.18.0"):
    assert importlib.metadata.version("transformer-lens") == "2.18.0"
assert importlib.metadata.version("transformer-lens") == "4.3.0"
assert importlib.metadata.version("torch")
"""


def test_version_4():
    done = run(VERSION_4)
    assert done.returncode == 0, done.stderr


def run(program):
    return subprocess.run(
        [sys.executable, "-c", program], check=False, capture_output=True, text=True
    )


def test_every_way_to_import_it():
    done = run(PROGRAM)
    assert done.returncode == 0, done.stderr
    answers = dict(line.split(" -> ") for line in done.stdout.splitlines())
    assert len(answers) == 10
    unexplained = [line for line, answer in answers.items() if "docs/migration.md" not in answer]
    assert unexplained == ["from transformer_lens.nothing import x"]
    assert "no connection to LIT" in answers["from transformer_lens import lit"]


@pytest.mark.parametrize("first", ["", "import bridge.legacy\n"])
def test_the_other_one_must_not_be_there_yet(first):
    done = run(
        f"{first}import sys, types; sys.modules['transformer_lens'] ="
        " types.ModuleType('transformer_lens')\nimport bridge.legacy.as_transformer_lens"
    )
    assert done.returncode == 1
    assert "transformer_lens has been imported already" in done.stderr
