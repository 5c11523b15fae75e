"""Load, run and process a model with HookedTransformer's arguments."""

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
from bridge.arguments import CannotBeDoneError
from bridge.generation.options import inferred_mask
from bridge.hooks.context import Listener, Scope, open_scope
from bridge.hooks.hooks import HookPoint
from bridge.hooks.names import NamesFilter, suggestion
from bridge.legacy.hook_points import Device
from bridge.legacy.HookedTransformerConfig import HookedTransformerConfig
from bridge.legacy.loading_from_pretrained import as_type, get_official_model_name
from bridge.legacy.module_tree import BUFFERS, ENDS, ModuleTree
from bridge.legacy.past_key_value_caching import HookedTransformerKeyValueCache
from bridge.legacy.utilities import Slice, get_attention_mask, get_device, position_embeddings
from bridge.loading.loading import UnknownArgumentError, text_model
from bridge.run.inputs import HookSpec, Input
from bridge.run.layer_range import check_layers
from bridge.run.tokenization import Batch, Text, as_tokens, texts_in
from weight_processing.process import OFF, ON

Side = Literal["left", "right"]
#: The accepted sources of a model.
Made = HookedTransformerConfig | ModelConfig | Mapping[str, Any] | nn.Module
_LOG = logging.getLogger(__name__)
#: The processing steps.
TRANSFORMS = (
    "fold_ln",
    "center_writing_weights",
    "center_unembed",
    "fold_value_biases",
    "refactor_factored_attn_matrices",
)


class Output(NamedTuple):
    """The result of ``return_type="both"``."""

    logits: Float[Tensor, "batch pos d_vocab"]
    loss: Float[Tensor, "..."]


