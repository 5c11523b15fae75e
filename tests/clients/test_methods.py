"""Some rows of docs/methods.md, computed again."""

import pytest

from benchmarks.methods import by_hand, hooked, packages  # noqa: F401 - they declare rows
from benchmarks.methods.table import METHODS
from bridge.interventions import Scale

NAMED = {method.name: method for method in METHODS}
SOME = (
    "Logit lens",
    "Exact effects of edges",
    "Edge attribution patching (EAP)",
    "Patchscopes",
    "Tuned lens",
    "EAP: edges of a tiny model",
    "Interchange of activations",
    "Sparse autoencoder in the model: jumprelu",
    "Attribution graph: transcoders",
    "Linear probe: coefficients",
)


@pytest.mark.parametrize("name", SOME)
def test_a_row(name):
    assert NAMED[name].difference() <= 1e-5


def test_a_wrong_number_shows():
    """Change one activation of ours by a tenth of a per cent."""
    with hooked.ours().hooks(fwd_hooks=[("blocks.1.hook_mlp_out", Scale(1.001))]):
        for name in ("Logit lens", "Patchscopes", "Edge attribution patching (EAP)"):
            assert NAMED[name].difference() > 1e-5
