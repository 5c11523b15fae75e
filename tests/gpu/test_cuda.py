"""On a CUDA device everything means what it means on the CPU."""

from __future__ import annotations

import threading

import pytest
import torch

from bridge import ActivationCache, TransformerBridge
from tests.conftest import tiny

TOKENS = torch.randint(1, 61, (2, 9), generator=torch.Generator().manual_seed(1))
NAMES = [
    "blocks.1.hook_resid_pre",
    "blocks.1.attn.hook_q",
    "blocks.1.attn.hook_pattern",
    "blocks.1.attn.hook_z",
]


def on_gpu(
    family: str, dtype: torch.dtype = torch.float32, implementation: str = "sdpa"
) -> TransformerBridge:
    return TransformerBridge(tiny(family, implementation, dtype).cuda())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_without_hooks_it_is_the_model(family: str, dtype: torch.dtype) -> None:
    bridge = on_gpu(family, dtype)
    with torch.no_grad():
        assert torch.equal(bridge(TOKENS), bridge.original_model(TOKENS.cuda()).logits)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_what_plain_torch_hooks_see(family: str, dtype: torch.dtype) -> None:
    bridge = on_gpu(family, dtype)
    block = bridge.original_model.get_submodule(bridge.block_paths[1])
    seen: list[torch.Tensor] = []
    handle = block.register_forward_pre_hook(lambda module, args: seen.append(args[0].clone()))
    with torch.no_grad():
        right = bridge.original_model(TOKENS.cuda()).logits
    handle.remove()
    with torch.no_grad():
        logits, cache = bridge.run_with_cache(TOKENS, names_filter="blocks.1.hook_resid_pre")
        zeroed = bridge.run_with_hooks(
            TOKENS, fwd_hooks=[("blocks.1.hook_resid_pre", lambda x, hook: x * 0)]
        )
        handle = block.register_forward_pre_hook(lambda module, args: (args[0] * 0, *args[1:]))
        expected = bridge.original_model(TOKENS.cuda()).logits
        handle.remove()
    assert torch.equal(logits, right)
    assert torch.equal(cache["resid_pre", 1], seen[0])
    assert torch.equal(zeroed, expected) and not torch.equal(zeroed, right)


def test_activations_and_gradients_are_the_cpus(family: str) -> None:
    cpu, gpu = TransformerBridge(tiny(family)), on_gpu(family)
    caches = []
    for bridge in (cpu, gpu):
        caches.append(
            bridge.run_with_cache(TOKENS, names_filter=NAMES, incl_bwd=True, return_type="loss")[1]
        )
    for name in NAMES:
        for key in (name, f"{name}_grad"):
            torch.testing.assert_close(caches[1][key].cpu(), caches[0][key], atol=2e-4, rtol=1e-3)


def test_hooks_edit_gradients_on_autograds_own_thread(family: str) -> None:
    bridge, threads = on_gpu(family), set()

    def double(gradient: torch.Tensor, hook: object) -> torch.Tensor:
        threads.add(threading.get_ident())
        return gradient * 2

    def weight_gradients() -> dict[str, torch.Tensor]:
        return {n: p.grad.clone() for n, p in bridge.named_parameters() if p.grad is not None}

    bridge(TOKENS, return_type="loss").backward()
    plain = weight_gradients()
    bridge.zero_grad()
    with bridge.hooks(bwd_hooks=[("blocks.0.hook_resid_pre", double)]):
        bridge(TOKENS, return_type="loss").backward()
    assert threads and threading.get_ident() not in threads
    hooked = weight_gradients()
    first = [n for n in plain if ".0." in n]
    later = [n for n in plain if ".1." in n or ".2." in n]
    assert first and all(
        torch.allclose(hooked[n], plain[n], atol=1e-5, rtol=1e-4) for n in first + later
    )
    assert any(
        not torch.allclose(hooked[n], plain[n], atol=1e-6) for n in set(plain) - {*first, *later}
    )


