"""The computation graph of a model: the writers and readers of the residual stream.

A head or an MLP reads the sum of all earlier outputs, so there is an edge between any writer and
any later reader (Elhage et al. 2021, "A Mathematical Framework for Transformer Circuits";
Goldowsky-Dill et al. 2023, "Localizing Model Behavior with Path Patching"). A head's query, key and
value inputs are separate readers.
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
from bridge.analysis.decomposition import tolerance_of_sum
from bridge.analysis.layer_outputs import post_norm
from bridge.arguments import refuse_wrong_types
from bridge.bridge import TransformerBridge
from bridge.hooks.names import suggestion
from bridge.rows import places_of
from bridge.run.inputs import Prompts, prompts_with


@dataclass(frozen=True)
class LayerShape:
    """The number of heads of a layer, and whether it has an MLP.

    Attributes:
        heads, key_heads: the number of query heads, and of key and value heads (in an ungrouped
            graph, equal to the query heads); 0 without attention.
        mlp: whether the layer has an MLP (or a mixture of experts, which is one node).
        parallel: whether the MLP reads the stream before the heads of its layer.
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
        first, count: the indices of its receivers.
        upstream: the number of senders that it reads: those before this index.
        layer: the port's layer; the logits have the number of layers.
        per_head: whether the activation has a head axis.
    """

    name: str
    first: int
    count: int
    upstream: int
    layer: int
    per_head: bool

    @property
    def receivers(self) -> slice:
        """Return the indices of its receivers."""
        return slice(self.first, self.first + self.count)


class Graph:
    """Senders, receivers and the edges between them.

    Senders are ``embed`` (everything that enters the first block), heads ``L3H2`` and MLPs
    ``L3MLP``. Receivers are ``L3H2.q``, ``L3H2.k``, ``L3H2.v``, ``L3MLP`` and ``logits``. With
    grouped keys, a key head has one key input and one value input, for all query heads of its
    group: ``L3G1.k``, ``L3G1.v``. With ``grouped=False``, each query head has inputs of its own, as
    in models without groups.

    Args:
        layers: the shape of each layer.

    Attributes:
        senders: the senders' names, in the order of computation.
        receivers: the receivers' names, in the order of computation.
        ports: the hook points of the receivers, in the order of computation.

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
        #: For each sender, the receivers that are its inputs.
        self.inputs: list[list[int]] = [[]]
        #: The senders that write at each hook point of the stream or of its added outputs.
        self.writes: dict[str, slice] = {"blocks.0.hook_resid_pre": slice(0, 1)}
        for index, layer in enumerate(self.layers):
            before_heads = len(self.senders)
            if layer.heads:
                self._add_heads(index, layer.heads, layer.key_heads)
            if layer.mlp:
                self._add_mlp(index, before_heads if layer.parallel else len(self.senders))
        after = len(self.layers)
        self._add_port(f"blocks.{after - 1}.hook_resid_post", ["logits"], len(self.senders), after)

    def _add_heads(self, layer: int, heads: int, key_heads: int) -> None:
        upstream = len(self.senders)
        self.writes[f"blocks.{layer}.hook_attn_out"] = slice(upstream, upstream + heads)
        inputs: list[list[int]] = [[] for _ in range(heads)]
        for kind in "qkv":
            count = heads if kind == "q" else key_heads
            letter = "H" if count == heads else "G"
            names = [f"L{layer}{letter}{i}.{kind}" for i in range(count)]
            point = f"blocks.{layer}.hook_{kind}_input"
            first = self._add_port(point, names, upstream, layer, per_head=True)
            for head, own in enumerate(inputs):
                own.append(first + head * count // heads)
        self.senders += [f"L{layer}H{head}" for head in range(heads)]
        self.inputs += inputs

    def _add_mlp(self, layer: int, upstream: int) -> None:
        name, sender = f"L{layer}MLP", len(self.senders)
        receiver = self._add_port(f"blocks.{layer}.hook_mlp_in", [name], upstream, layer)
        self.writes[f"blocks.{layer}.hook_mlp_out"] = slice(sender, sender + 1)
        self.senders.append(name)
        self.inputs.append([receiver])

    def _add_port(
        self, name: str, receivers: list[str], upstream: int, layer: int, per_head: bool = False
    ) -> int:
        """Add a port, and return the index of its first receiver."""
        first = len(self.receivers)
        self.ports.append(Port(name, first, len(receivers), upstream, layer, per_head))
        self.receivers += receivers
        return first

    @classmethod
    @refuse_wrong_types
    def of(cls, bridge: TransformerBridge, grouped: bool = True) -> Graph:
        """Return the graph of a model.

        Args:
            bridge: the bridge.
            grouped: whether query heads that share a key head share its inputs. False: each query
                head reads its key and value through inputs of its own, as in the graph of the
                Mechanistic Interpretability Benchmark. This does not change the model.

        Raises:
            ValueError: the residual stream is not a plain sum that heads and MLPs read (norms on
                the stream, an encoder and a decoder), or a component of a layer has no input of its
                own. With ``grouped=False``: the keys or outputs of all heads enter one norm, so a
                head's own key would differ in each.

        Example:
            See `edge_attribution`.
        """
        name, hooks = bridge.cfg.model_name, bridge.hook_dict
        if "blocks.0.hook_resid_pre" not in hooks or bridge.core.config.is_encoder_decoder:
            raise ValueError(
                f"{name} has no single list of blocks; a graph needs one residual stream"
            )
        refuse_no_sum(bridge)
        layers = [_shape_of(bridge, index) for index in range(bridge.cfg.n_layers)]
        if not grouped:
            layers = [_ungrouped(bridge, index, layer) for index, layer in enumerate(layers)]
        return cls(layers)

    @cached_property
    def exists(self) -> Bool[Tensor, "receiver sender"]:
        """Return which pairs are edges."""
        edges = torch.zeros(len(self.receivers), len(self.senders), dtype=torch.bool, device="cpu")
        for port in self.ports:
            edges[port.receivers, : port.upstream] = True
        return edges

    @cached_property
    def n_edges(self) -> int:
        """Return the number of edges."""
        return int(self.exists.sum())

    @cached_property
    def port_of(self) -> list[Port]:
        """Return the port of each receiver."""
        return [port for port in self.ports for _ in range(port.count)]

    @refuse_wrong_types
    def sender(self, name: str) -> int:
        """Return the index of a sender.

        Args:
            name: a name such as ``"L3H2"``.

        Raises:
            ValueError: no sender has this name.
        """
        return _find(name, self.senders, "sender")

    @refuse_wrong_types
    def receiver(self, name: str) -> int:
        """Return the index of a receiver.

        Args:
            name: a name such as ``"L3H2.q"``.

        Raises:
            ValueError: no receiver has this name.
        """
        return _find(name, self.receivers, "receiver")

    @refuse_wrong_types
    def receivers_named(self, name: str) -> list[int]:
        """Return the receivers with a name: a single one, or all inputs of a head (``"L3H2"``).

        Args:
            name: a receiver or a head.

        Raises:
            ValueError: no receiver or head has this name.
        """
        if name in self.senders and name != "embed":
            return self.inputs[self.senders.index(name)]
        return [self.receiver(name)]

    @refuse_wrong_types
    def edge(self, name: str) -> tuple[int, int]:
        """Return an edge as (receiver, sender).

        Args:
            name: a name such as ``"L0H1->L3H2.q"``.

        Raises:
            ValueError: there is no such edge.
        """
        sender, arrow, receiver = name.partition("->")
        if not arrow:
            raise ValueError(f"{name!r} is no edge; one is written like 'embed->L0H0.q'")
        pair = self.receiver(receiver), self.sender(sender)
        if not self.exists[pair]:
            raise ValueError(f"there is no edge {name}: {sender} writes after {receiver} has read")
        return pair

    def edge_name(self, receiver: int, sender: int) -> str:
        """Return the name of an edge."""
        return f"{self.senders[sender]}->{self.receivers[receiver]}"

    def to_dict(self) -> list[dict[str, Any]]:
        """Return the shape of each layer, for JSON."""
        return [asdict(layer) for layer in self.layers]

    @classmethod
    def from_dict(cls, layers: Sequence[Mapping[str, Any]]) -> Graph:
        """Return the graph that `to_dict` described."""
        return cls([LayerShape(**layer) for layer in layers])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Graph) and self.layers == other.layers

    def __hash__(self) -> int:
        return hash(self.layers)

    def __repr__(self) -> str:
        return (
            f"Graph({len(self.layers)} layers, {len(self.senders)} senders, {len(self.receivers)}"
            f" receivers, {self.n_edges} edges)"
        )


