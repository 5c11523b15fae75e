"""The parts that an adapter is declared from, and the hook points they make."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn

from adapters.attention import Attention, Projection, attention_points
from adapters.norms import LAYER_NORM, NormKind, SharedNormInput, norm_points
from adapters.paths import base_path, core_path, has_module, join
from adapters.points import Group, Point, Site
from adapters.views import Branch, FlatBatch, HeadsFirst, OverBatch, Through, View, WriteThrough


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
        router: the module, relative to `path`, that chooses among the experts for each of the ``(batch pos)`` rows. It
            returns their scores, and the weights and indices of the chosen ones.
        experts: the module, relative to `path`, that holds the experts' weights (see `adapters.experts`).
        chosen_by: what the router compares the experts by: their ``probabilities``, a softmax over all; or their
            ``logits``, with a softmax over the chosen ones afterwards.
        shared: an expert that every token is sent to, on ``(batch pos)`` rows; its path is relative to `path`.
        shared_gate: the linear layer, relative to `path`, whose sigmoid the shared expert's output is multiplied with.
        out_key: which element of the module's output is added to the residual stream (None: the output itself).
    """

    path: str
    router: str
    experts: str = "experts"
    chosen_by: Literal["probabilities", "logits"] = "probabilities"
    shared: MLP | None = None
    shared_gate: str | None = None
    out_key: int | None = None


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
        layers: the blocks, by index, that look different: in their MLP alone.
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
    layers: Mapping[int, Block] = field(default_factory=dict)
    stacks: Mapping[str, Stack] = field(default_factory=dict)
    no_layer_runs: str = ""
    points: Callable[[Architecture, nn.Module, Any], list[Point]] | None = None
    weights: Callable[[Any], None] | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)

    def block_at(self, index: int) -> Block:
        """What the block of a layer looks like."""
        return self.layers.get(index, self.block)


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
        points.extend(_mixture_points(mlp, module, f"{prefix}.mlp", index, cfg, stack, rows))
        out = Site(module, "output", mlp.out_key)
    else:
        points.extend(_feed_forward_points(mlp, module, f"{prefix}.mlp", index, stack, wide, rows))
        out = Site(join(path, mlp.out), "output", mlp.out_key) if mlp.out else Site(module, "output", mlp.out_key)
    aliases = (f"{prefix}.mlp.hook_out", f"{prefix}.mlp.out.hook_out")
    if block.ln2_post:
        add_rows("mlp.hook_out", out, group="extra", aliases=aliases[1:])
    else:
        add_rows("hook_mlp_out", out, aliases=aliases)
    return points


def _feed_forward_points(
    mlp: MLP, module: str, name: str, index: int, stack: str, wide: str, rows: tuple[Site, ...]
) -> list[Point]:
    """The hook points inside one feed-forward module; `rows` is where the batch size of a flat one is seen."""
    points: list[Point] = []

    def add(suffix: str, site: Site, view: View | None = None, **more: Any) -> None:
        seen = Through(view or View(), FlatBatch()) if mlp.flat else view or View()
        sources = rows if mlp.flat else ()
        points.append(Point(f"{name}.{suffix}", site, seen, wide, index, stack=stack, sources=sources, **more))

    up_site = Site(join(module, mlp.up.path), "output")
    if mlp.gate:
        add("hook_pre", Site(join(module, mlp.gate.path), "output"), mlp.gate.part, aliases=(f"{name}.gate.hook_out",))
        add("hook_pre_linear", up_site, mlp.up.part, aliases=(f"{name}.in.hook_out",))
    else:
        add("hook_pre", up_site, mlp.up.part, aliases=(f"{name}.in.hook_out",))
    if mlp.ln:
        ln = join(module, mlp.ln)
        add("hook_mid", Site(ln, "input"))
        points.extend(norm_points(LAYER_NORM, Site(ln, "output"), f"{name}.ln", index, stack, axes=wide))
    add("hook_post", Site(join(module, mlp.down), "input"), aliases=(f"{name}.out.hook_in",))
    return points


def _mixture_points(
    mlp: MoE, module: str, name: str, index: int, cfg: Any, stack: str, rows: tuple[Site, ...]
) -> list[Point]:
    """The hook points inside a mixture of experts."""
    points: list[Point] = []

    def add(suffix: str, site: Site, axes: str, group: Group = "standard", aliases: tuple[str, ...] = ()) -> None:
        more: dict[str, Any] = {"group": group, "aliases": aliases, "sources": rows, "stack": stack}
        points.append(Point(f"{name}.{suffix}", site, FlatBatch(), axes, index, **more))

    router = join(module, mlp.router)
    everyone, chosen = "batch pos n_experts", "batch pos experts_per_token"
    # As in HookedTransformer, an expert's weight is its probability before the best are chosen; where these are chosen
    # before that is computed, it is what the expert's output is multiplied with: zero for those that are not chosen.
    if mlp.chosen_by == "probabilities":
        logits, weights = Site(router, "forward", "scores"), Site(router, "forward", "pattern")
    else:
        logits, weights = Site(router, "router", "logits"), Site(router, "router", "weights")
    add("hook_router_logits", logits, everyone, "extra", (f"{name}.gate.hook_out",))
    add("hook_expert_weights", weights, everyone)
    add("hook_topk_weights", Site(router, "output", 1), chosen, "extra")
    add("hook_expert_indices", Site(router, "output", 2), chosen)
    experts = join(module, mlp.experts)
    for e in range(cfg.num_experts):
        for part in ("gate", "pre", "post"):
            # Its rows are of no batch: in caches only when named.
            site, axes = Site(experts, "experts", f"{e}.{part}"), "row d_expert"
            points.append(Point(f"{name}.experts.{e}.hook_{part}", site, View(), axes, index, "extra", stack=stack))
    if mlp.shared:
        shared, at = join(module, mlp.shared.path), f"{name}.shared_expert"
        points.extend(_feed_forward_points(mlp.shared, shared, at, index, stack, "batch pos d_shared_expert", rows))
        add("shared_expert.hook_out", Site(shared, "output"), "batch pos d_model", "extra")
    if mlp.shared_gate:
        add("shared_expert_gate.hook_out", Site(join(module, mlp.shared_gate), "output"), "batch pos 1", "extra")
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
        block = architecture.block_at(index)
        points.extend(block_points(block, model, path, index, cfg.n_layers, cfg, "blocks"))
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
