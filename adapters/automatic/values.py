"""What stands between the values and what enters the output projection of a recorded attention."""

from __future__ import annotations

from dataclasses import dataclass, replace

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
    between = _Between(found, mixed, z)
    if between.is_z(mixed):
        return declared
    if transform := between.factor() or between.norm() or between.gate():
        return replace(declared, z_transform=transform)
    if bias := between.bias():
        return replace(declared, v=replace(declared.v, bias=bias))
    if last := between.added() or between.sinks():
        return replace(declared, z_transform=last)
    raise NotFound("what enters its output projection is not pattern @ v: something unknown stands between")


@dataclass(frozen=True)
class _Between:
    """What may stand between `pattern @ v` and `z`, each looked for by itself; None where it is not that.

    Attributes:
        found: the attention.
        mixed: ``pattern @ v``, ``[batch, query, head, d_head]``.
        z: what enters the output projection, likewise.
    """

    found: FoundAttention
    mixed: Tensor
    z: Tensor

    def is_z(self, x: Tensor) -> bool:
        """Whether this is what enters the output projection."""
        return agree(x, self.z, self.found.z.value)

    def _relative(self, path: str) -> str:
        return relative(path, self.found.owner.path)

    def factor(self) -> Affine | None:
        """A constant."""
        factor = rounded(float((self.mixed * self.z).sum() / (self.mixed * self.mixed).sum()))
        made, entered = self.found.made_by("v").left[0].live, self.found.found["v"][0].entered
        known = self.is_z(self.mixed * factor) and entered
        return Affine(factor) if known and is_linear_through(self.found.z_by_head, made, known.live) else None

    def norm(self) -> Norm | None:
        """A norm over all heads, or each."""
        for call in self.found.sources:
            behind = call.entered if not call.is_linear and call.left[0].mark == self.found.z.mark else None
            if behind and agree(behind.value.flatten(2), self.mixed.flatten(2), self.found.z.value):
                return Norm(self._relative(call.path), self.found.norms[call])
        return None

    def gate(self) -> Gate | None:
        """A function of what a projection makes."""
        for call, sets in self.found.gates:
            rows = by_position(call.left[0].value, self.found.recording.batch, self.found.query_pos)
            gate = None if rows is None else rows[..., torch.tensor(sets, device=rows.device)].double()
            if gate is None or gate.shape[-1] not in (1, self.z.shape[-1]):
                continue
            for name, function in GATE_FUNCTIONS.items():
                if self.is_z(self.mixed * function(gate)):
                    view = heads_view(sets, call.left[0].value.shape[-1])
                    return Gate(Projection(self._relative(call.path), view), name)
        return None

    def bias(self) -> str | None:
        """The name of a parameter that is added to the values."""
        rest = self.z - self.mixed
        bound = worked_out(self.found.z.value) * float(self.z.abs().max())
        alike = bool(((rest - rest[:1, :1]).abs() <= bound).all())
        return parameter_of(self.found.owner.module, rest[0, 0], bound) if alike else None

    def added(self) -> AddedOutput | None:
        """The output of a module that reads the values, too."""
        for call in self.found.recording.between(self.found.owner.start, self.found.owner.end):
            made = call.left[0].value if call.left and call.is_leaf else None
            if made is None or made.shape != self.z.transpose(1, 2).shape:
                continue
            if self.is_z(self.mixed + made.transpose(1, 2).double()):
                return AddedOutput(self._relative(call.path))
        return None

    def sinks(self) -> SinkGate | None:
        """The sigmoid of what the scores add up to, less a parameter of each head."""
        total = self.found.softmax.scores.detach().double().logsumexp(-1).transpose(1, 2)[..., None]
        for name, parameter in self.found.owner.module.named_parameters(recurse=False):
            one_each = parameter.shape == (self.found.n_heads,)
            if one_each and self.is_z(self.mixed * (total - parameter.detach()[:, None]).sigmoid()):
                return SinkGate(name)
        return None


def auxiliary_modules(found: FoundAttention, declared: Attention, norms: Norms) -> tuple[tuple[str, str], ...]:
    """The modules with parameters in an attention that play no known part, with the axes of what they make."""
    owner, latent = found.owner, {path for path in (declared.q.latent, declared.k.latent) if path}
    added = declared.z_transform.path if isinstance(declared.z_transform, AddedOutput) else None
    single = (declared.gate and declared.gate.path, declared.position_bias, added, *(declared.score_bias_modules or ()))
    paths = [path for path in (*declared.submodules.values(), *latent, *single) if path]
    known = {join(owner.path, path) for path in paths} | {n.path for n in (found.part.pre, found.part.post) if n}
    latents = [
        call.entered.value for call in norms
        if call.entered and call.path in {join(owner.path, path) for path in latent}
    ]  # fmt: skip
    others = []
    for call in found.recording.between(max(owner.start, found.part.start), found.part.producer.end):
        if call in norms:
            own = not isinstance(call.module, nn.Dropout) and call.end < found.part.producer.start
        else:
            own = call.is_leaf and any(True for _ in call.module.parameters(recurse=False))
        if not own or call.path in known or call.whole is None:
            continue
        made = call.whole.value
        before = any(made.shape[-1] >= x.shape[-1] and torch.equal(made[..., : x.shape[-1]], x) for x in latents)
        if not before and made.ndim > 1 and len(found.recording.of(call.path)) == 1:
            path = relative(call.path, owner.path)
            name = path.rpartition(".")[2].partition("@")[0]
            others.append((path, axes_of(name, made.shape, found.recording.batch, found.recording.pos)))
    return tuple(others)
