"""Behaviour that a change to the code could take away unnoticed, in patching, generation, attention and processing."""

import copy
import gc
import itertools
import weakref

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from bridge import TransformerBridge
from bridge.generation.stream import TextPieces
from bridge.patching.generic import generic_activation_patch
from bridge.patching.setters import layer_head_vector_patch_setter
from bridge.taps.attention_call import AttentionCall
from tests.adapters.test_verify_all import tiny as adapters_tiny
from tests.conftest import tiny

TOKENS = torch.randint(3, 61, (2, 7), generator=torch.Generator().manual_seed(0))
NEW = {"max_new_tokens": 4, "do_sample": False, "verbose": False, "stop_at_eos": False}


# Patching


def new_tensor(corrupted, index, clean):
    made = corrupted.clone()
    made[:, :, index[1]] = clean[:, :, index[1]]
    return made


def in_place(corrupted, index, clean):
    corrupted[:, :, index[1]] = clean[:, :, index[1]]


def view_of_it(corrupted, index, clean):
    corrupted[:, :, index[1]] = clean[:, :, index[1]]
    return corrupted.view_as(corrupted)


def new_and_in_place(corrupted, index, clean):
    """What is returned counts, whatever was done to what was given."""
    made = new_tensor(corrupted, index, clean)
    corrupted.zero_()
    return made


@pytest.mark.parametrize("setter", [new_tensor, in_place, view_of_it, new_and_in_place])
@pytest.mark.parametrize("together", [1, 3, "auto"])
@torch.no_grad()
def test_setters_that_return_a_new_tensor_or_nothing(setter, together):
    """Each patch of a run is its own, however its setter says it, against one plain run with a hook for each."""
    bridge = TransformerBridge(tiny("gpt2"))
    clean, corrupted = TOKENS, TOKENS.clone()
    corrupted[:, 2] = (corrupted[:, 2] + 9) % 61
    _, cache = bridge.run_with_cache(clean, names_filter=lambda name: name.endswith("hook_z"))

    def metric(logits):
        return (logits[:, -1, 5] - logits[:, 4, 9]).mean()

    arguments = (bridge, corrupted, cache, metric, setter, "z", ("layer", "head"))
    found = generic_activation_patch(*arguments, patches_per_run=together, verbose=False)
    for layer, head in itertools.product(range(3), range(4)):
        name = f"blocks.{layer}.attn.hook_z"

        def by_hand(z, hook, name=name, head=head):
            z[:, :, head] = cache[name][:, :, head]

        expected = metric(bridge.run_with_hooks(corrupted, fwd_hooks=[(name, by_hand)]))
        torch.testing.assert_close(found[layer, head], expected, atol=1e-5, rtol=1e-4)
    assert found.std() > 0


def test_setters_may_do_nothing():
    bridge = TransformerBridge(tiny("gpt2"))
    _, cache = bridge.run_with_cache(TOKENS)
    some = lambda x, index, clean: None if index[1] % 2 else layer_head_vector_patch_setter(x, index, clean * 0)
    found = generic_activation_patch(
        bridge, TOKENS, cache, lambda logits: logits[0, -1, 5], some, "z", ("layer", "head"), verbose=False
    )
    torch.testing.assert_close(found[:, 1::2], bridge(TOKENS)[0, -1, 5].detach().expand(3, 2))
    assert (found[:, ::2] != found[0, 1]).all()


# Runs


@torch.no_grad()
def test_what_was_recorded_is_not_written_to_by_a_later_point_of_its_place():
    """In T5 the stream between and what the MLP reads are one tensor, and an edit of the second is made in place."""
    bridge = TransformerBridge(adapters_tiny("t5"))
    names = ["encoder.1.hook_resid_mid", "encoder.1.hook_mlp_in"]
    clean = bridge.run_with_cache(TOKENS, names_filter=names)[1]
    with bridge.hooks([(names[1], lambda x, hook: x * 0.5)]):
        for wanted in (names, names[:1]):
            cache = bridge.run_with_cache(TOKENS, names_filter=wanted)[1]
            assert torch.equal(cache[names[0]], clean[names[0]])
    assert torch.equal(clean[names[0]], clean[names[1]])


