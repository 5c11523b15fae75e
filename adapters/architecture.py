"""The parts that an adapter is declared from, and the hook points they make."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from adapters.attention import Attention, Projection, attention_points
from adapters.norms import LAYER_NORM, NormKind, NormNormalized, NormScale
from adapters.paths import base_path, core_path, has_module, join
from adapters.points import Group, Point, Site
from adapters.views import Branch, Call, Derived, FlatBatch, HeadsFirst, OverBatch, Through, View, WriteThrough


@dataclass(frozen=True)
class MLP:
    """A feed-forward module.

    Attributes:
        path: the module, relative to the block ("" where its layers stand in the block itself).
        up: the projection before the activation function (of a gated MLP: the linear one beside the gate).
        down: the projection after it, relative to `path`.
        gate: for a gated MLP, the projection that goes through the activation function.
        out, out_key: where the result stands that is added to the residual stream, relative to the block; by default
            the output of the module at `path`.
        ln: a layer norm between the activation function and `down` (SoLU), relative to `path`.
        flat: the norm before it, `up` and `down` work on ``(batch pos)`` rows.
    """

    path: str
    up: Projection
    down: str
    gate: Projection | None = None
    out: str | None = None
    out_key: int | None = None
    ln: str | None = None
    flat: bool = False


@dataclass(frozen=True)
class MoE:
    """A mixture of experts.

    Attributes:
        path: the module, relative to the block.
        router: the module, relative to `path`, that chooses among the experts: in its forward it computes one softmax,
            over all experts, for each of the ``(batch pos)`` rows.
        experts: the module, relative to `path`, that holds the experts' weights, ``gate_up_proj`` and ``down_proj``,
            one expert after the other along the first axis.
        weights_key, indices_key: which elements of its output are the chosen experts' weights and indices.
    """

    path: str
    router: str
    experts: str = "experts"
    weights_key: int = 1
    indices_key: int = 2


@dataclass(frozen=True)
class Block:
    """One layer.

    Attributes:
        attn, mlp: its parts (None where it has none).
        ln1, ln2: the norms before attention and MLP, relative to the block.
        ln1_post, ln2_post: norms between a part and the residual stream.
        norm: what the norms compute.
        cross_attn, ln3: in a decoder that reads an encoder's output: the attention to it, between attention and MLP,
            whose norm is then `ln2`, and the norm before the MLP.
        qk_norm: what the norms of queries and keys compute.
        qk_shift: the module whose output is added to what queries and keys read, after the norm (Shortformer's position
            embeddings), relative to the base model.
        parallel: attention and MLP read the same residual stream (there is no `hook_resid_mid`).
        shared_norm: attention and MLP share `ln1`; its hook points are repeated as `ln2`, each for its own branch.
        output_key: which element of the block's output is the residual stream (None: the output itself).
        output_length: how many elements a tuple output has (for skipping a block).
    """

    attn: Attention | None
    mlp: MLP | MoE | None
    ln1: str | None = None
    ln2: str | None = None
    ln1_post: str | None = None
    ln2_post: str | None = None
    cross_attn: Attention | None = None
    ln3: str | None = None
    norm: NormKind = LAYER_NORM
    qk_norm: NormKind | None = None
    qk_shift: str | None = None
    parallel: bool = False
    shared_norm: bool = False
    output_key: int | None = None
    output_length: int = 1


@dataclass(frozen=True)
class Stack:
    """One of the two lists of blocks of an encoder-decoder model (see `adapters.encoder_decoder`).

    Attributes:
        blocks: the path of the list of blocks.
        block: what a block looks like.
        embed: the embedding of its tokens.
        final_norm: the norm after the last block.
    """

    blocks: str
    block: Block
    embed: str
    final_norm: str


@dataclass(frozen=True)
class Architecture:
    """A model family, as its adapter declares it for one configuration.

    Paths are relative to the base model (the one under ``base_model_prefix``), except `unembed`, which is relative to
    the model itself.

    Attributes:
        blocks: the path of the list of blocks.
        block: what a block looks like.
        embed, pos_embed: the embeddings.
        embed_norm: a norm that follows the token embedding; `hook_embed` is its output.
        final_norm: the norm after the last block.
        final_kind: what it computes, where that differs from the blocks' norms.
        unembed: the output layer.
        stacks: of an encoder-decoder model, ``encoder`` and ``decoder``; `blocks` and `block` are then the encoder's.
        no_layer_runs: why a run cannot start or stop at a layer; "" where it can.
        points: makes the hook points, where `architecture_points` does not.
        weights: names the weights, where `adapters.weights.decoder_weights` does not.
        facts: fields of `ModelConfig` that the configuration does not say by itself.
    """

    blocks: str
    block: Block
    embed: str
    unembed: str
    final_norm: str | None
    pos_embed: str | None = None
    embed_norm: str | None = None
    final_kind: NormKind | None = None
    stacks: Mapping[str, Stack] = field(default_factory=dict)
    no_layer_runs: str = ""
    points: Callable[[Architecture, nn.Module, Any], list[Point]] | None = None
    weights: Callable[[Any], None] | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)


class SharedNormInput(Derived):
    """`hook_mlp_in` where attention and MLP share a norm: the residual stream as the MLP alone reads it."""

    def get(self, x: Tensor, call: Call) -> Tensor:
        entered = call.sources[0][1]
        return entered.view_as(entered) if entered.requires_grad else entered

    def put(self, x: Tensor, new: Tensor, call: Call) -> Tensor:
        return call.sources[0][0].forward(new)


def norm_points(
    kind: NormKind,
    site: Site,
    name: str,
    depth: int,
    stack: str,
    *,
    shared: Site | None = None,
    seen: View | None = None,
    sources: tuple[Site, ...] = (),
    axes: str = "batch pos d_model",
    branches: tuple[str, ...] = (),
) -> list[Point]:
    """`hook_scale` and `hook_normalized` of a norm.

    Args:
        kind, site, name, depth, stack: what the norm computes, its output, and where it belongs.
        shared: for a norm that attention and MLP share, its input; `site` is then where one of them reads it.
        seen: a view of the norm's tensors, and `sources`, the sites which that needs.
        axes: of `hook_normalized`.
        branches: see `Point`.
    """
    if kind.identity:
        return []
    beside = shared is not None
    scale, normalized = NormScale(kind, beside), NormNormalized(kind, beside)
    views: list[View] = [Through(view, seen) if seen else view for view in (scale, normalized)]
    more: dict[str, Any] = {"sources": (shared, *sources) if shared else sources, "stack": stack, "branches": branches}
    return [
        Point(f"{name}.hook_scale", site, views[0], axes.rsplit(" ", 1)[0] + " 1", depth, **more),
        Point(f"{name}.hook_normalized", site, views[1], axes, depth, **more),
    ]


def block_points(block: Block, model: nn.Module, path: str, index: int, n: int, cfg: Any, stack: str) -> list[Point]:
    """The hook points of block `index` of `n`."""
    prefix = f"{stack}.{index}"
    axes = "batch pos d_model"
    points: list[Point] = []

    def add(name: str, site: Site, view: View | None = None, axes: str = axes, **more: Any) -> None:
        points.append(Point(name, site, view or View(), axes, index, stack=stack, **more))

    def add_norm(name: str, module: str, kind: NormKind, branches: tuple[str, ...] = ()) -> None:
        site = Site(module, "output")
        points.extend(norm_points(kind, site, f"{prefix}.{name}", index, stack, branches=branches))
        add(f"{prefix}.{name}.hook_out", site, group="extra", branches=branches)

    add(f"{prefix}.hook_resid_pre", Site(path, "input"), aliases=(f"{prefix}.hook_in",))
    ln1 = join(path, block.ln1) if block.ln1 else None
    ln1_site = Site(ln1, "input") if ln1 else None
    shift = Site(join(base_path(model), block.qk_shift), "output") if block.qk_shift else None
    readers: tuple[str, ...] = ()
    if block.attn and not shift:  # with a shift, the norm's output alone does not say what the projections read
        readers = tuple(f"{prefix}.{block.attn.name}.hook_{letter}" for letter in "qkv")
    if ln1 and block.shared_norm:
        assert block.attn and block.mlp and ln1_site
        attn_in = Site(join(path, block.attn.path), "input")
        name = f"{prefix}.ln1"
        points.extend(norm_points(block.norm, attn_in, name, index, stack, shared=ln1_site, branches=readers))
    elif ln1:
        add(f"{prefix}.ln1.hook_in", Site(ln1, "input"), Branch(), group="extra")
        add_norm("ln1", ln1, block.norm, readers)
    if block.attn:
        out_name = None if block.ln1_post else "hook_attn_out"
        points.extend(
            attention_points(
                block.attn, model, path, prefix, index, cfg.n_heads, cfg.n_kv_heads, ln1_site, stack, out_name, shift
            )
        )
        if block.qk_norm:
            for letter, norm_path in (("q", block.attn.q_norm), ("k", block.attn.k_norm)):
                if norm_path:
                    norm_site = Site(join(path, block.attn.path, norm_path), "output")
                    name = f"{prefix}.attn.{letter}_norm"
                    points.extend(
                        norm_points(
                            block.qk_norm,
                            norm_site,
                            name,
                            index,
                            stack,
                            seen=HeadsFirst() if block.attn.norm_heads_first else None,
                            axes=f"batch pos {'n_heads' if letter == 'q' else 'n_key_value_heads'} d_head",
                        )
                    )
        if block.ln1_post:
            module = join(path, block.ln1_post)
            add_norm("ln1_post", module, block.norm)
            add(f"{prefix}.hook_attn_out", Site(module, "output"))
    if block.mlp:
        points.extend(_mlp_points(block, path, prefix, index, cfg, stack, ln1_site))
        if block.ln2_post:
            module = join(path, block.ln2_post)
            add_norm("ln2_post", module, block.norm)
            add(f"{prefix}.hook_mlp_out", Site(module, "output"))
    last = (f"{prefix}.hook_out",) + (("ln_final.hook_in",) if index == n - 1 and stack == "blocks" else ())
    add(f"{prefix}.hook_resid_post", Site(path, "output", block.output_key), aliases=last)
    return points


def _mlp_points(
    block: Block, path: str, prefix: str, index: int, cfg: Any, stack: str, ln1_site: Site | None
) -> list[Point]:
    """The hook points from the residual stream before the MLP to its output."""
    mlp = block.mlp
    assert mlp is not None
    axes, wide = "batch pos d_model", "batch pos d_mlp"
    module = join(path, mlp.path)
    points: list[Point] = []

    def add(name: str, site: Site, view: View | None = None, axes: str = axes, **more: Any) -> None:
        points.append(Point(f"{prefix}.{name}", site, view or View(), axes, index, stack=stack, **more))

    flat = isinstance(mlp, MLP) and mlp.flat
    rows: tuple[Site, ...] = (Site(path, "input"),) if flat or isinstance(mlp, MoE) else ()

    def add_rows(name: str, site: Site, view: View | None = None, axes: str = axes, **more: Any) -> None:
        """Adds a point whose site holds ``(batch pos)`` rows in a flat MLP."""
        seen = Through(view or View(), FlatBatch()) if flat else view
        add(name, site, seen, axes, sources=rows if flat else (), **more)

    mlp_in: dict[str, Any] = {
        "group": "heavy",
        "flag": "use_hook_mlp_in",
        "aliases": (f"{prefix}.ln2.hook_in", f"{prefix}.mlp.hook_mlp_in"),
    }
    if block.shared_norm:
        assert ln1_site is not None
        entered = Site(module, "input")
        add("hook_mlp_in", entered, SharedNormInput(), sources=(ln1_site,), **mlp_in)
        points.extend(norm_points(block.norm, entered, f"{prefix}.ln2", index, stack, shared=ln1_site))
    elif block.ln2:
        norm = join(path, block.ln2)
        if not block.parallel:
            add_rows("hook_resid_mid", Site(norm, "input"), WriteThrough())
        add_rows("hook_mlp_in", Site(norm, "input"), Branch(), **mlp_in)
        seen: dict[str, Any] = {"seen": FlatBatch(), "sources": rows} if flat else {}
        points.extend(norm_points(block.norm, Site(norm, "output"), f"{prefix}.ln2", index, stack, **seen))
        add_rows("ln2.hook_out", Site(norm, "output"), group="extra")

    if isinstance(mlp, MoE):
        router = join(module, mlp.router)
        routed: dict[str, Any] = {"view": FlatBatch(), "sources": rows}
        logits: dict[str, Any] = {"group": "extra", "aliases": (f"{prefix}.mlp.gate.hook_out",)}
        add("mlp.hook_router_logits", Site(router, "forward", "scores"), axes="batch pos n_experts", **logits, **routed)
        # As in HookedTransformer, these are the probabilities of all experts, before the best are chosen.
        add("mlp.hook_expert_weights", Site(router, "forward", "pattern"), axes="batch pos n_experts", **routed)
        chosen = "batch pos experts_per_token"
        add("mlp.hook_topk_weights", Site(router, "output", mlp.weights_key), axes=chosen, group="extra", **routed)
        add("mlp.hook_expert_indices", Site(router, "output", mlp.indices_key), axes=chosen, **routed)
        experts = join(module, mlp.experts)
        for e in range(cfg.num_experts):
            for part in ("gate", "pre", "post"):
                site = Site(experts, "experts", f"{e}.{part}")
                # Its rows are of no batch: in caches only when named.
                add(f"mlp.experts.{e}.hook_{part}", site, axes="row d_mlp", group="extra")
        out = Site(module, "output")
    else:
        up_site = Site(join(module, mlp.up.path), "output")
        if mlp.gate:
            gate_site = Site(join(module, mlp.gate.path), "output")
            add_rows("mlp.hook_pre", gate_site, mlp.gate.part, wide, aliases=(f"{prefix}.mlp.gate.hook_out",))
            add_rows("mlp.hook_pre_linear", up_site, mlp.up.part, wide, aliases=(f"{prefix}.mlp.in.hook_out",))
        else:
            add_rows("mlp.hook_pre", up_site, mlp.up.part, wide, aliases=(f"{prefix}.mlp.in.hook_out",))
        if mlp.ln:
            ln = join(module, mlp.ln)
            add("mlp.hook_mid", Site(ln, "input"), axes=wide)
            points.extend(norm_points(LAYER_NORM, Site(ln, "output"), f"{prefix}.mlp.ln", index, stack, axes=wide))
        down = Site(join(module, mlp.down), "input")
        add_rows("mlp.hook_post", down, axes=wide, aliases=(f"{prefix}.mlp.out.hook_in",))
        out = Site(join(path, mlp.out), "output", mlp.out_key) if mlp.out else Site(module, "output", mlp.out_key)
    aliases = (f"{prefix}.mlp.hook_out", f"{prefix}.mlp.out.hook_out")
    if block.ln2_post:
        add_rows("mlp.hook_out", out, group="extra", aliases=aliases[1:])
    else:
        add_rows("hook_mlp_out", out, aliases=aliases)
    return points


def architecture_points(architecture: Architecture, model: nn.Module, cfg: Any) -> list[Point]:
    """All hook points of a decoder- or encoder-only model, in the order of the computation."""
    base = base_path(model)
    axes = "batch pos d_model"
    kind = architecture.block.norm
    embed = Site(join(base, architecture.embed), "output")
    points: list[Point] = [
        Point("embed.hook_in", Site(embed.path, "input"), View(), "batch pos", -1, group="extra", stack="")
    ]
    if architecture.embed_norm:
        embed = Site(join(base, architecture.embed_norm), "output")
        points.extend(norm_points(kind, embed, "embed.ln", -1, ""))
    points.append(Point("hook_embed", embed, View(), axes, -1, aliases=("embed.hook_out",), stack=""))
    if architecture.pos_embed:
        site = Site(join(base, architecture.pos_embed), "output")
        names = {"aliases": ("pos_embed.hook_out",), "sources": (embed,), "stack": ""}
        points.append(Point("hook_pos_embed", site, OverBatch(), axes, -1, **names))  # type: ignore[arg-type]
    for index in range(cfg.n_layers):
        path = join(base, architecture.blocks, str(index))
        points.extend(block_points(architecture.block, model, path, index, cfg.n_layers, cfg, "blocks"))
    after = cfg.n_layers
    if architecture.final_norm:
        site = Site(join(base, architecture.final_norm), "output")
        points.extend(norm_points(architecture.final_kind or kind, site, "ln_final", after, ""))
        points.append(Point("ln_final.hook_out", site, View(), axes, after, group="extra", stack=""))
    core = core_path(model)
    if has_module(model.get_submodule(core), architecture.unembed):
        group: Group = "extra"
        unembed = join(core, architecture.unembed)
        into, out = Site(unembed, "input"), Site(unembed, "output")
        points.append(Point("unembed.hook_in", into, View(), axes, after, group=group, stack=""))
        logits = "batch pos d_vocab_out"
        names = {"aliases": ("hook_unembed",), "group": group, "stack": ""}
        points.append(Point("unembed.hook_out", out, View(), logits, after, **names))  # type: ignore[arg-type]
    return points
