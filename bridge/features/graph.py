"""Attribution graphs: who sends how much to whom in a local replacement model."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from adapters.views.basis import InBasis, dense
from bridge.analysis.analysis import refuse_training
from bridge.bases.bases import takes_over, written_later
from bridge.bridge import TransformerBridge
from bridge.hooks.arguments import check_positive, refuse_wrong_types
from bridge.hooks.hooks import HookPoint
from bridge.run.inputs import Prompts, prompts_with

#: What begins the residual stream.
_BEGINNINGS = ("hook_embed", "hook_pos_embed")
#: What bases may stand on: the stream, what is added to it, and what a part's last matrix makes that of.
_LINEAR_BEHIND = (
    ".hook_resid_pre", ".hook_resid_mid", ".hook_resid_post", ".hook_attn_out", ".hook_mlp_out", ".attn.hook_z",
    ".mlp.hook_post",
)  # fmt: skip


@dataclass(frozen=True)
class Node:
    """A feature, an error, a token or a logit in an attribution graph.

    Attributes:
        kind: ``feature``; ``error``, what no basis explains of what stands at `point`; ``token``, what begins the
            stream; ``constant``, what decoders write at `point` where no feature is active, or at the point ``biases``
            all that no other node sends; ``logit``, less the mean of all logits.
        point: the hook point that it stands on.
        pos: its position.
        index: the feature, or the token of a logit; 0 for other nodes.
        head: of features of each head, whose.
    """

    kind: Literal["feature", "error", "token", "constant", "logit"]
    point: str
    pos: int
    index: int = 0
    head: int | None = None

    def __str__(self) -> str:
        place = self.point.removeprefix("blocks.").replace(".hook_", ".")
        of_head = "" if self.head is None else f".{self.head}"
        which = {"feature": f".{self.index}", "logit": f".{self.index}", "constant": ".constant"}.get(self.kind, "")
        return f"{place}[{self.pos}]{of_head}{which}"


@dataclass(frozen=True, repr=False)
class AttributionGraph:
    """What every node sends directly to every other one, in one run.

    Attributes:
        nodes: features, then errors, tokens, constants and logits.
        adjacency: ``[receiver, sender]``: how much of the receiver's value (of a logit less the mean of all) comes
            straight from the sender, past no other node. The row of a feature or a logit adds up to its value.
        values: ``[node]``: features and logits as they are in the run; of errors, tokens and constants the length of
            the vector, and 0 for ``biases``, which is none.
        probabilities: of the logits' tokens.
    """

    nodes: tuple[Node, ...]
    adjacency: Float[Tensor, "node node"]
    values: Float[Tensor, " node"]
    probabilities: Float[Tensor, " logit"]
    _at: dict[Node, int] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        self._at.update((node, at) for at, node in enumerate(self.nodes))

    def __repr__(self) -> str:
        kinds = [node.kind for node in self.nodes]
        counted = ", ".join(f"{kinds.count(kind)} {kind}s" for kind in dict.fromkeys(kinds))
        return f"AttributionGraph({counted})"

    def __getitem__(self, edge: tuple[Node, Node]) -> float:
        """What one node sends to another: ``graph[sender, receiver]``."""
        sender, receiver = edge
        return float(self.adjacency[self._at[receiver], self._at[sender]])

    def _shares(self) -> Float[Tensor, "node node"]:
        """Each edge's share of the sizes of all that its receiver gets, constants aside: they explain nothing."""
        sizes = self.adjacency.abs()
        sizes[:, [i for i, node in enumerate(self.nodes) if node.kind == "constant"]] = 0
        return sizes / sizes.sum(1, keepdim=True).clamp(min=1e-10)

    def influence(self) -> Float[Tensor, " node"]:
        """How much of the logits goes through each node, directly or not.

        Edges are taken as shares of the sizes of all that a node receives, and followed to the logits, which count by
        their probabilities (Ameisen et al. 2025, "Circuit Tracing").

        Example:
            See `attribution_graph`.
        """
        shares = self._shares().double()
        weights = shares.new_zeros(len(self.nodes))
        weights[len(self.nodes) - len(self.probabilities) :] = self.probabilities.double()
        # Edges go forward alone: w @ (shares + shares^2 + ...) ends.
        whole = torch.linalg.solve(
            torch.eye(len(weights), dtype=shares.dtype, device=shares.device) - shares.T, weights
        )
        return (whole - weights).to(self.adjacency.dtype)

    def largest(self, n: int) -> list[tuple[str, str, float]]:
        """The edges with the most influence, as `bridge.pictures.circuit` takes them.

        Args:
            n: how many.

        Raises:
            ValueError: no edge is asked for.
        """
        check_positive("n", n)
        weights = self.influence()
        weights[len(self.nodes) - len(self.probabilities) :] = self.probabilities
        n = min(n, int(self.adjacency.count_nonzero()))
        found = (self._shares() * weights[:, None]).flatten().topk(n)
        pairs = [divmod(int(at), len(self.nodes)) for at in found.indices]
        return [(str(self.nodes[j]), str(self.nodes[i]), float(self.adjacency[i, j])) for i, j in pairs]

    @refuse_wrong_types
    def draw(self, n: int, bridge: TransformerBridge, tokens: Int[Tensor, "1 pos"], **options: Any) -> Any:
        """A picture of the edges with the most influence, by `bridge.pictures.circuit`: layers across, tokens down.

        Args:
            n: how many edges.
            bridge: the bridge, which knows the text of its tokens.
            tokens: the prompt of the graph, ``[1, pos]``.
            options: as `bridge.pictures.circuit` takes them.

        Raises:
            ImportError: what pictures need is not installed.
            ValueError: no edge is asked for; a prompt of another length.

        Example:
            See `attribution_graph`.
        """
        pictures = importlib.import_module("bridge.pictures")
        if tokens.shape[1] != self.nodes[-1].pos + 1:
            raise ValueError(f"tokens has {tokens.shape[1]} positions; the graph is of {self.nodes[-1].pos + 1}")
        edges = self.largest(n)
        drawn = {name for sender, receiver, _ in edges for name in (sender, receiver)}
        nodes = {}
        for node in self.nodes:
            if str(node) in drawn:
                column, label = _column(node, bridge.cfg.n_layers)
                if node.kind in ("token", "logit"):
                    token = int(tokens[0, node.pos]) if node.kind == "token" else node.index
                    label = pictures.style.visible(bridge.to_single_str_token(token))
                nodes[str(node)] = pictures.CircuitNode(column=column, label=label, position=node.pos)
        given = {"nodes": nodes, "tokens": bridge.to_str_tokens(tokens[0]), "measure": "contribution"}
        return pictures.circuit(edges, **(given | {"title": "Attribution graph"} | options))


