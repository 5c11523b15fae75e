"""`HookedEncoder`: BERT on the bridge."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from bridge.inputs import as_tokens
from bridge.legacy.HookedTransformer import HookedTransformer
from bridge.runs import Input


class HookedEncoder(HookedTransformer):
    """A model that reads in both directions, such as BERT. There is no processing, as in HookedTransformer.

    Example:
        >>> from transformers import BertConfig, BertForMaskedLM
        >>> from bridge.legacy import HookedEncoder
        >>> config = BertConfig(
        ...     hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, vocab_size=9
        ... )
        >>> model = HookedEncoder(BertForMaskedLM(config).eval())
        >>> model([[1, 2, 3]]).shape
        torch.Size([1, 3, 9])
    """

    @classmethod
    def from_pretrained(  # type: ignore[override]
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
        """Loads a model, with its head for masked tokens.

        Args:
            model_name, checkpoint_index, checkpoint_value, hf_model, device, tokenizer, move_to_device, dtype,
                from_pretrained_kwargs: as for `HookedTransformer.from_pretrained`.
        """
        if hf_model is None:
            from transformers import AutoModelForMaskedLM

            from_pretrained_kwargs.setdefault("model_class", AutoModelForMaskedLM)
        return super().from_pretrained(
            model_name,
            fold_ln=False,
            center_writing_weights=False,
            center_unembed=False,
            fold_value_biases=False,
            dtype=dtype,
            checkpoint_index=checkpoint_index,
            checkpoint_value=checkpoint_value,
            hf_model=hf_model,
            device=device,
            tokenizer=tokenizer,
            move_to_device=move_to_device,
            **from_pretrained_kwargs,
        )

    def forward(  # type: ignore[override]
        self,
        input: Input,
        return_type: str | None = "logits",
        token_type_ids: Int[Tensor, "batch pos"] | None = None,
        one_zero_attention_mask: Int[Tensor, "batch pos"] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Runs the model.

        Args:
            input: text, texts, tokens or embeddings.
            return_type: ``"logits"``, ``"predictions"`` (the likeliest token for each mask), or None.
            token_type_ids: which of two texts each token belongs to.
            one_zero_attention_mask: 1 for tokens and 0 for padding.
            kwargs: as for `HookedTransformer.forward`.
        """
        if one_zero_attention_mask is not None:
            kwargs["attention_mask"] = one_zero_attention_mask
        if token_type_ids is not None:
            kwargs["token_type_ids"] = token_type_ids
        if return_type != "predictions":
            return super().forward(input, return_type, **kwargs)
        if isinstance(input, str) or (isinstance(input, list) and isinstance(input[0], str)):
            batch = self.batch_of([input] if isinstance(input, str) else input)
            tokens = batch.tokens.to(self.cfg.device)
            kwargs.setdefault("attention_mask", batch.mask)
        else:
            tokens = as_tokens(input).to(self.cfg.device)
        logits = super().forward(tokens, **kwargs)
        mask = self.tokenizer_facts.tokenizer.mask_token_id
        texts = [
            " ".join(str(self.to_string(token)) for token in row[tokens_of_row == mask])
            for row, tokens_of_row in zip(logits.argmax(-1), tokens, strict=True)
        ]
        return texts[0] if len(texts) == 1 else texts
