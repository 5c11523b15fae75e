"""Native models: their values against a transformer written by hand, and Hugging Face's own methods
on them.
"""

from __future__ import annotations

import copy
import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from adapters import verify
from bridge import NativeConfig, TransformerBridge
from bridge.native import NativeModel
from bridge.native.native import ACT_FNS, INIT_MODES
from tests.native.by_hand import ByHand
from tests.tiny_models import checkpoint

SIZES: dict[str, Any] = {
    "n_layers": 2,
    "d_model": 12,
    "n_heads": 4,
    "d_head": 4,
    "d_vocab": 11,
    "n_ctx": 7,
}
TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9], [2, 6, 5, 3, 5, 8]])
HEAVY = dict.fromkeys(("use_attn_result", "use_split_qkv_input", "use_hook_mlp_in"), True)
BY_SAVING = ("architectures", "transformers_version", "dtype")
NORMS = (None, "LN", "LNPre", "RMS", "RMSPre")
POSITIONS = ("standard", "rotary", "shortformer", "none")

ATTN_ONLY = [
    {
        "attn_only": True,
        "normalization_type": norm,
        "positional_embedding_type": positions,
        "n_key_value_heads": kv,
    }
    for norm, positions, kv in itertools.product(NORMS, POSITIONS, (None, 2))
]
# Half of all combinations: grouped queries do not ask what the MLP is like.
WITH_MLP = [
    {
        "act_fn": "relu",
        "normalization_type": norm,
        "positional_embedding_type": positions,
        "n_key_value_heads": 2 if gated != parallel else None,
        "gated_mlp": gated,
        "parallel_attn_mlp": parallel,
    }
    for norm, positions, gated, parallel in itertools.product(
        NORMS, POSITIONS, (False, True), (False, True)
    )
]
OTHERS: list[dict[str, Any]] = [
    *({"act_fn": name, "normalization_type": norm} for name in ACT_FNS for norm in ("LN", "RMS")),
    {"act_fn": "solu", "gated_mlp": True},
    {"act_fn": "relu", "attention_dir": "bidirectional", "d_vocab_out": 5},
    {"act_fn": "relu", "final_rms": True, "normalization_type": "LN"},
    {"act_fn": "relu", "final_rms": True, "normalization_type": "LNPre", "eps": 0.1},
    {"attn_only": True, "positional_embedding_type": "rotary", "rotary_dim": 2, "rotary_base": 50},
    {"attn_only": True, "use_attn_scale": False},
    {"attn_only": True, "attn_scale": 3, "scale_attn_by_inverse_layer_idx": True},
    {"attn_only": True, "n_layers": 0},
]


def label(fields: dict[str, Any]) -> str:
    return "-".join(
        name if value is True else str(value)
        for name, value in fields.items()
        if value is not False
    )


def boot(**fields: Any) -> TransformerBridge:
    """A bridge in float64 whose every weight is random: biases and norms too."""
    bridge = TransformerBridge.boot_native(
        {**SIZES, "seed": 0, "dtype": torch.float64, **HEAVY, **fields}
    )
    generator = torch.Generator().manual_seed(1)
    for parameter in bridge.original_model.parameters():
        parameter.data += 0.5 * torch.randn(
            parameter.shape, generator=generator, dtype=torch.float64
        )
    return bridge


def by_hand(
    bridge: TransformerBridge, halved: str | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    run = ByHand(bridge.original_model.config, bridge.state_dict(), halved)
    return run.logits(TOKENS), run.seen


def assert_close(a: Tensor, b: Tensor, what: str) -> None:
    assert a.shape == b.shape, f"{what}: {list(a.shape)} and {list(b.shape)}"
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9, msg=lambda text: f"{what}: {text}")


@pytest.mark.parametrize("fields", ATTN_ONLY + WITH_MLP + OTHERS, ids=label)
@torch.no_grad()
def test_every_activation_is_what_one_computes_by_hand(fields: dict[str, Any]) -> None:
    bridge = boot(**fields)
    expected, seen = by_hand(bridge)
    logits, cache = bridge.run_with_cache(TOKENS)
    assert set(cache) == set(seen)
    for name, value in seen.items():
        assert_close(cache[name], value, name)
    assert_close(logits, expected, "logits")
    assert torch.equal(bridge(TOKENS), bridge.original_model(TOKENS).logits)


