"""Parts of a model called alone: a block, an embedding, a norm, an MLP, the unembedding."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from adapters.inputs import text_alone
from adapters.points import base_path, core_path, join
from bridge.arguments import shown
from bridge.hooks.context import forward_pass
from bridge.hooks.names import suggestion
from bridge.hooks.studied_bridge import StudiedBridge
from bridge.run.inputs import RunnableBridge


def paths_of_parts(bridge: StudiedBridge) -> Iterator[tuple[str, str]]:
    """Yield the names of parts, and the paths of the modules that implement them.

    Args:
        bridge: the bridge.
    """
    declared, base = bridge.architecture, base_path(bridge.original_model)
    for stack in declared.stacks:
        for i in range(len(stack.modules(bridge.original_model.get_submodule(base)))):
            block, path = f"{stack.name}.{i}", join(base, stack.place_of(i))
            yield block, path
            for part, place in stack.block_at(i).module_paths.items():
                yield f"{block}.{part}", join(path, place)
        if stack.final_norm:
            name = "ln_final" if stack.name == "blocks" else f"{stack.name}_final_ln"
            yield name, join(base, stack.final_norm.path)
    if declared.embedding.tokens:
        yield "embed", join(base, declared.embedding.tokens)
    if declared.embedding.positions:
        yield "pos_embed", join(base, declared.embedding.positions)
    if declared.readout.path:
        yield "unembed", join(core_path(bridge.original_model), declared.readout.path)


def path_of_part(bridge: StudiedBridge, name: str, paths: Mapping[str, str]) -> str | None:
    """Return the path of the module that implements a part; None if no single module does.

    Args:
        bridge: the bridge.
        name: the part, such as ``blocks.0.mlp``.
        paths: those of `paths_of_parts`, and perhaps others.
    """
    path = paths.get(name)
    point = bridge.hook_dict.get(f"{name}.hook_normalized")
    if path is None and point is not None and point.point.site.kind == "output":
        return point.point.site.path  # a norm behind attention or the MLP
    return path


def takes_one_tensor(module: nn.Module) -> bool:
    """Tell whether a module can be called with one tensor.

    Args:
        module: the module.
    """
    _, _, *others = inspect.signature(type(module).forward).parameters.values()
    return all(
        p.default is not p.empty or p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in others
    )


def called(module: nn.Module, *inputs: Any, **kwargs: Any) -> Tensor:
    """Call a module of the model as a forward pass of its own, in which hooks run, and return its
    first output.

    Args:
        module: the module.
        inputs, kwargs: its arguments.
    """
    with forward_pass():
        output = module(*inputs, **kwargs)
    return output if isinstance(output, Tensor) else output[0]  # type: ignore[no-any-return]


def unembedded(bridge: StudiedBridge, x: Tensor, *, scaled: bool = True) -> Tensor:
    """Return the logits of the unembedding's input, before a soft cap: ``x @ W_U + b_U``.

    Args:
        bridge: the bridge.
        x: the normed residual stream, ``[batch, pos, d_model]``.
        scaled: apply the factor of the unembedding's input, too.
    """
    readout = replace(bridge.architecture.readout, soft_cap=None)
    x = x * readout.factor_in if scaled else x
    module = bridge.core.get_submodule(readout.path)
    return readout.logits(called(module, x), bridge.core)


def call_part(bridge: RunnableBridge, name: str, input: Any, **kwargs: Any) -> Tensor:
    """Call a part of the model; see `TransformerBridge.call_part`."""
    above, _, last = name.rpartition(".")
    if above == "blocks" and last.isdigit():
        layers = {"start_at_layer": int(last), "stop_at_layer": int(last) + 1}
        return bridge(input, **text_alone(bridge.core) | layers | kwargs)  # type: ignore[no-any-return]
    if name == "embed" and "hook_embed" in bridge.hook_dict.keys() | bridge.names.aliases:
        _, cache = bridge.run_with_cache(input, names_filter="hook_embed", stop_at_layer=0)
        return cache["hook_embed"]
    paths = dict(paths_of_parts(bridge))
    known = {point.rpartition(".hook_")[0] for point in bridge.hook_dict} | paths.keys()
    if name not in known:
        raise AttributeError(f"the model has no part {name!r}.{suggestion(name, known)}")
    path = path_of_part(bridge, name, paths)
    module = None if path is None else bridge.original_model.get_submodule(path)
    is_whole = last.startswith("ln") or name == "unembed" or _is_output_of(bridge, name, path)
    if module is None or not is_whole or not takes_one_tensor(module):
        raise TypeError(_why_not_called(name, path))
    _check_stream(name, module, input)
    if name != "unembed":
        return called(module, input, **kwargs)
    if why := bridge.architecture.why_no_logit_sum():
        raise TypeError(
            f"unembed cannot be called by itself, as {why}. bridge(residual,"
            f" start_at_layer={bridge.cfg.n_layers}) computes the logits of the last block's output"
        )
    return unembedded(bridge, input)


def _is_output_of(bridge: StudiedBridge, name: str, path: str | None) -> bool:
    """Tell whether the output of the module at a path is what an MLP's hook point shows."""
    point = f"{name}.hook_out"
    if not name.endswith(".mlp") or point not in bridge.hook_dict.keys() | bridge.names.aliases:
        return False
    hook = bridge.names.find(point)
    return hook.view.identity and (hook.point.site.path, hook.point.site.kind) == (path, "output")


def _why_not_called(name: str, path: str | None) -> str:
    """Return the message about a part that cannot be called, with what can."""
    stack, number, *_ = [*name.split("."), ""]
    block = ""
    if stack == "blocks" and number.isdigit():
        block = (
            f": call its block, bridge.blocks[{number}](residual), inside of `with"
            f" bridge.hooks(...)` to read or change {name},"
        )
    own = ""
    if path is not None:
        own = (
            f" or the model's own module, bridge.original_model.get_submodule({path!r}), with its"
            " arguments"
        )
    return f"{name} cannot be called by itself{block or ': run the model,'}{own}".rstrip(",")


def _check_stream(name: str, module: nn.Module, x: Any) -> None:
    """Check the input of a norm, an MLP or the unembedding.

    Raises:
        TypeError: not a tensor of numbers.
        ValueError: vectors of another width.
    """
    if not isinstance(x, Tensor) or not x.is_floating_point():
        raise TypeError(f"{name} takes a tensor [batch, pos, d_model] of numbers; it is {shown(x)}")
    weight = getattr(module, "weight", None)
    if isinstance(weight, Tensor) and weight.ndim == 1 and x.shape[-1:] != weight.shape:
        raise ValueError(
            f"{name} takes vectors of width {len(weight)}; the input is {list(x.shape)}"
        )
