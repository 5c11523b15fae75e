"""Queries, keys and values are those of each head: by gradient, whatever lies between them and the scores."""

from __future__ import annotations

import torch
from torch import Tensor

from adapters.attention import Attention
from adapters.norms import Norm
from adapters.observe.gradients import by_position, either, gradients_of_scores, gradients_of_z
from adapters.observe.observe import ModuleCall
from adapters.points import module_path
from adapters.proofs.evidence import RANDOMIZED, Evidence, Findings, LayerStep
from adapters.views import Biased, Call, Heads, View

WRITTEN = "what is written at a hook point is read there, at every position and of every size"
#: The ends of the names of the points at which activations are replaced in other claims, and of what is made of them.
_WRITTEN = (*RANDOMIZED, ".hook_post", ".hook_z")
CLAIM = "queries, keys and values are the columns that reach each head's scores and z"


def prove_projections(evidence: Evidence, findings: Findings) -> None:
    """Each head's scores depend on its query's and key's columns, its `z` on its value's, and on no others.

    Args:
        evidence: a run `with_graph`.
        findings: what is found is added to it.
    """
    findings.claim(CLAIM)
    graphs = {
        module_path(place.module)
        for place, _ in evidence.attentions()
        if (scores := evidence.get(f"{place.part}hook_attn_scores")) is not None and scores.requires_grad
    }
    for place, part in evidence.attentions():
        if not part.projections:
            findings.inconclusive(CLAIM, f"{place.part}: what makes queries, keys and values is not known")
            continue
        scores, pattern = (evidence.get(f"{place.part}hook_{name}") for name in ("attn_scores", "pattern"))
        z = evidence.entered(place.module, part.o) if part.o else None
        if scores is None or pattern is None:
            findings.inconclusive(CLAIM, f"{place.part}: its scores cannot be seen")
        elif part.o and z is None:
            findings.holds(CLAIM, place.part, False, f"{part.o} did not run")
        elif part.o and not scores.requires_grad and module_path(place.module) in graphs:
            findings.inconclusive(
                CLAIM, f"{place.part}: it runs without gradients; another call of its module has them"
            )
        else:
            z = _before_norm(evidence, place, z) if z is not None and isinstance(part.z_transform, Norm) else z
            _Columns(evidence, findings, place, part, scores, pattern, z).prove()


def prove_choices(evidence: Evidence, findings: Findings) -> None:
    """Each hook point of queries, keys and values shows columns of its projection as they are, none of them twice.

    Args:
        evidence: a run.
        findings: what is found is added to it.
    """
    findings.claim(CLAIM)
    for place, part in evidence.attentions():
        for letter in part.projections:
            name = f"{place.part}hook_{letter}"
            site = evidence.bridge.hook_dict[name].point.site
            found = evidence.raw.get(site.path)
            if not found or site.kind != "output" or not isinstance(found[0].output, Tensor):
                continue
            wrong = _why_no_choice(evidence.bridge.hook_dict[name].point.view, found[0], found[0].output)
            findings.holds(CLAIM, name, not wrong, wrong)


def prove_written(evidence: Evidence, findings: Findings) -> None:
    """What is written at a hook point is read there: at every position, and of every size.

    Other claims replace these activations, and would not see how they are read.

    Args:
        evidence: a run.
        findings: what is found is added to it.
    """
    findings.claim(WRITTEN)
    generator = torch.Generator().manual_seed(5)
    for name, hook in evidence.bridge.hook_dict.items():
        site, call = hook.point.site, evidence.seen_by(hook) if name.endswith(_WRITTEN) else None
        if call is None or site.kind not in ("output", "input") or site.key is not None:
            continue
        raw = evidence.raw[site.path][0]
        x = raw.output if site.kind == "output" else raw.input
        if not isinstance(x, Tensor):
            continue
        # Sizes from a thousandth to a thousand.
        new = torch.randn((shape := hook.view.get(x, call).shape), generator=generator)
        new = (new * 10 ** (6 * torch.rand(shape, generator=generator) - 3)).to(x)
        read, size = hook.view.get(hook.view.put(x.clone(), new, call), call), new.abs().double() + 1
        same = read.shape == new.shape and bool(((read - new).abs() / size <= findings.tolerance).all())
        findings.holds(WRITTEN, name, same, "something else is read there")


