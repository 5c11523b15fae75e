"""`process_weights`: HookedTransformer's weight processing, on the Hugging Face model's own parameters."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from bridge.weights.accessors import WeightMethods
from weight_processing.check import Check, ProcessingError
from weight_processing.interrupted import all_or_broken, is_broken
from weight_processing.limits import Limits, is_as_left, no_processing
from weight_processing.parts import Parts
from weight_processing.saving import Carried, untie
from weight_processing.steps import STEPS

#: The field of the Hugging Face configuration that says what was done, so that a saved model knows it.
RECORD = "transformer_bridge_processed"
DONE = "done"


class ByDefault(NamedTuple):
    """A default, told apart from the same value given by the caller."""

    value: bool

    def __bool__(self) -> bool:
        return self.value

    def __repr__(self) -> str:
        return f"{self.value}, where the model allows it" if self.value else "False"


ON, OFF = ByDefault(True), ByDefault(False)
Choice = bool | ByDefault


class ProcessingMethods(WeightMethods):
    """The methods of a bridge that process weights."""

    core: Any

    def process_weights(
        self,
        fold_ln: Choice = ON,
        center_writing_weights: Choice = ON,
        center_unembed: Choice = ON,
        fold_value_biases: Choice = ON,
        refactor_factored_attn_matrices: Choice = OFF,
        check: bool | Literal["each"] = True,
    ) -> None:
        """Makes the weights easier to read, without changing log probabilities. The model's parameters are written to.

        What a model forbids is left out when it is asked for by default, and is an error when it is asked for by name;
        nothing is written before that is known. ``cfg.processed`` says for each transform that it is done, or why not.
        What is done already is not done again.

        Args:
            fold_ln: fold the norms' weights and biases into what reads them.
            center_writing_weights: take the mean out of all that is written to the residual stream.
            center_unembed: take the mean over the vocabulary out of the unembedding.
            fold_value_biases: fold the values' biases into the attention's output bias.
            refactor_factored_attn_matrices: give the matrices of each head orthogonal columns.
            check: compare the log probabilities of random tokens before and after; ``"each"``: after each transform.

        Raises:
            ProcessingError: a transform asked for by name is not for this model; or the log probabilities differ.

        Example:
            >>> from bridge import TransformerBridge
            >>> bridge = TransformerBridge.boot_embedded()
            >>> bridge.process_weights()
            >>> bool(bridge.W_U.mean(-1).abs().max() < 1e-5), bridge.cfg.normalization_type
            (True, 'RMSPre')
        """
        given: dict[str, Choice] = {
            "fold_ln": fold_ln,
            "center_writing_weights": center_writing_weights,
            "center_unembed": center_unembed,
            "fold_value_biases": fold_value_biases,
            "refactor_factored_attn_matrices": refactor_factored_attn_matrices,
        }
        for name, value in given.items():
            if not isinstance(value, bool | ByDefault):
                raise TypeError(f"{name} is {value!r}; it must be True or False")
        if check not in (True, False, "each"):
            raise ValueError(f"check is {check!r}; it must be True, False or 'each'")
        asked: dict[str, Choice] = {name: value for name, value in given.items() if value}
        parts, reasons = self._what_can_be_done(asked)
        if not asked:
            return
        report = dict(self.cfg.processed)
        report |= {name: f"left out: {reason}" for name, reason in reasons.items()}
        todo = [name for name in asked if name not in reasons and report.get(name) != DONE]
        if todo:
            assert parts is not None
            self._do(todo, parts, check, report)
        self._write_record(report)

    def enable_compatibility_mode(
        self,
        fold_ln: Choice = ON,
        center_writing_weights: Choice = ON,
        center_unembed: Choice = ON,
        fold_value_biases: Choice = ON,
        refactor_factored_attn_matrices: Choice = OFF,
        no_processing: bool = False,
        check: bool | Literal["each"] = True,
        disable_warnings: bool = False,
    ) -> None:
        """Makes weights and activations those of ``HookedTransformer.from_pretrained``, with its defaults.

        Args:
            fold_ln, center_writing_weights, center_unembed, fold_value_biases, refactor_factored_attn_matrices, check:
                as for `process_weights`.
            no_processing: leave the weights as they are (``HookedTransformer.from_pretrained_no_processing``).
            disable_warnings: is accepted; there are none.

        Raises:
            ProcessingError: as for `process_weights`.

        Example:
            >>> from bridge import TransformerBridge
            >>> bridge = TransformerBridge.boot_embedded()
            >>> bridge.enable_compatibility_mode()
            >>> bridge.cfg.processed["center_unembed"]
            'done'
        """
        if not no_processing:
            self.process_weights(
                fold_ln,
                center_writing_weights,
                center_unembed,
                fold_value_biases,
                refactor_factored_attn_matrices,
                check,
            )

    def _what_can_be_done(self, asked: dict[str, Choice]) -> tuple[Parts | None, dict[str, str]]:
        """The model's parts, and why transforms are left out.

        Raises:
            ProcessingError: one of these was asked for by name.
        """
        if is_broken(self.core):
            raise ProcessingError(
                f"the weights of {self.cfg.model_name} are as a call left them that did not come to its end: load them "
                "again. Nothing was changed"
            )
        parts, why = None, no_processing(self.core, self.architecture)
        reasons = dict.fromkeys(asked, why) if why else {}
        if not why:
            parts = Parts(self.weights)
            self._forget_if_replaced(parts)
            limits = Limits(self.core, parts)
            undone = [name for name in asked if self.cfg.processed.get(name) != DONE]
            reasons = {name: reason for name in undone if (reason := limits.reason(name))}
        for name, reason in reasons.items():
            if isinstance(asked[name], bool):
                raise ProcessingError(
                    f"{name}=True cannot be done for {self.cfg.model_name}: {reason}. Nothing was changed. "
                    f"With {name}=False, or without naming it, the rest is done."
                )
        return parts, reasons

    def _forget_if_replaced(self, parts: Parts) -> None:
        """Parameters may have been loaded or trained since: then what was done to the old ones does not count."""
        done = [name for name, state in self.cfg.processed.items() if state == DONE]
        if not all(is_as_left(parts, name) for name in done):
            self.cfg.processed = {}
            if any(parts.affine(norm)[0] is not None for norm in parts.norms):
                kind = self.architecture.norm_kind
                self.cfg.normalization_type = kind.name if kind else None

    def _do(self, todo: list[str], parts: Parts, check: bool | str, report: dict[str, str]) -> None:
        device = self.cfg.device.type
        with torch.inference_mode(False), torch.no_grad(), torch.autocast(device, enabled=False):
            before = Check(self.core, self.cfg) if check else None
            with all_or_broken(self.core):
                if {"fold_ln", "center_writing_weights", "center_unembed"} & set(todo):
                    untie(self.core, self.architecture)
                    self.cfg.tie_word_embeddings = bool(getattr(self.core.config, "tie_word_embeddings", False))
                carried = Carried(self.core)
                waiting: list[str] = []
                for name, step in STEPS.items():
                    again = name == "fold_value_biases" and report.get(name) == DONE and not is_as_left(parts, name)
                    if name not in todo and not again:
                        continue
                    step(parts, carried)
                    report[name] = DONE
                    waiting.append(name)
                    if before and check == "each":
                        before.compare(waiting)
                        waiting = []
                carried.note()
                if before and waiting:
                    before.compare(waiting)

    def _write_record(self, report: dict[str, str]) -> None:
        self.cfg.processed = report
        if DONE in report.values():
            setattr(self.core.config, RECORD, dict(report))
        kind = self.cfg.normalization_type
        if report.get("fold_ln") == DONE and kind in ("LN", "RMS"):
            self.cfg.normalization_type = kind + "Pre"

    def _read_record(self) -> None:
        """Takes over what was done to the model before this bridge, as its configuration says."""
        record = getattr(self.core.config, RECORD, None)
        if record and not no_processing(self.core, self.architecture):
            parts = Parts(self.weights)
            # A saved model's biases may stand in its norms (see `processing.saving`): it is processed anew when loaded.
            if all(is_as_left(parts, name) for name, state in record.items() if state == DONE):
                self._write_record(dict(record))

    def restore_processing(self) -> None:
        """Does again what was done to the weights before the model was saved, as its configuration says.

        `boot_transformers` calls it. A saved model has the function of the processed one, but biases for which its
        class has no place are written as biases of norms; this puts them back.

        Example:
            >>> from bridge import TransformerBridge
            >>> bridge = TransformerBridge.boot_embedded()
            >>> bridge.restore_processing()  # nothing was done to this one
        """
        record = getattr(self.core.config, RECORD, None)
        if record and not self.cfg.processed and not no_processing(self.core, self.architecture):
            # What is done twice is done once, but the factors of a head are free to change sign.
            factors, parts = "refactor_factored_attn_matrices", Parts(self.weights)
            again = {name: record.get(name) == DONE for name in STEPS}
            again[factors] = again[factors] and not is_as_left(parts, factors)
            self.process_weights(**again)
            self._write_record({**record, **self.cfg.processed})


def is_processed(model: nn.Module) -> bool:
    """Whether a Hugging Face model's configuration says that its weights were processed.

    Example:
        >>> from bridge import TransformerBridge
        >>> from bridge.processing import is_processed
        >>> is_processed(TransformerBridge.boot_embedded().original_model)
        False
    """
    return bool(getattr(model.config, RECORD, None))
