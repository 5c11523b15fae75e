"""`evals`: losses and the indirect object identification task."""

import sys
from types import SimpleNamespace

import pytest
import torch

from bridge.embedded import MODEL_DIR
from bridge.legacy import HookedTransformer, evals
from bridge.legacy.evals import IOIDataset, ioi_eval

# Their texts are read by tiny tokenizers that do not know all words.
pytestmark = pytest.mark.filterwarnings("ignore:the tokenizer .* does not know")

TEMPLATES = ["When [B] and [A] went to the store, [B] gave a drink to [A]"]


@pytest.fixture(scope="module")
def shipped():
    return HookedTransformer.from_pretrained(str(MODEL_DIR), device="cpu")


def test_sanity_check_is_a_loss(shipped):
    loss = evals.sanity_check(shipped)
    assert loss.ndim == 0
    assert torch.isfinite(loss)


def test_the_loss_over_batches_is_the_mean_of_theirs(model):
    torch.manual_seed(0)
    batches = [{"tokens": torch.randint(model.cfg.d_vocab, (2, 6))} for _ in range(3)]
    losses = [model(batch["tokens"], return_type="loss").item() for batch in batches]
    assert evals.evaluate_on_dataset(model, batches) == pytest.approx(sum(losses) / 3)
    assert evals.evaluate_on_dataset(model, batches, truncate=2) == pytest.approx(sum(losses[:2]) / 2)
    with pytest.raises(ValueError, match="no batches to evaluate on"):
        evals.evaluate_on_dataset(model, [])


class Tokens(SimpleNamespace):
    """A model over numbers, with the little of a `cfg` that is needed."""

    def __init__(self, answer, d_vocab=200, **cfg):
        super().__init__(answer=answer, tokenizer=SimpleNamespace(bos_token_id=7))
        known = {"n_ctx": 100, "d_vocab": d_vocab, "default_prepend_bos": True, "device": "cpu"}
        self.cfg = SimpleNamespace(**(known | cfg))

    def __call__(self, tokens, return_type):
        assert return_type == "logits"
        self.seen = tokens
        return self.answer(tokens)


def test_the_induction_loss_is_that_of_the_second_half():
    def induction(tokens):  # knows what followed the same token half a row ago, and nothing in the first half
        half = tokens.shape[1] // 2
        return torch.nn.functional.one_hot(tokens.roll(half - 1, 1), 200).float() * 50

    torch.manual_seed(0)
    model = Tokens(induction)
    assert evals.induction_loss(model, batch_size=3, subseq_len=20) < 1e-6
    assert model.seen.shape == (3, 40)
    assert set(model.seen[:, 0].tolist()) == {7}
    assert torch.equal(model.seen[:, 1:20], model.seen[:, 21:])
    assert model.seen[:, 1:].min() >= 100
    evals.induction_loss(model, batch_size=3, subseq_len=20, prepend_bos=False)
    assert 7 not in model.seen
    uniform = Tokens(lambda tokens: torch.zeros(*tokens.shape, 200))
    assert evals.induction_loss(uniform, subseq_len=20).exp() == pytest.approx(200)
    with pytest.raises(ValueError, match="more than the model's context of 100"):
        evals.induction_loss(model, subseq_len=51)
    with pytest.raises(ValueError, match="drawn from number 100 on, and the model has 60"):
        evals.induction_loss(Tokens(induction, d_vocab=60), subseq_len=20)


def test_prompts_differ_and_are_the_same_every_time(shipped):
    texts = [sample["text"] for sample in IOIDataset(shipped.tokenizer, num_samples=40).samples]
    assert len(texts) == 40
    assert len(set(texts)) > 5
    assert texts == [sample["text"] for sample in IOIDataset(shipped.tokenizer, num_samples=40).samples]
    assert texts != [sample["text"] for sample in IOIDataset(shipped.tokenizer, num_samples=40, seed=1).samples]
    assert not any("[" in text for text in texts)
    with pytest.raises(ValueError, match="two names are needed"):
        IOIDataset(shipped.tokenizer, names=["Mary"])


def test_a_prompt_and_its_names(shipped):
    data = IOIDataset(shipped.tokenizer, TEMPLATES, nouns={}, num_samples=4, symmetric=True)
    assert len(data) == 4
    assert data.samples[0]["IO"] == data.samples[1]["S"] != data.samples[0]["S"] == data.samples[1]["IO"]
    for sample, row in zip(data.samples, data, strict=True):
        assert sample["text"].endswith(sample["IO"])
        assert shipped.to_string(row["prompt"][1:]) == sample["text"]
        assert row["prompt"][0] == shipped.tokenizer.bos_token_id
        assert row["prompt"][-len(row["IO"]) :].tolist() == row["IO"].tolist()
    bare = IOIDataset(shipped.tokenizer, TEMPLATES, nouns={}, num_samples=4, symmetric=True, prepend_bos=False)
    assert torch.equal(bare[0]["prompt"], data[0]["prompt"][1:])