def _column(node: Node, n_layers: int) -> tuple[int, str]:
    """Where a node stands from left to right, and what is written on it."""
    if node.kind == "token":
        return 0, ""
    if node.kind == "logit":
        return 3 * n_layers + 1, ""
    _, layer, point = node.point.split(".", 2)
    part = 1 if "attn" in point or "resid_pre" in point else 2 if "mlp" in point or "resid_mid" in point else 3
    return 3 * int(layer) + part, f"L{layer} error" if node.kind == "error" else f"L{layer} #{node.index}"


@refuse_wrong_types
def attribution_graph(
    bridge: TransformerBridge,
    tokens: Prompts,
    points: Sequence[str],
    *,
    logits: Int[Tensor, " logit"] | int = 3,
    without_positions: Sequence[int] = (),
    together: int = 64,
    **model_kwargs: Any,
) -> AttributionGraph:
    """What features, errors, tokens and logits send each other, in the local replacement model of a prompt.

    In that model attention patterns and norm factors are held at their values in this run, the layers that bases
    explain are replaced by their features and what they leave unexplained, and other MLPs are all error. So everything
    between two features is linear, and what a feature gets from its senders adds up to its value. What does not depend
    on any of them has nodes, too: what each decoder writes where no feature is active, and ``biases``: those of the
    encoder and of the model, and what is written at positions that are left out. Influence passes these over (Ameisen
    et al. 2025, "Circuit Tracing: Revealing Computational Graphs in Language Models"; the graph is that of
    circuit-tracer, which has no such nodes). The encoders' own derivative is taken where the features are, so for ReLU,
    JumpReLU and top-k it is their weights.

    Features that are read inside an MLP or behind it (`mlp.hook_post`, and `hook_mlp_out` without `reads=`) get the
    MLP's derivative in this run: what enters such a feature is what a small change does, and does not add up. What it
    sends is exact. Such a feature gets nothing from ``biases``.

    Args:
        bridge: the bridge, in evaluation mode.
        tokens: one prompt, ``[1, pos]``, or what a processor gives.
        points: hook points in a basis, as `add_basis` returned them or by name: transcoders, or SAEs on the stream, on
            what is added to it, on `attn.hook_z` or on `mlp.hook_post`.
        logits: the tokens whose logits, at the last position, are nodes; or how many of the likeliest.
        without_positions: positions at which features and errors are no nodes (the first, as a rule, where features
            mean little). They still do what they did in the run.
        together: how many rows are computed at once.
        model_kwargs: what else the model takes with it, such as ``pixel_values=``.

    Returns:
        The graph.

    Raises:
        ValueError: a point that is in no basis, or in one of something else inside a part; training mode; a model that
            is not linear where patterns, factors and MLPs are held (a state space, a gate); nothing to attribute.

    Example:
        >>> import torch
        >>> from bridge import TransformerBridge
        >>> from bridge.features import attribution_graph
        >>> bridge, rows = TransformerBridge.boot_embedded(), torch.Generator().manual_seed(0)
        >>> W = torch.randn(128, 6, generator=rows) / 11
        >>> points = []
        >>> for layer in range(4):
        ...     read, write = f"blocks.{layer}.hook_resid_mid", f"blocks.{layer}.hook_mlp_out"
        ...     encode, decode = lambda x: (x @ W).relu(), lambda f: f @ W.T
        ...     points.append(bridge.add_basis(write, "tc", encode=encode, decode=decode, reads=read).name)
        >>> graph = attribution_graph(bridge, bridge.to_tokens("Mary and John"), points, logits=1)
        >>> {node.kind for node in graph.nodes} == {"feature", "error", "token", "constant", "logit"}
        True
        >>> graph.influence().shape == (len(graph.nodes),)
        True
        >>> graph.draw(6, bridge, bridge.to_tokens("Mary and John"))
        Picture('Attribution graph')
    """
    refuse_training(bridge)
    bases = _checked_bases(bridge, points)
    prompt = prompts_with(bridge, tokens, model_kwargs)
    length = prompt["input_ids"].shape[1]
    kept = torch.ones(length, dtype=torch.bool, device=bridge.cfg.device)
    kept[list(without_positions)] = False
    with torch.no_grad():
        plain = bridge(prompt)[0, -1].float()
    shares = plain.softmax(-1)
    chosen = shares.topk(logits).indices if isinstance(logits, int) else logits.to(shares.device)
    with bridge.linearised(prompt), torch.enable_grad():
        _refuse_what_is_not_linear(bridge, prompt)
        return _ReplacementRun(bridge, prompt, bases, kept).graph(chosen, shares[chosen], together)


