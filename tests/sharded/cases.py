"""The cases that several processes run. Each is called on all of them, with the kind of model and
where it is saved.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.distributed import DistributedConfig

from adapters import verify
from adapters.imports import VersionError, check_tensor_parallel, has_transformers
from adapters.spread import DifferentEditsError, SpreadModelError
from bridge import TransformerBridge
from bridge.cache import ActivationCache
from bridge.harvest import Activations, HarvestError, MixError, harvest
from bridge.hooks.names import UnknownHookError
from tests.sharded.built_on_points import ALL
from tests.sharded.models import PLANS, TOKENS, difference, load
from weight_processing.check import ProcessingError

#: In float64, but for what models compute in float32 themselves (norms, softmaxes, routers), in
#: another order.
CLOSE = 1e-5
#: In float32, behind two layers.
FAR = 1e-4


#: Kinds with latents, or gates of sinks, which are refused processing and graphs in one process,
#: too.
REFUSED_ANYWAY = ("deepseek_v2", "deepseek_v3", "minicpm3", "granite_swa")
#: Kinds without an adapter.
INFERRED = ("nanochat", "phimoe")
#: Cases whose error ends the process, and torchrun the others.
ENDS = ("alone_in_a_trace", "alone_in_a_direct_call", "breaks_off_in_a_harvest")


def tensor_parallel(kind: str, folder: Path, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    """A model over all processes."""
    check_tensor_parallel()
    if "by_expert" in kind and not has_transformers("5.19"):
        raise VersionError(
            "experts of a plan of their own (ep_size) need transformers 5.19 or later"
        )
    size = dist.get_world_size()
    experts = {"ep_size": size} if "by_expert" in kind else {}
    config = DistributedConfig(tp_plan=PLANS.get(kind, "auto"), tp_size=size, **experts)
    return load(kind, folder, dtype, distributed_config=config)


def pair(
    kind: str, folder: Path, dtype: torch.dtype = torch.float64
) -> tuple[TransformerBridge, TransformerBridge]:
    """A bridge of the model over all processes by tensor parallelism, and one of it in one
    process.
    """
    plain = TransformerBridge(load(kind, folder, dtype))
    declared = plain.declaration() if kind in INFERRED else None  # inferred in one process alone
    return TransformerBridge(tensor_parallel(kind, folder, dtype), declaration=declared), plain


def said_to_be_tensor_parallel(kind: str, folder: Path) -> None:
    """The bridge says how its model is spread."""
    ours, _ = pair(kind, folder)
    assert f"tensor parallel over {dist.get_world_size()} processes" in str(ours)
    assert f"tensor parallel over {dist.get_world_size()} processes" in ours.report()


def every_activation(kind: str, folder: Path) -> None:
    """Each point shows what it does in one process, in a cache of all and alone, with and without
    gradients.
    """
    ours, plain = pair(kind, folder)
    names = list(ours.hook_dict)
    missing = set(plain.hook_dict) - set(names)
    assert not missing and not ours.offered().not_offered
    for context in (torch.no_grad, torch.enable_grad):
        with context():
            logits, found = ours.run_with_cache(TOKENS, names_filter=names)
            wanted_logits, wanted = plain.run_with_cache(TOKENS, names_filter=names)
        assert difference(logits, wanted_logits) < CLOSE
        for name in names:
            assert difference(found[name], wanted[name]) < CLOSE, name
    for name in names:
        _, found = ours.run_with_cache(TOKENS, names_filter=name)
        assert difference(found[name], wanted[name]) < CLOSE, name
    _, default = ours.run_with_cache(TOKENS)
    assert set(default) == set(plain.run_with_cache(TOKENS)[1])


def every_edit(kind: str, folder: Path) -> None:
    """An edit at any point, and the gradient there, have the effect that they have in one
    process.
    """
    ours, plain = pair(kind, folder)
    base = plain(TOKENS)
    for name in ours.hook_dict:
        if name.startswith("blocks.1") or "indices" in name or "topk" in name:
            continue
        edit = [(name, _halved)]
        wanted = plain.run_with_hooks(TOKENS, fwd_hooks=edit)
        assert difference(ours.run_with_hooks(TOKENS, fwd_hooks=edit), wanted) < CLOSE, name
        with torch.no_grad():
            assert (
                difference(ours.run_with_hooks(TOKENS, fwd_hooks=edit), wanted.detach()) < CLOSE
            ), name
        assert difference(wanted, base) > 1e-3 or _changes_nothing(name), name
        mine, gradients = _gradients(ours, name), _gradients(plain, name)
        assert len(mine) == len(gradients), name
        for one, other in zip(mine, gradients, strict=True):
            assert difference(one, other) < CLOSE * (float(other.abs().max()) + 1), name


def _halved(x: torch.Tensor, hook: object) -> torch.Tensor:
    """Another factor for each entry of the last axis: parts that were exchanged would be seen."""
    return (
        x * torch.linspace(0.2, 0.9, x.shape[-1], device=x.device) if x.is_floating_point() else x
    )


def _mixed(x: torch.Tensor, hook: object) -> torch.Tensor:
    """Each entry depends on those of other processes."""
    return (
        x * 0.5 + x.flip(-1) * 0.3 + x.flip(-2) * 0.1 if x.ndim > 3 else x * 0.6 + x.flip(-1) * 0.3
    )


def _changes_nothing(name: str) -> bool:
    return not name.endswith(
        ("hook_z", "hook_q", "hook_v", "hook_post", "hook_pre", "hook_resid_mid", "hook_result")
    )


def gradients_of_parameters(kind: str, folder: Path) -> None:
    """With an edit in place, the gradient of every parameter is that of one process."""
    ours, plain = pair(kind, folder)
    places = ["attn.hook_z", "attn.hook_q", "attn.hook_pattern", "hook_mlp_out", "mlp.hook_post"]
    places += [f"mlp.experts.{e}.hook_{part}" for e in range(4) for part in ("in", "post", "out")]
    edits = [
        (name, _mixed)
        for name in (f"blocks.0.{place}" for place in places)
        if name in plain.hook_dict
    ]
    found = []
    for bridge in (ours, plain):
        bridge.run_with_hooks(TOKENS, fwd_hooks=edits, return_type="loss").backward()
        found.append([_of(parameter) for parameter in bridge.core.parameters()])
    for mine, theirs in zip(*found, strict=True):
        assert difference(mine, theirs) < CLOSE * (float(theirs.abs().max()) + 1)


def heads_knocked_out(kind: str, folder: Path) -> None:
    """Each head is the head of its number."""
    ours, plain = pair(kind, folder)
    effects = []
    for head in range(plain.cfg.n_heads):

        def knock(z: torch.Tensor, hook: object, head: int = head) -> None:
            z[:, :, head] = 0

        edit = [("blocks.0.attn.hook_z", knock)]
        wanted = plain.run_with_hooks(TOKENS, fwd_hooks=edit)
        effects.append(difference(wanted, plain(TOKENS)))
        assert difference(ours.run_with_hooks(TOKENS, fwd_hooks=edit), wanted) < CLOSE
    assert min(effects) > 1e-2


def weights_in_full(kind: str, folder: Path) -> None:
    """Weights are put together where they are read."""
    ours, plain = pair(kind, folder)
    for name in ("W_Q", "W_K", "W_V", "W_O", "W_in", "W_out", "W_U", "W_E", "b_Q", "b_out"):
        if hasattr(plain, name):
            assert difference(getattr(ours, name), getattr(plain, name)) == 0, name
    if hasattr(plain, "W_V"):
        assert difference(ours.OV[0, 1].AB, plain.OV[0, 1].AB) < CLOSE


def generation(kind: str, folder: Path) -> None:
    """Texts are those of one process, with and without an edit."""
    ours, plain = pair(kind, folder)
    for edits in (
        [],
        [("blocks.0.attn.hook_z", _halved)],
        [("blocks.1.attn.hook_pattern", _halved)],
    ):
        texts = []
        for bridge in (ours, plain):
            with bridge.hooks(fwd_hooks=edits):
                texts.append(
                    bridge.generate(
                        TOKENS,
                        max_new_tokens=5,
                        do_sample=False,
                        verbose=False,
                        return_type="tokens",
                    )
                )
        assert torch.equal(*texts)


def analysis(kind: str, folder: Path) -> None:
    """A patching sweep, logit attribution and head results."""
    from bridge.patching import get_act_patch_attn_head_out_all_pos

    ours, plain = pair(kind, folder)
    found = []
    for bridge in (ours, plain):
        _, cache = bridge.run_with_cache(TOKENS.flip(1))
        assert isinstance(cache, ActivationCache)
        heads = cache.stack_head_results(layer=-1)
        streams = cache.accumulated_resid(layer=-1)
        assert isinstance(streams, torch.Tensor)
        attribution = cache.logit_attrs(streams, TOKENS[:, :1].expand(-1, TOKENS.shape[1]))
        sweep = get_act_patch_attn_head_out_all_pos(
            bridge, TOKENS, cache, lambda logits: logits[:, -1, 5].sum()
        )
        found.append((heads, attribution, sweep))
    for mine, theirs in zip(*found, strict=True):
        assert difference(mine, theirs) < CLOSE


def built_on_points(kind: str, folder: Path) -> None:
    """Circuits, bases, graphs, lenses, sweeps and traces, which know nothing of processes."""
    for name, tried in ALL.items():
        if kind in REFUSED_ANYWAY and name in ("circuits", "in_bases"):
            continue
        ours, plain = pair(kind, folder)
        found = [list(tried(bridge)) for bridge in (ours, plain)]
        for mine, theirs in zip(*found, strict=True):
            assert difference(mine, theirs) < CLOSE * (
                float(theirs.abs().nan_to_num(posinf=0).max()) + 1
            ), name


def verified(kind: str, folder: Path) -> None:
    """`verify` proves the same claims as in one process."""
    ours, plain = pair(kind, folder)
    mine, theirs = verify(ours), verify(plain)
    assert mine.passed and theirs.passed, f"{mine}\n{theirs}"
    assert [check.name for check in mine.checks] == [check.name for check in theirs.checks]


def different_edits_are_refused(kind: str, folder: Path) -> None:
    """An edit that is another on each process, or fails on one, or is there on one alone, ends the
    run on all.
    """
    ours, _ = pair(kind, folder)
    rank = dist.get_rank()
    before = ours(TOKENS)

    def noise(x: torch.Tensor, hook: object) -> torch.Tensor:
        return x + rank

    def alone(x: torch.Tensor, hook: object) -> torch.Tensor | None:
        return x * 2 if rank == 0 else None

    def fails(x: torch.Tensor, hook: object) -> None:
        if rank == 1:
            raise KeyError("mine")

    for name in ("blocks.0.attn.hook_z", "blocks.0.attn.hook_pattern", "blocks.0.hook_resid_mid"):
        for hook in (noise, alone):
            with pytest.raises(
                DifferentEditsError, match=f"{name} differs .* seed random numbers alike"
            ):
                ours.run_with_hooks(TOKENS, fwd_hooks=[(name, hook)])
        error, words = (
            (KeyError, "mine")
            if rank == 1
            else (DifferentEditsError, f"{name} failed on process 1")
        )
        with pytest.raises(error, match=words):
            ours.run_with_hooks(TOKENS, fwd_hooks=[(name, fails)])
        mine = [(name, _halved)] if rank == 0 else []
        with pytest.raises(DifferentEditsError, match="other hook points"):
            ours.run_with_hooks(TOKENS, fwd_hooks=mine)
        with (
            pytest.raises(DifferentEditsError, match="other hook points"),
            ours.hooks(fwd_hooks=mine),
        ):
            ours.generate(TOKENS, max_new_tokens=2, do_sample=False, verbose=False)
    assert torch.equal(ours(TOKENS), before)


def different_gradients_are_refused(kind: str, folder: Path) -> None:
    """The same of functions of gradients; those that do the same are right."""
    ours, plain = pair(kind, folder)
    rank = dist.get_rank()

    def noise(gradient: torch.Tensor, hook: object) -> torch.Tensor:
        return gradient + rank

    def fails(gradient: torch.Tensor, hook: object) -> None:
        if rank == 1:
            raise KeyError("mine")

    def backward(bridge: TransformerBridge, name: str, hook: Any) -> torch.Tensor:
        bridge.core.zero_grad()
        with bridge.hooks(bwd_hooks=[(name, hook)]):
            bridge(TOKENS, return_type="loss").backward()
        return _of(bridge.core.get_input_embeddings().weight)

    for name in ("blocks.0.attn.hook_z", "blocks.1.attn.hook_pattern", "blocks.0.hook_resid_mid"):
        with pytest.raises(
            DifferentEditsError,
            match=f"the gradient at {name} differs .* seed random numbers alike",
        ):
            backward(ours, name, noise)
        words = "mine" if rank == 1 else f"the gradient at {name} failed on process 1"
        with pytest.raises(KeyError if rank == 1 else DifferentEditsError, match=words):
            backward(ours, name, fails)
        assert difference(backward(ours, name, _halved), backward(plain, name, _halved)) < CLOSE


def not_compared(kind: str, folder: Path) -> None:
    """With ``compare_edits=False`` each process does what its hooks do, and nothing is sent
    for it.
    """
    ours = TransformerBridge(tensor_parallel(kind, folder), compare_edits=False)
    rank, name = dist.get_rank(), "blocks.0.attn.hook_z"
    seen = []
    ours.run_with_hooks(
        TOKENS,
        fwd_hooks=[(name, lambda x, hook: x + rank), (name, lambda x, hook: seen.append(x[0, 0]))],
    )
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, seen[0])
    assert float((found[1] - found[0] - 1).abs().max()) < CLOSE


def alone_in_a_trace(kind: str, folder: Path) -> None:
    """A body that asks for an activation on one process alone: this one ends, and torchrun ends the
    others.
    """
    ours = TransformerBridge(tensor_parallel(kind, folder), patience=2.0)
    with ours.trace(TOKENS) as run:
        if dist.get_rank() == 0:
            run["blocks.0.attn.hook_z"].clone()
        run.logits.clone()


def alone_in_a_direct_call(kind: str, folder: Path) -> None:
    """A direct call of the model on one process alone, with hooks that all have."""
    ours = TransformerBridge(tensor_parallel(kind, folder), patience=2.0)
    ours.hook_dict["blocks.0.attn.hook_z"].add_hook(_halved)
    if dist.get_rank() == 0:
        ours.original_model(TOKENS)
    else:
        time.sleep(20)


def twelve_wrong_uses(kind: str, folder: Path) -> None:
    """Each is an error on all processes, within ten seconds, and leaves the model as it was."""
    ours = TransformerBridge(tensor_parallel(kind, folder), patience=5.0)
    rank, name, other = dist.get_rank(), "blocks.0.attn.hook_z", "blocks.1.hook_resid_post"
    before = ours(TOKENS)
    options: dict[str, Any] = {"max_new_tokens": 2, "verbose": False, "stop_at_eos": False}

    def run(hook: Any, kind: str = "fwd", place: str = name) -> None:
        with ours.hooks(**{f"{kind}_hooks": [(place, hook)]}):
            ours(TOKENS, return_type="loss").backward() if kind == "bwd" else ours(TOKENS)

    def fails(x: torch.Tensor, hook: object) -> None:
        if rank == 1:
            raise KeyError("mine")

    def sampled() -> None:
        torch.manual_seed(rank)
        ours.generate(TOKENS, do_sample=True, **options)

    def noise_in_a_trace() -> None:
        with ours.trace(TOKENS) as run:
            run[name] = run[name] + rank

    def direct_call() -> None:
        with ours.hooks(fwd_hooks=[(name, lambda x, hook: x + torch.rand(()))]):
            ours.original_model(TOKENS)

    torch.manual_seed(rank)
    wrong_uses: dict[str, Callable[[], object]] = {
        "another edit on each": lambda: run(lambda x, hook: x + rank),
        "random numbers that are not seeded": lambda: run(lambda x, hook: x + torch.rand(x.shape)),
        "an edit by one alone": lambda: run(
            lambda x, hook: x * 2 if rank == 0 else None, place=other
        ),
        "a hook that fails on one": lambda: run(fails),
        "a hook on one alone": lambda: run(_halved) if rank == 0 else ours(TOKENS),
        "hooks at other points": lambda: run(_halved, place=(name, other)[rank]),
        "other tokens": lambda: ours(TOKENS.roll(rank, 1)),
        "other tokens to generate from": lambda: ours.generate(
            TOKENS.roll(rank, 1), do_sample=False, **options
        ),
        "sampling that is not seeded": sampled,
        "another gradient on each": lambda: run(lambda x, hook: x + rank, "bwd"),
        "a function of gradients that fails on one": lambda: run(fails, "bwd"),
        "other requests": lambda: list(
            ours.generate_batch([[5, 6], [7]][rank:], 2, do_sample=False, verbose=False)
        ),
        "another edit in each trace": noise_in_a_trace,
        "another edit in a direct call": direct_call,
    }
    for use, call in wrong_uses.items():
        began = time.monotonic()
        with pytest.raises((DifferentEditsError, KeyError)):
            call()
        assert time.monotonic() - began < 10, use
    assert torch.equal(ours(TOKENS), before)


def context_parallel_is_refused(kind: str, folder: Path) -> None:
    """torch's own context, which gives each process some positions."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel

    bridge = TransformerBridge(load(kind, folder))
    tokens = TOKENS[:, :4].clone()
    with context_parallel(init_device_mesh("cpu", (2,)), buffers=[tokens], buffer_seq_dims=[1]):
        with pytest.raises(SpreadModelError, match="context parallel"):
            bridge(tokens)
        with (
            pytest.raises(SpreadModelError, match="context parallel"),
            bridge.hooks(fwd_hooks=[("hook_embed", _halved)]),
        ):
            bridge.original_model(tokens)
    bridge(TOKENS)