EDITED = [
    *ATTN_ONLY[::3],
    *WITH_MLP[::7],
    {"act_fn": "gelu", "normalization_type": None, "positional_embedding_type": "standard"},
    {
        "act_fn": "gelu",
        "normalization_type": None,
        "positional_embedding_type": "shortformer",
        "n_key_value_heads": 2,
    },
    {"act_fn": "solu_ln", "normalization_type": "LNPre"},
    {"act_fn": "relu", "final_rms": True, "attention_dir": "bidirectional"},
]


@pytest.mark.parametrize("fields", EDITED, ids=label)
@torch.no_grad()
def test_halving_any_activation_does_what_one_computes_by_hand(fields: dict[str, Any]) -> None:
    bridge = boot(**fields, n_layers=1)
    plain, seen = by_hand(bridge)
    for name in seen:
        edited = bridge.run_with_hooks(TOKENS, fwd_hooks=[(name, lambda x, hook: x * 0.5)])
        assert_close(edited, by_hand(bridge, halved=name)[0], name)
        # Before a norm, only its epsilon tells a tensor from its half.
        assert (edited - plain).abs().max() > 1e-8, name


@pytest.mark.parametrize("norm", NORMS)
def test_resid_mid_is_the_skip_connection_and_the_input_of_the_mlp(norm: str | None) -> None:
    bridge = boot(act_fn="relu", normalization_type=norm, n_layers=1)
    cfg, model = bridge.original_model.config, bridge.original_model
    _, cache = bridge.run_with_cache(TOKENS)
    mid = cache["blocks.0.hook_resid_mid"] * 0.5
    expected = mid + model.blocks[0].mlp(model.blocks[0].ln2(mid))
    seen = []
    bridge.run_with_hooks(
        TOKENS,
        fwd_hooks=[
            ("blocks.0.hook_resid_mid", lambda x, hook: x * 0.5),
            ("blocks.0.hook_resid_post", lambda x, hook: seen.append(x)),
        ],
    )
    assert_close(seen[0], expected, "resid_post")
    # Its gradient is that of the whole stream, as the one of a tensor put in its place.
    put = mid.detach().clone().requires_grad_()
    (model.unembed(model.ln_final(put + model.blocks[0].mlp(model.blocks[0].ln2(put))))).pow(
        2
    ).sum().backward()
    found = []
    with bridge.hooks(
        fwd_hooks=[("blocks.0.hook_resid_mid", lambda x, hook: x * 0.5)],
        bwd_hooks=[("blocks.0.hook_resid_mid", lambda gradient, hook: found.append(gradient))],
    ):
        bridge(TOKENS).pow(2).sum().backward()
    assert put.grad is not None
    assert_close(found[0], put.grad, "gradient")
    assert cfg.normalization_type == norm


@pytest.mark.parametrize("fields", EDITED[::4], ids=label)
def test_the_adapter_keeps_its_promises(fields: dict[str, Any]) -> None:
    report = verify(boot(**{**fields, "n_ctx": 9}))
    assert report.passed, str(report)


def test_the_bridge_knows_the_facts() -> None:
    fields = {
        **SIZES,
        "act_fn": "silu",
        "gated_mlp": True,
        "normalization_type": "RMSPre",
        "eps": 1e-3,
        "seed": 3,
    }
    more = {
        "n_key_value_heads": 2,
        "positional_embedding_type": "rotary",
        "d_vocab_out": 5,
        "use_attn_result": True,
    }
    cfg = TransformerBridge.boot_native({**fields, **more}).cfg
    expected = (
        fields
        | more
        | {
            "d_mlp": 48,
            "model_name": "native",
            "rotary_dim": 4,
            "rotary_base": 10000.0,
            "attn_scale": 2.0,
            "original_architecture": "NativeModel",
            "attn_only": False,
            "final_rms": False,
            "default_prepend_bos": True,
            "dtype": torch.float32,
        }
    )
    assert {name: getattr(cfg, name) for name in expected} == expected
    without = TransformerBridge.boot_native(
        {**SIZES, "attn_only": True, "normalization_type": None}
    ).cfg
    assert (without.normalization_type, without.eps, without.d_mlp, without.act_fn) == (
        None,
        None,
        None,
        None,
    )
    assert (without.attn_only, without.final_rms) == (True, False)


