"""The streams of a run, decoded to next tokens by a lens."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from adapters.inputs import takes
from bridge.analysis.analysis import pick, refuse_no_stream
from bridge.arguments import check_positive, refuse_wrong_types
from bridge.hooks.names import last_stream
from bridge.lens.maps import Lens
from bridge.lens.readout import Decode, as_read, decoder
from bridge.run.inputs import Input, RunnableBridge, prompts_with, unpacked
from bridge.run.recorder import PosSlice
from bridge.run.tokenization import texts_in

#: The most logits in memory at once.
MOST_LOGITS = 2**25


@dataclass(frozen=True, repr=False)
class Top:
    """The most likely tokens that a lens reads at each layer and position.

    Attributes:
        tokens: the ids of the tokens, most likely first, ``[layer, batch, pos, k]``.
        probabilities: the probabilities of these tokens.
    """

    tokens: Int[Tensor, "layer batch pos k"]
    probabilities: Float[Tensor, "layer batch pos k"]

    def __repr__(self) -> str:
        return f"Top(tokens [layer batch pos k]: {list(self.tokens.shape)})"


@dataclass(frozen=True, repr=False)
class Reading:
    """The residual streams of a run, decoded by a lens. Logits are computed on access.

    Attributes:
        streams: the stream before each selected layer, ``[layer, batch, pos, d_model]``; layer
            ``n_layers`` is the end.
        layers: the selected layers.
        decode: maps ``[batch, pos, d_model]`` and a layer to logits ``[batch, pos, d_vocab]``.
        mask: ``[batch, pos]``, 0 where a shorter prompt is (left-)padded; None: no padding.
        n_layers: the number of the model's layers.
        d_vocab: the size of the vocabulary.
        max_bytes: the approximate memory of logits, and of what is computed from them, per chunk of
            positions (at least one); None: a fast default. It does not limit the results of
            `logits` and `stack`.
        tokens: the tokens at the positions read, ``[batch, pos]``; None: the input was not
            tokens.
        bridge: the model, whose tokenizer names tokens in a picture.
        title: the lens, as the title of a picture.
    """

    streams: Float[Tensor, "layer batch pos d_model"]
    layers: tuple[int, ...]
    decode: Decode
    mask: Int[Tensor, "batch pos"] | None
    n_layers: int
    d_vocab: int
    max_bytes: int | None = None
    tokens: Int[Tensor, "batch pos"] | None = None
    bridge: RunnableBridge | None = None
    title: str = "Logit lens"
    picture: ClassVar[str] = "logit_lens"

    def __repr__(self) -> str:
        sizes = list(self.streams.shape[:3])
        layers = f"{self.labels[0]} to {self.labels[-1]}"
        return f"Reading([layer batch pos] {sizes}, {layers}, of {self.d_vocab} tokens)"

    @property
    def labels(self) -> list[str]:
        """Return labels such as ``0_pre`` and ``final_post``."""
        return ["final_post" if layer == self.n_layers else f"{layer}_pre" for layer in self.layers]

    @refuse_wrong_types
    def logits(self, layer: int) -> Float[Tensor, "batch pos d_vocab"]:
        """Return the logits of one layer.

        Args:
            layer: one of `layers`; -1 is the last of these.

        Raises:
            ValueError: it was not read.
        """
        if layer == -1:
            layer = self.layers[-1]
        if layer not in self.layers:
            raise ValueError(
                f"layer {layer} was not read; there are {', '.join(map(str, self.layers))}"
            )
        return self.decode(self.streams[self.layers.index(layer)], layer)

    def stack(self) -> Float[Tensor, "layer batch pos d_vocab"]:
        """Return the logits of all layers at all positions. The other methods avoid this large
        tensor.
        """
        return torch.stack([self.logits(layer) for layer in self.layers])

    @refuse_wrong_types
    def top(self, k: int = 5) -> Top:
        """Return the `k` most likely tokens of each layer.

        Args:
            k: the number of tokens.

        Raises:
            ValueError: there are fewer tokens.
        """
        if not 1 <= k <= self.d_vocab:
            raise ValueError(f"k is {k}; it must be from 1 to {self.d_vocab}")

        def likeliest(logits: Tensor) -> Tensor:
            best = logits.softmax(-1).topk(k, -1)
            return torch.cat([best.indices.to(best.values.dtype), best.values], -1)

        tokens, probabilities = self._gather(likeliest).split(k, -1)
        return Top(tokens.long(), probabilities)

    @refuse_wrong_types
    def probabilities(self, token: int | str) -> Float[Tensor, "layer batch pos"]:
        """Return the probability of one token in each layer.

        Args:
            token: its id, or its text, such as ``" Mary"``.
        """
        number = self._id(token)
        # A view would keep all tokens alive.
        return self._gather(lambda logits: logits.softmax(-1)[..., number].clone())

    @refuse_wrong_types
    def ranks(self, token: int | str) -> Int[Tensor, "layer batch pos"]:
        """Return the number of tokens that are more likely than this one in each layer: 0 where it
        is the likeliest.

        Args:
            token: its id, or its text.
        """
        number = self._id(token)
        return self._gather(
            lambda logits: (logits > logits[..., number : number + 1]).sum(-1)
        ).long()

    def divergence(self) -> Float[Tensor, "layer batch pos"]:
        """Return the KL divergence of each layer's distribution from the last one's, in nats."""
        last = self.layers[-1]
        rows = []
        for layer, stream in zip(self.layers, self.streams, strict=True):
            parts = []
            ends = self._parts(self.streams[-1], copies=7)
            for part, end in zip(self._parts(stream, copies=7), ends, strict=True):
                target = self.decode(end, last).double().log_softmax(-1)
                predicted = self.decode(part, layer).double().log_softmax(-1)
                parts.append((target.exp() * (target - predicted)).sum(-1))
            rows.append(torch.cat(parts, 1).to(self.streams.dtype))
        return torch.stack(rows)

    @refuse_wrong_types
    def draw(
        self,
        row: int | None = None,
        tokens: Sequence[str] | None = None,
        chosen: Sequence[str] | None = None,
        top: int = 5,
        **options: Any,
    ) -> Any:
        """Draw one prompt with `bridge.pictures.logit_lens`, without its padding; or the
        probability of some tokens, with `bridge.pictures.chosen_lens`.

        Args:
            row: which prompt; None: the only one.
            tokens: the text of each position; None: as the tokenizer has it.
            chosen: draw only these tokens, such as ``[" Mary", " John"]``.
            top: the number of tokens in a tooltip.
            options: options of the picture, such as `title`.

        Raises:
            ImportError: the dependencies of pictures are not installed.
            ValueError: several prompts and no `row`; a model that did not read tokens and has no
                `tokens`; a model without a tokenizer.

        Example:
            >>> from bridge import TransformerBridge
            >>> from bridge.lens import lens
            >>> reading = lens(TransformerBridge.boot_embedded(), "The capital of France is")
            >>> reading.draw(), reading.draw(chosen=[" Paris", " Rome"])
            (Picture('Logit lens'), Picture('Logit lens of chosen tokens'))
        """
        one, words = self._of_row(row, tokens)
        names = ["embed" if layer == 0 else str(layer - 1) for layer in self.layers]
        title = self.title if chosen is None else f"{self.title} of chosen tokens"
        options = {"rows": names, "title": title} | options
        pictures = importlib.import_module("bridge.pictures")
        if chosen is not None:
            return pictures.chosen_lens(one.stack(), words, self.bridge, chosen, **options)
        best = one.top(top)
        return pictures.token_lines.likeliest_tokens(
            best.tokens[:, 0], best.probabilities[:, 0], words, self.bridge, **options
        )

    def _of_row(
        self, row: int | None, tokens: Sequence[str] | None
    ) -> tuple[Reading, Sequence[str]]:
        """Return the reading of one prompt without its padding, and the text of each position."""
        rows = self.streams.shape[1]
        if row is None and rows > 1:
            raise ValueError(f"the reading is of {rows} prompts: draw(row=0) draws the first")
        row = row or 0
        if not -rows <= row < rows:
            raise ValueError(f"row is {row}; the reading is of {rows} prompts")
        if self.bridge is None or self.bridge.tokenizer is None:
            raise ValueError("the model has no tokenizer, so its predictions have no texts to draw")
        real = slice(None) if self.mask is None else self.mask[row].bool()
        ids = None if self.tokens is None else self.tokens[row, None, real]
        streams = self.streams[:, row, real].unsqueeze(1)
        one = replace(self, streams=streams, mask=None, tokens=ids)
        if tokens is not None:
            return one, tokens
        if ids is None:
            raise ValueError(
                "the model did not read tokens: pass tokens=, a text for each position"
            )
        return one, [self.bridge.to_single_str_token(token) for token in ids[0].tolist()]

    def _id(self, token: int | str) -> int:
        """Return a token's id.

        Raises:
            ValueError: there is no such token; or a text is given, and the reading has no bridge.
        """
        if isinstance(token, int):
            number = token
        elif self.bridge is None:
            raise ValueError(f"a reading without a bridge takes a token's id, not {token!r}")
        else:
            number = self.bridge.to_single_token(token)
        if not 0 <= number < self.d_vocab:
            raise ValueError(f"token is {token}; it must be from 0 to {self.d_vocab - 1}")
        return number

    def _gather(self, look: Callable[[Tensor], Tensor]) -> Tensor:
        """Compute a function of the logits of each layer, some positions at a time."""
        results = []
        for layer, stream in zip(self.layers, self.streams, strict=True):
            parts = [look(self.decode(part, layer).double()) for part in self._parts(stream)]
            results.append(torch.cat(parts, 1))
        return torch.stack(results)

    def _parts(
        self, stream: Float[Tensor, "batch pos d_model"], copies: int = 3
    ) -> Iterator[Tensor]:
        """Yield chunks of positions, small enough that float64 copies of their logits fit in
        memory.
        """
        of_position = stream.shape[0] * self.d_vocab
        if self.max_bytes is None:
            width = MOST_LOGITS // of_position
        else:
            width = self.max_bytes // (of_position * (stream.element_size() + 8 * copies))
        yield from stream.split(max(1, width), 1)


@refuse_wrong_types
def lens(
    bridge: RunnableBridge,
    input: Input,
    kind: str | Lens = "normed",
    pos_slice: PosSlice = None,
    layers: Sequence[int] | None = None,
    prepend_bos: bool | None = None,
    attention_mask: Int[Tensor, "batch pos"] | None = None,
    max_bytes: int | None = None,
    **model_kwargs: Any,
) -> Reading:
    """Decode the residual stream before each layer, and at the end, to next-token logits.

    The kinds are ``"normed"``, through the model's own final norm and unembedding (nostalgebraist
    2020, "interpreting GPT: the logit lens"); ``"raw"``, through the unembedding only; or a `Lens`,
    such as a `TunedLens` or a `JacobianLens`, whose map comes before the final norm. A soft cap on
    the logits is applied except for ``"raw"``.

    Args:
        bridge: the bridge.
        input: a text, several texts, token ids, or tokens ``[pos]`` or ``[batch, pos]``. Shorter
            texts are left-padded, so that position -1 is the last of each.
        kind: see above.
        pos_slice: the positions to read, such as -1; None: all. Other positions are not kept.
        layers: the layers whose input streams are read, from 0; ``n_layers`` is the end; None: all
            that the lens has maps for.
        prepend_bos: begin texts with BOS; None: the bridge's default.
        attention_mask: for tokens: 1 for tokens and 0 for padding.
        max_bytes: roughly how much memory the reading's logits may take at once (see `Reading`).
        model_kwargs: further arguments of the model, such as ``pixel_values=``.

    Returns:
        A reading, which computes logits on request. If hooks or weights after the blocks have
        changed by then, it raises an error.

    Raises:
        ValueError: an unknown kind or layer; a lens for another model; a model with several
            residual streams.

    Example:
        >>> from bridge import TransformerBridge
        >>> from bridge.lens import lens
        >>> bridge = TransformerBridge.boot_embedded()
        >>> reading = lens(
        ...     bridge, ["The capital of France is", "The capital of Italy is"], pos_slice=-1
        ... )
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
    adapters = {name: value for name, value in model_kwargs.items() if name == "adapter_names"}
    if isinstance(kind, Lens):
        kind.check(bridge, unembedding=False)
        chosen = _chosen_layers(kind.layers if layers is None else layers, n)
        mapped = functools.partial(_mapped, kind, decoder(bridge, "normed", adapters))
        for layer in chosen:
            kind.check_layer(layer)
        decode = as_read(bridge, mapped, True, kind)
    else:
        chosen = _chosen_layers(layers, n)
        decode = as_read(bridge, decoder(bridge, kind, adapters), kind != "raw")
    texts = texts_in(input)
    if texts is not None:
        if attention_mask is not None:
            raise ValueError("attention_mask is for tokens; for texts it is computed")
        batch = bridge.batch_of(texts, prepend_bos, "left")
        input, attention_mask = batch.tokens, batch.mask
    input, attention_mask, arguments = unpacked(input, attention_mask, model_kwargs)
    if takes(bridge.core).main is None:
        _check_inputs(bridge, input, arguments)
    last = last_stream(bridge.hook_dict, n)
    names = [f"blocks.{layer}.hook_resid_pre" if layer < n else last for layer in chosen]
    _, cache = bridge.run_with_cache(
        input,
        names_filter=names,
        pos_slice=pos_slice,
        attention_mask=attention_mask,
        return_type=None,
        **arguments,
    )
    mask = attention_mask
    positions = [pos_slice] if isinstance(pos_slice, int) else pos_slice
    if mask is not None:
        mask = pick(mask, positions, 1)
    tokens = _tokens_of(bridge, input)
    if tokens is not None:
        tokens = pick(tokens, positions, 1)
    activations = dict(cache)
    del cache
    streams = _stacked(activations, names)
    sizes = (n, bridge.cfg.d_vocab_out, max_bytes)
    title = kind.title if isinstance(kind, Lens) else Lens.title
    return Reading(streams, chosen, decode, mask, *sizes, tokens, bridge, title)


