"""Input that a model cannot take is refused before anything runs, by name, and leaves everything as
it was.
"""

from __future__ import annotations

import types

import pytest
import torch
import transformers
from torch import nn

from adapters.registry import UnsupportedModelError
from bridge import TransformerBridge
from bridge.arguments import CannotBeDoneError
from bridge.run.tokenization import TokenizerFacts
from tests.adapters.test_verify_all import tiny
from tests.conftest import torch_hooks

CASES = ("gpt2", "llama-gqa", "opt", "bert", "t5")
TOKENS = torch.randint(1, 61, (2, 7), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module", params=CASES)
def bridge(request: pytest.FixtureRequest) -> TransformerBridge:
    return TransformerBridge(tiny(request.param))


WRONG_INPUT = {
    "id-too-high": (
        torch.tensor([[1, 2], [3, 61]]),
        ValueError,
        r"token id 61 at \[1, 1\]; \w+ has ids .* = 60",
    ),
    "id-far-too-high": ([[1, 2**40]], ValueError, r"token id 1099511627776 at \[0, 1\]"),
    "id-below-zero": (torch.tensor([[1, -1]]), ValueError, r"token id -1 at \[0, 1\]"),
    "float-tokens": (
        TOKENS.float(),
        ValueError,
        r"d_model=32.*tokens must be whole numbers, and this is torch.float32",
    ),
    "float-list": ([[1.0, 2.0]], TypeError, "row 0 holds 1.0; tokens must be whole numbers"),
    "bool-list": ([True, False], TypeError, "the input holds True"),
    "bool-tensor": (torch.tensor([True, False]), TypeError, "whole numbers, not torch.bool"),
    "ragged": ([[1, 2], [3]], ValueError, "rows of the input have 2, 1 tokens; pad them"),
    "ragged-tensors": ([torch.tensor([1, 2]), torch.tensor([3])], TypeError, "must be one tensor"),
    "row-among-ids": ([[1, 2], 3], TypeError, "row 1 of the input is 3"),
    "zero-batch": (
        torch.zeros(0, 3, dtype=torch.long),
        ValueError,
        r"no rows: its shape is \[0, 3\]",
    ),
    "zero-length": (
        torch.zeros(2, 0, dtype=torch.long),
        ValueError,
        r"no tokens: its shape is \[2, 0\]",
    ),
    "empty-list": ([], ValueError, "the list is empty"),
    "empty-row": ([[]], ValueError, "its rows are empty"),
    "none": (
        None,
        TypeError,
        "there is no input: give a text|the input is NoneType; it must be a text",
    ),
    "text-among-ids": ([1, "a"], TypeError, "holds 'a'; tokens must be whole numbers"),
    "id-among-texts": (["a", 1], TypeError, "text 1 is 1, which is no string"),
    "narrow-embeddings": (torch.zeros(1, 3, 5), ValueError, r"d_model=32\], not \[1, 3, 5\]"),
    "empty-embeddings": (torch.zeros(0, 3, 32), ValueError, "no tokens: the embeddings have shape"),
    "wide-type-embeddings": (
        torch.zeros(1, 3, 32, dtype=torch.float64),
        TypeError,
        r"use \.to\(torch\.float32\)",
    ),
    "four-axes": (
        torch.zeros(1, 1, 1, 1, dtype=torch.long),
        ValueError,
        r"\[pos\] or \[batch, pos\]",
    ),
}


@pytest.mark.unchecked
@pytest.mark.parametrize("case", WRONG_INPUT)
def test_wrong_input(bridge, case):
    wrong, error, words = WRONG_INPUT[case]
    before = {name: p.clone() for name, p in bridge.original_model.named_parameters()}
    calls = [lambda: bridge(wrong), lambda: bridge.run_with_cache(wrong)]
    calls.append(
        lambda: bridge.run_with_hooks(
            wrong, fwd_hooks=[(next(iter(bridge.hook_dict)), lambda x, hook: x)]
        )
    )
    if bridge.core.can_generate():
        calls += [lambda: bridge.generate(wrong, verbose=False), lambda: bridge.hf_generate(wrong)]
        calls.append(lambda: list(bridge.generate_stream(wrong, verbose=False)))
    for call in calls:
        with pytest.raises(error, match=words if "prompt" not in words else None) as caught:
            call()
        assert caught.tb is not None
        frames = [str(entry.path) for entry in caught.traceback]
        assert "/bridge/" in frames[-1], frames[-1]  # it is ours, and the model was not asked
    assert torch_hooks(bridge.original_model) == 0
    assert all(torch.equal(before[name], p) for name, p in bridge.original_model.named_parameters())


@pytest.mark.parametrize(
    "dtype", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.uint16, torch.uint32]
)
def test_every_type_of_whole_number(bridge, dtype):
    narrow = TOKENS.to(dtype)
    assert torch.equal(bridge(narrow), bridge(TOKENS))
    for name, value in bridge.run_with_cache(narrow)[1].items():
        assert torch.equal(value, bridge.run_with_cache(TOKENS, names_filter=name)[1][name]), name
        break
    if bridge.cfg.attention_dir == "causal" and not bridge.core.config.is_encoder_decoder:
        assert torch.equal(bridge(narrow, return_type="loss"), bridge(TOKENS, return_type="loss"))
        new = {"max_new_tokens": 2, "do_sample": False, "verbose": False}
        assert torch.equal(bridge.generate(narrow, **new), bridge.generate(TOKENS, **new))


