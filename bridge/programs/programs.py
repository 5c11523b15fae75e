"""`Program`: a run with its captures and interventions as a plain module, which can be compiled, exported and served.

What comes in is a bridge, the hook points whose activations are wanted, and functions at hook points, with the
tensors that these are given anew in each call. What goes out is an `nn.Module` whose forward returns logits and
activations by name. The hooks that a run of the bridge would call now are a part of it; those that come later are
not.

1. *Shells* (`bridge.programs.lower`). For each module of the model there is an object of the same class that shares
   its parameters, buffers and configuration. What is attached to a shell the model does not see, and stays there: a
   program asks nobody who listens.
2. *Lowering.* Each function becomes a `Listener` whose call names what it is given (`Function`), and each hook point
   a `LoweredPoint` at its site: a torch hook of a shell (`LoweredSite`), or its forward (`LoweredTap`). What a hook
   does there is `HookPoint.edited`, as in a run.
3. *Running.* A pass of a program remembers what the pass of a run does (`ProgramPass`), and is found in thread-local
   storage, since torch.compile traces no context variable.
4. *Compiling* (`bridge.programs.compiled`) makes one graph for all numbers of rows and positions; programs of one
   bridge that differ in their numbers alone share it. *Exporting* (`bridge.export`) hands the same module to
   transformers' exporters.

Refused, when it is made: hook points that no program can have (inside a mixer, or a kernel that is no torch
function), gradients, modules with a forward that is somebody else's, models over several processes, inputs that no
function takes. Not known here: what torch makes of the code, and of a run more than its arguments.
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
from adapters.inputs import accepted_arguments, makes_decoder_tokens, past_of, takes, with_past_named
from adapters.points import core_of
from adapters.views import Kwargs
from bridge import export as exporting
from bridge.hooks.hooks import HookPoint
from bridge.hooks.names import suggestion
from bridge.hooks.rows import PositionCounting
from bridge.programs.compiled import CompiledRun, Run, generating_model
from bridge.programs.lower import Lowered, as_written, lower
from bridge.programs.program_pass import AnyFunction, ProgramPass
from bridge.run.inputs import RunnableBridge
from bridge.taps.attention import AttentionWatch


class Program(nn.Module):
    """A run of a model with captured activations and interventions. Made by `TransformerBridge.program`.

    It is around module objects of its own that share the model's parameters: the model does not see it, and a change of
    the parameters is seen by both. Its mode (`train`, `eval`), and which adapters of PEFT are at work, are its own; it
    begins with the model's. (Make another program for other adapters.)

    Args:
        bridge: the bridge.
        capture: the hook points whose activations it returns.
        interventions: hook points and functions, in turn.
        inputs: the declared inputs by name, with an example of each.

    Attributes:
        model: the module objects.
        captured: the names of the activations that it returns.
        inputs: an example of each declared input, as a tensor.
        compiled: it was made by `compile`.

    Raises:
        ValueError: a hook point that no program can have, or an input that no function takes.
        TypeError: a function that asks for what is not declared.
    """

    def __init__(
        self,
        bridge: RunnableBridge,
        capture: Sequence[HookPoint],
        interventions: Sequence[tuple[HookPoint, AnyFunction]],
        inputs: Mapping[str, object],
    ) -> None:
        if (main := takes(bridge.core).main) is not None:
            raise ValueError(f"a program takes tokens, and {type(bridge.core).__name__} reads {main} before any")
        if bridge.wiring.sharing is not None:
            bridge.wiring.sharing.refuse("a program")
        super().__init__()
        known = accepted_arguments(type(bridge.core).forward)
        self.inputs = declared_inputs(inputs, known)
        self.lowered: Lowered = lower(bridge, capture, interventions, tuple(self.inputs))
        self.model = self.lowered.model
        self._wiring = bridge.wiring
        self._config, self._class = bridge.core.config, type(bridge.core)
        self.captured = tuple([step.hook.name for step in self.lowered.steps if step.captured])
        self.compiled = False
        self.training = self.model.training
        self._known = known
        self._counted = PositionCounting.of(bridge.original_model, bridge.core, bridge.block_paths)
        self._places = bridge.cfg.positions_from_mask and "position_ids" in known
        self._caches = "use_cache" in known
        self._max_length = bridge.cfg.n_ctx
        self._has_decoder = bool(self._config.is_encoder_decoder)
        paths = () if self._has_decoder else bridge.block_paths  # T5's hand on what they are given, which torch refuses
        self._blocks = [
            self.model.get_submodule(path.removeprefix(as_written(bridge.original_model)[1])) for path in paths
        ]
        self._makes_tokens = self._has_decoder and makes_decoder_tokens(bridge.core)
        self._starts_with = getattr(self._config, "decoder_start_token_id", None) if self._has_decoder else 0
        self._chooses = self.lowered.chooses_tokens
        self._run: Run = self.run_lowered
        unused = [name for name in self.inputs if name not in self.lowered.taken]
        if unused:
            raise ValueError(
                f"no function of the interventions takes the input {', '.join(map(repr, unused))}: a function is given "
                "a declared input that its signature names, fn(activation, hook, vector)"
            )

    @property
    def changed(self) -> tuple[str, ...]:
        """The names of the hook points with interventions."""
        return tuple([step.hook.name for step in self.lowered.steps if step.changes])

    @property
    def axes(self) -> dict[str, str]:
        """The axes of the captured activations, by name."""
        return {step.hook.name: step.hook.point.axes for step in self.lowered.steps if step.captured}

    @property
    def core(self) -> PreTrainedModel:
        """The Hugging Face model among the module objects, without what wraps it (PEFT)."""
        found = core_of(self.model)
        assert isinstance(found, PreTrainedModel)
        return found

    @property
    def one_by_one(self) -> bool:
        """Experts are computed one after the other, with numbers of rows that depend on the values."""
        return self.lowered.one_by_one

    def attention_under_way(self) -> AttentionWatch | None:
        """What sees the attention that a tapped module is computing now, in this thread."""
        found = getattr(self.lowered.here, "watch", None)
        return found if isinstance(found, AttentionWatch) else None

    @property
    def config(self) -> PreTrainedConfig:
        """The Hugging Face model's configuration."""
        return self._config

    def __repr__(self) -> str:
        inputs = ", ".join(f"{name}: {list(example.shape)}" for name, example in self.inputs.items())
        changed = ", ".join(self.changed)
        return (
            f"{type(self).__name__} of {self._class.__name__}{' (compiled)' if self.compiled else ''}\n"
            f"  returns  {', '.join(('logits', *self.captured))}\n"
            f"  changes  {changed or 'nothing'}\n"
            f"  inputs   {inputs or 'none'}"
        )

    def forward(self, input_ids: Tensor | None = None, **given: Any) -> Kwargs:
        """Runs the model.

        Args:
            input_ids: tokens ``[batch, pos]``; in place of them, `inputs_embeds`.
            given: the declared inputs, and anything else that the model's forward takes (`attention_mask`
                ``[batch, pos]``, `decoder_input_ids`, `past_key_values`, `use_cache`, ...).

        Returns:
            ``"logits"`` ``[batch, pos, d_vocab]`` and each captured activation by its canonical name; with `use_cache`
            or `past_key_values` also ``"past_key_values"``, with `labels` also ``"loss"``.

        Raises:
            TypeError: an argument that nobody knows, an input that is missing, or of a wrong kind.
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
            >>> outputs = program(bridge.to_tokens("Mary and John"), vector=torch.ones(bridge.cfg.d_model))
            >>> list(outputs)
            ['logits', 'blocks.3.hook_resid_post']
        """
        if is_compiling():
            inputs = {name: given.pop(name) for name in self.inputs}
            return self.run_lowered(input_ids, inputs, given)
        inputs = {name: given.pop(name) for name in self.inputs if name in given}
        checked = checked_inputs(self.inputs, inputs)
        self._check(input_ids, given)
        # Else compiled code would be made once more for each thread's first call.
        vars(self.lowered.here).setdefault("program_pass", None)
        return self._run(input_ids, checked, self._with_mask(input_ids, given) if self.compiled else given)

    def _with_mask(self, input_ids: Tensor | None, given: Kwargs) -> Kwargs:
        """The arguments of compiled code, with a mask of ones where none is given: it is the same code then.

        Without a mask, transformers would look in it for several sequences in one row, by the `position_ids`.
        """
        tokens = given.get("inputs_embeds") if input_ids is None else input_ids
        if (
            tokens is None
            or "attention_mask" not in self._known
            or any(given.get(name) is not None for name in ("attention_mask", "position_ids"))
            or past_of(given) is not None
            or self._counted.padding is not None  # then the model itself looks for padding among the tokens
            or self._config._attn_implementation not in ("sdpa", "eager")
        ):
            return given
        return {**given, "attention_mask": torch.ones(tokens.shape[:2], dtype=torch.long, device=tokens.device)}

    def run_lowered(self, input_ids: Tensor | None, inputs: Mapping[str, Tensor], given: Kwargs) -> Kwargs:
        """The run itself, which is what is compiled and exported.

        Args:
            input_ids: as for `forward`.
            inputs: the declared inputs.
            given: further arguments of the model.
        """
        arguments = self._arguments(input_ids, given)
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
        made: Kwargs = {"logits": output.logits if hasattr(output, "logits") else output[0]}
        for name in self.captured:
            if name not in program_pass.kept:
                raise RuntimeError(f"{name} did not run")
            made[name] = program_pass.kept[name]
        if given.get("labels") is not None:
            made["loss"] = output.loss
        past = past_of(output) if isinstance(output, dict) else None
        if past is not None and (given.get("use_cache") or past_of(given) is not None):
            made["past_key_values"] = past
        return made

    def _arguments(self, input_ids: Tensor | None, given: Kwargs) -> Kwargs:
        """What the model is called with, as a run of the bridge works it out."""
        arguments = with_past_named(given, self._known)
        if input_ids is not None:
            arguments["input_ids"] = input_ids
        tokens: Tensor = given["inputs_embeds"] if input_ids is None else input_ids
        mask = given.get("attention_mask")
        if isinstance(mask, Tensor) and mask.ndim == 2:
            arguments["attention_mask"] = mask = mask.long()
            if self._places and given.get("position_ids") is None:
                arguments["position_ids"] = self._counted.places(mask)[:, -tokens.shape[1] :]
        if is_compiling() and self._caches and past_of(given) is None:
            arguments.setdefault("use_cache", False)  # nobody gets it, and it would be in the graph
        starts = {"decoder_input_ids", "decoder_inputs_embeds", "labels"}
        if self._has_decoder and not (self._makes_tokens and input_ids is not None) and not starts & given.keys():
            start = self._starts_with
            assert start is not None  # `_check` has seen to it
            arguments["decoder_input_ids"] = torch.full((tokens.shape[0], 1), start, device=tokens.device)
        return arguments

    def _check(self, input_ids: Tensor | None, given: Kwargs) -> None:
        """Refuses arguments that nobody knows, and tokens of a wrong shape."""
        for name in with_past_named(given, self._known):
            if name not in self._known:  # this runs in every call: what is asked of the configuration is kept
                raise TypeError(
                    f"{name!r} is neither an input of the program ({', '.join(self.inputs) or 'it has none'}) nor an "
                    f"argument of {self._class.__name__}.{suggestion(name, (*self.inputs, *self._known))}"
                )
        embeds = given.get("inputs_embeds")
        if (input_ids is None) == (embeds is None) and given.get("encoder_outputs") is None:
            raise TypeError("a program takes tokens [batch, pos] first, or inputs_embeds=..., and not both")
        if input_ids is not None and (input_ids.ndim != 2 or input_ids.is_floating_point()):
            raise ValueError(
                f"the tokens have shape {list(input_ids.shape)} and type {input_ids.dtype}; a program takes whole "
                "numbers [batch, pos], such as bridge.to_tokens(text) gives"
            )
        if self._starts_with is None and not {"decoder_input_ids", "decoder_inputs_embeds", "labels"} & given.keys():
            raise ValueError("the model names no decoder_start_token_id; pass decoder_input_ids")
        past = past_of(given)
        if past is not None:
            self._refuse_past("past_key_values")
        mask = given.get("attention_mask")
        if self._chooses is not None and isinstance(mask, Tensor) and not bool(mask.all()):
            self._refuse_past("padding")
        if self._max_length is not None and past is None and input_ids is not None:
            length = input_ids.shape[1]
            if length > self._max_length:
                raise ValueError(f"the tokens have {length} positions; the model has a context of {self._max_length}")

    def _refuse_past(self, what: str) -> None:
        """Refuses to continue a sequence of which an operation would have to know what was before.

        Raises:
            ValueError: there is such an operation.
        """
        if self._chooses is not None:
            raise ValueError(
                f"the intervention at {self._chooses} is for some tokens alone, and with {what} a program does not "
                "know which tokens it is given: use bridge.generate inside `with bridge.hooks(...)`, or with a program "
                "that is not compiled"
            )

    def generating(self, inputs: Mapping[str, object]) -> PreTrainedModel:
        """What has transformers' `generate` and runs this program in each step; `bridge.generate` takes the program.

        Args:
            inputs: the declared inputs, of every step.

        Raises:
            TypeError: an input that is missing, or that was not declared, or is of another kind.
            ValueError: the model has an encoder, or stands in another (PEFT).
        """
        unknown = [name for name in inputs if name not in self.inputs]
        if unknown:
            declared = ", ".join(self.inputs) or "none"
            raise TypeError(f"{', '.join(unknown)} was not declared; the program has the inputs {declared}")
        if self.compiled:
            self._refuse_past("generate, compiled,")
        if self.core is not self.model:
            raise ValueError(
                "a program around a PEFT model cannot generate: merge its weights first, merge_and_unload()"
            )
        vars(self.lowered.here).setdefault("program_pass", None)
        return generating_model(self.core, self._run, checked_inputs(self.inputs, inputs))

    def compile(self, **options: Any) -> Program:  # type: ignore[override]
        """The same program, through `torch.compile`: one graph, for any number of rows and positions.

        Tensors that its functions keep are inputs of the graph: other values, and other functions of the same code in
        another program of this bridge, are not compiled again. One position is a graph of its own.

        Args:
            options: of `torch.compile`; ``fullgraph=True`` unless they say otherwise.

        Returns:
            Another program around the same module objects, which stay as they are from then on. Its first call
            compiles.

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
        other._run = CompiledRun(other.run_lowered, self.lowered, self._wiring, self._blocks, options)
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
        """This program for another runtime, through transformers' exporters.

        Args:
            example: tokens ``[batch, pos]``, or the arguments of the model by name, as a tokenizer gives them. What it
                has is what the exported program takes, with the declared inputs.
            format: ``"dynamo"`` (`torch.export`), ``"onnx"``, ``"executorch"`` or ``"openvino"``.
            dynamic: other numbers of rows and positions than the example's may be given.
            path: a folder to save it in.
            options: of the exporter's configuration (`OnnxConfig`, ...), such as `opset_version` or `dynamic_shapes`.

        Returns:
            transformers' `ExportedModel`: ``exported(input_ids=..., vector=...)`` runs it in its runtime and returns
            what the program returns. `ExportedModel.from_pretrained(path)` reads it back; of
            ``"dynamo"``, which is pickled, with ``trust_remote_code=True``.

        Raises:
            VersionError: transformers is older than 5.23.
            ImportError: the format needs something that is not installed; the error names the command.
            TypeError, ValueError: a format that does not exist, an example that does not fit, an option that nobody
                knows.

        Example:
            >>> from bridge import TransformerBridge
            >>> bridge = TransformerBridge.boot_embedded()
            >>> program = bridge.program(capture=["blocks.3.hook_resid_post"])
            >>> program.export(bridge.to_tokens("Mary and John"), "tensorrt")
            Traceback (most recent call last):
            ValueError: format is 'tensorrt'; it must be one of 'dynamo', 'onnx', 'executorch', 'openvino'
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
        """This program for another runtime, in two parts: one for a prompt, one for a token more.

        Args:
            example: as for `export`: what the model's `generate` is given.
            format, dynamic, path, options: as for `export`.
            generation_config, multi_token_decode: as for transformers' `export_for_generation`.

        Returns:
            transformers' `ExportedModel`, with the components ``prefill`` and ``decode``.
        """
        self._refuse_past("export_for_generation")
        return exporting.export.export_for_generation(
            self, example, format, dynamic, path, generation_config, multi_token_decode, options
        )


