"""`HookedEncoder`: BERT on the bridge."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForPreTraining,
    T5Config,
    T5ForConditionalGeneration,
)

from adapters.points import base_path, core_path, join
from bridge.legacy.hook_points import Device
from bridge.legacy.HookedTransformerConfig import ONLY_LOADED, HookedTransformerConfig
from bridge.legacy.running import LegacyModel, Made
from bridge.run.inputs import Input
from bridge.run.parts import called
from bridge.run.tokenization import Text, Texts, as_tokens, texts_in

#: Tokens, or a number per token.
Ids = Int[Tensor, "batch pos"]
_BERT_NAMES = {
    "hidden_size": "d_model",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "intermediate_size": "d_mlp",
    "hidden_act": "act_fn",
    "vocab_size": "d_vocab",
    "layer_norm_eps": "eps",
    "max_position_embeddings": "n_ctx",
}
_BERT_FIXED = ONLY_LOADED | {"attn_only": False, "n_key_value_heads": None, "gated_mlp": False}
#: The parts of a HookedEncoder outside its blocks, by the location of their modules: inside BERT
#: itself, or outside.
_INSIDE = {"embed": "embeddings", "pooler": "pooler"}
_BESIDE = {"mlm_head": "cls.predictions.transform", "nsp_head": "cls.seq_relationship"}


class _WithoutProcessing(LegacyModel):
    """The base of `HookedEncoder` and `HookedEncoderDecoder`: no processing, and the tokenizer is
    used unchanged.

    Args:
        cfg: a `HookedTransformerConfig` or its fields, for a model with random weights; or a
            Hugging Face model, which is wrapped unchanged.
        tokenizer: the tokenizer for text, which is never modified. None: the one that
            ``cfg.tokenizer_name`` names.
        move_to_device: move a new model to ``cfg.device``.
    """

    #: The class to load; None: the configuration's architecture.
    loads: Any = None

    def __init__(self, cfg: Made, tokenizer: Any = None, move_to_device: bool = True) -> None:
        model, tokenizer = self._make(cfg, tokenizer, move_to_device)
        super().__init__(model)
        self.tokenizer = tokenizer
        if tokenizer is not None:
            self.cfg.tokenizer_name = getattr(tokenizer, "name_or_path", None) or None

    @classmethod
    def from_pretrained(
        cls,
        model_name: str,
        checkpoint_index: int | None = None,
        checkpoint_value: int | None = None,
        hf_model: nn.Module | None = None,
        device: Device = None,
        tokenizer: Any = None,
        move_to_device: bool = True,
        dtype: torch.dtype | str = torch.float32,
        **from_pretrained_kwargs: Any,
    ) -> Any:
        """Load a model."""
        if hf_model is None and cls.loads is not None:
            from_pretrained_kwargs.setdefault("model_class", cls.loads)
        return cls._load(
            model_name,
            hf_model=hf_model,
            tokenizer=tokenizer,
            device=device,
            move_to_device=move_to_device,
            dtype=dtype,
            passed_on=from_pretrained_kwargs,
            checkpoint_index=checkpoint_index,
            checkpoint_value=checkpoint_value,
        )

    @classmethod
    def _fields(
        cls, config: HookedTransformerConfig, names: Mapping[str, str], fixed: Mapping[str, Any]
    ) -> Any:
        """Return the fields of a configuration under Hugging Face's names."""
        if config.d_vocab_out not in (config.d_vocab, -1, 0):
            raise ValueError(
                f"d_vocab_out is {config.d_vocab_out}; {cls.__name__} has as many as d_vocab"
            )
        for name, allowed in fixed.items():
            value = getattr(config, name)
            if value != allowed:
                raise ValueError(
                    f"{name} is {value!r}; in a {cls.__name__} it can only be {allowed!r}"
                )
        return {theirs: getattr(config, ours) for theirs, ours in names.items()}

    @staticmethod
    def _placed(
        model: nn.Module, config: HookedTransformerConfig, move_to_device: bool
    ) -> nn.Module:
        device = config.device if move_to_device else "cpu"
        return model.eval().to(config.dtype).to(device)

    def tokens_and_mask(
        self, input: Texts, move_to_device: bool, truncate: bool
    ) -> tuple[Ids, Ids]:
        """Convert text to tokens, and return them with their attention mask."""
        longest = self.cfg.n_ctx if truncate else sys.maxsize
        batch = self.batch_of(texts_in(input) or cast("Sequence[Text]", input), longest=longest)
        mask = torch.ones_like(batch.tokens) if batch.mask is None else batch.mask
        device = self.cfg.device if move_to_device else "cpu"
        return batch.tokens.to(device), mask.to(device)


