"""Models with an encoder and a decoder that attends to its output: ``encoder.{i}`` and ``decoder.{i}``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from adapters.architecture import MLP, Architecture, Block
from adapters.attention import Attention, attention_points
from adapters.norms import norm_points
from adapters.paths import base_path, core_path, has_module, join
from adapters.points import Point, Site
from adapters.views import Branch, View, WriteThrough
from adapters.weights import Weights


def encoder_decoder_points(architecture: Architecture, model: nn.Module, cfg: Any) -> list[Point]:
    """All hook points, as HookedTransformer's encoder-decoder names them.

    Args:
        architecture: the declaration, with its `stacks`; a model may lack the decoder.
        model: the Hugging Face model.
        cfg: the facts about it.
    """
    base, core = base_path(model), core_path(model)
    tokens = Site(join(base, architecture.embed), "output")
    points = [
        Point("embed.hook_in", Site(tokens.path, "input"), View(), "batch pos", -1, group="extra", stack=""),
        Point("hook_embed", tokens, View(), "batch pos d_model", -1, aliases=("embed.hook_out",), stack=""),
    ]
    for name, stack in architecture.stacks.items():
        path = join(base, stack.blocks)
        if not has_module(model, path):
            continue
        axes = f"batch {_pos(name)} d_model"
        if name == "decoder":
            site = Site(join(base, stack.embed), "output")
            points.append(Point("decoder_embed.hook_out", site, View(), axes, -1, group="extra", stack=""))
        n = len(model.get_submodule(path))  # type: ignore[arg-type]
        for index in range(n):
            points.extend(_renamed(_block_points(stack.block, model, join(path, str(index)), index, cfg, name)))
        norm = Site(join(base, stack.final_norm), "output")
        points.extend(norm_points(stack.block.norm, norm, f"{name}_final_ln", n, "", axes=axes))
        aliases = (f"{name}_ln_final.hook_out",)
        points.append(Point(f"{name}_final_ln.hook_out", norm, View(), axes, n, "extra", aliases, stack=""))
    if has_module(model, join(core, architecture.unembed)):
        into, out = (Site(join(core, architecture.unembed), kind) for kind in ("input", "output"))
        more: dict[str, Any] = {"group": "extra", "stack": ""}
        points.append(Point("unembed.hook_in", into, View(), "batch decoder_pos d_model", cfg.n_layers, **more))
        logits = "batch decoder_pos d_vocab_out"
        points.append(Point("unembed.hook_out", out, View(), logits, cfg.n_layers, aliases=("hook_unembed",), **more))
    return points


def encoder_decoder_weights(weights: Weights) -> None:
    """The weights, as HookedTransformer's encoder-decoder names them."""
    architecture = weights.architecture
    weights.getters["embed.W_E"] = weights.parameter(architecture.embed)
    for name, stack in architecture.stacks.items():
        if not weights.has(stack.blocks):
            continue
        for index in range(len(weights.module(stack.blocks))):  # type: ignore[arg-type]
            weights.add_block(f"{name}.{index}", f"{stack.blocks}.{index}", stack.block)
        assert stack.block.attn
        bias = f"{stack.blocks}.0.{stack.block.attn.path}.relative_attention_bias"
        if weights.has(bias):  # the first block's, which all others use
            weights.getters[f"{name}.0.attn.rel_pos_bias.weight"] = weights.parameter(bias)
        weights.add_norm(f"{name}_final_ln", stack.final_norm, stack.block.norm)
    weights.add_unembed(architecture.unembed)


def _pos(stack: str) -> str:
    return "decoder_pos" if stack == "decoder" else "pos"


def _renamed(points: list[Point]) -> list[Point]:
    """The points of a block, with TransformerLens 3's names for the lists of blocks as further aliases of each."""

    def other_names(point: Point) -> tuple[str, ...]:
        stack = point.stack
        names = tuple(name.replace(f"{stack}.", f"{stack}_blocks.", 1) for name in (point.name, *point.aliases))
        if stack == "encoder":
            return names
        renamed = (name.replace(".attn.", ".self_attn.").replace("resid_mid_cross", "resid_mid2") for name in names)
        return tuple(dict.fromkeys((*names, *renamed)))

    return [replace(point, aliases=(*point.aliases, *other_names(point))) for point in points]


