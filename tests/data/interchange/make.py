"""Interchange interventions by pyvene and by TransformerLens: what `interchange.safetensors` holds.

Run with pyvene 0.1.8 and TransformerLens 4.3.0: ``python tests/data/interchange/make.py``. The
models are the tiny ones of `tests/data/reference`, as each of the two wraps them.
"""

from pathlib import Path

import pyvene
import torch
from safetensors.torch import save_file
from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.patching import (
    get_act_patch_attn_head_out_all_pos,
    get_act_patch_mlp_out,
    get_act_patch_resid_pre,
)
from transformer_lens.tools.analysis.interchange import (
    SubspaceInterchange,
    collect_activations,
    run_with_intervention,
)
from transformers import AutoModelForCausalLM

HERE = Path(__file__).parent
REFERENCE = HERE.parent / "reference"
POS, RANK = 3, 5
BASE = torch.tensor([[5, 17, 2, 30, 11, 44], [8, 3, 50, 12, 7, 21]])
SOURCE = torch.tensor([[9, 1, 33, 4, 20, 13], [2, 60, 41, 10, 15, 6]])
#: pyvene's names of places, and ours.
PLACES = {"block_output": "blocks.0.hook_resid_post", "mlp_output": "blocks.0.hook_mlp_out"}


def by_pyvene(
    model: torch.nn.Module, component: str, intervention: torch.nn.Module, **where: object
) -> torch.Tensor:
    config = pyvene.IntervenableConfig(
        [{"layer": 0, "component": component, "intervention": intervention}]
    )
    wrapped = pyvene.IntervenableModel(config, model=model)
    _, found = wrapped(
        {"input_ids": BASE}, [{"input_ids": SOURCE}], {"sources->base": POS}, **where
    )
    return found.logits


@torch.no_grad()
def main() -> None:
    kept = {"base": BASE, "source": SOURCE}
    for family in ("gpt2", "llama"):
        model = AutoModelForCausalLM.from_pretrained(REFERENCE / family).eval()
        torch.manual_seed(0)
        d = model.config.hidden_size
        for component, point in PLACES.items():
            key = f"{family}/pyvene/{point}"
            kept[f"{key}/all"] = by_pyvene(
                model, component, pyvene.VanillaIntervention(embed_dim=d)
            )
            rotated = pyvene.RotatedSpaceIntervention(embed_dim=d)
            some = {"subspaces": [[list(range(RANK))] * len(BASE)]}
            kept[f"{key}/rotated"] = by_pyvene(model, component, rotated, **some)
            kept[f"{key}/rotation"] = rotated.rotate_layer.weight
            low = pyvene.LowRankRotatedSpaceIntervention(embed_dim=d, low_rank_dimension=RANK)
            kept[f"{key}/low_rank"] = by_pyvene(model, component, low)
            kept[f"{key}/columns"] = low.rotate_layer.weight
        theirs = TransformerBridge.boot_transformers(
            str(REFERENCE / family),
            hf_model=AutoModelForCausalLM.from_pretrained(REFERENCE / family).eval(),
            tokenizer=None,
            device="cpu",
        ).eval()
        columns = torch.linalg.qr(torch.randn(d, RANK)).Q
        positions = torch.full((len(BASE),), POS)
        for point in PLACES.values():
            given = theirs, point
            read = collect_activations(*given, SOURCE, theirs, positions=positions)
            change = SubspaceInterchange(columns)
            found = run_with_intervention(*given, change, BASE, read, theirs, positions=positions)
            kept[f"{family}/transformer_lens/{point}"] = found
        kept[f"{family}/transformer_lens/columns"] = columns
        _, cache = theirs.run_with_cache(SOURCE[:1])
        metric = lambda logits: logits[0, -1, 7] - logits[0, -1, 9]
        patched = {
            "resid_pre": get_act_patch_resid_pre,
            "mlp_out": get_act_patch_mlp_out,
            "head_out": get_act_patch_attn_head_out_all_pos,
        }
        for name, patch in patched.items():
            kept[f"{family}/patching/{name}"] = patch(theirs, BASE[:1], cache, metric)
    save_file(
        {name: value.detach().contiguous().clone() for name, value in kept.items()},
        HERE / "interchange.safetensors",
    )
    print({name: list(value.shape) for name, value in kept.items()})


if __name__ == "__main__":
    main()
