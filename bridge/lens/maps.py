"""`Lens`: a linear map per layer from the residual stream there to the last one, and what can be
computed from any such map.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from jaxtyping import Float, Integer
from torch import Tensor, nn

from bridge.analysis.analysis import refuse_no_stream
from bridge.analysis.residual import directions_of
from bridge.arguments import check_positive, refuse_wrong_types
from bridge.lens.readout import decoder
from bridge.lens.sparse import Dictionary, Occupancy, SparseDecomposition, random_control
from bridge.run.inputs import RunnableBridge

#: One token, or several: texts or ids.
Tokens = str | int | Sequence[str] | Sequence[int] | Integer[Tensor, "..."]


class Lens(nn.Module):
    """A linear map per layer from the residual stream there to the last one. This class is the
    logit lens, the identity at every layer; `TunedLens` and `JacobianLens` have other maps.

    A layer is given as in `Reading`: the stream before that layer; ``n_layers`` is the end.

    Args:
        bridge: the model that it reads.

    Attributes:
        bridge: the model; None: not known yet (see `on`). A copied or unpickled lens has none.
        title: the title of pictures of its readings.

    Example:
        >>> from bridge import TransformerBridge
        >>> from bridge.lens import Lens
        >>> bridge = TransformerBridge.boot_embedded()
        >>> lens = Lens(bridge)
        >>> _, cache = bridge.run_with_cache("The capital of France is")
        >>> logits = lens.decode(cache["blocks.3.hook_resid_post"][0, -1], 4)
        >>> bridge.to_single_str_token(int(logits.argmax()))
        ' Paris'
    """

    bridge: RunnableBridge | None = None
    title: ClassVar[str] = "Logit lens"

    def __init__(self, bridge: RunnableBridge | None = None) -> None:
        super().__init__()
        if bridge is not None:
            self.on(bridge)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "bridge"}

    @property
    def layers(self) -> tuple[int, ...]:
        """Return the layers that it can read."""
        return tuple(range(self.model.cfg.n_layers + 1))

    @property
    def model(self) -> RunnableBridge:
        """Return the model.

        Raises:
            ValueError: it is not known.
        """
        if self.bridge is None:
            raise ValueError(
                f"this {type(self).__name__} does not know its model: call lens.on(bridge), or load"
                " it with Lens.load(path, bridge)"
            )
        return self.bridge

    def matrix(self, layer: int) -> Float[Tensor, "d_model d_model"]:
        """Return the linear part of a layer's map: the map of a column vector.

        Args:
            layer: one of `layers`.
        """
        cfg = self.model.cfg
        return torch.eye(cfg.d_model, device=cfg.device)

    def forward(
        self, stream: Float[Tensor, "*any d_model"], layer: int
    ) -> Float[Tensor, "*any d_model"]:
        """Predict the last stream from a layer's stream.

        Args:
            stream: the residual stream before the layer.
            layer: one of `layers`.
        """
        return stream

    @classmethod
    @refuse_wrong_types
    def load(cls, path: str | Path, /, bridge: RunnableBridge | None = None) -> Lens:
        """Load a lens of any kind.

        Args:
            path: the folder of a `TunedLens`; or a `JacobianLens`' file, or a folder with its
                ``lens.pt``.
            bridge: the model that it is for; the lens is put on that model's device.

        Raises:
            FileNotFoundError: there is no lens.
            ValueError: it is for a different model, or damaged.
        """
        for kind in cls.__subclasses__():
            if kind.is_at(Path(path)):
                return kind.load(path, bridge)
        raise FileNotFoundError(
            f"path is {str(path)!r}; it must be a folder with config.json and params.pt (a tuned"
            " lens), or a .pt file, or a folder with a lens.pt (a Jacobian lens)"
        )

    @classmethod
    def is_at(cls, path: Path) -> bool:
        """Tell whether a lens of this kind is saved at a path."""
        return False  # the identity is not saved

    @classmethod
    @refuse_wrong_types
    def merge(cls, lenses: Sequence[Lens]) -> Lens:
        """Average lenses that were fitted on different texts, weighted by their numbers of
        texts.

        Args:
            lenses: Jacobian lenses of one model, fitted in the same way.

        Raises:
            ValueError: there are none, they differ in more than their texts, or they are not
                averages over texts.
        """
        kinds = {type(lens) for lens in lenses}
        if len(kinds) != 1:
            raise ValueError(f"lenses are of {len(kinds)} kinds; they must be one or more of one")
        return lenses[0].merged_with(lenses[1:])

    def merged_with(self, others: Sequence[Any]) -> Lens:
        """Return the average of this lens and others of its kind. See `merge`."""
        raise ValueError(
            f"a {type(self).__name__} is no mean over texts: only Jacobian lenses can be merged"
        )

    def check(self, bridge: RunnableBridge, unembedding: bool = True) -> None:
        """Reject a model that does not fit the lens.

        Args:
            bridge: the model.
            unembedding: also reject a model whose unembedding differs from the one used in fitting,
                as far as that is known.

        Raises:
            ValueError: it has no single stream, or other sizes.
        """
        refuse_no_stream(bridge)

    @refuse_wrong_types
    def on(self, bridge: RunnableBridge, unembedding: bool = True) -> Self:
        """Set the model that the lens reads, and return the lens.

        Args:
            bridge, unembedding: as for `check`.

        Raises:
            ValueError: the lens is not for this model.
        """
        self.check(bridge, unembedding)
        object.__setattr__(self, "bridge", bridge)  # a submodule would be saved with the lens
        return self

    def check_layer(self, layer: int) -> None:
        """Reject a layer without a map.

        Raises:
            ValueError: the lens has no map for it.
        """
        if layer not in self.layers:
            raise ValueError(
                f"layer is {layer}; this {type(self).__name__} has maps for the streams before"
                f" {', '.join(map(str, self.layers))} (the last is the end)"
            )

    def _prepared(self, vector: Tensor, layer: int) -> Tensor:
        """Return vectors on the model's device, after checking them and their layer."""
        cfg = self.model.cfg
        self.check(self.model, unembedding=False)
        self.check_layer(layer)
        if vector.shape[-1:] != (cfg.d_model,):
            raise ValueError(
                f"the vector has the shape {list(vector.shape)}; it must be [*any d_model], with"
                f" d_model {cfg.d_model}"
            )
        return vector.to(cfg.device)

    @refuse_wrong_types
    def decode(
        self, vector: Float[Tensor, "*any d_model"], layer: int, normed: bool = True
    ) -> Float[Tensor, "*any d_vocab"]:
        """Decode vectors of a layer's stream to logits.

        Args:
            vector: a stream; or, with ``normed=False``, any direction in it: a difference of
                streams, a decoder column, a singular vector.
            layer: one of `layers`.
            normed: apply the whole map, the final norm and the unembedding. False: only the
                products with the map's matrix and ``W_U``. This is linear: it gives the change of
                the logits along a direction, up to the norm's scale. No bias is added.

        Raises:
            ValueError: a vector of another width; a layer without a map.

        Example:
            >>> from bridge import TransformerBridge
            >>> from bridge.lens import Lens
            >>> bridge = TransformerBridge.boot_embedded()
            >>> column = bridge.blocks[3].mlp.W_out[5]
            >>> Lens(bridge).decode(column, 4, normed=False).shape
            torch.Size([654])
        """
        vector = self._prepared(vector, layer)
        model = self.model
        if not normed:
            mapped = vector.float() @ self.matrix(layer).T.float()
            return mapped @ model.W_U.to(mapped)
        stream = self(vector, layer).to(model.cfg.dtype)
        logits = decoder(model, "normed", {})(stream.reshape(1, -1, stream.shape[-1]), layer)
        return logits.reshape(*vector.shape[:-1], -1)

    @refuse_wrong_types
    def vectors(self, tokens: Tokens, layer: int) -> Float[Tensor, "*tokens d_model"]:
        """Return the directions in a layer's stream that raise the logits of tokens: columns of
        ``W_U``, times the transposed matrix of the layer.

        Args:
            tokens: one token, as text or id; or several.
            layer: one of `layers`.

        Returns:
            ``[d_model]`` for one token, ``[token, d_model]`` for several.

        Raises:
            ValueError: a text that is not one token; a layer without a map.

        Example:
            >>> from bridge import TransformerBridge
            >>> from bridge.lens import Lens
            >>> Lens(TransformerBridge.boot_embedded()).vectors([" Paris", " Rome"], 2).shape
            torch.Size([2, 128])
        """
        self.check(self.model, unembedding=False)
        self.check_layer(layer)
        if isinstance(tokens, str | int | Tensor):
            directions = directions_of(self.model, tokens)
        else:
            directions = torch.stack([directions_of(self.model, token) for token in tokens])
        return directions.detach().float() @ self.matrix(layer).to(directions.device).float()

    def _rows_and_dictionary(
        self, stream: Tensor, layer: int, most: int
    ) -> tuple[list[Tensor], Dictionary]:
        """Return the stream as single vectors, and the dictionary of all tokens' vectors, after
        checking that at most `most` of them can be selected."""
        rows = self._prepared(stream, layer).float().reshape(-1, stream.shape[-1])
        d_vocab = self.model.cfg.d_vocab_out
        if not 1 <= most <= d_vocab:
            raise ValueError(f"the number of tokens is {most}; it must be from 1 to {d_vocab}")
        if not bool(rows.any(-1).all() & rows.isfinite().all()):
            raise ValueError("a vector is zero or not finite, so that no token is in it")
        return list(rows), Dictionary(self.vectors(torch.arange(d_vocab), layer))

    @refuse_wrong_types
    @torch.no_grad()
    def decompose(
        self, stream: Float[Tensor, "*any d_model"], layer: int, k: int = 25
    ) -> list[SparseDecomposition]:
        """Write vectors as sums of at most `k` tokens' vectors with non-negative coefficients
        (Gurnee et al. 2026, "Verbalizable Representations Form a Global Workspace in Language
        Models"): orthogonal matching pursuit (Pati et al. 1993).

        Args:
            stream: vectors in a layer's stream.
            layer: one of `layers`.
            k: the maximum number of tokens. The search ends earlier if no other token's vector
                has a positive cosine with the rest.

        Returns:
            A decomposition of each vector.

        Raises:
            ValueError: a vector of another width, or of zeros; a layer without a map; too many
                tokens.

        Example:
            >>> from bridge import TransformerBridge
            >>> from bridge.lens import Lens
            >>> bridge = TransformerBridge.boot_embedded()
            >>> lens = Lens(bridge)
            >>> mixed = 3 * lens.vectors(" Paris", 2) + lens.vectors(" Mary", 2)
            >>> (parts,) = lens.decompose(mixed, 2, k=2)
            >>> [bridge.to_single_str_token(int(token)) for token in parts.tokens]
            [' Paris', ' Mary']
        """
        rows, dictionary = self._rows_and_dictionary(stream, layer, k)
        return [dictionary.decompose(row, k) for row in rows]

    @refuse_wrong_types
    @torch.no_grad()
    def occupancy(
        self,
        stream: Float[Tensor, "*any d_model"],
        layer: int,
        most: int = 25,
        controls: int = 32,
        seed: int = 0,
    ) -> list[Occupancy]:
        """Estimate how many tokens a vector contains: tokens that explain more of it than the same
        number of random directions (Gurnee et al. 2026).

        Args:
            stream: vectors in a layer's stream.
            layer: one of `layers`.
            most: the maximum number of tokens.
            controls: the number of sets of random directions, each as large as the vocabulary, over
                which the comparison is averaged.
            seed: the seed of the random directions.

        Returns:
            An estimate for each vector.

        Raises:
            ValueError: as for `decompose`.

        Example:
            >>> from bridge import TransformerBridge
            >>> from bridge.lens import Lens
            >>> lens = Lens(TransformerBridge.boot_embedded())
            >>> mixed = 3 * lens.vectors(" Paris", 2) + lens.vectors(" Mary", 2)
            >>> [estimate.count for estimate in lens.occupancy(mixed, 2, controls=4)]
            [2]
        """
        check_positive("controls", controls)
        rows, dictionary = self._rows_and_dictionary(stream, layer, most)
        control = random_control(rows, len(dictionary.atoms), most, controls, seed)
        captured = [dictionary.captured(row, most) for row in rows]
        return [
            Occupancy(shares, of_random, tokens)
            for (shares, tokens), of_random in zip(captured, control, strict=True)
        ]