def test_recomputed_blocks_run_under_the_hooks_of_their_forward() -> None:
    results = []
    for checkpointing in (False, True):
        bridge = on_gpu("llama").train()
        if checkpointing:
            bridge.original_model.activation_checkpointing_enable()
        with bridge.hooks(fwd_hooks=[("blocks.1.hook_mlp_out", lambda x, hook: x * 0.5)]):
            bridge(TOKENS, return_type="loss").backward()
        results.append({n: p.grad for n, p in bridge.named_parameters()})
    for name, gradient in results[0].items():
        torch.testing.assert_close(results[1][name], gradient, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    "more", [{}, {"cache_implementation": "static"}], ids=["dynamic", "static"]
)
def test_generation_under_hooks(more: dict[str, str]) -> None:
    bridge, steps = on_gpu("llama"), []
    options = {"max_new_tokens": 6, "do_sample": False, "verbose": False, "stop_at_eos": False}
    plain = bridge.generate(TOKENS, **options)
    with bridge.hooks(
        fwd_hooks=[("blocks.0.attn.hook_z", lambda z, hook: steps.append(bridge.step))]
    ):
        hooked = bridge.generate(TOKENS, **options, **more)
    assert torch.equal(hooked, plain)
    assert steps == list(range(6))
    with bridge.hooks(fwd_hooks=[("blocks.0.hook_resid_post", lambda x, hook: x * 0)]):
        assert not torch.equal(bridge.generate(TOKENS, **options, **more), plain)


@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning")
def test_compiled_decoding_gives_way_to_hooks() -> None:
    bridge = on_gpu("llama")
    options = {"max_new_tokens": 5, "do_sample": False, "verbose": False, "stop_at_eos": False}
    compiled = {**options, "cache_implementation": "static", "disable_compile": False}
    plain = bridge.generate(TOKENS, **options)
    bridge.original_model.forward = torch.compile(bridge.original_model.forward)
    assert torch.equal(bridge.generate(TOKENS, **compiled), plain)
    seen = []
    with bridge.hooks(
        fwd_hooks=[("blocks.1.attn.hook_pattern", lambda x, hook: seen.append(x.shape))]
    ):
        assert torch.equal(bridge.generate(TOKENS, **compiled), plain)
    assert len(seen) == 5


def test_a_model_that_is_offloaded_to_the_cpu(family: str) -> None:
    accelerate = pytest.importorskip("accelerate")
    here = TransformerBridge(tiny(family))
    offloaded = tiny(family)
    accelerate.cpu_offload(offloaded, torch.device("cuda", 0))
    there = TransformerBridge(offloaded)
    half = [
        ("blocks.1.hook_mlp_out", lambda x, hook: x * 0.5)
    ]  # GPT-NeoX's parts are parallel: no `resid_mid`
    with torch.no_grad():
        logits, cache = there.run_with_cache(TOKENS, names_filter=NAMES)
        right, expected = here.run_with_cache(TOKENS, names_filter=NAMES)
        torch.testing.assert_close(logits.cpu(), right, atol=2e-4, rtol=1e-3)
        for name in NAMES:
            assert cache[name].is_cuda
            torch.testing.assert_close(cache[name].cpu(), expected[name], atol=2e-4, rtol=1e-3)
        edited = there.run_with_hooks(TOKENS, fwd_hooks=half).cpu()
        torch.testing.assert_close(
            edited, here.run_with_hooks(TOKENS, fwd_hooks=half), atol=2e-4, rtol=1e-3
        )


def test_a_cache_comes_back_whole(family: str) -> None:
    bridge = on_gpu(family)
    with torch.no_grad():
        _, cache = bridge.run_with_cache(TOKENS)
        _, kept = bridge.run_with_cache(TOKENS, device="cpu")
    right = {name: value.cpu() for name, value in cache.items()}
    moved = ActivationCache(dict(cache.cache_dict), bridge).to("cpu")
    for name, value in right.items():
        assert moved[name].device.type == "cpu" and torch.equal(moved[name], value)
        assert kept[name].device.type == "cpu" and torch.equal(kept[name], value)
    assert all(torch.equal(value.cpu(), right[name]) for name, value in moved.to("cuda").items())


def test_flash_attention_shows_its_pattern() -> None:
    pytest.importorskip("flash_attn")
    flash = on_gpu("llama", torch.bfloat16, "flash_attention_2")
    eager = on_gpu("llama", torch.bfloat16, "eager")
    with torch.no_grad():
        assert torch.equal(flash(TOKENS), flash.original_model(TOKENS.cuda()).logits)
        cache = flash.run_with_cache(TOKENS, names_filter="blocks.1.attn.hook_pattern")[1]
        right = eager.run_with_cache(TOKENS, names_filter="blocks.1.attn.hook_pattern")[1]
    torch.testing.assert_close(cache["pattern", 1], right["pattern", 1], atol=2e-2, rtol=2e-2)
    assert flash.original_model.config._attn_implementation == "flash_attention_2"
