"""Results of runs that were wrong without a word: losses, masks, positions, filters, layers,
replaced modules.
"""

import copy
import gc
import weakref

import peft
import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import MixtralConfig, MixtralForCausalLM, T5Config, T5ForConditionalGeneration

from bridge import TransformerBridge
from tests.conftest import FAMILIES, tiny, torch_hooks
from tests.tiny_models import tiny_model


def zero(x, hook):
    return x * 0


def mixtral() -> torch.nn.Module:
    torch.manual_seed(0)
    return MixtralForCausalLM(
        MixtralConfig(
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            intermediate_size=48,
            vocab_size=61,
            num_local_experts=4,
        )
    ).eval()


@pytest.mark.parametrize("make", [*[lambda f=f: tiny(f) for f in FAMILIES], mixtral])
def test_every_module_is_freed_after_a_cache(make, tokens):
    model = make()
    bridge = TransformerBridge(model)
    alive = [weakref.ref(module) for module in model.modules()]
    _, cache = bridge.run_with_cache(tokens)
    assert cache["pattern", 0].shape[0] == 2
    _, later = bridge.run_with_cache(tokens)  # its patterns are never computed
    del model, bridge, cache, later
    gc.collect()
    assert not [ref for ref in alive if ref() is not None]


def test_a_loss_of_one_token_is_refused_before_the_run(bridge, tokens):
    calls = []
    bridge.original_model.register_forward_pre_hook(lambda module, args: calls.append(1))
    with pytest.raises(ValueError, match="two tokens at least"):
        bridge(tokens[:, :1], return_type="loss")
    alone = torch.zeros_like(tokens)
    alone[:, 3] = 1
    with pytest.raises(ValueError, match="no two adjacent tokens"):
        bridge(tokens, return_type="loss", attention_mask=alone)
    assert not calls


@pytest.mark.parametrize("family", FAMILIES)
def test_a_bfloat16_loss_is_that_of_transformers(family, tokens):
    model = tiny(family, dtype=torch.bfloat16)
    expected = model(tokens, labels=tokens).loss
    loss = TransformerBridge(model)(tokens, return_type="loss")
    assert loss.dtype == expected.dtype == torch.float32
    torch.testing.assert_close(loss, expected)


def test_padding_of_a_decoder_is_not_counted():
    torch.manual_seed(0)
    config = T5Config(
        num_layers=2,
        d_model=16,
        d_kv=8,
        num_heads=2,
        d_ff=24,
        vocab_size=61,
        decoder_start_token_id=0,
    )
    model = T5ForConditionalGeneration(config).eval()
    bridge = TransformerBridge(model)
    source = torch.tensor([[3, 4, 5], [6, 7, 8]])
    target = torch.tensor([[0, 4, 5, 6], [0, 7, 0, 0]])
    with pytest.raises(ValueError, match="pass decoder_attention_mask"):
        bridge(source, return_type="loss", decoder_input_ids=target)
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    loss = bridge(source, return_type="loss", decoder_input_ids=target, decoder_attention_mask=mask)
    logits = model(input_ids=source, decoder_input_ids=target, decoder_attention_mask=mask).logits
    labels = target[:, 1:].masked_fill(mask[:, 1:] == 0, -100)
    torch.testing.assert_close(loss, cross_entropy(logits[:, :-1].transpose(1, 2), labels))
    each = bridge(
        source,
        return_type="loss",
        loss_per_token=True,
        decoder_input_ids=target,
        decoder_attention_mask=mask,
    )
    assert torch.equal(each[1, 1:], torch.zeros(2))


def test_loss_per_token_is_not_had_with_labels(bridge, tokens):
    with pytest.raises(ValueError, match="loss_per_token and labels"):
        bridge(tokens, return_type="loss", loss_per_token=True, labels=tokens)


@pytest.mark.parametrize("value", [0.5, 2.0, -1])
def test_a_mask_holds_zero_and_one(bridge, tokens, value):
    mask = torch.ones(tokens.shape, dtype=torch.float32 if isinstance(value, float) else torch.long)
    mask[0, 0] = value
    for run in (bridge, lambda *a, **k: bridge.generate(*a, **k, max_new_tokens=1, verbose=False)):
        with pytest.raises(
            ValueError, match=f"attention_mask holds {value}; it must be 1 for tokens and 0"
        ):
            run(tokens, attention_mask=mask)
    ones = torch.ones(tokens.shape)
    assert torch.equal(
        bridge(tokens, attention_mask=ones), bridge(tokens, attention_mask=ones.bool())
    )


