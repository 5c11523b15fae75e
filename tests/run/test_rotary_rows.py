"""Rotary embeddings whose factors depend on the length: each row has those that it has alone."""

import copy

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Phi3Config, Phi3ForCausalLM

from bridge import TransformerBridge
from bridge.harvest import Activations, harvest
from tests.conftest import torch_hooks

ORIGINAL = 12
ROPES = {
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 4,
        "long_factor": [4.0, 6.0, 8.0, 9.0],
        "original_max_position_embeddings": ORIGINAL,
    },
    "dynamic": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
}


def made(kind: str) -> LlamaForCausalLM | Phi3ForCausalLM:
    longest = 48 if kind == "longrope" else ORIGINAL
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "intermediate_size": 48, "vocab_size": 97}
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    more = {"max_position_embeddings": longest, "initializer_range": 0.3}
    torch.manual_seed(0)
    if kind == "longrope":
        more["original_max_position_embeddings"] = ORIGINAL
        config = Phi3Config(rope_parameters=ROPES[kind], **sizes, **ids, **more)
        return Phi3ForCausalLM(config).eval()
    return LlamaForCausalLM(LlamaConfig(rope_parameters=ROPES[kind], **sizes, **ids, **more)).eval()


def bridge_of(plain: LlamaForCausalLM | Phi3ForCausalLM) -> TransformerBridge:
    """A bridge around a copy, which has seen no input; for longer inputs than it was trained on."""
    bridge = TransformerBridge(copy.deepcopy(plain))
    bridge.cfg.n_ctx = 48
    return bridge


def rows(lengths: tuple[int, ...]) -> list[torch.Tensor]:
    numbers = torch.Generator().manual_seed(3)
    return [torch.randint(3, 97, (1, n), generator=numbers) for n in lengths]


def padded(texts: list[torch.Tensor], side: str) -> tuple[torch.Tensor, torch.Tensor]:
    longest = max(x.shape[1] for x in texts)
    tokens, mask = torch.zeros(2, len(texts), longest, dtype=torch.long)
    for row, text in enumerate(texts):
        own = slice(0, text.shape[1]) if side == "right" else slice(-text.shape[1], None)
        tokens[row, own], mask[row, own] = text[0], 1
    return tokens, mask


@pytest.fixture(params=ROPES)
def kind(request) -> str:
    return request.param


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("lengths", [(30, 8), (8, 30), (20, 30), (9, 5), (30, 13, 12, 4)])
def test_each_row_of_a_run_is_as_alone(kind, side, lengths):
    plain = made(kind)
    bridge = bridge_of(plain)
    texts = rows(lengths)
    tokens, mask = padded(texts, side)
    before = torch_hooks(bridge.original_model)
    with torch.no_grad():
        found, cache = bridge.run_with_cache(tokens, attention_mask=mask)
        hooks = [("blocks.0.hook_mlp_out", lambda x, hook: x * 0.5)]
        edited = bridge.run_with_hooks(tokens, attention_mask=mask, fwd_hooks=hooks)
    assert torch_hooks(bridge.original_model) == before
    for row, text in enumerate(texts):
        real = mask[row].bool()
        alone = bridge_of(plain)
        with torch.no_grad():
            torch.testing.assert_close(found[row, real], alone(text)[0], atol=1e-4, rtol=1e-4)
            expected = alone.run_with_hooks(text, fwd_hooks=hooks)[0]
            torch.testing.assert_close(edited[row, real], expected, atol=1e-4, rtol=1e-4)
            own = alone.run_with_cache(text)[1]
        stream = cache["resid_post", 1][row, real]
        torch.testing.assert_close(stream, own["resid_post", 1][0], atol=1e-4, rtol=1e-4)


def test_rows_of_one_length_are_the_models_own(kind):
    plain = made(kind)
    bridge = TransformerBridge(plain)
    bridge.cfg.n_ctx = 48
    tokens = torch.cat(rows((30, 30)))
    with torch.no_grad():
        assert torch.equal(bridge(tokens), plain(tokens).logits)
        mask = torch.ones_like(tokens)
        assert torch.equal(bridge(tokens, attention_mask=mask), plain(tokens).logits)