def test_decoder_tokens_out_of_range():
    bridge = TransformerBridge(tiny("t5"))
    with pytest.raises(ValueError, match=r"decoder_input_ids has token id 99 at \[0, 1\]"):
        bridge(TOKENS[:1], decoder_input_ids=torch.tensor([[0, 99]]))


@pytest.mark.unchecked
def test_a_tokenizer_given_as_a_string():
    model = tiny("gpt2")
    with pytest.raises(TypeError, match=r"tokenizer is 'gpt2'.*AutoTokenizer"):
        TransformerBridge(model, "gpt2")


def test_mistyped_methods(bridge):
    for wrong, right in (
        ("run_with_cahce", "run_with_cache"),
        ("generat", "generate"),
        ("to_token", "to_tokens"),
    ):
        with pytest.raises(AttributeError, match=f"has no '{wrong}'.* {right}"):
            getattr(bridge, wrong)


@pytest.mark.unchecked
@pytest.mark.parametrize("index", [slice(0, 2), "0", 1.0, True, None])
def test_an_index_of_the_blocks_is_a_number(index):
    bridge = TransformerBridge(tiny("gpt2"))
    with pytest.raises(TypeError, match=r"an index must be a whole number.*bridge.blocks\[i\]"):
        bridge.blocks[index]
    with pytest.raises(IndexError, match="has 2 members; 2 is out of range"):
        bridge.blocks[2]


@pytest.mark.unchecked
@pytest.mark.parametrize("pos_slice", [7, -8, [0, 7], slice(7, 9), slice(3, 3)])
def test_positions_out_of_range(bridge, pos_slice):
    name = next(iter(bridge.hook_dict))
    with pytest.raises(IndexError, match=r"pos_slice is .* 7 positions"):
        bridge.run_with_cache(TOKENS, names_filter=name, pos_slice=pos_slice)
    assert torch_hooks(bridge.original_model) == 0
    for wrong in ("last", [0.5], [True]):
        with pytest.raises(TypeError, match="must be an index, a slice, or a list of indices"):
            bridge.run_with_cache(TOKENS, names_filter=name, pos_slice=wrong)


@pytest.mark.parametrize("return_type", ["loss", "both", "predictions"])
def test_a_loss_needs_all_logits(return_type):
    bridge = TransformerBridge(tiny("llama-gqa"))
    with pytest.raises(
        ValueError, match=f"return_type='{return_type}' needs the logits of every position"
    ):
        bridge(TOKENS, return_type=return_type, logits_to_keep=1)
    assert torch.equal(
        bridge(TOKENS, logits_to_keep=1), bridge.original_model(TOKENS, logits_to_keep=1).logits
    )


