"""What `cfg` says after somebody else has changed the model: it is read from the model when it is
asked for.
"""

import copy
import pickle

import accelerate
import peft
import pytest
import torch
from transformers import GPT2LMHeadModel

from bridge import TransformerBridge
from tests.adapters.test_verify_all import tiny
from tests.conftest import tiny as made

TOKENS = torch.randint(3, 61, (2, 6), generator=torch.Generator().manual_seed(0))
ASKED = ("fold_ln", "center_writing_weights", "center_unembed", "fold_value_biases")


def facts(bridge):
    cfg = bridge.cfg
    return (
        cfg.processed,
        cfg.normalization_type,
        cfg.tie_word_embeddings,
        cfg.d_vocab,
        cfg.d_vocab_out,
    )


@pytest.mark.parametrize("case", ["gpt2", "llama-gqa"])
def test_another_bridge_processed_the_model(case):
    model = tiny(case)
    one, other = TransformerBridge(model), TransformerBridge(model)
    kind = other.cfg.normalization_type
    _ = other.W_U, other.b_O  # what was asked for before is asked for again
    one.process_weights()
    assert facts(other) == facts(one)
    assert other.cfg.processed["fold_ln"] == "done"
    assert other.cfg.normalization_type == f"{kind}Pre" == other.cfg.to_dict()["normalization_type"]
    weights = {name: p.clone() for name, p in model.named_parameters()}
    other.process_weights()  # nothing is done twice
    assert all(torch.equal(p, weights[name]) for name, p in model.named_parameters())
    for name in one.weights.getters:
        assert torch.equal(one.weights[name], other.weights[name]), name
    assert facts(TransformerBridge(model)) == facts(one)


def test_another_bridge_did_more():
    model = tiny("gpt2")
    one, other = TransformerBridge(model), TransformerBridge(model)
    one.process_weights(
        fold_ln=True, center_writing_weights=False, center_unembed=False, fold_value_biases=False
    )
    other.process_weights()
    assert one.cfg.processed == other.cfg.processed == dict.fromkeys(ASKED, "done")


@pytest.mark.parametrize("how", ["load_state_dict", "copy_", "replaced"])
def test_raw_weights_were_loaded(how):
    model = tiny("gpt2")
    raw = copy.deepcopy(model.state_dict())
    bridge = TransformerBridge(model)
    expected = bridge(TOKENS)
    bridge.process_weights()
    assert bridge.cfg.normalization_type == "LNPre"
    bias = model.lm_head.bias
    if how == "load_state_dict":
        model.load_state_dict(raw | {"lm_head.bias": torch.zeros_like(bias)})
    else:
        for name, value in [*raw.items(), ("lm_head.bias", torch.zeros_like(bias))]:
            module, _, parameter = name.rpartition(".")
            holder = model.get_submodule(module)
            if how == "copy_":
                with torch.no_grad():
                    getattr(holder, parameter).copy_(value)
            else:
                setattr(holder, parameter, torch.nn.Parameter(value.clone()))
    assert torch.equal(bridge(TOKENS), expected)
    assert bridge.cfg.processed == {}
    assert bridge.cfg.normalization_type == "LN"
    bridge.process_weights()
    assert bridge.cfg.processed == dict.fromkeys(ASKED, "done")
    assert bridge.cfg.normalization_type == "LNPre"
    torch.testing.assert_close(
        bridge(TOKENS).log_softmax(-1), expected.log_softmax(-1), atol=1e-4, rtol=1e-4
    )


@pytest.mark.parametrize("size", [50, 75])
@pytest.mark.parametrize("case", ["gpt2", "llama-gqa", "opt", "bloom"])
def test_embeddings_were_resized(case, size):
    model = tiny(case)
    bridge = TransformerBridge(model)
    assert (bridge.cfg.d_vocab, bridge.cfg.d_vocab_out) == (61, 61)
    _ = bridge.b_U
    with torch.random.fork_rng():
        model.resize_token_embeddings(size, mean_resizing=False)
    cfg = bridge.cfg
    assert (cfg.d_vocab, cfg.d_vocab_out, cfg.to_dict()["d_vocab"]) == (size, size, size)
    assert f"{size} tokens" in repr(bridge)
    assert bridge.W_E.shape[0] == bridge.W_U.shape[1] == len(bridge.b_U) == size
    assert bridge(torch.tensor([[size - 1]])).shape[-1] == size
    with pytest.raises(ValueError, match=f"d_vocab - 1 = {size - 1}"):
        bridge(torch.tensor([[size]]))
    expected = bridge(TOKENS % size).log_softmax(-1)
    bridge.process_weights()  # whose check takes random tokens
    torch.testing.assert_close(
        bridge(TOKENS % size).log_softmax(-1), expected, atol=1e-4, rtol=1e-4
    )


@pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)  # PEFT asks for it
def test_weights_that_cannot_be_looked_at():
    """Where LoRA or accelerate come before them, what was known is what is known."""
    bridge = TransformerBridge(tiny("llama-gqa"))
    bridge.process_weights()
    done = dict(bridge.cfg.processed)
    accelerate.cpu_offload(bridge.original_model, execution_device="cpu")
    assert bridge.cfg.processed == done
    bridge = TransformerBridge(tiny("llama-gqa"))
    bridge.process_weights()
    peft.get_peft_model(
        bridge.original_model, peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"])
    )
    assert bridge.cfg.processed == done
    assert bridge.cfg.normalization_type == "RMSPre"


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda bridge: pickle.loads(pickle.dumps(bridge))]
)
def test_copies_of_a_bridge_read_their_own_model(copied):
    bridge = TransformerBridge(made("gpt2"))
    other = copied(bridge)
    other.process_weights()
    same = other.original_model is bridge.original_model
    assert other.cfg.normalization_type == "LNPre"
    assert (bridge.cfg.normalization_type == "LNPre") is same
    assert (bridge.cfg.processed == other.cfg.processed) is same


def test_a_model_saved_after_raw_weights_were_loaded_is_raw(tmp_path):
    model = made("gpt2")
    raw = copy.deepcopy(model.state_dict())
    bridge = TransformerBridge(model)
    expected = bridge(TOKENS)
    bridge.process_weights()
    model.load_state_dict(raw | {"lm_head.bias": torch.zeros(61)})
    model.save_pretrained(tmp_path)
    loaded = TransformerBridge(GPT2LMHeadModel.from_pretrained(tmp_path).eval())
    assert loaded.cfg.processed == {}
    torch.testing.assert_close(loaded(TOKENS), expected)
