"""A linear probe with scikit-learn: from which layer on does a token's residual stream say which
word came before it?

pip install scikit-learn "transformer-bridge[harvest]"
python examples/linear_probe.py
"""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter

import numpy as np
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from bridge.embedded import prompts
from bridge.harvest import Activations, harvest

POINTS = ["hook_embed", "blocks.0.hook_resid_post", "blocks.3.hook_resid_post"]


def main(documents: int) -> dict[str, float]:
    """Harvests, fits a probe at each point, and returns its accuracy on other documents.

    Args:
        documents: how many of each kind are harvested.
    """
    texts = [prompt.text for kind in ("fact", "ioi") for prompt in prompts(kind, documents)]
    with tempfile.TemporaryDirectory() as folder:
        print(
            harvest("embedded", texts, hook_points=POINTS, out=folder, context_size=32, pack=False)
        )
        rows = Activations(folder)[:]
    token, position, document = (rows[name].numpy() for name in ("token", "position", "document"))
    # Rows of one document stand one behind the other: the row before is the word before.
    usable = np.flatnonzero(position > 0)
    before = token[usable - 1]
    common = [word for word, _ in Counter(before.tolist()).most_common(10)]
    chosen = usable[np.isin(before, common)]
    labels = token[chosen - 1]
    train = document[chosen] % 5 > 0
    most = Counter(labels[train].tolist()).most_common(1)[0][0]
    found = {"always the most common word": float((labels[~train] == most).mean())}
    for point in POINTS:
        x = rows[point].float().numpy()[chosen]
        probe = make_pipeline(StandardScaler(), LogisticRegression(max_iter=300))
        probe.fit(x[train], labels[train])
        found[point] = float(probe.score(x[~train], labels[~train]))
    for name, accuracy in found.items():
        print(f"{name:<28} {accuracy:.3f}")
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=int, default=150)
    main(parser.parse_args().documents)
