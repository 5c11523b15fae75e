"""`make reference`: what other libraries show under a name beside what a bridge shows, written to
the section "peers" of docs/lookup.json.

``python benchmarks/reference.py [TYPE ...]``: without types, every causal type of transformers, and
the file is written; with some, what differs in them is printed. The others are TransformerLens,
interp-engine and nnterp, each in a process of its own on a tiny random model that is equal to the
bridge's.

Where two values differ, arithmetic decides: what the residual stream gains in a block of the plain
model, what softmax and product make of scores, patterns and values, what the unembedding makes of
its input. If what is shown here does not fit, that is an error. If it does and the other does not,
the other is wrong, unless it shows something else that has a name here, or is a module's own input
or output: then one name has two meanings.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import subprocess
import sys
import tempfile
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from functools import cached_property
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.models import quiet
from bridge import TransformerBridge
from bridge.hooks.names import UnknownHookError
from tests.every_type.cases import usual
from tests.every_type.subject import Absent, Case, Subject
from tools.lookup import write

PEERS = {
    "TransformerLens": "transformer-lens",
    "interp-engine": "interp-engine",
    "nnterp": "nnterp",
}
NEAR = 1e-4
#: TransformerLens would install torchvision, with another torch, where a processor of images asks
#: for it.
_AS_IT_IS = {"PIP_NO_INDEX": "1", "UV_OFFLINE": "1"}
#: Theirs for what enters a part, which has another name here where the norm is elsewhere.
_INPUTS = ("attn_in", "mlp_in", "attentions_input", "mlps_input")
#: Names of which each library says the same in words: what does not fit is wrong, whatever it is.
_ONE_MEANING = ("attn.hook_attn_scores", "attn.hook_pattern", "attn.hook_z")
#: A value of another library: its name there, the name that it has here, and itself.
Value = tuple[str, str, Tensor]


# --------------------------------------------------------------------------------------------------
# The others.
# --------------------------------------------------------------------------------------------------


def of_interp_engine(subject: Subject) -> Iterator[Value]:
    """What interp-engine's eager engine captures, under the names that its own table gives them."""
    from interp_engine import EagerModel, capture  # type: ignore[import-not-found]
    from interp_engine.mappers import UnmappedHook, point_to_tlens_hook  # type: ignore[import-not-found]
    from interp_engine.points import Scope, known_names, point_spec  # type: ignore[import-not-found]

    whole = {
        "final_norm": "unembed.hook_in",
        "embeddings": "hook_embed",
        "lm_head": "unembed.hook_out",
    }
    read = {
        "attn_in": "ln1.hook_out",
        "mlp_in": "ln2.hook_out",
    }  # what a norm gives to the part behind it
    engine = EagerModel("tiny", hf_model=subject.case.model("eager"), tokenizer=_tokenizer())
    for name in sorted(known_names()):
        layers = range(len(subject.paths)) if point_spec(name).scope is Scope.LAYER else [None]
        for layer in layers:
            try:
                here = whole.get(name) if layer is None else point_to_tlens_hook(name, layer)
            except UnmappedHook:
                continue
            if name in read:
                here = f"blocks.{layer}.{read[name]}"
            point = name if layer is None else (name, layer)
            try:
                found = capture(engine, subject.tokens, [point])
            except (
                ValueError,
                RuntimeError,
                NotImplementedError,
                AttributeError,
                IndexError,
                KeyError,
                TypeError,
            ):
                continue  # there it is not offered
            if here is not None:
                yield name, here, next(iter(found.tensors.values()))


def of_transformer_lens(subject: Subject) -> Iterator[Value]:
    """All that TransformerLens' bridge caches."""
    from transformer_lens.model_bridge import TransformerBridge as Theirs  # type: ignore[import-not-found]

    model = subject.case.model("eager")
    with tempfile.TemporaryDirectory() as folder:  # it looks for a configuration by name
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(folder)
        theirs = Theirs.boot_transformers(
            folder, hf_model=model, tokenizer=_tokenizer(), device="cpu"
        )
    for name, value in theirs.run_with_cache(subject.tokens)[1].items():
        if isinstance(value, Tensor):
            yield name, name, value


