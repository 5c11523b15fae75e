"""Each line of the table in docs/what_you_have.md gives a bridge that runs the model that is
there.
"""

import re
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from bridge import TransformerBridge
from bridge.embedded import MODEL_DIR
from tests.docs.site import ROOT

PAGE = (ROOT / "docs" / "what_you_have.md").read_text(encoding="utf-8")
ROWS = [
    row.split(" | ")
    for row in re.findall(r"^\| (.* \| .*) \|$", PAGE.split("## ")[0], re.MULTILINE)
][1:]
TEXT = "When Mary and John went to the store"


def loaded():
    return AutoModelForCausalLM.from_pretrained(MODEL_DIR).eval()


def runs_it(bridge, model):
    tokens = bridge.to_tokens(TEXT)
    assert torch.equal(bridge(tokens), model(tokens).logits)
    _, cache = bridge.run_with_cache(tokens)
    assert cache["pattern", 1].shape[-1] == tokens.shape[1]
    changed = bridge.run_with_hooks(
        tokens, fwd_hooks=[("blocks.1.attn.hook_z", lambda z, hook: z * 0)]
    )
    assert not torch.equal(changed, bridge(tokens))


def folder(tmp_path):
    shutil.copytree(MODEL_DIR, tmp_path / "model")
    runs_it(TransformerBridge.boot_transformers(str(tmp_path / "model")), loaded())


def gguf(tmp_path):
    pytest.importorskip("gguf", reason="reading GGUF needs the package; `make real` runs one")


def model(tmp_path):
    mine = loaded()
    bridge = TransformerBridge(mine, AutoTokenizer.from_pretrained(MODEL_DIR))
    assert bridge.original_model is mine
    runs_it(bridge, mine)


def quantised(tmp_path):
    """By torch itself: eight-bit weights, as packages for accelerators have them, in modules of
    another class.
    """
    mine = torch.ao.quantization.quantize_dynamic(loaded(), {torch.nn.Linear}, dtype=torch.qint8)
    assert any(
        "Quantized" in type(module).__name__ or "dynamic" in type(module).__module__
        for module in mine.modules()
    )
    runs_it(TransformerBridge(mine, AutoTokenizer.from_pretrained(MODEL_DIR)), mine)


def lora(tmp_path):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj", "down_proj"], r=2, init_lora_weights=False)
    mine = peft.get_peft_model(loaded(), config).eval()
    bridge = TransformerBridge(mine, AutoTokenizer.from_pretrained(MODEL_DIR))
    assert not torch.equal(
        bridge(TEXT), TransformerBridge.boot_embedded()(TEXT)
    )  # the adapter is part of the run
    runs_it(bridge, mine)


def devices(tmp_path):
    pytest.importorskip("accelerate")
    bridge = TransformerBridge.boot_transformers(str(MODEL_DIR), device_map="auto")
    runs_it(bridge, bridge.original_model)


def own_class(tmp_path):
    from transformers import LlamaForCausalLM

    class Mine(LlamaForCausalLM):
        pass

    mine = Mine.from_pretrained(MODEL_DIR).eval()
    runs_it(TransformerBridge(mine, AutoTokenizer.from_pretrained(MODEL_DIR)), mine)


def hooked_transformer(tmp_path):
    from bridge.legacy import HookedTransformer

    old = HookedTransformer.from_pretrained(str(MODEL_DIR), device="cpu")
    assert old.run_with_cache(TEXT)[1]["pattern", 0].ndim == 4


def nnsight(tmp_path):
    bridge = TransformerBridge.boot_embedded()
    with bridge.trace(TEXT) as run:
        run["blocks.1.attn.hook_z"] = run["blocks.1.attn.hook_z"] * 0
    changed = bridge.run_with_hooks(
        TEXT, fwd_hooks=[("blocks.1.attn.hook_z", lambda z, hook: z * 0)]
    )
    assert torch.equal(run.logits, changed)


def nothing(tmp_path):
    bridge = TransformerBridge.boot_embedded()
    runs_it(bridge, bridge.original_model)


CASES = {
    "a name on the hub": folder,  # the same call, of what has been downloaded
    "a folder": folder,
    "a GGUF file": gguf,
    "a loaded model": model,
    "a quantised model": quantised,
    "a LoRA model (PEFT)": lora,
    "a model on several devices": devices,
    "a class of your own": own_class,
    "a HookedTransformer script": hooked_transformer,
    "an nnsight script": nnsight,
    "nothing yet": nothing,
}


def test_every_line_is_run():
    assert [row[0] for row in ROWS if not row[0].startswith("---")][-len(CASES) :] == list(CASES)


@pytest.mark.parametrize("line", CASES)
@pytest.mark.filterwarnings("ignore:.*deprecated")  # of torch.ao, and of a method that peft calls
def test_it_gives_a_bridge(line, tmp_path):
    CASES[line](tmp_path)