def _checked_bases(bridge: TransformerBridge, points: Sequence[str]) -> list[HookPoint]:
    """The hook points of the features.

    Raises:
        ValueError: there are none, or of some what they send is not linear or not known.
    """
    hooks = [bridge.select_hooks(point)[0] for point in points]
    bases = [hook for hook in hooks if isinstance(hook.view, InBasis)]
    if not hooks or len(bases) < len(hooks):
        named = ", ".join(hook.name for hook in hooks if hook not in bases) or "none"
        raise ValueError(f"points are hook points that add_basis placed; these are not: {named}")
    on = [hook.name.rpartition(".")[0] for hook in bases]
    if inside := [name for name in on if not name.endswith(_LINEAR_BEHIND)]:
        raise ValueError(
            f"{', '.join(inside)} is inside a part, so what is behind it is not linear in its features: place bases on "
            "the stream, on what attention or an MLP adds to it, on attn.hook_z or on mlp.hook_post"
        )
    if twice := sorted({name for name in on if on.count(name) > 1}):
        raise ValueError(f"several bases stand on {', '.join(twice)}: a part is replaced by one of them")
    if gone := sorted(hook.name for hook in bases if takes_over(hook)):
        raise ValueError(f"{', '.join(gone)} takes over features of an earlier layer: name the one of that layer")
    return bases


def _beginnings(bridge: TransformerBridge) -> list[str]:
    return [name for name in _BEGINNINGS if name in bridge.hook_dict]


def _uncapped(bridge: TransformerBridge, logits: Tensor) -> Tensor:
    """What entered a soft cap, which is linear."""
    cap = bridge.cfg.output_logits_soft_cap
    return cap * (logits / cap).atanh() if cap > 0 else logits


