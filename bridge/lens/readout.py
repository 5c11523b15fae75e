"""From a stream to logits: the model's own readout, under the hooks and weights of the reading."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from adapters.points import module_at, path_from
from bridge.hooks.context import CURRENT, RunContext, setting
from bridge.hooks.hooks import HookPoint
from bridge.modules import state_of
from bridge.run.inputs import RunnableBridge

#: A function from a stream and its layer to logits.
Decode = Callable[[Tensor, int], Tensor]

KINDS = ("normed", "raw")


def decoder(bridge: RunnableBridge, kind: str, names: Mapping[str, Any]) -> Decode:
    """Return the function from a stream and its layer to logits.

    Args:
        bridge, kind: as for `lens`.
        names: the names of each row's adapters, if rows have different ones.

    Raises:
        ValueError: there is no such kind, or the model has no unembedding to read with.
    """
    n = bridge.cfg.n_layers
    if "unembed.hook_out" not in bridge.hook_dict:
        raise ValueError(
            f"{bridge.cfg.model_name} has no unembedding: its stream cannot be read as tokens"
        )
    if kind == "raw":
        return _raw(bridge)
    if kind != "normed":
        raise ValueError(f"kind is {kind!r}; it must be {', '.join(map(repr, KINDS))} or a Lens")
    if bridge.architecture.pooled is not None:
        return _classified(bridge)
    return lambda stream, layer: bridge(stream, start_at_layer=n, **names)


def _raw(bridge: RunnableBridge) -> Decode:
    """Return a decoder that applies only the unembedding (`W_U` and `b_U`), without a soft cap.

    Raises:
        ValueError: the unembedding does not read vectors of the stream's width.
    """
    readout = replace(bridge.architecture.readout, soft_cap=None)
    unembed = bridge.core.get_submodule(readout.path)
    width = getattr(unembed, "in_features", bridge.cfg.d_model)
    if width != bridge.cfg.d_model:
        raise ValueError(
            f"the unembedding of {bridge.cfg.model_name} reads vectors of width {width}, not of the"
            f" stream's {bridge.cfg.d_model}: use another kind than 'raw'"
        )
    return lambda stream, layer: readout.logits(
        unembed.forward(stream * readout.factor_in), bridge.core
    )


def _classified(bridge: RunnableBridge) -> Decode:
    """Read each position of an image through the final norm and the classifier's head.

    The head reads one position, or a mean of several; in that case its logits at the end are the
    mean of these readings.

    Raises:
        ValueError: the norm reads that mean.
    """
    if why := bridge.architecture.why_no_logit_sum():
        raise ValueError(f"{bridge.cfg.model_name}: {why}")
    read = _raw(bridge)
    final = bridge.architecture.stack.final_norm
    if final is None:
        return read
    norm = bridge.original_model.get_submodule(path_from(bridge.original_model, final.path))
    return lambda stream, layer: read(norm.forward(stream), layer)


def _numbers_of(bridge: RunnableBridge) -> list[tuple[str, object]]:
    """Return the numeric fields of a model and its configuration, such as a soft cap, by name.
    Logits depend on some of them.
    """
    owners = (bridge.core.config.get_text_config(decoder=True), bridge.core)
    return [
        (name, x) for owner in owners for name, x in vars(owner).items() if type(x) in (int, float)
    ]


def _modules_behind(bridge: RunnableBridge, behind: Sequence[HookPoint]) -> list[nn.Module]:
    """Return the modules of the hook points after the blocks, and the output layer."""
    paths = dict.fromkeys(hook.point.site.path for hook in behind)
    modules = [module_at(bridge.original_model, path) for path in paths if path]
    own = bridge.core.get_output_embeddings()
    # Without one there is a classifier's head, which is a hook point.
    return modules if own is None else [own, *modules]


def functions_at(hooks: Sequence[HookPoint]) -> list[tuple[str, object]]:
    """Return the user's functions that change the activations of hook points, with their names."""
    return [
        (hook.name, listener.fn)
        for hook in hooks
        if hook.listeners
        for listener in hook.visible_listeners()
        if listener.kind == "fwd"
    ]


def as_read(
    bridge: RunnableBridge, decode: Decode, hooked: bool, maps: nn.Module | None = None
) -> Decode:
    """Return a decoder that raises an error if hooks or weights after the blocks have changed.

    Args:
        bridge: the bridge.
        decode: maps a stream and its layer to logits.
        hooked: whether decoding runs modules after the blocks, so that hooks there matter. (Hooks
            elsewhere have already acted on the streams.)
        maps: a trained lens, which is applied first.
    """
    behind = [hook for hook in bridge.hook_dict.values() if hook.point.depth >= bridge.cfg.n_layers]
    modules = _modules_behind(bridge, behind)
    if maps is not None:
        modules.append(maps)

    def hooks() -> list[tuple[str, object]]:
        return functions_at(behind) if hooked else []

    hooks_then = hooks()

    def weights() -> tuple[object, ...]:
        return (*[state_of(module) for module in modules], *_numbers_of(bridge))

    weights_then = weights()

    def decoded(stream: Tensor, layer: int) -> Tensor:
        if hooks() != hooks_then:
            names = ", ".join(dict.fromkeys(name for name, _ in (*hooks_then, *hooks())))
            raise ValueError(
                f"the hooks at {names} have changed since this reading was made: ask it"
                " inside of the same `with` statement, or read again"
            )
        if weights() != weights_then:
            raise ValueError(
                "the weights behind the blocks were changed since this reading was made (processed,"
                " trained, written to, or adapters switched), or the lens or a number of the"
                " configuration: read again"
            )
        here = CURRENT.get()
        context = RunContext(here.shared, generation=here.generation, inherited=here.shared)
        with setting(CURRENT, context):
            return decode(stream, layer)

    return decoded


def unembedding_hash(bridge: RunnableBridge) -> str:
    """Return the hash by which the package `tuned-lens` identifies an unembedding.

    It covers only a few numbers, rounded to one decimal, so a different unembedding may have the
    same hash.

    Args:
        bridge: the bridge.

    Example:
        >>> from bridge import TransformerBridge
        >>> from bridge.lens import unembedding_hash
        >>> len(unembedding_hash(TransformerBridge.boot_embedded()))
        64
    """
    return hashlib.sha256(np.array_str(_unembedding(bridge), precision=1).encode()).hexdigest()


def exact_hash(bridge: RunnableBridge) -> str:
    """Return the hash of all numbers of an unembedding, which must not be on the ``meta``
    device."""
    return hashlib.sha256(np.ascontiguousarray(_unembedding(bridge)).tobytes()).hexdigest()


def _unembedding(bridge: RunnableBridge) -> NDArray[np.float32]:
    weight: Tensor = bridge.core.get_output_embeddings().weight
    return weight.detach().cpu().float().numpy()
