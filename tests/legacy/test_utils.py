"""The functions of `utils`."""

import math
import re
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

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
    ],
)
def test_act_names(given, name):
    assert utils.get_act_name(*given) == name


@pytest.mark.unchecked
def test_slices():
    x = torch.arange(24).reshape(2, 12)
    for given, right in (
        (3, x[:, 3]), ((2, 5), x[:, 2:5]), ((None, 4), x[:, :4]), ((1, 9, 2), x[:, 1:9:2]), ((4,), x[:, :4]),
        ([1, 3], x[:, [1, 3]]), (torch.tensor([1, 3]), x[:, [1, 3]]), (np.array([1, 3]), x[:, [1, 3]]), (None, x),
        (slice(2, 4), x[:, 2:4]),
    ):  # fmt: skip
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
    right = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    assert torch.allclose(utils.lm_cross_entropy_loss(logits, tokens, per_token=True).flatten(), right)
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
    assert torch.equal(utils.get_cumsum_along_dim(x, -1, reverse=True)[0], torch.tensor([3.0, 3.0, 2.0]))
    assert torch.equal(utils.remove_batch_dim(x[None]), x)
    assert utils.remove_batch_dim(x) is x
    assert utils.is_square(x[:, :2])
    assert not utils.is_square(x)
    assert utils.is_lower_triangular(torch.ones(3, 3).tril())
    assert not utils.is_lower_triangular(torch.ones(3, 3))
    assert utils.get_corner(torch.ones(5, 5), 2).shape == (2, 2)
    for given in (x, [1, 2], (1.0,), 3, True, np.ones(2), torch.nn.Parameter(x)):
        assert isinstance(utils.to_numpy(given), np.ndarray)
    with pytest.raises(ValueError, match="no array of dict"):
        utils.to_numpy({})


def test_activation_functions():
    x = torch.linspace(-3, 3, 20)
    right = torch.nn.functional.gelu(x, approximate="tanh")
    for fn in (utils.gelu_new, utils.gelu_fast, utils.gelu_pytorch_tanh, utils.ACTIVATION_FN_DICT["gelu_new"]):
        assert torch.allclose(fn(x), right, atol=1e-5)
    assert torch.allclose(utils.solu(x), x * x.softmax(-1))


def test_xielu_is_what_hugging_face_starts_training_with():
    x = torch.linspace(-4, 4, 41)
    assert torch.allclose(utils.xielu(x), utils.XIELU()(x).detach(), atol=1e-6)
    other = utils.XIELU(alpha_p_init=1.0, alpha_n_init=1.5, beta_init=0.25)(x)  # Huang and Schlag 2024, by hand
    right = torch.where(x > 0, x * x, 1.5 * (x.clamp(max=0).expm1() - x)) + 0.25 * x
    assert torch.allclose(other, right, atol=1e-5)


@pytest.mark.parametrize(
    ("shape", "fans"), [((6,), (1, 6)), ((2, 3), (2, 3)), ((2, 25, 5), (25, 10)), ((4, 700, 30), (700, 120))]
)
def test_weights_are_drawn_by_the_sizes_of_their_axes(shape, fans):
    assert utils.calc_fan_in_and_fan_out(torch.empty(shape)) == fans
    torch.manual_seed(0)
    wide = torch.nn.Parameter(torch.empty(2, 900, 150))
    for fill, variance in (
        (utils.init_xavier_uniform_, 2 / (900 + 300)),
        (utils.init_xavier_normal_, 2 / (900 + 300)),
        (utils.init_kaiming_uniform_, 2 / 900),
        (utils.init_kaiming_normal_, 2 / 900),
    ):
        assert fill(wide) is wide
        assert math.isclose(wide.std().item(), math.sqrt(variance), rel_tol=0.01)
        if "uniform" in fill.__name__:
            assert wide.abs().max() <= math.sqrt(3 * variance)
            assert wide.abs().max() > 0.999 * math.sqrt(3 * variance)
        fill(wide, gain=3.0)
        assert math.isclose(wide.std().item(), 3 * math.sqrt(variance), rel_tol=0.01)
    utils.init_kaiming_normal_(wide, nonlinearity="linear", mode="fan_out")
    assert math.isclose(wide.std().item(), math.sqrt(1 / 300), rel_tol=0.01)
    with pytest.raises(ValueError, match=r"one, two or three axes; this one's shape is \[\]"):
        utils.calc_fan_in_and_fan_out(torch.tensor(1.0))
    with pytest.raises(ValueError, match="mode is 'fan'"):
        utils.init_kaiming_normal_(wide, mode="fan")


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("padding", [0, 1])
def test_bos_is_taken_out_where_it_is(side, padding):
    tokenizer = SimpleNamespace(padding_side=side, bos_token_id=1, pad_token_id=padding)
    rows = [[5, 1, 6], [7]]  # a BOS inside a text stays
    width = 4
    padded = [[padding] * (width - len(row) - 1) for row in rows]
    full = [[*pad, 1, *row] if side == "left" else [1, *row, *pad] for pad, row in zip(padded, rows, strict=True)]
    right = [[*pad, *row] if side == "left" else [*row, *pad] for pad, row in zip(padded, rows, strict=True)]
    assert utils.get_tokens_with_bos_removed(tokenizer, torch.tensor(full)).tolist() == right
    if side == "left":
        for row in (
            [5, 6, 7, 8],
            [padding, 6, 1, 8] if padding == 0 else [5, 1, 7, 8],
        ):  # BOS inside a text is not in front
            with pytest.raises(ValueError, match=r"does not start with BOS \(token 1\)"):
                utils.get_tokens_with_bos_removed(tokenizer, torch.tensor([row]))
    other = SimpleNamespace(padding_side="right" if side == "left" else "left", bos_token_id=1, pad_token_id=padding)
    assert utils.get_tokens_with_bos_removed(other, torch.tensor(full), padding_side=side).tolist() == right
    without = SimpleNamespace(padding_side=side, bos_token_id=None, pad_token_id=padding)
    assert utils.get_tokens_with_bos_removed(without, torch.tensor(full)).tolist() == full


