"""Which arguments a model's forward takes, and which of them its tokens are."""

from __future__ import annotations

import functools
import inspect
import re
import typing
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

from adapters.config import config_of, first
from adapters.linear import input_device
from adapters.points import core_of
from adapters.views import Args, Kwargs
from adapters.views.views import names_of

#: What tokens are to a model: those of its decoder, where its encoder reads images or sound.
TokensArgument = Literal["input_ids", "decoder_input_ids"]
#: What a model is given, by the names of its own arguments.
Given = Mapping[str, Tensor]
#: What it is called with, likewise.
Arguments = dict[str, Tensor]
#: How the names of arguments begin that are images or sound, or go along them.
OF_IMAGES_AND_SOUND = ("pixel", "image", "video", "audio", "feature", "input_features", "input_values")
#: What the keys and values of earlier tokens are called, among arguments and in what a model returns. Models of
#: transformers have the second name from 5.24 on.
PAST = ("past_key_values", "cache")


def past_of(given: Mapping[str, Any]) -> Any:
    """The keys and values of earlier tokens, among arguments or in what a model returns; None where there are none."""
    # By the names that are there: transformers 5.24 warns who asks an output for the older one.
    return next((value for name, value in given.items() if name in PAST and value is not None), None)


def with_past_named(given: Mapping[str, Any], known: Collection[str]) -> Kwargs:
    """Arguments in which the keys and values of earlier tokens have the name that the model has for them.

    Args:
        given: the arguments.
        known: the names that the model takes.

    Example:
        >>> from adapters.inputs import with_past_named
        >>> with_past_named({"past_key_values": 1, "use_cache": True}, {"cache", "use_cache"})
        {'use_cache': True, 'cache': 1}
    """
    theirs, said = next((name for name in PAST if name in known), None), [name for name in PAST if name in given]
    if theirs is None or sum(given[name] is not None for name in said) > 1:
        return dict(given)
    further = {name: value for name, value in given.items() if name not in PAST}
    return further | {theirs: past_of(given)} if said else further


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
        >>> from adapters.inputs import accepted_by
        >>> model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=10))
        >>> {"use_cache", "attention_mask"} <= accepted_by(model)
        True
    """
    forward = _forward_of(core)
    names = accepted_arguments(forward)
    if names.isdisjoint(PAST) or "use_cache" in names or not isinstance(core, PreTrainedModel):
        return names
    decoder = core.get_decoder()
    taken = (
        _takes_anything(forward) and decoder is not None and "use_cache" in accepted_arguments(type(decoder).forward)
    )
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
        >>> from adapters.inputs import gives_cache
        >>> config = transformers.BertConfig(
        ...     hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8, vocab_size=10
        ... )
        >>> gives_cache(transformers.BertForMaskedLM(config))
        False
    """
    forward = type(core).forward
    names = accepted_by(core)
    if names.isdisjoint(PAST) or "use_cache" not in names or not _counts_tokens(core):
        return False
    returned = _meant(inspect.signature(forward).return_annotation, forward)
    outputs = [kind for kind in (returned, *typing.get_args(returned)) if hasattr(kind, "__dataclass_fields__")]
    return not outputs or any(not output.__dataclass_fields__.keys().isdisjoint(PAST) for output in outputs)


def _counts_tokens(core: nn.Module) -> bool:
    """Whether what a model remembers of earlier tokens says how many there were; states of Mamba alone do not."""
    if not isinstance(core, PreTrainedModel):
        return True
    taken = inspect.signature(type(core).forward).parameters.get("cache")
    kinds = () if taken is None else typing.get_args(_meant(taken.annotation, type(core).forward))
    if kinds and not any(isinstance(kind, type) and issubclass(kind, Cache) for kind in kinds):
        return False
    if not hasattr(core.config.get_text_config(decoder=True), "num_hidden_layers"):
        return True  # its configuration has another name for that
    layers = DynamicCache(config=core.config).layers
    return not layers or any(isinstance(layer, CacheLayerMixin) for layer in layers)


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
        >>> from adapters.inputs import taken_by
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
    decodes = {"decoder_input_ids", "encoder_outputs"} <= parameters.keys()
    with_text = "input_ids" in parameters and not decodes  # an image may be in it
    if main == "input_ids" or main not in parameters or with_text:
        return Takes("input_ids", None, tuple(needed))
    return Takes("decoder_input_ids" if decodes else None, main, tuple(name for name in needed if name != main))


