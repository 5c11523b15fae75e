"""Attribution graphs: against circuit-tracer's own, and edge by edge against interventions."""

import errno
import math
import resource
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from bridge import TransformerBridge, pictures
from bridge.bases import CrossLayer
from bridge.features import AttributionGraph, Node, attribution_graph, head_loadings, score_terms
from bridge.hooks.hooks import HookPoint
from tests.bases.common import SAE
from tests.reference import DATA
from tests.tiny_models import tiny_model

GRAPHS = DATA.parent / "circuit_tracer" / "graphs.safetensors"
READS = {"gpt2": "ln2.hook_normalized", "llama": "hook_resid_mid"}


def reference_bridge(family: str) -> TransformerBridge:
    return TransformerBridge(AutoModelForCausalLM.from_pretrained(DATA / family).eval())


def place_cross_layer(bridge: TransformerBridge, read: str, theirs: dict[str, Tensor]) -> list[str]:
    """circuit-tracer's cross-layer transcoder."""
    reads, writes = (
        [f"blocks.{layer}.{name}" for layer in range(2)] for name in (read, "hook_mlp_out")
    )
    points = []
    for layer in range(2):
        threshold = theirs.get("activation_function.threshold")
        own = CrossLayer(
            theirs["W_enc"][layer],
            theirs["b_enc"][layer],
            theirs[f"W_dec.{layer}"],
            theirs["b_dec"][layer],
            None if threshold is None else threshold[layer, 0],
        )
        hook = bridge.add_basis(
            writes[layer], "clt", own, reads=reads[layer], later=writes[layer + 1 :]
        )
        points.append(hook.name)
    return points


def place_transcoders(bridge: TransformerBridge, read: str, theirs: dict[str, Tensor]) -> list[str]:
    """circuit-tracer's transcoders, of each layer one."""
    points = []
    for layer in range(2):
        own = {name: theirs[f"{layer}/{name}"] for name in ("W_enc", "b_enc", "W_dec", "b_dec")}
        through = theirs.get(f"{layer}/W_skip")
        hook = bridge.add_basis(
            f"blocks.{layer}.hook_mlp_out",
            "tc",
            encode=lambda x, own=own: (x @ own["W_enc"].T + own["b_enc"]).relu(),
            decode=lambda features, own=own: features @ own["W_dec"] + own["b_dec"],
            reads=f"blocks.{layer}.{read}",
            skip=None if through is None else lambda x, through=through: x @ through.T,
        )
        points.append(hook.name)
    return points


@pytest.mark.parametrize("kind", ["plain", "skip", "clt"])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_circuit_tracer_finds_the_same_graph(family: str, kind: str) -> None:
    key = f"{family}/{kind}/"
    theirs = {
        name.removeprefix(key): value
        for name, value in load_file(GRAPHS).items()
        if name.startswith(key)
    }
    bridge = reference_bridge(family)
    points = (place_cross_layer if kind == "clt" else place_transcoders)(
        bridge, READS[family], theirs
    )
    tokens = theirs["tokens"][None].long()
    graph = attribution_graph(
        bridge, tokens, points, logits=torch.tensor([7, 9, 11]), without_positions=[0]
    )
    n = tokens.shape[1]
    features = [
        Node("feature", points[layer], pos, index)
        for layer, pos, index in theirs["features"].tolist()
    ]
    assert [node for node in graph.nodes if node.kind == "feature"] == features and len(
        features
    ) > 20
    right, at = theirs["adjacency"], {node: i for i, node in enumerate(graph.nodes)}
    assert torch.allclose(graph.values[: len(features)], theirs["values"], atol=1e-5)
    errors = [
        Node("error", f"blocks.{layer}.hook_mlp_out", pos) for layer in range(2) for pos in range(n)
    ]
    begin = [Node("token", "hook_embed", pos) for pos in range(n)]
    ends = [Node("logit", "logits", n - 1, token) for token in (7, 9, 11)]
    order = [*features, *errors, *begin, *ends]
    kept = [
        i for i, node in enumerate(order) if node in at
    ]  # what is left out at the first position is zero there
    assert [order[i] for i in range(len(order)) if i not in kept] == [
        node for node in errors if node.pos == 0
    ]
    mine = [at[order[i]] for i in kept]
    assert torch.allclose(graph.adjacency[mine][:, mine], right[kept][:, kept], rtol=0, atol=1e-5)
    assert right.abs().max() > 1
    few = attribution_graph(
        bridge, tokens, points, logits=torch.tensor([7, 9, 11]), without_positions=[0], limit=15
    )
    mine, theirs = zip(
        *[(i, order.index(node)) for i, node in enumerate(few.nodes) if node in order], strict=True
    )
    assert len(mine) > 10
    assert torch.allclose(
        few.adjacency[list(mine)][:, mine], right[list(theirs)][:, theirs], rtol=0, atol=1e-5
    )


@pytest.fixture(scope="module")
def placed() -> tuple[TransformerBridge, list[str], AttributionGraph]:
    bridge = reference_bridge("gpt2")
    points = [
        bridge.add_basis(
            f"blocks.{layer}.hook_mlp_out",
            "tc",
            SAE(32, 24, 32),
            reads=f"blocks.{layer}.hook_resid_mid",
        ).name
        for layer in range(2)
    ]
    return bridge, points, attribution_graph(bridge, TOKENS, points, logits=3)


@pytest.fixture(scope="module")
def placed_across() -> tuple[TransformerBridge, list[str], AttributionGraph]:
    """The same of a cross-layer transcoder, whose first layer writes at both points."""
    bridge, generator = reference_bridge("gpt2"), torch.Generator().manual_seed(3)
    drawn = {name: torch.randn(2, *sizes, generator=generator) / 4 for name, *sizes in _ACROSS}
    drawn |= {
        f"W_dec.{layer}": torch.randn(24, 2 - layer, 32, generator=generator) / 4
        for layer in range(2)
    }
    points = place_cross_layer(bridge, "hook_resid_mid", drawn)
    return bridge, points, attribution_graph(bridge, TOKENS, points, logits=3)


@pytest.fixture(scope="module")
def placed_deep() -> tuple[TransformerBridge, list[str], AttributionGraph]:
    """In four layers, so that influence goes through several features one after the other."""
    bridge = TransformerBridge.boot_embedded()
    points = [
        bridge.add_basis(
            f"blocks.{i}.hook_mlp_out", "tc", SAE(128, 24, 128), reads=f"blocks.{i}.hook_resid_mid"
        ).name
        for i in range(4)
    ]
    return bridge, points, attribution_graph(bridge, TOKENS, points, logits=3)


_ACROSS = (("W_enc", 24, 32), ("b_enc", 24), ("b_dec", 32))
TOKENS = torch.tensor([[5, 17, 2, 30, 11, 44]])


