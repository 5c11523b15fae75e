"""What a trace shows, changes, refuses and leaves behind."""

from __future__ import annotations

import gc
import traceback
import weakref

import pytest
import torch
from torch.overrides import TorchFunctionMode

from bridge import TransformerBridge
from bridge.trace.coroutine import OutOfStepError
from tests.conftest import tiny, torch_hooks
from tests.tiny_models import checkpoint, tiny_model


@pytest.fixture(autouse=True)
def _nothing_left(bridge):
    yield
    assert not torch_hooks(bridge.original_model)
    assert not bridge.wiring.listening


def test_the_example(bridge, tokens):
    name = "blocks.0.hook_mlp_out"
    with bridge.trace(tokens) as run:
        h = bridge.blocks[0].output
        run["blocks.1.attn.hook_z"][:, :, 2] = 0
        run["blocks.2.hook_mlp_out"] = torch.ones_like(h)
        if h.norm() > 1e9:
            run.stop()

    def zero(x, hook):
        x[:, :, 2] = 0

    hooks = [
        ("blocks.1.attn.hook_z", zero),
        ("blocks.2.hook_mlp_out", lambda x, hook: torch.ones_like(x)),
    ]
    assert torch.equal(run.logits, bridge.run_with_hooks(tokens, fwd_hooks=hooks))
    assert torch.equal(
        h,
        bridge.run_with_cache(tokens, names_filter=f"{name[:9]}hook_resid_post")[1][
            "resid_post", 0
        ],
    )


def test_nothing_asked_for_is_the_plain_run(bridge, tokens):
    with bridge.trace(tokens) as run:
        pass
    assert torch.equal(run.logits, bridge.original_model(tokens).logits)
    with bridge.trace(tokens) as run:
        run["blocks.1.hook_resid_post"]
    assert torch.equal(run.logits, bridge.original_model(tokens).logits)


def test_passed(bridge, tokens):
    with (
        pytest.raises(OutOfStepError, match=r"has passed|the model is at") as caught,
        bridge.trace(tokens) as run,
    ):
        run["blocks.2.hook_resid_post"]
        run["blocks.1.hook_resid_post"]  # too late
    said = str(caught.value)
    assert "too late" in said and 'run["blocks.2.hook_resid_post"]' in said
    for name in ("blocks.1.hook_resid_post", "blocks.2.hook_resid_post"):
        assert (
            f"{name} ({bridge.hook_dict[name].order + 1} of {len(bridge.hook_dict)} points)" in said
        )
    assert traceback.extract_tb(caught.value.__traceback__)[-1].line.endswith("# too late")
    with bridge.trace(tokens) as run:
        run["blocks.1.attn.hook_z"]
        with pytest.raises(OutOfStepError, match="has passed"):
            run["blocks.1.hook_resid_pre"]
        h = run["blocks.2.hook_resid_post"]  # the trace goes on
    assert torch.equal(h, bridge.run_with_cache(tokens)[1]["resid_post", 2])


def test_capture(bridge, tokens):
    names = ["blocks.2.hook_resid_post", "blocks.0.attn.hook_pattern"]
    with bridge.trace(tokens, capture=names) as run:
        last = run["blocks.2.hook_resid_post"]
        first = run["blocks.0.attn.hook_pattern"]
    _, cache = bridge.run_with_cache(tokens)
    torch.testing.assert_close(first, cache["pattern", 0])
    torch.testing.assert_close(last, cache["resid_post", 2])
    assert torch.equal(run["blocks.0.attn.hook_pattern"], first)
    with pytest.raises(OutOfStepError, match=r"has passed|the model is at"):
        run["blocks.0.hook_resid_post"]


def test_never_came(bridge, tokens):
    with pytest.raises(OutOfStepError, match="never came") as caught, bridge.trace(tokens) as run:
        run.skip(1)
        run["blocks.1.attn.hook_z"]  # skipped
    assert "# skipped" in str(caught.value)
    assert traceback.extract_tb(caught.value.__traceback__)[-1].line.endswith("# skipped")


def test_an_exception_in_the_body(bridge, tokens):
    with pytest.raises(ZeroDivisionError) as caught, bridge.trace(tokens) as run:
        run["blocks.1.hook_resid_post"]
        1 / 0  # mine  # noqa: B018
    assert "# mine" in traceback.extract_tb(caught.value.__traceback__)[-1].line
    with pytest.raises(RuntimeError, match="stopped"):
        _ = run.logits
    assert torch.equal(bridge(tokens), bridge.original_model(tokens).logits)


