"""Trains models with norms and superposition to compute programs by known circuits:
`benchmarks/trained_circuits`.

    python -m tools.train_known_circuits [--check] [PROGRAM ...]

Strict interchange training (Gupta et al. 2024, "InterpBench: Semi-Synthetic Transformers for
Evaluating Mechanistic Interpretability Techniques"), of edges: what the compiled model's parts do
is given to parts of a larger model. Some of the circuit's edges carry, in both models, what their
senders write for another prompt, and any of the larger model's other edges do so, too. Where the
compiled model's answer is definite then, the larger one has to give it. So each edge of the circuit
carries what the program says, and no other edge can change an answer.

Two losses come on top. Each part of the circuit has to tell, to a linear readout, what the compiled
part writes: without that, `hist` and `sort_unique` stay with ways around the circuit. And at every
position the last stream has to tell to a linear readout which tokens, pairs and triples of tokens
stand where: more features than it has dimensions. So all other parts are busy with what the program
does not ask for. Both readouts are thrown away.

Minutes for each program on one core. On one machine, and version of torch, the files come out
equal, bit by bit: ``--check`` trains, writes nothing, and is an error where they do not.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

from bridge import TransformerBridge
from bridge.circuits import Graph
from bridge.circuits.edge_runs import run_with_edges_replaced
from bridge.circuits.graph import written
from bridge.native import NativeConfig, NativeModel
from bridge.native.native import NativeBlock
from bridge.tasks.compiled import PROGRAMS, Compiled, compiled

#: Which part of the larger model does what a part of the compiled one does.
PARTS = {
    "frac_prevs": {"L0MLP": "L1MLP", "L1H0": "L3H1"},
    "reverse": {"L3H0": "L3H2"},
    "hist": {"L0H0": "L1H2", "L0MLP": "L2MLP"},
    "sort_unique": {"L0H0": "L1H1", "L0MLP": "L1MLP", "L1H0": "L3H0"},
    "either": {
        "L0MLP": "L0MLP",
        "L1H0": "L1H0",
        "L1H1": "L2H3",
        "L1MLP": "L2MLP",
        "L2MLP": "L3MLP",
    },
    "most": {"L0MLP": "L0MLP", "L1H0": "L2H2", "L1MLP": "L3MLP"},
}
#: Parts that pass on what goes through an edge of the compiled model: the edges are those from its
#: sender to the first, from each to the next, and from the last to its reader; that from its sender
#: to its reader carries nothing.
RELAYS = {
    "frac_prevs": {"embed->L0MLP": ["L0H2"], "L0MLP->L1H0.v": ["L2MLP"]},
    "reverse": {"embed->L3H0.v": ["L0MLP", "L1MLP", "L2MLP"]},
    "hist": {"embed->L0H0.q": ["L0MLP"], "embed->L0H0.k": ["L0H3"], "L0MLP->logits": ["L3MLP"]},
    "sort_unique": {
        "embed->L0H0.q": ["L0MLP"],
        "embed->L0H0.k": ["L0MLP"],
        "embed->L1H0.v": ["L2MLP"],
    },
    "either": {},
    "most": {"L0MLP->L1H0.v": ["L1MLP"], "L1H0->L1MLP": ["L2MLP"]},
}
WIDTH, ROWS, STEPS, RATE = 64, 128, 2000, 2e-3
#: How much larger the embeddings start: what is drawn is lost among what the parts of the first
#: layer write.
EMBEDDINGS = 8.0
#: How sure of an answer a model is to be; how far a share may be off.
SURE, OFF = 0.97, 0.01
OUT = Path(__file__).parents[1] / "benchmarks" / "trained_circuits"


class Run(NamedTuple):
    """What a model answers, what its senders write, ``[batch, sender, pos * d_model]``, and the
    last stream.
    """

    logits: Tensor
    parts: Tensor
    stream: Tensor


def computed(
    model: NativeModel, tokens: Tensor, other: Tensor | None = None, replaced: Tensor | None = None
) -> Run:
    """What `run_with_edges_replaced` computes, of prompts with edges of their own, in half the
    time.

    Args:
        model: a `NativeModel` without grouped keys.
        tokens: the prompts, ``[batch, pos]``.
        other: the parts of another run, which replaced edges carry.
        replaced: which do, ``[batch, receiver, sender]``.
    """
    heads, (rows, length) = model.config.n_heads, tokens.shape
    blocks = cast(list[NativeBlock], list(model.blocks))
    assert model.pos_embed is not None
    stream = model.embed(tokens) + model.pos_embed.weight[:length]
    parts = [stream.flatten(1)[:, None]]
    sizes = [1, *[heads, 1] * len(blocks)]
    others = [] if other is None else other.split(sizes, 1)
    changes = [others[0] - parts[0]] if others else []
    at = 0

    def read(count: int, norm: nn.Module) -> Tensor:
        nonlocal at
        seen = stream[:, None]
        if replaced is not None:
            change = torch.cat(changes, 1)
            moved = replaced[:, at : at + count, : change.shape[1]] @ change
            seen = seen + moved.unflatten(2, (length, -1))
        at += count
        return norm(seen)  # row receiver pos d_model

    def write(made: Tensor) -> None:
        parts.append(made.flatten(2))
        if others:
            changes.append(others[len(changes)] - parts[-1])

    for block in blocks:
        assert block.mlp is not None
        attn, seen = block.attn, read(3 * heads, block.ln1).expand(-1, 3 * heads, -1, -1)
        projections = attn.q, attn.k, attn.v
        weight = torch.cat([one.weight for one in projections]).unflatten(0, (3 * heads, -1))
        bias = torch.cat([one.bias for one in projections]).unflatten(0, (3 * heads, 1, -1))
        by_head = seen.transpose(0, 1).flatten(1, 2) @ weight.mT + bias
        query, key, value = by_head.unflatten(1, (rows, length)).chunk(3)
        mixed = (query @ key.mT * attn.scaling).softmax(-1) @ value
        made = mixed.flatten(1, 2) @ attn.o.weight.unflatten(1, (heads, -1)).permute(1, 2, 0)
        by_row = made.unflatten(1, (rows, length)).transpose(0, 1)
        write(by_row)
        stream = stream + by_row.sum(1) + attn.o.bias
        made = block.mlp(read(1, block.ln2))
        write(made)
        stream = stream + made[:, 0]
    return Run(model.unembed(read(1, model.ln_final)[:, 0]), torch.cat(parts, 1), stream)


def shape(task: Compiled) -> dict[str, Any]:
    """What the larger model is made of."""
    cfg = task.bridge.cfg
    return {
        "n_layers": 4,
        "d_model": WIDTH,
        "n_heads": 4,
        "d_head": 8,
        "d_mlp": 32,
        "n_ctx": cfg.n_ctx,
        "d_vocab": cfg.d_vocab,
        "d_vocab_out": len(task.outputs),
        "act_fn": "gelu",
        "normalization_type": "LN",
    }


def paths_of(task: Compiled, program: str) -> dict[str, list[str]]:
    """The larger model's edges that do together what an edge of the compiled one does, for each."""
    parts, found = {"embed": "embed", "logits": "logits", **PARTS[program]}, {}
    for edge in sorted(task.edges):
        sender, reader = edge.split("->")
        part, dot, letter = reader.partition(".")
        relays = RELAYS[program].get(edge, [])
        readers = [relay + ".v" * ("H" in relay) for relay in relays] + [parts[part] + dot + letter]
        found[edge] = [
            "->".join(pair) for pair in zip([parts[sender], *relays], readers, strict=True)
        ]
    return found


