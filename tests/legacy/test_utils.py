"""The functions of `utils`."""

import importlib
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers.activations import XIELUActivation

import bridge.legacy
from bridge.legacy import utils
from bridge.legacy.utils import Slice

# Their texts are read by tiny tokenizers that do not know all words.
pytestmark = pytest.mark.filterwarnings("ignore:the tokenizer .* does not know")


@pytest.mark.parametrize(
    ("given", "name"),
    [
        (("k", 6, "a"), "blocks.6.attn.hook_k"),
        (("pre", 2), "blocks.2.mlp.hook_pre"),
        (("embed",), "hook_embed"),
        (("pos_embed",), "hook_pos_embed"),
        (("normalized", 27, "ln2"), "blocks.27.ln2.hook_normalized"),
        (("k6",), "blocks.6.attn.hook_k"),
        (("scale4ln1",), "blocks.4.ln1.hook_scale"),
        (("pre5",), "blocks.5.mlp.hook_pre"),
        (("normalized",), "ln_final.hook_normalized"),
        (("attn", 2), "blocks.2.attn.hook_pattern"),
        (("attn_logits", 2), "blocks.2.attn.hook_attn_scores"),
        (("attn_scores", 2), "blocks.2.attn.hook_attn_scores"),
        (("query", 2), "blocks.2.attn.hook_q"),
        (("mlp_post", 2), "blocks.2.mlp.hook_post"),
        (("mlp_out", 2), "blocks.2.hook_mlp_out"),
        (("attn_out", 2), "blocks.2.hook_attn_out"),
        (("resid_pre", 0), "blocks.0.hook_resid_pre"),
        (("hook_embed",), "hook_embed"),
        (("blocks.1.attn.hook_q",), "blocks.1.attn.hook_q"),
        (("q", 1, "attention"), "blocks.1.attn.hook_q"),
        (("q", 2, "q"), "blocks.2.attn.hook_q"),
        (("result", 1, "mlp"), "blocks.1.attn.hook_result"),
        (("pre5ln2",), "blocks.5.mlp.hook_pre"),
        (("k6", 3, "mlp"), "blocks.6.attn.hook_k"),
        (("z", -1, "b"), "blocks.-1.attn.hook_z"),
        (("scores", 1), "blocks.1.hook_scores"),
        (("scale", None, "ln1"), "ln_final.ln1.hook_scale"),
        (("mlp_pre2",), "hook_mlp_pre2"),
        (("resid_pre", 1, "block"), "blocks.1.hook_resid_pre"),
        (("rot_q", "3", None), "blocks.3.attn.hook_rot_q"),
    ],
)
def test_act_names(given, name):
    assert utils.get_act_name(*given) == name


@pytest.mark.unchecked
def test_slices():
    x = torch.arange(24).reshape(2, 12)
    for given, right in (
        (3, x[:, 3]),
        ((2, 5), x[:, 2:5]),
        ((None, 4), x[:, :4]),
        ((1, 9, 2), x[:, 1:9:2]),
        ((4,), x[:, :4]),
        ([1, 3], x[:, [1, 3]]),
        (torch.tensor([1, 3]), x[:, [1, 3]]),
        (np.array([1, 3]), x[:, [1, 3]]),
        (None, x),
        (slice(2, 4), x[:, 2:4]),
    ):
        assert torch.equal(Slice(given).apply(x, -1), right)
        assert torch.equal(Slice(given).apply(x, 1), right)
    assert torch.equal(Slice.unwrap(3).apply(x, 1), x[:, 3:4])
    assert Slice.unwrap(kept := Slice(2)) is kept
    assert Slice(2).indices().tolist() == [2]
    assert Slice((2, 5)).indices(12).tolist() == [2, 3, 4]
    assert Slice([-1]).indices(12).tolist() == [11]
    with pytest.raises(ValueError, match="max_ctx is needed"):
        Slice((2, 5)).indices()
    with pytest.raises(ValueError, match="a slice cannot be 'x'"):
        Slice("x")


