"""What stands before the first block and behind the last: embeddings, final norm, unembedding, logits."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from adapters.automatic.blocks import power_between
from adapters.automatic.layouts import relative
from adapters.automatic.norms import norm_kind, rounded, tolerance
from adapters.automatic.recording import ModuleCall, Recording, Seen, elements_of, mark
from adapters.config import config_of
from adapters.inputs.made import Given
from adapters.norms import Norm
from adapters.paths import base_path, token_embedding
from adapters.stream_ends import Embedding, Readout
from adapters.views import Affine


@dataclass
class FoundEmbedding:
    """What makes the first stream of a stack; paths are the model's.

    Attributes:
        embed: the token embedding.
        factor: what its result is multiplied with.
        pos_embed, token_types: what is added to it.
        more: what is added besides.
        norm: the norm of the sum.
        module: the one around all of them, where there is a sum with a norm behind it.
        project: a linear layer behind the tokens, or behind all of it; it is `module` then.
        adjust: what parameters of the base model do to it besides.
        width: of the tokens' embeddings, where that is not the stream's.
        missing: what could not be found, by hook name.
    """

    embed: str
    factor: float = 1.0
    adjust: Affine | None = None
    pos_embed: str | None = None
    token_types: str | None = None
    norm: Norm | None = None
    module: str | None = None
    project: str | None = None
    width: int | None = None
    more: list[str] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)

    def declared(self, relative: Callable[[str], str]) -> Embedding:
        """The declaration of it.

        Args:
            relative: makes a path from the base model of one from the model.
        """

        def at(path: str | None) -> str | None:
            return None if path is None else relative(path)

        return Embedding(
            self.embed and relative(self.embed),
            self.factor,
            self.adjust,
            at(self.pos_embed),
            at(self.token_types),
            tuple(map(relative, self.more)),
            self.norm and Norm(relative(self.norm.path), self.norm.kind),
            at(self.project),
            at(self.module),
            self.width,
            "; ".join(self.missing.values()),
        )


def find_embedding(
    model: nn.Module, recording: Recording, first: ModuleCall, since: int = -1, text: Tensor | None = None
) -> FoundEmbedding | None:
    """What makes the stream that enters the first block; None where no token embedding ran.

    Args:
        model: the model.
        recording: of its run.
        first: the call of the first block.
        since: the time from which on its embeddings run: when the stack before it has ended.
        text: ``[batch, pos]``, where the stream is made of tokens; None: everywhere.
    """
    before = [call for call in recording.calls if -1 < call.end <= first.start and call.left and call.start > since]
    module = token_embedding(model)
    called = [call for call in before if call.module is module] or [
        call for call in before if isinstance(call.module, nn.Embedding)
    ]
    if not called or first.entered is None:
        return None
    found = FoundEmbedding(called[0].path)
    tokens, target = called[0].left[0].value, first.entered
    found.width = None if tokens.shape[-1] == target.value.shape[-1] else tokens.shape[-1]
    last = [call for call in before if call.left[0].mark == target.mark and call.is_linear and call.entered]
    if last and last[-1].entered is not None and last[-1].entered.value.shape[:2] == tokens.shape[:2]:
        found.project, target = last[-1].path, last[-1].entered
    norms = [call for call in before if call.left[0].mark == target.mark and norm_kind(call)]
    norms = [call for call in norms if not called[0].holds(call)]  # what the embedding norms itself is its own
    if norms and norms[-1].entered is not None:
        kind = norm_kind(norms[-1])
        assert kind is not None
        found.norm, target = Norm(norms[-1].path, kind), norms[-1].entered
    shape = target.value.shape
    if tokens.shape != shape or not _is_in(tokens, target.value):
        made = [
            call for call in before
            if call.is_linear and call.start > called[0].end and call.left[0].value.shape == shape
            and found.project is None
        ]  # fmt: skip
        if made and _reads(made[0], tokens):
            found.project, tokens = made[0].path, made[0].left[0].value
    if tokens.shape != shape:
        found.missing["hook_embed"] = (
            f"{found.embed} puts out the shape {tuple(tokens.shape)}, the stream has {tuple(shape)}"
        )
        return found
    known = {called[0].left[0].mark, target.mark, mark(tokens)}
    others: list[tuple[ModuleCall, Tensor]] = []
    again: dict[ModuleCall, list[str]] = {}
    for call in before:
        x = _for_each_row(call.left[0].value, shape) if call.is_leaf else None
        same = [other for other, _ in others if other.left[0].mark == call.left[0].mark]
        if x is not None and call.left[0].mark not in known:
            known.add(call.left[0].mark)
            others.append((call, x))
        elif same and same[0].module is call.module:
            again.setdefault(same[0], []).append(recording.numbered(call))
    where = 1 if text is None else text.unsqueeze(-1)
    weights = _weights(target.value * where, [tokens * where, *(x * where for _, x in others)])
    if weights is None and tokens is called[0].left[0].value and (by := _adjusted(model, tokens, target.value)):
        found.factor, found.adjust = by
        return found
    if weights is None:
        found.missing["hook_embed"] = "the first stream is not the token embedding and what other modules put out"
        return found
    found.factor, alone = weights[0], False
    if weights[0] == 0:  # what is added is a norm of it
        for index, (call, _) in enumerate(others, 1):
            kind = norm_kind(call) if call.entered and call.entered.mark == called[0].left[0].mark else None
            if kind is not None and weights[index] == 1 and found.norm is None:
                found.norm, found.factor, weights[index] = Norm(call.path, kind), 1.0, 0.0
                alone = True  # the norm of the tokens alone
        if weights[0] == 0 and found.norm is None:
            found.missing["hook_embed"] = "the first stream is not the token embedding and what other modules put out"
            found.factor = 1.0
            return found
    types = config_of(model).get_text_config()
    rows = getattr(types, "type_vocab_size", None)
    for (call, x), weight in sorted(zip(others, weights[1:], strict=True), key=lambda each: -_rows(each[0][0], rows)):
        if weight == 0:
            continue
        what = "token_types" if bool((x == x[:, :1]).all()) else "pos_embed"
        times = 1 + len(again.get(call, ()))
        several = weight == 1 and recording.numbered(call) != call.path  # one table, of several sides (UDOP)
        if (weight == times and (times > 1 or getattr(found, what) is not None)) or several:
            found.more += [recording.numbered(call), *again.get(call, ())]
            continue
        if getattr(found, what) is not None or weight != 1 or not isinstance(call.module, nn.Module):
            found.missing[f"hook_{what}"] = f"{call.path} is added to the token embedding, times {weight:g}"
            continue
        setattr(found, what, call.path)
    if last and found.project == last[-1].path:
        found.module = found.project
    elif found.norm and not alone and (found.pos_embed or found.token_types or found.project):
        around = [
            call for call in before
            if call.left[0].mark == first.entered.mark and call.holds(called[0]) and not call.is_leaf
        ]  # fmt: skip
        # With no module around them, the norm is what puts out the first stream.
        found.module = min(around, key=lambda call: call.end - call.start).path if around else found.norm.path
    return found


def _adjusted(model: nn.Module, tokens: Tensor, target: Tensor) -> tuple[float, Affine] | None:
    """A factor, and parameters of the base model, that make the first stream of the token embedding."""
    base = model.get_submodule(base_path(model))
    x, y = (each.double().flatten(0, -2) for each in (tokens, target))
    around = x - x.mean(0)
    weight = (around * y).sum(0) / around.pow(2).sum(0)
    bias = y.mean(0) - weight * x.mean(0)
    close = 3 * tolerance(target) * float(y.abs().max())
    if bool(((weight * x + bias - y).abs() > close).any()):
        return None
    own = {name: p.detach().double().to(x.device) for name, p in base.named_parameters(recurse=False)}
    own = {name: p for name, p in own.items() if p.shape == weight.shape}
    factor = rounded(float(weight.mean()))
    tried = [(factor, Affine(bias=name)) for name in own]
    tried += [(1.0, Affine(weight=name)) for name in own]
    tried += [(1.0, Affine(weight=name, bias=other)) for name in own for other in own]
    for each, by in tried:
        with torch.no_grad():
            if bool(((by.of(x * each, base) - y).abs() <= close).all()):
                return each, by
    return None


def _rows(call: ModuleCall, said: int | None) -> bool:
    """Whether a table has as many rows as the configuration says that there are types of tokens."""
    table = getattr(call.module, "weight", None)
    return isinstance(table, Tensor) and said is not None and table.shape[0] == said


def _is_in(tokens: Tensor, total: Tensor) -> bool:
    """Whether a sum goes with the token embedding: they are alike beyond chance."""
    rows = [(x - x.mean((0, 1))).double().flatten() for x in (tokens, total)]
    return float(rows[0] @ rows[1]) > 0.05 * float(rows[0].norm() * rows[1].norm())


def _reads(linear: ModuleCall, tokens: Tensor) -> bool:
    """Whether a linear layer is given the token embedding, alone or before others."""
    x = None if linear.entered is None else linear.entered.value
    return x is not None and x.shape[:2] == tokens.shape[:2] and torch.equal(x[..., : tokens.shape[-1]], tokens)


def _for_each_row(x: Tensor, shape: torch.Size) -> Tensor | None:
    """What may be added to every row of the batch: ``[batch, pos, d]``, ``[1, pos, d]`` or ``[pos, d]``."""
    if x.ndim == 2:
        x = x.unsqueeze(0)
    if x.ndim != 3 or x.shape[-1] != shape[-1] or x.shape[1] not in (1, shape[1]) or x.shape[0] not in (1, shape[0]):
        return None
    return x.expand(shape)


def _weights(target: Tensor, terms: list[Tensor]) -> list[float] | None:
    """The factors with which terms make a sum, the fewest of them; None where they do not."""
    flat, close = target.double().flatten(), 3 * tolerance(target)
    for count in range(len(terms)):
        columns = torch.stack([term.double().flatten() for term in terms], 1)
        if count == 0:
            columns = columns[:, :1]
        solution = torch.linalg.lstsq(columns, flat[:, None]).solution[:, 0]
        if bool(((columns @ solution - flat).abs() <= close * flat.abs().max()).all()):
            found = [rounded(w) if abs(w) > 1e-4 else 0.0 for w in solution.tolist()]
            return found + [0.0] * (len(terms) - len(found))
        if count == 1:
            return None
    return None


def find_final_norm(recording: Recording, last: Seen, after: int) -> tuple[Norm | None, float]:
    """The norm that reads the last stream, and what that is multiplied with before."""
    behind = [call for call in recording.calls if call.start > after and call.entered]
    for call in behind:
        if call.entered and call.entered.mark == last.mark and (kind := norm_kind(call)):
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
    return next((call for call in recording.calls if call.module is layer and call.start > after and call.left), None)


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
        if kind is None or unembed.entered is None or norm.left[0].mark != unembed.entered.mark:
            continue
        linear = [call for call in behind if call.is_linear and call.end < norm.start]
        around = [call for call in behind if linear and call.holds(norm) and call.holds(linear[-1])]
        if around:
            head = min(around, key=lambda call: call.end - call.start)
            return head.path, linear[-1].path, Norm(norm.path, kind)
        if linear:  # nothing is around them but the model (DistilBERT)
            return linear[-1].path, linear[-1].path, Norm(norm.path, kind)
    linear = [call for call in behind if call.is_linear and call.end < unembed.start]
    around = [call for call in behind if linear and call.holds(unembed) and call.holds(linear[-1])]
    around = around or [
        call for call in behind if linear and call.holds(linear[-1]) and not call.is_leaf and call.end < unembed.start
        and call.left and unembed.entered is not None and call.left[0].mark == unembed.entered.mark
    ]  # fmt: skip
    if around:
        return min(around, key=lambda call: call.end - call.start).path, linear[-1].path, None
    return None


def find_readout(
    model: nn.Module, inputs: Given, unembed: ModuleCall, normed: Tensor, core: str, behind_head: bool
) -> Readout:
    """How logits are made of what the final norm puts out.

    What stands behind the output layer is seen in what the model makes of numbers as large as a trained model's logits:
    its own may be so small that a soft cap is nearly a straight line.

    Args:
        model, inputs: as for `record`.
        unembed: the call of the output layer.
        normed: what the final norm puts out, or the last stream without one.
        core: the path of the Hugging Face model in what wraps it.
        behind_head: a `Head` stands between the two.
    """
    path = relative(unembed.path, core)
    entered = None if unembed.entered is None else unembed.entered.value
    factor_in = 1.0
    if not behind_head:
        found = None if entered is None else _factor_between(normed, entered)
        if found is None:
            return Readout(path, unknown=f"{path} reads what is neither the last stream nor a norm of it that is known")
        factor_in = found
    before, logits = _large_logits(model, inputs, unembed)
    if logits is None or before.shape[:-1] != logits.shape[:-1] or logits.shape[-1] > before.shape[-1]:
        return Readout(path, factor_in, unknown=f"what {path} puts out has another shape than the logits")
    behind = readout_between(before[..., : logits.shape[-1]], logits)
    if behind is None:
        return Readout(path, factor_in, unknown=f"something that is not known is between {path} and the logits")
    factor_out, bias, cap = behind
    name = None
    if bias is not None:
        name = _holder_of(model.get_submodule(core), bias)
        if name is None:
            return Readout(path, factor_in, unknown=f"what is added behind {path} is no parameter of the model")
    return Readout(path, factor_in, factor_out, name, cap)


def _factor_between(x: Tensor, y: Tensor) -> float | None:
    """What a tensor is multiplied with to be another; None where it is not."""
    if x.shape != y.shape:
        return None
    a, b = x.double().flatten(), y.double().flatten()
    factor = float((a @ b) / (a @ a).clamp_min(1e-30))
    close = 3 * tolerance(y) * float(b.abs().max())
    return rounded(factor) if factor > 0 and bool(((factor * a - b).abs() <= close).all()) else None


def _large_logits(model: nn.Module, inputs: Given, unembed: ModuleCall) -> tuple[Tensor, Tensor | None]:
    """Numbers of a trained model's size in place of what the output layer puts out, and the logits they become."""
    generator = torch.Generator().manual_seed(0)
    before = unembed.left[0].value
    before = (torch.randn(before.shape, generator=generator, dtype=torch.float64) * 20).to(before)
    handle = unembed.module.register_forward_hook(
        lambda module, args, output: before if isinstance(output, Tensor) and output.shape == before.shape else output
    )
    try:
        with torch.no_grad():
            logits = next(iter(elements_of(model(**inputs))), None)
    finally:
        handle.remove()
    return before, logits if isinstance(logits, Tensor) else None


