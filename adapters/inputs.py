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

#: The argument for tokens: of a model whose encoder reads images or sound, the decoder's tokens.
TokensArgument = Literal["input_ids", "decoder_input_ids"]
#: A model's inputs, by the names of its own arguments.
Given = Mapping[str, Tensor]
#: The arguments of a model's forward, by name.
Arguments = dict[str, Tensor]
#: A module's forward.
Forward = Callable[..., Any]
#: Prefixes of the names of arguments that are images or sound, or accompany them.
OF_IMAGES_AND_SOUND = (
    "pixel",
    "image",
    "video",
    "audio",
    "feature",
    "input_features",
    "input_values",
)
#: The names of the cache of earlier keys and values, among arguments and in a model's output.
#: transformers uses the second name from 5.24 on.
PAST = ("past_key_values", "cache")


def past_of(values: Mapping[str, Any]) -> Any:
    """Return the cache of earlier keys and values in a model's arguments or output; None if there
    is none.
    """
    # Look up only names that exist: transformers 5.24 warns if an output is asked for the older
    # one.
    for name, value in values.items():
        if name in PAST and value is not None:
            return value
    return None


def with_past_named(arguments: Mapping[str, Any], known: Collection[str]) -> Kwargs:
    """Rename the cache in some arguments to the name that the model uses.

    Args:
        arguments: the arguments.
        known: the names that the model takes.

    Example:
        >>> from adapters.inputs import with_past_named
        >>> with_past_named({"past_key_values": 1, "use_cache": True}, {"cache", "use_cache"})
        {'use_cache': True, 'cache': 1}
    """
    accepted = [name for name in PAST if name in known]
    present = [name for name in PAST if name in arguments]
    if not accepted or sum(arguments[name] is not None for name in present) > 1:
        return dict(arguments)
    renamed = {name: value for name, value in arguments.items() if name not in PAST}
    if present:
        renamed[accepted[0]] = past_of(arguments)
    return renamed


@functools.cache
def accepted_arguments(forward: Forward) -> frozenset[str]:
    """Return the names of the arguments that a Hugging Face forward takes, including those of its
    typed ``**kwargs``.
    """
    names: set[str] = set()
    for parameter in inspect.signature(forward).parameters.values():
        if parameter.kind is not parameter.VAR_KEYWORD:
            names.add(parameter.name)
            continue
        for typed in typing.get_args(_evaluated(parameter.annotation, forward)):
            names.update(getattr(typed, "__annotations__", ()))
    return frozenset(names - {"self", "args"})


def _evaluated(annotation: Any, forward: Forward) -> Any:
    """Evaluate an annotation of a forward in the namespace of the module that defines it."""
    if isinstance(annotation, str):
        return eval(annotation, inspect.unwrap(forward).__globals__)
    return annotation


def _forward_of(core: nn.Module) -> Forward:
    """Return the forward that declares the accepted arguments; for a `PlainModel`, its module's
    forward."""
    module: nn.Module = getattr(core, "plain_module", core)
    return type(module).forward


def accepted_by(core: nn.Module) -> frozenset[str]:
    """Return the names of the arguments that a Hugging Face model takes.

    Args:
        core: the model, without wrappers. ``use_cache`` counts if its forward passes it on to its
            decoder.

    Example:
        >>> import transformers
        >>> from adapters.inputs import accepted_by
        >>> model = transformers.GPT2LMHeadModel(
        ...     transformers.GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=10)
        ... )
        >>> {"use_cache", "attention_mask"} <= accepted_by(model)
        True
    """
    forward = _forward_of(core)
    names = accepted_arguments(forward)
    if names.isdisjoint(PAST) or "use_cache" in names or not isinstance(core, PreTrainedModel):
        return names
    decoder = core.get_decoder()
    if decoder is None or not _takes_anything(forward):
        return names
    return names | (accepted_arguments(type(decoder).forward) & {"use_cache"})


def may_take(core: nn.Module, name: str) -> bool:
    """Tell whether a model may take an argument, according to its signature; a forward with
    ``**kwargs`` may take any.

    Args:
        core: the model, without its wrappers.
        name: the argument's name.
    """
    forward = _forward_of(core)
    return name in accepted_arguments(forward) or _takes_anything(forward)


