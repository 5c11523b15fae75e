"""Loading, running and processing a model with HookedTransformer's arguments."""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import AutoTokenizer

from adapters.config import ModelConfig
from adapters.views import Args, Kwargs
from bridge.generation.options import inferred_mask
from bridge.hooks.arguments import CannotBeDoneError
from bridge.hooks.context import Scope, open_scope
from bridge.hooks.hooks import HookPoint
from bridge.hooks.names import NamesFilter, suggestion
from bridge.legacy.HookedTransformerConfig import HookedTransformerConfig
from bridge.legacy.loading_from_pretrained import as_type, get_official_model_name
from bridge.legacy.module_tree import BUFFERS, ENDS, ModuleTree
from bridge.legacy.past_key_value_caching import HookedTransformerKeyValueCache
from bridge.legacy.utilities import Slice, get_attention_mask, get_device, position_embeddings
from bridge.loading.loading import UnknownArgumentError, text_model
from bridge.run.inputs import HookSpec, Input
from bridge.run.layer_range import check_layers
from bridge.run.tokenization import Batch, as_tokens, texts_in
from weight_processing.process import OFF, ON

#: What a model may be made from.
Made = HookedTransformerConfig | ModelConfig | Mapping[str, Any] | nn.Module
_LOG = logging.getLogger(__name__)
#: The steps of processing.
TRANSFORMS = (
    "fold_ln", "center_writing_weights", "center_unembed", "fold_value_biases", "refactor_factored_attn_matrices",
)  # fmt: skip


class Output(NamedTuple):
    """What ``return_type="both"`` gives."""

    logits: Float[Tensor, "batch pos d_vocab"]
    loss: Float[Tensor, "..."]


