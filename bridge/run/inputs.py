"""Inputs of a run: from the user's arguments to the arguments of the Hugging Face model."""

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
from transformers import PreTrainedModel

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
from adapters.tuners import takes_task_ids
from adapters.views import Kwargs
from bridge.hooks.context import CURRENT, HookFunction
from bridge.hooks.hooks import HookPoint
from bridge.hooks.names import NamesFilter, suggestion
from bridge.hooks.studied_bridge import StudiedBridge
from bridge.rows import (
    PositionCounting,
    around_blocks,
    check_zero_or_one,
    is_padded_in_front,
)
from bridge.run.tokenization import (
    Batch,
    Text,
    TokenizerFacts,
    as_tokens,
    check_embeddings,
    check_ids,
    texts_in,
)
from bridge.wiring.wiring import Wiring

# --------------------------------------------------------------------------------------------------
# Inputs as Hugging Face's tokenizers and processors return them, and models take them: by name, or
# in a mapping.
# --------------------------------------------------------------------------------------------------


#: The names of a run's input in Hugging Face's models.
NAMES = ("input_ids", "inputs_embeds")


def unpacked(
    input: Any, mask: Any, arguments: Mapping[str, Any]
) -> tuple[Any, Any, dict[str, Any]]:
    """Return the input, its mask and the model's other arguments.

    Args:
        input: a run's first argument: an input, a mapping of the model's arguments
            (`BatchEncoding`), or None.
        mask: ``[batch, pos]``, if passed.
        arguments: the model's arguments by name; the input may be one of them.

    Returns:
        The input, the mask, and the other arguments. The input is the tokens or embeddings, also if
        they were in the mapping or passed by name (NumPy arrays are converted to tensors); None if
        only images or sound were passed. Embeddings passed by name stay among the other arguments,
        because they are the model's own argument (`embeddings_given`).

    Raises:
        TypeError: an argument is passed twice, or there is no input.

    Example:
        >>> from bridge.run.inputs import unpacked
        >>> unpacked({"input_ids": [[5, 6]], "attention_mask": [[1, 1]]}, None, {})
        ([[5, 6]], tensor([[1, 1]]), {})
    """
    rest = dict(arguments)
    if isinstance(input, Mapping):
        twice = [
            name
            for name in input
            if name in rest or (name == "attention_mask" and mask is not None)
        ]
        if twice:
            raise TypeError(
                f"{', '.join(twice)}: given twice, by name and in the {type(input).__name__}"
            )
        ids = input.get("input_ids")
        one_row = isinstance(ids, list | tuple) and bool(ids) and isinstance(ids[0], int)
        for name, value in input.items():
            rest[name] = value if name in NAMES else _as_tensor(value, one_row)
        input, mask = None, rest.pop("attention_mask", mask)
    named = [name for name in NAMES if rest.get(name) is not None]
    if input is None and named:
        input = rest.pop(named[0])
        if named[0] == "inputs_embeds":
            input = rest[named[0]] = _array_as_tensor(input)
        mask = rest.pop("attention_mask", mask)
    if input is None and not any(isinstance(value, Tensor | np.ndarray) for value in rest.values()):
        raise TypeError(
            "there is no input: give a text, a list of texts, tokens [pos] or [batch, pos],"
            " embeddings [batch, pos, d_model], or what a tokenizer gives"
        )
    return _array_as_tensor(input), _array_as_tensor(mask), rest


def _array_as_tensor(value: Any) -> Any:
    return torch.as_tensor(value) if isinstance(value, np.ndarray) else value


def _as_tensor(value: Any, one_row: bool) -> Any:
    """Convert arrays and lists of numbers to tensors; return anything else unchanged."""
    is_text = isinstance(value, list | tuple) and bool(value) and isinstance(value[0], str)
    if is_text or not isinstance(value, np.ndarray | list | tuple):
        return value
    value = torch.as_tensor(value)
    return value.unsqueeze(0) if one_row and value.ndim == 1 else value


# --------------------------------------------------------------------------------------------------
# The interface of a bridge that a run needs.
# --------------------------------------------------------------------------------------------------