@functools.cache
def _takes_anything(forward: Forward) -> bool:
    parameters = inspect.signature(forward).parameters.values()
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)


def gives_cache(core: nn.Module) -> bool:
    """Tell, from its signature, whether a Hugging Face model takes a cache of keys and values and
    returns the extended one.

    Args:
        core: the model, without its wrappers.

    Example:
        >>> import transformers
        >>> from adapters.inputs import gives_cache
        >>> config = transformers.BertConfig(
        ...     hidden_size=8,
        ...     num_hidden_layers=1,
        ...     num_attention_heads=1,
        ...     intermediate_size=8,
        ...     vocab_size=10,
        ... )
        >>> gives_cache(transformers.BertForMaskedLM(config))
        False
    """
    forward = type(core).forward
    names = accepted_by(core)
    if names.isdisjoint(PAST) or "use_cache" not in names or not _counts_tokens(core):
        return False
    returned = _evaluated(inspect.signature(forward).return_annotation, forward)
    kinds = (returned, *typing.get_args(returned))
    fields = [kind.__dataclass_fields__ for kind in kinds if hasattr(kind, "__dataclass_fields__")]
    return not fields or not all(names.keys().isdisjoint(PAST) for names in fields)


def _counts_tokens(core: nn.Module) -> bool:
    """Tell whether a model's cache records the number of earlier tokens. A cache of Mamba's states
    does not.
    """
    if not isinstance(core, PreTrainedModel):
        return True
    forward = type(core).forward
    cache = inspect.signature(forward).parameters.get("cache")
    kinds = () if cache is None else typing.get_args(_evaluated(cache.annotation, forward))
    if kinds and not any(isinstance(kind, type) and issubclass(kind, Cache) for kind in kinds):
        return False
    if not hasattr(core.config.get_text_config(decoder=True), "num_hidden_layers"):
        return True  # its configuration has another name for that
    layers = DynamicCache(config=core.config).layers
    return not layers or any(isinstance(layer, CacheLayerMixin) for layer in layers)


def argument_names(module: nn.Module) -> list[str]:
    """Return the names of the arguments of a module's forward, in order."""
    return list(names_of(type(module).forward))


@dataclass(frozen=True)
class Takes:
    """The arguments of a model for tokens, images and sound.

    Attributes:
        tokens: the argument for tokens; None if it reads none (ViT, HuBERT).
        main: the argument for images or sound, if the first blocks read these instead of tokens
            (Whisper, ViT).
        needed: the required arguments of its forward.
    """

    tokens: TokensArgument | None
    main: str | None
    needed: tuple[str, ...]


def takes(core: nn.Module) -> Takes:
    """Return the inputs of a Hugging Face model.

    Args:
        core: the model, without its wrappers.

    Example:
        >>> from transformers import GPT2LMHeadModel, ViTModel, WhisperForConditionalGeneration
        >>> from adapters.inputs import taken_by
        >>> [(taken_by(cls).tokens, taken_by(cls).main) for cls in (GPT2LMHeadModel, ViTModel)]
        [('input_ids', None), (None, 'pixel_values')]
        >>> taken_by(WhisperForConditionalGeneration).tokens
        'decoder_input_ids'
    """
    cls: Any = type(core)  # a class is hashable, but its type does not show it
    return taken_by(cls)


@functools.cache
def taken_by(cls: type[nn.Module]) -> Takes:
    """Return the inputs of the models of a class: see `takes`."""
    parameters = inspect.signature(cls.forward).parameters
    main: str | None = getattr(cls, "main_input_name", "input_ids")
    tokens: TokensArgument | None = None
    decodes = {"decoder_input_ids", "encoder_outputs"} <= parameters.keys()
    with_text = "input_ids" in parameters and not decodes  # an image may be in it
    if main == "input_ids" or main not in parameters or with_text:
        main = None
        tokens = "input_ids"
    elif decodes:
        tokens = "decoder_input_ids"
    needed = []
    for parameter in list(parameters.values())[1:]:
        plain = parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        if plain and parameter.default is parameter.empty:
            needed.append(parameter.name)
    optional = ("input_ids", main)
    return Takes(tokens, main, tuple(name for name in needed if name not in optional))


