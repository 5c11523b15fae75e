"""The computation graph of a model: who writes to the residual stream, and who reads it.

A head or an MLP reads the sum of everything that was written before it, so between any writer and any later reader
there is an edge (Elhage et al. 2021, "A Mathematical Framework for Transformer Circuits"; Goldowsky-Dill et al. 2023,
"Localizing Model Behavior with Path Patching"). A head's query, key and value inputs are readers of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from bridge.analysis.requirements import refuse_no_sum
from bridge.bridge import TransformerBridge
from bridge.hooks.arguments import refuse_wrong_types
from bridge.hooks.names import suggestion


@dataclass(frozen=True)
class LayerShape:
    """What a layer has.

    Attributes:
        heads, key_heads: how many query heads, and key and value heads; 0 without attention.
        mlp: whether it has an MLP (or a mixture, which is one node).
        parallel: the MLP reads the stream before the heads of its layer.
    """

    heads: int
    key_heads: int
    mlp: bool
    parallel: bool


@dataclass(frozen=True)
class Port:
    """A hook point through which receivers read.

    Attributes:
        name: the hook point.
        first, count: its receivers, by index.
        upstream: it reads the senders before this index.
        layer: its layer; that of the logits is the number of layers.
        per_head: whether the activation has a head axis.
    """

    name: str
    first: int
    count: int
    upstream: int
    layer: int
    per_head: bool


class Graph:
    """Senders, receivers and the edges between them.

    Senders are ``embed`` (everything that enters the first block), heads ``L3H2`` and MLPs ``L3MLP``. Receivers are
    ``L3H2.q``, ``L3H2.k``, ``L3H2.v``, ``L3MLP`` and ``logits``. With grouped keys, a key head has one key input and
    one value input, for all query heads of its group: ``L3G1.k``, ``L3G1.v``.

    Args:
        layers: what each layer has.

    Attributes:
        senders: their names, in the order of the computation.
        receivers: likewise.
        ports: the hook points behind the receivers, in the order of the computation.

    Example:
        >>> from bridge import TransformerBridge
        >>> from bridge.circuits import Graph
        >>> graph = Graph.of(TransformerBridge.boot_embedded())
        >>> graph
        Graph(4 layers, 21 senders, 53 receivers, 479 edges)
        >>> graph.senders[:2], graph.receivers[-1]
        (['embed', 'L0H0'], 'logits')
    """

    def __init__(self, layers: Sequence[LayerShape]) -> None:
        self.layers = tuple(layers)
        self.senders: list[str] = ["embed"]
        self.receivers: list[str] = []
        self.ports: list[Port] = []
        #: For each sender, the receivers that feed it.
        self.inputs: list[list[int]] = [[]]
        #: For each layer, the index of its first head's sender.
        self.first_head: list[int] = []
        for index, layer in enumerate(self.layers):
            self._add(index, layer)
        after = len(self.layers)
        self._port(f"blocks.{after - 1}.hook_resid_post", ["logits"], len(self.senders), after, False)

    def _add(self, index: int, layer: LayerShape) -> None:
        before = len(self.senders)
        block = f"blocks.{index}"
        self.first_head.append(before)
        if layer.heads:
            grouped = "H" if layer.key_heads == layer.heads else "G"
            feeds: list[list[int]] = [[] for _ in range(layer.heads)]
            for letter in "qkv":
                n = layer.heads if letter == "q" else layer.key_heads
                names = [f"L{index}{'H' if letter == 'q' else grouped}{i}.{letter}" for i in range(n)]
                first = self._port(f"{block}.hook_{letter}_input", names, before, index, True)
                for head, own in enumerate(feeds):
                    own.append(first + head * n // layer.heads)
            self.senders += [f"L{index}H{head}" for head in range(layer.heads)]
            self.inputs += feeds
        if layer.mlp:
            upstream = before if layer.parallel else len(self.senders)
            first = self._port(f"{block}.hook_mlp_in", [f"L{index}MLP"], upstream, index, False)
            self.senders.append(f"L{index}MLP")
            self.inputs.append([first])

    def _port(self, name: str, receivers: list[str], upstream: int, layer: int, per_head: bool) -> int:
        first = len(self.receivers)
        self.ports.append(Port(name, first, len(receivers), upstream, layer, per_head))
        self.receivers += receivers
        return first

    @classmethod
    @refuse_wrong_types
    def of(cls, bridge: TransformerBridge) -> Graph:
        """The graph of a model.

        Args:
            bridge: the bridge.

        Raises:
            ValueError: its residual stream is no plain sum that heads and MLPs read (norms on the stream, an encoder
                and a decoder), or a part of a layer has no inputs of its own.
        """
        name, hooks = bridge.cfg.model_name, bridge.hook_dict
        if "blocks.0.hook_resid_pre" not in hooks or bridge.core.config.is_encoder_decoder:
            raise ValueError(f"{name} has no single list of blocks; a graph needs one residual stream")
        refuse_no_sum(bridge)
        return cls([_shape_of(bridge, index) for index in range(bridge.cfg.n_layers)])

    @cached_property
    def exists(self) -> Bool[Tensor, "receiver sender"]:
        """Which pairs are edges."""
        found = torch.zeros(len(self.receivers), len(self.senders), dtype=torch.bool)
        for port in self.ports:
            found[port.first : port.first + port.count, : port.upstream] = True
        return found

    @cached_property
    def n_edges(self) -> int:
        """How many edges there are."""
        return int(self.exists.sum())

    @cached_property
    def port_of(self) -> list[Port]:
        """The port of each receiver."""
        return [port for port in self.ports for _ in range(port.count)]

    @refuse_wrong_types
    def sender(self, name: str) -> int:
        """The index of a sender.

        Args:
            name: such as ``"L3H2"``.

        Raises:
            ValueError: there is none of this name.
        """
        return _find(name, self.senders, "sender")

    @refuse_wrong_types
    def receiver(self, name: str) -> int:
        """The index of a receiver.

        Args:
            name: such as ``"L3H2.q"``.

        Raises:
            ValueError: there is none of this name.
        """
        return _find(name, self.receivers, "receiver")

    @refuse_wrong_types
    def receivers_named(self, name: str) -> list[int]:
        """The receivers of a name: one of them, or all that feed a head (``"L3H2"``).

        Args:
            name: a receiver or a head.

        Raises:
            ValueError: there is none of this name.
        """
        if name in self.senders and name != "embed":
            return self.inputs[self.senders.index(name)]
        return [self.receiver(name)]

    @refuse_wrong_types
    def edge(self, name: str) -> tuple[int, int]:
        """An edge as (receiver, sender).

        Args:
            name: such as ``"L0H1->L3H2.q"``.

        Raises:
            ValueError: there is no such edge.
        """
        sender, arrow, receiver = name.partition("->")
        if not arrow:
            raise ValueError(f"{name!r} is no edge; one is written like 'embed->L0H0.q'")
        found = self.receiver(receiver), self.sender(sender)
        if not self.exists[found]:
            raise ValueError(f"there is no edge {name}: {sender} writes after {receiver} has read")
        return found

    def edge_name(self, receiver: int, sender: int) -> str:
        """The name of an edge."""
        return f"{self.senders[sender]}->{self.receivers[receiver]}"

    def to_dict(self) -> list[dict[str, Any]]:
        """What each layer has, for JSON."""
        return [asdict(layer) for layer in self.layers]

    @classmethod
    def from_dict(cls, layers: Sequence[Mapping[str, Any]]) -> Graph:
        """The graph that `to_dict` described."""
        return cls([LayerShape(**layer) for layer in layers])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Graph) and self.layers == other.layers

    def __hash__(self) -> int:
        return hash(self.layers)

    def __repr__(self) -> str:
        return (
            f"Graph({len(self.layers)} layers, {len(self.senders)} senders, {len(self.receivers)} receivers, "
            f"{self.n_edges} edges)"
        )


def _find(name: str, known: list[str], what: str) -> int:
    if name not in known:
        raise ValueError(f"there is no {what} {name!r}.{suggestion(name, known)}")
    return known.index(name)


def _shape_of(bridge: TransformerBridge, index: int) -> LayerShape:
    """What a layer has.

    Raises:
        ValueError: a part of it has no input of its own.
    """
    block, hooks = f"blocks.{index}", bridge.hook_dict

    def needs(part: str, *points: str) -> bool:
        if f"{block}.{part}" not in hooks:
            return False
        for point in points:
            if f"{block}.{point}" not in hooks:
                raise ValueError(
                    f"{bridge.cfg.model_name} has no {block}.{point}: a graph needs it to give one reader of the "
                    "residual stream another input than the others"
                )
        return True

    attention = needs("hook_attn_out", "attn.hook_result", "hook_q_input", "hook_k_input", "hook_v_input")
    mlp = needs("hook_mlp_out", "hook_mlp_in")
    attn = bridge.architecture.stack.block_at(index).attn if attention else None
    cfg = bridge.cfg  # of which a layer may have other numbers
    heads = (attn.own("n_heads", cfg.n_heads), attn.own("n_key_value_heads", cfg.n_kv_heads)) if attn else (0, 0)
    return LayerShape(*heads, mlp, parallel=mlp and attention and f"{block}.hook_resid_mid" not in hooks)
