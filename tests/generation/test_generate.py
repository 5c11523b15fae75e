"""Generation: greedy and sampled tokens equal the model's own, hooks at every step, padding,
endings.
"""

import pytest
import torch
from transformers import (
    CompileConfig,
    GPT2Config,
    GPT2LMHeadModel,
    StoppingCriteria,
    T5Config,
    T5ForConditionalGeneration,
)

from bridge import TransformerBridge
from tests.conftest import tiny, torch_hooks
from tests.tiny_models import tiny_model

QUIET = {"verbose": False}
GREEDY = {"do_sample": False, "verbose": False}
SOME = torch.tensor([[5, 6, 7, 8, 9], [15, 16, 17, 18, 19]])


def never_ending(model):
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


@pytest.fixture
def endless(family):
    return TransformerBridge(never_ending(tiny(family)))


def test_greedy_equals_the_models_own(endless):
    expected = endless.original_model.generate(
        SOME, attention_mask=torch.ones_like(SOME), max_new_tokens=9, do_sample=False
    )
    assert torch.equal(endless.generate(SOME, max_new_tokens=9, **GREEDY), expected)
    assert torch.equal(endless.generate(SOME[0], max_new_tokens=9, **GREEDY), expected[:1])
    assert torch.equal(endless.generate(SOME.tolist(), max_new_tokens=9, **GREEDY), expected)
    assert torch.equal(
        endless.generate(SOME, max_new_tokens=9, use_past_kv_cache=False, **GREEDY), expected
    )
    assert torch.equal(endless.hf_generate(SOME, max_new_tokens=9, do_sample=False), expected)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"top_k": 5},
        {"top_k": 0},
        {"top_p": 0.8},
        {"temperature": 0.5},
        {"repetition_penalty": 1.5},
        {"min_p": 0.1},
    ],
)
def test_sampling_equals_the_models_own(endless, options):
    torch.manual_seed(0)
    expected = endless.original_model.generate(
        SOME, attention_mask=torch.ones_like(SOME), max_new_tokens=9, do_sample=True, **options
    )
    torch.manual_seed(0)
    assert torch.equal(endless.generate(SOME, max_new_tokens=9, **options, **QUIET), expected)
    torch.manual_seed(0)
    pieces = list(endless.generate_stream(SOME, max_new_tokens=9, **options, **QUIET))
    assert torch.equal(torch.cat(pieces, -1), expected)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_rows_continue_as_if_alone(endless, side):
    rows = [torch.tensor([5, 6, 7, 8, 9, 10]), torch.tensor([20, 21, 22]), torch.tensor([30])]
    solo = [endless.generate(row, max_new_tokens=6, **GREEDY)[0] for row in rows]
    padded, mask = torch.zeros(3, 6, dtype=torch.long), torch.zeros(3, 6, dtype=torch.long)
    for i, row in enumerate(rows):
        where = slice(6 - len(row), None) if side == "left" else slice(0, len(row))
        padded[i, where], mask[i, where] = row, 1
    made = endless.generate(padded, attention_mask=mask, max_new_tokens=6, **GREEDY)
    for i, row in enumerate(rows):
        n = len(row) + 6
        assert torch.equal(made[i, -n:] if side == "left" else made[i, :n], solo[i])


def test_texts_of_different_lengths(embedded):
    texts = [
        "Mary",
        "When Mary and John went to the store, John gave a drink to",
        "Mary and John went",
    ]
    solo = [embedded.generate(text, max_new_tokens=8, **GREEDY) for text in texts]
    for side in ("left", "right", None):
        assert embedded.generate(texts, max_new_tokens=8, padding_side=side, **GREEDY) == solo
    assert all(out.startswith(text) for out, text in zip(solo, texts, strict=True))
    tokens = embedded.generate(
        texts, max_new_tokens=8, padding_side="right", return_type="tokens", **GREEDY
    )
    first = embedded.generate(texts[0], max_new_tokens=8, return_type="tokens", **GREEDY)[0]
    assert torch.equal(tokens[0, : len(first)], first)
    assert embedded.generate([texts[0]], max_new_tokens=8, **GREEDY) == [solo[0]]
    assert embedded.generate(
        embedded.to_tokens(texts[0]), max_new_tokens=8, return_type="str", **GREEDY
    ) == [solo[0]]


