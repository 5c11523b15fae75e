"""`lens`: what each layer of a model would say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from jaxtyping import Int
from torch import Tensor

from adapters.paths import path_from
from bridge.analysis.requirements import refuse_no_stream
from bridge.hooks.act_names import last_stream
from bridge.hooks.arguments import refuse_wrong_types
from bridge.lens.as_read import as_read
from bridge.lens.readable import Readable
from bridge.lens.reading import Reading
from bridge.lens.tuned import TunedLens
from bridge.run.checks import texts_in
from bridge.run.positions import PosSlice
from bridge.run.protocol import Input

KINDS = ("normed", "raw")


@refuse_wrong_types
def lens(
    bridge: Readable,
    input: Input,
    kind: str | TunedLens = "normed",
    pos_slice: PosSlice = None,
    layers: Sequence[int] | None = None,
    prepend_bos: bool | None = None,
    attention_mask: Int[Tensor, "batch pos"] | None = None,
) -> Reading:
    """Reads the residual stream before each layer, and at the end, as next tokens.

    The kinds are ``"normed"``, through the model's own final norm and unembedding (nostalgebraist 2020, "interpreting
    GPT: the logit lens"); ``"raw"``, through the unembedding alone; or a `TunedLens`, whose map comes before the final
    norm. A soft cap on the logits is part of all but ``"raw"``.

    Args:
        bridge: the bridge.
        input: a text, several texts, token ids, or tokens ``[pos]`` or ``[batch, pos]``. Shorter texts are padded in
            front, so that position -1 is the last of each.
        kind: see above.
        pos_slice: which positions to read, such as -1; None: all. Only those are kept.
        layers: streams before which layers, from 0; ``n_layers`` is the end; None: all.
        prepend_bos: begin texts with BOS; None: as the bridge does.
        attention_mask: for tokens: 1 for tokens and 0 for padding.

    Returns:
        A reading, which computes logits when asked, under the hooks and with the weights of now: where those behind
        the blocks have changed by then, it refuses.

    Raises:
        ValueError: an unknown kind or layer; a lens for another model; a model with several residual streams.

    Example:
        >>> from bridge import TransformerBridge
        >>> from bridge.lens import lens
        >>> bridge = TransformerBridge.boot_embedded()
        >>> reading = lens(bridge, ["The capital of France is", "The capital of Italy is"], pos_slice=-1)
        >>> top = reading.top(5)
        >>> top.tokens.shape  # layer batch pos k
        torch.Size([5, 2, 1, 5])
        >>> [bridge.to_single_str_token(int(token)) for token in top.tokens[-1, :, 0, 0]]
        [' Paris', ' Rome']
    """
    refuse_no_stream(bridge)
    n = bridge.cfg.n_layers
    chosen = tuple(range(n + 1)) if layers is None else tuple(layer + n + 1 if layer < 0 else layer for layer in layers)
    if not chosen or any(not 0 <= layer <= n for layer in chosen) or len(set(chosen)) < len(chosen):
        raise ValueError(f"layers are {list(layers or ())}; they must be different ones from 0 to {n}, the end")
    decode = as_read(bridge, _decoder(bridge, kind), hooked=kind != "raw")
    texts = texts_in(input)
    if texts is not None:
        if attention_mask is not None:
            raise ValueError("attention_mask is for tokens; for texts it is worked out")
        batch = bridge.batch_of(texts, prepend_bos, "left")
        input, attention_mask = batch.tokens, batch.mask
    last = last_stream(bridge.hook_dict, n)
    names = {layer: f"blocks.{layer}.hook_resid_pre" if layer < n else last for layer in chosen}
    _, cache = bridge.run_with_cache(
        input, names_filter=list(names.values()), pos_slice=pos_slice, attention_mask=attention_mask, return_type=None
    )
    mask = attention_mask
    if mask is not None and pos_slice is not None:
        chosen_positions = slice(*pos_slice) if isinstance(pos_slice, tuple) else pos_slice
        mask = mask[:, [chosen_positions] if isinstance(chosen_positions, int) else chosen_positions]
    streams = torch.stack([cache[names[layer]] for layer in chosen])
    return Reading(streams, chosen, decode, mask, n, bridge.cfg.d_vocab_out)


def _raw(bridge: Readable) -> Callable[[Tensor, int], Tensor]:
    """Reads through the unembedding alone, with the factors and the bias of `W_U` and `b_U`, without a soft cap.

    Raises:
        ValueError: the unembedding does not read vectors of the stream's width.
    """
    readout = replace(bridge.architecture.readout, soft_cap=None)
    unembed = bridge.core.get_submodule(readout.path)
    width = getattr(unembed, "in_features", bridge.cfg.d_model)
    if width != bridge.cfg.d_model:
        raise ValueError(
            f"the unembedding of {bridge.cfg.model_name} reads vectors of width {width}, not of the stream's "
            f"{bridge.cfg.d_model}: kind='raw' is not for it"
        )
    return lambda stream, layer: readout.logits(unembed.forward(stream * readout.factor_in), bridge.core)


def _classified(bridge: Readable) -> Callable[[Tensor, int], Tensor]:
    """Reads each position of an image through the final norm and the classifier's head.

    The head reads one position, or a mean of several: at the end, its logits are the mean of these readings.

    Raises:
        ValueError: the norm reads that mean.
    """
    if why := bridge.architecture.why_no_logit_sum():
        raise ValueError(f"{bridge.cfg.model_name}: {why}")
    final, read = bridge.architecture.stack.final_norm, _raw(bridge)
    if final is None:
        return read
    norm = bridge.original_model.get_submodule(path_from(bridge.original_model, final.path))
    return lambda stream, layer: read(norm.forward(stream), layer)


def _decoder(bridge: Readable, kind: str | TunedLens) -> Callable[[Tensor, int], Tensor]:
    """From a stream and its layer to logits.

    Raises:
        ValueError: there is no such kind, or the model has no unembedding to read with.
    """
    n = bridge.cfg.n_layers
    if "unembed.hook_out" not in bridge.hook_dict:
        raise ValueError(f"{bridge.cfg.model_name} has no unembedding: its stream cannot be read as tokens")
    if isinstance(kind, TunedLens):
        kind.check(bridge, unembedding=False)
        return lambda stream, layer: bridge(kind(stream, layer), start_at_layer=n)
    if kind == "raw":
        return _raw(bridge)
    if kind != "normed":
        raise ValueError(f"kind is {kind!r}; it must be {', '.join(map(repr, KINDS))} or a TunedLens")
    if bridge.architecture.pooled is not None:
        return _classified(bridge)
    return lambda stream, layer: bridge(stream, start_at_layer=n)
