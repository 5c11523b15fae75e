"""Loading models: thin layers over `from_pretrained`."""

from __future__ import annotations

import copy
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from typing import Any, cast

import torch
import transformers
from torch import nn
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase

from bridge.hooks.names import suggestion
from bridge.loading.patches import keep_recording, patched
from bridge.loading.request import Files, Placement, Source, Variant
from bridge.native import NativeConfig, NativeModel

#: The files of which a folder with a tokenizer has one.
_OF_TOKENIZERS = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model",
)  # fmt: skip


class UnknownArgumentError(TypeError):
    """An argument for loading a model that neither the bridge nor Hugging Face's class knows.

    Args:
        name: of the argument.
        loader: what the class is called.
        known: the bridge's own arguments.
    """

    def __init__(self, name: str, loader: str, known: Iterable[str]) -> None:
        super().__init__(name, loader, tuple(known))  # with all of them it is made again in another process
        self.name, self.loader = name, loader

    def __str__(self) -> str:
        name, loader, known = self.args
        return f"{name!r} is an argument of neither the bridge nor {loader}.{suggestion(name, known)}"


def load(source: Source, placement: Placement, variant: Variant, progress: bool) -> tuple[nn.Module, Files]:
    """A model from the hub or a folder; see `TransformerBridge.boot_transformers`.

    Args:
        source: which files.
        placement: where its weights are to be.
        variant: what of it, and as what.
        progress: show the bars of loading.

    Raises:
        ValueError: arguments that exclude each other, a checkpoint that does not exist, or a model that is stored in
            HookedTransformer's own format.
        UnknownArgumentError: an argument that nobody knows.
    """
    files = source.found(check_format=True)
    config = variant.config(files)
    loader = variant.model_class or _class_for(config)
    arguments = {"config": config, **files.where} | variant.arguments(placement.arguments(variant.load_weights))
    with _bars(progress), patched(variant.patches, variant.weight_conversions, loader, config):
        try:
            model = (
                loader.from_pretrained(files.repository, **arguments)
                if variant.load_weights
                else _empty(loader, arguments)
            )
        except TypeError as error:
            _explain_unknown(error, variant.from_pretrained, loader)
            raise
        keep_recording(model, variant.patches)
    model = text_model(model) if variant.model_class is None else model
    if placement.device is not None:
        model.to(placement.device)
    return model, files


def loaded_already(model: nn.Module, source: Source, placement: Placement, variant: Variant) -> Files:
    """Puts a model that is loaded already on its device, and finds its files for the tokenizer.

    Raises:
        ValueError: an argument would change how it is loaded.
    """
    given = {
        **vars(variant), **variant.from_pretrained, **vars(placement), "gguf_file": source.gguf_file,
        "checkpoint_index": source.checkpoint_index, "checkpoint_value": source.checkpoint_value,
    }  # fmt: skip
    del given["device"], given["load_weights"], given["from_pretrained"]
    clash = [name for name, value in given.items() if value is not None] + ["load_weights"] * (not variant.load_weights)
    if clash:
        raise ValueError(f"{', '.join(clash)} would change how the model is loaded, but hf_model is loaded")
    files = source.found(check_format=False)
    if placement.device is not None:
        model.to(placement.device)
    return files


def tokenizer_of(files: Files, progress: bool) -> PreTrainedTokenizerBase | None:
    """The tokenizer that is kept with a model; None where a folder has none. A GGUF file holds its own."""
    alone = os.path.isdir(files.repository) and "gguf_file" not in files.where
    if alone and not any(os.path.exists(os.path.join(files.repository, name)) for name in _OF_TOKENIZERS):
        return None
    with _bars(progress):
        return AutoTokenizer.from_pretrained(files.repository, **files.where)


def make_native(
    config: NativeConfig | Mapping[str, Any], tokenizer: PreTrainedTokenizerBase | None, **changes: object
) -> tuple[NativeModel, PreTrainedTokenizerBase | None]:
    """A small transformer with random weights, and its tokenizer; see `TransformerBridge.boot_native`.

    Args:
        config, tokenizer: as there.
        changes: fields in place of the configuration's; None leaves one as it is.
    """
    native = copy.copy(config) if isinstance(config, NativeConfig) else NativeConfig(**config)
    for name, value in changes.items():
        if value is not None:
            setattr(native, name, str(value) if name == "device" else value)
    if tokenizer is None and native.tokenizer_name is not None:
        tokenizer = AutoTokenizer.from_pretrained(native.tokenizer_name)
    return NativeModel(native), tokenizer


def text_model(model: nn.Module) -> nn.Module:
    """The language model of a Gemma 3 that also reads images, which shares its modules; any other model as it is.

    Args:
        model: a loaded model.
    """
    if type(model).__name__ != "Gemma3ForConditionalGeneration":
        return model
    whole = cast(transformers.Gemma3ForConditionalGeneration, model)
    with torch.device("meta"):
        text = transformers.Gemma3ForCausalLM(cast(transformers.Gemma3TextConfig, whole.config.text_config))
    text.model, text.lm_head = whole.model.language_model, whole.lm_head
    text.generation_config = whole.generation_config
    text.config.name_or_path = whole.config.name_or_path
    return text.train(whole.training)  # type: ignore[no-any-return]


def _class_for(config: PreTrainedConfig) -> type[Any]:
    """The class that the configuration's `architectures` names, or the one that its type has a head for."""
    for name in config.architectures or ():
        found = getattr(transformers, name, None)
        if found is not None:
            return found
    return transformers.AutoModelForCausalLM


def _explain_unknown(error: TypeError, given: Collection[str], loader: type[Any]) -> None:
    """Raises our own error where Hugging Face's says that it does not know an argument of the user's."""
    for name in given:
        if f"unexpected keyword argument {name!r}" in str(error):
            known = {field.name for part in (Source, Placement, Variant) for field in fields(part)}
            known = known - {"name", "from_pretrained"} | {"hf_model", "tokenizer", "progress", "name_or_path"}
            raise UnknownArgumentError(name, loader.__name__, sorted(known)) from error


def _empty(loader: Any, kwargs: dict[str, Any]) -> nn.Module:
    """A model on the ``meta`` device."""
    config = kwargs["config"]
    options = {k: v for k, v in kwargs.items() if k in ("dtype", "attn_implementation")}
    with torch.device("meta"):
        if hasattr(loader, "from_config"):  # one of transformers' Auto classes
            return loader.from_config(config, trust_remote_code=kwargs["trust_remote_code"], **options)
        return loader._from_config(config, **options)


@contextmanager
def _bars(wanted: bool) -> Iterator[None]:
    """Loads without progress bars, unless they are asked for."""
    from transformers.utils import logging

    if wanted or not logging.is_progress_bar_enabled():
        yield
        return
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.enable_progress_bar()
