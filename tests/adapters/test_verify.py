"""`verify` holds for every family, and notices what is broken."""

import dataclasses
from typing import Generic, TypeVar

import peft
import pytest
import torch

from adapters import verify
from adapters.proofs.scores import PATTERN, VALUES
from adapters.views import View, WriteThrough, columns
from bridge import TransformerBridge
from tests.adapters.by_hand.families import tiny as mixture
from tests.conftest import FAMILIES, tiny


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", FAMILIES)
def test_verified(name, implementation, dtype):
    report = verify(TransformerBridge(tiny(name, implementation, dtype)))
    assert report.passed, str(report)


MODES = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}


@pytest.mark.parametrize("automatic", [True, "always"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", MODES)
def test_wherever_it_is_asked_for(mode, dtype, automatic):
    """With the same proofs, of a model made outside of the mode, inside of it, and of tokens made
    there.
    """
    outside = TransformerBridge(tiny("llama", dtype=dtype), automatic=automatic)
    right = [check.name for check in verify(outside).checks]
    with MODES[mode]():
        inside = TransformerBridge(tiny("llama", dtype=dtype), automatic=automatic)
        tokens = torch.randint(3, 60, (2, 9))
        for report in (verify(outside), verify(outside, tokens), verify(inside, tokens)):
            assert report.passed, str(report)
            assert [name for name in right if name != "proved on"] == [
                check.name for check in report.checks if check.name != "proved on"
            ]
        assert verify(inside, level="quick").passed
    assert verify(inside).passed
    assert list(inside.hook_dict) == list(outside.hook_dict)


def failing(bridge):
    return [check.name for check in verify(bridge).checks if not check.passed]


def change(bridge, name, **fields):
    hook = bridge.hook_dict[name]
    hook.point = dataclasses.replace(hook.point, **fields)
    hook.view = hook.point.view
    bridge.wiring.place(hook)


def test_a_wrong_shape_is_noticed():
    bridge = TransformerBridge(tiny("llama"))
    change(bridge, "blocks.1.attn.hook_q", view=View())
    assert failing(bridge) == ["every hook point fires once, with its declared shape"]


def test_points_that_make_a_run_fail_are_named_with_the_error():
    class Fails(View):
        identity = False

        def get(self, x, call):
            raise RuntimeError("no such view")

    bridge = TransformerBridge(tiny("llama"))
    for layer in range(3):
        change(bridge, f"blocks.{layer}.hook_mlp_out", view=Fails())
    change(bridge, "blocks.2.hook_attn_out", view=Fails())
    (check,) = [
        check
        for check in verify(bridge).checks
        if check.name.startswith("every hook point fires once")
    ]
    said = [
        f"blocks.{name}: looking there ends in an error (RuntimeError: no such view)"
        for name in ("0.hook_mlp_out", "1.hook_mlp_out", "2.hook_attn_out")
    ]
    assert not check.passed and check.detail == "; ".join(said)


def test_a_residual_that_misses_a_branch_is_noticed():
    bridge = TransformerBridge(tiny("llama"))
    change(bridge, "blocks.1.hook_resid_mid", view=View())
    assert failing(bridge) == ["halving resid_mid reaches both branches"]


def test_a_wrong_site_is_noticed():
    bridge = TransformerBridge(tiny("gpt2"))
    change(
        bridge, "blocks.0.hook_attn_out", site=bridge.hook_dict["blocks.0.hook_mlp_out"].point.site
    )
    assert "resid_pre + attn_out = resid_mid" in failing(bridge)


def test_a_view_that_does_not_write_back_what_it_read_is_noticed():
    class Off(View):
        identity = False

        def put(self, x, new, call):
            return new * 1.1

    bridge = TransformerBridge(tiny("gpt2"))
    change(bridge, "blocks.0.hook_mlp_out", view=Off())
    assert failing(bridge) == ["writing back what was read changes nothing"]


def test_a_view_is_not_the_identity_where_it_shows_something_else():
    class Doubled(View):
        def get(self, x, call):
            return 2 * x

        def put(self, x, new, call):
            return new / 2

    bridge, tokens = TransformerBridge(tiny("gpt2")), torch.tensor([[3, 5, 8]])
    _, plain = bridge.run_with_cache(tokens)
    change(bridge, "blocks.0.hook_mlp_out", view=Doubled())
    _, seen = bridge.run_with_cache(tokens)
    assert torch.equal(seen["blocks.0.hook_mlp_out"], 2 * plain["blocks.0.hook_mlp_out"])
    assert View().identity and WriteThrough().identity and not Doubled().identity


def test_a_users_view_may_have_other_bases():
    tagged = []

    class Tagged:
        def __init_subclass__(cls, tag="", **more):
            super().__init_subclass__(**more)
            tagged.append(tag)

    class Doubles:
        def get(self, x, call):
            return 2 * x

    T = TypeVar("T")

    class Mine(View, Generic[T], Tagged, tag="mine"):
        pass

    class Mixed(Doubles, View):
        pass

    class Further(WriteThrough):
        pass

    assert tagged == ["mine"] and Mine[int].__args__ == (int,)
    assert Mine().identity and Further().identity and not Mixed().identity


def test_a_pattern_that_hides_what_sinks_take_is_noticed():
    class Scaled(columns):
        def get(self, x, call):
            return super().get(x, call) / super().get(x, call).sum(-1, keepdim=True)

    bridge = TransformerBridge(mixture("gpt_oss-gqa"))
    assert verify(bridge).passed
    change(bridge, "blocks.1.attn.hook_pattern", view=Scaled(0, -1))
    assert PATTERN in failing(bridge)


def test_the_mode_is_restored():
    bridge = TransformerBridge(tiny("gpt2"))
    bridge.train()
    verify(bridge)
    assert bridge.training


def test_a_pattern_that_is_wrong_only_where_there_is_padding_is_noticed():
    class Filled(View):
        identity = False

        def get(self, x, call):
            return x.where(
                x[..., :1] > 0, x + 0.1
            )  # every token attends to the first, but where that is padding

        def put(self, x, new, call):
            return new.where(x[..., :1] > 0, new - 0.1)

    bridge = TransformerBridge(tiny("llama"))
    change(bridge, "blocks.1.attn.hook_pattern", view=Filled())
    assert failing(bridge) == [PATTERN, VALUES]
    assert verify(bridge, level="quick").passed  # it leaves padding out


@pytest.mark.unchecked
def test_the_level_is_one_of_two():
    with pytest.raises(ValueError, match="neither 'full' nor 'quick'"):
        verify(TransformerBridge(tiny("gpt2")), level="fast")


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_model_in_other_precision_is_verified(name):
    """Norms and rotations are computed in single precision there, and the speeds of a rotation may
    be rounded.
    """
    for dtype in (torch.float64, torch.bfloat16):
        report = verify(TransformerBridge(tiny(name).to(dtype)))
        assert report.passed, str(report)


@pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)  # PEFT asks for it
@pytest.mark.parametrize(
    ("name", "layers"), [("gpt2", ["c_attn", "c_fc"]), ("llama", ["q_proj", "v_proj"])]
)
def test_layers_of_several_parts_are_verified(name, layers):
    model = peft.get_peft_model(
        tiny(name), peft.LoraConfig(r=2, target_modules=layers, fan_in_fan_out=name == "gpt2")
    )
    report = verify(TransformerBridge(model))
    assert report.passed, str(report)
    assert "whose weight (Parameter) is not a plain matrix; merge adapters" in str(report)
