"""Lenses: each layer's residual stream read as next tokens, raw, normed or tuned."""

from __future__ import annotations

import functools
import hashlib
import importlib
import json
import pickle
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor, nn
from tqdm.auto import tqdm

from adapters.inputs import takes
from adapters.points import module_at, path_from
from bridge.analysis.analysis import pick, refuse_no_stream
from bridge.arguments import check_positive, refuse_wrong_types, shown
from bridge.hooks.context import CURRENT, RunContext, setting
from bridge.hooks.hooks import HookPoint
from bridge.hooks.names import last_stream
from bridge.modules import state_of
from bridge.run.inputs import Input, RunnableBridge, prompts_with, unpacked
from bridge.run.recorder import PosSlice
from bridge.run.tokenization import texts_in

__all__ = ["Reading", "Top", "TunedLens", "lens"]

# --------------------------------------------------------------------------------------------------
# Tuned lenses: a learned affine map per layer that predicts the last layer's stream.
# --------------------------------------------------------------------------------------------------


_KIND = "linear_tuned_lens"


#: Python's errors for a damaged zip or pickle.
_DAMAGED = (
    EOFError,
    NotImplementedError,
    OSError,
    pickle.UnpicklingError,
    zipfile.BadZipFile,
    zlib.error,
)


class TunedLens(nn.Module):
    """An affine map per layer: the stream before the layer, plus a linear map of it (Belrose et al.
    2023, "Eliciting Latent Predictions from Transformers with the Tuned Lens").

    It loads folders that the package `tuned-lens` wrote (``params.pt`` and ``config.json``), and
    `save` writes the same format.

    Args:
        n_layers: the number of the model's layers.
        d_model: the width of its stream.
        bias: whether the maps have biases.

    Attributes:
        translators: a linear layer for the stream before each layer; new ones are zero, which is
            the logit lens.
        config: the contents of `config.json`.

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
        self.translators = nn.ModuleList(
            [nn.Linear(d_model, d_model, bias=bias) for _ in range(n_layers)]
        )
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

    def forward(
        self, stream: Float[Tensor, "*any d_model"], layer: int
    ) -> Float[Tensor, "*any d_model"]:
        """Predict the last layer's stream from a layer's stream.

        Args:
            stream: the residual stream before the layer.
            layer: from 0; ``n_layers``, the end, is returned unchanged.
        """
        if layer == len(self.translators):
            return stream
        return stream + self.translators[layer](stream)

    @classmethod
    @refuse_wrong_types
    def load(
        cls,
        folder: str | Path,
        bridge: RunnableBridge | None = None,
        check_unembedding: bool = True,
    ) -> TunedLens:
        """Load a lens.

        Args:
            folder: the folder with ``params.pt`` and ``config.json``.
            bridge: the model that it is for; the lens is put on that model's device.
            check_unembedding: reject a lens whose configuration identifies a different unembedding.

        Raises:
            FileNotFoundError: a file is missing.
            ValueError: it is a different kind of lens, for a different model, or damaged.
        """
        folder = Path(folder)
        for name in ("config.json", "params.pt"):
            if not (folder / name).is_file():
                raise FileNotFoundError(f"folder is {str(folder)!r}, which has no {name}")
        file = folder / "config.json"
        try:
            config = json.loads(file.read_text(encoding="utf-8"))
            if config.get("lens_type", _KIND) != _KIND:
                raise ValueError(
                    f"its lens is of type {config['lens_type']!r}; only {_KIND!r} can be read"
                )
            n_layers = config["num_hidden_layers"]
            d_model = config["d_model"]
            bias = config["bias"]
            file = folder / "params.pt"
            state = _read_maps(file, (n_layers, d_model, d_model))
            lens = cls(n_layers, d_model, bias)
            lens.translators.load_state_dict(state)
        except (
            *_DAMAGED,
            AttributeError,
            LookupError,
            RuntimeError,
            TypeError,
            ValueError,
        ) as error:
            raise ValueError(f"{file} cannot be used: {error}") from error
        lens.config |= config
        if bridge is not None:
            lens.check(bridge, check_unembedding)
            lens.to(bridge.cfg.device)
        return lens

    @refuse_wrong_types
    def save(self, folder: str | Path) -> None:
        """Write ``params.pt`` and ``config.json``.

        Args:
            folder: the folder, which is created if it is missing.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(self.translators.state_dict(), folder / "params.pt")
        (folder / "config.json").write_text(json.dumps(self.config), encoding="utf-8")

    @refuse_wrong_types
    def check(self, bridge: RunnableBridge, unembedding: bool = True) -> None:
        """Reject a model that the lens was not trained for.

        Args:
            bridge: the model.
            unembedding: also reject a model whose unembedding differs from the one used in
                training, as far as that is known.

        Raises:
            ValueError: its sizes or its unembedding differ.
        """
        n_layers, d_model = len(self.translators), self.config["d_model"]
        if (n_layers, d_model) != (bridge.cfg.n_layers, bridge.cfg.d_model):
            raise ValueError(
                f"the lens is for {n_layers} layers of width {d_model}; {bridge.cfg.model_name} has"
                f" {bridge.cfg.n_layers} of width {bridge.cfg.d_model}"
            )
        exact, short = self.config.get("unembed_sha256"), self.config["unembed_hash"]
        is_other = bool(
            exact != _exact_hash(bridge) if exact else short and short != unembedding_hash(bridge)
        )
        if unembedding and is_other:
            raise ValueError(
                "the lens was trained with another unembedding than that of"
                f" {bridge.cfg.model_name} (have its weights been processed?);"
                " check_unembedding=False uses it all the same"
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
        """Train a lens: minimise each layer's KL divergence from the model's own distribution.

        The model is not changed. The optimiser is Adam; the learning rate decreases linearly to
        zero.

        Args:
            bridge: the model, in evaluation mode.
            batches: texts, or tokens without padding. The padding of texts is excluded.
            epochs: the number of passes over the batches.
            learning_rate: the initial learning rate.
            verbose: show a progress bar.

        Raises:
            ValueError: there are no batches, the model is in training mode, or the learning rate is
                not above zero.

        Example:
            >>> from bridge import TransformerBridge
            >>> from bridge.lens import TunedLens
            >>> bridge = TransformerBridge.boot_embedded()
            >>> lens = TunedLens.fit(
            ...     bridge, ["The capital of France is Paris."], epochs=2, verbose=False
            ... )
        """
        if bridge.core.training:
            raise ValueError("the model is in training mode: call bridge.eval() first")
        if isinstance(batches, str) or (isinstance(batches, Tensor) and batches.ndim < 2):
            raise TypeError(
                f"batches is {shown(batches)}; it must be a list of batches, each of texts or"
                " tokens"
            )
        if not learning_rate > 0:
            raise ValueError(f"learning_rate is {learning_rate}; it must be above zero")
        masked = [_tokens_and_mask(bridge, batch) for batch in batches]
        if not masked or epochs < 1:
            raise ValueError(
                f"there are {len(masked)} batches and {epochs} epochs; a lens needs one of each, or"
                " more"
            )
        bridge.architecture.refuse_several_streams(bridge.cfg.model_name)
        lens = cls(bridge.cfg.n_layers, bridge.cfg.d_model).to(bridge.cfg.device)
        lens.config["base_model_name_or_path"] = bridge.cfg.model_name
        lens.config["unembed_hash"] = unembedding_hash(bridge)
        lens.config["unembed_sha256"] = _exact_hash(bridge)
        optimizer = torch.optim.Adam(lens.parameters(), lr=learning_rate)
        total = epochs * len(masked)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / total)
        progress = tqdm(total=total, desc="tuning a lens", unit="batch", disable=not verbose)
        with progress, torch.enable_grad():
            for batch, mask in masked * epochs:
                optimizer.zero_grad()
                divergence = _set_gradients(lens, bridge, batch, mask)
                optimizer.step()
                schedule.step()
                progress.set_postfix(divergence=f"{divergence:.3f}")
                progress.update()
        return lens.eval()