def makes_decoder_tokens(core: nn.Module) -> bool:
    """Tell whether a model makes its decoder's tokens from its encoder's when none are passed (BART
    and similar models).

    Args:
        core: the model, without its wrappers.

    Example:
        >>> import transformers
        >>> from adapters.inputs import makes_decoder_tokens
        >>> sizes = dict(d_model=16, encoder_layers=1, decoder_layers=1, vocab_size=10)
        >>> makes_decoder_tokens(transformers.BartModel(transformers.BartConfig(**sizes)))
        True
        >>> makes_decoder_tokens(
        ...     transformers.MarianModel(transformers.MarianConfig(**sizes, pad_token_id=0))
        ... )
        False
    """
    classes = {type(module) for module in core.modules()}
    forwards = {cls.forward for cls in classes if hasattr(cls, "forward")}
    return any(
        "decoder_input_ids" in accepted_arguments(forward) and _shifts_tokens(forward)
        for forward in forwards
    )


@functools.cache
def _shifts_tokens(forward: Forward) -> bool:
    """Tell whether a forward makes the decoder's tokens from the encoder's, according to its
    source.
    """
    try:
        source = inspect.getsource(inspect.unwrap(forward))
    except OSError:  # no source is available
        return False
    call = r"(shift\w*right|_prepare_fsmt_decoder_inputs)\(\s*(self\.config,\s*)?input_ids"
    return re.search(call, source) is not None


def takes_besides(core: nn.Module) -> str | None:
    """Return the first argument for images or sound that a model inserts among its tokens; None if
    there is none.

    Args:
        core: the model, without its wrappers.

    Example:
        >>> import transformers
        >>> from adapters.inputs import takes_besides
        >>> model = transformers.GPT2LMHeadModel(
        ...     transformers.GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=10)
        ... )
        >>> takes_besides(model) is None
        True
    """
    if takes(core).main is not None:
        return None
    for name in inspect.signature(_forward_of(core)).parameters:
        if name.startswith(OF_IMAGES_AND_SOUND):
            return name
    return None


def gives_blocks_tokens(core: nn.Module) -> bool:
    """Tell whether a model's blocks receive token data besides the stream: per-layer inputs (Gemma
    3n, 4).

    Args:
        core: the model, without its wrappers.
    """
    config = config_of(core).get_text_config()
    return bool(getattr(config, "hidden_size_per_layer_input", None))


def text_alone(core: nn.Module) -> Kwargs:
    """Return the arguments with which a run from a later layer treats its stream as text without
    images or sound.

    Args:
        core: the model, without its wrappers.
    """
    name = takes_besides(core)
    return {} if name is None else {name: None}


def with_stream(core: nn.Module, tokens: Tensor, more: Given) -> Kwargs:
    """Return the arguments that accompany the stream in a run from a later layer.

    Args:
        core: the model, without its wrappers.
        tokens, more: the inputs of the run.
    """
    of_images = any(name.startswith(OF_IMAGES_AND_SOUND) for name in more)
    if takes(core).main is None and (of_images or gives_blocks_tokens(core)):
        return {**more, "input_ids": tokens}
    return {**more, **text_alone(core)}


def looks_for_padding(core: nn.Module) -> bool:
    """Tell whether a model searches its tokens for padding, whatever mask is passed (sequence
    classifiers).

    Args:
        core: the model, without its wrappers.
    """
    if getattr(config_of(core), "is_encoder_decoder", False):
        return False  # it searches the tokens of its decoder
    code = getattr(inspect.unwrap(_forward_of(core)), "__code__", None)
    return code is not None and "pad_token_id" in code.co_names


# --------------------------------------------------------------------------------------------------
# Generated inputs: random tokens, and random images or sound of the sizes in a configuration.
# --------------------------------------------------------------------------------------------------


class CannotBeMade(ValueError):
    """An error for a required input that cannot be generated; the message says what to pass."""


