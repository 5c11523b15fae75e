"""thought-anchors' pure functions give the numbers of `suppression`, `PatternStatistics`,
`vertical_scores` and `kurtosis`: `make programs`.

The functions are taken out of their files, which import packages and models that they do not need.
"""

import ast
import os
import pathlib

import numpy as np
import pytest
import torch
from scipy import stats

from bridge.analysis.patterns import PatternStatistics, kurtosis, vertical_scores
from bridge.patching import suppression
from tests.patching.test_sentences import CHAT, bridge  # noqa: F401 - a fixture

pytestmark = pytest.mark.clients
FOLDER = os.environ.get("PROGRAMS")
FILES = {
    "attn_funcs": ("_compute_averaged_matrix", "get_vertical_scores"),
    "receiver_head_funcs": ("get_3d_ar_kurtosis",),
    "attn_supp_funcs": ("calculate_kl_divergence_sparse",),
}


@pytest.fixture(scope="module")
def theirs():
    """Their functions, by name."""
    if not FOLDER:
        pytest.skip("PROGRAMS names a folder with a checkout")
    inside = pathlib.Path(FOLDER, "thought-anchors/whitebox-analyses/attention_analysis")
    known = {"np": np, "stats": stats, "torch": torch, "F": torch.nn.functional, "Tuple": tuple}
    import typing

    known |= {name: getattr(typing, name) for name in ("List", "Dict", "Optional", "Union")}
    for file, names in FILES.items():
        tree = ast.parse((inside / f"{file}.py").read_text(encoding="utf-8"))
        tree.body = [
            node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in names
        ]
        exec(compile(tree, file, "exec"), known)
    return known


@torch.no_grad()
def test_matrices_scores_and_kurtosis(theirs, bridge):  # noqa: F811
    spans = bridge.spans(CHAT).sentences()
    name = "blocks.{}.attn.hook_pattern".format
    statistics = PatternStatistics(groups=spans)
    bridge.run_with_callback(CHAT, statistics, lambda x: x.endswith("hook_pattern"), max_bytes=2000)
    _, cache = bridge.run_with_cache(CHAT)
    bounds = [(span.start, span.end) for span in spans]
    for nearest, ranks in ((1, False), (1, True), (2, False)):
        ours, scores = [], []
        for layer in range(4):
            # Behind a row and a column, without which they leave out the last token.
            patterns = np.pad(cache[name(layer)][0].numpy(), ((0, 0), (0, 1), (0, 1)))
            matrices = [theirs["_compute_averaged_matrix"](x, bounds) for x in patterns]
            between = statistics.between[name(layer)][0]
            np.testing.assert_allclose(between.numpy(), matrices, rtol=0, atol=1e-6)
            ours.append(vertical_scores(between, nearest, ranks=ranks))
            with np.errstate(invalid="ignore", divide="ignore"):
                each = [theirs["get_vertical_scores"](x, nearest, ranks) for x in matrices]
            np.testing.assert_allclose(ours[-1].numpy(), each, rtol=0, atol=1e-6)
            scores.append(each)
        expected = theirs["get_3d_ar_kurtosis"](np.array(scores))
        np.testing.assert_allclose(
            kurtosis(torch.stack(ours)).numpy(), expected, rtol=1e-5, atol=1e-5
        )


@torch.no_grad()
def test_suppression(theirs, bridge):  # noqa: F811
    spans = bridge.spans(CHAT).sentences()
    before = bridge(CHAT)[0].numpy()
    words = np.arange(before.shape[-1])
    # Without logarithms: theirs, in float32, have no digit where a divergence is 1e-7.
    values = suppression(bridge, spans, log=False)
    for column, span in enumerate(spans):

        def mask(scores, hook, span=span):  # as theirs: for every query
            scores[..., span.start : span.end] = torch.finfo(scores.dtype).min
            return scores

        hooks = [(lambda x: x.endswith("attn.hook_attn_scores"), mask)]
        after = bridge.run_with_hooks(CHAT, fwd_hooks=hooks)[0].numpy()
        for row in range(column + 1, len(spans)):
            pairs = zip(before, after, strict=True)
            of_row = [*pairs][spans[row].start : spans[row].end]
            each = [
                theirs["calculate_kl_divergence_sparse"]((words, p), (words, q), temperature=0.6)
                for p, q in of_row
            ]
            assert abs(float(values[row, column]) - np.mean(each)) < 1e-5