def _read_maps(file: Path, sizes: tuple[int, int, int]) -> dict[str, Tensor]:
    """Return the state dict of a lens's maps.

    Raises:
        ValueError: the file is damaged, or contains maps of other sizes.
    """
    if zipfile.is_zipfile(file) and (bad := zipfile.ZipFile(file).testzip()) is not None:
        raise ValueError(f"the checksum of {bad} in it is another")
    state: dict[str, Tensor] = torch.load(file, map_location="cpu", weights_only=True)
    weights = [value for name, value in state.items() if name.endswith("weight")]
    if (len(weights), *weights[0].shape) != sizes:
        raise ValueError(
            f"it holds {len(weights)} maps {list(weights[0].shape)}, config.json says {sizes}"
        )
    return state


def _set_gradients(
    lens: TunedLens, bridge: RunnableBridge, batch: Input, mask: Tensor | None
) -> float:
    """Set the gradients of a lens's maps on one batch, and return the mean divergence over layers.

    The gradients are computed with `torch.autograd.grad`, so that those of the model's own
    parameters stay unchanged.
    """
    n = bridge.cfg.n_layers
    names = [f"blocks.{layer}.hook_resid_pre" for layer in range(n)]
    with torch.no_grad():
        logits, cache = bridge.run_with_cache(batch, attention_mask=mask, names_filter=names)
    target = logits.float().log_softmax(-1)
    total = 0.0
    for layer, name in enumerate(names):  # one layer at a time: its logits are large
        stream = cache[name].detach()
        predicted = bridge(lens(stream, layer), start_at_layer=n).float().log_softmax(-1)
        divergences = (target.exp() * (target - predicted)).sum(-1)  # batch pos
        if mask is not None:
            divergences = divergences[mask.bool().to(divergences.device)]
        loss = divergences.mean()
        parameters = list(lens.translators[layer].parameters())
        gradients = torch.autograd.grad(loss, parameters)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        total += loss.item() / n
    return total


