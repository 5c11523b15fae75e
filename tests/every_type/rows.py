"""Rows of unequal length, and requests that share passes: each is what the plain model makes of it
alone.
"""

from __future__ import annotations

import inspect
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from adapters.inputs import takes
from bridge.generation.batch import Answer
from bridge.interventions import Add, Interventions, Scale, Set
from tests.every_type.plain import Place, editing
from tests.every_type.subject import Absent, Subject, Wrong, arranged
from tests.tiny_images import image_inputs

NEW = 3
_SEEN = ("gemma3", "llava", "qwen2_audio", "qwen2_vl", "qwen3_vl")
_OURS = {"stop_at_eos": False, "verbose": False, "return_type": "tokens"}
_REQUESTS = {"max_new_tokens": NEW, "do_sample": False, "stop_at_eos": False, "verbose": False}
#: What goes with images though it may have the shape of the tokens.
_NOT_ALONG = ("pixel", "image_grid", "input_features", "feature", "aspect", "qformer")


@dataclass
class Rows:
    """Prompts of unequal length with what goes with each, and the same padded.

    Attributes:
        subject: the model they are for.
        main: the argument that is padded.
        alone: the arguments of each.
        lengths: how many tokens, or frames, each has.
        said: what the bridge said of rows in a batch.
    """

    subject: Subject
    main: str
    alone: list[dict[str, Tensor]]
    lengths: list[int]
    said: list[str] = field(default_factory=list)

    @cached_property
    def along(self) -> list[str]:
        """The arguments that are as long as the row."""
        first, n = self.alone[0], self.lengths[0]
        return [
            name
            for name, x in first.items()
            if name == self.main
            or (x.ndim >= 2 and x.shape[1] == n and not name.startswith(_NOT_ALONG))
        ]

    def padded(self, side: str) -> tuple[dict[str, Tensor], list[slice]]:
        """All rows in one batch, and where each of them is.

        Args:
            side: where padding is.
        """
        longest = max(self.lengths)
        at = [slice(longest - n, None) if side == "left" else slice(0, n) for n in self.lengths]
        together: dict[str, Tensor] = {}
        for name, x in self.alone[0].items():
            several = [row[name] for row in self.alone]
            if name in self.along:
                together[name] = x.new_zeros((len(several), longest, *x.shape[2:]))
                for i, one in enumerate(several):
                    together[name][i, at[i]] = one[0]
            else:
                together[name] = torch.cat(several)
        if len(set(self.lengths)) > 1:
            mask = torch.zeros(len(at), longest, dtype=torch.long)
            for i, where in enumerate(at):
                mask[i, where] = 1
            together["attention_mask"] = mask
        return together, at

    @property
    def sides(self) -> tuple[str, ...]:
        """Where padding may stand: sound, and what else is no text, is padded behind."""
        return ("left", "right") if self.main == "input_ids" else ("right",)

    @property
    def own_side(self) -> str:
        """Where the model's own `generate` needs it."""
        decodes = self.subject.hf.config.is_encoder_decoder
        return "left" if self.main == "input_ids" and not decodes else "right"

    def theirs(self, arguments: dict[str, Tensor], **way: Any) -> Tensor:
        """What the plain model writes, behind its prompt."""
        hf = self.subject.hf
        if "attention_mask" not in arguments and self.main == "input_ids":
            arguments = {**arguments, "attention_mask": torch.ones_like(arguments["input_ids"])}
        torch.manual_seed(0)
        given = {"do_sample": False, "num_beams": 1, **self.needed, **way}
        written = hf.generate(**arguments, max_new_tokens=NEW, eos_token_id=None, **given)
        return self._new(written, arguments)

    def _new(self, written: Tensor, arguments: dict[str, Tensor]) -> Tensor:
        n = arguments["input_ids"].shape[1] if "input_ids" in arguments and not self.decodes else 0
        return written[:, n:]

    @cached_property
    def needed(self) -> dict[str, Any]:
        """What the model's `generate` has to be told: where its decoder begins; of Whisper, to
        write no padding.
        """
        own, more = self.subject.hf.generation_config, {}
        if self.decodes and own.decoder_start_token_id is None and own.bos_token_id is None:
            more["decoder_start_token_id"] = 1
        return more | (
            {"suppress_tokens": [0]} if self.subject.case.model_type == "whisper" else {}
        )

    @property
    def decodes(self) -> bool:
        """Whether what is written is a text of its own."""
        return bool(self.subject.hf.config.is_encoder_decoder)

    def ours(self, arguments: dict[str, Tensor], **way: Any) -> Any:
        """What the bridge returns."""
        given = dict(arguments)
        tokens = given.pop("input_ids", None)
        if tokens is None:
            tokens = given.pop(self.main)
        torch.manual_seed(0)
        way = {"do_sample": False, "num_beams": 1, **self.needed, **given, **_OURS, **way}
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            made = self.subject.bridge.generate(tokens, max_new_tokens=NEW, **way)
        self.said += [said for each in told if "as it is alone" in (said := str(each.message))]
        return made

    def note_others(self, what: str) -> None:
        """Notes that the model itself makes something else of rows in a batch than alone, which has
        to be told.

        Raises:
            Wrong: the bridge has said nothing of it.
        """
        chosen = getattr(self.subject.hf.config.get_text_config(decoder=True), "index_topk", None)
        if self.said:
            self.subject.not_seen.append(
                f"the model itself {what} for rows in a batch than on their own, and a warning says"
                " so"
            )
        elif chosen is not None and chosen < max(self.lengths) + NEW:
            self.subject.not_seen.append(
                f"the model itself {what} for rows in a batch than on their own: padding decides"
                " which of several equal keys it chooses"
            )
        else:
            raise Wrong(
                f"the model itself {what} for rows in a batch than on their own, without a warning"
            )

    def written(self, sequences: Tensor, side: str) -> Tensor:
        """What the bridge wrote behind each row: padding is where the user had it."""
        if self.decodes:
            return sequences
        longest, copies = max(self.lengths), len(sequences) // len(self.lengths)
        if side == "left":
            return sequences[:, longest:]
        at = [n for n in self.lengths for _ in range(copies)]
        return torch.stack([row[n : n + NEW] for row, n in zip(sequences, at, strict=True)])