def _why_no_choice(view: View, call: ModuleCall, output: Tensor) -> str:
    """Why a view of an output does not show some of its columns as they are, each once, in order; "" where it does."""
    shown, numbers = _seen_through(view, output, call), _seen_through(view, _numbered(output), call)
    columns, values = (x[0, 0] if x.ndim == 4 else x.flatten(0, -2)[0] for x in (numbers, shown))
    there = not columns.is_floating_point() and bool(((columns >= 0) & (columns < output.shape[-1])).all())
    once = there and len(columns.unique()) == columns.numel()
    if not (once and torch.equal(output.flatten(0, -2)[0][columns.long()], values)):
        return "its view shows something that is no choice of columns"
    return "" if _in_order(columns) else _DISORDER


def _in_order(columns: Tensor) -> bool:
    """Whether each head's columns are in the order in which the projection makes them, which is HookedTransformer's.

    Scores do not tell: where nothing rotates, other orders that queries and keys share give the same ones.
    """
    return bool((columns.diff(dim=-1) > 0).all())


_DISORDER = "the columns of a head are not in the order in which the projection makes them"


def _numbered(output: Tensor) -> Tensor:
    """The numbers of its columns in each of its rows."""
    return torch.arange(output.shape[-1], device=output.device).expand_as(output).contiguous()


def _seen_through(view: View, x: Tensor, call: ModuleCall) -> Tensor:
    """What a view shows of an output, without a bias that is added to it."""
    return (view.heads if isinstance(view, Biased) else view).get(x, Call(call.module, call.args, call.kwargs))


def _before_norm(evidence: Evidence, place: LayerStep, z: Tensor) -> Tensor:
    """What a norm over all heads makes `z` of: behind it, no column is made from one head alone."""
    for call in evidence.calls_in(place.module):
        entered, left = call.input, call.result
        puts_out = left is not None and left.shape == z.shape and left.equal(z)
        if puts_out and entered is not None and entered.shape == z.shape and not entered.equal(z):
            return entered
    return z