def what_was_found_by_hostile_probes(kind: str, folder: Path) -> None:
    """Signs in float64, layers to run, lengths of the past, modules replaced, cut logits."""
    ours = TransformerBridge(tensor_parallel(kind, folder))
    rank, name = dist.get_rank(), "blocks.0.attn.hook_z"
    before = ours(TOKENS)
    with pytest.raises(DifferentEditsError, match="differs"):
        ours.run_with_hooks(TOKENS, fwd_hooks=[(name, lambda z, hook: z * (1 - 2 * rank))])
    with pytest.raises(DifferentEditsError, match="layers to run"):
        ours(TOKENS, stop_at_layer=1 + rank)
    past = ours.original_model(TOKENS, use_cache=True).past_key_values
    if rank:
        past.crop(-1)
    with pytest.raises(DifferentEditsError, match="lengths of the past"):
        ours(TOKENS[:, :1], past_key_values=past)
    assert torch.equal(ours(TOKENS), before)
    whole = load(kind, folder)
    ours.original_model.model.layers[0] = whole.model.layers[0]
    for point in (name, "blocks.0.mlp.hook_post", "blocks.0.attn.hook_pattern"):
        with pytest.raises(SpreadModelError, match="make another bridge"):
            ours.run_with_hooks(TOKENS, fwd_hooks=[(point, _halved)])
    config = DistributedConfig(tp_plan={"lm_head": "colwise"}, tp_size=dist.get_world_size())
    with pytest.raises(SpreadModelError, match="colwise_gather_output"):
        TransformerBridge(load(kind, folder, distributed_config=config))