#: What a run takes: a text, a chat, several of them, tokens ``[pos]`` or ``[batch, pos]`` (a tensor
#: or lists of ids), or embeddings ``[batch, pos, d_model]``; or a mapping of the model's arguments,
#: as a tokenizer gives it.
Input = (
    str
    | Sequence[Any]
    | Mapping[str, Any]
    | NDArray[Any]
    | Integer[Tensor, "..."]
    | Float[Tensor, "..."]
)
#: The prompts of a study: tokens, or a processor's mapping of the model's arguments with images or
#: sound.
Prompts = Integer[Tensor, "..."] | Mapping[str, Any]
#: Pairs of hook points (a name, an alias, a function of the name) and functions.
HookSpec = tuple[NamesFilter | HookPoint, HookFunction]


class RunnableBridge(StudiedBridge):
    """The interface of a bridge for code that runs its model.

    Attributes:
        wiring: its hook points and their sites.
    """

    wiring: Wiring

    @property
    def kept_level(self) -> int | None:
        """Return the context level of hooks that outlast their run."""
        return None

    @property
    def tokenizer_facts(self) -> TokenizerFacts:
        """Return the tokenizer's own behaviour."""
        raise NotImplementedError

    def batch_of(
        self,
        texts: Sequence[Text],
        prepend_bos: bool | None = None,
        padding_side: str | None = None,
    ) -> Batch:
        """Tokenize texts, padded to equal length."""
        raise NotImplementedError


_STAND_IN = re.compile("(image|video|audio)_token_(id|index)")


def prompts_with(
    bridge: RunnableBridge, prompts: Prompts | Input, more: Mapping[str, Any]
) -> dict[str, Any]:
    """Return prompts as model inputs: tokens, and further inputs such as images, sound and masks.

    Patching, lenses, circuits and features all take prompts this way. If tokens are placeholders
    for images or sound that were not passed, an error says so.

    Args:
        bridge: the bridge.
        prompts: see `Prompts`.
        more: arguments of the model for these prompts, by name; None for arguments that were not
            passed.

    Raises:
        TypeError: an argument that the model does not take, or that is passed twice.

    Example:
        >>> from bridge import TransformerBridge
        >>> from bridge.run.inputs import prompts_with
        >>> bridge = TransformerBridge.boot_embedded()
        >>> prompts_with(bridge, bridge.to_tokens("Mary and")[0], {"attention_mask": None})
        {'input_ids': tensor([[  1, 505, 388]])}
    """
    further = {
        name: value
        for name, value in more.items()
        if value is not None and name != "attention_mask"
    }
    input, mask, further = unpacked(prompts, more.get("attention_mask"), further)
    check_arguments(bridge, Request(input, model_kwargs=further), ())
    tokens = as_tokens(input).to(bridge.cfg.device)
    has_images = any(name.startswith(OF_IMAGES_AND_SOUND) for name in further)
    for name, token in vars(config_of(bridge.core)).items():
        if has_images or not _STAND_IN.fullmatch(name) or not isinstance(token, int):
            continue
        if bool((tokens == token).any()):
            kind = name.partition("_")[0]
            warnings.warn(
                f"the tokens hold {token}, which stands for {kind}, and none is given: it is read"
                " as a word. Give what the processor makes of it by name"
                f" ({'input_features' if kind == 'audio' else 'pixel_values'}=)",
                stacklevel=4,
            )
    masks = {} if mask is None else {"attention_mask": mask}
    return {"input_ids": tokens, **masks, **further}


