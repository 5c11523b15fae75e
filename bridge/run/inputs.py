"""From what a user passes to a run to what the Hugging Face model takes."""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Integer
from numpy.typing import NDArray
from torch import Tensor, nn

from adapters.config import config_of
from adapters.inputs import (
    OF_IMAGES_AND_SOUND,
    Takes,
    accepted_arguments,
    accepted_by,
    looks_for_padding,
    makes_decoder_tokens,
    may_take,
    past_of,
    takes,
    with_past_named,
)
from adapters.linear import input_device
from adapters.points import learns_prompt
from adapters.views import Kwargs
from bridge.hooks.asked import StudiedBridge
from bridge.hooks.context import CURRENT, HookFunction
from bridge.hooks.hooks import HookPoint
from bridge.hooks.names import NamesFilter, suggestion
from bridge.hooks.rows import (
    PositionCounting,
    around_blocks,
    check_zero_or_one,
    is_padded_in_front,
)
from bridge.run.tokenization import Batch, TokenizerFacts, as_tokens, check_embeddings, check_ids, texts_in
from bridge.wiring.wiring import Wiring

# ----------------------------------------------------------------------------------------------------------------------
# An input as Hugging Face's tokenizers and processors give it, and as its models take it: by name, or in a mapping.
# ----------------------------------------------------------------------------------------------------------------------


#: What Hugging Face's models call the input of a run.
NAMES = ("input_ids", "inputs_embeds")


def unpacked(input: Any, mask: Any, arguments: Mapping[str, Any]) -> tuple[Any, Any, dict[str, Any]]:
    """The input, its mask and the model's other arguments.

    Args:
        input: what a run is given first: what it takes, a mapping of the model's arguments (`BatchEncoding`), or None.
        mask: ``[batch, pos]``, if it is given.
        arguments: the model's arguments by name, the input perhaps among them.

    Returns:
        The input, tokens or embeddings out of a mapping or from their names, arrays of NumPy as tensors; None where
        only images or sound are given; the mask; the other arguments. Embeddings by their name stay among these: they
        are the model's own argument (`embeddings_given`).

    Raises:
        TypeError: something is given twice, or there is no input at all.

    Example:
        >>> from bridge.run.inputs import unpacked
        >>> unpacked({"input_ids": [[5, 6]], "attention_mask": [[1, 1]]}, None, {})
        ([[5, 6]], tensor([[1, 1]]), {})
    """
    rest = dict(arguments)
    if isinstance(input, Mapping):
        twice = [name for name in input if name in rest or (name == "attention_mask" and mask is not None)]
        if twice:
            raise TypeError(f"{', '.join(twice)}: given twice, by name and in the {type(input).__name__}")
        found = dict(input)
        one_row = isinstance(ids := found.get("input_ids"), list | tuple) and ids and isinstance(ids[0], int)
        rest |= {name: value if name in NAMES else _as_tensor(value, bool(one_row)) for name, value in found.items()}
        input, mask = None, rest.pop("attention_mask", mask)
    named = [name for name in NAMES if rest.get(name) is not None]
    if input is None and named:
        input = rest.pop(named[0])
        if named[0] == "inputs_embeds":
            input = rest[named[0]] = _as_tensor(input, False, arrays_only=True)
        mask = rest.pop("attention_mask", mask)
    if input is None and not any(isinstance(value, Tensor | np.ndarray) for value in rest.values()):
        raise TypeError(
            "there is no input: give a text, a list of texts, tokens [pos] or [batch, pos], embeddings "
            "[batch, pos, d_model], or what a tokenizer gives"
        )
    return _as_tensor(input, False, arrays_only=True), _as_tensor(mask, False, arrays_only=True), rest


def _as_tensor(value: Any, one_row: bool, arrays_only: bool = False) -> Any:
    """Arrays and lists of numbers as tensors; anything else, such as names of adapters, as it is."""
    numbers = isinstance(value, list | tuple) and not any(isinstance(entry, str) for entry in value[:1])
    if isinstance(value, np.ndarray) or (not arrays_only and numbers):
        value = torch.as_tensor(value)
        return value.unsqueeze(0) if one_row and value.ndim == 1 else value
    return value


# ----------------------------------------------------------------------------------------------------------------------
# What a run needs of a bridge.
# ----------------------------------------------------------------------------------------------------------------------


