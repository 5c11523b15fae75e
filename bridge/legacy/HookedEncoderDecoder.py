"""`HookedEncoderDecoder`: T5 on the bridge."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn
from transformers import T5Config, T5ForConditionalGeneration

from bridge.legacy.HookedTransformerConfig import ONLY_LOADED, HookedTransformerConfig
from bridge.legacy.loaded import WithoutProcessing
from bridge.run.inputs import Input

_NAMES = {
    "d_model": "d_model", "d_kv": "d_head", "d_ff": "d_mlp", "num_layers": "n_layers", "num_heads": "n_heads",
    "vocab_size": "d_vocab", "layer_norm_epsilon": "eps", "tie_word_embeddings": "tie_word_embeddings",
}  # fmt: skip
_FIXED = {
    name: value for name, value in ONLY_LOADED.items() if not name.startswith("relative_attention")
} | {"attn_only": False, "n_key_value_heads": None}  # fmt: skip


class HookedEncoderDecoder(WithoutProcessing):
    """A model with an encoder and a decoder, such as T5. There is no processing, as in HookedTransformer.

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
    def _model_of(cls, config: HookedTransformerConfig, move_to_device: bool) -> nn.Module:
        fields = cls._fields(config, _NAMES, _FIXED)
        for name in ("relative_attention_num_buckets", "relative_attention_max_distance"):
            if getattr(config, name) is not None:
                fields[name] = getattr(config, name)
        start = 0 if config.decoder_start_token_id is None else config.decoder_start_token_id
        kind = f"gated-{config.act_fn}" if config.gated_mlp else config.act_fn
        fields |= {"feed_forward_proj": kind, "decoder_start_token_id": start, "dropout_rate": 0.0}
        return cls._placed(T5ForConditionalGeneration(T5Config(**fields)), config, move_to_device)

    def to_tokens(  # type: ignore[override]
        self, input: str | Sequence[str], move_to_device: bool = True, truncate: bool = True
    ) -> tuple[Int[Tensor, "batch pos"], Int[Tensor, "batch pos"]]:
        """Text as the encoder's tokens, and their mask."""
        return self.tokens_and_mask(input, move_to_device, truncate)

    def forward(  # type: ignore[override]
        self,
        input: Input,
        decoder_input: Int[Tensor, "batch decoder_pos"] | list[list[int]] | None = None,
        return_type: str | None = "logits",
        one_zero_attention_mask: Int[Tensor, "batch pos"] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Runs the model."""
        if decoder_input is not None:
            kwargs["decoder_input_ids"] = torch.as_tensor(decoder_input, device=self.cfg.device)
        if one_zero_attention_mask is not None:
            kwargs["attention_mask"] = one_zero_attention_mask
        return super().forward(input, return_type, **kwargs)

    def generate(  # type: ignore[override]
        self,
        input: Input = "",
        one_zero_attention_mask: Int[Tensor, "batch pos"] | None = None,
        max_new_tokens: int = 10,
        **more: Any,
    ) -> Any:
        """What the decoder answers, by the model's own `generate`; `more` is as for `HookedTransformer.generate`."""
        if one_zero_attention_mask is not None:
            more["attention_mask"] = one_zero_attention_mask
        return super().generate(input, max_new_tokens, **more)

    def _stack(self, part: str, name: str) -> Tensor:
        return torch.stack([getattr(getattr(block, part), name) for block in (*self.encoder, *self.decoder)])

    def call_part(self, name: str, *inputs: Any, **kwargs: Any) -> Tensor:
        """What a part of the model makes of tensors. Hooks inside of it act."""
        last, module = name.rpartition(".")[2], self.module_of(name)
        if last.isdigit() and "resid_pre" in kwargs:
            inputs = (kwargs.pop("resid_pre"), *inputs)
        x = inputs[0]
        if last in ("attn", "cross_attn"):
            reads = inputs if last == "attn" else inputs[1:]
            if not reads or any(not torch.equal(other, reads[0]) for other in reads):
                raise TypeError(f"keys and values of {name} read one tensor, and in attn queries do too")
            if last == "cross_attn":
                kwargs["key_value_states"] = reads[0]
            inputs = inputs[:1]
        if name.startswith("decoder.") and (last == "attn" or last.isdigit()):
            n = x.shape[1]
            mask = torch.full((n, n), torch.finfo(x.dtype).min, dtype=x.dtype, device=x.device).triu(1)[None, None]
            kwargs["mask" if last == "attn" else "attention_mask"] = mask
        return self._called(module, *inputs, **kwargs)
