"""How the first stream is made of embeddings, found in a recording."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from adapters.architecture import KINDS, Embedding, Head, Positions, Readout, TableOf, tables
from adapters.attention import capped
from adapters.automatic.blocks import power_between
from adapters.automatic.norms import function_norm, norm_of, relative, rounded
from adapters.config import config_of
from adapters.inputs import Given, may_take
from adapters.norms import Norm
from adapters.observe.observe import (
    WRONG,
    BorderTensor,
    ModuleCall,
    NotFound,
    Recording,
    elements_of,
    mark,
    one_line,
    tightest,
)
from adapters.observe.recognised import FITTED, NEGLIGIBLE, agree, factor_of, worked_out
from adapters.points import base_path, core_of, token_embedding
from adapters.views import Affine, Args, Chain, Kwargs, times, transformed
from adapters.views.views import place_of_input

#: A cosine is no chance from this many standard deviations on. Where the question comes up among the 273 tiny types, it
#: is at most 2.6 (Reformer, whose declaration is the same either way), or at least 8.6.
_BEYOND_CHANCE = 4

NO_SUM = "the first stream is not the token embedding and what other modules put out"


def find_embedding(
    model: nn.Module,
    recording: Recording,
    first: ModuleCall,
    missing: dict[str, str],
    since: int = -1,
    text: Tensor | None = None,
) -> Embedding | None:
    """What makes the stream that enters the first block, with paths of the model; None where no token embedding ran.

    Args:
        model: the model.
        recording: of its run.
        first: the call of the first block.
        missing: what cannot be found is noted here, by hook name.
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
    # A table of positions may run before that of tokens (FSMT): it makes the same of every row.
    tokens = next((call for call in called if not _same_for_each_row(call.returned.value)), called[0])
    return _EmbeddingSearch(model, recording, before, tokens, first.entered, text, missing).run()


def taken_as(made: Embedding, model: nn.Module, given: Given, first: ModuleCall) -> Embedding:
    """The same, and how the model takes embeddings in place of tokens: by what its first block is given then.

    Args:
        made: what makes the first stream.
        model, given: the model and what it was run on.
        first: the call of the first block.
    """
    named = {name: x for name, x in given.items() if name != "input_ids"}
    if "input_ids" not in given or not may_take(core_of(model), "inputs_embeds"):
        return made
    assert first.entered is not None
    rows = model.get_submodule(made.tokens).forward(given["input_ids"])
    if not isinstance(rows, Tensor):
        return made
    rows = rows.detach()
    stream = first.entered.value
    tried: dict[Literal["rows", "multiplied"], Tensor] = {"rows": rows, "multiplied": rows * made.factor}
    for how, x in tried.items():
        try:
            seen = entering(first.module, partial(model, inputs_embeds=x, **named))
        except WRONG as error:
            one_line(error)  # it takes none: whoever gives it some is told so by the model
            return made
        if seen is not None and seen.shape == stream.shape and agree(seen, stream, stream):
            return replace(made, given=how)
    return replace(made, given="other")


def entering(module: nn.Module, run: Callable[[], object]) -> Tensor | None:
    """What a module is given first in a run, which ends there."""
    seen: list[Tensor] = []

    def stop(module: nn.Module, args: Args, kwargs: Kwargs) -> None:
        place = place_of_input(module, args, kwargs)
        seen.append(args[place] if isinstance(place, int) else kwargs[place or ""])
        raise NotFound("the first block has been reached")

    with torch.no_grad(), module.register_forward_pre_hook(stop, with_kwargs=True), suppress(NotFound):
        run()
    return seen[0] if seen else None


def _same_for_each_row(x: Tensor) -> bool:
    return x.ndim != 3 or torch.equal(x, x[:1].expand_as(x))


