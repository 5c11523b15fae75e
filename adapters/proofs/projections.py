"""Proofs by gradient that queries, keys and values belong to their heads, whatever lies between
them and the scores.
"""

from __future__ import annotations

import torch
from torch import Tensor

from adapters.norms import Norm
from adapters.observe.gradients import by_position, either, gradients_of_scores, gradients_of_z
from adapters.observe.observe import ModuleCall
from adapters.points import module_path
from adapters.proofs.evidence import RANDOMIZED, AttentionClaim, Evidence, Findings
from adapters.views import Biased, Call, Heads, View

WRITTEN = "what is written at a hook point is read there, at every position and of every size"
#: Endings of the names of the hook points whose activations other claims replace, and of those
#: computed from them.
_WRITTEN = (*RANDOMIZED, ".hook_post", ".hook_z")
CLAIM = "queries, keys and values are the columns that reach each head's scores and z"
_NOT_COLUMNS = "its view shows something other than columns, each once"
_DISORDER = "the columns of a head are not in the order in which the projection makes them"


def prove_projections(evidence: Evidence, findings: Findings) -> None:
    """Check that each head's scores depend only on the columns of its query and key, and its `z`
    only on the columns of its value.

    Args:
        evidence: a run `with_graph`.
        findings: collects the results.
    """
    findings.claim(CLAIM)
    graphs: set[str] = set()
    for place, _ in evidence.attentions():
        scores = evidence.get(f"{place.part}hook_attn_scores")
        if scores is not None and scores.requires_grad:
            graphs.add(module_path(place.module))
    for place, _ in evidence.attentions():
        _Columns(evidence, findings, place).prove(graphs)


def prove_choices(evidence: Evidence, findings: Findings) -> None:
    """Check that each hook point of queries, keys and values returns unchanged columns of its
    projection, without duplicates.

    Args:
        evidence: a run.
        findings: collects the results.
    """
    findings.claim(CLAIM)
    for place, part in evidence.attentions():
        for letter in part.projections:
            name = f"{place.part}hook_{letter}"
            point = evidence.bridge.hook_dict[name].point
            calls = evidence.raw.get(point.site.path)
            if not calls or point.site.kind != "output":
                continue
            output = calls[0].output
            if isinstance(output, Tensor):
                wrong = _why_no_columns(point.view, calls[0], output)
                findings.holds(CLAIM, name, not wrong, wrong)


def prove_written(evidence: Evidence, findings: Findings) -> None:
    """Check that reading a hook point returns the values written to it, at every position and
    magnitude.

    Other claims replace these activations, so they cannot detect an error in reading them.

    Args:
        evidence: a run.
        findings: collects the results.
    """
    findings.claim(WRITTEN)
    generator = torch.Generator().manual_seed(5)
    for name, hook in evidence.bridge.hook_dict.items():
        site = hook.point.site
        view = hook.view
        call = evidence.call_at(hook) if name.endswith(_WRITTEN) else None
        if call is None or site.kind not in ("output", "input") or site.key is not None:
            continue
        raw = evidence.raw[site.path][0]
        x = raw.output if site.kind == "output" else raw.input
        if not isinstance(x, Tensor):
            continue
        # Magnitudes from a thousandth to a thousand.
        shape = view.get(x, call).shape
        noise = torch.randn(shape, generator=generator, device="cpu")
        exponents = 6 * torch.rand(shape, generator=generator, device="cpu") - 3
        new = (noise * 10**exponents).to(x)
        read = view.get(view.put(x.clone(), new, call), call)
        same = False
        if read.shape == new.shape:
            differences = (read - new).abs() / (new.abs().double() + 1)
            same = bool((differences <= findings.tolerance).all())
        findings.holds(WRITTEN, name, same, "something else is read there")


# --------------------------------------------------------------------------------------------------
# The columns of a projection's output that a hook point shows: its view of their numbers.
# --------------------------------------------------------------------------------------------------


def _why_no_columns(view: View, call: ModuleCall, output: Tensor) -> str:
    """Return why a view of an output does not return unchanged columns, each once and in order; ""
    if it does.
    """
    values = _first_position(_shown(view, output, call))
    columns = _first_position(_shown(view, _numbered(output), call))
    width = output.shape[-1]
    if columns.is_floating_point() or not bool(((columns >= 0) & (columns < width)).all()):
        return _NOT_COLUMNS
    unique = len(columns.unique()) == columns.numel()
    if not unique or not torch.equal(output.flatten(0, -2)[0][columns.long()], values):
        return _NOT_COLUMNS
    return "" if _in_order(columns) else _DISORDER


