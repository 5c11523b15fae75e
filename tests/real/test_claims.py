"""What the experiments on SmolLM2-135M say, measured on 200 prompts that no page uses.

As `tests/docs/test_claims.py`: each claim is searched for in its page, and its numbers are compared
with those measured.
"""

import random
import re
from functools import partial

import pytest
import torch

from bridge.analysis.logit_lens import head_contributions
from bridge.circuits import logit_difference, path_patching
from bridge.interventions import Add, Set
from bridge.tasks import ioi
from bridge.tasks.tasks import NAMES
from tests.docs.site import ROOT
from tests.docs.test_claims import agree

N, SEED = 200, 62
IOI = partial(agree, "learn_smollm_ioi")
MOVERS = [0, 1, 2, 7]  # of layer 23
LAYERS = range(30)


# --------------------------------------------------------------------------------------------------
# Indirect objects.
# --------------------------------------------------------------------------------------------------


class Objects:
    """Indirect-object prompts, and one run of them.

    Attributes:
        at: the positions of the indirect object, and of the subject's two mentions.
        names: the tokens of all names.
        run: the cache of the stream before layer 23 and of the last token's attention.
    """

    def __init__(self, bridge):
        self.bridge = bridge
        self.pairs = ioi(bridge, N, seed=SEED)
        clean, io, subject = self.pairs.clean, self.pairs.answers, self.pairs.wrong
        last = clean.shape[1] - 1
        self.at = {
            "IO": (clean == io[:, None]).float().argmax(1),
            "S1": (clean == subject[:, None]).float().argmax(1),
            "S2": last - (clean == subject[:, None]).flip(1).float().argmax(1),
        }
        self.names = torch.tensor([bridge.to_single_token(f" {name}") for name in NAMES])
        points = [f"blocks.{layer}.attn.hook_pattern" for layer in LAYERS]
        points.append("blocks.23.hook_resid_pre")
        with torch.no_grad():
            self.logits, self.run = bridge.run_with_cache(
                clean, names_filter=points, logits_to_keep=1
            )
        self.attention = {
            where: torch.stack(
                [self.run["pattern", layer][range(N), :, -1, place].mean(0) for layer in LAYERS]
            )
            for where, place in self.at.items()
        }

    def strangers(self):
        """Return the prompts with three other names in each."""
        rng = random.Random(SEED)
        tokens = self.pairs.clean.clone()
        for row, known in enumerate(
            zip(self.pairs.answers.tolist(), self.pairs.wrong.tolist(), strict=True)
        ):
            drawn = rng.sample([name for name in self.names.tolist() if name not in known], 3)
            for place, name in zip(self.at.values(), drawn, strict=True):
                tokens[row, place[row]] = name
        return tokens

    @torch.no_grad()
    def contributions(self):
        """Return what each head adds to IO and to S above the average name: ``[layer, head]``."""
        average = self.names[torch.arange(N) % len(self.names)]
        return [
            head_contributions(self.bridge, self.pairs.clean, name, average).mean(0)
            for name in (self.pairs.answers, self.pairs.wrong)
        ]

    def of_logits(self, logits):
        """Return IO's and S's logits above the average name, and the per cent of right answers."""
        mean = logits[:, self.names].mean(1)
        of_names = [
            (logits[range(N), name] - mean).mean()
            for name in (self.pairs.answers, self.pairs.wrong)
        ]
        return [*of_names, 100 * (logits.argmax(-1) == self.pairs.answers).float().mean()]


@pytest.fixture(scope="module")
def objects(smollm):
    return Objects(smollm)


@torch.no_grad()
def test_it_answers(objects):
    difference = objects.pairs.metric(each=True)(objects.logits)
    right = (objects.logits[:, -1].argmax(-1) == objects.pairs.answers).float().mean()
    IOI(
        "Of # prompts it answers #% correctly; in #% the answer's logit is above the subject's",
        [N, 100 * right, 100 * (difference > 0).float().mean()],
        [0, 4, 3],
    )


def test_movers_and_suppressors_write_names(objects):
    io, subject = objects.contributions()
    attention = objects.attention
    chosen = (io > 0.4) & (attention["IO"] > 0.25)
    assert chosen.nonzero().tolist() == [[23, head] for head in MOVERS]
    IOI(
        "attend to IO (# to #, to S1 # to #) and raise both names: IO by # to #, S by # to #",
        [
            end
            for row in (attention["IO"], attention["S1"], io, subject)
            for end in (row[23, MOVERS].min(), row[23, MOVERS].max())
        ],
        [0.06] * 4 + [0.15] * 4,
    )
    IOI(
        "L23H3 attends to S2 (#) and lowers S by # (IO by #)",
        [attention["S2"][23, 3], -subject[23, 3], -io[23, 3]],
        [0.05, 0.3, 0.15],
    )
    IOI(
        "L24H4 attends to IO (#) and lowers it by # (S by #)",
        [attention["IO"][24, 4], -io[24, 4], -subject[24, 4]],
        [0.05, 0.2, 0.15],
    )
    lowest = subject.flatten().argsort()
    assert divmod(int(lowest[0]), 9) == (23, 3) and subject.flatten()[lowest[1]] > -0.8