@dataclass
class _EmbeddingSearch:
    """Goes back from the first stream: through a projection and a norm to a sum, and from its terms to their tables.

    Attributes:
        before: the calls that may make the first stream.
        tokens: the call of the table of tokens.
        stream: the first stream.
        text: as for `find_embedding`.
        found: as far as it is found.
        missing: as for `find_embedding`.
    """

    model: nn.Module
    recording: Recording
    before: list[ModuleCall]
    tokens: ModuleCall
    stream: BorderTensor
    text: Tensor | None
    missing: dict[str, str]

    def run(self) -> Embedding:
        """What is found."""
        rows = self.tokens.returned.value
        if rows.ndim == 3 and self.stream.value.shape == rows.transpose(0, 1).shape != rows.shape:
            self.stream = self.stream.transposed()  # blocks are given positions first, this is not
        self.found = Embedding(self.tokens.path)
        target = self._behind_norm(self._behind_projection(self.stream))
        rows = self._projected(rows, target.value)
        if rows.shape != target.value.shape:
            shapes = f"{tuple(rows.shape)}, the stream has {tuple(target.value.shape)}"
            self.missing["hook_embed"] = f"{self.tokens.path} puts out the shape {shapes}"
        else:
            self._explain(rows, target)
        return replace(self.found, added=tuple(sorted(self.found.added, key=lambda table: KINDS.index(table[0]))))

    def _behind_projection(self, target: BorderTensor) -> BorderTensor:
        """What a linear layer reads that puts out the first stream; else the stream."""
        rows = self.tokens.returned.value
        for call in reversed(self.before):
            if call.returned.mark == target.mark and call.is_linear and call.entered:
                if call.entered.value.shape[:2] != rows.shape[:2]:
                    return target
                self.found = replace(self.found, project=call.path, module=call.path)
                return call.entered
        return target

    def _behind_norm(self, target: BorderTensor) -> BorderTensor:
        """What a norm reads that puts this out; else this. What the table of tokens norms itself is its own."""
        for call in reversed(self.before):
            if call.returned.mark != target.mark or self.tokens.holds(call) or call.entered is None:
                continue
            if norm := norm_of(call):
                self.found = replace(self.found, norm=norm)
                return call.entered
        return target

    def _projected(self, rows: Tensor, target: Tensor) -> Tensor:
        """What a linear layer makes of the token embedding, where that stands in the sum; else the embedding."""
        if self.found.project is not None or (rows.shape == target.shape and _is_in(rows, target)):
            return rows
        for call in self.before:
            if call.is_linear and call.start > self.tokens.end and call.returned.value.shape == target.shape:
                if not _reads(call, rows):
                    return rows
                self.found = replace(self.found, project=call.path)
                return call.returned.value
        return rows

    def _others(
        self, rows: Tensor, target: BorderTensor
    ) -> tuple[dict[ModuleCall, Tensor], dict[ModuleCall, list[str]]]:
        """What else may be added, with the further calls of the same table that put out the same."""
        known = {self.tokens.returned.mark, target.mark, mark(rows)}
        others: dict[ModuleCall, Tensor] = {}
        again: dict[ModuleCall, list[str]] = {}
        for call in self.before:
            x = _for_each_row(call.returned.value, target.value.shape) if call.is_leaf else None
            same = next((other for other in others if other.returned.mark == call.returned.mark), None)
            if x is not None and call.returned.mark not in known:
                known.add(call.returned.mark)
                others[call] = x
            elif same is not None and same.module is call.module:
                again.setdefault(same, []).append(self.recording.numbered(call))
        return others, again

    def _explain(self, rows: Tensor, target: BorderTensor) -> None:
        """The sum as the token embedding, with a factor, and tables that are added."""
        others, again = self._others(rows, target)
        where = 1 if self.text is None else self.text.unsqueeze(-1)
        weights = _weights(target.value * where, [rows * where, *(x * where for x in others.values())])
        if weights is None:
            own = rows is self.tokens.returned.value
            by = _adjusted(self.model, rows, target.value) if own else None
            placed = _placed(self.model, rows, target.value) if own and by is None else None
            if by is None and placed is None:
                self.missing["hook_embed"] = NO_SUM
            elif placed is not None and len(placed) and placed[-1].plus is None:
                self.missing["hook_pos_embed"] = "no module, parameter or buffer is what is added for each place"
            self.found = replace(self.found, transform=by or placed or ())
            return
        factor, *rest = weights
        added = dict(zip(others, rest, strict=True))
        alone = factor == 0  # then a norm of the tokens alone is what is added
        if alone and not self._normed_alone(added):
            self.missing["hook_embed"] = NO_SUM
            return
        self.found = replace(self.found, transform=times(1.0 if alone else factor))
        self._name(others, added, again)
        self._around(alone)

    def _normed_alone(self, added: dict[ModuleCall, float]) -> bool:
        """Whether a norm of the token embedding is a term of the sum, which is then no table."""
        for call, weight in added.items():
            reads = call.reads(self.tokens.returned.mark)
            if weight == 1 and reads and self.found.norm is None and (norm := norm_of(call)):
                self.found = replace(self.found, norm=norm)
                added[call] = 0.0
        return self.found.norm is not None

    def _name(
        self, others: dict[ModuleCall, Tensor], added: dict[ModuleCall, float], again: dict[ModuleCall, list[str]]
    ) -> None:
        """Which of the tables has positions, which the types of tokens, and which are further ones."""
        said = getattr(config_of(self.model).get_text_config(), "type_vocab_size", None)
        for call in sorted(added, key=lambda each: -_rows(each, said)):
            weight, repeated = added[call], again.get(call, [])
            if weight == 0:
                continue
            what: TableOf = "types" if bool((others[call] == others[call][:, :1]).all()) else "positions"
            taken, times = getattr(self.found, what) is not None, 1 + len(repeated)
            several = weight == 1 and self.recording.numbered(call) != call.path  # one table, of several sides (UDOP)
            if several or (weight == times and (times > 1 or taken)):
                self._add("more", self.recording.numbered(call), *repeated)
            elif taken or weight != 1:
                name = "hook_pos_embed" if what == "positions" else "hook_token_types"
                self.missing[name] = f"{call.path} is added to the token embedding, times {weight:g}"
            else:
                of_rows = call.end <= self.tokens.start and call.returned.value.shape == others[call].shape
                self._add("row positions" if what == "positions" and of_rows else what, call.path)

    def _add(self, what: TableOf, *paths: str) -> None:
        self.found = replace(self.found, added=(*self.found.added, *((what, path) for path in paths)))

    def _around(self, alone: bool) -> None:
        """The module that puts out the first stream, where that is a norm of a sum."""
        found = self.found
        if found.module is not None or found.norm is None or alone:
            return
        if not (found.positions or found.types or found.project):
            return
        around = tightest(
            call for call in self.before
            if call.returned.mark == self.stream.mark and call.holds(self.tokens) and not call.is_leaf
        )  # fmt: skip
        # With no module around them, the norm is what puts out the first stream.
        self.found = replace(found, module=(around or found.norm).path)