def test_a_tuple_of_positions_is_a_range(bridge, tokens):
    _, whole = bridge.run_with_cache(tokens)
    for given, positions in (((1, 4), [1, 2, 3]), ((1, 8, 3), [1, 4, 7]), ([1, 4], [1, 4])):
        _, some = bridge.run_with_cache(tokens, pos_slice=given)
        assert torch.equal(some["resid_post", 1], whole["resid_post", 1][:, positions])
        torch.testing.assert_close(
            some["pattern", 1], whole["pattern", 1][:, :, positions], atol=1e-6, rtol=0
        )
        kept, forward, _ = bridge.get_caching_hooks("blocks.1.hook_resid_post", pos_slice=given)
        bridge.run_with_hooks(tokens, fwd_hooks=forward)
        assert torch.equal(kept["blocks.1.hook_resid_post"], whole["resid_post", 1][:, positions])


def test_a_residual_that_is_added_to_in_place_under_inference_mode(bridge, tokens):
    name = "blocks.1.hook_resid_pre"
    _, expected = bridge.run_with_cache(tokens, names_filter=name)
    block = bridge.original_model.get_submodule(bridge.block_paths[1])
    with torch.inference_mode():
        changes = block.register_forward_hook(
            lambda module, args, out: [None, args[0].add_(1.0)][0]
        )
        _, cache = bridge.run_with_cache(tokens, names_filter=name)
    changes.remove()
    assert torch.equal(cache[name], expected[name])
    assert not block._forward_hooks


@pytest.mark.parametrize("new", ["long", "bool", "int"])
def test_a_hook_returns_numbers_of_the_points_kind(bridge, tokens, new):
    with pytest.raises(TypeError, match=r"returned torch\.\w+; the activation is torch.float32"):
        bridge.run_with_hooks(
            tokens, fwd_hooks=[("blocks.1.hook_mlp_out", lambda x, hook: getattr(x, new)())]
        )
    assert torch_hooks(bridge.original_model) == 0
    assert bridge.run_with_hooks(
        tokens, fwd_hooks=[("blocks.1.hook_mlp_out", lambda x, hook: x.double())]
    ).shape


def test_a_hook_returns_whole_numbers_at_a_point_of_indices(tokens):
    bridge = TransformerBridge(mixtral())
    name = "blocks.0.mlp.hook_expert_indices"
    with pytest.raises(TypeError, match=r"returned torch.float32; the activation is torch.int64"):
        bridge.run_with_hooks(tokens, fwd_hooks=[(name, lambda x, hook: x.float() + 0.5)])
    moved = bridge.run_with_hooks(tokens, fwd_hooks=[(name, lambda x, hook: ((x + 1) % 4).int())])
    assert not torch.equal(moved, bridge(tokens))


@pytest.mark.parametrize(
    "chosen",
    [
        lambda n: n.endswith("hook_out"),
        lambda n: "hook_in" in n,
        lambda n: n.endswith("hook_result"),
        lambda n: True,
    ],
)
@pytest.mark.parametrize("make", [*[lambda f=f: tiny(f) for f in FAMILIES], mixtral])
def test_a_filter_sees_every_name_and_alias(make, chosen):
    bridge = TransformerBridge(make())
    expected = [
        name
        for name, hook in bridge.hook_dict.items()
        if chosen(name) or any(chosen(a) for a in hook.point.aliases)
    ]
    assert [hook.name for hook in bridge.select_hooks(chosen)] == expected