def _holder_of(model: nn.Module, bias: Tensor) -> str | None:
    """The path of the parameter or buffer that holds a bias."""
    for name, held in itertools.chain(model.named_parameters(), model.named_buffers()):
        if held.numel() == bias.numel() and not held.is_meta:
            rest = (held.detach().double().reshape(-1).to(bias.device) - bias).abs().max()
            if float(rest) <= 1e-3 * float(bias.abs().max()):
                return name
    return None


def readout_between(before: Tensor, logits: Tensor) -> tuple[float, Tensor | None, float | None] | None:
    """The factor, the bias and the soft cap between what leaves an output layer and the logits; None for anything else.

    Args:
        before: what leaves the output layer, ``[batch, pos, d_vocab]``: some of it beyond a soft cap.
        logits: what the model makes of it.
    """
    close = 10 * tolerance(before) * float(logits.abs().max())
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
    close = 10 * tolerance(before) * float(y.abs().max())
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
    return (factor, cap) if bool(((cap * torch.tanh(factor * x / cap) - y).abs() <= close).all()) else None


def _cap_at(x: float, y: float) -> float | None:
    """The soft cap that leaves a number this much; None where it leaves it all."""
    if y >= x:
        return None
    low, high = y, 1e6
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if middle * math.tanh(x / middle) < y else (low, middle)
    return low
