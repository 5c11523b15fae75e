"""Wrong types and shapes for every parameter of what stands on runs: analysis, patching, lenses, circuits, traces, ...

The parameters are those of the signatures; a right call is written down for each function. Every wrong value gives a
result, or an error of ours.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache, partial
from typing import Any

import pytest
import torch

from bridge import FactoredMatrix, TransformerBridge, act_name, patching
from bridge.analysis import head_detector, logit_lens
from bridge.analysis.svd import SVDInterpreter
from bridge.circuits import (
    Circuit,
    EdgeScores,
    Graph,
    edge_attribution,
    edge_effects,
    faithfulness_curve,
    kl_divergence,
    logit_difference,
    mean_scores,
    path_patching,
)
from bridge.lens import TunedLens, lens
from bridge.loading import boot
from bridge.tasks import embedded_pairs, greater_than, induction, ioi
from tests.conftest import torch_hooks
from tests.robustness.test_fuzz import SIZES, TOKENS, WRONG, complaint, described