def arguments_of(core: nn.Module, input: Tensor, more: Given) -> Arguments:
    """Return a model's arguments by name, from a bridge's: the input itself, and the
    further ones.
    """
    taken = takes(core)
    name: str = taken.tokens or "input_ids"
    if taken.main is not None and input.is_floating_point():
        name = taken.main
    return {name: input, **more}


def split(core: nn.Module, arguments: Given) -> tuple[Tensor, Arguments]:
    """Split a model's arguments into the input of a run and the further ones: the inverse of
    `arguments_of`.

    Raises:
        CannotBeMade: none of them is the input.
    """
    main = takes(core).main
    names = (main, "input_values", "input_features", "pixel_values") if main else ("input_ids",)
    more = dict(arguments)
    for name in names:
        if name in more:
            return more.pop(name), more
    raise CannotBeMade(f"there is no {names[0]} among {', '.join(arguments) or 'nothing'}")


def repeated(inputs: Given, times: int) -> Arguments:
    """Repeat the rows of some inputs; inputs without rows, such as concatenated patches of images,
    are repeated, too.
    """
    arguments = {}
    for name, x in inputs.items():
        arguments[name] = x.repeat(times, *[1] * (x.ndim - 1)) if x.ndim else x
    return arguments


def sample_inputs(model: nn.Module, inputs: Given | None = None) -> Arguments:
    """Generate inputs: three rows of eleven tokens (numbers unlikely to equal a model's number of
    heads), and whatever else the model needs.

    Args:
        model: the model.
        inputs: images or sound that it needs, by the names of its own arguments; None: generated.

    Raises:
        CannotBeMade: it has no weights to run, or needs an input that cannot be generated.
    """
    parameter = next(model.parameters(), None)
    device = None if parameter is None else input_device(model)
    if device is None or device.type == "meta":
        raise CannotBeMade("it has no weights, and what plays which part is found in a run")
    config = config_of(model)
    vocabulary = getattr(config, "vocab_size", None)
    if not vocabulary:
        vocabulary = getattr(config.get_text_config(), "vocab_size", None)
    size = 4 if vocabulary is None else int(vocabulary)  # of images or sound alone
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(min(3, size - 1), size, (3, 11), generator=generator, device="cpu")
    decodes = bool(getattr(config, "is_encoder_decoder", False))
    return with_required_inputs(core_of(model), tokens.to(device), decodes, inputs)