def test_hooks_act_on_every_step_and_know_which_it_is(endless):
    seen = []

    def look(x, hook):
        seen.append((endless.step, x.shape[1]))
        hook.ctx["calls"] = hook.ctx.get("calls", 0) + 1

    endless.add_perma_hook("blocks.1.hook_resid_post", look)
    for run in (
        lambda: endless.generate(SOME, max_new_tokens=4, **GREEDY),
        lambda: endless.hf_generate(SOME, max_new_tokens=4, do_sample=False),
        lambda: list(endless.generate_stream(SOME, max_new_tokens=4, **GREEDY)),
    ):
        seen.clear()
        run()
        assert seen == [(0, 5), (1, 1), (2, 1), (3, 1)]
        assert endless.step is None
    assert endless.hook_dict["blocks.1.hook_resid_post"].ctx["calls"] == 12
    endless.reset_hooks(including_permanent=True)


def test_interventions_change_every_step(endless):
    edit = ("blocks.1.hook_resid_post", lambda x, hook: x * -1)
    with endless.hooks(fwd_hooks=[edit]):
        made = endless.generate(SOME, max_new_tokens=5, **GREEDY)
        stepwise = SOME
        for _ in range(5):
            best = endless(stepwise)[:, -1].argmax(-1, keepdim=True)
            stepwise = torch.cat([stepwise, best], -1)
    assert torch.equal(made, stepwise)
    assert not torch.equal(made, endless.generate(SOME, max_new_tokens=5, **GREEDY))


@pytest.mark.parametrize("caching", [True, False])
def test_the_cache_of_a_generation_is_that_of_the_finished_sequence(endless, caching):
    calls = []
    handle = endless.original_model.register_forward_pre_hook(lambda *a: calls.append(1))
    made, cache, prompt = endless.generate(
        SOME,
        max_new_tokens=6,
        return_cache=True,
        return_input_tokens=True,
        use_past_kv_cache=caching,
        **GREEDY,
    )
    handle.remove()
    assert len(calls) == 6
    assert torch.equal(prompt, SOME)
    _, expected = endless.run_with_cache(made[:, :-1])
    assert list(cache) == list(expected)
    for name in expected:
        torch.testing.assert_close(cache[name], expected[name], atol=2e-5, rtol=1e-4, msg=name)
    _, some = endless.generate(
        SOME,
        max_new_tokens=2,
        return_cache=True,
        names_filter="hook_embed",
        device="meta",
        **GREEDY,
    )
    assert list(some) == ["hook_embed"] and some["hook_embed"].is_meta
    assert torch_hooks(endless.original_model) == 0


@torch.no_grad()
def test_the_cache_of_points_whose_steps_are_of_other_lengths():
    """Keys that are made anew from a latent, for the past too; logits of a prompt; the rows of an
    expert.
    """
    bridge = TransformerBridge(tiny_model("deepseek_v3"))
    names = ["blocks.0.attn.hook_k", "blocks.1.attn.hook_v", "unembed.hook_in"]
    options = {
        "max_new_tokens": 4,
        "return_cache": True,
        "return_type": "tokens",
        "stop_at_eos": False,
        **GREEDY,
    }
    made, cache = bridge.generate(SOME, names_filter=names, **options)
    _, whole = bridge.run_with_cache(made[:, :-1], names_filter=names)
    for name in names:
        torch.testing.assert_close(cache[name], whole[name], atol=1e-5, rtol=1e-4)
    rows = [f"blocks.1.mlp.experts.{expert}.hook_in" for expert in range(4)]
    with pytest.raises(
        ValueError, match=r"experts\.0\.hook_in.* do not make those of the sequence"
    ):
        bridge.generate(SOME, names_filter=rows, **options)
    made, cache = bridge.generate(SOME, names_filter=rows, use_past_kv_cache=False, **options)
    _, whole = bridge.run_with_cache(made[:, :-1], names_filter=rows)
    assert all(torch.equal(cache[name], whole[name]) for name in rows)
    assert torch_hooks(bridge.original_model) == 0