class LegacyModel(ModuleTree):
    """A bridge that is loaded, run and processed with HookedTransformer's arguments, in
    HookedTransformer's order.
    """

    counts_norm_weights = False

    # Loading, or building from a configuration.

    @classmethod
    def from_pretrained(cls, model_name: str, **kwargs: Any) -> Any:
        """Load a model."""
        raise NotImplementedError

    @classmethod
    def _load(
        cls,
        model_name: str,
        *,
        hf_model: nn.Module | None,
        tokenizer: Any,
        device: Device,
        move_to_device: bool,
        dtype: torch.dtype | str,
        passed_on: Kwargs,
        n_devices: int = 1,
        processing: bool = False,
        **loading: Any,
    ) -> Any:
        """Return a bridge around a loaded model or the given one, which is copied if anything has
        to change.
        """
        kind = as_type(passed_on.pop("torch_dtype", dtype))
        passed_on.pop("low_cpu_mem_usage", None)  # transformers always loads this way now
        official = get_official_model_name(model_name)
        target = None
        if move_to_device and n_devices == 1:
            target = torch.device(device or get_device())
        loading["n_devices"] = n_devices if n_devices > 1 else None
        if hf_model is None:
            loading["dtype"] = kind
            loading["device"] = None if "device_map" in passed_on else target
        else:
            loading["hf_model"] = _copied(text_model(hf_model), processing, kind, target)
            loading["n_ctx"] = None
        try:
            bridge: Any = cls.boot_transformers(
                official, tokenizer=tokenizer, **loading, **passed_on
            )
        except UnknownArgumentError as error:  # its names are HookedTransformer's here
            known: set[str] = set()
            for load in (cls.from_pretrained, cls.boot_transformers):
                known |= inspect.signature(load).parameters.keys()
            raise UnknownArgumentError(error.name, error.loader, known) from error.__cause__
        bridge.cfg.model_name = official.rstrip("/").rpartition("/")[2]
        return bridge

    @classmethod
    def _make(cls, source: Made, tokenizer: Any, move_to_device: bool) -> tuple[nn.Module, Any]:
        """Return the model and tokenizer that a configuration describes; a model is used
        unchanged."""
        if isinstance(source, str):
            raise TypeError(
                f"{source!r} is no configuration: {cls.__name__}.from_pretrained({source!r}) loads"
                " a model"
            )
        if isinstance(source, nn.Module):
            return source, tokenizer
        config = HookedTransformerConfig.unwrap(source)
        if tokenizer is None and config.tokenizer_name is not None:
            tokenizer = AutoTokenizer.from_pretrained(
                config.tokenizer_name, trust_remote_code=config.trust_remote_code
            )
        if config.d_vocab < 0:
            if tokenizer is None:
                raise CannotBeDoneError("Must provide a tokenizer if d_vocab is not provided")
            config.d_vocab = max(tokenizer.get_vocab().values()) + 1
            if config.d_vocab_out < 0:
                config.d_vocab_out = config.d_vocab
        return cls._model_of(config, move_to_device), tokenizer

    @classmethod
    def _model_of(cls, config: HookedTransformerConfig, move_to_device: bool) -> nn.Module:
        """Return a model with random weights."""
        raise NotImplementedError

    # Runs.

    def forward(  # type: ignore[override]
        self,
        input: Input,
        return_type: str | None = "logits",
        loss_per_token: bool = False,
        prepend_bos: bool | None = None,
        padding_side: Side | None = None,
        start_at_layer: int | None = None,
        tokens: Int[Tensor, "batch pos"] | None = None,
        shortformer_pos_embed: Tensor | None = None,
        attention_mask: Int[Tensor, "batch past_and_pos"] | None = None,
        stop_at_layer: int | None = None,
        past_kv_cache: HookedTransformerKeyValueCache | None = None,
        **model_kwargs: Any,
    ) -> Any:
        """Run the model."""
        self._check_positions(shortformer_pos_embed, attention_mask)
        if tokens is not None and start_at_layer is None:
            raise ValueError("tokens are for start_at_layer; without it the input holds them")
        model_kwargs |= {"start_at_layer": start_at_layer, "stop_at_layer": stop_at_layer}
        wants_loss = return_type in ("loss", "both") and stop_at_layer is None
        if past_kv_cache is None and (tokens is None or not wants_loss):
            if attention_mask is None and start_at_layer is None:
                attention_mask = self._mask_in_front(input, prepend_bos, padding_side)
            output = super().forward(
                input,
                return_type,
                loss_per_token,
                prepend_bos,
                padding_side,
                attention_mask,
                **model_kwargs,
            )
            return Output(*output) if return_type == "both" and wants_loss else output
        if past_kv_cache is not None and start_at_layer is None:
            tokens, attention_mask = self._tokens_of(
                input, prepend_bos, padding_side, attention_mask
            )
            input = tokens
        if wants_loss and tokens is None:
            raise ValueError("a loss needs tokens: a residual stream does not say what comes next")
        of_run = "logits" if wants_loss else return_type
        if past_kv_cache is None:
            output = super().forward(input, of_run, attention_mask=attention_mask, **model_kwargs)
        else:
            output = self._continued(input, of_run, attention_mask, past_kv_cache, model_kwargs)
        if tokens is None or not wants_loss:
            return output
        loss = self._loss_of(output, tokens, attention_mask, loss_per_token)
        return loss if return_type == "loss" else Output(output, loss)

    def _loss_of(
        self, logits: Tensor, tokens: Tensor, mask: Tensor | None, per_token: bool
    ) -> Tensor:
        """Return the loss of tokens; the mask may also cover earlier tokens."""
        if mask is not None:
            mask = mask[:, -tokens.shape[1] :]
        return self.loss_fn(logits, tokens, mask, per_token)

    def batch_of(
        self,
        texts: Sequence[Text],
        prepend_bos: bool | None = None,
        padding_side: str | None = None,
        longest: int | None = None,
    ) -> Batch:
        """Return the batch, as `TransformerBridge.batch_of`; in a run, text longer than the context
        is truncated.
        """
        if longest is None:
            longest = self.cfg.n_ctx
        return super().batch_of(texts, prepend_bos, padding_side, longest)

    def input_to_embed(
        self,
        input: Input,
        prepend_bos: bool | None = None,
        padding_side: Side | None = None,
        attention_mask: Int[Tensor, "batch pos"] | None = None,
        past_kv_cache: HookedTransformerKeyValueCache | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Return the first block's input, for runs with `start_at_layer`: the residual stream, the
        tokens, the positional embeddings of a shortformer model, and the attention mask of all
        tokens so far; None for what does not exist.
        """
        pads_left = padding_side == "left"
        if not padding_side and self.tokenizer is not None:
            pads_left = self.tokenizer.padding_side == "left"
        masked = attention_mask is not None or past_kv_cache is not None or pads_left
        tokens, mask = self._tokens_of(input, prepend_bos, padding_side, attention_mask, masked)
        if masked and mask is None:
            mask = torch.ones_like(tokens)
        # The run replaces the cache's mask.
        earlier = None if past_kv_cache is None else past_kv_cache.previous_attention_mask
        residual = self._run(
            tokens, attention_mask=mask, stop_at_layer=0, past_kv_cache=past_kv_cache
        )
        if earlier is not None and mask is not None:
            mask = torch.cat([earlier.to(tokens.device), mask], dim=-1)
        positions = None
        if self.cfg.positional_embedding_type == "shortformer":
            positions = self._positions_of(tokens, mask)
        return residual, tokens, positions, mask

    def _positions_of(self, tokens: Tensor, mask: Tensor | None) -> Tensor:
        offset = 0 if mask is None else mask.shape[1] - tokens.shape[1]
        return position_embeddings(self.weights["pos_embed.W_pos"], tokens, offset, mask)

    def _check_positions(self, positions: Tensor | None, mask: Tensor | None) -> None:
        if positions is None:
            return
        if self.cfg.positional_embedding_type != "shortformer":
            raise ValueError(
                f"shortformer_pos_embed is for shortformer models; {self.cfg.model_name} is none"
            )
        own = self._positions_of(positions[..., 0].long(), mask)
        if not torch.equal(positions, own):
            raise ValueError(
                "shortformer_pos_embed is not what the model adds: it computes that itself"
            )

    def _mask_in_front(
        self, input: Any, prepend_bos: bool | None, side: str | None
    ) -> Tensor | None:
        """Return the attention mask of left-padded tokens, if the tokenizer or this run pads on the
        left.
        """
        if self.tokenizer is None or (side or self.tokenizer.padding_side) != "left":
            return None
        if isinstance(input, Mapping) and input.get("attention_mask") is None:
            input = input.get("input_ids")
        if not isinstance(input, Tensor) or input.is_floating_point() or input.ndim != 2:
            return None
        mask = get_attention_mask(self.tokenizer, input, self._prepends(prepend_bos), side)
        return None if bool(mask.all()) else mask

    def _prepends(self, prepend_bos: bool | None) -> bool:
        return bool(self.cfg.default_prepend_bos if prepend_bos is None else prepend_bos)

    def _tokens_of(
        self,
        input: Any,
        prepend_bos: bool | None,
        side: str | None,
        mask: Tensor | None,
        masked: bool = True,
    ) -> tuple[Tensor, Tensor | None]:
        """Convert an input to tokens and their attention mask; padding in tokens is detected if
        `masked` is set.
        """
        texts = texts_in(input)
        if texts is not None:
            batch = self.batch_of(texts, prepend_bos, side)
            tokens = batch.tokens
            if mask is None:
                mask = batch.mask
        else:
            tokens = as_tokens(input)
            if mask is None and masked and self.tokenizer is not None:
                mask = get_attention_mask(self.tokenizer, tokens, self._prepends(prepend_bos), side)
        tokens = tokens.to(self.cfg.device)
        if mask is not None:
            mask = mask.to(tokens.device)
            if mask.shape != tokens.shape:
                raise ValueError(
                    f"attention_mask has shape {list(mask.shape)}; the new tokens"
                    f" {list(tokens.shape)}"
                )
        return tokens, mask

    def _continued(
        self,
        input: Any,
        return_type: str | None,
        mask: Tensor | None,
        cache: HookedTransformerKeyValueCache,
        kwargs: Kwargs,
    ) -> Any:
        """Run the model after cached tokens. The cache changes only at the end."""
        if return_type == "logits_and_cache":
            raise ValueError(
                "past_kv_cache is filled itself: 'logits_and_cache' would give a second one"
            )
        layers = (kwargs["start_at_layer"], kwargs["stop_at_layer"])
        start, _ = check_layers(*layers, self.cfg.n_layers)
        if start and not cache.frozen:
            raise ValueError(
                f"the cache would miss these tokens in the layers before start_at_layer={start}:"
                " freeze() it first"
            )
        past = cache.for_run(len(input))
        earlier = cache.previous_attention_mask[:, : past.get_seq_length()].to(input.device)
        if mask is None:
            ones = torch.ones(input.shape[:2], dtype=torch.long, device=input.device)
            mask = torch.cat([earlier, ones], dim=-1)
        elif start is None:
            mask = torch.cat([earlier, mask], dim=-1)
        kwargs = {name: value for name, value in kwargs.items() if value is not None}
        if not bool(mask.all()):
            kwargs["attention_mask"] = mask
        output = super().forward(input, return_type, past_key_values=past, use_cache=True, **kwargs)
        if not cache.frozen:
            cache.past_key_values, cache.previous_attention_mask = past, mask
        return output

    def select_hooks(self, names: NamesFilter | HookPoint) -> list[HookPoint]:
        """Return the hook points that a filter selects. A function is called with
        HookedTransformer's names of the enabled hook points, because only these fire there. If it
        selects none of them, it is called with all names.
        """
        if isinstance(names, HookPoint) or not callable(names):
            return super().select_hooks(names)
        enabled = [point for point in super().select_hooks(None) if names(point.name)]
        heavy = [point for point in self.hook_dict.values() if point.point.group == "heavy"]
        named = [point for point in heavy if names(point.name)]
        return enabled or named or super().select_hooks(names)

    def to_str_tokens(
        self, input: Any, prepend_bos: bool | None = None, padding_side: str | None = None
    ) -> Any:
        """Return the text of each token, as `TransformerBridge.to_str_tokens`; also for an array or
        a list.
        """
        if isinstance(input, list) and input and not isinstance(input[0], int):
            return [self.to_str_tokens(row, prepend_bos, padding_side) for row in input]
        if isinstance(input, str):
            input = self.batch_of([input], prepend_bos, padding_side).tokens[0]
        elif isinstance(input, np.ndarray):
            input = torch.from_numpy(input)
        return super().to_str_tokens(input, prepend_bos, padding_side)

    def run_with_cache(self, *model_args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """Run the model and cache activations, as `TransformerBridge.run_with_cache`."""
        if kwargs.get("pos_slice") is not None:
            kwargs["pos_slice"] = _positions(kwargs["pos_slice"])
        with self._level(kwargs.get("reset_hooks_end", True)), self._called_points(kwargs):
            return super().run_with_cache(**self._named(model_args), **kwargs)

    @contextmanager
    def _called_points(self, kwargs: Kwargs) -> Iterator[None]:
        """Make a cache read at hook points rather than at modules if the user has overridden
        `forward`, which may then call hook points.
        """
        if getattr(self.forward, "__func__", None) is self.library_forward:
            yield
            return
        scope = Scope()  # not opened: its listeners only hold the places
        silent = Listener("read", self.select_hooks, scope)
        points = self.select_hooks(kwargs.get("names_filter"))
        scope.members += [(point, silent) for point in points]
        with self.wiring.scopes_attached([scope]):
            yield

    def run_with_hooks(self, *model_args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """Run the model with hooks, as `TransformerBridge.run_with_hooks`."""
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
        """Add hooks for the runs inside a ``with`` statement, as `TransformerBridge.hooks`."""
        with (
            self._level(reset_hooks_end),
            super().hooks(fwd_hooks, bwd_hooks, reset_hooks_end, clear_contexts) as model,
        ):
            yield model

    @contextmanager
    def _level(self, reset_hooks_end: bool) -> Iterator[None]:
        """Remove, on exit, the hooks of the inner level, as HookedTransformer does: ``add_hook(...,
        level=1)`` lasts for one run, and hooks with ``reset_hooks_end=False`` last until a run that
        resets hooks.
        """
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
        """Return the level of hooks that outlast their run: that of the ``with`` statement that
        keeps them.
        """
        return self.context_level

    def _named(self, model_args: Args) -> Kwargs:
        """Return positional arguments of a run by name."""
        parameters = inspect.signature(self.forward).parameters
        if any(x.kind is x.VAR_POSITIONAL for x in parameters.values()):  # a user's subclass
            parameters = inspect.signature(LegacyModel.forward.__get__(self)).parameters
        # A user's subclass may call the input `tokens`.
        names = ["input", *list(parameters)[1:]]
        return dict(zip(names[: len(model_args)], model_args, strict=True))

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
        padding_side: Side | None = None,
        return_type: str | None = "input",
        verbose: bool = True,
        **more: Any,
    ) -> Any:
        """Continue a prompt with the model's own `generate`; hooks run at every step.

        Unlike `TransformerBridge.generate`, it ignores the model's `generation_config`: by default
        it samples from all tokens at temperature 1.
        """
        embedded = isinstance(input, Tensor) and input.is_floating_point()
        as_embeddings = return_type == "embeds" or (embedded and return_type == "input")
        if as_embeddings or return_type == "tensor":
            return_type = "tokens"
        eos = None if self.tokenizer is None else self.tokenizer.eos_token_id
        if stop_at_eos and eos_token_id is None:
            eos_token_id = eos
        elif stop_at_eos and isinstance(eos_token_id, Sequence):
            stop_at_eos = len(eos_token_id) > 0
            if eos is not None:
                self._pad_with(eos, input, more)
        options = _sampling(do_sample, top_k, top_p, temperature, freq_penalty) | more
        output = super().generate(
            input,
            max_new_tokens,
            stop_at_eos=stop_at_eos,
            eos_token_id=eos_token_id,
            use_past_kv_cache=use_past_kv_cache,
            prepend_bos=prepend_bos,
            padding_side=padding_side,
            verbose=verbose,
            return_type=return_type,
            **options,
        )
        if as_embeddings:
            new = self.core.get_input_embeddings()(output)
            return torch.cat([input, new], dim=1) if embedded else new  # type: ignore[list-item]
        return output[0] if isinstance(output, list) and len(output) == 1 else output

    def _pad_with(self, token: int, input: Input, options: Kwargs) -> None:
        """Set the padding token of a generation with several stop tokens, which may contain BOS."""
        embedded = isinstance(input, Tensor) and input.is_floating_point()
        if not embedded and texts_in(input) is None and "attention_mask" not in options:
            options["attention_mask"] = inferred_mask(self, as_tokens(input), token, options)
        options.setdefault("pad_token_id", token)

    # Weights.

    def process_weights_(
        self,
        fold_ln: bool = True,
        center_writing_weights: bool = True,
        center_unembed: bool = True,
        refactor_factored_attn_matrices: bool = False,
        fold_value_biases: bool = True,
    ) -> None:
        """Process the weights in place. Steps that the architecture does not allow are skipped with
        a warning in the log.
        """
        steps = (
            fold_ln,
            center_writing_weights,
            center_unembed,
            fold_value_biases,
            refactor_factored_attn_matrices,
        )
        chosen = dict(zip(TRANSFORMS, steps, strict=True))
        if fold_ln and self.cfg.num_experts:
            _LOG.warning(
                "fold_ln left out: HookedTransformer does not fold norms that feed a mixture of"
                " experts"
            )
            chosen["fold_ln"] = False
        if fold_ln and self.cfg.dtype not in (torch.float32, torch.float64):
            _LOG.warning(
                "folding weights of %s rounds them; from_pretrained_no_processing does not",
                self.cfg.dtype,
            )
        choices: Kwargs = {name: ON if step else OFF for name, step in chosen.items()}
        self.process_weights(**choices)
        for name, state in self.cfg.processed.items():
            if chosen.get(name) and state != "done":
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
        """Load a state dict with HookedTransformer's names, and process the weights. Missing
        weights keep their values.

        Raises:
            ValueError: a name that the model does not have.
            RuntimeError: a wrong shape, or a value that the model cannot store.
        """
        steps = (
            center_writing_weights,
            center_unembed,
            fold_value_biases,
            refactor_factored_attn_matrices,
        )
        known = self.weights.getters
        if fold_ln and self._lacks_norms_of(state_dict):
            config = HookedTransformerConfig.of_model(self.cfg)
            config.normalization_type = str(config.normalization_type).removesuffix("Pre")
            kind: Any = type(self)  # these classes are built from a configuration
            with_norms = kind(config)
            with_norms.load_and_process_state_dict(state_dict, True, *steps)
            folded = with_norms.state_dict()
            self.load_state_dict({name: folded[name] for name in folded if name in known})
            self.cfg.processed = with_norms.cfg.processed
            return
        for name in sorted(state_dict.keys() - known.keys()):
            if name.rpartition(".")[2] not in BUFFERS:
                raise ValueError(f"this model has no weight {name!r}.{suggestion(name, known)}")
        self.load_state_dict(state_dict, strict=False)
        self.process_weights_(
            fold_ln, *steps[:2], refactor_factored_attn_matrices, fold_value_biases
        )

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:  # type: ignore[override]
        """Load a state dict with HookedTransformer's names, or with the Hugging Face model's own.

        Args:
            state_dict: the result of `state_dict`, of this library or of HookedTransformer.
            strict: raise an error for missing and unknown names; otherwise log unknown ones as a
                warning.
            assign: as for `torch.nn.Module.load_state_dict`; only with the Hugging Face model's own
                names.

        Raises:
            RuntimeError: missing or unknown names, a wrong shape, or a value that the model cannot
                store.

        Example:
            >>> from bridge.legacy import HookedTransformer
            >>> cfg = {
            ...     "n_layers": 1,
            ...     "d_model": 8,
            ...     "n_ctx": 5,
            ...     "d_head": 4,
            ...     "d_vocab": 10,
            ...     "act_fn": "relu",
            ... }
            >>> HookedTransformer(cfg).load_state_dict(HookedTransformer(cfg).state_dict())
            <All keys matched successfully>
        """
        known = self.weights.getters.keys() & state_dict.keys()
        keys: Any
        if not known and self.original_model.state_dict().keys() & state_dict.keys():
            keys = self.original_model.load_state_dict(state_dict, strict=strict, assign=assign)
        elif assign:
            raise ValueError(
                "assign=True takes the Hugging Face model's own names: HookedTransformer's are"
                " views"
            )
        else:
            if state_dict and not known:
                raise RuntimeError(
                    "no weight of the model has any of these names, such as"
                    f" {next(iter(state_dict))!r}"
                )
            if all(self.fits(name, state_dict[name]) is None for name in known):
                self.write({name: state_dict[name] for name in ENDS if name in known})
            keys = nn.Module.load_state_dict(self, state_dict, strict=strict)
        if keys.unexpected_keys:
            _LOG.warning(
                "names in the state dict that the model does not have: %s",
                ", ".join(keys.unexpected_keys),
            )
        return keys

    def _lacks_norms_of(self, state_dict: Mapping[str, Tensor]) -> bool:
        """Tell whether the model was built without the norm weights that the state dict has
        (``LNPre``, ``RMSPre``).
        """
        if not str(self.cfg.normalization_type).endswith("Pre"):
            return False
        words: set[str] = set()
        for name in state_dict.keys() - self.weights.getters.keys():
            words |= {*name.split(".")}
        return not words.isdisjoint({"ln1", "ln2", "ln_final"})


def _sampling(
    do_sample: bool,
    top_k: int | None,
    top_p: float | None,
    temperature: float,
    freq_penalty: float,
) -> Kwargs:
    """Return the arguments of `TransformerBridge.generate` for HookedTransformer's sampling."""
    sampled = do_sample and temperature > 0
    sampling: Kwargs = {"num_beams": 1, "repetition_penalty": 1.0, "do_sample": sampled}
    if sampled:
        sampling["top_k"] = 0 if top_k is None else top_k
        sampling["top_p"] = 1.0 if top_p is None else top_p
        sampling["temperature"] = temperature
        # HookedTransformer subtracts the penalty after dividing by the temperature, and only when
        # it samples.
        sampling["freq_penalty"] = freq_penalty * temperature
    return sampling


def _positions(pos_slice: Any) -> Any:
    """Return a `pos_slice` in the bridge's form."""
    unwrapped = Slice.unwrap(pos_slice)
    positions = unwrapped.slice
    is_array = isinstance(positions, np.ndarray)
    if unwrapped.mode == "int" or (is_array and positions.ndim == 0):
        raise ValueError(
            f"pos_slice={pos_slice!r} would take the axis of positions away: give {int(positions)},"
            " which keeps it"
        )
    if not is_array:
        return positions
    return (positions.nonzero()[0] if positions.dtype == bool else positions).tolist()


def _copied(
    model: nn.Module, processing: bool, dtype: torch.dtype, device: torch.device | None
) -> nn.Module:
    """Return the user's model, or a copy if something has to change: the user's model is never
    modified.
    """
    parameters = [*model.parameters()]
    dtypes = {parameter.dtype for parameter in parameters if parameter.is_floating_point()}
    devices = {parameter.device for parameter in parameters}
    stays = device is None or all(
        x.type == device.type and device.index in (None, x.index) for x in devices
    )
    if not processing and dtypes == {dtype} and stays:
        return model
    return copy.deepcopy(model).to(device=device, dtype=dtype)