def _mapped(maps: Lens, read: Decode, stream: Tensor, layer: int) -> Tensor:
    """Decode a layer's stream after a lens's map."""
    return read(maps(stream, layer), layer)


def _tokens_of(bridge: RunnableBridge, input: Input) -> Int[Tensor, "batch pos"] | None:
    """Return the tokens of an input that is already tokenized; None for embeddings and images."""
    if takes(bridge.core).main is not None or input is None:
        return None
    tokens = torch.as_tensor(input)
    if tokens.is_floating_point():
        return None
    return tokens if tokens.ndim > 1 else tokens[None]


def _check_inputs(bridge: RunnableBridge, input: Input, arguments: dict[str, Any]) -> None:
    """Check the inputs of a model that does not take tokens."""
    if not (isinstance(input, Tensor) and input.is_floating_point()):
        prompts_with(bridge, input, arguments)  # raises an error that names what is missing


def _chosen_layers(layers: Sequence[int] | None, n: int) -> tuple[int, ...]:
    """Return the layers to read, from 0 to `n`, the end.

    Raises:
        ValueError: there is no such layer, or one is listed twice.
    """
    if layers is None:
        return tuple(range(n + 1))
    chosen = tuple(layer + n + 1 if layer < 0 else layer for layer in layers)
    out_of_range = any(not 0 <= layer <= n for layer in chosen)
    if not chosen or out_of_range or len(set(chosen)) < len(chosen):
        raise ValueError(
            f"layers are {list(layers)}; they must be different ones from 0 to {n}, the end"
        )
    return chosen


def _stacked(activations: dict[str, Tensor], names: Sequence[str]) -> Tensor:
    """Stack activations into one tensor, removing each from the dictionary once it is copied, so
    that they are not all in memory twice.
    """
    first = activations[names[0]]
    dtype = functools.reduce(torch.promote_types, [activations[name].dtype for name in names])
    stack = first.new_empty((len(names), *first.shape), dtype=dtype)
    del first
    for place, name in enumerate(names):
        stack[place] = activations.pop(name)
    return stack