@torch.no_grad()
@pytest.mark.parametrize(
    "pos", [2, 5]
)  # at the last one, what the second MLP adds reaches the logits, too
@pytest.mark.parametrize("kind", ["placed", "placed_across"])
def test_edges_are_what_interventions_do(
    kind: str, pos: int, request: pytest.FixtureRequest
) -> None:
    """Turn one feature up by a tenth, with everything else held: each receiver moves by a tenth of
    its edge.
    """
    bridge, points, graph = request.getfixturevalue(kind)
    first = next(node for node in graph.nodes if node.point == points[0] and node.pos == pos)
    with bridge.linearised(TOKENS, freeze=("pattern", "ln_scale", "mlp_out")):

        def turned_up(features: Tensor, hook: object) -> Tensor:
            features[0, first.pos, first.index] *= 1.1
            return features

        wanted = [points[1]]
        before, cache = bridge.run_with_cache(TOKENS, names_filter=wanted)
        with bridge.hooks(fwd_hooks=[(points[0], turned_up)]):
            after, changed = bridge.run_with_cache(TOKENS, names_filter=wanted)
    receivers = [node for node in graph.nodes if node.point == points[1]]
    assert len(receivers) > 10
    for node in receivers:
        moved = (changed[points[1]] - cache[points[1]])[0, node.pos, node.index]
        assert float(moved) == pytest.approx(graph[first, node] / 10, abs=2e-5)
    assert max(abs(graph[first, node]) for node in receivers) > 1e-2
    for node in graph.nodes[-3:]:
        moved = (after - after.mean(-1, keepdim=True) - before + before.mean(-1, keepdim=True))[
            0, -1, node.index
        ]
        assert float(moved) == pytest.approx(graph[first, node] / 10, abs=2e-5)


@torch.no_grad()
def test_what_a_node_receives_adds_up(
    placed: tuple[TransformerBridge, list[str], AttributionGraph],
) -> None:
    """With all biases away: the value of every feature and logit is the sum of its edges."""
    model = AutoModelForCausalLM.from_pretrained(DATA / "gpt2").eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.zero_()
    bridge = TransformerBridge(model)
    points = []
    for layer in range(2):
        sae = SAE(32, 24, 32)
        sae.b_enc.zero_()
        sae.b_dec.zero_()
        reads = f"blocks.{layer}.hook_resid_mid"
        points.append(bridge.add_basis(f"blocks.{layer}.hook_mlp_out", "tc", sae, reads=reads).name)
    graph = attribution_graph(bridge, TOKENS, points, together=7)
    valued = [i for i, node in enumerate(graph.nodes) if node.kind in ("feature", "logit")]
    logits = bridge(TOKENS)[0, -1]
    assert torch.allclose(
        graph.values[-3:], (logits - logits.mean())[[node.index for node in graph.nodes[-3:]]]
    )
    assert torch.allclose(graph.adjacency[valued].sum(1), graph.values[valued], rtol=0, atol=1e-4)
    senders = [
        node for i, node in enumerate(graph.nodes) if (graph.adjacency[:, i].abs() > 1e-4).any()
    ]
    assert {node.kind for node in senders} == {"feature", "error", "token"}


@torch.no_grad()
@pytest.mark.parametrize("left_out", [(), (0, 3)])
@pytest.mark.parametrize("kind", ["placed", "placed_across"])
def test_with_constants_it_adds_up_too(
    kind: str, left_out: tuple[int, ...], request: pytest.FixtureRequest
) -> None:
    bridge, points, _ = request.getfixturevalue(kind)
    graph = attribution_graph(bridge, TOKENS, points, without_positions=left_out)
    valued = [i for i, node in enumerate(graph.nodes) if node.kind in ("feature", "logit")]
    assert torch.allclose(graph.adjacency[valued].sum(1), graph.values[valued], rtol=0, atol=1e-4)
    constant = torch.tensor([node.kind == "constant" for node in graph.nodes])
    assert (graph.adjacency[valued][:, ~constant].sum(1) - graph.values[valued]).abs().max() > 0.1


@torch.no_grad()
def test_constants_are_those_of_encoders_and_decoders() -> None:
    """By hand in float64: what a decoder's constant adds to what is read behind it; the rest is the
    encoder's own.
    """
    model = AutoModelForCausalLM.from_pretrained(DATA / "gpt2").eval().double()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.zero_()
    bridge, saes, points = (
        TransformerBridge(model),
        [SAE(32, 24, 32).double() for _ in range(2)],
        [],
    )
    for layer, sae in enumerate(saes):
        reads = f"blocks.{layer}.hook_resid_mid"
        points.append(bridge.add_basis(f"blocks.{layer}.hook_mlp_out", "tc", sae, reads=reads).name)
    graph = attribution_graph(bridge, TOKENS, points)
    biases = Node("constant", "biases", 0)
    for node in graph.nodes:
        if node.kind == "feature":
            layer = points.index(node.point)
            assert graph[biases, node] == pytest.approx(
                float(saes[layer].b_enc[node.index]), abs=1e-6
            )
        if node.kind == "logit":
            assert graph[biases, node] == pytest.approx(0, abs=1e-5)

    def more(act: Tensor, hook: object) -> Tensor:
        return act + saes[0].b_dec * (torch.arange(6) == 2)[:, None]

    with bridge.linearised(TOKENS, freeze=("pattern", "ln_scale", "blocks.1.hook_mlp_out")):
        reads = "blocks.1.hook_resid_mid"
        _, before = bridge.run_with_cache(TOKENS, names_filter=reads)
        with bridge.hooks(fwd_hooks=[("blocks.0.hook_mlp_out", more)]):
            _, after = bridge.run_with_cache(TOKENS, names_filter=reads)
    moved = (after[reads] - before[reads])[0] @ saes[1].W_enc
    sender, seen = Node("constant", "blocks.0.hook_mlp_out", 2), 0
    for node in graph.nodes:
        if node.kind == "feature" and node.point == points[1]:
            assert graph[sender, node] == pytest.approx(
                float(moved[node.pos, node.index]), abs=1e-6
            )
            seen += abs(float(moved[node.pos, node.index])) > 1e-2
    assert seen > 10


INSIDE = (
    "blocks.0.attn.hook_z",
    "blocks.0.mlp.hook_post",
    "blocks.1.attn.hook_z",
    "blocks.1.mlp.hook_post",
)