def of_nnterp(subject: Subject) -> Iterator[Value]:
    """What nnterp's accessors read in a trace."""
    from nnterp import StandardizedTransformer  # type: ignore[import-not-found]

    model = StandardizedTransformer(
        subject.case.model("eager"), tokenizer=_tokenizer(), check_renaming=False, device_map=None
    )
    read = {
        "layers_input": "hook_resid_pre",
        "layers_output": "hook_resid_post",
        "attentions_output": "attn.hook_out",
        "mlps_output": "mlp.hook_out",
        "attentions_input": "ln1.hook_out",
        "mlps_input": "ln2.hook_out",
    }
    for layer in range(len(subject.paths)):
        for accessor, here in read.items():
            try:
                with model.trace(subject.tokens):
                    value = getattr(model, accessor)[layer].save()
            except Exception:  # noqa: BLE001 - whatever it raises, there it is not offered
                continue
            value = value[0] if isinstance(value, tuple) else value
            if isinstance(value, Tensor):
                yield accessor, f"blocks.{layer}.{here}", value


OTHERS = {
    "TransformerLens": of_transformer_lens,
    "interp-engine": of_interp_engine,
    "nnterp": of_nnterp,
}


def _tokenizer() -> Any:
    return TransformerBridge.boot_embedded().tokenizer


