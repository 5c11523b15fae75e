"""`Program`: a run with its hooks as a plain module that can be compiled, exported and served.

The inputs are a bridge, the hook points to capture, and functions at hook points, with the declared
input tensors that these take on each call. The result is an `nn.Module` whose forward returns
logits and activations by name. Hooks that a run of the bridge would call now become part of the
program; hooks added later do not.

1. *Shells* (`bridge.programs.lower`). Each module of the model has a shell: an object of the same
   class that shares its parameters, buffers and configuration. Hooks on a shell are invisible to
   the model and fixed, so a program does not look up listeners.
2. *Lowering.* Each function becomes a `Listener` with declared arguments (`Function`), and each
   hook point a `LoweredPoint` at its site: a torch hook of a shell (`LoweredSite`), or its forward
   (`LoweredTap`). A hook's effect is computed by `HookPoint.edited`, as in a run.
3. *Running.* A pass of a program has the same state as the pass of a run (`ProgramPass`). It is in
   thread-local storage, because torch.compile cannot trace context variables.
4. *Compiling* (`bridge.programs.compiled`) makes one graph for all batch sizes and lengths;
   programs of one bridge that differ only in tensor values share it. *Exporting* (`bridge.export`)
   passes the same module to transformers' exporters.

Rejected at construction: hook points that a program does not support (inside a mixer, or a kernel
that is not a torch function), gradients, modules with a replaced forward, models sharded across
processes, inputs that no function takes. This module knows nothing of how torch compiles the code,
and of a run only its arguments.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

from adapters import imports as versions
from adapters.imports import is_compiling
from adapters.inputs import (
    accepted_by,
    makes_decoder_tokens,
    past_of,
    takes,
    with_past_named,
)
from adapters.points import core_of
from adapters.views import Kwargs
from bridge import export as exporting
from bridge.hooks.hooks import HookPoint
from bridge.hooks.names import suggestion
from bridge.programs.compiled import CompiledRun, Run, generating_model
from bridge.programs.lower import Edits, Lowered, as_written, lower
from bridge.programs.program_pass import ProgramPass
from bridge.rows import PositionCounting
from bridge.run.inputs import RunnableBridge, hides_positions
from bridge.taps.attention_tap import AttentionWatch


class Program(nn.Module):
    """A run of a model with captures and interventions, made by `TransformerBridge.program`.

    It consists of its own module objects, which share the model's parameters: the model itself is
    not changed, and a changed parameter affects both. Its mode (`train`, `eval`) and its active
    PEFT adapters are its own and start as the model's. (Make another program for other adapters.)

    Args:
        bridge: the bridge.
        capture: the hook points whose activations it returns.
        interventions: hook points and functions, in order.
        inputs: the declared inputs by name, with an example of each.

    Attributes:
        model: the module objects.
        captured: the names of the returned activations.
        inputs: an example of each declared input, as a tensor.
        compiled: whether it was made by `compile`.

    Raises:
        ValueError: a hook point that a program does not support, or an input that no function
            takes.
        TypeError: a function takes an input that is not declared.
    """

    def __init__(
        self,
        bridge: RunnableBridge,
        capture: Sequence[HookPoint],
        interventions: Edits,
        inputs: Mapping[str, object],
    ) -> None:
        core = bridge.core
        if (main := takes(core).main) is not None:
            raise ValueError(
                f"a program takes tokens, but {type(core).__name__} reads {main} first"
            )
        if bridge.wiring.sharing is not None:
            bridge.wiring.sharing.refuse("a program")
        super().__init__()
        self._known = accepted_by(core)
        if hides_positions(bridge):
            self._known -= {"attention_mask"}
        self.inputs = declared_inputs(inputs, self._known)
        self.lowered: Lowered = lower(bridge, capture, interventions, tuple(self.inputs))
        self.model = self.lowered.model
        self.captured = tuple(self.axes)
        self.training = self.model.training
        self.compiled = False
        self._run: Run = self.run_lowered
        self._chooses = self.lowered.chooses_tokens
        self._set_model_facts(bridge)
        unused = [repr(name) for name in self.inputs if name not in self.lowered.taken]
        if unused:
            raise ValueError(
                f"no function of the interventions takes the input {', '.join(unused)}: a function"
                " is given a declared input that its signature names, fn(activation, hook, vector)"
            )

    def _set_model_facts(self, bridge: RunnableBridge) -> None:
        """Set the attributes that depend only on the model."""
        core = bridge.core
        config = bridge.core.config
        self._wiring = bridge.wiring
        self._class = type(core)
        self._config = config
        self._caches = "use_cache" in self._known
        self._places = bridge.cfg.positions_from_mask and "position_ids" in self._known
        self._counted = PositionCounting.of(bridge.original_model, core, bridge.block_paths)
        self._max_length = bridge.cfg.n_ctx
        self._has_decoder = bool(config.is_encoder_decoder)
        self._makes_tokens = self._has_decoder and makes_decoder_tokens(core)
        self._starts_with: int | None = 0
        self._blocks: list[nn.Module] = []
        if self._has_decoder:  # T5's blocks return their inputs, which torch rejects
            self._starts_with = getattr(config, "decoder_start_token_id", None)
            return
        _, prefix = as_written(bridge.original_model)
        for path in bridge.block_paths:
            self._blocks.append(self.model.get_submodule(path.removeprefix(prefix)))

    @property
    def changed(self) -> tuple[str, ...]:
        """Return the names of the hook points with interventions."""
        return tuple([step.hook.name for step in self.lowered.steps if step.changes])

    @property
    def axes(self) -> dict[str, str]:
        """Return the axes of the captured activations, by name."""
        hooks = [step.hook for step in self.lowered.steps if step.captured]
        return {hook.name: hook.point.axes for hook in hooks}

    @property
    def core(self) -> PreTrainedModel:
        """Return the program's own copy of the Hugging Face model, without its wrapper (PEFT). The
        copy has modules of its own, and the original model's parameters.
        """
        core = core_of(self.model)
        assert isinstance(core, PreTrainedModel)
        return core

    @property
    def one_by_one(self) -> bool:
        """Tell whether experts run one after the other, with row counts that depend on the
        values.
        """
        return self.lowered.one_by_one

    def attention_under_way(self) -> AttentionWatch | None:
        """Return the watch on the attention that a tapped module is currently computing in this
        thread.
        """
        watch = getattr(self.lowered.here, "watch", None)
        return watch if isinstance(watch, AttentionWatch) else None

    @property
    def config(self) -> PreTrainedConfig:
        """Return the Hugging Face model's configuration."""
        return self._config

    def __repr__(self) -> str:
        inputs = ", ".join(
            f"{name}: {list(example.shape)}" for name, example in self.inputs.items()
        )
        compiled = " (compiled)" if self.compiled else ""
        return (
            f"{type(self).__name__} of {self._class.__name__}{compiled}\n"
            f"  returns  {', '.join(('logits', *self.captured))}\n"
            f"  changes  {', '.join(self.changed) or 'nothing'}\n"
            f"  inputs   {inputs or 'none'}"
        )

    def forward(self, input_ids: Tensor | None = None, **kwargs: Any) -> Kwargs:
        """Run the model.

        Args:
            input_ids: tokens ``[batch, pos]``; omit them if you pass `inputs_embeds`.
            kwargs: the declared inputs, and any argument of the model's forward (`attention_mask`
                ``[batch, pos]``, `decoder_input_ids`, `past_key_values`, `use_cache`, ...).

        Returns:
            ``"logits"`` ``[batch, pos, d_vocab]`` and each captured activation by its canonical
            name; with `use_cache` or `past_key_values` also ``"past_key_values"``, with `labels`
            also ``"loss"``.

        Raises:
            TypeError: an unknown argument, or a declared input that is missing or has the wrong
                type.
            ValueError: tokens of a wrong shape, or too many.

        Example:
            >>> import torch
            >>> from bridge import TransformerBridge
            >>> bridge = TransformerBridge.boot_embedded()
            >>> def steer(activation, hook, vector):
            ...     return activation + vector
            >>> program = bridge.program(
            ...     capture=["blocks.3.hook_resid_post"],
            ...     interventions=[("blocks.1.hook_resid_post", steer)],
            ...     inputs={"vector": torch.zeros(bridge.cfg.d_model)},
            ... )
            >>> outputs = program(
            ...     bridge.to_tokens("Mary and John"), vector=torch.ones(bridge.cfg.d_model)
            ... )
            >>> list(outputs)
            ['logits', 'blocks.3.hook_resid_post']
        """
        if is_compiling():
            inputs = {name: kwargs.pop(name) for name in self.inputs}
            return self.run_lowered(input_ids, inputs, kwargs)
        values = {name: kwargs.pop(name) for name in self.inputs if name in kwargs}
        inputs = checked_inputs(self.inputs, values)
        self._check(input_ids, kwargs)
        # otherwise each thread's first call would compile again
        vars(self.lowered.here).setdefault("program_pass", None)
        if self.compiled:
            kwargs = self._with_mask(input_ids, kwargs)
        return self._run(input_ids, inputs, kwargs)

    def _with_mask(self, input_ids: Tensor | None, kwargs: Kwargs) -> Kwargs:
        """Return the arguments of compiled code with a mask of ones if there is none, so that the
        code is the same.

        Without a mask, transformers would infer from `position_ids` whether a row holds several
        sequences.
        """
        tokens = kwargs.get("inputs_embeds") if input_ids is None else input_ids
        if tokens is None or "attention_mask" not in self._known:
            return kwargs
        if kwargs.get("attention_mask") is not None or kwargs.get("position_ids") is not None:
            return kwargs
        if past_of(kwargs) is not None or self._config._attn_implementation not in (
            "sdpa",
            "eager",
        ):
            return kwargs
        if self._counted.padding is not None:  # the model itself infers padding from the tokens
            return kwargs
        mask = torch.ones(tokens.shape[:2], dtype=torch.long, device=tokens.device)
        return {**kwargs, "attention_mask": mask}

    def run_lowered(
        self, input_ids: Tensor | None, inputs: Mapping[str, Tensor], kwargs: Kwargs
    ) -> Kwargs:
        """Run the program; this function is compiled and exported.

        Args:
            input_ids: as for `forward`.
            inputs: the declared inputs.
            kwargs: further arguments of the model.
        """
        arguments = self._arguments(input_ids, kwargs)
        here = self.lowered.here
        outer = getattr(here, "program_pass", None)
        program_pass = ProgramPass(inputs)
        self.lowered.take_embeddings(program_pass, arguments)
        here.program_pass = program_pass
        try:
            output = self.model(**arguments)
        finally:
            here.program_pass = outer
            program_pass.end()
        outputs: Kwargs = {"logits": output.logits if hasattr(output, "logits") else output[0]}
        for name in self.captured:
            if name not in program_pass.kept:
                raise RuntimeError(f"{name} did not run")
            outputs[name] = program_pass.kept[name]
        if kwargs.get("labels") is not None:
            outputs["loss"] = output.loss
        past = past_of(output) if isinstance(output, dict) else None
        if past is not None and (kwargs.get("use_cache") or past_of(kwargs) is not None):
            outputs["past_key_values"] = past
        return outputs

    def _arguments(self, input_ids: Tensor | None, kwargs: Kwargs) -> Kwargs:
        """Return the model's arguments, computed as in a run of the bridge."""
        arguments = with_past_named(kwargs, self._known)
        if input_ids is not None:
            arguments["input_ids"] = input_ids
        tokens: Tensor = kwargs["inputs_embeds"] if input_ids is None else input_ids
        mask = kwargs.get("attention_mask")
        if isinstance(mask, Tensor) and mask.ndim == 2:
            arguments["attention_mask"] = mask = mask.long()
            if self._places and kwargs.get("position_ids") is None:
                arguments["position_ids"] = self._counted.places(mask)[:, -tokens.shape[1] :]
        if is_compiling() and self._caches and past_of(kwargs) is None:
            # Nobody reads it, and it would enlarge the graph
            arguments.setdefault("use_cache", False)
        makes_tokens = self._makes_tokens and input_ids is not None
        if self._has_decoder and not makes_tokens and not _has_decoder_tokens(kwargs):
            start = self._starts_with
            assert start is not None  # `_check` has verified this
            shape = (tokens.shape[0], 1)
            arguments["decoder_input_ids"] = torch.full(shape, start, device=tokens.device)
        return arguments

    def _check(self, input_ids: Tensor | None, kwargs: Kwargs) -> None:
        """Reject unknown arguments and tokens of a wrong shape."""
        for name in with_past_named(kwargs, self._known):
            if name not in self._known:  # hot path: values from the configuration are cached
                raise TypeError(
                    f"{name!r} is neither an input of the program"
                    f" ({', '.join(self.inputs) or 'it has none'}) nor an argument of"
                    f" {self._class.__name__}.{suggestion(name, (*self.inputs, *self._known))}"
                )
        embeds = kwargs.get("inputs_embeds")
        if (input_ids is None) == (embeds is None) and kwargs.get("encoder_outputs") is None:
            raise TypeError(
                "a program takes tokens [batch, pos] first, or inputs_embeds=..., and not both"
            )
        if input_ids is not None and (input_ids.ndim != 2 or input_ids.is_floating_point()):
            raise ValueError(
                f"the tokens have shape {list(input_ids.shape)} and type {input_ids.dtype}; a"
                " program takes whole numbers [batch, pos], such as bridge.to_tokens(text) gives"
            )
        if self._starts_with is None and not _has_decoder_tokens(kwargs):
            raise ValueError("the model names no decoder_start_token_id; pass decoder_input_ids")
        past = past_of(kwargs)
        mask = kwargs.get("attention_mask")
        if past is not None:
            self._refuse_past("past_key_values")
        if self._chooses is not None and isinstance(mask, Tensor) and not bool(mask.all()):
            self._refuse_past("padding")
        length = 0 if input_ids is None or past is not None else input_ids.shape[1]
        if self._max_length is not None and length > self._max_length:
            raise ValueError(
                f"the tokens have {length} positions; the model has a context of {self._max_length}"
            )

    def _refuse_past(self, what: str) -> None:
        """Reject continuing a sequence if an operation needs the earlier tokens.

        Raises:
            ValueError: there is such an operation.
        """
        if self._chooses is not None:
            raise ValueError(
                f"the intervention at {self._chooses} is only for some tokens, and with {what} a"
                " program does not know which tokens it is given: use bridge.generate inside `with"
                " bridge.hooks(...)`, or with a program that is not compiled"
            )

    def generating(self, inputs: Mapping[str, object]) -> PreTrainedModel:
        """Return a model whose `generate` is transformers' own and runs this program in each step;
        `bridge.generate` accepts the program.

        Args:
            inputs: the declared inputs, the same for every step.

        Raises:
            TypeError: an input that is missing, not declared, or of the wrong type.
            ValueError: the model has an encoder or a wrapper (PEFT).
        """
        unknown = [name for name in inputs if name not in self.inputs]
        if unknown:
            raise TypeError(
                f"{', '.join(unknown)} was not declared; the program has the inputs"
                f" {', '.join(self.inputs) or 'none'}"
            )
        if self.compiled:
            self._refuse_past("generate, compiled,")
        if self.core is not self.model:
            raise ValueError(
                "a program around a PEFT model cannot generate: merge its weights first,"
                " merge_and_unload()"
            )
        vars(self.lowered.here).setdefault("program_pass", None)
        return generating_model(self.core, self._run, checked_inputs(self.inputs, inputs))

    def compile(self, **options: Any) -> Program:  # type: ignore[override]
        """Return a program that runs through `torch.compile`: one graph for all batch sizes and
        lengths.

        Tensors that its functions keep are inputs of the graph: other values, or other functions
        with the same code in another program of this bridge, do not compile again. A single
        position has a separate graph.

        Args:
            options: options of `torch.compile`; ``fullgraph=True`` by default.

        Returns:
            Another program with the same module objects, which are fixed from then on. Its first
            call compiles.

        Example:
            >>> from bridge import TransformerBridge
            >>> bridge = TransformerBridge.boot_embedded()
            >>> program = bridge.program(capture=["blocks.3.hook_resid_post"])
            >>> program.compile(mode="max-autotune-no-cudagraphs").compiled
            True
        """
        other = self.__class__.__new__(self.__class__)
        other.__dict__ = self.__dict__.copy()
        other.__dict__["_modules"] = dict(self._modules)
        other.compiled = True
        other._run = CompiledRun(
            other.run_lowered, self.lowered, self._wiring, self._blocks, options
        )
        return other

    def export(
        self,
        example: Tensor | Mapping[str, object],
        format: str = "dynamo",
        *,
        dynamic: bool = True,
        path: str | Path | None = None,
        **options: Any,
    ) -> versions.ExportedModel:
        """Export this program to another runtime, through transformers' exporters.

        Args:
            example: tokens ``[batch, pos]``, or the model's arguments by name, as a tokenizer
                returns them. The exported program takes the same arguments and the declared inputs.
            format: ``"dynamo"`` (`torch.export`), ``"onnx"``, ``"executorch"`` or ``"openvino"``.
            dynamic: whether the batch size and length may differ from the example's.
            path: the folder to save it in.
            options: options of the exporter's configuration (`OnnxConfig`, ...), such as
                `opset_version` or `dynamic_shapes`.

        Returns:
            transformers' `ExportedModel`: ``exported(input_ids=..., vector=...)`` runs it in its
            runtime and returns the program's outputs. `ExportedModel.from_pretrained(path)` loads
            it again; for ``"dynamo"``, which is pickled, add ``trust_remote_code=True``.

        Raises:
            VersionError: transformers is older than 5.23.
            ImportError: a package that the format needs is not installed; the error names the
                command.
            TypeError, ValueError: an unknown format or option, or an example that does not fit.

        Example:
            >>> from bridge import TransformerBridge
            >>> bridge = TransformerBridge.boot_embedded()
            >>> program = bridge.program(capture=["blocks.3.hook_resid_post"])
            >>> program.export(bridge.to_tokens("Mary and John"), "tensorrt")
            Traceback (most recent call last):
            ValueError: format is 'tensorrt'; it must be one of 'dynamo', 'onnx', 'executorch',
                'openvino'
        """
        return exporting.export.export_program(self, example, format, dynamic, path, options)

    def export_for_generation(
        self,
        example: Tensor | Mapping[str, object],
        format: str = "dynamo",
        *,
        dynamic: bool = True,
        path: str | Path | None = None,
        generation_config: GenerationConfig | None = None,
        multi_token_decode: bool = False,
        **options: Any,
    ) -> versions.ExportedModel:
        """Export this program to another runtime in two parts: one for the prompt, one for each
        further token.

        Args:
            example: as for `export`: the arguments of the model's `generate`.
            format, dynamic, path, options: as for `export`.
            generation_config, multi_token_decode: as for transformers' `export_for_generation`.

        Returns:
            transformers' `ExportedModel`, with the components ``prefill`` and ``decode``.
        """
        self._refuse_past("export_for_generation")
        return exporting.export.export_for_generation(
            self, example, format, dynamic, path, generation_config, multi_token_decode, options
        )