def rows_of(subject: Subject) -> Rows:
    """Rows for a model: text, with images or sound in it; or sound and images, of which a decoder
    writes.
    """
    if not subject.hf.can_generate():
        raise Absent("the model does not generate")
    case = subject.case.model_type
    if case in _SEEN:
        tokens, more = image_inputs(case)
    else:
        tokens, more = subject.inputs
        more = {name: x for name, x in more.items() if name != "decoder_input_ids"}
    count, main = len(tokens), takes(subject.hf).main if tokens.is_floating_point() else "input_ids"
    assert main is not None
    n = tokens.shape[1]
    cuts = [0, n * 2 // 5, n // 4] if tokens.is_floating_point() else [0, 4, 2]
    masked = "attention_mask" in inspect.signature(subject.hf.forward).parameters
    if (
        tokens.is_floating_point() and (not masked or tokens.ndim > 3 or case == "whisper")
    ) or not masked:
        cuts = [0, 0, 0]  # nothing can say what is padding
    lengths = [n - cuts[i % 3] for i in range(count)]
    rows = []
    for i, length in enumerate(lengths):
        row = {main: tokens[i : i + 1, :length]}
        for name, x in more.items():
            each = len(x) // count
            one = x[i * each : (i + 1) * each]
            is_long = one.ndim >= 2 and one.shape[1] == n and not name.startswith(_NOT_ALONG)
            row[name] = one[:, :length] if is_long else one
        rows.append(row)
    return Rows(subject, main, rows, lengths)


def _same_text(
    rows: Rows, ours: Tensor, alone: Sequence[Tensor], theirs: Callable[[], Tensor], what: str
) -> None:
    """Each row is written as alone; of a model that sees its padding, as its own `generate` writes
    the same batch.
    """
    subject, expected = rows.subject, torch.cat(list(alone))
    if torch.equal(ours, expected):
        subject.compared += 1
        return
    with subject.itself():
        together = theirs()
    if torch.equal(together, expected):
        subject.same(ours.double(), expected.double(), what, near=None)
    subject.same(ours.double(), together.double(), f"{what}, as the model itself", near=None)
    rows.note_others("writes different texts")


def _are_alone(subject: Subject, **way: Any) -> None:
    rows = rows_of(subject)
    with torch.no_grad():
        with subject.itself():
            alone = [rows.theirs(row, **way) for row in rows.alone]
        for side in rows.sides:
            given, _ = rows.padded(side)
            ours = rows.written(rows.ours(given, **way), side)
            _same_text(
                rows,
                ours,
                alone,
                lambda: rows.theirs(rows.padded(rows.own_side)[0], **way),
                f"{side}, {way}",
            )


def rows_are_alone(subject: Subject) -> None:
    """Rows of unequal length, left-padded or right-padded, are written as the plain model writes
    each alone.
    """
    _are_alone(subject)


def rows_of_beams_are_alone(subject: Subject) -> None:
    """The same with beams, two sequences of each row."""
    _are_alone(subject, num_beams=3, num_return_sequences=2)


def rows_are_drawn_by_seed(subject: Subject) -> None:
    """Sampled with a seed, padded rows, and two of each, are what the plain model's own `generate`
    draws.
    """
    rows = rows_of(subject)
    way = {"do_sample": True, "num_return_sequences": 2}
    with torch.no_grad():
        with subject.itself():
            theirs = rows.theirs(rows.padded(rows.own_side)[0], **way)
            alone = rows.theirs(rows.alone[1], **way)
        for side in rows.sides:
            ours = rows.written(rows.ours(rows.padded(side)[0], **way), side)
            subject.same(ours.double(), theirs.double(), f"{side}, sampled", near=None)
        one = rows.ours(rows.alone[1], **way)
        one = one if rows.decodes else one[:, rows.lengths[1] :]
        subject.same(one.double(), alone.double(), "one row, sampled", near=None)


def rows_are_kept_alone(subject: Subject) -> None:
    """The cache of padded rows that are generated holds, at each row's tokens, what a plain run of
    it alone shows.
    """
    rows = rows_of(subject)
    subject.needs_blocks()
    name, kind = f"{subject.main}.{len(subject.paths) - 1}.hook_resid_pre", "input_ids"
    if rows.decodes:
        kind = "decoder_input_ids"
    if not subject.named(name):
        raise Absent("its blocks have no hook points")
    caches = (
        {}
        if rows.decodes or subject.bridge.cfg.attention_dir != "bidirectional"
        else {"use_cache": False}
    )
    with torch.no_grad():
        with subject.itself():
            rows.theirs(rows.alone[0], **caches)
        for side in rows.sides:
            given, at = rows.padded(side)
            sequences, cache = rows.ours(given, return_cache=True, names_filter=name, **caches)
            new = rows.written(sequences, side)
            for i, row in enumerate(rows.alone):
                tokens = (
                    new[i : i + 1] if rows.decodes else torch.cat([row[kind], new[i : i + 1]], 1)
                )
                arguments = {**row, kind: tokens[:, :-1]}
                for along in set(rows.along) - {rows.main, kind}:  # what is written is text
                    x = arguments[along]
                    arguments[along] = torch.cat(
                        [x, x[:, -1:].expand(-1, NEW - 1, *x.shape[2:])], 1
                    )
                found: list[Tensor] = []
                with subject.itself(), _shown(subject, found):
                    torch.manual_seed(0)
                    subject.hf(**arguments)
                ours = cache[name][i : i + 1]
                theirs = (
                    arranged(found[0], ours)
                    if found[0].shape[0] != 1
                    else found[0].reshape(1, -1, *ours.shape[2:])
                )
                start = 0 if rows.decodes else at[i].start
                here = ours[:, start : start + theirs.shape[1]]
                if torch.allclose(here, theirs, rtol=1e-3, atol=1e-3 * float(theirs.abs().max())):
                    subject.compared += 1
                    continue
                own = _generated(rows, row, caches, ours)[:, : theirs.shape[1]]
                if own.shape == here.shape and torch.allclose(
                    here, own, rtol=1e-3, atol=1e-3 * float(own.abs().max())
                ):
                    subject.compared += 1
                    subject.not_seen.append(
                        "the model's own generate computes different streams from its forward"
                    )
                    continue
                padded, own_at = rows.padded(rows.own_side)
                start = 0 if rows.decodes else own_at[i].start
                own = _generated(rows, padded, caches, ours)[
                    i : i + 1, start : start + theirs.shape[1]
                ]
                subject.same(here, own, f"{side}, row {i}, as the model itself", near=1e-3)
                rows.note_others("computes different streams")


def _generated(
    rows: Rows, given: dict[str, Tensor], caches: dict[str, Any], like: Tensor
) -> Tensor:
    """What enters the last block of the plain model in all steps of its own `generate`.

    Args:
        rows, caches: the rows, and whether it keeps keys and values.
        given: what it is given.
        like: the same as the bridge shows it.
    """
    found: list[Tensor] = []
    with rows.subject.itself(), _shown(rows.subject, found):
        rows.theirs(given, **caches)
    count = len(next(iter(given.values())))
    steps = [x.reshape(count, -1, *like.shape[2:]) for x in found]
    return (
        steps[-1]
        if len(steps) > 1 and steps[1].shape[1] > steps[0].shape[1]
        else torch.cat(steps, 1)
    )


@contextmanager
def _shown(subject: Subject, found: list[Tensor]) -> Iterator[None]:
    """What enters the last block of the plain model, in each of its passes."""
    with editing(
        subject.hf, subject.border(subject.paths[-1]), lambda x: found.append(x.detach().clone())
    ):
        yield


@contextmanager
def _added(
    hf: Any, where: Place, vector: Tensor, places: Sequence[int], n: int, beams: int
) -> Iterator[None]:
    """The plain model, to whose rows something is added: to each at a place of its prompt.

    Args:
        hf: the model.
        where: where the stream enters the block that is given it.
        vector: what is added, as an activation has it at one place.
        places: one for each row.
        n: how long the prompt is.
        beams: how many there are.
    """
    count: list[int] = []  # of rows, those of beams included

    def edit(x: Tensor) -> Tensor | None:
        if not count:
            count.append(x.numel() // (n * vector.numel()))
            if count[0] * n * vector.numel() != x.numel() or count[0] not in (
                len(places),
                beams * len(places),
            ):
                raise Absent("its blocks are given other positions than those of the tokens")
        elif x.numel() // (count[0] * vector.numel()) < max(n, 2):
            return None  # a step behind the prompt
        like = x.reshape(count[0], -1, vector.numel())
        new, copies = (arranged(x, like) if x.ndim == 3 else like).clone(), count[0] // len(places)
        for i, place in enumerate(places):
            new[i * copies : (i + 1) * copies, place] += vector.flatten()
        return arranged(new, x) if x.ndim == 3 else new.reshape(x.shape)

    with editing(hf, where, edit):
        yield


def edits_of_rows_are_alone(subject: Subject) -> None:
    """An edit at the first, or the last, token of each padded row, with beams and without, is a
    plain hook's there.
    """
    rows = rows_of(subject)
    subject.needs_blocks()
    for stack in subject.stacks:
        layer = len(subject.stacks[stack]) - 1
        name, path = f"{stack}.{layer}.hook_resid_pre", subject.stacks[stack][layer]
        written = (
            rows.decodes and stack == subject.main
        )  # where the prompt is the token that a decoder starts with
        if not subject.named(name) or "@" in path or (rows.main != "input_ids" and not written):
            subject.not_seen.append(f"{stack}: its positions are not tokens")
            continue
        stream = subject.cache[name]
        vector = (
            torch.randn(stream.shape[2:], generator=torch.Generator().manual_seed(5))
            * 3
            * stream.std()
        )
        for way in ({}, {"num_beams": 2}):
            for place in (0,) if written else (0, -1):
                try:
                    _edits_agree(rows, name, path, vector, place, written, way)
                except Absent as absent:
                    if not way:
                        raise
                    subject.not_seen.append(f"with beams: {absent}")


def _edits_agree(
    rows: Rows, name: str, path: str, vector: Tensor, place: int, written: bool, way: dict[str, Any]
) -> None:
    subject = rows.subject

    def theirs(given: dict[str, Tensor], at: list[slice]) -> Tensor:
        n = 1 if written else given[rows.main].shape[1]
        places = [0 if written else range(n)[where][place] for where in at]
        with _added(subject.hf, subject.border(path), vector, places, n, way.get("num_beams", 1)):
            return rows.theirs(given, **way)

    with torch.no_grad():
        with subject.itself():
            alone = [theirs(row, [slice(None)]) for row in rows.alone]
        edit = Interventions([(name, Add(vector, positions=place))], subject.bridge)
        for side in rows.sides:
            with subject.bridge.hooks(fwd_hooks=edit):
                ours = rows.written(rows.ours(rows.padded(side)[0], **way), side)
            _same_text(
                rows,
                ours,
                alone,
                lambda: theirs(*rows.padded(rows.own_side)),
                f"{name} at {place}, {side}, {way}",
            )


def _raises(error: type[BaseException], at: int) -> Callable[..., None]:
    calls: list[int] = []

    def breaks(x: Tensor, hook: object) -> None:
        calls.append(1)
        if len(calls) > at:
            raise error("of a hostile request")

    return breaks


def _fills(value: float) -> Callable[..., None]:
    def fills(x: Tensor, hook: object) -> None:
        x[..., 0] = value

    return fills


def _hostile(name: str, drawn: torch.Generator) -> list[tuple[str, Any]]:
    """Edits of a request that ends in an error: one of many kinds."""
    kinds: list[Callable[[int], Any]] = [
        lambda step: Scale(float("nan"), from_step=step),
        lambda step: Set(float("inf")),
        lambda step: Scale(1e38, from_step=step) if step else Add(float("-inf")),
        lambda step: _fills(float("nan")),
        lambda step: _fills(float("inf")),
        lambda step: lambda x, hook: x / 0,
        lambda step: lambda x, hook: x[:, :1, :3],
        lambda step: lambda x, hook: "no tensor",
        lambda step: lambda x, hook: x.new_zeros(()),
        lambda step: Scale(1.0, positions=40),
        *(
            lambda step, error=error: _raises(error, step)
            for error in (
                ZeroDivisionError,
                KeyboardInterrupt,
                SystemExit,
                StopIteration,
                GeneratorExit,
                MemoryError,
                RecursionError,
                AssertionError,
            )
        ),
    ]
    kind = kinds[int(torch.randint(0, len(kinds), (), generator=drawn))]
    return [(name, kind(int(torch.randint(0, 3, (), generator=drawn))))]


@contextmanager
def _runs_beside(subject: Subject, rows: Rows, name: str) -> Iterator[None]:
    """Another thread runs the bridge meanwhile, with an edit and without.

    Raises:
        Wrong: one of its runs ended otherwise than before.
    """
    ends, bad = threading.Event(), []
    row = {x: value for x, value in rows.alone[0].items() if x != "input_ids"}

    def both() -> list[Tensor]:
        with torch.no_grad():
            tokens = rows.alone[0]["input_ids"]
            half = [(name, Scale(0.5))]
            return [
                subject.bridge(tokens, **row),
                subject.bridge.run_with_hooks(tokens, fwd_hooks=half, **row),
            ]

    right = both()

    def runs() -> None:
        while not ends.wait(0.01):
            try:
                if not all(torch.equal(x, y) for x, y in zip(both(), right, strict=True)):
                    bad.append("another result")
            except Exception as error:  # noqa: BLE001 - whatever it is, no other thread may cause it
                bad.append(f"{type(error).__name__}: {error}")

    beside = threading.Thread(target=runs)
    beside.start()
    try:
        yield
    finally:
        ends.set()
        beside.join()
    if bad:
        raise Wrong(f"a run of another thread: {bad[0]}")


def requests_are_alone(subject: Subject) -> None:
    """Requests that share passes with hostile ones are written as the plain model writes each
    alone; these end.
    """
    rows = rows_of(subject)
    if rows.main != "input_ids":
        raise Absent("it is given no tokens")
    stack = next(iter(subject.stacks))
    layer = len(subject.stacks[stack]) - 1
    name = f"{stack}.{layer}.hook_resid_pre"
    if not subject.named(name):
        raise Absent("its blocks have no hook points")
    texts = [row["input_ids"][0] for row in rows.alone]
    bridge, drawn = subject.bridge, torch.Generator().manual_seed(3)
    with torch.no_grad():
        list(bridge.generate_batch([texts[0].tolist()], **_REQUESTS))  # refused, or not
        with subject.itself():
            alone = [rows.theirs({"input_ids": text[None]})[0] for text in texts]
            with subject.edited(layer, lambda x: x * 0.5, stack):
                halved = [rows.theirs({"input_ids": text[None]})[0] for text in texts]
        with _runs_beside(subject, rows, name):
            for _ in range(2):
                whose = torch.randint(0, len(texts), (8,), generator=drawn).tolist()
                kinds = torch.randint(0, 4, (8,), generator=drawn).tolist()
                each = [
                    _hostile(name, drawn) if kind > 1 else [(name, Scale(0.5))] if kind else []
                    for kind in kinds
                ]
                prompts = [texts[i].tolist() for i in whose]
                for answer in bridge.generate_batch(prompts, each=each, **_REQUESTS):
                    i, kind = whose[answer.index], kinds[answer.index]
                    if (kind > 1) != (answer.error is not None):
                        raise Wrong(f"{each[answer.index]}: the error is {answer.error!r}")
                    if kind <= 1:
                        expected = (halved if kind else alone)[i]
                        what = "a request with an edit" if kind else "a request"
                        subject.same(answer.tokens.double(), expected.double(), what, near=None)
        _conflicting_edits_agree(subject, f"{stack}.{layer}", texts[0])
        for _ in bridge.generate_batch([text.tolist() for text in texts], **_REQUESTS):
            break  # nobody wants the others
        padded, _ = Rows(
            subject, "input_ids", [{"input_ids": x[None]} for x in texts], rows.lengths
        ).padded("right")
        mask = padded.get("attention_mask")
        for answer in bridge.generate_batch(padded["input_ids"], attention_mask=mask, **_REQUESTS):
            _answers(subject, answer, alone[answer.index], "a padded request")


def _answers(subject: Subject, answer: Answer, expected: Tensor, what: str) -> None:
    if answer.error is not None:
        raise Wrong(f"{what}: {answer.error!r}")
    subject.same(answer.tokens.double(), expected.double(), what, near=None)


def _conflicting_edits_agree(subject: Subject, block: str, text: Tensor) -> None:
    """Edits that a run refuses together, for what one makes is read by another, are those of each
    request alone.
    """
    bridge, parts = (
        subject.bridge,
        ("ln1.hook_normalized", "hook_q_input", "hook_attn_in", "attn.hook_result"),
    )
    edits = [
        (name, Scale(0.5)) for part in parts if (name := f"{block}.{part}") in bridge.hook_dict
    ]
    prompts = [text.tolist()] * len(edits)
    for answer in (
        bridge.generate_batch(prompts, each=[[edit] for edit in edits], **_REQUESTS)
        if edits
        else ()
    ):
        with bridge.hooks(fwd_hooks=[edits[answer.index]]):
            alone = bridge.generate(text[None], return_type="tokens", **_REQUESTS)[0, len(text) :]
        _answers(subject, answer, alone, f"{edits[answer.index][0]} beside others")


PROPERTIES: dict[str, Callable[[Subject], None]] = {
    "rows": rows_are_alone,
    "rows beams": rows_of_beams_are_alone,
    "rows sampled": rows_are_drawn_by_seed,
    "rows cache": rows_are_kept_alone,
    "rows edits": edits_of_rows_are_alone,
    "requests": requests_are_alone,
}