# --------------------------------------------------------------------------------------------------
# What differs, and what arithmetic says of it.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """A name under which two libraries show two things.

    Attributes:
        peer, model_type: which library, in which type.
        there, here: the name.
        apart: how far, of the largest number; None: they have not as many numbers.
        is_here: what the other's is called here, or which module's input or output it is; "" where
            it is nothing known.
        fits: which of the two the arithmetic fits: ``both``, ``ours``, ``theirs``; "" where none
            says what it is.
    """

    peer: str
    model_type: str
    there: str
    here: str
    apart: float | None
    is_here: str
    fits: str

    @property
    def verdict(self) -> str:
        """``ours is wrong``, ``theirs is wrong``, ``two meanings`` or ``not decided``."""
        if self.fits == "theirs":
            return "ours is wrong"
        if self.is_here and not (self.fits == "ours" and self.here.endswith(_ONE_MEANING)):
            return "two meanings"
        return "theirs is wrong" if self.fits == "ours" else "not decided"


@dataclass
class Compared:
    """What came of one type with one other library.

    Attributes:
        equal: how many values were equal.
        differences: of the others.
        only_there: names that there are only there, and whose value has no other name here.
        why_not: why nothing was compared.
    """

    equal: int = 0
    differences: list[Difference] = field(default_factory=list)
    only_there: list[str] = field(default_factory=list)
    why_not: str = ""


def apart(one: Tensor, other: Tensor) -> float | None:
    """How far two values are from each other, where both are finite; None: they have not as many
    numbers.
    """
    one, other = one.detach().double(), other.detach().double()
    if one.numel() != other.numel():
        return None
    swapped = one.ndim == other.ndim > 2 and one.shape[1:3] == other.shape[2:0:-1]
    one = one.transpose(1, 2) if swapped and one.shape != other.shape else one.reshape(other.shape)
    there = (
        (one > -1e30) & (other > -1e30) & one.isfinite() & other.isfinite()
    )  # what is masked is not compared
    if not bool(there.any()):
        return 0.0
    return float((one - other)[there].abs().max() / other[there].abs().max().clamp_min(1e-12))


@dataclass
class Judge:
    """What a value may be besides, and what arithmetic says of it."""

    subject: Subject

    @cached_property
    def ours(self) -> dict[str, Tensor]:
        """All that a bridge shows of one run."""
        bridge = self.subject.bridge
        with torch.no_grad():
            return dict(
                self.subject.ours(bridge.run_with_cache, names_filter=list(bridge.hook_dict))[
                    1
                ].items()
            )

    @cached_property
    def of_modules(self) -> dict[str, Tensor]:
        """What enters and leaves every module of the plain model."""
        found: dict[str, Tensor] = {}

        def keep(path: str) -> Any:
            def hook(
                module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
            ) -> None:
                entered = [
                    x
                    for x in (*args, *kwargs.values())
                    if isinstance(x, Tensor) and x.is_floating_point()
                ]
                output = output[0] if isinstance(output, tuple | list) and output else output
                for side, x in (
                    (f"what enters `{path}`", entered[:1]),
                    (f"what `{path}` returns", [output]),
                ):
                    if x and isinstance(x[0], Tensor) and x[0].is_floating_point():
                        found[side] = x[0].detach().clone()

            return hook

        handles = [
            module.register_forward_hook(keep(path), with_kwargs=True)
            for path, module in self.subject.hf.named_modules()
            if path
        ]
        with torch.no_grad():
            self.subject.run()
        for handle in handles:
            handle.remove()
        return found

    def known_as(self, value: Tensor, here: str) -> str:
        """What a value is called here, or which module's it is, if need be times a number."""
        named = {
            f"`{name}`": x
            for name, x in self.ours.items()
            if name != here and x.is_floating_point()
        }
        block = here.split(".")[:2]
        near = sorted(
            named, key=lambda name: name.strip("`").split(".")[:2] != block
        )  # its own block first
        for known in (dict.fromkeys(near), self.of_modules):
            for name in known:
                x = named[name] if name in named else self.of_modules[name]
                if (by := _times(value, x)) is not None:
                    return name if by == 1 else f"{name} times {by:.3g}"
        return self._made_of(value, here) if here in self.ours else ""

    def _made_of(self, value: Tensor, here: str) -> str:
        """What a value is that has no name here, but is made of what has."""
        mine = self.ours[here]
        if (part := _part_of(value, mine)) is not None:
            return part
        if here.endswith("hook_attn_scores") and value.shape == mine.shape:
            shift = (value - mine).masked_fill(mine < -1e30, torch.nan)
            if _same(shift, shift.nanmean(-1, True).expand_as(shift)):
                return "the same but for one number for each query, which softmax does not see"
        if here.endswith("hook_expert_weights"):
            named = (
                self.ours[here.replace("expert_weights", name)]
                for name in ("expert_indices", "topk_weights")
            )
            chosen, weights = named
            if _same(value, torch.zeros_like(mine).scatter(-1, chosen, weights.to(mine.dtype))):
                return "the weights of the chosen experts, zero for the others"
        if here.endswith("hook_normalized") and any(
            _is_normed(value, x) for x in self.of_modules.values()
        ):
            return "the norm's input over its scale, without weight and bias"
        return ""

    def fits(self, here: str, theirs: Tensor) -> str:
        """Which of the two values the arithmetic of the plain model fits."""
        ours = self.ours[here]
        both = [
            self._fits(here, x.reshape(ours.shape)) if x.numel() == ours.numel() else None
            for x in (ours, theirs)
        ]
        if both[0] is None:
            return ""
        return {
            (True, True): "both",
            (True, False): "ours",
            (False, True): "theirs",
            (False, False): "",
        }[both[0], bool(both[1])]

    def _fits(self, here: str, x: Tensor) -> bool | None:
        """Whether a value may have a name; None where no sum or product says so."""
        subject, ours = self.subject, self.ours
        stack, _, rest = here.partition(".")
        layer, _, name = rest.partition(".")
        if here == "unembed.hook_in":
            head = subject.hf.get_output_embeddings()
            made = (
                None
                if head is None
                else self.of_modules.get(f"what `{_path_of(subject.hf, head)}` returns")
            )
            return None if head is None or made is None else _same(head(x), made)
        if not layer.isdigit():
            return None
        of = lambda other: ours.get(f"{stack}.{layer}.{other}")
        try:
            before, after = (subject.stream(int(layer) + i, stack) for i in (0, 1))
        except Absent:
            return None
        if name == "hook_resid_post" and of("hook_normalized_resid_post") is not None:
            added, mid = (
                of("hook_mlp_out"),
                of("ln1.hook_out"),
            )  # the stream is normed behind each sum
            return None if added is None or mid is None else _same(x, mid + added)
        if name in ("hook_resid_pre", "hook_resid_post"):
            return _same(x, before if name.endswith("pre") else after)
        if re.fullmatch(
            r"hook_\w+_out", name
        ):  # all that is written in the block is what the stream gains
            written = [
                each for each in ours if re.fullmatch(rf"{stack}\.{layer}\.hook_\w+_out", each)
            ]
            return _same(x + sum(ours[each] for each in written if each != here), after - before)
        pattern, z = of("attn.hook_pattern"), of("attn.hook_z")
        v = of("attn.hook_v") if of("attn.v_norm.hook_out") is None else None
        if name == "attn.hook_attn_scores" and pattern is not None:
            return _same(x.softmax(-1), pattern)
        if name in ("attn.hook_pattern", "attn.hook_v", "attn.hook_z") and None not in (
            pattern,
            z,
            v,
        ):
            parts = {"pattern": pattern, "v": v, "z": z} | {name.removeprefix("attn.hook_"): x}
            return _product_fits(**parts)
        return None


