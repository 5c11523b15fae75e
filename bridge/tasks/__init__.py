"""Tasks with known answers: pairs of prompts of one length, for patching and for circuits."""

from bridge.tasks.compiled import Compiled, compiled
from bridge.tasks.embedded import embedded_pairs
from bridge.tasks.greater_than import greater_than
from bridge.tasks.induction import induction
from bridge.tasks.ioi import ioi
from bridge.tasks.pairs import NumberPairs, Pairs

__all__ = ["Compiled", "NumberPairs", "Pairs", "compiled", "embedded_pairs", "greater_than", "induction", "ioi"]
