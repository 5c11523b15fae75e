"""A program in the place of the model inside of transformers' `generate`."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping

from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from adapters.views import Kwargs

#: What runs a program: tokens, the declared inputs, the model's further arguments.
Run = Callable[[Tensor | None, Mapping[str, Tensor], Kwargs], Kwargs]


def generating(model: PreTrainedModel, run: Run, inputs: Mapping[str, Tensor]) -> PreTrainedModel:
    """A model whose forward is a program's, and whose `generate` is transformers' own.

    Args:
        model: the program's module objects.
        run: runs the program.
        inputs: the declared inputs of every step.

    Raises:
        ValueError: the model has an encoder, which `generate` calls by itself.
    """
    if model.config.is_encoder_decoder:
        raise ValueError(
            f"{type(model).__name__} has an encoder, which generate runs by itself, outside of a program: use "
            "bridge.generate inside `with bridge.hooks(...)`"
        )
    other = copy.copy(model)

    def step(input_ids: Tensor | None = None, **given: object) -> CausalLMOutputWithPast:
        given.pop("return_dict", None)
        made = run(input_ids, inputs, {name: value for name, value in given.items() if value is not None})
        return CausalLMOutputWithPast(logits=made["logits"], past_key_values=made.get("past_key_values"))

    functools.update_wrapper(step, model.forward)  # whose signature `generate` asks for
    other.__dict__["forward"] = step
    return other