def too_few_heads_are_refused(kind: str, folder: Path) -> None:
    """Heads of keys that would be cut: transformers does not repeat them, and its own forward
    fails.
    """
    model = tensor_parallel(kind, folder)
    size = dist.get_world_size()
    with pytest.raises(
        RuntimeError, match=rf"shape '\[2, 7, -1, {model.config.head_dim}\]' is invalid"
    ):
        model(TOKENS)
    heads = model.config.num_key_value_heads
    with pytest.raises(
        SpreadModelError, match=f"{heads} heads of keys cannot be cut for {size} processes"
    ):
        TransformerBridge(model)


def different_inputs_are_refused(kind: str, folder: Path) -> None:
    """Other tokens, another mask or another seed on each process ends the run on all."""
    ours, _ = pair(kind, folder)
    rank = dist.get_rank()
    before = ours(TOKENS)
    other = TOKENS.roll(rank, 1)
    mask = torch.ones_like(TOKENS)
    mask[0, :rank] = 0
    options = {"max_new_tokens": 2, "verbose": False, "stop_at_eos": False, "return_type": "tokens"}
    calls = [
        lambda: ours(other),
        lambda: ours.run_with_cache(other),
        lambda: ours(TOKENS, attention_mask=mask),
    ]
    calls.append(lambda: ours.generate(other, do_sample=False, **options))
    for call in calls:
        with pytest.raises(DifferentEditsError, match="different inputs"):
            call()
    torch.manual_seed(rank)
    with pytest.raises(DifferentEditsError, match="draw different tokens"):
        ours.generate(TOKENS, do_sample=True, **options)
    torch.manual_seed(0)
    alike: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(alike, ours.generate(TOKENS, do_sample=True, **options).tolist())
    assert alike[0] == alike[1]
    assert torch.equal(ours(TOKENS), before)


