"""`HookedEncoderDecoder`: T5 on the bridge."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from bridge.bridge import TransformerBridge
from bridge.legacy.devices import get_device
from bridge.legacy.HookedTransformer import _copied, _type
from bridge.legacy.model_names import get_official_model_name
from bridge.runs import Input


class HookedEncoderDecoder(TransformerBridge):
    """A model with an encoder and a decoder, such as T5. There is no processing, as in HookedTransformer.

    Args:
        hf_model: the Hugging Face model.
        tokenizer: for text.

    Example:
        >>> from transformers import T5Config, T5ForConditionalGeneration
        >>> from bridge.legacy import HookedEncoderDecoder
        >>> config = T5Config(d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, vocab_size=9)
        >>> config.decoder_start_token_id = 0
        >>> model = HookedEncoderDecoder(T5ForConditionalGeneration(config).eval())
        >>> model([[1, 2, 3]], [[0, 4]]).shape
        torch.Size([1, 2, 9])
    """

    @classmethod
    def from_pretrained(
        cls,
        model_name: str,
        checkpoint_index: int | None = None,
        checkpoint_value: int | None = None,
        hf_model: nn.Module | None = None,
        device: torch.device | str | None = None,
        tokenizer: Any = None,
        move_to_device: bool = True,
        dtype: torch.dtype | str = torch.float32,
        **from_pretrained_kwargs: Any,
    ) -> Any:
        """Loads a model.

        Args:
            model_name, hf_model, device, tokenizer, move_to_device, dtype: as for `HookedTransformer.from_pretrained`.
            checkpoint_index, checkpoint_value: a training checkpoint.
            from_pretrained_kwargs: as for `TransformerBridge.boot_transformers`.
        """
        kind, target = _type(dtype), torch.device(device or get_device()) if move_to_device else None
        if hf_model is not None:
            loading: dict[str, Any] = {"hf_model": _copied(hf_model, False, kind, target)}
        else:
            loading = {
                "dtype": kind,
                "device": target,
                "checkpoint_index": checkpoint_index,
                "checkpoint_value": checkpoint_value,
            }
        name = get_official_model_name(model_name)
        return cls.boot_transformers(name, tokenizer=tokenizer, **loading, **from_pretrained_kwargs)

    def forward(  # type: ignore[override]
        self,
        input: Input,
        decoder_input: Int[Tensor, "batch decoder_pos"] | list[list[int]] | None = None,
        return_type: str | None = "logits",
        one_zero_attention_mask: Int[Tensor, "batch pos"] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Runs the model.

        Args:
            input: the encoder's: text, texts, or tokens.
            decoder_input: the decoder's tokens; None: its start token alone.
            return_type: ``"logits"`` ``[batch, decoder_pos, d_vocab]``, or None, and what `TransformerBridge.forward`
                takes besides.
            one_zero_attention_mask: 1 for tokens and 0 for padding.
            kwargs: as for `TransformerBridge.forward`.
        """
        if decoder_input is not None:
            kwargs["decoder_input_ids"] = torch.as_tensor(decoder_input, device=self.cfg.device)
        if one_zero_attention_mask is not None:
            kwargs["attention_mask"] = one_zero_attention_mask
        return super().forward(input, return_type, **kwargs)

    def run_with_cache(self, input: Input, *model_args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """`TransformerBridge.run_with_cache`, with `forward`'s arguments in its order."""
        return super().run_with_cache(input, **_named(model_args), **kwargs)

    def run_with_hooks(self, input: Input, *model_args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """`TransformerBridge.run_with_hooks`, with `forward`'s arguments in its order."""
        return super().run_with_hooks(input, **_named(model_args), **kwargs)


def _named(model_args: tuple[Any, ...]) -> dict[str, Any]:
    return dict(zip(("decoder_input", "return_type", "one_zero_attention_mask"), model_args, strict=False))
