"""What a property is tried on: a tiny random model, a bridge of its equal, tokens; and what is said
of a result.
"""

from __future__ import annotations

import linecache
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import PreTrainedModel

import adapters
from adapters import Architecture
from adapters.inputs import arguments_of, sample_inputs, split
from adapters.points import base_path, join
from adapters.proofs.evidence import LayerStep
from adapters.registry import declaration_for
from adapters.views import SeveralStreams
from bridge import TransformerBridge
from tests.adapters.mutations import declared_as
from tests.every_type.plain import Edit, Place, editing, seen
from tests.tiny_models import Task, tiny_model

_OURS = tuple(
    str(Path(adapters.__file__).parent.parent / room)
    for room in ("adapters", "bridge", "weight_processing")
)
#: What a model of transformers may end in.
_FAILURES = (
    RuntimeError,
    ValueError,
    TypeError,
    AttributeError,
    AssertionError,
    LookupError,
    ImportError,
    ArithmeticError,
    StrictDataclassError,
)
#: How far two results may be apart, as a part of the larger one's largest number.
NEAR = 2e-4

Verdict = Literal["right", "refused", "absent", "WRONG", "CRASH"]


class Wrong(Exception):
    """A property does not hold."""


class Absent(Exception):
    """There is nothing that the property could be about: a model without attention has no
    patterns.
    """


@dataclass(frozen=True)
class Outcome:
    """What came of a property.

    Attributes:
        verdict: ``right``; ``refused``: by an error of ours that says why; ``absent``: nothing to
            try; ``WRONG``; ``CRASH``: an error that nobody meant.
        says: what differs, or the error's text; of what is right, what could not be compared.
    """

    verdict: Verdict
    says: str = ""


@dataclass(frozen=True)
class Case:
    """A model to be made.

    Attributes:
        model_type, task: as for `tests.tiny_models.tiny_model`.
        options: fields of its configuration that are not as usual.
    """

    model_type: str
    task: Task = "causal"
    options: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        options = "".join(f" {name}={value}" for name, value in self.options)
        return f"{self.task}:{self.model_type}{options}"

    def model(self, attn_implementation: str | None = None) -> PreTrainedModel:
        """The model; two of one case are equal."""
        options = dict(self.options)
        return tiny_model(
            self.model_type, self.task, attn_implementation=attn_implementation, **options
        )