def test_the_score_is_the_logit_difference_before_the_answer(shipped):
    data = IOIDataset(shipped.tokenizer, TEMPLATES, nouns={}, num_samples=6, symmetric=True)
    right = []
    for sample in data.samples:
        logits = shipped(sample["text"].removesuffix(sample["IO"]))[0, -1]
        io, s = (shipped.to_single_token(sample[name]) for name in ("IO", "S"))
        right.append((logits[io] - logits[s]).item())
    found = ioi_eval(shipped, data, batch_size=4)
    assert found["Logit Difference"] == pytest.approx(sum(right) / 6, abs=1e-3)
    assert found["Accuracy"] == sum(value > 0 for value in right) / 6 == 1
    turned = ["When [B] and [A] went to the store, [A] gave a drink to [A]"]
    assert ioi_eval(shipped, IOIDataset(shipped.tokenizer, turned, nouns={}, num_samples=6))["Accuracy"] == 0


@pytest.mark.parametrize("end", [".", " today"])
def test_a_prompt_that_does_not_end_with_the_answer(shipped, end):
    data = IOIDataset(shipped.tokenizer, [TEMPLATES[0] + end], nouns={}, num_samples=2)
    with pytest.raises(ValueError, match="it must end with its IO"):
        ioi_eval(shipped, data)


def test_what_a_data_set_is_made_of_is_its_own(shipped):
    data = IOIDataset(shipped.tokenizer, num_samples=1)
    data.nouns["OBJECT"].append("tea")
    data.names += ["Ann"]
    data.templates += TEMPLATES
    other = IOIDataset(shipped.tokenizer, num_samples=1)
    assert "tea" not in other.nouns["OBJECT"] and len(other.names) == len(other.templates) == 2


def test_no_prompts_have_no_score(shipped):
    with pytest.raises(ValueError, match="there are no prompts"):
        ioi_eval(shipped, num_samples=1, symmetric=True)


def test_names_of_several_tokens_are_compared_where_they_differ():
    rows = [{"prompt": torch.tensor([1, 2, 3, 4]), "IO": torch.tensor([3, 4]), "S": torch.tensor([3, 5, 6])}]

    def answer(tokens):
        logits = torch.zeros(*tokens.shape, 9)
        logits[0, 2, 4], logits[0, 2, 5] = 3.0, 1.0  # after the 3 that both begin with
        return logits

    assert ioi_eval(Tokens(answer), rows) == {"Logit Difference": 2.0, "Accuracy": 1.0}
    rows[0]["S"] = torch.tensor([3])
    with pytest.raises(ValueError, match="do not differ at any token"):
        ioi_eval(Tokens(answer), rows)


def test_data_sets_are_loaded_and_cut_into_rows(model, monkeypatch):
    class Table(SimpleNamespace):
        def remove_columns(self, names):
            return self

        def map(self, function, batched, remove_columns, num_proc):
            return Rows(function(self.columns)["tokens"])

    class Rows(list):
        def set_format(self, type, columns):
            self[:] = [{"tokens": torch.tensor(row)} for row in self]

    asked = []

    def load_dataset(*names, split):
        asked.append(names)
        column = "content" if "codeparrot" in names[0] else "text"
        return Table(columns={column: ["a b c d " * 1200] * 2}, features={column: None})

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    for name, loader in zip(evals.DATASET_NAMES, evals.DATASET_LOADERS, strict=True):
        assert name in loader.__name__
        batch = next(iter(loader(model.tokenizer, batch_size=2)))
        assert batch["tokens"].shape == (2, 1024)
        assert set(batch["tokens"][:, 0].tolist()) == {model.tokenizer.bos_token_id}
    assert [names[0] for names in asked] == [
        "wikitext", "stas/openwebtext-10k", "NeelNanda/pile-10k", "codeparrot/codeparrot-valid-v2-near-dedup",
    ]  # fmt: skip


def test_what_is_not_there_says_so():
    with pytest.raises(NotImplementedError, match="the package lm_eval evaluates"):
        evals.mmlu_eval()
    with pytest.raises(AttributeError, match="the package lm_eval evaluates"):
        evals.MMLU_SUBJECTS  # noqa: B018
    with pytest.raises(AttributeError, match="Did you mean ioi_eval"):
        evals.ioi_evl  # noqa: B018
