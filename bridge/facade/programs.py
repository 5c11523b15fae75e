"""Programs: a run with its hooks as a plain module, here or in another runtime."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from adapters.imports import versions
from bridge import programs
from bridge.facade.hooks import HookMethods
from bridge.facade.tokens import TokenMethods
from bridge.hooks.names import NamesFilter
from bridge.run.checks import as_tokens
from bridge.run.hooked import check_specs, checked_function
from bridge.run.protocol import HookSpec, Input


class ProgramMethods(HookMethods, TokenMethods):
    """The methods of a bridge that make programs of runs."""

    def program(
        self,
        capture: NamesFilter = (),
        interventions: Sequence[HookSpec] = (),
        inputs: Mapping[str, Tensor | float] | None = None,
    ) -> programs.program.Program:
        """A run with captured activations and interventions as a plain module, to be compiled, exported, served.

        What hooks do is lowered into it once: its forward has no context and attaches nothing. Hooks that a run would
        see now (those that were added, those of an open ``with``) are part of it.

        Args:
            capture: which activations it returns: a name or alias, a list of them, a function of the name.
            interventions: pairs (hook points, function), as for `run_with_hooks`, or what `trace_edit` returns. A
                function is called as ``fn(activation, hook=point)``, and given the declared inputs that its signature
                names as keywords.
            inputs: the declared inputs by name, each with an example (a tensor, or a number): a steering vector, a
                strength, a value to be patched in, a mask over heads. Calls give them other values.

        Returns:
            A module: ``program(tokens, attention_mask=..., vector=...)`` returns a mapping from ``"logits"`` and each
            captured name to its tensor.

        Raises:
            UnknownHookError: a name that no hook point has.
            ValueError: a hook point that no program can have; a model that reads images or sound before text; an input
                that no function takes; a filter that matches nothing.
            TypeError: a function that asks for an input which is not declared.

        Example:
            >>> import torch
            >>> from bridge import TransformerBridge
            >>> bridge = TransformerBridge.boot_embedded()
            >>> def scale(activation, hook, strength):
            ...     return activation * strength
            >>> program = bridge.program(
            ...     capture=["blocks.2.attn.hook_pattern"],
            ...     interventions=[("blocks.1.hook_mlp_out", scale)],
            ...     inputs={"strength": 1.0},
            ... )
            >>> tokens = bridge.to_tokens("Mary and John")
            >>> torch.equal(program(tokens, strength=1.0)["logits"], bridge(tokens))
            True
        """
        check_specs("interventions", interventions)
        pairs = [(hook, checked_function(hook, fn)) for names, fn in interventions for hook in self.select_hooks(names)]
        none = isinstance(capture, Sequence) and not isinstance(capture, str) and not capture
        points = [] if none or capture is None else self.select_hooks(capture)
        return programs.program.Program(self, points, pairs, inputs or {})

    def export(
        self,
        example: Input | Mapping[str, Tensor],
        format: str = "dynamo",
        *,
        capture: NamesFilter = (),
        interventions: Sequence[HookSpec] = (),
        inputs: Mapping[str, Tensor | float] | None = None,
        dynamic: bool = True,
        path: str | Path | None = None,
        **options: Any,
    ) -> versions.ExportedModel:
        """A run with captured activations and interventions for another runtime, through transformers' exporters.

        Args:
            example: text, texts, tokens ``[batch, pos]``, or the model's arguments by name, as a tokenizer gives them.
                What it has is what the exported program takes, with the declared inputs.
            format: ``"dynamo"`` (`torch.export`), ``"onnx"``, ``"executorch"`` or ``"openvino"``.
            capture, interventions, inputs: as for `program`.
            dynamic, path, options: as for `Program.export`.

        Returns:
            transformers' `ExportedModel`: ``exported(input_ids=..., vector=...)`` runs it in its runtime and returns
            what the program returns.

        Raises:
            VersionError: transformers is older than 5.23.
            ImportError: the format needs something that is not installed; the error names the command.
            UnknownHookError, TypeError, ValueError: as for `program` and `Program.export`.
        """
        program = self.program(capture, interventions, inputs)
        if isinstance(example, str) or (isinstance(example, Sequence) and example and isinstance(example[0], str)):
            batch = self.batch_of([example] if isinstance(example, str) else example)
            mask = torch.ones_like(batch.tokens) if batch.mask is None else batch.mask
            example = {"input_ids": batch.tokens, "attention_mask": mask}
        elif not isinstance(example, Mapping):
            example = {"input_ids": as_tokens(example)}
        return program.export(example, format, dynamic=dynamic, path=path, **options)
