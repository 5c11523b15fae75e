"""Weight processing: transforms of a model's own parameters that keep its function.

**Input**: a model that can be processed (`_Processable`: its parameters, its declaration, its
canonical weights), and a choice for each transform in `TRANSFORMS` (fold norms, center the weights
that write to the stream, center the unembedding, fold value biases, refactor the factors of queries
and keys, values and output).

**Output**: the same model with other numbers in its parameters, and a record in ``cfg.processed``
and in the Hugging Face configuration, which a saved model keeps.

**Steps**, in order:

1. Check what is possible before anything is written (`limits.py`): a transform needs parts that are
   linear, stored, not shared with others, and fully declared.
2. Compute log probabilities of random tokens (`check.py`).
3. Mark the model as in progress; untie tied weights (`saving.py`), and apply each transform, part
   by part (`steps.py`, arithmetic in `transforms.py`, the parts in `parts.py`), in float64 (half
   precision in float32).
4. Compare log probabilities, at the end or after each transform; a difference beyond rounding is an
   error.
5. Record biases that a transform has added to layers without one, so that saving and loading keep
   them.

**Errors** (`ProcessingError`), with nothing changed: an explicitly requested transform that this
model does not allow, with the reason; a model that an earlier call left half processed. A transform
that is on by default and not allowed is skipped, and the record says why. If the final check fails,
the weights have been changed, and the error says so.

**Constraint**: this package does not depend on bridges, hooks or runs. It needs `adapters` alone,
and receives a context in which the user's hooks do not fire during the check.
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
from adapters.views.values import fingerprints
from weight_processing.check import LogProbCheck, ProcessingError
from weight_processing.limits import is_as_left, no_processing, why_not
from weight_processing.parts import ProcessedParts, held_here, is_spread
from weight_processing.saving import SavedBiases, untie
from weight_processing.steps import REFACTOR, TRANSFORMS

# --------------------------------------------------------------------------------------------------
# Models that a call left half processed: it was interrupted, or its check found a difference.
# --------------------------------------------------------------------------------------------------


Samples = dict[str, Tensor]

#: Attribute of such a model, and of its copies, with samples of every parameter that was written
#: to: after the model is loaded again, its parameters differ from them.
_MARK = "transformer_bridge_half_processed"
_SIZE = 256


def _samples(core: nn.Module) -> Samples:
    samples = {}
    for name, parameter in core.named_parameters():
        if type(parameter) is nn.Parameter or isinstance(parameter, DTensor):
            values = held_here(parameter.detach()).flatten()
            samples[name] = values[:: max(1, len(values) // _SIZE)].clone()
    return samples


@contextmanager
def marking_interrupted(core: nn.Module) -> Iterator[None]:
    """Mark a model as half processed if an exception ends the body after it has written to a
    parameter.

    Args:
        core: the Hugging Face model.
    """
    before = _samples(core)
    try:
        yield
    except BaseException as error:
        changed = {}
        for name, sample in _samples(core).items():
            if name not in before or not _same(sample, before[name]):
                changed[name] = sample
        if changed:
            core.__dict__[_MARK] = changed
            if not isinstance(error, ProcessingError):
                error.add_note("The model's weights are processed in part: load them again.")
        raise


def is_interrupted(core: nn.Module) -> bool:
    """Tell whether a model's weights were left half processed by a call that did not finish.

    Args:
        core: the Hugging Face model.
    """
    if _MARK not in core.__dict__:
        return False
    now = _samples(core)
    for name, sample in core.__dict__[_MARK].items():
        if name in now and _same(sample, now[name]):
            return True
    del core.__dict__[_MARK]
    return False


def _same(x: Tensor, y: Tensor) -> bool:
    return x.shape == y.shape and torch.equal(x.to(y), y)


#: Field of the Hugging Face configuration that records the applied transforms; a saved model keeps
#: it.
RECORD = "transformer_bridge_processed"
DONE = "done"


class _Default(NamedTuple):
    """Default value, distinguishable from the same value passed by the caller."""

    value: bool

    def __bool__(self) -> bool:
        return self.value

    def __repr__(self) -> str:
        return f"{self.value}, where the model allows it" if self.value else "False"


ON, OFF = _Default(True), _Default(False)
Choice = bool | _Default
#: Opens a context in which the user's hooks do not fire.
WithoutHooks = Callable[[], AbstractContextManager[object]]


class _Processable(Protocol):
    """Model whose weights are processed, such as a bridge.

    Attributes:
        core: the Hugging Face model.
        architecture: the declaration of its adapter.
        cfg: its facts; processing writes `processed` and the changed fields.
    """

    core: PreTrainedModel
    architecture: Architecture
    cfg: ModelConfig

    @property
    def weights(self) -> Weights:
        """Return the canonical weights; called only if the model can be processed at all."""
        ...


def process(
    model: _Processable,
    choices: Mapping[str, Choice],
    check: bool | Literal["each"] = True,
    without_hooks: WithoutHooks = nullcontext,
) -> None:
    """Apply transforms to a model's own parameters; see `TransformerBridge.process_weights`.

    Args:
        model: the model whose weights are changed.
        choices: for each name in `TRANSFORMS`, whether to apply it.
        check: compare the log probabilities of random tokens before and after; ``"each"``: after
            each transform.
        without_hooks: opens the context in which the check runs the model.

    Raises:
        ProcessingError: an explicitly requested transform is not possible for this model; or the
            log probabilities differ.
        TypeError: a choice is not True or False.
        ValueError: `check` is not one of the three values.
    """
    for name, choice in choices.items():
        if not isinstance(choice, bool | _Default):
            raise TypeError(f"{name} is {choice!r}; it must be True or False")
    if check not in (True, False, "each"):
        raise ValueError(f"check is {check!r}; it must be True, False or 'each'")
    requested = {name: choice for name, choice in choices.items() if choice}
    parts, reasons = _plan(model, requested)
    if not requested:
        return
    report = dict(model.cfg.processed)
    for name, reason in reasons.items():
        report[name] = f"left out: {reason}"
    todo = [name for name in requested if name not in reasons and report.get(name) != DONE]
    if todo:
        assert parts is not None
        _apply(model, todo, parts, check, report, without_hooks)
    _write_record(model, report)


def read_record(model: _Processable) -> None:
    """Make a model's ``cfg.processed`` reflect the record in its configuration, even if other code
    writes it.

    Args:
        model: the model.
    """
    model.cfg.watch(_ProcessingRecord(model))


class _ProcessingRecord:
    """Record, in a model's configuration, of the transforms applied to its weights, as long as it
    matches the weights.

    Other code may also process the model, or load or train its parameters. A saved model may hold
    its biases in its norms (see `saving`): it is processed again when it is loaded.

    Args:
        model: the model.
    """

    def __init__(self, model: _Processable) -> None:
        self._core, self._architecture = model.core, model.architecture
        self._inspected: tuple[object, bool | None] = None, None

    def __call__(self, cfg: ModelConfig, known: dict[str, str]) -> dict[str, str]:
        """Return the record that currently matches the weights, given the last known one."""
        noted = getattr(self._core.config, RECORD, None)
        record = dict(noted) if noted and noted != known else known
        if DONE not in record.values():
            return known
        if is_spread(self._core):
            return record  # looking at the weights would need a call in all processes
        is_true = self._is_true(cfg, record)
        if is_true is None:
            return known
        return record if is_true else {}

    def _is_true(self, cfg: ModelConfig, record: Mapping[str, str]) -> bool | None:
        """Tell whether the weights match the record; None if they cannot be inspected."""
        done = [name for name, state in record.items() if state == DONE]
        # Inspect them again if a parameter was written to or replaced, whether torch counts it or
        # not (fused optimizers do not).
        numbers = [known for p in self._core.parameters() for known in fingerprints(p)]
        state = done, numbers
        if state != self._inspected[0]:
            self._inspected = state, self._are_as_left(cfg, done)
        return self._inspected[1]

    def _are_as_left(self, cfg: ModelConfig, done: list[str]) -> bool | None:
        """Tell whether the weights are as these transforms leave them; None if they cannot be
        inspected.
        """
        if no_processing(self._core, self._architecture):
            return None
        parts = ProcessedParts(Weights(self._architecture, self._core, cfg))
        try:
            return all(is_as_left(parts, name) for name in done)
        except TypeError:  # raised by `Weights.matrix` for LoRA and quantised layers
            return None


def restore(model: _Processable, without_hooks: WithoutHooks = nullcontext) -> None:
    """Apply the transforms again that were applied before a model was saved; see
    `TransformerBridge.restore_processing`.

    Args:
        model, without_hooks: as for `process`.
    """
    record = getattr(model.core.config, RECORD, None)
    if record and not model.cfg.processed and not no_processing(model.core, model.architecture):
        # The transforms are idempotent, except that refactoring may change the signs of a head's
        # factors.
        parts = ProcessedParts(model.weights)
        again = {name: record.get(name) == DONE for name in TRANSFORMS}
        if again[REFACTOR] and is_as_left(parts, REFACTOR):
            again[REFACTOR] = False
        process(model, again, without_hooks=without_hooks)
        _write_record(model, {**record, **model.cfg.processed})


def is_processed(model: nn.Module) -> bool:
    """Tell whether a Hugging Face model's configuration records that its weights were processed.

    Args:
        model: the Hugging Face model.

    Example:
        >>> from bridge import TransformerBridge
        >>> from weight_processing.process import is_processed
        >>> is_processed(TransformerBridge.boot_embedded().original_model)
        False
    """
    return bool(getattr(model.config, RECORD, None))


def _plan(
    model: _Processable, requested: Mapping[str, Choice]
) -> tuple[ProcessedParts | None, dict[str, str]]:
    """Return the model's parts, and the reasons why transforms are skipped.

    Raises:
        ProcessingError: one of these was explicitly requested.
    """
    if is_interrupted(model.core):
        raise ProcessingError(
            f"the weights of {model.cfg.model_name} are half processed: an earlier call did"
            " not finish. Load them again. Nothing was changed"
        )
    reasons: dict[str, str] = {}
    parts = None
    if reason := no_processing(model.core, model.architecture):
        reasons = dict.fromkeys(requested, reason)
    else:
        parts = ProcessedParts(model.weights)
        done = model.cfg.processed
        for name in requested:
            if done.get(name) != DONE and (reason := why_not(parts, name)):
                reasons[name] = reason
    for name, reason in reasons.items():
        if isinstance(requested[name], bool):
            raise ProcessingError(
                f"{name}=True cannot be done for {model.cfg.model_name}: {reason}. Nothing was"
                f" changed. With {name}=False, or without naming it, the rest is done."
            )
    return parts, reasons


def _apply(
    model: _Processable,
    todo: list[str],
    parts: ProcessedParts,
    check: bool | Literal["each"],
    report: dict[str, str],
    without_hooks: WithoutHooks,
) -> None:
    """Apply transforms, check the result, and note them in the report."""
    core, cfg = model.core, model.cfg
    autocast = torch.autocast(cfg.device.type, enabled=False)
    with torch.inference_mode(False), torch.no_grad(), autocast:
        before = LogProbCheck(core, cfg, without_hooks) if check else None
        with marking_interrupted(core):
            if {"fold_ln", "center_writing_weights", "center_unembed"} & set(todo):
                untie(core, model.architecture)
            saved_biases = SavedBiases(core)
            unchecked: list[str] = []
            for name, transform in TRANSFORMS.items():
                again = name == "fold_value_biases" and report.get(name) == DONE
                if name not in todo and not (again and not is_as_left(parts, name)):
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


def _write_record(model: _Processable, report: dict[str, str]) -> None:
    model.cfg.processed = report
    if DONE in report.values():
        setattr(model.core.config, RECORD, dict(report))
