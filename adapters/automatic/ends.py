"""Infer the embedding and the readout of a recorded model."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from adapters.architecture import KINDS, Embedding, Head, Positions, Readout, TableOf, tables
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
    one_line,
    tightest,
)
from adapters.observe.operations import behind, between, factor, is_operation, operands, parameter
from adapters.observe.recognised import FITTED, NEGLIGIBLE, agree, factor_of
from adapters.points import base_path, core_of, token_embedding
from adapters.views import Affine, Args, Chain, Kwargs, times
from adapters.views.views import place_of_input

#: Operations that write over some of a tensor's numbers.
_REPLACING = ("IndexPut", "IndexFill", "CopySlices", "MaskedScatter")

NO_SUM = "the first stream is not the sum of the token embedding and other modules' outputs"


def find_embedding(
    model: nn.Module,
    recording: Recording,
    first: ModuleCall,
    missing: dict[str, str],
    since: int = -1,
    text: Tensor | None = None,
) -> Embedding | None:
    """Return the embedding that computes the input of the first block, with the model's paths; None
    if no token embedding ran.

    Args:
        model: the model.
        recording: the recording of its run.
        first: the call of the first block.
        missing: receives the reasons for unavailable hook points, by hook name.
        since: the time after which the embeddings run: the end of the stack before.
        text: mask of token positions, ``[batch, pos]``; None: all positions.
    """
    before = [call for call in recording.before(first.start) if call.outputs and call.start > since]
    module = token_embedding(model)
    tables = [call for call in before if call.module is module]
    if not tables:
        tables = [call for call in before if isinstance(call.module, nn.Embedding)]
    if not tables or first.entered is None:
        return None
    # A position table may run before the token table (FSMT): its output is equal in every row.
    of_tokens = (call for call in tables if not _is_same_for_each_row(call.value))
    tokens = next(of_tokens, tables[0])
    return _EmbeddingSearch(model, recording, before, tokens, first.entered, text, missing).run()


def taken_as(embedding: Embedding, model: nn.Module, inputs: Given, first: ModuleCall) -> Embedding:
    """Return the embedding, completed with how the model treats `inputs_embeds`; compare the first
    block's input to find out.

    Args:
        embedding: the embedding.
        model, inputs: the model and the inputs of the run.
        first: the call of the first block.
    """
    if "input_ids" not in inputs:
        return embedding
    if not may_take(core_of(model), "inputs_embeds"):
        return embedding
    rows = model.get_submodule(embedding.tokens).forward(inputs["input_ids"])
    stream = first.entered_value
    if not isinstance(rows, Tensor):
        return embedding
    if stream is None:
        return embedding
    rows = rows.detach()
    others = {name: x for name, x in inputs.items() if name != "input_ids"}
    options: dict[Literal["rows", "multiplied"], Tensor] = {
        "rows": rows,
        "multiplied": rows * embedding.factor,
    }
    for how, x in options.items():
        try:
            entered = entering(first.module, partial(model, inputs_embeds=x, **others))
        except WRONG as error:
            one_line(error)  # it does not accept embeddings, and the model's own error says so
            return embedding
        if entered is not None and entered.shape == stream.shape and agree(entered, stream):
            return replace(embedding, given=how)
    return replace(embedding, given="other")


def entering(module: nn.Module, run: Callable[[], object]) -> Tensor | None:
    """Return a module's first input in a run, and stop the run there."""
    inputs: list[Tensor] = []

    def stop(module: nn.Module, args: Args, kwargs: Kwargs) -> None:
        place = place_of_input(module, args, kwargs)
        inputs.append(args[place] if isinstance(place, int) else kwargs[place or ""])
        raise NotFound("the first block has been reached")

    stopping = module.register_forward_pre_hook(stop, with_kwargs=True)
    with torch.no_grad(), stopping, suppress(NotFound):
        run()
    return inputs[0] if inputs else None


def _is_same_for_each_row(x: Tensor) -> bool:
    return x.ndim != 3 or torch.equal(x, x[:1].expand_as(x))


