"""`HookedEncoder`: BERT on the bridge."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import BertConfig, BertForMaskedLM, BertForPreTraining

from adapters.points import base_path, core_path, join
from bridge.legacy.HookedTransformerConfig import ONLY_LOADED, HookedTransformerConfig
from bridge.legacy.loaded import WithoutProcessing
from bridge.run.inputs import Input
from bridge.run.tokenization import as_tokens, texts_in

_NAMES = {
    "hidden_size": "d_model", "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads",
    "intermediate_size": "d_mlp", "hidden_act": "act_fn", "vocab_size": "d_vocab", "layer_norm_eps": "eps",
    "max_position_embeddings": "n_ctx",
}  # fmt: skip
_FIXED = ONLY_LOADED | {"attn_only": False, "n_key_value_heads": None, "gated_mlp": False}
#: The parts of a HookedEncoder that are no blocks, by where their modules are: in BERT itself, or outside it.
_INSIDE = {"embed": "embeddings", "pooler": "pooler"}
_BESIDE = {"mlm_head": "cls.predictions.transform", "nsp_head": "cls.seq_relationship"}


class _WithItsHeads:
    """BERT with both of its heads where a checkpoint has both, and with the one for masked tokens otherwise."""

    @staticmethod
    def from_pretrained(name: str, **kwargs: Any) -> nn.Module:
        loaded: Any = BertForPreTraining.from_pretrained(name, output_loading_info=True, **kwargs)
        model: nn.Module = loaded[0]
        return BertForMaskedLM.from_pretrained(name, **kwargs) if loaded[1]["missing_keys"] else model


class HookedEncoder(WithoutProcessing):
    """A model that reads in both directions, such as BERT. There is no processing, as in HookedTransformer.

    Example:
        >>> from bridge.legacy import HookedEncoder
        >>> model = HookedEncoder({"n_layers": 1, "d_model": 8, "n_ctx": 5, "d_head": 4, "d_vocab": 9, "act_fn": "gelu",
        ...     "device": "cpu"})
        >>> model([[1, 2, 3]]).shape
        torch.Size([1, 3, 9])
    """

    loads = _WithItsHeads

    @classmethod
    def _model_of(cls, config: HookedTransformerConfig, move_to_device: bool) -> nn.Module:
        fields = cls._fields(config, _NAMES, _FIXED)
        if config.n_heads * config.d_head != config.d_model:
            raise ValueError(
                f"n_heads={config.n_heads} times d_head={config.d_head} is not d_model={config.d_model}, as in BERT"
            )
        made = BertConfig(**fields, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
        return cls._placed(BertForPreTraining(made), config, move_to_device)

    def to_tokens(  # type: ignore[override]
        self, input: str | Sequence[str], move_to_device: bool = True, truncate: bool = True
    ) -> tuple[Int[Tensor, "batch pos"], Int[Tensor, "batch pos"], Int[Tensor, "batch pos"]]:
        """Text as tokens, with what BERT takes in addition to them."""
        tokens, mask = self.tokens_and_mask(input, move_to_device, truncate)
        return tokens, torch.zeros_like(tokens), mask

    def encoder_output(
        self,
        tokens: Int[Tensor, "batch pos"],
        token_type_ids: Int[Tensor, "batch pos"] | None = None,
        one_zero_attention_mask: Int[Tensor, "batch pos"] | None = None,
    ) -> Float[Tensor, "batch pos d_model"]:
        """What the last block makes of tokens."""
        last = self.cfg.n_layers
        return self.forward(tokens, "logits", token_type_ids, one_zero_attention_mask, stop_at_layer=last)  # type: ignore[no-any-return]

    def forward(  # type: ignore[override]
        self,
        input: Input,
        return_type: str | None = "logits",
        token_type_ids: Int[Tensor, "batch pos"] | None = None,
        one_zero_attention_mask: Int[Tensor, "batch pos"] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Runs the model."""
        given = {"attention_mask": one_zero_attention_mask, "token_type_ids": token_type_ids}
        kwargs |= {name: value for name, value in given.items() if value is not None}
        if return_type != "predictions":
            return super().forward(input, return_type, **kwargs)
        mask_token = self.tokenizer_facts.tokenizer.mask_token_id
        if (texts := texts_in(input)) is not None:
            tokens, _, mask = self.to_tokens(texts)
            kwargs.setdefault("attention_mask", mask)
        else:
            tokens = as_tokens(input).to(self.cfg.device)
        logits = super().forward(tokens, **kwargs)
        words = [str(self.to_string(token)) for token in logits[tokens == mask_token].argmax(-1)]
        return "".join(words) if len(words) < 2 else [f"Prediction {i}: {word}" for i, word in enumerate(words)]

    def _paths(self) -> Iterator[tuple[str, str]]:
        yield from super()._paths()
        for start, below in ((base_path, _INSIDE), (core_path, _BESIDE)):
            yield from ((name, join(start(self.original_model), path)) for name, path in below.items())

    def call_part(self, name: str, *inputs: Any, **kwargs: Any) -> Tensor:
        """What a part of the model makes of tensors: also ``embed`` (of tokens and ``token_type_ids``, with positions
        and norm), ``pooler``, ``nsp_head`` and ``mlm_head``; see `HookedTransformer.call_part`."""
        if name not in (*_INSIDE, *_BESIDE):
            return super().call_part(name, *inputs, **kwargs)
        if name == "embed" and len(inputs) == 2:
            kwargs["token_type_ids"], inputs = inputs[1], inputs[:1]
        return self._called(self.module_of(name), *inputs, **kwargs)