def test_masks_and_positions():
    class Tokenizer:
        pad_token_id, bos_token_id, padding_side = 0, 0, "left"

    rows = torch.tensor([[0, 0, 5, 0], [0, 6, 7, 8]])
    mask = utils.get_attention_mask(Tokenizer, rows, prepend_bos=True)
    assert mask.tolist() == [[0, 1, 1, 1], [1, 1, 1, 1]]
    assert utils.get_attention_mask(Tokenizer, rows, prepend_bos=False).tolist() == [[0, 0, 1, 1], [0, 1, 1, 1]]
    assert utils.get_attention_mask(None, rows, True).all()
    Tokenizer.padding_side = "right"
    assert utils.get_attention_mask(Tokenizer, rows, True).tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]
    assert utils.get_offset_position_ids(1, torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])).tolist() == [
        [0, 0, 1],
        [1, 2, 3],
    ]


def test_defaults():
    assert utils.override_or_use_default_value(1, None) == 1
    assert utils.override_or_use_default_value(1, False) is False
    assert utils.USE_DEFAULT_VALUE is None
    assert utils.is_library_available("torch")
    assert not utils.is_library_available("not_a_library")


class Dataset:
    """The little of a data set of the package `datasets` that is needed."""

    def __init__(self, columns):
        self.columns = columns
        self.features = dict.fromkeys(columns)
        self.format = None

    def remove_columns(self, names):
        return Dataset({name: value for name, value in self.columns.items() if name not in names})

    def map(self, function, batched, remove_columns, num_proc=None):
        assert batched
        return Dataset(function(self.columns))

    def set_format(self, type, columns):
        self.format = type


@pytest.mark.parametrize("bos", [True, False])
def test_tokenize_and_concatenate(model, bos):
    texts = ["a b c d e", "f g", "h i j k"]
    tokenizer = model.tokenizer
    made = utils.tokenize_and_concatenate(
        Dataset({"text": texts, "id": [1, 2, 3]}), tokenizer, max_length=4, add_bos_token=bos
    )
    rows = made.columns["tokens"]
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    stream = [*ids[0], tokenizer.eos_token_id, *ids[1], tokenizer.eos_token_id, *ids[2]]
    width = 3 if bos else 4
    assert rows.shape == (len(stream) // width, 4)
    assert rows[:, -width:].flatten().tolist() == stream[: len(stream) // width * width]
    assert not bos or set(rows[:, 0].tolist()) == {tokenizer.bos_token_id}
    assert made.format == "torch"
    short = utils.tokenize_and_concatenate(Dataset({"text": ["a"]}), tokenizer, max_length=9, add_bos_token=bos)
    assert short.columns["tokens"].shape == (1, 9)


def test_data_sets_are_what_the_package_datasets_loads(monkeypatch):
    asked = []
    package = SimpleNamespace(load_dataset=lambda *names, **kwargs: asked.append((names, kwargs)) or "rows")
    monkeypatch.setitem(sys.modules, "datasets", package)
    assert utils.get_dataset("pile", cache_dir="here") == "rows"
    assert utils.get_dataset("owt") == "rows"
    assert asked == [
        (("NeelNanda/pile-10k",), {"split": "train", "cache_dir": "here"}),
        (("stas/openwebtext-10k",), {"split": "train"}),
    ]
    with pytest.raises(ValueError, match="no data set is known as 'plie'"):
        utils.get_dataset("plie")


def test_without_the_package_datasets_its_call_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match=r"datasets\.load_dataset\('NeelNanda/pile-10k'.* pip install datasets"):
        utils.get_dataset("pile")


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
    with pytest.raises(AttributeError, match="methods take prepend_bos="):
        utils.LocallyOverridenDefaults  # noqa: B018
    with pytest.raises(AttributeError, match="Did you mean to_numpy"):
        utils.to_nump  # noqa: B018