@torch.no_grad()
@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("sender", INSIDE[:3])
def test_edges_of_features_inside_parts_are_what_interventions_do(family: str, sender: str) -> None:
    """A millionth more of a feature, in double precision: all moves by a millionth of its edge."""
    bridge = reference_bridge(family).to(torch.float64)
    points = {}
    for name in INSIDE:
        width = bridge.run_with_cache(TOKENS, names_filter=name)[1][name].shape[-1]
        points[name] = bridge.add_basis(name, "own", SAE(width, 16).double()).name
    graph = attribution_graph(bridge, TOKENS, list(points.values()), logits=3)
    features = [node for node in graph.nodes if node.kind == "feature"]
    assert all((node.head is None) == ("hook_post" in node.point) for node in features)
    behind = [name for name in INSIDE if INSIDE.index(name) > INSIDE.index(sender)]
    seen = 0
    for start in [node for node in features if node.point == points[sender]][::29]:

        def turned_up(act: Tensor, hook: object, start: Node = start) -> Tensor:
            act[0, start.pos, *([] if start.head is None else [start.head]), start.index] *= (
                1 + 1e-6
            )
            return act

        for at, receiver in enumerate(
            [*behind, None]
        ):  # each with all other bases behind the sender held
            held = [name for name in behind if name != receiver]
            with bridge.linearised(TOKENS, freeze=("pattern", "ln_scale", *held)):
                wanted = [points[receiver]] if receiver else []
                before, cache = bridge.run_with_cache(TOKENS, names_filter=wanted or points[sender])
                with bridge.hooks(fwd_hooks=[(points[sender], turned_up)]):
                    after, changed = bridge.run_with_cache(
                        TOKENS, names_filter=wanted or points[sender]
                    )
            for node in [node for node in features if node.point in wanted]:
                place = (0, node.pos, *([] if node.head is None else [node.head]), node.index)
                moved = float(changed[node.point][place] - cache[node.point][place]) * 1e6
                assert moved == pytest.approx(graph[start, node], rel=1e-3, abs=2e-6)
                seen += abs(moved) > 1e-4
            for node in graph.nodes[-3:] if at == len(behind) else ():
                moves = (
                    after - after.mean(-1, keepdim=True) - before + before.mean(-1, keepdim=True)
                ) * 1e6
                assert float(moves[0, -1, node.index]) == pytest.approx(
                    graph[start, node], rel=1e-3, abs=2e-6
                )
    assert seen > 10


@torch.no_grad()
def test_what_features_of_heads_receive_adds_up() -> None:
    model = AutoModelForCausalLM.from_pretrained(DATA / "gpt2").eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.zero_()
    bridge = TransformerBridge(model)
    sae = SAE(bridge.cfg.d_head, 24)
    sae.b_enc.zero_()
    sae.b_dec.zero_()
    points = [
        bridge.add_basis(f"blocks.{layer}.attn.hook_z", "own", sae).name for layer in range(2)
    ]
    graph = attribution_graph(bridge, TOKENS, points)
    valued = [i for i, node in enumerate(graph.nodes) if node.kind in ("feature", "logit")]
    assert len({node.head for node in graph.nodes}) > 2 and len(set(graph.nodes)) == len(
        graph.nodes
    )
    assert torch.allclose(graph.adjacency[valued].sum(1), graph.values[valued], rtol=0, atol=1e-4)
    assert isinstance(pictures.circuit(graph.largest(5)), pictures.Picture)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["jamba", "recurrent_gemma", "qwen3_next"])
def test_a_model_that_is_not_linear_where_patterns_are_held_is_refused(
    kind: str, tmp_path: Path
) -> None:
    """And the file that stood where the graph was to stand is there."""
    bridge, file = TransformerBridge(tiny_model(kind)), tmp_path / "rows"
    point = bridge.add_basis("blocks.0.hook_mlp_out", "own", SAE(bridge.cfg.d_model, 16))
    file.write_bytes(b"an earlier graph")
    with pytest.raises(ValueError, match=r"is not linear between the embedding and blocks\.\d"):
        attribution_graph(bridge, TOKENS, [point.name], file=file)
    assert file.read_bytes() == b"an earlier graph"


def test_no_graph_is_made_in_inference_mode(
    placed: tuple[TransformerBridge, list[str], AttributionGraph],
) -> None:
    bridge, points, graph = placed
    studies = {
        "graph": lambda: attribution_graph(bridge, TOKENS, points),
        "scores": lambda: score_terms(bridge, TOKENS, points, 1, 0, 3, 1),
        "loadings": lambda: head_loadings(bridge, TOKENS, points, graph.nodes[-1]),
    }
    for study in studies.values():
        with torch.inference_mode(), pytest.raises(RuntimeError, match="needs gradients"):
            study()


@pytest.mark.parametrize("side", ["right", "left"])
def test_padding_of_one_prompt_is_refused(
    placed: tuple[TransformerBridge, list[str], AttributionGraph], side: str
) -> None:
    """The last position would be padding, and padding would be nodes."""
    bridge, points, _ = placed
    mask = torch.ones_like(TOKENS)
    mask[:, :2] = 0
    prompt = {"input_ids": TOKENS, "attention_mask": mask if side == "left" else mask.flip(1)}
    with pytest.raises(ValueError, match=f"2 of {TOKENS.shape[1]} tokens are padding"):
        attribution_graph(bridge, prompt, points)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