def words_of(task: Compiled) -> list[int]:
    """The tokens that prompts are made of, behind BOS."""
    return [i for word, i in task.vocabulary.items() if word not in ("BOS", "compiler_pad")]


def every_prompt(task: Compiled, program: str) -> Tensor:
    """All there are. Tokens of ``sort_unique`` are all different."""
    words, length = words_of(task), task.clean.shape[1] - 1
    rows = (
        itertools.permutations(words, length)
        if program == "sort_unique"
        else itertools.product(words, repeat=length)
    )
    return torch.tensor([[task.vocabulary["BOS"], *row] for row in rows])


def right_answers(task: Compiled, found: Tensor, right: Tensor) -> Tensor:
    """Which answers are the compiled model's, or ones where that has no definite answer, ``[row,
    pos]``.

    A share is right if the nearest one that there can be, of no more than four tokens, is the right
    one.
    """
    if len(task.outputs) == 1:
        return (found - right).abs()[..., 0] < 1 / 8
    return (found.argmax(-1) == right.argmax(-1)) | ~definite(right)


def definite(right: Tensor) -> Tensor:
    """Which answers are one and no mean of several: between replaced queries and keys nothing may
    match.
    """
    first, second = right.topk(2, -1).values.unbind(-1)
    return first - second > 0.75


