"""Gradient rules: other gradients with the same values, against gradients computed by hand."""

import threading

import peft
import pytest
import torch
from torch.nn.functional import silu

from bridge import Rules, TransformerBridge
from bridge.bases import Rotation
from bridge.circuits import edge_attribution, node_attribution
from bridge.features import attribution_graph, feature_attribution, token_attribution
from bridge.run.rules import declared_rules
from bridge.taps.attention_call import AttentionCall
from tests.tiny_models import CANNOT_BE_BUILT, checkpoint, tiny_model, types

NAMES = ("gim", "relp", "attnlrp")
EACH = {
    "norms": Rules(norms="held"),
    "softmax": Rules(softmax=2.0),
    "softmax held": Rules(softmax="held"),
    "q": Rules(q=0.25),
    "k": Rules(k=0.25),
    "v": Rules(v=0.5),
    "activation": Rules(activation="held"),
    "gate": Rules(gate=0.5),
    "mlps": Rules(mlps="held"),
}
TOKENS, OTHER = (
    torch.randint(10, 60, (2, 9), generator=torch.Generator().manual_seed(seed)) for seed in (1, 2)
)


#: Among them: fused projections, parallel blocks, other norms, caps, gates, sinks, mixers.
FAMILIES = ["gpt2", "gemma2", "gpt_neox", "falcon", "bloom", "qwen3", "mixtral", "opt", "doge"]
FAMILIES += ["mamba", "granite_swa", "gpt_oss", "deepseek_v3", "qwen3_next", "cohere"]


def metric(logits):
    return logits[:, -1, 3].sum()


def of_tokens(bridge, rules, tokens=TOKENS, **more):
    return token_attribution(bridge, tokens, metric, rules, **more)


def near(x, y, tolerance=1e-5):
    x, y = x.detach(), y.detach()
    return float((x - y).abs().max()) <= tolerance * float(y.abs().max())


def gradient(bridge, tokens=TOKENS, fwd_hooks=(), **more):
    """The gradient at the start of the stream, and the logits, in the present context."""
    kept = []

    def begin(x, hook):
        kept.append(x.detach().clone().requires_grad_())
        return kept[0]

    start = f"{bridge.architecture.stack.name}.0.hook_resid_pre"
    start = "hook_embed" if "hook_embed" in bridge.hook_dict else start
    with bridge.hooks(fwd_hooks=[(start, begin), *fwd_hooks]):
        logits = bridge(tokens, **more)
    (slope,) = torch.autograd.grad(logits[..., 3].sum() + logits[..., 7].square().sum(), kept)
    return slope, logits.detach()


# ---- By hand, in float64. ----


def held(x):
    return x.detach()