def _tokens_and_mask(bridge: RunnableBridge, batch: Input) -> tuple[Input, Tensor | None]:
    """Return a batch's tokens, and the mask of its real positions; None if none are padding."""
    if isinstance(batch, Mapping):
        inputs = {name: value for name, value in batch.items() if name != "attention_mask"}
        return inputs, batch.get("attention_mask")
    texts = None if isinstance(batch, str) else texts_in(batch)
    if texts is not None:
        padded = bridge.batch_of(texts)
        return padded.tokens, padded.mask
    return batch, None


def unembedding_hash(bridge: RunnableBridge) -> str:
    """Return the hash by which the package `tuned-lens` identifies an unembedding.

    It covers only a few numbers, rounded to one decimal, so a different unembedding may have the
    same hash.

    Args:
        bridge: the bridge.

    Example:
        >>> from bridge import TransformerBridge
        >>> from bridge.lens import unembedding_hash
        >>> len(unembedding_hash(TransformerBridge.boot_embedded()))
        64
    """
    return hashlib.sha256(np.array_str(_unembedding(bridge), precision=1).encode()).hexdigest()


def _exact_hash(bridge: RunnableBridge) -> str:
    """Return the hash of all numbers of an unembedding, which must not be on the ``meta``
    device."""
    return hashlib.sha256(np.ascontiguousarray(_unembedding(bridge)).tobytes()).hexdigest()


def _unembedding(bridge: RunnableBridge) -> NDArray[np.float32]:
    weight: Tensor = bridge.core.get_output_embeddings().weight
    return weight.detach().cpu().float().numpy()


# --------------------------------------------------------------------------------------------------
# Early readout: the residual stream of each layer, read as next tokens.
# --------------------------------------------------------------------------------------------------