def with_required_inputs(
    core: nn.Module, tokens: Tensor, decodes: bool, inputs: Given | None = None
) -> Arguments:
    """Return a model's arguments by name: tokens, and all required inputs.

    A separate decoder gets a shorter text, so that its shapes differ from the encoder's.

    Args:
        core: the model, without its wrappers.
        tokens: ``[batch, pos]``.
        decodes: the model has an encoder and a decoder.
        inputs: images, sound, and what accompanies them, also tokens; fewer rows are repeated.
            None: generated.

    Raises:
        CannotBeMade: it needs an input of a kind that cannot be generated.
    """
    taken = takes(core)
    arguments = dict(inputs or {})
    main = taken.main or ""
    if "input_ids" in arguments or (main in arguments and taken.tokens in (None, *arguments)):
        counted = arguments["input_ids" if "input_ids" in arguments else main]
        return repeated(arguments, -(-tokens.shape[0] // counted.shape[0]))
    if main:
        arguments, tokens = _with_rows(arguments or _made(core, (main,), tokens), tokens)
        if taken.tokens is not None:
            arguments[taken.tokens] = tokens[:, :-4].contiguous()
        return arguments
    if arguments:
        arguments, tokens = _with_rows(arguments, tokens)
    else:
        arguments = _required_inputs(core, tokens)
        tokens = arguments.pop("input_ids", tokens)
    decoder_tokens = tokens[:, :-4].contiguous()
    if decodes and _reads_the_end(core):
        tokens = _ending_once(tokens, config_of(core).eos_token_id)
        decoder_tokens = tokens.roll(1, 1)
    if decodes:
        arguments.setdefault("decoder_input_ids", decoder_tokens)
    return {"input_ids": tokens, **arguments}


def _reads_the_end(core: nn.Module) -> bool:
    """Tell whether a classifier reads its decoder at the position where the encoder's text ends
    (BART, T5): both texts then need the same length.
    """
    return "eos_mask" in inspect.unwrap(type(core).forward).__code__.co_varnames


def _ending_once(tokens: Tensor, end: int) -> Tensor:
    """Return tokens in which only the last one of each row is the end token."""
    tokens = tokens.masked_fill(tokens == end, (end + 1) % 7 + 3)
    tokens[:, -1] = end
    return tokens


def _with_rows(inputs: Given, tokens: Tensor) -> tuple[Arguments, Tensor]:
    """Match the number of rows of some inputs and of the tokens, by repeating rows of either."""
    rows = next(iter(inputs.values())).shape[0]
    n_texts = tokens.shape[0]
    times = -(-n_texts // rows)
    total = rows * times
    texts = tokens.repeat(-(-total // n_texts), 1)
    return repeated(inputs, times), texts[:total]


def _required_inputs(core: nn.Module, tokens: Tensor) -> Arguments:
    """Generate the required inputs besides tokens. Return them with the tokens, in which the
    positions of images are marked if the model needs that.
    """
    config = config_of(core)
    needed = (*takes(core).needed, *_NEEDED_TOO.get(config.model_type, ()))
    inputs = _made(core, needed, tokens) if needed else {}
    token, count = _places(config)
    if "pixel_values" in inputs and token is not None:
        tokens = tokens.masked_fill(tokens == token, (token + 1) % 7 + 1)
        row = torch.full((tokens.shape[0], count), token, device=tokens.device)
        inputs["input_ids"] = torch.cat([tokens[:, :1], row, tokens[:, 1:]], 1)
    return inputs


def _made(core: nn.Module, names: tuple[str, ...], tokens: Tensor) -> Arguments:
    sample = _Sample(config_of(core), tokens)
    like = next(p for p in core.parameters() if p.is_floating_point())
    inputs: Arguments = {}
    for name in names:
        make = _OF_TYPE.get((sample.config.model_type, name)) or _MAKERS.get(name)
        x = make(sample) if make else None
        if x is None:
            raise CannotBeMade(
                f"{type(core).__name__} needs {name}, and none can be made up: pass"
                f" inputs={{{name!r}: ...}}"
            )
        inputs[name] = x.to(like) if x.is_floating_point() else x.to(like.device)
    return inputs


class _Sample:
    """A generator of random inputs for each row of tokens, with the sizes given by a configuration.
    Its methods return None if the configuration lacks a size.
    """

    def __init__(self, config: PreTrainedConfig, tokens: Tensor) -> None:
        self.config = config
        self.tokens = tokens
        self.rows = tokens.shape[0]
        self.generator = torch.Generator().manual_seed(0)

    def noise(self, *sizes: Any) -> Tensor:
        """Generate random numbers of a shape for each row."""
        return torch.randn(self.rows, *sizes, generator=self.generator, device="cpu")

    def image(self) -> Tensor | None:
        """Generate images, ``[batch, channel, height, width]``."""
        names = ("vision_config", "encoder")
        inner: list[Any] = [getattr(self.config, name, None) for name in names]
        for config in (*inner, self.config):
            size = getattr(config, "image_size", None)
            if size is not None:
                height, width = size if isinstance(size, list | tuple) else (size, size)
                channels = first(config, "num_channels", "in_channels", "in_chans") or 3
                return self.noise(channels, height, width)
        return None

    def video(self) -> Tensor | None:
        """Generate videos, ``[batch, frame, channel, height, width]``."""
        frames = first(self.config, "num_frames", "frames_per_clip")
        size = first(self.config, "image_size", "crop_size")
        if frames is None or size is None:
            return None
        height, width = size if isinstance(size, list | tuple) else (size, size)
        channels = first(self.config, "num_channels", "in_chans") or 3
        return self.noise(frames, channels, height, width)

    def one_image(self) -> Tensor | None:
        """Generate ``[batch, image, channel, height, width]``, one image in each row."""
        image = self.image()
        return None if image is None else image.unsqueeze(1)

    def frames(self) -> Tensor | None:
        """Generate ``[batch, frame, channel, height, width]``, four frames in each row."""
        image = self.image()
        if image is None:
            return None
        return torch.stack([image, image.flip(0), -image, image.flip(-1)], 1)

    @property
    def n_tiles(self) -> int:
        """Return the number of tiles of an image (Mllama)."""
        return self.config.vision_config.max_num_tiles

    def tiles(self) -> Tensor | None:
        """Generate ``[batch, image, tile, channel, height, width]``, one image of all tiles in each
        row.
        """
        tiles = [tile for _ in range(self.n_tiles) if (tile := self.image()) is not None]
        return torch.stack(tiles, 1).unsqueeze(1) if tiles else None

    def spectrogram(self) -> Tensor | None:
        """Generate a spectrogram: for Whisper ``[batch, mel, frame]``, otherwise ``[batch, frame,
        mel]``.
        """
        mels = first(self.config, "num_mel_bins")
        frames = first(self.config, "max_source_positions")
        if mels is not None and frames is not None:
            return self.noise(mels, 2 * frames)
        return self.frames_of_sound("input_feat_per_channel", "feature_projection_input_dim")

    def frames_of_sound(self, *widths: str) -> Tensor | None:
        """Generate ``[batch, frame, mel]``, with the width that the configuration has under one of
        these names.
        """
        width = first(self.config, *widths)
        return None if width is None else self.noise(104, width)

    def waveform(self) -> Tensor | None:
        """Generate a tone in noise, ``[batch, sample]``: half a second at 16 kHz."""
        tone = (torch.arange(8000, device="cpu") * 0.17).sin()
        return tone + 0.3 * self.noise(8000)

    def flat_patches(self) -> Tensor | None:
        """Generate a grid of three by three patches, each with its row and column before its pixels
        (Pix2Struct).
        """
        vision: Any = getattr(self.config, "vision_config", self.config)
        width = first(vision, "patch_embed_hidden_size")
        if width is None:
            return None
        side = torch.arange(1.0, 4.0, device="cpu")
        grid = torch.cartesian_prod(side, side)
        return torch.cat([grid.expand(self.rows, 9, 2), self.noise(9, width)], -1)

    def boxes(self) -> Tensor | None:
        """Generate the position of each token on its page, ``[batch, pos, 4]``: left, top, right,
        bottom.
        """
        shape = (*self.tokens.shape, 2)
        corner = torch.rand(shape, generator=self.generator, device="cpu") * 0.7
        size = torch.rand(shape, generator=self.generator, device="cpu") * 0.3
        return torch.cat([corner, corner + size], -1)

    def other_tokens(self) -> Tensor | None:
        """Generate tokens of another vocabulary (InstructBLIP)."""
        n = first(self.config.qformer_config, "vocab_size")
        if not n:
            return None
        return torch.randint(0, n, (self.rows, 5), generator=self.generator, device="cpu")

    def image_places(self) -> Tensor | None:
        """Generate a mask of the places that an image takes (Kosmos 2): those after the first."""
        places = torch.zeros(self.tokens.shape, dtype=torch.long, device="cpu")
        places[:, 1 : 1 + self.config.latent_query_num] = 1
        return places

    def filter_banks(self) -> Tensor | None:
        """Generate ``[batch, frame, mel]``, of the length that a model expects."""
        length = first(self.config, "max_length")
        mels = first(self.config, "num_mel_bins")
        return None if None in (length, mels) else self.noise(length, mels)

    def frames_for_tokens(self) -> Tensor | None:
        """Generate ``[batch, mel, frame]``: a few frames for each token, which the model adds to
        its embedding."""
        mels = first(self.config.audio_config, "num_mel_bins")
        frames = 2 * self.config.downsample_factor * self.tokens.shape[1]
        return None if mels is None else self.noise(mels, frames)


def _ones(*shape: int) -> Tensor:
    """Return a mask of ones: all places are present, or may be attended to."""
    return torch.ones(shape, dtype=torch.long, device="cpu")


Make = Callable[[_Sample], Tensor | None]
_MAKERS: Mapping[str, Make] = {
    "pixel_values": _Sample.image,
    "input_features": _Sample.spectrogram,
    "input_values": _Sample.waveform,
    "flattened_patches": _Sample.flat_patches,
    "bbox": _Sample.boxes,
    "qformer_input_ids": _Sample.other_tokens,
    "image_attention_mask": lambda sample: _ones(*sample.tokens.shape, 1),
    "image_embeds_position_mask": _Sample.image_places,
}
#: Model types for which an argument of that name has another form.
_OF_TYPE: Mapping[tuple[str, str], Make] = {
    ("audio-spectrogram-transformer", "input_values"): _Sample.filter_banks,
    ("speech_to_text", "input_features"): lambda sample: sample.frames_of_sound(
        "input_feat_per_channel", "num_mel_bins"
    ),
    ("voxtral_realtime", "input_features"): _Sample.frames_for_tokens,
    ("idefics", "pixel_values"): _Sample.one_image,
    ("mllama", "pixel_values"): _Sample.tiles,
    ("mllama", "aspect_ratio_ids"): lambda sample: _ones(sample.rows, 1),
    ("mllama", "aspect_ratio_mask"): lambda sample: _ones(sample.rows, 1, sample.n_tiles),
    ("mllama", "cross_attention_mask"): lambda sample: _ones(
        *sample.tokens.shape, 1, sample.n_tiles
    ),
    ("instructblipvideo", "pixel_values"): _Sample.frames,
    ("videomae", "pixel_values"): _Sample.video,
    ("timesformer", "pixel_values"): _Sample.video,
    ("vivit", "pixel_values"): _Sample.video,
    ("vjepa2", "pixel_values_videos"): _Sample.video,
}
#: Inputs that models need although their forward can be called without.
_NEEDED_TOO: Mapping[str, tuple[str, ...]] = {
    "idefics": ("pixel_values", "image_attention_mask"),
    "kosmos-2": ("pixel_values", "image_embeds_position_mask"),
    "mllama": ("pixel_values", "aspect_ratio_ids", "aspect_ratio_mask", "cross_attention_mask"),
    "udop": ("bbox",),
    "voxtral_realtime": ("input_features",),
}


def _places(config: PreTrainedConfig) -> tuple[int | None, int]:
    """Return the token that marks an image's positions, and the number of such tokens per image, if
    tokens mark images.
    """
    if config.model_type in ("blip-2", "instructblip"):
        return first(config, "image_token_index"), config.num_query_tokens
    if config.model_type == "instructblipvideo":
        return first(config, "video_token_index"), 4 * config.num_query_tokens
    return None, 0


# --------------------------------------------------------------------------------------------------
# The places of images, or sound, among the tokens.
# --------------------------------------------------------------------------------------------------


def others_of(arguments: Given) -> Arguments:
    """Replace images or sound by different random ones."""
    return {name: x.flip(-1) * -1.5 for name, x in arguments.items() if x.is_floating_point()}


def unchanged(before: Tensor, after: Tensor) -> Tensor | None:
    """Return the positions at which two streams are equal, ``[batch, pos]``; None if the comparison
    is not informative.

    Args:
        before, after: ``[batch, pos, d_model]``, of runs with different images.
    """
    same = (before == after).all(-1)
    if same.all() or not same.any():
        return None
    return same


def text_places(
    model: nn.Module, arguments: Given, first: nn.Module, stream: Tensor
) -> Tensor | None:
    """Return the positions at which the first stream does not depend on images, ``[batch, pos]``;
    None if that is all of them or none.

    Args:
        model: a Hugging Face model.
        arguments: the inputs of the run.
        first: the first block.
        stream: the input of that block in that run.
    """
    others = others_of(arguments)
    if not others:
        return None
    streams: list[Tensor] = []
    name = next(iter(argument_names(first)), "")

    def enters(module: nn.Module, args: Args, kwargs: Kwargs) -> None:
        entered = args[0] if args else kwargs[name]
        streams.append(entered.detach().clone())

    with torch.no_grad(), first.register_forward_pre_hook(enters, with_kwargs=True):
        model(**{**arguments, **others})
    if len(streams) != 1 or streams[0].shape != stream.shape:
        return None
    return unchanged(stream, streams[0])