def makes_decoder_tokens(core: nn.Module) -> bool:
    """Whether a model that is given no tokens for its decoder makes them itself, of its encoder's (BART and its kin).

    Args:
        core: the model, without what wraps it.

    Example:
        >>> import transformers
        >>> from adapters.inputs import makes_decoder_tokens
        >>> sizes = dict(d_model=16, encoder_layers=1, decoder_layers=1, vocab_size=10)
        >>> makes_decoder_tokens(transformers.BartModel(transformers.BartConfig(**sizes)))
        True
        >>> makes_decoder_tokens(transformers.MarianModel(transformers.MarianConfig(**sizes, pad_token_id=0)))
        False
    """
    forwards = {type(module).forward for module in core.modules() if hasattr(type(module), "forward")}
    return any(_shifts_tokens(each) for each in forwards if "decoder_input_ids" in accepted_arguments(each))


@functools.cache
def _shifts_tokens(forward: Callable[..., Any]) -> bool:
    """Whether a forward makes the decoder's tokens of the encoder's: its source says so."""
    try:
        source = inspect.getsource(inspect.unwrap(forward))
    except OSError:  # nobody has it
        return False
    return (
        re.search(r"(shift\w*right|_prepare_fsmt_decoder_inputs)\(\s*(self\.config,\s*)?input_ids", source) is not None
    )


def takes_besides(core: nn.Module) -> str | None:
    """The first argument of a model that is images or sound among its tokens; None where it takes none.

    Args:
        core: the model, without what wraps it.

    Example:
        >>> import transformers
        >>> from adapters.inputs import takes_besides
        >>> model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=10))
        >>> takes_besides(model) is None
        True
    """
    if takes(core).main is not None:
        return None
    names = inspect.signature(_forward_of(core)).parameters
    return next((name for name in names if name.startswith(OF_IMAGES_AND_SOUND)), None)


def gives_blocks_tokens(core: nn.Module) -> bool:
    """Whether a model's blocks are given something of the tokens besides the stream: per-layer inputs (Gemma 3n, 4).

    Args:
        core: the model, without what wraps it.
    """
    config = config_of(core).get_text_config()
    return bool(getattr(config, "hidden_size_per_layer_input", None))


def text_alone(core: nn.Module) -> Kwargs:
    """What says to a run from a layer on that its stream is of text without images or sound.

    Args:
        core: the model, without what wraps it.
    """
    name = takes_besides(core)
    return {} if name is None else {name: None}


def with_stream(core: nn.Module, tokens: Tensor, more: Given) -> Kwargs:
    """What goes with the stream of a run, in a run from a layer on.

    Args:
        core: the model, without what wraps it.
        tokens, more: what the run was given.
    """
    of_images = any(name.startswith(OF_IMAGES_AND_SOUND) for name in more)
    if takes(core).main is None and (of_images or gives_blocks_tokens(core)):
        return {**more, "input_ids": tokens}
    return {**more, **text_alone(core)}


def looks_for_padding(core: nn.Module) -> bool:
    """Whether a model looks for its padding token among its tokens, whatever mask it is given (sequence classifiers).

    Args:
        core: the model, without what wraps it.
    """
    if getattr(config_of(core), "is_encoder_decoder", False):
        return False  # what it looks for is in the tokens of its decoder
    code = getattr(inspect.unwrap(_forward_of(core)), "__code__", None)
    return code is not None and "pad_token_id" in code.co_names


# ----------------------------------------------------------------------------------------------------------------------
# Inputs that are made up: random tokens, and random images or sound of the sizes that a configuration says.
# ----------------------------------------------------------------------------------------------------------------------


class CannotBeMade(ValueError):
    """What a model needs in addition to tokens is of no kind that can be made up; the message says what to pass."""


def arguments_of(core: nn.Module, input: Tensor, more: Given) -> Arguments:
    """What a model is called with, by name, from what a bridge is: the input itself, and what else is given."""
    taken = takes(core)
    name = taken.main if taken.main is not None and input.is_floating_point() else taken.tokens
    return {name or "input_ids": input, **more}


def split(core: nn.Module, arguments: Given) -> tuple[Tensor, Arguments]:
    """The other way: the input of a run, and what it is given besides.

    Raises:
        CannotBeMade: nothing of it is the input.
    """
    taken, more = takes(core), dict(arguments)
    for name in (taken.main, "input_values", "input_features", "pixel_values") if taken.main else ("input_ids",):
        if name is not None and name in more:
            return more.pop(name), more
    raise CannotBeMade(f"there is no {taken.main or 'input_ids'} among {', '.join(arguments) or 'nothing'}")