def test_other_precisions(family: str, dtype: torch.dtype) -> None:
    """What rounding does to logits is that of the model, not that of the single precision that they
    are counted in.
    """

    def graph_of(dtype: torch.dtype) -> AttributionGraph:
        bridge = TransformerBridge(tiny_model(family).to(dtype))
        points = []
        for layer in range(2):
            basis = SAE(bridge.cfg.d_model, 16).to(dtype)
            reads = f"blocks.{layer}.hook_resid_mid"
            points.append(
                bridge.add_basis(f"blocks.{layer}.hook_mlp_out", "own", basis, reads=reads).name
            )
        return attribution_graph(bridge, TOKENS, points, logits=torch.tensor([5, 6]))

    one, other = graph_of(torch.float32), graph_of(dtype)
    both = [node for node in one.nodes if node in set(other.nodes)]
    assert len(both) > 0.9 * len(one.nodes)
    values = [[graph[sender, one.nodes[-1]] for sender in both] for graph in (one, other)]
    first, second = map(torch.tensor, values)
    assert (first - second).abs().max() < {torch.bfloat16: 0.03}.get(
        dtype, 0.004
    ) * first.abs().max()
    receives = [i for i, node in enumerate(other.nodes) if node.kind in ("feature", "logit")]
    assert torch.allclose(other.adjacency.sum(1)[receives], other.values[receives], atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
def test_terms_of_a_score_in_half_precision(family: str) -> None:
    """A score in half precision is its sum as nearly as it is rounded."""
    bridge = TransformerBridge(tiny_model(family).bfloat16())
    basis = SAE(bridge.cfg.d_model, 16).bfloat16()
    point = bridge.add_basis(
        "blocks.0.hook_mlp_out", "own", basis, reads="blocks.0.hook_resid_mid"
    ).name
    for layer, head, query, key in [
        (i, j, k, k - 1) for i in range(2) for j in range(4) for k in range(1, 6)
    ]:
        terms = score_terms(bridge, TOKENS, [point], layer, head, query, key)
        _, cache = bridge.run_with_cache(
            TOKENS, names_filter=f"blocks.{layer}.attn.hook_attn_scores"
        )
        size = max(1.0, float(terms.query_parts.norm() * terms.key_parts.norm()))
        assert abs(terms.score - float(cache["scores", layer][0, head, query, key])) < 0.01 * size


@torch.no_grad()
def test_a_head_that_bends_behind_the_stream_is_refused() -> None:
    """BERT's stream begins at the norm of its embeddings; what makes logits of it has an activation
    function.
    """
    bridge = TransformerBridge(tiny_model("bert", "masked"))
    point = bridge.add_basis("blocks.0.hook_resid_post", "own", SAE(bridge.cfg.d_model, 16))
    with pytest.raises(ValueError, match="is not linear between the embedding and the logits"):
        attribution_graph(bridge, TOKENS, [point.name])


@torch.no_grad()
def test_a_model_with_an_encoder_and_a_decoder_is_refused() -> None:
    bridge = TransformerBridge(tiny_model("t5", "seq2seq"))
    point = bridge.add_basis("decoder.0.hook_mlp_out", "own", SAE(bridge.cfg.d_model, 16))
    for tokens in (TOKENS[:, :3], TOKENS):
        with pytest.raises(ValueError, match="has no single list of blocks"):
            attribution_graph(
                bridge, {"input_ids": TOKENS, "decoder_input_ids": tokens}, [point.name]
            )


def test_tokens_stand_where_a_norm_of_the_embeddings_begins_the_stream() -> None:
    """Of GIT no hook point has what is added up alone: the edges of its tokens are what changing
    these does.
    """
    bridge = TransformerBridge(tiny_model("git"))
    point = bridge.add_basis("blocks.0.hook_resid_post", "own", SAE(bridge.cfg.d_model, 16))
    graph = attribution_graph(bridge, TOKENS, [point.name], logits=1)
    tokens = [node for node in graph.nodes if node.kind == "token"]
    assert [(node.point, node.pos) for node in tokens] == [
        ("hook_full_embed", pos) for pos in range(TOKENS.shape[1])
    ]
    seen: dict[str, Tensor] = {}
    for share in (1.0, 0.5):

        def shrink(stream: Tensor, hook: HookPoint, share: float = share) -> Tensor:
            return torch.cat([stream[:, :2], stream[:, 2:3] * share, stream[:, 3:]], 1)

        keep = lambda features, hook, share=share: seen.update(
            {str(share): features.detach().clone()}
        )
        with bridge.linearised(TOKENS, freeze=("pattern", "ln_scale", "mlp_out")):
            bridge.run_with_hooks(TOKENS, fwd_hooks=[("hook_full_embed", shrink), (point, keep)])
    active = [node for node in graph.nodes if node.kind == "feature" and node.pos == 2]
    assert active
    for node in active:
        full, half = (float(seen[share][0, node.pos, node.index]) for share in ("1.0", "0.5"))
        if half > 0:
            assert abs(graph[tokens[2], node] - 2 * (full - half)) < 1e-5


def test_influence_and_picture(
    placed: tuple[TransformerBridge, list[str], AttributionGraph],
) -> None:
    graph = placed[2]
    sizes = graph.adjacency.abs() * torch.tensor(
        [float(node.kind != "constant") for node in graph.nodes]
    )
    assert (sizes != graph.adjacency.abs()).any()
    shares = (sizes / sizes.sum(1, keepdim=True).clamp(min=1e-10)).double()
    weights = torch.zeros(len(graph.nodes), dtype=torch.float64)
    weights[-3:] = graph.probabilities.double()
    right, power = torch.zeros_like(weights), weights
    for _ in range(4):  # two layers of features, errors and tokens: no path is longer
        power = power @ shares
        right += power
    assert torch.allclose(graph.influence().double(), right, atol=1e-6)
    edges = graph.largest(12)
    assert len(edges) == 12 and isinstance(pictures.circuit(edges), pictures.Picture)


def by_hand(adjacency: Tensor, ignored: Tensor, ends: int, probabilities: Tensor) -> Tensor:
    """Influence in float64, by powers of the shares."""
    sizes = adjacency.double().abs() * ~ignored
    shares = sizes / sizes.sum(1, keepdim=True).clamp(min=1e-10)
    weights = torch.zeros(len(adjacency), dtype=torch.float64)
    weights[-ends:] = probabilities.double()
    whole = torch.zeros_like(weights)
    for _ in range(6):
        weights = weights @ shares
        whole += weights
    return whole


@pytest.mark.parametrize("limit", [1, 5, 40, 90])
@pytest.mark.parametrize("kind", ["placed", "placed_across", "placed_deep"])
def test_a_limit_keeps_the_most_influential(
    kind: str, limit: int, request: pytest.FixtureRequest
) -> None:
    """Of the whole graph's edges, followed through the kept features alone: the kept nodes have the
    most influence.
    """
    bridge, points, whole = request.getfixturevalue(kind)
    graph = attribution_graph(bridge, TOKENS, points, limit=limit, together=3)
    dropped, at = next(i for i, node in enumerate(graph.nodes) if node.kind == "dropped"), {}
    for index, node in enumerate(whole.nodes):
        at[node] = index
    kept = [at[node] for node in graph.nodes if node.kind in ("feature", "error", "token")]
    assert len(kept) == limit and kept == sorted(kept)
    constant = torch.tensor([node.kind == "constant" for node in whole.nodes])
    followed = whole.adjacency.clone()
    followed[[i for node, i in at.items() if node.kind == "feature" and i not in kept]] = 0
    influence = by_hand(followed, constant, 3, whole.probabilities)
    left_out = influence[
        [i for i in range(len(influence) - 3) if i not in kept and not constant[i]]
    ]
    assert influence[kept].min() >= left_out.max() - 1e-9
    # Their edges are the whole graph's; what all others send is in one node, and what is constant
    # in another.
    mine = [i for i, node in enumerate(graph.nodes) if node in at and node.point != "biases"]
    theirs = [at[graph.nodes[i]] for i in mine]
    assert torch.allclose(
        graph.adjacency[mine][:, mine], whole.adjacency[theirs][:, theirs], rtol=0, atol=1e-6
    )
    assert torch.equal(graph.values[mine], whole.values[theirs])
    valued = [i for i in mine if graph.nodes[i].kind in ("feature", "logit")]
    assert torch.allclose(graph.adjacency[valued].sum(1), graph.values[valued], rtol=0, atol=1e-4)
    rest = whole.adjacency[
        :, [i for i in range(len(influence)) if i not in theirs and not constant[i]]
    ].sum(1)
    assert torch.allclose(
        graph.adjacency[valued, dropped], rest[[at[graph.nodes[i]] for i in valued]], atol=1e-4
    )
    # And influence is counted as there: what was dropped, one by one.
    found = graph.influence().double()
    assert torch.allclose(found[mine], influence[theirs], atol=1e-6)
    assert (
        float(found[dropped]) == pytest.approx(float(left_out.sum()), abs=1e-6)
        and found[dropped] > 1e-5
    )
    assert "what was dropped, 3 logits" in repr(graph)
    assert "dropped" not in {name for edge in graph.largest(limit) for name in edge[:2]}


@pytest.mark.parametrize("limit", [None, 40])
def test_a_graph_in_a_file_is_the_same(
    limit: int | None,
    placed_deep: tuple[TransformerBridge, list[str], AttributionGraph],
    tmp_path: Path,
) -> None:
    bridge, points, _ = placed_deep
    graph = attribution_graph(bridge, TOKENS, points, limit=limit)
    path = tmp_path / "rows"
    first = attribution_graph(bridge, TOKENS, points, limit=5, file=path)
    there = attribution_graph(
        bridge, TOKENS, points, limit=limit, file=path
    )  # in the place of the first
    assert len(first.nodes) < len(there.nodes) == len(graph.nodes) and len(first.adjacency) == len(
        first.nodes
    )
    # Of no edge that a later node would have: of each receiver's row those columns that hold
    # something.
    assert (
        path.stat().st_size
        == 4 * sum(sent.numel() for *_, sent in graph.rows)
        < 2 * len(graph.nodes) ** 2
    )
    for name in ("adjacency", "values", "probabilities", "received"):
        assert torch.equal(getattr(there, name), getattr(graph, name))
    written = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.float32)
    assert torch.equal(
        written.sort().values, torch.cat([sent.flatten() for *_, sent in graph.rows]).sort().values
    )
    assert torch.equal(there.influence(), graph.influence()) and there.largest(30) == graph.largest(
        30
    )