def _find(name: str, known: list[str], what: str) -> int:
    if name not in known:
        raise ValueError(f"there is no {what} {name!r}.{suggestion(name, known)}")
    return known.index(name)


#: Hook points that a layer with attention needs, to give its readers separate inputs.
_ATTENTION_POINTS = ("attn.hook_result", "hook_q_input", "hook_k_input", "hook_v_input")


def _shape_of(bridge: TransformerBridge, index: int) -> LayerShape:
    """Return the shape of a layer.

    Raises:
        ValueError: a component of the layer has no input of its own, or is neither attention nor
            the layer's MLP.
    """
    block, hooks = f"blocks.{index}", bridge.hook_dict

    writes = {name for name in hooks if name.startswith(f"{block}.hook_") and name.endswith("_out")}
    if others := sorted(writes - {f"{block}.hook_attn_out", f"{block}.hook_mlp_out"}):
        raise ValueError(
            f"{bridge.cfg.model_name} writes to its residual stream at {others[0]}: a graph has"
            " heads and one MLP in each layer, and nothing else"
        )
    attention, mlp = f"{block}.hook_attn_out" in hooks, f"{block}.hook_mlp_out" in hooks
    needed = _ATTENTION_POINTS if attention else ()
    for point in (*needed, "hook_mlp_in") if mlp else needed:
        if f"{block}.{point}" not in hooks:
            raise ValueError(
                f"{bridge.cfg.model_name} has no {block}.{point}: a graph needs it to give one"
                " reader of the residual stream another input than the others"
            )
    heads = key_heads = 0
    attn = bridge.architecture.stack.block_at(index).attn
    if attention and attn:  # the numbers of heads may differ between layers
        heads = attn.own("n_heads", bridge.cfg.n_heads)
        key_heads = attn.own("n_key_value_heads", bridge.cfg.n_kv_heads)
    parallel = mlp and attention and f"{block}.hook_resid_mid" not in hooks
    return LayerShape(heads, key_heads, mlp, parallel)