#: What a run takes: a text, texts, tokens ``[pos]`` or ``[batch, pos]`` (a tensor, or lists of ids), or embeddings
#: ``[batch, pos, d_model]``; or a mapping of the model's arguments, as a tokenizer gives it.
Input = str | Sequence[Any] | Mapping[str, Any] | NDArray[Any] | Integer[Tensor, "..."] | Float[Tensor, "..."]
#: Prompts of a study: tokens, or a mapping of the model's arguments with images or sound, as a processor gives it.
Prompts = Integer[Tensor, "..."] | Mapping[str, Any]
#: Which hook point (a name, an alias, a function of the name) gets which function.
HookSpec = tuple[NamesFilter | HookPoint, HookFunction]


class RunnableBridge(StudiedBridge):
    """A bridge, as those need it who run its model.

    Attributes:
        wiring: its hook points and what they stand on.
    """

    wiring: Wiring

    @property
    def kept_level(self) -> int | None:
        """The level that hooks get which outlast their run."""
        return None

    @property
    def tokenizer_facts(self) -> TokenizerFacts:
        """What the tokenizer does by itself."""
        raise NotImplementedError

    def batch_of(self, texts: Sequence[str], prepend_bos: bool | None = None, padding_side: str | None = None) -> Batch:
        """Texts as tokens, padded to one length."""
        raise NotImplementedError


_STAND_IN = re.compile("(image|video|audio)_token_(id|index)")


def prompts_with(bridge: RunnableBridge, prompts: Prompts | Input, more: Mapping[str, Any]) -> dict[str, Any]:
    """A study's prompts, as any run takes them: tokens, and what else the model is given: images, sound, masks.

    Every study takes them so: patching, lenses, circuits, features. Where the tokens stand for images or sound, and
    there are none, it says so.

    Args:
        bridge: the bridge.
        prompts: see `Prompts`.
        more: arguments of the model by name, for these prompts; None for one that is not given.

    Raises:
        TypeError: one that the model does not take, or that is given twice.

    Example:
        >>> from bridge import TransformerBridge
        >>> from bridge.run.inputs import prompts_with
        >>> bridge = TransformerBridge.boot_embedded()
        >>> prompts_with(bridge, bridge.to_tokens("Mary and")[0], {"attention_mask": None})
        {'input_ids': tensor([[  1, 505, 388]])}
    """
    further = {name: value for name, value in more.items() if value is not None and name != "attention_mask"}
    input, mask, given = unpacked(prompts, more.get("attention_mask"), further)
    check_arguments(bridge, Request(input, model_kwargs=given), ())
    tokens = as_tokens(input).to(bridge.cfg.device)
    config, seen = config_of(bridge.core), any(name.startswith(OF_IMAGES_AND_SOUND) for name in given)
    for name, token in vars(config).items():
        if not seen and _STAND_IN.fullmatch(name) and isinstance(token, int) and bool((tokens == token).any()):
            kind = name.partition("_")[0]
            warnings.warn(
                f"the tokens hold {token}, which stands for {kind}, and none is given: it is read as a word. Give what "
                f"the processor makes of it by name ({'input_features' if kind == 'audio' else 'pixel_values'}=)",
                stacklevel=4,
            )
    return {"input_ids": tokens, **({} if mask is None else {"attention_mask": mask}), **given}


# ----------------------------------------------------------------------------------------------------------------------
# What a user asks of a run.
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Request:
    """An input, how it is taken, and which layers run. The fields are arguments of `TransformerBridge.forward`.

    Attributes:
        input: text, texts, tokens ``[pos]`` or ``[batch, pos]``, or embeddings ``[batch, pos, d_model]``; for a model
            whose first blocks read images or sound, these, or the decoder's tokens. A mapping of arguments, and
            what is given by the names of the model, is taken apart; None: images or sound are given by their name.
        prepend_bos, padding_side: for text.
        attention_mask: ``[batch, pos]``, 1 for tokens and 0 for padding.
        start_at_layer, stop_at_layer: the layers between which the model runs.
        model_kwargs: further arguments of the model.
    """

    input: Input | None
    prepend_bos: bool | None = None
    padding_side: str | None = None
    attention_mask: Any = None  # an array becomes a tensor
    start_at_layer: int | None = None
    stop_at_layer: int | None = None
    model_kwargs: Kwargs = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.input, Tensor | str | list):
            self.input, self.attention_mask, self.model_kwargs = unpacked(
                self.input, self.attention_mask, self.model_kwargs
            )