@pytest.mark.parametrize("limit", [None, 20])
def test_a_disk_without_room(
    limit: int | None,
    placed_deep: tuple[TransformerBridge, list[str], AttributionGraph],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A file that may not become as large as the graph: it is told before a row is computed, and
    nothing is left.
    """
    bridge, points, _ = placed_deep
    monkeypatch.setattr(
        "bridge.features.graph._ReplacementRun._rows", lambda *_: pytest.fail("a row was computed")
    )
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(
            OSError, match=r"the edges between \d+ nodes take up to \d+ bytes: .*rows"
        ) as told:
            attribution_graph(bridge, TOKENS, points, limit=limit, file=tmp_path / "rows")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert told.value.filename == str(tmp_path / "rows") and told.value.errno == errno.EFBIG
    assert not (tmp_path / "rows").exists()
    monkeypatch.setattr(bridge, "run_with_hooks", lambda *_, **__: pytest.fail("the model ran"))
    with pytest.raises(FileNotFoundError, match="no_such_folder"):
        attribution_graph(
            bridge, TOKENS, points, limit=limit, file=tmp_path / "no_such_folder" / "rows"
        )


def test_influence_and_edges_do_not_depend_on_how_many_rows_are_looked_at(
    placed_deep: tuple[TransformerBridge, list[str], AttributionGraph],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graph = placed_deep[2]
    influence, edges = graph.influence(), graph.largest(200)
    monkeypatch.setattr("bridge.features.graph._ROWS", 7)
    assert (
        torch.allclose(graph.influence(), influence, rtol=1e-6, atol=0)
        and graph.largest(200) == edges
    )


@pytest.mark.parametrize("limit", [None, 70])
@pytest.mark.parametrize("kind", ["placed", "placed_across", "placed_deep"])
def test_rows_of_the_prompts_first_parts(
    kind: str, limit: int | None, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Computed without what is behind them, they are those of the whole prompt."""
    bridge, points, _ = request.getfixturevalue(kind)
    whole = attribution_graph(bridge, TOKENS, points, limit=limit, together=5)
    monkeypatch.setattr("bridge.features.graph._WORTHWHILE", 0)
    lengths, run = [], bridge.linearised
    monkeypatch.setattr(
        bridge,
        "linearised",
        lambda prompt, *args, **kwargs: (
            lengths.append(prompt["input_ids"].shape[1]) or run(prompt, *args, **kwargs)
        ),
    )
    graph = attribution_graph(bridge, TOKENS, points, limit=limit, together=5)
    assert set(lengths) == {1, 3, 4, 6} or (limit is not None and {3, 4} & set(lengths))
    assert graph.nodes == whole.nodes
    for name in ("adjacency", "values", "received"):
        assert torch.allclose(getattr(graph, name), getattr(whole, name), rtol=0, atol=1e-5)
    assert torch.allclose(graph.influence(), whole.influence(), rtol=0, atol=1e-5)


def test_rows_that_need_what_is_behind_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A basis that reads later positions: at the prompt's first tokens other features are active
    without these.
    """
    monkeypatch.setattr("bridge.features.graph._WORTHWHILE", 0)
    bridge = reference_bridge("gpt2")
    W = torch.randn(32, 24, generator=torch.Generator().manual_seed(0)) / 4
    point = bridge.add_basis(
        "blocks.1.hook_mlp_out",
        "both",
        reads="blocks.1.hook_resid_mid",
        encode=lambda x: ((x + x.mean(1, keepdim=True)) @ W).relu(),
        decode=lambda features: features @ W.T,
    )
    graph = attribution_graph(bridge, TOKENS, [point.name])
    monkeypatch.setattr("bridge.features.graph._PREFIXES", 1)
    right = attribution_graph(bridge, TOKENS, [point.name])
    assert graph.nodes == right.nodes and torch.equal(graph.adjacency, right.adjacency)
    later = [i for i, node in enumerate(graph.nodes) if node.kind == "token" and node.pos == 5]
    first = [i for i, node in enumerate(graph.nodes) if node.kind == "feature" and node.pos == 0]
    assert graph.adjacency[first][:, later].abs().max() > 1e-3


def test_a_limit_that_all_fit_in_changes_nothing(
    placed: tuple[TransformerBridge, list[str], AttributionGraph],
) -> None:
    bridge, points, whole = placed
    graph = attribution_graph(bridge, TOKENS, points, limit=len(whole.nodes))
    assert graph.nodes == whole.nodes and torch.equal(graph.adjacency, whole.adjacency)
    with pytest.raises(ValueError, match="limit"):
        attribution_graph(bridge, TOKENS, points, limit=0)


@pytest.mark.parametrize("limit", [None, 20])
@pytest.mark.parametrize("kind", ["placed", "placed_across"])
def test_a_saved_graph_is_the_same(
    kind: str, limit: int | None, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    bridge, points, _ = request.getfixturevalue(kind)
    graph = attribution_graph(bridge, TOKENS, points, limit=limit)
    graph.save(tmp_path / "graph.json", bridge, TOKENS)
    again = AttributionGraph.load(tmp_path / "graph.json")
    assert again.nodes == graph.nodes
    torch.testing.assert_close(
        again.influence(), graph.influence(), rtol=1e-5, atol=1e-7
    )  # sums of other rows
    for name in ("adjacency", "values", "probabilities", "received"):
        assert torch.equal(getattr(again, name), getattr(graph, name))
    graph.save(tmp_path / "few.json", bridge, TOKENS, n=7)
    few = AttributionGraph.load(tmp_path / "few.json")
    kept = few.adjacency != 0
    assert int(kept.sum()) == 7 and torch.equal(few.adjacency[kept], graph.adjacency[kept])
    with pytest.raises(ValueError, match="tokens has 3 positions; the graph is of 6"):
        graph.save(tmp_path / "no.json", bridge, TOKENS[:, :3])


def test_nodes_in_a_file_have_names_of_their_own(tmp_path: Path) -> None:
    """Features of each head, and bases at several points of one layer."""
    bridge = reference_bridge("gpt2")
    points = [
        bridge.add_basis(f"blocks.{i}.attn.hook_z", "own", SAE(bridge.cfg.d_head, 9)).name
        for i in range(2)
    ]
    points += [
        bridge.add_basis(f"blocks.{i}.hook_resid_mid", "own", SAE(bridge.cfg.d_model, 9)).name
        for i in range(2)
    ]
    points.append(bridge.add_basis("blocks.1.mlp.hook_post", "own", SAE(bridge.cfg.d_mlp, 9)).name)
    graph = attribution_graph(bridge, TOKENS, points)
    graph.save(tmp_path / "graph.json", bridge, TOKENS)
    again = AttributionGraph.load(tmp_path / "graph.json")
    assert again.nodes == graph.nodes and torch.equal(again.adjacency, graph.adjacency)


def test_a_damaged_graph_is_refused(
    placed: tuple[TransformerBridge, list[str], AttributionGraph], tmp_path: Path
) -> None:
    bridge, _, graph = placed
    path = tmp_path / "graph.json"
    graph.save(path, bridge, TOKENS)
    whole = path.read_bytes()
    generator = torch.Generator().manual_seed(0)
    for at in torch.randint(0, len(whole), (40,), generator=generator).tolist():
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :])
        with pytest.raises(
            ValueError, match=r"graph\.json holds no attribution graph that can be read"
        ):
            AttributionGraph.load(path)
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(
        ValueError, match=r"graph\.json holds no attribution graph that can be read"
    ):
        AttributionGraph.load(path)
    with pytest.raises(FileNotFoundError):
        AttributionGraph.load(tmp_path / "none.json")


FAMILIES = ("gpt2", "llama", "qwen3", "gemma2", "gpt_neox", "bloom", "phi3", "olmo2")


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_terms_of_a_score_add_up_and_are_what_interventions_do(family: str) -> None:
    """In float64: the terms sum to the score, and a feature turned up moves the query by its
    part.
    """
    bridge = TransformerBridge(tiny_model(family)).to(torch.float64)
    mid = "blocks.0.hook_resid_mid"
    reads = mid if mid in bridge.hook_dict else "blocks.0.hook_resid_pre"
    basis = SAE(bridge.cfg.d_model, 24).double()
    point = bridge.add_basis("blocks.0.hook_mlp_out", "tc", basis, reads=reads).name
    terms = score_terms(bridge, TOKENS, [point], layer=1, head=3, query=4, key=2)
    names = ["blocks.1.attn.hook_attn_scores", point]
    _, cache = bridge.run_with_cache(TOKENS, names_filter=names)
    score = float(cache[names[0]][0, 3, 4, 2])
    if cap := bridge.cfg.attn_scores_soft_cap > 0 and bridge.cfg.attn_scores_soft_cap:
        score = cap * math.atanh(score / cap)
    assert float(terms.values.sum()) + terms.position == pytest.approx(score, abs=1e-5)
    assert (terms.position != 0) == (family == "bloom") and terms.score == pytest.approx(
        score, abs=1e-5
    )
    assert {node.kind for node in terms.queries} >= {"feature", "error", "token", "constant"}
    assert (
        max(node.pos for node in terms.queries) == 4 and max(node.pos for node in terms.keys) == 2
    )
    biggest = terms.largest(5)
    assert [abs(term) for _, _, term in biggest] == sorted(
        terms.values.abs().flatten().tolist(), reverse=True
    )[:5]
    rotated = [name for name in bridge.hook_dict if name.startswith("blocks.1.attn.hook_rot_")]
    query, key = rotated or ["blocks.1.attn.hook_q", "blocks.1.attn.hook_k"]
    scale = 1 if not bridge.cfg.use_attn_scale else bridge.cfg.attn_scale
    seen = 0
    with bridge.linearised(TOKENS):
        _, before = bridge.run_with_cache(TOKENS, names_filter=[query, key])
        for name, nodes, parts, pos in (
            (query, terms.queries, terms.query_parts * scale, 4),
            (key, terms.keys, terms.key_parts, 2),
        ):
            head = 3 * before[name].shape[2] // bridge.cfg.n_heads
            for at, node in [(at, node) for at, node in enumerate(nodes) if node.kind == "feature"][
                ::3
            ]:

                def turned_up(features: Tensor, hook: object, node: Node = node) -> Tensor:
                    features[0, node.pos, node.index] *= 2
                    return features

                with bridge.hooks(fwd_hooks=[(point, turned_up)]):
                    _, after = bridge.run_with_cache(TOKENS, names_filter=name)
                assert torch.allclose(
                    (after[name] - before[name])[0, pos, head], parts[at], rtol=0, atol=1e-8
                )
                seen += float(parts[at].norm()) > 1e-4
    assert seen > 4


def moved_through(
    bridge: TransformerBridge,
    receiver: Node,
    sender: Node,
    points: list[str],
    heads: list[tuple[int, int]],
) -> list[float]:
    """By how much a receiver moves if a sender is twice as strong, and only one head puts out what
    it then would.

    The last number is that of no head: all put out what they did.
    """
    names = [f"blocks.{layer}.attn.hook_z" for layer in range(bridge.cfg.n_layers)]
    cap = bridge.cfg.output_logits_soft_cap

    def run(*hooks: tuple[str, object]) -> tuple[float, dict[str, Tensor]]:
        with bridge.hooks(fwd_hooks=list(hooks)):
            logits, cache = bridge.run_with_cache(TOKENS, names_filter=[*names, *points])
        if receiver.kind == "feature":
            return float(cache[receiver.point][0, receiver.pos, receiver.index]), cache
        logits = cap * (logits / cap).atanh() if cap > 0 else logits
        return float(logits[0, -1, receiver.index] - logits[0, -1].mean()), cache

    def twice(act: Tensor, hook: object) -> Tensor:
        act[(0, sender.pos, *([] if sender.kind == "token" else [sender.index]))] *= 2
        return act

    with bridge.linearised(TOKENS, freeze=("pattern", "ln_scale", "mlp_out")):
        stood, before = run()
        _, after = run((sender.point, twice))
        found = []
        for layer, head in [*heads, (-1, 0)]:

            def held(act: Tensor, hook: HookPoint, layer: int = layer, head: int = head) -> Tensor:
                act = before[hook.name].clone()
                if hook.layer() == layer:
                    act[:, :, head] = after[hook.name][:, :, head]
                return act

            found.append(
                run(*[(name, held) for name in names], *[(sender.point, twice)] * (layer < 0))[0]
                - stood
            )
    return found


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("of", ["feature", "logit"])
def test_loadings_of_heads_are_what_interventions_do(family: str, of: str) -> None:
    """In float64: they add up to the edges, these to the value; each is what a run does in which
    all else is held.
    """
    bridge = TransformerBridge(tiny_model(family)).to(torch.float64)
    points = []
    for layer in range(bridge.cfg.n_layers):
        mid = f"blocks.{layer}.hook_resid_mid"
        reads = mid if mid in bridge.hook_dict else f"blocks.{layer}.hook_resid_pre"
        basis = SAE(bridge.cfg.d_model, 24).double()
        points.append(
            bridge.add_basis(f"blocks.{layer}.hook_mlp_out", "tc", basis, reads=reads).name
        )
    graph = attribution_graph(bridge, TOKENS, points)
    value = dict(zip(graph.nodes, graph.values.tolist(), strict=True))
    last = [
        node
        for node in graph.nodes
        if node.kind == of and node.pos == 5 and node.point in (points[-1], "logits")
    ]
    receiver = max(last, key=value.__getitem__)
    found = head_loadings(bridge, TOKENS, points, receiver)
    right = torch.tensor([graph[node, receiver] for node in found.nodes])
    assert torch.allclose(found.edges.float(), right, rtol=0, atol=1e-5) and right.abs().max() > 0.1
    assert float(found.edges.sum()) == pytest.approx(value[receiver], abs=1e-5)
    assert {node.kind for node in found.nodes} == {"feature", "error", "token", "constant"}
    seen = 0
    for kind in ("token", "feature"):
        senders = [node for node in found.nodes if node.kind == kind]
        sender = max(senders, key=lambda node: max(map(abs, found[node].values())))
        moves = moved_through(bridge, receiver, sender, points, list(found.heads))
        wanted = [*found[sender].values(), float(found.direct[found.nodes.index(sender)])]
        assert moves == pytest.approx(wanted, abs=1e-5)
        seen += sum(abs(loading) > 1e-4 for loading in wanted)
    assert seen > 3
    sizes = found.values.abs().flatten().sort(descending=True).values
    assert [abs(loading) for *_, loading in found.largest(3)] == sizes[:3].tolist()


@torch.no_grad()
def test_a_head_with_features_of_its_own_loads_them() -> None:
    """What features of a head's output receive comes through that head."""
    bridge = reference_bridge("gpt2").to(torch.float64)
    points = [
        bridge.add_basis(f"blocks.{i}.attn.hook_z", "own", SAE(bridge.cfg.d_head, 9).double()).name
        for i in (0, 1)
    ]
    graph = attribution_graph(bridge, TOKENS, points)
    receiver = next(
        node for node in graph.nodes if node.point == points[1] and node.head == 2 and node.pos == 4
    )
    found = head_loadings(bridge, TOKENS, points, receiver)
    assert torch.allclose(
        found.edges.float(),
        torch.tensor([graph[node, receiver] for node in found.nodes]),
        atol=1e-5,
    )
    of_others = found.values[:-1].clone()
    of_others[:, found.heads.index((1, 2))] = 0
    assert of_others.abs().max() < 1e-9 < found.values[:-1].abs().max()


def test_loadings_of_what_is_not_there_are_refused(
    placed: tuple[TransformerBridge, list[str], AttributionGraph],
) -> None:
    bridge, points, graph = placed
    off = next(
        Node("feature", points[1], 3, i)
        for i in range(24)
        if Node("feature", points[1], 3, i) not in graph.nodes
    )
    for node in (off, Node("logit", "logits", 4, 7), Node("error", "blocks.1.hook_mlp_out", 3)):
        with pytest.raises(
            ValueError, match="is no feature that is active in this run, and no logit"
        ):
            head_loadings(bridge, TOKENS, points, node)
    with pytest.raises(ValueError, match="logits is"):
        head_loadings(bridge, TOKENS, points, Node("logit", "logits", 5, 10**6))
    inside = bridge.add_basis("blocks.1.mlp.hook_post", "own", SAE(bridge.cfg.d_mlp, 16)).name
    node = next(
        node for node in attribution_graph(bridge, TOKENS, [inside]).nodes if node.kind == "feature"
    )
    with pytest.raises(ValueError, match="its edges are slopes"):
        head_loadings(bridge, TOKENS, [inside], node)
    bridge.remove_basis(inside)
    with pytest.raises(ValueError, match="sends nothing to"):
        head_loadings(bridge, TOKENS, points, graph.nodes[-1])[Node("token", "hook_embed", 99)]
    assert not bridge.hook_dict[points[0]].listeners


def test_a_score_that_is_not_there_is_refused(
    placed: tuple[TransformerBridge, list[str], AttributionGraph],
) -> None:
    bridge, points, _ = placed
    for wrong, said in (
        ({"layer": 2}, "in layer 2 that are hook points"),
        ({"head": 4}, "head is 4; there are 4"),
        ({"query": 6}, "query is 6; there are 6"),
        ({"key": 5}, "does not attend to position 5"),
    ):
        with pytest.raises(ValueError, match=said):
            score_terms(
                bridge, TOKENS, points, **({"layer": 1, "head": 0, "query": 4, "key": 2} | wrong)
            )
    for given, more, said in (
        (TOKENS.repeat(2, 1), {}, "tokens are 2 prompts; a graph is of one"),
        (TOKENS, {"without_positions": [6]}, "without_positions names 6; there are 6 positions"),
    ):
        runs: list[object] = []
        looks = bridge.hooks(
            fwd_hooks=[("hook_embed", lambda act, hook, runs=runs: runs.append(hook))]
        )
        with looks, pytest.raises(ValueError, match=said):
            score_terms(bridge, given, points, layer=1, head=0, query=4, key=2, **more)
        assert not runs  # before anything runs
    assert not bridge.hook_dict[points[0]].listeners


def test_what_is_no_graph_is_refused(
    placed: tuple[TransformerBridge, list[str], AttributionGraph],
) -> None:
    bridge, points, _ = placed
    with pytest.raises(
        ValueError, match=r"add_basis placed; these are not: blocks\.0\.hook_mlp_out"
    ):
        attribution_graph(bridge, TOKENS, ["blocks.0.hook_mlp_out"])
    with pytest.raises(ValueError, match="no feature is active"):
        attribution_graph(bridge, TOKENS, points, without_positions=range(6))
    for logits in (0, -1, 10**6, torch.tensor([5, 5]), torch.tensor([-1])):
        with pytest.raises(ValueError, match="give how many, or different tokens from 0 to"):
            attribution_graph(bridge, TOKENS, points, logits=logits)
    with pytest.raises(ValueError, match="tokens are 2 prompts; a graph is of one"):
        attribution_graph(bridge, TOKENS.repeat(2, 1), points)
    with pytest.raises(ValueError, match="without_positions names 6; there are 6 positions"):
        attribution_graph(bridge, TOKENS, points, without_positions=[6])
    assert not bridge.hook_dict[points[0]].listeners


class Attending(torch.nn.Module):
    """Features that read earlier positions, by a pattern of their own (as low-rank sparse attention
    does).
    """

    def __init__(self, d: int, n: int, kernel: bool = False) -> None:
        super().__init__()
        numbers, self.kernel = torch.Generator().manual_seed(5), kernel
        drawn = {
            name: torch.randn(d, n, generator=numbers, dtype=torch.float64) / d**0.5
            for name in ("q", "k", "v", "o")
        }
        for name, value in drawn.items():
            self.register_buffer(name, value)

    def encode(self, x: Tensor) -> Tensor:
        q, k, v = (x @ getattr(self, name) for name in "qkv")
        if self.kernel:
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).relu()
        scores = q @ k.mT
        blocked = torch.ones_like(scores).triu(1).bool()
        return (scores.masked_fill(blocked, -torch.inf).softmax(-1) @ v).relu()

    def decode(self, features: Tensor) -> Tensor:
        return features @ self.o.T


