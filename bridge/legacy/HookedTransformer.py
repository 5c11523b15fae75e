"""`HookedTransformer`: a bridge that is made and called as HookedTransformer is."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from adapters.config import ModelConfig
from bridge.legacy.devices import get_device
from bridge.legacy.HookedTransformerConfig import HookedTransformerConfig
from bridge.legacy.loading_from_pretrained import DTYPE_FROM_STRING, get_official_model_name
from bridge.legacy.placing import PartsAsBefore
from bridge.legacy.reweighing import WeightsAsBefore
from bridge.legacy.running import Output, RunsAsBefore
from bridge.names import suggestion
from bridge.native import NativeConfig, NativeModel

__all__ = ["HookedTransformer", "Output"]

Side = Literal["left", "right"]
_LOG = logging.getLogger(__name__)
#: What `from_pretrained` passes on, besides its own arguments.
_PASSED_ON = ("revision", "trust_remote_code", "attn_implementation", "model_class")
#: Models that HookedTransformer runs without BOS unless told otherwise.
_WITHOUT_BOS = ("BloomForCausalLM", "QWenLMHeadModel", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
_NOT_HERE = {
    "input_to_embed": "run with stop_at_layer=0 for the first residual stream; to_tokens makes the tokens",
    "get_residual": "run with stop_at_layer=0 for the first residual stream",
    "get_pos_offset": "the model works its positions out itself",
    "init_weights": "a model made from a configuration has its weights; loaded ones are not drawn anew",
    "fill_missing_keys": "load_and_process_state_dict leaves what is missing as it is",
    "move_model_modules_to_device": "model.to(device), or n_devices when loading",
    "check_hooks_to_add": "heavy hook points need no switch before hooks are added",
    "sample_datapoint": "no data set comes with this package",
    "fold_layer_norm": "model.process_weights(fold_ln=True, ...) works on the model, not on a state dict",
    "center_writing_weights": "model.process_weights(center_writing_weights=True, ...) works on the model",
    "center_unembed": "model.process_weights(center_unembed=True, ...) works on the model",
    "fold_value_biases": "model.process_weights(fold_value_biases=True, ...) works on the model",
    "refactor_factored_attn_matrices": "model.process_weights(refactor_factored_attn_matrices=True, ...) does it",
}


class HookedTransformer(RunsAsBefore, PartsAsBefore, WeightsAsBefore):
    """A `TransformerBridge` with HookedTransformer's ways in: `from_pretrained`, or a configuration.

    The Hugging Face model runs, as in any bridge; `state_dict` and `named_parameters` have its names, and
    `tl_parameters` gives the weights by HookedTransformer's.

    Args:
        cfg: a `HookedTransformerConfig` or its fields, or another model's `cfg`, for a model with random weights
            (`bridge.native`); or a Hugging Face model, which is wrapped as it is.
        tokenizer: for text; it is copied, never changed. None: the one that `cfg.tokenizer_name` names.
        move_to_device: put a new model where `cfg.device` says.
        default_padding_side: where shorter texts are padded.

    Raises:
        ValueError, TypeError: as for `HookedTransformerConfig`; or fields that only loaded models have.

    Example:
        >>> from bridge.legacy import HookedTransformer
        >>> model = HookedTransformer({"n_layers": 1, "d_model": 8, "n_ctx": 5, "d_head": 4, "d_vocab": 10,
        ...     "act_fn": "relu", "device": "cpu"})
        >>> model([[1, 2, 3]]).shape, model.blocks[0].attn.W_Q.shape
        (torch.Size([1, 3, 10]), torch.Size([2, 8, 4]))
    """

    def __init__(
        self,
        cfg: HookedTransformerConfig | ModelConfig | Mapping[str, Any] | nn.Module,
        tokenizer: Any = None,
        move_to_device: bool = True,
        default_padding_side: Side = "right",
    ) -> None:
        own = None
        if isinstance(cfg, str):
            raise TypeError(f"{cfg!r} is no configuration: HookedTransformer.from_pretrained({cfg!r}) loads a model")
        if not isinstance(cfg, nn.Module):
            config = HookedTransformerConfig.unwrap(cfg)
            if tokenizer is None and config.tokenizer_name is not None:
                own = AutoTokenizer.from_pretrained(config.tokenizer_name, trust_remote_code=config.trust_remote_code)
            if config.d_vocab == -1 and (tokenizer or own) is not None:
                config.d_vocab = max((tokenizer if own is None else own).get_vocab().values()) + 1
                config.d_vocab_out = config.d_vocab if config.d_vocab_out == -1 else config.d_vocab_out
            fields = config.native() | ({} if move_to_device else {"device": None})
            cfg = NativeModel(NativeConfig(**fields))
        super().__init__(cfg)
        self.dataset = None
        if tokenizer is not None:
            self.set_tokenizer(tokenizer, default_padding_side)
        elif own is not None:
            self._adopt(own, default_padding_side)

    @classmethod
    def from_pretrained(
        cls,
        model_name: str,
        fold_ln: bool = True,
        center_writing_weights: bool = True,
        center_unembed: bool = True,
        refactor_factored_attn_matrices: bool = False,
        checkpoint_index: int | None = None,
        checkpoint_value: int | None = None,
        hf_model: nn.Module | None = None,
        device: torch.device | str | None = None,
        n_devices: int = 1,
        tokenizer: Any = None,
        move_to_device: bool = True,
        fold_value_biases: bool = True,
        default_prepend_bos: bool | None = None,
        default_padding_side: Side = "right",
        dtype: torch.dtype | str = torch.float32,
        first_n_layers: int | None = None,
        n_ctx: int | None = None,
        **from_pretrained_kwargs: Any,
    ) -> Any:
        """Loads a model and processes its weights. What it forbids is left out, with a warning in the log.

        Args:
            model_name: a short name such as ``gpt2-small``, a hub name, or a folder.
            fold_ln, center_writing_weights, center_unembed, fold_value_biases, refactor_factored_attn_matrices: as for
                `TransformerBridge.process_weights`.
            checkpoint_index, checkpoint_value: a training checkpoint.
            hf_model: use this model, or a copy of it where anything has to change.
            device: where to put the model; None: the first accelerator, or the CPU.
            n_devices: spread it over this many accelerators.
            tokenizer: use a copy of this one rather than load one.
            move_to_device: False leaves it on the CPU.
            default_prepend_bos: whether texts start with BOS; None: as HookedTransformer has it for this model.
            default_padding_side: where shorter texts are padded.
            dtype: of the weights.
            first_n_layers: only so many of the layers.
            n_ctx: another context length.
            from_pretrained_kwargs: ``revision``, ``trust_remote_code``, ``attn_implementation``, ``model_class``, and
                ``torch_dtype`` for `dtype`.

        Raises:
            ValueError: an unknown name; a model in TransformerLens' own format; an encoder-decoder model; arguments
                that exclude each other.
            TypeError: an argument that nobody knows.

        Example:
            >>> from bridge.embedded import MODEL_DIR
            >>> from bridge.legacy import HookedTransformer
            >>> model = HookedTransformer.from_pretrained(str(MODEL_DIR), device="cpu")
            >>> model.cfg.normalization_type
            'RMSPre'
        """
        dtype = from_pretrained_kwargs.pop("torch_dtype", dtype)
        dtype = _type(dtype)
        for name in from_pretrained_kwargs:
            if name not in _PASSED_ON:
                raise TypeError(
                    f"{name!r} is no argument of from_pretrained.{suggestion(name, _PASSED_ON)} For a model that is "
                    "loaded in another way, load it with transformers and pass it as hf_model."
                )
        if first_n_layers is not None and hf_model is not None:
            raise ValueError("first_n_layers is for a model that is loaded, and hf_model is loaded already")
        official = get_official_model_name(model_name)
        processing = any(
            (fold_ln, center_writing_weights, center_unembed, fold_value_biases, refactor_factored_attn_matrices)
        )
        target = None if not move_to_device or n_devices > 1 else torch.device(device or get_device())
        if hf_model is not None:
            hf_model = _copied(hf_model, processing, dtype, target)
            loading: dict[str, Any] = {"hf_model": hf_model}
        else:
            checkpoint = {"checkpoint_index": checkpoint_index, "checkpoint_value": checkpoint_value}
            loading = {"dtype": dtype, "n_ctx": n_ctx, "n_devices": n_devices if n_devices > 1 else None, **checkpoint}
        bridge: Any = cls.boot_transformers(official, tokenizer=tokenizer, **loading, **from_pretrained_kwargs)
        if first_n_layers is not None:
            bridge._keep_layers(first_n_layers)
        if bridge.core.config.is_encoder_decoder:
            raise ValueError(f"{model_name} is an encoder-decoder model: HookedEncoderDecoder.from_pretrained loads it")
        if target is not None and hf_model is None:
            bridge.to(target)
        cfg = bridge.cfg
        cfg.model_name = official.rstrip("/").rpartition("/")[2]
        if n_ctx is not None:
            cfg.n_ctx = n_ctx
        if bridge.tokenizer is not None:
            bridge._adopt(bridge.tokenizer, default_padding_side)  # a copy already
        cfg.default_prepend_bos = (
            cfg.original_architecture not in _WITHOUT_BOS if default_prepend_bos is None else default_prepend_bos
        )
        if processing:
            bridge.process_weights_(
                fold_ln, center_writing_weights, center_unembed, refactor_factored_attn_matrices, fold_value_biases
            )
        return bridge

    @classmethod
    def from_pretrained_no_processing(
        cls,
        model_name: str,
        fold_ln: bool = False,
        center_writing_weights: bool = False,
        center_unembed: bool = False,
        refactor_factored_attn_matrices: bool = False,
        fold_value_biases: bool = False,
        dtype: torch.dtype | str = torch.float32,
        default_prepend_bos: bool | None = None,
        default_padding_side: Side = "right",
        **from_pretrained_kwargs: Any,
    ) -> Any:
        """`from_pretrained` with all processing off.

        Example:
            >>> from bridge.embedded import MODEL_DIR
            >>> from bridge.legacy import HookedTransformer
            >>> model = HookedTransformer.from_pretrained_no_processing(str(MODEL_DIR), device="cpu")
            >>> model.cfg.normalization_type
            'RMS'
        """
        return cls.from_pretrained(
            model_name,
            fold_ln=fold_ln,
            center_writing_weights=center_writing_weights,
            center_unembed=center_unembed,
            refactor_factored_attn_matrices=refactor_factored_attn_matrices,
            fold_value_biases=fold_value_biases,
            dtype=dtype,
            default_prepend_bos=default_prepend_bos,
            default_padding_side=default_padding_side,
            **from_pretrained_kwargs,
        )

    def _keep_layers(self, n: int) -> None:
        if not 0 <= n <= self.cfg.n_layers:
            raise ValueError(f"first_n_layers is {n}; {self.cfg.model_name} has {self.cfg.n_layers}")
        parent, _, last = self.block_paths[0].rpartition(".")[0].rpartition(".")
        holder, config = self.original_model.get_submodule(parent), self.core.config
        setattr(holder, last, getattr(holder, last)[:n])
        config.num_hidden_layers = n
        if isinstance(getattr(config, "layer_types", None), list):
            config.layer_types = config.layer_types[:n]
        before, tokenizer = self.cfg, self.tokenizer
        model = self.original_model
        del self._tree
        type(self).__init__(self, model)  # the bridge anew, around fewer layers
        self.tokenizer = tokenizer
        for name in ("from_checkpoint", "checkpoint_index", "checkpoint_value", "checkpoint_label_type", "n_devices"):
            setattr(self.cfg, name, getattr(before, name))

    def set_tokenizer(self, tokenizer: Any, default_padding_side: Side = "right") -> None:
        """Gives the model a copy of a tokenizer that pads, and starts texts, with EOS where it has no token for that.

        Args:
            tokenizer: a Hugging Face tokenizer; it is not changed.
            default_padding_side: where shorter texts are padded.

        Raises:
            TypeError: it is none.
            ValueError: an unknown side.
        """
        if not isinstance(tokenizer, PreTrainedTokenizerBase):
            raise TypeError(f"{type(tokenizer).__name__} is no Hugging Face tokenizer")
        self._adopt(copy.deepcopy(tokenizer), default_padding_side)

    def _adopt(self, tokenizer: Any, side: str) -> None:
        if side not in ("left", "right"):
            raise ValueError(f'default_padding_side is {side!r}; it must be "left" or "right"')
        tokenizer.padding_side = side
        if tokenizer.eos_token is not None:
            for name in ("pad_token", "bos_token"):
                if getattr(tokenizer, name) is None:
                    setattr(tokenizer, name, tokenizer.eos_token)
        self.tokenizer = tokenizer
        self.cfg.tokenizer_name = tokenizer.name_or_path or None
        self.cfg.tokenizer_prepends_bos = self.tokenizer_facts.adds_bos

    def to(self, device_or_dtype: Any = None, print_details: bool = True, **kwargs: Any) -> HookedTransformer:  # type: ignore[override]
        """Moves the model, or changes the type of its weights.

        Args:
            device_or_dtype: a device or a type.
            print_details: is accepted; nothing is printed.
            kwargs: as for `torch.nn.Module.to`.
        """
        self.original_model.to(*([] if device_or_dtype is None else [device_or_dtype]), **kwargs)
        return self

    def cuda(self, device: int | torch.device | None = None) -> HookedTransformer:
        """Moves the model to a GPU."""
        return self.to(torch.device("cuda", device) if isinstance(device, int) else device or torch.device("cuda"))

    def cpu(self) -> HookedTransformer:
        """Moves the model to the CPU."""
        return self.to(torch.device("cpu"))

    def mps(self) -> HookedTransformer:
        """Moves the model to Apple's GPU."""
        return self.to(torch.device("mps"))

    def load_sample_training_dataset(self, **kwargs: Any) -> Any:
        """Always an error: no data set comes with this package. Set `dataset` to one of your own.

        Raises:
            ImportError: in any case.
        """
        raise ImportError(
            "no data set comes with this package: load one with the package datasets, and set model.dataset"
        )

    def hook_points(self) -> list[Any]:
        """All hook points."""
        return list(self.hook_dict.values())

    def clear_contexts(self) -> None:
        """Empties the `ctx` of all hook points."""
        self._clear_contexts()

    def remove_all_hook_fns(
        self,
        direction: Literal["fwd", "bwd", "both"] = "both",
        including_permanent: bool = False,
        level: int | None = None,
    ) -> None:
        """Removes hooks, and leaves contexts as they are."""
        self.reset_hooks(False, direction, including_permanent, level)

    def cache_all(self, cache: dict[str, Tensor] | None = None, **kwargs: Any) -> dict[str, Tensor]:
        """The old name of `add_caching_hooks` without a filter."""
        return self.add_caching_hooks(None, cache=cache, **kwargs)

    def cache_some(self, cache: dict[str, Tensor] | None, names: Any, **kwargs: Any) -> dict[str, Tensor]:
        """The old name of `add_caching_hooks` with a filter."""
        return self.add_caching_hooks(names, cache=cache, **kwargs)

    def set_ungroup_grouped_query_attention(self, ungroup_grouped_query_attention: bool) -> None:
        """Refuses what there is not: keys and values of their own for each query head.

        Raises:
            ValueError: they are asked for.
        """
        if ungroup_grouped_query_attention and self.cfg.n_key_value_heads is not None:
            raise ValueError(
                "the model computes one key and value for each group of heads, and that is what its hook points show; "
                "W_K and W_V repeat them for each head"
            )

    def __getattr__(self, name: str) -> Any:
        if name in _NOT_HERE:
            raise AttributeError(f"HookedTransformer has no {name} here: {_NOT_HERE[name]}. See docs/migration.md")
        return super().__getattr__(name)


def _type(dtype: torch.dtype | str) -> torch.dtype:
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype not in DTYPE_FROM_STRING:
        raise ValueError(f"dtype is {dtype!r}; it must be a torch.dtype or one of {', '.join(DTYPE_FROM_STRING)}")
    return DTYPE_FROM_STRING[dtype]


def _copied(model: nn.Module, processing: bool, dtype: torch.dtype, device: torch.device | None) -> nn.Module:
    """The user's model, or a copy where something is to be different: the user's stays as it is."""
    kinds = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    places = {parameter.device for parameter in model.parameters()}
    here = device is None or all(p.type == device.type and device.index in (None, p.index) for p in places)
    if not processing and kinds == {dtype} and here:
        return model
    copied: nn.Module = copy.deepcopy(model)
    return copied.to(dtype=dtype) if device is None else copied.to(device=device, dtype=dtype)