# --------------------------------------------------------------------------------------------------
# The user's request for a run.
# --------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Request:
    """An input, its options, and the layers to run. The fields are arguments of
    `TransformerBridge.forward`.

    Attributes:
        input: text, texts, tokens ``[pos]`` or ``[batch, pos]``, or embeddings ``[batch, pos,
            d_model]``; for a model whose first blocks read images or sound, these, or the decoder's
            tokens. A mapping of arguments is unpacked. None: the input is passed by name in
            `model_kwargs`.
        prepend_bos, padding_side: options for text.
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
    """The arguments that the model is called with.

    Attributes:
        kwargs: the model's keyword arguments.
        tokens: ``[batch, pos]``, None for embeddings.
        mask: ``[batch, pos]``, 1 for tokens and 0 for padding; None without padding.
    """

    kwargs: Kwargs
    tokens: Tensor | None
    mask: Tensor | None


#: Keyword arguments of the bridge's other calls, to suggest the right call.
TAKEN_BY = {
    **dict.fromkeys(
        ("names_filter", "incl_bwd", "pos_slice", "device", "return_cache_object"),
        "run_with_cache takes it",
    ),
    "remove_batch_dim": (
        "run_with_cache takes it; a hook's activation has its batch axis: write `x[0]` in the"
        " function"
    ),
    **dict.fromkeys(
        ("fwd_hooks", "bwd_hooks"),
        "run_with_hooks takes it, and so does `with bridge.hooks(...)` around any call",
    ),
    **dict.fromkeys(
        ("reset_hooks_end", "clear_contexts"), "run_with_hooks and run_with_cache take it"
    ),
    **dict.fromkeys(("return_type", "loss_per_token"), "a plain run takes it, bridge(tokens)"),
    "capture": "trace takes it",
    "return_dict": "a run returns what return_type says",
}
#: Outputs of Hugging Face's models on request, and their equivalents here.
_OUTPUTS = {
    "output_hidden_states": "hook_resid_pre and hook_resid_post of each block",
    "output_attentions": "attn.hook_pattern of each block",
}


def added_around(model: nn.Module) -> AbstractSet[str]:
    """Return the names of arguments that a wrapper adds, such as PEFT's adapter or task of each
    row."""
    mixes = hasattr(model, "get_base_model") and not learns_prompt(model)
    names = {"adapter_names"} if mixes else set()
    return names | {"task_ids"} if takes_task_ids(model) else names


def check_arguments(bridge: RunnableBridge, request: Request, ours: Sequence[str]) -> None:
    """Reject keyword arguments that neither the bridge nor the model accepts.

    Raises:
        TypeError: there is such an argument.
    """
    kwargs = request.model_kwargs
    if not kwargs:
        return
    model = bridge.core
    known = accepted_by(model) | added_around(bridge.original_model)
    for name in with_past_named(kwargs, known):
        # See `embeddings_given`.
        by_name = name == "inputs_embeds" and kwargs.get(name) is request.input
        # The tokens of a stream.
        by_name |= name == "input_ids" and request.start_at_layer is not None
        if name in NAMES and not by_name:
            raise TypeError(f"{name} is the input itself, and an input is given: pass one of them")
        if name in _OUTPUTS and kwargs[name]:
            raise ValueError(
                f"{name}=True is an option of Hugging Face's output, and a run returns what"
                f" return_type says: run_with_cache(tokens) gives {_OUTPUTS[name]},"
                " bridge.original_model(...) Hugging Face's own output"
            )
        if name not in known and name in TAKEN_BY:
            raise TypeError(f"{name!r} is not an argument of this call: {TAKEN_BY[name]}")
        if name not in known:
            raise TypeError(
                f"{name!r} is an argument of neither the bridge nor {type(model).__name__}."
                f"{suggestion(name, (*ours, *known))}"
            )


def prepare(bridge: RunnableBridge, request: Request) -> Inputs:
    """Return the model's arguments for the user's input.

    Args:
        bridge: the bridge.
        request: the user's request.

    Raises:
        TypeError: the input is of an unsupported kind.
        ValueError: it is too long or empty, its mask does not fit, or the model needs a further
            argument.
    """
    kwargs = with_past_named(request.model_kwargs, accepted_by(bridge.core))
    taken = takes(bridge.core)
    if taken.needed:
        _check_needed(bridge.core, taken, kwargs)
    run = CURRENT.get().run
    starts = run is not None and run.start_at is not None
    if taken.main is not None and not starts:
        return _images_or_sound(bridge, taken, request, kwargs)
    tokens, mask = _taken_in(bridge, request, kwargs, starts)
    length = (kwargs["inputs_embeds"] if tokens is None else tokens).shape[1]
    # The cache of an encoder-decoder belongs to its decoder: all encoder tokens are in this run.
    past = None if bridge.core.config.is_encoder_decoder else past_of(kwargs)
    _check_further(bridge, kwargs, length, past)
    if mask is not None:
        mask = _checked_mask(mask, kwargs, length, past)
        if not may_take(bridge.core, "attention_mask"):
            _refuse_padding(bridge, mask)
            mask = None
    if mask is not None:
        if mask.ndim == 2 and looks_for_padding(bridge.core):
            tokens = _padded_as_known(bridge.core, mask, kwargs)
        # A model that requires an image passes unknown arguments on to its image model.
        if mask.ndim == 2 and not taken.needed:
            _place(bridge, mask, length, kwargs)
        kwargs["attention_mask"] = mask.to(input_device(bridge.wiring.model))
        if mask.ndim == 4:  # left to the model: it does not show what is padding
            return Inputs(kwargs, tokens, None)
        mask = kwargs["attention_mask"][:, -length:]
    # Checked first, since reading a configuration is slower.
    has_decoder = "decoder_input_ids" in accepted_arguments(type(bridge.core).forward)
    if has_decoder and bridge.core.config.is_encoder_decoder:
        return Inputs(kwargs, _decoder_tokens(bridge, kwargs), kwargs.get("decoder_attention_mask"))
    return Inputs(kwargs, tokens, mask)


def embeddings_given(bridge: StudiedBridge, input: Tensor, kwargs: Mapping[str, Any]) -> Tensor:
    """Return the model's argument for embeddings, such that rows of `W_E` give the same run as
    their tokens.

    Args:
        bridge: the bridge.
        input: the embeddings.
        kwargs: the model's arguments; embeddings passed there by name are used unchanged.

    Raises:
        ValueError: see `Embedding.in_place_of_tokens`.
    """
    stack = bridge.architecture.token_stack
    by_name = kwargs.get("inputs_embeds") is input
    return input if by_name or stack is None else stack.embedding.in_place_of_tokens(input)


def _taken_in(
    bridge: RunnableBridge, request: Request, kwargs: Kwargs, starts: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Return the tokens and the mask of an input; add text, tokens or embeddings to the model's
    arguments.

    Args:
        bridge, request: as for `prepare`.
        kwargs: the model's arguments.
        starts: the run starts at a layer, with a residual stream that was already checked.
    """
    input, mask, texts = request.input, request.attention_mask, texts_in(request.input)
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
            raise ValueError("position_ids are computed for text; give tokens to set them yourself")
        batch = bridge.batch_of(texts, request.prepend_bos, request.padding_side)
        tokens, mask = batch.tokens, batch.mask if mask is None else mask
    check_ids(bridge.wiring.embedding, bridge.cfg, tokens)
    device = input_device(bridge.wiring.model)
    kwargs["input_ids"] = tokens = tokens if tokens.device == device else tokens.to(device)
    return tokens, mask


