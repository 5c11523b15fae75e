"""What is recorded of a run: what tensors held when modules were called, and nothing of it longer
than it is needed.
"""

from __future__ import annotations

import gc
import random

import pytest
import torch
from torch import Tensor, nn

from adapters.observe.observe import CallRecorder, ModuleCall
from bridge import TransformerBridge
from tests.tiny_models import tiny_model


class Written(nn.Module):
    """Two layers read one tensor, which is written over in between."""

    def __init__(self, past_versions: bool = False) -> None:
        super().__init__()
        self.past_versions = past_versions
        self.first, self.second, self.third = nn.Identity(), nn.Identity(), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        self.first(x)
        self.second(x)
        if self.past_versions:
            x.data[:, :1] += 1
        else:
            x[:, :1] += 1  # through a view of it
        return self.third(x)


@pytest.mark.parametrize("past_versions", [False, True])
def test_a_tensor_that_several_modules_read_is_copied_once_for_each_change_of_it(
    past_versions: bool,
) -> None:
    model, x = Written(past_versions), torch.zeros(2, 3)
    with torch.no_grad(), CallRecorder(model.named_children()) as recording:
        model(x)
    calls = [recording.of(path)[0] for path in ("first", "second", "third")]
    assert [float(call.args[0].sum()) for call in calls] == [0, 0, 2]
    assert calls[0].args[0] is calls[0].output is calls[1].args[0]
    assert calls[2].args[0] is not x  # nor what is written later


def test_what_was_made_in_inference_mode_is_copied_as_well() -> None:
    model = Written()
    with torch.inference_mode(), CallRecorder(model.named_children()) as recording:
        model(torch.zeros(2, 3))
    found = [float(recording.of(path)[0].args[0].sum()) for path in ("first", "second", "third")]
    assert found == [0, 0, 2]


@pytest.mark.parametrize("kind", ["llama", "bamba"])
def test_nothing_of_the_run_that_was_inferred_from_stays(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A circle of objects would keep the graph of a whole run until Python looks for circles."""
    model = tiny_model(kind)
    gc.collect()
    gc.disable()
    try:
        bridge = TransformerBridge(model, automatic="always")
        left = [each for each in gc.get_objects() if isinstance(each, ModuleCall)]
    finally:
        gc.enable()
    assert bridge.hook_dict and not left


@pytest.mark.unchecked  # what checks annotations draws, too
@pytest.mark.parametrize("model_type", ["reformer", "big_bird", "musicgen"])
def test_what_a_user_draws_next_does_not_depend_on_a_model_that_was_wrapped(
    model_type: str,
) -> None:
    """These models draw in evaluation mode, too."""
    model = tiny_model(model_type)
    states = torch.get_rng_state(), random.getstate()
    TransformerBridge(model)
    assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1]