#: A function from a stream and its layer to logits.
Decode = Callable[[Tensor, int], Tensor]
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
        tokens: those of the positions that were read, ``[batch, pos]``; None: the input was not
            tokens.
        bridge: the model, whose tokenizer names tokens in a picture.
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
    def probabilities(self, token: int) -> Float[Tensor, "layer batch pos"]:
        """Return the probability of one token in each layer.

        Args:
            token: its id.
        """
        self._check(token)
        # A view would keep all tokens alive.
        return self._gather(lambda logits: logits.softmax(-1)[..., token].clone())

    @refuse_wrong_types
    def ranks(self, token: int) -> Int[Tensor, "layer batch pos"]:
        """Return the number of tokens that are more likely than this one in each layer.

        Args:
            token: its id.
        """
        self._check(token)
        return self._gather(lambda logits: (logits > logits[..., token : token + 1]).sum(-1)).long()

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
            chosen: draw these tokens alone, such as ``[" Mary", " John"]``.
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
        options = {"rows": names} | options
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

    def _check(self, token: int) -> None:
        if not 0 <= token < self.d_vocab:
            raise ValueError(f"token is {token}; it must be from 0 to {self.d_vocab - 1}")

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


# --------------------------------------------------------------------------------------------------
# Decoding under the hooks and weights that were active when the lens read the stream.
# --------------------------------------------------------------------------------------------------


def _numbers_of(bridge: RunnableBridge) -> list[tuple[str, object]]:
    """Return the numbers that a model reads from its configuration and itself, such as a soft
    cap.
    """
    owners = (bridge.core.config.get_text_config(decoder=True), bridge.core)
    return [
        (name, x) for owner in owners for name, x in vars(owner).items() if type(x) in (int, float)
    ]


def _modules_behind(bridge: RunnableBridge, behind: Sequence[HookPoint]) -> list[nn.Module]:
    """Return the modules of the hook points behind the blocks, and the output layer."""
    paths = dict.fromkeys(hook.point.site.path for hook in behind)
    modules = [module_at(bridge.original_model, path) for path in paths if path]
    own = bridge.core.get_output_embeddings()
    # Without one there is a classifier's head, which is a hook point.
    return modules if own is None else [own, *modules]


def _functions_at(hooks: Sequence[HookPoint]) -> list[tuple[str, object]]:
    """Return the user's functions that change the activations of hook points, with their names."""
    return [
        (hook.name, listener.fn)
        for hook in hooks
        if hook.listeners
        for listener in hook.visible_listeners()
        if listener.kind == "fwd"
    ]


