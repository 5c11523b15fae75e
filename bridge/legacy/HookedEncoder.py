"""`HookedEncoder`: BERT on the bridge."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import BertConfig, BertForMaskedLM, BertForPreTraining, T5Config, T5ForConditionalGeneration

from adapters.points import base_path, core_path, join
from bridge.hooks.arguments import check_choice
from bridge.legacy.HookedTransformerConfig import ONLY_LOADED, HookedTransformerConfig
from bridge.legacy.running import LegacyModel, Made
from bridge.run.inputs import Input
from bridge.run.tokenization import as_tokens, texts_in

#: Tokens, or a number that is said of each.
Ids = Int[Tensor, "batch pos"]
_BERT_NAMES = {
    "hidden_size": "d_model", "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads",
    "intermediate_size": "d_mlp", "hidden_act": "act_fn", "vocab_size": "d_vocab", "layer_norm_eps": "eps",
    "max_position_embeddings": "n_ctx",
}  # fmt: skip
_BERT_FIXED = ONLY_LOADED | {"attn_only": False, "n_key_value_heads": None, "gated_mlp": False}
#: The parts of a HookedEncoder that are no blocks, by where their modules are: in BERT itself, or outside it.
_INSIDE = {"embed": "embeddings", "pooler": "pooler"}
_BESIDE = {"mlm_head": "cls.predictions.transform", "nsp_head": "cls.seq_relationship"}


class WithoutProcessing(LegacyModel):
    """`HookedEncoder` and `HookedEncoderDecoder`: no processing, and the tokenizer is used as it is.

    Args:
        cfg: a `HookedTransformerConfig` or its fields, for a model with random weights; or a Hugging Face model, which
            is wrapped as it is.
        tokenizer: for text; it is only read. None: the one that ``cfg.tokenizer_name`` names.
        move_to_device: put a new model where ``cfg.device`` says.
    """

    #: The class to load; None: what the configuration's architecture says.
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
        device: torch.device | str | None = None,
        tokenizer: Any = None,
        move_to_device: bool = True,
        dtype: torch.dtype | str = torch.float32,
        **from_pretrained_kwargs: Any,
    ) -> Any:
        """Loads a model."""
        if hf_model is None and cls.loads is not None:
            from_pretrained_kwargs.setdefault("model_class", cls.loads)
        return cls._load(
            model_name, hf_model=hf_model, tokenizer=tokenizer, device=device, move_to_device=move_to_device,
            dtype=dtype, passed_on=from_pretrained_kwargs, checkpoint_index=checkpoint_index,
            checkpoint_value=checkpoint_value,
        )  # fmt: skip

    @classmethod
    def _fields(cls, config: HookedTransformerConfig, names: Mapping[str, str], fixed: Mapping[str, Any]) -> Any:
        """A configuration's fields by Hugging Face's names."""
        if config.d_vocab_out not in (config.d_vocab, -1, 0):
            raise ValueError(f"d_vocab_out is {config.d_vocab_out}; {cls.__name__} has as many as d_vocab")
        for name, allowed in fixed.items():
            if getattr(config, name) != allowed:
                raise ValueError(f"{name} is {getattr(config, name)!r}; in a {cls.__name__} it can only be {allowed!r}")
        return {theirs: getattr(config, ours) for theirs, ours in names.items()}

    @staticmethod
    def _placed(model: nn.Module, config: HookedTransformerConfig, move_to_device: bool) -> nn.Module:
        return model.eval().to(config.dtype).to(config.device if move_to_device else "cpu")

    def tokens_and_mask(self, input: str | Sequence[str], move_to_device: bool, truncate: bool) -> tuple[Ids, Ids]:
        """Text as tokens, and their mask."""
        longest = self.cfg.n_ctx if truncate else sys.maxsize
        batch = self.batch_of([input] if isinstance(input, str) else input, longest=longest)
        mask = torch.ones_like(batch.tokens) if batch.mask is None else batch.mask
        device = self.cfg.device if move_to_device else "cpu"
        return batch.tokens.to(device), mask.to(device)


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
    parts_of_blocks = "attn ln1 mlp ln2"

    @classmethod
    def _model_of(cls, config: HookedTransformerConfig, move_to_device: bool) -> nn.Module:
        fields = cls._fields(config, _BERT_NAMES, _BERT_FIXED)
        if config.n_heads * config.d_head != config.d_model:
            raise ValueError(
                f"n_heads={config.n_heads} times d_head={config.d_head} is not d_model={config.d_model}, as in BERT"
            )
        made = BertConfig(**fields, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
        return cls._placed(BertForPreTraining(made), config, move_to_device)

    def to_tokens(  # type: ignore[override]
        self, input: str | Sequence[str], move_to_device: bool = True, truncate: bool = True
    ) -> tuple[Ids, Ids, Ids]:
        """Text as tokens, with what BERT takes in addition to them."""
        tokens, mask = self.tokens_and_mask(input, move_to_device, truncate)
        return tokens, torch.zeros_like(tokens), mask

    def encoder_output(
        self,
        tokens: Ids,
        token_type_ids: Ids | None = None,
        one_zero_attention_mask: Ids | None = None,
    ) -> Float[Tensor, "batch pos d_model"]:
        """What the last block makes of tokens."""
        last = self.cfg.n_layers
        return self.forward(tokens, "logits", token_type_ids, one_zero_attention_mask, stop_at_layer=last)  # type: ignore[no-any-return]

    def forward(  # type: ignore[override]
        self,
        input: Input,
        return_type: str | None = "logits",
        token_type_ids: Ids | None = None,
        one_zero_attention_mask: Ids | None = None,
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


# ----------------------------------------------------------------------------------------------------------------------
# `BertNextSentencePrediction`: whether one sentence follows another, by BERT's other head.
# ----------------------------------------------------------------------------------------------------------------------


_HEAD = "nsp_head.hook_nsp_out"
_ANSWERS = ("The sentences are sequential", "The sentences are NOT sequential")


class BertNextSentencePrediction:
    """A `HookedEncoder` whose output is that of its head for next sentences.

    Args:
        model: a HookedEncoder with that head: `HookedEncoder.from_pretrained` gives it where the checkpoint has one.

    Raises:
        ValueError: the model has none.

    Example:
        >>> import torch
        >>> from bridge.legacy import BertNextSentencePrediction, HookedEncoder
        >>> model = HookedEncoder({"n_layers": 1, "d_model": 8, "n_ctx": 5, "d_head": 4, "d_vocab": 9, "act_fn": "gelu",
        ...     "device": "cpu"})
        >>> BertNextSentencePrediction(model)(torch.tensor([[1, 2, 3]]), token_type_ids=torch.tensor([[0, 0, 1]])).shape
        torch.Size([1, 2])
    """

    def __init__(self, model: HookedEncoder) -> None:
        if _HEAD not in model.hook_dict:
            raise ValueError(
                f"{type(model.core).__name__} has no head for next sentences; BertForPreTraining and "
                "BertForNextSentencePrediction have one"
            )
        self.model = model

    def to_tokens(self, input: list[str], move_to_device: bool = True, truncate: bool = True) -> tuple[Ids, Ids, Ids]:
        """Two sentences as one row of tokens."""
        if isinstance(input, str) or len(input) != 2:
            raise ValueError(f"the input is {input!r}; it must be a list of two sentences")
        encoded = self.model.tokenizer_facts.tokenizer(
            input[0], input[1], return_tensors="pt", padding=True, truncation=truncate,
            max_length=self.model.cfg.n_ctx if truncate else None,
        )  # fmt: skip
        found = tuple(encoded[name] for name in ("input_ids", "token_type_ids", "attention_mask"))
        return tuple(x.to(self.model.cfg.device) for x in found) if move_to_device else found  # type: ignore[return-value]

    def forward(
        self,
        input: list[str] | Ids,
        return_type: str | None = "logits",
        token_type_ids: Ids | None = None,
        one_zero_attention_mask: Ids | None = None,
    ) -> Float[Tensor, "batch 2"] | str | list[str] | None:
        """Runs the model."""
        return self._run(self.model.forward, input, return_type, token_type_ids, one_zero_attention_mask)[0]

    __call__ = forward

    def run_with_cache(
        self,
        input: list[str] | Ids,
        return_type: str | None = "logits",
        token_type_ids: Ids | None = None,
        one_zero_attention_mask: Ids | None = None,
        **kwargs: Any,
    ) -> Any:
        """Runs the model and keeps activations."""
        run = functools.partial(self.model.run_with_cache, **kwargs)
        made, (_, cache) = self._run(run, input, return_type, token_type_ids, one_zero_attention_mask)
        return made, cache

    def _run(
        self, run: Callable[..., Any], input: Any, return_type: str | None, types: Tensor | None, mask: Tensor | None
    ) -> tuple[Any, Any]:
        """What was asked for, and what `run` returns."""
        check_choice("return_type", return_type, ("logits", "predictions", None))
        if isinstance(input, str | list) and (not input or isinstance(input[0], str)):
            tokens, own_types, own_mask = self.to_tokens(input)  # type: ignore[arg-type]
            types, mask = own_types if types is None else types, own_mask if mask is None else mask
        else:
            tokens = as_tokens(input)
            if types is None:
                raise ValueError(
                    "tokens need token_type_ids, which say to which of the two sentences each belongs; or give the two "
                    "sentences themselves"
                )
        found: list[Tensor] = []
        with self.model.hooks(fwd_hooks=[(_HEAD, lambda logits, hook: found.append(logits))]):
            rest = run(tokens, None, types, mask)
        if return_type != "predictions":
            return (found[0] if return_type == "logits" else None), rest
        said = [_ANSWERS[best] for best in found[0].argmax(-1).tolist()]
        return (said[0] if len(said) == 1 else said), rest


# ----------------------------------------------------------------------------------------------------------------------
# `HookedEncoderDecoder`: T5 on the bridge.
# ----------------------------------------------------------------------------------------------------------------------


_T5_NAMES = {
    "d_model": "d_model", "d_kv": "d_head", "d_ff": "d_mlp", "num_layers": "n_layers", "num_heads": "n_heads",
    "vocab_size": "d_vocab", "layer_norm_epsilon": "eps", "tie_word_embeddings": "tie_word_embeddings",
}  # fmt: skip
_T5_FIXED = {
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

    parts_of_blocks = "ln1 attn ln2 cross_attn ln3 mlp"

    @classmethod
    def _model_of(cls, config: HookedTransformerConfig, move_to_device: bool) -> nn.Module:
        fields = cls._fields(config, _T5_NAMES, _T5_FIXED)
        for name in ("relative_attention_num_buckets", "relative_attention_max_distance"):
            if getattr(config, name) is not None:
                fields[name] = getattr(config, name)
        start = 0 if config.decoder_start_token_id is None else config.decoder_start_token_id
        kind = f"gated-{config.act_fn}" if config.gated_mlp else config.act_fn
        fields |= {"feed_forward_proj": kind, "decoder_start_token_id": start, "dropout_rate": 0.0}
        return cls._placed(T5ForConditionalGeneration(T5Config(**fields)), config, move_to_device)

    def to_tokens(  # type: ignore[override]
        self, input: str | Sequence[str], move_to_device: bool = True, truncate: bool = True
    ) -> tuple[Ids, Ids]:
        """Text as the encoder's tokens, and their mask."""
        return self.tokens_and_mask(input, move_to_device, truncate)

    def forward(  # type: ignore[override]
        self,
        input: Input,
        decoder_input: Int[Tensor, "batch decoder_pos"] | list[list[int]] | None = None,
        return_type: str | None = "logits",
        one_zero_attention_mask: Ids | None = None,
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
        one_zero_attention_mask: Ids | None = None,
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