@dataclass
class Subject:
    """A model, a bridge of another one that is equal to it, and what both are given.

    Attributes:
        case: which model.
        declare: changes the adapter's declaration, to see that a property notices; None: nothing
            does.
        compared: how many results were compared.
        not_seen: what a property could not compare, with the reason.
    """

    case: Case
    declare: Callable[[Architecture], Architecture] | None = None
    compared: int = 0
    not_seen: list[str] = field(default_factory=list)
    _seen: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def hf(self) -> PreTrainedModel:
        """The plain model, which no bridge knows."""
        return self.case.model()

    def new_bridge(self) -> TransformerBridge:
        """A bridge of a model equal to `hf`."""
        model = self.case.model()
        if self.declare is None:
            return TransformerBridge(model)
        with declared_as(self.declare(declaration_for(model))):
            return TransformerBridge(model)

    @cached_property
    def bridge(self) -> TransformerBridge:
        """One bridge for all properties but those that change weights."""
        return self.new_bridge()

    def in_double(self) -> Subject:
        """The same in float64, where the model runs in it."""
        double = Subject(self.case, self.declare)
        double.__dict__["hf"] = self.case.model().double()
        with self.itself(), torch.no_grad():
            double.run()
        bridge = self.new_bridge()
        bridge.double()
        double.__dict__["bridge"] = bridge
        return double

    @cached_property
    def inputs(self) -> tuple[Tensor, dict[str, Tensor]]:
        """What a bridge is given: the input, and what goes with it."""
        given = sample_inputs(self.hf)
        return split(self.hf, given)

    @property
    def tokens(self) -> Tensor:
        """The input."""
        return self.inputs[0]

    @property
    def more(self) -> dict[str, Tensor]:
        """What goes with it."""
        return self.inputs[1]

    @property
    def is_plain_text(self) -> bool:
        """Tokens are all that it is given."""
        return not self.more and not self.tokens.is_floating_point()

    def needs_tokens(self) -> None:
        """For what is promised of text alone, also where a decoder writes another."""
        if self.tokens.is_floating_point():
            raise Absent("it is given no tokens")
        if extra := set(self.more) - {"decoder_input_ids"}:
            raise Absent(f"it is given {', '.join(sorted(extra))}")

    def needs_plain_text(self) -> None:
        """For what is promised of one list of blocks that reads tokens alone."""
        if not self.is_plain_text:
            raise Absent("it is given more than tokens")

    @contextmanager
    def itself(self) -> Iterator[None]:
        """What the plain model does alone: what it cannot do, nobody promises of it."""
        try:
            yield
        except Absent:
            raise
        except _FAILURES as error:
            raise Absent(
                f"the model itself: {type(error).__name__}: {' '.join(str(error).split())[:90]}"
            ) from error

    def run(self, tokens: Tensor | None = None, **more: Any) -> Tensor:
        """The logits of the plain model."""
        torch.manual_seed(0)
        arguments = arguments_of(
            self.hf, self.tokens if tokens is None else tokens, self.more | more
        )
        return logits_of(self.hf(**arguments))

    def ours(
        self, call: Callable[..., Any] | None = None, tokens: Tensor | None = None, **more: Any
    ) -> Any:
        """A method of the bridge on the same input; None: its forward."""
        torch.manual_seed(0)
        call = self.bridge if call is None else call
        return call(self.tokens if tokens is None else tokens, **{**self.more, **more})

    @cached_property
    def stacks(self) -> dict[str, list[str]]:
        """The paths of the blocks, by the names of their lists."""
        base, stacks = base_path(self.hf), self.bridge.architecture.stacks
        return {
            stack.name: [
                join(base, stack.place_of(i))
                for i in range(len(stack.modules(self.hf.get_submodule(base))))
            ]
            for stack in stacks
        }

    @property
    def main(self) -> str:
        """The list of blocks that ends in the logits."""
        return next(reversed(self.stacks))

    @property
    def paths(self) -> list[str]:
        """The paths of its blocks."""
        return self.stacks[self.main]

    @property
    def layers(self) -> list[tuple[str, str]]:
        """All blocks: their names, and their paths in the plain model."""
        return [
            (f"{name}.{i}", path)
            for name, paths in self.stacks.items()
            for i, path in enumerate(paths)
        ]

    def needs_blocks(self) -> None:
        """For what is done to a whole block of the plain model by a torch hook."""
        if "its blocks are not modules" in self.bridge.no_layer_runs:
            raise Absent("the model has no modules that are its blocks")

    @cached_property
    def _plain(self) -> tuple[Tensor, dict[str, Tensor]]:
        places = {}
        for name, paths in self.stacks.items():
            for i, path in enumerate(paths):
                places |= {
                    f"{name}.{i}": self.border(path),
                    f"{name}.{i}.out": self.border(path, "output"),
                }
        with torch.no_grad():
            if "its blocks are not modules" not in self.bridge.no_layer_runs:
                return seen(self.hf, places, self.run)
            output = self.hf(**arguments_of(self.hf, *self.inputs), output_hidden_states=True)
        hidden = {f"blocks.{i}": x for i, x in enumerate(output.hidden_states)}
        n = len(self.stacks["blocks"])
        return logits_of(output), hidden | {f"blocks.{n - 1}.out": hidden[f"blocks.{n}"]}

    @property
    def logits(self) -> Tensor:
        """The plain model's."""
        return self._plain[0]

    def stream(self, layer: int, stack: str | None = None) -> Tensor:
        """What enters a block of the plain model; behind the last one, what leaves it.

        Args:
            layer: from 0 to the number of blocks.
            stack: which list of blocks; None: the one that ends in the logits.
        """
        stack = self.main if stack is None else stack
        n = len(self.stacks[stack])
        name = f"{stack}.{layer}" if layer < n else f"{stack}.{n - 1}.out"
        if name not in self._plain[1]:
            raise Absent(f"{name} did not run")
        found = self._plain[1][name]
        rows = self.tokens.shape[0]
        if (
            found.ndim >= 3 and found.shape[0] != rows and found.shape[1] == rows
        ):  # positions come first
            return found.transpose(0, 1)
        return found

    @contextmanager
    def edited(self, layer: int, edit: Edit, stack: str | None = None) -> Iterator[None]:
        """The plain model with another stream into a block; behind the last one: out of it."""
        self.needs_blocks()
        paths = self.stacks[self.main if stack is None else stack]
        place = (
            self.border(paths[layer]) if layer < len(paths) else self.border(paths[-1], "output")
        )

        def fitting(x: Tensor) -> Tensor | None:
            new = edit(x)
            return new if new is None or new.shape == x.shape else arranged(new, x)

        with editing(self.hf, place, fitting):
            yield

    def border(self, block: str, side: Literal["input", "output"] = "input") -> Place:
        """Where the stream enters a block of the plain model, or leaves it."""
        view = self.bridge.architecture.stack.stream_view
        return Place(block, side, isinstance(view, SeveralStreams) and view.first)

    def written(self, part: str) -> str:
        """The hook point of what a part's last weight puts out, with what is declared behind it,
        before a norm.
        """
        name, index, _ = part.split(".", 2)
        stack = next(stack for stack in self.bridge.architecture.stacks if stack.name == name)
        steps = [
            LayerStep(f"{name}.{index}.", "", int(index), stack, x)
            for x in stack.block_at(int(index)).named
        ]
        return next(step for step in steps if step.part == f"{part}.").added

    @cached_property
    def cache(self) -> Any:
        """The bridge's cache of one run."""
        with torch.no_grad():
            return self.ours(self.bridge.run_with_cache)[1]

    def named(self, name: str) -> bool:
        """Whether there is such a hook point."""
        return name in self.bridge.hook_dict or name in self.bridge.names.aliases

    def same(
        self, ours: Tensor, theirs: Tensor, what: str, near: float | None = NEAR, scale: float = 0.0
    ) -> None:
        """Two results are the same.

        Args:
            ours, theirs: the results.
            what: what they are.
            near: see `NEAR`; None: bit by bit.
            scale: the largest number that counts, where the results' own are differences of larger
                ones.

        Raises:
            Wrong: they are not.
        """
        self.compared += 1
        ours, theirs = ours.detach(), theirs.detach()
        if (
            ours.numel() == theirs.numel()
            and ours.shape != theirs.shape
            and 1 not in ours.shape[:2]
        ):
            theirs = arranged(theirs, ours)
        if ours.shape != theirs.shape:
            raise Wrong(f"{what}: shape {list(ours.shape)}, not {list(theirs.shape)}")
        if torch.equal(ours, theirs):
            return
        finite = theirs.isfinite()
        if not torch.equal(ours.isfinite(), finite) or not torch.equal(
            ours[~finite & ~theirs.isnan()], theirs[~finite & ~theirs.isnan()]
        ):
            raise Wrong(f"{what}: finite at other places")
        ours, theirs = ours[finite].double(), theirs[finite].double()
        size = max(float(theirs.abs().max()), float(scale))
        worst = float((ours - theirs).abs().max()) / (size + 1e-9)
        if near is None or not worst <= near:
            raise Wrong(f"{what}: differs by {worst:.1e}, relatively")