def as_read(
    bridge: RunnableBridge, decode: Decode, hooked: bool, maps: nn.Module | None = None
) -> Decode:
    """Return a decoder that raises an error if hooks or weights after the blocks have changed.

    Args:
        bridge: the bridge.
        decode: maps a stream and its layer to logits.
        hooked: whether decoding runs modules after the blocks, so that hooks there matter. (Hooks
            elsewhere have already acted on the streams.)
        maps: a trained lens, which is applied first.
    """
    behind = [hook for hook in bridge.hook_dict.values() if hook.point.depth >= bridge.cfg.n_layers]
    modules = _modules_behind(bridge, behind)
    if maps is not None:
        modules.append(maps)

    def hooks() -> list[tuple[str, object]]:
        return _functions_at(behind) if hooked else []

    hooks_then = hooks()

    def weights() -> tuple[object, ...]:
        return (*[state_of(module) for module in modules], *_numbers_of(bridge))

    weights_then = weights()

    def decoded(stream: Tensor, layer: int) -> Tensor:
        if hooks() != hooks_then:
            names = ", ".join(dict.fromkeys(name for name, _ in (*hooks_then, *hooks())))
            raise ValueError(
                f"the hooks at {names} have changed since this reading was made: ask it"
                " inside of the same `with` statement, or read again"
            )
        if weights() != weights_then:
            raise ValueError(
                "the weights behind the blocks were changed since this reading was made (processed,"
                " trained, written to, or adapters switched), or the lens or a number of the"
                " configuration: read again"
            )
        here = CURRENT.get()
        context = RunContext(here.shared, generation=here.generation, inherited=here.shared)
        with setting(CURRENT, context):
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
    """Decode the residual stream before each layer, and at the end, to next-token logits.

    The kinds are ``"normed"``, through the model's own final norm and unembedding (nostalgebraist
    2020, "interpreting GPT: the logit lens"); ``"raw"``, through the unembedding only; or a
    `TunedLens`, whose map comes before the final norm. A soft cap on the logits is applied except
    for ``"raw"``.

    Args:
        bridge: the bridge.
        input: a text, several texts, token ids, or tokens ``[pos]`` or ``[batch, pos]``. Shorter
            texts are left-padded, so that position -1 is the last of each.
        kind: see above.
        pos_slice: the positions to read, such as -1; None: all. Other positions are not kept.
        layers: the layers whose input streams are read, from 0; ``n_layers`` is the end; None: all.
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
    chosen = _chosen_layers(layers, n)
    adapters = {name: value for name, value in model_kwargs.items() if name == "adapter_names"}
    maps = kind if isinstance(kind, TunedLens) else None
    decode = as_read(bridge, _decoder(bridge, kind, adapters), kind != "raw", maps)
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
    return Reading(streams, chosen, decode, mask, *sizes, tokens, bridge)


def _tokens_of(bridge: RunnableBridge, input: Input) -> Int[Tensor, "batch pos"] | None:
    """Return the tokens of an input that is no text any more; None for embeddings and images."""
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


def _raw(bridge: RunnableBridge) -> Decode:
    """Return a decoder that applies only the unembedding (`W_U` and `b_U`), without a soft cap.

    Raises:
        ValueError: the unembedding does not read vectors of the stream's width.
    """
    readout = replace(bridge.architecture.readout, soft_cap=None)
    unembed = bridge.core.get_submodule(readout.path)
    width = getattr(unembed, "in_features", bridge.cfg.d_model)
    if width != bridge.cfg.d_model:
        raise ValueError(
            f"the unembedding of {bridge.cfg.model_name} reads vectors of width {width}, not of the"
            f" stream's {bridge.cfg.d_model}: use another kind than 'raw'"
        )
    return lambda stream, layer: readout.logits(
        unembed.forward(stream * readout.factor_in), bridge.core
    )


def _classified(bridge: RunnableBridge) -> Decode:
    """Read each position of an image through the final norm and the classifier's head.

    The head reads one position, or a mean of several; in that case its logits at the end are the
    mean of these readings.

    Raises:
        ValueError: the norm reads that mean.
    """
    if why := bridge.architecture.why_no_logit_sum():
        raise ValueError(f"{bridge.cfg.model_name}: {why}")
    read = _raw(bridge)
    final = bridge.architecture.stack.final_norm
    if final is None:
        return read
    norm = bridge.original_model.get_submodule(path_from(bridge.original_model, final.path))
    return lambda stream, layer: read(norm.forward(stream), layer)


def _decoder(bridge: RunnableBridge, kind: str | TunedLens, names: Mapping[str, Any]) -> Decode:
    """Return the function from a stream and its layer to logits.

    Args:
        bridge, kind: as for `lens`.
        names: the names of each row's adapters, if rows have different ones.

    Raises:
        ValueError: there is no such kind, or the model has no unembedding to read with.
    """
    n = bridge.cfg.n_layers
    if "unembed.hook_out" not in bridge.hook_dict:
        raise ValueError(
            f"{bridge.cfg.model_name} has no unembedding: its stream cannot be read as tokens"
        )
    if isinstance(kind, TunedLens):
        kind.check(bridge, unembedding=False)
        return lambda stream, layer: bridge(kind(stream, layer), start_at_layer=n, **names)
    if kind == "raw":
        return _raw(bridge)
    if kind != "normed":
        raise ValueError(
            f"kind is {kind!r}; it must be {', '.join(map(repr, KINDS))} or a TunedLens"
        )
    if bridge.architecture.pooled is not None:
        return _classified(bridge)
    return lambda stream, layer: bridge(stream, start_at_layer=n, **names)