def _ungrouped(bridge: TransformerBridge, index: int, layer: LayerShape) -> LayerShape:
    """Return the layer's shape with a separate key and value for each query head.

    Raises:
        ValueError: a head's output depends on more than its own query, key and value.
    """
    attn = bridge.architecture.stack.block_at(index).attn
    if attn is not None and layer.heads != layer.key_heads:
        normed = attn.norms_over == "width" and (attn.k.norm or attn.v.norm)
        if normed or not isinstance(attn.z_transform, Gate | SinkGate | None):
            raise ValueError(
                f"heads of layer {index} of {bridge.cfg.model_name} go through one norm or module"
                " together, so that no head has a key and a value to itself: there is only the"
                " graph with keys grouped"
            )
    return replace(layer, key_heads=layer.heads)


# --------------------------------------------------------------------------------------------------
# Metrics of logits: the difference of two tokens, and the divergence from other logits. Any
# function of logits can be a metric.
# --------------------------------------------------------------------------------------------------


#: From logits ``[batch, pos, d_vocab]`` to one number, in a tensor that has a gradient.
Metric = Callable[[Float[Tensor, "batch pos d_vocab"]], Tensor]


def measured(metric: Metric, logits: Float[Tensor, "batch pos d_vocab"]) -> Float[Tensor, "..."]:
    """Return the metric for some prompts: one number, or one for each prompt, in double precision.

    Raises:
        ValueError: the metric returns another shape.
    """
    values = torch.as_tensor(metric(logits)).detach().cpu().double()
    if values.shape == logits.shape[:1]:
        return values
    if values.numel() != 1:
        raise ValueError(
            f"metric gives {list(values.shape)} numbers; it is one number, or one for each of"
            f" {len(logits)} prompts"
        )
    return values.reshape(())


def one_number(metric: Metric, logits: Float[Tensor, "batch pos d_vocab"]) -> Tensor:
    """Return the metric of some prompts as a single number.

    Raises:
        ValueError: the metric returns one number per prompt.
    """
    value = torch.as_tensor(metric(logits))
    if value.numel() != 1:
        raise ValueError(
            f"metric gives {list(value.shape)} numbers, one for each prompt: scores are of one,"
            " such as their mean"
        )
    return value.squeeze()


