"""What benchmarks/RESULTS.md tells of: for each table its columns, and for each column things to do
in turn.

Every column's first thing is a plain run of the same Hugging Face model, or the same work by hand;
all others are compared with it. `report.py` measures them.
"""

from __future__ import annotations

import copy
import importlib.util
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from greenlet import getcurrent, greenlet
from torch.autograd.graph import get_gradient_edge
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from adapters import verify
from bridge import TransformerBridge

Jobs = dict[str, Callable[[], Any]]


@dataclass(frozen=True)
class Column:
    """One column of a table.

    Attributes:
        title: the model and its input.
        jobs: makes what is done in turn.
        grad: with gradients on.
        large: too long for one thread.
    """

    title: str
    jobs: Callable[[str], Jobs]
    grad: bool = False
    large: bool = False


@dataclass(frozen=True)
class Table:
    """One table: its name in the page, and its columns."""

    name: str
    columns: tuple[Column, ...]


def gpt2(attention: str = "sdpa", **fields: Any) -> Any:
    """A GPT-2 with random weights."""
    torch.manual_seed(0)
    return GPT2LMHeadModel._from_config(GPT2Config(**fields), attn_implementation=attention).eval()


def llama(attention: str = "sdpa", **fields: Any) -> Any:
    """A Llama of eight layers with random weights, its keys in groups."""
    torch.manual_seed(0)
    usual = {
        "hidden_size": 512,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "intermediate_size": 1408,
        "vocab_size": 32000,
        "max_position_embeddings": 8192,
    }
    return LlamaForCausalLM._from_config(
        LlamaConfig(**usual | fields), attn_implementation=attention
    ).eval()


def tiny_llama(attention: str = "sdpa") -> Any:
    """24 layers, so small that what is besides the model shows."""
    fields = {
        "hidden_size": 64,
        "num_hidden_layers": 24,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
    }
    return llama(attention, **fields, intermediate_size=128, vocab_size=100)


def tiny_gpt2(attention: str = "sdpa") -> Any:
    """Likewise."""
    return gpt2(attention, n_embd=64, n_layer=24, n_head=4, vocab_size=100, n_positions=128)


MODELS: dict[str, tuple[Callable[..., Any], tuple[int, int]]] = {
    "tiny Llama 1x16": (tiny_llama, (1, 16)),
    "tiny GPT-2 1x16": (tiny_gpt2, (1, 16)),
    "GPT-2 1x128": (gpt2, (1, 128)),
    "Llama 1x128": (llama, (1, 128)),
}
LARGE: dict[str, tuple[Callable[..., Any], tuple[int, int]]] = {
    "GPT-2 4x512": (gpt2, (4, 512)),
    "Llama 4x512": (llama, (4, 512)),
}


def tokens_for(hf: Any, shape: tuple[int, int]) -> torch.Tensor:
    """Random tokens, where the model is."""
    return torch.randint(1, 100, shape, generator=torch.Generator().manual_seed(0)).to(hf.device)


