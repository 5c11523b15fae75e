"""BERT, with its masked-language, next-sentence and pooler heads."""

from __future__ import annotations

from typing import Any

from torch import nn

from adapters.architecture import MLP, Architecture, Block, norm_points
from adapters.attention import Attention, Projection
from adapters.paths import base_path, core_path, has_module, join
from adapters.points import Point, Site
from adapters.post_norm import post_norm_block_points
from adapters.registry import UnsupportedModelError, register
from adapters.views import OverBatch, View
from adapters.weights import bert_weights


@register("BertPreTrainedModel")
def bert(config: Any) -> Architecture:
    for name in ("add_cross_attention", "chunk_size_feed_forward"):
        if getattr(config, name):
            raise UnsupportedModelError(f"BERT with {name}={getattr(config, name)} has no adapter, only without it")
    q, k, v = (Projection(f"self.{name}") for name in ("query", "key", "value"))
    out = "attention.output.dense"
    return Architecture(
        embed="embeddings.word_embeddings",
        pos_embed="embeddings.position_embeddings",
        blocks="encoder.layer",
        block=Block(
            attn=Attention("attention", q, k, v, o="output.dense", out=out, out_key=None, core="self"),
            ln1="attention.output.LayerNorm",
            mlp=MLP("", up=Projection("intermediate.dense"), down="output.dense"),
            ln2="output.LayerNorm",
        ),
        final_norm=None,
        unembed="cls.predictions.decoder",
        points=bert_points,
        weights=bert_weights,
        facts={"attention_dir": "causal" if config.is_decoder else "bidirectional"},
    )


def bert_points(architecture: Architecture, model: nn.Module, cfg: Any) -> list[Point]:
    """All hook points of a BERT model, as HookedTransformer's encoder names them."""
    base, top = base_path(model), core_path(model)
    core, axes, after = model.get_submodule(top), "batch pos d_model", cfg.n_layers
    norm = architecture.block.norm
    embeddings = join(base, "embeddings")
    words = Site(join(base, architecture.embed), "output")
    points: list[Point] = []

    def add(name: str, site: Site, axes: str = axes, view: View | None = None, depth: int = -1, **more: Any) -> None:
        points.append(Point(name, site, view or View(), axes, depth, stack="", **more))

    add("embed.hook_in", Site(words.path, "input"), "batch pos", group="extra")
    add("embed.hook_embed", words, aliases=("hook_embed", "embed.hook_out"))
    types, positions = (Site(f"{embeddings}.{kind}_embeddings", "output") for kind in ("token_type", "position"))
    add("embed.hook_token_type_embed", types)
    pos_names = ("hook_pos_embed", "pos_embed.hook_out")
    add("embed.hook_pos_embed", positions, view=OverBatch(), sources=(words,), aliases=pos_names)
    points.extend(norm_points(norm, Site(f"{embeddings}.LayerNorm", "output"), "embed.ln", -1, ""))
    add("hook_full_embed", Site(embeddings, "output"))
    for index in range(cfg.n_layers):
        path = join(base, architecture.blocks, str(index))
        points.extend(post_norm_block_points(architecture.block, model, path, index, cfg, "blocks"))
    if has_module(model, join(base, "pooler")):
        add("pooler.hook_pooler_out", Site(join(base, "pooler"), "output"), "batch d_model", depth=after)
    if has_module(core, architecture.unembed):
        transform, unembed = join(top, "cls.predictions.transform.LayerNorm"), join(top, architecture.unembed)
        points.extend(norm_points(norm, Site(transform, "output"), "mlm_head.ln", after, ""))
        add("unembed.hook_in", Site(unembed, "input"), depth=after, group="extra")
        logits = {"depth": after, "group": "extra", "aliases": ("hook_unembed",)}
        add("unembed.hook_out", Site(unembed, "output"), "batch pos d_vocab_out", **logits)
    if has_module(core, "cls.seq_relationship"):
        add("nsp_head.hook_nsp_out", Site(join(top, "cls.seq_relationship"), "output"), "batch 2", depth=after)
    return points
