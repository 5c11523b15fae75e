"""What inference and proofs leave as it was, and what they make of modules that do not take what
they try.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from adapters import UnsupportedModelError, verify
from adapters.architecture import Architecture
from adapters.automatic.automatic import infer, source_of
from adapters.feed_forward import MLP
from adapters.inputs import sample_inputs, split
from bridge import TransformerBridge
from tests.conftest import tiny
from tests.tiny_models import model_class, tiny_config, tiny_model


def inferred(model: nn.Module) -> TransformerBridge:
    return TransformerBridge(model, automatic="always")


@pytest.mark.parametrize(
    "look", [inferred, lambda model: verify(TransformerBridge(model))], ids=["infer", "verify"]
)
def test_every_module_is_left_in_the_mode_that_it_was_in(
    look: Callable[[nn.Module], object],
) -> None:
    model = tiny("llama").train()
    model.model.layers[0].eval()
    before = [module.training for module in model.modules()]
    look(model)
    assert [module.training for module in model.modules()] == before


class ThreeAxes(nn.Module):
    """Takes ``[batch, pos, d]``, of at least two positions, and nothing else."""

    def forward(self, x: Tensor) -> Tensor:
        batch, pos, _ = x.shape
        if pos < 2:
            raise IndexError("no position before the last")
        return torch.cat([x[:, :1], x[:, 1:] + 0 * x[:, :-1]], 1).view(batch, pos, -1)


def test_a_module_that_takes_no_rows_alone() -> None:
    """Whether it is a norm is asked of rows as it is given them."""
    model = tiny("llama")
    for layer in model.model.layers:
        layer.mlp.act_fn = nn.Sequential(nn.SiLU(), ThreeAxes())
    bridge = inferred(model)
    assert not bridge.offered().not_offered and verify(bridge).passed


class Raises(nn.Module):
    """Raises for texts of fewer than eight tokens, or for numbers larger than all that it was given
    first.
    """

    def __init__(self, error: Exception, of: str) -> None:
        super().__init__()
        self.error, self.of, self.most = error, of, 0.0

    def forward(self, x: Tensor) -> Tensor:
        most = float(x.detach().abs().max())
        self.most = self.most or 1.01 * most
        if x.shape[1] < 8 if self.of == "short texts" else most > self.most:
            raise self.error
        return x


def raising(error: Exception, of: str) -> nn.Module:
    model = tiny("llama")
    model.model.layers[1].mlp.act_fn = nn.Sequential(nn.SiLU(), Raises(error, of))
    return model


def test_a_model_that_takes_no_short_texts() -> None:
    assert (
        not inferred(raising(ValueError("eight tokens at least"), "short texts"))
        .offered()
        .not_offered
    )


def test_an_error_without_words_is_a_reason() -> None:
    bridge = inferred(raising(NotImplementedError(), "large numbers"))
    reasons = bridge.offered().not_offered
    assert reasons["activations can be replaced by random numbers"].endswith(
        ": NotImplementedError"
    )
    assert all("NotImplementedError" in why for why in reasons.values())


@pytest.mark.parametrize("of", ["short texts", "large numbers"])
def test_full_memory_is_no_finding(of: str) -> None:
    with pytest.raises(torch.OutOfMemoryError, match="full"):
        inferred(raising(torch.OutOfMemoryError("full"), of))


def test_the_source_of_numbers_and_texts_of_any_kind() -> None:
    found = infer(tiny("llama")).architecture
    odd = {**found.config_values, "extra": {"quotes": '"\\', "lines": "a\nb", "most": float("inf")}}
    namespace: dict[str, object] = {"__name__": "odd"}
    exec(source_of(replace(found, config_values=odd), "OddPreTrainedModel", "Odd"), namespace)
    declare = namespace["odd"]
    assert callable(declare)
    declared = declare(None)
    assert isinstance(declared, Architecture) and declared.config_values == odd


class ReplacedForward(nn.Module):
    """Writes over what it is given."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(1.0)


def with_shared_norm() -> nn.Module:
    model = tiny("llama")
    model.model.layers[1].input_layernorm = model.model.layers[0].input_layernorm
    return model


def with_shared_activation() -> nn.Module:
    model, shared = tiny("llama"), nn.Sequential(nn.SiLU(), ReplacedForward())
    for layer in model.model.layers:
        layer.mlp.act_fn = shared
    return model


def test_a_module_of_several_layers() -> None:
    """A norm of two layers is at one place: the other layer is not offered. An activation function
    has no place.
    """
    bridge = inferred(with_shared_norm())
    reasons = bridge.offered().not_offered
    assert (
        reasons["blocks.0.hook_resid_mid"]
        == "model.layers.1.input_layernorm is not inside model.layers.0"
    )
    assert (
        "blocks.0.hook_resid_pre" in bridge.hook_dict
        and "blocks.0.hook_attn_out" not in bridge.hook_dict
    )
    assert "blocks.1.ln1.hook_scale" in reasons and "blocks.2.ln1.hook_scale" in bridge.hook_dict
    bridge = inferred(with_shared_activation())
    assert not bridge.offered().not_offered and verify(bridge).passed