@torch.no_grad()
def _refuse_what_is_not_linear(bridge: TransformerBridge, prompt: dict[str, Any]) -> None:
    """Refuses a model whose stream, patterns and factors held, bends where what begins it is once, twice, three times.

    Raises:
        ValueError: it does; the message says where.
    """
    streams = [name for name in bridge.hook_dict if name.endswith((".hook_resid_mid", ".hook_resid_post"))]
    found: list[dict[str, Tensor]] = []
    with bridge.linearised(prompt, freeze=("mlp_out",)):
        for times in (1, 2, 3):
            larger = [(name, lambda act, hook, times=times: act * times) for name in _beginnings(bridge)]
            with bridge.hooks(fwd_hooks=larger):
                logits, cache = bridge.run_with_cache(prompt, names_filter=streams)
            found.append({**cache, "the logits": _uncapped(bridge, logits.float())})
    for name in found[0]:
        one, two, three = (run[name] for run in found)
        rounding = min(1000 * torch.finfo(one.dtype).eps, 0.05) * float(three.abs().max())
        if float((one - 2 * two + three).abs().max()) > rounding:
            raise ValueError(
                f"{bridge.cfg.model_name} is not linear between the embedding and {name} where patterns, norm factors "
                'and MLPs are held (a state space, a gate, a basis with error="drop"): its graph would not add up'
            )


@dataclass
class _Source:
    """What sends: a tensor that the run's later parts are functions of, and its entries that are nodes."""

    nodes: list[Node]
    leaf: Tensor
    entries: Tensor  # for each node the indices of its entries, of features; of errors and tokens the positions


