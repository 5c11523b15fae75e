"""Compiles programs into transformer weights: what `bridge/tasks/programs` holds.

Run with tracr-pypi 1.0.0 (a development tool alone): ``python benchmarks/compile_programs.py``.
Each file has the weights under HookedTransformer's names, the compiler's own stream for some
prompts, and the edges through which something goes that depends on the tokens, worked out from what
the compiled parts write and read.
"""

import itertools
import json
import random
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from tracr.compiler import compiling, lib
from tracr.rasp import rasp


def more(word: str, share: float) -> rasp.SOp:
    """Whether more than a share of the prompt, its BOS included, is this token."""
    found = rasp.numerical(
        rasp.Aggregate(
            rasp.Select(rasp.indices, rasp.indices, rasp.Comparison.TRUE),
            rasp.numerical(rasp.Map(lambda token: float(token == word), rasp.tokens)),
            default=0.0,
        )
    )
    return rasp.categorical(rasp.Map(lambda part: part > share, found))


def either() -> rasp.SOp:
    """Whether "x" or "y" is there: two ways to the answer, of which one is enough."""
    return rasp.categorical(
        rasp.SequenceMap(lambda x, y: x or y, more("x", 0.1), more("y", 0.1))
    ).named("either")


OUT = Path(__file__).parents[1] / "bridge" / "tasks" / "programs"
LENGTH = 5
PROGRAMS = {
    "frac_prevs": (lambda: lib.make_frac_prevs(rasp.tokens == "x"), ["w", "x", "y"]),
    "reverse": (lambda: lib.make_reverse(rasp.tokens), ["a", "b", "c", "d"]),
    "hist": (lambda: lib.make_hist(), ["a", "b", "c"]),
    "most": (lambda: more("x", 0.5).named("most"), ["v", "w", "x"]),
    "either": (either, ["v", "w", "x", "y"]),
    "sort_unique": (lambda: lib.make_sort_unique(rasp.tokens, rasp.tokens), [1, 2, 3, 4, 5]),
}
SMALL = 1e-6


def weights_of(params, config, output) -> dict[str, torch.Tensor]:
    d, heads, size = params["token_embed"]["embeddings"].shape[1], config.num_heads, config.key_size
    found = {
        "embed.W_E": params["token_embed"]["embeddings"],
        "pos_embed.W_pos": params["pos_embed"]["embeddings"],
        "unembed.W_U": np.eye(d)[:, output],
    }
    for layer in range(config.num_layers):
        at, part = f"transformer/layer_{layer}", f"blocks.{layer}"
        for letter, name in zip("QKV", ("query", "key", "value"), strict=True):
            one = params[f"{at}/attn/{name}"]
            found[f"{part}.attn.W_{letter}"] = one["w"].reshape(d, heads, size).transpose(1, 0, 2)
            found[f"{part}.attn.b_{letter}"] = one["b"].reshape(heads, size)
        out = params[f"{at}/attn/linear"]
        found[f"{part}.attn.W_O"], found[f"{part}.attn.b_O"] = (
            out["w"].reshape(heads, size, d),
            out["b"],
        )
        up, down = params[f"{at}/mlp/linear_1"], params[f"{at}/mlp/linear_2"]
        found |= {f"{part}.mlp.W_in": up["w"], f"{part}.mlp.b_in": up["b"]}
        found |= {f"{part}.mlp.W_out": down["w"], f"{part}.mlp.b_out": down["b"]}
    return {
        name: torch.tensor(np.array(value), dtype=torch.float32).contiguous()
        for name, value in found.items()
    }