# ----------------------------------------------------------------------------------------------------------------------
# The declared inputs of a program: tensors that its functions are given, other ones in each call.
# ----------------------------------------------------------------------------------------------------------------------


_TAKEN = ("input_ids", "inputs_embeds", "hook", "activation")


def declared_inputs(inputs: Mapping[str, object], known: Collection[str]) -> dict[str, Tensor]:
    """The declared inputs of a program, as tensors.

    Args:
        inputs: an example of each, by name: a tensor, or a number.
        known: the names of the model's own arguments.

    Raises:
        TypeError: something else than a tensor or a number.
        ValueError: a name that means something else, or that no parameter can have.
    """
    found = {}
    for name, example in inputs.items():
        if not name.isidentifier() or name in known or name in _TAKEN:
            raise ValueError(
                f"{name!r} cannot be the name of an input: it must be one that a function's parameter can have, and "
                "that is no argument of the model"
            )
        found[name] = _tensor(name, example).detach()
    return found


def _tensor(name: str, value: object, like: Tensor | None = None) -> Tensor:
    if isinstance(value, Tensor):
        return value
    if isinstance(value, bool | int | float):
        return torch.tensor(value) if like is None else torch.tensor(value, device=like.device)
    raise TypeError(f"the input {name} is {type(value).__name__}; it must be a tensor or a number")


def checked_inputs(declared: Mapping[str, Tensor], given: Mapping[str, object]) -> dict[str, Tensor]:
    """What is given for declared inputs in one call, as tensors of the types of the examples.

    Args:
        declared: the examples, by name.
        given: the values, by name.

    Raises:
        TypeError: one is missing, or of another kind of number.
        ValueError: one has another number of axes.
    """
    missing = [name for name in declared if name not in given]
    if missing:
        raise TypeError(
            f"the program needs {', '.join(f'{name}=...' for name in missing)}: "
            f"it was declared with the inputs {', '.join(declared)}"
        )
    found = {}
    for name, example in declared.items():
        value = _tensor(name, given[name], example)
        if value.ndim != example.ndim:
            raise ValueError(
                f"the input {name} has shape {list(value.shape)}; it was declared with {list(example.shape)}, and "
                "must have as many axes"
            )
        if value.dtype != example.dtype:
            truth = example.dtype == torch.bool
            if truth or (value.is_floating_point() and not example.is_floating_point()):
                raise TypeError(f"the input {name} is of {value.dtype}; it was declared as {example.dtype}")
            value = value.to(example.dtype)
        found[name] = value
    return found