@torch.no_grad()
def test_rows_are_left_out_where_they_were_not_named(caplog):
    """The rows of an expert; in a prompt of one token each step has as many of them as the
    others.
    """
    bridge, rows = TransformerBridge(tiny_model("mixtral")), "blocks.0.mlp.experts.0.hook_in"
    options = {
        "max_new_tokens": 3,
        "return_cache": True,
        "return_type": "tokens",
        "stop_at_eos": False,
        **GREEDY,
    }
    for prompt in (SOME, SOME[:, :1]):
        made, cache = bridge.generate(
            prompt, names_filter=lambda name: name in (rows, "hook_embed"), **options
        )
        _, whole = bridge.run_with_cache(made[:, :-1], names_filter="hook_embed")
        assert list(cache) == ["hook_embed"] and torch.equal(
            cache["hook_embed"], whole["hook_embed"]
        )
        assert f"{rows} has rows of each step" in caplog.text
        for only in (rows, lambda name: name == rows):
            with pytest.raises(
                ValueError, match=r"experts\.0\.hook_in: their rows at each step do not make those"
            ):
                bridge.generate(prompt, names_filter=only, **options)
        caplog.clear()
    bridge.generate(SOME, names_filter=lambda name: "mlp" in name, **options)
    assert (
        f"{rows}, " in caplog.text
        and "more: each has rows of each step" in caplog.text
        and len(caplog.text) < 500
    )


@torch.no_grad()
@pytest.mark.parametrize("model_type", ["qwen3_next", "olmo_hybrid"])
def test_what_a_norm_of_a_linear_attention_makes_is_kept_by_position(model_type):
    bridge = TransformerBridge(tiny_model(model_type))
    name = next(
        name
        for name in bridge.hook_dict
        if name.startswith("blocks.0.mixer") and name.endswith("norm")
    )
    made, cache = bridge.generate(
        SOME, max_new_tokens=3, return_cache=True, return_type="tokens", stop_at_eos=False, **GREEDY
    )
    _, whole = bridge.run_with_cache(made[:, :-1])
    assert list(cache) == list(whole) and cache[name].shape[:2] == made[:, :-1].shape
    torch.testing.assert_close(cache[name], whole[name], atol=1e-5, rtol=1e-4)


def test_the_cache_of_padded_prompts(embedded):
    texts = ["Mary", "Mary and John went"]
    made, cache, _ = embedded.generate(
        texts,
        max_new_tokens=5,
        return_cache=True,
        return_input_tokens=True,
        return_type="tokens",
        stop_at_eos=False,
        **GREEDY,
    )
    for i, text in enumerate(texts):
        n = embedded.to_tokens(text).shape[1] + 4
        _, solo = embedded.run_with_cache(made[i : i + 1, -n - 1 : -1])
        for name in (
            "blocks.2.hook_resid_post",
            "blocks.0.attn.hook_rot_k",
            "blocks.3.mlp.hook_post",
        ):
            torch.testing.assert_close(cache[name][i, -n:], solo[name][0], atol=1e-4, rtol=1e-3)
        torch.testing.assert_close(
            cache["pattern", 1][i, :, -n:, -n:], solo["pattern", 1][0], atol=1e-5, rtol=1e-4
        )


def test_caches_that_cannot_be_had(endless):
    with pytest.raises(ValueError, match="return_cache is not available with num_beams"):
        endless.generate(SOME, num_beams=2, return_cache=True, **GREEDY)


def test_driving_it_oneself(endless):
    logits, past = endless(SOME, return_type="logits_and_cache")
    made = SOME
    cached = []
    for _ in range(3):
        token = logits[:, -1].argmax(-1, keepdim=True)
        made = torch.cat([made, token], -1)
        (logits, past), cache = endless.run_with_cache(
            token, past_key_values=past, return_type="logits_and_cache"
        )
        cached.append(cache["resid_post", 2])
    assert torch.equal(made, endless.generate(SOME, max_new_tokens=3, **GREEDY))
    whole = endless.run_with_cache(made)[1]["resid_post", 2]
    torch.testing.assert_close(torch.cat(cached, 1), whole[:, -3:], atol=2e-5, rtol=1e-4)


