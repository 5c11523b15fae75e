"""Tracing: interventions as plain Python, in the order in which the model runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from torch import Tensor

from bridge.facade.runs import RunMethods
from bridge.run.protocol import Input
from bridge.trace.places import Places
from bridge.trace.trace import Trace

T = TypeVar("T")


class TraceMethods(RunMethods):
    """The methods of a bridge that trace its model."""

    @property
    def _model_order(self) -> Places:
        """The order of its hook points, worked out by the first trace."""
        found = self.__dict__.get("_places")
        if not isinstance(found, Places) or not found.are_of(self.hook_dict):
            found = self.__dict__["_places"] = Places(self.hook_dict)
        return found

    def trace(
        self,
        input: Input,
        *,
        capture: Sequence[str] = (),
        prepend_bos: bool | None = None,
        padding_side: str | None = None,
        attention_mask: Tensor | None = None,
        start_at_layer: int | None = None,
        stop_at_layer: int | None = None,
        **model_kwargs: Any,
    ) -> Trace:
        """A run of the model that waits wherever the body of a ``with`` statement asks for an activation.

        The body is ordinary Python. ``run[name]`` lets the model go on to that hook point and returns the activation,
        a real tensor: what is changed in it in place, or assigned (``run[name] = x``), the model goes on with. Points
        are asked for in the model's order. The idea of writing interventions so is nnsight's (Fiotto-Kaufman et al.
        2024); this has nothing of its mechanism.

        Args:
            input, prepend_bos, padding_side, attention_mask, start_at_layer, stop_at_layer, model_kwargs: as for
                `forward`.
            capture: hook points whose activations can be read in any order, and after the block.

        Returns:
            The trace, for a ``with`` statement.

        Raises:
            TypeError: an argument that neither the bridge nor the model knows, or an input of a wrong type.
            ValueError: a layer out of range, a prompt that is too long.
            UnknownHookError: a name that no hook point has.

        Example:
            >>> from bridge import TransformerBridge
            >>> bridge = TransformerBridge.boot_embedded()
            >>> with bridge.trace("When Mary and John went to the store, John gave a drink to") as run:
            ...     pattern = run["blocks.2.attn.hook_pattern"]
            ...     run["blocks.3.attn.hook_z"][:, :, 1] = 0
            >>> pattern.shape, run.logits.shape[0]
            (torch.Size([1, 4, 14, 14]), 1)
        """
        return Trace(
            self,
            self._model_order,
            input,
            capture,
            prepend_bos,
            padding_side,
            attention_mask,
            start_at_layer,
            stop_at_layer,
            model_kwargs,
        )

    def save(self, x: T) -> T:
        """Returns `x`. Values of a trace are real tensors and stay: this is for code that comes from nnsight.

        Args:
            x: anything.
        """
        return x