def runs(make: Callable[..., Any], shape: tuple[int, int], device: str) -> Jobs:
    """Runs, hooks, caches of chosen points."""
    hf = make().to(device)
    bridge, tokens, n = TransformerBridge(hf), tokens_for(hf, shape), hf.config.num_hidden_layers
    name, ending = f"blocks.{n // 2}.hook_resid_pre", "hook_resid_pre"
    names, half = [f"blocks.{i}.{ending}" for i in range(n)], bridge(tokens, stop_at_layer=n // 2)
    assert torch.equal(bridge(tokens), hf(tokens).logits)
    jobs: Jobs = {
        "`hf(tokens)`": lambda: hf(tokens),
        "`bridge(tokens)`": lambda: bridge(tokens),
        "`run_with_hooks`, one residual hook": lambda: bridge.run_with_hooks(
            tokens, fwd_hooks=[(name, _same)]
        ),
        "`run_with_cache`, one name": lambda: bridge.run_with_cache(tokens, names_filter=name),
        "`run_with_cache`, a list of a name for each layer": lambda: bridge.run_with_cache(
            tokens, names_filter=names
        ),
        "the same by a function": lambda: bridge.run_with_cache(
            tokens, names_filter=lambda other: other.endswith(ending)
        ),
        "the same, `pos_slice=-1`": lambda: bridge.run_with_cache(
            tokens, names_filter=names, pos_slice=-1
        ),
        "`start_at_layer`, the second half": lambda: bridge(half, start_at_layer=n // 2),
        "`TransformerBridge(hf)`, wrapping": lambda: TransformerBridge(hf),
    }
    if peer := _transformer_lens(hf):
        jobs |= {
            "TransformerLens: `bridge(tokens)`": lambda: peer(tokens),
            "TransformerLens: one residual hook": lambda: peer.run_with_hooks(
                tokens, fwd_hooks=[(name, _same)]
            ),
            "TransformerLens: cache, one name": lambda: peer.run_with_cache(
                tokens, names_filter=name
            ),
        }
    return jobs


def _same(x: torch.Tensor, hook: Any) -> torch.Tensor:
    return x


def _transformer_lens(hf: Any) -> Any:
    """TransformerLens' bridge around a copy of the model; None where it is not installed."""
    if not importlib.util.find_spec("transformer_lens"):
        return None
    from transformer_lens.model_bridge import TransformerBridge as Peer  # type: ignore[import-not-found]

    with (
        tempfile.TemporaryDirectory() as folder
    ):  # it looks for a configuration and a tokenizer by name
        hf.config.save_pretrained(folder)
        return Peer.boot_transformers(
            folder,
            hf_model=copy.deepcopy(hf),
            tokenizer=TransformerBridge.boot_embedded().tokenizer,
            device=str(hf.device),
        )


Hooks = list[tuple[dict[int, Any], Callable[..., None]]]


def places(model: Any, bridge: TransformerBridge, kept: list[Any]) -> Hooks:
    """Where the floor's hooks stand, and they: found beforehand, as a bridge finds its own once.

    Args:
        model: the Hugging Face model.
        bridge: its bridge.
        kept: where the hooks put what they are given.
    """

    def keep(x: Any) -> None:
        kept.append(x)

    found: Hooks = []
    for site in {
        hook.point.site for hook in bridge.hook_dict.values() if hook.point.group == "standard"
    }:
        if site.kind == "input":
            found.append((model.get_submodule(site.path)._forward_pre_hooks, lambda m, a: keep(a)))
        elif site.kind == "output":
            found.append((model.get_submodule(site.path)._forward_hooks, lambda m, a, o: keep(o)))
    return found


def nodes(model: Any, bridge: TransformerBridge, names: list[str], kept: list[Any]) -> Hooks:
    """Hooks at the same places, with a node of the graph for each hook point there: what torch
    takes for these alone.

    A gradient at a hook point is that of what reads the tensor from here on, so each has a node of
    its own.

    Args:
        model, bridge, kept: as for `places`.
        names: of the hook points.
    """

    def through(x: Any, number: int) -> Any:
        if not (isinstance(x, torch.Tensor) and x.requires_grad):
            return x
        for _ in range(number):
            x = x.view_as(x)
            kept.append((get_gradient_edge(x), x.detach()))
        return x

    def rest(x: Any, number: int) -> Any:
        return (through(x[0], number), *x[1:]) if isinstance(x, tuple) and x else through(x, number)

    found: Hooks = []
    for site, number in Counter(bridge.hook_dict[name].point.site for name in names).items():
        if site.kind == "input":
            where = model.get_submodule(site.path)._forward_pre_hooks
            found.append((where, lambda m, a, number=number: rest(a, number)))
        elif site.kind == "output":
            where = model.get_submodule(site.path)._forward_hooks
            found.append((where, lambda m, a, o, number=number: rest(o, number)))
    return found


def with_hooks(hooks: Hooks, run: Callable[[], Any]) -> None:
    """A run with the hooks put into torch's own dictionaries: torch's handles would cost more than
    the hooks.
    """
    for number, (where, hook) in enumerate(hooks):
        where[-1 - number] = hook
    try:
        run()
    finally:
        for number, (where, _) in enumerate(hooks):
            del where[-1 - number]


def everything(make: Callable[..., Any], shape: tuple[int, int], device: str) -> Jobs:
    """Caches of everything, and the floor under them."""
    hf, eager = make().to(device), make("eager").to(device)
    eager.load_state_dict(hf.state_dict())
    bridge, tokens = TransformerBridge(hf), tokens_for(hf, shape)
    kept: list[Any] = []
    hooks = places(hf, bridge, kept)

    def floor() -> list[Any]:
        with_hooks(hooks, lambda: hf(tokens))
        found = list(kept)
        kept.clear()
        return found

    jobs: Jobs = {
        "`hf(tokens)`": lambda: hf(tokens),
        "floor: plain torch hooks at the same places, found beforehand": floor,
        "eager attention with `output_attentions`": lambda: eager(tokens, output_attentions=True),
        "`run_with_cache`, everything": lambda: bridge.run_with_cache(tokens),
        "`run_with_cache`, everything, `pos_slice=-1`": lambda: bridge.run_with_cache(
            tokens, pos_slice=-1
        ),
    }
    if peer := _transformer_lens(hf):
        jobs["TransformerLens: cache, everything"] = lambda: peer.run_with_cache(tokens)
    return jobs


def backward(make: Callable[..., Any], shape: tuple[int, int], device: str) -> Jobs:
    """Gradients of everything, against plain hooks that keep them."""
    hf = make().to(device)
    bridge, tokens = TransformerBridge(hf), tokens_for(hf, shape)
    kept: list[Any] = []
    hooks = places(hf, bridge, kept)
    names = [name for name, hook in bridge.hook_dict.items() if hook.point.group == "standard"]
    names = [name for name in names if not name.endswith(("hook_attn_scores", "hook_pattern"))]

    def plain() -> None:
        hf(tokens, labels=tokens).loss.backward()
        hf.zero_grad()

    def floor() -> Any:
        loss: list[torch.Tensor] = []
        with_hooks(hooks, lambda: loss.append(hf(tokens, labels=tokens).loss))
        found = [x[0] if type(x) is tuple and x else x for x in kept]
        kept.clear()
        wanted = [x for x in found if isinstance(x, torch.Tensor) and x.requires_grad]
        return found, torch.autograd.grad(
            loss[0], wanted, allow_unused=True
        )  # none of parameters, as ours

    noded: list[Any] = []
    hooks_with_nodes = nodes(hf, bridge, names, noded)

    def null() -> Any:
        loss: list[torch.Tensor] = []
        with_hooks(hooks_with_nodes, lambda: loss.append(hf(tokens, labels=tokens).loss))
        found = list(noded)
        noded.clear()
        return found, torch.autograd.grad(loss[0], [edge for edge, _ in found], allow_unused=True)

    def ours(chosen: list[str] | None) -> Any:
        return bridge.run_with_cache(tokens, names_filter=chosen, return_type="loss", incl_bwd=True)

    return {
        "floor: plain hooks that keep tensors and gradients": floor,
        "null: the same, with a node of the graph for each hook point": null,
        "forward and backward": plain,
        "`incl_bwd`, the same places": lambda: ours(names),
        "`incl_bwd`, everything, with scores and patterns": lambda: ours(None),
    }


def traces(make: Callable[..., Any], shape: tuple[int, int], device: str) -> Jobs:
    """Traces, and nnsight's where it is installed."""
    hf = make().to(device)
    bridge, tokens = TransformerBridge(hf), tokens_for(hf, shape)
    blocks = [hf.get_submodule(path) for path in bridge.block_paths]
    names, middle = [f"blocks.{i}.hook_resid_post" for i in range(len(blocks))], len(blocks) // 2

    def torch_hook() -> list[Any]:
        seen: list[Any] = []
        handle = blocks[middle].register_forward_hook(
            lambda module, args, output: seen.append(output)
        )
        hf(tokens)
        handle.remove()
        return seen

    def in_turns() -> list[Any]:
        main = getcurrent()

        def show(module: Any, args: Any, output: Any) -> None:
            given = output.clone() if isinstance(output, torch.Tensor) else output[0].clone()
            main.switch(given)
            torch.equal(given, output if isinstance(output, torch.Tensor) else output[0])

        work = greenlet(
            lambda: with_hooks(
                [(block._forward_hooks, show) for block in blocks], lambda: hf(tokens)
            )
        )
        seen = [work.switch() for _ in blocks]
        work.switch()
        return seen

    def asked(some: list[str]) -> list[Any]:
        with bridge.trace(tokens) as run:
            return [run[name] for name in some]

    def captured() -> Any:
        with bridge.trace(tokens, capture=names) as run:
            pass
        return run

    jobs: Jobs = {
        "`hf(tokens)`": lambda: hf(tokens),
        "one torch hook": torch_hook,
        "`run_with_hooks`, one point": lambda: bridge.run_with_hooks(
            tokens, fwd_hooks=[(names[middle], _same)]
        ),
        "a trace that asks for nothing": lambda: asked([]),
        "a trace, one point": lambda: asked(names[middle : middle + 1]),
        "null: in each layer a copy, a switch to another greenlet and back, and a comparison": (
            in_turns
        ),
        "a trace, every layer": lambda: asked(names),
        "a trace, every layer by `capture`": captured,
    }
    if importlib.util.find_spec("nnsight"):
        from nnsight import NNsight  # type: ignore[import-not-found]

        peer = NNsight(hf)
        layers = [_part(peer, path.split(".")) for path in bridge.block_paths]

        def peer_one() -> Any:
            with peer.trace(tokens):
                found = layers[middle].output.save()
            return found

        def peer_every() -> Any:
            with peer.trace(tokens):
                found = list().save()  # noqa: C408
                for layer in layers:
                    found.append(layer.output)
            return found

        jobs |= {"nnsight: one layer": peer_one, "nnsight: every layer": peer_every}
    return jobs


def _part(module: Any, path: list[str]) -> Any:
    """A module of a model that another library wraps."""
    for part in path:
        module = module[int(part)] if part.isdigit() else getattr(module, part)
    return module


def generation(make: Callable[..., Any], shape: tuple[int, int], device: str) -> Jobs:
    """16 greedy tokens."""
    hf = make().to(device)
    hf.generation_config.eos_token_id, hf.generation_config.pad_token_id = None, 0
    bridge, tokens = TransformerBridge(hf), tokens_for(hf, (1, 16))
    name, n = f"blocks.{hf.config.num_hidden_layers // 2}.hook_resid_post", 16
    ours: dict[str, Any] = {"max_new_tokens": n, "do_sample": False, "verbose": False}

    def hooked() -> Any:
        with bridge.hooks(fwd_hooks=[(name, _same)]):
            return bridge.generate(tokens, **ours)

    def traced() -> Any:
        with bridge.trace_generate(tokens, max_new_tokens=n, do_sample=False) as run:
            pass
        return run

    plain: Callable[[], Any] = lambda: hf.generate(
        tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=n, do_sample=False
    )
    assert torch.equal(plain(), bridge.generate(tokens, **ours))
    return {
        "`hf.generate`": plain,
        "`generate`": lambda: bridge.generate(tokens, **ours),
        "`generate`, one residual hook": hooked,
        "`trace_generate` that asks for nothing": traced,
        "`generate`, `return_cache`, everything": lambda: bridge.generate(
            tokens, return_cache=True, **ours
        ),
    }


def patterns(make: Callable[..., Any], padded: bool, device: str) -> Jobs:
    """Patterns of a long prompt, in two layers."""
    hf = make().to(device)
    bridge, tokens = TransformerBridge(hf), tokens_for(hf, (1, 2048))
    given: dict[str, Any] = {}
    if padded:
        given["attention_mask"] = (torch.arange(2048, device=hf.device) >= 100).long()[None]
    names = [name for name in bridge.hook_dict if name.endswith("hook_pattern")]

    def cached(chosen: list[str] | None, **how: Any) -> Any:
        return bridge.run_with_cache(tokens, names_filter=chosen, **how, **given)

    def write(x: torch.Tensor, hook: Any) -> None:
        x.mul_(0.5)

    def looked(look: Callable[..., None]) -> Any:
        return bridge.run_with_hooks(tokens, fwd_hooks=[(name, look) for name in names], **given)

    return {
        "`hf(tokens)`": lambda: hf(tokens, **given),
        "cache of all patterns, which nobody reads": lambda: cached(names),
        "cache of all patterns, each read": lambda: [
            float(x[0, 0, 0, 0]) for x in cached(names)[1].values()
        ],
        "cache of all patterns, `pos_slice=-1`": lambda: cached(names, pos_slice=-1),
        "cache of everything, `pos_slice=-1`": lambda: cached(None, pos_slice=-1),
        "a hook on each pattern that only looks": lambda: looked(lambda x, hook: None),
        "a hook on each pattern that writes": lambda: looked(write),
    }


def head_results(device: str) -> Jobs:
    """What heads write, stacked."""
    hf = gpt2(vocab_size=1000).to(device)
    bridge = TransformerBridge(hf)
    _, cache = bridge.run_with_cache(tokens_for(hf, (1, 128)))
    weight = torch.stack([bridge.blocks[i].attn.W_O for i in range(12)])
    z = [cache["z", i] for i in range(12)]
    return {
        "one einsum": (
            lambda: torch.einsum("lbphd,lhdm->lhbpm", torch.stack(z), weight).flatten(0, 1)
        ),
        "`stack_head_results`": lambda: cache.stack_head_results(),
    }


def head_attribution(device: str) -> Jobs:
    """What each head adds to a logit at the last position."""
    hf = gpt2(vocab_size=1000).to(device)
    bridge = TransformerBridge(hf)
    _, cache = bridge.run_with_cache(tokens_for(hf, (1, 128)))
    weight = torch.stack([bridge.blocks[i].attn.W_O for i in range(12)])
    z, scale = [cache["z", i] for i in range(12)], cache["ln_final.hook_scale"][:, -1]
    direction = hf.transformer.wte.weight[5] * hf.transformer.ln_f.weight

    def by_hand() -> torch.Tensor:
        last = torch.stack([x[:, -1] for x in z])
        written = torch.einsum("lbhd,lhdm->lhbm", last, weight).flatten(0, 1)
        return ((written - written.mean(-1, keepdim=True)) / scale).to(direction.dtype) @ direction

    def by_layer() -> torch.Tensor:
        made = z[0].new_empty(12, 12, 1, 768)
        for x, block, out in zip(z, hf.transformer.h, made, strict=True):
            torch.bmm(x[:, -1].transpose(0, 1), block.attn.c_proj.weight.view(12, 64, 768), out=out)
        written = made.flatten(0, 1)
        return ((written - written.mean(-1, keepdim=True)) / scale).to(direction.dtype) @ direction

    def ours() -> torch.Tensor:
        return cache.logit_attrs(cache.stack_head_results(pos_slice=-1), 5, pos_slice=-1)

    atol, rtol = (1e-5, 1e-4) if hf.dtype == torch.float32 else (5e-3, 0.05)
    torch.testing.assert_close(ours(), by_hand(), atol=atol, rtol=rtol, check_dtype=False)
    torch.testing.assert_close(by_layer(), by_hand(), atol=atol, rtol=rtol, check_dtype=False)
    null = "null: by hand, with the model's own weights in place of a stack of them that is there"
    return {
        "by hand": by_hand,
        null: by_layer,
        "`logit_attrs(stack_head_results(pos_slice=-1))`": ours,
    }


def many_hooks(device: str) -> Jobs:
    """Many functions at one hook point."""
    hf = tiny_llama().to(device)
    bridge, tokens = TransformerBridge(hf), tokens_for(hf, (1, 16))
    some: list[Any] = [("blocks.3.hook_resid_pre", lambda x, hook: None)]
    return {
        "a run with 500 hooks": lambda: bridge.run_with_hooks(tokens, fwd_hooks=some * 500),
        "a run with 1000 hooks": lambda: bridge.run_with_hooks(tokens, fwd_hooks=some * 1000),
    }


def verification(device: str) -> Jobs:
    """The proof of everything that is declared of GPT-2 small."""
    hf = gpt2().to(device)
    bridge, tokens = TransformerBridge(hf), tokens_for(hf, (4, 16))
    return {
        "20 plain runs, 4x16": lambda: [hf(tokens) for _ in range(20)],
        "`adapters.verify`": lambda: verify(bridge),
    }


def _columns(make_jobs: Callable[..., Jobs], large: bool = False, *only: str) -> Iterator[Column]:
    for title, (make, shape) in MODELS.items():
        if not only or title in only:
            yield Column(
                title, lambda device, make=make, shape=shape: make_jobs(make, shape, device)
            )
    for title, (make, shape) in LARGE.items() if large else ():
        yield Column(
            title, lambda device, make=make, shape=shape: make_jobs(make, shape, device), large=True
        )


def _with_grad(columns: Iterator[Column]) -> list[Column]:
    return [replace(column, title=f"{column.title}, gradients", grad=True) for column in columns]


_TINY = ("tiny Llama 1x16", "tiny GPT-2 1x16")
_TWO_GPT2: Callable[..., Any] = lambda: gpt2(n_layer=2, n_positions=2048, vocab_size=1000)
_TWO_EAGER: Callable[..., Any] = lambda: gpt2("eager", n_layer=2, n_positions=2048, vocab_size=1000)
_TWO_LLAMA: Callable[..., Any] = lambda: llama(num_hidden_layers=2, vocab_size=1000)

TABLES: tuple[Table, ...] = (
    Table("runs", tuple(_columns(runs, True))),
    Table("everything", tuple(_columns(everything, True))),
    Table(
        "backward", tuple(_with_grad(_columns(backward, False, "tiny Llama 1x16", "GPT-2 1x128")))
    ),
    Table(
        "traces",
        (
            *_columns(traces, False, *_TINY, "GPT-2 1x128"),
            *_with_grad(_columns(traces, False, *_TINY)),
        ),
    ),
    Table("generation", tuple(_columns(generation, False, *_TINY, "Llama 1x128"))),
    Table(
        "patterns",
        (
            Column("GPT-2 1x2048", lambda device: patterns(_TWO_GPT2, False, device)),
            Column(
                "Llama, grouped, left-padded", lambda device: patterns(_TWO_LLAMA, True, device)
            ),
            Column("GPT-2, eager", lambda device: patterns(_TWO_EAGER, False, device)),
        ),
    ),
    Table("head_results", (Column("GPT-2 1x128", head_results),)),
    Table("head_attribution", (Column("GPT-2 1x128", head_attribution),)),
    Table("verification", (Column("GPT-2", verification),)),
    Table("many_hooks", (Column("tiny Llama 1x16", many_hooks),)),
)