@dataclass
class _EmbeddingSearch:
    """Search from the first stream backwards: through a projection and a norm to a sum, and from
    its terms to their tables.

    Attributes:
        before: the calls before the first stream.
        tokens: the call of the token table.
        stream: the first stream.
        text: as for `find_embedding`.
        result: the embedding, as far as it is known.
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
        """Return the embedding, as far as it is known."""
        shape = self.tokens.value.shape
        turned_shape = self.stream.value.transpose(0, 1).shape
        if len(shape) == 3 and turned_shape == shape != self.stream.value.shape:
            # Blocks have positions first, the token table does not.
            self.stream = self.stream.transposed()
        self.result = Embedding(self.tokens.path)
        self._explain(self._behind_norm(self._behind_projection(self.stream)))
        added = sorted(self.result.added, key=lambda table: KINDS.index(table[0]))
        return replace(self.result, added=tuple(added))

    def _behind_projection(self, target: BorderTensor) -> BorderTensor:
        """Return the input of the linear layer that outputs the first stream; the stream if there
        is none.
        """
        for call in reversed(self.before):
            if call.returned.mark == target.mark and call.is_linear and call.entered:
                if call.entered.value.shape[:2] != self.tokens.value.shape[:2]:
                    return target
                self.result = replace(self.result, project=call.path, module=call.path)
                return call.entered
        return target

    def _behind_norm(self, target: BorderTensor) -> BorderTensor:
        """Return the input of the norm that outputs the target; the target if there is none. A norm
        inside the token table is part of the table.
        """
        for call in reversed(self.before):
            if call.returned.mark != target.mark:
                continue
            if self.tokens.holds(call):
                continue
            if call.entered is None:
                continue
            if norm := norm_of(call):
                self.result = replace(self.result, norm=norm)
                return call.entered
        return target

    def _terms(
        self, target: BorderTensor
    ) -> tuple[dict[ModuleCall, Tensor], dict[ModuleCall, list[str]]]:
        """Return the other candidate terms, each with the repeated calls of its table that have the
        same output.
        """
        known = {self.tokens.returned.mark: self.tokens}
        terms: dict[ModuleCall, Tensor] = {}
        again: dict[ModuleCall, list[str]] = {}
        for call in self.before:
            mark = call.returned.mark
            if not call.is_leaf:
                continue
            if mark == target.mark and not self._projects(call):
                continue
            same = known.get(mark)
            x = _for_each_row(call.value, target.value.shape) if same is None else None
            if x is not None:
                known[mark] = call
                terms[call] = x
            elif same in terms and same is not None and same.module is call.module:
                again.setdefault(same, []).append(self.recording.numbered(call))
        return terms, again

    def _projects(self, call: ModuleCall) -> bool:
        """Tell whether a linear layer's input begins with the token embedding."""
        x = call.entered_value
        rows = self.tokens.value
        if x is None or not call.is_linear:
            return False
        return torch.equal(x[..., : rows.shape[-1]], rows)

    def _explain(self, target: BorderTensor) -> None:
        """Explain the sum as the token embedding times a factor, plus tables."""
        rows = self.tokens.value
        terms, again = self._terms(target)
        candidates = {self.tokens: rows} if rows.shape == target.value.shape else {}
        candidates |= terms
        text = 1 if self.text is None else self.text.unsqueeze(-1)
        masked = [x * text for x in candidates.values()]
        weights = _weights(target.value * text, masked)
        if weights is None:
            self._explain_without_modules(target)
            return
        added = dict(zip(candidates, weights, strict=True))
        factor = added.pop(self.tokens, 0.0) or self._projected(added)
        if factor == 0 and not self._normed_alone(added):
            self._refuse(target)
            return
        self.result = replace(self.result, transform=times(factor or 1.0))
        self._name(terms, added, again)
        if factor != 0:
            self._around()

    def _projected(self, added: dict[ModuleCall, float]) -> float:
        """Return the factor of the projected token embedding in the sum; zero if no linear layer's
        output is a term of the sum.
        """
        if self.result.project is not None:
            return 0.0
        for call, weight in added.items():
            if weight != 0 and self._projects(call):
                self.result = replace(self.result, project=call.path)
                added[call] = 0.0
                return weight
        return 0.0

    def _explain_without_modules(self, target: BorderTensor) -> None:
        """Explain the sum by parameters and buffers that the model itself adds."""
        transform = self._adjusted(target)
        if transform is None:
            transform = _placed(self.model, self.tokens.value, target.value)
            if transform is None:
                self._refuse(target)
                return
            if transform[-1].plus is None:
                self.missing["hook_pos_embed"] = (
                    "no module, parameter or buffer holds the term that is added for each position"
                )
        self.result = replace(self.result, transform=transform)

    def _refuse(self, target: BorderTensor) -> None:
        """Record why the token embedding is not known."""
        rows = tuple(self.tokens.value.shape)
        stream = tuple(target.value.shape)
        self.missing["hook_embed"] = NO_SUM
        if rows != stream:
            self.missing["hook_embed"] = (
                f"{self.tokens.path} returns the shape {rows}, the stream has {stream}"
            )

    def _adjusted(self, target: BorderTensor) -> Chain | None:
        """Return the factor and the base model's parameters between the token embedding and the
        first stream, or None.
        """
        base = self.model.get_submodule(base_path(self.model))
        names = {p.data_ptr(): name for name, p in base.named_parameters(recurse=False)}
        start = behind(self.tokens.returned.node)
        node = behind(target.node)
        chain: Chain = ()
        while node is not start:
            if product := factor(node, names):
                node, by = product
            elif is_operation(node, "Add"):
                added = {parameter(operand, names): operand for operand in operands(node)}
                node = added.pop(None, None)
                by = tuple(Affine(plus=name) for name in added)
                if not by:
                    return None
            else:
                return None
            chain = (*by, *chain)
            node = behind(node)
        return chain

    def _normed_alone(self, added: dict[ModuleCall, float]) -> bool:
        """Tell whether one term of the sum is a norm of the token embedding, and so not a table."""
        for call, weight in added.items():
            reads = call.reads(self.tokens.returned.mark)
            if weight == 1 and reads and self.result.norm is None and (norm := norm_of(call)):
                self.result = replace(self.result, norm=norm)
                added[call] = 0.0
        return self.result.norm is not None

    def _name(
        self,
        terms: dict[ModuleCall, Tensor],
        added: dict[ModuleCall, float],
        again: dict[ModuleCall, list[str]],
    ) -> None:
        """Declare each table as positions, token types or a further one."""
        n_types = getattr(config_of(self.model).get_text_config(), "type_vocab_size", None)
        for call in sorted(added, key=lambda call: not _has_rows(call, n_types)):
            weight = added[call]
            if weight != 0:
                self._add(call, terms[call], weight, again.get(call, []))

    def _add(self, call: ModuleCall, x: Tensor, weight: float, repeated: list[str]) -> None:
        """Declare one table.

        Args:
            call: the call of the table.
            x: its output, for each batch row.
            weight: its factor in the sum.
            repeated: the paths of further calls with the same output.
        """
        is_of_types = bool((x == x[:, :1]).all())
        is_taken = (self.result.types if is_of_types else self.result.positions) is not None
        kind: TableOf = "types" if is_of_types else "positions"
        path = self.recording.numbered(call)
        count = 1 + len(repeated)
        # One table may be used for several sides (UDOP).
        is_further = path != call.path if weight == 1 else weight == count
        if is_further or (weight == count and is_taken):
            self._declare("more", path, *repeated)
        elif is_taken or weight != 1:
            name = "hook_token_types" if is_of_types else "hook_pos_embed"
            self.missing[name] = f"{call.path} is added to the token embedding, times {weight:g}"
        else:
            by_row = call.end <= self.tokens.start and call.value.shape == x.shape
            self._declare("row positions" if by_row and not is_of_types else kind, call.path)

    def _declare(self, kind: TableOf, *paths: str) -> None:
        tables = tuple((kind, path) for path in paths)
        self.result = replace(self.result, added=self.result.added + tables)

    def _around(self) -> None:
        """Record the module that outputs the first stream, if that is a norm of a sum."""
        result = self.result
        if result.module is not None:
            return
        if result.norm is None:
            return
        if not (result.positions or result.types or result.project):
            return
        producers = [call for call in self.before if call.returned.mark == self.stream.mark]
        around = [call for call in producers if call.holds(self.tokens) and not call.is_leaf]
        # Without a module around them, the norm outputs the first stream.
        self.result = replace(result, module=(tightest(around) or result.norm).path)