def _padded_as_known(core: nn.Module, mask: Tensor, kwargs: Kwargs) -> Tensor | None:
    """Return the tokens with the model's padding token wherever the mask marks padding. A
    classifier reads its score at the last token that is not the padding token, whatever the mask
    says.

    Raises:
        ValueError: there are embeddings instead of tokens, in which the model cannot find padding.
    """
    tokens: Tensor | None = kwargs.get("input_ids")
    if bool(mask.all()):
        return tokens
    if tokens is None:
        raise ValueError(
            f"{type(core).__name__} looks for padding among its tokens, and embeddings have none:"
            " it would read its score at padding. Give tokens, or rows without padding"
        )
    pad = core.config.get_text_config().pad_token_id  # type: ignore[union-attr, operator]
    if pad is not None:  # otherwise the model itself rejects more than one row
        kwargs["input_ids"] = tokens = tokens.masked_fill(mask.to(tokens.device) == 0, pad)
    return tokens


def _check_further(bridge: RunnableBridge, kwargs: Kwargs, length: int, past: Any) -> None:
    """Reject further arguments that do not fit the input."""
    if isinstance(decoder := kwargs.get("decoder_input_ids"), Tensor) and decoder.numel():
        check_ids(bridge.wiring.embedding, bridge.cfg, decoder, "decoder_input_ids")
    _check_length(bridge, length, past)
    if kwargs.get("decoder_attention_mask") is not None:
        check_zero_or_one("decoder_attention_mask", kwargs["decoder_attention_mask"])


def _place(bridge: RunnableBridge, mask: Tensor, length: int, kwargs: Kwargs) -> None:
    """Set the positions of left-padded tokens, if the model does not compute them itself.

    Raises:
        ValueError: PEFT or a wrapper would not pass the positions on, or the model fails with
            them.
    """
    if (
        "position_ids" in kwargs
        or not bridge.cfg.positions_from_mask
        or _counts_positions(bridge, kwargs.keys())
    ):
        return
    if "position_ids" not in accepted_by(bridge.core):
        refuse_wrapped_positions(bridge, mask)
        return
    if not is_padded_in_front(mask):
        return
    if learns_prompt(bridge.original_model):
        raise ValueError(
            "left padding is not available with a learned prompt: PEFT does not pass position_ids"
            ' on; use padding_side="right"'
        )
    if any(hasattr(module, "_pad_to_mult_of_chunk_length") for module in _around_blocks(bridge)):
        raise ValueError(
            "left padding is not available: this model lengthens its rows itself (Reformer), and"
            " transformers' code that does so fails if positions are passed; use"
            ' padding_side="right"'
        )
    counted = PositionCounting.of(bridge.original_model, bridge.core, bridge.block_paths)
    kwargs["position_ids"] = counted.places(mask)[:, -length:].to(input_device(bridge.wiring.model))


