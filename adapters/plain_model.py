"""Language models in plain torch: tokens go in, logits come out, and no configuration says anything of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from adapters.inputs import may_take
from adapters.multihead import open_multihead
from adapters.observe.observe import WRONG, CallRecorder, ModuleCall, elements_of, one_line
from adapters.points import core_of
from adapters.registry import UnsupportedModelError, declaring


class PlainConfig(PreTrainedConfig):
    """What is known of a model in plain torch without looking at a run: how many tokens it reads."""

    model_type = "plain_module"

    def __init__(self, vocab_size: int = 0, **options: Any) -> None:
        self.vocab_size, self.pad_token_id, self.use_cache = vocab_size, None, False
        self.tie_word_embeddings = False
        super().__init__(**options)


class PlainModel(PreTrainedModel, GenerationMixin):
    """A module of plain torch with the interface of transformers' models: it calls the module, and nothing else.

    Args:
        module: tokens go in, ``[batch, pos]``, as its first argument; logits come out, ``[batch, pos, d_vocab]``:
            alone, first in a tuple, or as ``logits`` in a dictionary.

    Attributes:
        module: the module.

    Raises:
        UnsupportedModelError: it has no parameters, embeds no tokens, or does not run on some.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from adapters.plain_model import PlainModel
        >>> model = PlainModel(nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 7)))
        >>> model(torch.tensor([[1, 2]])).logits.shape, model.config.vocab_size
        (torch.Size([1, 2, 7]), 7)
    """

    config_class = PlainConfig
    base_model_prefix = "module"

    def __init__(self, module: nn.Module) -> None:
        super().__init__(PlainConfig())
        open_multihead(module)
        self.module = module
        self._tokens, self._output = _ends(module)
        self.config.vocab_size = int(self.get_input_embeddings().num_embeddings)
        self.config.name_or_path = type(module).__name__
        self.train(module.training)

    @property
    def plain_module(self) -> nn.Module:
        """The module, whose forward says what can be passed."""
        return self.module

    def forward(self, input_ids: Tensor, return_dict: bool | None = None, **more: Any) -> CausalLMOutput:
        """Calls the module.

        Args:
            input_ids: tokens, ``[batch, pos]``.
            return_dict: as transformers' models take it; it changes nothing.
            more: what it takes besides, by the names of its own arguments.
        """
        return CausalLMOutput(logits=logits_in(self.module, self.module(input_ids, **more)))

    def get_input_embeddings(self) -> nn.Embedding:
        """The table that tokens were looked up in."""
        found = self.module.get_submodule(self._tokens)
        assert isinstance(found, nn.Embedding)
        return found

    def get_output_embeddings(self) -> nn.Module | None:
        """The last module with a matrix that put out as many numbers as there are logits; None where none did."""
        return None if self._output is None else self.module.get_submodule(self._output)

    def prepare_inputs_for_generation(  # type: ignore[override]
        self, input_ids: Tensor, attention_mask: Tensor | None = None, **options: Any
    ) -> dict[str, Tensor]:
        """All tokens, at every step: a plain module keeps none.

        Raises:
            ValueError: some are padding, and the module takes no `attention_mask`.
        """
        if attention_mask is None or may_take(self, "attention_mask"):
            return {"input_ids": input_ids} | ({} if attention_mask is None else {"attention_mask": attention_mask})
        if not bool(attention_mask.all()):
            raise ValueError(
                f"{type(self.module).__name__} takes no attention_mask, so padding would be read as tokens: generate "
                "from prompts of one length"
            )
        return {"input_ids": input_ids}

    # Its own names, without that of the place where it stands.

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own state dict."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own `load_state_dict`."""
        return self.module.load_state_dict(*args, **kwargs)


def logits_in(module: nn.Module, output: Any) -> Tensor:
    """The logits in what a module returns.

    Raises:
        UnsupportedModelError: there are none.
    """
    if isinstance(output, Mapping) and isinstance(output.get("logits"), Tensor):
        output = output["logits"]
    found = output if isinstance(output, Tensor) else next(iter(elements_of(output)), None)
    if not isinstance(found, Tensor) or found.ndim != 3 or not found.is_floating_point():
        shown = f"a tensor of shape {list(found.shape)}" if isinstance(found, Tensor) else f"a {type(output).__name__}"
        raise UnsupportedModelError(
            f"{type(module).__name__} returns {shown} for tokens: logits, [batch, pos, d_vocab], are needed, alone, "
            "first in a tuple, or as `logits` in a dictionary"
        )
    return found


def _ends(module: nn.Module) -> tuple[str, str | None]:
    """Where a module looks tokens up, and what puts its logits out: the paths of the two.

    Raises:
        UnsupportedModelError: it does not run on tokens, or has no such table.
    """
    name = type(module).__name__
    parameter = next(module.parameters(), None)
    if parameter is None or parameter.is_meta:
        raise UnsupportedModelError(f"{name} has no weights, and what plays which part is found in a run")
    tokens = torch.tensor([[1, 0]], device=parameter.device)
    calls, logits = _run_of_matrices(module, tokens)
    tables = [call.path for call in calls if _looks_up(call, tokens)]
    outputs = [(call.path, call.output) for call in calls if call.path not in tables]
    made = [path for path, x in outputs if isinstance(x, Tensor) and x.shape == logits.shape]
    if not tables or not isinstance(module.get_submodule(tables[0]), nn.Embedding):
        raise UnsupportedModelError(f"{name} looks tokens up in no nn.Embedding: how many there are is not known")
    return tables[0], made[-1] if made else None


def _run_of_matrices(module: nn.Module, tokens: Tensor) -> tuple[list[ModuleCall], Tensor]:
    """The calls of all modules that have a matrix, as they end in a run on tokens, and its logits.

    Raises:
        UnsupportedModelError: it does not run on tokens alone.
    """
    weights = [(path, each, getattr(each, "weight", None)) for path, each in module.named_modules()]
    matrices = [(path, each) for path, each, weight in weights if isinstance(weight, Tensor) and weight.ndim == 2]
    try:
        with torch.no_grad(), CallRecorder(matrices) as recording:
            logits = logits_in(module, module(tokens))
    except UnsupportedModelError:
        raise
    except WRONG as error:
        raise UnsupportedModelError(
            f"{type(module).__name__} is no model of transformers, and does not run on tokens alone "
            f"({one_line(error)}): tokens have to go in, as its first argument, and logits come out{_held(module)}"
        ) from error
    return sorted(recording.calls, key=lambda call: call.end), logits


def _held(module: nn.Module) -> str:
    """Where a module of another library has a model of transformers (sentence-transformers)."""
    held = next(((path, each) for path, each in module.named_modules() if isinstance(each, PreTrainedModel)), None)
    if held is None:
        return ""
    return f". It holds a {type(held[1]).__name__}, which can be wrapped: its get_submodule({held[0]!r})"


def _looks_up(call: ModuleCall, tokens: Tensor) -> bool:
    x = call.args[0] if call.args else None
    return isinstance(x, Tensor) and not x.is_floating_point() and torch.equal(x, tokens)


def with_interface(model: nn.Module) -> nn.Module:
    """A model, or, of a module in plain torch, a `PlainModel` around it.

    Args:
        model: what a user wraps.

    Raises:
        UnsupportedModelError: it is no language model, see `PlainModel`.
    """
    core = core_of(model)
    inside = getattr(core, "module", None)
    if any(isinstance(each, PreTrainedModel) for each in (core, inside)) or any(True for _ in declaring(type(core))):
        return model
    return PlainModel(model)