class _ReplacementRun:
    """One run of the local replacement model, with its graph of derivatives.

    Args:
        bridge: the bridge; patterns and factors are held already.
        prompt: the tokens, ``[1, pos]``, and what else the model is given with them.
        bases: the hook points in a basis.
        kept: the positions at which features and errors are nodes.
    """

    def __init__(
        self, bridge: TransformerBridge, prompt: dict[str, Any], bases: Sequence[HookPoint], kept: Tensor
    ) -> None:
        self.bridge, self.kept = bridge, kept
        self.features: list[_Source] = []
        self.errors: list[_Source] = []
        self.tokens: list[_Source] = []
        self.constants: list[_Source] = []
        self.targets: list[Tensor] = []
        self._read: dict[str, Tensor] = {}
        self._leaves: dict[str, Tensor] = {}
        by_point = {hook.name.rpartition(".")[0]: hook for hook in bases}
        explained = {name.replace(".mlp.hook_post", ".hook_mlp_out") for name in by_point}  # by what made it
        mlps = [name for name in bridge.hook_dict if name.endswith(".hook_mlp_out") and name not in explained]
        reads = [hook.view.reads[0] for hook in bases if isinstance(hook.view, InBasis) and hook.view.reads]
        hooks: list[tuple[str, Callable[..., Tensor | None]]] = [(name, self._begin) for name in _beginnings(bridge)]
        hooks += [(name, self._keep) for name in dict.fromkeys(reads)]
        later = [follower.name.rpartition(".")[0] for hook in bases for follower in hook.point.linked]
        for name in dict.fromkeys([*by_point, *later, *mlps]):
            hooks.append((name, self._replace(by_point.get(name), written_later(name, bases, bridge.hook_dict))))
        made = _uncapped(bridge, bridge.run_with_hooks(prompt, fwd_hooks=hooks)[0, -1].float())
        self.logits = made - made.mean()

    def _begin(self, act: Tensor, hook: HookPoint) -> Tensor:
        leaf = act.detach().requires_grad_()
        positions = torch.arange(act.shape[1], device=act.device)
        nodes = [Node("token", hook.name, int(pos)) for pos in positions]
        self.tokens.append(_Source(nodes, leaf, positions))
        return leaf

    def _keep(self, act: Tensor, hook: HookPoint) -> None:
        self._read[hook.name] = act

    def _replace(self, basis: HookPoint | None, earlier: list[tuple[HookPoint, InBasis]]) -> Callable[..., Tensor]:
        """A hook that makes an MLP's output a function of features and errors alone.

        Args:
            basis: that of the features; None: the MLP is all error.
            earlier: what writes here of a cross-layer transcoder's layers.
        """

        def replace(act: Tensor, hook: HookPoint) -> Tensor:
            made = constant = torch.zeros_like(act)
            for layer, there in earlier:
                leaf = self._leaves[layer.name]
                made = made + there.decoded(leaf, act)
                constant = constant + there.decoded(torch.zeros_like(leaf), act)
            if basis is not None:
                view = basis.view
                assert isinstance(view, InBasis)
                read = self._read[view.reads[0]] if view.reads else act
                found = dense(view.encode(read))
                leaf = found.detach().requires_grad_()
                entries = (leaf[0] * self.kept.view(-1, *[1] * (leaf.ndim - 2))).nonzero()
                nodes = [Node("feature", basis.name, at[0], at[-1], *at[1:-1]) for at in entries.tolist()]
                self.features.append(_Source(nodes, leaf, entries))
                self.targets.append(found)
                self._leaves[basis.name] = leaf
                made = made + view.decoded(leaf, act)
                constant = constant + view.decoded(torch.zeros_like(leaf), act)
                if view.skip is not None:
                    made = made + view.skip(read)
            positions = self.kept.nonzero().flatten()

            def source(kind: Literal["error", "constant"], value: Tensor) -> _Source:
                nodes = [Node(kind, hook.name, int(pos)) for pos in positions]
                return _Source(nodes, value.detach().requires_grad_(), positions)

            self.errors.append(source("error", act - made))
            if constant.any():
                self.constants.append(source("constant", constant))
                made = made - constant.detach() + self.constants[-1].leaf
            return self.errors[-1].leaf + made

        return replace

    def graph(self, tokens: Tensor, probabilities: Tensor, together: int) -> AttributionGraph:
        """The graph of the run.

        Args:
            tokens: whose logits are nodes.
            probabilities: theirs.
            together: how many rows at once.
        """
        sources = [*self.features, *self.errors, *self.tokens, *self.constants]
        ends = [Node("logit", "logits", self.kept.numel() - 1, int(token)) for token in tokens]
        nodes = [node for source in sources for node in source.nodes]
        nodes.append(Node("constant", "biases", 0))
        if not any(source.nodes for source in self.features):
            raise ValueError("no feature is active at these positions: there is nothing to attribute")
        values = [found[0][source.entries.unbind(1)] for source, found in zip(self.features, self.targets, strict=True)]
        adjacency = probabilities.new_zeros(len(nodes) + len(ends), len(nodes) + len(ends))
        receivers = torch.cat([*values, self.logits[tokens]])
        rows = [*range(sum(map(len, values))), *range(len(nodes), len(nodes) + len(ends))]
        leaves = [source.leaf for source in sources]
        for at in range(0, len(rows), together):
            some = rows[at : at + together]
            wanted = torch.zeros(len(some), len(rows), device=adjacency.device, dtype=receivers.dtype)
            wanted[range(len(some)), range(at, at + len(some))] = 1
            gradients = self._gradients(receivers, leaves, wanted)
            adjacency[some, : len(nodes) - 1] = torch.cat(
                [_sent(source, gradient, len(some)) for source, gradient in zip(sources, gradients, strict=True)], 1
            ).to(adjacency.dtype)
        # Everything is linear in the nodes and constant otherwise, but for the insides of an MLP.
        linear = [not self._bends(source.nodes) for source in self.features for _ in source.nodes] + [True] * len(ends)
        rest = receivers.detach().to(adjacency.dtype) - adjacency[rows].sum(1)
        adjacency[rows, len(nodes) - 1] = rest * torch.tensor(linear, device=rest.device)
        vectors = (*self.errors, *self.tokens, *self.constants)
        sizes = [source.leaf.detach()[0][source.entries].flatten(1).norm(dim=-1) for source in vectors]
        sizes.append(receivers.new_zeros(1))
        whole = torch.cat([*(value.detach() for value in values), *sizes, self.logits[tokens].detach()])
        return AttributionGraph((*nodes, *ends), adjacency, whole.to(adjacency.dtype), probabilities)

    def _bends(self, nodes: Sequence[Node]) -> bool:
        """Whether an MLP is between the stream and the features of these nodes, so that what they get is a slope."""
        point = nodes[0].point if nodes else ""
        view = self.bridge.hook_dict[point].view if point else None
        read = view.reads[0] if isinstance(view, InBasis) and view.reads else point.rpartition(".")[0]
        return ".mlp." in read or read.endswith(".hook_mlp_out")

    def _gradients(self, receivers: Tensor, leaves: Sequence[Tensor], wanted: Tensor) -> Sequence[Tensor | None]:
        """Of each row of weights of the receivers: one by one where the model is spread, as DTensors know no vmap."""
        given = partial(torch.autograd.grad, receivers, leaves, retain_graph=True, allow_unused=True)
        if self.bridge.wiring.sharing is None:
            return given(wanted, is_grads_batched=True)
        rows = [given(row) for row in wanted]
        return [None if of_leaf[0] is None else torch.stack(of_leaf) for of_leaf in zip(*rows, strict=True)]


def _sent(source: _Source, gradient: Tensor | None, rows: int) -> Tensor:
    """What the nodes of a source send to each of the receivers whose gradients these are, ``[row, node]``."""
    if gradient is None:
        return source.leaf.new_zeros(rows, len(source.nodes))
    parts = gradient[:, 0] * source.leaf.detach()[0]
    if source.entries.ndim == 2:
        where: tuple[slice | Tensor, ...] = (slice(None), *source.entries.unbind(1))
        return parts[where]
    return parts[:, source.entries].flatten(2).sum(-1)
