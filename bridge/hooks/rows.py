"""How the rows of a batch lie: along each axis where padding is, which arguments go along it, whose row is whose.

Whatever speaks of positions asks here: runs, generation and what records it, operations, caches, batches of requests.
Padding may be moved where a model allows it: in front of a decoder's tokens, behind an encoder's. What a model makes
itself (the tokens of a decoder) is left to it, and what cannot be right is refused.
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

#: Where padding may stand.
Side = Literal["left", "right"]
#: Arguments of Hugging Face's models whose second axis is that of the tokens (of `position_ids` the last).
_ALONG_TOKENS = frozenset((
    "input_ids", "inputs_embeds", "attention_mask", "token_type_ids", "mm_token_type_ids", "position_ids", "langs",
    "bbox", "image_attention_mask", "cross_attention_mask", "image_embeds_position_mask", "global_attention_mask",
    "visual_pos_masks", "images_seq_mask", "vision_mask", "inputs_mask", "input_type_ids",
))  # fmt: skip
#: Arguments that have an entry for each row, and that any layer is given.
OF_ROWS = ("attention_mask", "adapter_names")
#: What rows are counted by, the surest first.
_ROWS_OF = ("input_ids", "inputs_embeds", "decoder_input_ids", "decoder_inputs_embeds")
#: Methods of models that put padding behind their rows themselves; else what is added is a learned prompt, in front.
_LENGTHENS = ("_pad_to_window_size", "_pad_to_mult_of_chunk_length")


def token_axis(axis: str) -> str:
    """The axis of tokens (or frames) that an axis of an activation goes along: of keys, that of their tokens."""
    return axis.replace("key_pos", "pos")


class BatchRows:
    """How the rows of one batch lie.

    Args:
        core: the model, without what wraps it.
        arguments: what it is called with, by name.

    Attributes:
        count: how many rows there are; 0: that is not known.
        masks: for an axis (``"pos"``, in an encoder-decoder that of the encoder; ``"decoder_pos"``) what is padding,
            ``[row, token]``, 1 for tokens and 0 for padding; for sound, of its samples. An axis that is not here has
            none.
        growing: the axis along which a generation adds tokens.
        order: where each token stood before padding was moved, ``[row, token]``; None: where it is.

    Example:
        >>> import torch, transformers
        >>> from bridge.hooks.rows import BatchRows
        >>> model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=10))
        >>> tokens, mask = torch.tensor([[5, 6, 7], [5, 6, 0]]), torch.tensor([[1, 1, 1], [1, 1, 0]])
        >>> given = {"input_ids": tokens, "attention_mask": mask}
        >>> rows = BatchRows(model, given)
        >>> rows.arrange(given, "left")
        >>> given["input_ids"].tolist(), rows.before
        ([[5, 6, 7], [0, 5, 6]], [0, 1])
    """

    __slots__ = ("_untold", "before", "core", "count", "growing", "masks", "order")

    def __init__(self, core: nn.Module, arguments: Mapping[str, Any]) -> None:
        self.core = core
        config = getattr(core, "config", None)  # a plain module, which is called as it is, has none
        self.growing = "decoder_pos" if getattr(config, "is_encoder_decoder", False) else "pos"
        self.masks: dict[str, Tensor] = {}
        self._untold: set[str] = set()
        self.order: Tensor | None = None
        names = (takes(core).main, *_ROWS_OF, "input_values", "input_features", "pixel_values")
        given = next((x for name in names if isinstance(x := arguments.get(name or ""), Tensor) and x.ndim), None)
        self.count = 0 if given is None else int(given.shape[0])
        self.before: list[int] = [0] * self.count
        self.note(arguments)

    def note(self, arguments: Mapping[str, Any]) -> None:
        """Notes the masks of padding among a model's arguments."""
        for axis, name in (("pos", "attention_mask"), ("decoder_pos", "decoder_attention_mask")):
            mask = arguments.get(name)
            if isinstance(mask, Tensor) and mask.ndim == 2:
                self.masks[axis] = mask
            elif mask is not None:
                self._untold.add(axis)  # which query sees which key

    def arrange(self, arguments: MutableMapping[str, Any], side: Side) -> None:
        """Moves tokens, and all that goes along them, so that padding stands on one side of each row.

        Args:
            arguments: of the model; what is moved is replaced.
            side: where padding is to be.

        Raises:
            ValueError: there may be something among them that would have to move with the tokens.
        """
        mask = self.masks.get("pos")
        if mask is None:
            return
        # A stable sort by the mask keeps the tokens' order, and that of the padding.
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
        """Whether an argument goes along the tokens.

        Raises:
            ValueError: it looks as if it did, and nobody knows.
        """
        assert self.order is not None
        if not isinstance(value, Tensor) or value.ndim < 2:
            return False
        if name in _ALONG_TOKENS:
            return tuple(value.shape[-2:] if name == "position_ids" else value.shape[:2]) == tuple(self.order.shape)
        if tuple(value.shape[:2]) == tuple(self.order.shape) and not name.startswith(
            (*OF_IMAGES_AND_SOUND, "decoder_", "encoder_")
        ):
            raise ValueError(
                f"padding has to be moved to the other side of each row here, and {name} has the shape of the tokens: "
                "whether it goes along them is not known. Pad on the other side yourself, or give rows of one length"
            )
        return False

    def _moved(self, value: Tensor) -> Tensor:
        assert self.order is not None
        order = self.order.to(value.device)
        if value.ndim == 3 and value.shape[-2:] == order.shape and value.shape[:2] != order.shape:
            return value.gather(-1, order.expand(value.shape))  # position_ids of several axes
        return torch.take_along_dim(value, order.reshape(*order.shape, *(1 for _ in value.shape[2:])), 1)

    def repeated(self, value: Tensor, rows: int) -> Tensor:
        """What has an entry for each row as it is where rows are repeated: beams, returned sequences.

        Args:
            value: ``[row, ...]``.
            rows: how many rows there are in the end.
        """
        copies = rows // value.shape[0] if value.shape[0] and rows % value.shape[0] == 0 else 1
        return value if copies == 1 else value.repeat_interleave(copies, 0)

    def real(self, axis: str, length: int, rows: int) -> Tensor | None:
        """Which entries along an axis of an activation are no padding, ``[rows, length]``; None: all of them are none.

        Args:
            axis: the name of the axis.
            length: how many entries it has.
            rows: how many rows the activation has.

        Raises:
            ValueError: the mask is of something else, and nothing says what that makes of these entries.
        """
        mask = self.masks.get(token_axis(axis))
        if mask is None and token_axis(axis) in self._untold:
            raise ValueError(
                "positions are not known here: the mask that was given says which query sees which key, not which "
                "tokens are padding. Run each row alone, without padding and mask, or pass attention_mask [batch, pos]"
            )
        if mask is None or bool(mask.all()):
            return None
        if mask.shape[1] != length:
            mask = self._of_frames(mask, length)
        return self.repeated(mask.bool(), rows)

    def _of_frames(self, mask: Tensor, length: int) -> Tensor:
        """A mask of samples as one of the frames that are made of them; of tokens, with what the model itself adds."""
        added = length - mask.shape[1]
        if takes(self.core).main is None and added > 0:
            behind = any(hasattr(module, name) for module in self.core.modules() for name in _LENGTHENS)
            return nn.functional.pad(mask, (0, added) if behind else (added, 0), value=int(not behind))
        lengths = mask.long().sum(-1)
        behind = torch.equal(mask.long(), (torch.arange(mask.shape[1], device=mask.device) < lengths[:, None]).long())
        full = torch.full_like(lengths, mask.shape[1])
        for counts in _counts_of_frames(self.core) if behind else ():
            if bool((counts(full) == length).all()):
                return (torch.arange(length, device=mask.device) < counts(lengths)[:, None]).long()
        raise ValueError(
            f"positions are not known here: attention_mask has {mask.shape[1]} entries, the activation {length}, and "
            f"{type(self.core).__name__} does not say which of these are padding. Run each row alone, without padding"
        )

    def stripped(self, sequences: Tensor) -> list[Tensor]:
        """Each sequence of a generation without the padding in front of it."""
        if not any(self.before):
            return list(sequences)
        copies = len(sequences) // self.count
        return [row[self.before[i // copies] :] for i, row in enumerate(sequences)]

    def padded_behind(self, sequences: Tensor) -> Tensor:
        """The sequences of a generation, with the padding that stands in front of each behind it."""
        return self.given_back(sequences, ["batch", self.growing], behind=True)

    def given_back(self, activation: Tensor, axes: Sequence[str], behind: bool) -> Tensor:
        """An activation with each token where the user has it.

        Args:
            activation: of the rows as they are.
            axes: the names of its axes.
            behind: the user has the padding of the sequences that grow behind them.
        """
        if axes[0] != "batch":
            return activation
        for number, axis in enumerate(axes):
            length, kind = activation.shape[number], token_axis(axis)
            places = torch.arange(length, device=activation.device)
            if kind == self.growing and behind and any(self.before):
                index = (places + torch.tensor(self.before, device=activation.device)[:, None]) % length
            elif kind == "pos" != self.growing and self.order is not None:
                index = torch.cat(
                    [self.order.to(places.device).argsort(-1), places[self.order.shape[1] :].expand(self.count, -1)], 1
                )
            else:
                continue
            index = self.repeated(index, activation.shape[0])
            shape = [1] * activation.ndim
            shape[0], shape[number] = index.shape
            activation = torch.take_along_dim(activation, index.reshape(shape), number)
        return activation


def _counts_of_frames(core: nn.Module) -> Iterator[Any]:
    """Functions from numbers of samples to numbers of frames that a model has, for its first layers and its last."""
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


# ----------------------------------------------------------------------------------------------------------------------
# Places among the tokens of a row, as a model counts them.
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PositionCounting:
    """How a model counts places.

    Attributes:
        padding: the position of padding in a model that counts from there on (RoBERTa); else None.
        first: the position of the first token in a model whose own positions say so (Nyströmformer's begin at 2).
    """

    padding: int | None = None
    first: Tensor | None = None

    @classmethod
    def of(cls, model: nn.Module, core: nn.Module, block_paths: Sequence[str]) -> PositionCounting:
        """How a model counts places, from its embeddings.

        Args:
            model, core: the model, with what wraps it and without.
            block_paths: where its blocks are.
        """
        name = "create_position_ids_from_input_ids"
        for module in around_blocks(model, core, block_paths):
            index = None if isinstance(module, nn.Embedding) else getattr(module, "padding_idx", None)
            if index is not None and (
                hasattr(module, name) or name in inspect.unwrap(type(module).forward).__globals__
            ):
                return cls(padding=int(index))
            own = module._buffers.get("position_ids")
            if own is not None and own.numel():
                return cls(first=own.flatten()[0])
        return cls()

    def places(self, mask: Tensor) -> Tensor:
        """Each token's place among the tokens of its row; padding behind keeps its place in the row.

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


def around_blocks(model: nn.Module, core: nn.Module, block_paths: Sequence[str]) -> Iterator[nn.Module]:
    """A model's modules but for those inside of its lists of blocks, which are nearly all of them.

    Looked for in each run: a user may exchange an embedding between two, or wrap the model.
    """
    lists = {module_path(path).rpartition(".")[0] for path in block_paths}
    left_out = {module_at(model, path) for path in lists if path}
    waiting: list[nn.Module] = [core]
    while waiting:
        yield (module := waiting.pop())
        inside = [child for child in module._modules.values() if child is not None]
        waiting += [child for child in reversed(inside) if not (isinstance(child, nn.ModuleList) and child in left_out)]


def tiled(arguments: Mapping[str, Any], times: int) -> dict[str, Any]:
    """A model's arguments for a batch in which all rows come several times, one batch behind the other.

    Images and sound lie in the order of the rows that they belong to, so the same holds for them, whatever one is.

    Args:
        arguments: by name.
        times: how many times.
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
    """Where each row has a position, counted among its own tokens, ``[row]``.

    Args:
        mask: ``[row, token]``, 1 for tokens and 0 for padding; None: no padding.
        position: from the front, or, if negative, from the end.
        shape: rows and tokens.

    Raises:
        ValueError: a row has no such position.
    """
    real = torch.ones(tuple(shape[:2]), dtype=torch.bool) if mask is None else mask.bool().cpu()
    size = real.sum(-1)
    if not bool(((size > position) & (size >= -position)).all()):
        raise ValueError(f"position is {position}, and the shortest prompt has {int(size.min())} tokens")
    wanted = position if position >= 0 else size[:, None] + position
    return ((real.cumsum(-1) - 1 == wanted) & real).long().argmax(-1)


def is_padded_in_front(mask: Tensor) -> bool:
    """Whether padding stands before a token of a row.

    What is in the memory of an accelerator is not looked at, and may be: that would wait for all that is under way.
    """
    before = (mask[:, 0] == 0) | (mask[:, 1:] > mask[:, :-1]).any(-1)
    return mask.device.type != "cpu" or bool(before.any())


def last_tokens(mask: Tensor) -> Tensor:
    """Where the last token of each row stands, ``[row]``.

    Args:
        mask: ``[row, token]``, 1 for tokens and 0 for padding.
    """
    return mask.shape[1] - 1 - mask.long().flip(-1).argmax(-1)


def mask_of_ends(tokens: Tensor, pad: int | None) -> Tensor | None:
    """What is padding where `to_tokens` made rows one length: padding tokens at an end of a row; None: none is there.

    Args:
        tokens: ``[row, token]``.
        pad: the padding token; None: there is none.
    """
    is_pad = tokens == (-1 if pad is None else pad)
    ends = is_pad.long().cumprod(-1) + is_pad.flip(-1).long().cumprod(-1).flip(-1)
    return (ends == 0).long() if bool(ends.any()) else None


def check_zero_or_one(name: str, mask: Tensor) -> None:
    """Refuses a mask of tokens that holds anything but 0 and 1.

    Whole numbers in the memory of an accelerator are not looked at: that would wait for everything under way there.

    Args:
        name: of the argument.
        mask: ``[batch, pos]``.

    Raises:
        ValueError: it holds something else.
    """
    if mask.ndim != 2 or mask.dtype == torch.bool or not (mask.device.type == "cpu" or mask.is_floating_point()):
        return
    strange = mask[(mask != 0) & (mask != 1)]
    if strange.numel():
        raise ValueError(
            f"{name} holds {strange[0].item()}; it must be 1 for tokens and 0 for padding, nothing between"
        )


def check_said(tokens: Tensor, pad: int | None, endings: Collection[int | None]) -> None:
    """Refuses tokens that hold padding where nothing says that they are padding: all of them count.

    Args:
        tokens: ``[row, token]``.
        pad: the padding token.
        endings: what ends a text, which may be the same token.

    Raises:
        ValueError: there are such.
    """
    if pad is not None and pad not in endings and bool((tokens == pad).any()):
        raise ValueError(
            f"the tokens hold the padding token {pad}, and nothing says whether it is padding: pass attention_mask "
            "[batch, pos], 1 for tokens and 0 for padding"
        )
