"""The computation graph of a model: who writes to the residual stream, and who reads it.

A head or an MLP reads the sum of everything that was written before it, so between any writer and any later reader
there is an edge (Elhage et al. 2021, "A Mathematical Framework for Transformer Circuits"; Goldowsky-Dill et al. 2023,
"Localizing Model Behavior with Path Patching"). A head's query, key and value inputs are readers of their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from adapters.attention import Gate, SinkGate
from bridge.analysis.analysis import refuse_no_sum, refuse_training
from bridge.analysis.layer_outputs import post_norm
from bridge.bridge import TransformerBridge
from bridge.hooks.arguments import refuse_wrong_types
from bridge.hooks.names import suggestion
from bridge.hooks.rows import places_of
from bridge.run.inputs import Prompts, prompts_with


@dataclass(frozen=True)
class LayerShape:
    """How many heads a layer has, and whether an MLP beside them.

    Attributes:
        heads, key_heads: how many query heads, and key and value heads (in a graph that is not grouped, as many as
            query heads); 0 without attention.
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
    one value input, for all query heads of its group: ``L3G1.k``, ``L3G1.v``; or, if the graph is asked for with
    ``grouped=False``, each query head has inputs of its own, as in models without groups.

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
        #: Where senders write: of each hook point of the stream, and of what is added to it, which senders.
        self.writes: dict[str, slice] = {"blocks.0.hook_resid_pre": slice(0, 1)}
        for index, layer in enumerate(self.layers):
            self._add(index, layer)
        after = len(self.layers)
        self._port(f"blocks.{after - 1}.hook_resid_post", ["logits"], len(self.senders), after, False)

    def _add(self, index: int, layer: LayerShape) -> None:
        before = len(self.senders)
        block = f"blocks.{index}"
        if layer.heads:
            self.writes[f"{block}.hook_attn_out"] = slice(before, before + layer.heads)
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
            self.writes[f"{block}.hook_mlp_out"] = slice(len(self.senders), len(self.senders) + 1)
            self.senders.append(f"L{index}MLP")
            self.inputs.append([first])

    def _port(self, name: str, receivers: list[str], upstream: int, layer: int, per_head: bool) -> int:
        first = len(self.receivers)
        self.ports.append(Port(name, first, len(receivers), upstream, layer, per_head))
        self.receivers += receivers
        return first

    @classmethod
    @refuse_wrong_types
    def of(cls, bridge: TransformerBridge, grouped: bool = True) -> Graph:
        """The graph of a model.

        Args:
            bridge: the bridge.
            grouped: whether query heads that share a key head share its inputs. False: each reads its key and its value
                through inputs of its own, as in the graph of the Mechanistic Interpretability Benchmark. Nothing of the
                model is changed for that.

        Raises:
            ValueError: its residual stream is no plain sum that heads and MLPs read (norms on the stream, an encoder
                and a decoder), or a part of a layer has no inputs of its own; not grouped, and all heads' keys, or what
                heads put together, enter one norm, so that a head's own key would be another one in each.

        Example:
            See `edge_attribution`.
        """
        name, hooks = bridge.cfg.model_name, bridge.hook_dict
        if "blocks.0.hook_resid_pre" not in hooks or bridge.core.config.is_encoder_decoder:
            raise ValueError(f"{name} has no single list of blocks; a graph needs one residual stream")
        refuse_no_sum(bridge)
        found = [_shape_of(bridge, index) for index in range(bridge.cfg.n_layers)]
        return cls(found if grouped else [_ungrouped(bridge, index, layer) for index, layer in enumerate(found)])

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
        ValueError: a part of it has no input of its own, or is neither attention nor the layer's MLP.
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

    writes = {name for name in hooks if name.startswith(f"{block}.hook_") and name.endswith("_out")}
    if others := sorted(writes - {f"{block}.hook_attn_out", f"{block}.hook_mlp_out"}):
        raise ValueError(
            f"{bridge.cfg.model_name} writes to its residual stream at {others[0]}: a graph has heads and one MLP in "
            "each layer, and nothing else"
        )
    attention = needs("hook_attn_out", "attn.hook_result", "hook_q_input", "hook_k_input", "hook_v_input")
    mlp = needs("hook_mlp_out", "hook_mlp_in")
    attn = bridge.architecture.stack.block_at(index).attn if attention else None
    cfg = bridge.cfg  # of which a layer may have other numbers
    heads = (attn.own("n_heads", cfg.n_heads), attn.own("n_key_value_heads", cfg.n_kv_heads)) if attn else (0, 0)
    return LayerShape(*heads, mlp, parallel=mlp and attention and f"{block}.hook_resid_mid" not in hooks)