def test_a_compiled_block_is_as_it_was_after_it_was_passed_over():
    bridge = TransformerBridge(tiny("gpt2"))
    residual = bridge(TOKENS, stop_at_layer=1)
    expected = bridge(residual, start_at_layer=1)
    block = bridge.original_model.transformer.h[0]
    block.compile(backend="eager")
    own = block._compiled_call_impl
    assert torch.equal(bridge(residual, start_at_layer=1), expected)
    assert block._compiled_call_impl is own


@pytest.mark.parametrize("name", ["blocks.1.ln1.hook_scale", "blocks.1.ln1.hook_normalized"])
@torch.no_grad()
def test_a_cache_of_a_norm_does_not_keep_the_stream(name):
    """What could be computed later from larger tensors is computed in the run, unless everything is kept anyway."""
    bridge = TransformerBridge(tiny("gpt2"))
    alive = []
    norm = bridge.original_model.transformer.h[1].ln_1
    norm.register_forward_pre_hook(lambda module, args: alive.append(weakref.ref(args[0])))
    _, cache = bridge.run_with_cache(TOKENS, names_filter=name)
    gc.collect()
    assert alive[0]() is None
    _, whole = bridge.run_with_cache(TOKENS)
    assert torch.equal(whole[name], cache[name])


# Generation


def llama() -> LlamaForCausalLM:
    config = LlamaConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=48,
        vocab_size=61, pad_token_id=0,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return LlamaForCausalLM(config).eval()


def test_a_generation_config_beside_the_arguments_is_refused():
    bridge = TransformerBridge(llama())
    calls = []
    bridge.original_model.register_forward_pre_hook(lambda module, args: calls.append(1))
    own = copy.deepcopy(bridge.original_model.generation_config)
    own.max_new_tokens = 2
    for run in (bridge.generate, bridge.generate_stream):
        with pytest.raises(TypeError, match=r"generation_config is not taken beside .* use hf_generate"):
            run(TOKENS, generation_config=own, **NEW)
    assert not calls
    assert bridge.hf_generate(TOKENS, generation_config=own, do_sample=False).shape == (2, 9)


@pytest.mark.parametrize("stream", [False, True])
def test_how_many_rows_is_what_the_arguments_say(stream):
    """The model's own configuration may ask for several rows for each prompt."""
    model = llama()
    expected = TransformerBridge(model).generate(TOKENS, **NEW)
    model.generation_config.num_return_sequences, model.generation_config.do_sample = 2, True
    bridge = TransformerBridge(model)
    made = torch.cat(list(bridge.generate_stream(TOKENS, **NEW)), -1) if stream else bridge.generate(TOKENS, **NEW)
    assert torch.equal(made, expected)


def test_what_a_tokenizer_writes_in_another_way_once_others_follow():
    """`` .`` becomes ``.``: what was given stays, nothing is lost, and the stream goes on."""
    words = {1: "a", 2: " ", 3: ".", 4: "b", 5: " c", 6: " ?"}
    row = TextPieces(lambda ids: "".join(words[i] for i in ids).replace(" .", ".").replace(" ?", "?"))
    pieces = [row.add([i]) for i in (1, 2, 3, 4, 5)]
    assert pieces == ["a", " ", ".", "b", " c"]
    assert row.add([2]) == " "
    assert row.add([3], last=True) == "."
    whole = TextPieces(lambda ids: "".join(words[i] for i in ids).replace(" .", ".").replace(" ?", "?"))
    assert whole.add([1, 6, 4, 5], last=True) == "a?b c"
    empty = TextPieces(lambda ids: "" if len(ids) > 1 else "a")
    assert [empty.add([1]), empty.add([1]), empty.add([], last=True)] == ["a", "", ""]


# Attention: what is no torch function is known by its arguments