def test_the_models_embedding_stays_as_it_is_meanwhile(kind, monkeypatch):
    """Another thread may run the model while rows are computed alone."""
    bridge = bridge_of(made(kind))
    shared = bridge.original_model.model.rotary_emb
    tokens, mask = padded(rows((30, 8)), "left")
    bridge(tokens, attention_mask=mask)
    fields, seen = dict(shared.__dict__), []
    own = type(shared).forward

    def forward(self, *args, **kwargs):
        if self is not shared:
            same = shared.__dict__.keys() == fields.keys()
            seen.append(same and all(shared.__dict__[name] is fields[name] for name in fields))
        return own(self, *args, **kwargs)

    monkeypatch.setattr(type(shared), "forward", forward)
    bridge(tokens, attention_mask=mask)
    assert len(seen) == 2
    assert all(seen)


@pytest.mark.parametrize("lengths", [(30, 8), (20, 14)])
def test_each_row_is_continued_as_alone(kind, lengths):
    plain = made(kind)
    texts = rows(lengths)
    tokens, mask = padded(texts, "left")
    options = {"max_new_tokens": 4, "do_sample": False}
    found = bridge_of(plain).generate(
        tokens,
        attention_mask=mask,
        stop_at_eos=False,
        return_type="tokens",
        verbose=False,
        **options,
    )
    for row, text in enumerate(texts):
        own = copy.deepcopy(plain).generate(text, eos_token_id=None, **options)
        assert torch.equal(found[row, -4:], own[0, -4:])


def test_rows_that_pass_the_length_are_refused(kind):
    bridge = bridge_of(made(kind))
    tokens, mask = padded(rows((30, 10)), "left")
    said = r"rotary embedding \w+ has other factors above 12 tokens, which a row of this batch"
    for generate in (bridge.generate, bridge.generate_stream):
        with pytest.raises(ValueError, match=said):
            generate(tokens, attention_mask=mask, max_new_tokens=5, do_sample=False, verbose=False)
    one = bridge.generate(tokens[1:, -10:], max_new_tokens=5, do_sample=False, verbose=False)
    assert one.shape[1] >= 11


def test_requests_are_refused_above_the_length(kind):
    bridge = bridge_of(made(kind))
    prompts = [text[0].tolist() for text in rows((9, 5))]
    with pytest.raises(ValueError, match="takes its factors from the longest request above 12"):
        bridge.generate_batch(prompts, 8, do_sample=False, verbose=False)
    answers = list(bridge.generate_batch(prompts, 3, do_sample=False, verbose=False))
    assert len(answers) == 2


def test_documents_are_harvested_as_alone(kind, tmp_path):
    plain, point = made(kind), "blocks.1.hook_resid_post"
    texts = rows((14, 11, 9, 30, 10))
    harvest(
        bridge_of(plain),
        [text[0].tolist() for text in texts],
        hook_points=[point],
        out=tmp_path / "acts",
        context_size=32,
        pack=False,
        prepend_bos=False,
        dtype="float32",
    )
    acts = Activations(tmp_path / "acts")
    found = {(int(r["document"]), int(r["position"])): torch.as_tensor(r[point]) for r in acts}
    for number, text in enumerate(texts):
        alone = bridge_of(plain)
        with torch.no_grad():
            expected = alone.run_with_cache(text, names_filter=point)[1][point][0]
        for position, row in enumerate(expected):
            torch.testing.assert_close(found[number, position], row, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("n_ctx", [20, 200])
@pytest.mark.parametrize("name", [*ROPES, "yarn", "default"])
def test_another_context_length_is_the_same_model(tmp_path, name, n_ctx):
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": None}
    yarn["original_max_position_embeddings"] = 16
    default = {"rope_type": "default", "rope_theta": 1e4}
    rope = (ROPES | {"yarn": yarn, "default": default})[name]
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"intermediate_size": 48, "vocab_size": 97, "max_position_embeddings": 64}
    model = LlamaForCausalLM(LlamaConfig(rope_parameters=rope, **sizes)).eval()
    model.save_pretrained(tmp_path)
    (tokens,) = rows((18,))
    bridge = TransformerBridge.boot_transformers(str(tmp_path), n_ctx=n_ctx)
    with torch.no_grad():
        assert torch.equal(bridge(tokens), model(tokens).logits)
    assert bridge.cfg.n_ctx == n_ctx
    with pytest.raises(ValueError, match=str(n_ctx)):
        bridge(torch.zeros(1, n_ctx + 1, dtype=torch.long))
