"""Tries what a bridge offers of every text architecture of transformers, on a tiny instance, and
writes the section "models" of docs/lookup.json.

``python benchmarks/models.py [TASK:TYPE ... | CLASS ...]``: without these, writes the file; else
prints their rows.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import cast

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedConfig, PreTrainedModel

from adapters import UnsupportedModelError, verify
from adapters.attention import Attention
from adapters.families import CLASSES
from adapters.feed_forward import MLP, MoE
from adapters.inputs import sample_inputs
from adapters.mixers import Mixer
from adapters.proofs.proofs import NOT_PROVED
from adapters.registry import family_of
from bridge import TransformerBridge
from bridge.native.native import NativeModel
from tests.every_type.cases import switched
from tests.named_by_transformer_lens import NAMED
from tests.tiny_models import (
    CANNOT_BE_BUILT,
    MAPPINGS,
    OTHER_HEADS,
    WIDE,
    Task,
    config_for,
    model_class,
    tiny_config,
    tiny_of,
    types,
)
from tools.lookup import COLUMNS, TRANSFORMS, counts, write
from weight_processing.check import ProcessingError

TITLES: dict[Task, str] = {
    "causal": "Causal language models",
    "masked": "Masked language models",
    "seq2seq": "Sequence-to-sequence models",
    "image_text": "The text of models of images and text",
    "speech": "Text from sound",
}
#: Classes that read images or sound, and have no text.
WITHOUT_TEXT: dict[str, tuple[str, ...]] = {
    "vision": (
        "ViTForImageClassification",
        "DeiTForImageClassification",
        "Dinov2ForImageClassification",
        "Dinov2WithRegistersForImageClassification",
        "DINOv3ViTModel",
        "SiglipVisionModel",
        "SiglipForImageClassification",
        "CLIPVisionModel",
        "CLIPForImageClassification",
        "BeitForImageClassification",
        "Data2VecVisionForImageClassification",
        "ViTMSNForImageClassification",
        "IJepaForImageClassification",
        "PixioModel",
        "BlipVisionModel",
        "Siglip2VisionModel",
        "YolosModel",
        "ViTMAEModel",
        "ViTMAEForPreTraining",
        "VideoMAEModel",
        "SwinForImageClassification",
    ),
    "sound": (
        "Wav2Vec2Model",
        "Wav2Vec2ForCTC",
        "HubertModel",
        "HubertForCTC",
        "WavLMModel",
        "UniSpeechModel",
        "SEWModel",
        "Data2VecAudioModel",
        "Wav2Vec2BertModel",
        "Wav2Vec2ConformerModel",
        "ASTForAudioClassification",
        "WhisperForAudioClassification",
    ),
}
#: What the rows are of, by the name in docs/lookup.json.
GROUPS: dict[str, str] = {
    **TITLES,
    "vision": "Vision transformers",
    "sound": "Encoders of sound",
    "beside": "Classes without text, or without a head",
}
_NO_INSTANCE = "no tiny instance"
#: How much of a model is offered, the least first.
_AMOUNTS = ("–", "stream", "parts", "full")
#: What a class of transformers ends in that cannot be made of a configuration.
_NOT_BUILT = (
    ValueError,
    TypeError,
    AttributeError,
    AssertionError,
    ImportError,
    ArithmeticError,
    LookupError,
    RuntimeError,
    StrictDataclassError,
)
#: What is said of a type for which a class of another package needs to be there.
_MISSING_PACKAGE = "its class needs a package that is not installed"


@dataclass(frozen=True)
class Row:
    """What is known of one type.

    Attributes:
        type, cls: the model type and its class.
        how: ``declared``, ``inferred``, or ``–``.
        offered: ``full``, ``parts`` (what is added to the stream, but not all that is inside),
            ``stream``, ``–``.
        points: how many hook points there are.
        proved: `adapters.verify` proves all that is declared, without exception.
        processed: the transforms of `process_weights` that are done.
        reason: what is missing, and why.
        tried: how many configurations it was tried in.
    """

    type: str
    cls: str
    how: str = "–"
    offered: str = "–"
    points: int = 0
    proved: bool = False
    processed: str = "–"
    reason: str = ""
    tried: int = 1

    @property
    def is_full(self) -> bool:
        """Fully offered, and proved."""
        return self.offered == "full" and self.proved

    def columns(self, task: str) -> list[object]:
        """The row of docs/lookup.json, in the order of `COLUMNS`."""
        return [
            task,
            self.type,
            self.cls,
            listed_base(self.cls) if self.how == "declared" else "",
            self.how,
            self.offered,
            self.tried if self.how != "–" else 0,
            self.points,
            self.proved,
            "".join(
                str(TRANSFORMS.index(each)) if each in TRANSFORMS else each
                for each in self.processed.split(", ")
                if each != "none"
            ),
            self.reason.replace("\n", " "),
        ]


def listed_base(name: str) -> str:
    """The class that a class of transformers has its adapter from: itself, or a base of it."""
    listed = {
        each for families in CLASSES.values() for names in families.values() for each in names
    }
    return next(
        base.__name__ for base in getattr(transformers, name).__mro__ if base.__name__ in listed
    )


def row(model_type: str, task: Task) -> Row:
    """Tries one type in three configurations: the usual one, a wide one, one with other options or
    other heads.
    """
    try:
        cls = model_class(model_type, task)
    except ImportError:
        return Row(model_type, "–", reason=_MISSING_PACKAGE)
    if model_type in CANNOT_BE_BUILT:
        return Row(
            model_type, cls.__name__, reason=f"no tiny instance: {CANNOT_BE_BUILT[model_type]}"
        )
    return _of_three(model_type, cls, partial(tiny_config, model_type, task))


def row_of_class(name: str) -> Row:
    """Tries one class, in the same three."""
    cls: type[PreTrainedModel] = getattr(transformers, name)
    return _of_three(getattr(cls.config_class, "model_type", "–"), cls, partial(config_for, cls))


def _of_three(
    model_type: str, cls: type[PreTrainedModel], configured: Callable[..., PreTrainedConfig]
) -> Row:
    """The row of the usual configuration, less what does not hold of the others.

    Args:
        model_type, cls: the type and its class.
        configured: makes a configuration, of fields, and of `sizes`.
    """

    def tried(fields: Mapping[str, object]) -> Row:
        return _tried(model_type, cls.__name__, lambda: tiny_of(cls, _with(configured, fields)))

    usual = tried({})
    if usual.how == "–":
        return usual
    options, refused = _options(cls, configured)
    others: dict[str, Mapping[str, object]] = {"512 wide": {"sizes": WIDE}}
    if options:
        others[" ".join(f"{name}={value}" for name, value in options.items())] = options
    else:
        others["other heads"] = {"sizes": OTHER_HEADS}
    found = {said: tried(fields) for said, fields in others.items()}
    made = {said: each for said, each in found.items() if not each.reason.startswith(_NO_INSTANCE)}
    reasons = [usual.reason] if usual.reason else []
    if refused and usual.is_full:
        reasons.append(f"refused with {' '.join(refused)}")
    offered, proved = usual.offered, usual.proved
    for said, each in found.items():
        if said not in made:
            reasons.append(f"{said}: {each.reason}")
        elif usual.is_full and not each.is_full:
            offered, proved = min(offered, each.offered, key=_AMOUNTS.index), proved and each.proved
            reasons.append(f"with {said}: {each.reason or each.offered}")
    return replace(
        usual, offered=offered, proved=proved, reason="; ".join(reasons), tried=1 + len(made)
    )


def _with(
    configured: Callable[..., PreTrainedConfig], fields: Mapping[str, object]
) -> PreTrainedConfig:
    """A configuration with other fields: of one of several parts, those of its text, and of an
    encoder of the kind.
    """
    sizes = {name: value for name, value in fields.items() if name == "sizes"}
    plain = configured(**sizes)
    text = _text_of(plain)
    if text is plain:
        return configured(**fields)
    encoder = getattr(plain, "encoder", None)
    for name, value in fields.items():
        parts = [] if name in sizes else [text, *([encoder] if type(encoder) is type(text) else [])]
        # The head is not the text's.
        for part in (*parts, plain) if name == "tie_word_embeddings" else parts:
            setattr(part, name, value)
    return plain


def _text_of(config: PreTrainedConfig) -> PreTrainedConfig:
    """The part of a configuration that is of its text: the decoder's, where there is an encoder as
    well.
    """
    return config.get_text_config(decoder=True)


@torch.no_grad()
def _options(
    cls: type[PreTrainedModel], configured: Callable[..., PreTrainedConfig]
) -> tuple[dict[str, object], list[str]]:
    """All options of a class the other way round that it can be made with, one key head among them.

    Returns:
        The options, and which of them an adapter refuses by name: these are not among them.
    """
    options: dict[str, object] = {}
    refused: list[str] = []
    config = configured()
    text = _text_of(config)
    of_text = None if text is config else MAPPINGS["causal"].get(type(text), None)
    for name, value in switched(text).items():
        try:
            model = tiny_of(cls, _with(configured, {**options, name: value}))
            model(**sample_inputs(model))
        except _NOT_BUILT:
            continue
        option = f"{name}={value}"
        if _is_refused(cls, model.config, option) or (
            of_text and _is_refused(of_text, _text_of(model.config), option)
        ):
            refused.append(option)
        else:
            options[name] = value
    return options, refused


def _is_refused(cls: type[PreTrainedModel], config: PreTrainedConfig, option: str) -> bool:
    """Whether the adapter of a class refuses an option by name."""
    if not family_of(cls):
        return False
    try:
        TransformerBridge(tiny_of(cls, config), cache_declaration=False)
    except _NOT_BUILT as error:
        return option in str(error)
    return False


def _tried(model_type: str, name: str, build: Callable[[], PreTrainedModel]) -> Row:
    try:
        model = build()
    except _NOT_BUILT as error:
        return Row(
            model_type, name, reason=f"{_NO_INSTANCE}: {first_line(error.__cause__ or error)}"
        )
    try:
        bridge = TransformerBridge(model, cache_declaration=False)
    except (UnsupportedModelError, *_NOT_BUILT) as error:
        said = str(error)
        why = (
            said.partition(": so what plays")[0] if ": so what plays" in said else first_line(error)
        )
        return Row(model_type, name, reason=why.rstrip("."))
    offered = bridge.offered()
    proved, reason = _proved(bridge)
    left_out = sorted(
        why for why in set(offered.not_offered.values()) if not why.startswith(NOT_PROVED)
    )
    reasons = [*left_out[:2], *([reason] if reason else [])] or _not_taken_apart(bridge)
    return Row(
        model_type,
        name,
        "inferred" if offered.inferred else "declared",
        how_much(bridge),
        len(offered.names),
        proved,
        _processed(bridge),
        "; ".join(shortened(each) for each in reasons),
    )


def _not_taken_apart(bridge: TransformerBridge) -> list[str]:
    """What is shown by what enters and leaves it, where nothing else says so."""
    steps = [
        step
        for stack in bridge.architecture.stacks
        for block in stack.every_block
        for step in block.steps
    ]
    parts = [
        step.part.path for step in steps if isinstance(step.part, Mixer) and not step.part.mixes
    ]
    return [f"{path} is no MLP" for path in dict.fromkeys(parts)]


def first_line(error: BaseException) -> str:
    """The first line of an error's text."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def shortened(text: str, most: int = 130) -> str:
    """A text that is not too long."""
    return text if len(text) <= most else text[: most - 1].rstrip() + "…"