class Exchanges(nn.Module):
    """Has another module inside after each run."""

    def __init__(self) -> None:
        super().__init__()
        self.inner: nn.Module = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.inner(x)
        self.inner = nn.SiLU()
        return made


def test_a_model_that_exchanges_modules_in_every_run_is_refused() -> None:
    model = tiny("llama")
    model.model.layers[0].mlp.act_fn = Exchanges()
    with pytest.raises(
        UnsupportedModelError, match="LlamaForCausalLM exchanges modules for others in every run"
    ):
        inferred(model)


@pytest.mark.parametrize("model_type", ["llama", "gemma2"])
def test_a_model_in_float64_is_found_as_it_is_in_float32(model_type: str) -> None:
    """Its norms compute in float32 all the same."""
    single, double = inferred(tiny_model(model_type)), inferred(tiny_model(model_type).double())
    assert double.offered().names == single.offered().names and not double.offered().not_offered
    assert verify(double).passed


@pytest.mark.parametrize("act_fn", ["gelu_pytorch_tanh", "gelu", "quick_gelu"])
def test_the_activation_function_of_experts_is_the_one_that_the_configuration_names(
    act_fn: str,
) -> None:
    """Of numbers so small that several are alike."""
    model = tiny_model("mixtral", hidden_act=act_fn)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.experts.gate_up_proj.mul_(0.02)
    assert inferred(model).cfg.act_fn == act_fn


def untrained(model_type: str) -> nn.Module:
    """As it is initialised: its activations and logits are small."""
    torch.manual_seed(0)
    return model_class(model_type)._from_config(tiny_config(model_type)).eval()


def test_a_soft_cap_of_logits_that_are_far_below_it() -> None:
    bridge = inferred(untrained("gemma2"))
    assert bridge.cfg.output_logits_soft_cap == 30 and verify(bridge).passed


def test_a_factor_of_the_embedding_that_is_not_written_in_five_digits() -> None:
    """The square root of 32 in bfloat16."""
    assert inferred(tiny_model("recurrent_gemma")).architecture.embedding.factor == 5.65625


def test_parts_that_write_far_less_than_the_stream_holds() -> None:
    """What attention writes is near what rounding leaves of the stream: its block is no parallel
    one for that.
    """
    bridge = inferred(untrained("modernbert-decoder"))
    assert not bridge.offered().not_offered and not bridge.cfg.parallel_attn_mlp
    assert "blocks.1.hook_resid_mid" in bridge.hook_dict and verify(bridge).passed


def test_a_mixer_behind_an_attention_is_what_adds_to_the_stream():
    bridge = TransformerBridge(tiny_model("zamba2"))
    assert not any(name.endswith("hook_attn_out") for name in bridge.hook_dict)
    assert "reads it" in bridge.offered().not_offered["blocks.1.hook_attn_out"]
    assert "blocks.1.attn.hook_z" in bridge.hook_dict
    made = {}
    mamba = bridge.original_model.model.layers[1].mamba_decoder.mamba
    handle = mamba.register_forward_hook(lambda module, args, output: made.update(x=output))
    _, cache = bridge.run_with_cache(torch.tensor([[3, 4, 5, 6]]))
    handle.remove()
    assert torch.equal(cache["blocks.1.hook_mixer_out"], made["x"])
    torch.testing.assert_close(
        cache["blocks.1.hook_resid_post"], cache["blocks.1.hook_resid_pre"] + made["x"]
    )


@torch.no_grad()
def test_a_norm_that_is_multiplied_by_what_is_not_of_the_stream() -> None:
    """Voxtral Realtime's MLPs read a norm times a function of the delay: the stream and the MLP are
    offered.
    """
    model = tiny_model("voxtral_realtime", "speech")
    bridge = TransformerBridge(model)
    reasons = bridge.offered().not_offered
    assert "is multiplied by what is not of the stream before it is read" in reasons["blocks.0.ln2"]
    assert not {name for name in reasons if name.startswith("blocks.") and not name.endswith("ln2")}
    given = sample_inputs(model)
    layer = model.model.language_model.layers[1]

    def half(x: Tensor, hook: object) -> Tensor:
        return x * 0.5

    def at_input(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (args[0] * 0.5, *args[1:])

    tokens, more = split(bridge.core, given)
    plain = bridge.run_with_hooks(tokens, fwd_hooks=[], **more)
    for name, module in (
        ("blocks.1.hook_mlp_in", layer.post_attention_layernorm),
        ("blocks.1.mlp.hook_post", layer.mlp.down_proj),
    ):
        handle = module.register_forward_pre_hook(at_input)
        expected = model(**given).logits
        handle.remove()
        found = bridge.run_with_hooks(tokens, fwd_hooks=[(name, half)], **more)
        torch.testing.assert_close(found, expected)
        if name.endswith("post"):  # a norm undoes a factor of its input
            assert not torch.allclose(found, plain, atol=1e-4)
    # What leaves attention is added to the stream that the MLP's result is added to.
    edited = bridge.run_with_hooks(tokens, fwd_hooks=[("blocks.1.hook_resid_mid", half)], **more)
    assert not torch.allclose(edited, plain, atol=1e-4)


def test_a_sink_that_a_layer_makes_for_each_query_is_named() -> None:
    reasons = TransformerBridge(tiny_model("inkling2_text")).offered().not_offered
    assert (
        "a sink that model.layers.0.self_attn.sink_proj makes for each query"
        in reasons["blocks.0.attn"]
    )


class Learned(nn.Module):
    """An MLP with a factor that is learned: of its result, or of its neurons before their
    activation function.
    """

    def __init__(self, place: str, alpha: float) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 16)
        self.alpha, self.place = nn.Parameter(torch.tensor(alpha)), place

    def forward(self, x: Tensor) -> Tensor:
        factor = {"exponential": self.alpha.exp(), "block": 1.0}.get(self.place, self.alpha)
        if self.place == "neurons":
            return self.down(self.act(self.up(x) * factor))
        return self.down(self.act(self.up(x))) * factor