def test_an_exception_in_the_model(bridge, tokens):
    with pytest.raises(ValueError, match="shape"), bridge.trace(tokens) as run:
        run["blocks.1.hook_resid_post"] = torch.zeros(3)
    with pytest.raises(ValueError, match="token id"), bridge.trace(tokens + 1000):
        pass
    handle = bridge.original_model.get_input_embeddings().register_forward_hook(
        lambda *given: given[1000]
    )
    with pytest.raises(IndexError), bridge.trace(tokens) as run:
        _ = run["blocks.1.hook_resid_post"]
    handle.remove()
    with pytest.raises(TypeError, match="argument of neither"):
        bridge.trace(tokens, nonsense=1)


@pytest.mark.unchecked
def test_wrong_names_and_values(bridge, tokens):
    with bridge.trace(tokens) as run:
        with pytest.raises(KeyError, match="Did you mean"):
            run["blocks.1.hook_resid_pots"]
        with pytest.raises(ValueError, match="no module"):
            run.module("nothing.here")
        with pytest.raises(TypeError, match="must return a tensor"):
            run["blocks.1.hook_resid_post"] = 3
    with pytest.raises(RuntimeError, match="inside a trace only"):
        _ = bridge.blocks[0].output
    with pytest.raises(RuntimeError, match="not begun"):
        bridge.trace(tokens)["blocks.1.hook_resid_post"]


def test_save(bridge, tokens):
    with bridge.trace(tokens) as run:
        h = bridge.save(run["blocks.1.hook_resid_post"])
    assert h.shape[0] == 2
    with pytest.raises(AttributeError) as caught, bridge.trace(tokens) as run:
        run["blocks.1.hook_resid_post"].save()
    assert "bridge.save" in caught.value.__notes__[0]


def test_late_edits_are_told(bridge, tokens):
    with (
        pytest.raises(OutOfStepError, match=r"blocks\.0"),
        torch.no_grad(),
        bridge.trace(tokens) as run,
    ):
        h = run["blocks.0.hook_resid_post"]
        run["blocks.1.hook_resid_post"]
        h *= 0


def test_gradients(bridge, tokens):
    names = [
        "blocks.0.hook_resid_post",
        "blocks.1.attn.hook_z",
        "blocks.1.ln1.hook_normalized",
        "blocks.2.hook_resid_post",
    ]
    _, cache = bridge.run_with_cache(tokens, return_type="loss", incl_bwd=True, names_filter=names)
    with bridge.trace(tokens) as run:
        names = sorted(names, key=lambda name: bridge.hook_dict[name].order)
        values = [run[name] for name in names]
    loss = torch.nn.functional.cross_entropy(
        run.logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()
    )
    found = torch.autograd.grad(loss, values, retain_graph=True)
    with pytest.raises(RuntimeError, match="ask for it in the block"):
        run.grad("blocks.2.hook_mlp_out")
    loss.backward()
    for name, gradient in zip(names, found, strict=True):
        if "ln1" not in name:  # a cache has the queries' part of it
            torch.testing.assert_close(gradient, cache[f"{name}_grad"])
        torch.testing.assert_close(run.grad(name), 2 * gradient)  # of both passes
    bridge.original_model.zero_grad()


def test_gradient_of_what_was_put_in(bridge, tokens):
    vector = torch.zeros(32, requires_grad=True)
    with bridge.trace(tokens) as run:
        run["blocks.1.hook_resid_post"] = run["blocks.1.hook_resid_post"] + vector
    run.logits.sum().backward()
    torch.testing.assert_close(vector.grad, run.grad("blocks.1.hook_resid_post").sum((0, 1)))
    assert not vector._backward_hooks
    bridge.original_model.zero_grad()


