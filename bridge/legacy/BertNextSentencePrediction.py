"""`BertNextSentencePrediction`: whether one sentence follows another, by BERT's other head."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor

from bridge.hooks.arguments import check_choice
from bridge.legacy.HookedEncoder import HookedEncoder
from bridge.run.tokenization import as_tokens

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

    def to_tokens(
        self, input: list[str], move_to_device: bool = True, truncate: bool = True
    ) -> tuple[Int[Tensor, "batch pos"], Int[Tensor, "batch pos"], Int[Tensor, "batch pos"]]:
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
        input: list[str] | Int[Tensor, "batch pos"],
        return_type: str | None = "logits",
        token_type_ids: Int[Tensor, "batch pos"] | None = None,
        one_zero_attention_mask: Int[Tensor, "batch pos"] | None = None,
    ) -> Float[Tensor, "batch 2"] | str | list[str] | None:
        """Runs the model."""
        return self._run(self.model.forward, input, return_type, token_type_ids, one_zero_attention_mask)[0]

    __call__ = forward

    def run_with_cache(
        self,
        input: list[str] | Int[Tensor, "batch pos"],
        return_type: str | None = "logits",
        token_type_ids: Int[Tensor, "batch pos"] | None = None,
        one_zero_attention_mask: Int[Tensor, "batch pos"] | None = None,
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