@dataclass
class Inputs:
    """What the model is called with.

    Attributes:
        kwargs: the model's keyword arguments.
        tokens: ``[batch, pos]``, None for embeddings.
        mask: ``[batch, pos]``, 1 for tokens and 0 for padding; None when nothing is padded.
    """

    kwargs: Kwargs
    tokens: Tensor | None
    mask: Tensor | None


#: Kwargs of a bridge's other calls, for who gives them where they are not taken.
TAKEN_BY = {
    **dict.fromkeys(
        ("names_filter", "incl_bwd", "pos_slice", "device", "return_cache_object"),
        "run_with_cache takes it",
    ),
    "remove_batch_dim": "run_with_cache takes it; a hook's activation has its batch axis: write `x[0]` in the function",
    **dict.fromkeys(
        ("fwd_hooks", "bwd_hooks"), "run_with_hooks takes it, and so does `with bridge.hooks(...)` around any call"
    ),
    **dict.fromkeys(("reset_hooks_end", "clear_contexts"), "run_with_hooks and run_with_cache take it"),
    **dict.fromkeys(("return_type", "loss_per_token"), "a plain run takes it, bridge(tokens)"),
    "capture": "trace takes it",
    "return_dict": "a run returns what return_type says",
}
#: What Hugging Face's models return when they are asked, and where it is here.
_OUTPUTS = {
    "output_hidden_states": "hook_resid_pre and hook_resid_post of each block",
    "output_attentions": "attn.hook_pattern of each block",
}


def added_around(model: nn.Module) -> AbstractSet[str]:
    """The arguments of what is wrapped around a model: of PEFT, which adapter each row has."""
    mixes = hasattr(model, "get_base_model") and not learns_prompt(model)
    return {"adapter_names"} if mixes else frozenset()


def check_arguments(bridge: RunnableBridge, asked: Request, ours: Sequence[str]) -> None:
    """Refuses keyword arguments that neither the bridge nor the model knows.

    Raises:
        TypeError: there is one.
    """
    given = asked.model_kwargs
    if not given:
        return
    model = bridge.core
    known = accepted_by(model) | added_around(bridge.original_model)
    for name in with_past_named(given, known):
        by_name = name == "inputs_embeds" and given.get(name) is asked.input  # see `embeddings_given`
        by_name |= name == "input_ids" and asked.start_at_layer is not None  # what the stream is of
        if name in NAMES and not by_name:
            raise TypeError(f"{name} is the input itself, and an input is given: pass one of them")
        if name in _OUTPUTS and given[name]:
            raise ValueError(
                f"{name}=True is an option of Hugging Face's output, and a run returns what return_type says: "
                f"run_with_cache(tokens) gives {_OUTPUTS[name]}, bridge.original_model(...) Hugging Face's own output"
            )
        if name not in known and name in TAKEN_BY:
            raise TypeError(f"{name!r} is no argument of this call: {TAKEN_BY[name]}")
        if name not in known:
            raise TypeError(
                f"{name!r} is an argument of neither the bridge nor {type(model).__name__}."
                f"{suggestion(name, (*ours, *known))}"
            )


