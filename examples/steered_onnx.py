"""A steered model served by ONNX Runtime: a vector found with the library, its strength an input of
the served model.

pip install "transformer-bridge[onnx]" python examples/steered_onnx.py --figures
# what steering does, and what serving costs python examples/steered_onnx.py --strength 3 "Then Adam
and Victor met at the market. Later, Victor sold a pen to"
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import onnxruntime
import torch
from tokenizers import Tokenizer
from torch import Tensor

from bridge import TransformerBridge
from bridge.embedded import prompts

NAME = " Jane"
AT = "blocks.2.hook_resid_post"


def find_vector(bridge: TransformerBridge, n: int = 400) -> Tensor:
    """What is different at the last position, on average, where the right next word is the name."""
    ours, others = [], []
    for prompt in prompts("ioi", n):
        _, cache = bridge.run_with_cache(prompt.text, names_filter=AT)
        (ours if prompt.answer == NAME else others).append(cache[AT][0, -1])
    return torch.stack(ours).mean(0) - torch.stack(others).mean(0)


def save(folder: Path) -> Tensor:
    """Finds the vector, and saves the steered model and its tokenizer.

    Args:
        folder: where.

    Returns:
        The vector.
    """
    bridge = TransformerBridge.boot_embedded().eval()
    with torch.no_grad():
        vector = find_vector(bridge)

    def add(activation: Tensor, hook: object, strength: Tensor) -> Tensor:
        return activation + strength * vector  # the vector is baked into what is served

    bridge.export(
        "When Mary and John went to the store",
        "onnx",
        capture=[AT],
        interventions=[(AT, add)],
        inputs={"strength": 1.0},
        path=folder,
    )
    assert bridge.tokenizer is not None
    bridge.tokenizer.save_pretrained(folder)
    return vector


class Served:
    """The saved model: text in, text out, by ONNX Runtime and the tokenizer alone.

    Args:
        folder: what `save` wrote.
    """

    def __init__(self, folder: Path) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self.session = onnxruntime.InferenceSession(folder / "model.onnx", options)
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        said = json.loads(self.session.get_modelmeta().custom_metadata_map["transformer_bridge"])
        self.about = (
            f"{said['model']} by transformer-bridge {said['version']}, changed at"
            f" {said['interventions']}"
        )

    def run(self, ids: list[int], strength: float) -> np.ndarray:
        """The logits of the next token."""
        tokens = np.array([ids], dtype=np.int64)
        fed = {
            "input_ids": tokens,
            "attention_mask": np.ones_like(tokens),
            "strength": np.array(strength, dtype=np.float32),
        }
        logits: np.ndarray = self.session.run(["logits"], fed)[0]
        return logits[0, -1]

    def ids(self, text: str) -> list[int]:
        """A text as the model was trained to read it."""
        found: list[int] = self.tokenizer.encode(text).ids
        return found

    def complete(self, text: str, strength: float, n: int = 6) -> str:
        """A text with its likeliest continuation.

        Args:
            text: the prompt.
            strength: of the steering.
            n: how many tokens more.
        """
        ids = self.ids(text)
        start = len(ids)
        for _ in range(n):
            ids.append(int(self.run(ids, strength).argmax()))
        return text + self.tokenizer.decode(ids[start:])


def figures(folder: Path, vector: Tensor) -> dict[str, float]:
    """What steering does to prompts that the vector was not made from, and what a run costs beside
    torch's.
    """
    served, found = Served(folder), {}
    bridge = TransformerBridge.boot_embedded().eval()
    held_out = [prompt for prompt in prompts("ioi", 600)[400:] if prompt.answer != NAME]
    name = bridge.to_single_token(NAME)
    for strength in (0, 1, 2, 3):
        chosen = [served.run(served.ids(prompt.text), strength).argmax() for prompt in held_out]
        found[f"share of{NAME} at strength {strength}"] = float(
            np.mean([token == name for token in chosen])
        )
    worst, times = 0.0, []
    with torch.no_grad():
        for prompt in held_out[:40]:
            ids = served.ids(prompt.text)
            tokens = torch.tensor([ids])
            with bridge.hooks([(AT, lambda activation, hook: activation + 2 * vector)]):
                wanted = bridge(tokens)[0, -1].numpy()
            worst = max(worst, float(np.abs(wanted - served.run(ids, 2.0)).max()))
            start = time.perf_counter()
            bridge.original_model(tokens)
            middle = time.perf_counter()
            served.run(ids, 2.0)
            times.append((time.perf_counter() - middle) / (middle - start))
    found["largest difference to hooks in torch"] = worst
    found["time of a run, of the plain model's in torch"] = statistics.median(times)
    found["size on disk, MB"] = (
        sum(file.stat().st_size for file in folder.glob("model.onnx*")) / 1e6
    )
    return found


def main() -> None:
    """Saves the model, and serves it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("text", nargs="*")
    parser.add_argument("--strength", type=float, default=2.0)
    parser.add_argument("--figures", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        vector = save(Path(folder))
        served = Served(Path(folder))
        print(served.about)
        for text in given.text:
            for strength in (0.0, given.strength):
                print(f"strength {strength}: {served.complete(text, strength)}")
        if given.figures:
            for what, value in figures(Path(folder), vector).items():
                print(f"{what:<48} {value:.3g}")


if __name__ == "__main__":
    main()
