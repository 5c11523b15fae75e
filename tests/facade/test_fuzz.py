"""Wrong types and shapes for every argument of the public methods: a result, or an error of
ours.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bridge import TransformerBridge
from tests.conftest import torch_hooks

ROOT = Path(__file__).resolve().parents[2]
OURS = tuple(f"{ROOT}/{room}/" for room in ("bridge", "adapters", "weight_processing"))
TOKENS = torch.tensor([[1, 2, 3, 4]])
SIZES = {
    "n_layers": 2,
    "d_model": 8,
    "n_heads": 2,
    "d_head": 4,
    "d_vocab": 10,
    "n_ctx": 8,
    "act_fn": "gelu",
}
WRONG: list[Any] = [
    None,
    True,
    0,
    -1,
    10**12,
    2.5,
    float("nan"),
    "",
    "nonsense",
    b"bytes",
    [],
    [None],
    ["a", 1],
    [[1], [2, 3]],
    (1, 2, 3),
    {},
    {"a": 1},
    object(),
    lambda: None,
    lambda *a, **k: None,
    torch.tensor(1),
    torch.zeros(0),
    torch.zeros(2, 3, 4, 5),
    torch.ones(1, 4),
    torch.zeros(1, 4, dtype=torch.long),
    torch.eye(3, dtype=torch.complex64),
    slice(0, 2),
    int,
]

NEW = {"max_new_tokens": 1, "verbose": False, "do_sample": False}
NAME = "blocks.0.hook_resid_pre"


def keep(x: Any, hook: Any) -> None:
    return None


#: For each method, arguments that are right, and those of them that are made wrong in turn.
CALLS: dict[str, tuple[Callable[..., Any], dict[str, Any], tuple[str, ...]]] = {
    "forward": (
        lambda b, **k: b(**k),
        {"input": TOKENS},
        (
            "input",
            "return_type",
            "attention_mask",
            "start_at_layer",
            "stop_at_layer",
            "padding_side",
            "nonsense",
        ),
    ),
    "run_with_cache": (
        lambda b, **k: b.run_with_cache(**k),
        {"input": TOKENS},
        ("input", "names_filter", "pos_slice", "device", "stop_at_layer", "attention_mask"),
    ),
    "run_with_hooks": (
        lambda b, **k: b.run_with_hooks(**k),
        {"input": TOKENS},
        ("input", "fwd_hooks", "bwd_hooks", "start_at_layer"),
    ),
    "a hook": (
        lambda b, fn: b.run_with_hooks(TOKENS, fwd_hooks=[(NAME, fn)]),
        {"fn": keep},
        ("fn",),
    ),
    "what a hook returns": (
        lambda b, value: b.run_with_hooks(TOKENS, fwd_hooks=[(NAME, lambda x, hook: value)]),
        {"value": None},
        ("value",),
    ),
    "run_with_callback": (
        lambda b, **k: b.run_with_callback(TOKENS, **k),
        {"callback": keep},
        ("callback", "names_filter"),
    ),
    "add_hook": (
        lambda b, **k: b.add_hook(**k),
        {"name": NAME, "hook": keep},
        ("name", "hook", "dir"),
    ),
    "select_hooks": (lambda b, names: b.select_hooks(names), {"names": NAME}, ("names",)),
    "reset_hooks": (lambda b, **k: b.reset_hooks(**k), {}, ("direction",)),
    "generate": (
        lambda b, **k: b.generate(**NEW | k),
        {"input": TOKENS},
        ("input", "padding_side", "return_type", "names_filter"),
    ),
    "to_tokens": (lambda b, **k: b.to_tokens(**k), {"input": "a"}, ("input",)),
    "to_string": (lambda b, **k: b.to_string(**k), {"tokens": TOKENS}, ("tokens",)),
    "boot_native": (
        lambda b, config: TransformerBridge.boot_native(config),
        {"config": SIZES},
        ("config",),
    ),
    "TransformerBridge": (lambda b, **k: TransformerBridge(**k), {}, ("hf_model",)),
    "blocks": (lambda b, index: b.blocks[index], {"index": 0}, ("index",)),
    "attributes": (lambda b, name: getattr(b, name), {"name": "W_Q"}, ("name",)),
}


def complaint(error: BaseException) -> str:
    """What is wrong with an error, "" where it is one of ours."""
    frames = traceback.extract_tb(error.__traceback__)
    last = frames[-1].filename
    where = f"{type(error).__name__}: {str(error)[:160]!r} from {last}:{frames[-1].lineno}"
    if isinstance(error, StopIteration | NotImplementedError) or type(error) in (
        KeyError,
        AssertionError,
    ):
        return where
    # Python's own word about a call's arguments or a callable of the user's is said at the call.
    if last.startswith(OURS) or last == __file__:
        words = str(error)
        return (
            ""
            if len(words) > 12 and "NoneType' object" not in words and "object is not" not in words
            else where
        )
    return where


def described(wrong: Any) -> str:
    return f"{wrong.dtype}{list(wrong.shape)}" if isinstance(wrong, torch.Tensor) else repr(wrong)


@pytest.mark.unchecked
@pytest.mark.parametrize(
    ("method", "argument"), [(m, a) for m, (_, _, wrong) in CALLS.items() for a in wrong]
)
def test_wrong_arguments(method: str, argument: str):
    call, right, _ = CALLS[method]
    text = method.startswith("to_") or method == "generate"
    bridge = (
        TransformerBridge.boot_embedded() if text else TransformerBridge.boot_native(SIZES)
    ).eval()
    expected = bridge(TOKENS)
    complaints = []
    for wrong in WRONG:
        try:
            call(bridge, **right | {argument: wrong})
        except Exception as error:  # noqa: BLE001 - which one it is, is what is looked at
            if found := complaint(error):
                complaints.append(f"{argument}={described(wrong)}: {found}")
        bridge.reset_hooks(including_permanent=True)
        if torch_hooks(bridge.original_model):
            complaints.append(f"{argument}={described(wrong)} left hooks behind")
    assert not complaints, "\n".join(complaints)
    assert torch.equal(bridge(TOKENS), expected)
