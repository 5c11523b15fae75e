"""Generations whose activations, padding or arguments were taken another way than they were
meant.
"""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from bridge import TransformerBridge

GIVEN = {"max_new_tokens": 4, "do_sample": False, "stop_at_eos": False, "verbose": False}


@pytest.fixture
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        vocab_size=61,
        max_position_embeddings=64,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture
def prompt():
    return torch.tensor([[3, 4, 5, 6, 7]])


def assert_of_the_sequence(bridge, sequence, cache):
    _, expected = bridge.run_with_cache(sequence[:, :-1])
    assert set(cache) == set(expected)
    for name in expected:
        torch.testing.assert_close(cache[name], expected[name], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("where", ["use_past_kv_cache", "use_cache", "generation_config"])
def test_without_keys_and_values_kept(model, prompt, where):
    bridge = TransformerBridge(model)
    if where == "generation_config":
        model.generation_config.use_cache = False
    more = {} if where == "generation_config" else {where: False}
    sequence, cache = bridge.generate(prompt, return_cache=True, **GIVEN, **more)
    assert_of_the_sequence(bridge, sequence, cache)


OTHER_RUNS = {
    "num_beams": 2,
    "prompt_lookup_num_tokens": 2,
    "guidance_scale": 1.5,
    "assistant_early_exit": 1,
    "dola_layers": "low",
    "penalty_alpha": 0.6,
}


@pytest.mark.parametrize("where", ["argument", "generation_config"])
@pytest.mark.parametrize("name", OTHER_RUNS)
def test_no_cache_where_other_tokens_are_processed(model, prompt, name, where):
    calls = []
    model.register_forward_pre_hook(lambda module, args: calls.append(1))
    bridge = TransformerBridge(model)
    more = {name: OTHER_RUNS[name]} if where == "argument" else {}
    if where == "generation_config":
        setattr(model.generation_config, name, OTHER_RUNS[name])
    with pytest.raises(ValueError, match=f"return_cache is not available with .*{name}"):
        bridge.generate(prompt, return_cache=True, **GIVEN, **more)
    assert not calls
    if where == "generation_config":  # an argument goes before it
        off = {"num_beams": 1, "guidance_scale": 1.0}.get(name)
        sequence, cache = bridge.generate(prompt, return_cache=True, **GIVEN, **{name: off})
        assert_of_the_sequence(bridge, sequence, cache)


def test_no_cache_of_what_was_computed_before(model, prompt):
    bridge = TransformerBridge(model)
    past = model(prompt[:, :3], use_cache=True).past_key_values
    with pytest.raises(
        ValueError, match="past_key_values: what was computed before is not seen again"
    ):
        bridge.generate(prompt, return_cache=True, past_key_values=past, **GIVEN)
    assert past.get_seq_length() == 3


def test_the_cache_of_right_padded_prompts_stands_beside_their_tokens(model):
    bridge = TransformerBridge(model)
    tokens = torch.tensor([[3, 4, 5, 0, 0], [3, 4, 5, 6, 7]])
    made, cache = bridge.generate(
        tokens, attention_mask=(tokens != 0).long(), return_cache=True, **GIVEN
    )
    alone, own = bridge.generate(tokens[:1, :3], return_cache=True, **GIVEN)
    assert torch.equal(made[0, :7], alone[0])
    for name in own:
        got = cache[name][:1]
        for axis, size in enumerate(own[name].shape):
            got = got.narrow(axis, 0, size)
        torch.testing.assert_close(got, own[name], atol=1e-5, rtol=1e-4)
    ids = cache["embed"][0, :6] - model.get_input_embeddings().weight[made[0, :6]]
    assert ids.abs().max() == 0


def test_padding_tokens_without_a_mask_are_refused(model):
    bridge = TransformerBridge(model)
    tokens = torch.tensor([[0, 0, 3, 4, 5], [3, 4, 5, 6, 7]])
    with pytest.raises(ValueError, match="the tokens hold the padding token 0"):
        bridge.generate(tokens, **GIVEN)
    given = bridge.generate(
        tokens, attention_mask=torch.ones_like(tokens), output_logits=True, **GIVEN
    )
    torch.testing.assert_close(given.logits[0], bridge(tokens)[:, -1])
    mask = (tokens != 0).long()
    given = bridge.generate(tokens, attention_mask=mask, output_logits=True, **GIVEN)
    torch.testing.assert_close(given.logits[0], bridge(tokens, attention_mask=mask)[:, -1])


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"max_length": 8}, "max_length=8 would have no effect together with max_new_tokens=4"),
        ({"return_dict_in_generate": True}, "use output_logits=True"),
        ({"output_scores": True}, "use output_logits=True"),
        ({"names_filter": "hook_embed"}, "names_filter is of the cache .* return_cache=True"),
        ({"device": "cpu"}, "device is of the cache .* return_cache=True"),
    ],
)
def test_arguments_without_effect_are_refused(model, prompt, more, words):
    with pytest.raises(ValueError, match=words):
        TransformerBridge(model).generate(prompt, **GIVEN, **more)