def _adjusted(model: nn.Module, tokens: Tensor, target: Tensor) -> Chain | None:
    """A factor, and parameters of the base model, that make the first stream of the token embedding."""
    base = model.get_submodule(base_path(model))
    x, y = (each.double().flatten(0, -2) for each in (tokens, target))
    around = x - x.mean(0)
    weight = (around * y).sum(0) / around.pow(2).sum(0)
    bias = y.mean(0) - weight * x.mean(0)
    if not agree(weight * x + bias, y, target):
        return None
    own = {name: p.detach().double().to(x.device) for name, p in base.named_parameters(recurse=False)}
    own = {name: p for name, p in own.items() if p.shape == weight.shape}
    factor = rounded(float(weight.mean()))
    tried: list[Chain] = [(*times(factor), Affine(plus=name)) for name in own]
    tried += [(Affine(weight=name),) for name in own]
    tried += [(Affine(plus=other), Affine(weight=name)) for name in own for other in own]
    for by in tried:
        with torch.no_grad():
            if agree(transformed(by, x, base), y, target):
                return by
    return None


def _placed(model: nn.Module, tokens: Tensor, target: Tensor) -> Chain | None:
    """A factor of the token embedding, and what is added for each place: a table that is a parameter or a buffer.

    Without the table, where it is neither; None where something else makes the first stream.
    """
    x, y = tokens.double(), target.double()
    if x.shape != y.shape or len(x) < 2:
        return None
    dx, dy = x - x.mean(0), y - y.mean(0)
    factor = rounded(factor_of(dy, dx))
    rest = y - factor * x
    if abs(factor) <= NEGLIGIBLE or not agree(rest, rest[:1].expand_as(rest), target):
        return None
    base = model.get_submodule(base_path(model))
    for name, held in itertools.chain(base.named_parameters(), base.named_buffers()):
        table = held.detach().double().reshape(-1, held.shape[-1]) if held.ndim > 1 else None
        if table is None or table.shape[-1] != rest.shape[-1] or len(table) < rest.shape[1]:
            continue
        if agree(table[: rest.shape[1]].to(rest), rest[0], target):
            return (*times(factor), Affine(plus=name))
    return (Affine(factor),)


