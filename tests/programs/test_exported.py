"""What is refused before anything is traced; `test_compiled` runs the tests of exports."""

from __future__ import annotations

import importlib.util
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from adapters.observe.observe import Watch
from bridge import TransformerBridge
from bridge.export import formats
from bridge.export.export import attention_as_called
from bridge.export.formats import example_of, for_executorch
from tests.adapters.test_verify_all import tiny


@pytest.mark.parametrize(
    ("format", "command"),
    [
        ("onnx", r"onnx, onnxscript, onnxruntime.*pip install 'transformer-bridge\[onnx\]'"),
        ("executorch", r"executorch.*pip install 'transformer-bridge\[executorch\]'"),
        ("openvino", r"openvino.*pip install 'transformer-bridge\[openvino\]'"),
    ],
)
def test_what_is_not_installed_is_said_with_the_command(
    format: str, command: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    bridge = TransformerBridge(tiny("gpt2"))
    with pytest.raises(ImportError, match=command):
        bridge.export(torch.tensor([[3, 4, 5]]), format)


def test_what_cannot_be_exported_is_refused():
    bridge = TransformerBridge(tiny("gpt2"))
    tokens = torch.tensor([[3, 4, 5]])
    with pytest.raises(
        ValueError, match="format is 'tensorrt'; it must be one of 'dynamo', 'onnx'"
    ):
        bridge.export(tokens, "tensorrt")
    with pytest.raises(ValueError, match="input_ids of the example has one position"):
        bridge.export(tokens[:, :1])
    with pytest.raises(TypeError, match="format='dynamo' has no option 'opset'; it takes"):
        bridge.export(tokens, opset=18)
    with pytest.raises(ValueError, match="no weights"):
        TransformerBridge(tiny("gpt2").to("meta")).export(tokens)
    program = bridge.program(
        interventions=[("blocks.0.hook_mlp_out", lambda a, hook, v: a + v)],
        inputs={"v": torch.zeros(32)},
    )
    with pytest.raises(
        TypeError, match="v: an example of a declared input is given where the program is made"
    ):
        program.export({"input_ids": tokens, "v": torch.ones(32)})


def test_the_axes_of_an_example_are_of_any_size():
    """Said to transformers, which warns where it has to choose that itself."""
    tokens, vector = torch.tensor([[3, 4, 5]]), torch.zeros(32)
    axis = torch.export.Dim.AUTO
    example, shapes = example_of(tokens, {"v": vector}, True)
    assert shapes == {"dynamic_shapes": {"input_ids": {0: axis, 1: axis}, "v": {0: axis}}}
    assert torch.equal(example["input_ids"], tokens.repeat(2, 1)) and example["v"] is vector
    # What is no tensor has axes that only transformers knows.
    assert example_of({"input_ids": tokens, "use_cache": False}, {}, True)[1] == {}
    fixed, shapes = example_of(tokens, {}, False)
    assert fixed["input_ids"] is tokens and shapes == {}


def test_executorch_is_told_in_other_words_what_it_gets_wrong():
    class Calls(torch.nn.Module):
        def forward(self, x: Tensor) -> list[Tensor]:
            parts = [
                *torch.split(x, 4, -1),
                *x.split([3, 4, 6], dim=-1),
                *x.chunk(3, -1),
                *torch.chunk(x, 2, dim=2),
            ]
            return [*parts, functional.gelu(x, approximate="tanh"), functional.gelu(x), x.relu()]

    class Told(Calls):
        def forward(self, x: Tensor) -> list[Tensor]:
            with Watch.calling(for_executorch):
                return super().forward(x)

    x = torch.randn(2, 5, 13)
    for made, wanted in zip(Told()(x), Calls()(x), strict=True):
        torch.testing.assert_close(made, wanted, rtol=1e-6, atol=1e-6)
    dims = ({0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO},)
    found = [
        [
            str(node.target)
            for node in torch.export.export(each, (x,), dynamic_shapes=dims).graph.nodes
        ]
        for each in (Calls(), Told())
    ]
    splits = [[op for op in ops if "split" in op or "chunk" in op] for ops in found]
    assert [len(ops) for ops in splits] == [4, 0] and [
        ops.count("aten.gelu.default") for ops in found
    ] == [2, 1]


def test_executorch_does_not_get_what_it_would_move_or_cannot_count():
    bridge = TransformerBridge(tiny("gpt2"))
    with pytest.raises(ValueError, match="moves the model's own parameters"):
        formats.check_can_take(
            formats.FORMATS["executorch"], bridge.core, False, {"backend": "cuda"}
        )
    with pytest.raises(ValueError, match="points inside experts"):
        formats.check_can_take(formats.FORMATS["executorch"], bridge.core, True, {})


def test_other_threads_call_attention_as_it_was_while_a_program_is_traced():
    tracing, called = threading.Event(), threading.Event()
    x, asked = torch.randn(1, 2, 3, 4), []

    def under_way() -> None:
        asked.append(threading.current_thread())

    def elsewhere() -> Tensor:
        tracing.wait(60)
        try:
            return functional.scaled_dot_product_attention(x, x, x)
        finally:
            called.set()

    before = functional.scaled_dot_product_attention
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(elsewhere)
        with attention_as_called(under_way):
            tracing.set()
            assert (
                called.wait(60) and not asked
            )  # what sees the program's attention was not asked there
            functional.scaled_dot_product_attention(x, x, x)
        assert asked == [threading.current_thread()]
        assert torch.equal(other.result(), before(x, x, x))
    assert functional.scaled_dot_product_attention is before