def _times(value: Tensor, x: Tensor) -> float | None:
    """By what the other is to be multiplied to be the value; None: it is not that."""
    if value.numel() != x.numel() or not value.is_floating_point():
        return None
    if _same(value, x):
        return 1.0
    one, other = value.double().flatten(), x.double().flatten()
    if (
        not bool(one.isfinite().all() and other.isfinite().all())
        or float(other @ other) == 0
        or len(one) < 8
    ):
        return None
    by = float(one @ other / (other @ other))
    return by if by != 0 and _same(value, by * x) else None


def _is_normed(value: Tensor, x: Tensor) -> bool:
    """Whether rows of a value are those of another, centred, each over some scale of its own."""
    if value.shape != x.shape or x.ndim < 3:
        return False
    return _same(
        *(
            functional.normalize(rows.double(), dim=-1)
            for rows in (value, x - x.mean(-1, keepdim=True))
        )
    )


def _part_of(value: Tensor, ours: Tensor) -> str | None:
    """Which of our numbers along the last axis the other's are; None: it is not that."""
    if value.ndim != 4 or ours.ndim != 4 or not 0 < (n := value.shape[-1]) < ours.shape[-1]:
        return None
    value = value if value.shape[1] == ours.shape[1] else value.transpose(1, 2)
    for said, columns in (
        (f"its last {n} columns", ours[..., -n:]),
        (f"its first {n} columns", ours[..., :n]),
    ):
        rows = columns if value.shape == columns.shape else columns[:, :, : value.shape[2]]
        if rows.shape == value.shape and _same(value, rows):
            return said
    return None


def _same(one: Tensor, other: Tensor) -> bool:
    far = apart(one, other)
    return far is not None and far <= NEAR


