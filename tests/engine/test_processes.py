"""Tensor parallelism: two processes share a model, and each request is what it is alone."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from bridge import TransformerBridge
from bridge.engine import Engine
from tests.engine.test_engine import (  # noqa: F401
    LAYERS,
    OPTIONS,
    assert_alone,
    edits_of,
    named,
    prompts_of,
    pytestmark,
)

#: What is whole in each process; of the others each has some columns.
WHOLE = ["hook_resid_pre", "hook_resid_mid", "hook_resid_post", "hook_attn_out", "hook_mlp_out"]


@pytest.mark.slow
def test_two_processes(
    folder: Path, bridge: TransformerBridge, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stream and what is added to it are offered; queries, heads and hidden units are refused
    by name.
    """
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    engine = Engine(folder, named(), rows=8, rank=4, tensor_parallel_size=2, **OPTIONS)
    try:
        wanted = [f"blocks.{layer}.{name}" for layer in range(LAYERS) for name in WHOLE]
        assert engine.offered() == [name for name in engine.bridge.hook_dict if name in wanted]
        assert set(engine.refused) == set(named()) - set(wanted)
        assert (
            "several processes share the columns of layers.0.mlp.down_proj"
            in engine.refused["blocks.0.mlp.hook_post"]
        )
        for seed in range(4):
            drawn = random.Random(seed)
            prompts = prompts_of(drawn, drawn.randint(2, 20))
            each = [edits_of(drawn, wanted) for _ in prompts]
            assert_alone(engine, bridge, prompts, each, 6, drawn.sample(wanted, seed))
    finally:
        engine.close()
