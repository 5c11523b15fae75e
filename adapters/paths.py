"""Where things are in a model: dotted paths."""

from __future__ import annotations

from torch import nn


def join(*parts: str) -> str:
    """Dotted paths one after another; empty ones are left out."""
    return ".".join(part for part in parts if part)


def has_module(model: nn.Module, path: str) -> bool:
    """Whether there is a module at a path."""
    for part in path.split("."):
        if not isinstance(model, nn.Module) or getattr(model, part, None) is None:
            return False
        model = getattr(model, part)
    return True


def members_of(modules: nn.Module) -> list[nn.Module]:
    """The modules in a list of modules; one that stands at two places is there twice, as `children` does not say."""
    return [module for module in modules._modules.values() if module is not None]


def core_path(model: nn.Module) -> str:
    """The path of the Hugging Face model inside what wraps it (PEFT, `torch.compile`), "" where nothing does."""
    path = ""
    while True:
        if hasattr(model, "get_base_model") and hasattr(model, "peft_config"):
            step, model = "base_model.model", model.get_base_model()  # type: ignore[operator]
        elif "_orig_mod" in model._modules:
            step, model = "_orig_mod", model.get_submodule("_orig_mod")
        else:
            return path
        path = join(path, step)


def base_path(model: nn.Module) -> str:
    """The path of the base model (the one without a head) inside `model`, "" where `model` is the base model."""
    core = core_path(model)
    module = model.get_submodule(core)
    prefix = getattr(module, "base_model_prefix", "")
    return join(core, prefix) if prefix and hasattr(module, prefix) else core


def path_from(model: nn.Module, path: str) -> str:
    """A declared path as one from `model`: it is relative to the base model, or, if it begins with a dot, to the model
    itself."""
    return join(core_path(model), path[1:]) if path.startswith(".") else join(base_path(model), path)
