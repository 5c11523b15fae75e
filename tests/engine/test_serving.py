"""vLLM's server with requests that name saved interventions: each answer is what `bridge.generate`
gives alone.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import peft
import pytest
import torch

from bridge import TransformerBridge
from bridge.embedded import MODEL_DIR
from bridge.interventions import Add, FittedProbe, Interventions, Zero
from tests.engine.test_engine import pytestmark  # noqa: F401

PROMPTS = [
    "When Mary and John went to the store, John gave a drink to",
    "Mary and",
    "The king of France is",
    "1 2 3 4",
]
POINT = "blocks.1.hook_resid_post"
PROBE = FittedProbe(
    point=POINT,
    values=torch.randn(2, 128, generator=torch.Generator().manual_seed(3)) / 8,
    over="multimax",
    name="city",
    bias=0.5,
)


@pytest.fixture(scope="module")
def bridge() -> TransformerBridge:
    return TransformerBridge.boot_embedded()


@pytest.fixture(scope="module")
def edits(bridge: TransformerBridge) -> dict[str, Interventions]:
    vector = torch.randn(bridge.cfg.d_model, generator=torch.Generator().manual_seed(0))
    return {
        "add": Interventions([(POINT, Add(2 * vector))], bridge),
        "later": Interventions([(POINT, Add(-3 * vector, part="generated"))], bridge),
        "less": Interventions([(POINT, Zero(features=slice(0, 40)))], bridge),
        "far": Interventions([(POINT, Zero(positions=50))], bridge),
        "other": Interventions([("blocks.2.hook_resid_post", Add(vector))], bridge),
    }


@pytest.fixture(scope="module")
def tuned() -> peft.PeftModel:
    """A LoRA adapter with random weights."""
    model = TransformerBridge.boot_embedded().original_model
    torch.manual_seed(1)
    made = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "o_proj"]))
    for name, parameter in made.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    return made


@pytest.fixture(scope="module")
def address(
    tmp_path_factory: pytest.TempPathFactory, edits: dict[str, Interventions], tuned: peft.PeftModel
) -> Iterator[str]:
    """The server of docs/engine.md, on a port of its own, with room for two edits at once, and an
    adapter.
    """
    folder = tmp_path_factory.mktemp("served")
    (folder / "saved").mkdir()
    for name, its in edits.items():
        its.save(folder / "saved" / f"{name}.safetensors")
    edits["add"].save(folder / "outside.safetensors")
    tuned.save_pretrained(folder / "tuned")
    (folder / "saved" / "link.safetensors").symlink_to(folder / "outside.safetensors")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    page = (Path(__file__).parents[2] / "docs" / "engine.md").read_text()
    torch.save(PROBE, folder / "probe.pt")
    code = page.split("```text\n# serve.py\n")[1].split("```")[0]
    more = (
        f"port={port}, adapters={{'tuned': 'tuned'}}, rows=2, enforce_eager=True,"
        " max_model_len=128, "
    )
    more += "gpu_memory_utilization=0.05"
    assert "port=8000" in code
    code = code.replace("readings=[probe]", "readings=[torch.load('probe.pt', weights_only=False)]")
    (folder / "serve.py").write_text(code.replace("port=8000", more))
    with (folder / "log").open("w") as log:
        process = subprocess.Popen([sys.executable, "serve.py"], cwd=folder, stdout=log, stderr=log)
    try:
        for _ in range(900):
            time.sleep(1)
            assert process.poll() is None, (folder / "log").read_text()[-4000:]
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/health"):
                    break
            except urllib.error.URLError:
                continue
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        process.wait(180)


def answered(address: str, prompt: str | list[str], **more: Any) -> tuple[int, Any]:
    """The status of an answer, and the answer or its error."""
    body = {
        "model": str(MODEL_DIR),
        "prompt": prompt,
        "max_tokens": 6,
        "temperature": 0,
        "ignore_eos": True,
        **more,
    }
    body["return_token_ids"] = True
    request = urllib.request.Request(
        f"{address}/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=300) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def asked(address: str, prompt: str, **more: Any) -> tuple[int, object]:
    """The status of an answer, and its tokens or its error."""
    status, answer = answered(address, prompt, **more)
    return status, answer["choices"][0]["token_ids"] if status == 200 else answer


def alone(bridge: TransformerBridge, prompt: str, edits: Interventions | None) -> list[int]:
    """The tokens; the server puts no BOS before texts where the tokenizer does not."""
    with bridge.hooks(fwd_hooks=list(edits or ())):
        made = bridge.generate(
            prompt,
            6,
            do_sample=False,
            stop_at_eos=False,
            verbose=False,
            prepend_bos=False,
            return_type="tokens",
        )
    return made[0, -6:].tolist()


def test_requests_at_once_are_what_each_is_alone(
    address: str, bridge: TransformerBridge, edits: dict[str, Interventions]
) -> None:
    """More edits than there are rows, beside plain requests, with the same prompts; and a client's
    own salt.
    """
    rows = [
        (prompt, name)
        for _ in range(3)
        for prompt in PROMPTS
        for name in (None, "add", "later", "less")
    ]

    def ask(row: tuple[str, str | None]) -> tuple[int, object]:
        prompt, name = row
        more = {} if name is None else {"vllm_xargs": {"interventions": f"{name}.safetensors"}}
        return asked(address, prompt, **more, **({"cache_salt": "mine"} if len(prompt) % 2 else {}))

    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(ask, rows))
    for (prompt, name), answer in zip(rows, answers, strict=True):
        assert answer == (200, alone(bridge, prompt, edits[name] if name else None)), (prompt, name)
    assert len({str(tokens) for _, tokens in answers}) > 2 * len(PROMPTS)


def test_the_numbers_of_a_reading_leave_with_the_answer(
    address: str, bridge: TransformerBridge, edits: dict[str, Interventions]
) -> None:
    """Beside an edit, and twice, so that a prefix would be in the cache."""
    xargs = {"readings": "city", "interventions": "later.safetensors"}
    for _ in range(2):
        status, answer = answered(address, PROMPTS[0], vllm_xargs=xargs)
        assert status == 200, answer
        tokens = [*bridge.to_tokens(PROMPTS[0], prepend_bos=False)[0].tolist()]
        whole = [tokens + answer["choices"][0]["token_ids"][:-1]]
        with bridge.hooks(
            fwd_hooks=[(POINT, Add(edits["later"][0][1].value, positions=slice(len(tokens), None)))]
        ):
            (expected,) = bridge.readings(whole, [PROBE])
        (sample,) = answer["kv_transfer_params"]["readings"]
        read = sample["city"]
        assert torch.allclose(
            torch.tensor(read["tokens"]), expected["city"].tokens, rtol=0, atol=1e-3
        )
        assert abs(read["value"] - expected["city"].value) < 1e-3


def test_readings_that_would_be_lost_are_refused(address: str) -> None:
    xargs = {"readings": ["city"]}
    assert answered(address, PROMPTS[:2])[0] == 200
    for more, why in (
        ({"stream": True}, "are not available with stream"),
        ({"use_beam_search": True, "n": 2}, "use_beam_search"),
        ({}, "several prompts in one request"),
    ):
        prompt = PROMPTS[0] if more else PROMPTS[:2]
        status, text = answered(address, prompt, vllm_xargs=xargs, **more)
        assert status == 400 and why in str(text), (status, text)


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"interventions": "nowhere.safetensors"}, "no file 'nowhere.safetensors' in the folders"),
        (
            {"interventions": "../outside.safetensors"},
            "no file '../outside.safetensors' in the folders",
        ),
        ({"interventions": "link.safetensors"}, "no file 'link.safetensors' in the folders"),
        ({"interventions": 3}, "no file 3 in the folders"),
        (
            {"interventions": "other.safetensors"},
            "blocks.2.hook_resid_post is not among the points",
        ),
        ({"interventions": "far.safetensors"}, "a position is 50, and there are"),
        ({"bridge": "edit"}, "not for clients"),
        ({"readings": "town"}, "there is no reading 'town' here; there are city"),
    ],
)
def test_what_cannot_be_is_an_error_of_the_client(
    address: str, said: dict[str, object], why: str
) -> None:
    code, text = asked(address, "Mary and", vllm_xargs=said)
    assert code == 400 and why in str(text), text


def test_beams_with_interventions_are_refused(address: str) -> None:
    code, text = asked(
        address,
        "Mary and",
        use_beam_search=True,
        n=2,
        vllm_xargs={"interventions": "add.safetensors"},
    )
    assert code == 400 and "use_beam_search" in str(text)
    assert asked(address, "Mary and", use_beam_search=True, n=2)[0] == 200


def test_an_adapter_is_named_as_the_model(
    address: str, bridge: TransformerBridge, edits: dict[str, Interventions], tuned: peft.PeftModel
) -> None:
    """Requests with the adapter beside others, with the same edits and prompts."""
    adapted = TransformerBridge(tuned.merge_and_unload(), bridge.tokenizer)
    rows = [
        (prompt, name, its)
        for prompt in PROMPTS
        for name in (None, "add")
        for its in (bridge, adapted)
    ] * 2

    def ask(row: tuple[str, str | None, TransformerBridge]) -> tuple[int, object]:
        prompt, name, its = row
        more: dict[str, Any] = (
            {} if name is None else {"vllm_xargs": {"interventions": f"{name}.safetensors"}}
        )
        return asked(address, prompt, **more, **({} if its is bridge else {"model": "tuned"}))

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, rows))
    for (prompt, name, its), answer in zip(rows, answers, strict=True):
        assert answer == (200, alone(its, prompt, edits[name] if name else None)), (
            prompt,
            name,
            its is bridge,
        )
    assert answers[0] != answers[1]