def _placed(model: nn.Module, tokens: Tensor, target: Tensor) -> Chain | None:
    """Return the factor of the token embedding and the position table added to it, if the table is
    a parameter or a buffer.

    Without such a table, return only the factor; None if the first stream has other terms.
    """
    x = tokens.double()
    y = target.double()
    if x.shape != y.shape:
        return None
    if len(x) < 2:
        return None
    factor = rounded(factor_of(y - y.mean(0), x - x.mean(0)))
    rest = y - factor * x
    if abs(factor) <= NEGLIGIBLE:
        return None
    if not agree(rest, rest[:1].expand_as(rest), target):
        return None
    n_positions, width = rest.shape[1:]
    base = model.get_submodule(base_path(model))
    for name, held in itertools.chain(base.named_parameters(), base.named_buffers()):
        if not held.ndim:
            continue
        if held.shape[-1] != width:
            continue
        table = held.detach().double().reshape(-1, width)[:n_positions].to(rest)
        if len(table) in (1, n_positions) and agree(table, rest[0], target):
            return (*times(factor), Affine(plus=name))
    return (Affine(factor),)


def _has_rows(call: ModuleCall, count: int | None) -> bool:
    """Tell whether a table has as many rows as the configuration has token types."""
    table = getattr(call.module, "weight", None)
    if not isinstance(table, Tensor):
        return False
    return table.shape[0] == count