def test_hooks_on_a_layer_that_does_not_run_are_refused(bridge, tokens):
    seen = []
    with bridge.hooks(fwd_hooks=[("blocks.2.hook_mlp_out", lambda x, hook: seen.append(1))]):
        with pytest.raises(
            ValueError, match=r"blocks.2.hook_mlp_out has a hook .* never be called"
        ):
            bridge(tokens, stop_at_layer=1)
        bridge(tokens)
    with (
        bridge.hooks(bwd_hooks=[("blocks.0.hook_mlp_out", lambda x, hook: None)]),
        pytest.raises(ValueError, match=r"blocks.0.hook_mlp_out"),
    ):
        bridge(torch.zeros(2, 9, 32), start_at_layer=1)
    with bridge.hooks(
        fwd_hooks=[(lambda name: name.endswith("mlp_out"), lambda x, hook: seen.append(hook.name))]
    ):
        bridge(tokens, stop_at_layer=1)
    assert seen == [1, "blocks.0.hook_mlp_out"]
    inner = []

    def runs_a_part(x, hook):
        inner.append(bridge(tokens, stop_at_layer=0))

    bridge.run_with_hooks(tokens, fwd_hooks=[("blocks.2.hook_mlp_out", runs_a_part)])
    assert len(inner) == 1


@pytest.mark.parametrize("kind", ["pre", "post"])
def test_a_users_own_hook_on_a_skipped_block_does_not_act(bridge, tokens, kind):
    residual = bridge(tokens, stop_at_layer=2)
    expected = bridge(residual, start_at_layer=2)
    calls = []

    def own(module, args, output=None):
        calls.append(1)
        return (args[0] * 0, *args[1:]) if kind == "pre" else output

    blocks = [bridge.original_model.get_submodule(path) for path in bridge.block_paths]
    for block in blocks[:2]:
        (
            block.register_forward_pre_hook(own)
            if kind == "pre"
            else block.register_forward_hook(
                lambda m, a, o: (calls.append(1), o[0] * 0 if isinstance(o, tuple) else o * 0)[1]
            )
        )
    assert torch.equal(bridge(residual, start_at_layer=2), expected)
    assert not calls
    bridge(tokens)
    assert len(calls) == 2
    assert not any("_compiled_call_impl" in block.__dict__ for block in blocks)


def blocks_of(bridge):
    path, _, _ = bridge.block_paths[0].rpartition(".")
    return bridge.original_model.get_submodule(path)


def test_one_module_at_two_places_is_refused(hf, tokens):
    bridge = TransformerBridge(hf)
    blocks = blocks_of(bridge)
    third = blocks[2]
    blocks[2] = blocks[0]
    for use in (
        lambda: TransformerBridge(hf),
        lambda: bridge.run_with_hooks(tokens, fwd_hooks=[("blocks.0.hook_mlp_out", zero)]),
        lambda: bridge.run_with_cache(tokens),
    ):
        with pytest.raises(ValueError, match=r"one module is at .* and at"):
            use()
    blocks[2] = third
    mlp, blocks[2].mlp = blocks[2].mlp, blocks[0].mlp
    with pytest.raises(ValueError, match=r"one module is at .*0\.mlp"):
        TransformerBridge(hf)
    blocks[2].mlp = mlp
    TransformerBridge(hf).run_with_cache(tokens)
    assert torch_hooks(hf) == 0


@pytest.mark.parametrize("name", ["blocks.1.hook_mlp_out", "blocks.1.attn.hook_pattern"])
@pytest.mark.parametrize("how", ["run", "direct", "generate"])
def test_a_block_replaced_under_its_hooks_is_refused(hf, tokens, name, how):
    bridge = TransformerBridge(hf)
    blocks = blocks_of(bridge)
    fresh = copy.deepcopy(blocks[1])
    run = {
        "run": lambda: bridge(tokens),
        "direct": lambda: hf(tokens),
        "generate": lambda: bridge.generate(
            tokens, max_new_tokens=1, verbose=False, do_sample=False
        ),
    }[how]
    with bridge.hooks(fwd_hooks=[(name, zero)]):
        run()
        blocks[1] = fresh
        with pytest.raises(RuntimeError, match="was replaced while hooks were on it"):
            run()
    assert torch_hooks(hf) == 0
    with bridge.hooks(fwd_hooks=[(name, zero)]):
        assert not torch.equal(bridge(tokens), tiny_logits(hf, tokens))


def tiny_logits(hf, tokens):
    return copy.deepcopy(hf)(tokens).logits


def test_the_model_of_a_bridge_stays(bridge):
    before = bridge.original_model
    with pytest.raises(AttributeError, match="Make another for this one"):
        bridge.original_model = copy.deepcopy(before)
    with pytest.raises(AttributeError, match="Make another for this one"):
        bridge.core = copy.deepcopy(before)
    assert bridge.original_model is before


