"""Running a model with HookedTransformer's arguments."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from bridge.bridge import TransformerBridge
from bridge.hook_point import HookPoint
from bridge.inputs import accepted_arguments, as_tokens
from bridge.legacy.past_key_value_caching import HookedTransformerKeyValueCache
from bridge.legacy.slices import Slice
from bridge.legacy.tokens import get_attention_mask, lm_cross_entropy_loss
from bridge.names import Names, NamesFilter
from bridge.runs import Input


class Output(NamedTuple):
    """What ``return_type="both"`` gives."""

    logits: Float[Tensor, "batch pos d_vocab"]
    loss: Float[Tensor, "..."]


class SwitchedNames(Names):
    """Names among which a filter function chooses as in HookedTransformer: the heavy hook points only when they are
    switched on, and none that HookedTransformer does not have, unless it accepts nothing else."""

    def select(self, names: NamesFilter, include_heavy: Any) -> list[HookPoint]:
        if callable(names):
            usual = [point for point in super().select(None, include_heavy) if names(point.name)]
            if usual:
                return usual
        return super().select(names, include_heavy)


class RunsAsBefore(TransformerBridge):
    """Runs with HookedTransformer's arguments, in its order."""

    def forward(  # type: ignore[override]
        self,
        input: Input,
        return_type: str | None = "logits",
        loss_per_token: bool = False,
        prepend_bos: bool | None = None,
        padding_side: Literal["left", "right"] | None = None,
        start_at_layer: int | None = None,
        tokens: Int[Tensor, "batch pos"] | None = None,
        shortformer_pos_embed: Tensor | None = None,
        attention_mask: Int[Tensor, "batch pos"] | None = None,
        stop_at_layer: int | None = None,
        past_kv_cache: HookedTransformerKeyValueCache | None = None,
        **model_kwargs: Any,
    ) -> Any:
        """Runs the model.

        Args:
            input, return_type, loss_per_token, prepend_bos, padding_side, start_at_layer, attention_mask,
                stop_at_layer, model_kwargs: as for `TransformerBridge.forward`. ``return_type="both"`` gives an
                `Output`. With a tokenizer that pads on the left, padding in front of tokens is masked.
            tokens: with `start_at_layer`, the tokens that a loss is about.
            shortformer_pos_embed: is worked out by the model; anything but None is an error.
            past_kv_cache: keys and values of earlier tokens; those of this input are added unless it is frozen.

        Raises:
            TypeError, ValueError: as for `TransformerBridge.forward`; a cache for another batch size.

        Example:
            >>> from bridge.embedded import MODEL_DIR
            >>> from bridge.legacy import HookedTransformer
            >>> model = HookedTransformer.from_pretrained(str(MODEL_DIR), device="cpu")
            >>> model("When Mary and John went to the store", return_type="both").logits.shape[:2]
            torch.Size([1, 9])
        """
        if shortformer_pos_embed is not None:
            raise ValueError("shortformer_pos_embed cannot be given: the model works its positions out itself")
        layers: dict[str, Any] = {"start_at_layer": start_at_layer, "stop_at_layer": stop_at_layer}
        wants_loss = return_type in ("loss", "both")
        if tokens is not None:
            if start_at_layer is None:
                raise ValueError("tokens are for start_at_layer; without it the input holds them")
            if wants_loss and stop_at_layer is None:
                logits = super().forward(input, attention_mask=attention_mask, **layers, **model_kwargs)
                return self._with_loss(logits, tokens, attention_mask, return_type, loss_per_token)
        if past_kv_cache is None:
            if attention_mask is None and start_at_layer is None:
                attention_mask = self._mask_in_front(input, prepend_bos)
            output = super().forward(
                input, return_type, loss_per_token, prepend_bos, padding_side, attention_mask, **layers, **model_kwargs
            )
            return Output(*output) if return_type == "both" and stop_at_layer is None else output
        if return_type == "logits_and_cache":
            raise ValueError("past_kv_cache is filled itself: return_type='logits_and_cache' would give a second one")
        return self._continued(
            input, return_type, loss_per_token, prepend_bos, padding_side, attention_mask, past_kv_cache,
            layers | model_kwargs,
        )  # fmt: skip

    def _mask_in_front(self, input: Any, prepend_bos: bool | None) -> Tensor | None:
        """The mask of tokens with padding in front, where the tokenizer pads there."""
        left = self.tokenizer is not None and self.tokenizer.padding_side == "left"
        if not left or not isinstance(input, Tensor) or input.is_floating_point() or input.ndim != 2:
            return None
        mask = get_attention_mask(self.tokenizer, input, self._prepends(prepend_bos))
        return None if bool(mask.all()) else mask

    def _prepends(self, prepend_bos: bool | None) -> bool:
        return bool(self.cfg.default_prepend_bos if prepend_bos is None else prepend_bos)

    def _continued(
        self, input: Any, return_type: str | None, per_token: bool, prepend_bos: bool | None, side: Any,
        mask: Tensor | None, cache: HookedTransformerKeyValueCache, kwargs: dict[str, Any],
    ) -> Any:  # fmt: skip
        """A run after earlier tokens."""
        if kwargs["start_at_layer"] is not None:
            raise ValueError("start_at_layer and past_kv_cache exclude each other: use stop_at_layer, or no cache")
        if isinstance(input, str) or (isinstance(input, list | tuple) and input and isinstance(input[0], str)):
            batch = self.batch_of([input] if isinstance(input, str) else input, prepend_bos, side)
            tokens, mask = batch.tokens, batch.mask if mask is None else mask
        else:
            tokens = as_tokens(input)
            if mask is None and self.tokenizer is not None:
                mask = get_attention_mask(self.tokenizer, tokens, self._prepends(prepend_bos))
        tokens = tokens.to(self.cfg.device)
        past = cache.for_run(len(tokens))
        mask = torch.ones_like(tokens) if mask is None else mask.to(tokens.device)
        if mask.shape != tokens.shape:
            raise ValueError(
                f"attention_mask has shape {list(mask.shape)}; the new tokens, for which it is, {list(tokens.shape)}"
            )
        before = cache.previous_attention_mask
        everything = cache.append_attention_mask(mask)
        kwargs = {name: value for name, value in kwargs.items() if value is not None}
        if not bool(everything.all()):
            kwargs["attention_mask"] = everything
            if "position_ids" in accepted_arguments(type(self.core).forward):
                positions = (everything.long().cumsum(-1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
                kwargs.setdefault("position_ids", positions)
        plain = return_type if return_type in (None, "predictions") else "logits"
        try:
            output = super().forward(tokens, plain, past_key_values=past, use_cache=True, **kwargs)
        except BaseException:
            cache.previous_attention_mask = before  # the tokens were not taken
            raise
        if return_type in ("loss", "both") and "stop_at_layer" not in kwargs:
            return self._with_loss(output, tokens, mask, return_type, per_token)
        return output

    def _with_loss(
        self, logits: Tensor, tokens: Tensor, mask: Tensor | None, return_type: str | None, per_token: bool
    ) -> Any:
        loss = self.loss_fn(logits, tokens, mask, per_token)
        return loss if return_type == "loss" else Output(logits, loss)

    def loss_fn(
        self,
        logits: Float[Tensor, "batch pos d_vocab"],
        tokens: Int[Tensor, "batch pos"],
        attention_mask: Int[Tensor, "batch pos"] | None = None,
        per_token: bool = False,
    ) -> Float[Tensor, "..."]:
        """The loss of predicting each next token.

        Args:
            logits: what the model predicts.
            tokens: what stands there.
            attention_mask: 0 for padding, whose loss does not count.
            per_token: ``[batch, pos-1]`` in place of the mean.
        """
        return lm_cross_entropy_loss(logits, tokens.to(logits.device), attention_mask, per_token)

    def to_str_tokens(self, input: Any, prepend_bos: bool | None = None, padding_side: str | None = None) -> Any:
        """The text of each token: `TransformerBridge.to_str_tokens`, which may be given an array, too."""
        if isinstance(input, np.ndarray):
            input = torch.from_numpy(input)
        return super().to_str_tokens(input, prepend_bos, padding_side)

    def run_with_cache(self, *model_args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """Runs the model and keeps activations: `TransformerBridge.run_with_cache`.

        Args:
            model_args: as for `forward`, in its order.
            kwargs: as for `forward` and `TransformerBridge.run_with_cache`. ``pos_slice`` is a `Slice`, or what one is
                made of: a tuple is ``(start, stop, step)``.
        """
        if kwargs.get("pos_slice") is not None:
            kwargs["pos_slice"] = _positions(kwargs["pos_slice"])
        return super().run_with_cache(**self._named(model_args), **kwargs)

    def run_with_hooks(self, *model_args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """Runs the model with hooks: `TransformerBridge.run_with_hooks`.

        Args:
            model_args: as for `forward`, in its order.
            kwargs: as for `forward` and `TransformerBridge.run_with_hooks`.
        """
        return super().run_with_hooks(**self._named(model_args), **kwargs)

    def _named(self, model_args: tuple[Any, ...]) -> dict[str, Any]:
        names = list(inspect.signature(self.forward).parameters)[: len(model_args)]
        return dict(zip(names, model_args, strict=True))

    def generate(  # type: ignore[override]
        self,
        input: Input = "",
        max_new_tokens: int = 10,
        stop_at_eos: bool = True,
        eos_token_id: int | Sequence[int] | None = None,
        do_sample: bool = True,
        top_k: int | None = None,
        top_p: float | None = None,
        temperature: float = 1.0,
        freq_penalty: float = 0.0,
        use_past_kv_cache: bool = True,
        prepend_bos: bool | None = None,
        padding_side: Literal["left", "right"] | None = None,
        return_type: str | None = "input",
        verbose: bool = True,
        **more: Any,
    ) -> Any:
        """Continues a prompt, by the model's own `generate`; hooks act on every step.

        Unlike `TransformerBridge.generate`, nothing is taken from the model's `generation_config`: what is not given
        is sampled from all tokens at temperature 1.

        Args:
            input, max_new_tokens, stop_at_eos, do_sample, freq_penalty, use_past_kv_cache, prepend_bos, padding_side,
                verbose, more: as for `TransformerBridge.generate`.
            eos_token_id: what ends a row; None: what the tokenizer says, else the model.
            top_k, top_p: None: all tokens.
            temperature: 0 takes the likeliest token.
            return_type: ``"input"``, ``"str"``, ``"tokens"``, or ``"embeds"``: embeddings of the prompt and of the new
                tokens, which is also what ``"input"`` is for embeddings.

        Example:
            >>> from bridge.embedded import MODEL_DIR
            >>> from bridge.legacy import HookedTransformer
            >>> model = HookedTransformer.from_pretrained(str(MODEL_DIR), device="cpu")
            >>> prompt = "When Mary and John went to the store, John gave a drink to"
            >>> model.generate(prompt, max_new_tokens=1, temperature=0, verbose=False)[len(prompt):]
            ' Mary'
        """
        embedded = isinstance(input, Tensor) and input.is_floating_point()
        as_embeddings = return_type == "embeds" or (embedded and return_type == "input")
        if stop_at_eos and eos_token_id is None and self.tokenizer is not None:
            eos_token_id = self.tokenizer.eos_token_id
        sampling: dict[str, Any] = {"num_beams": 1, "repetition_penalty": 1.0}
        if do_sample and temperature > 0:
            sampling |= {
                "top_k": 0 if top_k is None else top_k,
                "top_p": 1.0 if top_p is None else top_p,
                "temperature": temperature,
            }
        made = super().generate(
            input,
            max_new_tokens,
            stop_at_eos=stop_at_eos,
            eos_token_id=eos_token_id,
            do_sample=do_sample and temperature > 0,
            freq_penalty=freq_penalty,
            use_past_kv_cache=use_past_kv_cache,
            prepend_bos=prepend_bos,
            padding_side=padding_side,
            return_type="tokens" if as_embeddings else return_type,
            verbose=verbose,
            **(sampling | more),
        )
        if as_embeddings:
            new = self.core.get_input_embeddings()(made)
            return torch.cat([input, new], dim=1) if embedded else new  # type: ignore[list-item]
        return made[0] if isinstance(made, list) and len(made) == 1 else made


def _positions(given: Any) -> Any:
    """A `pos_slice` as the bridge takes it."""
    kept = Slice.unwrap(given)
    if kept.mode == "int":
        return int(kept.slice)
    values = kept.slice
    if isinstance(values, np.ndarray):
        return (values.nonzero()[0] if values.dtype == bool else values).tolist()
    return values