def _first_position(x: Tensor) -> Tensor:
    """Return the columns at the first position."""
    return x[0, 0] if x.ndim == 4 else x.flatten(0, -2)[0]


def _in_order(columns: Tensor) -> bool:
    """Tell whether each head's columns are in the order of the projection's output, which is
    HookedTransformer's.

    Scores do not determine the order: without a rotation, any order that queries and keys share
    gives the same scores.
    """
    return bool((columns.diff(dim=-1) > 0).all())


def _numbered(output: Tensor) -> Tensor:
    """Return a tensor like the output that holds the column number in each column."""
    return torch.arange(output.shape[-1], device=output.device).expand_as(output).contiguous()


def _shown(view: View, x: Tensor, call: ModuleCall) -> Tensor:
    """Return a view of an output, without a bias that is added to it."""
    own = view.heads if isinstance(view, Biased) else view
    return own.get(x, Call(call.module, call.args, call.kwargs))


# --------------------------------------------------------------------------------------------------
# The columns that reach scores and `z`, by gradient.
# --------------------------------------------------------------------------------------------------


class _Columns(AttentionClaim):
    """Each head of an attention depends exactly on the columns that its hook points show."""

    name = CLAIM

    def prove(self, graphs: set[str]) -> None:
        """Check the columns of queries, keys and values, if the attention can be seen.

        Args:
            graphs: the attentions with a call whose scores have a graph, without call numbers.
        """
        place = self.place.part
        output = self.part.o
        if not self.part.projections:
            self.inconclusive(f"{place}: what makes queries, keys and values is not known")
            return
        scores = self.get("attn_scores")
        pattern = self.get("pattern")
        z = self.input_of(output) if output else None
        if scores is None or pattern is None:
            self.inconclusive(f"{place}: its scores cannot be seen")
        elif output and z is None:
            self.fails(place, f"{output} did not run")
        elif output and not scores.requires_grad and module_path(self.path) in graphs:
            reason = "it runs without gradients; another call of its module has them"
            self.inconclusive(f"{place}: {reason}")
        else:
            if z is not None and isinstance(self.part.z_transform, Norm):
                z = self._before_norm(z)
            self._prove_columns(scores, pattern, z)

    def _before_norm(self, z: Tensor) -> Tensor:
        """Return the input of a norm over all heads that computes `z`; after it, every column
        depends on all heads.
        """
        for call in self.evidence.calls_in(self.path):
            entered = call.input
            normed = call.result
            if normed is None or normed.shape != z.shape or not normed.equal(z):
                continue
            if entered is not None and entered.shape == z.shape and not entered.equal(z):
                return entered
        return z

    def _prove_columns(self, scores: Tensor, pattern: Tensor, z: Tensor | None) -> None:
        """Compare the columns that reach scores and `z` with the columns at hook points."""
        self.scores = scores
        self.batch, self.n_heads, self.query_pos, self.key_pos = pattern.shape
        query = self.query_pos - 2
        allowed = (pattern[:, :, query] > 0).all(0).all(0)
        if not self.part.cross:
            allowed[query] = False
        keys = allowed.nonzero().flatten().tolist()[-4:]
        if len(keys) < 2:
            place = self.place.part
            self.inconclusive(f"{place}: a query may attend to fewer than two other keys")
            return
        # Keys of another block also reach scores through the stream. They are checked where they
        # are computed.
        calls: dict[str, ModuleCall] = {}
        outputs: dict[str, Tensor] = {}
        for letter in self.part.projections:
            call = self._call(letter)
            if call is None or call.result is None:
                self.fails(self.point(letter), "its projection did not run")
                return
            calls[letter] = call
            outputs[letter] = call.result
        if z is not None:
            columns = by_position(z, self.batch, self.query_pos)
            if columns is None or columns.shape[-1] % self.n_heads:
                self.fails(self.point("z"), f"z of shape {list(z.shape)}")
                return
            z = columns.unflatten(-1, (self.n_heads, -1))
        for letter, mask in self._reached_anywhere(outputs, z, query, keys).items():
            self._compare(letter, calls[letter], outputs[letter], mask)

    def _reached_anywhere(
        self, outputs: dict[str, Tensor], z: Tensor | None, query: int, keys: list[int]
    ) -> dict[str, Tensor | None]:
        """Return the columns that reach each head at a query. If values are clamped, so that they
        may have no gradient there, search earlier queries too.
        """
        reached = self._reached(outputs, z, query, keys)
        for other in range(4, query) if self.part.clip is not None else ():
            more = self._reached(outputs, z, other, [other - 3, other - 1])
            for letter, mask in more.items():
                reached[letter] = either(reached[letter], mask)
        return reached

    def _reached(
        self, outputs: dict[str, Tensor], z: Tensor | None, query: int, keys: list[int]
    ) -> dict[str, Tensor | None]:
        """Return the columns of queries, keys and values that reach each head at a query."""
        factors = [outputs[letter] for letter in "qk" if letter in outputs]
        reaches = gradients_of_scores(
            self.scores,
            factors,
            query=query,
            keys=keys,
            query_pos=self.query_pos,
            key_pos=self.key_pos,
        )
        reached = {"q": reaches.from_query[0]}
        if "k" in outputs:
            reached["k"] = reaches.from_keys[1]
        if "v" in outputs and z is not None:
            (reached["v"],) = gradients_of_z(z, [outputs["v"]], query=query, key_pos=self.key_pos)
        return reached

    def _call(self, letter: str) -> ModuleCall | None:
        """Return the call of the site of a letter's hook point, or of the norm over all heads that
        follows it.
        """
        hook = self.bridge.hook_dict[self.point(letter)]
        return self.evidence.call(self._norm(letter) or hook.point.site.path)

    def _norm(self, letter: str) -> str | None:
        """Return the path of the norm over all heads of queries or keys."""
        norm = self.part.projections[letter].norm
        if norm is None or letter == "v" or self.part.norms_over != "width":
            return None
        return f"{self.path}.{norm.path}"

    def _positions_of(self, letter: str) -> int:
        """Return the number of positions of queries, or of keys and values."""
        return self.query_pos if letter == "q" else self.key_pos

    def _compare(
        self, letter: str, call: ModuleCall, output: Tensor, reached: Tensor | None
    ) -> None:
        """Compare the columns that reach each head with the columns at a hook point."""
        point = self.point(letter)
        rows = by_position(output, self.batch, self._positions_of(letter))
        if reached is None:
            why = "no known layout in" if rows is None else "nothing of it reaches"
            self.fails(point, f"{why} the {'z' if letter == 'v' else 'scores'}")
            return
        declared = None if rows is None else self._declared(letter, call, rows)
        if declared is None:
            self.fails(point, _NOT_COLUMNS)
            return
        heads = len(declared)
        expected = torch.zeros_like(reached)
        for head in range(self.n_heads):
            expected[head, declared[head * heads // self.n_heads]] = True
        wrong = (expected != reached).any(-1).nonzero().flatten().tolist()
        if wrong:
            head = wrong[0]
            shown = _columns(expected[head])
            self.fails(
                point, f"head {head} is reached from {_columns(reached[head])}, and shows {shown}"
            )
        else:
            self.holds(point, _in_order(declared), _DISORDER)

    def _declared(self, letter: str, call: ModuleCall, rows: Tensor) -> Tensor | None:
        """Return the columns that a hook point returns for each head, ``[head, d_head]``: its view
        of the column numbers.
        """
        view = self.bridge.hook_dict[self.point(letter)].point.view
        if self._norm(letter):
            view = Heads(self.cfg.n_heads if letter == "q" else self.cfg.n_kv_heads)
        shown = _shown(view, _numbered(rows), call)
        if shown.ndim != 4 or shown.is_floating_point() or self.n_heads % shown.shape[2]:
            return None
        return shown[0, 0].long()


def _columns(mask: Tensor) -> str:
    """Describe the columns of a mask."""
    columns = mask.nonzero().flatten().tolist()
    if not columns:
        return "no column"
    first = columns[0]
    last = columns[-1]
    if last - first == len(columns) - 1:
        return f"columns {first} to {last}"
    return f"columns {columns[:6]}..."
