"""Which arguments a model's forward takes, and which of them its tokens are."""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn
from transformers import PreTrainedModel

from adapters.views.given import names_of

#: What tokens are to a model: those of its decoder, where its encoder reads images or sound.
TokensArgument = Literal["input_ids", "decoder_input_ids"]


@functools.cache
def accepted_arguments(forward: Callable[..., Any]) -> frozenset[str]:
    """The names of the arguments that a Hugging Face forward takes, those of its typed ``**kwargs`` included."""
    names: set[str] = set()
    for parameter in inspect.signature(forward).parameters.values():
        if parameter.kind is not parameter.VAR_KEYWORD:
            names.add(parameter.name)
            continue
        for typed in typing.get_args(_meant(parameter.annotation, forward)):
            names.update(getattr(typed, "__annotations__", ()))
    return frozenset(names - {"self", "args"})


def _meant(annotation: Any, forward: Callable[..., Any]) -> Any:
    """What an annotation of a forward means."""
    if isinstance(annotation, str):
        return eval(annotation, inspect.unwrap(forward).__globals__)  # its own module wrote it
    return annotation


def _forward_of(core: nn.Module) -> Callable[..., Any]:
    """The forward that says what can be passed: of a `PlainModel`, its module's."""
    said: nn.Module = getattr(core, "plain_module", core)
    return type(said).forward


def accepted_by(core: nn.Module) -> frozenset[str]:
    """The names of the arguments that a Hugging Face model takes.

    Args:
        core: the model, without what wraps it. ``use_cache`` counts where its forward passes it on to its decoder.

    Example:
        >>> import transformers
        >>> from adapters.inputs.arguments import accepted_by
        >>> model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=10))
        >>> {"use_cache", "past_key_values"} <= accepted_by(model)
        True
    """
    forward = _forward_of(core)
    names = accepted_arguments(forward)
    if "past_key_values" not in names or "use_cache" in names or not isinstance(core, PreTrainedModel):
        return names
    passes_on = any(x.kind is x.VAR_KEYWORD for x in inspect.signature(forward).parameters.values())
    decoder = core.get_decoder()
    taken = passes_on and decoder is not None and "use_cache" in accepted_arguments(type(decoder).forward)
    return names | {"use_cache"} if taken else names


def may_take(core: nn.Module, name: str) -> bool:
    """Whether a model takes an argument, as far as it says: one whose forward takes anything may.

    Args:
        core: the model, without what wraps it.
        name: of the argument.
    """
    forward = _forward_of(core)
    return name in accepted_arguments(forward) or _takes_anything(forward)


@functools.cache
def _takes_anything(forward: Callable[..., Any]) -> bool:
    return any(each.kind is each.VAR_KEYWORD for each in inspect.signature(forward).parameters.values())


def gives_cache(core: nn.Module) -> bool:
    """Whether a Hugging Face model takes keys and values of earlier tokens and gives those of all, as far as it says.

    Args:
        core: the model, without what wraps it.

    Example:
        >>> import transformers
        >>> from adapters.inputs.arguments import gives_cache
        >>> config = transformers.MambaConfig(hidden_size=8, num_hidden_layers=1, vocab_size=10)
        >>> gives_cache(transformers.MambaForCausalLM(config))  # its state is no cache of keys and values
        False
    """
    forward = type(core).forward
    if not {"past_key_values", "use_cache"} <= accepted_by(core):
        return False
    returned = _meant(inspect.signature(forward).return_annotation, forward)
    outputs = [kind for kind in (returned, *typing.get_args(returned)) if hasattr(kind, "__dataclass_fields__")]
    return not outputs or any("past_key_values" in output.__dataclass_fields__ for output in outputs)


def argument_names(module: nn.Module) -> list[str]:
    """The names of what a module's forward takes, in order."""
    return list(names_of(type(module).forward))


@dataclass(frozen=True)
class Takes:
    """What a model takes.

    Attributes:
        tokens: the argument that tokens are; None where there are none (ViT, HuBERT).
        main: the argument that images or sound are, where tokens are not what its first blocks read (Whisper, ViT).
        needed: the arguments without which its forward cannot be called.
    """

    tokens: TokensArgument | None
    main: str | None
    needed: tuple[str, ...]


def takes(core: nn.Module) -> Takes:
    """What a Hugging Face model takes.

    Args:
        core: the model, without what wraps it.

    Example:
        >>> from transformers import GPT2LMHeadModel, ViTModel, WhisperForConditionalGeneration
        >>> from adapters.inputs.arguments import taken_by
        >>> [(taken_by(cls).tokens, taken_by(cls).main) for cls in (GPT2LMHeadModel, ViTModel)]
        [('input_ids', None), (None, 'pixel_values')]
        >>> taken_by(WhisperForConditionalGeneration).tokens
        'decoder_input_ids'
    """
    cls: Any = type(core)  # a class can be hashed, which its type does not say
    return taken_by(cls)


@functools.cache
def taken_by(cls: type[nn.Module]) -> Takes:
    """What the models of a class take: see `takes`."""
    parameters = inspect.signature(cls.forward).parameters
    known = (each for each in list(parameters.values())[1:] if each.kind is each.POSITIONAL_OR_KEYWORD)
    needed = [each.name for each in known if each.default is each.empty and each.name != "input_ids"]
    main: str = getattr(cls, "main_input_name", "input_ids")
    if main == "input_ids" or main not in parameters:
        return Takes("input_ids", None, tuple(needed))
    if {"decoder_input_ids", "encoder_outputs"} <= parameters.keys():
        return Takes("decoder_input_ids", main, tuple(name for name in needed if name != main))
    if "input_ids" in parameters:  # text, with an image in it
        return Takes("input_ids", None, tuple(needed))
    return Takes(None, main, tuple(name for name in needed if name != main))