def test_features_that_read_across_positions_have_their_patterns_held() -> None:
    """In float64: what such a feature gets adds up to it, and is its pattern times what stands at
    the positions.
    """
    bridge, basis = reference_bridge("gpt2").to(torch.float64), Attending(32, 16)
    first = bridge.add_basis(
        "blocks.0.hook_mlp_out", "tc", SAE(32, 24, 32).double(), reads="blocks.0.hook_resid_mid"
    ).name
    second = bridge.add_basis(
        "blocks.1.hook_attn_out", "lorsa", basis, reads="blocks.1.hook_resid_pre"
    ).name
    graph = attribution_graph(bridge, TOKENS, [first, second])
    _, cache = bridge.run_with_cache(
        TOKENS, names_filter=["blocks.1.hook_resid_pre", first, second]
    )
    x = cache["blocks.1.hook_resid_pre"][0]
    scores = (x @ basis.q @ (x @ basis.k).T).masked_fill(
        torch.ones(6, 6).triu(1).bool(), -torch.inf
    )
    pattern, seen = scores.softmax(-1), 0
    for receiver in [node for node in graph.nodes if node.point == second]:
        row = [graph[node, receiver] for node in graph.nodes]
        assert sum(row) == pytest.approx(
            float(cache[second][0, receiver.pos, receiver.index]), abs=1e-5
        )
        for sender in [node for node in graph.nodes if node.point == first]:
            written = (
                cache[first][0, sender.pos, sender.index]
                * bridge.hook_dict[first].view.basis.W_dec[sender.index]
            )
            right = float(
                pattern[receiver.pos, sender.pos] * (written @ basis.v[:, receiver.index])
            )
            assert graph[sender, receiver] == pytest.approx(right, abs=1e-6)
            seen += abs(right) > 1e-3 and sender.pos < receiver.pos
    assert seen > 10
    bridge.remove_basis(second)
    whole = bridge.add_basis(
        "blocks.1.hook_attn_out", "sdpa", Attending(32, 16, True), reads="blocks.1.hook_resid_pre"
    )
    with pytest.raises(
        ValueError, match=r"blocks\.1\.hook_attn_out\.sdpa attends by scaled_dot_product_attention"
    ):
        attribution_graph(bridge, TOKENS, [first, whole.name])
    bridge.remove_basis(whole.name)
    directions = torch.eye(32, dtype=torch.float64)[:6]
    mixed = bridge.add_basis(
        "blocks.1.hook_mlp_out",
        "mixed",
        encode=lambda x: (x @ directions.T).softmax(-1),
        decode=lambda features: features @ directions,
    )
    with pytest.raises(ValueError, match="as many features as the prompt has tokens, 6"):
        attribution_graph(bridge, TOKENS, [mixed.name])
    assert attribution_graph(bridge, TOKENS[:, :5], [mixed.name]).nodes


