"""Torch hooks of the user's, beside edits that compute a module's output anew.

Some edits, and gradients at some hook points, run a module's forward a second time, on heads' own
inputs or behind an edited norm. A forward does not run torch hooks, so what a hook of the user's
changed, a value or only its gradient, would be lost silently: such runs are refused.

`refuse_other_hooks` compares the output that the model continues with with the module's own,
and `refuse_other_gradients` the last steps of their graphs.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from adapters.imports import is_compiling
from adapters.views import Call
from adapters.views.values import is_readable

#: Packages whose own hooks on a model leave what a module computes as it is.
_PACKAGES = ("torch", "transformers", "accelerate", "peft", "bridge", "adapters")


def is_users_own(hook: object) -> bool:
    """Tell whether a torch hook was written by the user, and not by one of the packages."""
    return (getattr(hook, "__module__", None) or "").partition(".")[0] not in _PACKAGES


def refuse_other_hooks(x: Tensor, module: nn.Module, entered: Tensor, call: Call) -> None:
    """Reject an edit that computes a module's output anew where a torch hook of the user's changed
    this output, or its gradient: the change would be lost.

    Args:
        x: the output, as the model continues with it. An earlier edit of this call may have
            computed it anew, after it was compared.
        module: the module.
        entered: the module's input.
        call: the call at the hook point's site, of this module or of one that reads its output.

    Raises:
        RuntimeError: a hook changed it.
    """
    if is_compiling() or not is_readable(x):
        return
    done = f"compared {id(module)}"
    if done in call.scratch:
        return
    call.scratch[done] = True
    before = () if module is call.module else call.module._forward_pre_hooks.values()
    if any(map(is_users_own, [*module._forward_hooks.values(), *before])):
        with torch.no_grad():
            own = module.forward(entered, **(call.told if module is call.module else {}))
        # The same function of the same numbers: at most a last digit may differ.
        rounding = torch.finfo(x.dtype).eps
        if not torch.allclose(own.reshape(x.shape), x, rtol=rounding, atol=0, equal_nan=True):
            raise _lost(module, "changes this output")
    refuse_other_gradients(x, module, entered, call)


def refuse_other_gradients(x: Tensor, module: nn.Module, entered: Tensor, call: Call) -> None:
    """Reject an edit that computes a module's output anew where a torch hook of the user's may have
    changed this output's gradient, and no value.

    Args:
        x, module, entered, call: as for `refuse_other_hooks`.

    Raises:
        RuntimeError: a hook may have changed it.
    """
    if not x.requires_grad or is_compiling():
        return
    hooks = [*module._backward_hooks.values(), *module._backward_pre_hooks.values()]
    if module is not call.module:
        hooks += [*call.module._backward_hooks.values(), *call.module._backward_pre_hooks.values()]
    for tensor in (x, x._base):
        hooks += (getattr(tensor, "_backward_hooks", None) or {}).values()
    changes = any(map(is_users_own, hooks))
    if not changes and any(map(is_users_own, module._forward_hooks.values())):
        own = module.forward(entered, **(call.told if module is call.module else {}))
        changes = _last_step(x) != _last_step(own)
    if changes:
        raise _lost(module, "may change the gradient of this output")


def _last_step(x: Tensor) -> str | None:
    """Return the name of the last step of a tensor's graph that is not a view of another."""
    step = x.grad_fn
    while step is not None and "View" in step.name():
        step = step.next_functions[0][0]
    return None if step is None else step.name()


def _lost(module: nn.Module, change: str) -> RuntimeError:
    return RuntimeError(
        "edits of this hook point, and gradients there, compute the output of a"
        f" {type(module).__name__} anew, and a torch hook {change}, which would be lost: remove the"
        " torch hook, or use a hook point behind it"
    )
