"""Mixtures whose experts are a `ModuleList` that a loop runs through, as remote code has them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.adapters.unknown_classes.parts import (
    D_MODEL,
    N_LAYERS,
    Attention,
    CausalModel,
    Decoder,
    DecoderLayer,
)
from tests.adapters.unknown_classes.shown import at

N_EXPERTS, CHOSEN, D_EXPERT = 5, 2, 16


class Expert(nn.Module):
    """A gated MLP of its own."""

    def __init__(
        self,
        layer: int,
        name: str,
        width: int = D_EXPERT,
        names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    ) -> None:
        super().__init__()
        self.layer, self.name, self.names = layer, name, names
        gate, up, down = names
        self.add_module(gate, nn.Linear(D_MODEL, width, bias=False))
        self.add_module(up, nn.Linear(D_MODEL, width, bias=False))
        self.add_module(down, nn.Linear(width, D_MODEL, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        gate, up, down = (self.get_submodule(name) for name in self.names)
        shared = self.name == "shared_expert"
        shape = x.shape
        x = x if shared else at(self.layer, f"mlp.{self.name}.hook_in", x.flatten(0, -2))
        first, second, last = ("pre", "pre_linear", "post") if shared else ("gate", "pre", "post")
        made = (
            at(self.layer, f"mlp.{self.name}.hook_{first}", gate(x)),
            at(self.layer, f"mlp.{self.name}.hook_{second}", up(x)),
        )
        y = down(
            at(self.layer, f"mlp.{self.name}.hook_{last}", nn.functional.silu(made[0]) * made[1])
        )
        return at(self.layer, f"mlp.{self.name}.hook_out", y).view(shape)


def experts(
    layer: int, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
) -> nn.ModuleList:
    """The experts of a mixture."""
    return nn.ModuleList(Expert(layer, f"experts.{e}", names=names) for e in range(N_EXPERTS))


def by_rows(layer: int, name: str, x: Tensor, rows: Tensor) -> Tensor:
    """An activation ``[row, d]`` with the axes that it has where a hook point shows it."""
    return at(layer, name, x.view(*rows.shape[:2], -1)).view(x.shape)


class Mixture(nn.Module):
    """What all of them share: the loop over experts that tokens were sent to, each adding to the
    rows of these.
    """

    def __init__(self, layer: int) -> None:
        super().__init__()
        self.layer = layer

    def summed(self, x: Tensor, chosen: Tensor, weights: Tensor, experts: nn.ModuleList) -> Tensor:
        """The weighted sum of the chosen experts, ``[row, d_model]``."""
        total = torch.zeros_like(x)
        for e, expert in enumerate(experts):
            row, rank = torch.where(chosen == e)
            total.index_add_(0, row, expert(x[row]) * weights[row, rank, None])
        return total


class OldMixtralMixture(Mixture):
    """The block's own softmax over what a linear layer makes of a token, then the best, which share
    what is one.
    """

    def __init__(self, layer: int) -> None:
        super().__init__(layer)
        self.gate, self.experts = (
            nn.Linear(D_MODEL, N_EXPERTS, bias=False),
            experts(layer, ("w1", "w3", "w2")),
        )

    def forward(self, hidden_states: Tensor) -> Tensor:
        rows = hidden_states.view(-1, D_MODEL)
        logits = by_rows(self.layer, "mlp.hook_router_logits", self.gate(rows), hidden_states)
        weights = nn.functional.softmax(logits, dim=1, dtype=torch.float)
        weights = by_rows(self.layer, "mlp.hook_expert_weights", weights, hidden_states)
        weights, chosen = torch.topk(weights, CHOSEN, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        return self.summed(rows, chosen, weights, self.experts).view(hidden_states.shape)


class QwenMixture(Mixture):
    """The same, not made one, with an expert for all tokens behind a gate of its own."""

    def __init__(self, layer: int) -> None:
        super().__init__(layer)
        self.gate, self.experts = nn.Linear(D_MODEL, N_EXPERTS, bias=False), experts(layer)
        self.shared_expert, self.shared_expert_gate = (
            Expert(layer, "shared_expert", 20),
            nn.Linear(D_MODEL, 1, bias=False),
        )

    def forward(self, hidden_states: Tensor) -> Tensor:
        rows = hidden_states.view(-1, D_MODEL)
        logits = by_rows(self.layer, "mlp.hook_router_logits", self.gate(rows), hidden_states)
        weights = by_rows(self.layer, "mlp.hook_expert_weights", logits.softmax(-1), hidden_states)
        weights, chosen = weights.topk(CHOSEN, dim=-1)
        shared = self.shared_expert(hidden_states)
        gate = at(
            self.layer, "mlp.shared_expert_gate.hook_out", self.shared_expert_gate(hidden_states)
        )
        routed = self.summed(rows, chosen, weights, self.experts).view(hidden_states.shape)
        return routed + gate.sigmoid() * shared


class DeepseekGate(nn.Module):
    """Chooses by sigmoids, corrected by a term of each expert's own, and returns indices and
    weights.
    """

    def __init__(self, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.weight = nn.Parameter(torch.empty(N_EXPERTS, D_MODEL))
        self.e_score_correction_bias = nn.Parameter(torch.zeros(N_EXPERTS))

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        rows = hidden_states.view(-1, D_MODEL)
        logits = by_rows(
            self.layer,
            "mlp.hook_router_logits",
            nn.functional.linear(rows, self.weight),
            hidden_states,
        )
        scores = logits.sigmoid()
        with torch.no_grad():
            chosen = torch.topk(
                scores + self.e_score_correction_bias, CHOSEN, dim=-1, sorted=False
            )[1]
        weights = scores.gather(1, chosen)
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * 2.5
        everyone = by_rows(
            self.layer,
            "mlp.hook_expert_weights",
            torch.zeros_like(logits).scatter(1, chosen, weights),
            hidden_states,
        )
        weights = by_rows(
            self.layer, "mlp.hook_topk_weights", everyone.gather(1, chosen), hidden_states
        )
        return by_rows(self.layer, "mlp.hook_expert_indices", chosen, hidden_states), weights


class DeepseekMixture(Mixture):
    """DeepSeek V3's: tokens sorted by their expert, each expert given its own, and shared
    experts.
    """

    def __init__(self, layer: int) -> None:
        super().__init__(layer)
        self.gate, self.experts = DeepseekGate(layer), experts(layer)
        self.shared_experts = Expert(layer, "shared_expert", 32)

    def forward(self, hidden_states: Tensor) -> Tensor:
        chosen, weights = self.gate(hidden_states)
        rows = hidden_states.view(-1, D_MODEL)
        counts = torch.bincount(chosen.view(-1), minlength=N_EXPERTS).tolist()
        order = chosen.view(-1).argsort()
        sorted_rows, start, outputs = rows[order // CHOSEN], 0, []
        for e, count in enumerate(counts):
            if count:
                outputs.append(self.experts[e](sorted_rows[start : start + count]))
            start += count
        together = torch.empty_like(sorted_rows)
        together[order] = torch.cat(outputs)
        routed = (
            (together.view(*chosen.shape, -1) * weights.unsqueeze(-1))
            .sum(1)
            .view(hidden_states.shape)
        )
        return routed + self.shared_experts(hidden_states)


class BailingGate(nn.Module):
    """A softmax over all, the best of them; it returns indices, weights and logits."""

    def __init__(self, layer: int) -> None:
        super().__init__()
        self.layer, self.weight = layer, nn.Parameter(torch.empty(N_EXPERTS, D_MODEL))

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        rows = hidden_states.view(-1, D_MODEL)
        logits = by_rows(
            self.layer,
            "mlp.hook_router_logits",
            nn.functional.linear(rows, self.weight, None),
            hidden_states,
        )
        scores = by_rows(
            self.layer,
            "mlp.hook_expert_weights",
            logits.softmax(-1, dtype=torch.float32),
            hidden_states,
        )
        weights, chosen = torch.topk(scores, CHOSEN, dim=-1, sorted=False)
        weights = by_rows(
            self.layer,
            "mlp.hook_topk_weights",
            weights / weights.sum(-1, keepdim=True),
            hidden_states,
        )
        return (
            by_rows(self.layer, "mlp.hook_expert_indices", chosen, hidden_states),
            weights,
            logits,
        )


class BailingMixture(Mixture):
    """Each token repeated for each of its experts, which write into their rows; it returns the
    router's logits, too.
    """

    def __init__(self, layer: int) -> None:
        super().__init__(layer)
        self.gate, self.experts = BailingGate(layer), experts(layer)

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        chosen, weights, logits = self.gate(hidden_states)
        flat = chosen.view(-1)
        rows = hidden_states.view(-1, D_MODEL).repeat_interleave(CHOSEN, dim=0)
        made = torch.empty_like(rows)
        for e, expert in enumerate(self.experts):
            made[flat == e] = expert(rows[flat == e])
        y = (made.view(*weights.shape, -1) * weights.unsqueeze(-1)).sum(1)
        return y.view(hidden_states.shape), logits


class HunyuanGate(nn.Module):
    """Says for each token, expert and place in that expert's queue whether it is sent there, and
    its weight.
    """

    def __init__(self, layer: int) -> None:
        super().__init__()
        self.layer, self.wg = layer, nn.Linear(D_MODEL, N_EXPERTS, bias=False)

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        rows = hidden_states.reshape(-1, D_MODEL)
        logits = by_rows(self.layer, "mlp.hook_router_logits", self.wg(rows), hidden_states)
        gates = by_rows(
            self.layer,
            "mlp.hook_expert_weights",
            nn.functional.softmax(logits, dim=1),
            hidden_states,
        )
        weights, chosen = torch.topk(gates, CHOSEN)
        weights = weights / weights.sum(-1, keepdim=True)
        sent = nn.functional.one_hot(chosen, N_EXPERTS).transpose(0, 1).reshape(-1, N_EXPERTS)
        place = (sent.cumsum(0) - 1) * sent
        places = nn.functional.one_hot(place, len(rows)) * sent.unsqueeze(-1)
        places = places.view(CHOSEN, len(rows), N_EXPERTS, len(rows)).float()
        return torch.einsum("sk,ksec->sec", weights, places), places.sum(0)


class HunyuanMixture(Mixture):
    """Products with these: every expert is given as many rows as there are tokens, zeros behind
    those sent to it.
    """

    def __init__(self, layer: int) -> None:
        super().__init__(layer)
        self.gate, self.experts, self.shared_mlp = (
            HunyuanGate(layer),
            experts(layer),
            Expert(layer, "shared_expert", 32),
        )

    def forward(self, hidden_states: Tensor) -> Tensor:
        weights, sent = self.gate(hidden_states)
        rows = hidden_states.reshape(-1, D_MODEL)
        given = torch.einsum("sec,sm->ecm", sent, rows)
        made = torch.cat(
            [expert(x) for expert, x in zip(self.experts, given.chunk(N_EXPERTS), strict=True)]
        )
        routed = torch.einsum("sec,ecm->sm", weights, made).reshape(hidden_states.shape)
        return self.shared_mlp(hidden_states) + routed


def _with(mixture: type[nn.Module]) -> type[nn.Module]:
    class Model(CausalModel):
        def base(self) -> nn.Module:
            return Decoder([DecoderLayer(i, Attention(i), mixture(i)) for i in range(N_LAYERS)])

    return Model


OldMixtral, QwenMoe, DeepseekMoe, HunyuanMoe = map(
    _with, (OldMixtralMixture, QwenMixture, DeepseekMixture, HunyuanMixture)
)


class BailingLayer(DecoderLayer):
    """A block whose mixture returns a tuple."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        x = at(self.layer, "hook_resid_pre", hidden_states)
        x = at(
            self.layer,
            "hook_resid_mid",
            x + at(self.layer, "hook_attn_out", self.self_attn(self.input_layernorm(x))),
        )
        made, _ = self.mlp(self.post_attention_layernorm(x))
        return at(self.layer, "hook_resid_post", x + at(self.layer, "hook_mlp_out", made))


