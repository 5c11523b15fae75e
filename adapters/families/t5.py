"""T5 (and v1.1), encoder and decoder."""

from __future__ import annotations

from typing import Any

from torch import nn

from adapters.architecture import MLP, Architecture, Block, norm_points
from adapters.attention import Attention, Projection, attention_points
from adapters.norms import RMS_NORM
from adapters.paths import base_path, core_path, has_module, join
from adapters.points import Point, Site
from adapters.registry import register
from adapters.views import Branch, View, WriteThrough
from adapters.weights import t5_weights

_QKVO = {letter: Projection(letter) for letter in "qkv"} | {"o": "o"}


@register("T5PreTrainedModel")
def t5(config: Any) -> Architecture:
    gate, up = (Projection("wi_0"), Projection("wi_1")) if config.is_gated_act else (None, Projection("wi"))
    return Architecture(
        embed="encoder.embed_tokens",
        blocks="encoder.block",
        block=Block(
            ln1="layer.0.layer_norm",
            attn=Attention("layer.0.SelfAttention", **_QKVO, out="layer.0.dropout", out_key=None),
            ln2="layer.1.layer_norm",
            mlp=MLP("layer.1.DenseReluDense", up=up, gate=gate, down="wo", out="layer.1.dropout"),
            norm=RMS_NORM,
            output_key=0,
            output_length=3,
        ),
        final_norm="encoder.final_layer_norm",
        unembed="lm_head",
        no_layer_runs=(
            "its first layer makes the position bias that all others use, and its decoder needs the encoder's output"
        ),
        points=t5_points,
        weights=t5_weights,
        facts={
            "attention_dir": "bidirectional",
            "positional_embedding_type": "relative_positional_bias",
            "d_mlp": config.d_ff,
            "act_fn": config.dense_act_fn,
            "use_attn_scale": False,
            "attn_scale": 1.0,
            "relative_attention_num_buckets": config.relative_attention_num_buckets,
            "relative_attention_max_distance": config.relative_attention_max_distance,
            "decoder_start_token_id": config.decoder_start_token_id,
        },
    )


def t5_points(architecture: Architecture, model: nn.Module, cfg: Any) -> list[Point]:
    """All hook points of a T5 model: ``encoder.{i}`` and, where there is one, ``decoder.{i}``."""
    base, core = base_path(model), core_path(model)
    tokens = Site(join(base, "encoder.embed_tokens"), "output")
    points = [
        Point("embed.hook_in", Site(tokens.path, "input"), View(), "batch pos", -1, group="extra", stack=""),
        Point("hook_embed", tokens, View(), "batch pos d_model", -1, aliases=("embed.hook_out",), stack=""),
    ]
    for stack in ("encoder", "decoder"):
        if not has_module(model, join(base, stack)):
            continue
        pos = "pos" if stack == "encoder" else "decoder_pos"
        axes = f"batch {pos} d_model"
        if stack == "decoder":
            site = Site(join(base, "decoder.embed_tokens"), "output")
            points.append(Point("decoder_embed.hook_out", site, View(), axes, -1, group="extra", stack=""))
        blocks = model.get_submodule(join(base, f"{stack}.block"))
        for index in range(len(blocks)):  # type: ignore[arg-type]
            points.extend(_block(architecture.block, model, join(base, stack, "block", str(index)), index, cfg, stack))
        norm = Site(join(base, stack, "final_layer_norm"), "output")
        points.extend(norm_points(RMS_NORM, norm, f"{stack}_final_ln", cfg.n_layers, "", axes=axes))
    if has_module(model, join(core, "lm_head")):
        into, out = (Site(join(core, "lm_head"), kind) for kind in ("input", "output"))
        more: dict[str, Any] = {"group": "extra", "stack": ""}
        points.append(Point("unembed.hook_in", into, View(), "batch decoder_pos d_model", cfg.n_layers, **more))
        logits = "batch decoder_pos d_vocab_out"
        points.append(Point("unembed.hook_out", out, View(), logits, cfg.n_layers, aliases=("hook_unembed",), **more))
    return points


