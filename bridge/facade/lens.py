"""Reading the residual stream as next tokens."""

from __future__ import annotations

from collections.abc import Sequence

from jaxtyping import Int
from torch import Tensor

from bridge import lens as lenses
from bridge.facade.runs import RunMethods
from bridge.run.positions import PosSlice
from bridge.run.protocol import Input


class LensMethods(RunMethods):
    """The method of a bridge that reads its residual stream."""

    def lens(
        self,
        input: Input,
        kind: str | lenses.TunedLens = "normed",
        pos_slice: PosSlice = None,
        layers: Sequence[int] | None = None,
        prepend_bos: bool | None = None,
        attention_mask: Int[Tensor, "batch pos"] | None = None,
    ) -> lenses.Reading:
        """What each layer would say next: the residual stream before it, and at the end, read as tokens.

        Logits are computed when the reading is asked, a layer at a time.

        Args:
            input: a text, several texts, token ids, or tokens ``[pos]`` or ``[batch, pos]``.
            kind: ``"normed"``, through the final norm and the unembedding; ``"raw"``, through the unembedding alone; or
                a `bridge.lens.TunedLens`.
            pos_slice, layers, prepend_bos, attention_mask: as for `bridge.lens.lens`.

        Raises:
            ValueError: an unknown kind or layer; a lens for another model.

        Example:
            >>> from bridge import TransformerBridge
            >>> bridge = TransformerBridge.boot_embedded()
            >>> top = bridge.lens("The capital of France is", pos_slice=-1).top(5)  # layer batch pos k
            >>> [bridge.to_single_str_token(int(token)) for token in top.tokens[-1, 0, 0, :1]]
            [' Paris']
        """
        return lenses.lens(self, input, kind, pos_slice, layers, prepend_bos, attention_mask)
