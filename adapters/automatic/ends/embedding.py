"""How the first stream is made of embeddings, found in a recording."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from adapters.automatic.norms import norm_kind, rounded
from adapters.config import config_of
from adapters.norms import Norm
from adapters.observe.calls import BorderTensor, ModuleCall, Recording, mark, tightest
from adapters.observe.tolerance import NEGLIGIBLE, agree
from adapters.paths import base_path, token_embedding
from adapters.stream_ends import KINDS, Embedding, TableOf
from adapters.views import Affine, Chain, times, transformed

#: A cosine is no chance from this many standard deviations on. Where the question comes up among the 273 tiny types, it
#: is at most 2.6 (Reformer, whose declaration is the same either way), or at least 8.6.
_BEYOND_CHANCE = 4

NO_SUM = "the first stream is not the token embedding and what other modules put out"


@dataclass
class FoundEmbedding:
    """What makes the first stream of a stack, with paths of the model; `declared` has those of the base model.

    Attributes:
        embedding: it.
        missing: what could not be found, by hook name.
    """

    embedding: Embedding
    missing: dict[str, str] = field(default_factory=dict)

    def declared(self, relative: Callable[[str], str]) -> Embedding:
        """The declaration of it.

        Args:
            relative: makes a path from the base model of one from the model.
        """
        found = self.embedding
        added = sorted(found.added, key=lambda table: KINDS.index(table[0]))
        return replace(found, added=tuple(added), unknown="; ".join(self.missing.values())).moved(relative)


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
    # A table of positions may run before that of tokens (FSMT): it makes the same of every row.
    tokens = next((call for call in called if not _same_for_each_row(call.left[0].value)), called[0])
    return _Search(model, recording, before, tokens, first.entered, text).run()


def _same_for_each_row(x: Tensor) -> bool:
    return x.ndim != 3 or torch.equal(x, x[:1].expand_as(x))


@dataclass
class _Search:
    """Goes back from the first stream: through a projection and a norm to a sum, and from its terms to their tables.

    Attributes:
        before: the calls that may make the first stream.
        tokens: the call of the table of tokens.
        stream: the first stream.
        text: as for `find_embedding`.
        found: as far as it is found.
        missing: as in `FoundEmbedding`.
    """

    model: nn.Module
    recording: Recording
    before: list[ModuleCall]
    tokens: ModuleCall
    stream: BorderTensor
    text: Tensor | None
    missing: dict[str, str] = field(default_factory=dict)

    def run(self) -> FoundEmbedding:
        rows = self.tokens.left[0].value
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
        return FoundEmbedding(self.found, self.missing)

    def _behind_projection(self, target: BorderTensor) -> BorderTensor:
        """What a linear layer reads that puts out the first stream; else the stream."""
        rows = self.tokens.left[0].value
        for call in reversed(self.before):
            if call.left[0].mark == target.mark and call.is_linear and call.entered:
                if call.entered.value.shape[:2] != rows.shape[:2]:
                    return target
                self.found = replace(self.found, project=call.path, module=call.path)
                return call.entered
        return target

    def _behind_norm(self, target: BorderTensor) -> BorderTensor:
        """What a norm reads that puts this out; else this. What the table of tokens norms itself is its own."""
        for call in reversed(self.before):
            if call.left[0].mark != target.mark or self.tokens.holds(call) or call.entered is None:
                continue
            if (kind := norm_kind(call)) is not None:
                self.found = replace(self.found, norm=Norm(call.path, kind))
                return call.entered
        return target

    def _projected(self, rows: Tensor, target: Tensor) -> Tensor:
        """What a linear layer makes of the token embedding, where that stands in the sum; else the embedding."""
        if self.found.project is not None or (rows.shape == target.shape and _is_in(rows, target)):
            return rows
        for call in self.before:
            if call.is_linear and call.start > self.tokens.end and call.left[0].value.shape == target.shape:
                if not _reads(call, rows):
                    return rows
                self.found = replace(self.found, project=call.path)
                return call.left[0].value
        return rows

    def _others(
        self, rows: Tensor, target: BorderTensor
    ) -> tuple[dict[ModuleCall, Tensor], dict[ModuleCall, list[str]]]:
        """What else may be added, with the further calls of the same table that put out the same."""
        known = {self.tokens.left[0].mark, target.mark, mark(rows)}
        others: dict[ModuleCall, Tensor] = {}
        again: dict[ModuleCall, list[str]] = {}
        for call in self.before:
            x = _for_each_row(call.left[0].value, target.value.shape) if call.is_leaf else None
            same = next((other for other in others if other.left[0].mark == call.left[0].mark), None)
            if x is not None and call.left[0].mark not in known:
                known.add(call.left[0].mark)
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
            own = rows is self.tokens.left[0].value
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
            reads = call.reads(self.tokens.left[0].mark)
            if weight == 1 and reads and self.found.norm is None and (kind := norm_kind(call)) is not None:
                self.found = replace(self.found, norm=Norm(call.path, kind))
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
                of_rows = call.end <= self.tokens.start and call.left[0].value.shape == others[call].shape
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
            if call.left[0].mark == self.stream.mark and call.holds(self.tokens) and not call.is_leaf
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
    factor = rounded(float((dx * dy).sum() / (dx * dx).sum()))
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
    flat = target.double().flatten()
    for count in range(len(terms)):
        columns = torch.stack([term.double().flatten() for term in terms], 1)
        if count == 0:
            columns = columns[:, :1]
        solution = torch.linalg.lstsq(columns, flat[:, None]).solution[:, 0]
        if agree(columns @ solution, flat, target):
            found = [rounded(w) if abs(w) > NEGLIGIBLE else 0.0 for w in solution.tolist()]
            return found + [0.0] * (len(terms) - len(found))
        if count == 1:
            return None
    return None
