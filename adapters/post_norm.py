"""Models in which each norm follows the sum of a part and the residual stream (BERT and its kin)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from adapters.architecture import MLP, Architecture, Block
from adapters.attention import attention_points
from adapters.norms import norm_points
from adapters.paths import base_path, core_path, has_module, join
from adapters.points import Point, Site
from adapters.views import OverBatch, View


@dataclass(frozen=True)
class PostNormEncoder:
    """Makes the hook points of an encoder, as HookedTransformer's encoder names them (see `Architecture.points`).

    Paths are relative to the base model, except those of the heads, which are relative to the model itself. A model
    may lack any of the heads.

    Attributes:
        embeddings: the module that makes the first residual stream.
        token_types, norm: in it, the embedding of the two sentences, and the norm after the sum.
        pooler: what makes one vector of the first token's residual stream.
        head_norm: the head's norm before the unembedding.
        next_sentence: the head on top of the pooler.
    """

    embeddings: str
    token_types: str
    norm: str
    pooler: str
    head_norm: str
    next_sentence: str

    def __call__(self, architecture: Architecture, model: nn.Module, cfg: Any) -> list[Point]:
        return [
            *self._embedding_points(architecture, base_path(model)),
            *(
                point
                for index in range(cfg.n_layers)
                for point in _block_points(
                    architecture.block, model, join(base_path(model), architecture.blocks, str(index)), index, cfg
                )
            ),
            *self._head_points(architecture, model, cfg.n_layers),
        ]

    def _embedding_points(self, architecture: Architecture, base: str) -> list[Point]:
        assert architecture.pos_embed
        words = Site(join(base, architecture.embed), "output")
        types = Site(join(base, self.token_types), "output")
        positions = Site(join(base, architecture.pos_embed), "output")
        points: list[Point] = []

        def add(name: str, site: Site, axes: str = "batch pos d_model", view: View | None = None, **more: Any) -> None:
            points.append(Point(name, site, view or View(), axes, -1, stack="", **more))

        add("embed.hook_in", Site(words.path, "input"), "batch pos", group="extra")
        add("embed.hook_embed", words, aliases=("hook_embed", "embed.hook_out"))
        add("embed.hook_token_type_embed", types)
        names = ("hook_pos_embed", "pos_embed.hook_out")
        add("embed.hook_pos_embed", positions, view=OverBatch(), sources=(words,), aliases=names)
        norm = Site(join(base, self.norm), "output")
        points.extend(norm_points(architecture.block.norm, norm, "embed.ln", -1, ""))
        add("hook_full_embed", Site(join(base, self.embeddings), "output"))
        return points

    def _head_points(self, architecture: Architecture, model: nn.Module, after: int) -> list[Point]:
        base, core = base_path(model), core_path(model)
        pooler, next_sentence = join(base, self.pooler), join(core, self.next_sentence)
        unembed = join(core, architecture.unembed)
        points: list[Point] = []

        def add(name: str, module: str, axes: str, kind: Any = "output", **more: Any) -> None:
            points.append(Point(name, Site(module, kind), View(), axes, after, stack="", **more))

        if has_module(model, pooler):
            add("pooler.hook_pooler_out", pooler, "batch d_model")
        if has_module(model, unembed):
            norm = Site(join(core, self.head_norm), "output")
            points.extend(norm_points(architecture.block.norm, norm, "mlm_head.ln", after, ""))
            add("unembed.hook_in", unembed, "batch pos d_model", "input", group="extra")
            add("unembed.hook_out", unembed, "batch pos d_vocab_out", group="extra", aliases=("hook_unembed",))
        if has_module(model, next_sentence):
            add("nsp_head.hook_nsp_out", next_sentence, "batch 2")
        return points


def _block_points(block: Block, model: nn.Module, path: str, index: int, cfg: Any) -> list[Point]:
    """The hook points of one block.

    `hook_resid_mid` and `hook_resid_post` are the sums that enter the norms; the block's output, which the next block
    reads, is `hook_normalized_resid_post`.

    Args:
        block: the declaration, with `ln1` and `ln2` as the norms after attention and after the MLP.
        model: the Hugging Face model.
        path: the block's path.
        index: its index.
        cfg: the model's facts.
    """
    assert block.attn and isinstance(block.mlp, MLP) and block.ln1 and block.ln2
    stack = "blocks"
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