def by_hand(model, embeddings, rules):
    """The logits of a Llama whose steps have the gradients of the rules."""

    def norm(module, x):
        scale = (x.pow(2).mean(-1, keepdim=True) + module.variance_epsilon).sqrt()
        return module.weight * x / (held(scale) if rules.norms else scale)

    def with_gradient(x, other):
        return held(x) + other - held(other)

    def scaled(x, factor):
        return with_gradient(x, x * factor)

    def rotated(x, cos, sin):
        half = x.shape[-1] // 2
        return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin

    config, x = model.config, embeddings
    length = x.shape[1]
    cos, sin = model.model.rotary_emb(x, torch.arange(length)[None])
    future = torch.ones(length, length, dtype=torch.bool).triu(1)
    for layer in model.model.layers:
        attn, mlp = layer.self_attn, layer.mlp
        read = norm(layer.input_layernorm, x)
        q, k, v = (
            scaled(proj(read).unflatten(-1, (-1, config.head_dim)).transpose(1, 2), factor)
            for proj, factor in (
                (attn.q_proj, rules.q),
                (attn.k_proj, rules.k),
                (attn.v_proj, rules.v),
            )
        )
        q, k = rotated(q, cos[:, None], sin[:, None]), rotated(k, cos[:, None], sin[:, None])
        k, v = (y.repeat_interleave(q.shape[1] // y.shape[1], 1) for y in (k, v))
        scores = (q @ k.mT * config.head_dim**-0.5).masked_fill(future, -torch.inf)
        pattern = scores.softmax(-1)
        if rules.softmax == "held":
            pattern = held(pattern)
        elif rules.softmax:
            tempered = rules.softmax * (scores / rules.softmax).softmax(-1)
            pattern = with_gradient(pattern, tempered)
        x = x + attn.o_proj((pattern @ v).transpose(1, 2).flatten(-2))
        read = norm(layer.post_attention_layernorm, x)
        gate, up = mlp.gate_proj(read), mlp.up_proj(read)
        act = gate * held(silu(gate) / gate) if rules.activation else silu(gate)
        x = x + mlp.down_proj(scaled(act * up, rules.gate))
    return model.lm_head(norm(model.model.norm, x))

    def __init__(self, norm):
        super().__init__()
        self.weight, self.variance_epsilon = norm.weight, norm.variance_epsilon

    def forward(self, x):
        return (
            self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        )


@pytest.mark.parametrize("rules", [*NAMES, *EACH.values()], ids=[*NAMES, *EACH])
@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
def test_they_are_those_by_hand(kernel, rules):
    rules = declared_rules(rules)
    if rules.mlps:
        pytest.skip("their path is cut by hand below")
    model = tiny_model("llama", attn_implementation=kernel).double()
    bridge = TransformerBridge(model)
    embeddings = model.get_input_embeddings()(TOKENS).detach().requires_grad_()
    logits = by_hand(model, embeddings, rules)
    (slope,) = torch.autograd.grad(metric(logits), embeddings)
    assert near(bridge(TOKENS), logits.detach(), 1e-6), "it is the same model"
    # Its norms and softmax compute in float32.
    assert near(of_tokens(bridge, rules), (slope * embeddings).sum(-1).detach(), 2e-5)


def test_held_mlps_leave_the_paths_around_them():
    bridge = TransformerBridge(tiny_model("gpt2"))
    detached = [(f"blocks.{layer}.hook_mlp_out", lambda x, hook: x.detach()) for layer in (0, 1)]
    right, _ = gradient(bridge, fwd_hooks=detached)
    with bridge.rules(mlps="held"):
        assert torch.equal(gradient(bridge)[0], right)


@pytest.mark.parametrize(
    "edit", ["attn.hook_pattern", "mlp.hook_post", "mlp.hook_pre", "ln1.hook_scale"]
)
def test_with_everything_held_terms_add_up_to_the_logit(edit):
    """Without biases, the model is then a product of matrices in its embeddings: also with a hook
    inside, opened before the rules or after them.
    """
    bridge = TransformerBridge(tiny_model("llama").double())
    hooks = [(f"blocks.0.{edit}", lambda x, hook: x * 1.5)]
    with bridge.hooks(fwd_hooks=hooks):
        total, before = metric(bridge(TOKENS).detach()), of_tokens(bridge, "relp")
    with bridge.rules("relp"), bridge.hooks(fwd_hooks=hooks):
        after = of_tokens(bridge, None)
    assert torch.equal(before, after)
    assert float(before.sum()) == pytest.approx(float(total), rel=1e-5)
    with bridge.hooks(fwd_hooks=hooks):
        assert float(of_tokens(bridge, None).sum()) != pytest.approx(float(total), rel=0.1)


@pytest.mark.parametrize(
    ("point", "rules"),
    [("attn.hook_pattern", Rules(softmax=2.0)), ("mlp.hook_post", Rules(activation="held"))],
)
def test_a_hook_behind_a_function_comes_after_its_rule(point, rules):
    """A replaced output has no gradient, whether the hook is opened before the rules or after."""
    bridge = TransformerBridge(tiny_model("llama"))
    names = [f"blocks.{layer}.{point}" for layer in (0, 1)]
    hooks = [(name, lambda x, hook: torch.full_like(x, 0.1)) for name in names]
    right, _ = gradient(bridge, fwd_hooks=hooks)
    with bridge.rules(rules):
        assert near(gradient(bridge, fwd_hooks=hooks)[0], right)
    with bridge.hooks(fwd_hooks=hooks), bridge.rules(rules):
        assert near(gradient(bridge)[0], right)


# ---- On every family. ----


def attempt(bridge, rules):
    """The gradient under rules and the logits, or the error that refuses them."""
    try:
        with bridge.rules(rules):
            return gradient(bridge)
    except ValueError as error:
        return str(error)


def check_type(bridge):
    """Each rule keeps every bit of the logits, and changes gradients, or names what is missing."""
    plain, logits = gradient(bridge)
    for name, rules in EACH.items():
        outcome = attempt(bridge, rules)
        if isinstance(outcome, str):
            assert f"the rule {name.split()[0]!r}" in outcome
            assert "blocks." in outcome or "_ln" in outcome
            continue
        assert torch.equal(outcome[1], logits), name
        assert outcome[0].isfinite().all(), name
        relu = name == "activation" and bridge.cfg.act_fn == "relu"
        if not relu and not (name == "gate" and not bridge.cfg.gated_mlp):
            assert not near(outcome[0], plain, 1e-7), name
    assert not any(hook.listeners for hook in bridge.hook_dict.values())


@pytest.mark.parametrize("model_type", FAMILIES)
def test_each_acts_or_says_what_it_lacks(model_type):
    bridge = TransformerBridge(tiny_model(model_type))
    check_type(bridge)
    outcome = attempt(bridge, Rules(norms="held", softmax="held"))
    if isinstance(outcome, tuple):
        with bridge.linearised(TOKENS):  # the same values, and their gradients
            assert near(outcome[0], gradient(bridge)[0])


def test_sinks_have_no_temperature_and_runs_without_gradients_no_scores(monkeypatch):
    bridge = TransformerBridge(tiny_model("gpt_oss"))
    with pytest.raises(ValueError, match="attention sinks"), bridge.rules("gim"):
        pass
    bridge = TransformerBridge(tiny_model("llama"))
    monkeypatch.setattr(AttentionCall, "scores", lambda call: 1 / 0)
    with bridge.rules(softmax=2.0), torch.no_grad():
        bridge(TOKENS)
    with bridge.rules(softmax="held"):
        bridge(TOKENS)
    with bridge.rules(softmax=2.0), pytest.raises(ZeroDivisionError):
        bridge(TOKENS)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", [name for name in types() if name not in CANNOT_BE_BUILT])
def test_each_acts_on_every_type(model_type):
    bridge = TransformerBridge(tiny_model(model_type))
    try:
        gradient(bridge)
    except (RuntimeError, KeyError) as error:
        pytest.skip(f"it has no gradient at the start of its stream: {error}")
    check_type(bridge)


@pytest.mark.parametrize("rules", [None, *NAMES])
@pytest.mark.parametrize("model_type", ["llama", "gemma2", "gpt_neox", "olmo2", "bloom"])
def test_edges_add_up_to_nodes(model_type, rules):
    """Heads have their own inputs there, which are normed again."""
    bridge = TransformerBridge(tiny_model(model_type))
    pair = bridge, TOKENS, OTHER, metric, "gradient"
    edges, nodes = edge_attribution(*pair, rules=rules), node_attribution(*pair, rules=rules)
    assert near(edges.values.sum(0), nodes.values)
    if rules:
        assert not near(nodes.values, node_attribution(*pair).values, 1e-2)


def test_encoders_and_decoders_have_them_both():
    bridge = TransformerBridge(tiny_model("bart", "seq2seq"))
    plain, logits = gradient(bridge, decoder_input_ids=OTHER)
    for rules in (Rules(v=0.5), Rules(norms="held"), Rules(softmax=2.0), *NAMES):
        with bridge.rules(rules):
            slope, same = gradient(bridge, decoder_input_ids=OTHER)
        assert torch.equal(same, logits)
        assert not near(slope, plain, 1e-3)
    names = [name for name in bridge.hook_dict if name.endswith("hook_v")]
    assert len(names) == 6, "of the encoder's two layers, and of both attentions of the decoder's"
    with bridge.hooks(bwd_hooks=[(names, lambda gradient, hook: gradient * 0.5)]):
        halved, _ = gradient(bridge, decoder_input_ids=OTHER)
    with bridge.rules(v=0.5):
        assert near(gradient(bridge, decoder_input_ids=OTHER)[0], halved)


# ---- What surrounds them. ----


@pytest.fixture(scope="module")
def bridge():
    return TransformerBridge(tiny_model("llama"))


@pytest.mark.parametrize("rules", NAMES)
@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
def test_left_padding_changes_nothing(kernel, rules):
    bridge = TransformerBridge(tiny_model("gpt_neox", attn_implementation=kernel))
    rows = torch.cat([torch.zeros(2, 3, dtype=torch.long), TOKENS], 1)
    rows[1, :3] = OTHER[1, :3]
    mask = torch.ones_like(rows)
    mask[0, :3] = 0
    padded = of_tokens(bridge, rules, rows, attention_mask=mask)
    assert near(padded[0, 3:], of_tokens(bridge, rules, TOKENS[:1])[0])
    assert not padded[0, :3].any()


@pytest.mark.parametrize("rules", NAMES)
def test_precision_modes_and_threads(bridge, rules):
    right = of_tokens(bridge, rules)
    with torch.no_grad():
        assert torch.equal(of_tokens(bridge, rules), right)
    with torch.inference_mode():
        with pytest.raises(RuntimeError, match=r"outside of torch\.inference_mode"):
            of_tokens(bridge, rules)
        with bridge.rules(rules):
            logits = bridge(TOKENS)
    assert torch.equal(logits, bridge(TOKENS))
    for dtype, tolerance in ((torch.bfloat16, 0.05), (torch.float16, 0.01)):
        half = TransformerBridge(tiny_model("llama").to(dtype))
        assert near(of_tokens(half, rules).float(), right, tolerance)
        plain = half(TOKENS)
        with half.rules(rules):
            assert torch.equal(half(TOKENS), plain)
    elsewhere = []
    thread = threading.Thread(target=lambda: elsewhere.append(of_tokens(bridge, None)))
    plain = of_tokens(bridge, None)
    with bridge.rules(rules):
        thread.start()
        thread.join()
    assert torch.equal(elsewhere[0], plain)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("rules", NAMES)
def test_checkpointing_and_a_later_backward(rules, reentrant):
    model = tiny_model("llama")
    bridge, weight = TransformerBridge(model), model.get_input_embeddings().weight

    def slope():
        weight.grad = None
        with bridge.rules(rules):
            value = metric(bridge(TOKENS))
        value.backward()
        return weight.grad

    right = slope()
    checkpoint(model.train(), {"use_reentrant": reentrant})
    assert near(slope(), right)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("rules", NAMES)
def test_compiled_and_with_adapters(bridge, rules):
    right = of_tokens(bridge, rules)
    compiled = TransformerBridge(torch.compile(tiny_model("llama"), backend="eager"))
    assert near(of_tokens(compiled, rules), right)
    modules = ["q_proj", "v_proj", "gate_proj", "down_proj"]
    config = peft.LoraConfig(r=4, target_modules=modules, init_lora_weights=False)
    model = peft.get_peft_model(tiny_model("llama"), config).eval()
    adapted = of_tokens(TransformerBridge(model), rules)
    assert not near(adapted, right, 1e-2)
    merged = TransformerBridge(model.merge_and_unload())
    assert near(of_tokens(merged, rules), adapted)


def test_nested_rules_and_programs_are_refused(bridge):
    with bridge.rules("gim"):
        with pytest.raises(ValueError, match=r"open already, at blocks\.0"), bridge.rules(v=0.5):
            pass
        with pytest.raises(ValueError, match="open already"):
            of_tokens(bridge, "relp")
        with pytest.raises(ValueError, match="a hook or a rule of gradients"):
            bridge.program()
        inside = of_tokens(bridge, None)
    assert torch.equal(inside, of_tokens(bridge, "gim"))


def test_an_error_leaves_nothing_behind(bridge):
    def fail(x, hook):
        raise ZeroDivisionError

    right = of_tokens(bridge, "relp")
    for name in ("mlp.hook_post", "attn.hook_pattern"):
        with pytest.raises(ZeroDivisionError), bridge.rules("relp"):
            bridge.run_with_hooks(TOKENS, fwd_hooks=[(f"blocks.0.{name}", fail)])
    assert not any(hook.listeners for hook in bridge.hook_dict.values())
    assert torch.equal(of_tokens(bridge, "relp"), right)
    assert torch.equal(bridge(TOKENS), bridge.original_model(TOKENS).logits)


def test_a_cache_and_the_block_alone_see_the_same(bridge):
    start = bridge(TOKENS, stop_at_layer=0).detach().requires_grad_()
    with bridge.rules("relp"):
        alone, run = bridge.blocks[0](start), bridge(start, start_at_layer=0, stop_at_layer=1)
        _, cache = bridge.run_with_cache(TOKENS)
    _, plain = bridge.run_with_cache(TOKENS)
    assert all(torch.equal(cache[name], plain[name]) for name in plain)
    slopes = (torch.autograd.grad(stream.sum(), start)[0] for stream in (alone, run))
    assert torch.equal(*slopes)


@pytest.mark.unchecked
def test_invalid_rules(bridge):
    for wrong in ({"norms": "frozen"}, {"softmax": "soft"}, {"mlps": 1.0}):
        with pytest.raises(ValueError, match="must be 'held'"):
            Rules(**wrong)
    for wrong in (0.0, -1.0, torch.nan, torch.inf):
        with pytest.raises(ValueError, match="a temperature is above 0"):
            Rules(softmax=wrong)
    with pytest.raises(ValueError, match="q is inf"):
        Rules(q=torch.inf)
    with pytest.raises(ValueError, match="must be 'gim', 'relp' or 'attnlrp'"), bridge.rules("lrp"):
        pass
    with pytest.raises(TypeError, match="norm"), bridge.rules(norm="held"):
        pass


# ---- What takes them. ----


def test_features_and_graphs_take_them():
    bridge = TransformerBridge.boot_embedded()
    tokens = bridge.to_tokens("Mary and John")
    last = lambda logits: logits[0, -1, 7]
    point = bridge.add_basis("blocks.1.hook_resid_post", "turned", Rotation(128, 5))
    plain = feature_attribution(bridge, tokens, last, point)
    assert not near(feature_attribution(bridge, tokens, last, point, rules="gim"), plain, 0.01)
    with pytest.raises(ValueError, match="temperature of the softmax"):
        attribution_graph(bridge, tokens, [point.name], rules="gim")
    graph, same = (
        attribution_graph(bridge, tokens, [point.name], rules=rules)
        for rules in (None, Rules(norms="held", softmax="held"))
    )
    assert torch.equal(graph.adjacency, same.adjacency)
    halved = attribution_graph(bridge, tokens, [point.name], rules=Rules(v=0.5))
    assert not near(halved.adjacency, graph.adjacency, 0.01)


def test_a_baseline_of_tokens(bridge):
    embed = bridge.original_model.get_input_embeddings().weight.detach()
    slope = token_slope(bridge)
    right = (slope * (embed[TOKENS] - embed[5])).sum(-1)
    assert near(of_tokens(bridge, "gim", baseline=5), right)
    right = (slope * (embed[TOKENS] - embed[OTHER])).sum(-1)
    assert near(of_tokens(bridge, "gim", baseline=OTHER), right)
    for wrong in (99, -1, OTHER[:, :4]):
        with pytest.raises(ValueError, match=r"baseline|token id"):
            of_tokens(bridge, None, baseline=wrong)


def token_slope(bridge):
    kept = []

    def begin(x, hook):
        kept.append(x.detach().requires_grad_())
        return kept[0]

    with bridge.rules("gim"):
        logits = bridge.run_with_hooks(TOKENS, fwd_hooks=[("hook_embed", begin)])
    return torch.autograd.grad(metric(logits), kept)[0]