def refuse_wrapped_positions(bridge: RunnableBridge, mask: Tensor) -> None:
    """Reject left padding in a wrapper that hides the `position_ids` of the model inside.

    Raises:
        ValueError: it hides them, and a row is left-padded.
    """
    if hides_positions(bridge) and is_padded_in_front(mask):
        plain = type(bridge.core.plain_module).__name__
        raise ValueError(
            f"left padding is not available: the forward of {plain} does not name position_ids,"
            " which the model inside needs; add the argument and pass it on, or right-pad"
            " (generate takes prompts of one length)"
        )


def hides_positions(bridge: RunnableBridge) -> bool:
    """Tell whether a plain module wraps a model with position embeddings, and its forward does not
    name `position_ids`.
    """
    plain, stack = getattr(bridge.core, "plain_module", None), bridge.architecture.token_stack
    if plain is None or "position_ids" in accepted_by(bridge.core):
        return False
    if stack is None or stack.embedding.positions is None:
        return False
    inner = (module for module in plain.modules() if isinstance(module, PreTrainedModel))
    return any("position_ids" in accepted_by(module) for module in inner)


def _check_needed(core: nn.Module, taken: Takes, names: Collection[str]) -> None:
    """Reject a run without an argument that the model's forward requires.

    Raises:
        ValueError: it is missing.
    """
    for name in taken.needed:
        if name not in names:
            raise ValueError(
                f"{type(core).__name__} needs {name} in addition to its tokens: bridge(tokens,"
                f" {name}=...)"
            )


def _take_first(bridge: RunnableBridge, taken: Takes, request: Request, kwargs: Kwargs) -> None:
    """Store the first argument: images or sound, or the decoder's tokens.

    Raises:
        TypeError, ValueError: as for `_images_or_sound`.
    """
    device, name = input_device(bridge.wiring.model), type(bridge.core).__name__
    main, input = taken.main, request.input
    assert main is not None
    if isinstance(input, Tensor) and input.is_floating_point():
        if main in kwargs:
            raise ValueError(f"{main} is given twice: as the input, and by its name")
        kwargs[main] = input.to(device)
    elif taken.tokens is None:
        raise TypeError(
            f"{name} reads no tokens: its input is {main}, a tensor of numbers: bridge({main})"
        )
    elif taken.tokens in kwargs:
        raise ValueError(f"{taken.tokens} is given twice: as the input, and by its name")
    else:
        texts = texts_in(input)
        if texts is not None:
            batch = bridge.batch_of(texts, request.prepend_bos, request.padding_side)
            tokens = batch.tokens
            if batch.mask is not None:
                kwargs.setdefault("decoder_attention_mask", batch.mask.to(device))
        else:
            tokens = as_tokens(input)
        kwargs[taken.tokens] = tokens.to(device)


def _images_or_sound(
    bridge: RunnableBridge,
    taken: Takes,
    request: Request,
    kwargs: Kwargs,
) -> Inputs:
    """Return the arguments of a model that reads images or sound; tokens are passed to its decoder.

    Raises:
        TypeError: text or tokens for a model that does not read any. ValueError: images or sound
            are passed twice or not at all, or tokens are passed twice.
    """
    device, name, main = input_device(bridge.wiring.model), type(bridge.core).__name__, taken.main
    assert main is not None
    if request.attention_mask is not None:
        # Frames or patches: left to the model.
        kwargs["attention_mask"] = request.attention_mask.to(device)
    if request.input is not None:
        _take_first(bridge, taken, request, kwargs)
    inputs = {main, "input_values", "input_features", "pixel_values", "encoder_outputs"}
    if kwargs.keys().isdisjoint(inputs):
        raise ValueError(
            f"{name} needs {main}, and tokens are its decoder's: bridge(tokens, {main}=...), or "
            f"bridge({main}, decoder_input_ids=tokens)"
        )
    if taken.tokens is None:
        return Inputs(kwargs, None, None)
    if isinstance(tokens := kwargs.get(taken.tokens), Tensor) and tokens.numel():
        check_ids(bridge.wiring.embedding, bridge.cfg, tokens, taken.tokens)
        _check_length(bridge, tokens.shape[1], past_of(kwargs))
    if kwargs.get("decoder_attention_mask") is not None:
        check_zero_or_one("decoder_attention_mask", kwargs["decoder_attention_mask"])
    return Inputs(kwargs, _decoder_tokens(bridge, kwargs), kwargs.get("decoder_attention_mask"))