def _gradients(bridge: TransformerBridge, name: str) -> list[torch.Tensor]:
    """Those that a point is shown: none where nothing goes through it (`hook_attn_in` if nobody
    asks for it).
    """
    found: list[torch.Tensor] = []
    with bridge.hooks(
        bwd_hooks=[(name, lambda gradient, hook: found.append(gradient.detach().clone()))]
    ):
        bridge(TOKENS, return_type="loss").backward()
    return found


def processed(kind: str, folder: Path) -> None:
    """`process_weights` does to the parts what it does to the whole in one process."""
    ours, plain = pair(kind, folder, torch.float32)
    plain.process_weights()
    _compare_processing(ours, plain)
    assert ours.cfg.processed == plain.cfg.processed, f"{ours.cfg.processed} {plain.cfg.processed}"
    assert ("done" in ours.cfg.processed.values()) == (kind not in REFUSED_ANYWAY)
    place = folder / f"{kind}_processed"
    ours.original_model.save_pretrained(place)
    dist.barrier()
    saved = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32).eval()
    assert difference(saved(TOKENS).logits, plain(TOKENS)) < FAR


def _compare_processing(ours: TransformerBridge, plain: TransformerBridge) -> None:
    before = ours(TOKENS).log_softmax(-1)
    ours.process_weights(check="each")
    plain.process_weights(**{name: done == "done" for name, done in ours.cfg.processed.items()})
    assert difference(ours(TOKENS).log_softmax(-1), before) < FAR
    wanted = plain.state_dict()
    found = ours.state_dict()
    assert set(found) == set(wanted)
    for name, weight in wanted.items():
        assert difference(_whole(found[name]), weight) == 0, name
    _, mine = ours.run_with_cache(TOKENS)
    _, theirs = plain.run_with_cache(TOKENS)
    for name in theirs:
        assert difference(mine[name], theirs[name]) < FAR, name
    loss = ours(TOKENS, return_type="loss")
    assert difference(loss, plain(TOKENS, return_type="loss")) < FAR
    loss.backward()