@torch.no_grad()
def test_copying_scores(objects):
    bridge, names = objects.bridge, objects.names
    bos = torch.full_like(names, bridge.tokenizer.bos_token_id)
    stream = bridge(torch.stack([bos, names], 1), stop_at_layer=1)[:, 1]
    shares = torch.zeros(2, 30, 9)
    for layer in LAYERS:
        values = torch.einsum("nm,hmd->hnd", bridge.blocks[layer].ln1(stream), bridge.W_V[layer])
        written = torch.einsum("hnd,hdm->hnm", values, bridge.W_O[layer])
        logits = bridge.unembed(bridge.ln_final(written))
        own = logits[:, range(len(names)), names][..., None]
        for sign, ranks in enumerate((logits > own, logits < own)):
            shares[sign, layer] = 100 * (ranks.sum(-1) < 5).float().mean(1)
    copies, suppresses = shares
    assert {tuple(at) for at in (suppresses > 50).nonzero().tolist()} == {(23, 3), (24, 4)}
    others = [float(copies[layer, head]) for layer in LAYERS for head in range(9)]
    IOI(
        "copy #%, #%, #% and #% of 30 names",
        [copies[23, head] for head in MOVERS],
        [7] * 4,
    )
    IOI("L24H5 and L23H5 copy #% and #%", [copies[24, 5], copies[23, 5]], [7, 7])
    IOI("L23H3 suppresses #%, L24H4 #%", [suppresses[23, 3], suppresses[24, 4]], [7, 7])
    IOI("the average of all 270 heads is #%", [sum(others) / 270], [0.6])


@torch.no_grad()
def test_without_movers_and_suppressors(objects):
    bridge = objects.bridge
    outputs = [f"blocks.{layer}.attn.hook_z" for layer in (23, 24)]
    _, other = bridge.run_with_cache(
        objects.strangers(), names_filter=outputs, pos_slice=-1, logits_to_keep=1
    )

    later = [f"blocks.{layer}.attn.hook_z" for layer in range(24, 30)]

    def without(layer, heads):
        """Return `of_logits`, and what each head of layers 24 to 29 adds to IO."""
        name = f"blocks.{layer}.attn.hook_z"
        hooks = [(name, Set(other[name], heads=heads, positions=-1))] if heads else []
        with bridge.hooks(fwd_hooks=hooks):
            logits, run = bridge.run_with_cache(
                objects.run["resid_pre", 23],
                start_at_layer=23,
                names_filter=[*later, "ln_final.hook_scale"],
                pos_slice=-1,
            )
        readout = bridge.W_U[:, objects.pairs.answers].T - bridge.W_U[:, objects.names].mean(1)
        readout = readout * bridge.ln_final.w / run["ln_final.hook_scale"][:, -1]
        adds = [
            torch.einsum("bhd,hdm,bm->h", run[name][:, -1], bridge.W_O[layer], readout) / N
            for layer, name in enumerate(later, 24)
        ]
        return [*objects.of_logits(logits[:, -1]), torch.stack(adds)]

    intact, movers, control = (without(23, heads) for heads in ([], MOVERS, [4, 5, 6, 8]))
    IOI(
        "without the four, IO falls from # to #, S from # to #, and #% of the answers are right",
        [intact[0], movers[0], intact[1], movers[1], movers[2]],
        [0.3, 0.3, 0.3, 0.3, 4],
    )
    IOI("#% are right without the layer's other four heads", [control[2]], [5])
    rises = movers[3] - intact[3]
    known = [(0, 4), (5, 0), (5, 1)]
    changes = [float(rises[head]) for head in known]
    for head in known:
        rises[head] = 0
    IOI(
        "L24H4 lowers IO by # less, L29H0 by # less, L29H1 adds # less, and no other later"
        " head adds more than #",
        [changes[0], changes[1], -changes[2], rises.max()],
        [0.15] * 4,
    )
    of_s, of_io = without(23, [3]), without(24, [4])
    IOI("without it, S rises from # to #, and #% are right", [intact[1], *of_s[1:3]], [0.3, 0.3, 5])
    IOI("without it, IO rises to # and #% are right", [of_io[0], of_io[2]], [0.3, 4])


