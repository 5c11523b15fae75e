"""Jacobian lenses: the mean derivative of the last stream with respect to each layer's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from tqdm.auto import tqdm

from adapters.inputs import gives_cache
from bridge.analysis.analysis import refuse_no_stream, refuse_training
from bridge.arguments import check_positive, refuse_wrong_types
from bridge.hooks.hooks import HookPoint
from bridge.hooks.names import last_stream
from bridge.lens.maps import Lens
from bridge.lens.readout import exact_hash, functions_at
from bridge.lens.tuned import DAMAGED
from bridge.run.inputs import RunnableBridge
from bridge.run.run import hooked
from bridge.run.tokenization import Text

#: Metadata of a file, with the only values that are accepted.
_CONVENTIONS = {
    "estimator": "jacobian_lens",
    "hook_convention": "blocks.{layer}.hook_out",
    "processing": {"compatibility_mode": False, "weight_basis": "raw_huggingface"},
}
#: The first tokens of a text, whose streams are unusually large.
SKIPPED = 16


class JacobianLens(Lens):
    """A matrix per layer: the derivative of the last stream with respect to the layer's, summed
    over later tokens and averaged over earlier ones and texts (Gurnee et al. 2026, "Verbalizable
    Representations Form a Global Workspace in Language Models").

    Files have the format of the paper's code and of `transformer_lens.tools.analysis.JacobianLens`.
    A file counts the blocks after which a stream is read; `maps` counts, as `Reading` does, the
    blocks before which it is read: 0 in the file is 1 here.

    Args:
        maps: the matrix of each layer, by the layer before which the stream is read: 1 to
            ``n_layers - 1``.
        n_prompts: the number of texts in the average.
        metadata: how it was fitted, under TransformerLens's names.

    Attributes:
        n_prompts, metadata: as above.

    Example:
        >>> from bridge import TransformerBridge
        >>> from bridge.embedded import prompts
        >>> from bridge.lens import JacobianLens
        >>> bridge = TransformerBridge.boot_embedded()
        >>> texts = [prompt.text + prompt.answer for prompt in prompts("ioi", 4)]
        >>> lens = JacobianLens.fit(bridge, texts, skip_first=4, verbose=False)
        >>> lens.layers
        (1, 2, 3, 4)
        >>> bridge.lens("The capital of France is", lens, pos_slice=-1).top(1).tokens.shape
        torch.Size([4, 1, 1, 1])
    """

    title = "Jacobian lens"

    matrices: Tensor

    @refuse_wrong_types
    def __init__(
        self,
        maps: Mapping[int, Float[Tensor, "d_model d_model"]],
        n_prompts: int,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.n_prompts, self.metadata = n_prompts, dict(metadata or {})
        for name, value in (_CONVENTIONS | self.metadata).items():
            if value != _CONVENTIONS.get(name, value):
                raise ValueError(
                    f"its {name} is {value!r}; only {_CONVENTIONS[name]!r} can be used"
                )
        n_layers: int = self.metadata.get("target_layer", max(maps, default=0)) + 1
        if not set(maps) <= set(range(1, n_layers)) or not maps:
            raise ValueError(
                f"maps are of the layers {list(maps)}; they must be of some of 1 to {n_layers - 1}"
            )
        self._layers = (*sorted(maps), n_layers)
        matrices = [maps[layer].detach().float() for layer in self._layers[:-1]]
        self.register_buffer("matrices", torch.stack([*matrices, torch.eye(len(matrices[0]))]))

    def __repr__(self) -> str:
        return f"JacobianLens(layers {self.layers}, of {self.n_prompts} texts)"

    @property
    def maps(self) -> dict[int, Tensor]:
        """Return the matrix of each layer, by the layer before which the stream is read."""
        return dict(zip(self.layers[:-1], self.matrices[:-1], strict=True))

    @property
    def layers(self) -> tuple[int, ...]:
        return self._layers

    def matrix(self, layer: int) -> Float[Tensor, "d_model d_model"]:
        return self.matrices[self.layers.index(layer)]

    def forward(
        self, stream: Float[Tensor, "*any d_model"], layer: int
    ) -> Float[Tensor, "*any d_model"]:
        if layer == self.layers[-1]:
            return stream
        return (stream.float() @ self.matrix(layer).to(stream.device).T).to(stream.dtype)

    @refuse_wrong_types
    def check(self, bridge: RunnableBridge, unembedding: bool = True) -> None:
        """Reject a model that the lens was not fitted for.

        Args:
            bridge: the model.
            unembedding: also reject a model with a different unembedding or, if the file does not
                identify the unembedding, with a different name.

        Raises:
            ValueError: its sizes, name or unembedding differ; its weights are processed.
        """
        refuse_no_stream(bridge)
        _refuse_processed(bridge)
        name, cfg = bridge.cfg.model_name, bridge.cfg
        sizes = (self.layers[-1], self.matrices.shape[-1])
        if sizes != (cfg.n_layers, cfg.d_model):
            raise ValueError(
                f"the lens is for {sizes[0]} layers of width {sizes[1]}; {name} has {cfg.n_layers}"
                f" of width {cfg.d_model}"
            )
        if not unembedding:
            return
        exact, fitted_on = self.metadata.get("unembed_sha256"), self.metadata.get("model_name")
        is_other = bool(
            exact != exact_hash(bridge) if exact else fitted_on and Path(fitted_on).name != name
        )
        if is_other:
            raise ValueError(
                f"the lens was fitted on {fitted_on}, or on other weights than those of {name};"
                " unembedding=False uses it all the same"
            )

    @classmethod
    def is_at(cls, path: Path) -> bool:
        return path.is_file() or (path / "lens.pt").is_file()

    @classmethod
    @refuse_wrong_types
    def load(
        cls, path: str | Path, /, bridge: RunnableBridge | None = None, unembedding: bool = True
    ) -> JacobianLens:
        """Load a lens that TransformerLens, the paper's code or `save` wrote.

        Args:
            path: the file, or a folder with a ``lens.pt``.
            bridge: the model that it is for; the lens is put on that model's device.
            unembedding: as for `check`.

        Raises:
            FileNotFoundError: there is no file.
            ValueError: it is a different kind of lens, damaged, for a different model, or follows
                another convention.
        """
        path = Path(path)
        file = path / "lens.pt" if path.is_dir() else path
        if not file.is_file():
            raise FileNotFoundError(f"path is {str(path)!r}, which is no file, and has no lens.pt")
        try:
            lens = cls(*_read(torch.load(file, map_location="cpu", weights_only=True)))
        except (
            *DAMAGED,
            LookupError,
            AttributeError,
            RuntimeError,
            TypeError,
            ValueError,
        ) as error:
            raise ValueError(f"{file} cannot be used: {error}") from error
        if bridge is not None:
            lens.on(bridge, unembedding).to(bridge.cfg.device)
        return lens

    @refuse_wrong_types
    def save(self, path: str | Path, dtype: torch.dtype = torch.float32) -> None:
        """Write the lens in the format of TransformerLens and the paper's code.

        Args:
            path: the file.
            dtype: the matrices' type; published files use ``torch.float16``.
        """
        maps = {layer - 1: matrix.cpu().to(dtype) for layer, matrix in self.maps.items()}
        content = {
            "J": maps,
            "n_prompts": self.n_prompts,
            "source_layers": list(maps),
            "d_model": self.matrices.shape[-1],
            "metadata": self.metadata,
        }
        torch.save(content, path)

    def merged_with(self, others: Sequence[JacobianLens]) -> JacobianLens:
        lenses = [self, *others]
        counts = torch.tensor([lens.n_prompts for lens in lenses])
        facts = [lens.metadata | {"layers": lens.layers, "n_prompts": 0} for lens in lenses]
        if facts != [facts[0]] * len(lenses) or int(counts.min()) < 1:
            raise ValueError(
                f"the lenses are means of {counts.tolist()} texts, by {facts}: they must be fitted"
                " in the same way, on known numbers of texts"
            )
        n = int(counts.sum())
        mean = torch.stack([lens.matrices.cpu() for lens in lenses], -1) @ counts.float() / n
        maps = dict(zip(self.layers[:-1], mean, strict=False))
        return JacobianLens(maps, n, self.metadata | {"n_prompts": n})

    @classmethod
    @refuse_wrong_types
    def fit(
        cls,
        bridge: RunnableBridge,
        texts: Sequence[Text] | Sequence[Int[Tensor, " pos"]],
        skip_first: int = SKIPPED,
        max_tokens: int = 128,
        at_once: int = 16,
        corpus: str = "",
        verbose: bool = True,
    ) -> JacobianLens:
        """Compute a lens: the derivatives, averaged over texts. Each text takes ``d_model``
        vector-Jacobian products.

        The model is not changed. Besides the maps, this needs the memory of one run and of
        `at_once` rows of gradients.

        Args:
            bridge: the model, with its own weights, in evaluation mode.
            texts: texts, chats, or tokens ``[pos]``; one hundred of 128 tokens are enough for a
                first look (Gurnee et al. used 1000).
            skip_first: the number of first tokens in each text that are excluded. The last token is
                excluded too.
            max_tokens: the number of tokens to which longer texts are truncated.
            at_once: the number of output coordinates in one backward pass.
            corpus: the texts' name, recorded in the file.
            verbose: show a progress bar.

        Raises:
            ValueError: a text has too few tokens; the model is in training mode, not causal, in
                half precision, or has processed weights or several streams.
            RuntimeError: the call is in inference mode.
        """
        refuse_no_stream(bridge)
        refuse_training(bridge.core)
        _refuse_processed(bridge)
        _refuse_no_derivatives(bridge)
        check_positive("at_once", at_once)
        check_positive("skip_first", skip_first + 1)
        prompts = _tokens_of(bridge, texts, skip_first, max_tokens)
        maps = dict(enumerate(_mean_jacobians(bridge, prompts, skip_first, at_once, verbose), 1))
        metadata = {
            **_CONVENTIONS,
            "model_name": bridge.cfg.model_name,
            "unembed_sha256": exact_hash(bridge),
            "target_layer": bridge.cfg.n_layers - 1,
            "corpus": corpus,
            "n_prompts": len(prompts),
            "max_seq_len": max_tokens,
            "skip_first_positions": skip_first,
        }
        lens = cls(maps, len(prompts), metadata).on(bridge, unembedding=False)
        return lens.to(bridge.cfg.device)


def _read(content: Mapping[str, Any]) -> tuple[dict[int, Tensor], int, dict[str, Any]]:
    """Return the maps, the number of texts and the metadata in a file.

    Raises:
        ValueError: they are missing or do not fit each other.
    """
    if "J" not in content:
        raise ValueError(f"it has no 'J', but {', '.join(map(str, content))}")
    maps = {layer + 1: matrix for layer, matrix in content["J"].items()}
    if len(next(iter(maps.values()))) != content["d_model"]:
        raise ValueError(f"its matrices are not of width {content['d_model']}, as it says")
    return maps, content.get("n_prompts", 0), content.get("metadata") or {}


def _refuse_processed(bridge: RunnableBridge) -> None:
    """Reject a model with processed weights: its stream and unembedding differ.

    Raises:
        ValueError: its weights are processed.
    """
    done = [name for name, state in bridge.cfg.processed.items() if state == "done"]
    if done:
        raise ValueError(
            f"the weights of {bridge.cfg.model_name} are processed ({', '.join(done)}); Jacobian"
            " lenses are for a model's own weights: use a bridge without process_weights"
        )


def _refuse_no_derivatives(bridge: RunnableBridge) -> None:
    """Reject a model for which no lens can be computed, and half precision.

    Raises:
        ValueError: the model is not causal, has one layer, or computes in half precision, as under
            autocast.
        RuntimeError: the call is in inference mode.
    """
    cfg = bridge.cfg
    if cfg.attention_dir != "causal" or bridge.core.config.is_encoder_decoder or cfg.n_layers < 2:
        raise ValueError(
            f"a Jacobian lens is for causal decoders of two layers or more; {cfg.model_name} has"
            f" {cfg.n_layers}, and attention {cfg.attention_dir}"
        )
    if cfg.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"{cfg.model_name} computes in {cfg.dtype}, and so would its derivatives: fit the lens"
            " on the model in float32; it can then read this one"
        )
    if torch.is_autocast_enabled(cfg.device.type):
        raise ValueError(
            "derivatives under torch.autocast are in half precision: fit outside of it"
        )
    if torch.is_inference_mode_enabled():
        raise RuntimeError("a Jacobian lens needs gradients: fit it outside of inference_mode()")


def _tokens_of(
    bridge: RunnableBridge,
    texts: Sequence[Text] | Sequence[Tensor],
    skip_first: int,
    max_tokens: int,
) -> list[Tensor]:
    """Return the tokens of each text, ``[1, pos]``.

    Raises:
        ValueError: there are no texts, or a text has too few tokens.
    """
    tokens = [text[None] if isinstance(text, Tensor) else bridge.to_tokens(text) for text in texts]
    rows = [row[:, :max_tokens].to(bridge.cfg.device) for row in tokens]
    short = {i: row.shape[1] for i, row in enumerate(rows) if row.shape[1] < skip_first + 2}
    if short or not rows:
        raise ValueError(
            f"these texts have too few tokens (by index; of {len(rows)}): {short}. The first"
            f" {skip_first} and the last are excluded: pass longer texts, or skip_first="
        )
    return rows


def _mean_jacobians(
    bridge: RunnableBridge, prompts: Sequence[Tensor], skip_first: int, at_once: int, verbose: bool
) -> Tensor:
    """Return the derivatives of the last stream with respect to the streams before layer 1 and
    later layers, averaged over texts: ``[layer, d_model, d_model]``."""
    d_model = bridge.cfg.d_model
    total = torch.zeros(bridge.cfg.n_layers - 1, d_model, d_model, device="cpu")
    progress = tqdm(prompts, desc="fitting a lens", unit="text", disable=not verbose)
    with torch.enable_grad():
        batches = _batches(_streams(bridge, prompts[0][:, :-1], skip_first))
        for tokens in progress:
            # The last token has no target: the run does not need it.
            rows = tokens[:, :-1].expand(1 if batches else at_once, -1)
            streams = _streams(bridge, rows, skip_first)
            for start, of_layers in _rows(streams, rows.shape[1] - skip_first, at_once, batches):
                total[:, start : start + at_once] += of_layers / len(prompts)
    return total


def _batches(streams: Sequence[Tensor]) -> bool:
    """Tell whether a backward pass over one copy of a text can compute several products: some
    functions and kernels do not support it."""
    try:
        next(_rows(streams, 1, 2, True))
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        return False
    return True


def _rows(
    streams: Sequence[Tensor], length: int, at_once: int, batches: bool
) -> Iterator[tuple[int, Tensor]]:
    """Yield rows of the derivatives: the first one's index, and the rows ``[layer, row, d_model]``.

    Args:
        streams: those before layer 1 and later layers, and at the end, ``[copy, pos, d_model]``.
        length: the number of positions, from the end, that are included.
        at_once: the number of rows in a backward pass.
        batches: whether one copy of the text serves all these rows; otherwise each row has its
            own copy.
    """
    *sources, end = streams
    d_model = end.shape[-1]
    cotangent = end.new_zeros(at_once, *end.shape[1:])
    for start in range(0, d_model, at_once):
        rows = torch.arange(min(at_once, d_model - start), device=end.device)
        cotangent.zero_()
        cotangent[rows, -length:, start + rows] = 1
        gradients = torch.autograd.grad(
            end,
            sources,
            cotangent.unsqueeze(1) if batches else cotangent,
            retain_graph=start + at_once < d_model,
            is_grads_batched=batches,
        )
        of_rows = [x.reshape(at_once, *end.shape[1:])[: len(rows), -length:] for x in gradients]
        yield start, torch.stack([x.float().mean(1).cpu() for x in of_rows])


def _streams(bridge: RunnableBridge, tokens: Tensor, skip_first: int) -> list[Tensor]:
    """Return the streams before each layer from 1 on, and at the end, as one graph.

    No gradients are needed at the first `skip_first` tokens. If the model can continue from a cache
    of keys and values, these run without gradients, and only the other tokens' streams are
    returned.
    """
    if skip_first and _continues(bridge):
        with torch.no_grad():
            right = bridge(tokens[:1], stop_at_layer=bridge.cfg.n_layers)[:, skip_first:]
            _, past = bridge(tokens[:, :skip_first], return_type="logits_and_cache")
        streams = _recorded(bridge, tokens[:, skip_first:], past_key_values=past)
        error = (streams[-1][:1] - right).abs().max()
        if error <= torch.finfo(right.dtype).eps ** 0.75 * right.abs().max():
            return streams
    return _recorded(bridge, tokens)


def _continues(bridge: RunnableBridge) -> bool:
    """Tell whether a run may continue from another one's cache: there are no hooks of the user,
    which might select positions, and each block's only memory is keys and values."""
    hooks = bridge.hook_dict
    attend = all(f"blocks.{layer}.attn.hook_k" in hooks for layer in range(bridge.cfg.n_layers))
    mix = any(".mixer." in name for name in hooks)
    edited = functions_at(list(hooks.values()))
    return attend and not mix and not edited and gives_cache(bridge.core)


def _recorded(bridge: RunnableBridge, tokens: Tensor, **options: Any) -> list[Tensor]:
    """Run the blocks and return the streams before each layer from 1 on, and at the end.

    Raises:
        ValueError: a stream has other positions than the tokens, or a layer runs twice.
    """
    n_layers = bridge.cfg.n_layers
    names = [f"blocks.{layer}.hook_resid_pre" for layer in range(1, n_layers)]
    streams: list[Tensor] = []

    def keep(stream: Tensor, hook: HookPoint) -> Tensor:
        # The graph begins at the first stream: no gradients are needed before it.
        streams.append(stream if streams else stream.detach().requires_grad_())
        return streams[-1]

    hooks = [(name, keep) for name in (*names, last_stream(bridge.hook_dict, n_layers))]
    with hooked(bridge, hooks, [], True, False):
        bridge(tokens, stop_at_layer=n_layers, **options)
    if any(stream.shape[:2] != tokens.shape for stream in streams) or len(streams) != n_layers:
        raise ValueError(
            f"{bridge.cfg.model_name}: a Jacobian lens is for one stream position a token, and for"
            " blocks that run once"
        )
    return streams
