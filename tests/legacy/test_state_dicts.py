"""Weights by HookedTransformer's names, from `loading_from_pretrained`."""

import logging

import pytest
import torch
from transformers import GPT2LMHeadModel

from bridge.legacy import loading
from tests.reference import DATA


def test_weights_as_they_are_stored(model):
    hf = GPT2LMHeadModel.from_pretrained(DATA / "gpt2")
    found = loading.get_pretrained_state_dict(str(DATA / "gpt2"), model.cfg)
    given = loading.get_pretrained_state_dict(str(DATA / "gpt2"), model.cfg, hf_model=hf)
    assert (
        found.keys()
        == given.keys()
        == model.tl_parameters().keys()
        | {
            f"{norm}.{part}"
            for norm in (
                "ln_final",
                *(f"blocks.{i}.ln{n}" for i in range(model.cfg.n_layers) for n in (1, 2)),
            )
            for part in ("w", "b")
        }
    )
    assert all(torch.equal(found[name], given[name]) for name in found)
    assert torch.equal(found["embed.W_E"], hf.transformer.wte.weight)
    assert torch.equal(found["blocks.1.mlp.W_in"], hf.transformer.h[1].mlp.c_fc.weight)
    assert not any(value.requires_grad for value in found.values())
    half = loading.get_pretrained_state_dict(str(DATA / "gpt2"), dtype=torch.bfloat16)
    assert {value.dtype for value in half.values()} == {torch.bfloat16}


@pytest.mark.parametrize("names", ["tl_parameters", "state_dict"])
def test_what_is_missing_is_filled_in(model, names, caplog):
    own = getattr(model, names)()
    left_out = [name for name in own if "W_in" in name or "c_fc.weight" in name]
    assert left_out
    partial = {name: torch.zeros_like(value) for name, value in own.items() if name not in left_out}
    with caplog.at_level(logging.WARNING):
        filled = loading.fill_missing_keys(model, partial)
    assert filled is partial
    assert filled.keys() == own.keys()
    assert all(torch.equal(filled[name], own[name]) for name in left_out)
    assert all(bool((filled[name] == 0).all()) for name in own if name not in left_out)
    assert len(caplog.records) == sum("W_" in name for name in left_out)
