"""Loading models: thin layers over `from_pretrained`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from bridge.loading.training_checkpoints import checkpoint_revision

if TYPE_CHECKING:
    from bridge.native import NativeConfig


#: Weights of fewer bytes than this are loaded in about a second.
SMALL = 500_000_000


class BootMethods:
    """The class methods of a bridge that load or make a model."""

    @classmethod
    def boot_transformers(
        cls,
        name_or_path: str,
        *,
        hf_model: nn.Module | None = None,
        tokenizer: Any = None,
        hf_config_overrides: Mapping[str, Any] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | str | None = None,
        load_weights: bool = True,
        trust_remote_code: bool = False,
        model_class: type[Any] | None = None,
        device_map: Any = None,
        n_devices: int | None = None,
        max_memory: Mapping[Any, Any] | None = None,
        n_ctx: int | None = None,
        revision: str | None = None,
        checkpoint_index: int | None = None,
        checkpoint_value: int | None = None,
        attn_implementation: str | None = None,
        cache_dir: str | None = None,
        force_download: bool = False,
        local_files_only: bool = False,
        token: str | bool | None = None,
    ) -> Any:
        """Loads a model from the hub or a folder.

        Args:
            name_or_path: a hub name, or a folder (which needs no network).
            hf_model: use this model rather than load one.
            tokenizer: use this tokenizer rather than load one.
            hf_config_overrides: fields of the Hugging Face configuration to change.
            device: where to put the model; None: where Hugging Face puts it.
            dtype: the type of its weights; None: what Hugging Face chooses.
            load_weights: False for a model without weights (on the ``meta`` device) whose hook points can be listed.
            trust_remote_code: as for `from_pretrained`.
            model_class: the class to load; None: what the configuration's architecture says.
            device_map, max_memory: as for `from_pretrained` (accelerate).
            n_devices: spread the model evenly over this many accelerators.
            n_ctx: the context length, in tokens.
            revision: a branch, tag or commit of the hub's repository.
            checkpoint_index, checkpoint_value: a training checkpoint, by position in the list or by step (Pythia and
                stanford-crfm models).
            attn_implementation, cache_dir, force_download, local_files_only, token: as for `from_pretrained`.

        Raises:
            ValueError: arguments that exclude each other, or a checkpoint that does not exist.

        Example:
            >>> from bridge import TransformerBridge
            >>> from bridge.embedded import MODEL_DIR
            >>> TransformerBridge.boot_transformers(str(MODEL_DIR)).cfg.n_layers
            4
        """
        from transformers import AutoConfig, AutoTokenizer

        if hf_model is not None:
            given = {
                "hf_config_overrides": hf_config_overrides, "dtype": dtype, "device_map": device_map,
                "n_devices": n_devices, "max_memory": max_memory, "n_ctx": n_ctx, "model_class": model_class,
                "attn_implementation": attn_implementation, "checkpoint_index": checkpoint_index,
                "checkpoint_value": checkpoint_value,
            }  # fmt: skip
            clash = [name for name, value in given.items() if value is not None] + ["load_weights"] * (not load_weights)
            if clash:
                raise ValueError(f"{', '.join(clash)} would change how the model is loaded, but hf_model is loaded")
        checkpoint = checkpoint_revision(name_or_path, checkpoint_index, checkpoint_value)
        if checkpoint is not None and revision is not None:
            raise ValueError(f"revision={revision!r} and a checkpoint exclude each other")
        repository = checkpoint.repository if checkpoint else name_or_path
        hub = {"cache_dir": cache_dir, "force_download": force_download, "local_files_only": local_files_only}
        where: dict[str, Any] = {name: value for name, value in {**hub, "token": token}.items() if value}
        where["trust_remote_code"] = trust_remote_code
        if checkpoint or revision:
            where["revision"] = checkpoint.revision if checkpoint else revision
        loaded = hf_model is None
        if hf_model is None:
            config = AutoConfig.from_pretrained(repository, **where)
            _override(config, dict(hf_config_overrides or {}) | context_fields(config, n_ctx))
            loader = model_class or _class_for(config)
            if max_memory is not None and device_map is None and n_devices is None:
                raise ValueError("max_memory says how to spread a model: it needs device_map or n_devices")
            if device_map is not None and n_devices is not None:
                raise ValueError("device_map and n_devices both say how to spread the model")
            if device is not None and not load_weights:
                raise ValueError(f"a model without weights is on no device, so device={device!r} cannot be had")
            if device is not None and (device_map is not None or n_devices is not None):
                raise ValueError("device puts the whole model in one place; device_map and n_devices spread it")
            kwargs: dict[str, Any] = {"config": config, **where}
            if n_devices is not None:
                kwargs |= {"device_map": "balanced", "max_memory": max_memory or _first_devices(n_devices)}
            elif device_map is not None:
                kwargs |= {"device_map": device_map} | ({"max_memory": max_memory} if max_memory else {})
            for name, value in (("dtype", dtype), ("attn_implementation", attn_implementation)):
                if value is not None:
                    kwargs[name] = value
            with _bar_where_it_takes_a_while(repository):
                hf_model = loader.from_pretrained(repository, **kwargs) if load_weights else _empty(loader, kwargs)
        if device is not None:
            hf_model.to(device)
        if tokenizer is None:
            tokenizer = _tokenizer(AutoTokenizer, repository, where)
        bridge: Any = cls(hf_model, tokenizer)  # type: ignore[call-arg]
        if loaded:
            bridge.restore_processing()
        cfg = bridge.cfg
        cfg.model_name = name_or_path
        if n_ctx is not None:
            cfg.n_ctx = n_ctx
        if n_devices is not None:
            cfg.n_devices = n_devices
        if checkpoint is not None:
            cfg.from_checkpoint = True
            cfg.checkpoint_index, cfg.checkpoint_value = checkpoint.index, checkpoint.value
            cfg.checkpoint_label_type = "step"
        return bridge

    @classmethod
    def boot_native(cls, config: NativeConfig | Mapping[str, Any], tokenizer: Any = None) -> Any:
        """A small transformer with random weights, for studies of toy models.

        Args:
            config: a `NativeConfig`, or its fields.
            tokenizer: for text input; None: the one that the configuration's `tokenizer_name` names, if it does.

        Raises:
            TypeError: a field that does not exist, or that is missing, or whose value has the wrong type.
            ValueError: a value out of range, or fields that contradict each other.

        Example:
            >>> from bridge import TransformerBridge
            >>> bridge = TransformerBridge.boot_native(
            ...     {"n_layers": 1, "d_model": 8, "n_heads": 2, "d_vocab": 10, "n_ctx": 5, "attn_only": True}
            ... )
            >>> bridge([[1, 2, 3]]).shape
            torch.Size([1, 3, 10])
        """
        from transformers import AutoTokenizer

        from bridge.native import NativeConfig, NativeModel

        native = config if isinstance(config, NativeConfig) else NativeConfig(**config)
        if tokenizer is None and native.tokenizer_name is not None:
            tokenizer = AutoTokenizer.from_pretrained(native.tokenizer_name)
        return cls(NativeModel(native), tokenizer)  # type: ignore[call-arg]

    @classmethod
    def boot_embedded(cls) -> Any:
        """The small English model that comes with this package, with ground truth for what it knows.

        Example:
            >>> from bridge import TransformerBridge
            >>> TransformerBridge.boot_embedded().cfg.n_layers
            4
        """
        from bridge.embedded import MODEL_DIR

        bridge = cls.boot_transformers(str(MODEL_DIR))
        bridge.cfg.model_name = "embedded"  # type: ignore[attr-defined]
        return bridge


@contextmanager
def _bar_where_it_takes_a_while(repository: str) -> Iterator[None]:
    """Leaves transformers' progress bar out where a folder's weights are small, so that it would only flash up."""
    from transformers.utils import logging

    small = False
    if os.path.isdir(repository) and logging.is_progress_bar_enabled():
        files = [entry for entry in os.scandir(repository) if entry.name.endswith((".safetensors", ".bin", ".gguf"))]
        small = sum(entry.stat().st_size for entry in files) < SMALL
    if not small:
        yield
        return
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.enable_progress_bar()


def _override(config: Any, changes: Mapping[str, Any]) -> None:
    for name, value in changes.items():
        if not hasattr(config, name):
            raise ValueError(f"{type(config).__name__} has no field {name!r}")
        setattr(config, name, value)


def context_fields(config: Any, n_ctx: int | None) -> dict[str, int]:
    """What to change in a Hugging Face configuration for another context length.

    Raises:
        ValueError: it has none, or the model has learned fewer positions.
    """
    if n_ctx is None:
        return {}
    name = next((n for n in ("max_position_embeddings", "n_positions", "seq_length") if hasattr(config, n)), None)
    if name is None:
        raise ValueError(f"{type(config).__name__} has no context length to set to n_ctx={n_ctx}")
    learned = config.model_type in ("gpt2", "opt", "gpt_neo", "bert")
    if learned and n_ctx > getattr(config, name):
        raise ValueError(
            f"n_ctx={n_ctx} is more than the {getattr(config, name)} positions that this model has learned"
        )
    # A table of learned positions keeps its size; the limit that the bridge checks is its configuration's.
    return {} if learned else {name: n_ctx}


def _class_for(config: Any) -> Any:
    """The class that the configuration's `architectures` names, or the one that its type has a head for."""
    import transformers

    for name in config.architectures or ():
        found = getattr(transformers, name, None)
        if found is not None:
            return found
    return transformers.AutoModelForCausalLM


def _empty(loader: Any, kwargs: dict[str, Any]) -> nn.Module:
    """A model on the ``meta`` device."""
    config = kwargs["config"]
    options = {k: v for k, v in kwargs.items() if k in ("dtype", "attn_implementation")}
    with torch.device("meta"):
        if hasattr(loader, "from_config"):  # one of transformers' Auto classes
            return loader.from_config(config, trust_remote_code=kwargs["trust_remote_code"], **options)
        return loader._from_config(config, **options)


def _tokenizer(auto: Any, repository: str, where: dict[str, Any]) -> Any:
    """The repository's tokenizer, or None where a folder has none."""
    if os.path.isdir(repository):
        files = (
            "tokenizer.json",
            "tokenizer_config.json",
            "tokenizer.model",
            "vocab.json",
            "vocab.txt",
            "spiece.model",
        )
        if not any(os.path.exists(os.path.join(repository, name)) for name in files):
            return None
    return auto.from_pretrained(repository, **where)


def _first_devices(n: int) -> dict[int, int]:
    found = torch.cuda.device_count()
    if n > found:
        raise ValueError(f"n_devices={n}, but this machine has {found}")
    return {i: torch.cuda.get_device_properties(i).total_memory for i in range(n)}
