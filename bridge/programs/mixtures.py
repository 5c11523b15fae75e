"""The experts of a mixture in a program: all, one after the other, so that no code depends on which were chosen."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from adapters.experts import first_projection, gate_and_up, has_gate, joined, stacked
from adapters.views import Call
from bridge.programs.program_pass import current
from bridge.programs.taps import LoweredTap


class LoweredExperts(LoweredTap):
    """Experts whose weights are in one parameter for all. Its channels are those of `bridge.taps.experts`.

    transformers' own loop over the experts leaves out those that no token was sent to, which is a question to the
    values; here these have no rows.
    """

    def install(self) -> None:
        """Takes the place of the module's forward.

        Raises:
            ValueError: the experts are kept in another way than in one parameter for each projection and expert.
        """
        if stacked(self.module):
            name = next(iter(self.steps.values()))[0].hook.name
            raise ValueError(f"{name} is inside experts whose matrices are stacked, which a program cannot reach")
        super().install()

    def __call__(self, *args: object, **kwargs: object) -> object:
        """The module's forward."""
        module: Any = self.module
        program_pass = current(self.here)
        call = Call(module, args, kwargs)
        given: Any = (*args, *kwargs.values())
        hidden_states, top_k_index, top_k_weights = given
        total = torch.zeros_like(hidden_states)
        chosen = torch.nn.functional.one_hot(top_k_index, num_classes=module.num_experts + 1).permute(2, 1, 0)
        for e in range(module.num_experts):
            rank, token = torch.where(chosen[e])
            both = _linear(
                module, first_projection(module), self.show(f"{e}.in", hidden_states[token], call, program_pass), e
            )
            if not has_gate(module):
                both = self.show(f"{e}.pre", both, call, program_pass)
            elif f"{e}.gate" in self.steps or f"{e}.pre" in self.steps:
                gate, up = gate_and_up(module, both)
                gate, up = (
                    self.show(f"{e}.gate", gate, call, program_pass),
                    self.show(f"{e}.pre", up, call, program_pass),
                )
                both = joined(module, gate, up)
            made = module._apply_gate(both) if has_gate(module) else module.act_fn(both)
            post = self.show(f"{e}.post", made, call, program_pass)
            out = self.show(f"{e}.out", _linear(module, "down_proj", post, e), call, program_pass)
            total.index_add_(0, token, (out * top_k_weights[token, rank, None]).to(total.dtype))
        return total


def _linear(module: Any, name: str, x: Tensor, expert: int) -> Tensor:
    """One projection of one expert, as its module keeps it."""
    weight: Tensor = getattr(module, name)[expert]
    if module.is_transposed:
        made = x @ weight
        return made + getattr(module, f"{name}_bias")[expert] if module.has_bias else made
    return torch.nn.functional.linear(x, weight, getattr(module, f"{name}_bias")[expert] if module.has_bias else None)