def _block(block: Block, model: nn.Module, path: str, index: int, cfg: Any, stack: str) -> list[Point]:
    """The hook points of one block. The norm before the MLP is `ln2` in the encoder and `ln3` in the decoder."""
    assert block.attn and isinstance(block.mlp, MLP)
    decoder = stack == "decoder"
    pos = "decoder_pos" if decoder else "pos"
    prefix, axes = f"{stack}.{index}", f"batch {pos} d_model"
    points: list[Point] = []

    def add(name: str, site: Site, view: View | None = None, axes: str = axes, **more: Any) -> None:
        points.append(Point(f"{prefix}.{name}", site, view or View(), axes, index, stack=stack, **more))

    def add_norm(name: str, layer: int, **more: Any) -> Site:
        module = f"{path}.layer.{layer}.layer_norm"
        points.extend(
            norm_points(block.norm, Site(module, "output"), f"{prefix}.{name}", index, stack, axes=axes, **more)
        )
        add(f"{name}.hook_out", Site(module, "output"), group="extra", **more)
        return Site(module, "input")

    def attend(part: Attention, norm: Site, out: str, keys: str, **more: Any) -> None:
        heads = (cfg.n_heads, cfg.n_kv_heads)
        points.extend(
            attention_points(part, model, path, prefix, index, *heads, norm, stack, out, pos=pos, key_pos=keys, **more)
        )

    add("hook_resid_pre", Site(path, "input"), aliases=(f"{prefix}.hook_in",))
    add("ln1.hook_in", Site(f"{path}.layer.0.layer_norm", "input"), Branch(), group="extra")
    readers = tuple(f"{prefix}.attn.hook_{letter}" for letter in "qkv")
    attend(
        block.attn, add_norm("ln1", 0, branches=readers), "hook_attn_out", "decoder_key_pos" if decoder else "key_pos"
    )
    second = Site(f"{path}.layer.1.layer_norm", "input")
    add("hook_resid_mid", second, WriteThrough())
    if decoder:
        add(
            "hook_cross_attn_in",
            second,
            Branch(),
            group="heavy",
            flag="use_attn_in",
            aliases=(f"{prefix}.ln2.hook_in",),
        )
        cross = Attention("layer.1.EncDecAttention", **_QKVO, out="layer.1.dropout", out_key=None, name="cross_attn")
        attend(cross, add_norm("ln2", 1), "hook_cross_attn_out", "key_pos", per_head_inputs=False)
        add("hook_resid_mid_cross", Site(f"{path}.layer.2.layer_norm", "input"), WriteThrough())
    last = 2 if decoder else 1
    name = f"ln{last + 1}"
    # As in HookedTransformer, what the MLP reads here is also what its output is added to.
    entry = Site(f"{path}.layer.{last}.layer_norm", "input")
    add(
        "hook_mlp_in",
        entry,
        WriteThrough(),
        group="heavy",
        flag="use_hook_mlp_in",
        aliases=(f"{prefix}.{name}.hook_in",),
    )
    add_norm(name, last)
    mlp, module, wide = block.mlp, f"{path}.layer.{last}.DenseReluDense", f"batch {pos} d_mlp"
    up, pre = f"{module}.{mlp.up.path}", f"{module}.{(mlp.gate or mlp.up).path}"
    gate_alias = f"{prefix}.mlp.gate.hook_out" if mlp.gate else f"{prefix}.mlp.in.hook_out"
    add("mlp.hook_pre", Site(pre, "output"), axes=wide, aliases=(gate_alias,))
    if mlp.gate:
        add("mlp.hook_pre_linear", Site(up, "output"), axes=wide, aliases=(f"{prefix}.mlp.in.hook_out",))
    add("mlp.hook_post", Site(f"{module}.{mlp.down}", "input"), axes=wide, aliases=(f"{prefix}.mlp.out.hook_in",))
    out = Site(f"{path}.layer.{last}.dropout", "output")
    add("hook_mlp_out", out, aliases=(f"{prefix}.mlp.hook_out", f"{prefix}.mlp.out.hook_out"))
    add("hook_resid_post", Site(path, "output", block.output_key), aliases=(f"{prefix}.hook_out",))
    return points
