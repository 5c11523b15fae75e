"""The stage of weight processing: transforms of a model's own parameters that leave its function as it is.

**In**: a model that can be processed (`Processable`: its parameters, its declaration, its canonical weights), and for
each transform in `TRANSFORMS` (fold norms, center what writes to the stream, center the unembedding, fold values'
biases, refactor the factors of queries and keys, values and output) whether it is asked for.

**Out**: the same model with other numbers in its parameters, and a record in ``cfg.processed`` and in the Hugging Face
configuration, so that a saved model knows it.

**How**, in order:

1. What can be done is asked before anything is written (`limits.py`): a transform needs parts that are linear, stored,
   not shared with others, and declared in full.
2. Log probabilities of random tokens are taken (`check.py`).
3. The model is marked as being worked on; tied weights are untied (`saving.py`), and each transform is done, part by
   part (`steps.py`, arithmetic in `transforms.py`, the parts in `parts.py`), in float64 (half precision in float32).
4. Log probabilities are compared, at the end or after each transform; a difference beyond rounding is an error.
5. Biases that a transform has made where the model's class has none are noted, so that saving and loading keep them.

**It refuses** (`ProcessingError`), with nothing changed: a transform asked for by name that this model does not allow,
with the reason; a model that a call left half done. A transform that is on by default and not allowed is left out, and
the record says why. After a failed check the weights are other ones, and the error says so.

**It does not know** of bridges, hooks or runs: it needs `adapters` alone, and is given a context in which the user's
hooks do not see its check.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from adapters import Architecture, Weights
from adapters.config import ModelConfig
from weight_processing.check import LogProbCheck, ProcessingError
from weight_processing.limits import is_as_left, no_processing, why_not
from weight_processing.parts import ProcessedParts, held_here, is_spread
from weight_processing.saving import SavedBiases, untie
from weight_processing.steps import TRANSFORMS

# ----------------------------------------------------------------------------------------------------------------------
# Models whose weights a call left half processed: it was interrupted, or its check found a difference.
# ----------------------------------------------------------------------------------------------------------------------


Samples = dict[str, Tensor]

#: Where such a model, and each copy of it, has some values of every parameter that was written to: when it has been
#: loaded again, it has others.
_MARK = "transformer_bridge_half_processed"
_SIZE = 256


def _samples(core: nn.Module) -> Samples:
    known = {name: p for name, p in core.named_parameters() if type(p) is nn.Parameter or isinstance(p, DTensor)}
    flat = {name: held_here(p.detach()).flatten() for name, p in known.items()}
    return {name: x[:: max(1, len(x) // _SIZE)].clone() for name, x in flat.items()}


@contextmanager
def marking_interrupted(core: nn.Module) -> Iterator[None]:
    """Marks a model as half processed when the body is left by an exception after it has written to a parameter.

    Args:
        core: the Hugging Face model.
    """
    before = _samples(core)
    try:
        yield
    except BaseException as error:
        now = _samples(core)
        changed = {n: x for n, x in now.items() if n not in before or not _same(x, before[n])}
        if changed:
            core.__dict__[_MARK] = changed
            if not isinstance(error, ProcessingError):
                error.add_note("The model's weights are processed in part: load them again.")
        raise


def is_interrupted(core: nn.Module) -> bool:
    """Whether a model's weights are as a call left them that did not come to its end.

    Args:
        core: the Hugging Face model.
    """
    if _MARK not in core.__dict__:
        return False
    now = _samples(core)
    if any(name in now and _same(x, now[name]) for name, x in core.__dict__[_MARK].items()):
        return True
    del core.__dict__[_MARK]
    return False


def _same(x: Tensor, y: Tensor) -> bool:
    return x.shape == y.shape and torch.equal(x.to(y), y)


#: The field of the Hugging Face configuration that says what was done, so that a saved model knows it.
RECORD = "transformer_bridge_processed"
DONE = "done"


class Default(NamedTuple):
    """A default, told apart from the same value given by the caller."""

    value: bool

    def __bool__(self) -> bool:
        return self.value

    def __repr__(self) -> str:
        return f"{self.value}, where the model allows it" if self.value else "False"


ON, OFF = Default(True), Default(False)
Choice = bool | Default
#: Opens a context in which the user's hooks do not see the model run.
WithoutHooks = Callable[[], AbstractContextManager[object]]


class Processable(Protocol):
    """A model whose weights are processed, such as a bridge.

    Attributes:
        core: the Hugging Face model.
        architecture: what its adapter declares.
        cfg: the facts about it; `processed` and what the transforms change are written there.
    """

    core: PreTrainedModel
    architecture: Architecture
    cfg: ModelConfig

    @property
    def weights(self) -> Weights:
        """The canonical weights; asked for only where the model can be processed at all."""
        ...


def process(
    model: Processable,
    given: Mapping[str, Choice],
    check: bool | Literal["each"] = True,
    without_hooks: WithoutHooks = nullcontext,
) -> None:
    """Does some transforms to a model's own parameters; see `TransformerBridge.process_weights`.

    Args:
        model: whose weights are written to.
        given: for each name in `TRANSFORMS`, whether it is asked for.
        check: compare the log probabilities of random tokens before and after; ``"each"``: after each transform.
        without_hooks: opens the context in which the check runs the model.

    Raises:
        ProcessingError: a transform asked for by name is not for this model; or the log probabilities differ.
        TypeError: a choice that is not True or False.
        ValueError: `check` is none of the three.
    """
    for name, value in given.items():
        if not isinstance(value, bool | Default):
            raise TypeError(f"{name} is {value!r}; it must be True or False")
    if check not in (True, False, "each"):
        raise ValueError(f"check is {check!r}; it must be True, False or 'each'")
    asked = {name: value for name, value in given.items() if value}
    parts, reasons = _what_can_be_done(model, asked)
    if not asked:
        return
    report = dict(model.cfg.processed)
    report |= {name: f"left out: {reason}" for name, reason in reasons.items()}
    todo = [name for name in asked if name not in reasons and report.get(name) != DONE]
    if todo:
        assert parts is not None
        _do(model, todo, parts, check, report, without_hooks)
    _write_record(model, report)


def read_record(model: Processable) -> None:
    """Lets a model's ``cfg.processed`` say what was done to it before, here or by others, as its configuration says.

    Args:
        model: whose `cfg` it is.
    """
    model.cfg.watch(ProcessingRecord(model))


class ProcessingRecord:
    """What was done to a model's weights, of which its configuration has a note, as long as it is true of them.

    Others may process the model too, and load or train its parameters. A saved model's biases may stand in its norms
    (see `saving`): it is processed anew when it is loaded.

    Args:
        model: whose it is.
    """

    def __init__(self, model: Processable) -> None:
        self._core, self._architecture = model.core, model.architecture
        self._looked: tuple[object, bool | None] = None, None

    def __call__(self, cfg: ModelConfig, known: dict[str, str]) -> dict[str, str]:
        """What is true now, given what was noted last."""
        noted = getattr(self._core.config, RECORD, None)
        record = dict(noted) if noted and noted != known else known
        if DONE not in record.values():
            return known
        if is_spread(self._core):
            return record  # to look at the weights, all processes would have to ask
        is_true = self._is_true(cfg, record)
        return known if is_true is None else record if is_true else {}

    def _is_true(self, cfg: ModelConfig, record: Mapping[str, str]) -> bool | None:
        """Whether the weights look like it; None where they cannot be looked at."""
        done = tuple([name for name, state in record.items() if state == DONE])
        # Looked at anew when a parameter was written to or replaced.
        now = done, tuple([(p.data_ptr(), None if p.is_inference() else p._version) for p in self._core.parameters()])
        if now != self._looked[0]:
            self._looked = now, self._are_as_left(cfg, done)
        return self._looked[1]

    def _are_as_left(self, cfg: ModelConfig, done: tuple[str, ...]) -> bool | None:
        if no_processing(self._core, self._architecture):
            return None
        parts = ProcessedParts(Weights(self._architecture, self._core, cfg))
        try:
            return all(is_as_left(parts, name) for name in done)
        except TypeError:  # what `Weights.matrix` says of LoRA and quantised layers
            return None


def restore(model: Processable, without_hooks: WithoutHooks = nullcontext) -> None:
    """Does again what was done before a model was saved; see `TransformerBridge.restore_processing`.

    Args:
        model, without_hooks: as for `process`.
    """
    record = getattr(model.core.config, RECORD, None)
    if record and not model.cfg.processed and not no_processing(model.core, model.architecture):
        # What is done twice is done once, but the factors of a head are free to change sign.
        factors, parts = "refactor_factored_attn_matrices", ProcessedParts(model.weights)
        again = {name: record.get(name) == DONE for name in TRANSFORMS}
        again[factors] = again[factors] and not is_as_left(parts, factors)
        process(model, again, without_hooks=without_hooks)
        _write_record(model, {**record, **model.cfg.processed})


def is_processed(model: nn.Module) -> bool:
    """Whether a Hugging Face model's configuration says that its weights were processed.

    Args:
        model: the Hugging Face model.

    Example:
        >>> from bridge import TransformerBridge
        >>> from weight_processing.process import is_processed
        >>> is_processed(TransformerBridge.boot_embedded().original_model)
        False
    """
    return bool(getattr(model.config, RECORD, None))


def _what_can_be_done(model: Processable, asked: Mapping[str, Choice]) -> tuple[ProcessedParts | None, dict[str, str]]:
    """The model's parts, and why transforms are left out.

    Raises:
        ProcessingError: one of these was asked for by name.
    """
    if is_interrupted(model.core):
        raise ProcessingError(
            f"the weights of {model.cfg.model_name} are as a call left them that did not come to its end: load them "
            "again. Nothing was changed"
        )
    parts, why = None, no_processing(model.core, model.architecture)
    reasons = dict.fromkeys(asked, why) if why else {}
    if not why:
        parts = ProcessedParts(model.weights)
        undone = [name for name in asked if model.cfg.processed.get(name) != DONE]
        reasons = {name: reason for name in undone if (reason := why_not(parts, name))}
    for name, reason in reasons.items():
        if isinstance(asked[name], bool):
            raise ProcessingError(
                f"{name}=True cannot be done for {model.cfg.model_name}: {reason}. Nothing was changed. "
                f"With {name}=False, or without naming it, the rest is done."
            )
    return parts, reasons


def _do(
    model: Processable,
    todo: list[str],
    parts: ProcessedParts,
    check: bool | Literal["each"],
    report: dict[str, str],
    without_hooks: WithoutHooks,
) -> None:
    core, cfg = model.core, model.cfg
    with torch.inference_mode(False), torch.no_grad(), torch.autocast(cfg.device.type, enabled=False):
        before = LogProbCheck(core, cfg, without_hooks) if check else None
        with marking_interrupted(core):
            if {"fold_ln", "center_writing_weights", "center_unembed"} & set(todo):
                untie(core, model.architecture)
            saved_biases = SavedBiases(core)
            unchecked: list[str] = []
            for name, transform in TRANSFORMS.items():
                again = name == "fold_value_biases" and report.get(name) == DONE and not is_as_left(parts, name)
                if name not in todo and not again:
                    continue
                transform.do(parts, saved_biases)
                report[name] = DONE
                unchecked.append(name)
                if before and check == "each":
                    before.compare(unchecked)
                    unchecked = []
            saved_biases.note()
            if before and unchecked:
                before.compare(unchecked)


def _write_record(model: Processable, report: dict[str, str]) -> None:
    model.cfg.processed = report
    if DONE in report.values():
        setattr(model.core.config, RECORD, dict(report))