class Interchange(NamedTuple):
    """Both models' runs on prompts some of whose edges carry what is written for other prompts.

    Attributes:
        tokens, sources: the prompts, and those others.
        right, found: the compiled model's run, and the larger one's.
        right_source, source: likewise, on the other prompts, with nothing replaced.
        replaced: which of its edges carry what that wrote, ``[batch, receiver, sender]``.
    """

    tokens: Tensor
    sources: Tensor
    right: Run
    found: Run
    right_source: Run
    source: Run
    replaced: Tensor


class Training:
    """A larger model, and how far it is from doing as the compiled one does."""

    def __init__(self, program: str) -> None:
        self.program, self.task = program, compiled(program)
        config = NativeConfig(
            **shape(self.task),
            attention_dir="bidirectional",
            model_name=program,
            default_prepend_bos=False,
            seed=0,
        )
        self.bridge = TransformerBridge.boot_native(config).eval()
        self.model, self.teacher = (
            cast(NativeModel, one.original_model) for one in (self.bridge, self.task.bridge)
        )
        self.small, self.large = Graph.of(self.task.bridge), Graph.of(self.bridge)
        paths = paths_of(self.task, program)
        self.edges = sorted({edge for path in paths.values() for edge in path})
        self.own = torch.tensor([self.small.edge(edge) for edge in paths]).T
        self.given = torch.tensor([self.large.edge(edge) for edge in self.edges]).T
        #: Which edges of the larger model are on the path of which edge of the compiled one.
        self.along = torch.tensor(
            [[float(edge in path) for path in paths.values()] for edge in self.edges]
        )
        self.others = self.large.exists.clone()
        self.others[tuple(self.given)] = False
        self.numbers = torch.Generator().manual_seed(1)
        self.words, self.every = torch.tensor(words_of(self.task)), every_prompt(self.task, program)
        #: What parts of the larger model have to tell: what parts of the compiled one write.
        self.tell = {to: of for of, to in PARTS[program].items()}
        self.tell |= {
            relay: edge.split("->")[0]
            for edge, relays in RELAYS[program].items()
            for relay in relays
        }
        with torch.no_grad(), torch.random.fork_rng():
            torch.manual_seed(0)
            #: Of each of the latter, what is usual: the mean and spread of what depends on the
            #: prompt.
            self.usual: dict[str, tuple[Tensor, Tensor, Tensor]] = {}
            plain = computed(self.teacher, self.every)
            for part in {*self.tell.values()}:
                values = self.behind_bos(plain, self.small.senders.index(part))
                varies = values.std(0).amax(0) > 1e-4
                values = values[..., varies].flatten(0, 1)
                self.usual[part] = varies, values.mean(0), values.std(0)
            self.probes = nn.ModuleDict(
                {to: nn.Linear(WIDTH, len(self.usual[of][1])) for to, of in self.tell.items()}
            )
            self.readout = nn.Linear(WIDTH, self.crowd(self.every[:1]).shape[1])
            self.model.embed.weight.mul_(EMBEDDINGS)

    def behind_bos(self, run: Run, sender: int) -> Tensor:
        """What a sender writes, ``[batch, pos, d_model]``."""
        return run.parts[:, sender].unflatten(1, (self.every.shape[1], -1))[:, 1:]

    def prompts(self, rows: int) -> Tensor:
        """Random ones. Rare answers are not rare among them."""
        length = self.every.shape[1] - 1
        if self.program == "sort_unique":
            return self.every[torch.randint(len(self.every), (rows,), generator=self.numbers)]
        shares = torch.rand(rows, len(self.words), generator=self.numbers) ** 2
        drawn = torch.multinomial(shares + 1e-3, length, replacement=True, generator=self.numbers)
        return torch.cat([torch.full((rows, 1), self.task.vocabulary["BOS"]), self.words[drawn]], 1)

    def interchanged(self, share: Tensor, others: Tensor) -> Interchange:
        """Runs of random prompts.

        Args:
            share: for each, how many of the circuit's edges are replaced.
            others: and of all other edges.
        """
        rows = len(share)
        tokens, sources = self.prompts(rows), self.prompts(rows)
        chosen = (
            torch.rand(rows, len(self.edges), generator=self.numbers) < share[:, None]
        ).float()
        replaced = (
            torch.rand(rows, *self.others.shape, generator=self.numbers) < others[:, None, None]
        ) & self.others
        replaced = replaced.float()
        replaced[:, self.given[0], self.given[1]] = chosen
        with torch.no_grad():
            in_small = torch.zeros(rows, *self.small.exists.shape)
            in_small[:, self.own[0], self.own[1]] = (chosen @ self.along).clamp(max=1)
            right_source = computed(self.teacher, sources)
            right = computed(self.teacher, tokens, right_source.parts, in_small)
        source = computed(self.model, sources)
        found = computed(self.model, tokens, source.parts, replaced)
        return Interchange(tokens, sources, right, found, right_source, source, replaced)

    def loss(self, runs: Interchange) -> Tensor:
        """How far answers are from the compiled model's, where these are definite."""
        found, right = runs.found.logits[:, 1:], runs.right.logits[:, 1:]
        if len(self.task.outputs) == 1:
            return 10 * ((found - right).abs() - OFF).clamp(min=0).mean()
        losses = functional.cross_entropy(
            found.movedim(-1, 1), right.argmax(-1), reduction="none", label_smoothing=1 - SURE
        )
        return losses[definite(right)].mean()

    def probed(self, runs: Interchange) -> Tensor:
        """How far parts of the circuit are from telling what the compiled ones write."""
        losses = []
        for to, of in self.tell.items():
            varies, mean, spread = self.usual[of]
            wanted = self.behind_bos(runs.right_source, self.small.senders.index(of))[..., varies]
            told = self.probes[to](self.behind_bos(runs.source, self.large.senders.index(to)))
            losses.append((told - (wanted - mean) / spread).square().mean())
        return torch.stack(losses).mean()

    def crowd(self, tokens: Tensor) -> Tensor:
        """Which tokens, pairs and triples of tokens are where, ``[batch, feature]``."""
        found, where = [], (tokens[:, 1:, None] == self.words).float()
        for size in (1, 2, 3):
            for places in itertools.combinations(range(where.shape[1]), size):
                joint = where[:, places[0]]
                for place in places[1:]:
                    joint = (joint[:, :, None] * where[:, place, None]).flatten(1)
                found.append(joint)
        return torch.cat(found, 1)

    def told(self, run: Run) -> Tensor:
        """What the last stream tells of the crowd, as logits, ``[batch, pos, feature]``."""
        return self.readout(functional.layer_norm(run.stream, (WIDTH,)))[:, 1:]

    def crowded(self, runs: Interchange) -> Tensor:
        """How far the last stream is from telling all that."""
        found = self.told(runs.source)
        return functional.binary_cross_entropy_with_logits(
            found, self.crowd(runs.sources)[:, None].expand_as(found)
        )

    def train(self) -> None:
        """Trains, and rounds the weights to what is shipped."""
        weights, started = [*self.model.parameters()], time.process_time()
        optimizer = torch.optim.AdamW(
            [*weights, *self.probes.parameters(), *self.readout.parameters()],
            RATE,
            betas=(0.9, 0.98),
        )
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, RATE, total_steps=STEPS, pct_start=0.2
        )
        levels = torch.tensor([0.0, 0.5, 1.0])
        for step in range(STEPS):
            share = torch.tensor([0.0, 0.5, 0.5])[torch.randint(3, (ROWS,), generator=self.numbers)]
            runs = self.interchanged(
                share, levels[torch.randint(3, (ROWS,), generator=self.numbers)]
            )
            losses = torch.stack([self.loss(runs), self.probed(runs), self.crowded(runs)])
            optimizer.zero_grad()
            losses.sum().backward()
            nn.utils.clip_grad_norm_(weights, 1.0)
            optimizer.step()
            schedule.step()
            if step % 250 == 0 or step == STEPS - 1:
                said = " + ".join(f"{loss:.4f}" for loss in losses.tolist())
                print(
                    f"{self.program} {step}: {said}, {time.process_time() - started:.0f} s",
                    flush=True,
                )
        self.model.load_state_dict(
            {name: value.half().float() for name, value in self.model.state_dict().items()}
        )

    @torch.no_grad()
    def report(self) -> None:
        """Prints how well the rounded model does, and that runs of the bridge say the same."""
        for own, rest in ((0.0, 0.0), (0.0, 1.0), (0.5, 0.5), (0.5, 1.0)):
            n = 2000
            runs = self.interchanged(torch.full((n,), own), torch.full((n,), rest))
            right = right_answers(self.task, runs.found.logits[:, 1:], runs.right.logits[:, 1:])
            print(
                f"  replaced {own} of the circuit, {rest} of the rest: {right.float().mean():.5f}"
                " right",
                flush=True,
            )
        given = {"input_ids": runs.tokens}
        sources = written(self.large, self.bridge, runs.sources).parts
        again = run_with_edges_replaced(
            self.large, self.bridge, given, sources, runs.replaced[None]
        )[0]
        torch.testing.assert_close(runs.found.logits, again, atol=1e-4, rtol=1e-4)
        told, wanted = (
            self.told(computed(self.model, self.every)) > 0,
            self.crowd(self.every)[:, None].bool(),
        )
        wanted = wanted.expand_as(told)
        seen, wrong = told[wanted].float().mean(), told[~wanted].float().mean()
        print(
            f"  of {told.shape[-1]} features, {seen:.4f} of those that are there are told,"
            f" {wrong:.4f} of the others"
        )

    def write(self, check: bool) -> None:
        """Writes what `bridge.tasks.trained` reads, in half precision, or compares it with what is
        there.

        Raises:
            AssertionError: it is compared, and differs.
        """
        header = {"facts": json.dumps(shape(self.task)), "edges": json.dumps(self.edges)}
        halves = {
            name: value.half().contiguous() for name, value in self.model.state_dict().items()
        }
        file = OUT / f"{self.program}.safetensors"
        if not check:
            OUT.mkdir(exist_ok=True)
            return save_file(halves, file, header)
        there = load_file(file)
        assert there.keys() == halves.keys() and all(
            torch.equal(there[name], halves[name]) for name in halves
        ), file
        print("  as shipped, bit by bit")


def main() -> None:
    """Trains each program's model."""
    torch.set_num_threads(1)
    check = "--check" in sys.argv
    for program in [name for name in sys.argv[1:] if name != "--check"] or PROGRAMS:
        training = Training(program)
        training.train()
        training.report()
        training.write(check)


if __name__ == "__main__":
    main()