def test_who_tells_the_movers_where_to_look(objects):
    pairs = objects.pairs
    senders = ["L20H0", "L19H2"]
    others = [
        f"L{at}H{head}" for at in (19, 20) for head in range(9) if f"L{at}H{head}" not in senders
    ]
    queries = [f"L23H{head}.q" for head in MOVERS]

    def change(chosen):
        """Return the mean over parts of 20 prompts: a graph's senders are all kept in memory."""
        changes = []
        for part in torch.arange(N).split(20):
            metric = logit_difference(pairs.answers[part], pairs.wrong[part])
            ends = pairs.clean[part], pairs.corrupted[part], metric
            changes.append(path_patching(objects.bridge, *ends, chosen, queries, logits_to_keep=1))
        return sum(changes) / len(changes)

    with torch.no_grad():
        total = pairs.metric()(objects.logits)
        both, rest = change(senders), change(others)
    IOI(
        "the other 16 heads of layers 19 and 20 change it by #, these two by # of #",
        [rest, both, total],
        [0.2, 0.4, 0.4],
    )
    attention = objects.attention
    IOI(
        "L20H0 and L19H2 attend to S2 (#, #; to IO # and #)",
        [attention[where][at] for where in ("S2", "IO") for at in ((20, 0), (19, 2))],
        [0.05] * 4,
    )


# --------------------------------------------------------------------------------------------------
# A function vector.
# --------------------------------------------------------------------------------------------------

VECTOR = partial(agree, "learn_smollm_function_vector")
MESSAGES = ("Continue.", "Complete the line.")
#: What the page chooses, on other nouns.
HEADS = "L20H5 L24H4 L20H6 L17H5 L18H6 L23H3 L22H5 L17H3 L14H1 L14H3"
CHOSEN = "before layer 20, 2 times"
BEST = [tuple(map(int, name[1:].split("H"))) for name in HEADS.split()]


@pytest.fixture(scope="module")
def page():
    """Return the names that the page's code defines, without the search for heads and layer."""
    text = (ROOT / "docs" / "learn_smollm_function_vector.md").read_text(encoding="utf-8")
    names = {"LAYERS": [20]}
    blocks = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    for block in blocks[:4]:
        exec(re.sub(r"^best = .*\nprint.*\n", "", block).split("kept = {}")[0], names)
    return names


def test_the_page_chooses_these_heads():
    path = ROOT / "examples" / "learn_smollm_function_vector.ipynb"
    stored = path.read_text(encoding="utf-8")
    assert f"heads: {HEADS}\\n" in stored and f'"{CHOSEN}:' in stored


@torch.no_grad()
def test_it_forms_plurals_from_examples(page):
    held_out, bridge = page["held_out"], page["bridge"]
    shares = []
    for task in ("plural", "shuffled"):
        tokens = page["with_examples"](held_out, N, task, SEED)
        shares.append(100 * page["right"](bridge(tokens, logits_to_keep=1), held_out))
    VECTOR(
        "the plural in #% of # prompts about held-out nouns; with shuffled examples, in #%",
        [shares[0], N, shares[1]],
        [5, 0, 7],
    )
    assert len(held_out) == 100 and not {*held_out} & {*page["seen"]}


@torch.no_grad()
def test_the_vector_and_what_is_no_vector(page):
    bridge, held_out, vector = page["bridge"], page["held_out"], page["vector"]
    runs = [page["without_examples"](held_out, message) for message in MESSAGES]
    stream = [run["resid_pre", 20] for run, _ in runs]

    def share(added):
        hooks = [("blocks.20.hook_resid_pre", Add(added, 2.0, positions=-1))]
        shares = [
            page["right"](
                bridge.run_with_hooks(one, start_at_layer=20, fwd_hooks=hooks, logits_to_keep=1),
                held_out,
            )
            for one in stream
        ]
        return 100 * sum(shares) / len(MESSAGES)

    alone = 100 * sum(right for _, right in runs) / len(MESSAGES)
    plural = vector(page["plural"], BEST)
    layers = {layer for layer, _ in BEST}
    rest = [(layer, head) for layer in layers for head in range(9) if (layer, head) not in BEST]
    drawn = []
    for seed in range(1, 4):
        others = vector(page["plural"], random.Random(seed).sample(rest, 10))
        drawn.append(share(others * plural.norm() / others.norm()))
    VECTOR(
        "Without examples it does so in #% of them, and with the vector in #%",
        [alone, share(plural)],
        [2, 6],
    )
    VECTOR("at most #% in three draws of ten other heads of these layers", [max(drawn)], [5])
    VECTOR(
        "with shuffled examples #%, with the noun repeated #%",
        [share(vector(page[task], BEST)) for task in ("shuffled", "repeat")],
        [7, 5],
    )
    VECTOR("L20H5 alone #%", [share(vector(page["plural"], [(20, 5)]))], [6])