def _ungrouped(bridge: TransformerBridge, index: int, layer: LayerShape) -> LayerShape:
    """A layer in whose graph each query head has a key and a value of its own.

    Raises:
        ValueError: what a head puts together is no function of its own query, key and value alone.
    """
    attn = bridge.architecture.stack.block_at(index).attn
    if attn is not None and layer.heads != layer.key_heads:
        normed = attn.norms_over == "width" and (attn.k.norm or attn.v.norm)
        if normed or not isinstance(attn.z_transform, Gate | SinkGate | None):
            raise ValueError(
                f"heads of layer {index} of {bridge.cfg.model_name} go through one norm or module together, so that no "
                "head has a key and a value to itself: there is only the graph with keys grouped"
            )
    return replace(layer, key_heads=layer.heads)


# ----------------------------------------------------------------------------------------------------------------------
# Metrics of logits: the difference of two tokens, and the divergence from other logits. Any function will do.
# ----------------------------------------------------------------------------------------------------------------------


#: From logits ``[batch, pos, d_vocab]`` to one number, in a tensor that has a gradient.
Metric = Callable[[Float[Tensor, "batch pos d_vocab"]], Tensor]


def measured(metric: Metric, logits: Float[Tensor, "batch pos d_vocab"]) -> Float[Tensor, "..."]:
    """What a metric says of some prompts: one number, or one for each, in double precision.

    Raises:
        ValueError: it gives something else.
    """
    found = torch.as_tensor(metric(logits)).detach().cpu().double()
    if found.shape == logits.shape[:1]:
        return found
    if found.numel() != 1:
        raise ValueError(
            f"metric gives {list(found.shape)} numbers; it is one number, or one for each of {len(logits)} prompts"
        )
    return found.reshape(())


def one_number(metric: Metric, logits: Float[Tensor, "batch pos d_vocab"]) -> Tensor:
    """What a metric says of some prompts together.

    Raises:
        ValueError: it gives a number for each.
    """
    found = torch.as_tensor(metric(logits))
    if found.numel() != 1:
        raise ValueError(
            f"metric gives {list(found.shape)} numbers, one for each prompt: scores are of one, such as their mean"
        )
    return found.squeeze()


def gradients_of(name: str, number: Tensor, leaves: Sequence[Tensor], again: bool = False) -> tuple[Tensor, ...]:
    """The gradients of what a metric says.

    Args:
        name: what the metric is called.
        number: what it says.
        leaves: what the logits were computed from.
        again: whether there will be other gradients of what they were computed by.

    Raises:
        ValueError: it was not computed from the logits in a way that has a gradient.
    """
    found = torch.autograd.grad(number, leaves, retain_graph=again, allow_unused=True) if number.requires_grad else ()
    if not found or any(one is None for one in found):
        raise ValueError(
            f"{name} gives a number without a gradient: compute it from the logits that it is given, by PyTorch, "
            "without detach(), item() or argmax()"
        )
    return found


def refuse_inference_mode(name: str) -> None:
    """Refuses a study that needs gradients where there are none.

    Args:
        name: the study's.

    Raises:
        RuntimeError: it is in inference mode.
    """
    if torch.is_inference_mode_enabled():
        raise RuntimeError(f"{name} needs gradients: call it outside of torch.inference_mode()")


def check_rate(rate: float) -> None:
    """Refuses a rate of learning by which nothing is learned.

    Args:
        rate: the rate.

    Raises:
        ValueError: it is not positive, or not finite.
    """
    if not 0 < rate < math.inf:
        raise ValueError(f"rate is {rate}; it must be more than 0, and finite")


@refuse_wrong_types
def logit_difference(
    answers: Int[Tensor, " batch"],
    wrong: Int[Tensor, " batch"],
    position: int | Int[Tensor, " batch"] = -1,
    each: bool = False,
) -> Metric:
    """How much higher the right token's logit is than the wrong one's, on average over the prompts.

    Args:
        answers, wrong: a token of each prompt, ``[batch]``.
        position: where to look, for all prompts or for each.
        each: a number for each prompt in place of their mean, for `Circuit.evaluate` and `Curve.intervals`.

    Raises:
        ValueError: there are not as many wrong tokens as answers.

    Example:
        >>> import torch
        >>> from bridge.circuits import logit_difference
        >>> logit_difference(torch.tensor([1]), torch.tensor([0]))(torch.tensor([[[2.0, 5.0]]])).item()
        3.0
    """
    if answers.shape != wrong.shape:
        raise ValueError(f"there are {len(answers)} answers and {len(wrong)} wrong tokens")

    def metric(logits: Tensor) -> Tensor:
        if logits.shape[0] != len(answers):
            raise ValueError(f"the logits have {logits.shape[0]} rows, and there are {len(answers)} answers")
        here, rows = _at(logits, position), torch.arange(len(answers), device=logits.device)
        found = here[rows, answers.to(logits.device)] - here[rows, wrong.to(logits.device)]
        return found if each else found.mean()

    metric.__name__ = "logit_difference"  # what pictures call it
    return metric


