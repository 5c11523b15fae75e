"""Lenses: the residual stream of each layer read as next tokens, raw, through the final norm, or tuned."""

from __future__ import annotations

import functools
import hashlib
import json
import pickle
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from tqdm.auto import tqdm

from adapters.inputs import takes
from adapters.points import module_at, path_from
from bridge.analysis.analysis import pick, refuse_no_stream
from bridge.hooks.arguments import check_positive, refuse_wrong_types, shown
from bridge.hooks.context import CURRENT, RunContext, setting
from bridge.hooks.modules import written_to
from bridge.hooks.names import last_stream
from bridge.run.inputs import Input, RunnableBridge, prompts_with, unpacked
from bridge.run.recorder import PosSlice
from bridge.run.tokenization import texts_in

__all__ = ["Reading", "Top", "TunedLens", "lens"]

# ----------------------------------------------------------------------------------------------------------------------
# Tuned lenses: for each layer a learned affine map to what the last layer would hold.
# ----------------------------------------------------------------------------------------------------------------------


_KIND = "linear_tuned_lens"


#: What Python says of a zip or a pickle that is damaged.
_DAMAGED = (EOFError, NotImplementedError, OSError, pickle.UnpicklingError, zipfile.BadZipFile, zlib.error)


class TunedLens(nn.Module):
    """An affine map for each layer: the stream that enters the layer, plus a linear map of it (Belrose et al. 2023,
    "Eliciting Latent Predictions from Transformers with the Tuned Lens").

    Folders that the package `tuned-lens` wrote (``params.pt`` and ``config.json``) load, and `save` writes such ones.

    Args:
        n_layers: how many layers the model has.
        d_model: the width of its stream.
        bias: whether the maps add something.

    Attributes:
        translators: a linear layer for the stream before each layer; new ones are zero, which is the logit lens.
        config: what `config.json` says.

    Example:
        >>> from bridge.lens import TunedLens
        >>> TunedLens(4, 128).translators[0].weight.abs().sum().item()
        0.0
    """

    @refuse_wrong_types
    def __init__(self, n_layers: int, d_model: int, bias: bool = True) -> None:
        super().__init__()
        for name, size in (("n_layers", n_layers), ("d_model", d_model)):
            check_positive(name, size)
        self.translators = nn.ModuleList([nn.Linear(d_model, d_model, bias=bias) for _ in range(n_layers)])
        for parameter in self.translators.parameters():
            nn.init.zeros_(parameter)
        self.config: dict[str, Any] = {
            "base_model_name_or_path": "",
            "d_model": d_model,
            "num_hidden_layers": n_layers,
            "bias": bias,
            "base_model_revision": None,
            "unembed_hash": None,
            "lens_type": _KIND,
        }

    def forward(self, stream: Float[Tensor, "*any d_model"], layer: int) -> Float[Tensor, "*any d_model"]:
        """The stream as the last layer would hold it.

        Args:
            stream: what enters the layer.
            layer: from 0; ``n_layers``, the end, stays as it is.
        """
        return stream if layer == len(self.translators) else stream + self.translators[layer](stream)

    @classmethod
    @refuse_wrong_types
    def load(
        cls, folder: str | Path, bridge: RunnableBridge | None = None, check_unembedding: bool = True
    ) -> TunedLens:
        """Reads a lens.

        Args:
            folder: with ``params.pt`` and ``config.json``.
            bridge: the model that it is for; it is put on that model's device.
            check_unembedding: refuse a lens whose configuration names another unembedding than this model's.

        Raises:
            FileNotFoundError: a file is missing.
            ValueError: it is another kind of lens, or for another model, or damaged.
        """
        folder = Path(folder)
        for name in ("config.json", "params.pt"):
            if not (folder / name).is_file():
                raise FileNotFoundError(f"folder is {str(folder)!r}, which has no {name}")
        reading = folder / "config.json"
        try:
            config = json.loads(reading.read_text(encoding="utf-8"))
            if config.get("lens_type", _KIND) != _KIND:
                raise ValueError(f"its lens is of type {config['lens_type']!r}; only {_KIND!r} can be read")
            sizes, bias = (config["num_hidden_layers"], config["d_model"], config["d_model"]), config["bias"]
            reading = folder / "params.pt"
            if zipfile.is_zipfile(reading) and (bad := zipfile.ZipFile(reading).testzip()) is not None:
                raise ValueError(f"the checksum of {bad} in it is another")
            state = torch.load(reading, map_location="cpu", weights_only=True)
            weights = [value for name, value in state.items() if name.endswith("weight")]
            if (len(weights), *weights[0].shape) != sizes:
                raise ValueError(f"it holds {len(weights)} maps {list(weights[0].shape)}, config.json says {sizes}")
            lens = cls(sizes[0], sizes[1], bias)
            lens.translators.load_state_dict(state)
        except (*_DAMAGED, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            raise ValueError(f"{reading} cannot be used: {error}") from error
        lens.config |= config
        if bridge is not None:
            lens.check(bridge, check_unembedding)
            lens.to(bridge.cfg.device)
        return lens

    @refuse_wrong_types
    def save(self, folder: str | Path) -> None:
        """Writes ``params.pt`` and ``config.json``.

        Args:
            folder: it is made where it is missing.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(self.translators.state_dict(), folder / "params.pt")
        (folder / "config.json").write_text(json.dumps(self.config), encoding="utf-8")

    @refuse_wrong_types
    def check(self, bridge: RunnableBridge, unembedding: bool = True) -> None:
        """Refuses a model that the lens is not for.

        Args:
            bridge: the model.
            unembedding: whether its unembedding has to be the one that the lens was trained with, as far as is known.

        Raises:
            ValueError: it has other sizes, or another unembedding.
        """
        n_layers, d_model = len(self.translators), self.config["d_model"]
        if (n_layers, d_model) != (bridge.cfg.n_layers, bridge.cfg.d_model):
            raise ValueError(
                f"the lens is for {n_layers} layers of width {d_model}; {bridge.cfg.model_name} has "
                f"{bridge.cfg.n_layers} of width {bridge.cfg.d_model}"
            )
        named = self.config["unembed_hash"]
        if unembedding and named and named != unembedding_hash(bridge):
            raise ValueError(
                f"the lens was trained with another unembedding than that of {bridge.cfg.model_name} (have its weights "
                "been processed?); check_unembedding=False uses it all the same"
            )

    @classmethod
    @refuse_wrong_types
    def fit(
        cls,
        bridge: RunnableBridge,
        batches: Iterable[Input],
        epochs: int = 1,
        learning_rate: float = 1e-3,
        verbose: bool = True,
    ) -> TunedLens:
        """Trains a lens: each layer's distribution is brought near the model's own, by the divergence between them.

        The model stays as it is. Adam; the learning rate falls to zero, linearly.

        Args:
            bridge: the model, in evaluation mode.
            batches: texts or tokens, as the bridge takes them. Padding of texts does not count; tokens have none.
            epochs: how many times to go through them.
            learning_rate: at the beginning.
            verbose: show a progress bar.

        Raises:
            ValueError: there are no batches, the model is in training mode, or the learning rate is not above zero.

        Example:
            >>> from bridge import TransformerBridge
            >>> from bridge.lens import TunedLens
            >>> bridge = TransformerBridge.boot_embedded()
            >>> lens = TunedLens.fit(bridge, ["The capital of France is Paris."], epochs=2, verbose=False)
        """
        if bridge.core.training:
            raise ValueError("the model is in training mode: call bridge.eval() first")
        if isinstance(batches, str) or (isinstance(batches, Tensor) and batches.ndim < 2):
            raise TypeError(f"batches is {shown(batches)}; it must be a list of batches, each of texts or tokens")
        if not learning_rate > 0:
            raise ValueError(f"learning_rate is {learning_rate}; it must be above zero")
        every = [_tokens_and_mask(bridge, batch) for batch in batches]
        if not every or epochs < 1:
            raise ValueError(f"there are {len(every)} batches and {epochs} epochs; a lens needs one of each, or more")
        bridge.architecture.refuse_several_streams(bridge.cfg.model_name)
        n = bridge.cfg.n_layers
        names = [f"blocks.{layer}.hook_resid_pre" for layer in range(n)]
        lens = cls(n, bridge.cfg.d_model).to(bridge.cfg.device)
        lens.config |= {"base_model_name_or_path": bridge.cfg.model_name, "unembed_hash": unembedding_hash(bridge)}
        optimizer = torch.optim.Adam(lens.parameters(), lr=learning_rate)
        total = epochs * len(every)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / total)
        with tqdm(total=total, desc="tuning a lens", unit="batch", disable=not verbose) as bar, torch.enable_grad():
            for batch, mask in every * epochs:
                with torch.no_grad():
                    logits, cache = bridge.run_with_cache(batch, attention_mask=mask, names_filter=names)
                right = logits.float().log_softmax(-1)
                loss = 0.0
                optimizer.zero_grad()
                for layer, name in enumerate(names):  # one layer at a time: its logits are large
                    stream = cache[name].detach()
                    found = bridge(lens(stream, layer), start_at_layer=n).float().log_softmax(-1)
                    each = (right.exp() * (right - found)).sum(-1)  # batch pos
                    one = each.mean() if mask is None else each[mask.bool().to(each.device)].mean()
                    parameters = list(lens.translators[layer].parameters())  # the model's own are not touched
                    for parameter, gradient in zip(parameters, torch.autograd.grad(one, parameters), strict=True):
                        parameter.grad = gradient
                    loss += one.item() / n
                optimizer.step()
                schedule.step()
                bar.set_postfix(divergence=f"{loss:.3f}")
                bar.update()
        return lens.eval()


def _tokens_and_mask(bridge: RunnableBridge, batch: Input) -> tuple[Input, Tensor | None]:
    """A batch, and which of its positions are no padding; None: all of them."""
    if isinstance(batch, Sequence) and batch and isinstance(batch[0], str) and not isinstance(batch, str):
        padded = bridge.batch_of(batch)
        return padded.tokens, padded.mask
    if isinstance(batch, Mapping):
        return {name: value for name, value in batch.items() if name != "attention_mask"}, batch.get("attention_mask")
    return batch, None


def unembedding_hash(bridge: RunnableBridge) -> str:
    """How the package `tuned-lens` names an unembedding: by its entries, printed to one decimal.

    Args:
        bridge: the bridge.

    Example:
        >>> from bridge import TransformerBridge
        >>> from bridge.lens import unembedding_hash
        >>> len(unembedding_hash(TransformerBridge.boot_embedded()))
        64
    """
    weight = bridge.core.get_output_embeddings().weight.detach().cpu().float().numpy()
    return hashlib.sha256(np.array_str(weight, precision=1).encode()).hexdigest()


# ----------------------------------------------------------------------------------------------------------------------
# What the model would say if it ended earlier: the residual stream of each layer, read as next tokens.
# ----------------------------------------------------------------------------------------------------------------------


#: From a stream and its layer to logits.
Decode = Callable[[Tensor, int], Tensor]
#: The most logits that are held at once.
MOST_LOGITS = 2**25


@dataclass(frozen=True)
class Top:
    """The likeliest tokens that a lens reads at each layer and position.

    Attributes:
        tokens: their ids, the likeliest first, ``[layer, batch, pos, k]``.
        probabilities: theirs.
    """

    tokens: Int[Tensor, "layer batch pos k"]
    probabilities: Float[Tensor, "layer batch pos k"]


@dataclass(frozen=True)
class Reading:
    """The residual streams of a run, and what a lens reads in them. Logits are computed when they are asked for.

    Attributes:
        streams: before each chosen layer, ``[layer, batch, pos, d_model]``; layer ``n_layers`` is the end.
        layers: which layers.
        decode: from ``[batch, pos, d_model]`` and a layer to logits ``[batch, pos, d_vocab]``.
        mask: ``[batch, pos]``, 0 where a shorter prompt is padded (in front); None: nowhere.
        n_layers: how many layers the model has.
        d_vocab: how many tokens there are.
        max_bytes: about how much memory logits, and what is made of them, may take at once, some positions after the
            other (one at least); None: what is quick. `logits` and `stack` return as much as they return.
    """

    streams: Float[Tensor, "layer batch pos d_model"]
    layers: tuple[int, ...]
    decode: Decode
    mask: Int[Tensor, "batch pos"] | None
    n_layers: int
    d_vocab: int
    max_bytes: int | None = None

    @property
    def labels(self) -> list[str]:
        """Such as ``0_pre``, and ``final_post``."""
        return ["final_post" if layer == self.n_layers else f"{layer}_pre" for layer in self.layers]

    @refuse_wrong_types
    def logits(self, layer: int) -> Float[Tensor, "batch pos d_vocab"]:
        """The logits of one layer.

        Args:
            layer: as in `layers`; -1 is the last of them.

        Raises:
            ValueError: it was not read.
        """
        if layer == -1:
            layer = self.layers[-1]
        if layer not in self.layers:
            raise ValueError(f"layer {layer} was not read; there are {', '.join(map(str, self.layers))}")
        return self.decode(self.streams[self.layers.index(layer)], layer)

    def stack(self) -> Float[Tensor, "layer batch pos d_vocab"]:
        """The logits of all layers at all positions that were read. Everything else here does without that tensor."""
        return torch.stack([self.logits(layer) for layer in self.layers])

    @refuse_wrong_types
    def top(self, k: int = 5) -> Top:
        """The `k` likeliest tokens of each layer.

        Args:
            k: how many.

        Raises:
            ValueError: there are not so many tokens.
        """
        if not 1 <= k <= self.d_vocab:
            raise ValueError(f"k is {k}; it must be from 1 to {self.d_vocab}")

        def likeliest(logits: Tensor) -> Tensor:
            found = logits.softmax(-1).topk(k, -1)
            return torch.cat([found.indices.to(found.values.dtype), found.values], -1)

        found = self._gather(likeliest)
        tokens, probabilities = found.split(k, -1)
        return Top(tokens.long(), probabilities)

    @refuse_wrong_types
    def probabilities(self, token: int) -> Float[Tensor, "layer batch pos"]:
        """The probability of one token in each layer.

        Args:
            token: its id.
        """
        self._check(token)
        return self._gather(lambda logits: logits.softmax(-1)[..., token].clone())  # a view would keep all tokens

    @refuse_wrong_types
    def ranks(self, token: int) -> Int[Tensor, "layer batch pos"]:
        """How many tokens are likelier than this one in each layer.

        Args:
            token: its id.
        """
        self._check(token)
        return self._gather(lambda logits: (logits > logits[..., token : token + 1]).sum(-1)).long()

    def divergence(self) -> Float[Tensor, "layer batch pos"]:
        """The Kullback-Leibler divergence of each layer's distribution from the last one's, in nats."""
        last = self.layers[-1]
        rows = []
        for layer, stream in zip(self.layers, self.streams, strict=True):
            parts = []
            ends = self._parts(self.streams[-1], copies=7)
            for part, end in zip(self._parts(stream, copies=7), ends, strict=True):
                right = self.decode(end, last).double().log_softmax(-1)
                found = self.decode(part, layer).double().log_softmax(-1)
                parts.append((right.exp() * (right - found)).sum(-1))
            rows.append(torch.cat(parts, 1).to(self.streams.dtype))
        return torch.stack(rows)

    def _check(self, token: int) -> None:
        if not 0 <= token < self.d_vocab:
            raise ValueError(f"token is {token}; it must be from 0 to {self.d_vocab - 1}")

    def _gather(self, look: Callable[[Tensor], Tensor]) -> Tensor:
        """A function of the logits for each layer, some positions at a time."""
        return torch.stack(
            [
                torch.cat([look(self.decode(part, layer).double()) for part in self._parts(stream)], 1)
                for layer, stream in zip(self.layers, self.streams, strict=True)
            ]
        )

    def _parts(self, stream: Float[Tensor, "batch pos d_model"], copies: int = 3) -> Iterator[Tensor]:
        """Some positions after the other: beside their logits so many copies in float64 fit in."""
        of_position = stream.shape[0] * self.d_vocab
        if self.max_bytes is None:
            width = MOST_LOGITS // of_position
        else:
            width = self.max_bytes // (of_position * (stream.element_size() + 8 * copies))
        yield from stream.split(max(1, width), 1)


# ----------------------------------------------------------------------------------------------------------------------
# Decoding what a lens has read under the hooks, and with the weights, that it was read with.
# ----------------------------------------------------------------------------------------------------------------------


def as_read(bridge: RunnableBridge, decode: Decode, hooked: bool) -> Decode:
    """The same decoding, refused where hooks or weights behind the blocks are not those of now.

    Args:
        bridge: the bridge.
        decode: from a stream and its layer to logits.
        hooked: it runs the model behind the blocks, and so sees the hooks there. (Others have done their work.)
    """
    behind = [hook for hook in bridge.hook_dict.values() if hook.point.depth >= bridge.cfg.n_layers]
    paths = dict.fromkeys(hook.point.site.path for hook in behind)
    own = bridge.core.get_output_embeddings()  # none: a classifier's head, which is a hook point
    modules = [*[own][: own is not None], *[module_at(bridge.original_model, path) for path in paths if path]]

    def hooks() -> list[tuple[str, object]]:
        active = [(hook.name, listener) for hook in behind if hook.listeners for listener in hook.visible_listeners()]
        return [(name, listener.fn) for name, listener in active if hooked and listener.kind == "fwd"]

    hooks_then, weights_then = hooks(), [written_to(module) for module in modules]

    def decoded(stream: Tensor, layer: int) -> Tensor:
        if hooks() != hooks_then:
            names = ", ".join(dict.fromkeys(name for name, _ in (*hooks_then, *hooks())))
            raise ValueError(
                f"the hooks at {names} are not those that this reading was made under: ask it inside of the same "
                "`with` statement, or read again"
            )
        if [written_to(module) for module in modules] != weights_then:
            raise ValueError(
                "the weights behind the blocks were changed since this reading was made (processed, trained, written "
                "to, or adapters switched): read again"
            )
        here = CURRENT.get()
        with setting(CURRENT, RunContext(here.shared, generation=here.generation, inherited=here.shared)):
            return decode(stream, layer)

    return decoded


KINDS = ("normed", "raw")


@refuse_wrong_types
def lens(
    bridge: RunnableBridge,
    input: Input,
    kind: str | TunedLens = "normed",
    pos_slice: PosSlice = None,
    layers: Sequence[int] | None = None,
    prepend_bos: bool | None = None,
    attention_mask: Int[Tensor, "batch pos"] | None = None,
    max_bytes: int | None = None,
    **model_kwargs: Any,
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
        max_bytes: about how much memory the reading's logits may take at once (see `Reading`).
        model_kwargs: what else the model takes with the input, such as ``pixel_values=``.

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
    if max_bytes is not None:
        check_positive("max_bytes", max_bytes)
    n = bridge.cfg.n_layers
    chosen = tuple(range(n + 1)) if layers is None else tuple(layer + n + 1 if layer < 0 else layer for layer in layers)
    if not chosen or any(not 0 <= layer <= n for layer in chosen) or len(set(chosen)) < len(chosen):
        raise ValueError(f"layers are {list(layers or ())}; they must be different ones from 0 to {n}, the end")
    names = {name: value for name, value in model_kwargs.items() if name == "adapter_names"}
    decode = as_read(bridge, _decoder(bridge, kind, names), hooked=kind != "raw")
    texts = texts_in(input)
    if texts is not None:
        if attention_mask is not None:
            raise ValueError("attention_mask is for tokens; for texts it is worked out")
        batch = bridge.batch_of(texts, prepend_bos, "left")
        input, attention_mask = batch.tokens, batch.mask
    input, attention_mask, given = unpacked(input, attention_mask, model_kwargs)
    if takes(bridge.core).main is None and not (isinstance(input, Tensor) and input.is_floating_point()):
        prompts_with(bridge, input, given)  # says what is missing
    last = last_stream(bridge.hook_dict, n)
    at = {layer: f"blocks.{layer}.hook_resid_pre" if layer < n else last for layer in chosen}
    _, cache = bridge.run_with_cache(
        input,
        names_filter=list(at.values()),
        pos_slice=pos_slice,
        attention_mask=attention_mask,
        return_type=None,
        **given,
    )
    mask = attention_mask
    if mask is not None:
        mask = pick(mask, [pos_slice] if isinstance(pos_slice, int) else pos_slice, 1)
    held = dict(cache)
    del cache
    first = held[at[chosen[0]]]
    dtype = functools.reduce(torch.promote_types, [held[at[layer]].dtype for layer in chosen])
    streams = first.new_empty((len(chosen), *first.shape), dtype=dtype)
    for place, layer in enumerate(chosen):
        streams[place] = held.pop(at[layer])  # each goes as it is copied: two of all would be the most there is
    return Reading(streams, chosen, decode, mask, n, bridge.cfg.d_vocab_out, max_bytes)


def _raw(bridge: RunnableBridge) -> Decode:
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


def _classified(bridge: RunnableBridge) -> Decode:
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


def _decoder(bridge: RunnableBridge, kind: str | TunedLens, names: Mapping[str, Any]) -> Decode:
    """From a stream and its layer to logits.

    Args:
        bridge, kind: as for `lens`.
        names: of the adapters of each row, where they have their own.

    Raises:
        ValueError: there is no such kind, or the model has no unembedding to read with.
    """
    n = bridge.cfg.n_layers
    if "unembed.hook_out" not in bridge.hook_dict:
        raise ValueError(f"{bridge.cfg.model_name} has no unembedding: its stream cannot be read as tokens")
    if isinstance(kind, TunedLens):
        kind.check(bridge, unembedding=False)
        return lambda stream, layer: bridge(kind(stream, layer), start_at_layer=n, **names)
    if kind == "raw":
        return _raw(bridge)
    if kind != "normed":
        raise ValueError(f"kind is {kind!r}; it must be {', '.join(map(repr, KINDS))} or a TunedLens")
    if bridge.architecture.pooled is not None:
        return _classified(bridge)
    return lambda stream, layer: bridge(stream, start_at_layer=n, **names)
