"""`TransformerBridge`: a Hugging Face model, untouched, with hook points."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from adapters.config import ModelFields
from bridge import embedded, loading
from bridge.facade.generation import GenerationMethods


class TransformerBridge(GenerationMethods):
    """Wraps a Hugging Face model without changing it.

    Its parameters, state dict, mode and device are the model's own. Hook points cost nothing until someone listens.

    Args:
        hf_model: any model of a supported family, or a subclass, or a PEFT model around one; or one of any other.
        tokenizer: its tokenizer; it is never changed. Without one, the bridge takes tokens only.
        automatic: where the model's class has no adapter, infer one from a run on a few tokens, prove it on the model,
            and say so in the log (`bridge`); `offered` says what it has. False: refuse. ``"always"``: infer one where
            the class has an adapter, too.
        inputs: what the model needs for that run besides tokens, images or sound, by the names of its own arguments, as
            its processor returns them. None: made up, of the sizes that its configuration says.
        declaration: in place of all that, what was declared or inferred of such a model before: what `declaration`
            returned, or the file that it was saved in. It is proved on this model, in a few runs.
        cache_declaration: keep what is inferred in a file, and prove that, in a few runs, when such a model is wrapped
            the next time. (Files are in ``~/.cache/transformer-bridge``, or where the environment's
            ``TRANSFORMER_BRIDGE_CACHE`` says; where that is set and empty, nothing is kept.)
        compare_edits: where processes share the model, compare what hooks make of activations and gradients.
        patience: likewise, how many seconds a hook waits for those of the other processes.

    Attributes:
        original_model: the model.
        core: the Hugging Face model, without what wraps it (PEFT, `torch.compile`).
        tokenizer: the tokenizer.
        cfg: the facts about the model.
        names: hook points by name and alias.

    Raises:
        UnsupportedModelError: there is no adapter for the model's class, and none could be inferred, or was to be.
        DeclarationError: the declaration that was given is damaged, of another model, or does not hold of this one.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> from bridge import TransformerBridge
        >>> bridge = TransformerBridge(GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=10)))
        >>> bridge.blocks[1].attn.hook_z
        HookPoint(blocks.1.attn.hook_z: [batch pos n_heads d_head])
    """

    @classmethod
    def boot_transformers(
        cls,
        model_name: str,
        *,
        hf_model: nn.Module | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        hf_config_overrides: Mapping[str, object] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | str | None = None,
        load_weights: bool = True,
        trust_remote_code: bool = False,
        model_class: type[Any] | None = None,
        device_map: loading.loading.DeviceMap = None,
        n_devices: int | None = None,
        max_memory: loading.loading.MaxMemory = None,
        n_ctx: int | None = None,
        revision: str | None = None,
        checkpoint_index: int | None = None,
        checkpoint_value: int | None = None,
        attn_implementation: str | None = None,
        cache_dir: str | None = None,
        force_download: bool = False,
        local_files_only: bool = False,
        token: str | bool | None = None,
        patches: loading.patches.Patches | None = None,
        weight_conversions: loading.patches.WeightConversions | None = None,
        gguf_file: str | None = None,
        quantization_config: object = None,
        progress: bool = False,
        **from_pretrained: object,
    ) -> Self:
        """Loads a model from the hub or a folder.

        Args:
            model_name: a hub name, one of HookedTransformer's short names (``gpt2-small``, ``pythia-70m``), or a folder
                (which needs no network).
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
            patches: classes of modules in the place of transformers' own, by name or pattern of the name, for this
                load alone (``{"LlamaAttention": MyAttention}``), as `transformers.monkey_patching` has them.
            weight_conversions: where a patch changes the layout of weights, by model type or class name a list of
                transformers' `WeightConverter` and `WeightRenaming`.
            gguf_file: a GGUF file of the repository, whose weights are dequantised.
            quantization_config: how to quantise the weights while they are loaded, as for `from_pretrained`.
            progress: show the bars of loading.
            from_pretrained: what else the class's `from_pretrained` takes.

        Of a checkpoint of Gemma 3 with images, the text model is loaded.

        Raises:
            TypeError: a patch that is no class of modules.
            ValueError: arguments that exclude each other, a checkpoint that does not exist, or a model that is stored
                in HookedTransformer's own format.
            TypeError: an argument that nobody knows.

        Example:
            >>> from bridge import TransformerBridge
            >>> from bridge.embedded import MODEL_DIR
            >>> TransformerBridge.boot_transformers(str(MODEL_DIR)).cfg.n_layers
            4
        """
        asked = loading.loading.LoadRequest(
            name=model_name, revision=revision, checkpoint_index=checkpoint_index, checkpoint_value=checkpoint_value,
            gguf_file=gguf_file, cache_dir=cache_dir, force_download=force_download,
            local_files_only=local_files_only, token=token, trust_remote_code=trust_remote_code, device=device,
            device_map=device_map, n_devices=n_devices, max_memory=max_memory, model_class=model_class,
            hf_config_overrides=hf_config_overrides, n_ctx=n_ctx, dtype=dtype, attn_implementation=attn_implementation,
            quantization_config=quantization_config, load_weights=load_weights, patches=patches,
            weight_conversions=weight_conversions, from_pretrained=from_pretrained,
        )  # fmt: skip
        if hf_model is None:
            model, files = loading.loading.load(asked, progress)
        else:
            model, files = hf_model, loading.loading.loaded_already(hf_model, asked)
        bridge = cls(model, loading.loading.tokenizer_of(files, progress) if tokenizer is None else tokenizer)
        if hf_model is None:
            bridge.restore_processing()
        said = {"n_ctx": n_ctx, "n_devices": n_devices}
        for field, value in (files.facts | {name: n for name, n in said.items() if n is not None}).items():
            setattr(bridge.cfg, field, value)
        return bridge

    @classmethod
    def boot_native(
        cls,
        config: ModelFields | Mapping[str, object],
        tokenizer: PreTrainedTokenizerBase | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        model_name: str | None = None,
    ) -> Self:
        """A small transformer with random weights, for studies of toy models.

        Args:
            config: a `NativeConfig`, its fields, or a configuration of HookedTransformer's (`bridge.legacy`).
            tokenizer: for text input; None: the one that the configuration's `tokenizer_name` names, if it does.
            device, dtype, model_name: in place of the configuration's.

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
        return cls(*loading.loading.make_native(config, tokenizer, device=device, dtype=dtype, model_name=model_name))

    @classmethod
    def boot_embedded(cls, device: torch.device | str | None = None, dtype: torch.dtype | str | None = None) -> Self:
        """The small English model that comes with this package, with ground truth for what it knows.

        Args:
            device: where to put it; None: on the CPU.
            dtype: the type of its weights; None: float32.

        Example:
            >>> from bridge import TransformerBridge
            >>> TransformerBridge.boot_embedded().cfg.n_layers
            4
        """
        bridge = cls.boot_transformers(str(embedded.MODEL_DIR), device=device, dtype=dtype)
        bridge.cfg.model_name = "embedded"
        return bridge