def ends_at(model, token):
    model.generation_config.eos_token_id = token
    model.generation_config.pad_token_id = 0
    return TransformerBridge(model)


def test_endings(endless):
    made = endless.generate(SOME, max_new_tokens=8, **GREEDY)
    first, third = int(made[0, 5]), int(made[0, 7])
    at_once = ends_at(endless.original_model, first)
    one = at_once.generate(SOME[:1], max_new_tokens=8, **GREEDY)
    assert torch.equal(one, made[:1, :6])
    assert torch.equal(
        at_once.generate(SOME[:1], max_new_tokens=8, stop_at_eos=False, **GREEDY), made[:1]
    )
    never_ending(endless.original_model)
    early = endless.generate(SOME, max_new_tokens=8, eos_token_id=third, **GREEDY)
    stop = made[0].tolist().index(third, 5) + 1
    assert torch.equal(early[0, :stop], made[0, :stop])
    assert (early[0, stop:] == 0).all()
    if third not in made[1, 5:].tolist():
        assert torch.equal(early[1], made[1])
    assert torch.equal(
        endless.generate(SOME[:1], max_new_tokens=8, eos_token_id=[first, 60], **GREEDY),
        made[:1, :6],
    )


@pytest.mark.unchecked
def test_stopping_criteria_and_strings(embedded):
    prompt = "When Mary and John went to the store, John gave a drink to"
    whole = embedded.generate(prompt, max_new_tokens=12, stop_at_eos=False, **GREEDY)
    made = whole[len(prompt) :]
    stop = (
        made.split(".")[0][-3:] + "."
    )  # the end of a word and the full stop: two tokens, and part of the first
    cut = embedded.generate(
        prompt, max_new_tokens=12, stop_at_eos=False, stop_strings=stop, **GREEDY
    )
    assert cut == whole[: whole.index(stop, len(prompt)) + len(stop)]
    assert cut == embedded.generate(prompt, max_new_tokens=12, stop_strings=["zzz", stop], **GREEDY)
    assert (
        "".join(embedded.generate_stream(prompt, max_new_tokens=12, stop_strings=stop, **GREEDY))
        == cut
    )
    assert (
        embedded.generate(prompt, max_new_tokens=12, stop_at_eos=False, stop_strings=[], **GREEDY)
        == whole
    )
    for empty in ("", [""]):
        with pytest.raises(ValueError, match="none of them empty"):
            embedded.generate(prompt, stop_strings=empty, **GREEDY)
    for wrong in (123, [123]):
        with pytest.raises(TypeError, match="stopping_criteria has 123"):
            embedded.generate(prompt, stopping_criteria=wrong, **GREEDY)

    class After(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return torch.full((len(input_ids),), input_ids.shape[1] >= 17)

    for given in (After(), [After()]):
        assert (
            embedded.generate(
                prompt, stopping_criteria=given, return_type="tokens", **GREEDY
            ).shape[1]
            == 17
        )


def test_frequency_penalty(endless):
    logits = endless(SOME)[:, -1]
    counts = torch.stack([torch.bincount(row, minlength=logits.shape[-1]) for row in SOME])
    made = endless.generate(SOME, max_new_tokens=1, freq_penalty=3.0, **GREEDY)
    assert torch.equal(made[:, -1], (logits - 3.0 * counts).argmax(-1))
    plain = endless.generate(SOME, max_new_tokens=20, **GREEDY)
    varied = endless.generate(SOME, max_new_tokens=20, freq_penalty=50.0, **GREEDY)
    assert len(set(varied[0].tolist())) == 25 > len(set(plain[0].tolist()))


def test_what_is_returned(endless):
    out = endless.generate(SOME, max_new_tokens=3, output_logits=True, **GREEDY)
    assert torch.equal(out.sequences, endless.generate(SOME, max_new_tokens=3, **GREEDY))
    assert len(out.logits) == 3
    torch.testing.assert_close(out.logits[0], endless(SOME)[:, -1])
    several = endless.generate(SOME, max_new_tokens=3, num_return_sequences=2, verbose=False)
    assert several.shape == (4, 8)
    assert endless.generate(SOME, return_type=None, **GREEDY) is None
    beams = endless.generate(SOME, max_new_tokens=3, num_beams=2, **GREEDY)
    assert beams.shape == (2, 8)
    native = endless.hf_generate(
        SOME, max_new_tokens=2, return_dict_in_generate=True, output_scores=True, do_sample=False
    )
    assert len(native.scores) == 2


def test_embeddings_as_a_prompt(endless):
    embeddings = endless.original_model.get_input_embeddings()(SOME)
    made = endless.generate(embeddings, max_new_tokens=4, **GREEDY)
    assert torch.equal(made, endless.generate(SOME, max_new_tokens=4, **GREEDY)[:, 5:])


def test_the_context_limit(endless):
    full = torch.full((1, 38), 3)
    assert endless.generate(full, max_new_tokens=2, **GREEDY).shape == (1, 40)
    with pytest.raises(
        ValueError,
        match=r"has 38 tokens and max_new_tokens=3; .* context of 40: there is room for 2",
    ):
        endless.generate(full, max_new_tokens=3, **GREEDY)


def test_empty_prompts(embedded):
    assert embedded.generate(max_new_tokens=3, **GREEDY) == embedded.generate(
        "", max_new_tokens=3, **GREEDY
    )
    assert embedded.generate("", max_new_tokens=3, return_type="tokens", **GREEDY).shape == (1, 4)
    with pytest.raises(ValueError, match="an empty text gives no tokens"):
        embedded.generate("", prepend_bos=False, **GREEDY)
    with pytest.raises(ValueError, match="no tokens"):
        embedded.generate(torch.zeros(1, 0, dtype=torch.long), **GREEDY)


@pytest.mark.unchecked
def test_errors(endless):
    with pytest.raises(
        TypeError, match=r"'max_new_token' is an argument of neither.*max_new_tokens"
    ):
        endless.generate(SOME, max_new_token=3, **GREEDY)
    with pytest.raises(ValueError, match="return_type is 'text'"):
        endless.generate(SOME, return_type="text", **GREEDY)
    with pytest.raises(ValueError, match="padding_side is 'middle'"):
        endless.generate(SOME, padding_side="middle", **GREEDY)
    with pytest.raises(ValueError, match="has no tokenizer"):
        endless.generate("text", **GREEDY)
    with pytest.raises(ValueError, match="has no tokenizer"):
        endless.generate(SOME, return_type="str", **GREEDY)
    with pytest.raises(ValueError, match=r"attention_mask has shape \[1, 2\]"):
        endless.generate(SOME, attention_mask=torch.ones(1, 2, dtype=torch.long), **GREEDY)

    def fail(x, hook):
        raise RuntimeError("deliberate")

    with (
        pytest.raises(RuntimeError, match="deliberate"),
        endless.hooks(fwd_hooks=[("hook_embed", fail)]),
    ):
        endless.generate(SOME, return_cache=True, **GREEDY)
    assert endless.step is None
    assert torch_hooks(endless.original_model) == 0
    headless = TransformerBridge(tiny("gpt2").transformer)
    with pytest.raises(TypeError, match="GPT2Model does not generate text"):
        headless.generate(SOME, **GREEDY)


def test_the_progress_bar_counts_tokens(endless, capsys):
    endless.generate(SOME, max_new_tokens=7, do_sample=False, verbose=True)
    assert "7/7" in capsys.readouterr().err
    endless.generate(SOME, max_new_tokens=7, **GREEDY)
    assert capsys.readouterr().err == ""


def test_encoder_decoder():
    config = T5Config(
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        vocab_size=61,
        decoder_start_token_id=0,
        dropout_rate=0.0,
    )
    torch.manual_seed(0)
    model = never_ending(T5ForConditionalGeneration(config).eval())
    bridge = TransformerBridge(model)
    expected = model.generate(
        SOME, attention_mask=torch.ones_like(SOME), max_new_tokens=6, do_sample=False
    )
    made, cache = bridge.generate(SOME, max_new_tokens=6, return_cache=True, **GREEDY)
    assert torch.equal(made, expected)
    _, whole = bridge.run_with_cache(SOME, decoder_input_ids=made[:, :-1])
    assert set(whole) == set(cache)
    for name in whole:
        torch.testing.assert_close(cache[name], whole[name], atol=2e-5, rtol=1e-4, msg=name)
    assert torch.equal(
        torch.cat(list(bridge.generate_stream(SOME, max_new_tokens=6, **GREEDY)), -1), expected
    )


def test_a_sliding_window_whose_cache_forgets():
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    config = MistralConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        vocab_size=61,
        max_position_embeddings=40,
        sliding_window=4,
    )
    bridge = TransformerBridge(never_ending(MistralForCausalLM(config).eval()))
    made, cache = bridge.generate(SOME, max_new_tokens=8, return_cache=True, **GREEDY)
    _, whole = bridge.run_with_cache(made[:, :-1])
    for name in whole:
        torch.testing.assert_close(cache[name], whole[name], atol=2e-5, rtol=1e-4, msg=name)


