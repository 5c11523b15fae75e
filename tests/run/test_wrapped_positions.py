"""A module of plain torch around a model with position embeddings: left-padded rows are the same
as alone where its forward names `position_ids`, and refused where it does not.
"""

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from bridge import TransformerBridge

ROW = torch.tensor([[3, 9, 4, 1, 7]])
BOTH = torch.tensor([[0, 0, 3, 9, 4, 1, 7], [5, 2, 8, 6, 1, 9, 3]])
MASK = (torch.arange(7) >= torch.tensor([[2], [0]])).long()


class Wrapper(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model, self.config = model, model.config


class Named(Wrapper):
    def forward(self, input_ids, attention_mask=None, position_ids=None):
        return self.model(input_ids, attention_mask=attention_mask, position_ids=position_ids)


class Hidden(Wrapper):
    def forward(self, input_ids, attention_mask=None):
        return self.model(input_ids, attention_mask=attention_mask)


class Anything(Wrapper):
    def forward(self, input_ids, **kwargs):
        return self.model(input_ids, **kwargs)


def learned():
    torch.manual_seed(0)
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    return GPT2LMHeadModel(GPT2Config(vocab_size=11, initializer_range=0.5, **sizes)).eval()


def rotary():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=11, num_attention_heads=4, **sizes)).eval()


@pytest.mark.parametrize(
    ("wrapper", "model"), [(Named, learned), (Named, rotary), (Hidden, rotary), (Anything, rotary)]
)
def test_a_left_padded_row_is_the_same_as_alone(wrapper, model):
    bridge = TransformerBridge(wrapper(model()))
    alone, padded = bridge(ROW)[0], bridge(BOTH, attention_mask=MASK)[0, 2:]
    torch.testing.assert_close(padded, alone, atol=1e-5, rtol=1e-5)


def test_generation_passes_the_positions_on():
    bridge = TransformerBridge(Named(learned()))
    options = {"max_new_tokens": 6, "do_sample": False, "verbose": False, "stop_at_eos": False}
    alone = bridge.generate(ROW, **options)[0, -6:]
    assert torch.equal(bridge.generate(BOTH, attention_mask=MASK, **options)[0, -6:], alone)


@pytest.mark.parametrize("wrapper", [Hidden, Anything])
def test_hidden_positions_are_refused(wrapper):
    bridge = TransformerBridge(wrapper(learned()))
    with pytest.raises(ValueError, match=f"{wrapper.__name__} does not name position_ids"):
        bridge(BOTH, attention_mask=MASK)
    bridge(BOTH.flip(-1), attention_mask=MASK.flip(-1))  # right-padded


def test_generation_refuses_hidden_positions():
    bridge = TransformerBridge(Hidden(learned()))
    with pytest.raises(ValueError, match="generate takes prompts of one length"):
        bridge.generate(BOTH, attention_mask=MASK, max_new_tokens=2, verbose=False)


def test_wrapping_leaves_the_mode_of_the_model():
    wrapper = Hidden(learned())  # the wrapper itself is in training mode
    TransformerBridge(wrapper)
    assert wrapper.training and not wrapper.model.training
