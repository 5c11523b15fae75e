"""The cases that several processes run. Each is called on all of them, with the kind of model and where it is saved."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers.distributed import DistributedConfig

from adapters.layout import SpreadModelError
from bridge import TransformerBridge
from bridge.hooks.names import UnknownHookError
from tests.sharded.models import TOKENS, difference, load
from weight_processing.check import ProcessingError

CLOSE = 1e-5


def pair(kind: str, folder: Path) -> tuple[TransformerBridge, TransformerBridge]:
    """A bridge of the model over all processes by tensor parallelism, and one of it in one process."""
    return TransformerBridge(load(kind, folder, tp_plan="auto")), TransformerBridge(load(kind, folder))


def stream_of_tensor_parallel(kind: str, folder: Path) -> None:
    """The residual stream, its edits and its gradients are those of one process."""
    ours, plain = pair(kind, folder)
    assert "tensor parallel over 2 processes" in str(ours)
    assert "tensor parallel over 2 processes" in ours.report()
    names = [name for name in ours.hook_dict if "resid" in name or name in ("hook_embed", "ln_final.hook_normalized")]
    assert len(names) >= 8
    _, found = ours.run_with_cache(TOKENS, names_filter=names)
    _, wanted = plain.run_with_cache(TOKENS, names_filter=names)
    for name in names:
        assert difference(found[name], wanted[name]) < CLOSE, name
    for name in names:
        assert _gradient(ours, name).sub(_gradient(plain, name)).abs().max() < CLOSE, name
        edit = [(name, lambda x, hook: x * 0.5 + 1)]
        assert difference(ours.run_with_hooks(TOKENS, fwd_hooks=edit), plain.run_with_hooks(TOKENS, fwd_hooks=edit)) < (
            10 * CLOSE
        ), name


def _gradient(bridge: TransformerBridge, name: str) -> torch.Tensor:
    found = []
    with bridge.hooks(bwd_hooks=[(name, lambda gradient, hook: found.append(gradient.detach().clone()))]):
        bridge(TOKENS, return_type="loss").backward()
    return found[0]


def processing_is_refused(kind: str, folder: Path) -> None:
    """Weights that are spread are not processed, and are as they were."""
    ours = TransformerBridge(load(kind, folder, tp_plan="auto"))
    before = ours(TOKENS)
    with pytest.raises(ProcessingError, match="tensor parallel over 2 processes"):
        ours.process_weights()
    assert torch.equal(ours(TOKENS), before)
    sharded = load(kind, folder)
    fully_shard(sharded)
    ours = TransformerBridge(sharded)
    ours(TOKENS)
    with pytest.raises(ProcessingError, match="FSDP2"):
        ours.process_weights()


def expert_parallel_is_refused(kind: str, folder: Path) -> None:
    """Each process numbers its own experts from 0."""
    model = load(kind, folder, distributed_config=DistributedConfig(tp_size=2, ep_size=2))
    with pytest.raises(SpreadModelError, match="expert parallel over 2 processes"):
        TransformerBridge(model)


def spread_without_a_plan_is_refused(kind: str, folder: Path) -> None:
    """Nothing says how activations are cut where parameters were spread by hand."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    model = load(kind, folder)
    layer = model.model.layers[0].mlp.up_proj
    layer.weight = torch.nn.Parameter(
        distribute_tensor(layer.weight.detach(), init_device_mesh("cpu", (2,)), [Shard(0)])
    )
    with pytest.raises(SpreadModelError, match=r"up_proj.weight is spread .* tp_plan"):
        TransformerBridge(model)


def inferring_is_refused(kind: str, folder: Path) -> None:
    """An adapter is inferred in one process alone."""
    with pytest.raises(SpreadModelError, match="inferred in one process"):
        TransformerBridge(load(kind, folder, tp_plan="auto"), automatic="always")


def inside_experts_is_refused(kind: str, folder: Path) -> None:
    """A point of which each process has a part that is not put together is refused with the reason."""
    ours = TransformerBridge(load(kind, folder, tp_plan="auto"))
    name = "blocks.0.mlp.experts.0.hook_post"
    with pytest.raises(UnknownHookError, match=r"cut inside .*tensor parallel over 2 processes"):
        ours.get_hook_point(name)
    assert name in ours.offered().not_offered


def rows_of_its_own(kind: str, folder: Path) -> None:
    """DDP and FSDP2: each process sees its own rows whole; gradients of parameters are the mean over all."""
    rank = torch.distributed.get_rank()
    plain = TransformerBridge(load(kind, folder))
    sharded = load(kind, folder)
    for layer in sharded.model.layers:
        fully_shard(layer)
    fully_shard(sharded)
    wrapped = TransformerBridge(DistributedDataParallel(load(kind, folder)))
    tokens = TOKENS[rank : rank + 1]
    logits, wanted = plain.run_with_cache(tokens, names_filter=lambda name: True)
    for ours, said in ((wrapped, "data parallel over 2"), (TransformerBridge(sharded), "FSDP2")):
        assert said in str(ours) and said in ours.report()
        assert list(ours.hook_dict) == list(plain.hook_dict)
        assert difference(ours(tokens), logits) < CLOSE
        _, found = ours.run_with_cache(tokens, names_filter=lambda name: True)
        for name in wanted:
            assert difference(found[name], wanted[name]) < CLOSE, name
        for name in ("blocks.0.attn.hook_z", "blocks.0.attn.hook_pattern", "blocks.1.hook_resid_mid"):
            edit = [(name, lambda x, hook: x * 0.5 + 0.1)]
            changed = ours.run_with_hooks(tokens, fwd_hooks=edit)
            assert difference(changed, plain.run_with_hooks(tokens, fwd_hooks=edit)) < 10 * CLOSE, name
        assert difference(ours.W_Q, plain.W_Q) == 0
        loss = ours(tokens, return_type="loss")
        loss.backward()
    wanted_gradients = []
    for row in (0, 1):
        plain.core.zero_grad()
        plain(TOKENS[row : row + 1], return_type="loss").backward()
        wanted_gradients.append([_of(p).clone() for p in plain.core.parameters()])
    for a, b, mine, theirs in zip(*wanted_gradients, wrapped.core.parameters(), sharded.parameters(), strict=True):
        assert difference(_of(mine), (a + b) / 2) < CLOSE
        assert difference(_of(theirs), (a + b) / 2) < CLOSE


def _of(parameter: torch.Tensor) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
