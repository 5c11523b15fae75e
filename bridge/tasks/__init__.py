"""Tasks with known answers: pairs of prompts of equal length, for patching and for circuits."""

from bridge.tasks.compiled import Compiled, KnownCircuit, compiled, trained
from bridge.tasks.tasks import NumberPairs, Pairs, embedded_pairs, greater_than, induction, ioi

__all__ = [
    "Compiled",
    "KnownCircuit",
    "NumberPairs",
    "Pairs",
    "compiled",
    "embedded_pairs",
    "greater_than",
    "induction",
    "ioi",
    "trained",
]
