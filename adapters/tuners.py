"""PEFT's layers around modules of the model: which module computes, and what it needs to know.

Most of PEFT's layers are functions of their input, and hook points treat them as the layer that
they wrap. Three kinds are not: tuned norms keep the parameters in a copy, adapters of parameters
wrap a module whose attributes stay inside, and some layers depend on the call (activated LoRA on
its tokens, Poly on ``task_ids``, X-LoRA on the prompt).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


def working_norm(module: nn.Module) -> nn.Module:
    """Return the norm that is computed: with PEFT's LN tuning, the active copy; otherwise the
    module.

    Args:
        module: a norm, or PEFT's layer around one.
    """
    tuned: Any = module
    if not hasattr(module, "ln_tuning_layers"):
        return module
    copies: nn.ModuleDict = tuned.ln_tuning_layers
    if tuned.disable_adapters:
        # A merged layer has exchanged the two.
        return copies[tuned.merged_adapters[0]] if tuned.merged else tuned.base_layer
    if tuned.merged or not tuned.active_adapters:
        base: nn.Module = tuned.base_layer
        return base
    return copies[tuned.active_adapters[0]]


def is_tuned_norm(module: nn.Module) -> bool:
    """Tell whether a module is PEFT's layer around a norm."""
    return hasattr(module, "ln_tuning_layers")


def holder_of_parameters(module: nn.Module) -> nn.Module:
    """Return the module that computes inside PEFT's wrappers of its parameters
    (``target_parameters=``) or of a trained copy (``modules_to_save=``).

    Args:
        module: any module.
    """
    while True:
        if wraps_parameters(module):
            module = module.get_submodule("base_layer")
        elif isinstance(getattr(module, "modules_to_save", None), nn.ModuleDict):
            module = _trained_copy(module)
        else:
            return module


def _trained_copy(wrapper: Any) -> nn.Module:
    """Return the copy that a wrapper of ``modules_to_save=`` calls, or the original module."""
    copies: nn.ModuleDict = wrapper.modules_to_save
    active: str = next(iter(wrapper.active_adapters), "")
    if wrapper.disable_adapters or active not in copies:
        original: nn.Module = wrapper.original_module
        return original
    return copies[active]


@contextmanager
def no_hooks_of_rows_left(model: nn.Module) -> Iterator[None]:
    """Remove the hooks that PEFT leaves on its layers when a call ends in an error, as a run does
    that stops at a layer.

    They hold each row's adapters (``adapter_names=``) or activation offsets (activated LoRA), and
    would act in every later run.

    Args:
        model: PEFT's model.
    """
    before = {module: {*module._forward_pre_hooks} for module in model.modules()}
    try:
        yield
    finally:
        for module, present in before.items():
            for key in {*module._forward_pre_hooks} - present:
                function = getattr(module._forward_pre_hooks[key], "func", None)
                if getattr(function, "__module__", "").startswith("peft."):
                    del module._forward_pre_hooks[key]
                    module._forward_pre_hooks_with_kwargs.pop(key, None)


def tells_layers_of_rows(model: nn.Module, arguments: Collection[str]) -> bool:
    """Tell whether PEFT passes its layers something about each row of a call, by hooks.

    Args:
        model: a model, or PEFT's around one.
        arguments: the names of the call's arguments.
    """
    return "adapter_names" in arguments or acts_by_tokens(model) == "activated LoRA"


def wraps_parameters(module: nn.Module) -> bool:
    """Tell whether a module is PEFT's wrapper of another one's parameter."""
    return hasattr(module, "base_layer") and isinstance(
        getattr(module, "parameter_name", None), str
    )


def is_of_peft(model: nn.Module, path: str) -> bool:
    """Tell whether the module at a path, or its nearest parent, is of a PEFT class."""
    while path:
        try:
            return type(model.get_submodule(path)).__module__.startswith("peft.")
        except AttributeError:
            path = path.rpartition(".")[0]
    return False


def depends_on_call(module: nn.Module) -> str:
    """Return what a PEFT layer depends on besides its input; "" for nothing, and for layers that
    are not PEFT's.

    Args:
        module: any module.
    """
    if not hasattr(module, "base_layer"):
        return ""
    variants: Any = getattr(module, "lora_variant", {})
    if any(type(variant).__name__.startswith("ALora") for variant in variants.values()):
        return "activated LoRA acts from its invocation tokens on"
    if type(module).__module__.startswith("peft.tuners.poly"):
        return "Poly chooses by task_ids"
    if "forward" in module.__dict__:
        return "its forward was replaced, as X-LoRA does to weigh adapters by the prompt"
    return ""


def acts_by_tokens(model: nn.Module) -> str:
    """Return the name of a kind of PEFT adapter that depends on the tokens of a call; "" if there
    is none.

    Args:
        model: a model, or PEFT's around one.
    """
    configs: Any = getattr(model, "peft_config", {})
    for config in configs.values() if isinstance(configs, dict) else ():
        if getattr(config, "alora_invocation_tokens", None):
            return "activated LoRA"
        if "XLORA" in str(config.peft_type):
            return "X-LoRA"
    return ""


def takes_task_ids(model: nn.Module) -> bool:
    """Tell whether PEFT's model selects adapters by the argument ``task_ids`` (Poly, multitask
    prompts)."""
    configs: Any = getattr(model, "peft_config", {})
    kinds = [str(config.peft_type) for config in configs.values()] if configs else []
    return any(word in kind for kind in kinds for word in ("POLY", "MULTITASK_PROMPT"))