def test_hooks_act_on_every_step_of_a_static_cache(model, prompt):
    bridge = TransformerBridge(model)
    calls = []

    def half(x, hook):
        calls.append(bridge.step)
        return x * 0.5

    with bridge.hooks(fwd_hooks=[("blocks.1.hook_mlp_out", half)]):
        plain = bridge.generate(prompt, **GIVEN)
        assert calls == [0, 1, 2, 3]
        static = bridge.generate(prompt, cache_implementation="static", **GIVEN)
    assert calls == [0, 1, 2, 3] * 2
    assert torch.equal(plain, static)


@pytest.mark.unchecked  # the checks of annotations are no code that torch compiles
@pytest.mark.filterwarnings("ignore:Dynamo:UserWarning")  # it says what it leaves to Python
def test_hooks_act_in_decoding_that_is_compiled(model, prompt):
    """As on an accelerator, where transformers compiles the forward that decodes with a static
    cache.
    """
    bridge = TransformerBridge(model)
    expected = bridge.generate(prompt, **GIVEN)
    compiled = torch.compile(model.__call__, backend="eager")
    model.get_compiled_call = lambda config: compiled  # what `generate` asks for
    model._valid_auto_compile_criteria = lambda *args, **kwargs: True
    static = {"cache_implementation": "static", **GIVEN}
    assert torch.equal(bridge.generate(prompt, **static), expected)
    calls = []
    with bridge.hooks(
        fwd_hooks=[("blocks.1.hook_mlp_out", lambda x, hook: calls.append(bridge.step))]
    ):
        assert torch.equal(bridge.generate(prompt, **static), expected)
    assert calls == [0, 1, 2, 3]
    calls.clear()
    with bridge.hooks(
        fwd_hooks=[("blocks.1.hook_mlp_out", lambda x, hook: calls.append(bridge.step))]
    ):
        model.generate(
            prompt,
            max_new_tokens=4,
            do_sample=False,
            cache_implementation="static",
            eos_token_id=None,
        )
    assert len(calls) == 4
    _, cache = bridge.generate(prompt, return_cache=True, **static)
    assert_of_the_sequence(bridge, expected, cache)


def test_a_model_without_weights_says_where_to_generate() -> None:
    """The bridge of an engine is around such a skeleton."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(vocab_size=20, intermediate_size=16, **sizes))
    skeleton = TransformerBridge(model)
    tokens = torch.tensor([[1, 2, 3]])
    for call in (
        lambda: skeleton.generate(tokens, verbose=False),
        lambda: skeleton.generate_stream(tokens, verbose=False),
        lambda: skeleton.generate_batch([[1, 2, 3]]),
    ):
        with pytest.raises(RuntimeError, match=r"call engine\.generate, not engine\.bridge"):
            call()
