"""Language models in plain torch: they map tokens to logits, and have no configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from adapters.inputs import accepted_by, may_take
from adapters.multihead import open_multihead
from adapters.observe.observe import WRONG, CallRecorder, ModuleCall, elements_of, one_line
from adapters.points import core_of
from adapters.registry import UnsupportedModelError, declaring


class _PlainConfig(PreTrainedConfig):
    """The properties of a plain torch model that are known without a run: the size of its
    vocabulary."""

    model_type = "plain_module"

    def __init__(self, vocab_size: int = 0, **options: Any) -> None:
        self.vocab_size = vocab_size
        self.pad_token_id = None
        self.use_cache = False
        self.tie_word_embeddings = False
        super().__init__(**options)


class PlainModel(PreTrainedModel, GenerationMixin):
    """A module of plain torch with the interface of transformers' models: it only calls the module.

    Args:
        module: maps tokens, its first argument, ``[batch, pos]``, to logits, ``[batch, pos,
            d_vocab]``, which it returns directly, first in a tuple, or as ``logits`` in a
            dictionary.

    Attributes:
        module: the module.

    Raises:
        UnsupportedModelError: it has no parameters, does not embed tokens, or does not run on
            tokens.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from adapters.plain_model import PlainModel
        >>> model = PlainModel(nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 7)))
        >>> model(torch.tensor([[1, 2]])).logits.shape, model.config.vocab_size
        (torch.Size([1, 2, 7]), 7)
    """

    config_class = _PlainConfig
    base_model_prefix = "module"

    def __init__(self, module: nn.Module) -> None:
        super().__init__(_PlainConfig())
        open_multihead(module)
        self.module = module
        self._tokens, self._output = _ends(module)
        self.config.vocab_size = int(self.get_input_embeddings().num_embeddings)
        self.config.name_or_path = type(module).__name__
        self.training = module.training  # `train` would change the mode of its children

    @property
    def plain_module(self) -> nn.Module:
        """Return the module, whose forward declares the accepted arguments."""
        return self.module

    def forward(
        self, input_ids: Tensor, return_dict: bool | None = None, **more: Any
    ) -> CausalLMOutput:
        """Call the module.

        Args:
            input_ids: tokens, ``[batch, pos]``.
            return_dict: accepted for compatibility with transformers' models, and ignored.
            more: its further inputs, by the names of its own arguments.
        """
        return CausalLMOutput(logits=logits_in(self.module, self.module(input_ids, **more)))

    def get_input_embeddings(self) -> nn.Embedding:
        """Return the table that tokens were looked up in."""
        table = self.module.get_submodule(self._tokens)
        assert isinstance(table, nn.Embedding)
        return table

    def get_output_embeddings(self) -> nn.Module | None:
        """Return the last module with a matrix whose output is as wide as the logits; None if there
        is none.
        """
        return None if self._output is None else self.module.get_submodule(self._output)

    def prepare_inputs_for_generation(  # type: ignore[override]
        self, input_ids: Tensor, attention_mask: Tensor | None = None, **options: Any
    ) -> dict[str, Tensor]:
        """Return all tokens, at every step: a plain module has no cache.

        Raises:
            ValueError: some are padding, and the module takes no `attention_mask`.
        """
        if attention_mask is None:
            return {"input_ids": input_ids}
        if may_take(self, "attention_mask"):
            inputs = {"input_ids": input_ids, "attention_mask": attention_mask}
            if "position_ids" in accepted_by(self):
                inputs["position_ids"] = (attention_mask.cumsum(-1) - 1).clamp(min=0)
            return inputs
        if not bool(attention_mask.all()):
            raise ValueError(
                f"{type(self.module).__name__} takes no attention_mask, so padding would be read as"
                " tokens: generate from prompts of one length"
            )
        return {"input_ids": input_ids}

    # Its own names, without the prefix of this wrapper.

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's own state dict."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module's own `load_state_dict`."""
        return self.module.load_state_dict(*args, **kwargs)


