"""Hook points at any module, `bridge.at`: the tensors are those of torch's own hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn

from adapters import verify
from bridge import TransformerBridge
from bridge.harvest import Activations, harvest
from bridge.hooks.hooks import HookPoint
from bridge.interventions import Scale, Zero
from bridge.modules import argument, element_of, with_argument, with_element
from tests.conftest import tiny, torch_hooks
from tests.tiny_models import tiny_model

TOKENS = torch.randint(3, 20, (2, 7), generator=torch.Generator().manual_seed(0))
#: Families of other layouts; the last ones write over tensors, keep rows without a batch axis, put
#: positions first, or have names of their own for the rest.
TYPES = ["gpt2", "llama", "bloom", "mixtral", "falcon_mamba", "gemma3", "xlm", "xlnet", "opt"]
#: Of the shipped model.
ACTIVATION = "model.layers.1.mlp.act_fn"


def on_site(module: nn.Module, kind: str, fn: Callable[[Tensor], Tensor]) -> Any:
    """Registers torch's own hook on a module's input or output."""

    def on_input(module: nn.Module, args: Any, kwargs: Any) -> Any:
        x, place = argument(module, args, kwargs, None)
        return with_argument(args, kwargs, place, fn(x))

    def on_output(module: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, Tensor):
            return fn(output)
        return with_element(output, 0, fn(element_of(output, 0)))

    if kind == "input":
        return module.register_forward_pre_hook(on_input, with_kwargs=True)
    return module.register_forward_hook(on_output)


def points_of(bridge: TransformerBridge) -> list[HookPoint]:
    points = []
    for path, _ in bridge.original_model.named_modules():
        for border in ("output", "input"):
            try:
                points.append(bridge.at(path, border))
            except ValueError:  # it does not run, or several times, or without a tensor
                continue
    return points


@pytest.mark.parametrize("model_type", TYPES)
@torch.no_grad()
def test_every_module_shows_what_torch_hooks_see(model_type: str) -> None:
    bridge = TransformerBridge(tiny_model(model_type))
    points = points_of(bridge)
    assert len(points) > 30
    seen: dict[str, Tensor] = {}
    handles = []
    for point in points:

        def keep(x: Tensor, name: str = point.name) -> Tensor:
            seen[name] = x.clone()
            return x

        module = bridge.original_model.get_submodule(point.point.site.path)
        handles.append(on_site(module, point.point.site.kind, keep))
    plain = bridge(TOKENS)
    for handle in handles:
        handle.remove()

    logits, cache = bridge.run_with_cache(TOKENS, names_filter=[point.name for point in points])
    assert torch.equal(logits, plain)
    for point in points:
        shown, axes = cache[point], point.point.axes.split()
        assert torch.equal(shown.reshape(seen[point.name].shape), seen[point.name]), point
        assert shown.ndim == len(axes), point
        sizes = dict(zip(axes, shown.shape, strict=True))
        assert sizes.get("pos", 7) == 7 and sizes.get("batch", 2) == 2, (point, shown.shape)


@pytest.mark.parametrize("model_type", TYPES)
@torch.no_grad()
def test_edits_are_those_of_torch_hooks(model_type: str) -> None:
    bridge = TransformerBridge(tiny_model(model_type))
    changed = 0
    for point in points_of(bridge)[::5]:
        module = bridge.original_model.get_submodule(point.point.site.path)
        probe = bridge.run_with_cache(TOKENS, names_filter=point)[1][point]
        if not probe.is_floating_point():
            continue
        ours = bridge.run_with_hooks(TOKENS, fwd_hooks=[(point, Scale(0.5))])
        handle = on_site(module, point.point.site.kind, lambda x: x * 0.5)
        theirs = bridge(TOKENS)
        handle.remove()
        assert torch.equal(ours, theirs), point
        changed += not torch.equal(ours, bridge(TOKENS))
    assert changed > 3


def test_rows_are_what_they_are_alone() -> None:
    bridge = TransformerBridge.boot_embedded()
    spec = [(bridge.at(ACTIVATION), Zero(positions=1))]
    texts = ["Mary and John went to the", "Mary and"]
    for side in ("left", "right"):
        batch = bridge.run_with_hooks(texts, fwd_hooks=spec, padding_side=side)
        for row, text in zip(batch, texts, strict=True):
            alone = bridge.run_with_hooks(text, fwd_hooks=spec)[0]
            n = len(alone)
            tokens = row[-n:] if side == "left" else row[:n]
            torch.testing.assert_close(tokens, alone, atol=1e-5, rtol=1e-5)


def test_it_works_wherever_hook_points_do(tmp_path) -> None:
    bridge = TransformerBridge.boot_embedded()
    point = bridge.at(ACTIVATION)
    assert bridge.at(ACTIVATION) is point
    tokens = bridge.to_tokens("Mary and John went to the")
    edit = [(point, Scale(0.5))]
    edited = bridge.run_with_hooks(tokens, fwd_hooks=edit)
    activation = bridge.run_with_cache(tokens, names_filter=point)[1][point]

    program = bridge.program(interventions=edit)
    torch.testing.assert_close(program(tokens)["logits"], edited, atol=1e-5, rtol=1e-5)

    with torch.no_grad(), bridge.trace(tokens) as trace:
        before = trace["blocks.1.mlp.hook_pre"]
        trace[point.name] = trace[point.name] * 0.5
        logits = trace.logits
    assert before.shape == activation.shape
    assert torch.equal(logits, edited)

    slopes = {}
    logits = bridge.run_with_hooks(
        tokens, bwd_hooks=[(point, lambda x, hook: slopes.update({hook.name: x}))]
    )
    logits[0, -1, 5].backward()
    assert slopes[point.name].abs().max() > 0

    out = tmp_path / "rows"
    harvest(
        bridge,
        ["Mary and John went to the"],
        hook_points=[point.name],
        out=out,
        dtype="float32",
        prepend_bos=True,
    )
    row = Activations(out)[0][point.name]
    torch.testing.assert_close(row, activation[0, 0], atol=1e-6, rtol=0)

    assert point.name not in bridge.run_with_cache(tokens)[1]
    with bridge.hooks(fwd_hooks=edit):
        text = bridge.generate("Mary and John", max_new_tokens=3, do_sample=False, verbose=False)
    assert isinstance(text, str)


def test_reports_say_that_it_is_not_verified() -> None:
    bridge = TransformerBridge.boot_embedded()
    for path in (ACTIVATION, "model.layers.0.self_attn", "model.rotary_emb"):
        bridge.at(path)
        bridge.at(path, "input")
    report = verify(bridge)
    assert report.passed
    assert f"{ACTIVATION}.hook_out" in report.not_verified
    assert "not verified: " in str(report)
    again = TransformerBridge(bridge.original_model, declaration=bridge.declaration())
    assert f"{ACTIVATION}.hook_out" not in again.hook_dict


def test_tensors_of_an_output_are_named_by_their_index() -> None:
    bridge = TransformerBridge.boot_embedded()
    point = bridge.at("model.rotary_emb", key=1)
    assert point.name == "model.rotary_emb.hook_out_1"
    assert torch.equal(
        bridge.run_with_cache(TOKENS, names_filter=point)[1][point],
        bridge.original_model.model.rotary_emb(torch.zeros(1), torch.arange(7)[None])[1],
    )


@pytest.mark.unchecked
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("model.layers.9",), "model.layers has 0, 1, 2, 3"),
        (("model.layers",), "does not run"),
        (("",), "has model, lm_head"),
        (("config",), "has model, lm_head"),
        ((ACTIVATION, "middle"), "must be 'output' or 'input'"),
        ((ACTIVATION, "input", "scale"), "is called with a Tensor: key='scale'"),
        ((ACTIVATION, "output", 1), "returns a Tensor: key=1 is no tensor"),
        (("model.rotary_emb", "output", 7), "returns a tuple of 2: key=7"),
        (
            ("model.layers.0.self_attn", "input", "position_embeddings"),
            "position_embeddings .a tuple",
        ),
    ],
)
def test_what_has_no_tensor_is_refused(arguments: tuple[Any, ...], message: str) -> None:
    bridge = TransformerBridge.boot_embedded()
    before = list(bridge.hook_dict)
    with pytest.raises(ValueError, match=message):
        bridge.at(*arguments)
    assert list(bridge.hook_dict) == before
    assert torch_hooks(bridge.original_model) == 0


def test_wrong_axes_are_refused() -> None:
    bridge = TransformerBridge.boot_embedded()
    with pytest.raises(ValueError, match=r"names 2 axes, and .* has the shape \[3, 11, 344\]"):
        bridge.at(ACTIVATION, axes="batch pos")


def test_gradients_at_a_norm_do_not_pass_by_a_module_behind_it() -> None:
    """Queries, keys and values each read a copy of the norm: a hook between them is refused."""
    bridge = TransformerBridge.boot_embedded()
    between = bridge.at("model.layers.0.self_attn", "input")
    norm, ignore = "blocks.0.ln1.hook_normalized", lambda x, hook: None
    both = [
        {"fwd_hooks": [(between, ignore)], "bwd_hooks": [(norm, ignore)]},
        {"bwd_hooks": [(norm, ignore), (between, ignore)]},
    ]
    for hooks in both:
        with pytest.raises(ValueError, match="cannot be used together"):
            bridge.run_with_hooks(TOKENS, **hooks)
    elsewhere = bridge.at("model.layers.1.self_attn", "input")
    bridge.run_with_hooks(TOKENS, bwd_hooks=[(norm, ignore), (elsewhere, ignore)])


@pytest.mark.parametrize("name", ["gpt2", "llama", "gpt_neox"])
def test_what_a_torch_hook_changes_behind_a_norm_is_not_lost(name: str) -> None:
    """A copy for each reader would leave out the change: it raises, and did so silently before."""
    bridge = TransformerBridge(tiny(name))
    norm, ignore = "blocks.0.ln1.hook_normalized", lambda x, hook: None
    attention = bridge.original_model.get_submodule(
        {"gpt2": "transformer.h.0.attn", "gpt_neox": "gpt_neox.layers.0.attention"}.get(
            name, "model.layers.0.self_attn"
        )
    )
    plain = bridge.run_with_hooks(TOKENS, bwd_hooks=[(norm, ignore)])
    for factor in (1.0, 0.0):
        handle = on_site(attention, "input", lambda x, factor=factor: x * factor)
        if factor:  # the same numbers
            same = bridge.run_with_hooks(TOKENS, bwd_hooks=[(norm, ignore)])
            assert torch.equal(same, plain)
        else:
            with pytest.raises(RuntimeError, match="the change would be lost"):
                bridge.run_with_hooks(TOKENS, bwd_hooks=[(norm, ignore)])
        handle.remove()
    assert torch_hooks(bridge.original_model) == 0


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
@pytest.mark.parametrize("rs", [False, True])
@torch.no_grad()
def test_loras_own_coordinates_are_those_of_its_first_matrix(rs: bool) -> None:
    config = peft.LoraConfig(
        target_modules=["q_proj", "down_proj"], init_lora_weights=False, r=4, use_rslora=rs
    )
    model = peft.get_peft_model(tiny("llama"), config)
    bridge = TransformerBridge(model)
    layers = [path for path, module in model.named_modules() if hasattr(module, "lora_A")]
    points = {path: bridge.at(f"{path}.lora_A.default") for path in layers}
    assert len(points) == 6

    path = layers[0]
    layer, point = model.get_submodule(path), points[path]
    _, cache = bridge.run_with_cache(TOKENS, names_filter=[point, bridge.at(path, "input")])
    gain = cache[point] @ layer.lora_B["default"].weight.T * layer.scaling["default"]
    entered = cache[f"{path}.hook_in"]
    torch.testing.assert_close(layer(entered) - layer.base_layer(entered), gain, atol=1e-6, rtol=0)

    one = bridge.run_with_hooks(TOKENS, fwd_hooks=[(point, Zero())])
    scaling, layer.scaling["default"] = layer.scaling["default"], 0.0
    torch.testing.assert_close(one, bridge(TOKENS), atol=1e-6, rtol=0)
    layer.scaling["default"] = scaling
    off = bridge.run_with_hooks(TOKENS, fwd_hooks=[(x, Zero()) for x in points.values()])
    with model.disable_adapter():
        assert torch.equal(off, bridge(TOKENS))
    assert not torch.equal(off, bridge(TOKENS))


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_a_lora_that_is_not_computed_apart_has_no_coordinates() -> None:
    for how in ("dora", "merged"):
        config = peft.LoraConfig(
            target_modules=["q_proj"], init_lora_weights=False, use_dora=how == "dora"
        )
        model = peft.get_peft_model(tiny("llama"), config)
        if how == "merged":
            model.merge_adapter()
        path = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.default"
        message = "runs 2 times" if how == "dora" else "does not run"
        with pytest.raises(ValueError, match=message):
            TransformerBridge(model).at(path)


def test_a_block_that_runs_several_times_has_each_call_in_its_place() -> None:
    """ALBERT's blocks are one module: a call is behind what runs before it, in its own block."""
    bridge = TransformerBridge(tiny_model("albert", "masked"))
    path = "albert.encoder.albert_layer_groups.0.albert_layers.0.ffn"
    for layer in (1, 0):
        written, read = bridge.at(f"{path}@{layer}"), bridge.at(f"{path}@{layer}", "input")
        names = [bridge.hook_dict[f"blocks.{layer}.{x}"] for x in ("ln1.hook_out", "mlp.hook_post")]
        orders = [hook.order for hook in (names[0], read, written, names[1])]
        assert orders == sorted(orders)
        assert read.point.depth == written.point.depth == layer


def test_both_sides_of_a_layer_take_one_run() -> None:
    model = tiny_model("llama")
    bridge = TransformerBridge(model)
    runs: list[object] = []
    model.register_forward_pre_hook(lambda module, args: runs.append(args))
    bridge.add_components("blocks.0.mlp.W_out", torch.zeros(48, 3), torch.zeros(3, 32))
    assert len(runs) == 1
    bridge.add_components("blocks.0.mlp.W_out", torch.zeros(48, 3), torch.zeros(3, 32), "others")
    assert len(runs) == 1