def gradients_of(
    name: str, number: Tensor, leaves: Sequence[Tensor], again: bool = False
) -> tuple[Tensor, ...]:
    """Return the gradients of the metric.

    Args:
        name: the metric's name.
        number: the metric's value.
        leaves: the tensors from which the logits were computed.
        again: whether the autograd graph is needed for further gradients.

    Raises:
        ValueError: the value does not depend on the logits differentiably.
    """
    if number.requires_grad:
        gradients = torch.autograd.grad(number, leaves, retain_graph=again, allow_unused=True)
        if all(gradient is not None for gradient in gradients):
            return gradients
    raise ValueError(
        f"{name} gives a number without a gradient: compute it from the logits that it is"
        " given, by PyTorch, without detach(), item() or argmax()"
    )


def refuse_inference_mode(name: str) -> None:
    """Raise an error if a study that needs gradients runs in inference mode.

    Args:
        name: the study's name.

    Raises:
        RuntimeError: the call is in inference mode.
    """
    if torch.is_inference_mode_enabled():
        raise RuntimeError(f"{name} needs gradients: call it outside of torch.inference_mode()")


def check_rate(rate: float) -> None:
    """Raise an error for a learning rate that trains nothing.

    Args:
        rate: the learning rate.

    Raises:
        ValueError: the rate is not positive, or not finite.
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
    """Return a metric: the right token's logit minus the wrong one's, averaged over the prompts.

    Args:
        answers, wrong: a token for each prompt, ``[batch]``.
        position: the position of the logits, for all prompts or for each; padding is counted, so -1
            is the last token of left-padded prompts only; a study raises an error for a position
            that is padding in a row.
        each: return one number per prompt instead of their mean, for `Circuit.evaluate` and
            `Curve.intervals`.

    Raises:
        ValueError: the number of wrong tokens differs from the number of answers.

    Example:
        >>> import torch
        >>> from bridge.circuits import logit_difference
        >>> logit_difference(torch.tensor([1]), torch.tensor([0]))(
        ...     torch.tensor([[[2.0, 5.0]]])
        ... ).item()
        3.0
    """
    if answers.shape != wrong.shape:
        raise ValueError(f"there are {len(answers)} answers and {len(wrong)} wrong tokens")

    def difference(last: Tensor) -> Tensor:
        if len(last) != len(answers):
            raise ValueError(
                f"the logits have {len(last)} rows, and there are {len(answers)} answers"
            )
        rows = torch.arange(len(answers), device=last.device)
        right, other = answers.to(last.device), wrong.to(last.device)
        differences = last[rows, right] - last[rows, other]
        return differences if each else differences.mean()

    return _AtPosition("logit_difference", position, difference)


class _AtPosition:
    """A metric that reads the logits at one position of each row; `check_position` checks it.

    Args:
        name: its name in pictures.
        position: the position, for all rows or for each.
        function: the metric of these logits, ``[batch, d_vocab]``.
    """

    def __init__(
        self, name: str, position: int | Tensor, function: Callable[[Tensor], Tensor]
    ) -> None:
        self.__name__, self.position, self._function = name, position, function

    def __call__(self, logits: Tensor) -> Tensor:
        """Return the metric of ``[batch, pos, d_vocab]``."""
        return self._function(_logits_at(logits, self.position))


def _logits_at(
    logits: Float[Tensor, "batch pos d_vocab"], position: int | Int[Tensor, " batch"]
) -> Float[Tensor, "batch d_vocab"]:
    """Return each prompt's logits at a shared position, or at one position per prompt."""
    if isinstance(position, int):
        return logits[:, position]
    if len(position) != len(logits):
        raise ValueError(
            f"the logits have {len(logits)} rows, and there are {len(position)} positions"
        )
    return logits[torch.arange(len(position), device=logits.device), position.to(logits.device)]