def by_hand(module, query, key, value, attention_mask, scaling=None, sliding_window=None, is_causal=None, **kwargs):
    """Attention as flash computes it: a mask of tokens, the last query at the last key, a window of positions."""
    key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1).double()
    value = value.repeat_interleave(query.shape[1] // value.shape[1], dim=1).double()
    scores = query.double() @ key.transpose(-1, -2) * scaling
    queries, keys = scores.shape[-2:]
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    for q in range(queries):
        place = q + keys - queries
        for k in range(keys):
            if (causal and k > place) or (sliding_window is not None and k <= place - sliding_window):
                scores[..., q, k] = -torch.inf
    if attention_mask is not None:
        scores = scores.masked_fill(attention_mask[:, None, None].logical_not(), -torch.inf)
    pattern = scores.softmax(-1).nan_to_num()
    return (pattern @ value).transpose(1, 2).to(query.dtype), None


@pytest.fixture
def flash_by_hand(monkeypatch):
    """A kernel registered by a user, which hides what it computes from everybody."""

    def kernel(*args, **kwargs):
        with torch._C.DisableTorchFunctionSubclass(), torch._C.DisableTorchFunction():
            return by_hand(*args, **kwargs)

    ALL_ATTENTION_FUNCTIONS["flash_attention_2"] = kernel
    yield "flash_attention_2"
    assert ALL_ATTENTION_FUNCTIONS["flash_attention_2"] is kernel
    del ALL_ATTENTION_FUNCTIONS["flash_attention_2"]


def windowed(kind, implementation) -> MistralForCausalLM:
    config = MistralConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=48,
        vocab_size=61, sliding_window=3 if kind == "window" else None,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = MistralForCausalLM._from_config(config, attn_implementation="eager").eval()
    model.config._attn_implementation = implementation  # `set_attn_implementation` looks for flash itself
    return model


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("kind", ["window", "no window"])
@pytest.mark.parametrize("past", [0, 4, 6])
@torch.no_grad()
def test_windows_under_a_kernel_that_shows_nothing(flash_by_hand, kind, padded, past):
    """Scores, pattern and edits of them under a kernel of the user's are those of the model's own eager attention."""
    mask = torch.tensor([[1] * 7, [0, 0, 1, 1, 1, 1, 1]]) if padded else torch.ones(2, 7, dtype=torch.long)
    seen = mask[:, :, None] * mask[:, None] * torch.ones(7, 7).tril()
    found = []
    for implementation in ("eager", flash_by_hand):
        bridge = TransformerBridge(windowed(kind, implementation))
        assert bridge.original_model.config._attn_implementation == implementation
        names = ["blocks.1.attn.hook_attn_scores", "blocks.1.attn.hook_pattern"]

        def run(how, bridge=bridge, **more):
            if past:
                kept = DynamicCache()  # which knows no windows, and forgets nothing
                bridge.original_model(TOKENS[:, :past], attention_mask=mask[:, :past], past_key_values=kept)
                more |= {"past_key_values": kept}
            return how(TOKENS[:, past:], attention_mask=mask, **more)

        plain = run(bridge)
        logits, cache = run(bridge.run_with_cache, names_filter=names)
        assert torch.equal(logits, plain)
        results = [plain, cache[names[0]], cache[names[1]]]
        for name, edit in (
            (names[0], lambda x, hook: x * torch.linspace(0.5, 2, x.shape[-1])),
            (names[1], lambda x, hook: x.roll(1, 1)),
            ("blocks.1.attn.hook_rot_k", lambda x, hook: x.flip(2)),
        ):
            results.append(run(bridge.run_with_hooks, fwd_hooks=[(name, edit)]))
            assert not torch.allclose(results[-1], plain)
        found.append(results)
    allowed = seen[:, past:].bool()
    if kind == "window":
        places = torch.arange(7)
        allowed = allowed & (places > places[past:, None] - 3)
    for ours, expected in zip(found[1][1:3], found[0][1:3], strict=True):
        keys = expected.shape[-1]
        at = allowed[:, None, :, -keys:].expand_as(expected)
        rows = at.any(-1, keepdim=True).expand_as(at)
        ours = ours[..., -keys:]
        torch.testing.assert_close(ours[at], expected[at], atol=1e-5, rtol=1e-4)
        assert not ours[rows & ~at].isfinite().logical_and(ours[rows & ~at] != 0).any()
    for ours, expected in zip([found[1][0], *found[1][3:]], [found[0][0], *found[0][3:]], strict=True):
        real = mask[:, past:].bool()
        torch.testing.assert_close(ours[real], expected[real], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@torch.no_grad()
def test_a_query_for_which_a_hook_forbids_everything(implementation):
    """It attends to nothing: no NaN, and what editing the pattern to zero gives."""
    bridge = TransformerBridge(tiny("llama", implementation))
    scores, pattern = ("blocks.1.attn.hook_attn_scores", "blocks.1.attn.hook_pattern")

    def forbid(x, hook):
        x[:, 1, 3] = 0 if hook.name == pattern else -torch.inf

    with bridge.hooks([(scores, forbid)]):
        logits, cache = bridge.run_with_cache(TOKENS, names_filter=[pattern])
    assert not cache[pattern][:, 1, 3].any()
    torch.testing.assert_close(cache[pattern][:, 0].sum(-1), torch.ones(2, 7))
    torch.testing.assert_close(logits, bridge.run_with_hooks(TOKENS, fwd_hooks=[(pattern, forbid)]))


@pytest.mark.parametrize("name", ["attn_scores", "pattern", "rot_q", "rot_k", "z"])
def test_queries_packed_in_groups(name):
    """One query of a padded batch is given to the kernel packed by groups of heads: an edit is of each head."""
    mask = torch.tensor([[1] * 7, [0, 0, 1, 1, 1, 1, 1]])

    def edit(x, hook):
        head = 1 if name in ("attn_scores", "pattern") else 2
        steps = torch.linspace(0.5, 2, x.shape[head]).view([-1 if axis == head else 1 for axis in range(4)])
        return x * steps

    made = []
    for implementation in ("eager", "sdpa"):
        bridge = TransformerBridge(tiny("llama", implementation))
        more = {"attention_mask": mask, "output_logits": True, **NEW}
        plain = torch.stack(bridge.generate(TOKENS, **more)["logits"])
        with bridge.hooks([(f"blocks.1.attn.hook_{name}", edit)]):
            made.append(torch.stack(bridge.generate(TOKENS, **more)["logits"]))
        assert not torch.allclose(made[-1][1:], plain[1:], atol=1e-3)
    torch.testing.assert_close(made[0], made[1], atol=1e-5, rtol=1e-4)


def test_a_kernel_is_given_back_what_it_returns_itself():
    """Packed queries come back packed, as the kernel has them."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, 2, n, 8, generator=generator) for n in (3, 5, 5))
    call = AttentionCall(query, key, value, None, n_heads=6)
    result = call.result(call.pattern(call.scores()))
    assert result.shape == query.shape
    torch.testing.assert_close(result, torch.nn.functional.scaled_dot_product_attention(query, key, value))


@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.uint8, torch.int32, torch.float16, torch.float64])
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_the_type_of_a_mask_is_no_matter(implementation, dtype):
    bridge = TransformerBridge(tiny("llama", implementation))
    mask = torch.tensor([[1] * 7, [0, 0, 1, 1, 1, 1, 1]])
    name = "blocks.1.attn.hook_attn_scores"
    logits, cache = bridge.run_with_cache(TOKENS, attention_mask=mask, names_filter=name)
    again, other = bridge.run_with_cache(TOKENS, attention_mask=mask.to(dtype), names_filter=name)
    assert torch.equal(logits, again)
    assert torch.equal(cache[name], other[name])
    assert torch.equal(
        bridge.generate(TOKENS, attention_mask=mask.to(dtype), **NEW),
        bridge.generate(TOKENS, attention_mask=mask, **NEW),
    )
    loss = bridge(TOKENS, attention_mask=mask.to(dtype), return_type="loss")
    assert torch.equal(loss, bridge(TOKENS, attention_mask=mask, return_type="loss"))


def test_a_mask_is_brought_to_the_model(monkeypatch):
    """What the model is given lies where its input goes: here on a device that only says so."""
    bridge = TransformerBridge(tiny("llama"))
    monkeypatch.setattr("bridge.run.model_inputs.input_device", lambda model: torch.device("meta"))
    seen = []

    def stop(module, args, kwargs):
        seen.append(kwargs)
        raise RuntimeError("seen")

    bridge.original_model.register_forward_pre_hook(stop, with_kwargs=True)
    mask = torch.tensor([[1] * 7, [0, 0, 1, 1, 1, 1, 1]])
    for given in (mask, mask.bool(), mask.float(), mask[:, None, None].expand(2, 1, 7, 7).float()):
        with pytest.raises(RuntimeError, match="seen"):
            bridge(TOKENS, attention_mask=given)
        assert {value.device.type for value in seen.pop().values()} == {"meta"}


# Processing


@pytest.mark.parametrize("kind", ["native", "gpt2"])
def test_norms_without_weights_when_raw_weights_are_loaded_again(kind):
    """There is nothing in them to fold: whether they were folded is seen by what reads them."""
    if kind == "native":
        fields = {"n_layers": 2, "d_model": 32, "n_heads": 4, "d_vocab": 61, "n_ctx": 9, "act_fn": "relu", "seed": 0}
        bridge = TransformerBridge.boot_native({**fields, "normalization_type": "LNPre"}).eval()
    else:
        model = tiny("gpt2")
        for block in model.transformer.h:
            block.ln_1 = block.ln_2 = None
            block.ln_1, block.ln_2 = (torch.nn.LayerNorm(32, elementwise_affine=False) for _ in range(2))
        model.transformer.ln_f = torch.nn.LayerNorm(32, elementwise_affine=False)
        bridge = TransformerBridge(model)
    raw = copy.deepcopy(bridge.original_model.state_dict())
    called = bridge.cfg.normalization_type
    expected = bridge(TOKENS)
    alone = {"center_writing_weights": False, "center_unembed": False, "fold_value_biases": False}
    bridge.process_weights(fold_ln=True, **alone)
    processed = copy.deepcopy(bridge.original_model.state_dict())
    raw |= {name: torch.zeros_like(value) for name, value in processed.items() if name not in raw}
    assert (bridge.cfg.processed["fold_ln"], bridge.cfg.normalization_type) == ("done", "LNPre")
    bridge.original_model.load_state_dict(raw)
    assert (bridge.cfg.processed, bridge.cfg.normalization_type) == ({}, called)
    assert torch.equal(bridge(TOKENS), expected)
    bridge.process_weights(fold_ln=True, **alone)
    assert (bridge.cfg.processed["fold_ln"], bridge.cfg.normalization_type) == ("done", "LNPre")
    for name, value in bridge.original_model.state_dict().items():
        torch.testing.assert_close(value, processed[name], atol=1e-6, rtol=1e-5)
    assert bridge.W_in.mean(1).abs().max() < 1e-6


def test_sums_of_several_types():
    """Parts in several types are stacked in the widest of them, as the stream that they add up to."""
    model = tiny("gpt2")
    model.transformer.h[1].mlp.c_proj.double().register_forward_pre_hook(lambda module, args: (args[0].double(),))
    for norm in (model.transformer.h[2].ln_1, model.transformer.h[2].ln_2, model.transformer.ln_f):
        norm.register_forward_pre_hook(lambda module, args: (args[0].float(),))
    bridge = TransformerBridge(model)
    with torch.no_grad():
        _, cache = bridge.run_with_cache(TOKENS)
    types = [cache[name, 1].dtype for name in ("attn_out", "mlp_out", "resid_post")]
    assert types == [torch.float32, torch.float64, torch.float64]
    stream = cache["resid_post", 2]
    for terms in (
        cache.decompose_resid(),
        cache.get_full_resid_decomposition(),
        cache.stack_head_results(incl_remainder=True),
        cache.stack_neuron_results(-1, incl_remainder=True),
    ):
        assert terms.dtype == torch.float64
        torch.testing.assert_close(terms.sum(0), stream, atol=1e-5, rtol=1e-5)


def test_a_name_that_a_part_does_not_have_is_no_circuit():
    bridge = TransformerBridge(tiny("gpt2"))
    assert bridge.blocks[0].attn.OV.shape == (4, 32, 32)
    for part, name in ((bridge.blocks[0].attn, "VO"), (bridge.blocks[0].mlp, "OV"), (bridge.blocks[0].mlp, "QK")):
        with pytest.raises(AttributeError, match=f"has no '{name}'"):
            getattr(part, name)


def test_whether_embeddings_are_cached():
    bridge = TransformerBridge(tiny("gpt2"))
    _, cache = bridge.run_with_cache(TOKENS, names_filter=["hook_embed", "hook_pos_embed"])
    assert (cache.has_embed, cache.has_pos_embed) == (True, True)
    _, cache = bridge.run_with_cache(TOKENS, names_filter="blocks.0.hook_resid_pre")
    assert (cache.has_embed, cache.has_pos_embed) == (False, False)