def _rows(call: ModuleCall, said: int | None) -> bool:
    """Whether a table has as many rows as the configuration says that there are types of tokens."""
    table = getattr(call.module, "weight", None)
    return isinstance(table, Tensor) and said is not None and table.shape[0] == said


def _is_in(tokens: Tensor, total: Tensor) -> bool:
    """Whether a sum goes with the token embedding: they are alike beyond chance.

    The cosine between n unrelated numbers and n others has the standard deviation ``1 / sqrt(n)``.
    """
    rows = [(x - x.mean((0, 1))).double().flatten() for x in (tokens, total)]
    cosine = float(rows[0] @ rows[1] / (rows[0].norm() * rows[1].norm()))
    return cosine > _BEYOND_CHANCE / math.sqrt(rows[0].numel())


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
    flat, every = target.double().flatten(), torch.stack([term.double().flatten() for term in terms], 1)
    for columns in (every[:, :1], every):
        solution = torch.linalg.lstsq(columns, flat[:, None]).solution[:, 0]
        if agree(columns @ solution, flat, target):
            found = [rounded(w) if abs(w) > NEGLIGIBLE else 0.0 for w in solution.tolist()]
            return found + [0.0] * (len(terms) - len(found))
    return None


# ----------------------------------------------------------------------------------------------------------------------
# How the stream of an image begins, and how one vector is read from its end, found in a recording.
# ----------------------------------------------------------------------------------------------------------------------


#: Of which positions a mean is tried: the class token, all, all behind the class token and registers.
_POOLS: tuple[Positions, ...] = ((0, 1), (0, None), *((n, None) for n in range(1, 9)), (0, 2))


def find_patches(recording: Recording, first: ModuleCall) -> Embedding:
    """What makes the stream that enters the first block, with paths of the model.

    Args:
        recording: of a run.
        first: the call of the first block.
    """
    if first.entered is None or first.entered.value.ndim != 3:
        return Embedding()
    stream = first.entered
    before = [call for call in recording.calls if -1 < call.end <= first.start and len(call.left) == 1]
    makes = [call for call in before if call.returned.mark == stream.mark and call.returned.key is None]
    module = max(makes, key=lambda call: call.end, default=None)
    if module is None or len(recording.of(module.path)) > 1:
        return Embedding()
    norm, total = None, stream
    for call in makes:
        if call.entered and (found := norm_of(call)):
            norm, total = found, call.entered
    patches = next((call.path for call in before if _makes_patches(call, total.value)), None)
    return Embedding(added=tables(patches=patches), norm=norm, module=module.path)


def as_patches(module: nn.Module, made: Tensor) -> Tensor:
    """What the layer of patches puts out, ``[batch, patch, d_model]``."""
    return made.flatten(2).transpose(1, 2) if isinstance(module, nn.Conv2d) and made.ndim == 4 else made


def _makes_patches(call: ModuleCall, stream: Tensor) -> bool:
    """Whether it is the layer whose vectors are the last of a stream, but for what is the same in each image."""
    if not isinstance(call.module, nn.Conv2d | nn.Linear):
        return False
    made = as_patches(call.module, call.returned.value)
    if made.ndim != 3 or made.shape[::2] != stream.shape[::2] or made.shape[1] > stream.shape[1]:
        return False
    rest = stream[:, -made.shape[1] :] - made
    return agree(rest[:1].expand_as(rest), rest, stream)


@dataclass(frozen=True)
class Pool:
    """One vector that is read of each image.

    Attributes:
        positions: see `adapters.architecture.Readout`.
        norm: the norm that reads it, with its path from the model; None where it is the mean of the final norm.
        unembed: the layer whose output are the logits.
    """

    positions: Positions
    norm: Norm | None
    unembed: ModuleCall | None