def _at(
    logits: Float[Tensor, "batch pos d_vocab"], position: int | Int[Tensor, " batch"]
) -> Float[Tensor, "batch d_vocab"]:
    """Each prompt's logits at a position, or at its own."""
    if isinstance(position, int):
        return logits[:, position]
    if len(position) != len(logits):
        raise ValueError(f"the logits have {len(logits)} rows, and there are {len(position)} positions")
    return logits[torch.arange(len(position), device=logits.device), position.to(logits.device)]


@refuse_wrong_types
def kl_divergence(right: Float[Tensor, "batch pos d_vocab"], position: int | Int[Tensor, " batch"] = -1) -> Metric:
    """The Kullback-Leibler divergence of next-token distributions from the right ones, in nats, mean over the prompts.

    Args:
        right: the logits of the unpatched model.
        position: where to look, for all prompts or for each.

    Raises:
        ValueError: there are not as many positions as prompts.

    Example:
        >>> import torch
        >>> from bridge.circuits import kl_divergence
        >>> logits = torch.randn(2, 3, 5)
        >>> kl_divergence(logits)(logits).item()
        0.0
    """
    target = _at(right, position).detach().log_softmax(-1)

    def metric(logits: Tensor) -> Tensor:
        found = _at(logits, position).log_softmax(-1)
        return (target.exp() * (target - found)).sum(-1).mean()

    metric.__name__ = "kl_divergence"
    return metric


def divergence_at_last_tokens(right: Float[Tensor, "batch pos d_vocab"], prompts: Mapping[str, Any]) -> Metric:
    """The divergence at each prompt's own last token: the loss of what is trained, where none is given.

    Args:
        right: the logits of the whole model.
        prompts: what it ran on; the mask says where each prompt ends.

    Raises:
        ValueError: a prompt has no token.
    """
    return kl_divergence(right, places_of(prompts.get("attention_mask"), -1, right.shape))


# ----------------------------------------------------------------------------------------------------------------------
# What each head and MLP writes to the residual stream in a run.
# ----------------------------------------------------------------------------------------------------------------------


#: How far the parts may be from their sum, of its largest entry.
TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-3}  # some norms compute in float32 whatever they are given


@dataclass(frozen=True)
class SenderOutputs:
    """What a run's senders wrote.

    Attributes:
        parts: ``[sender, batch, pos, d_model]``. A head's is without the output projection's bias; where a norm follows
            attention, it is what that norm makes of the head's share, its scale held.
        logits: ``[batch, pos, d_vocab]``.
        end: the residual stream after the last block, ``[batch, pos, d_model]``.
        seen: by hook point, what each layer's heads add as a whole, ``[batch, pos, d_model]``, and what stood where it
            was asked for.
    """

    parts: Float[Tensor, "sender batch pos d_model"]
    logits: Float[Tensor, "batch pos d_vocab"]
    end: Float[Tensor, "batch pos d_model"]
    seen: Mapping[str, Tensor]


def names_of(bridge: TransformerBridge, point: str) -> list[str]:
    """The hook points that say what senders write.

    Args:
        bridge: the bridge.
        point: where they write, one of `Graph.writes`.
    """
    block, _, name = point.rpartition(".")
    if name != "hook_attn_out":
        return [point]
    norm = [f"{block}.attn.hook_out", scale] if (scale := f"{block}.ln1_post.hook_scale") in bridge.hook_dict else []
    return [f"{block}.attn.hook_result", *norm]


def parts_of(
    bridge: TransformerBridge, point: str, seen: Mapping[str, Tensor]
) -> Float[Tensor, "sender batch pos d_model"]:
    """What senders write, from what was seen at the hook points of `names_of`.

    Args:
        bridge, point: as there.
        seen: activations by name.
    """
    block, _, name = point.rpartition(".")
    if name != "hook_attn_out":
        return seen[point].unsqueeze(0)
    results = seen[f"{block}.attn.hook_result"]
    if (scale := f"{block}.ln1_post.hook_scale") in seen:
        norm = post_norm(bridge, bridge.hook_dict[point].point.depth, "attn")
        assert norm is not None
        rest = seen[f"{block}.attn.hook_out"] - results.sum(-2)  # the bias, of which every head has its share
        results = results + (rest / results.shape[-2]).unsqueeze(-2)
        results = norm.linear(results, seen[scale].unsqueeze(-2)).to(rest.dtype)
    return results.movedim(-2, 0)


def token_mask(prompts: Mapping[str, Any]) -> Bool[Tensor, "batch pos"]:
    """What is a token, and no padding.

    Args:
        prompts: as runs take them.
    """
    return prompts.get("attention_mask", torch.ones_like(prompts["input_ids"])).bool()