def test_sampling():
    torch.manual_seed(0)
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0]]).repeat(500, 1)
    assert set(utils.sample_logits(logits).tolist()) == {0, 1, 2, 3}
    assert set(utils.sample_logits(logits, top_k=2).tolist()) == {1, 3}
    # Probabilities are .64, .24, .09, .03: two of them are needed for 0.7.
    assert set(utils.sample_logits(logits, top_p=0.7).tolist()) == {1, 3}
    assert set(utils.sample_logits(logits, top_p=0.1).tolist()) == {1}
    assert set(utils.sample_logits(logits, temperature=0.0).tolist()) == {1}
    tokens = torch.tensor([[1, 1, 3]]).repeat(500, 1)
    assert set(utils.sample_logits(logits, freq_penalty=100.0, tokens=tokens).tolist()) == {0, 2}
    assert logits[0].tolist() == [0, 3, 1, 2]
    share = (utils.sample_logits(logits, temperature=100.0) == 0).float().mean()
    assert 0.15 < share < 0.35
    for bad in ({"top_k": 0}, {"top_p": 1.5}, {"freq_penalty": 1.0}):
        with pytest.raises(ValueError, match=r"top_k is 0|top_p is 1\.5|needs the tokens"):
            utils.sample_logits(logits, **bad)


def test_losses():
    torch.manual_seed(0)
    logits, tokens = torch.randn(2, 5, 7), torch.randint(0, 7, (2, 5))
    right = torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="none"
    )
    assert torch.allclose(
        utils.lm_cross_entropy_loss(logits, tokens, per_token=True).flatten(), right
    )
    assert torch.allclose(utils.lm_cross_entropy_loss(logits, tokens), right.mean())
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    counted = torch.cat([right[:2], right[4:]])
    assert torch.allclose(utils.lm_cross_entropy_loss(logits, tokens, mask), counted.mean())
    sure = torch.nn.functional.one_hot(tokens.roll(-1, 1), 7).float()
    assert utils.lm_accuracy(sure, tokens) == 1
    assert utils.lm_accuracy(-sure, tokens, per_token=True).sum() == 0


def test_tensors():
    x = torch.arange(6.0).reshape(2, 3)
    assert torch.equal(utils.transpose(x), x.T)
    assert torch.equal(utils.remove_batch_dim(x[None]), x)
    assert utils.remove_batch_dim(x) is x
    assert utils.get_corner(torch.ones(5, 5), 2).shape == (2, 2)
    for given in (x, [1, 2], (1.0,), 3, True, np.ones(2), torch.nn.Parameter(x)):
        assert isinstance(utils.to_numpy(given), np.ndarray)
    with pytest.raises(ValueError, match="dict cannot be converted"):
        utils.to_numpy({})


def test_activation_functions():
    x = torch.linspace(-3, 3, 20)
    right = torch.nn.functional.gelu(x, approximate="tanh")
    for fn in (
        utils.gelu_new,
        utils.gelu_fast,
        utils.gelu_pytorch_tanh,
        utils.ACTIVATION_FN_DICT["gelu_new"],
    ):
        assert torch.allclose(fn(x), right, atol=1e-5)
    assert torch.allclose(utils.solu(x), x * x.softmax(-1))


def test_xielu_is_what_hugging_face_starts_training_with():
    x = torch.linspace(-4, 4, 41)
    starting = XIELUActivation(dtype=torch.float32)
    assert torch.allclose(utils.xielu(x), starting(x).detach(), atol=1e-6)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("padding", [0, 1])
def test_bos_is_taken_out_where_it_is(side, padding):
    tokenizer = SimpleNamespace(padding_side=side, bos_token_id=1, pad_token_id=padding)
    rows = [[5, 1, 6], [7]]  # a BOS inside a text stays
    width = 4
    padded = [[padding] * (width - len(row) - 1) for row in rows]
    full = [
        [*pad, 1, *row] if side == "left" else [1, *row, *pad]
        for pad, row in zip(padded, rows, strict=True)
    ]
    right = [
        [*pad, *row] if side == "left" else [*row, *pad]
        for pad, row in zip(padded, rows, strict=True)
    ]
    assert utils.get_tokens_with_bos_removed(tokenizer, torch.tensor(full)).tolist() == right
    if side == "left":
        for row in (
            [5, 6, 7, 8],
            [padding, 6, 1, 8] if padding == 0 else [5, 1, 7, 8],
        ):  # BOS inside a text is not in front
            with pytest.raises(ValueError, match=r"does not start with BOS \(token 1\)"):
                utils.get_tokens_with_bos_removed(tokenizer, torch.tensor([row]))
    other = SimpleNamespace(
        padding_side="right" if side == "left" else "left", bos_token_id=1, pad_token_id=padding
    )
    assert (
        utils.get_tokens_with_bos_removed(other, torch.tensor(full), padding_side=side).tolist()
        == right
    )
    without = SimpleNamespace(padding_side=side, bos_token_id=None, pad_token_id=padding)
    assert utils.get_tokens_with_bos_removed(without, torch.tensor(full)).tolist() == full


