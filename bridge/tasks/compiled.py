"""Models with known circuits: programs compiled into weights, and models trained to compute them.

Lindner et al. 2023, "Tracr: Compiled Transformers as a Laboratory for Interpretability". The script
``benchmarks/compile_programs.py`` writes the files in `programs`; the compiler itself is not needed
here. ``tools/train_known_circuits.py`` writes the files in ``benchmarks/trained_circuits``, which
are part of a checkout and of the source distribution, but not of the wheel.
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
#: The trained models of a checkout.
_TRAINED = Path(__file__).parents[2] / "benchmarks" / "trained_circuits"
#: The programs: the share of earlier tokens that are "x"; the tokens reversed; the count of each
#: token; the tokens sorted; whether "x" or "y" occurs; whether "x" is more than half (BOS counts).
PROGRAMS = ("frac_prevs", "reverse", "hist", "sort_unique", "either", "most")


@dataclass(frozen=True, eq=False, repr=False)
class KnownCircuit:
    """A model that computes a program, and its known circuit.

    Attributes:
        bridge: the model, which is bidirectional.
        clean, corrupted: pairs of prompts, ``[batch, pos]``.
        edges: the known circuit, by the names of `bridge.circuits.Graph`: the edges on a path to
            the output that carry information about the tokens.
        outputs: the meaning of each logit.
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
        n_edges = Graph.of(self.bridge).n_edges
        return (
            f"{type(self).__name__}({self.bridge.cfg.model_name}: {len(self.edges)} of {n_edges}"
            f" edges, {len(self.clean)} pairs)"
        )

    def metric(self) -> Metric:
        """Return a metric: how far all logits together have moved from the corrupted prompts' (0)
        to the clean prompts' (1).
        """
        with torch.no_grad():
            start = self.bridge(self.corrupted)
            change = self.bridge(self.clean) - start
        direction = change / change.square().sum()

        def metric(logits: Tensor) -> Tensor:
            return ((logits - start) * direction).sum()

        return metric

    def edge_auc(self, scores: EdgeScores) -> float:
        """Return how well scores separate the known circuit's edges from other edges: the area
        under the ROC curve.

        1: every edge of the circuit has a larger absolute score than every other edge; 0.5: chance.

        Args:
            scores: scores of this model's edges.
        """
        return scores.auroc(self.circuit)

    @property
    def circuit(self) -> Circuit:
        """Return the known circuit, on the model's graph."""
        return Circuit.of_edges(Graph.of(self.bridge), [*self.edges])

    def node_auc(self, scores: EdgeScores) -> float:
        """Return the area under the ROC curve for nodes: a node's score is that of its largest
        outgoing edge.

        Args:
            scores: scores of this model's edges.
        """
        return area_under_rates(scores.values.abs().amax(0), self.circuit.mask.any(0))


@dataclass(frozen=True, eq=False, repr=False)
class Compiled(KnownCircuit):
    """A model whose weights were compiled from a program, not trained, and its known circuit.

    The model has no norms; each coordinate of its stream is a value of a variable.

    Attributes:
        labels: the meaning of each coordinate of the stream.
        streams: the compiler's own stream after the last block, for the first clean prompts.
    """

    labels: tuple[str, ...]
    streams: Float[Tensor, "rows pos d_model"]


def compiled(program: str) -> Compiled:
    """Return a model that was compiled from a program, with its known circuit.

    Args:
        program: ``"frac_prevs"``, the share of the tokens so far that are "x"; ``"reverse"``, the
            tokens reversed; ``"hist"``, the count of each token; ``"sort_unique"``, the tokens
            sorted; ``"either"``, whether "x" or "y" occurs (both or none, in its prompts);
            ``"most"``, whether more than half of the tokens are "x".

    Raises:
        ValueError: an unknown program.

    Example:
        >>> from bridge.tasks import compiled
        >>> task = compiled("reverse")
        >>> words = {number: word for word, number in task.vocabulary.items()}
        >>> said = [
        ...     task.outputs[i].split(":")[1] for i in task.bridge(task.clean[:1])[0, 1:].argmax(-1)
        ... ]
        >>> said == [words[int(i)] for i in task.clean[0, 1:]][::-1]
        True
    """
    header, tensors = _read(_FOLDER / f"{program}.safetensors", program)
    facts = {"act_fn": "relu", "normalization_type": None, **json.loads(header["facts"])}
    bridge = _model(program, facts)
    prompts = tensors.pop("prompts")
    streams = tensors.pop("streams")
    with torch.no_grad():
        for name, getter in bridge.weights.getters.items():
            stored = getter()
            if name in tensors:
                stored.copy_(tensors[name])
            else:
                stored.zero_()
    clean, corrupted = prompts.chunk(2)
    return Compiled(
        bridge,
        clean,
        corrupted,
        frozenset(json.loads(header["edges"])),
        tuple(json.loads(header["outputs"])),
        json.loads(header["vocabulary"]),
        tuple(json.loads(header["labels"])),
        streams,
    )


def trained(program: str, folder: str | Path | None = None) -> KnownCircuit:
    """Return a model with norms and superposition that was trained to compute a program by a known
    circuit.

    The model has four layers of width 64, with four heads and an MLP in each. Strict interchange
    training (Gupta et al. 2024, "InterpBench") assigned the components of the compiled model to
    some of its components, and pass-through information to others. With edges of the circuit
    replaced the model answers as the compiled one does, whatever its other edges carry. These other
    edges carry information that the program does not use: which tokens, token pairs and triples
    occur at which positions.

    Args:
        program: one of the programs of `compiled`.
        folder: the folder with the models' files; None: the installed checkout's.

    Raises:
        ValueError: an unknown program.
        FileNotFoundError: the file does not exist; the wheel does not contain these files.

    Example:
        >>> from bridge.circuits import edge_attribution
        >>> from bridge.tasks import trained
        >>> task = trained("hist")
        >>> scores = edge_attribution(task.bridge, task.clean, task.corrupted, task.metric())
        >>> len(task.edges), scores.auroc(task.circuit) > 0.99
        (7, True)
    """
    file = Path(_TRAINED if folder is None else folder) / f"{program}.safetensors"
    if program in PROGRAMS and not file.is_file():
        raise FileNotFoundError(
            f"there is no {file}: trained models are in the source distribution of"
            " transformer-bridge, in benchmarks/trained_circuits. Unpack it, and pass that folder"
            " as folder="
        )
    header, tensors = _read(file, program)
    task = compiled(program)
    bridge = _model(program, json.loads(header["facts"]))
    weights = {name: tensor.float() for name, tensor in tensors.items()}
    bridge.original_model.load_state_dict(weights)
    edges = frozenset(json.loads(header["edges"]))
    return KnownCircuit(bridge, task.clean, task.corrupted, edges, task.outputs, task.vocabulary)


def _read(file: Path, program: str) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Return the metadata and tensors of a file.

    Raises:
        ValueError: there is no such program.
    """
    if program not in PROGRAMS:
        raise ValueError(f"there is no program {program!r}; there are {', '.join(PROGRAMS)}")
    with safe_open(file, framework="pt") as content:
        return content.metadata(), {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118


def _model(program: str, facts: dict[str, Any]) -> TransformerBridge:
    config = NativeConfig(
        **facts, attention_dir="bidirectional", model_name=program, default_prepend_bos=False
    )
    return TransformerBridge.boot_native(config).eval()
