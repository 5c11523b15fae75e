"""TransformerLens 4.3's Jacobian lens, run where `transformer_lens` is theirs: what it computes for
the models in a folder, written to ``theirs.pt`` beside each. Called by `test_jacobian_lens.py`.
"""

import json
import sys
from pathlib import Path

import torch
from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.tools.analysis import JacobianLens
from transformers import AutoModelForCausalLM, AutoTokenizer


def computed(model, plan):
    """Compute everything that the test compares, for one model."""
    texts, prompt = plan["texts"], torch.tensor([plan["prompt"]])
    # A text is the number of its tokens' list.
    model.to_tokens = lambda text: torch.tensor([texts[int(text)]])
    numbers = [str(index) for index in range(len(texts))]
    lens = JacobianLens.fit(
        model,
        numbers,
        corpus="tokens",
        skip_first_positions=plan["skip_first"],
        max_seq_len=plan["max_tokens"],
        show_progress=False,
    )
    lens.save(plan["file"], dtype=torch.float32)
    half = len(numbers) // 2
    options = {"corpus": "tokens", "skip_first_positions": plan["skip_first"]}
    parts = [
        JacobianLens.fit(model, part, show_progress=False, **options)
        for part in (numbers[:half], numbers[half:])
    ]
    layer, (a, b) = plan["layer"], plan["pair"]
    layers = range(layer, model.cfg.n_layers - 1)
    _, cache = model.run_with_cache(prompt)
    clean = {name: cache[name] for name in [f"blocks.{i}.hook_out" for i in layers]}
    streams = clean[f"blocks.{layer}.hook_out"][0]
    readout = lens.readout(model, prompt, return_full_logits=True, top_k=1)
    hooks = {
        "swap": lens.swap_hooks(model, a, b, layers, alpha=1.5),
        "ablation": lens.ablation_hooks(model, [a, b], layers, positions=[-1]),
        "clamp": lens.swap_hooks(model, a, b, layers, clamp_to=clean),
    }
    edited = {}
    for name, of_edit in hooks.items():
        with torch.no_grad(), model.hooks(fwd_hooks=of_edit):
            edited[name] = model(prompt)
    parts_of = [lens.decompose(model, stream, layer, k=plan["k"]) for stream in streams]
    occupancies = [
        lens.occupancy(model, stream, layer, max_atoms=8, num_control_dictionaries=4)
        for stream in streams[-3:]
    ]
    return {
        "maps": lens.jacobians,
        "merged": JacobianLens.merge(parts).jacobians,
        "readout": readout.lens_logits,
        "vectors": lens.lens_vectors(model, [a, b], layer),
        "edited": edited,
        "decompositions": [
            (
                part.selected_support,
                part.support,
                part.coordinates,
                part.reconstruction,
                part.j_space_component,
                part.non_j_space_component,
            )
            for part in parts_of
        ],
        "occupancies": [
            (
                each.occupancy,
                each.support,
                each.marginal_captured_variance,
                each.control_captured_variance,
            )
            for each in occupancies
        ],
    }


def loaded(model, file, prompt):
    """Read with a lens from a file of ours."""
    lens = JacobianLens.load(file)
    lens.metadata["model_name"] = model.cfg.model_name
    lens.validate_model(model)
    return lens.readout(model, prompt, return_full_logits=True, top_k=1).lens_logits


def main(folder, tokenizer):
    tokenizer = AutoTokenizer.from_pretrained(tokenizer)
    for plan_file in sorted(Path(folder).glob("*/plan.json")):
        plan = json.loads(plan_file.read_text("utf-8"))
        hf = AutoModelForCausalLM.from_pretrained(plan["model"], dtype=torch.float32).eval()
        model = TransformerBridge.boot_transformers(
            plan["model"], hf_model=hf, tokenizer=tokenizer, device="cpu"
        )
        if "ours" in plan:
            result = loaded(model, plan["ours"], torch.tensor([plan["prompt"]]))
        else:
            result = computed(model, plan)
        torch.save(result, plan_file.parent / "theirs.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