def test_a_seed_makes_the_same_weights_and_leaves_the_random_state_alone() -> None:
    def make(**fields: Any) -> dict[str, Tensor]:
        return NativeModel(NativeConfig(**SIZES, act_fn="relu", **fields)).state_dict()

    def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
        return all(torch.equal(a[name].float(), b[name].float()) for name in a)

    before = torch.get_rng_state()
    first = make(seed=1)
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(5)
    assert equal(first, make(seed=1))
    assert equal(first, make(seed=1, dtype="float64"))
    assert not torch.equal(first["embed.weight"], make(seed=2)["embed.weight"])
    before = torch.get_rng_state()
    drawn = make()
    assert not torch.equal(torch.get_rng_state(), before)
    torch.set_rng_state(before)
    assert equal(drawn, make())


@pytest.mark.parametrize("mode", INIT_MODES)
def test_weights_are_drawn_as_the_mode_says(mode: str) -> None:
    sizes = SIZES | {"d_model": 200, "d_vocab": 400}
    model = NativeModel(NativeConfig(**sizes, act_fn="relu", seed=0, init_mode=mode))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert not parameter.any(), name
        elif ".ln" in name or name.startswith("ln"):
            assert (parameter == 1).all(), name
    for weight, fan_in, fan_out in (
        (model.blocks[1].mlp.up.weight, 200, 800),
        (model.embed.weight, 400, 200),
    ):
        std = {
            "gpt2": 0.8 / math.sqrt(200),
            "xavier": math.sqrt(2 / (fan_in + fan_out)),
            "kaiming": math.sqrt(2 / fan_in),
        }[mode.split("_")[0]]
        assert weight.std().item() == pytest.approx(std, rel=0.02)
        largest = weight.abs().max().item() / std
        assert largest <= math.sqrt(3) + 1e-6 if mode.endswith("uniform") else largest > 3
    assert NativeConfig(**sizes, act_fn="relu", initializer_range=0.5).initializer_range == 0.5


def test_init_weights_false_leaves_torchs_own() -> None:
    torch.manual_seed(0)
    model = NativeModel(NativeConfig(**SIZES, attn_only=True, init_weights=False))
    assert model.blocks[0].attn.q.bias.any()


