"""The properties notice what is broken: a declaration with one thing changed, or a line of the
library.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from adapters import Architecture
from adapters.views import Affine
from bridge import ActivationCache, TransformerBridge
from bridge.analysis.decomposition import StreamTerms
from bridge.generation import batch, generation
from bridge.harvest import Activations
from bridge.rows import BatchRows
from tests.every_type import reading
from tests.every_type.subject import Case, Outcome, Subject, outcome
from tests.every_type.table import PROPERTIES


def _stack(architecture: Architecture, **fields: Any) -> Architecture:
    return replace(architecture, stacks=(replace(architecture.stack, **fields),))


def _first_step(architecture: Architecture, **fields: Any) -> Architecture:
    block = architecture.stack.block
    return _stack(
        architecture,
        block=replace(block, steps=(replace(block.steps[0], **fields), *block.steps[1:])),
    )


#: What is changed, in which type, and which property has to notice.
CHANGES: dict[str, tuple[str, str, Callable[[Architecture], Architecture]]] = {
    "factor of the logits left out": (
        "cohere",
        "attributions",
        lambda a: replace(a, readout=replace(a.readout, output_transform=Affine())),
    ),
    "norm of the embeddings left out": (
        "mbart",
        "terms",
        lambda a: _stack(a, embedding=replace(a.stack.embedding, norm=None)),
    ),
    "factor of what attention writes left out": (
        "granite",
        "terms",
        lambda a: _first_step(a, result_chain=()),
    ),
    "final norm left out": ("llama", "attributions", lambda a: _stack(a, final_norm=None)),
    "norm behind attention left out": (
        "gemma2",
        "terms",
        lambda a: _first_step(a, result_chain=()),
    ),
    "another final norm": (
        "llama",
        "attributions",
        lambda a: _stack(
            a,
            final_norm=replace(
                a.stack.final_norm, kind=replace(a.stack.final_norm.kind, offset=1.0)
            ),
        ),
    ),
}


def found(
    model_type: str, name: str, declare: Callable[[Architecture], Architecture] | None = None
) -> Outcome:
    return outcome(Subject(Case(model_type), declare), PROPERTIES[name])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_declaration_is_noticed(change: str) -> None:
    model_type, name, declare = CHANGES[change]
    assert found(model_type, name).verdict == "right"
    changed = found(model_type, name, declare)
    noticed = changed.verdict == "WRONG" or "that its adapter declares" in changed.says
    assert noticed, changed


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Callable[[object, str, Callable[[Any], Any]], None]:
    def change(where: object, name: str, wrap: Callable[[Any], Any]) -> None:
        monkeypatch.setattr(where, name, wrap(getattr(where, name)))

    return change


def test_a_layer_too_far_is_noticed(broken) -> None:
    def wrap(own: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def forward(
            self: TransformerBridge, *args: Any, stop_at_layer: int | None = None, **more: Any
        ) -> Tensor:
            return own(
                self,
                *args,
                stop_at_layer=None if stop_at_layer is None else min(stop_at_layer + 1, 2),
                **more,
            )

        return forward

    broken(TransformerBridge, "forward", wrap)
    assert found("llama", "stop").verdict == "WRONG"


@pytest.mark.filterwarnings("ignore:the terms do not sum")
def test_a_term_of_another_size_is_noticed(broken) -> None:
    def wrap(own: Callable[[StreamTerms], None]) -> Callable[[StreamTerms], None]:
        def found(self: StreamTerms) -> None:
            own(self)
            self.terms[0].value = self.terms[0].value * 1.01

        return found

    broken(StreamTerms, "__post_init__", wrap)
    assert found("llama", "terms").verdict == "WRONG"
    assert found("llama", "attributions").verdict == "WRONG"


def test_rows_in_another_order_are_noticed(broken) -> None:
    broken(
        Activations, "__getitem__", lambda own: lambda self, index: own(self, len(self) - 1 - index)
    )
    assert found("llama", "harvest").verdict == "WRONG"


def test_a_shard_that_is_taken_for_another_is_noticed(broken) -> None:
    """Rows were once counted as if each shard had as many as the first."""

    def wrap(own: Callable[..., Any]) -> Callable[..., Any]:
        def rows_of(self: Activations, rows: Any) -> Any:
            at = int(rows)
            return own(self, at if at < 11 else 11 + (at - 11 + 1) % (len(self) - 11))

        return rows_of

    broken(Activations, "__getitem__", wrap)
    assert found("llama", "harvest").verdict == "WRONG"


@pytest.mark.parametrize("model_type", ["llama", "gemma2"])
def test_a_norm_that_is_not_applied_is_noticed(
    monkeypatch: pytest.MonkeyPatch, model_type: str
) -> None:
    monkeypatch.setattr(
        ActivationCache, "apply_ln_to_stack", lambda self, stack, *args, **more: stack
    )
    assert found(model_type, "final norm").verdict == "WRONG"


@pytest.mark.parametrize("model_type", ["modernbert"])
def test_a_norm_before_another_layer_that_is_not_applied_is_noticed(
    monkeypatch: pytest.MonkeyPatch, model_type: str
) -> None:
    case = Case(model_type, "masked")
    assert outcome(Subject(case), PROPERTIES["final norm"]).verdict == "right"
    monkeypatch.setattr(
        ActivationCache, "apply_ln_to_stack", lambda self, stack, *args, **more: stack
    )
    assert outcome(Subject(case), PROPERTIES["final norm"]).verdict == "WRONG"


@pytest.mark.parametrize(
    ("name", "weight"), [("W mlp", "W_in"), ("W mlp", "W_gate"), ("W attention", "W_K")]
)
def test_another_weight_is_noticed(monkeypatch: pytest.MonkeyPatch, name: str, weight: str) -> None:
    own = reading._weight
    monkeypatch.setattr(
        reading, "_weight", lambda part, x: own(part, x).flip(-1) if x == weight else own(part, x)
    )
    assert found("llama", name).verdict == "WRONG"


def test_a_lens_with_its_norm_is_not_the_raw_one(broken) -> None:
    def wrap(own: Callable[..., Any]) -> Callable[..., Any]:
        return lambda self, tokens, kind="normed", **more: own(self, tokens, **more)

    broken(TransformerBridge, "lens", wrap)
    assert found("llama", "raw lens").verdict == "WRONG"


def test_an_accident_is_no_refusal(broken) -> None:
    def fails(own: object) -> Callable[..., Tensor]:
        def lens(*args: object, **more: object) -> Tensor:
            raise IndexError("index 3 is out of range")

        return lens

    broken(TransformerBridge, "lens", fails)
    assert found("llama", "lens").verdict == "CRASH"


#: What is broken of rows and requests: where, and what stands in its place; of which type; and
#: which properties notice.
BROKEN: dict[str, tuple[object, str, Callable[[Any], Any], Case, tuple[str, ...]]] = {
    "padding that is not moved": (
        BatchRows,
        "arrange",
        lambda own: lambda self, arguments, side: None,
        Case("llama"),
        ("rows", "rows beams"),
    ),
    "padding of an encoder that is moved to its front": (
        BatchRows,
        "arrange",
        lambda own: lambda self, arguments, side: own(self, arguments, "left"),
        Case("bart", "seq2seq"),
        ("rows cache",),
    ),
    "another seed": (
        generation,
        "run_generate",
        lambda own: lambda *given: (torch.manual_seed(1), own(*given))[1],
        Case("llama"),
        ("rows sampled",),
    ),
    "a cache whose padding stays in front": (
        BatchRows,
        "given_back",
        lambda own: lambda self, activation, axes, behind: activation,
        Case("llama"),
        ("rows cache",),
    ),
    "positions that count padding": (
        BatchRows,
        "real",
        lambda own: lambda self, axis, length, rows: None,
        Case("llama"),
        ("rows edits",),
    ),
    "an end that is not told": (
        batch._Batch,
        "fail",
        lambda own: lambda self, request, error: None,
        Case("llama"),
        ("requests",),
    ),
    "attention that stays exchanged": (
        batch._ExchangedAttention,
        "give_back",
        lambda own: lambda self: None,
        Case("gemma2"),
        ("requests",),
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("what", BROKEN)
def test_rows_and_requests_that_are_not_as_alone_are_noticed(broken, what: str) -> None:
    where, name, wrap, case, noticing = BROKEN[what]
    broken(where, name, wrap)
    for noticed in noticing:
        assert outcome(Subject(case), PROPERTIES[noticed]).verdict in ("WRONG", "CRASH"), noticed