def prepare(bridge: RunnableBridge, asked: Request) -> Inputs:
    """The model's arguments for what a user asks.

    Args:
        bridge: the bridge.
        asked: what the user asks.

    Raises:
        TypeError: the input is none of what a run takes.
        ValueError: it is too long, or empty, or its mask does not fit; or something that the model needs is missing.
    """
    kwargs = with_past_named(asked.model_kwargs, accepted_by(bridge.core))
    taken = takes(bridge.core)
    if taken.needed:
        _check_needed(bridge.core, taken, kwargs)
    run = CURRENT.get().run
    starts = run is not None and run.start_at is not None
    if taken.main is not None and not starts:
        return _images_or_sound(bridge, taken, asked, kwargs)
    tokens, mask = _taken_in(bridge, asked, kwargs, starts)
    length = (kwargs["inputs_embeds"] if tokens is None else tokens).shape[1]
    # What an encoder-decoder remembers is of its decoder: the encoder's tokens are all here.
    past = None if bridge.core.config.is_encoder_decoder else past_of(kwargs)
    _check_further(bridge, kwargs, length, past)
    if mask is not None and not may_take(bridge.core, "attention_mask"):
        _refuse_padding(bridge, _checked_mask(mask, kwargs, length, past))
        mask = None
    if mask is not None:
        mask = _checked_mask(mask, kwargs, length, past)
        if mask.ndim == 2 and looks_for_padding(bridge.core):
            tokens = _padded_as_known(bridge.core, mask, kwargs)
        # A model that needs an image hands what it does not know to that image's own model, too.
        if mask.ndim == 2 and not taken.needed:
            _place(bridge, mask, length, kwargs)
        kwargs["attention_mask"] = mask.to(input_device(bridge.wiring.model))
        if mask.ndim == 4:  # the model's own business: what is padding cannot be told from it
            return Inputs(kwargs, tokens, None)
        mask = kwargs["attention_mask"][:, -length:]
    two = "decoder_input_ids" in accepted_arguments(type(bridge.core).forward)  # a configuration takes longer to ask
    if two and bridge.core.config.is_encoder_decoder:
        return Inputs(kwargs, _decoder_tokens(bridge, kwargs), kwargs.get("decoder_attention_mask"))
    return Inputs(kwargs, tokens, mask)


def embeddings_given(bridge: StudiedBridge, input: Tensor, kwargs: Mapping[str, Any]) -> Tensor:
    """What the model is given of embeddings: of rows of `W_E`, so that the run is that of their tokens.

    Args:
        bridge: the bridge.
        input: the embeddings.
        kwargs: the model's arguments: what is among them by its name is given as it is.

    Raises:
        ValueError: see `Embedding.in_place_of_tokens`.
    """
    stack = bridge.architecture.token_stack
    by_name = kwargs.get("inputs_embeds") is input
    return input if by_name or stack is None else stack.embedding.in_place_of_tokens(input)


def _taken_in(
    bridge: RunnableBridge, asked: Request, kwargs: Kwargs, starts: bool
) -> tuple[Tensor | None, Tensor | None]:
    """The tokens, and the mask, of text, tokens or embeddings, which are among the model's arguments then.

    Args:
        bridge, asked: as for `prepare`.
        kwargs: the model's arguments.
        starts: embeddings replace the residual stream, which was checked.
    """
    input, mask, texts = asked.input, asked.attention_mask, texts_in(asked.input)
    if texts is None and isinstance(input, Tensor) and input.is_floating_point():
        if not starts:
            check_embeddings(bridge.core, input)
            input = embeddings_given(bridge, input, kwargs)
        kwargs["inputs_embeds"] = input if input.ndim == 3 else input.unsqueeze(0)
        return None, mask
    if texts is None:
        tokens = as_tokens(input)
    else:
        if "position_ids" in kwargs:
            raise ValueError("position_ids are worked out for text; give tokens to set them yourself")
        batch = bridge.batch_of(texts, asked.prepend_bos, asked.padding_side)
        tokens, mask = batch.tokens, batch.mask if mask is None else mask
    check_ids(bridge.wiring.embedding, bridge.cfg, tokens)
    device = input_device(bridge.wiring.model)
    kwargs["input_ids"] = tokens = tokens if tokens.device == device else tokens.to(device)
    return tokens, mask


def _padded_as_known(core: nn.Module, mask: Tensor, kwargs: Kwargs) -> Tensor | None:
    """Puts the padding token that a model looks for in the place of what a mask says is padding; returns the tokens.

    A classifier reads its score where the last token is that is none, whatever the mask says.

    Raises:
        ValueError: there are embeddings in place of tokens, in which it finds no padding.
    """
    tokens: Tensor | None = kwargs.get("input_ids")
    if bool(mask.all()):
        return tokens
    if tokens is None:
        raise ValueError(
            f"{type(core).__name__} looks for padding among its tokens, and embeddings have none: it would read its "
            "score at padding. Give tokens, or rows without padding"
        )
    pad = core.config.get_text_config().pad_token_id  # type: ignore[union-attr, operator]
    if pad is not None:  # else the model itself refuses more than one row
        kwargs["input_ids"] = tokens = tokens.masked_fill(mask.to(tokens.device) == 0, pad)
    return tokens