def _around_blocks(bridge: RunnableBridge) -> Iterator[nn.Module]:
    return around_blocks(bridge.original_model, bridge.core, bridge.block_paths)


def _counts_positions(bridge: RunnableBridge, names: AbstractSet[str]) -> bool:
    """Tell whether the model itself computes the positions of its inputs from the mask."""
    further = names - {"input_ids", "inputs_embeds", "attention_mask"}
    if not further:
        return False
    for module in _around_blocks(bridge):
        if find := getattr(module, "get_rope_index", None):
            return not further.isdisjoint(inspect.signature(find).parameters)
    return False


def _refuse_padding(bridge: RunnableBridge, mask: Tensor) -> None:
    """Check that the mask for a model that takes none does not mask anything.

    Raises:
        ValueError: it masks something.
    """
    if not bool(mask.all()):
        raise ValueError(
            f"{bridge.cfg.model_name} takes no attention_mask, so padding would be read as tokens:"
            " run rows of one length, without padding"
        )


def _checked_mask(mask: Tensor, kwargs: Kwargs, length: int, past: Any) -> Tensor:
    """Return the mask as integers.

    Raises:
        TypeError: it is not a tensor.
        ValueError: it does not fit.
    """
    if not isinstance(mask, Tensor):
        raise TypeError(
            f"attention_mask is {type(mask).__name__}; it must be a tensor [batch, pos]"
        )
    input: Tensor = kwargs["input_ids"] if "input_ids" in kwargs else kwargs["inputs_embeds"]
    n_rows = input.shape[0]
    n_keys = length + (past.get_seq_length() if past is not None else 0)
    if mask.ndim == 4:
        batch, _, pos, key_pos = mask.shape
        if batch not in (1, n_rows) or pos not in (1, length) or key_pos < n_keys:
            raise ValueError(
                f"attention_mask has shape {list(mask.shape)}; with four axes it must be"
                f" [batch={n_rows}, 1, pos={length}, key_pos={n_keys}]"
            )
        return mask
    if mask.shape != (n_rows, n_keys):
        raise ValueError(
            f"attention_mask has shape {list(mask.shape)}; it must have {[n_rows, n_keys]}, for"
            " every token so far"
        )
    check_zero_or_one("attention_mask", mask)
    return mask.long()


def _decoder_tokens(bridge: RunnableBridge, kwargs: Kwargs) -> Tensor | None:
    """Return the decoder's tokens, if known; otherwise the model computes them. If it does not, the
    decoder gets only its start token.
    """
    if "decoder_input_ids" in kwargs:
        return kwargs["decoder_input_ids"]
    if not kwargs.keys().isdisjoint(("labels", "decoder_inputs_embeds", "encoder_outputs")):
        return None
    if "input_ids" in kwargs and makes_decoder_tokens(bridge.core):
        return None
    start = getattr(bridge.core.config, "decoder_start_token_id", None)
    if start is None:
        raise ValueError(
            f"{bridge.cfg.model_name} names no decoder_start_token_id; pass decoder_input_ids"
        )
    main = takes(bridge.core).main
    names = ("input_ids", "inputs_embeds", main, "input_values", "input_features")
    input: Tensor = next(kwargs[name] for name in names if name in kwargs)
    tokens = torch.full((input.shape[0], 1), start, device=input.device)
    kwargs["decoder_input_ids"] = tokens
    return tokens


def _check_length(bridge: RunnableBridge, length: int, past: Any) -> None:
    before = past.get_seq_length() if past is not None else 0
    n_ctx = bridge.cfg.n_ctx
    if n_ctx is not None and before + length > n_ctx:
        raise ValueError(
            f"the prompt has {before + length} tokens; {bridge.cfg.model_name} has a context of"
            f" {n_ctx}. Pass the last {n_ctx} of them, or load the model with a larger n_ctx."
        )