class LegacyModel(ModuleTree):
    """A bridge that is loaded, run and processed with HookedTransformer's arguments, in its order."""

    counts_norm_weights = False

    # Loading, or making from a configuration.

    @classmethod
    def from_pretrained(cls, model_name: str, **kwargs: Any) -> Any:
        """Loads a model."""
        raise NotImplementedError

    @classmethod
    def _load(
        cls,
        model_name: str,
        *,
        hf_model: nn.Module | None,
        tokenizer: Any,
        device: torch.device | str | None,
        move_to_device: bool,
        dtype: torch.dtype | str,
        passed_on: Kwargs,
        n_devices: int = 1,
        processing: bool = False,
        **loading: Any,
    ) -> Any:
        """A bridge around a loaded model, or around the given one: a copy of it where anything has to change."""
        kind = as_type(passed_on.pop("torch_dtype", dtype))
        passed_on.pop("low_cpu_mem_usage", None)  # as transformers always loads now
        official = get_official_model_name(model_name)
        target = torch.device(device or get_device()) if move_to_device and n_devices == 1 else None
        loading["n_devices"] = n_devices if n_devices > 1 else None
        if hf_model is None:
            loading |= {"dtype": kind, "device": None if "device_map" in passed_on else target}
        else:
            loading |= {"hf_model": _copied(text_model(hf_model), processing, kind, target), "n_ctx": None}
        try:
            bridge: Any = cls.boot_transformers(official, tokenizer=tokenizer, **loading, **passed_on)
        except UnknownArgumentError as error:  # whose names are HookedTransformer's here
            known = {
                name
                for way in (cls.from_pretrained, cls.boot_transformers)
                for name in inspect.signature(way).parameters
            }
            raise UnknownArgumentError(error.name, error.loader, known) from error.__cause__
        bridge.cfg.model_name = official.rstrip("/").rpartition("/")[2]
        return bridge

    @classmethod
    def _make(cls, given: Made, tokenizer: Any, move_to_device: bool) -> tuple[nn.Module, Any]:
        """The model and the tokenizer that a configuration describes; a model is taken as it is."""
        if isinstance(given, str):
            raise TypeError(f"{given!r} is no configuration: {cls.__name__}.from_pretrained({given!r}) loads a model")
        if isinstance(given, nn.Module):
            return given, tokenizer
        config = HookedTransformerConfig.unwrap(given)
        if tokenizer is None and config.tokenizer_name is not None:
            tokenizer = AutoTokenizer.from_pretrained(config.tokenizer_name, trust_remote_code=config.trust_remote_code)
        if config.d_vocab < 0:
            if tokenizer is None:
                raise CannotBeDoneError("Must provide a tokenizer if d_vocab is not provided")
            config.d_vocab = max(tokenizer.get_vocab().values()) + 1
            config.d_vocab_out = config.d_vocab if config.d_vocab_out < 0 else config.d_vocab_out
        return cls._model_of(config, move_to_device), tokenizer

    @classmethod
    def _model_of(cls, config: HookedTransformerConfig, move_to_device: bool) -> nn.Module:
        """A model with random weights."""
        raise NotImplementedError

    # Runs.

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
        attention_mask: Int[Tensor, "batch past_and_pos"] | None = None,
        stop_at_layer: int | None = None,
        past_kv_cache: HookedTransformerKeyValueCache | None = None,
        **model_kwargs: Any,
    ) -> Any:
        """Runs the model."""
        if shortformer_pos_embed is not None:
            self._check_positions(shortformer_pos_embed, attention_mask)
        if tokens is not None and start_at_layer is None:
            raise ValueError("tokens are for start_at_layer; without it the input holds them")
        layers: Kwargs = {"start_at_layer": start_at_layer, "stop_at_layer": stop_at_layer}
        wants_loss = return_type in ("loss", "both") and stop_at_layer is None
        if past_kv_cache is None and (tokens is None or not wants_loss):
            if attention_mask is None and start_at_layer is None:
                attention_mask = self._mask_in_front(input, prepend_bos, padding_side)
            output = super().forward(
                input, return_type, loss_per_token, prepend_bos, padding_side, attention_mask, **layers, **model_kwargs
            )
            return Output(*output) if return_type == "both" and wants_loss else output
        plain = "logits" if wants_loss else return_type
        if past_kv_cache is None:
            output = super().forward(input, plain, attention_mask=attention_mask, **layers, **model_kwargs)
        else:
            if return_type == "logits_and_cache":
                raise ValueError("past_kv_cache is filled itself: 'logits_and_cache' would give a second one")
            if start_at_layer is None:
                input, attention_mask = self._tokens_of(input, prepend_bos, padding_side, attention_mask)
                tokens = input
            elif wants_loss and tokens is None:
                raise ValueError("a loss needs tokens: a residual stream does not say what comes next")
            output = self._continued(input, plain, attention_mask, past_kv_cache, layers | model_kwargs)
        if not wants_loss:
            return output
        assert tokens is not None
        mask = None if attention_mask is None else attention_mask[:, -tokens.shape[1] :]
        loss = self.loss_fn(output, tokens, mask, loss_per_token)
        return loss if return_type == "loss" else Output(output, loss)

    def batch_of(
        self,
        texts: Sequence[str],
        prepend_bos: bool | None = None,
        padding_side: str | None = None,
        longest: int | None = None,
    ) -> Batch:
        """`TransformerBridge.batch_of`: a text that is longer than the context is cut, in a run, too."""
        return super().batch_of(texts, prepend_bos, padding_side, self.cfg.n_ctx if longest is None else longest)

    def input_to_embed(
        self,
        input: Input,
        prepend_bos: bool | None = None,
        padding_side: Literal["left", "right"] | None = None,
        attention_mask: Int[Tensor, "batch pos"] | None = None,
        past_kv_cache: HookedTransformerKeyValueCache | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """What enters the first block, for runs with `start_at_layer`: the residual stream, the tokens, the positional
        embeddings of a shortformer model, and the mask of all tokens so far; None where there are none."""
        side = padding_side or (self.tokenizer.padding_side if self.tokenizer is not None else "right")
        masked = attention_mask is not None or past_kv_cache is not None or side == "left"
        tokens, mask = self._tokens_of(input, prepend_bos, padding_side, attention_mask, masked)
        if masked and mask is None:
            mask = torch.ones_like(tokens)
        earlier = None if past_kv_cache is None else past_kv_cache.previous_attention_mask.to(tokens.device)
        residual = self.forward(tokens, attention_mask=mask, stop_at_layer=0, past_kv_cache=past_kv_cache)
        if earlier is not None and mask is not None:
            mask = torch.cat([earlier, mask], dim=-1)
        shortformer = self.cfg.positional_embedding_type == "shortformer"
        return residual, tokens, self._positions_of(tokens, mask) if shortformer else None, mask

    def _positions_of(self, tokens: Tensor, mask: Tensor | None) -> Tensor:
        offset = 0 if mask is None else mask.shape[1] - tokens.shape[1]
        return position_embeddings(self.weights["pos_embed.W_pos"], tokens, offset, mask)

    def _check_positions(self, given: Tensor, mask: Tensor | None) -> None:
        if self.cfg.positional_embedding_type != "shortformer":
            raise ValueError(f"shortformer_pos_embed is for shortformer models; {self.cfg.model_name} is none")
        if not torch.equal(given, self._positions_of(given[..., 0].long(), mask)):
            raise ValueError("shortformer_pos_embed is not what the model adds: it works that out itself")

    def _mask_in_front(self, input: Any, prepend_bos: bool | None, side: str | None) -> Tensor | None:
        """The mask of tokens with padding in front, where the tokenizer, or this run, pads there."""
        left = self.tokenizer is not None and (side or self.tokenizer.padding_side) == "left"
        if isinstance(input, Mapping) and input.get("attention_mask") is None:
            input = input.get("input_ids")
        if not left or not isinstance(input, Tensor) or input.is_floating_point() or input.ndim != 2:
            return None
        mask = get_attention_mask(self.tokenizer, input, self._prepends(prepend_bos), side)
        return None if bool(mask.all()) else mask

    def _prepends(self, prepend_bos: bool | None) -> bool:
        return bool(self.cfg.default_prepend_bos if prepend_bos is None else prepend_bos)

    def _tokens_of(
        self, input: Any, prepend_bos: bool | None, side: str | None, mask: Tensor | None, masked: bool = True
    ) -> tuple[Tensor, Tensor | None]:
        """An input as tokens, and the mask of their padding, which is looked for in tokens where `masked` says so."""
        texts = texts_in(input)
        if texts is not None:
            batch = self.batch_of(texts, prepend_bos, side)
            tokens, mask = batch.tokens, batch.mask if mask is None else mask
        else:
            tokens = as_tokens(input)
            if mask is None and masked and self.tokenizer is not None:
                mask = get_attention_mask(self.tokenizer, tokens, self._prepends(prepend_bos), side)
        tokens = tokens.to(self.cfg.device)
        if mask is not None:
            mask = mask.to(tokens.device)
            if mask.shape != tokens.shape:
                raise ValueError(f"attention_mask has shape {list(mask.shape)}; the new tokens {list(tokens.shape)}")
        return tokens, mask

    def _continued(
        self,
        input: Any,
        return_type: str | None,
        mask: Tensor | None,
        cache: HookedTransformerKeyValueCache,
        kwargs: Kwargs,
    ) -> Any:
        """A run after earlier tokens. The cache is changed at its end only."""
        start, _ = check_layers(kwargs["start_at_layer"], kwargs["stop_at_layer"], self.cfg.n_layers)
        if start and not cache.frozen:
            raise ValueError(
                f"the cache would miss these tokens in the layers before start_at_layer={start}: freeze() it first"
            )
        past = cache.for_run(len(input))
        ones = torch.ones(input.shape[:2], dtype=torch.long, device=input.device)
        earlier = cache.previous_attention_mask[:, : past.get_seq_length()].to(input.device)
        if start is None or mask is None:
            mask = torch.cat([earlier, ones if mask is None else mask], dim=-1)
        kwargs = {name: value for name, value in kwargs.items() if value is not None}
        if not bool(mask.all()):
            kwargs["attention_mask"] = mask
        output = super().forward(input, return_type, past_key_values=past, use_cache=True, **kwargs)
        if not cache.frozen:
            cache.past_key_values, cache.previous_attention_mask = past, mask
        return output

    def select_hooks(self, names: NamesFilter | HookPoint) -> list[HookPoint]:
        """The hook points that a filter chooses. A function is asked about HookedTransformer's names of those that are
        switched on, as these alone fire there; if it chooses none of them, about all names that there are."""
        if isinstance(names, HookPoint) or not callable(names):
            return super().select_hooks(names)
        on = [point for point in super().select_hooks(None) if names(point.name)]
        named = [point for point in self.hook_dict.values() if point.point.group == "heavy" and names(point.name)]
        return on or named or super().select_hooks(names)

    def to_str_tokens(self, input: Any, prepend_bos: bool | None = None, padding_side: str | None = None) -> Any:
        """The text of each token: `TransformerBridge.to_str_tokens`, of an array or a list of anything, too."""
        if isinstance(input, list) and input and not isinstance(input[0], int):
            return [self.to_str_tokens(each, prepend_bos, padding_side) for each in input]
        if isinstance(input, str):
            input = self.batch_of([input], prepend_bos, padding_side).tokens[0]
        elif isinstance(input, np.ndarray):
            input = torch.from_numpy(input)
        return super().to_str_tokens(input, prepend_bos, padding_side)

    def run_with_cache(self, *model_args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """Runs the model and keeps activations: `TransformerBridge.run_with_cache`."""
        if kwargs.get("pos_slice") is not None:
            kwargs["pos_slice"] = _positions(kwargs["pos_slice"])
        with self._level(kwargs.get("reset_hooks_end", True)):
            return super().run_with_cache(**self._named(model_args), **kwargs)

    def run_with_hooks(self, *model_args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """Runs the model with hooks: `TransformerBridge.run_with_hooks`."""
        with self._level(kwargs.get("reset_hooks_end", True)):
            return super().run_with_hooks(**self._named(model_args), **kwargs)

    @contextmanager
    def hooks(
        self,
        fwd_hooks: Sequence[HookSpec] = (),
        bwd_hooks: Sequence[HookSpec] = (),
        reset_hooks_end: bool = True,
        clear_contexts: bool = False,
    ) -> Iterator[Any]:
        """Hooks for the runs inside a ``with`` statement: `TransformerBridge.hooks`."""
        with (
            self._level(reset_hooks_end),
            super().hooks(fwd_hooks, bwd_hooks, reset_hooks_end, clear_contexts) as model,
        ):
            yield model

    @contextmanager
    def _level(self, reset_hooks_end: bool) -> Iterator[None]:
        """Takes away, at the end, what was added with the level of hooks inside, as in HookedTransformer:
        ``add_hook(..., level=1)`` lasts for one run, and hooks of ``reset_hooks_end=False`` until a run that does."""
        if not reset_hooks_end:
            with open_scope(Scope()):
                yield
            return
        level = self.context_level + 1
        try:
            yield
        finally:
            if self.wiring.listening:
                self.reset_hooks(clear_contexts=False, level=level)

    @property
    def kept_level(self) -> int:
        """The level that hooks get which outlast their run: that of the ``with`` statement that keeps them."""
        return self.context_level

    def _named(self, model_args: Args) -> Kwargs:
        found = inspect.signature(self.forward).parameters
        if any(each.kind is each.VAR_POSITIONAL for each in found.values()):  # of a class of the user's
            found = inspect.signature(LegacyModel.forward.__get__(self)).parameters
        names = ["input", *list(found)[1:]][: len(model_args)]  # a class of the user's may call it `tokens`
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
        """
        embedded = isinstance(input, Tensor) and input.is_floating_point()
        as_embeddings = return_type == "embeds" or (embedded and return_type == "input")
        own = None if self.tokenizer is None else self.tokenizer.eos_token_id
        if stop_at_eos and eos_token_id is None:
            eos_token_id = own
        elif stop_at_eos and isinstance(eos_token_id, Sequence):
            stop_at_eos = len(eos_token_id) > 0
            if own is not None:
                if not embedded and texts_in(input) is None and "attention_mask" not in more:
                    more["attention_mask"] = inferred_mask(self, as_tokens(input), own, more)  # in which it may be BOS
                more.setdefault("pad_token_id", own)
        sampled = do_sample and temperature > 0
        sampling: Kwargs = {"num_beams": 1, "repetition_penalty": 1.0, "do_sample": sampled}
        if sampled:
            drawn_from = {"top_k": 0 if top_k is None else top_k, "top_p": 1.0 if top_p is None else top_p}
            # HookedTransformer subtracts the penalty behind the division by the temperature, and when it samples only
            sampling |= drawn_from | {"temperature": temperature, "freq_penalty": freq_penalty * temperature}
        made = super().generate(
            input, max_new_tokens, stop_at_eos=stop_at_eos, eos_token_id=eos_token_id,
            use_past_kv_cache=use_past_kv_cache, prepend_bos=prepend_bos, padding_side=padding_side, verbose=verbose,
            return_type="tokens" if as_embeddings or return_type == "tensor" else return_type, **(sampling | more),
        )  # fmt: skip
        if as_embeddings:
            new = self.core.get_input_embeddings()(made)
            return torch.cat([input, new], dim=1) if embedded else new  # type: ignore[list-item]
        return made[0] if isinstance(made, list) and len(made) == 1 else made

    # Weights.

    def process_weights_(
        self,
        fold_ln: bool = True,
        center_writing_weights: bool = True,
        center_unembed: bool = True,
        refactor_factored_attn_matrices: bool = False,
        fold_value_biases: bool = True,
    ) -> None:
        """Processes the weights in place. What the architecture forbids is left out with a warning in the log."""
        steps = (fold_ln, center_writing_weights, center_unembed, fold_value_biases, refactor_factored_attn_matrices)
        asked = dict(zip(TRANSFORMS, steps, strict=True))
        if fold_ln and self.cfg.num_experts:
            _LOG.warning("fold_ln left out: HookedTransformer does not fold norms that feed a mixture of experts")
            asked["fold_ln"] = False
        if fold_ln and self.cfg.dtype not in (torch.float32, torch.float64):
            _LOG.warning("folding weights of %s rounds them; from_pretrained_no_processing does not", self.cfg.dtype)
        self.process_weights(**{name: ON if wanted else OFF for name, wanted in asked.items()})  # type: ignore[arg-type]
        for name, state in self.cfg.processed.items():
            if asked.get(name) and state != "done":
                _LOG.warning("%s %s", name, state)

    def load_and_process_state_dict(
        self,
        state_dict: Mapping[str, Tensor],
        fold_ln: bool = True,
        center_writing_weights: bool = True,
        center_unembed: bool = True,
        fold_value_biases: bool = True,
        refactor_factored_attn_matrices: bool = False,
    ) -> None:
        """Loads a state dict with HookedTransformer's names, and processes the weights. What is missing stays as it is.

        Raises:
            ValueError: a name that the model does not have.
            RuntimeError: a shape that does not fit, or a value for which the model has no place.
        """
        steps = (center_writing_weights, center_unembed, fold_value_biases, refactor_factored_attn_matrices)
        if fold_ln and self._lacks_norms_of(state_dict):
            config = HookedTransformerConfig.of_model(self.cfg)
            config.normalization_type = str(config.normalization_type).removesuffix("Pre")
            made: Any = type(self)  # whose classes are made from a configuration
            other = made(config)  # which has the norms that are to be folded
            other.load_and_process_state_dict(state_dict, True, *steps)
            self.load_state_dict({name: x for name, x in other.state_dict().items() if name in self.weights.getters})
            self.cfg.processed = other.cfg.processed
            return
        unknown = {name for name in state_dict if name.rpartition(".")[2] not in BUFFERS} - set(self.weights.getters)
        for name in sorted(unknown):
            raise ValueError(f"{name!r} is no weight of this model.{suggestion(name, self.weights.getters)}")
        self.load_state_dict(state_dict, strict=False)
        self.process_weights_(fold_ln, *steps[:2], refactor_factored_attn_matrices, fold_value_biases)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:  # type: ignore[override]
        """Loads a state dict with HookedTransformer's names, or one with the Hugging Face model's own.

        Args:
            state_dict: what `state_dict` gave, here or in HookedTransformer.
            strict: missing and unknown names are errors; otherwise unknown ones are warned of in the log.
            assign: as for `torch.nn.Module.load_state_dict`; for the Hugging Face model's own names only.

        Raises:
            RuntimeError: names are missing or not known, a shape does not fit, or a value has no place.

        Example:
            >>> from bridge.legacy import HookedTransformer
            >>> cfg = {"n_layers": 1, "d_model": 8, "n_ctx": 5, "d_head": 4, "d_vocab": 10, "act_fn": "relu"}
            >>> HookedTransformer(cfg).load_state_dict(HookedTransformer(cfg).state_dict())
            <All keys matched successfully>
        """
        known = set(self.weights.getters)
        own = set(self.original_model.state_dict()) & set(state_dict)
        if own and not known & set(state_dict):
            found: Any = self.original_model.load_state_dict(state_dict, strict=strict, assign=assign)
        elif assign:
            raise ValueError("assign=True takes the Hugging Face model's own names: HookedTransformer's are views")
        else:
            if state_dict and not known & set(state_dict):
                raise RuntimeError(f"no weight of the model has any of these names, such as {next(iter(state_dict))!r}")
            fitting = {name: state_dict[name] for name in known & set(state_dict)}
            if all(self.fits(name, value) is None for name, value in fitting.items()):
                self.write({name: fitting[name] for name in ENDS if name in fitting})
            found = nn.Module.load_state_dict(self, state_dict, strict=strict)
        if found.unexpected_keys:
            _LOG.warning("names in the state dict that the model does not have: %s", ", ".join(found.unexpected_keys))
        return found

    def _lacks_norms_of(self, state_dict: Mapping[str, Tensor]) -> bool:
        """Whether the model was made without the norms' weights, which the state dict has (``LNPre``, ``RMSPre``)."""
        lacking = {word for name in state_dict.keys() - self.weights.getters.keys() for word in name.split(".")}
        return str(self.cfg.normalization_type).endswith("Pre") and bool(lacking & {"ln1", "ln2", "ln_final"})


def _positions(given: Any) -> Any:
    """A `pos_slice` as the bridge takes it."""
    chosen = Slice.unwrap(given)
    kept = chosen.slice
    if chosen.mode == "int" or (isinstance(kept, np.ndarray) and kept.ndim == 0):
        raise ValueError(f"pos_slice={given!r} would take the axis of positions away: give {int(kept)}, which keeps it")
    if not isinstance(kept, np.ndarray):
        return kept
    return (kept.nonzero()[0] if kept.dtype == bool else kept).tolist()


def _copied(model: nn.Module, processing: bool, dtype: torch.dtype, device: torch.device | None) -> nn.Module:
    """The user's model, or a copy where something is to be different: the user's stays as it is."""
    kinds = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    places = {parameter.device for parameter in model.parameters()}
    here = device is None or all(p.type == device.type and device.index in (None, p.index) for p in places)
    if not processing and kinds == {dtype} and here:
        return model
    copied: nn.Module = copy.deepcopy(model)
    return copied.to(dtype=dtype) if device is None else copied.to(device=device, dtype=dtype)
