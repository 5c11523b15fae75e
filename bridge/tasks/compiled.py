"""Programs that were compiled into weights: models whose circuits are known.

Lindner et al. 2023, "Tracr: Compiled Transformers as a Laboratory for Interpretability". The script
``benchmarks/compile_programs.py`` makes the files in `programs`; nothing of the compiler is needed here.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

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


@dataclass(frozen=True, eq=False)
class Compiled:
    """A model that computes a program, by weights that were worked out and not trained, and its known circuit.

    Attributes:
        bridge: the model: bidirectional, without norms; each coordinate of its stream is a value of a variable.
        clean, corrupted: pairs of prompts, ``[batch, pos]``.
        edges: the known circuit: the edges through which something goes that depends on the tokens, on a way to the
            output. By the names of `bridge.circuits.Graph`.
        labels: what each coordinate of the stream is.
        outputs: what each of the logits is.
        vocabulary: the tokens' ids.
        streams: the compiler's own stream after the last block, for the first clean prompts.
    """

    bridge: TransformerBridge
    clean: Int[Tensor, "batch pos"]
    corrupted: Int[Tensor, "batch pos"]
    edges: frozenset[str]
    labels: tuple[str, ...]
    outputs: tuple[str, ...]
    vocabulary: dict[str, int]
    streams: Float[Tensor, "rows pos d_model"]

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
        graph = Graph.of(self.bridge)
        mask = torch.zeros_like(graph.exists)
        for edge in self.edges:
            mask[graph.edge(edge)] = True
        return Circuit(graph, mask)

    def node_auc(self, scores: EdgeScores) -> float:
        """The same of the nodes: a node's score is that of its largest edge out.

        Args:
            scores: of this model's edges.
        """
        return area_under_rates(scores.values.abs().amax(0), self.circuit.mask.any(0))


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
    if program not in PROGRAMS:
        raise ValueError(f"there is no program {program!r}; there are {', '.join(PROGRAMS)}")
    with safe_open(_FOLDER / f"{program}.safetensors", framework="pt") as file:
        header = file.metadata()
        found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no dictionary
    config = NativeConfig(
        **json.loads(header["facts"]), act_fn="relu", normalization_type=None, attention_dir="bidirectional",
        model_name=program, default_prepend_bos=False,
    )  # fmt: skip
    bridge = TransformerBridge.boot_native(config).eval()
    prompts, streams = found.pop("prompts"), found.pop("streams")
    with torch.no_grad():
        for name, getter in bridge.weights.getters.items():
            stored = getter()
            stored.copy_(found[name]) if name in found else stored.zero_()
    return Compiled(
        bridge, prompts[: len(prompts) // 2], prompts[len(prompts) // 2 :], frozenset(json.loads(header["edges"])),
        tuple(json.loads(header["labels"])), tuple(json.loads(header["outputs"])), json.loads(header["vocabulary"]),
        streams,
    )  # fmt: skip
