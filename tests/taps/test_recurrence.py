"""Inside mixers: what their functions are given and return, and the states they go through."""

import copy
import inspect
import threading

import pytest
import torch
from torch import Tensor

from adapters.mixers import FUNCTIONS, ONE_STEP, POINTS
from bridge import TransformerBridge
from tests.conftest import torch_hooks
from tests.taps.mixers import MODELS, build
from tests.tiny_models import tiny_model

TOKENS = torch.randint(3, 61, (2, 7), generator=torch.Generator().manual_seed(3))


@pytest.fixture(params=MODELS)
def bridge(request: pytest.FixtureRequest) -> TransformerBridge:
    return build(request.param)


def mixer_of(bridge: TransformerBridge) -> torch.nn.Module:
    path = bridge.hook_dict["blocks.0.mixer.hook_conv"].point.site.path
    return bridge.original_model.get_submodule(path)


def namespace_of(bridge: TransformerBridge) -> dict[str, object]:
    return inspect.unwrap(type(mixer_of(bridge)).forward).__globals__


class Given:
    """Takes the place of a function of the model's, for layer 0 alone, by hand."""

    def __init__(
        self, bridge: TransformerBridge, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.own, self.signature = (
            namespace_of(bridge)[name],
            inspect.signature(namespace_of(bridge)[name]),
        )
        self.arguments: dict[str, Tensor] = {}
        self.result: Tensor | None = None
        self.factor: dict[str | None, float] = {}
        self.calls = 0
        monkeypatch.setitem(namespace_of(bridge), name, self)

    def __call__(self, *args: object, **kwargs: object) -> object:
        self.calls += 1
        if self.calls > 1:
            return self.own(*args, **kwargs)
        bound = self.signature.bind(*args, **kwargs)
        for name in self.factor:
            if name is not None:
                bound.arguments[name] = bound.arguments[name] * self.factor[name]
        self.arguments = dict(bound.arguments)
        made = self.own(*bound.args, **bound.kwargs)
        result = made[0] if isinstance(made, tuple) else made
        self.result = result * self.factor.get(None, 1.0)
        return (self.result, *made[1:]) if isinstance(made, tuple) else self.result


def whole_functions(bridge: TransformerBridge) -> list[str]:
    return [
        name
        for name in FUNCTIONS
        if name in namespace_of(bridge) and (name in ONE_STEP or name.endswith("_fn"))
    ]


def shown(x: Tensor, axes: str) -> Tensor:
    order = ["b", "p", *(axis for axis in axes.split() if axis not in "bp")]
    return x.permute([axes.split().index(axis) for axis in order])


def test_it_shows_what_the_functions_are_given(
    bridge: TransformerBridge, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits, cache = bridge.run_with_cache(
        TOKENS, names_filter=lambda name: "blocks.0.mixer" in name
    )
    assert torch.equal(logits, bridge.original_model(TOKENS).logits)
    givens = {name: Given(bridge, name, monkeypatch) for name in whole_functions(bridge)}
    bridge.original_model(TOKENS)
    compared = 0
    for name, given in givens.items():
        for seen in FUNCTIONS[name]:
            x = given.result if seen.parameter is None else given.arguments[seen.parameter]
            x = shown(x, seen.axes)[:, -TOKENS.shape[1] :]
            assert torch.equal(cache[f"blocks.0.mixer.{POINTS[seen.channel][0]}"], x), seen
            compared += 1
    assert compared >= 7


def test_an_edit_is_an_edit_of_the_argument(
    bridge: TransformerBridge, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in whole_functions(bridge):
        for seen in FUNCTIONS[name]:
            point = f"blocks.0.mixer.{POINTS[seen.channel][0]}"
            ours = bridge.run_with_hooks(TOKENS, fwd_hooks=[(point, lambda x, hook: x * 0.5)])
            with monkeypatch.context() as patch:
                given = Given(bridge, name, patch)
                given.factor[seen.parameter] = 0.5
                by_hand = bridge.original_model(TOKENS).logits
            torch.testing.assert_close(ours, by_hand, rtol=1e-5, atol=1e-5)
            assert not torch.allclose(ours, bridge(TOKENS), atol=1e-6), point


def test_gradients_are_those_of_the_result(
    bridge: TransformerBridge, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in whole_functions(bridge):
        seen = next(seen for seen in FUNCTIONS[name] if seen.parameter is None)
        gradients: list[Tensor] = []
        hook = (
            f"blocks.0.mixer.{POINTS[seen.channel][0]}",
            lambda g, hook, kept=gradients: kept.append(g.clone()),
        )
        bridge.run_with_hooks(TOKENS, bwd_hooks=[hook]).pow(2).sum().backward()
        with monkeypatch.context() as patch:
            given = Given(bridge, name, patch)
            logits = bridge.original_model(TOKENS).logits
            assert given.result is not None
            (by_hand,) = torch.autograd.grad(logits.pow(2).sum(), given.result)
        torch.testing.assert_close(gradients[0], shown(by_hand, seen.axes), rtol=1e-4, atol=1e-5)


def test_generation_shows_every_step(bridge: TransformerBridge) -> None:
    prompt = TOKENS[:1]
    kwargs = {"max_new_tokens": 4, "do_sample": False, "verbose": False, "return_type": "tokens"}
    names = [f"blocks.0.mixer.{end}" for end in ("hook_conv", "hook_recurrence_out")]
    tokens, cache = bridge.generate(prompt, return_cache=True, names_filter=names, **kwargs)
    whole = bridge.run_with_cache(tokens[:, :-1], names_filter=names)[1]
    for name in names:
        torch.testing.assert_close(cache[name], whole[name], rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_the_gate_of_a_step_stands_behind_what_is_shown() -> None:
    """Falcon H1 gates in the function of a step, and behind that of a whole sequence."""
    bridge = TransformerBridge(tiny_model("falcon_h1", num_hidden_layers=1))
    tokens, name = TOKENS[:1], "blocks.0.mixer.hook_recurrence_out"
    past = bridge.original_model(tokens[:, :-1]).past_key_values
    for edit in (
        lambda x, hook: None,
        lambda x, hook: x + (torch.arange(x.shape[1]) == x.shape[1] - 1)[:, None, None],
    ):
        with bridge.hooks([(name, edit)]):
            whole, all_of_it = bridge.run_with_cache(tokens, names_filter=name)
            step, last = bridge.run_with_cache(
                tokens[:, -1:], names_filter=name, past_key_values=copy.deepcopy(past)
            )
        torch.testing.assert_close(last[name], all_of_it[name][:, -1:], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(step, whole[:, -1:], rtol=1e-4, atol=1e-5)


STATE = "blocks.0.mixer.hook_ssm_state"


def has_states(bridge: TransformerBridge) -> bool:
    return STATE in bridge.hook_dict


def test_the_states_are_those_of_the_recurrence(bridge: TransformerBridge) -> None:
    """By hand, in float64, from what goes into it."""
    ends = {channel: f"blocks.0.mixer.{name}" for channel, (name, _) in POINTS.items()}
    _, cache = bridge.run_with_cache(
        TOKENS, names_filter=[STATE, *(n for n in ends.values() if n in bridge.hook_dict)]
    )
    x = {channel: cache[name].double() for channel, name in ends.items() if name in cache}
    mixer, state = mixer_of(bridge), torch.zeros((), dtype=torch.float64)
    for t in range(TOKENS.shape[1]):
        if "beta" in x:
            norm = {
                n: x[n][:, t] * (x[n][:, t].pow(2).sum(-1, keepdim=True) + 1e-6).rsqrt()
                for n in ("q", "k")
            }
            heads = x["v"].shape[2]
            q, k = (norm[n].repeat_interleave(heads // norm[n].shape[1], dim=1) for n in ("q", "k"))
            decay = x["log_decay"][:, t].exp()
            state = state * (decay[..., None] if decay.ndim == 3 else decay[..., None, None])
            held = (state * k[..., None]).sum(-2)
            delta = (x["v"][:, t] - held) * x["beta"][:, t, :, None]
            state = state + k[..., None] * delta[..., None, :]
            read = (state * q[..., None]).sum(-2) / q.shape[-1] ** 0.5
        else:
            A = -mixer.A_log.double().exp()
            two = x["x"].ndim == 4
            bias = (mixer.dt_bias if two else mixer.dt_proj.bias).double()
            dt = torch.nn.functional.softplus(x["dt"][:, t] + bias)
            B, C = x["B"][:, t], x["C"][:, t]
            if two:
                B, C = (
                    y.repeat_interleave(dt.shape[1] // y.shape[1], dim=1)[:, :, None]
                    for y in (B, C)
                )
                dt, A = dt[..., None, None], A[:, None, None]
            else:
                B, C, dt = B[:, None], C[:, None], dt[..., None]
            state = (dt * A).exp() * state + dt * B * x["x"][:, t, ..., None]
            read = (state * C).sum(-1)
            D = mixer.D.double()
            read = read + (D[:, None] if two else D) * x["x"][:, t]
        torch.testing.assert_close(cache[STATE][:, t].double(), state, rtol=1e-4, atol=1e-5)
        if "beta" in x or x["x"].ndim == 4:  # Mamba's scan is gated before it returns
            torch.testing.assert_close(x["recurrence"][:, t], read, rtol=1e-4, atol=1e-5)


def test_states_go_by_time_steps_within_the_models_limits() -> None:
    """By hand, in float64: Nemotron-H's scan over a sequence knows a least time step, its function
    of one step none.
    """
    least = 0.7
    bridge = TransformerBridge(tiny_model("nemotron_h", time_step_min=least))
    names = [f"blocks.0.mixer.{name}" for name in ("hook_x", "hook_dt_proj", "hook_B")]
    _, cache = bridge.run_with_cache(TOKENS, names_filter=[STATE, *names])
    x, dt, B = (cache[name].double() for name in names)
    mixer = mixer_of(bridge)
    steps = torch.nn.functional.softplus(dt + mixer.dt_bias.double())
    assert bool((steps < least).any()) and bool((steps > least).any())
    steps = steps.clamp(min=least)[..., None, None]
    decay = (steps * -mixer.A_log.double().exp()[:, None, None]).exp()
    state = torch.zeros((), dtype=torch.float64)
    for t in range(TOKENS.shape[1]):
        B_t = B[:, t].repeat_interleave(dt.shape[-1] // B.shape[2], dim=1)[:, :, None]
        state = decay[:, t] * state + steps[:, t] * B_t * x[:, t, ..., None]
        torch.testing.assert_close(cache[STATE][:, t].double(), state, rtol=1e-4, atol=1e-5)


def test_an_edited_state_is_what_follows_is_computed_from(bridge: TransformerBridge) -> None:
    """What was put into a state at one position stays in it, and everything from there on
    reads it.
    """
    t, name = 3, "blocks.0.mixer.hook_recurrence_out"
    _, plain = bridge.run_with_cache(TOKENS, names_filter=[name, STATE])
    other = bridge.run_with_cache(TOKENS.flip(1), names_filter=STATE)[1][STATE][:, t]

    def put(state: Tensor, hook: object) -> None:
        state[:, t] = other

    with bridge.hooks(fwd_hooks=[(STATE, put)]):
        _, cache = bridge.run_with_cache(TOKENS, names_filter=name)
    torch.testing.assert_close(cache[name][:, :t], plain[name][:, :t], rtol=1e-5, atol=1e-6)
    assert not torch.allclose(cache[name][:, t], plain[name][:, t], atol=1e-5)
    assert not torch.equal(cache[name][:, t + 1], plain[name][:, t + 1])

    def same_again(state: Tensor, hook: object) -> Tensor:
        return state.clone()

    torch.testing.assert_close(
        bridge.run_with_hooks(TOKENS, fwd_hooks=[(STATE, same_again)]),
        bridge(TOKENS),
        rtol=1e-4,
        atol=1e-5,
    )
    half = bridge.run_with_hooks(TOKENS, fwd_hooks=[(STATE, lambda s, hook: s * 0.5)])
    assert not torch.allclose(half, bridge(TOKENS), atol=1e-5)


def test_gradients_of_states_are_refused(bridge: TransformerBridge) -> None:
    with pytest.raises(RuntimeError, match="hook_ssm_state has no gradient"):
        bridge.run_with_hooks(TOKENS, bwd_hooks=[(STATE, lambda g, hook: None)])
    assert torch_hooks(bridge.original_model) == 0


def test_nothing_is_left_in_the_models_module(bridge: TransformerBridge) -> None:
    before = {
        name: namespace_of(bridge)[name] for name in FUNCTIONS if name in namespace_of(bridge)
    }
    bridge.run_with_cache(TOKENS)
    with pytest.raises(ArithmeticError):
        bridge.run_with_hooks(
            TOKENS, fwd_hooks=[("blocks.0.mixer.hook_conv", lambda x, hook: 1 / 0)]
        )
    with bridge.hooks(fwd_hooks=[("blocks.0.mixer.hook_conv", lambda x, hook: None)]):
        bridge(TOKENS)
    assert {name: namespace_of(bridge)[name] for name in before} == before


def test_another_thread_is_not_seen(bridge: TransformerBridge) -> None:
    right, seen, others = bridge(TOKENS), [], []

    def halve(x: Tensor, hook: object) -> Tensor:
        seen.append(threading.current_thread())
        thread = threading.Thread(target=lambda: others.append(bridge(TOKENS)))
        thread.start()
        thread.join()
        return x * 0.5

    bridge.run_with_hooks(TOKENS, fwd_hooks=[("blocks.0.mixer.hook_conv", halve)])
    assert seen == [threading.current_thread()]
    assert torch.equal(others[0], right)