def repeated(given: Given, times: int) -> Arguments:
    """The same rows several times: of what has no rows, as patches of images one after another, likewise."""
    return {name: x.repeat(times, *(1 for _ in x.shape[1:])) if x.ndim else x for name, x in given.items()}


def sample_inputs(model: nn.Module, inputs: Given | None = None) -> Arguments:
    """A few tokens: three rows of eleven, numbers that are unlikely to be a model's number of heads; and what it needs.

    Args:
        model: the model.
        inputs: images or sound that it needs, by the names of its own arguments; None: made up.

    Raises:
        CannotBeMade: it has no weights to run, or needs something that cannot be made up.
    """
    parameter = next(model.parameters(), None)
    device = None if parameter is None else input_device(model)
    if device is None or device.type == "meta":
        raise CannotBeMade("it has no weights, and what plays which part is found in a run")
    config = config_of(model)
    core = core_of(model)
    vocabulary = getattr(config, "vocab_size", None) or getattr(config.get_text_config(), "vocab_size", None)
    vocabulary = 4 if vocabulary is None else int(vocabulary)  # of images or sound alone
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(min(3, vocabulary - 1), vocabulary, (3, 11), generator=generator)
    tokens = tokens.to(device)
    return with_required_inputs(core, tokens, bool(getattr(config, "is_encoder_decoder", False)), inputs)