def _whole(x: torch.Tensor) -> torch.Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def spread_without_a_plan_is_refused(kind: str, folder: Path) -> None:
    """Nothing says how activations are cut where parameters were spread by hand."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    model = load(kind, folder)
    layer = model.model.layers[0].mlp.up_proj
    layer.weight = torch.nn.Parameter(
        distribute_tensor(layer.weight.detach(), init_device_mesh("cpu", (2,)), [Shard(0)])
    )
    with pytest.raises(SpreadModelError, match=r"up_proj.weight is spread .*DistributedConfig"):
        TransformerBridge(model)


def inferring_is_refused(kind: str, folder: Path) -> None:
    """An adapter is inferred in one process alone."""
    with pytest.raises(SpreadModelError, match="inferred in one process"):
        TransformerBridge(tensor_parallel(kind, folder), automatic="always")


def declared_in_one_process(kind: str, folder: Path) -> None:
    """What was inferred in one process says what is what where several share the model."""
    one = TransformerBridge(load(kind, folder), automatic="always")
    ours = TransformerBridge(tensor_parallel(kind, folder), declaration=one.declaration())
    names = list(one.hook_dict)
    assert list(ours.hook_dict) == names and ours.offered().inferred
    _, found = ours.run_with_cache(TOKENS, names_filter=names)
    _, wanted = one.run_with_cache(TOKENS, names_filter=names)
    for name in names:
        assert difference(found[name], wanted[name]) < CLOSE, name


def unequal_parts_are_refused(kind: str, folder: Path) -> None:
    """A point of which each process has a part that is not put together is refused with the
    reason.
    """
    ours = TransformerBridge(tensor_parallel(kind, folder))
    name = "blocks.0.mlp.hook_post"
    with pytest.raises(
        UnknownHookError, match=r"the 95 columns .* unequal parts: tensor parallel over 2 processes"
    ):
        ours.get_hook_point(name)
    assert name in ours.offered().not_offered
    ours.get_hook_point("blocks.0.attn.hook_z")


def made_for_one_process(kind: str, folder: Path) -> None:
    """Programs are refused."""
    for model in (tensor_parallel(kind, folder), _by_fsdp(kind, folder)):
        ours = TransformerBridge(model)
        with pytest.raises(
            ValueError, match="a program is for models in one process, and this one is"
        ):
            ours.program(capture="blocks.0.attn.hook_z")


def _of_its_own(kind: str, folder: Path) -> list[TransformerBridge]:
    return [
        TransformerBridge(each.eval())
        for each in (_by_fsdp(kind, folder), DistributedDataParallel(load(kind, folder)))
    ]


def harvested_by_each(kind: str, folder: Path) -> None:
    """FSDP2 and DDP: each process harvests its own rows, however many, as deep as it likes, and
    some fail.
    """
    rank, plain = dist.get_rank(), TransformerBridge(load(kind, folder))
    mine = [
        [3 + rank, *range(5, 5 + n)] for n in ((4, 7, 3), (9, 2, 8, 5, 6, 4, 3), (), (6,))[rank]
    ]
    how: dict[str, Any] = {
        "context_size": 5,
        "dtype": "float32",
        "tokens_per_shard": 10,
        "batch_size": 1 + rank,
        "pack": False,
        "interventions": [("blocks.0.attn.hook_q", _halved)],
        "hook_points": [
            "blocks.0.hook_resid_post" if rank else "blocks.1.attn.hook_pattern",
            "blocks.0.attn.hook_z",
        ],
    }
    for number, ours in enumerate(_of_its_own(kind, folder)):
        out, alone = folder / f"by_each_{number}_{rank}", folder / f"by_each_alone_{number}_{rank}"
        if not mine:
            with pytest.raises(HarvestError, match="has no tokens"):
                harvest(ours, mine, out=out, **how)
        else:
            assert harvest(ours, mine, out=out, **how).rows == sum(map(len, mine))
            harvest(plain, mine, out=alone, **how)
            rows, wanted = Activations(out)[:], Activations(alone)[:]
            assert list(rows) == list(wanted)
            assert all(
                difference(rows[name].double(), wanted[name].double()) < CLOSE for name in wanted
            )
        dist.barrier()
        if (
            rank == 1
        ):  # one goes on with what was lost, another refuses, the first has nothing left to do
            next(iter(out.glob("shard-*"))).unlink()
        if mine:
            assert harvest(ours, mine, out=out, **how).made == (rank == 1)
        else:
            with pytest.raises(HarvestError):
                harvest(ours, mine, out=out, **how)
        once = how | {"hook_points": ["hook_embed"], "interventions": ()}
        if rank == 0:
            with pytest.raises(MixError):
                harvest(ours, [[5, 6, 7]], out=out, **once)
        else:
            harvest(ours, [[5, 6, 7]], out=folder / f"by_each_more_{number}_{rank}", **once)
        said: list[Any] = [None] * dist.get_world_size()
        try:  # all into one folder
            mine_said: object = harvest(
                ours, [[5, 6, 7]], out=folder / f"by_each_one_{number}", **once
            ).made
        except HarvestError as error:
            mine_said = str(error)[:29]
        dist.all_gather_object(said, mine_said)
        assert sorted(map(str, said)) == [
            "1",
            *["another process is harvesting"] * (len(said) - 1),
        ], said
        assert difference(ours(TOKENS[:1]), plain(TOKENS[:1])) < CLOSE


def breaks_off_in_a_harvest(kind: str, folder: Path) -> None:
    """A function that fails in a pass of one process: this one says so and ends, and torchrun ends
    the others.
    """
    ours, rank = TransformerBridge(_by_fsdp(kind, folder).eval()), dist.get_rank()

    def fails(x: torch.Tensor, hook: object) -> None:
        if rank == 0:
            raise KeyError("mine")

    edits: list[Any] = [("blocks.0.attn.hook_q", fails)]
    points = ["blocks.1.hook_resid_post"]
    harvest(
        ours,
        TOKENS,
        hook_points=points,
        interventions=edits,
        out=folder / f"broken_{rank}",
        context_size=5,
    )


def requests_of_each(kind: str, folder: Path) -> None:
    """FSDP2 and DDP: each process has requests of its own, of other numbers and lengths; one has
    none, one bad ones.
    """
    rank, plain = dist.get_rank(), TransformerBridge(load(kind, folder))
    prompts = ([[5, 6, 7], [8, 9, 10, 11, 12, 13], [17]], [[9, 8]], [], [[500]])[rank]
    each = [
        [("blocks.0.attn.hook_z", _halved)] if index % 2 else [] for index in range(len(prompts))
    ]
    how: dict[str, Any] = {
        "capture": ["blocks.0.attn.hook_z", "blocks.1.attn.hook_pattern"],
        "do_sample": False,
        "verbose": False,
        "stop_at_eos": False,
        "output_logits": True,
    }
    for ours in _of_its_own(kind, folder):
        for new in (3 + rank, 2):
            found = []
            for bridge in (ours, plain):
                answers = bridge.generate_batch(prompts, new, each=each, **how)
                found.append(sorted(answers, key=lambda answer: answer.index))
            assert len(found[0]) == len(prompts)
            for mine, theirs in zip(*found, strict=True):
                assert (mine.error is None) == (theirs.error is None) == (rank < 3)
                assert torch.equal(mine.tokens, theirs.tokens)
                if mine.error is None:
                    assert difference(mine.logits, theirs.logits) < CLOSE
                    for point in how["capture"]:
                        assert difference(mine.cache[point], theirs.cache[point]) < CLOSE, point

        def fails(x: torch.Tensor, hook: object) -> None:
            if rank == 0:
                raise KeyError("mine")

        (answer,) = ours.generate_batch(
            [[5, 6]], 2, interventions=[("blocks.0.attn.hook_z", fails)], **how
        )
        assert isinstance(answer.error, KeyError) if rank == 0 else answer.error is None
        assert difference(ours(TOKENS[:1]), plain(TOKENS[:1])) < CLOSE


def harvested(kind: str, folder: Path) -> None:
    """The first process writes the rows that one process would, and either goes on with what the
    other began.
    """
    ours, plain = pair(kind, folder)
    points = ["blocks.0.attn.hook_z", "blocks.1.hook_resid_post", "blocks.0.attn.hook_pattern"]
    how: dict[str, Any] = {
        "hook_points": points,
        "interventions": [("blocks.0.attn.hook_q", _halved)],
        "context_size": 5,
        "dtype": "float32",
        "tokens_per_shard": 20,
        "batch_size": 2,
        "pack": False,
    }
    rank, tokens = dist.get_rank(), torch.cat([TOKENS, TOKENS.flip(1), TOKENS.flip(0)])
    together, alone = folder / f"{kind}_rows", folder / f"{kind}_rows_alone"
    report = harvest(ours, tokens, out=together, **how)
    assert report.rows == tokens.numel() and report.path == together
    again = harvest(ours, tokens, out=together, **how)
    assert again.made == 0
    if rank == 0:
        harvest(plain, tokens, out=alone, **how)
        mine, theirs = Activations(together), Activations(alone)
        for point in points:
            assert (
                difference(torch.as_tensor(mine[:][point]), torch.as_tensor(theirs[:][point]))
                < CLOSE
            )
        assert harvest(plain, tokens, out=together, **how).made == 0
    dist.barrier()
    with pytest.raises(HarvestError, match="dtype"):
        harvest(
            ours,
            tokens,
            out=folder / f"{kind}_large",
            **how | {"dtype": "float16", "interventions": [(points[0], _large)]},
        )


def _large(x: torch.Tensor, hook: object) -> torch.Tensor:
    return x * 1e9


def many_requests(kind: str, folder: Path) -> None:
    """Texts, logits and activations of many requests at once are those of one process, each under
    its own edits.
    """
    ours, plain = pair(kind, folder)
    prompts = [[5, 6, 7], [8, 9, 10, 11, 12, 13, 14, 15, 16], [17], [5, 6, 7]]
    each = [[], [("blocks.0.attn.hook_z", _halved)], [("blocks.1.hook_resid_post", _halved)], []]
    each[3] = [("blocks.0.attn.hook_pattern", _halved)]
    points = ["blocks.0.attn.hook_z", "blocks.1.hook_resid_post", "blocks.1.attn.hook_pattern"]
    found = []
    for bridge in (ours, plain):
        answers = bridge.generate_batch(
            prompts,
            each=each,
            capture=points,
            max_new_tokens=4,
            do_sample=False,
            stop_at_eos=False,
            verbose=False,
            output_logits=True,
        )
        found.append(sorted(answers, key=lambda answer: answer.index))
    for mine, theirs in zip(*found, strict=True):
        assert mine.error is None and torch.equal(mine.tokens, theirs.tokens)
        assert difference(mine.logits, theirs.logits) < CLOSE
        for point in points:
            assert difference(mine.cache[point], theirs.cache[point]) < CLOSE, point
    rank = dist.get_rank()

    def noise(x: torch.Tensor, hook: object) -> torch.Tensor:
        return x + rank

    answers = list(
        ours.generate_batch(
            prompts, 2, interventions=[(points[0], noise)], do_sample=False, verbose=False
        )
    )
    assert all(isinstance(answer.error, DifferentEditsError) for answer in answers), [
        a.error for a in answers
    ]
    with pytest.raises(DifferentEditsError, match="different inputs"):
        list(ours.generate_batch(prompts[rank:], max_new_tokens=2, do_sample=False, verbose=False))


def traced(kind: str, folder: Path) -> None:
    """A trace reads and writes as in one process."""
    ours, plain = pair(kind, folder)
    found = []
    for bridge in (ours, plain):
        with bridge.trace(TOKENS) as run:
            z = run["blocks.0.attn.hook_z"].clone()
            run["blocks.0.attn.hook_z"] = z * 0.5
        found.append((z, run.logits))
    for mine, theirs in zip(*found, strict=True):
        assert difference(mine, theirs) < CLOSE


def copied(kind: str, folder: Path) -> None:
    """A copy of a bridge is of a copy of the model, over the same processes: it shows the same, and
    is edited alone.
    """
    bridge = TransformerBridge(tensor_parallel(kind, folder))
    x = TOKENS
    before, cache = bridge.run_with_cache(x)
    copy = deepcopy(bridge)
    assert copy.original_model is not bridge.original_model and copy.layout == bridge.layout
    again, its = copy.run_with_cache(x)
    assert torch.equal(again, before) and all(torch.equal(its[name], cache[name]) for name in cache)
    name = "blocks.0.attn.hook_z"
    edited = copy.run_with_hooks(x, fwd_hooks=[(name, _halved)])
    assert torch.equal(
        edited, bridge.run_with_hooks(x, fwd_hooks=[(name, _halved)])
    ) and not torch.equal(edited, before)
    copy.add_hook(name, _halved)
    assert torch.equal(copy(x), edited) and torch.equal(bridge(x), before)


def adapters_of_peft_are_refused(kind: str, folder: Path) -> None:
    """An adapter of PEFT over layers that are cut is refused by name, on whichever layers, before
    or behind the wrap.

    PEFT takes what a process has for the whole layer: it ran with another delta on each, unsaid.
    """
    peft = pytest.importorskip("peft")
    for layers in (["q_proj", "v_proj"], ["down_proj"]):
        how = peft.LoraConfig(r=4, target_modules=layers)
        refused = pytest.raises(
            SpreadModelError, match=rf"{layers[0]} has an adapter of PEFT .*merge_and_unload"
        )
        with refused:
            TransformerBridge(peft.get_peft_model(tensor_parallel(kind, folder), how))
        for attach in (
            lambda model: peft.get_peft_model(model, how),  # noqa: B023
            lambda model: model.add_adapter(how),  # noqa: B023
        ):
            model = tensor_parallel(kind, folder)
            ours = TransformerBridge(model)
            attach(model)
            with refused:
                ours(TOKENS)
            with refused:
                ours.generate(TOKENS, max_new_tokens=1, verbose=False)
            with refused, ours.hooks(fwd_hooks=[("blocks.0.attn.hook_z", _halved)]):
                model(TOKENS)


def rows_of_its_own(kind: str, folder: Path) -> None:
    """DDP and FSDP2: each process sees its own rows whole; gradients of parameters are the mean
    over all.
    """
    rank = dist.get_rank()
    plain = TransformerBridge(load(kind, folder))
    sharded = _by_fsdp(kind, folder)
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
        for name in (
            "blocks.0.attn.hook_z",
            "blocks.0.attn.hook_pattern",
            "blocks.1.hook_resid_mid",
        ):
            edit = [(name, lambda x, hook: x * 0.5 + 0.1)]
            changed = ours.run_with_hooks(tokens, fwd_hooks=edit)
            assert difference(changed, plain.run_with_hooks(tokens, fwd_hooks=edit)) < CLOSE, name
        assert difference(ours.W_Q, plain.W_Q) == 0
        loss = ours(tokens, return_type="loss")
        loss.backward()
    wanted_gradients = []
    for row in (0, 1):
        plain.core.zero_grad()
        plain(TOKENS[row : row + 1], return_type="loss").backward()
        wanted_gradients.append([_of(p).clone() for p in plain.core.parameters()])
    for a, b, mine, theirs in zip(
        *wanted_gradients, wrapped.core.parameters(), sharded.parameters(), strict=True
    ):
        assert difference(_of(mine), (a + b) / 2) < CLOSE
        assert difference(_of(theirs), (a + b) / 2) < CLOSE


def processed_by_fsdp(kind: str, folder: Path) -> None:
    """The same under FSDP2, behind a run, which leaves parameters of the last layers put
    together.
    """
    ours = TransformerBridge(_by_fsdp(kind, folder, torch.float32))
    plain = TransformerBridge(load(kind, folder, torch.float32))
    ours(TOKENS, return_type="loss").backward()
    _compare_processing(ours, plain)
    assert "done" in ours.cfg.processed.values()


def no_place_under_fsdp(kind: str, folder: Path) -> None:
    """A bias that a layer would be given, or a matrix that was shared, is refused by name; the rest
    is done.
    """
    ours = TransformerBridge(_by_fsdp(kind, folder, torch.float32))
    before = ours(TOKENS)
    step = "fold_ln" if kind == "llama_tied" else "fold_value_biases"
    with pytest.raises(ProcessingError, match=r"FSDP2 has no place|FSDP2 has no place for another"):
        ours.process_weights(**{step: True})
    assert torch.equal(ours(TOKENS), before)
    ours.process_weights()
    assert ours.cfg.processed[step].startswith("left out")
    assert difference(ours(TOKENS).log_softmax(-1), before.log_softmax(-1)) < FAR


def _by_fsdp(kind: str, folder: Path, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    """A model whose parameters FSDP2 has sharded, layer by layer."""
    sharded = load(kind, folder, dtype)
    for path in TransformerBridge(sharded).block_paths:
        fully_shard(sharded.get_submodule(path))
    fully_shard(sharded)
    return sharded


def _of(parameter: torch.Tensor) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad


def found_where_it_was_kept(kind: str, folder: Path) -> None:
    """What was inferred in one process is used again by all, if all have it."""
    rank = dist.get_rank()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRANSFORMER_BRIDGE_CACHE", str(folder / f"kept_{rank}"))
        model = tensor_parallel(kind, folder)
        if rank == 0:
            TransformerBridge(load(kind, folder))
        with pytest.raises(SpreadModelError, match=r"declaration\(\).save"):
            TransformerBridge(model)
        if rank == 1:
            TransformerBridge(load(kind, folder))
        assert TransformerBridge(model).declaration().inferred