def how_much(bridge: TransformerBridge) -> str:
    """How much of a model has hook points."""
    reasons = bridge.offered().not_offered
    not_offered = [
        name for name, why in reasons.items() if " " not in name or not why.startswith(NOT_PROVED)
    ]
    blocks = [block for stack in bridge.architecture.stacks for block in stack.every_block]
    if any(not block.steps for block in blocks):
        return (
            "stream" if any(name.endswith("hook_resid_pre") for name in bridge.hook_dict) else "–"
        )
    opaque = any(
        isinstance(step.part, Mixer) and not step.part.mixes
        for block in blocks
        for step in block.steps
    )
    parts = [step.part for block in blocks for step in block.steps]
    known = any(
        isinstance(part, Attention | MLP | MoE) or (isinstance(part, Mixer) and part.layers)
        for part in parts
    )
    if opaque or not_offered:
        return "parts"
    return "full" if known else "parts"


def _proved(bridge: TransformerBridge) -> tuple[bool, str]:
    """Whether everything is proved, and the first thing that is not."""
    try:
        report = verify(bridge)
    except _NOT_BUILT as error:
        bridge.reset_hooks()
        return False, f"verification: {type(error).__name__}: {first_line(error)}"
    reasons = [f"{NOT_PROVED}: {check.name}: {check.detail}" for check in report.failed]
    reasons += [why for why in bridge.offered().not_offered.values() if why.startswith(NOT_PROVED)]
    return not reasons, reasons[0] if reasons else ""