def arranged(theirs: Tensor, like: Tensor) -> Tensor:
    """A stream whose positions come first, or whose rows are flattened, as batch and positions."""
    if theirs.ndim == like.ndim >= 2 and theirs.shape[:2] == (like.shape[1], like.shape[0]):
        return theirs.transpose(0, 1)
    return theirs.reshape(like.shape)


def logits_of(output: Any) -> Tensor:
    """The logits in what a model returns: they are the first, where none are called so."""
    for name in ("logits", "prediction_logits"):
        if isinstance(found := getattr(output, name, None), Tensor):
            return found
    return output[0]


def is_refusal(error: BaseException) -> bool:
    """Whether an error is one of ours that says why, and no accident: it was raised, in our
    code.
    """
    last = traceback.extract_tb(error.__traceback__)[-1]
    line = linecache.getline(last.filename, last.lineno or 0).strip()
    ours = last.filename.startswith(_OURS) and line.startswith("raise")
    return ours and isinstance(
        error, ValueError | NotImplementedError | KeyError | AttributeError | TypeError
    )


def outcome(subject: Subject, holds: Callable[[Subject], None]) -> Outcome:
    """Tries a property.

    Args:
        subject: what on.
        holds: the property; it raises `Wrong` or `Absent`, or returns.
    """
    before = subject.compared
    try:
        holds(subject)
    except Wrong as wrong:
        return Outcome("WRONG", str(wrong))
    except Absent as absent:
        return Outcome("absent", str(absent))
    except Exception as error:  # noqa: BLE001 - which error it is, is the result
        said = f"{type(error).__name__}: {' '.join(str(error).split())}"
        if is_refusal(error):
            return Outcome("refused", said)
        frame = traceback.extract_tb(error.__traceback__)[-1]
        return Outcome("CRASH", f"{said} ({Path(frame.filename).name}:{frame.lineno})")
    left, subject.not_seen = "; ".join(subject.not_seen), []
    return (
        Outcome("right", left)
        if subject.compared > before
        else Outcome("absent", left or "nothing to compare")
    )
