"""What all tests share. Importing our packages under jaxtyping's hook checks every annotated shape
in every test.
"""

import gc
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMER_BRIDGE_CACHE"] = ""  # every test infers for itself

from tests.shapes import Checks, install

install([] if os.environ.get("UNCHECKED") else ["adapters", "bridge", "weight_processing"])

import pytest
import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)
from transformers.generation.continuous_batching import continuous_api

from adapters import registry
from bridge import TransformerBridge

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
torch.set_num_threads(1)
# transformers asks for a collection after each batch that it generates: half a second each, with
# all that tests hold.
continuous_api.gc = SimpleNamespace(collect=lambda: 0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Minutes of compiling begin at once: workers start at even distances, and so stand these."""
    compiling = [
        item for item in items if item.nodeid.startswith("tests/programs/test_compiled.py")
    ]
    others = [item for item in items if item not in compiling]
    for place, item in enumerate(compiling):
        others.insert(place * len(items) // len(compiling), item)
    items[:] = others


def pytest_collection_finish() -> None:
    """What is imported by now stays: collections of garbage, which memory tests ask for, need not
    go through it.
    """
    gc.collect()
    gc.freeze()


def tiny(
    name: str, implementation: str = "sdpa", dtype: torch.dtype = torch.float32
) -> torch.nn.Module:
    """A tiny model with random weights, norms and biases included, in evaluation mode."""
    cls, config = {
        "gpt2": (
            GPT2LMHeadModel,
            GPT2Config(n_embd=32, n_layer=3, n_head=4, vocab_size=61, n_positions=40),
        ),
        "llama": (
            LlamaForCausalLM,
            LlamaConfig(
                hidden_size=32,
                num_hidden_layers=3,
                num_attention_heads=4,
                num_key_value_heads=2,
                intermediate_size=48,
                vocab_size=61,
                max_position_embeddings=40,
            ),
        ),
        "gpt_neox": (
            GPTNeoXForCausalLM,
            GPTNeoXConfig(
                hidden_size=32,
                num_hidden_layers=3,
                num_attention_heads=4,
                intermediate_size=48,
                vocab_size=61,
                max_position_embeddings=40,
            ),
        ),
    }[name]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = cls._from_config(config, attn_implementation=implementation, dtype=dtype)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


@pytest.fixture(autouse=True)
def _types_as_marked(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test marked `unchecked` runs without these checks: to see our errors for wrong types, or to
    time.
    """
    Checks.on = request.node.get_closest_marker("unchecked") is None
    Checks.test += 1
    yield
    Checks.on = True


FAMILIES = ["gpt2", "llama", "gpt_neox"]


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def hf(family: str) -> torch.nn.Module:
    return tiny(family)


@pytest.fixture
def bridge(hf: torch.nn.Module) -> TransformerBridge:
    return TransformerBridge(hf)


@pytest.fixture
def tokens() -> torch.Tensor:
    return torch.randint(0, 61, (2, 9), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="session")
def embedded() -> TransformerBridge:
    return TransformerBridge.boot_embedded().eval()


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch):
    return AutoModelForCausalLM


def torch_hooks(model: torch.nn.Module) -> int:
    """How many torch hooks and replaced forwards a model has."""
    return sum(
        len(m._forward_hooks)
        + len(m._forward_pre_hooks)
        + len(m._backward_hooks)
        + ("forward" in m.__dict__)
        for m in model.modules()
    )


def seeds(count: int) -> range:
    """The seeds of a slow test: so many, or those that the environment names
    (`SEEDS=2000:4000`).
    """
    first, last = os.environ.get("SEEDS", f"0:{count}").split(":")
    return range(int(first), int(last))


@contextmanager
def beside(
    *runs: Callable[[], torch.Tensor], every: float = 0.005, traced: bool = False
) -> Iterator[None]:
    """Another thread makes runs meanwhile, again and again: each result is, bit by bit, what it was
    before.

    Where torch traces meanwhile (`traced`), its tracer stands in the place of all modules' calls,
    in every thread, and may break a run off: an error of its own, and no result.
    """
    with torch.no_grad():
        right = [run() for run in runs]
    wrong: list[object] = []
    ends = threading.Event()

    def goes_on() -> None:
        while not ends.wait(every):
            try:
                with torch.no_grad():
                    wrong.extend(
                        i for i, run in enumerate(runs) if not torch.equal(run(), right[i])
                    )
            except Exception as error:  # noqa: BLE001 - whatever it is, no other thread may cause it
                if not traced or str(error) != "module is not installed as a submodule":
                    wrong.append(error)

    thread = threading.Thread(target=goes_on)
    thread.start()
    try:
        yield
    finally:
        ends.set()
        thread.join()
    assert not wrong, wrong[:3]


@pytest.fixture(autouse=True)
def registered_declarations_are_forgotten() -> Iterator[None]:
    """What a test registers, or a page that a test runs, is a declaration for that test alone."""
    registry.supported()
    held, before = registry._REGISTRY, dict(registry._REGISTRY)
    yield
    held.clear()
    held.update(before)


@pytest.fixture(autouse=True)
def compiled_code_stays_as_it_was() -> Iterator[None]:
    """Runs with hooks keep compiled code away while they run, and not after."""
    yield
    assert torch._dynamo.eval_frame._stance.stance == "default"
