"""Bases of every kind, on points of every kind."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bridge import HookPoint, TransformerBridge
from bridge.bases import Basis, CrossLayer, Directions, Neurons, Rotation


class SAE(nn.Module):
    """A sparse autoencoder with random weights."""

    def __init__(self, d: int, n: int, d_out: int | None = None) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.W_enc, self.b_enc = (
                nn.Parameter(torch.randn(d, n) / d**0.5),
                nn.Parameter(torch.randn(n) * 0.1),
            )
            self.W_dec = nn.Parameter(torch.randn(n, d_out or d) / n**0.5)
            self.b_dec = nn.Parameter(torch.randn(d_out or d) * 0.1)
        self.requires_grad_(False)

    def encode(self, x: Tensor) -> Tensor:
        return (x @ self.W_enc + self.b_enc).relu()

    def decode(self, features: Tensor) -> Tensor:
        return features @ self.W_dec + self.b_dec


@dataclass(frozen=True)
class Case:
    """A basis on a point: what is read there, and what is written, by hand."""

    point: str
    basis: Basis
    reads: str | None = None
    later: str | None = None

    def place(self, bridge: TransformerBridge) -> HookPoint:
        later = () if self.later is None else (self.later,)
        return bridge.add_basis(self.point, "own", self.basis, reads=self.reads, later=later)


def cross_layer(d: int, n: int, points: int) -> CrossLayer:
    """One layer of a cross-layer transcoder with random weights."""
    generator = torch.Generator().manual_seed(0)
    sizes = ((n, d), (n,), (n, points, d), (d,))
    return CrossLayer(*(torch.randn(size, generator=generator) / size[-1] ** 0.5 for size in sizes))


def cases(bridge: TransformerBridge) -> dict[str, Case]:
    cfg, generator = bridge.cfg, torch.Generator().manual_seed(0)
    d, d_mlp = cfg.d_model, cfg.d_mlp
    assert d_mlp is not None
    middle = (
        "blocks.1.hook_resid_mid"
        if "blocks.1.hook_resid_mid" in bridge.hook_dict
        else "blocks.1.hook_resid_pre"
    )
    several = torch.randn(d, 3, generator=generator)
    return {
        "sae": Case("blocks.1.hook_resid_post", SAE(d, 40)),
        "directions": Case(middle, Directions(several)),
        "rotation": Case("blocks.1.attn.hook_z", Rotation(cfg.d_head, 5, generator=generator)),
        "neurons": Case("blocks.1.mlp.hook_post", Neurons(d_mlp, [5, 2, 11])),
        "transcoder": Case("blocks.1.hook_mlp_out", SAE(d, 40), middle),
        "cross-layer": Case(
            "blocks.0.hook_mlp_out",
            cross_layer(d, 40, 2),
            middle.replace("blocks.1", "blocks.0"),
            "blocks.1.hook_mlp_out",
        ),
    }


KINDS = ("sae", "directions", "rotation", "neurons", "transcoder", "cross-layer")
