"""Decoding what a lens has read under the hooks, and with the weights, that it was read with."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from adapters.paths import module_at
from bridge.hooks.context import CURRENT, RunContext, in_context
from bridge.hooks.written import written_to
from bridge.lens.readable import Readable

Decode = Callable[[Tensor, int], Tensor]


def as_read(bridge: Readable, decode: Decode, hooked: bool) -> Decode:
    """The same decoding, refused where hooks or weights behind the blocks are not those of now.

    Args:
        bridge: the bridge.
        decode: from a stream and its layer to logits.
        hooked: it runs the model behind the blocks, and so sees the hooks there. (Others have done their work.)
    """
    behind = [hook for hook in bridge.hook_dict.values() if hook.point.depth >= bridge.cfg.n_layers]
    paths = dict.fromkeys(hook.point.site.path for hook in behind)
    own = bridge.core.get_output_embeddings()  # none: a classifier's head, which is a hook point
    modules = [*[own][: own is not None], *[module_at(bridge.original_model, path) for path in paths if path]]

    def hooks() -> list[tuple[str, object]]:
        active = [(hook.name, listener) for hook in behind if hook.listeners for listener in hook.visible_listeners()]
        return [(name, listener.fn) for name, listener in active if hooked and listener.kind == "fwd"]

    hooks_then, weights_then = hooks(), [written_to(module) for module in modules]

    def decoded(stream: Tensor, layer: int) -> Tensor:
        if hooks() != hooks_then:
            names = ", ".join(dict.fromkeys(name for name, _ in (*hooks_then, *hooks())))
            raise ValueError(
                f"the hooks at {names} are not those that this reading was made under: ask it inside of the same "
                "`with` statement, or read again"
            )
        if [written_to(module) for module in modules] != weights_then:
            raise ValueError(
                "the weights behind the blocks were changed since this reading was made (processed, trained, written "
                "to, or adapters switched): read again"
            )
        here = CURRENT.get()
        with in_context(RunContext(here.shared, generation=here.generation, inherited=here.shared)):
            return decode(stream, layer)

    return decoded
