"""The end of the stream, found: final norm, output layer, and what is between that and the logits."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from adapters.automatic.blocks import power_between
from adapters.automatic.layouts import relative
from adapters.automatic.norms import function_norm, norm_kind, rounded
from adapters.inputs.made import Given
from adapters.norms import Norm, normalized
from adapters.observe.calls import BorderTensor, ModuleCall, Recording, elements_of, tightest
from adapters.observe.tolerance import FITTED, agree, worked_out
from adapters.stream_ends import Head, Readout
from adapters.views import Affine


def find_final_norm(recording: Recording, last: BorderTensor, after: int) -> tuple[Norm | None, float]:
    """The norm that reads the last stream, and what that is multiplied with before."""
    behind = [call for call in recording.calls if call.start > after and call.entered]
    for call in behind:
        if call.reads(last.mark) and (kind := norm_kind(call)):
            return Norm(call.path, kind), 1.0
    for call in behind[:1]:
        factor = call.entered and power_between(call.entered.value, last.value)
        if factor and (kind := norm_kind(call)):
            return Norm(call.path, kind), factor
    return None, 1.0


def find_unembedding(model: nn.Module, recording: Recording, after: int) -> ModuleCall | None:
    """The output layer."""
    layer = None
    for module in model.modules():  # the text's model inside of it may be what says (BLIP)
        find: Callable[[], nn.Module | None] | None = getattr(module, "get_output_embeddings", None)
        layer = layer or (find() if find else None)
    behind = [call for call in recording.calls if call.start > after and call.left]
    if not isinstance(layer, nn.Embedding):
        return next((call for call in behind if call.module is layer), None)
    # It may be the embedding that says: the layer has its matrix, or puts out what the model does (FSMT, tied or not).
    returned = {seen.mark for seen in recording.calls[0].left}
    return next(
        (call for call in behind if call.is_linear
         and (getattr(call.module, "weight", None) is layer.weight or call.left[0].mark in returned)),
        None,
    )  # fmt: skip


def find_head(recording: Recording, after: int, unembed: ModuleCall) -> tuple[str, str, Norm | None] | None:
    """A linear layer and a norm between the last stream and the output layer, and the module around the two.

    Without a norm, the module holds the output layer, too, or puts out what that reads.

    Returns:
        The paths of that module (of the linear layer itself, where there is none) and of the linear layer; the norm.
    """
    behind = [call for call in recording.calls if call.start > after]
    linear: list[ModuleCall]
    for norm in behind:
        kind = norm_kind(norm) if norm.end < unembed.start else None
        if kind is None or not unembed.reads(norm.left[0].mark):
            continue
        linear = [call for call in behind if call.is_linear and call.end < norm.start]
        head = tightest(call for call in behind if linear and call.holds(norm) and call.holds(linear[-1]))
        if head:
            return head.path, linear[-1].path, Norm(norm.path, kind)
        if linear:  # nothing is around them but the model (DistilBERT)
            return linear[-1].path, linear[-1].path, Norm(norm.path, kind)
    linear = [call for call in behind if call.is_linear and call.end < unembed.start]
    around = [call for call in behind if linear and call.holds(linear[-1])]
    head = tightest(call for call in around if call.holds(unembed)) or tightest(
        call for call in around
        if not call.is_leaf and call.end < unembed.start and call.left and unembed.reads(call.left[0].mark)
    )  # fmt: skip
    return (head.path, linear[-1].path, None) if head else None


@dataclass(frozen=True)
class End:
    """What is behind the last block of a recorded run.

    Attributes:
        model, recording: as for `record`.
        core: the path of the Hugging Face model in what wraps it.
        unembed: the call of the output layer.
        after: the time at which the last block ended.
    """

    model: nn.Module
    recording: Recording
    core: str
    unembed: ModuleCall
    after: int

    def normed(self, last: Tensor, norm: Norm | None, on_stream: bool) -> tuple[Tensor, Norm | None]:
        """What the final norm puts out, or else the last stream; and that norm, where it is a function.

        Args:
            last: the last stream.
            norm: the final norm that is a module, with its path from the model.
            on_stream: a norm on the stream itself is the last step.
        """
        if norm is not None:
            return self.recording.of(norm.path)[-1].left[0].value, None
        if on_stream or self.unembed.entered is None:
            return last, None
        kind = function_norm(last, self.unembed.entered.value)
        return (last, None) if kind is None else (normalized(kind, last), Norm("", kind))

    def heads(self, normed: Tensor) -> tuple[Head, ...]:
        """What is between the final norm and the output layer, where that does not read the norm.

        Args:
            normed: what the final norm puts out.
        """
        if self.unembed.entered is None or _factor_between(normed, self.unembed.entered.value) is not None:
            return ()
        found = find_head(self.recording, self.after, self.unembed)
        if found is None:
            return ()
        around, linear = ("." + relative(each, self.core) for each in found[:2])
        norm = found[2] and Norm("." + relative(found[2].path, self.core), found[2].kind)
        return (Head("mlm_head", around, linear=linear, norm=norm),)

    def readout(self, inputs: Given, normed: Tensor, behind_head: bool) -> Readout:
        """How logits are made of what the final norm puts out.

        What is behind the output layer is seen in what the model makes of numbers as large as a trained model's logits:
        its own may be so small that a soft cap is nearly a straight line.

        Args:
            inputs: as for `record`.
            normed: what the final norm puts out.
            behind_head: a `Head` is between the two.
        """
        unembed, path = self.unembed, relative(self.unembed.path, self.core)
        factor_in: float | None = 1.0
        if not behind_head:
            factor_in = None if unembed.entered is None else _factor_between(normed, unembed.entered.value)
        if factor_in is None:
            return Readout(path, unknown=f"{path} reads what is neither the last stream nor a norm of it that is known")
        before, logits = _large_logits(self.model, inputs, unembed)
        if logits is not None and logits.ndim == 3 and before.shape[:2] == logits.shape[:2][::-1] != logits.shape[:2]:
            before = before.transpose(0, 1)  # the output layer is given positions first
        if logits is None or before.shape[:-1] != logits.shape[:-1] or logits.shape[-1] > before.shape[-1]:
            return Readout(path, factor_in, unknown=f"what {path} puts out has another shape than the logits")
        if float(logits.abs().max()) > 1e30:
            return Readout(path, factor_in, unknown="the model puts a constant in place of the logits of some tokens")
        behind = readout_between(before[..., : logits.shape[-1]], logits)
        if behind is None:
            return Readout(path, factor_in, unknown=f"something that is not known is between {path} and the logits")
        factor_out, bias, cap = behind
        name = None if bias is None else _holder_of(self.model.get_submodule(self.core), bias)
        if bias is not None and name is None:
            return Readout(path, factor_in, unknown=f"what is added behind {path} is no parameter of the model")
        return Readout(path, factor_in, Affine(factor_out, plus=name), cap)


def _factor_between(x: Tensor, y: Tensor) -> float | None:
    """What a tensor is multiplied with to be another; None where it is not."""
    if x.shape != y.shape:
        return None
    a, b = x.double().flatten(), y.double().flatten()
    factor = float((a @ b) / (a @ a).clamp_min(1e-30))
    return rounded(factor) if factor > 0 and agree(factor * a, b, y) else None


def _large_logits(model: nn.Module, inputs: Given, unembed: ModuleCall) -> tuple[Tensor, Tensor | None]:
    """Numbers of a trained model's size in place of what the output layer puts out, and the logits they become."""
    generator = torch.Generator().manual_seed(0)
    before = unembed.left[0].value
    before = (torch.randn(before.shape, generator=generator, dtype=torch.float64) * 20).to(before)
    with unembed.module.register_forward_hook(
        lambda module, args, output: before if isinstance(output, Tensor) and output.shape == before.shape else output
    ):
        return before, returned_by(model, inputs)