def _block_points(block: Block, model: nn.Module, path: str, index: int, cfg: Any, stack: str) -> list[Point]:
    """The hook points of one block. The norm before the MLP is `ln2` in the encoder and `ln3` in the decoder."""
    assert block.attn and block.ln1 and block.ln2
    pos = _pos(stack)
    prefix, axes = f"{stack}.{index}", f"batch {pos} d_model"
    points: list[Point] = []

    def add(name: str, site: Site, view: View | None = None, axes: str = axes, **more: Any) -> None:
        points.append(Point(f"{prefix}.{name}", site, view or View(), axes, index, stack=stack, **more))

    def add_norm(name: str, module: str, **more: Any) -> None:
        site = Site(join(path, module), "output")
        points.extend(norm_points(block.norm, site, f"{prefix}.{name}", index, stack, axes=axes, **more))
        add(f"{name}.hook_out", site, group="extra", **more)

    def attend(part: Attention, norm: Site, out: str, key_pos: str, **more: Any) -> None:
        more |= {"pos": pos, "key_pos": key_pos, "out_name": out}
        args = (part, model, path, prefix, index, cfg.n_heads, cfg.n_kv_heads, norm, stack)
        points.extend(attention_points(*args, **more))

    add("hook_resid_pre", Site(path, "input"), aliases=(f"{prefix}.hook_in",))
    entry = Site(join(path, block.ln1), "input")
    add("ln1.hook_in", entry, Branch(), group="extra")
    add_norm("ln1", block.ln1, branches=tuple(f"{prefix}.attn.hook_{letter}" for letter in "qkv"))
    attend(block.attn, entry, "hook_attn_out", "decoder_key_pos" if stack == "decoder" else "key_pos")
    entry = Site(join(path, block.ln2), "input")
    add("hook_resid_mid", entry, WriteThrough())
    last, norm = "ln2", block.ln2
    if block.cross_attn:
        assert block.ln3
        reads: dict[str, Any] = {"group": "heavy", "flag": "use_attn_in", "aliases": (f"{prefix}.ln2.hook_in",)}
        add("hook_cross_attn_in", entry, Branch(), **reads)
        add_norm("ln2", block.ln2)
        attend(block.cross_attn, entry, "hook_cross_attn_out", "key_pos", per_head_inputs=False)
        entry = Site(join(path, block.ln3), "input")
        add("hook_resid_mid_cross", entry, WriteThrough())
        last, norm = "ln3", block.ln3
    # As in HookedTransformer, what the MLP reads here is also what its output is added to.
    reads = {"group": "heavy", "flag": "use_hook_mlp_in", "aliases": (f"{prefix}.{last}.hook_in",)}
    add("hook_mlp_in", entry, WriteThrough(), **reads)
    add_norm(last, norm)
    _add_mlp(add, block, path, prefix, pos)
    add("hook_resid_post", Site(path, "output", block.output_key), aliases=(f"{prefix}.hook_out",))
    return points


def _add_mlp(add: Any, block: Block, path: str, prefix: str, pos: str) -> None:
    mlp = block.mlp
    assert isinstance(mlp, MLP) and mlp.out
    module, wide = join(path, mlp.path), f"batch {pos} d_mlp"
    up = Site(join(module, mlp.up.path), "output")
    if mlp.gate:
        gate = Site(join(module, mlp.gate.path), "output")
        add("mlp.hook_pre", gate, axes=wide, aliases=(f"{prefix}.mlp.gate.hook_out",))
        add("mlp.hook_pre_linear", up, axes=wide, aliases=(f"{prefix}.mlp.in.hook_out",))
    else:
        add("mlp.hook_pre", up, axes=wide, aliases=(f"{prefix}.mlp.in.hook_out",))
    post = (f"{prefix}.mlp.out.hook_in",)
    add("mlp.hook_post", Site(join(module, mlp.down), "input"), axes=wide, aliases=post)
    out = (f"{prefix}.mlp.hook_out", f"{prefix}.mlp.out.hook_out")
    add("hook_mlp_out", Site(join(path, mlp.out), "output"), aliases=out)