def _for_each_row(x: Tensor, shape: torch.Size) -> Tensor | None:
    """Return a tensor expanded to every batch row, if it is ``[batch, pos, d]``, ``[1, pos, d]`` or
    ``[pos, d]``; otherwise None.
    """
    if x.ndim == 2:
        x = x.unsqueeze(0)
    if x.ndim != 3:
        return None
    if x.shape[-1] != shape[-1]:
        return None
    if x.shape[0] not in (1, shape[0]):
        return None
    if x.shape[1] not in (1, shape[1]):
        return None
    return x.expand(shape)


def _weights(target: Tensor, terms: list[Tensor]) -> list[float] | None:
    """Return the factors with which the fewest terms form a sum; None if they do not."""
    y = target.double().flatten()
    if not terms:
        return None
    columns = torch.stack([term.double().flatten() for term in terms], 1)
    for count in (1, len(terms)):
        used = columns[:, :count]
        weights = torch.linalg.lstsq(used, y[:, None]).solution[:, 0]
        if agree(used @ weights, y, target):
            factors = [rounded(w) if abs(w) > NEGLIGIBLE else 0.0 for w in weights.tolist()]
            return factors + [0.0] * (len(terms) - count)
    return None


# --------------------------------------------------------------------------------------------------
# Embedding of patches, and pooling of the last stream, in a recording of a vision model.
# --------------------------------------------------------------------------------------------------


#: Position ranges whose mean is tried: the class token, all, all after the class token and
#: registers.
_POOLS: tuple[Positions, ...] = ((0, 1), (0, None), *((n, None) for n in range(1, 9)), (0, 2))


def find_patches(recording: Recording, first: ModuleCall) -> Embedding:
    """Return the embedding of patches that computes the input of the first block, with the model's
    paths.

    Args:
        recording: the recording of a run.
        first: the call of the first block.
    """
    if first.entered is None or first.entered.value.ndim != 3:
        return Embedding()
    stream = first.entered
    before = [call for call in recording.before(first.start) if len(call.outputs) == 1]
    makers = [call for call in before if call.returned.mark == stream.mark]
    makers = [call for call in makers if call.returned.key is None]
    module = max(makers, key=lambda call: call.end, default=None)
    if module is None or len(recording.of(module.path)) > 1:
        return Embedding()
    last_norm = None
    total = stream
    for call in makers:
        if call.entered and (norm := norm_of(call)):
            last_norm = norm
            total = call.entered
    patches = next((call.path for call in before if _makes_patches(call, total.value)), None)
    return Embedding(added=tables(patches=patches), norm=last_norm, module=module.path)


def _as_patches(call: ModuleCall) -> Tensor:
    """Return the patch layer's output as ``[batch, patch, d_model]``."""
    if isinstance(call.module, nn.Conv2d) and call.value.ndim == 4:
        return call.value.flatten(2).transpose(1, 2)
    return call.value


def _makes_patches(call: ModuleCall, stream: Tensor) -> bool:
    """Tell whether a layer's vectors are the last of the stream, up to a term that is the same for
    each image.
    """
    if not isinstance(call.module, nn.Conv2d | nn.Linear):
        return False
    patches = _as_patches(call)
    if patches.ndim != 3:
        return False
    if patches.shape[::2] != stream.shape[::2]:
        return False
    n_patches = patches.shape[1]
    if n_patches > stream.shape[1]:
        return False
    rest = stream[:, -n_patches:] - patches
    return agree(rest[:1].expand_as(rest), rest, stream)


