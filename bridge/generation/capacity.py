"""How many requests are generated together: pages of keys and values, tokens of one pass, from model and memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedModel
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from bridge.run.memory import free_memory

#: Tokens of a page: small pages waste little on short requests.
_PAGE = 16
#: Tokens of a pass where the prompts are shorter: on a processor a longer pass was slower, for its mask is square.
_TOKENS, _TOKENS_ELSEWHERE = 512, 4096
#: What keys and values, and the masks, may take of the memory that is free.
_SHARE = 0.5


@dataclass(frozen=True)
class Capacity:
    """What there is room for at once.

    Attributes:
        tokens: of one pass.
        pages: of keys and values.
        page: the tokens of a page.
    """

    tokens: int
    pages: int
    page: int

    def pages_of(self, prompt: int, new: int) -> int:
        """The pages that a request needs, with one to spare for windows, whose pages are counted by themselves."""
        return -(-(prompt + new) // self.page) + 1

    def fits(self, prompt: int, new: int) -> bool:
        """Whether a request fits alone."""
        return prompt <= self.tokens and self.pages_of(prompt, new) <= self.pages

    def config(self, requests: int) -> ContinuousBatchingConfig:
        """The same for transformers, with what hooks need: a forward pass in each step, pages of each request alone.

        Args:
            requests: how many there are.
        """
        return ContinuousBatchingConfig(
            page_size=self.page,
            num_blocks=self.pages,
            max_batch_tokens=self.tokens,
            max_requests_per_batch=min(requests, self.tokens),
            max_blocks_per_request=0,
            allow_block_sharing=False,  # keys and values behind an edit are those of its request
            use_cuda_graph=False,  # a replayed graph calls no hook
            use_async_batching=False,  # which requests a pass holds would be told of the next one
            auto_switch_to_flash=False,  # the values are those of the kernel that the model was loaded with
            drop_unsupported_processors=False,  # refused by name in place of being left out
            safety_margin=0.0,  # no request is let in that does not fit
        )


def capacity_for(model: PreTrainedModel, prompts: Sequence[int], new: int, free: int | None = None) -> Capacity:
    """What there is room for.

    Args:
        model: the model.
        prompts: the lengths of the prompts.
        new: the new tokens of each.
        free: bytes of memory; None: those that are free on the model's device.

    Raises:
        ValueError: the memory that is free does not hold the longest request alone.
    """
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    item = model.dtype.itemsize
    page = 2 * config.num_hidden_layers * heads * width * _PAGE * item
    longest = max(prompts)
    most = _TOKENS if model.device.type == "cpu" else _TOKENS_ELSEWHERE
    tokens = max(longest, min(sum(prompts), most), min(len(prompts), most))
    mask = 2 * tokens * item * _PAGE  # for each page: the masks of full and of windowed attention
    wanted = sum(Capacity(tokens, 0, _PAGE).pages_of(length, new) for length in prompts)
    free = int(_SHARE * (free_memory(model.device) if free is None else free)) - 2 * tokens * tokens * item
    pages = min(wanted, max(0, free) // (page + mask))
    room = Capacity(tokens, pages, _PAGE)
    if not room.fits(longest, new):
        raise ValueError(
            f"the longest prompt has {longest} tokens, and with {new} new ones it needs "
            f"{room.pages_of(longest, new) * (page + mask) / 2**20:.0f} MiB of keys, values and masks; "
            f"{max(0, free) / 2**20:.0f} MiB may be taken of what is free on {model.device}: generate fewer tokens, or "
            "one by one with bridge.generate"
        )
    return room
