"""Queries, keys, values and the output projection of a recorded attention, by gradient."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
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
    per_head,
    result_of,
    scores_of,
)
from adapters.automatic.norms import heads_view, parameter_of, relative, rounded, same_numbers
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
    is_linear_through,
)
from adapters.observe.observe import ModuleCall, NotFound, Recording, Softmax, one_line
from adapters.observe.recognised import FITTED, ROUNDED_TABLE, agree, factor_of, tolerance, worked_out
from adapters.points import join
from adapters.views import Affine, Composed, Heads, OneHead

#: The columns of each head, in a projection's output.
Sets = tuple[tuple[int, ...], ...]


class Met(NamedTuple):
    """Queries and keys as they meet, in float64, and what is made of them.

    Attributes:
        product: theirs, ``[batch, head, query, key]``.
        query, key: ``[batch, head, pos, d_head]``, keys repeated for their group.
        scores: what entered the softmax, without a sink's column.
        seen: where the pattern is not zero.
    """

    product: Tensor
    query: Tensor
    key: Tensor
    scores: Tensor
    seen: Tensor


def of_attention(softmaxes: Sequence[Softmax]) -> list[Softmax]:
    """Those of queries and keys, where there are others; one of those that make the same pattern of the same."""
    made = [each for each in softmaxes if each.query is not None] or list(softmaxes)
    found: list[Softmax] = []
    for each in made:
        if not any(each.scores.shape == x.scores.shape and torch.equal(each.scores, x.scores) for x in found):
            found.append(each)
    return found


class FoundAttention:
    """Finds out what an attention is made of.

    Args:
        part: the part.
        recording: the run.
        norms: the norms of its block.
        block: the call of its block.
        earlier: the attentions of blocks before it, by their index.
        kernel_alone: what makes its queries, keys and values, and what reads what it makes of them, is not looked for.

    Attributes:
        declared: what was made of it, for later ones that read its keys and values. `keys_of`: whose it reads itself.
        missing: what could not be found, by hook name. `cross`: its keys are at the encoder's positions. `adds`: a
            number that a layer makes for each head is added to the scores.

    Raises:
        NotFound: it cannot be declared as an attention.
    """

    declared: Attention | None = None
    keys_of: tuple[int, FoundAttention] | None = None

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
        self.part, self.recording, self.norms, self.block = part, recording, norms, block
        self.earlier = earlier
        self.missing: dict[str, str] = {}
        self.normed_last = False
        self.clip: float | None = None
        self.clips_normed = self.adds = False
        # Its layers may stand in the block itself (LLaDA).
        self.owner = part.owner or block
        softmaxes = of_attention(part.softmaxes)
        if len(softmaxes) != 1:
            raise NotFound(f"it computes {len(part.softmaxes)} softmaxes")
        self.softmax: Softmax = softmaxes[0]
        scores = self.softmax.scores
        self.flat_heads = scores.ndim == 3 and scores.shape[0] % recording.batch == 0 and scores.shape[1] > 1
        if self.flat_heads:
            rows = (recording.batch, -1)
            self.softmax = replace(
                self.softmax, scores=scores.unflatten(0, rows), pattern=self.softmax.pattern.unflatten(0, rows)
            )
            scores = self.softmax.scores
        if scores.ndim != 4 or scores.shape[0] != recording.batch:
            raise NotFound(f"its scores have the shape {tuple(scores.shape)}, not [batch, head, query, key]")
        self.n_heads = scores.shape[1]
        self.query_pos, self.key_pos = scores.shape[2], scores.shape[3]
        self.cross = self.key_pos not in (self.query_pos, self.query_pos + 1)
        self.found: dict[str, tuple[ModuleCall, Sets, ModuleCall | None]] = {}
        self.biases: dict[str, tuple[str, Tensor]] = {}
        if kernel_alone:
            return
        if not part.producer.is_linear or part.producer.entered is None:
            raise NotFound(f"{part.producer.path}, which puts out its result, is no linear layer")
        self.z = part.producer.entered
        z = by_position(self.z.live, recording.batch, scores.shape[2])
        if z is None or z.shape[-1] % self.n_heads:
            raise NotFound(f"what enters its output projection has the shape {tuple(self.z.value.shape)}")
        self.z_by_head = z.unflatten(-1, (self.n_heads, -1))
        self.mixed = self._before_norm(z).unflatten(-1, (self.n_heads, -1))
        if self.z.value.ndim != 3:
            raise NotFound("what enters its output projection is not [batch, pos, (head d_head)]")
        self.sources = self._sources()
        self._trace()

    def _before_norm(self, z: Tensor) -> Tensor:
        """What enters the output projection, before a norm over all heads: behind it, no column is one head's alone."""
        for norm in self.norms:
            entered = norm.entered
            if (
                self.owner.holds(norm)
                and norm.returned.mark == self.z.mark
                and entered
                and entered.live.shape == z.shape
            ):
                return entered.live
        return z

    def _sources(self) -> list[ModuleCall]:
        """What queries, keys and values may have been made by: linear layers and norms inside, in order."""
        inside = [call for call in self.recording.calls if self.owner.holds(call) and call is not self.part.producer]
        return [
            call for call in inside
            if (call.is_linear or call in self.norms) and len(call.left) == 1 and call.returned.live.requires_grad
            and call.end < self.part.producer.start
        ]  # fmt: skip

    def _trace(self) -> None:
        live = [call.returned.live for call in self.sources]
        if not live or not self.softmax.scores.requires_grad or not self.z_by_head.requires_grad:
            raise NotFound("no linear layer inside of it has a gradient")
        query = min(5, self.query_pos - 1)
        keys = [max(query - 2, 0), max(query - 1, 1)]
        scores = self.softmax.scores
        if keys[-1] >= scores.shape[-1]:
            raise NotFound(f"its scores have {scores.shape[-1]} keys")
        key_pos = self.key_pos if self.key_pos != self.query_pos + 1 else self.query_pos  # a sink is no key
        try:
            reaches = gradients_of_scores(
                scores, live, query=query, keys=keys, query_pos=self.query_pos, key_pos=key_pos
            )
            reached_z, values = self._from_values(live, query, key_pos)
        except RuntimeError as error:
            raise NotFound(f"no gradient can be taken: {one_line(error)}") from None
        self.gates = [
            (call, sets)
            for call, reached, value in zip(self.sources, reached_z, values, strict=True)
            if call.is_linear and reached is not None and value is None
            and (sets := disjoint_sets(reached)) and len(sets) == self.n_heads
        ]  # fmt: skip
        for letter, reached in (("q", reaches.from_query), ("v", values), ("k", reaches.from_keys)):
            carrier = self._carrier(reached)
            wide = self._width(letter)
            # What is clamped has no gradient.
            if not self.cross and (carrier is None or len(carrier[1][0]) != wide < math.inf):
                carrier = self._carrier(self._of_all_queries(letter, live, key_pos)) or carrier
            if carrier is None or len(carrier[1][0]) > wide:  # columns that do not reach the head alone
                self.missing[letter] = "no projection has columns of its own for each head"
            else:
                self.found[letter] = carrier
        if self.missing.keys() == {"k", "v"}:
            self._read_those_of_another()
        self.biases = {letter: bias for letter in "qk" if (bias := self._bias_behind(letter))}
        self.clip = self._clamped()

    def _read_those_of_another(self) -> None:
        """Takes keys and values from the attention before it that has the same keys in its product."""
        key, path = self.softmax.key, relative(self.owner.path, self.block.path)
        for index, other in self.earlier.items() if key is not None else ():
            its = other.softmax.key
            if its is None or key is None or other.declared is None or other.declared.path != path:
                continue
            if its.shape == key.shape and torch.equal(its, key):
                self.keys_of = index, other
                self.found |= {letter: other.found[letter] for letter in "kv"}
                self.missing.clear()
                return

    def _width(self, letter: str) -> float:
        """How many columns of each head meet in the product, or values have; infinite where that is not seen."""
        factor = self.z_by_head if letter == "v" else self.softmax.factor(letter)
        return math.inf if factor is None else factor.shape[-1]

    def _of_all_queries(self, letter: str, live: Sequence[Tensor], key_pos: int) -> list[Tensor | None]:
        """Which columns reach each head's scores, or its `z`, of any query."""
        total: list[Tensor | None] = [None] * len(live)
        options = {"query_pos": self.query_pos, "key_pos": key_pos}
        for query in range(3, self.query_pos):
            if letter == "v":
                masks = self._from_values(live, query, key_pos)[1]
            else:
                keys = [query - 3, query - 1]
                reaches = gradients_of_scores(self.softmax.scores, live, query=query, keys=keys, **options)
                masks = reaches.from_query if letter == "q" else reaches.from_keys
            total = list(map(either, total, masks))
        return total

    def _clamped(self) -> float | None:
        """What queries and keys are clamped to before they are rotated: one of the attention's own numbers."""
        numbers = self._numbers()
        if self.clip is not None:
            return self.clip
        for letter in "qk":
            factor = self.softmax.factor(letter)
            if letter not in self.found or factor is None or not numbers:
                continue
            before = self.normed(letter)
            after = factor.detach()[:, :: max(1, factor.shape[1] // before.shape[2])].transpose(1, 2).norm(dim=-1)
            if before.shape[:3] != after.shape:
                continue
            for clip in [None, *(x for x in numbers if float(before.abs().max()) > x)]:
                given = before if clip is None else before.clamp(-clip, clip)
                if agree(given.norm(dim=-1), after, before):
                    self.clips_normed = clip is not None and self._norm(letter) is not None
                    return clip
        return None

    def _bias_behind(self, letter: str) -> tuple[str, Tensor] | None:
        """A parameter between a projection and the product, with its numbers ``[head, d_head]``."""
        factor = self.softmax.factor(letter)
        if letter not in self.found or factor is None or factor.shape[1] != self.heads_of(letter):
            return None
        before, after = self._by_head(self.found[letter][0].returned.value, letter), factor.detach().transpose(1, 2)
        if before.shape != after.shape:
            return None
        x, y = (each.double() - each.double().mean((0, 1)) for each in (before, after))
        scale = factor_of(y, x)
        rest = after.double() / scale - before.double()
        close = worked_out(before) * float(before.abs().max())
        if bool(((rest - rest[:1, :1]).abs() > close).any()) or float(rest.abs().max()) <= close:
            return None
        name = parameter_of(self.owner.module, rest[0, 0], close)
        return None if name is None else (name, rest[0, 0].to(before))

    def _from_values(
        self, live: Sequence[Tensor], query: int, key_pos: int
    ) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """Which columns reach each head's `z` of a query; and those alone that are of values, and not of a gate."""
        reached = gradients_of_z(self.mixed, live, query=query, key_pos=key_pos)
        both = zip(self.sources, reached, strict=True)
        return reached, [mask if self._from_before(call, query) else None for call, mask in both]

    def _from_before(self, call: ModuleCall, query: int) -> bool:
        """Whether `z` at a position is made from what a call puts out at the one before: a gate's is not."""
        live = call.returned.live
        z = self.mixed[:, query]
        gradient = gradient_of(z.pow(2).sum() + z.sum(), live)
        rows = None if gradient is None else by_position(gradient, self.recording.batch, self.query_pos)
        if gradient is not None and rows is None and self.cross:
            rows = by_position(gradient, self.recording.batch, self.key_pos)
        return rows is not None and bool(rows[:, query - 1].any())

    def _carrier(self, reached: Sequence[Tensor | None]) -> tuple[ModuleCall, Sets, ModuleCall | None] | None:
        """The last linear layer with columns of its own for each head; with the norm behind it that mixes heads."""
        for index in reversed(range(len(self.sources))):
            mask, call = reached[index], self.sources[index]
            sets = None if mask is None else disjoint_sets(mask)
            if mask is None or sets is None or call.entered is None or self.n_heads % len(sets):
                continue
            if len(sets[0]) == 1 < self.z_by_head.shape[-1]:  # a number that is added to the scores of a key (Doge),
                self.adds = True
                continue
            if self.adds and "v" in self.found and call is self.found["v"][0]:  # and is made of its value
                continue
            group = self.n_heads // len(sets)
            if any(tuple(row.nonzero().flatten().tolist()) != sets[head // group] for head, row in enumerate(mask)):
                continue  # heads that are not one group after the other
            if call.is_linear:
                return call, sets, None
            # A norm over all heads: its input has the layout of its output.
            before = [c for c in self.sources[:index] if c.is_linear and c.returned.mark == call.entered.mark]
            if before and call.entered.value.ndim == 3:
                return before[-1], sets, call
            if (part := self._part_that(call, index)) is not None:
                linear, start, self.clip = part
                return linear, tuple(tuple(start + column for column in each) for each in sets), call
        return None

    def _part_that(self, norm: ModuleCall, index: int) -> tuple[ModuleCall, int, float | None] | None:
        """The fused projection of which a norm is given some columns, from which on, and what these are clamped to."""
        assert norm.entered is not None
        x, width = norm.entered.value, norm.entered.value.shape[-1]
        for call in reversed(self.sources[:index]):
            made = call.returned.value
            if not call.is_linear or made.shape[:-1] != x.shape[:-1] or made.shape[-1] <= width:
                continue
            for start in range(0, made.shape[-1] - width + 1, width):
                columns = made[..., start : start + width]
                for clip in (None, *self._numbers()):
                    if torch.equal(x, columns if clip is None else columns.clamp(-clip, clip)):
                        return call, start, clip
        return None

    def _numbers(self) -> list[float]:
        """The attention's own numbers, and those of the configuration that it keeps."""
        config = getattr(self.owner.module, "config", None)
        kept = [*vars(self.owner.module).values(), *(vars(config).values() if config is not None else ())]
        return list(dict.fromkeys(x for x in kept if isinstance(x, float) and x > 0))

    def declare(self, *, values: bool = True) -> Attention:
        """The declaration.

        Args:
            values: with values, and what reads ``pattern @ v``.

        Raises:
            NotFound: a projection could not be found.
        """
        missing = {letter: why for letter, why in sorted(self.missing.items()) if values or letter != "v"}
        if missing:
            raise NotFound("; ".join(f"{letter}: {reason}" for letter, reason in missing.items()))
        owner = self.owner.path
        projections = {"v": UNKNOWN}
        own = {letter: each for letter, each in self.found.items() if self.keys_of is None or letter == "q"}
        for letter, (call, sets, _) in own.items():
            made = call.returned.value
            view = heads_view(sets, made.shape[-1])
            if made.ndim == 4 and made.shape[1] == 1:
                view = Composed(OneHead(), view or Heads(len(sets)))
            norm, bias = self._norm(letter), self.biases.get(letter)
            projections[letter] = Projection(
                relative(call.path, owner),
                view,
                norm=norm and norm[0],
                bias=bias and bias[0],
                width=len(sets[0]),
            )
        latents = {"q": self._latent("q")}
        if self.keys_of is None:
            latents["kv"] = None if self.cross else self._latent(*("kv" if values else "k"))
            k, v = (replace(projections[letter], latent=latents["kv"]) for letter in "kv")
            v = v if values else UNKNOWN
        else:
            source = self.keys_of[1].declared
            assert source is not None
            k, v = source.k, source.v
        over = {self._over(call) for _, call in filter(None, map(self._norm, "qk"))}
        if len(over) > 1:
            raise NotFound("the norms of queries and keys are given different shapes")
        core = self.softmax.path
        declared = Attention(
            relative(owner, self.block.path),
            replace(projections["q"], latent=latents["q"]),
            k,
            v,
            o=relative(self.part.producer.path, owner) if values else "",
            rotary="first" if self.normed_last else "last" if self.rotated() else None,
            norms_over=over.pop() if over else "heads",
            core="" if core == owner else relative(core, owner),
            keys_from="encoder" if self.cross else None if self.keys_of is None else self.keys_of[0],
            clamp=None if self.clip is None else (self.clip, "normed" if self.clips_normed else "made"),
            config_values={"n_heads": self.n_heads, "n_key_value_heads": self.heads_of("k")},
        )
        if values and self.heads_of("v") != self.heads_of("k"):
            raise NotFound(f"it has {self.heads_of('k')} heads of keys, and {self.heads_of('v')} of values")
        return declared

    def kernel(self) -> Attention:
        """The declaration of what it shows where queries and keys meet.

        Raises:
            NotFound: they are not seen.
        """
        query, key = self.softmax.query, self.softmax.key
        if query is None or key is None or query.shape[1] != self.n_heads or self.key_pos < self.query_pos:
            raise NotFound("queries and keys are not seen where they meet")
        made = replace(UNKNOWN, width=query.shape[-1])
        sizes = {"n_heads": self.n_heads, "n_key_value_heads": self.n_key_heads}
        declared = Attention(relative(self.owner.path, self.block.path), made, made, UNKNOWN, o="", config_values=sizes)
        return replace(declared, keys_from="more") if key.shape[2] > self.query_pos else declared

    def without_values(self) -> Attention:
        """The declaration without values, which something unknown is made of.

        Raises:
            NotFound: queries and keys that are found are not those that meet.
        """
        for letter in "qk":
            before, after = self.normed(letter), self.turned(letter)
            once = None if after is None else after[:, :: max(1, after.shape[1] // before.shape[2])].transpose(1, 2)
            if once is None or once.shape != before.shape or not agree(before.norm(dim=-1), once.norm(dim=-1), before):
                raise NotFound(f"the projection of {letter} does not make what meets")
        return self.declare(values=False)

    def heads_of(self, letter: str) -> int:
        """How many heads of queries, keys or values a projection makes."""
        return len(self.found[letter][1])

    @property
    def n_key_heads(self) -> int:
        """How many heads of keys there are."""
        if "k" in self.found or self.softmax.key is None:
            return self.heads_of("k")
        key = self.softmax.key.detach()
        sizes = (n for n in range(key.shape[1], 1, -1) if key.shape[1] % n == 0)
        group = next((n for n in sizes if torch.equal(key[:, ::n].repeat_interleave(n, 1), key)), 1)
        return key.shape[1] // group

    @property
    def d_head(self) -> int:
        """How wide values are; of a kernel alone, queries."""
        if "v" in self.found or self.softmax.query is None:
            return len(self.found["v"][1][0])
        return self.softmax.query.shape[-1]

    def _latent(self, *letters: str) -> Norm | None:
        """What makes what a projection reads, where that is neither the part's input nor its norm: inside of it.

        Raises:
            NotFound: keys have one, and values none, or another.
        """
        found: set[Norm | None] = set()
        for letter in letters:
            entered = self.found[letter][0].entered
            assert entered is not None
            made = [c for c in self.sources if c.returned.mark == entered.mark and c.end < self.found[letter][0].start]
            pre = self.part.pre is not None and bool(made) and made[-1].path == self.part.pre.path
            if self.owner.reads(entered.mark) or pre:
                found.add(None)
            else:
                path = relative(made[-1].path, self.owner.path) if made else ""
                found.add(Norm(path, self.norms.get(made[-1], OPAQUE_NORM) if made else OPAQUE_NORM))
        if len(found) > 1:
            raise NotFound("keys and values are not made from one latent")
        return found.pop()

    def shares_keys(self) -> bool:
        """Whether keys enter the product with more columns than their projection makes, and nothing is rotated."""
        wider = "q" in self.found and len(self.found["q"][1][0]) > len(self.found["k"][1][0])
        return wider and not self.rotated()

    def made_by(self, letter: str) -> ModuleCall:
        """The call that left queries, keys or values: their norm's, or else their projection's."""
        found = self._norm(letter)
        return found[1] if found else self.found[letter][0]

    def _norm(self, letter: str) -> tuple[Norm, ModuleCall] | None:
        """The norm between a projection and the scores."""
        if self.keys_of is not None and letter != "q":
            return self.keys_of[1]._norm(letter)
        if letter not in self.found:
            return None
        call, _, norm = self.found[letter]
        if norm is None:
            # As wide as a head, or as all of them, and behind the projection.
            d_head, made = len(self.found[letter][1][0]), call.returned.value
            heads = self.heads_of(letter)
            for other in self.sources:
                if other.is_linear or other.start < call.end or other.entered is None:
                    continue
                x = other.entered.value
                wide = x.shape[-1] in (d_head, d_head * heads)
                if wide and same_numbers(x, self._by_head(made, letter), tolerance(x)):
                    norm = other
                    break
                if wide and letter in "qk" and self._is_last(letter, other):
                    norm = other
                    self.normed_last = True
                    break
        return None if norm is None else (Norm(relative(norm.path, self.owner.path), self.norms[norm]), norm)

    def _is_last(self, letter: str, norm: ModuleCall) -> bool:
        """Whether a norm puts out the queries (keys) that enter the product, not repeated for groups."""
        factor = self.softmax.factor(letter)
        if factor is None or factor.shape[1] % self.heads_of(letter):
            return False
        once = factor.detach()[:, :: factor.shape[1] // self.heads_of(letter)]
        made = norm.returned.value
        return any(made.shape == each.shape and torch.equal(made, each) for each in (once, once.transpose(1, 2)))

    def _by_head(self, made: Tensor, letter: str) -> Tensor:
        """What a projection made, ``[batch, pos, head, d_head]``."""
        call, sets, _ = self.found[letter]
        rows = by_position(made, self.recording.batch, self._positions(letter))
        if rows is None:
            raise NotFound(f"{call.path} puts out the shape {tuple(made.shape)}")
        return rows[..., torch.tensor(sets, device=made.device)]

    def _positions(self, letter: str) -> int:
        """At how many positions queries (keys, values) are made."""
        return self.key_pos if self.cross and letter != "q" else self.query_pos

    def _over(self, call: ModuleCall) -> Literal["heads", "heads first", "width"]:
        """What a norm of queries or keys is given."""
        assert call.entered is not None
        shape = call.entered.value.shape
        if len(shape) == 3:
            return "width"
        return "heads" if shape[1] in (self.query_pos, self._positions("k")) else "heads first"

    def normed(self, letter: str) -> Tensor:
        """Queries or keys as they leave their norm, ``[batch, pos, head, d_head]``; or as they meet."""
        factor = self.softmax.factor(letter)
        if letter not in self.found and factor is not None:
            return factor.detach().transpose(1, 2)
        call, sets, _ = self.found[letter]
        norm = self._norm(letter)
        if norm is None or (self.normed_last and letter in "qk"):
            made = self._by_head(call.returned.value, letter)
            made = made if self.clip is None else made.clamp(-self.clip, self.clip)
            return made + self.biases[letter][1] if letter in self.biases else made
        rows = by_position(norm[1].returned.value, self.recording.batch, self._positions(letter))
        assert rows is not None
        rows = rows if self.clip is None or not self.clips_normed else rows.clamp(-self.clip, self.clip)
        return rows.unflatten(-1, (len(sets), -1))

    def turned(self, letter: str) -> Tensor | None:
        """Queries (keys) behind their rotation, ``[batch, head, pos, d_head]``: before the norm that comes last."""
        norm = self._norm(letter)
        if self.normed_last and norm is not None and norm[1].entered is not None:
            entered = norm[1].entered.value
            return entered if self._over(norm[1]) == "heads first" else entered.transpose(1, 2)
        factor = self.softmax.factor(letter)
        return None if factor is None else factor.detach()

    def rotated(self) -> bool:
        """Whether queries are changed before they meet the keys, each head's size kept, but for its place's factor."""
        query = self.turned("q")
        if query is None:
            return False
        before, after = self.normed("q"), query.transpose(1, 2)
        if before.shape != after.shape:
            return False
        factor = (before * after).sum((0, -1), keepdim=True) / (before * before).sum((0, -1), keepdim=True)
        if agree(factor * before, after, before):
            return False
        sizes = after.norm(dim=-1) / before.norm(dim=-1)
        return bool(((sizes - sizes.mean(0)).abs() <= ROUNDED_TABLE * sizes.mean(0)).all())

    def met(self) -> Met | None:
        """What meets in the scores; None where queries and keys do not fit."""
        query, key = self.softmax.query, self.softmax.key
        if query is None or key is None:  # in a product that is not watched: as they leave their projections
            query, key = (self.normed(letter).transpose(1, 2) for letter in "qk")
        query, key = query.detach().double(), key.detach().double()
        if self.n_heads % key.shape[1] or query.shape[-1] != key.shape[-1]:
            return None
        n = key.shape[2]
        scores, seen = self.softmax.scores.detach().double()[..., :n], self.softmax.pattern[..., :n] > 0
        return Met(scores_of(query, key), query, per_head(key, self.n_heads), scores, seen)

    def divided_by(self, factor: float) -> float:
        """What the product is divided by, that a factor was measured of: the root of a head's width, or another."""
        usual = self.normed("q").shape[-1] ** 0.5
        return usual if abs(factor * usual - 1) < FITTED else rounded(1 / factor)

    @property
    def is_causal(self) -> bool:
        """No query attends to a later key."""
        return not bool(self.softmax.pattern[..., : self.query_pos].triu(1).any())


# ----------------------------------------------------------------------------------------------------------------------
# What stands between the values and what enters the output projection of a recorded attention.
# ----------------------------------------------------------------------------------------------------------------------


def with_values(found: FoundAttention, declared: Attention) -> Attention:
    """The declaration with the norm of the values, and what stands between `pattern @ v` and `z`.

    Args:
        found: the attention.
        declared: its declaration without.

    Raises:
        NotFound: something unknown does.
    """
    v = found.normed("v").double()
    pattern = found.softmax.pattern[..., : v.shape[1]].double()
    mixed = result_of(pattern, v.transpose(1, 2)).transpose(1, 2)
    if mixed.shape != found.z_by_head.shape:
        wide = found.z_by_head.shape[-1]
        raise NotFound(f"what enters its output projection is {wide} wide for each head, values {v.shape[-1]}")
    if _is_z(found, mixed):
        return declared
    if transform := _factor(found, mixed) or _norm(found, mixed) or _gate(found, mixed):
        return replace(declared, z_transform=transform)
    if bias := _bias(found, mixed):
        return replace(declared, v=replace(declared.v, bias=bias))
    if last := _added(found, mixed) or _sinks(found, mixed):
        return replace(declared, z_transform=last)
    raise NotFound("what enters its output projection is not pattern @ v: something unknown stands between")


# What may stand between `pattern @ v`, ``[batch, query, head, d_head]``, and `z`, each looked for by itself; None where
# it is not that.


def _is_z(found: FoundAttention, x: Tensor) -> bool:
    """Whether this is what enters the output projection."""
    return agree(x, found.z_by_head.detach().double(), found.z.value)


def _factor(found: FoundAttention, mixed: Tensor) -> Affine | None:
    """A constant."""
    factor = rounded(factor_of(found.z_by_head.detach(), mixed))
    made, entered = found.made_by("v").returned.live, found.found["v"][0].entered
    known = _is_z(found, mixed * factor) and entered
    return Affine(factor) if known and is_linear_through(found.z_by_head, made, known.live) else None


def _norm(found: FoundAttention, mixed: Tensor) -> Norm | None:
    """A norm over all heads, or each."""
    for call in found.sources:
        behind = call.entered if not call.is_linear and call.returned.mark == found.z.mark else None
        if behind and agree(behind.value.flatten(2), mixed.flatten(2), found.z.value):
            return Norm(relative(call.path, found.owner.path), found.norms[call])
    return None


def _gate(found: FoundAttention, mixed: Tensor) -> Gate | None:
    """A function of what a projection makes."""
    for call, sets in found.gates:
        rows = by_position(call.returned.value, found.recording.batch, found.query_pos)
        gate = None if rows is None else rows[..., torch.tensor(sets, device=rows.device)].double()
        if gate is None or gate.shape[-1] not in (1, mixed.shape[-1]):
            continue
        made = Projection(relative(call.path, found.owner.path), heads_view(sets, call.returned.value.shape[-1]))
        own = found.owner.module.named_parameters(recurse=False)
        sums = {name: gate + p.detach()[:, None] for name, p in own if p.shape == gate.shape[2:3]}
        for bias, total in ((None, gate), *sums.items()):
            for name in GATE_FUNCTIONS:
                tried = Gate(replace(made, bias=bias), name)
                if _is_z(found, tried.of(mixed, total)):
                    return tried
    return None


def _bias(found: FoundAttention, mixed: Tensor) -> str | None:
    """The name of a parameter that is added to the values."""
    z = found.z_by_head.detach().double()
    rest, bound = z - mixed, worked_out(found.z.value) * float(z.abs().max())
    alike = bool(((rest - rest[:1, :1]).abs() <= bound).all())
    return parameter_of(found.owner.module, rest[0, 0], bound) if alike else None


def _added(found: FoundAttention, mixed: Tensor) -> AddedOutput | None:
    """The output of a module that reads the values, too."""
    for call in found.recording.between(found.owner.start, found.owner.end):
        made = call.returned.value if call.left and call.is_leaf else None
        if made is None or made.shape != mixed.transpose(1, 2).shape:
            continue
        tried = AddedOutput(relative(call.path, found.owner.path))
        if _is_z(found, tried.of(mixed, made)):
            return tried
    return None


def _sinks(found: FoundAttention, mixed: Tensor) -> SinkGate | None:
    """The sigmoid of what the scores add up to, less a parameter of each head."""
    scores = found.softmax.scores.detach()
    for name, parameter in found.owner.module.named_parameters(recurse=False):
        one_each = parameter.shape == (found.n_heads,)
        if one_each and _is_z(found, SinkGate(name).of(mixed, scores, parameter.detach())):
            return SinkGate(name)
    return None


def auxiliary_modules(found: FoundAttention, declared: Attention, norms: Norms) -> tuple[tuple[str, str], ...]:
    """The modules with parameters in an attention that play no known part, with the axes of what they make."""
    owner, latent = found.owner, {norm.path for norm in (declared.q.latent, declared.k.latent) if norm and norm.path}
    added = declared.z_transform.path if isinstance(declared.z_transform, AddedOutput) else None
    single = (declared.gate and declared.gate.path, declared.position_bias, added, *(declared.score_bias_modules or ()))
    paths = [path for path in (*declared.submodules.values(), *latent, *single) if path]
    known = {join(owner.path, path) for path in paths} | {n.path for n in (found.part.pre, found.part.post) if n}
    latents = [
        call.entered.value for call in norms
        if call.entered and call.path in {join(owner.path, path) for path in latent}
    ]  # fmt: skip
    others = []
    for call in found.recording.between(max(owner.start, found.part.start), found.part.producer.end):
        if call in norms:
            own = not isinstance(call.module, nn.Dropout) and call.end < found.part.producer.start
        else:
            own = call.is_leaf and any(True for _ in call.module.parameters(recurse=False))
        if not own or call.path in known or call.whole is None:
            continue
        made = call.whole.value
        before = any(made.shape[-1] >= x.shape[-1] and torch.equal(made[..., : x.shape[-1]], x) for x in latents)
        if not before and made.ndim > 1 and len(found.recording.of(call.path)) == 1:
            path = relative(call.path, owner.path)
            name = path.rpartition(".")[2].partition("@")[0]
            others.append((path, axes_of(name, made.shape, found.recording.batch, found.recording.pos)))
    return tuple(others)