class WithLearned(nn.Module):
    def __init__(self, place: str, alpha: float) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(16), Learned(place, alpha)

    def forward(self, x: Tensor) -> Tensor:
        y = self.mlp(self.norm(x))
        return x + (self.mlp.alpha * y if self.mlp.place == "block" else y)


class Stacked(nn.Module):
    def __init__(self, place: str, alpha: float) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(60, 16), nn.Linear(16, 60, bias=False)
        self.blocks, self.norm = (
            nn.ModuleList(WithLearned(place, alpha) for _ in range(2)),
            nn.LayerNorm(16),
        )

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@pytest.mark.parametrize("alpha", [0.73, 1.0])
@pytest.mark.parametrize("place", ["result", "exponential", "block", "neurons"])
@torch.no_grad()
def test_a_factor_that_is_learned_is_no_constant(place: str, alpha: float) -> None:
    """What adds up when the model is wrapped adds up when it was trained; also where training
    begins with no factor.
    """
    torch.manual_seed(0)
    model = Stacked(place, alpha - (place == "exponential" and alpha == 1)).eval()
    bridge = TransformerBridge(model, cache_declaration=False)
    assert isinstance(bridge.architecture.stack.block.steps[0].part, MLP) == (
        place != "exponential"
    )
    assert ("cfg.act_fn" in bridge.offered().not_offered) == (place == "neurons")
    for block in model.blocks:
        block.mlp.alpha.fill_(-1.6)
    _, cache = bridge.run_with_cache(torch.arange(7)[None])
    total = cache["blocks.1.hook_resid_pre"] + cache["blocks.1.hook_mlp_out"]
    torch.testing.assert_close(cache["blocks.1.hook_resid_post"], total)


class OfHeads(nn.Module):
    """A mean of what came before, whose heads are normalised in rows, in an order of (prompt,
    position, head).
    """

    def __init__(self, order: tuple[int, int, int]) -> None:
        super().__init__()
        self.order, self.norm, self.out = order, nn.LayerNorm(8), nn.Linear(32, 32)

    def forward(self, hidden_states: Tensor, **kwargs: object) -> tuple[Tensor, None]:
        batch, pos, width = hidden_states.shape
        mean = hidden_states.cumsum(1) / torch.arange(1, pos + 1)[:, None]
        heads = mean.view(batch, pos, 4, 8).permute(*self.order, 3)
        rows = self.norm(heads.reshape(-1, 8)).view(heads.shape)
        back = [self.order.index(axis) for axis in range(3)]
        return self.out(rows.permute(*back, 3).reshape(batch, pos, width)), None


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (0, 2, 1), (2, 0, 1)])
def test_rows_of_heads_are_shown_by_prompt_and_position_where_they_lie_so(
    order: tuple[int, int, int],
) -> None:
    model = tiny_model("llama")
    for layer in model.model.layers:
        layer.self_attn = OfHeads(order)
    bridge, name = inferred(model), "blocks.1.mixer.hook_inner_norm"
    in_turn = order == (0, 1, 2)
    assert bridge.hook_dict[name].point.axes == (
        "batch pos norm_2 d_norm" if in_turn else "row d_norm"
    )
    assert verify(bridge).passed
    made = {}
    handle = model.model.layers[1].self_attn.norm.register_forward_hook(
        lambda *call: made.update(x=call[2])
    )
    tokens = torch.tensor([[3, 4, 5, 6], [7, 8, 9, 3]])
    logits, cache = bridge.run_with_cache(tokens)
    handle.remove()
    assert torch.equal(cache[name], made["x"].view(2, 4, 4, 8) if in_turn else made["x"])
    if in_turn:  # an edit of one head at one position of one prompt

        def without(act: Tensor, hook: object) -> Tensor:
            act[1, 2, 3] = 0
            return act

        edited = bridge.run_with_hooks(tokens, fwd_hooks=[(name, without)])
        assert torch.equal(edited[0], logits[0]) and torch.equal(edited[1, :2], logits[1, :2])
        assert not torch.equal(edited[1, 2], logits[1, 2])
