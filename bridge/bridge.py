"""`TransformerBridge`: an unmodified Hugging Face model with hook points."""

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
    """A Hugging Face model with hook points; the model itself is not changed.

    Its parameters, state dict, mode and device are the model's own. A hook point without listeners
    has no cost.

    Args:
        hf_model: a model of a supported family or a subclass, a PEFT model around one, or any other
            model.
        tokenizer: its tokenizer, which is never modified. Without one, the bridge takes tokens
            only.
        automatic: if the model's class has no adapter, infer one from a run on a few tokens, verify
            it on the model, and log it (logger `bridge`); `offered` lists its hook points. False:
            raise an error instead. ``"always"``: infer one even if the class has an adapter.
        inputs: the inputs of that run besides tokens, such as images or sound, by the names of the
            model's arguments, as its processor returns them. None: random inputs, with the sizes of
            its configuration.
        declaration: an earlier declaration of such a model, used instead of inference: the result
            of `declaration`, or the file that it was saved in. It is verified on this model in a
            few runs.
        cache_declaration: store the inferred declaration in a file; the next time such a model is
            wrapped, it is only verified, in a few runs. (Files are in
            ``~/.cache/transformer-bridge``, or in the environment's ``TRANSFORMER_BRIDGE_CACHE``;
            if that is set and empty, nothing is stored.)
        compare_edits: if the model is sharded across processes, compare the hooks' results for
            activations and gradients.
        patience: if the model is sharded across processes, how many seconds a hook waits for the
            other processes' hooks.

    Attributes:
        original_model: the model.
        core: the Hugging Face model, without wrappers (PEFT, `torch.compile`).
        tokenizer: the tokenizer.
        cfg: facts about the model.
        names: hook points by name and alias.

    Raises:
        UnsupportedModelError: the model's class has no adapter, and none could be inferred, or
            `automatic` is False.
        DeclarationError: the declaration is damaged, belongs to another model, or does not hold for
            this one.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> from bridge import TransformerBridge
        >>> bridge = TransformerBridge(
        ...     GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=10))
        ... )
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
        """Load a model from the hub or a folder.

        Args:
            model_name: a hub name, one of HookedTransformer's short names (``gpt2-small``,
                ``pythia-70m``), or a folder (which needs no network).
            hf_model: use this model instead of loading one.
            tokenizer: use this tokenizer instead of loading one.
            hf_config_overrides: fields of the Hugging Face configuration to change.
            device: the model's device; None: Hugging Face's choice.
            dtype: the dtype of its weights; None: Hugging Face's choice.
            load_weights: False for a model without weights (on the ``meta`` device), to list its
                hook points.
            trust_remote_code: as for `from_pretrained`.
            model_class: the class to load; None: the configuration's architecture.
            device_map, max_memory: as for `from_pretrained` (accelerate).
            n_devices: spread the model evenly over this many accelerators.
            n_ctx: the context length, in tokens.
            revision: a branch, tag or commit of the hub's repository.
            checkpoint_index, checkpoint_value: a training checkpoint, by position in the list or by
                step (Pythia and stanford-crfm models).
            attn_implementation, cache_dir, force_download, local_files_only, token: as for
            `from_pretrained`.
            patches: replacements for transformers' module classes, by name or name pattern, for
                this load only (``{"LlamaAttention": MyAttention}``), as in
                `transformers.monkey_patching`.
            weight_conversions: if a patch changes the layout of weights, a list of transformers'
                `WeightConverter` and `WeightRenaming`, by model type or class name.
            gguf_file: a GGUF file of the repository, whose weights are dequantised.
            quantization_config: how to quantise the weights while they are loaded, as for
                `from_pretrained`.
            progress: show progress bars.
            from_pretrained: further arguments of the class's `from_pretrained`.

        For a multimodal Gemma 3 checkpoint, the text model is loaded.

        Raises:
            TypeError: a patch that is not a module class, or an unknown argument.
            ValueError: arguments that exclude each other, a checkpoint that does not exist, or a
                model that is stored in HookedTransformer's own format.

        Example:
            >>> from bridge import TransformerBridge
            >>> from bridge.embedded import MODEL_DIR
            >>> TransformerBridge.boot_transformers(str(MODEL_DIR)).cfg.n_layers
            4
        """
        request = loading.loading.LoadRequest(
            name=model_name,
            revision=revision,
            checkpoint_index=checkpoint_index,
            checkpoint_value=checkpoint_value,
            gguf_file=gguf_file,
            cache_dir=cache_dir,
            force_download=force_download,
            local_files_only=local_files_only,
            token=token,
            trust_remote_code=trust_remote_code,
            device=device,
            device_map=device_map,
            n_devices=n_devices,
            max_memory=max_memory,
            model_class=model_class,
            hf_config_overrides=hf_config_overrides,
            n_ctx=n_ctx,
            dtype=dtype,
            attn_implementation=attn_implementation,
            quantization_config=quantization_config,
            load_weights=load_weights,
            patches=patches,
            weight_conversions=weight_conversions,
            from_pretrained=from_pretrained,
        )
        if hf_model is None:
            model, files = loading.loading.load(request, progress)
        else:
            model = hf_model
            files = loading.loading.loaded_already(hf_model, request)
        if tokenizer is None:
            tokenizer = loading.loading.tokenizer_of(files, progress)
        bridge = cls(model, tokenizer)
        if hf_model is None:
            bridge.restore_processing()
        for field, value in files.facts.items():
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
        """Create a small transformer with random weights, for toy models.

        Args:
            config: a `NativeConfig`, its fields, or a HookedTransformer configuration
                (`bridge.legacy`).
            tokenizer: the tokenizer for text input; None: the one in the configuration's
                `tokenizer_name`, if any.
            device, dtype, model_name: values that override the configuration's.

        Raises:
            TypeError: a field that does not exist, or that is missing, or whose value has the wrong
                type.
            ValueError: a value out of range, or fields that contradict each other.

        Example:
            >>> from bridge import TransformerBridge
            >>> bridge = TransformerBridge.boot_native(
            ...     {
            ...         "n_layers": 1,
            ...         "d_model": 8,
            ...         "n_heads": 2,
            ...         "d_vocab": 10,
            ...         "n_ctx": 5,
            ...         "attn_only": True,
            ...     }
            ... )
            >>> bridge([[1, 2, 3]]).shape
            torch.Size([1, 3, 10])
        """
        changes = {"device": device, "dtype": dtype, "model_name": model_name}
        return cls(*loading.loading.make_native(config, tokenizer, **changes))

    @classmethod
    def boot_embedded(
        cls, device: torch.device | str | None = None, dtype: torch.dtype | str | None = None
    ) -> Self:
        """Load the small English model that comes with this package, with ground truth for its
        knowledge.

        Args:
            device: its device; None: the CPU.
            dtype: the dtype of its weights; None: float32.

        Example:
            >>> from bridge import TransformerBridge
            >>> TransformerBridge.boot_embedded().cfg.n_layers
            4
        """
        bridge = cls.boot_transformers(str(embedded.MODEL_DIR), device=device, dtype=dtype)
        bridge.cfg.model_name = "embedded"
        return bridge