def _product_fits(pattern: Tensor, v: Tensor, z: Tensor) -> bool | None:
    """Whether patterns times values are z: each group of heads has the values of its key head."""
    if v.ndim != 4 or z.ndim != 4 or pattern.ndim != 4 or pattern.shape[1] % v.shape[2]:
        return None
    values = v.repeat_interleave(pattern.shape[1] // v.shape[2], 2)
    if z.shape[1:3] != (pattern.shape[2], pattern.shape[1]) or values.shape[-1] != z.shape[-1]:
        return None
    return _same(torch.einsum("bhqk,bkhd->bqhd", pattern, values), z)


def _path_of(model: nn.Module, wanted: nn.Module) -> str:
    return next(path for path, module in model.named_modules() if module is wanted)


@torch.no_grad()
def compared(case: Case, peer: str) -> Compared:
    """One type, with one other library."""
    found = Compared()
    try:
        subject = Subject(case)
        judge = Judge(subject)
        subject.needs_plain_text()
        known = judge.ours
        values = list(OTHERS[peer](subject))
    except Absent as why:
        return Compared(why_not=str(why))
    except Exception as error:  # noqa: BLE001 - what either cannot do is a row of the page
        return Compared(why_not=f"{type(error).__name__}: {' '.join(str(error).split())[:120]}")
    for there, name, value in values:
        try:
            here = subject.bridge.names.find(name).name
        except UnknownHookError:
            if value.is_floating_point() and not judge.known_as(value, name):
                found.only_there.append(there if there != name else name)
            continue
        if here not in known:
            continue
        far = apart(value, known[here])
        if far is not None and far <= NEAR:
            found.equal += 1
            continue
        said = judge.known_as(value, here), judge.fits(here, value)
        if there in _INPUTS and re.fullmatch(r"`\S+`", said[0]):
            found.equal += 1  # under the name that it has in this type
            continue
        found.differences.append(Difference(peer, case.model_type, there, here, far, *said))
    return found


# --------------------------------------------------------------------------------------------------
# The section of docs/lookup.json.
# --------------------------------------------------------------------------------------------------

VERDICTS = ("ours is wrong", "theirs is wrong", "two meanings", "not decided")
Found = dict[str, dict[str, Compared]]


def section(found: Found) -> dict[str, Any]:
    """What was compared, in numbers, and each difference with its types."""
    totals: list[list[Any]] = []
    for peer, by_type in found.items():
        differences = [each for one in by_type.values() for each in one.differences]
        verdicts = Counter(each.verdict for each in differences)
        compared_types = sum(not one.why_not for one in by_type.values())
        equal = sum(one.equal for one in by_type.values())
        totals.append(
            [peer, compared_types, equal, len(differences), *(verdicts[name] for name in VERDICTS)]
        )
    differing, only, why_not = _grouped(found)
    return {
        "versions": ", ".join(f"{peer} {version(name)}" for peer, name in PEERS.items()),
        "columns": ["library", "types compared", "values equal", "values that differ", *VERDICTS],
        "totals": totals,
        "differs": differing,
        "only there": only,
        "not compared": why_not,
    }


def _grouped(found: Found) -> tuple[list[list[Any]], ...]:
    """The rows of what differs, of what only others show, of what was not compared: types with one
    reason together.
    """
    groups: tuple[dict[tuple[str, ...], list[str]], ...] = (
        defaultdict(list),
        defaultdict(list),
        defaultdict(list),
    )
    differing, only, why_not = groups
    for peer, by_type in found.items():
        for model_type, one in by_type.items():
            for each in one.differences:
                names = map(_general, (each.there, each.here, each.is_here))
                differing[each.verdict, peer, *names].append(model_type)
            for name in one.only_there:
                only[peer, _general(name)].append(model_type)
            if one.why_not:
                why_not[peer, one.why_not.partition(". Available")[0].replace("|", "/")].append(
                    model_type
                )
    return tuple(
        [[*key, list(dict.fromkeys(types))] for key, types in sorted(group.items())]
        for group in groups
    )


def _general(text: str) -> str:
    """A name without the number of its layer."""
    return re.sub(r"\.\d+\.", ".{i}.", text)


def _loaded(data: dict[str, Any]) -> Compared:
    return Compared(**data | {"differences": [Difference(**each) for each in data["differences"]]})


def main(given: Iterable[str] | None = None) -> None:
    """Runs each library in a process of its own."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("types", nargs="*", help="types; none: all, and the file is written")
    parser.add_argument("--peer", choices=OTHERS, help="that library alone, as JSON")
    asked = parser.parse_args(given)
    if asked.peer:
        quiet()
        warnings.simplefilter("ignore")
        logging.disable(logging.ERROR)
        for case in usual("causal"):
            if not asked.types or case.model_type in asked.types:
                print(json.dumps([case.model_type, asdict(compared(case, asked.peer))]), flush=True)
        return
    found: dict[str, dict[str, Compared]] = {}
    for peer in OTHERS:
        command = [sys.executable, __file__, *asked.types, "--peer", peer]
        done = subprocess.run(
            command, stdout=subprocess.PIPE, text=True, check=True, env=os.environ | _AS_IT_IS
        )
        lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
        found[peer] = {model_type: _loaded(data) for model_type, data in lines}
        print(f"{peer}: {len(lines)} types", flush=True)
    if not asked.types:
        write(peers=section(found))
    wrong = [
        each for by_type in found.values() for one in by_type.values() for each in one.differences
    ]
    for each in wrong if asked.types else []:
        print(each.verdict, each)
    if bad := [str(each) for each in wrong if each.verdict == "ours is wrong"]:
        sys.exit("\n".join(bad))


if __name__ == "__main__":
    main()
