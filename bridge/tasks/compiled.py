"""Models whose circuits are known: programs compiled into weights, and models trained to compute them likewise.

Lindner et al. 2023, "Tracr: Compiled Transformers as a Laboratory for Interpretability". The script
``benchmarks/compile_programs.py`` makes the files in `programs`; nothing of the compiler is needed here. Those in
`programs/trained` are made by ``tools/train_known_circuits.py``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from safetensors import safe_open
from torch import Tensor

from bridge.bridge import TransformerBridge
from bridge.circuits.circuits import Circuit, EdgeScores, area_under_rates
from bridge.circuits.graph import Graph, Metric
from bridge.native import NativeConfig

_FOLDER = Path(__file__).parent / "programs"
#: The programs: the share of earlier tokens that are "x"; the tokens from behind; how often each token is there; the
#: tokens in order; whether "x" or "y" is there; whether "x" is more than half (BOS counts).
PROGRAMS = ("frac_prevs", "reverse", "hist", "sort_unique", "either", "most")


@dataclass(frozen=True, eq=False, repr=False)
class KnownCircuit:
    """A model that computes a program, and its known circuit.

    Attributes:
        bridge: the model, which is bidirectional.
        clean, corrupted: pairs of prompts, ``[batch, pos]``.
        edges: the known circuit: the edges through which something goes that depends on the tokens, on a way to the
            output. By the names of `bridge.circuits.Graph`.
        outputs: what each of the logits is.
        vocabulary: the tokens' ids.

    Example:
        >>> from bridge.tasks import trained
        >>> trained("hist")
        KnownCircuit(hist: 7 of 479 edges, 32 pairs)
    """

    bridge: TransformerBridge
    clean: Int[Tensor, "batch pos"]
    corrupted: Int[Tensor, "batch pos"]
    edges: frozenset[str]
    outputs: tuple[str, ...]
    vocabulary: dict[str, int]

    def __repr__(self) -> str:
        of, edges = Graph.of(self.bridge).n_edges, len(self.edges)
        return f"{type(self).__name__}({self.bridge.cfg.model_name}: {edges} of {of} edges, {len(self.clean)} pairs)"

    def metric(self) -> Metric:
        """How far the logits are on the way from the corrupted prompts' (0) to the clean ones' (1), over all."""
        with torch.no_grad():
            start, end = self.bridge(self.corrupted), self.bridge(self.clean)
        way = (end - start) / (end - start).square().sum()

        def metric(logits: Tensor) -> Tensor:
            return ((logits - start) * way).sum()

        return metric

    def edge_auc(self, scores: EdgeScores) -> float:
        """How well scores tell the known circuit's edges from the others: the area under the curve of both rates.

        1: every edge of the circuit has a larger score, of either sign, than every other; 0.5: as by chance.

        Args:
            scores: of this model's edges.
        """
        return scores.auroc(self.circuit)

    @property
    def circuit(self) -> Circuit:
        """The known circuit, of the model's graph."""
        return Circuit.of_edges(Graph.of(self.bridge), [*self.edges])

    def node_auc(self, scores: EdgeScores) -> float:
        """The same of the nodes: a node's score is that of its largest edge out.

        Args:
            scores: of this model's edges.
        """
        return area_under_rates(scores.values.abs().amax(0), self.circuit.mask.any(0))


@dataclass(frozen=True, eq=False, repr=False)
class Compiled(KnownCircuit):
    """A model that computes a program by weights that were worked out and not trained, and its known circuit.

    It has no norms; each coordinate of its stream is a value of a variable.

    Attributes:
        labels: what each coordinate of the stream is.
        streams: the compiler's own stream after the last block, for the first clean prompts.
    """

    labels: tuple[str, ...]
    streams: Float[Tensor, "rows pos d_model"]


def compiled(program: str) -> Compiled:
    """A model that a program was compiled into, with its known circuit.

    Args:
        program: ``"frac_prevs"``, the share of the tokens so far that are "x"; ``"reverse"``, the tokens from behind;
            ``"hist"``, how often each token is there; ``"sort_unique"``, the tokens in order; ``"either"``, whether "x"
            or "y" is there (both or none, in its prompts); ``"most"``, whether more than half of the tokens are "x".

    Raises:
        ValueError: another program.

    Example:
        >>> from bridge.tasks import compiled
        >>> task = compiled("reverse")
        >>> words = {number: word for word, number in task.vocabulary.items()}
        >>> said = [task.outputs[i].split(":")[1] for i in task.bridge(task.clean[:1])[0, 1:].argmax(-1)]
        >>> said == [words[int(i)] for i in task.clean[0, 1:]][::-1]
        True
    """
    header, found = _read(_FOLDER / f"{program}.safetensors", program, PROGRAMS)
    facts = {"act_fn": "relu", "normalization_type": None, **json.loads(header["facts"])}
    bridge = _model(program, facts)
    prompts, streams = found.pop("prompts"), found.pop("streams")
    with torch.no_grad():
        for name, getter in bridge.weights.getters.items():
            stored = getter()
            stored.copy_(found[name]) if name in found else stored.zero_()
    clean, corrupted = prompts.chunk(2)
    return Compiled(
        bridge, clean, corrupted, frozenset(json.loads(header["edges"])), tuple(json.loads(header["outputs"])),
        json.loads(header["vocabulary"]), tuple(json.loads(header["labels"])), streams,
    )  # fmt: skip


def trained(program: str) -> KnownCircuit:
    """A model with norms and superposition that was trained to compute a program by a known circuit.

    Four layers of width 64, four heads and an MLP in each. Strict interchange training (Gupta et al. 2024,
    "InterpBench") gave some of its parts what the parts of the compiled model do, and others what they pass on: with
    edges of the circuit replaced it answers as the compiled one does, whatever its other edges carry. These carry what
    the program does not ask for: which tokens, pairs and triples of tokens stand where.

    Args:
        program: one of those of `compiled`.

    Raises:
        ValueError: another program.

    Example:
        >>> from bridge.circuits import edge_attribution
        >>> from bridge.tasks import trained
        >>> task = trained("hist")
        >>> scores = edge_attribution(task.bridge, task.clean, task.corrupted, task.metric())
        >>> len(task.edges), scores.auroc(task.circuit) > 0.99
        (7, True)
    """
    header, found = _read(_FOLDER / "trained" / f"{program}.safetensors", program, PROGRAMS)
    task, bridge = compiled(program), _model(program, json.loads(header["facts"]))
    bridge.original_model.load_state_dict({name: tensor.float() for name, tensor in found.items()})
    edges = frozenset(json.loads(header["edges"]))
    return KnownCircuit(bridge, task.clean, task.corrupted, edges, task.outputs, task.vocabulary)


def _read(file: Path, program: str, known: tuple[str, ...]) -> tuple[dict[str, str], dict[str, Tensor]]:
    """A file's facts and tensors.

    Raises:
        ValueError: there is no such program.
    """
    if program not in known:
        raise ValueError(f"there is no program {program!r}; there are {', '.join(known)}")
    with safe_open(file, framework="pt") as content:
        return content.metadata(), {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118


def _model(program: str, facts: dict[str, Any]) -> TransformerBridge:
    config = NativeConfig(**facts, attention_dir="bidirectional", model_name=program, default_prepend_bos=False)
    return TransformerBridge.boot_native(config).eval()