def returned_by(model: nn.Module, inputs: Given) -> Tensor | None:
    """What a model returns first: logits, where it has them; None where that is no tensor."""
    with torch.no_grad():
        logits = next(iter(elements_of(model(**inputs))), None)
    return logits if isinstance(logits, Tensor) else None


def _holder_of(model: nn.Module, bias: Tensor) -> str | None:
    """The path of the parameter or buffer that holds a bias."""
    for name, held in itertools.chain(model.named_parameters(), model.named_buffers()):
        if held.numel() == bias.numel() and not held.is_meta:
            rest = (held.detach().double().reshape(-1).to(bias.device) - bias).abs().max()
            if float(rest) <= FITTED * float(bias.abs().max()):
                return name
    return None


def readout_between(before: Tensor, logits: Tensor) -> tuple[float, Tensor | None, float | None] | None:
    """The factor, the bias and the soft cap between what leaves an output layer and the logits; None for anything else.

    Args:
        before: what leaves the output layer, ``[batch, pos, d_vocab]``: some of it beyond a soft cap.
        logits: what the model makes of it.
    """
    close = worked_out(before) * float(logits.abs().max())
    x, y = before.double(), logits.double()
    factor = rounded(float((x * y).sum() / x.pow(2).sum()))
    if bool(((y - factor * x).abs() <= close).all()):
        return factor, None, None
    rows, made = x.flatten(0, -2), y.flatten(0, -2)
    around = rows - rows.mean(0)
    factor = rounded(float((around * made).sum() / around.pow(2).sum()))
    rest = made - factor * rows
    if bool(((rest - rest[:1]).abs() <= close).all()):
        return factor, rest.mean(0), None
    found = capped_between(before, logits)
    return None if found is None else (found[0], None, found[1])


def capped_between(before: Tensor, logits: Tensor) -> tuple[float, float] | None:
    """The factor and the soft cap that make logits: ``cap * tanh(factor * x / cap)``; None where they do not.

    Args:
        before, logits: as for `readout_between`.
    """
    x, y = before.double().flatten(), logits.double().flatten()
    cap = float(y.abs().max())
    for _ in range(100):  # each factor tells a cap, each cap tells a factor: by turns, they come to rest
        near = y.abs() < 0.6 * cap
        if not bool(near.any()):
            return None
        straight = cap * torch.atanh(y[near] / cap)
        factor = float((x[near] @ straight) / (x[near] @ x[near]))
        at = int(x.abs().argmax())
        new = _cap_at(abs(float(factor * x[at])), abs(float(y[at])))
        if new is None:
            return None
        cap, moved = new, abs(new - cap)
        if moved <= 1e-12 * cap:
            break
    cap, factor = float(f"{cap:.4g}"), rounded(float(f"{factor:.6g}"))
    return (factor, cap) if agree(cap * torch.tanh(factor * x / cap), y, before) else None


def _cap_at(x: float, y: float) -> float | None:
    """The soft cap that leaves a number this much; None where it leaves it all."""
    if y >= x:
        return None
    low, high = y, 1e6
    for _ in range(200):  # more halvings than a double has digits
        middle = (low + high) / 2
        low, high = (middle, high) if middle * math.tanh(x / middle) < y else (low, middle)
    return low
