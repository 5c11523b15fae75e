"""What stands between the values and what enters the output projection of a recorded attention."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from adapters.attention import GATE_FUNCTIONS, AddedOutput, Attention, Gate, Projection, SinkGate
from adapters.automatic.attention import FoundAttention
from adapters.automatic.layouts import heads_view, parameter_of, relative
from adapters.automatic.norms import rounded
from adapters.automatic.parts import Norms
from adapters.mixers.part import axes_of
from adapters.norms import Norm
from adapters.observe.errors import NotFound
from adapters.observe.gradients import by_position, is_linear_through
from adapters.observe.tolerance import agree, worked_out
from adapters.paths import join
from adapters.views import Affine


def with_values(found: FoundAttention, declared: Attention) -> Attention:
    """The declaration with the norm of the values, and what stands between `pattern @ v` and `z`.

    Args:
        found: the attention.
        declared: its declaration without.

    Raises:
        NotFound: something unknown does.
    """
    v = found.normed("v").double()
    pattern = found.softmax.pattern[..., : v.shape[1]].double()
    mixed = torch.einsum("bhqk,bkhd->bqhd", pattern, v.repeat_interleave(found.n_heads // v.shape[2], dim=2))
    z = found.z_by_head.detach().double()
    if mixed.shape != z.shape:
        raise NotFound(f"what enters its output projection is {z.shape[-1]} wide for each head, values {v.shape[-1]}")

    def is_z(x: Tensor) -> bool:
        return agree(x, z, found.z.value)

    if is_z(mixed):
        return declared
    factor = rounded(float((mixed * z).sum() / (mixed * mixed).sum()))
    made, entered = found.made_by("v").left[0].live, found.found["v"][0].entered
    if is_z(mixed * factor) and entered and is_linear_through(found.z_by_head, made, entered.live):
        return replace(declared, z_transform=Affine(factor))
    flat = mixed.flatten(2)
    for call in found.sources:
        behind = call.entered if not call.is_linear and call.left[0].mark == found.z.mark else None
        if behind and agree(behind.value.flatten(2), flat, found.z.value):
            norm = Norm(relative(call.path, found.owner.path), found.norms[call])
            return replace(declared, z_transform=norm)
    for call, sets in found.gates:
        rows = by_position(call.left[0].value, found.recording.batch, found.query_pos)
        gate = None if rows is None else rows[..., torch.tensor(sets, device=rows.device)].double()
        for name, function in GATE_FUNCTIONS.items():
            if gate is not None and gate.shape[-1] in (1, z.shape[-1]) and is_z(mixed * function(gate)):
                view = heads_view(sets, call.left[0].value.shape[-1])
                path = relative(call.path, found.owner.path)
                return replace(declared, z_transform=Gate(Projection(path, view), name))
    rest = z - mixed
    bound = worked_out(found.z.value) * float(z.abs().max())
    if bool(((rest - rest[:1, :1]).abs() <= bound).all()):
        bias = parameter_of(found.owner.module, rest[0, 0], bound)
        if bias is not None:
            return replace(declared, v=replace(declared.v, bias=bias))
    for call in found.recording.between(found.owner.start, found.owner.end):
        added = call.left[0].value if call.left and call.is_leaf else None
        if (
            added is not None
            and added.shape == z.transpose(1, 2).shape
            and is_z(mixed + added.transpose(1, 2).double())
        ):
            return replace(declared, z_transform=AddedOutput(relative(call.path, found.owner.path)))
    total = found.softmax.scores.detach().double().logsumexp(-1).transpose(1, 2)[..., None]
    for name, parameter in found.owner.module.named_parameters(recurse=False):
        if parameter.shape == (found.n_heads,) and is_z(mixed * (total - parameter.detach()[:, None]).sigmoid()):
            return replace(declared, z_transform=SinkGate(name))
    raise NotFound("what enters its output projection is not pattern @ v: something unknown stands between")


def auxiliary_modules(found: FoundAttention, declared: Attention, norms: Norms) -> tuple[tuple[str, str], ...]:
    """The modules with parameters in an attention that play no known part, with the axes of what they make."""
    paths = [p.path for p in (declared.q, declared.k, declared.v, declared.gate) if p]
    paths += [each.norm.path for each in declared.projections.values() if each.norm]
    added = declared.z_transform.path if isinstance(declared.z_transform, AddedOutput) else None
    single = (declared.o, declared.q.latent, declared.k.latent, declared.position_bias, added)
    paths += [path for path in (*single, *(declared.score_bias_modules or ())) if path]
    owner = found.owner
    known = {join(owner.path, path) for path in paths} | {n.path for n in (found.part.pre, found.part.post) if n}
    latents = [
        call.entered.value for call in norms
        if call.entered and call.path in {join(owner.path, path) for path in single[1:3] if path}
    ]  # fmt: skip
    others = []
    for call in found.recording.between(max(owner.start, found.part.start), found.part.producer.end):
        own = call.is_leaf and any(True for _ in call.module.parameters(recurse=False)) and call not in norms
        own = own or (
            call in norms
            and not isinstance(call.module, nn.Dropout)
            and call.path not in known
            and call.end < found.part.producer.start
        )
        if not own or call.path in known or call.n_left != 1 or not call.left or call.left[0].key is not None:
            continue
        made = call.left[0].value
        before = any(made.shape[-1] >= x.shape[-1] and torch.equal(made[..., : x.shape[-1]], x) for x in latents)
        if not before and made.ndim > 1 and len(found.recording.of(call.path)) == 1:
            path = relative(call.path, owner.path)
            name = path.rpartition(".")[2].partition("@")[0]
            others.append((path, axes_of(name, made.shape, found.recording.batch, found.recording.pos)))
    return tuple(others)
