"""Blocks in which each norm follows the sum of a part and the residual stream (BERT and its kin)."""

from __future__ import annotations

from typing import Any

from torch import nn

from adapters.architecture import MLP, Block, norm_points
from adapters.attention import attention_points
from adapters.paths import join
from adapters.points import Point, Site
from adapters.views import View


def post_norm_block_points(block: Block, model: nn.Module, path: str, index: int, cfg: Any, stack: str) -> list[Point]:
    """The hook points of one block.

    `hook_resid_mid` and `hook_resid_post` are the sums that enter the norms; the block's output, which the next block
    reads, is `hook_normalized_resid_post`.

    Args:
        block: the declaration, with `ln1` and `ln2` as the norms after attention and after the MLP.
        model: the Hugging Face model.
        path: the block's path.
        index: its index.
        cfg: the model's facts.
        stack: the list of blocks it belongs to.
    """
    assert block.attn and isinstance(block.mlp, MLP) and block.ln1 and block.ln2
    prefix, axes, wide = f"{stack}.{index}", "batch pos d_model", "batch pos d_mlp"
    ln1, ln2 = join(path, block.ln1), join(path, block.ln2)
    points: list[Point] = []

    def add(name: str, site: Site, axes: str = axes, view: View | None = None, **more: Any) -> None:
        points.append(Point(f"{prefix}.{name}", site, view or View(), axes, index, stack=stack, **more))

    def add_norm(name: str, module: str) -> None:
        points.extend(norm_points(block.norm, Site(module, "output"), f"{prefix}.{name}", index, stack))
        add(f"{name}.hook_out", Site(module, "output"), group="extra")

    add("hook_resid_pre", Site(path, "input"), aliases=(f"{prefix}.hook_in",))
    points.extend(attention_points(block.attn, model, path, prefix, index, cfg.n_heads, cfg.n_kv_heads, None, stack))
    add("hook_resid_mid", Site(ln1, "input"))
    # The norm's output is both what the MLP reads and the skip connection, so there is nothing the MLP alone reads.
    add("hook_mlp_in", Site(ln1, "input"), group="heavy", flag="use_hook_mlp_in", aliases=(f"{prefix}.ln1.hook_in",))
    add_norm("ln1", ln1)
    mlp = block.mlp
    up, down = Site(join(path, mlp.path, mlp.up.path), "output"), join(path, mlp.path, mlp.down)
    add("mlp.hook_pre", up, wide, aliases=(f"{prefix}.mlp.in.hook_out",))
    add("mlp.hook_post", Site(down, "input"), wide, aliases=(f"{prefix}.mlp.out.hook_in",))
    add("hook_mlp_out", Site(down, "output"), aliases=(f"{prefix}.mlp.hook_out", f"{prefix}.mlp.out.hook_out"))
    add("hook_resid_post", Site(ln2, "input"), aliases=(f"{prefix}.ln2.hook_in",))
    add_norm("ln2", ln2)
    output = Site(path, "output", block.output_key)
    add("hook_normalized_resid_post", output, aliases=(f"{prefix}.hook_out",))
    return points