@refuse_wrong_types
def kl_divergence(
    right: Float[Tensor, "batch pos d_vocab"], position: int | Int[Tensor, " batch"] = -1
) -> Metric:
    """Return a metric: the Kullback-Leibler divergence from the right next-token distributions, in
    nats, averaged over prompts.

    Args:
        right: the logits of the unpatched model.
        position: the position of the logits, for all prompts or for each; padding is counted, so -1
            is the last token of left-padded prompts only; a study raises an error for a position
            that is padding in a row.

    Raises:
        ValueError: the number of positions differs from the number of prompts.

    Example:
        >>> import torch
        >>> from bridge.circuits import kl_divergence
        >>> logits = torch.randn(2, 3, 5)
        >>> kl_divergence(logits)(logits).item()
        0.0
    """
    target = _logits_at(right, position).detach().log_softmax(-1)

    def divergence(last: Tensor) -> Tensor:
        return (target.exp() * (target - last.log_softmax(-1))).sum(-1).mean()

    return _AtPosition("kl_divergence", position, divergence)


def divergence_at_last_tokens(
    right: Float[Tensor, "batch pos d_vocab"], prompts: Mapping[str, Any]
) -> Metric:
    """Return the divergence at each prompt's own last token: the default loss for training.

    Args:
        right: the logits of the full model.
        prompts: the model inputs; the mask says where each prompt ends.

    Raises:
        ValueError: a prompt has no token.
    """
    return kl_divergence(right, places_of(prompts.get("attention_mask"), -1, right.shape))


# --------------------------------------------------------------------------------------------------
# The output of each head and MLP to the residual stream in a run.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SenderOutputs:
    """The outputs of a run's senders.

    Attributes:
        parts: ``[sender, batch, pos, d_model]``. A head's output excludes the output projection's
            bias. If a norm follows attention, the output is the normalised share of the head, with
            a frozen scale.
        logits: ``[batch, logit_pos, d_vocab]``, the positions that `logits_to_keep` keeps.
        end: the residual stream after the last block, ``[batch, pos, d_model]``.
        activations: by hook point, each layer's total attention output, ``[batch, pos, d_model]``,
            and the other requested activations.
    """

    parts: Float[Tensor, "sender batch pos d_model"]
    logits: Float[Tensor, "batch logit_pos d_vocab"]
    end: Float[Tensor, "batch pos d_model"]
    activations: Mapping[str, Tensor]


def names_of(bridge: TransformerBridge, point: str) -> list[str]:
    """Return the hook points from which the senders' outputs are computed.

    Args:
        bridge: the bridge.
        point: the hook point to which the senders write, one of `Graph.writes`.
    """
    block, _, name = point.rpartition(".")
    if name != "hook_attn_out":
        return [point]
    result, scale = f"{block}.attn.hook_result", f"{block}.ln1_post.hook_scale"
    return [result, f"{block}.attn.hook_out", scale] if scale in bridge.hook_dict else [result]


def parts_of(
    bridge: TransformerBridge, point: str, activations: Mapping[str, Tensor]
) -> Float[Tensor, "sender batch pos d_model"]:
    """Return the senders' outputs, computed from the activations at the hook points of `names_of`.

    Args:
        bridge, point: as for `names_of`.
        activations: by name.
    """
    block, _, name = point.rpartition(".")
    if name != "hook_attn_out":
        return activations[point].unsqueeze(0)
    results = activations[f"{block}.attn.hook_result"]
    scale = f"{block}.ln1_post.hook_scale"
    if scale in activations:
        norm = post_norm(bridge, bridge.hook_dict[point].point.depth, "attn")
        assert norm is not None
        bias = activations[f"{block}.attn.hook_out"] - results.sum(-2)
        # The bias is shared equally among the heads.
        results = results + (bias / results.shape[-2]).unsqueeze(-2)
        results = norm.linear(results, activations[scale].unsqueeze(-2)).to(bias.dtype)
    return results.movedim(-2, 0)


def token_mask(prompts: Mapping[str, Any]) -> Bool[Tensor, "batch pos"]:
    """Return a mask of the tokens that are not padding.

    Args:
        prompts: the model inputs.
    """
    return prompts.get("attention_mask", torch.ones_like(prompts["input_ids"])).bool()