class _Columns:
    def __init__(
        self,
        evidence: Evidence,
        findings: Findings,
        place: LayerStep,
        part: Attention,
        scores: Tensor,
        pattern: Tensor,
        z: Tensor | None,
    ) -> None:
        self.evidence, self.findings, self.place, self.part = evidence, findings, place, part
        self.scores, self.pattern, self.z = scores, pattern, z
        self.batch, self.n_heads, self.query_pos, self.key_pos = pattern.shape
        self.query = self.query_pos - 2

    def prove(self) -> None:
        allowed = (self.pattern[:, :, self.query] > 0).all(0).all(0)
        if not self.part.cross:
            allowed[self.query] = False
        keys = allowed.nonzero().flatten().tolist()[-4:]
        if len(keys) < 2:
            self.findings.inconclusive(CLAIM, f"{self.place.part}: a query may attend to fewer than two other keys")
            return
        # Keys of another block reach scores through the stream, too: those are proved by what they make.
        calls = {letter: self.made(letter) for letter in self.part.projections}
        missing = [letter for letter, call in calls.items() if call is None or call.result is None]
        if missing:
            self.findings.holds(CLAIM, f"{self.place.part}hook_{missing[0]}", False, "its projection did not run")
            return
        outputs = {letter: call.result for letter, call in calls.items() if call and call.result is not None}
        by_head: Tensor | None = None
        if self.z is not None:
            z = by_position(self.z, self.batch, self.query_pos)
            if z is None or z.shape[-1] % self.n_heads:
                self.findings.holds(CLAIM, f"{self.place.part}hook_z", False, f"z of shape {list(self.z.shape)}")
                return
            by_head = z.unflatten(-1, (self.n_heads, -1))
        reached = self._reached(outputs, by_head, self.query, keys)
        for query in range(4, self.query) if self.part.clip is not None else ():  # what is clamped has no gradient
            more = self._reached(outputs, by_head, query, [query - 3, query - 1])
            reached = {letter: either(mask, more[letter]) for letter, mask in reached.items()}
        for letter, found in reached.items():
            call = calls[letter]
            assert call is not None
            self.compare(letter, call, outputs[letter], found)

    def _reached(
        self, outputs: dict[str, Tensor], z: Tensor | None, query: int, keys: list[int]
    ) -> dict[str, Tensor | None]:
        """Which columns of queries, keys and values reach each head at a query."""
        positions = {"query_pos": self.query_pos, "key_pos": self.key_pos}
        made = [outputs[letter] for letter in "qk" if letter in outputs]
        reaches = gradients_of_scores(self.scores, made, query=query, keys=keys, **positions)
        found = {"q": reaches.from_query[0]} | ({"k": reaches.from_keys[1]} if "k" in outputs else {})
        if "v" in outputs and z is not None:
            found["v"] = gradients_of_z(z, [outputs["v"]], query=query, key_pos=self.key_pos)[0]
        return found

    def made(self, letter: str) -> ModuleCall | None:
        """What the hook point of a letter stands on, or the norm over all heads at once that follows it."""
        hook = self.evidence.bridge.hook_dict[f"{self.place.part}hook_{letter}"]
        return self.evidence.call(self.normed(letter) or hook.point.site.path)

    def normed(self, letter: str) -> str | None:
        norm = self.part.projections[letter].norm
        if norm is None or letter == "v" or self.part.norms_over != "width":
            return None
        return f"{self.place.module}.{norm.path}"

    def compare(self, letter: str, call: ModuleCall, output: Tensor, found: Tensor | None) -> None:
        at = f"{self.place.part}hook_{letter}"
        pos = self.query_pos if letter == "q" else self.key_pos
        if found is None:
            seen = "nothing of it reaches" if by_position(output, self.batch, pos) is not None else "no known layout in"
            self.findings.holds(CLAIM, at, False, f"{seen} the {'z' if letter == 'v' else 'scores'}")
            return
        declared = self.declared(letter, call, output)
        if declared is None:
            self.findings.holds(CLAIM, at, False, "its view shows something that is no choice of columns")
            return
        heads = declared.shape[0]
        expected = torch.zeros_like(found)
        for head in range(self.n_heads):
            expected[head, declared[head * heads // self.n_heads]] = True
        wrong = (expected != found).any(-1).nonzero().flatten().tolist()
        seen = ""
        if wrong:
            head = wrong[0]
            seen = f"head {head} is reached from {_columns(found[head])}, and shows {_columns(expected[head])}"
        elif not _in_order(declared):
            wrong, seen = [0], _DISORDER
        self.findings.holds(CLAIM, at, not wrong, seen)

    def declared(self, letter: str, call: ModuleCall, output: Tensor) -> Tensor | None:
        """The columns that a hook point shows of each head, ``[head, d_head]``: its view, given their numbers."""
        hook = self.evidence.bridge.hook_dict[f"{self.place.part}hook_{letter}"]
        pos = self.query_pos if letter == "q" else self.key_pos
        rows = by_position(output, self.batch, pos)
        if rows is None:
            return None
        view, cfg = hook.point.view, self.evidence.bridge.cfg
        if self.normed(letter):
            view = Heads(cfg.n_heads if letter == "q" else cfg.n_kv_heads)
        shown = _seen_through(view, _numbered(rows), call)
        if shown.ndim != 4 or shown.is_floating_point() or self.n_heads % shown.shape[2]:
            return None
        return shown[0, 0].long()


def _columns(mask: Tensor) -> str:
    found = mask.nonzero().flatten().tolist()
    if not found:
        return "no column"
    return f"columns {found[0]} to {found[-1]}" if found[-1] - found[0] == len(found) - 1 else f"columns {found[:6]}..."