def test_masks_and_positions():
    class Tokenizer:
        pad_token_id, bos_token_id, padding_side = 0, 0, "left"

    rows = torch.tensor([[0, 0, 5, 0], [0, 6, 7, 8]])
    mask = utils.get_attention_mask(Tokenizer, rows, prepend_bos=True)
    assert mask.tolist() == [[0, 1, 1, 1], [1, 1, 1, 1]]
    assert utils.get_attention_mask(Tokenizer, rows, prepend_bos=False).tolist() == [
        [0, 0, 1, 1],
        [0, 1, 1, 1],
    ]
    assert utils.get_attention_mask(None, rows, True).all()
    Tokenizer.padding_side = "right"
    assert utils.get_attention_mask(Tokenizer, rows, True).tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]
    assert utils.get_offset_position_ids(
        1, torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    ).tolist() == [
        [0, 0, 1],
        [1, 2, 3],
    ]


def test_prompts_are_reported(model, capsys):
    utils.test_prompt("a b c", ["d", "e"], model, top_k=2)
    said = capsys.readouterr().out
    assert said.count("Rank:") == 2
    assert "Top 1th token" in said
    ranks = re.findall(r"^Rank: (\d+) .*Token: \|(.+)\|$", said, re.MULTILINE)
    assert f"Ranks of the answer tokens: {[[(name, int(rank)) for rank, name in ranks]]}" in said


def test_what_is_not_there_says_so():
    with pytest.raises(AttributeError, match=r"no check_structure: .*docs/migration\.md"):
        utils.check_structure  # noqa: B018
    with pytest.raises(AttributeError, match=r"tokenizer\.bos_token \+ text"):
        utils.get_input_with_manually_prepended_bos  # noqa: B018
    with pytest.raises(AttributeError, match="Did you mean to_numpy"):
        utils.to_nump  # noqa: B018


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("get_dataset", "datasets.load_dataset"),
        ("tokenize_and_concatenate", "bridge.harvest"),
        ("init_xavier_uniform_", "init_mode='xavier_uniform'"),
        ("find_embedding_device", "W_E.device"),
        ("multi_gpu", "device_map='auto'"),
    ],
)
def test_what_went_says_what_to_use(name, instead):
    with pytest.raises(AttributeError, match=re.escape(instead)):
        getattr(utils, name)


@pytest.mark.parametrize("name", ["evals", "train", "BertNextSentencePrediction"])
def test_modules_that_went_say_what_to_use(name):
    with pytest.raises(AttributeError, match=r"See docs/migration\.md"):
        getattr(bridge.legacy, name)
    with pytest.raises(ModuleNotFoundError, match=r"See docs/migration\.md"):
        importlib.import_module(f"bridge.legacy.{name}")


def test_defaults_are_set_for_a_while(model):
    before = model.cfg.default_prepend_bos, model.tokenizer.padding_side
    with utils.LocallyOverridenDefaults(model, prepend_bos=False, padding_side="left"):
        assert (model.cfg.default_prepend_bos, model.tokenizer.padding_side) == (False, "left")
        with utils.LocallyOverridenDefaults(model, prepend_bos=None, padding_side=None):
            assert (model.cfg.default_prepend_bos, model.tokenizer.padding_side) == (False, "left")
        assert model.to_tokens("a").shape == model.to_tokens("a", prepend_bos=False).shape
    assert (model.cfg.default_prepend_bos, model.tokenizer.padding_side) == before
    with pytest.raises(KeyError), utils.LocallyOverridenDefaults(model, padding_side="left"):
        raise KeyError
    assert model.tokenizer.padding_side == before[1]
    with (
        pytest.raises(AssertionError, match="only prepend_bos and padding_side"),
        utils.LocallyOverridenDefaults(model, n_ctx=3),
    ):
        pass
    with (
        pytest.raises(AssertionError, match="not one of"),
        utils.LocallyOverridenDefaults(model, padding_side="middle", prepend_bos=False),
    ):
        pass
    assert model.cfg.default_prepend_bos is before[0]


def test_defaults_of_a_model_without_a_tokenizer():
    model = SimpleNamespace(cfg=SimpleNamespace(default_prepend_bos=True), tokenizer=None)
    with utils.LocallyOverridenDefaults(model, prepend_bos=False, padding_side="middle"):
        assert model.cfg.default_prepend_bos is False
    assert model.cfg.default_prepend_bos is True


def test_the_device_of_a_block(model):
    assert utils.get_device_for_block_index(1, model.cfg) == model.W_E.device
    with pytest.raises(NotImplementedError, match=r"model\.blocks\[2\]\.attn\.W_Q\.device"):
        utils.get_device_for_block_index(2, SimpleNamespace(n_devices=2, device="cpu"))