@dataclass(frozen=True)
class Pool:
    """The pooled vector of each image.

    Attributes:
        positions: see `adapters.architecture.Readout`.
        norm: the norm that reads it, with its path from the model; None if it is the mean of the
            final norm's output.
        unembed: the layer that outputs the logits.
    """

    positions: Positions
    norm: Norm | None
    unembed: ModuleCall | None


def find_pool(
    recording: Recording, last: BorderTensor, final: Norm | None, after: int, logits: Tensor | None
) -> Pool | None:
    """Return the mean over positions that the final norm or the output layer reads; None if there
    is none.

    Args:
        recording: the recording of a run.
        last: the last stream.
        final: the norm that reads it, with its path from the model.
        after: the time at which the last block ended.
        logits: the model's first output.
    """
    x = recording.of(final.path)[-1].value if final else last.value
    if x.ndim != 3:
        return None
    calls = [call for call in recording.after(after) if call.entered and call.outputs]
    pools = _pools(calls, x)
    norms = ((call, norm_of(call)) for call in pools if final is None)
    reader, norm = next((both for both in norms if both[1]), (None, None))
    for call in calls:
        if logits is None or not call.is_linear or call.value.shape != logits.shape:
            continue
        if not agree(call.value, logits):
            continue
        if call in pools:  # even if a norm also reads the vector (CLIP)
            return Pool(pools[call], None, call)
        if reader and call.reads(reader.returned.mark):
            return Pool(pools[reader], norm, call)
    return None if reader is None else Pool(pools[reader], norm, None)


def _pools(calls: Sequence[ModuleCall], x: Tensor) -> dict[ModuleCall, Positions]:
    """Return the calls that read the mean of a tensor over some of its positions, with these
    positions."""
    pools: dict[ModuleCall, Positions] = {}
    for call in calls:
        vector = call.entered_value
        if vector is None:
            continue
        if vector.shape != x[:, 0].shape:
            continue
        for pool in _POOLS:
            rows = x[:, slice(*pool)]
            if rows.shape[1] and agree(rows.mean(1), vector):
                pools[call] = pool
                break
    return pools


# --------------------------------------------------------------------------------------------------
# Readout: final norm, output layer, and the operations between it and the logits.
# --------------------------------------------------------------------------------------------------


def find_final_norm(
    recording: Recording, last: BorderTensor, after: int
) -> tuple[Norm | None, float]:
    """Return the norm that reads the last stream, and the factor by which the stream is multiplied
    before it.
    """
    readers = [call for call in recording.after(after) if call.entered]
    for call in readers:
        if call.reads(last.mark) and (norm := norm_of(call)):
            return norm, 1.0
    for call in readers[:1]:
        power = call.entered and power_between(call.entered.value, last.value)
        if power and (norm := norm_of(call)):
            return norm, power
    return None, 1.0


def find_unembedding(model: nn.Module, recording: Recording, after: int) -> ModuleCall | None:
    """Return the call of the output layer."""
    layer = None
    for module in model.modules():  # the text model inside may define it (BLIP)
        find: Callable[[], nn.Module | None] | None = getattr(module, "get_output_embeddings", None)
        layer = layer or (find() if find else None)
    calls = [call for call in recording.after(after) if call.outputs]
    if not isinstance(layer, nn.Embedding):
        return next((call for call in calls if call.module is layer), None)
    # The model may name its embedding instead (FSMT): the output layer then shares its matrix, or
    # has the model's output.
    returned = {output.mark for output in recording.calls[0].outputs}
    for call in calls:
        is_tied = getattr(call.module, "weight", None) is layer.weight
        if call.is_linear and (is_tied or call.returned.mark in returned):
            return call
    return None


def find_head(recording: Recording, core: str, unembed: ModuleCall, after: int) -> Head | None:
    """Return the linear layer and the norm between the last stream and the output layer, and the
    module around both.

    Without a norm, the module contains the output layer too, or its output is the output layer's
    input. Without a module around them, it is the linear layer itself.

    Args:
        recording, unembed: as for `what_is_read`.
        core: the path of the Hugging Face model inside a wrapper.
        after: the time at which the last block ended.
    """

    after_blocks = recording.after(after)
    before = [call for call in after_blocks if call.end < unembed.start]
    linear = [call for call in before if call.is_linear]
    for call in before:
        norm = norm_of(call) if unembed.reads(call.returned.mark) else None
        earlier = [other for other in linear if other.end < call.start]
        if norm and earlier:
            last = earlier[-1]
            around = [other for other in after_blocks if other.holds(call) and other.holds(last)]
            # DistilBERT has no module around both.
            return _head(core, tightest(around) or last, last, norm)
    if not linear:
        return None
    around = [call for call in after_blocks if call.holds(linear[-1])]
    with_output = [call for call in around if call.holds(unembed)]
    module = tightest(with_output)
    if module is None:
        read = [call for call in around if call in before and not call.is_leaf and call.outputs]
        module = tightest(call for call in read if unembed.reads(call.returned.mark))
    return _head(core, module, linear[-1]) if module else None