#: The arguments that give a decoder its first tokens.
_DECODER_TOKENS = ("decoder_input_ids", "decoder_inputs_embeds", "labels")


def _has_decoder_tokens(kwargs: Kwargs) -> bool:
    return any(name in kwargs for name in _DECODER_TOKENS)


# --------------------------------------------------------------------------------------------------
# The declared inputs of a program: tensors that its functions take, with other values in each call.
# --------------------------------------------------------------------------------------------------


_TAKEN = ("input_ids", "inputs_embeds", "hook", "activation")


def declared_inputs(inputs: Mapping[str, object], known: Collection[str]) -> dict[str, Tensor]:
    """Return the declared inputs of a program as tensors.

    Args:
        inputs: an example of each, by name: a tensor, or a number.
        known: the names of the model's own arguments.

    Raises:
        TypeError: an example that is not a tensor or a number.
        ValueError: a name that is reserved or is not a valid parameter name.
    """
    declared = {}
    for name, example in inputs.items():
        if not name.isidentifier() or name in known or name in _TAKEN:
            raise ValueError(
                f"{name!r} cannot be the name of an input: it must be one that a function's"
                " parameter can have, and not one of the model's arguments"
            )
        declared[name] = _tensor(name, example).detach()
    return declared


def _tensor(name: str, value: object, like: Tensor | None = None) -> Tensor:
    if isinstance(value, Tensor):
        return value
    if isinstance(value, bool | int | float):
        return torch.tensor(value, device=None if like is None else like.device)
    raise TypeError(f"the input {name} is {type(value).__name__}; it must be a tensor or a number")


def checked_inputs(
    declared: Mapping[str, Tensor], values: Mapping[str, object]
) -> dict[str, Tensor]:
    """Convert the declared inputs of one call to tensors with the dtypes of the examples.

    Args:
        declared: the examples, by name.
        values: the values, by name.

    Raises:
        TypeError: an input is missing, or has the wrong kind of dtype.
        ValueError: an input has the wrong number of axes.
    """
    missing = [name for name in declared if name not in values]
    if missing:
        raise TypeError(
            f"the program needs {', '.join(f'{name}=...' for name in missing)}: "
            f"it was declared with the inputs {', '.join(declared)}"
        )
    checked = {}
    for name, example in declared.items():
        value = _tensor(name, values[name], example)
        if value.ndim != example.ndim:
            raise ValueError(
                f"the input {name} has shape {list(value.shape)}; it was declared with"
                f" {list(example.shape)}, and must have as many axes"
            )
        if value.dtype != example.dtype:
            truth = example.dtype == torch.bool
            if truth or (value.is_floating_point() and not example.is_floating_point()):
                raise TypeError(
                    f"the input {name} is of {value.dtype}; it was declared as {example.dtype}"
                )
            value = value.to(example.dtype)
        checked[name] = value
    return checked