def _processed(bridge: TransformerBridge) -> str:
    """Which transforms are done, with log probabilities as before."""
    try:
        bridge.process_weights()
    except (
        ProcessingError,
        RuntimeError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
    ) as error:
        return f"refused ({shortened(first_line(error), 60)})"
    done = [step for step, said in bridge.cfg.processed.items() if said == "done"]
    return ", ".join(done) or "none"


def wanted(task: Task) -> list[str]:
    """The types of a task that have a row: a class that two tasks have is in the first."""
    ours = NativeModel.config_class.model_type  # none of transformers'
    found = [each for each in types(task) if each != ours]
    others: list[Task] = [other for other in TITLES if other != task] if task == "speech" else []
    earlier = {_class(each, other) for other in others for each in types(other)} - {None}
    return [each for each in found if _class(each, task) not in earlier]


def _class(model_type: str, task: Task) -> type[PreTrainedModel] | None:
    try:
        return model_class(model_type, task)
    except ImportError:
        return None


def named(found: Mapping[str, Row]) -> str:
    """How many of the classes that TransformerLens names are offered, and why the others are not.

    Args:
        found: rows by class.
    """
    seen = [found[name] for name in NAMED]
    offered = [each for each in seen if each.offered != "–"]
    full = sum(each.offered == "full" and each.proved for each in seen)
    parts = sum(each.offered in ("full", "parts") for each in seen)
    missing = "; ".join(
        f"{each.cls} ({shortened(each.reason)})" for each in seen if each.offered == "–"
    )
    return (
        f"Of the {len(NAMED)} classes that TransformerLens 4.3.0 names and transformers has,"
        f" {len(offered)} are offered, {full} fully and proved, {parts} at least with the stream"
        f" and its parts. The others: {missing or 'none'}."
    )


