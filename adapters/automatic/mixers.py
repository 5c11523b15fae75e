"""What can be shown inside a mixer: its own modules, and the functions that it convolves and recurs with."""

from __future__ import annotations

from adapters.automatic.recording import ModuleCall, Recording
from adapters.mixers.part import Mixer, axes_of, functions_of


def declared_mixer(path: str, out: str | None, out_key: int | None, owner: ModuleCall, recording: Recording) -> Mixer:
    """A mixer with what is inside of it.

    Args:
        path, out, out_key: as for `Mixer`.
        owner: its call.
        recording: the run.
    """
    modules = []
    for call in recording.between(owner.start, owner.end):
        parent, _, name = call.path.rpartition(".")
        once = len(recording.of(call.path)) == 1 and call.n_left == 1 and len(call.left) == 1
        if parent == owner.path and once and call.left[0].key is None and not name.startswith("act"):
            axes = axes_of(name, call.left[0].live.shape, recording.batch, recording.pos)
            modules.append((name, axes))
    return Mixer(path, out, out_key, tuple(modules), functions_of(owner.module))
