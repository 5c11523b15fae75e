"""What the experiments say about the shipped model, measured on 200 prompts that no page uses.

Each claim is searched for in its page, and its numbers are compared with those measured. A page
that says something else, or a model that does, is an error.
"""

import itertools
import random
import re
from functools import cache

import pytest
import torch

from bridge import TransformerBridge
from bridge.circuits import edge_attribution, edge_effects, path_patching
from bridge.embedded import prompts
from bridge.embedded.language import CONTEXTS, FACTS, NAMES, PHRASINGS
from bridge.features import attribution_graph, direction, write_into_weights
from bridge.interventions import Add, Zero
from bridge.lens import lens
from bridge.tasks import embedded_pairs, ioi
from tests.docs.site import ROOT

N, SEED = 200, 62
NUMBER = r"([-+]?\d+(?:\.\d+)?)"


@cache
def text_of(page):
    return " ".join((ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8").split())


def stated(page, claim):
    """Return the numbers of a claim, which a page has once; `#` stands for each."""
    found = re.findall(re.escape(claim).replace(r"\#", NUMBER), text_of(page))
    assert len(found) == 1, f"{page} does not say once: {claim}"
    return [float(number) for number in ([found[0]] if isinstance(found[0], str) else found[0])]


def agree(page, claim, measured, within):
    """Check the numbers of a claim against those measured, each within a tolerance of its own."""
    numbers = stated(page, claim)
    assert len(numbers) == len(measured) == len(within)
    for number, one, tolerance in zip(numbers, measured, within, strict=True):
        assert number == pytest.approx(float(one), abs=tolerance), (
            claim,
            list(map(float, measured)),
        )


@cache
def shipped():
    return TransformerBridge.boot_embedded()


@cache
def words(*texts):
    return torch.tensor([shipped().to_single_token(text) for text in texts])


class Objects:
    """Indirect-object prompts of all templates, left-padded, and the tokens of their names.

    Attributes:
        tokens: ``[prompt, pos]``.
        other_giver: the same with a third person as giver.
        answer, repeated, third: a name for each prompt; the third is that of `other_giver`.
        first, receiver, giver: positions of the repeated name, of the answer, and of the giver.
    """

    def __init__(self):
        texts = prompts("ioi", N, seed=SEED)
        self.tokens = shipped().to_tokens([one.text for one in texts], padding_side="left")
        self.mask = (self.tokens != shipped().tokenizer.pad_token_id).long()
        self.answer = words(*(one.answer for one in texts))
        self.repeated = words(*(one.wrong for one in texts))
        rng = random.Random(SEED)
        absent = [[name for name in NAMES if name not in one.text] for one in texts]
        self.third = words(*(f" {rng.choice(names)}" for names in absent))
        names = self.places(one.wrong for one in texts)
        self.first, self.giver = names[:, 0], names[:, -1]
        self.receiver = self.places(one.answer for one in texts)[:, 0]
        self.other_giver = self.tokens.clone()
        self.other_giver[range(N), self.giver] = self.third

    def places(self, names):
        """Return the first and the last position of each prompt's name."""
        rows = []
        for row, name in zip(self.tokens.tolist(), names, strict=True):
            at_start = shipped().tokenizer.convert_tokens_to_ids(name.strip())
            ids = {shipped().to_single_token(name), at_start}
            found = [place for place, token in enumerate(row) if token in ids]
            rows.append((found[0], found[-1]))
        return torch.tensor(rows)


@cache
def objects():
    return Objects()


@cache
@torch.no_grad()
def cached(kind):
    return shipped().run_with_cache(getattr(objects(), kind), attention_mask=objects().mask)


@torch.no_grad()
def of_heads(kind, target):
    """Return what each head adds to a name's logit, above the average name: ``[layer, head]``."""
    bridge = shipped()
    _, run = cached(kind)
    unembedding = (
        bridge.W_U - bridge.W_U[:, words(*(f" {name}" for name in NAMES))].mean(1)[:, None]
    )
    readout = unembedding[:, getattr(objects(), target)].T * bridge.ln_final.w
    readout = readout / run["ln_final.hook_scale"][:, -1]
    return torch.stack(
        [
            torch.einsum("bhd,hdm,bm->h", run["z", layer][:, -1], bridge.W_O[layer], readout) / N
            for layer in range(4)
        ]
    )


def attention(layer, head, keys, kind="tokens"):
    """Return a head's mean attention from the last token to a position of each prompt."""
    return cached(kind)[1]["pattern", layer][range(N), head, -1, getattr(objects(), keys)].mean()


@torch.no_grad()
def difference_without(*heads):
    """Return the mean logit difference and the share of right answers, with heads ablated."""
    zeroed = [(f"blocks.{layer}.attn.hook_z", Zero(heads=head)) for layer, head in heads]
    logits = shipped().run_with_hooks(
        objects().tokens, fwd_hooks=zeroed, attention_mask=objects().mask
    )[:, -1]
    answer, repeated = (logits[range(N), name] for name in (objects().answer, objects().repeated))
    right = logits.argmax(-1) == objects().answer
    return float((answer - repeated).mean()), float(right.float().mean())


SUPPRESSORS = [(2, 0), (2, 2), (2, 3)]
LAYER_1 = [(1, head) for head in range(4)]


@torch.no_grad()
def test_layer_1_raises_both_names_and_layer_2_lowers_one():
    bridge, these = shipped(), objects()
    rows = lens(bridge, these.tokens, attention_mask=these.mask, pos_slice=-1).stack()[:, :, 0]
    average = rows[..., words(*(f" {name}" for name in NAMES))].mean(-1)
    answer, repeated = (
        (rows[:, range(N), name] - average).mean(1) for name in (these.answer, these.repeated)
    )
    says = [
        (rows[2].argmax(-1) == name).float().mean() * 100 for name in (these.answer, these.repeated)
    ]
    right = (rows[3].argmax(-1) == these.answer).float().mean() * 100
    assert abs(answer[2] - repeated[2]) < 0.5 and answer[1] < 1 < 5 < min(answer[2], repeated[2])
    agree(
        "learn_layers",
        "On # prompts, layer 1 raises *both* names by #: #% are right, #% say the other.",
        [N, (answer + repeated)[2] / 2 - (answer + repeated)[1] / 2, *says],
        [0, 0.5, 15, 15],
    )
    agree(
        "learn_layers",
        "Layer 2 lowers the repeated name by # and raises the answer by #: #% are right.",
        [repeated[2] - repeated[3], answer[3] - answer[2], right],
        [0.5, 0.5, 0.5],
    )
    agree("learn_layers", "The difference is # before layer 2", [(answer - repeated)[2]], [0.4])


def test_the_roles_of_heads():
    raised, lowered = of_heads("tokens", "answer"), of_heads("tokens", "repeated")
    both = [value for head in LAYER_1 for value in (raised[head], lowered[head])]
    agree(
        "learn_circuit",
        "layer 1 copies **both** names (# to # each)",
        [min(both), max(both)],
        [0.2, 0.2],
    )
    low, high = ([table[head] for head in SUPPRESSORS] for table in (lowered, raised))
    agree(
        "learn_circuit",
        "lower the **repeated** name (# to #; the answer # to #)",
        [max(low), min(low), min(high), max(high)],
        [0.2] * 4,
    )
    other = of_heads("other_giver", "third")
    assert max(other[head] for head in SUPPRESSORS) < -0.8  # a name that is not repeated, too
    for kind, claim in (
        ("tokens", "L2H0, L2H2 and L2H3 attend to the giver (# to #)"),
        ("other_giver", "a third person as giver gets as much of that attention (# to #)"),
    ):
        weights = [attention(layer, head, "giver", kind) for layer, head in SUPPRESSORS]
        agree("learn_circuit", claim, [min(weights), max(weights)], [0.03, 0.03])


@torch.no_grad()
def test_layer_1_reads_what_l0h0_gathered():
    _, run = cached("tokens")
    these = objects()
    source = run["pattern", 1][:, 0, -1].argmax(-1)
    assert not (torch.stack([these.first, these.receiver, these.giver]) == source).any()
    gathered = run["pattern", 0][range(N), 0, source]
    agree(
        "learn_circuit",
        "where L0H0 attends to both (#, #)",
        [gathered[range(N), place].mean() for place in (these.first, these.receiver)],
        [0.04, 0.04],
    )


def test_heads_that_answer():
    intact, right = difference_without()
    without, left = difference_without(*SUPPRESSORS)
    _, chance = difference_without(*SUPPRESSORS, (3, 0), (3, 2))
    assert right == 1
    agree(
        "learn_circuit",
        "Without these three #% are right, without L3H0 and L3H2 too #%",
        [100 * left, 100 * chance],
        [4, 6],
    )
    agree("learn_circuit", "without the three, it falls from # to #", [intact, without], [0.9, 0.4])


def test_no_head_works_through_queries():
    pairs = embedded_pairs(shipped(), "ioi", N, seed=SEED)
    grid = list(itertools.product(range(4), range(4)))
    change = path_patching(
        shipped(),
        pairs.clean,
        pairs.corrupted,
        pairs.metric(),
        [f"L{layer}H{head}" for layer, head in grid if layer < 3],
        [f"L{layer}H{head}.q" for layer, head in grid if layer > 0],
    )
    assert abs(change) < 0.4
    claim = "through all queries together, heads change the difference by # of #"
    with torch.no_grad():
        clean, corrupted = (
            pairs.metric()(shipped()(one)) for one in (pairs.clean, pairs.corrupted)
        )
    agree("learn_circuit", claim, [change, clean - corrupted], [0.15, 1.5])


def test_the_circuit_of_eight_prompts_on_others():
    bridge, found_with = shipped(), ioi(shipped(), 8)
    metric = found_with.metric()
    scores = edge_attribution(bridge, found_with.clean, found_with.corrupted, metric)
    circuit = scores.greedy(48)
    pairs = embedded_pairs(bridge, "ioi", N, seed=SEED)
    clean, corrupted, metric = pairs.clean, pairs.corrupted, pairs.metric()
    evaluated = circuit.evaluate(bridge, clean, corrupted, metric)
    agree(
        "learn_circuit",
        "On # held-out prompts a tenth of the edges has a faithfulness of #, the rest #; every sign"
        " is right.",
        [N, evaluated.faithfulness, evaluated.complement_faithfulness],
        [0, 0.03, 0.02],
    )
    assert circuit.share == pytest.approx(0.1, abs=0.01)
    strongest = sorted(circuit.edges, key=lambda edge: -abs(edge[2]))[:20]
    names = [f"{sender}->{receiver}" for sender, receiver, _ in strongest]
    exact = edge_effects(bridge, clean, corrupted, metric, names, verbose=False)
    assert all(float(scores[name]) * float(exact[name]) > 0 for name in names)


# --------------------------------------------------------------------------------------------------
# Experiment 2: random lists, said twice.
# --------------------------------------------------------------------------------------------------


@cache
def lists():
    """Return random lists of 25 tokens, each twice."""
    bridge = shipped()
    generator = torch.Generator().manual_seed(SEED)
    half = torch.randint(10, bridge.cfg.d_vocab, (N, 25), generator=generator)
    start = torch.full((N, 1), bridge.tokenizer.bos_token_id)
    return torch.cat([start, half, half], dim=1)


@torch.no_grad()
def loss_without(*heads):
    """Return the mean loss in the second half, with heads ablated."""
    zeroed = [(f"blocks.{layer}.attn.hook_z", Zero(heads=head)) for layer, head in heads]
    loss = shipped().run_with_hooks(
        lists(), fwd_hooks=zeroed, return_type="loss", loss_per_token=True
    )
    return float(loss[:, 26:].mean())


def test_induction_heads_share_the_work():
    single = [loss_without(head) for head in LAYER_1]
    alone = [loss_without(*(one for one in LAYER_1 if one != head)) for head in LAYER_1]
    agree(
        "learn_induction",
        "without one the loss rises from # to at most #, with one alone it is # to #, without all"
        " four #",
        [loss_without(), max(single), min(alone), max(alone), loss_without(*LAYER_1)],
        [0.1, 0.2, 0.3, 0.3, 0.1],
    )
    agree("learn_induction", "Without either the loss is # or more", [loss_without((0, 2))], [0.15])
    assert loss_without((0, 0)) > 6


@torch.no_grad()
def test_where_the_heads_of_lists_attend():
    points = [f"blocks.{layer}.attn.hook_pattern" for layer in (0, 1)]
    _, run = shipped().run_with_cache(lists(), names_filter=points)
    induction = run[points[1]].diagonal(-24, dim1=-2, dim2=-1)[..., 2:].mean((0, -1)) * 100
    agree(
        "learn_induction",
        "on # rows, #% to #% of their attention",
        [N, induction.min(), induction.max()],
        [0, 4, 4],
    )
    itself = run[points[0]][:, 0].diagonal(0, -2, -1)[:, 1:].mean() * 100
    before = run[points[0]][:, 2].diagonal(-1, -2, -1).mean() * 100
    agree("learn_induction", "L0H2 attends to the token before (#%)", [before], [2])
    agree("learn_induction", "L0H0 attends to the token itself (#%)", [itself], [2])


@torch.no_grad()
def test_what_layer_0_tells_layer_1():
    tokens = lists()[:24]
    other = torch.cat([tokens[:, :1], tokens.roll(1, 0)[:, 1:26], tokens[:, 26:]], dim=1)

    def nats(logits):
        return logits[:, 26:-1].log_softmax(-1).gather(-1, tokens[:, 27:, None]).mean()

    def change(sender, reader):
        readers = [f"L1H{head}.{reader}" for head in range(4)]
        return path_patching(shipped(), tokens, other, nats, sender, readers)

    claim = "with another list's keys the right token loses # nats"
    agree("learn_induction", claim, [-change(["L0H2"], "k")], [0.6])
    agree("learn_induction", "which token to copy (# nats)", [-change(["L0H0"], "v")], [0.9])
    assert abs(change(["L0H0", "L0H1", "L0H3"], "k")) < 0.3 > abs(change(["L0H1", "L0H2"], "v"))


# --------------------------------------------------------------------------------------------------
# Experiments 4 and 7: a direction.
# --------------------------------------------------------------------------------------------------


SEEN = ["France", "Spain", "Italy", "Germany", "Japan", "China", "Russia", "Greece"]
POINT = "blocks.1.hook_resid_post"
OTHERS = [country for country, _ in FACTS["capital"] if country not in SEEN]


@cache
def towards_capitals():
    """Return the direction, and the stream's mean norm where it is added."""
    bridge = shipped()
    asked = [[f"In {name}, the capital is", f"The language of {name} is"] for name in SEEN]
    found = direction(bridge, *map(list, zip(*asked, strict=True)), POINT)
    texts = [f"The language of {country} is" for country in OTHERS[:6]]
    _, run = bridge.run_with_cache(texts, names_filter=POINT)
    return found, float(run[POINT][:, -1].norm(dim=-1).mean())


@cache
def questions(kind):
    """Return questions of all phrasings about other countries: texts, and countries."""
    every = list(itertools.product(["", *CONTEXTS], PHRASINGS[kind], OTHERS))
    drawn = random.Random(SEED).sample(every, N)
    return [f"{before} {text.format(s=name)}".strip() for before, text, name in drawn], [
        name for *_, name in drawn
    ]


@torch.no_grad()
def right(model, texts, answers, hooks=()):
    """Return which texts the model continues with its answer."""
    logits = model.run_with_hooks(texts, padding_side="left", fwd_hooks=list(hooks))
    return logits[:, -1].argmax(-1) == words(*(f" {answer}" for answer in answers))


def named(model, kind, answer, hooks=()):
    """Return which questions of a kind are answered with the country's capital or language."""
    texts, countries = questions(kind)
    answers = dict(FACTS[answer])
    return right(model, texts, [answers[country] for country in countries], hooks)


def steered(strength, vector=None):
    found, length = towards_capitals()
    vector = found.vector if vector is None else vector
    hooks = [(POINT, Add(vector, strength * length, positions=-1))]
    return 100 * named(shipped(), "language", "capital", hooks).float().mean()


def test_how_strong_a_direction_must_be():
    assert steered(0.0) == 0 and steered(0.2) < 2
    agree(
        "learn_steering",
        "half the stream's norm makes #% say the capital, 0.6 of it #%, twice the norm #%",
        [steered(0.5), steered(0.6), steered(2.0)],
        [5, 2, 12],
    )
    agree(
        "learn_batch",
        "#% at 0.3, #% at 0.4, #% at 0.5, #% at 0.6; at 1.2 #% name the capital",
        [steered(strength) for strength in (0.3, 0.4, 0.5, 0.6, 1.2)],
        [5, 10, 5, 2, 6],
    )


def test_random_directions():
    generator = torch.Generator().manual_seed(SEED)
    claim = "Of twenty random directions none makes it say one at half the norm"
    assert claim in text_of("learn_steering")
    vectors = torch.randn(20, 128, generator=generator)
    assert max(float(steered(0.5, vector / vector.norm())) for vector in vectors) == 0


def test_what_the_removal_of_a_direction_costs():
    changed = TransformerBridge.boot_embedded()
    write_into_weights(changed, towards_capitals()[0])
    left = named(changed, "capital", "capital")
    assert named(shipped(), "capital", "capital").all()
    claim = "Of # questions for capitals in eight phrasings, #% are still right"
    agree("learn_steering", claim, [N, 100 * left.float().mean()], [0, 8])
    texts, _ = questions("capital")
    assert not left[["the capital is" in text for text in texts]].any()
    assert left[["take a train to" in text for text in texts]].float().mean() > 0.9
    assert named(changed, "language", "language").all()
    capitals = {*dict(FACTS["capital"]).values(), *dict(FACTS["language"]).values()}
    for kind in ("fact", "ioi", "repeats"):
        rest = [one for one in prompts(kind, 4 * N, SEED) if one.answer.strip() not in capitals][:N]
        assert right(
            changed, [one.text for one in rest], [one.answer.strip() for one in rest]
        ).all()


# --------------------------------------------------------------------------------------------------
# Experiment 5: the previous word, and the page's own dictionary.
# --------------------------------------------------------------------------------------------------


@cache
@torch.no_grad()
def residuals(n, seed, *ablated):
    """Return the stream before and after layer 0, and the previous token, of texts' tokens."""
    kinds = [prompts(kind, n, seed) for kind in ("fact", "ioi")]
    texts = [f"{one.text}{one.answer}." for one in itertools.chain(*kinds)]
    bridge = shipped()
    tokens = bridge.to_tokens(texts)
    names = ["hook_embed", "blocks.0.hook_resid_post"]
    hooks = [("blocks.0.attn.hook_z", Zero(heads=head)) for head in ablated]
    with bridge.hooks(fwd_hooks=hooks):
        _, run = bridge.run_with_cache(tokens, names_filter=names)
    real = tokens[:, 2:] != bridge.tokenizer.pad_token_id
    return *(run[name][:, 2:][real] for name in names), tokens[:, 1:-1][real]


def probed(place, *ablated):
    """Return a linear probe's accuracy on the fifty commonest previous words of other texts."""
    train, test = residuals(300, 0, *ablated), residuals(N // 2, SEED, *ablated)
    values, counts = train[-1].unique(return_counts=True)
    classes = values[counts.argsort(descending=True)[:50]]

    def of(rows):
        kept = torch.isin(rows[-1], classes)
        return torch.nn.functional.pad(rows[place][kept], (0, 1), value=1.0), rows[-1][kept]

    (x, previous), (new, wanted) = of(train), of(test)
    weights = torch.linalg.lstsq(x, (previous[:, None] == classes).float(), driver="gelsd").solution
    return 100 * (classes[(new @ weights).argmax(-1)] == wanted).float().mean()


def test_the_previous_word_is_decodable():
    agree(
        "learn_features",
        "#% of the fifty commonest words, before it #%, and without the previous-token head L0H2"
        " #%",
        [probed(1), probed(0), probed(1, 2)],
        [2, 5, 5],
    )
    assert probed(1, 0) > 95


@cache
def dictionary():
    """Return the names that the page's code defines, up to its basis."""
    page = (ROOT / "docs" / "learn_features.md").read_text(encoding="utf-8")
    names = {}
    for block in re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)[:4]:
        exec(block.split("tokens = bridge.to_tokens(")[0], names)
    return names


def ranked(one):
    """Return what the SAE shows of a prompt: the logit difference, that without the feature ranked
    first, whether no other active one lowers it more, whether the answer is right from the SAE's
    output, and the share of the last token's variance that it explains.
    """
    names = dictionary()
    bridge, sae, point = names["bridge"], names["sae"], names["point"]
    answer, wrong = bridge.to_single_token(one.answer), bridge.to_single_token(one.wrong)
    with torch.no_grad():
        stream = bridge.run_with_cache(one.text, names_filter=point)[1][point]
    start = stream.clone().requires_grad_()
    logits = bridge(start, start_at_layer=3)[0, -1]
    (gradient,) = torch.autograd.grad(logits[answer] - logits[wrong], start)
    with torch.no_grad():
        features = sae.encode(stream)
        rebuilt = sae.decode(features)
        active = features[0, -1].nonzero().flatten()
        first = (features[0, -1] * (sae.W_dec @ gradient[0, -1]))[active].argmax()
        removed = features[0, :, active].T[..., None] * sae.W_dec[active][:, None]
        logits = bridge(torch.cat([stream, rebuilt, stream - removed]), start_at_layer=3)[:, -1]
    whole, _, *without = (logits[:, answer] - logits[:, wrong]).tolist()
    error, spread = ((stream - base)[0, -1].square().sum() for base in (rebuilt, sae.mean))
    right = logits[1].argmax() == answer
    return [whole, without[first], min(without) == without[first], right, 1 - error / spread]


def test_features_and_what_they_miss():
    rows = torch.tensor([list(map(float, ranked(one))) for one in prompts("ioi", N, SEED)])
    assert (rows[:, 1] < rows[:, 0]).all()
    whole, without, best, right, explained = rows.mean(0)
    agree(
        "learn_features",
        "always lowers the difference, on average from # to #."
        " In #% no other active feature matters as much",
        [whole, without, 100 * best],
        [0.9, 0.9, 8],
    )
    claim = "With the SAE's output in place of the stream, #% are right"
    agree("learn_features", claim, [100 * right], [8])
    agree("learn_features", "but #% at the last token", [100 * explained], [4])


def test_the_strongest_node_is_often_an_error():
    names = dictionary()
    bridge = names["bridge"]
    largest = []
    for one in prompts("ioi", 16, SEED):
        graph = attribution_graph(
            bridge,
            bridge.to_tokens(one.text),
            [names["placed"].name],
            logits=words(one.answer),
            without_positions=[0],
        )
        (logit,) = [i for i, node in enumerate(graph.nodes) if node.kind == "logit"]
        largest.append(graph.nodes[int(graph.adjacency[logit].argmax())].kind)
    (share,) = stated("learn_features", "prompts in #%, and errors are")
    assert abs(100 * largest.count("error") / len(largest) - share) < 25
    assert set(largest) == {"feature", "error"}


# --------------------------------------------------------------------------------------------------
# Experiment 6: facts, patched.
# --------------------------------------------------------------------------------------------------


class Facts:
    """Facts, each with a run of another subject.

    Attributes:
        corrupted: the runs' tokens, ``[fact, pos]``.
        run: the cache of the facts' own runs.
        subject: the position of each fact's subject.
    """

    def __init__(self):
        pairs = embedded_pairs(shipped(), "fact", N, seed=SEED)
        _, self.run = shipped().run_with_cache(pairs.clean)
        self.corrupted, self.metric = pairs.corrupted, pairs.metric(each=True)
        self.low, self.high = (self.metric(shipped()(one)) for one in (self.corrupted, pairs.clean))
        self.subject = (pairs.clean != pairs.corrupted).float().argmax(1)

    def restored(self, name, *index):
        """Return the share of each fact's difference that a patch of some places restores."""

        def put(x, hook):
            x[index] = self.run[name][index]

        patched = shipped().run_with_hooks(self.corrupted, fwd_hooks=[(name, put)])
        return 100 * (self.metric(patched) - self.low) / (self.high - self.low)

    def at(self, layer, place):
        """Return it for the stream before a layer, at one position of each fact."""
        return self.restored(f"blocks.{layer}.hook_resid_pre", range(N), place)

    def head(self, layer, head):
        """Return it for a head's output at all positions."""
        return self.restored(f"blocks.{layer}.attn.hook_z", slice(None), slice(None), head)


@torch.no_grad()
def test_where_a_fact_is():
    facts = Facts()
    moved = facts.restored("blocks.1.hook_attn_out", range(N), -1)
    assert facts.at(0, facts.subject).min() > 99 and abs(facts.at(3, facts.subject).mean()) < 1
    agree(
        "learn_patching",
        "the subject's token brings back #% until layer 1 and #% after it; layer 1's attention"
        " moves #% to the last token (more than 90% in #% of them)",
        [
            facts.at(1, facts.subject).mean(),
            facts.at(2, facts.subject).mean(),
            moved.mean(),
            100 * (moved > 90).float().mean(),
        ],
        [3, 3, 3, 6],
    )
    heads = torch.stack([facts.head(1, head) for head in range(4)])
    agree(
        "learn_patching",
        "L1H2 brings back most (#%), L1H1 #%; in #% of the facts one head brings back more than"
        " half",
        [heads[2].mean(), heads[1].mean(), 100 * (heads.max(0).values > 50).float().mean()],
        [8, 8, 12],
    )
    agree("learn_patching", "L0H0 alone brings back #%", [facts.head(0, 0).mean()], [4])
    elsewhere = [
        float(facts.at(layer, place)[facts.subject != place].max())
        for layer in (1, 2)
        for place in range(facts.corrupted.shape[1] - 1)
    ]
    assert max(elsewhere) < stated("learn_patching", "no other token more than #%")[0] + 5