def pairs_of(
    bridge: TransformerBridge, clean: Prompts, corrupted: Prompts, model_kwargs: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Pairs of prompts as runs take them.

    Args:
        bridge: the bridge.
        clean, corrupted: what a user gives.
        model_kwargs: further arguments of the model, for both.

    Raises:
        ValueError: they differ in shape, or in what is padding.
    """
    one, other = (prompts_with(bridge, prompts, model_kwargs) for prompts in (clean, corrupted))
    if one["input_ids"].shape != other["input_ids"].shape:
        raise ValueError(
            f"clean tokens are {list(one['input_ids'].shape)} and corrupted ones {list(other['input_ids'].shape)}: "
            "pairs need one shape, [batch, pos]"
        )
    if not torch.equal(token_mask(one), token_mask(other)):
        raise ValueError(
            "the masks of clean and corrupted prompts differ: pairs need as many tokens, in the same places"
        )
    return one, other


@torch.no_grad()
def written(graph: Graph, bridge: TransformerBridge, prompts: Prompts, also: Sequence[str] = ()) -> SenderOutputs:
    """Runs a model and takes apart what its senders write.

    Args:
        graph: its graph.
        bridge: the bridge.
        prompts: what runs.
        also: other hook points that are read in the same run.

    Raises:
        ValueError: the model is in training mode. All studies of circuits pass here before they do anything else.

    Example:
        >>> from bridge import TransformerBridge
        >>> from bridge.circuits import Graph
        >>> from bridge.circuits.graph import written
        >>> bridge = TransformerBridge.boot_embedded()
        >>> written(Graph.of(bridge), bridge, bridge.to_tokens("Mary and")).parts.shape
        torch.Size([21, 1, 3, 128])
    """
    refuse_training(bridge)
    end = f"blocks.{len(graph.layers) - 1}.hook_resid_post"
    also = [*(name for name in graph.writes if name.endswith("hook_attn_out")), *also]
    names = dict.fromkeys([end, *also, *(name for point in graph.writes for name in names_of(bridge, point))])
    logits, cache = bridge.run_with_cache(prompts, names_filter=[*names])
    embed = cache["blocks.0.hook_resid_pre"]
    parts = embed.new_empty(len(graph.senders), *embed.shape)
    for point, senders in graph.writes.items():
        parts[senders] = parts_of(bridge, point, cache)
    return SenderOutputs(parts, logits, cache[end], {name: cache[name] for name in also})


def refuse_another_sum(bridge: TransformerBridge, wrote: SenderOutputs) -> None:
    """Refuses a run in which something besides the senders writes to the stream.

    What is the same everywhere, the biases of output projections, may be left over.

    Raises:
        ValueError: it does.
    """
    rest = wrote.end - wrote.parts.sum(0)
    _refuse_no_sum_of(bridge, rest, rest[:1, :1].expand_as(rest), wrote.end.abs().max().item())


def _refuse_no_sum_of(bridge: TransformerBridge, found: Tensor, right: Tensor, largest: float) -> None:
    if not right.isfinite().all():
        raise ValueError(
            f"in {bridge.cfg.model_name} the residual stream has numbers that are not finite, in {right.dtype}: take "
            "another precision, or, if prompts are padded in front, pad them at the end"
        )
    device, kind = right.device.type, right.dtype
    if torch.is_autocast_enabled(device):
        kind = torch.get_autocast_dtype(device)
    tolerance = TOLERANCE.get(kind, 30 * torch.finfo(kind).eps) * largest
    if not torch.allclose(found.to(right.dtype), right, rtol=0, atol=tolerance):
        raise ValueError(
            f"in {bridge.cfg.model_name} what heads and MLPs write does not add up to the residual stream: it has no "
            "graph of residual edges"
        )


def written_in_both(
    graph: Graph, bridge: TransformerBridge, clean: Prompts, corrupted: Prompts
) -> tuple[SenderOutputs, SenderOutputs]:
    """What the senders write in two runs.

    Args:
        graph: the graph.
        bridge: the bridge.
        clean, corrupted: the prompts, of one shape.

    Raises:
        ValueError: the parts do not add up to the stream, so that it is no plain sum of what the graph's nodes write:
            between the prompts; or, where these are the same, at all.
    """
    one, other = written(graph, bridge, clean), written(graph, bridge, corrupted)
    if torch.equal(one.parts[0], other.parts[0]):  # no difference says anything
        refuse_another_sum(bridge, one)
        return one, other
    right = other.end - one.end
    found = (other.parts - one.parts).sum(0)
    largest = max(right.abs().max().item(), one.end.abs().max().item() * 1e-3)
    _refuse_no_sum_of(bridge, found, right, largest)
    return one, other