def _check_further(bridge: RunnableBridge, kwargs: Kwargs, length: int, past: Any) -> None:
    """Refuses further arguments that do not fit the input."""
    if isinstance(decoder := kwargs.get("decoder_input_ids"), Tensor) and decoder.numel():
        check_ids(bridge.wiring.embedding, bridge.cfg, decoder, "decoder_input_ids")
    _check_length(bridge, length, past)
    if kwargs.get("decoder_attention_mask") is not None:
        check_zero_or_one("decoder_attention_mask", kwargs["decoder_attention_mask"])


def _place(bridge: RunnableBridge, mask: Tensor, length: int, kwargs: Kwargs) -> None:
    """Says at which positions tokens are that are behind padding, where the model does not count so itself.

    Raises:
        ValueError: PEFT would not pass it on, or the model fails with it.
    """
    if "position_ids" in kwargs or not bridge.cfg.positions_from_mask or _places(bridge, kwargs.keys()):
        return
    if "position_ids" not in accepted_arguments(type(bridge.core).forward):
        return
    if not is_padded_in_front(mask):
        return
    if learns_prompt(bridge.original_model):
        raise ValueError(
            "padding before a token cannot be had with a learned prompt: PEFT does not pass position_ids "
            'on; use padding_side="right"'
        )
    if any(hasattr(module, "_pad_to_mult_of_chunk_length") for module in _around_blocks(bridge)):
        raise ValueError(
            "padding before a token cannot be had: this model lengthens its rows itself (Reformer), and transformers' "
            'code that does so fails where it is told positions; use padding_side="right"'
        )
    counted = PositionCounting.of(bridge.original_model, bridge.core, bridge.block_paths)
    kwargs["position_ids"] = counted.places(mask)[:, -length:].to(input_device(bridge.wiring.model))


def _check_needed(core: nn.Module, taken: Takes, given: Collection[str]) -> None:
    """Refuses a run without something that the model's forward cannot be called without.

    Raises:
        ValueError: it is not there.
    """
    for name in taken.needed:
        if name not in given:
            raise ValueError(
                f"{type(core).__name__} needs {name} in addition to its tokens: bridge(tokens, {name}=...)"
            )


def _take_first(bridge: RunnableBridge, taken: Takes, asked: Request, kwargs: Kwargs) -> None:
    """Puts what was given first among the arguments: images or sound, or the decoder's tokens.

    Raises:
        TypeError, ValueError: as for `_images_or_sound`.
    """
    device, name, main, input = input_device(bridge.wiring.model), type(bridge.core).__name__, taken.main, asked.input
    assert main is not None
    if isinstance(input, Tensor) and input.is_floating_point():
        if main in kwargs:
            raise ValueError(f"{main} is given twice: as the input, and by its name")
        kwargs[main] = input.to(device)
    elif taken.tokens is None:
        raise TypeError(f"{name} reads no tokens: its input is {main}, a tensor of numbers: bridge({main})")
    elif taken.tokens in kwargs:
        raise ValueError(f"{taken.tokens} is given twice: as the input, and by its name")
    else:
        texts = texts_in(input)
        if texts is not None:
            batch = bridge.batch_of(texts, asked.prepend_bos, asked.padding_side)
            tokens = batch.tokens
            if batch.mask is not None:
                kwargs.setdefault("decoder_attention_mask", batch.mask.to(device))
        else:
            tokens = as_tokens(input)
        kwargs[taken.tokens] = tokens.to(device)


def _images_or_sound(
    bridge: RunnableBridge,
    taken: Takes,
    asked: Request,
    kwargs: Kwargs,
) -> Inputs:
    """The arguments of a model whose first blocks read images or sound: tokens, where there are any, are its decoder's.

    Raises:
        TypeError: text or tokens for a model that reads none.
        ValueError: the images, or the sound, are given twice, or not at all; or tokens are given twice.
    """
    device, name, main = input_device(bridge.wiring.model), type(bridge.core).__name__, taken.main
    assert main is not None
    if asked.attention_mask is not None:
        kwargs["attention_mask"] = asked.attention_mask.to(device)  # of frames or patches: the model's own business
    if asked.input is not None:
        _take_first(bridge, taken, asked, kwargs)
    if not kwargs.keys() & {main, "input_values", "input_features", "pixel_values", "encoder_outputs"}:
        raise ValueError(
            f"{name} needs {main}, and tokens are its decoder's: bridge(tokens, {main}=...), or "
            f"bridge({main}, decoder_input_ids=tokens)"
        )
    if taken.tokens is None:
        return Inputs(kwargs, None, None)
    if isinstance(given := kwargs.get(taken.tokens), Tensor) and given.numel():
        check_ids(bridge.wiring.embedding, bridge.cfg, given, taken.tokens)
        _check_length(bridge, given.shape[1], past_of(kwargs))
    if kwargs.get("decoder_attention_mask") is not None:
        check_zero_or_one("decoder_attention_mask", kwargs["decoder_attention_mask"])
    return Inputs(kwargs, _decoder_tokens(bridge, kwargs), kwargs.get("decoder_attention_mask"))