@pytest.mark.parametrize(
    "fields",
    [{"positional_embedding_type": positions, "n_key_value_heads": 2} for positions in POSITIONS],
    ids=label,
)
@torch.no_grad()
def test_greedy_generation_is_argmax_step_by_step(fields: dict[str, Any]) -> None:
    bridge = boot(act_fn="relu", **fields, n_ctx=12)
    model = bridge.original_model
    expected = TOKENS
    for _ in range(5):
        expected = torch.cat([expected, bridge(expected)[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(model.generate(TOKENS, max_new_tokens=5, do_sample=False), expected)
    lengths = []
    with bridge.hooks(
        fwd_hooks=[
            ("blocks.1.attn.hook_pattern", lambda x, hook: lengths.append(tuple(x.shape[-2:])))
        ]
    ):
        assert torch.equal(model.generate(TOKENS, max_new_tokens=5, do_sample=False), expected)
    assert lengths == [(6, 6), (1, 7), (1, 8), (1, 9), (1, 10)]


@torch.no_grad()
def test_padding_on_the_left_changes_nothing() -> None:
    for positions in POSITIONS:
        bridge = boot(act_fn="relu", positional_embedding_type=positions, n_ctx=9)
        padded = torch.cat([torch.zeros_like(TOKENS[:, :2]), TOKENS], dim=1)
        mask = torch.ones_like(padded)
        mask[:, :2] = 0
        assert_close(bridge(padded, attention_mask=mask)[:, 2:], bridge(TOKENS), positions)
        for side in ("eager", "sdpa"):
            bridge.original_model.set_attn_implementation(side)
            _, cache = bridge.run_with_cache(
                padded, attention_mask=mask, names_filter="blocks.1.attn.hook_pattern"
            )
            assert not cache["pattern", 1][:, :, 2:, :2].any()


@pytest.mark.parametrize("fields", [*EDITED[-4:], {"attn_only": True, "n_layers": 0}], ids=label)
@torch.no_grad()
def test_a_saved_model_loads_as_it_was(fields: dict[str, Any], tmp_path: Path) -> None:
    bridge = boot(**fields, device="cpu")
    model = bridge.original_model
    model.save_pretrained(tmp_path)
    for loaded in (
        NativeModel.from_pretrained(tmp_path),
        AutoModelForCausalLM.from_pretrained(tmp_path),
    ):
        assert isinstance(loaded, NativeModel)
        assert loaded.dtype == torch.float64
        assert torch.equal(loaded(TOKENS).logits, bridge(TOKENS))
        same = {
            name: getattr(model.config, name)
            for name in model.config.to_diff_dict()
            if name not in BY_SAVING
        }
        assert {name: getattr(loaded.config, name) for name in same} == same
    eager = NativeModel.from_pretrained(tmp_path, attn_implementation="eager")
    assert_close(eager(TOKENS).logits, bridge(TOKENS), "eager")


@pytest.mark.parametrize("n_layers", [1, 2])
def test_training_an_attention_only_model_lowers_the_loss(n_layers: int) -> None:
    fields = {
        **SIZES,
        "n_layers": n_layers,
        "d_model": 32,
        "attn_only": True,
        "normalization_type": None,
        "seed": 0,
    }
    bridge = TransformerBridge.boot_native({**fields, "positional_embedding_type": "shortformer"})
    optimizer = torch.optim.AdamW(bridge.parameters(), lr=1e-2)
    losses = []
    for _ in range(30):
        loss = bridge(TOKENS, return_type="loss")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(math.log(11), abs=0.5)
    assert losses[-1] < 0.2 * losses[0]


def test_hugging_faces_own_outputs_and_checkpointing() -> None:
    bridge = boot(act_fn="relu")
    model = bridge.original_model
    model.set_attn_implementation("eager")
    output = model(TOKENS, output_attentions=True, output_hidden_states=True, use_cache=True)
    _, cache = bridge.run_with_cache(TOKENS)
    assert_close(output.attentions[1], cache["pattern", 1], "attentions")
    stream = [cache["resid_pre", 0], cache["resid_post", 0], cache["resid_post", 1]]
    for layer, (a, b) in enumerate(zip(output.hidden_states, stream, strict=True)):
        assert_close(a, b, f"hidden state {layer}")
    assert output.past_key_values.get_seq_length() == TOKENS.shape[1]
    assert model(TOKENS).past_key_values is None
    assert torch.equal(model(inputs_embeds=model.embed(TOKENS)).logits, output.logits)

    def gradient() -> Tensor:
        model.zero_grad()
        model(TOKENS).logits.pow(2).sum().backward()
        return model.embed.weight.grad.clone()

    plain = gradient()
    checkpoint(model)
    model.train()
    assert_close(gradient(), plain, "gradient with checkpointing")
    assert torch.equal(copy.deepcopy(model)(TOKENS).logits, model(TOKENS).logits)


def test_a_tokenizer_is_loaded_by_name(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1, "b": 2}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="[UNK]").save_pretrained(tmp_path)
    bridge = TransformerBridge.boot_native(
        NativeConfig(**SIZES, attn_only=True, tokenizer_name=str(tmp_path))
    )
    assert bridge.to_tokens("a b a").tolist() == [[1, 2, 1]]


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"n_layer": 2}, TypeError, "NativeConfig has no field 'n_layer'. Did you mean n_layers"),
        ({"hidden_size": 8}, TypeError, "Here it is called d_model"),
        ({"use_hook_tokens": True}, TypeError, "embed.hook_in always shows the tokens"),
        ({"d_vocab": -1, "n_ctx": -1}, TypeError, "needs n_ctx, d_vocab"),
        ({"n_heads": -1, "d_head": -1}, TypeError, "needs n_heads or d_head"),
        (
            {"d_head": -1, "n_heads": 5},
            ValueError,
            "d_model=12 is not divisible by n_heads=5: give d_head as well",
        ),
        ({"n_layers": 1.5}, TypeError, "n_layers is 1.5; it must be a whole number"),
        ({"d_head": 0}, ValueError, "d_head is 0; it must be at least 1"),
        ({"act_fn": None}, ValueError, "act_fn is needed for the MLPs: one of relu"),
        (
            {"act_fn": "gelu_old"},
            ValueError,
            "'gelu_old'; it must be one of None, 'relu'.*Did you mean gelu",
        ),
        (
            {"normalization_type": "ln"},
            ValueError,
            "normalization_type is 'ln'; it must be one of None, 'LN'",
        ),
        (
            {"positional_embedding_type": "alibi"},
            ValueError,
            "'standard', 'rotary', 'shortformer', 'none'",
        ),
        ({"attention_dir": "backward"}, ValueError, "'causal', 'bidirectional'"),
        ({"init_mode": "xavier"}, ValueError, "Did you mean xavier_normal"),
        ({"gated_mlp": 1}, TypeError, "gated_mlp is 1; it must be True or False"),
        ({"eps": -1}, ValueError, "eps is -1; it must be positive"),
        ({"attn_scale": "big"}, TypeError, "attn_scale is 'big'; it must be a number"),
        ({"seed": 1.5}, TypeError, "seed is 1.5"),
        ({"dtype": "int64"}, ValueError, "dtype is 'int64'; it must be a floating-point type"),
        ({"dtype": "flout32"}, ValueError, "dtype is 'flout32'"),
        ({"device": "gpu"}, ValueError, "device is 'gpu', which torch does not know"),
        ({"tie_word_embeddings": True}, ValueError, "tie_word_embeddings is not available"),
        ({"n_key_value_heads": 3}, ValueError, "n_heads=4 is not divisible by n_key_value_heads=3"),
        (
            {"attn_only": True, "d_mlp": 8, "gated_mlp": True},
            ValueError,
            "no MLP, but d_mlp, gated_mlp says",
        ),
        (
            {"act_fn": "solu_ln", "gated_mlp": True},
            ValueError,
            "exclude each other; act_fn='solu' can be gated",
        ),
        (
            {"final_rms": True, "normalization_type": None},
            ValueError,
            "final_rms=True asks for a last norm",
        ),
        (
            {"use_attn_scale": False, "attn_scale": 2.0},
            ValueError,
            "use_attn_scale=False and attn_scale=2.0",
        ),
        (
            {"rotary_dim": 2},
            ValueError,
            "rotary_dim=2 is for positional_embedding_type='rotary', not 'standard'",
        ),
        (
            {"positional_embedding_type": "rotary", "rotary_dim": 3},
            ValueError,
            "must be even and at most d_head=4",
        ),
        (
            {"positional_embedding_type": "rotary", "rotary_dim": 6},
            ValueError,
            "must be even and at most d_head=4",
        ),
    ],
    ids=lambda value: label(value) if isinstance(value, dict) else "",
)
def test_what_cannot_be_is_refused(
    fields: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        NativeConfig(**{**SIZES, "act_fn": "relu", **fields})


def test_runs_that_cannot_be_are_refused() -> None:
    model = NativeModel(NativeConfig(**SIZES, attn_only=True))
    with pytest.raises(ValueError, match="either input_ids or inputs_embeds"):
        model()
    with pytest.raises(ValueError, match="8 positions are more than the n_ctx=7 learned ones"):
        model(torch.zeros(1, 8, dtype=torch.long))
    both_ways = NativeModel(NativeConfig(**SIZES, attn_only=True, attention_dir="bidirectional"))
    with pytest.raises(ValueError, match="use_cache=False"):
        both_ways(TOKENS, use_cache=True)
