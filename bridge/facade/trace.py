"""Tracing: interventions as plain Python, in the order in which the model runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from numpy.typing import NDArray
from torch import Tensor

from bridge import trace as tracing
from bridge.facade.generation import GenerationMethods
from bridge.facade.runs import RunMethods
from bridge.hooks.arguments import refuse_wrong_types
from bridge.hooks.context import without_hooks
from bridge.run.protocol import Input
from bridge.run.request import Request

T = TypeVar("T")


class TraceMethods(RunMethods, GenerationMethods):
    """The methods of a bridge that trace its model."""

    @property
    def _model_order(self) -> tracing.places.ModelOrder:
        """The order of its hook points, worked out by the first trace."""
        found = self.__dict__.get("_places")
        if not isinstance(found, tracing.places.ModelOrder) or not found.are_of(self.wiring.points):
            found = self.__dict__["_places"] = tracing.places.ModelOrder(self.wiring.points)
        return found

    @refuse_wrong_types
    def trace(
        self,
        input: Input | None = None,
        *,
        capture: Sequence[str] = (),
        prepend_bos: bool | None = None,
        padding_side: str | None = None,
        attention_mask: Tensor | NDArray[Any] | None = None,
        start_at_layer: int | None = None,
        stop_at_layer: int | None = None,
        **model_kwargs: Any,
    ) -> tracing.trace.Trace:
        """A run of the model that waits wherever the body of a ``with`` statement asks for an activation.

        The body is ordinary Python. ``run[name]`` lets the model go on to that hook point and returns the activation,
        a real tensor: what is changed in it in place, or assigned (``run[name] = x``), the model goes on with. Points
        are asked for in the model's order. The idea of writing interventions so is nnsight's (Fiotto-Kaufman et al.
        2024), whose later versions run the body in a greenlet, in strict turns with the model; here it is the model
        that runs in one, and the body stays in its own frame.

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
            (torch.Size([1, 4, 15, 15]), 1)
        """
        asked = Request(input, prepend_bos, padding_side, attention_mask, start_at_layer, stop_at_layer, model_kwargs)
        return tracing.trace.Trace(self, self._model_order, asked, capture)

    def trace_generate(self, input: Input = "", **arguments: Any) -> tracing.generation.GenerationTrace:
        """A generation that waits wherever the body of a ``with`` statement asks for an activation.

        ``for step in run.steps`` goes through its steps, the prompt's first; ``step[name]`` is as ``run[name]`` in a
        trace, of that step. Edits that are made outside of the loop (``run[name][:, -1] = 0``, ``run[name] += v``,
        ``run[name] = x``) are made at every step.

        Args:
            input, arguments: as for `generate`, but for `return_type`, `return_cache`, `return_input_tokens`,
                `output_logits`, `names_filter` and `device`; `verbose` is off unless it is asked for.

        Returns:
            The generation, for a ``with`` statement; afterwards it has `tokens` and `text`.

        Raises:
            TypeError: an argument that nobody knows, or a model that does not generate.
            ValueError: no room in the context.

        Example:
            >>> from bridge import TransformerBridge
            >>> bridge = TransformerBridge.boot_embedded()
            >>> with bridge.trace_generate("Mary and", max_new_tokens=3, do_sample=False) as run:
            ...     run["blocks.3.hook_mlp_out"] *= 0.5
            ...     norms = [step["blocks.0.hook_resid_post"].norm().item() for step in run.steps]
            >>> len(norms), run.tokens.shape
            (3, torch.Size([1, 6]))
        """
        return tracing.generation.GenerationTrace(self, self._model_order, input, arguments)

    @refuse_wrong_types
    def trace_edit(
        self, body: tracing.edit.Body, *, prompt: Input | None = None, points: Sequence[str] | None = None
    ) -> tracing.edit.Edit:
        """Turns the body of a trace, written as a function, into hooks for `hooks`, `run_with_hooks` and `generate`.

        In each forward pass (of a generation: in each step) the body runs once, in step with the model. A point that
        does not run is passed over, as a hook there would be.

        Args:
            body: called with what has activations by name: ``run[name]`` and ``run[name] = x``.
            prompt: what it is tried on, to find the hook points that it asks for; None: four tokens.
            points: these hook points, in place of trying.

        Returns:
            Pairs of a name and a function.

        Raises:
            UnknownHookError: a name that no hook point has.
            ValueError: the body asks for nothing.

        Example:
            >>> from bridge import TransformerBridge
            >>> bridge = TransformerBridge.boot_embedded()
            >>> def halve_if_large(run):
            ...     if run["blocks.1.hook_resid_post"].norm() > 1:
            ...         run["blocks.2.hook_mlp_out"] *= 0.5
            >>> edit = bridge.trace_edit(halve_if_large, points=["blocks.1.hook_resid_post", "blocks.2.hook_mlp_out"])
            >>> with bridge.hooks(fwd_hooks=edit):
            ...     loss = bridge("Mary and John", return_type="loss")
        """
        if points is None:
            probe = torch.zeros(1, 4, dtype=torch.long) if prompt is None else prompt
            # The user's hooks see nothing of it.
            with torch.no_grad(), without_hooks(), self.trace(probe) as run:
                found = tracing.edit.points_asked_for(self.names, body, run)
        else:
            found = [self.names.find(name) for name in points]
        return tracing.edit.Edit(self.names, body, found)

    def shapes(self, input: Input, **forward_kwargs: Any) -> tracing.shapes.Shapes:
        """The shape and type of every activation, without computing one: from torch's fake tensors.

        Args:
            input, forward_kwargs: as for `forward`. The model may be on the meta device.

        Returns:
            By hook point, under all names. Where a number depends on values (how many tokens an expert is given), the
            shape has None. Points that this input does not come to are absent.

        Raises:
            RuntimeError: the model's own code asks for a value on its way.

        Example:
            >>> from bridge import TransformerBridge
            >>> bridge = TransformerBridge.boot_embedded()
            >>> bridge.shapes("Mary and John")["blocks.2.attn.hook_pattern"]
            PointShape(shape=(1, 4, 4, 4), dtype=torch.float32)
        """
        return tracing.shapes.shapes(self, input, forward_kwargs)

    def save(self, x: T) -> T:
        """Returns `x`. Values of a trace are real tensors and stay: this is for code that comes from nnsight.

        Args:
            x: anything.
        """
        return x
