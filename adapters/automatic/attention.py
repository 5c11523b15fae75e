"""Infer the queries, keys, values and output projection of a recorded attention by gradient."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from adapters.attention import (
    GATE_FUNCTIONS,
    UNKNOWN,
    AddedOutput,
    Attention,
    Gate,
    Projection,
    SinkGate,
    result_of,
)
from adapters.automatic.norms import heads_view, parameter_of, relative, rounded
from adapters.automatic.parts import FoundPart, Norms
from adapters.mixers import axes_of
from adapters.norms import OPAQUE_NORM, Norm
from adapters.observe.gradients import (
    by_position,
    disjoint_sets,
    either,
    gradient_of,
    gradients_of_scores,
    gradients_of_z,
)
from adapters.observe.observe import ModuleCall, NotFound, Recording, Softmax, one_line
from adapters.observe.operations import (
    behind,
    between,
    clamp_before,
    factor,
    is_operation,
    operands,
    parameter,
    selected_from,
)
from adapters.observe.recognised import (
    ROUNDED_TABLE,
    agree,
    worked_out,
)
from adapters.points import join
from adapters.views import Affine, Composed, Heads, OneHead

#: The columns of each head in a projection's output.
Sets = tuple[tuple[int, ...], ...]


class _HeadColumns(NamedTuple):
    """A projection of queries, keys or values.

    Attributes:
        call: the call of the linear layer.
        columns: the columns of each head in its output.
        norm: the call of the norm over all heads that follows it, if the projection was identified
            from that norm's output.
    """

    call: ModuleCall
    columns: Sets
    norm: ModuleCall | None


def of_attention(softmaxes: Sequence[Softmax]) -> list[Softmax]:
    """Return the softmaxes over query-key scores, or all if there are none; drop duplicates that
    have identical scores.
    """
    over_products = [softmax for softmax in softmaxes if softmax.query is not None]
    distinct: list[Softmax] = []
    for softmax in over_products or softmaxes:
        if not any(torch.equal(softmax.scores, other.scores) for other in distinct):
            distinct.append(softmax)
    return distinct


class FoundAttention:
    """Inferred structure of an attention.

    Args:
        part: the part.
        recording: the run.
        norms: the norms of its block.
        block: the call of its block.
        earlier: the attentions of earlier blocks, by index.
        kernel_alone: do not search for the projections of queries, keys and values, nor for the
            output projection.

    Attributes:
        declared: its declaration, for later attentions that share its keys and values.
        keys_of: the index of the attention whose keys and values it reads, and that attention.
        projections: the projections of queries, keys and values, by letter.
        missing: reasons, by letter, why projections were not found.
        cross: whether its keys are at the encoder's positions.

    Raises:
        NotFound: it cannot be declared as an attention.
    """

    declared: Attention | None = None
    keys_of: tuple[int, FoundAttention] | None = None
    #: A norm of queries or keys follows their rotation.
    normed_last = False
    #: The limit to which queries and keys are clamped, and whether that is behind their norm.
    clip: float | None = None
    clips_normed = False
    #: A layer's output, one number per head, is added to the scores.
    adds = False

    def __init__(
        self,
        part: FoundPart,
        recording: Recording,
        norms: Norms,
        block: ModuleCall,
        earlier: Mapping[int, FoundAttention],
        *,
        kernel_alone: bool = False,
    ) -> None:
        self.part = part
        self.recording = recording
        self.norms = norms
        self.block = block
        self.earlier = earlier
        self.projections: dict[str, _HeadColumns] = {}
        self.missing: dict[str, str] = {}
        #: The parameters added behind the projections, with their values, ``[head, d_head]``.
        self.biases: dict[str, tuple[str, Tensor]] = {}
        # Its layers may be children of the block itself (LLaDA).
        self.owner = part.owner or block
        self._read_softmax()
        if not kernel_alone:
            self._read_output()
            self.sources = self._sources()
            self._trace()

    def _read_softmax(self) -> None:
        """Read the sizes of the attention from its softmax."""
        softmaxes = of_attention(self.part.softmaxes)
        if len(softmaxes) != 1:
            raise NotFound(f"it computes {len(self.part.softmaxes)} softmaxes")
        self.softmax: Softmax = softmaxes[0]
        batch = self.recording.batch
        shape = self.softmax.scores.shape
        self.flat_heads = len(shape) == 3 and shape[0] % batch == 0 and shape[1] > 1
        if self.flat_heads:
            self.softmax = replace(
                self.softmax,
                scores=self.softmax.scores.unflatten(0, (batch, -1)),
                pattern=self.softmax.pattern.unflatten(0, (batch, -1)),
            )
            shape = self.softmax.scores.shape
        if len(shape) != 4 or shape[0] != batch:
            raise NotFound(
                f"its scores have the shape {tuple(shape)}, not [batch, head, query, key]"
            )
        _, self.n_heads, self.query_pos, self.key_pos = shape
        self.cross = self.key_pos not in (self.query_pos, self.query_pos + 1)

    def _read_output(self) -> None:
        """Read the input of the output projection, head by head."""
        producer = self.part.producer
        if not producer.is_linear or producer.entered is None:
            raise NotFound(f"{producer.path}, which computes its result, is not a linear layer")
        self.z = producer.entered
        z = by_position(self.z.live, self.recording.batch, self.query_pos)
        if z is None or z.shape[-1] % self.n_heads:
            shape = tuple(self.z.value.shape)
            raise NotFound(f"what enters its output projection has the shape {shape}")
        if self.z.value.ndim != 3:
            raise NotFound("what enters its output projection is not [batch, pos, (head d_head)]")
        self.z_by_head = z.unflatten(-1, (self.n_heads, -1))
        self.mixed = self._before_norm(z).unflatten(-1, (self.n_heads, -1))

    def _before_norm(self, z: Tensor) -> Tensor:
        """Return the input of the output projection, or the input of a norm over all heads before
        it: after such a norm, every column depends on all heads.
        """
        for norm in self.norms:
            if not self.owner.holds(norm):
                continue
            if norm.returned.mark != self.z.mark:
                continue
            if norm.entered and norm.entered.live.shape == z.shape:
                return norm.entered.live
        return z

    def _sources(self) -> list[ModuleCall]:
        """Return the calls that may produce queries, keys and values: linear layers and norms of
        the part, in order.
        """
        sources = []
        for call in self.recording.inside(self.owner):
            if call.end >= self.part.producer.start:
                continue
            if len(call.outputs) != 1:
                continue
            if not call.returned.live.requires_grad:
                continue
            if call.is_linear or call in self.norms:
                sources.append(call)
        return sources

    # ----------------------------------------------------------------------------------------------
    # Projections, by gradient.
    # ----------------------------------------------------------------------------------------------

    def _trace(self) -> None:
        """Find the projections, and what happens between them and the product."""
        scores = self.softmax.scores
        reachable = scores.requires_grad and self.z_by_head.requires_grad
        if not self.sources or not reachable:
            raise NotFound("no linear layer inside of it has a gradient")
        query, keys = self.probed
        if keys[-1] >= scores.shape[-1]:
            raise NotFound(f"its scores have {scores.shape[-1]} keys")
        try:
            from_query, from_keys = self._from_scores(query, keys)
            reaching_z = self._from_z(query)
            values = self._without_gates(reaching_z, query)
        except RuntimeError as error:
            raise NotFound(f"no gradient can be taken: {one_line(error)}") from None
        self.gates = list(self._gates(reaching_z, values))
        self._add_projection("q", from_query)
        self._add_projection("v", values)
        self._add_projection("k", from_keys)
        if self.missing.keys() == {"k", "v"}:
            self._read_those_of_another()
        for letter in "qk":
            if bias := self._bias_behind(letter):
                self.biases[letter] = bias
        self._read_clamp()

    @property
    def probed(self) -> tuple[int, list[int]]:
        """Return the position of the query whose scores are differentiated, and the positions of
        its keys."""
        query = min(5, self.query_pos - 1)
        return query, [max(query - 2, 0), max(query - 1, 1)]

    @property
    def _own_keys(self) -> int:
        """Return the number of keys; a sink is not a key."""
        if self.key_pos == self.query_pos + 1:
            return self.query_pos
        return self.key_pos

    @property
    def _live(self) -> list[Tensor]:
        return [call.returned.live for call in self.sources]

    def _from_scores(self, query: int, keys: Sequence[int]) -> tuple[list[Tensor | None], ...]:
        """Return the columns that reach each head's scores, from the query and from the keys."""
        return gradients_of_scores(
            self.softmax.scores,
            self._live,
            query=query,
            keys=keys,
            query_pos=self.query_pos,
            key_pos=self._own_keys,
        )

    def _from_z(self, query: int) -> list[Tensor | None]:
        """Return the columns that reach each head's `z` for a query."""
        return gradients_of_z(self.mixed, self._live, query=query, key_pos=self._own_keys)

    def _without_gates(self, reached: Sequence[Tensor | None], query: int) -> list[Tensor | None]:
        """Return the columns that reach each head's `z`, for value projections only."""
        both = zip(self.sources, reached, strict=True)
        return [mask if self._from_before(call, query) else None for call, mask in both]

    def _from_before(self, call: ModuleCall, query: int) -> bool:
        """Tell whether `z` at a position depends on a call's output at the previous one. For a gate
        it does not.
        """
        z = self.mixed[:, query]
        gradient = gradient_of(z.pow(2).sum() + z.sum(), call.returned.live)
        if gradient is None:
            return False
        rows = by_position(gradient, self.recording.batch, self.query_pos)
        if rows is None and self.cross:
            rows = by_position(gradient, self.recording.batch, self.key_pos)
        if rows is None:
            return False
        return bool(rows[:, query - 1].any())

    def _gates(
        self, reached: Sequence[Tensor | None], values: Sequence[Tensor | None]
    ) -> Iterator[tuple[ModuleCall, Sets]]:
        """Yield the linear layers that reach `z` at their own position only, with their columns."""
        for call, mask, value in zip(self.sources, reached, values, strict=True):
            if mask is None:
                continue
            if value is not None:
                continue
            if not call.is_linear:
                continue
            sets = disjoint_sets(mask)
            if sets and len(sets) == self.n_heads:
                yield call, sets

    def _add_projection(self, letter: str, reached: Sequence[Tensor | None]) -> None:
        """Store the projection of queries, keys or values, or the reason why there is none."""
        carrier = self._carrier(reached)
        width = self._width(letter)
        # Clamped values have no gradient.
        if not self.cross and (carrier is None or len(carrier.columns[0]) != width < math.inf):
            carrier = self._carrier(self._of_all_queries(letter)) or carrier
        if carrier is None or len(carrier.columns[0]) > width:  # it reaches other heads too
            self.missing[letter] = "no projection has columns of its own for each head"
        else:
            self.projections[letter] = carrier

    def _read_those_of_another(self) -> None:
        """Take keys and values from the earlier attention whose keys are identical."""
        key = self.softmax.key
        path = relative(self.owner.path, self.block.path)
        for index, other in self.earlier.items():
            its = other.softmax.key
            if key is None:
                continue
            if its is None:
                continue
            if not torch.equal(its, key):
                continue
            if other.declared is not None and other.declared.path == path:
                self.keys_of = index, other
                self.projections["k"] = other.projections["k"]
                self.projections["v"] = other.projections["v"]
                self.missing.clear()
                return

    def _width(self, letter: str) -> float:
        """Return the number of columns per head of queries, keys or values; infinity if unknown."""
        factor = self.z_by_head if letter == "v" else self.softmax.factor(letter)
        if factor is None:
            return math.inf
        return factor.shape[-1]

    def _of_all_queries(self, letter: str) -> list[Tensor | None]:
        """Return the columns that reach each head's scores, or its `z`, for any query."""
        total: list[Tensor | None] = [None] * len(self.sources)
        for query in range(3, self.query_pos):
            if letter == "v":
                masks = self._without_gates(self._from_z(query), query)
            else:
                from_query, from_keys = self._from_scores(query, [query - 3, query - 1])
                masks = from_query if letter == "q" else from_keys
            total = list(map(either, total, masks))
        return total

    def _carrier(self, reached: Sequence[Tensor | None]) -> _HeadColumns | None:
        """Return the last linear layer that has separate columns for each head, the columns, and
        the norm over all heads after it.
        """
        for index in reversed(range(len(self.sources))):
            call = self.sources[index]
            mask = reached[index]
            sets = None if mask is None else disjoint_sets(mask)
            if mask is None:
                continue
            if sets is None:
                continue
            if call.entered is None:
                continue
            if self._is_added(call, sets):
                continue
            if not self._are_adjacent(mask, sets):
                continue
            if call.is_linear:
                return _HeadColumns(call, sets, None)
            if carrier := self._before_norm_over_heads(call, sets, self.sources[:index]):
                return carrier
        return None

    def _is_added(self, call: ModuleCall, sets: Sets) -> bool:
        """Tell whether a call computes a number per head that is added to a key's scores (Doge), or
        an input of that number.
        """
        if len(sets[0]) == 1 < self.z_by_head.shape[-1]:
            self.adds = True
            return True
        if not self.adds:
            return False
        if "v" not in self.projections:
            return False
        return call is self.projections["v"].call

    def _are_adjacent(self, mask: Tensor, sets: Sets) -> bool:
        """Tell whether the heads of each group that shares columns are adjacent."""
        if self.n_heads % len(sets):
            return False
        group = self.n_heads // len(sets)
        for head, row in enumerate(mask):
            if tuple(row.nonzero().flatten().tolist()) != sets[head // group]:
                return False
        return True

    def _before_norm_over_heads(
        self, norm: ModuleCall, sets: Sets, before: Sequence[ModuleCall]
    ) -> _HeadColumns | None:
        """Return the projection whose output a norm over all heads reads. The norm's input has the
        layout of its output.
        """
        assert norm.entered is not None
        shape = norm.entered.value.shape
        for call in reversed(before):
            if not call.is_linear:
                continue
            if call.value.shape[:-1] != shape[:-1]:
                continue
            if columns := self._columns_read(norm, call):
                shifted = [tuple(columns[column] for column in head) for head in sets]
                return _HeadColumns(call, tuple(shifted), norm)
        return None

    @staticmethod
    def _columns_read(norm: ModuleCall, linear: ModuleCall) -> list[int]:
        """Return the columns of a linear layer's output that a norm reads, clamped or not; an empty
        list if it reads something else.
        """
        assert norm.entered is not None
        if selected_from(norm.entered.node) is not selected_from(linear.returned.node):
            return []
        gradient = gradient_of(norm.entered.live.sum(), linear.returned.live)
        if gradient is None:
            return []
        return gradient.flatten(0, -2).any(0).nonzero().flatten().tolist()

    # ----------------------------------------------------------------------------------------------
    # What happens to queries and keys between their projections and the product.
    # ----------------------------------------------------------------------------------------------

    def _read_clamp(self) -> None:
        """Read the limit to which queries and keys are clamped, if it cut off any of them."""
        stops = {call.returned.node for call in self.sources}
        for call in (self.owner, self.block):
            if call.entered:
                stops.add(behind(call.entered.node))
        for letter in "qk":
            product = self.softmax.factor(letter)
            norm = self.norm_call(letter)
            if letter not in self.projections:
                continue
            if product is None:
                continue
            largest = self.normed(letter).abs().max()
            limit = clamp_before(product.grad_fn, stops)
            if limit is not None and norm is not None:
                self.clips_normed = bool(largest > limit)
            elif norm is not None and norm.entered:
                limit = clamp_before(norm.entered.node, stops)
                largest = self._projected(letter).abs().max()
            if limit is not None and largest > limit:
                self.clip = limit
                return

    def _bias_behind(self, letter: str) -> tuple[str, Tensor] | None:
        """Return the parameter that is added between a projection and the product, with its values
        ``[head, d_head]``.
        """
        query = self.softmax.factor(letter)
        if letter not in self.projections:
            return None
        if query is None:
            return None
        call, columns, _ = self.projections[letter]
        node = behind(query.grad_fn)
        while (product := factor(node, {})) is not None:
            node = behind(product[0])
        if not is_operation(node, "Add"):
            return None
        parameters = dict(self.owner.module.named_parameters())
        names = {parameter.data_ptr(): name for name, parameter in parameters.items()}
        projected = None
        bias = None
        for operand in operands(node):
            if name := parameter(operand, names):
                bias = name
            elif selected_from(operand) is selected_from(call.returned.node):
                projected = operand
        if projected is None or bias is None:
            return None
        values = parameters[bias].detach()
        return bias, values.reshape(len(columns), len(columns[0]))

    def made_by(self, letter: str) -> ModuleCall:
        """Return the call that outputs queries, keys or values: their norm, or else their
        projection.
        """
        return self.norm_call(letter) or self.projections[letter].call

    def norm_call(self, letter: str) -> ModuleCall | None:
        """Return the call of the norm between a projection and the scores, or None."""
        if self.keys_of is not None and letter != "q":
            return self.keys_of[1].norm_call(letter)
        if letter not in self.projections:
            return None
        projection = self.projections[letter]
        if projection.norm is not None:
            return projection.norm
        # The norm follows the projection, and is as wide as one head or as all of them.
        columns = sorted(itertools.chain(*projection.columns))
        for call in self.sources:
            x = call.entered_value
            if call.is_linear or call.start < projection.call.end or x is None:
                continue
            if x.shape[-1] not in (len(columns), len(projection.columns[0])):
                continue
            if self._columns_read(call, projection.call) == columns:
                return call
            if letter in "qk" and self._is_last(letter, call):
                self.normed_last = True
                return call
        return None

    def _is_last(self, letter: str, norm: ModuleCall) -> bool:
        """Tell whether a norm outputs the queries (keys) of the product, before they are repeated
        for groups.
        """
        factor = self.softmax.factor(letter)
        if factor is None:
            return False
        return selected_from(factor.grad_fn) is selected_from(norm.returned.node)

    def _rows(self, x: Tensor, letter: str) -> Tensor:
        """Return the output of queries' (keys', values') projection or norm, or its gradient, as
        ``[batch, pos, column]``.
        """
        positions = self.key_pos if self.cross and letter != "q" else self.query_pos
        rows = by_position(x, self.recording.batch, positions)
        if rows is None:
            path = self.projections[letter].call.path
            raise NotFound(f"{path} returns the shape {tuple(x.shape)}")
        return rows

    def _projected(self, letter: str) -> Tensor:
        """Return a projection's output as ``[batch, pos, head, d_head]``."""
        projection = self.projections[letter]
        return _columns(self._rows(projection.call.value, letter), projection.columns)

    def gradient_by_head(self, total: Tensor, letter: str) -> Tensor | None:
        """Return the gradient of a number with respect to queries (keys) after their norm,
        ``[batch, pos, head, d_head]``; None if it does not depend on them.
        """
        gradient = gradient_of(total, self.made_by(letter).returned.live)
        if gradient is None:
            return None
        rows = self._rows(gradient, letter)
        sets = self.projections[letter].columns
        if self.norm_call(letter) is None:
            return _columns(rows, sets)
        return rows.unflatten(-1, (len(sets), -1))

    def _over(self, norm: ModuleCall) -> Literal["heads", "heads first", "width"]:
        """Return the layout of the input of a norm of queries or keys."""
        assert norm.entered is not None
        shape = norm.entered.value.shape
        if len(shape) == 3:
            return "width"
        if shape[1] in (self.query_pos, self._key_rows):
            return "heads"
        return "heads first"

    @property
    def _key_rows(self) -> int:
        """Return the number of positions of the keys' projection."""
        if self.cross:
            return self.key_pos
        return self.query_pos

    def normed(self, letter: str) -> Tensor:
        """Return queries or keys after their norm, ``[batch, pos, head, d_head]``; if their
        projection is unknown, the factors of the product.
        """
        factor = self.softmax.factor(letter)
        if letter not in self.projections and factor is not None:
            return factor.detach().transpose(1, 2)
        norm = self.norm_call(letter)
        if norm is None or (self.normed_last and letter in "qk"):
            projected = _clamp(self._projected(letter), self.clip)
            if letter in self.biases:
                projected = projected + self.biases[letter][1]
            return projected
        rows = self._rows(norm.value, letter)
        if self.clips_normed:
            rows = _clamp(rows, self.clip)
        return rows.unflatten(-1, (self.heads_of(letter), -1))

    def turned(self, letter: str) -> Tensor | None:
        """Return queries (keys) after their rotation and before any norm that follows it, ``[batch,
        head, pos, d_head]``.
        """
        norm = self.norm_call(letter)
        if self.normed_last and norm is not None and norm.entered is not None:
            x = norm.entered.value
            if self._over(norm) == "heads first":
                return x
            return x.transpose(1, 2)
        factor = self.softmax.factor(letter)
        return None if factor is None else factor.detach()

    def rotated(self) -> bool:
        """Tell whether queries are rotated before the product: they change, but each head's norm is
        kept, up to a factor per position.
        """
        query = self.turned("q")
        if query is None:
            return False
        before = self.normed("q")
        after = query.transpose(1, 2)
        if before.shape != after.shape:
            return False
        products = (before * after).sum((0, -1), keepdim=True)
        squares = (before * before).sum((0, -1), keepdim=True)
        if agree(products / squares * before, after, before):
            return False
        sizes = after.norm(dim=-1) / before.norm(dim=-1)
        mean = sizes.mean(0)
        return bool(((sizes - mean).abs() <= ROUNDED_TABLE * mean).all())

    @property
    def meets_changed(self) -> bool:
        """Tell whether queries or keys are rotated, clamped or widened on the way to their product,
        or their projections are unknown.
        """
        if "q" not in self.projections:
            return True
        if self.clip is not None:
            return True
        query, key = (len(self.projections[letter].columns[0]) for letter in "qk")
        return query > key or self.rotated()

    def factors(self) -> tuple[Tensor, Tensor]:
        """Return the queries and keys whose product is divided by the scale, ``[batch, head, pos,
        d_head]``, after any rotation.
        """
        query = self.softmax.query
        key = self.softmax.key
        if self.meets_changed and query is not None and key is not None:
            return query.detach(), key.detach()
        return self.normed("q").transpose(1, 2), self.normed("k").transpose(1, 2)

    @property
    def is_causal(self) -> bool:
        """Tell whether no query attends to a later key."""
        return not bool(self.softmax.pattern[..., : self.query_pos].triu(1).any())

    def heads_of(self, letter: str) -> int:
        """Return the number of heads of queries, keys or values in their projection."""
        return len(self.projections[letter].columns)

    @property
    def n_key_heads(self) -> int:
        """Return the number of key heads."""
        if "k" in self.projections or self.softmax.key is None:
            return self.heads_of("k")
        key = self.softmax.key.detach()
        heads = key.shape[1]
        for group in range(heads, 1, -1):
            if heads % group:
                continue
            if torch.equal(key[:, ::group].repeat_interleave(group, 1), key):
                return heads // group
        return heads

    @property
    def d_head(self) -> int:
        """Return the width of the values, or of the queries if the values are unknown."""
        if "v" in self.projections or self.softmax.query is None:
            return len(self.projections["v"].columns[0])
        return self.softmax.query.shape[-1]

    # ----------------------------------------------------------------------------------------------
    # Its declaration.
    # ----------------------------------------------------------------------------------------------

    def declare(self, *, values: bool = True) -> Attention:
        """Return the declaration.

        Args:
            values: include the values and the output projection.

        Raises:
            NotFound: a projection could not be found.
        """
        letters = "qkv" if values else "qk"
        missing = [f"{x}: {self.missing[x]}" for x in sorted(letters) if x in self.missing]
        if missing:
            raise NotFound("; ".join(missing))
        q = self._projection("q", self._latent("q"))
        if self.keys_of is None:
            latent = None if self.cross else self._latent(*letters[1:])
            k = self._projection("k", latent)
            v = self._projection("v", latent) if values else UNKNOWN
        else:
            source = self.keys_of[1].declared
            assert source is not None
            k = source.k
            v = source.v
        owner = self.owner.path
        declared = Attention(
            relative(owner, self.block.path),
            q,
            k,
            v,
            o=relative(self.part.producer.path, owner) if values else "",
            rotary=self._rotary(),
            norms_over=self._norms_over(),
            core=relative(self.softmax.path, owner),
            keys_from=self._keys_from(),
            clamp=self._clamp(),
            config_values={"n_heads": self.n_heads, "n_key_value_heads": self.heads_of("k")},
        )
        if values and self.heads_of("v") != self.heads_of("k"):
            raise NotFound(
                f"it has {self.heads_of('k')} heads of keys, and {self.heads_of('v')} of values"
            )
        return declared

    def _projection(self, letter: str, latent: Norm | None) -> Projection:
        """Return the declaration of a projection with its norm and bias."""
        call, sets, _ = self.projections[letter]
        output = call.value
        view = heads_view(sets, output.shape[-1])
        if output.ndim == 4 and output.shape[1] == 1:
            view = Composed(OneHead(), view or Heads(len(sets)))
        norm = None
        if (norm_call := self.norm_call(letter)) is not None:
            norm = Norm(relative(norm_call.path, self.owner.path), self.norms[norm_call])
        bias = self.biases[letter][0] if letter in self.biases else None
        path = relative(call.path, self.owner.path)
        return Projection(path, view, norm, bias, width=len(sets[0]), latent=latent)

    def _rotary(self) -> Literal["first", "last"] | None:
        """Return whether the rotation comes before or after the norms; None for no rotation."""
        if self.normed_last:
            return "first"
        return "last" if self.rotated() else None

    def _norms_over(self) -> Literal["heads", "heads first", "width"]:
        """Return the layout of the inputs of the norms of queries and keys."""
        calls = [self.norm_call(letter) for letter in "qk"]
        layouts = {self._over(call) for call in calls if call is not None}
        if len(layouts) > 1:
            raise NotFound("the norms of queries and keys are given different shapes")
        return layouts.pop() if layouts else "heads"

    def _keys_from(self) -> int | Literal["encoder"] | None:
        """Return where the keys are computed, if not by this attention's own projection."""
        if self.cross:
            return "encoder"
        if self.keys_of is None:
            return None
        return self.keys_of[0]

    def _clamp(self) -> tuple[float, Literal["made", "normed"]] | None:
        """Return the limit to which queries and keys are clamped, and where."""
        if self.clip is None:
            return None
        return self.clip, "normed" if self.clips_normed else "made"

    def kernel(self) -> Attention:
        """Return a declaration of the query-key product only.

        Raises:
            NotFound: queries and keys were not recorded.
        """
        query = self.softmax.query
        key = self.softmax.key
        is_recorded = query is not None and query.shape[1] == self.n_heads
        if query is None or key is None or not is_recorded or self.key_pos < self.query_pos:
            raise NotFound("queries and keys are not seen where they meet")
        projection = replace(UNKNOWN, width=query.shape[-1])
        return Attention(
            relative(self.owner.path, self.block.path),
            projection,
            projection,
            UNKNOWN,
            o="",
            keys_from="more" if key.shape[2] > self.query_pos else None,
            config_values={"n_heads": self.n_heads, "n_key_value_heads": self.n_key_heads},
        )

    def without_values(self) -> Attention:
        """Return the declaration without values, for an attention whose values are unknown.

        Raises:
            NotFound: the projections do not produce the queries and keys of the product.
        """
        for letter in "qk":
            before = self.normed(letter)
            turned = self.turned(letter)
            if turned is not None:
                after = _once(turned, before.shape[2])
                sizes = before.norm(dim=-1), after.norm(dim=-1)
                if after.shape == before.shape and agree(*sizes, before):
                    continue
            raise NotFound(f"the projection of {letter} does not make what meets")
        return self.declare(values=False)

    def _latent(self, *letters: str) -> Norm | None:
        """Return the inner norm (or module) that produces the projection's latent input; None if
        the projection reads the part's input or its norm.

        Raises:
            NotFound: keys and values have different latent inputs.
        """
        latents = {self._latent_of(self.projections[letter].call) for letter in letters}
        if len(latents) > 1:
            raise NotFound("keys and values are not made from one latent")
        return latents.pop()

    def _latent_of(self, projection: ModuleCall) -> Norm | None:
        """Return the norm or module that produces a projection's latent input, or None."""
        assert projection.entered is not None
        mark = projection.entered.mark
        producer = None
        for call in self.sources:
            if call.returned.mark == mark and call.end < projection.start:
                producer = call
        if self.owner.reads(mark):
            return None
        if producer is None:
            return Norm("", OPAQUE_NORM)
        if self.part.pre is not None and producer.path == self.part.pre.path:
            return None
        kind = self.norms.get(producer, OPAQUE_NORM)
        return Norm(relative(producer.path, self.owner.path), kind)


def _columns(rows: Tensor, sets: Sets) -> Tensor:
    """Return the columns of each head, ``[batch, pos, head, d_head]``."""
    return rows[..., torch.tensor(sets, device=rows.device)]


def _once(factor: Tensor, n_heads: int) -> Tensor:
    """Return queries (keys) of the product, ``[batch, pos, head, d_head]``, without the copies for
    the heads of a group.

    Args:
        factor: the factor of the product, ``[batch, head, pos, d_head]``.
        n_heads: the number of heads without copies.
    """
    group = max(1, factor.shape[1] // n_heads)
    return factor[:, ::group].transpose(1, 2)


def _clamp(x: Tensor, limit: float | None) -> Tensor:
    """Return a tensor clamped to a limit, or unchanged if the limit is None."""
    if limit is None:
        return x
    return x.clamp(-limit, limit)


# --------------------------------------------------------------------------------------------------
# Transforms between the values and the input of the output projection of a recorded attention.
# --------------------------------------------------------------------------------------------------


def with_values(attention: FoundAttention, declared: Attention) -> Attention:
    """Return the declaration with the norm of the values, and the transform between `pattern @ v`
    and `z`.

    Args:
        attention: the attention.
        declared: its declaration without them.

    Raises:
        NotFound: the transform is unknown.
    """
    v = attention.normed("v").double()
    pattern = attention.softmax.pattern[..., : v.shape[1]].double()
    mixed = result_of(pattern, v.transpose(1, 2)).transpose(1, 2)
    if mixed.shape != attention.z_by_head.shape:
        width = attention.z_by_head.shape[-1]
        raise NotFound(
            f"what enters its output projection is {width} wide for each head, values {v.shape[-1]}"
        )
    if _is_z(attention, mixed):
        return declared
    transform = _factor(attention, mixed) or _norm(attention, mixed) or _gate(attention, mixed)
    if transform is not None:
        return replace(declared, z_transform=transform)
    if bias := _bias(attention, mixed):
        return replace(declared, v=replace(declared.v, bias=bias))
    last = _added(attention, mixed) or _sinks(attention, mixed)
    if last is not None:
        return replace(declared, z_transform=last)
    raise NotFound(
        "what enters its output projection is not pattern @ v: something unknown stands between"
    )


# Candidates for the transform between `pattern @ v`, ``[batch, query, head, d_head]``, and `z`.
# Each function tries one, and returns None if it does not fit.


def _is_z(attention: FoundAttention, x: Tensor) -> bool:
    """Tell whether a tensor equals the input of the output projection."""
    return agree(x, attention.z_by_head.detach().double(), attention.z.value)


def _factor(attention: FoundAttention, mixed: Tensor) -> Affine | None:
    """Return a constant factor."""
    operations = between(attention.z_by_head.grad_fn)
    scale = operations.factor
    if is_operation(operations.start, "Bmm"):  # of a constant pattern and values
        scale *= between(selected_from(operands(operations.start)[-1])).factor
    scale = rounded(scale)
    if scale != 1 and _is_z(attention, mixed * scale):
        return Affine(scale)
    return None


def _norm(attention: FoundAttention, mixed: Tensor) -> Norm | None:
    """Return a norm over all heads, or over each head."""
    for call in attention.sources:
        x = call.entered_value
        if call.is_linear:
            continue
        if call.returned.mark != attention.z.mark:
            continue
        if x is None:
            continue
        if agree(x.flatten(2), mixed.flatten(2), attention.z.value):
            return Norm(relative(call.path, attention.owner.path), attention.norms[call])
    return None


def _gate(attention: FoundAttention, mixed: Tensor) -> Gate | None:
    """Return a gate: a function of a projection's output."""
    parameters = list(attention.owner.module.named_parameters(recurse=False))
    for call, sets in attention.gates:
        output = call.value
        rows = by_position(output, attention.recording.batch, attention.query_pos)
        gate = None if rows is None else _columns(rows, sets).double()
        if gate is None:
            continue
        if gate.shape[-1] not in (1, mixed.shape[-1]):
            continue
        path = relative(call.path, attention.owner.path)
        projection = Projection(path, heads_view(sets, output.shape[-1]))
        options: list[tuple[str | None, Tensor]] = [(None, gate)]
        for name, bias in parameters:
            if bias.shape == gate.shape[2:3]:
                options.append((name, gate + bias.detach()[:, None]))
        for bias_name, total in options:
            for function in GATE_FUNCTIONS:
                candidate = Gate(replace(projection, bias=bias_name), function)
                if _is_z(attention, candidate.of(mixed, total)):
                    return candidate
    return None


def _bias(attention: FoundAttention, mixed: Tensor) -> str | None:
    """Return the name of a parameter that is added to the values."""
    z = attention.z_by_head.detach().double()
    rest = z - mixed
    bound = worked_out(attention.z.value) * float(z.abs().max())
    if bool(((rest - rest[:1, :1]).abs() > bound).any()):
        return None
    return parameter_of(attention.owner.module, rest[0, 0], bound)


def _added(attention: FoundAttention, mixed: Tensor) -> AddedOutput | None:
    """Return a module that also reads the values, and whose output is added."""
    owner = attention.owner
    for call in attention.recording.between(owner.start, owner.end):
        if not call.outputs or not call.is_leaf:
            continue
        output = call.value
        candidate = AddedOutput(relative(call.path, owner.path))
        if output.shape != mixed.transpose(1, 2).shape:
            continue
        if _is_z(attention, candidate.of(mixed, output)):
            return candidate
    return None


def _sinks(attention: FoundAttention, mixed: Tensor) -> SinkGate | None:
    """Return the sink gate: the sigmoid of the scores' log-sum-exp minus a parameter of each
    head."""
    scores = attention.softmax.scores.detach()
    for name, sink in attention.owner.module.named_parameters(recurse=False):
        if sink.shape != (attention.n_heads,):
            continue
        candidate = SinkGate(name)
        if _is_z(attention, candidate.of(mixed, scores, sink.detach())):
            return candidate
    return None


# --------------------------------------------------------------------------------------------------
# Other modules of a recorded attention.
# --------------------------------------------------------------------------------------------------


def auxiliary_modules(
    attention: FoundAttention, declared: Attention, norms: Norms
) -> tuple[tuple[str, str], ...]:
    """Return the modules with parameters in an attention whose role is unknown, with the axes of
    their outputs.
    """
    owner = attention.owner
    part = attention.part
    recording = attention.recording
    latent_paths = {join(owner.path, path) for path in _latent_paths(declared)}
    latents = [call.entered.value for call in norms if call.entered and call.path in latent_paths]
    known = {join(owner.path, path) for path in _known_paths(declared)} | latent_paths
    known |= {norm.path for norm in (part.pre, part.post) if norm}
    modules = []
    for call in recording.between(max(owner.start, part.start), part.producer.end):
        if call.path in known or not _has_parameters(call, part.producer, norms):
            continue
        if call.only_output is None or call.value.ndim < 2 or len(recording.of(call.path)) != 1:
            continue
        if any(_begins_with(call.value, latent) for latent in latents):
            continue
        path = relative(call.path, owner.path)
        name = path.rpartition(".")[2].partition("@")[0]
        modules.append((path, axes_of(name, call.value.shape, recording.batch, recording.pos)))
    return tuple(modules)


def _latent_paths(declared: Attention) -> set[str]:
    """Return the paths of the norms of an attention's latent inputs."""
    norms = (declared.q.latent, declared.k.latent)
    return {norm.path for norm in norms if norm and norm.path}


def _known_paths(declared: Attention) -> Iterator[str]:
    """Yield the paths of an attention's modules whose role is known."""
    yield from filter(None, declared.submodules.values())
    yield from declared.score_bias_modules or ()
    if declared.gate:
        yield declared.gate.path
    if declared.position_bias:
        yield declared.position_bias
    if isinstance(declared.z_transform, AddedOutput):
        yield declared.z_transform.path


def _has_parameters(call: ModuleCall, producer: ModuleCall, norms: Norms) -> bool:
    """Tell whether a call is a norm before the output projection, or a leaf with parameters."""
    if call in norms:
        if isinstance(call.module, nn.Dropout):
            return False
        return call.end < producer.start
    if not call.is_leaf:
        return False
    return any(True for _ in call.module.parameters(recurse=False))


def _begins_with(output: Tensor, latent: Tensor) -> bool:
    """Tell whether the first columns of an output are the latent input of a projection."""
    return torch.equal(output[..., : latent.shape[-1]], latent)