def test_a_state_of_fixed_size():
    torch.manual_seed(0)
    bridge = TransformerBridge(
        never_ending(
            GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=61)).eval()
        )
    )
    expected = bridge.generate(SOME, max_new_tokens=5, **GREEDY)
    made, cache = bridge.generate(
        SOME, max_new_tokens=5, cache_implementation="static", return_cache=True, **GREEDY
    )
    assert torch.equal(made, expected)
    _, whole = bridge.run_with_cache(made[:, :-1])
    for name in whole:
        torch.testing.assert_close(cache[name], whole[name], atol=2e-5, rtol=1e-4, msg=name)


def test_not_stopping_at_eos_makes_no_padding_of_it():
    model = tiny("gpt2")
    model.generation_config.eos_token_id = model.generation_config.bos_token_id = 0
    model.generation_config.pad_token_id = None
    bridge = TransformerBridge(model)
    tokens = torch.tensor([[0, 5, 9, 3, 8]])
    for stop in (True, False):
        out = bridge.generate(
            tokens, max_new_tokens=1, stop_at_eos=stop, output_logits=True, **GREEDY
        )
        torch.testing.assert_close(out.logits[0], bridge(tokens)[:, -1])


@pytest.mark.parametrize("embedded", [False, True])
def test_the_room_for_new_tokens_is_the_whole_context(embedded):
    bridge = TransformerBridge(tiny("gpt2"))  # with a context of 40
    prompt = torch.randint(0, 61, (2, 37), generator=torch.Generator().manual_seed(0))
    prompt = bridge.original_model.get_input_embeddings()(prompt).detach() if embedded else prompt
    assert bridge.generate(prompt, max_new_tokens=3, **GREEDY).shape[0] == 2
    with pytest.raises(
        ValueError, match=r"the prompt has 37 tokens and max_new_tokens=4.*room for 3 new tokens"
    ):
        bridge.generate(prompt, max_new_tokens=4, **GREEDY)


@pytest.mark.unchecked
@torch.no_grad()
def test_what_generate_compiles_by_itself_on_an_accelerator(tokens):
    bridge, steps = TransformerBridge(tiny("llama")), []
    options = {"max_new_tokens": 4, "do_sample": False, "verbose": False, "stop_at_eos": False}
    compiled = CompileConfig(backend=lambda graph, inputs, **mode: graph.forward)
    compiled._compile_all_devices = True
    plain = bridge.generate(tokens, **options)
    options |= {"cache_implementation": "static", "compile_config": compiled}
    with bridge.hooks(
        fwd_hooks=[("blocks.0.attn.hook_z", lambda z, hook: steps.append(bridge.step))]
    ):
        assert torch.equal(bridge.generate(tokens, **options), plain)  # and torch warns of nothing
    assert steps == list(range(4))
    assert torch.equal(bridge.generate(tokens, **options), plain)