def edges_of(w, config, varies, output) -> list[str]:
    """The edges through which something goes that depends on the tokens, on a way to the output.

    Args:
        w: the weights.
        config: the compiler's configuration.
        varies: which coordinates of the stream differ between prompts.
        output: the coordinates that are read in the end.
    """
    writes, reads = {"embed": w["embed.W_E"].abs().sum(0) > SMALL}, {}
    place = {"embed": -1.0, "logits": float(config.num_layers)}
    for layer in range(config.num_layers):
        for head in range(config.num_heads):
            name, part = f"L{layer}H{head}", f"blocks.{layer}.attn"
            q, k, v, o = (w[f"{part}.W_{letter}"][head] for letter in "QKVO")
            for letter, matrix in (("q", q @ k.T), ("k", k @ q.T), ("v", v @ o)):
                reads[f"{name}.{letter}"] = matrix.abs().sum(1) > SMALL
            writes[name] = (v @ o).abs().sum(0) > SMALL
            place[name] = float(layer)
        name, part = f"L{layer}MLP", f"blocks.{layer}.mlp"
        used = w[f"{part}.W_out"].abs().sum(1) > SMALL
        reads[name] = w[f"{part}.W_in"][:, used].abs().sum(1) > SMALL
        writes[name] = w[f"{part}.W_out"].abs().sum(0) > SMALL
        place[name] = layer + 0.5
    reads["logits"] = torch.zeros_like(varies)
    reads["logits"][output] = True
    edges = [
        (sender, receiver)
        for sender, receiver in itertools.product(writes, reads)
        if place[sender] < place[receiver.split(".")[0]]
        and bool((writes[sender] & reads[receiver] & varies).any())
    ]
    wanted = {"logits"}
    for sender in sorted(writes, key=lambda name: -place[name]):
        if any(receiver.split(".")[0] in wanted for one, receiver in edges if one == sender):
            wanted.add(sender)
    return sorted(
        f"{sender}->{receiver}" for sender, receiver in edges if receiver.split(".")[0] in wanted
    )


def prompt(name: str, words: list, rng: random.Random, clean: bool) -> list:
    """A prompt of a program, of those that are clean or corrupted."""
    if name == "either":  # both ways are open, widely, or none
        return rng.sample("xxyy" if clean else rng.choices("vw", k=4), 4)
    if name == "most":  # far from the half, on both sides
        return list("xxxx") if clean else rng.choices("vw", k=4)
    return rng.sample(words, 4) if name == "sort_unique" else rng.choices(words, k=4)


def main() -> None:
    OUT.mkdir(exist_ok=True)
    for name, (make, words) in PROGRAMS.items():
        program = make()
        model = compiling.compile_rasp_to_model(
            program, vocab=set(words), max_seq_len=LENGTH, compiler_bos="BOS"
        )
        config, labels = model.model_config, [str(label) for label in model.residual_labels]
        assert not config.layer_norm and not config.causal
        output = [i for i, label in enumerate(labels) if label.split(":")[0] == program.label]
        w = weights_of(model.params, config, output)
        rng = random.Random(0)
        rows = [prompt(name, words, rng, at < 32) for at in range(64)]
        ids = [[model.input_encoder.encoding_map[token] for token in ["BOS", *row]] for row in rows]
        streams = torch.tensor(
            np.concatenate([model.apply(["BOS", *row]).residuals[-1] for row in rows])
        )
        varies = (streams - streams[:1]).abs().amax((0, 1)) > 1e-4
        edges = edges_of(w, config, varies, output)
        facts = {
            "n_layers": config.num_layers,
            "n_heads": config.num_heads,
            "d_head": config.key_size,
            "d_mlp": config.mlp_hidden_size,
            "d_model": len(labels),
            "n_ctx": LENGTH + 1,
            "d_vocab": w["embed.W_E"].shape[0],
            "d_vocab_out": len(output),
        }
        header = {
            "facts": json.dumps(facts),
            "edges": json.dumps(edges),
            "labels": json.dumps(labels),
            "vocabulary": json.dumps(
                {str(key): int(i) for key, i in model.input_encoder.encoding_map.items()}
            ),
            "outputs": json.dumps([labels[i] for i in output]),
            "source": (
                "compiled by tracr-pypi 1.0.0 from its own library of programs (DeepMind; Apache"
                " License 2.0)"
            ),
        }
        kept = {**w, "prompts": torch.tensor(ids), "streams": streams[:4]}
        save_file(
            {key: value.contiguous() for key, value in kept.items()},
            OUT / f"{name}.safetensors",
            header,
        )
        print(name, facts, edges)


if __name__ == "__main__":
    main()