def _around_blocks(bridge: RunnableBridge) -> Iterator[nn.Module]:
    return around_blocks(bridge.original_model, bridge.core, bridge.block_paths)


def _places(bridge: RunnableBridge, given: AbstractSet[str]) -> bool:
    """Whether the model itself works out the positions of its inputs, of the mask too: those of images' parts."""
    further = given - {"input_ids", "inputs_embeds", "attention_mask"}
    if not further:
        return False
    find = next((f for module in _around_blocks(bridge) if (f := getattr(module, "get_rope_index", None))), None)
    return find is not None and not further.isdisjoint(inspect.signature(find).parameters)


def _refuse_padding(bridge: RunnableBridge, mask: Tensor) -> None:
    """Looks whether a mask that the model does not take hides nothing.

    Raises:
        ValueError: it hides something.
    """
    if not bool(mask.all()):
        raise ValueError(
            f"{bridge.cfg.model_name} takes no attention_mask, so padding would be read as tokens: run rows of one "
            "length, without padding"
        )


def _checked_mask(mask: Tensor, kwargs: Kwargs, length: int, past: Any) -> Tensor:
    """The mask as whole numbers.

    Raises:
        TypeError: it is no tensor.
        ValueError: it does not fit.
    """
    if not isinstance(mask, Tensor):
        raise TypeError(f"attention_mask is {type(mask).__name__}; it must be a tensor [batch, pos]")
    given: Tensor = kwargs["input_ids"] if "input_ids" in kwargs else kwargs["inputs_embeds"]
    wanted = [given.shape[0], length + (past.get_seq_length() if past is not None else 0)]
    if mask.ndim == 4:
        if mask.shape[0] not in (1, wanted[0]) or mask.shape[2] not in (1, length) or mask.shape[3] < wanted[1]:
            raise ValueError(
                f"attention_mask has shape {list(mask.shape)}; with four axes it must be [batch={wanted[0]}, 1, "
                f"pos={length}, key_pos={wanted[1]}]"
            )
        return mask
    if list(mask.shape) != wanted:
        raise ValueError(f"attention_mask has shape {list(mask.shape)}; it must have {wanted}, for every token so far")
    check_zero_or_one("attention_mask", mask)
    return mask.long()


def _decoder_tokens(bridge: RunnableBridge, kwargs: Kwargs) -> Tensor | None:
    """What the decoder is given, as far as it is known: what the model makes itself is left to it.

    One that makes nothing is given its start token alone.
    """
    if {"labels", "decoder_inputs_embeds", "encoder_outputs"} & set(kwargs) and "decoder_input_ids" not in kwargs:
        return None
    if "decoder_input_ids" not in kwargs:
        if "input_ids" in kwargs and makes_decoder_tokens(bridge.core):
            return None
        start = getattr(bridge.core.config, "decoder_start_token_id", None)
        if start is None:
            raise ValueError(f"{bridge.cfg.model_name} names no decoder_start_token_id; pass decoder_input_ids")
        names = ("input_ids", "inputs_embeds", takes(bridge.core).main, "input_values", "input_features")
        given: Tensor = next(kwargs[name] for name in names if name in kwargs)
        kwargs["decoder_input_ids"] = torch.full((given.shape[0], 1), start, device=given.device)
    return kwargs["decoder_input_ids"]


def _check_length(bridge: RunnableBridge, length: int, past: Any) -> None:
    before = past.get_seq_length() if past is not None else 0
    n_ctx = bridge.cfg.n_ctx
    if n_ctx is not None and before + length > n_ctx:
        raise ValueError(
            f"the prompt has {before + length} tokens; {bridge.cfg.model_name} has a context of {n_ctx}. "
            f"Pass the last {n_ctx} of them, or load the model with a larger n_ctx."
        )