def with_required_inputs(core: nn.Module, tokens: Tensor, decodes: bool, given: Given | None = None) -> Arguments:
    """All that a model takes, by the names of its arguments: tokens, and what it cannot run without.

    A decoder of its own is given a shorter text, so that its shapes are not the encoder's.

    Args:
        core: the model, without what wraps it.
        tokens: ``[batch, pos]``.
        decodes: the model has an encoder and a decoder.
        given: images, sound, and what goes with them, also tokens; of fewer rows, they are repeated. None: made up.

    Raises:
        CannotBeMade: it needs something of a kind that cannot be made up.
    """
    taken, made = takes(core), dict(given or {})
    if "input_ids" in made or (taken.main in made and taken.tokens in (None, *made)):
        rows = next(x for name in ("input_ids", taken.main) if name and (x := made.get(name)) is not None).shape[0]
        return repeated(made, -(-tokens.shape[0] // rows))
    if taken.main is not None:
        made, tokens = _with_rows(made or _made(core, (taken.main,), tokens), tokens)
        return made if taken.tokens is None else {**made, taken.tokens: tokens[:, :-4].contiguous()}
    made, tokens = _with_rows(made, tokens) if made else (_required_inputs(core, tokens), tokens)
    tokens = made.pop("input_ids", tokens)
    if decodes:
        made.setdefault("decoder_input_ids", tokens[:, :-4].contiguous())
    return {"input_ids": tokens, **made}


def _with_rows(given: Given, tokens: Tensor) -> tuple[Arguments, Tensor]:
    """As many rows of what is given as there are of tokens, or of these a few more."""
    rows = next(iter(given.values())).shape[0]
    times = -(-tokens.shape[0] // rows)
    return repeated(given, times), tokens.repeat(-(-rows * times // tokens.shape[0]), 1)[: rows * times]


def _required_inputs(core: nn.Module, tokens: Tensor) -> Arguments:
    """What a model needs in addition to its tokens, and these with places for images in them, where it has such."""
    config, needed = config_of(core), takes(core).needed
    also = _NEEDED_TOO.get(config.model_type, ())
    made = _made(core, (*needed, *also), tokens) if needed or also else {}
    token, count = _places(config)
    if "pixel_values" in made and token is not None:
        tokens = tokens.masked_fill(tokens == token, (token + 1) % 7 + 1)
        row = torch.full((tokens.shape[0], count), token, device=tokens.device)
        made["input_ids"] = torch.cat([tokens[:, :1], row, tokens[:, 1:]], 1)
    return made


def _made(core: nn.Module, names: tuple[str, ...], tokens: Tensor) -> Arguments:
    config = config_of(core)
    like = next(p for p in core.parameters() if p.is_floating_point())
    generator = torch.Generator().manual_seed(0)
    made: Arguments = {}
    for name in names:
        make = _OF_TYPE.get((config.model_type, name)) or _MAKERS.get(name)
        x = None if make is None else make(config, tokens, generator)
        if x is None:
            raise CannotBeMade(
                f"{type(core).__name__} needs {name}, and none can be made up: pass inputs={{{name!r}: ...}}"
            )
        made[name] = x.to(like) if x.is_floating_point() else x.to(like.device)
    return made


Make = Callable[[PreTrainedConfig, Tensor, torch.Generator], Tensor | None]


def _image(config: PreTrainedConfig, tokens: Tensor, generator: torch.Generator) -> Tensor | None:
    """``[batch, channel, height, width]``."""
    inner = (getattr(config, "vision_config", None), getattr(config, "encoder", None))
    for each in (*(each for each in inner if isinstance(each, PreTrainedConfig)), config):
        size = getattr(each, "image_size", None)
        if size is not None:
            height, width = size if isinstance(size, list | tuple) else (size, size)
            channels = first(each, "num_channels", "in_channels", "in_chans") or 3
            return torch.randn(tokens.shape[0], channels, height, width, generator=generator)
    return None


def _of_image(change: Callable[[Tensor], Tensor]) -> Make:
    """What is made of an image in each row."""
    return lambda *given: None if (image := _image(*given)) is None else change(image)


def _tiles_in(config: PreTrainedConfig) -> int:
    return int(config.vision_config.max_num_tiles)


def _tiles(config: PreTrainedConfig, tokens: Tensor, generator: torch.Generator) -> Tensor | None:
    """``[batch, image, tile, channel, height, width]`` (Mllama), one image of all tiles in each row."""
    tiles = [x for _ in range(_tiles_in(config)) if (x := _image(config, tokens, generator)) is not None]
    return torch.stack(tiles, 1).unsqueeze(1) if tiles else None


def _ones(shape: Callable[[PreTrainedConfig, Tensor], tuple[int, ...]]) -> Make:
    """A one at each place of a shape: all of them are there, or may be attended to."""
    return lambda config, tokens, generator: torch.ones(shape(config, tokens), dtype=torch.long)


def _noise(shape: Callable[[PreTrainedConfig, Tensor], tuple[Any, ...]]) -> Make:
    """Random numbers in a shape for each row; None where the configuration does not say one of its sizes."""

    def make(config: PreTrainedConfig, tokens: Tensor, generator: torch.Generator) -> Tensor | None:
        sizes = shape(config, tokens)
        return None if None in sizes else torch.randn(tokens.shape[0], *sizes, generator=generator)

    return make


def _spectrogram(config: PreTrainedConfig, tokens: Tensor, generator: torch.Generator) -> Tensor | None:
    """Of Whisper ``[batch, mel, frame]``, of others ``[batch, frame, mel]``."""
    mels, frames = first(config, "num_mel_bins"), first(config, "max_source_positions")
    if mels is not None and frames is not None:
        return torch.randn(tokens.shape[0], mels, 2 * frames, generator=generator)
    mels = first(config, "input_feat_per_channel", "feature_projection_input_dim")
    return None if mels is None else torch.randn(tokens.shape[0], 104, mels, generator=generator)


def _waveform(config: PreTrainedConfig, tokens: Tensor, generator: torch.Generator) -> Tensor | None:
    """A tone in noise, ``[batch, sample]``: half a second at 16 kHz."""
    tone = (torch.arange(8000) * 0.17).sin()
    return tone + 0.3 * torch.randn(tokens.shape[0], 8000, generator=generator)


def _flat_patches(config: PreTrainedConfig, tokens: Tensor, generator: torch.Generator) -> Tensor | None:
    """A grid of three by three patches, each with its row and column before its pixels (Pix2Struct)."""
    vision = getattr(config, "vision_config", config)
    width = first(vision, "patch_embed_hidden_size")
    if width is None:
        return None
    pixels = torch.randn(tokens.shape[0], 9, width, generator=generator)
    grid = torch.cartesian_prod(torch.arange(1.0, 4.0), torch.arange(1.0, 4.0))
    return torch.cat([grid.expand(tokens.shape[0], 9, 2), pixels], -1)


def _boxes(config: PreTrainedConfig, tokens: Tensor, generator: torch.Generator) -> Tensor | None:
    """Where each token stands on its page, ``[batch, pos, 4]``: left, top, right, bottom."""
    corner = torch.rand(*tokens.shape, 2, generator=generator) * 0.7
    return torch.cat([corner, corner + torch.rand(*tokens.shape, 2, generator=generator) * 0.3], -1)


def _other_tokens(config: PreTrainedConfig, tokens: Tensor, generator: torch.Generator) -> Tensor | None:
    rows = first(config.qformer_config, "vocab_size")
    return torch.randint(0, rows, (tokens.shape[0], 5), generator=generator) if rows else None


def _image_places(config: PreTrainedConfig, tokens: Tensor, generator: torch.Generator) -> Tensor | None:
    """Which places an image takes (Kosmos 2): those behind the first."""
    places = torch.zeros(tokens.shape, dtype=torch.long)
    places[:, 1 : 1 + config.latent_query_num] = 1
    return places


_MAKERS: Mapping[str, Make] = {
    "pixel_values": _image,
    "input_features": _spectrogram,
    "input_values": _waveform,
    "flattened_patches": _flat_patches,
    "bbox": _boxes,
    "qformer_input_ids": _other_tokens,
    "image_attention_mask": _ones(lambda config, tokens: (*tokens.shape, 1)),
    "image_embeds_position_mask": _image_places,
}
#: Model types whose argument of that name is something else.
_OF_TYPE: Mapping[tuple[str, str], Make] = {
    ("audio-spectrogram-transformer", "input_values"): _noise(
        lambda config, tokens: (first(config, "max_length"), first(config, "num_mel_bins"))
    ),
    ("speech_to_text", "input_features"): _noise(
        lambda config, tokens: (104, first(config, "input_feat_per_channel", "num_mel_bins"))
    ),
    # A few frames for each token, which are added to it.
    ("voxtral_realtime", "input_features"): _noise(
        lambda config, tokens: (
            first(config.audio_config, "num_mel_bins"),
            2 * config.downsample_factor * tokens.shape[1],
        )
    ),
    # [batch, image, channel, height, width], one image in each row.
    ("idefics", "pixel_values"): _of_image(lambda image: image.unsqueeze(1)),
    ("mllama", "pixel_values"): _tiles,
    ("mllama", "aspect_ratio_ids"): _ones(lambda config, tokens: (len(tokens), 1)),
    ("mllama", "aspect_ratio_mask"): _ones(lambda config, tokens: (len(tokens), 1, _tiles_in(config))),
    ("mllama", "cross_attention_mask"): _ones(lambda config, tokens: (*tokens.shape, 1, _tiles_in(config))),
    # [batch, frame, channel, height, width], four frames in each row.
    ("instructblipvideo", "pixel_values"): _of_image(
        lambda image: torch.stack([image, image.flip(0), -image, image.flip(-1)], 1)
    ),
}
#: What else models need that their forward can be called without.
_NEEDED_TOO: Mapping[str, tuple[str, ...]] = {
    "idefics": ("pixel_values", "image_attention_mask"),
    "kosmos-2": ("pixel_values", "image_embeds_position_mask"),
    "mllama": ("pixel_values", "aspect_ratio_ids", "aspect_ratio_mask", "cross_attention_mask"),
    "udop": ("bbox",),
    "voxtral_realtime": ("input_features",),
}


def _places(config: PreTrainedConfig) -> tuple[int | None, int]:
    """The token that stands where an image does, and how many of them, where tokens are to hold them."""
    if config.model_type in ("blip-2", "instructblip"):
        return first(config, "image_token_index"), config.num_query_tokens
    if config.model_type == "instructblipvideo":
        return first(config, "video_token_index"), 4 * config.num_query_tokens
    return None, 0


# ----------------------------------------------------------------------------------------------------------------------
# Where images, or sound, stand among the tokens.
# ----------------------------------------------------------------------------------------------------------------------


def others_of(arguments: Given) -> Arguments:
    """Other images, or another sound, in the place of what is given."""
    return {name: x.flip(-1) * -1.5 for name, x in arguments.items() if x.is_floating_point()}


def unchanged(before: Tensor, after: Tensor) -> Tensor | None:
    """The places at which two streams are the same, ``[batch, pos]``; None where that says nothing.

    Args:
        before, after: ``[batch, pos, d_model]``, of runs with different images.
    """
    same = (before == after).all(-1)
    return None if bool(same.all()) or not bool(same.any()) else same


def text_places(model: nn.Module, arguments: Given, first: nn.Module, stream: Tensor) -> Tensor | None:
    """The places whose first stream images have no part in, ``[batch, pos]``; None where all, or none, are such.

    Args:
        model: a Hugging Face model.
        arguments: what it was run on.
        first: the first block.
        stream: what entered it in that run.
    """
    others = others_of(arguments)
    if not others:
        return None
    seen: list[Tensor] = []
    name = next(iter(argument_names(first)), "")

    def enters(module: nn.Module, args: Args, kwargs: Kwargs) -> None:
        seen.append((args[0] if args else kwargs[name]).detach().clone())

    with torch.no_grad(), first.register_forward_pre_hook(enters, with_kwargs=True):
        model(**{**arguments, **others})
    return unchanged(stream, seen[0]) if len(seen) == 1 and seen[0].shape == stream.shape else None