class BailingMoe(CausalModel):
    """Bailing's."""

    def base(self) -> nn.Module:
        return Decoder([BailingLayer(i, Attention(i), BailingMixture(i)) for i in range(N_LAYERS)])


class Relu2Expert(nn.Module):
    """Two layers with a squared ReLU between."""

    def __init__(self, layer: int, name: str, width: int = D_EXPERT) -> None:
        super().__init__()
        self.layer, self.name = layer, name
        self.up_proj, self.down_proj = (
            nn.Linear(D_MODEL, width, bias=False),
            nn.Linear(width, D_MODEL, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        shared = self.name == "shared_expert"
        x = x if shared else at(self.layer, f"mlp.{self.name}.hook_in", x)
        post = at(self.layer, f"mlp.{self.name}.hook_pre", self.up_proj(x)).relu().pow(2)
        return at(
            self.layer,
            f"mlp.{self.name}.hook_out",
            self.down_proj(at(self.layer, f"mlp.{self.name}.hook_post", post)),
        )


class NemotronMixture(Mixture):
    """Nemotron-H's: experts without gates; one that no token was sent to is run on a token all the
    same.
    """

    def __init__(self, layer: int) -> None:
        super().__init__(layer)
        self.gate = DeepseekGate(layer)
        self.experts = nn.ModuleList(Relu2Expert(layer, f"experts.{e}") for e in range(N_EXPERTS))
        self.shared_experts = Relu2Expert(layer, "shared_expert", 20)

    def forward(self, hidden_states: Tensor) -> Tensor:
        chosen, weights = self.gate(hidden_states)
        rows = hidden_states.view(-1, D_MODEL)
        total = torch.zeros_like(rows, dtype=weights.dtype)
        mask = nn.functional.one_hot(chosen, num_classes=N_EXPERTS).permute(2, 0, 1)
        for e, expert in enumerate(self.experts):
            row, rank = torch.where(mask[e])
            if row.numel():
                total.index_add_(0, row, expert(rows[row]) * weights[row, rank].unsqueeze(-1))
            else:
                total = total + expert(torch.zeros_like(rows[0]).unsqueeze(0)) * 0
        return total.view(hidden_states.shape) + self.shared_experts(hidden_states)


class NemotronLayer(nn.Module):
    """One norm, one part."""

    def __init__(self, layer: int, mixer: nn.Module, name: str) -> None:
        super().__init__()
        self.layer, self.name, self.mixer = layer, name, mixer
        from tests.adapters.unknown_classes.parts import Rms

        self.norm = Rms()

    def forward(self, hidden_states: Tensor) -> Tensor:
        x = at(self.layer, "hook_resid_pre", hidden_states)
        return at(
            self.layer,
            "hook_resid_post",
            x + at(self.layer, f"hook_{self.name}_out", self.mixer(self.norm(x))),
        )


class NemotronMoe(CausalModel):
    """Nemotron-H's layers, of one part each."""

    def base(self) -> nn.Module:
        kinds = [(Attention, "attn"), (NemotronMixture, "mlp")] * 2
        return Decoder([NemotronLayer(i, kind(i), name) for i, (kind, name) in enumerate(kinds)])