@torch.no_grad()
def test_features_of_several_points_receive_from_all_of_them() -> None:
    """In float64, a crosscoder of two streams that is written in three layers: rows add up, edges
    are interventions.
    """
    bridge = TransformerBridge.boot_embedded().to(torch.float64)
    numbers = torch.Generator().manual_seed(2)
    drawn = [
        torch.randn(size, generator=numbers, dtype=torch.float64) / 11
        for size in ((40, 2, 128), (40,), (40, 3, 128))
    ]
    points = []
    for layer in range(2):
        reads = f"blocks.{layer}.hook_resid_mid"
        basis = SAE(128, 24, 128).double()
        points.append(
            bridge.add_basis(f"blocks.{layer}.hook_mlp_out", "tc", basis, reads=reads).name
        )
    bridge.remove_basis(points.pop())
    basis = CrossLayer(*drawn, torch.zeros(128, dtype=torch.float64))
    reads, later = (
        ["blocks.0.hook_resid_post", "blocks.1.hook_resid_mid"],
        ["blocks.2.hook_mlp_out", "blocks.3.hook_mlp_out"],
    )
    cross = bridge.add_basis("blocks.1.hook_mlp_out", "cc", basis, reads=reads, later=later).name
    points.append(cross)
    graph = attribution_graph(bridge, TOKENS, points)
    _, cache = bridge.run_with_cache(TOKENS, names_filter=[*reads, cross])
    both = torch.stack([cache[name] for name in reads], -2)
    assert torch.allclose(
        cache[cross], (torch.einsum("bprd,frd->bpf", both, drawn[0]) + drawn[1]).relu()
    )
    valued = [i for i, node in enumerate(graph.nodes) if node.kind in ("feature", "logit")]
    assert torch.allclose(graph.adjacency[valued].sum(1), graph.values[valued], rtol=0, atol=1e-4)
    first = max(
        (n for n in graph.nodes if n.point == points[0] and n.pos == 2),
        key=lambda n: graph.values[graph.nodes.index(n)],
    )

    def turned_up(act: Tensor, hook: object) -> Tensor:
        act[0, first.pos, first.index] *= 1 + 1e-4
        return act

    receivers = [node for node in graph.nodes if node.point == cross or node.kind == "logit"]
    with bridge.linearised(TOKENS, freeze=("pattern", "ln_scale", "mlp_out")):
        before, held = bridge.run_with_cache(TOKENS, names_filter=cross)
        with bridge.hooks(fwd_hooks=[(points[0], turned_up)]):
            _, changed = bridge.run_with_cache(TOKENS, names_filter=cross)
    seen = 0
    for node in receivers[:-3]:
        moved = float((changed[cross] - held[cross])[0, node.pos, node.index]) * 1e4
        assert moved == pytest.approx(graph[first, node], abs=1e-4)
        seen += abs(moved) > 1e-2
    assert seen > 10
    # What it writes, at its own point and later ones, is what an edit of it does.
    sender = next(node for node in graph.nodes if node.point == cross and node.pos == 5)

    def off(act: Tensor, hook: object) -> Tensor:
        act[0, sender.pos, sender.index] = 0
        return act

    with bridge.linearised(TOKENS, freeze=("pattern", "ln_scale", "mlp_out")):
        without = bridge.run_with_hooks(TOKENS, fwd_hooks=[(cross, off)])
    moved = (before - before.mean(-1, keepdim=True) - without + without.mean(-1, keepdim=True))[
        0, -1
    ]
    for node in graph.nodes[-3:]:
        assert float(moved[node.index]) == pytest.approx(graph[sender, node], abs=1e-4)
    assert max(abs(graph[sender, node]) for node in graph.nodes[-3:]) > 1e-2