class Counts(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def test_states_do_not_leak(bridge, tokens):
    expected = bridge(tokens)
    with bridge.trace(tokens) as run:
        with torch.no_grad():
            h = run["blocks.0.attn.hook_q"]
            assert not torch.is_grad_enabled()
            run["blocks.0.attn.hook_pattern"]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            run["blocks.1.attn.hook_attn_scores"]
            assert (
                torch.is_autocast_enabled("cpu")
                and (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16
            )
        with torch.inference_mode():
            run["blocks.1.hook_resid_post"]
            assert torch.is_inference_mode_enabled() and torch.ones(1).is_inference()
        mode = Counts()
        with mode:
            run["blocks.2.attn.hook_pattern"]
            torch.ones(1)
            run["blocks.2.hook_resid_post"]
        packed = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: packed.append(x) or x, lambda x: x):
            _ = run.logits
        assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        assert not torch.is_autocast_enabled("cpu")
    assert run.logits.requires_grad and h.requires_grad and run.logits.dtype == torch.float32
    torch.testing.assert_close(run.logits, expected)
    assert len(mode.seen) < 10 and not packed
    assert torch._C._len_torch_function_stack() == 0


def test_the_model_side_keeps_its_own_state(bridge, tokens):
    with torch.no_grad(), bridge.trace(tokens) as run:
        with torch.enable_grad():
            run["blocks.0.hook_resid_post"]
        run["blocks.1.hook_resid_post"]
    assert not run.logits.requires_grad
    inside = []

    def pre(module, args):
        module.guard = torch.inference_mode()
        module.guard.__enter__()

    def post(module, args, output):
        module.guard.__exit__(None, None, None)
        del module.guard

    block = bridge.original_model.get_submodule(bridge.block_paths[1])
    handles = [block.register_forward_pre_hook(pre), block.register_forward_hook(post)]
    with torch.no_grad(), bridge.trace(tokens) as run:
        inside.append(run["blocks.1.attn.hook_z"].is_inference())
        assert not torch.is_inference_mode_enabled() and not torch.ones(1).is_inference()
        run["blocks.2.hook_resid_post"]
    for handle in handles:
        handle.remove()
    assert inside == [True] and not torch.is_inference_mode_enabled()


def test_stopping_and_layers(bridge, tokens):
    calls = []
    handle = bridge.original_model.get_submodule(bridge.block_paths[2]).register_forward_hook(
        lambda *a: calls.append(1)
    )
    with bridge.trace(tokens) as run:
        run["blocks.1.hook_resid_post"]
        run.stop()
        with pytest.raises(RuntimeError, match="stopped"):
            run["blocks.2.hook_resid_post"]
    assert not calls
    handle.remove()
    with bridge.trace(tokens, stop_at_layer=2) as run:
        h = run["blocks.1.hook_resid_post"]
        with pytest.raises(ValueError, match="stop_at_layer"):
            run["blocks.2.hook_resid_post"]
    assert torch.equal(run.output, h)
    with bridge.trace(h.detach(), start_at_layer=2) as run:
        run["blocks.2.hook_resid_pre"]
    torch.testing.assert_close(run.logits, bridge(tokens))


def test_skipping(bridge, tokens):
    with bridge.trace(tokens) as run:
        before = run["blocks.0.hook_resid_post"]
        run.skip(1, 2)
        with pytest.raises(ValueError, match="come to block 0 already"):
            run.skip(0)
    torch.testing.assert_close(run.logits, bridge(before, start_at_layer=3))


def test_rows(embedded):
    short, long = "Mary and John", "When Mary and John went to the store, John gave a drink to"
    _, alone = embedded.run_with_cache(short)
    for side in ("left", "right"):
        with torch.no_grad(), embedded.trace([short, long], padding_side=side) as run:
            h = run.rows(0)["blocks.1.hook_resid_post"]
            pattern = run.rows(0)["blocks.2.attn.hook_pattern"]
        torch.testing.assert_close(h, alone["resid_post", 1])
        torch.testing.assert_close(pattern, alone["pattern", 2])
        torch.testing.assert_close(run.rows(0).logits, embedded(short), atol=1e-4, rtol=1e-4)
    with pytest.raises(IndexError, match="2 prompts"):
        run.rows(2)


def test_patching_in_three_lines(embedded):
    clean = "When Mary and John went to the store, John gave a drink to"
    corrupted = "When Mary and John went to the store, Mary gave a drink to"
    name = "blocks.2.hook_resid_post"
    with torch.no_grad(), embedded.trace([clean, corrupted]) as run:
        run.rows(1)[name][:, -1] = run.rows(0)[name][:, -1]
    source = embedded.run_with_cache(clean, names_filter=name)[1][name]

    def patch(x, hook):
        x[:, -1] = source[:, -1]

    expected = embedded.run_with_hooks(corrupted, fwd_hooks=[(name, patch)])
    torch.testing.assert_close(run.rows(1).logits, expected)


def test_nothing_is_kept_alive(bridge, tokens):
    gc.collect()
    gc.disable()
    try:
        with bridge.trace(tokens) as run:
            h = run["blocks.1.hook_resid_post"]
            z = run["blocks.2.attn.hook_z"]
            out = run.module(bridge.block_paths[2]).output
        inside = [weakref.ref(x) for x in (h, z, out, run.logits)]
        trace = weakref.ref(run)
        del h, z, out, run
        assert [x() for x in inside] == [None] * 4 and trace() is None
        with pytest.raises(KeyError), bridge.trace(tokens) as run:
            h = run["blocks.1.hook_resid_post"]
            trace = weakref.ref(run), weakref.ref(h)
            raise KeyError
        del run, h
    finally:
        gc.enable()
    gc.collect()
    assert trace[0]() is None and trace[1]() is None


def test_modules(tokens):
    hf = tiny("gpt2")
    bridge = TransformerBridge(hf)
    with bridge.trace(tokens) as run:
        args, kwargs = run.module("transformer.h.1").inputs
        assert torch.equal(run.module(hf.transformer.h[1]).input, args[0])
        assert torch.equal(bridge.blocks[1].inputs[0][0], args[0])
        attention = run.module("transformer.h.1.attn").output
        run.module("transformer.h.1.mlp").output *= 0
        out = bridge.blocks[1].output
    assert isinstance(attention, tuple) and "position_ids" in kwargs
    expected = bridge.run_with_hooks(
        tokens, fwd_hooks=[("blocks.1.hook_mlp_out", lambda x, hook: x * 0)]
    )
    assert torch.equal(run.logits, expected) and out.shape == args[0].shape
    with bridge.trace(tokens) as run:
        run.module("transformer.h.2").input = args[0]
    torch.testing.assert_close(run.logits, bridge(args[0].detach(), start_at_layer=2))


def test_what_parts_are_given_and_return_by_plain_torch_hooks(tokens):
    hf = tiny("gpt2")
    bridge, blocks = TransformerBridge(hf), hf.transformer.h
    seen = []
    handles = [
        blocks[0].ln_1.register_forward_hook(lambda module, args, output: output * 2),
        blocks[0].attn.c_attn.register_forward_pre_hook(lambda module, args: seen.append(args[0])),
        blocks[1].register_forward_pre_hook(lambda module, args: (args[0] * 0.5, *args[1:])),
        blocks[1].mlp.register_forward_pre_hook(lambda module, args: (args[0] * 3,)),
        blocks[2].register_forward_pre_hook(lambda module, args: (args[0] + 1, *args[1:])),
    ]
    expected = hf(tokens).logits
    for handle in handles:
        handle.remove()
    with bridge.trace(tokens) as run:
        positions = bridge.pos_embed.input
        bridge.blocks[0].ln1.output = bridge.blocks[0].ln1.output * 2
        read = bridge.blocks[0].attn.q.input  # of the module that makes queries, keys and values
        bridge.blocks[1].input = bridge.blocks[1].input * 0.5
        bridge.blocks[1].mlp.input = bridge.blocks[1].mlp.input * 3
        args, kwargs = bridge.blocks[2].inputs
        bridge.blocks[2].inputs = ((args[0] + 1, *args[1:]), kwargs)
    torch.testing.assert_close(run.logits, expected)
    assert torch.equal(read, seen[0]) and torch.equal(
        positions.flatten(), torch.arange(tokens.shape[1])
    )


def test_parts_that_are_several_modules(tokens):
    """OPT's MLP stands in the block: its second layer, which puts out what it puts out, is given
    neurons.
    """
    hf = tiny_model("opt")
    bridge, seen = TransformerBridge(hf), []
    block = hf.model.decoder.layers[0]
    handle = block.fc2.register_forward_hook(lambda module, args, output: seen.append(output))
    hf(tokens)
    handle.remove()
    with bridge.trace(tokens):
        for ask in ("input", "inputs"):
            with pytest.raises(
                ValueError, match=r"blocks\.0\.mlp is not a single module in OPTForCausalLM"
            ):
                getattr(bridge.blocks[0].mlp, ask)
        with pytest.raises(ValueError, match=r"blocks\.0\.mlp is not a single module"):
            bridge.blocks[0].mlp.input = torch.zeros(2, 9, 32)
        out = bridge.blocks[0].mlp.output
    assert torch.equal(out.flatten(), seen[0].flatten())


def test_checkpointing_is_refused(tokens):
    hf = tiny("llama").train()
    checkpoint(hf)
    with pytest.raises(RuntimeError, match="checkpointing"), TransformerBridge(hf).trace(tokens):
        pass


def test_a_block_that_fails_before_the_model_is_called(bridge, tokens):
    before, residual = bridge(tokens), bridge(tokens, stop_at_layer=1)
    block = bridge.original_model.get_submodule(bridge.block_paths[0])
    with pytest.raises(ZeroDivisionError), bridge.trace(residual, start_at_layer=1) as run:
        assert "_compiled_call_impl" in block.__dict__
        raise ZeroDivisionError
    assert "_compiled_call_impl" not in block.__dict__
    with pytest.raises(RuntimeError, match="no output: it was stopped"):
        _ = run.output
    with bridge.trace(residual, start_at_layer=1) as run:
        run["blocks.1.hook_resid_post"]
        logits = run.logits
        assert (
            "_compiled_call_impl" not in block.__dict__
        )  # what the run needed ended with it, not with the block
    assert torch.equal(logits, bridge(residual, start_at_layer=1))
    assert torch.equal(bridge(tokens), before)