def find_pool(
    recording: Recording, last: BorderTensor, final: Norm | None, after: int, logits: Tensor | None
) -> Pool | None:
    """The mean over positions that the final norm or the output layer reads; None where there is none.

    Args:
        recording: of a run.
        last: the last stream.
        final: the norm that reads it, with its path from the model.
        after: the time at which the last block ended.
        logits: what the model returns first.
    """
    x = recording.of(final.path)[-1].returned.value if final else last.value
    if x.ndim != 3:
        return None
    behind = [call for call in recording.calls if call.start > after and call.entered and call.left]
    reads = [call for call in behind if call.entered and call.entered.value.shape == x[:, 0].shape]
    pools = {call: found for call in reads if call.entered and (found := _pool_of(x, call.entered.value))}
    norms = ((call, norm) for call in pools if final is None and (norm := norm_of(call)))
    reader, norm = next(norms, (None, None))
    for call in reads:
        made = call.returned.value
        if logits is None or not call.is_linear or made.shape != logits.shape or not agree(made, logits):
            continue
        if call in pools:  # whatever else a norm reads (CLIP)
            return Pool(pools[call], None, call)
        if reader and call.reads(reader.returned.mark):
            return Pool(pools[reader], norm, call)
    return None if reader is None else Pool(pools[reader], norm, None)


def _pool_of(x: Tensor, seen: Tensor) -> Positions | None:
    """Of which positions a vector is the mean."""
    tried = (pool for pool in _POOLS if x[:, slice(*pool)].shape[1])
    return next((pool for pool in tried if agree(x[:, slice(*pool)].mean(1), seen)), None)


# ----------------------------------------------------------------------------------------------------------------------
# The end of the stream, found: final norm, output layer, and what is between that and the logits.
# ----------------------------------------------------------------------------------------------------------------------


def find_final_norm(recording: Recording, last: BorderTensor, after: int) -> tuple[Norm | None, float]:
    """The norm that reads the last stream, and what that is multiplied with before."""
    behind = [call for call in recording.calls if call.start > after and call.entered]
    for call in behind:
        if call.reads(last.mark) and (norm := norm_of(call)):
            return norm, 1.0
    for call in behind[:1]:
        factor = call.entered and power_between(call.entered.value, last.value)
        if factor and (norm := norm_of(call)):
            return norm, factor
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
         and (getattr(call.module, "weight", None) is layer.weight or call.returned.mark in returned)),
        None,
    )  # fmt: skip


def find_head(recording: Recording, core: str, unembed: ModuleCall, after: int) -> Head | None:
    """A linear layer and a norm between the last stream and the output layer, and the module around the two.

    Without a norm, the module holds the output layer, too, or puts out what that reads. Without a module around them it
    is the linear layer itself.

    Args:
        recording, unembed: as for `what_is_read`.
        core: the path of the Hugging Face model in what wraps it.
        after: the time at which the last block ended.
    """

    def head(around: ModuleCall, linear: ModuleCall, norm: Norm | None = None) -> Head:
        own = norm and replace(norm, path="." + relative(norm.path, core))
        return Head("mlm_head", "." + relative(around.path, core), "." + relative(linear.path, core), norm=own)

    behind = [call for call in recording.calls if call.start > after]
    for call in behind:
        norm = norm_of(call) if call.end < unembed.start else None
        before = [each for each in behind if each.is_linear and each.end < call.start]
        if norm and before and unembed.reads(call.returned.mark):
            both = tightest(each for each in behind if each.holds(call) and each.holds(before[-1]))
            return head(both or before[-1], before[-1], norm)  # nothing is around DistilBERT's but the model
    linear = [call for call in behind if call.is_linear and call.end < unembed.start]
    around = [call for call in behind if linear and call.holds(linear[-1])]
    found = tightest(call for call in around if call.holds(unembed)) or tightest(
        call for call in around
        if not call.is_leaf and call.end < unembed.start and call.left and unembed.reads(call.returned.mark)
    )  # fmt: skip
    return head(found, linear[-1]) if found else None