@pytest.mark.parametrize("name", ["blocks.1.attn.hook_pattern", "blocks.1.hook_mlp_out"])
def test_a_copy_made_under_hooks_runs_as_the_model_alone(hf, tokens, name):
    bridge = TransformerBridge(hf)
    plain = hf(tokens).logits
    calls = []
    with bridge.hooks(fwd_hooks=[(name, lambda x, hook: calls.append(1))]):
        other = copy.deepcopy(hf)
        assert torch.equal(other(tokens).logits, plain)
    assert not calls
    for module in other.modules():
        forward = module.__dict__.get("forward")
        assert forward is None or forward.__func__ is type(module).forward
        assert forward is None or forward.__self__ is module


def test_positions_of_rows_padded_in_front(bridge, hf, tokens):
    mask = torch.ones_like(tokens)
    mask[0, :3] = 0
    theirs = hf(tokens, attention_mask=mask).logits
    alone = bridge(tokens[:1, 3:])
    torch.testing.assert_close(
        bridge(tokens, attention_mask=mask)[:1, 3:], alone, atol=1e-5, rtol=1e-4
    )
    positions = torch.arange(tokens.shape[1])[None]
    assert torch.equal(bridge(tokens, attention_mask=mask, position_ids=positions), theirs)
    bridge.cfg.positions_from_mask = False
    assert torch.equal(bridge(tokens, attention_mask=mask), theirs)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["roberta", "yoso"])
def test_positions_of_a_model_whose_first_is_not_zero(kind):
    """RoBERTa's first token is at the place after padding's, YOSO's at 2: as the model has it, in a
    program too.
    """
    model = tiny_model(kind, "masked", num_hidden_layers=1)
    bridge, padding = TransformerBridge(model), model.config.pad_token_id
    tokens = torch.randint(3, 99, (2, 7), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(tokens)
    assert torch.equal(
        bridge.program()(tokens, attention_mask=mask)["logits"], model(tokens, mask).logits
    )
    with bridge.hooks([("embed.hook_pos_embed", lambda x, hook: seen.append(x[-1]))]):
        seen: list[Tensor] = []
        bridge(tokens[1:, 3:])
        mask[1, :3] = 0
        for ids in (
            tokens.where(mask.bool(), padding),
            tokens,
        ):  # what stands under the mask is no matter
            logits = bridge(ids, attention_mask=mask)
            assert torch.equal(seen[0], seen[-1][3:])
            assert torch.equal(bridge.program()(ids, attention_mask=mask)["logits"], logits)
    if kind == "roberta":
        padded = tokens.where(mask.bool(), padding)
        assert torch.equal(
            bridge(padded, attention_mask=mask), model(padded, attention_mask=mask).logits
        )


@torch.no_grad()
@pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)  # PEFT asks for it
@pytest.mark.parametrize("how", ["replaced", "PEFT"])
def test_positions_follow_embeddings_that_are_exchanged_between_two_runs(how):
    """How a model counts positions is asked in each run, of what stands around its blocks then."""
    model = tiny_model("roberta", "masked", num_hidden_layers=1)
    bridge, padding = TransformerBridge(model), model.config.pad_token_id
    tokens = torch.randint(8, 99, (2, 7), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(tokens)
    mask[1, :3] = 0
    before = bridge(tokens, attention_mask=mask)
    config = copy.deepcopy(model.config)
    config.pad_token_id = padding + 4
    exchanged = type(model.roberta.embeddings)(config).eval()
    if how == "PEFT":
        bridge = TransformerBridge(
            peft.get_peft_model(model, peft.LoraConfig(target_modules=["query"])).eval()
        )
    model.roberta.embeddings = exchanged
    after = bridge(tokens, attention_mask=mask)
    padded = tokens.where(mask.bool(), config.pad_token_id)
    assert torch.equal(after[1, 3:], model(padded, attention_mask=mask).logits[1, 3:])
    assert not torch.allclose(before, after, atol=1e-2)
    torch.testing.assert_close(after[1:, 3:], model(tokens[1:, 3:]).logits, atol=1e-5, rtol=1e-4)