def _head(core: str, around: ModuleCall, linear: ModuleCall, norm: Norm | None = None) -> Head:
    """Return a head with its paths from the Hugging Face model."""
    if norm is not None:
        norm = replace(norm, path=f".{relative(norm.path, core)}")
    module = f".{relative(around.path, core)}"
    return Head("mlm_head", module, f".{relative(linear.path, core)}", norm=norm)


def what_is_read(
    recording: Recording, unembed: ModuleCall, last: Tensor, norm: Norm | None, on_stream: bool
) -> tuple[Tensor, Norm | None]:
    """Return the final norm's output (the last stream if there is no norm), and the norm itself if
    it is a plain function.

    Args:
        recording: the recording of a run.
        unembed: the call of the output layer.
        last: the last stream.
        norm: the final norm, if it is a module, with its path from the model.
        on_stream: whether the last step is a norm on the stream itself.
    """
    if norm is not None:
        return recording.of(norm.path)[-1].value, None
    if on_stream or unembed.entered is None:
        return last, None
    kind = function_norm(last, unembed.entered.value)
    if kind is None:
        return (last, None)
    return (kind.of(last), Norm("", kind))


def find_readout(
    recording: Recording, core: nn.Module, path: str, unembed: ModuleCall, factor_in: float | None
) -> tuple[Readout, str]:
    """Return how logits are computed from the output layer's input, and a message about what is
    unknown.

    Args:
        recording, unembed: as for `find_head`.
        core: the Hugging Face model.
        path: the path of the output layer, relative to `core`.
        factor_in: the factor between the norm of the last stream and the output layer's input; None
            if they are not proportional.
    """
    if factor_in is None:
        unknown = f"the input of {path} is neither the last stream nor a known norm of it"
        return Readout(path), unknown
    readout = Readout(path, factor_in)
    logits = recording.calls[0].returned
    start = behind(unembed.returned.node)
    operations = between(logits.node, start)
    cap = operations.cap
    if is_operation(operations.start, *_REPLACING):
        return readout, "the model replaces the logits of some tokens by a constant"
    if operations.start is not start or (cap and operations.adds):
        return readout, f"there is an unknown operation between {path} and the logits"
    scale = rounded(operations.factor)
    if not operations.adds:
        cap = rounded(cap) if cap else None
        return replace(readout, output_transform=Affine(scale), soft_cap=cap), ""
    product = scale * unembed.value.double()[..., : logits.value.shape[-1]]
    rest = logits.value.double() - product
    name = _holder_of(core, rest.flatten(0, -2)[0])
    if name is None:
        return readout, f"no parameter of the model holds the term that is added behind {path}"
    return replace(readout, output_transform=Affine(scale, plus=name)), ""


def factor_between(x: Tensor, y: Tensor) -> float | None:
    """Return the factor that turns one tensor into another; None if there is none."""
    if x.shape != y.shape:
        return None
    a = x.double().flatten()
    b = y.double().flatten()
    factor = float(a @ b / (a @ a).clamp_min(1e-30))
    if factor > 0 and agree(factor * a, b, y):
        return rounded(factor)
    return None


def returned_by(model: nn.Module, inputs: Given) -> Tensor | None:
    """Return a model's first output, logits if it has them; None if that is not a tensor."""
    with torch.no_grad():
        logits = next(iter(elements_of(model(**inputs))), None)
    return logits if isinstance(logits, Tensor) else None


def _holder_of(model: nn.Module, bias: Tensor) -> str | None:
    """Return the path of the parameter or buffer that holds a bias."""
    close = FITTED * float(bias.abs().max())
    for name, held in itertools.chain(model.named_parameters(), model.named_buffers()):
        if held.numel() != bias.numel():
            continue
        if held.is_meta:
            continue
        numbers = held.detach().double().reshape(-1).to(bias.device)
        if float((numbers - bias).abs().max()) <= close:
            return name
    return None