def what_is_read(
    recording: Recording, unembed: ModuleCall, last: Tensor, norm: Norm | None, on_stream: bool
) -> tuple[Tensor, Norm | None]:
    """What the final norm puts out, or else the last stream; and that norm, where it is a function.

    Args:
        recording: of a run.
        unembed: the call of the output layer.
        last: the last stream.
        norm: the final norm that is a module, with its path from the model.
        on_stream: a norm on the stream itself is the last step.
    """
    if norm is not None:
        return recording.of(norm.path)[-1].returned.value, None
    if on_stream or unembed.entered is None:
        return last, None
    kind = function_norm(last, unembed.entered.value)
    return (last, None) if kind is None else (kind.of(last), Norm("", kind))


def find_readout(
    model: nn.Module, core: str, inputs: Given, unembed: ModuleCall, factor_in: float | None
) -> tuple[Readout, str]:
    """How logits are made of what the output layer reads, and what cannot be said of that.

    What is behind the output layer is seen in what the model makes of numbers as large as a trained model's logits:
    its own may be so small that a soft cap is nearly a straight line.

    Args:
        model, inputs: as for `record`.
        core, unembed: as for `find_head`.
        factor_in: what the output layer reads is that many times the norm of the last stream; None: it is not.
    """
    path = relative(unembed.path, core)
    if factor_in is None:
        return Readout(path), f"{path} reads what is neither the last stream nor a norm of it that is known"
    before, logits = _large_logits(model, inputs, unembed)
    if logits is not None and logits.ndim == 3 and before.shape[:2] == logits.shape[:2][::-1] != logits.shape[:2]:
        before = before.transpose(0, 1)  # the output layer is given positions first
    if logits is None or before.shape[:-1] != logits.shape[:-1] or logits.shape[-1] > before.shape[-1]:
        return Readout(path, factor_in), f"what {path} puts out has another shape than the logits"
    if float(logits.abs().max()) > 1e30:
        return Readout(path, factor_in), "the model puts a constant in place of the logits of some tokens"
    behind = readout_between(before[..., : logits.shape[-1]], logits)
    if behind is None:
        return Readout(path, factor_in), f"something that is not known is between {path} and the logits"
    factor_out, bias, cap = behind
    name = None if bias is None else _holder_of(model.get_submodule(core), bias)
    if bias is not None and name is None:
        return Readout(path, factor_in), f"what is added behind {path} is no parameter of the model"
    return Readout(path, factor_in, Affine(factor_out, plus=name), cap), ""


def factor_between(x: Tensor, y: Tensor) -> float | None:
    """What a tensor is multiplied with to be another; None where it is not."""
    if x.shape != y.shape:
        return None
    a, b = x.double().flatten(), y.double().flatten()
    factor = float((a @ b) / (a @ a).clamp_min(1e-30))
    return rounded(factor) if factor > 0 and agree(factor * a, b, y) else None


def _large_logits(model: nn.Module, inputs: Given, unembed: ModuleCall) -> tuple[Tensor, Tensor | None]:
    """Numbers of a trained model's size in place of what the output layer puts out, and the logits they become."""
    generator = torch.Generator().manual_seed(0)
    before = unembed.returned.value
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
    factor = rounded(factor_of(y, x))
    if bool(((y - factor * x).abs() <= close).all()):
        return factor, None, None
    rows, made = x.flatten(0, -2), y.flatten(0, -2)
    around = rows - rows.mean(0)
    factor = rounded(factor_of(made, around))
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
        factor = factor_of(straight, x[near])
        at = int(x.abs().argmax())
        new = _cap_at(abs(float(factor * x[at])), abs(float(y[at])))
        if new is None:
            return None
        cap, moved = new, abs(new - cap)
        if moved <= 1e-12 * cap:
            break
    cap, factor = float(f"{cap:.4g}"), rounded(float(f"{factor:.6g}"))
    return (factor, cap) if agree(capped(factor * x, cap), y, before) else None


def _cap_at(x: float, y: float) -> float | None:
    """The soft cap that leaves a number this much; None where it leaves it all."""
    if y >= x:
        return None
    low, high = y, 1e6
    for _ in range(200):  # more halvings than a double has digits
        middle = (low + high) / 2
        low, high = (middle, high) if middle * math.tanh(x / middle) < y else (low, middle)
    return low