class _WithItsHeads:
    """BERT with both heads if the checkpoint has both, otherwise with the one for masked tokens."""

    @staticmethod
    def from_pretrained(name: str, **kwargs: Any) -> nn.Module:
        loaded: Any = BertForPreTraining.from_pretrained(name, output_loading_info=True, **kwargs)
        model, info = loaded
        if info["missing_keys"]:
            return BertForMaskedLM.from_pretrained(name, **kwargs)
        return model  # type: ignore[no-any-return]


class HookedEncoder(_WithoutProcessing):
    """A bidirectional model such as BERT. Weights are not processed, as in HookedTransformer.

    Example:
        >>> from bridge.legacy import HookedEncoder
        >>> model = HookedEncoder(
        ...     {
        ...         "n_layers": 1,
        ...         "d_model": 8,
        ...         "n_ctx": 5,
        ...         "d_head": 4,
        ...         "d_vocab": 9,
        ...         "act_fn": "gelu",
        ...         "device": "cpu",
        ...     }
        ... )
        >>> model([[1, 2, 3]]).shape
        torch.Size([1, 3, 9])
    """

    loads = _WithItsHeads
    parts_of_blocks = "attn ln1 mlp ln2"

    @classmethod
    def _model_of(cls, config: HookedTransformerConfig, move_to_device: bool) -> nn.Module:
        fields = cls._fields(config, _BERT_NAMES, _BERT_FIXED)
        if config.n_heads * config.d_head != config.d_model:
            raise ValueError(
                f"n_heads={config.n_heads} times d_head={config.d_head} is not"
                f" d_model={config.d_model}, as in BERT"
            )
        bert = BertConfig(**fields, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
        return cls._placed(BertForPreTraining(bert), config, move_to_device)

    def to_tokens(  # type: ignore[override]
        self, input: Texts, move_to_device: bool = True, truncate: bool = True
    ) -> tuple[Ids, Ids, Ids]:
        """Convert text to tokens, and return them with BERT's further inputs."""
        tokens, mask = self.tokens_and_mask(input, move_to_device, truncate)
        return tokens, torch.zeros_like(tokens), mask

    def encoder_output(
        self,
        tokens: Ids,
        token_type_ids: Ids | None = None,
        one_zero_attention_mask: Ids | None = None,
    ) -> Float[Tensor, "batch pos d_model"]:
        """Return the output of the last block."""
        last = self.cfg.n_layers
        return self.forward(
            tokens, "logits", token_type_ids, one_zero_attention_mask, stop_at_layer=last
        )  # type: ignore[no-any-return]

    def forward(  # type: ignore[override]
        self,
        input: Input,
        return_type: str | None = "logits",
        token_type_ids: Ids | None = None,
        one_zero_attention_mask: Ids | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run the model."""
        if one_zero_attention_mask is not None:
            kwargs["attention_mask"] = one_zero_attention_mask
        if token_type_ids is not None:
            kwargs["token_type_ids"] = token_type_ids
        if return_type != "predictions":
            return super().forward(input, return_type, **kwargs)
        mask_token = self.tokenizer_facts.tokenizer.mask_token_id
        texts = texts_in(input)
        if texts is not None:
            tokens, _, mask = self.to_tokens(texts)
            kwargs.setdefault("attention_mask", mask)
        else:
            tokens = as_tokens(input).to(self.cfg.device)
        logits = super().forward(tokens, **kwargs)
        predicted = logits[tokens == mask_token].argmax(-1)
        words = [str(self.to_string(token)) for token in predicted]
        if len(words) < 2:
            return "".join(words)
        return [f"Prediction {i}: {word}" for i, word in enumerate(words)]

    def _paths(self) -> Iterator[tuple[str, str]]:
        yield from super()._paths()
        base, core = base_path(self.original_model), core_path(self.original_model)
        for name, path in _INSIDE.items():
            yield name, join(base, path)
        for name, path in _BESIDE.items():
            yield name, join(core, path)

    def call_part(self, name: str, *inputs: Any, **kwargs: Any) -> Tensor:
        """Call a part of the model: also ``embed`` (tokens and ``token_type_ids``, with positions
        and norm), ``pooler``, ``nsp_head`` and ``mlm_head``; see `HookedTransformer.call_part`.
        """
        if name not in (*_INSIDE, *_BESIDE):
            return super().call_part(name, *inputs, **kwargs)
        if name == "embed" and len(inputs) == 2:
            kwargs["token_type_ids"], inputs = inputs[1], inputs[:1]
        return called(self.module_of(name), *inputs, **kwargs)


# --------------------------------------------------------------------------------------------------
# `HookedEncoderDecoder`: T5 on the bridge.
# --------------------------------------------------------------------------------------------------


_T5_NAMES = {
    "d_model": "d_model",
    "d_kv": "d_head",
    "d_ff": "d_mlp",
    "num_layers": "n_layers",
    "num_heads": "n_heads",
    "vocab_size": "d_vocab",
    "layer_norm_epsilon": "eps",
    "tie_word_embeddings": "tie_word_embeddings",
}
_T5_RELATIVE = ("relative_attention_num_buckets", "relative_attention_max_distance")
_T5_FIXED = {name: value for name, value in ONLY_LOADED.items() if name not in _T5_RELATIVE}
_T5_FIXED |= {"attn_only": False, "n_key_value_heads": None}


class HookedEncoderDecoder(_WithoutProcessing):
    """An encoder-decoder model such as T5. Weights are not processed, as in HookedTransformer.

    Example:
        >>> from transformers import T5Config, T5ForConditionalGeneration
        >>> from bridge.legacy import HookedEncoderDecoder
        >>> config = T5Config(d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, vocab_size=9)
        >>> config.decoder_start_token_id = 0
        >>> model = HookedEncoderDecoder(T5ForConditionalGeneration(config).eval())
        >>> model([[1, 2, 3]], [[0, 4]]).shape
        torch.Size([1, 2, 9])
    """

    parts_of_blocks = "ln1 attn ln2 cross_attn ln3 mlp"

    @classmethod
    def _model_of(cls, config: HookedTransformerConfig, move_to_device: bool) -> nn.Module:
        fields = cls._fields(config, _T5_NAMES, _T5_FIXED)
        for name in _T5_RELATIVE:
            value = getattr(config, name)
            if value is not None:
                fields[name] = value
        fields["feed_forward_proj"] = (
            f"gated-{config.act_fn}" if config.gated_mlp else config.act_fn
        )
        fields["decoder_start_token_id"] = config.decoder_start_token_id or 0
        fields["dropout_rate"] = 0.0
        return cls._placed(T5ForConditionalGeneration(T5Config(**fields)), config, move_to_device)

    def to_tokens(  # type: ignore[override]
        self, input: Texts, move_to_device: bool = True, truncate: bool = True
    ) -> tuple[Ids, Ids]:
        """Convert text to the encoder's tokens, and return them with their attention mask."""
        return self.tokens_and_mask(input, move_to_device, truncate)

    def forward(  # type: ignore[override]
        self,
        input: Input,
        decoder_input: Int[Tensor, "batch decoder_pos"] | list[list[int]] | None = None,
        return_type: str | None = "logits",
        one_zero_attention_mask: Ids | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run the model."""
        if decoder_input is not None:
            kwargs["decoder_input_ids"] = torch.as_tensor(decoder_input, device=self.cfg.device)
        if one_zero_attention_mask is not None:
            kwargs["attention_mask"] = one_zero_attention_mask
        return super().forward(input, return_type, **kwargs)

    def generate(  # type: ignore[override]
        self,
        input: Input = "",
        one_zero_attention_mask: Ids | None = None,
        max_new_tokens: int = 10,
        **more: Any,
    ) -> Any:
        """Generate the decoder's answer with the model's own `generate`; `more` is as for
        `HookedTransformer.generate`.
        """
        if one_zero_attention_mask is not None:
            more["attention_mask"] = one_zero_attention_mask
        return super().generate(input, max_new_tokens, **more)

    def _stack(self, part: str, name: str) -> Tensor:
        blocks = (*self.encoder, *self.decoder)
        return torch.stack([getattr(getattr(block, part), name) for block in blocks])

    def call_part(self, name: str, *inputs: Any, **kwargs: Any) -> Tensor:
        """Call a part of the model. Hooks inside it run."""
        module = self.module_of(name)
        last = name.rpartition(".")[2]
        if last.isdigit() and "resid_pre" in kwargs:
            inputs = (kwargs.pop("resid_pre"), *inputs)
        x = inputs[0]
        if last in ("attn", "cross_attn"):
            reads = inputs if last == "attn" else inputs[1:]
            differs = any(not torch.equal(other, reads[0]) for other in reads)
            if not reads or differs:
                raise TypeError(
                    f"keys and values of {name} read one tensor, and in attn queries do too"
                )
            if last == "cross_attn":
                kwargs["key_value_states"] = reads[0]
            inputs = inputs[:1]
        if name.startswith("decoder.") and (last == "attn" or last.isdigit()):
            shape = (1, 1, x.shape[1], x.shape[1])
            lowest = torch.finfo(x.dtype).min
            mask = torch.full(shape, lowest, dtype=x.dtype, device=x.device).triu(1)
            kwargs["mask" if last == "attn" else "attention_mask"] = mask
        return called(module, *inputs, **kwargs)