def pairs_of(
    bridge: TransformerBridge, clean: Prompts, corrupted: Prompts, model_kwargs: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return pairs of prompts as model inputs.

    Args:
        bridge: the bridge.
        clean, corrupted: the user's prompts.
        model_kwargs: further model inputs, for both.

    Raises:
        ValueError: the prompts differ in shape or in their padding.
    """
    one, other = (prompts_with(bridge, prompts, model_kwargs) for prompts in (clean, corrupted))
    shapes = [list(prompts["input_ids"].shape) for prompts in (one, other)]
    if shapes[0] != shapes[1]:
        raise ValueError(
            f"clean tokens are {shapes[0]} and corrupted ones {shapes[1]}: pairs need one shape,"
            " [batch, pos]"
        )
    if not torch.equal(token_mask(one), token_mask(other)):
        raise ValueError(
            "the masks of clean and corrupted prompts differ: pairs need as many tokens, in the"
            " same places"
        )
    return one, other


@torch.no_grad()
def written(
    graph: Graph, bridge: TransformerBridge, prompts: Prompts, also: Sequence[str] = ()
) -> SenderOutputs:
    """Run a model and split the stream into its senders' outputs.

    Args:
        graph: the bridge's graph.
        bridge: the bridge.
        prompts: the model inputs.
        also: other hook points to read in the same run.

    Raises:
        ValueError: the model is in training mode. All studies of circuits call this function first.

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
    kept = [*(name for name in graph.writes if name.endswith("hook_attn_out")), *also]
    names = [end, *kept]
    for point in graph.writes:
        names += names_of(bridge, point)
    logits, cache = bridge.run_with_cache(prompts, names_filter=list(dict.fromkeys(names)))
    embed = cache["blocks.0.hook_resid_pre"]
    parts = embed.new_empty(len(graph.senders), *embed.shape)
    for point, senders in graph.writes.items():
        parts[senders] = parts_of(bridge, point, cache)
    return SenderOutputs(parts, logits, cache[end], {name: cache[name] for name in kept})


def refuse_another_sum(bridge: TransformerBridge, wrote: SenderOutputs) -> None:
    """Raise an error if anything besides the senders writes to the stream.

    A remainder that is the same at every position is allowed: the biases of output projections.

    Raises:
        ValueError: something else writes to the stream.
    """
    rest = wrote.end - wrote.parts.sum(0)
    largest = wrote.end.abs().max().item()
    _refuse_another_number(bridge, rest, rest[:1, :1].expand_as(rest), largest)


def _refuse_another_number(
    bridge: TransformerBridge, total: Tensor, right: Tensor, largest: float
) -> None:
    """Raise an error if a sum of parts differs from the stream.

    Args:
        bridge: the bridge.
        total, right: the sum, and what it must be.
        largest: the largest number, which the tolerance is relative to.

    Raises:
        ValueError: they differ, or are not finite.
    """
    if not right.isfinite().all():
        raise ValueError(
            f"in {bridge.cfg.model_name} the residual stream has numbers that are not finite, in"
            f" {right.dtype}: take another precision, or, if prompts are left-padded, pad them at"
            " the end"
        )
    device, dtype = right.device.type, right.dtype
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    tolerance = tolerance_of_sum(dtype) * largest
    if not torch.allclose(total.to(right.dtype), right, rtol=0, atol=tolerance):
        raise ValueError(
            f"in {bridge.cfg.model_name} what heads and MLPs write does not add up to the residual"
            " stream: it has no graph of residual edges"
        )


def written_in_both(
    graph: Graph, bridge: TransformerBridge, clean: Prompts, corrupted: Prompts
) -> tuple[SenderOutputs, SenderOutputs]:
    """Return the senders' outputs in two runs.

    Args:
        graph: the graph.
        bridge: the bridge.
        clean, corrupted: the prompts, of one shape.

    Raises:
        ValueError: the stream is not the sum of the outputs of the graph's nodes, in the difference
            between the prompts or, if these are equal, in the run itself.
    """
    one, other = written(graph, bridge, clean), written(graph, bridge, corrupted)
    if torch.equal(one.parts[0], other.parts[0]):  # without a difference no score is meaningful
        refuse_another_sum(bridge, one)
        return one, other
    change = (other.parts - one.parts).sum(0)
    right = other.end - one.end
    largest = max(right.abs().max().item(), one.end.abs().max().item() * 1e-3)
    _refuse_another_number(bridge, change, right, largest)
    return one, other