def summary(task: str, found: Iterable[Row]) -> str:
    """The rows in numbers. Full is what is so in all configurations."""
    rows = (dict(zip(COLUMNS, each.columns(task), strict=True)) for each in found)
    return f"{GROUPS[task]}: " + ", ".join(f"{n} {name}" for name, n in counts(rows).items())


def quiet() -> None:
    """Neither transformers nor the bridge says anything while this runs."""
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity_error()
    logging.getLogger("bridge").setLevel(logging.ERROR)
    torch.set_num_threads(1)


def everything() -> dict[str, list[str]]:
    """All that has a row, by group: ``task:type``, or a class."""
    listed = {str(task): [f"{task}:{each}" for each in wanted(task)] for task in TITLES}
    beside = [name for names in WITHOUT_TEXT.values() for name in names]
    classes = {
        found.__name__ for task in TITLES for each in wanted(task) if (found := _class(each, task))
    }
    others = sorted({*NAMED} - classes - {*beside})
    return (
        listed | {group: list(names) for group, names in WITHOUT_TEXT.items()} | {"beside": others}
    )


def tried(each: str) -> Row:
    """The row of a ``task:type``, or of a class."""
    task, _, name = each.rpartition(":")
    return (
        row_of_class(name)
        if not task and name in dir(transformers)
        else row(name, cast("Task", task or "causal"))
    )


def collect(folder: Path, part: int, parts: int) -> None:
    """Makes every so many of the rows, each once, and keeps it in a file of its own.

    Args:
        folder: where the files are; rows that are there are not made again.
        part, parts: which rows.
    """
    folder.mkdir(parents=True, exist_ok=True)
    names = [each for group in everything().values() for each in group]
    for each in names[part::parts]:
        file = folder / f"{each.replace(':', '--')}.json"
        if not file.exists():
            file.write_text(json.dumps(asdict(tried(each))), encoding="utf-8")


def write_rows(folder: Path) -> None:
    """Writes the section from the rows in a folder."""
    found = {
        task: [
            Row(**json.loads((folder / f"{each.replace(':', '--')}.json").read_text()))
            for each in names
        ]
        for task, names in everything().items()
    }
    by_class: dict[str, Row] = {}
    for task, rows in found.items():
        print(summary(task, rows), flush=True)
        by_class = {each.cls: each for each in reversed(rows)} | by_class
    rows_of_all = [each.columns(task) for task, rows in found.items() for each in rows]
    write(
        transformers=transformers.__version__,
        named=named(by_class),
        tasks=GROUPS,
        models=rows_of_all,
    )


def main(arguments: list[str]) -> None:
    """Writes the rows, or prints some of them, or makes a part of them: ``--part 0/2 FOLDER``, and
    ``--write FOLDER``.
    """
    quiet()
    match arguments:
        case ["--part", part, folder]:
            collect(Path(folder), *map(int, part.split("/")))
        case ["--write", folder]:
            write_rows(Path(folder))
        case []:
            with TemporaryDirectory() as folder:
                parts = os.cpu_count() or 1
                made = [
                    [sys.executable, __file__, "--part", f"{i}/{parts}", folder]
                    for i in range(parts)
                ]
                failed = [each.wait() for each in [subprocess.Popen(each) for each in made]]
                if any(failed):
                    raise SystemExit(f"the parts ended with {failed}")
                write_rows(Path(folder))
        case _:
            for each in arguments:
                print(tried(each), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