@pytest.mark.parametrize("case", ["gpt2", "llama-gqa"])
def test_a_block_that_was_deleted(case):
    bridge = TransformerBridge(tiny(case))
    blocks = bridge.original_model.get_submodule(bridge.block_paths[1].rpartition(".")[0])
    del blocks[1]
    words = r"has no module [\w.]+\.1[\w.]*\. If it was replaced.*make a new bridge"
    assert torch.equal(bridge(TOKENS), bridge.original_model(TOKENS).logits)
    for call in (
        lambda: bridge.run_with_cache(TOKENS),
        lambda: bridge.run_with_cache(TOKENS, names_filter="blocks.1.hook_resid_pre"),
        lambda: bridge.run_with_hooks(
            TOKENS, fwd_hooks=[("blocks.1.attn.hook_z", lambda x, hook: x)]
        ),
        lambda: bridge.add_hook("blocks.1.attn.hook_pattern", lambda x, hook: x),
        lambda: bridge(TOKENS, stop_at_layer=2),
        lambda: bridge(torch.zeros(1, 2, 32), start_at_layer=2),
        lambda: bridge.W_Q,
    ):
        with pytest.raises(RuntimeError, match=words):
            call()
        assert torch_hooks(bridge.original_model) == 0
    assert not bridge.wiring.listening
    new = TransformerBridge(bridge.original_model)
    assert torch.equal(new.run_with_cache(TOKENS)[0], bridge(TOKENS))


def test_data_parallel():
    for wrapper in (nn.DataParallel,):
        with pytest.raises(
            UnsupportedModelError,
            match=r"hooks do not reach: wrap the GPT2LMHeadModel in its \.module",
        ):
            TransformerBridge(wrapper(tiny("gpt2")))


def test_remote_code_with_a_known_name():
    """A class of another package that is called as one of transformers' is not taken for it; a
    subclass is.
    """
    remote = types.ModuleType("transformers_modules.someone.modeling_llama")
    base = type(
        "LlamaPreTrainedModel", (transformers.PreTrainedModel,), {"__module__": remote.__name__}
    )
    fields = {"__module__": remote.__name__, "config_class": transformers.LlamaConfig}
    cls = type("LlamaForCausalLM", (base,), fields)
    model = cls(
        transformers.LlamaConfig(
            hidden_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=9
        )
    )
    with pytest.raises(
        UnsupportedModelError,
        match=r"not transformers' own: its LlamaPreTrainedModel is from transf",
    ):
        TransformerBridge(model)
    own = type("Ours", (transformers.LlamaForCausalLM,), {"__module__": "someone"})
    bridge = TransformerBridge(own(tiny("llama-gqa").config).eval())
    assert "blocks.0.attn.hook_q" in bridge.hook_dict


class Probed:
    """A tokenizer whose text is cut otherwise when special tokens stand beside it.

    Args:
        changed: the texts that are.
    """

    bos_token_id, eos_token_id, pad_token_id, cls_token_id = 1, 2, None, None

    def __init__(self, changed: tuple[str, ...]) -> None:
        self.changed = changed

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        plain = [] if text in self.changed and not text.isalpha() else [10 + ord(c) for c in text]
        if not add_special_tokens:
            return {"input_ids": plain}
        return {"input_ids": [1, *([7] if text in self.changed else plain), 2]}


@pytest.mark.unchecked
def test_what_a_tokenizer_adds_is_found_by_several_texts():
    for changed in ((), ("a",), ("a", "A", "0"), ("0", ".")):
        facts = TokenizerFacts(Probed(changed))
        assert (facts.adds_bos, facts.ending) == (True, [2])
    with pytest.raises(CannotBeDoneError, match="what it adds cannot be told"):
        TokenizerFacts(Probed(("a", "A", "0", ".", " a", "the", "a b")))
