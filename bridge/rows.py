"""Batch rows: where padding is, which arguments have a token axis, which row an entry belongs to.

All code that handles positions uses this file: runs, generation and its recorders, operations,
caches, batches of requests. Padding may be moved if a model allows it: to the left of a decoder's
tokens, to the right of an encoder's. Tokens that a model makes itself (a decoder's) are left to the
model. Inputs that cannot be right raise an error.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from adapters.config import config_of
from adapters.inputs import OF_IMAGES_AND_SOUND, takes
from adapters.points import module_at, module_path

#: The sides on which padding may be.
Side = Literal["left", "right"]
#: Arguments of Hugging Face's models whose second axis is that of the tokens (of `position_ids` the
#: last).
_ALONG_TOKENS = frozenset(
    (
        "input_ids",
        "inputs_embeds",
        "attention_mask",
        "token_type_ids",
        "mm_token_type_ids",
        "position_ids",
        "langs",
        "bbox",
        "image_attention_mask",
        "cross_attention_mask",
        "image_embeds_position_mask",
        "global_attention_mask",
        "visual_pos_masks",
        "images_seq_mask",
        "vision_mask",
        "inputs_mask",
        "input_type_ids",
    )
)
#: Arguments with an entry for each row that any layer accepts.
OF_ROWS = ("attention_mask", "adapter_names")
#: Arguments that tell the number of rows, the most reliable first.
_ROWS_OF = ("input_ids", "inputs_embeds", "decoder_input_ids", "decoder_inputs_embeds")
#: Methods of models that right-pad their rows themselves; otherwise added entries are a learned
#: prompt on the left.
_LENGTHENS = ("_pad_to_window_size", "_pad_to_mult_of_chunk_length")


def token_axis(axis: str) -> str:
    """Return the token (or frame) axis that an activation's axis follows; keys follow their
    tokens.
    """
    return axis.replace("key_pos", "pos")


class BatchRows:
    """The layout of the rows of one batch.

    Args:
        core: the model, without its wrappers.
        arguments: the arguments of its call, by name.

    Attributes:
        count: the number of rows; 0 if unknown.
        masks: for each axis (``"pos"``, in an encoder-decoder the encoder's; ``"decoder_pos"``),
            the mask ``[row, token]``, 1 for tokens and 0 for padding; for sound, a mask of its
            samples. Axes without padding are omitted.
        growing: the axis along which a generation adds tokens.
        order: the position of each token before padding was moved, ``[row, token]``; None:
            unchanged.

    Example:
        >>> import torch, transformers
        >>> from bridge.rows import BatchRows
        >>> model = transformers.GPT2LMHeadModel(
        ...     transformers.GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=10)
        ... )
        >>> tokens, mask = (
        ...     torch.tensor([[5, 6, 7], [5, 6, 0]]),
        ...     torch.tensor([[1, 1, 1], [1, 1, 0]]),
        ... )
        >>> arguments = {"input_ids": tokens, "attention_mask": mask}
        >>> rows = BatchRows(model, arguments)
        >>> rows.arrange(arguments, "left")
        >>> arguments["input_ids"].tolist(), rows.before
        ([[5, 6, 7], [0, 5, 6]], [0, 1])
    """

    __slots__ = ("_unknown", "before", "core", "count", "growing", "masks", "order")

    def __init__(self, core: nn.Module, arguments: Mapping[str, Any]) -> None:
        self.core = core
        config = getattr(core, "config", None)  # a plain module, called directly, has none
        self.growing = "decoder_pos" if getattr(config, "is_encoder_decoder", False) else "pos"
        self.masks: dict[str, Tensor] = {}
        self._unknown: set[str] = set()
        self.order: Tensor | None = None
        names = (takes(core).main, *_ROWS_OF, "input_values", "input_features", "pixel_values")
        self.count = 0
        for name in names:
            value = arguments.get(name or "")
            if isinstance(value, Tensor) and value.ndim:
                self.count = int(value.shape[0])
                break
        self.before: list[int] = [0] * self.count
        self.note(arguments)

    def note(self, arguments: Mapping[str, Any]) -> None:
        """Record the padding masks among a model's arguments."""
        for axis, name in (("pos", "attention_mask"), ("decoder_pos", "decoder_attention_mask")):
            mask = arguments.get(name)
            if isinstance(mask, Tensor) and mask.ndim == 2:
                self.masks[axis] = mask
            elif mask is not None:
                self._unknown.add(axis)  # which key each query may attend to

    def arrange(self, arguments: MutableMapping[str, Any], side: Side) -> None:
        """Move tokens, and all arguments along them, so that padding is on one side of each row.

        Args:
            arguments: the model's arguments; moved ones are replaced in this mapping.
            side: the side for the padding.

        Raises:
            ValueError: it is unclear whether one of the arguments has to move with the tokens.
        """
        mask = self.masks.get("pos")
        if mask is None:
            return
        # A stable sort by the mask keeps the order of the tokens, and of the padding.
        real = mask.bool()
        order = (real if side == "left" else ~real).to(torch.int8).argsort(dim=-1, stable=True)
        if not torch.equal(order, torch.arange(mask.shape[1], device=mask.device).expand_as(order)):
            self.order = order
            for name, value in arguments.items():
                if self._goes_along(name, value):
                    arguments[name] = self._moved(value)
            self.masks["pos"] = self._moved(mask)
        if self.growing == "pos":
            self.before = (self.masks["pos"].cumsum(-1) == 0).sum(-1).tolist()

    def _goes_along(self, name: str, value: object) -> bool:
        """Tell whether an argument has an axis of tokens.

        Raises:
            ValueError: it is ambiguous.
        """
        assert self.order is not None
        if not isinstance(value, Tensor) or value.ndim < 2:
            return False
        of_tokens = self.order.shape
        if name in _ALONG_TOKENS:
            axes = value.shape[-2:] if name == "position_ids" else value.shape[:2]
            return axes == of_tokens
        is_of_others = name.startswith((*OF_IMAGES_AND_SOUND, "decoder_", "encoder_"))
        if value.shape[:2] == of_tokens and not is_of_others:
            raise ValueError(
                f"padding has to be moved to the other side of each row here, and {name} has the"
                " shape of the tokens: whether it goes along them is not known. Pad on the other"
                " side yourself, or give rows of one length"
            )
        return False

    def _moved(self, value: Tensor) -> Tensor:
        assert self.order is not None
        order = self.order.to(value.device)
        if value.ndim == 3 and value.shape[-2:] == order.shape and value.shape[:2] != order.shape:
            return value.gather(-1, order.expand(value.shape))  # position_ids of several axes
        index = order.reshape(*order.shape, *(1 for _ in value.shape[2:]))
        return torch.take_along_dim(value, index, 1)

    def repeated(self, value: Tensor, rows: int) -> Tensor:
        """Repeat a per-row value for repeated rows, such as beams or returned sequences.

        Args:
            value: ``[row, ...]``.
            rows: the number of rows of the result.
        """
        copies = rows // value.shape[0] if value.shape[0] and rows % value.shape[0] == 0 else 1
        return value if copies == 1 else value.repeat_interleave(copies, 0)

    def real(self, axis: str, length: int, rows: int) -> Tensor | None:
        """Return the mask of real entries along an axis, ``[rows, length]``; None if none are
        padding.

        Args:
            axis: the name of the axis.
            length: the number of its entries.
            rows: the number of rows of the activation.

        Raises:
            ValueError: the mask has another length, and it is unknown how its entries map to these.
        """
        mask = self.masks.get(token_axis(axis))
        if mask is None and token_axis(axis) in self._unknown:
            raise ValueError(
                "positions are not known here: the mask that was given says which query sees which"
                " key, not which tokens are padding. Run each row alone, without padding and mask,"
                " or pass attention_mask [batch, pos]"
            )
        if mask is None or bool(mask.all()):
            return None
        if mask.shape[1] != length:
            mask = self._of_frames(mask, length)
        return self.repeated(mask.bool(), rows)

    def _of_frames(self, mask: Tensor, length: int) -> Tensor:
        """Convert a mask of samples to one of frames, or extend a mask of tokens by the model's
        own tokens.
        """
        added = length - mask.shape[1]
        if takes(self.core).main is None and added > 0:
            pads_right = any(
                hasattr(module, name) for module in self.core.modules() for name in _LENGTHENS
            )
            sides = (0, added) if pads_right else (added, 0)
            return nn.functional.pad(mask, sides, value=int(not pads_right))
        lengths = mask.long().sum(-1)
        is_right_padded = torch.equal(mask.long(), _mask_of_lengths(lengths, mask.shape[1]))
        full = torch.full_like(lengths, mask.shape[1])
        for counts in _counts_of_frames(self.core) if is_right_padded else ():
            if bool((counts(full) == length).all()):
                return _mask_of_lengths(counts(lengths), length)
        raise ValueError(
            f"positions are not known here: attention_mask has {mask.shape[1]} entries, the"
            f" activation {length}, and {type(self.core).__name__} does not say which of these are"
            " padding. Run each row alone, without padding"
        )

    def stripped(self, sequences: Tensor) -> list[Tensor]:
        """Return each sequence of a generation without its left padding."""
        if not any(self.before):
            return list(sequences)
        copies = len(sequences) // self.count
        return [row[self.before[i // copies] :] for i, row in enumerate(sequences)]

    def padded_behind(self, sequences: Tensor) -> Tensor:
        """Return the sequences of a generation, right-padded instead of left-padded."""
        return self.given_back(sequences, ["batch", self.growing], behind=True)

    def given_back(self, activation: Tensor, axes: Sequence[str], behind: bool) -> Tensor:
        """Return an activation with each token at the user's position.

        Args:
            activation: an activation of the rearranged rows.
            axes: the names of its axes.
            behind: whether the user's growing sequences are right-padded.
        """
        if axes[0] != "batch":
            return activation
        for number, axis in enumerate(axes):
            length, kind = activation.shape[number], token_axis(axis)
            places = torch.arange(length, device=activation.device)
            if kind == self.growing and behind and any(self.before):
                before = torch.tensor(self.before, device=activation.device)
                index = (places + before[:, None]) % length
            elif kind == "pos" != self.growing and self.order is not None:
                moved = self.order.to(places.device).argsort(-1)
                unmoved = places[self.order.shape[1] :].expand(self.count, -1)
                index = torch.cat([moved, unmoved], 1)
            else:
                continue
            index = self.repeated(index, activation.shape[0])
            shape = [1] * activation.ndim
            shape[0], shape[number] = index.shape
            activation = torch.take_along_dim(activation, index.reshape(shape), number)
        return activation


def _mask_of_lengths(lengths: Tensor, width: int) -> Tensor:
    """Return the mask of right-padded rows, ``[row, width]``, from the number of real entries."""
    return (torch.arange(width, device=lengths.device) < lengths[:, None]).long()


def _counts_of_frames(core: nn.Module) -> Iterator[Any]:
    """Return the model's functions that convert numbers of samples to numbers of frames: for the
    first layers, and for layers after the last."""
    squeezed = getattr(config_of(core), "squeeze_factor", None)
    for name in ("_get_feat_extract_output_lengths", "_get_subsampling_output_length"):
        for module in core.modules():
            counts = getattr(module, name, None)
            if counts is None:
                continue
            if "add_adapter" in inspect.signature(counts).parameters:
                yield lambda x, counts=counts: counts(x, add_adapter=False)
            yield counts
            if squeezed is not None:
                yield lambda x, counts=counts: counts(x) // squeezed
            break


# --------------------------------------------------------------------------------------------------
# Positions among the tokens of a row, as a model counts them.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PositionCounting:
    """A model's way of counting positions.

    Attributes:
        padding: the position of padding, in a model that counts positions from there (RoBERTa);
            otherwise None.
        first: the position of the first token, in a model whose own position ids define it
            (Nyströmformer's begin at 2).
    """

    padding: int | None = None
    first: Tensor | None = None

    @classmethod
    def of(cls, model: nn.Module, core: nn.Module, block_paths: Sequence[str]) -> PositionCounting:
        """Determine how a model counts positions, from its embeddings.

        Args:
            model, core: the model, with and without its wrappers.
            block_paths: the paths of its blocks.
        """
        name = "create_position_ids_from_input_ids"
        for module in around_blocks(model, core, block_paths):
            index: int | None = None
            if not isinstance(module, nn.Embedding):
                index = getattr(module, "padding_idx", None)
            if index is not None and (
                hasattr(module, name) or name in inspect.unwrap(type(module).forward).__globals__
            ):
                return cls(padding=int(index))
            own = module._buffers.get("position_ids")
            if own is not None and own.numel():
                return cls(first=own.flatten()[0])
        return cls()

    def places(self, mask: Tensor) -> Tensor:
        """Return each token's position in its row; right padding keeps its index.

        Args:
            mask: ``[batch, pos]``, 1 for tokens and 0 for padding.

        Returns:
            ``[batch, pos]``.
        """
        count = mask.cumsum(-1)
        if self.padding is not None:
            return count * mask + self.padding
        own_place = torch.arange(mask.shape[1], device=mask.device).expand_as(mask)
        places = torch.where(mask.bool() | (count == 0), (count - 1).clamp(min=0), own_place)
        return places if self.first is None else places + self.first.to(places.device)


def around_blocks(
    model: nn.Module, core: nn.Module, block_paths: Sequence[str]
) -> Iterator[nn.Module]:
    """Return a model's modules except those inside its lists of blocks. They are looked up in each
    run, because a user may replace an embedding or wrap the model between two runs.
    """
    paths = {module_path(path).rpartition(".")[0] for path in block_paths}
    lists = {module_at(model, path) for path in paths if path}
    waiting: list[nn.Module] = [core]
    while waiting:
        module = waiting.pop()
        yield module
        for child in reversed(module._modules.values()):
            is_list = isinstance(child, nn.ModuleList) and child in lists
            if child is not None and not is_list:
                waiting.append(child)


def tiled(arguments: Mapping[str, Any], times: int) -> dict[str, Any]:
    """Repeat a model's arguments along the batch, one copy of the batch after the other.

    Images and sound are in the order of their rows, so they can be repeated in the same way,
    whatever their number per row.

    Args:
        arguments: the arguments, by name.
        times: the number of copies.
    """

    def of_all(name: str, value: Any) -> Any:
        if isinstance(value, list):  # of each row (PEFT)
            return value * times
        if not isinstance(value, Tensor) or not value.ndim:
            return value
        rows = [1] * value.ndim
        rows[int(name == "position_ids" and value.ndim == 3)] = times  # positions of several axes
        return value.repeat(rows)

    return {name: value if times == 1 else of_all(name, value) for name, value in arguments.items()}


def places_of(mask: Tensor | None, position: int, shape: Sequence[int]) -> Tensor:
    """Return the index of a position in each row, counted among its real tokens, ``[row]``.

    Args:
        mask: ``[row, token]``, 1 for tokens and 0 for padding; None: no padding.
        position: the position, counted from the front or, if negative, from the end.
        shape: the numbers of rows and tokens.

    Raises:
        ValueError: a row has no such position.
    """
    real = (
        torch.ones(tuple(shape[:2]), dtype=torch.bool, device="cpu")
        if mask is None
        else mask.bool().cpu()
    )
    size = real.sum(-1)
    if not bool(((size > position) & (size >= -position)).all()):
        raise ValueError(
            f"position is {position}, and the shortest prompt has {int(size.min())} tokens"
        )
    place = position if position >= 0 else size[:, None] + position
    return ((real.cumsum(-1) - 1 == place) & real).long().argmax(-1)


def check_position(metric: object, mask: Tensor | None) -> None:
    """Raise an error if a metric reads one position of all rows, and a row has padding there.

    Args:
        metric: a metric; those made by the library have the position as ``position``.
        mask: ``[row, token]``, 1 for tokens and 0 for padding; None: no padding.

    Raises:
        ValueError: the position is padding in a row.
    """
    position = getattr(metric, "position", None)
    if mask is None or not isinstance(position, int):
        return
    padded = (mask[:, position] == 0).nonzero().flatten().tolist()
    if padded:
        raise ValueError(
            f"the metric reads the logits at position {position}, which is padding in row"
            f" {padded[0]}: pass position= with an index for each row, such as"
            " attention_mask.sum(-1) - 1 for the last tokens of right-padded rows"
        )


def is_padded_in_front(mask: Tensor) -> bool:
    """Tell whether a row is left-padded.

    Masks on an accelerator are not read, and count as left-padded: reading would wait for all
    queued work.
    """
    before = (mask[:, 0] == 0) | (mask[:, 1:] > mask[:, :-1]).any(-1)
    return mask.device.type != "cpu" or bool(before.any())


def last_tokens(mask: Tensor) -> Tensor:
    """Return the index of the last real token of each row, ``[row]``.

    Args:
        mask: ``[row, token]``, 1 for tokens and 0 for padding.
    """
    return mask.shape[1] - 1 - mask.long().flip(-1).argmax(-1)


def mask_of_ends(tokens: Tensor, pad: int | None) -> Tensor | None:
    """Return the mask of rows that `to_tokens` padded at one end; None if no row is padded.

    Args:
        tokens: ``[row, token]``.
        pad: the padding token; None: there is none.
    """
    is_pad = tokens == (-1 if pad is None else pad)
    ends = is_pad.long().cumprod(-1) + is_pad.flip(-1).long().cumprod(-1).flip(-1)
    return (ends == 0).long() if bool(ends.any()) else None


def check_zero_or_one(name: str, mask: Tensor) -> None:
    """Reject a token mask that contains anything but 0 and 1.

    Integer masks on an accelerator are not read: that would wait for all queued work.

    Args:
        name: the argument's name.
        mask: ``[batch, pos]``.

    Raises:
        ValueError: it contains another value.
    """
    if mask.ndim != 2 or mask.dtype == torch.bool:
        return
    if mask.device.type != "cpu" and not mask.is_floating_point():
        return
    strange = mask[(mask != 0) & (mask != 1)]
    if strange.numel():
        raise ValueError(
            f"{name} holds {strange[0].item()}; it must be 1 for tokens and 0 for padding, nothing"
            " between"
        )


def check_said(tokens: Tensor, pad: int | None, endings: Collection[int | None]) -> None:
    """Reject tokens that contain padding without a mask, because the padding would count as tokens.

    Args:
        tokens: ``[row, token]``.
        pad: the padding token.
        endings: the end-of-text tokens; the padding token may be one of them.

    Raises:
        ValueError: the tokens contain padding.
    """
    if pad is not None and pad not in endings and bool((tokens == pad).any()):
        raise ValueError(
            f"the tokens hold the padding token {pad}, and nothing says whether it is padding: pass"
            " attention_mask [batch, pos], 1 for tokens and 0 for padding"
        )