def logits_in(module: nn.Module, output: Any) -> Tensor:
    """Return the logits in a module's output.

    Raises:
        UnsupportedModelError: there are none.
    """
    if isinstance(output, Mapping) and isinstance(output.get("logits"), Tensor):
        output = output["logits"]
    logits = output if isinstance(output, Tensor) else next(iter(elements_of(output)), None)
    if not isinstance(logits, Tensor):
        shown = f"a {type(output).__name__}"
    elif logits.ndim == 3 and logits.is_floating_point():
        return logits
    else:
        shown = f"a tensor of shape {list(logits.shape)}"
    raise UnsupportedModelError(
        f"{type(module).__name__} returns {shown} for tokens: logits, [batch, pos, d_vocab], are"
        " needed, alone, first in a tuple, or as `logits` in a dictionary"
    )


def _ends(module: nn.Module) -> tuple[str, str | None]:
    """Return the paths of the modules that look up tokens and that output the logits.

    Raises:
        UnsupportedModelError: it does not run on tokens, or has no such table.
    """
    name = type(module).__name__
    parameter = next(module.parameters(), None)
    if parameter is None or parameter.is_meta:
        raise UnsupportedModelError(
            f"{name} has no weights, and what plays which part is found in a run"
        )
    tokens = torch.tensor([[1, 0]], device=parameter.device)
    calls, logits = _run_of_matrices(module, tokens)
    tables = [call.path for call in calls if _looks_up(call, tokens)]
    output = None
    for call in calls:
        if isinstance(call.output, Tensor) and call.output.shape == logits.shape:
            output = call.path if call.path not in tables else output
    if not tables or not isinstance(module.get_submodule(tables[0]), nn.Embedding):
        raise UnsupportedModelError(
            f"{name} looks tokens up in no nn.Embedding: how many there are is not known"
        )
    return tables[0], output


def _run_of_matrices(module: nn.Module, tokens: Tensor) -> tuple[list[ModuleCall], Tensor]:
    """Return the calls of all modules that have a matrix, in the order in which they end in a run
    on tokens, and the run's logits.

    Raises:
        UnsupportedModelError: it does not run on tokens alone.
    """
    matrices = []
    for path, inner in module.named_modules():
        weight = getattr(inner, "weight", None)
        if isinstance(weight, Tensor) and weight.ndim == 2:
            matrices.append((path, inner))
    try:
        with torch.no_grad(), CallRecorder(matrices) as recording:
            logits = logits_in(module, module(tokens))
    except UnsupportedModelError:
        raise
    except WRONG as error:
        raise UnsupportedModelError(
            f"{type(module).__name__} is not a transformers model, and does not run on tokens alone"
            f" ({one_line(error)}): tokens have to go in, as its first argument, and logits come"
            f" out{_held(module)}"
        ) from error
    return sorted(recording.calls, key=lambda call: call.end), logits


def _held(module: nn.Module) -> str:
    """Return the last part of an error message: the name of a transformers model inside the module
    (as in sentence-transformers); "" if there is none.
    """
    for path, inner in module.named_modules():
        if isinstance(inner, PreTrainedModel):
            return (
                f". It holds a {type(inner).__name__}, which can be wrapped: its"
                f" get_submodule({path!r})"
            )
    return ""


def _looks_up(call: ModuleCall, tokens: Tensor) -> bool:
    x = call.args[0] if call.args else None
    return isinstance(x, Tensor) and not x.is_floating_point() and torch.equal(x, tokens)


def with_interface(model: nn.Module) -> nn.Module:
    """Return a model itself, or a `PlainModel` around a module in plain torch.

    Args:
        model: the model that a user wraps.

    Raises:
        UnsupportedModelError: it is not a language model, see `PlainModel`.
    """
    core = core_of(model)
    inside = getattr(core, "module", None)
    is_ours = isinstance(core, PreTrainedModel) or isinstance(inside, PreTrainedModel)
    if is_ours or any(True for _ in declaring(type(core))):
        return model
    return PlainModel(model)
