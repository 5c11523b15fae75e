"""Declarations that are kept: what is read again is data, of this model, and proved; everything
else is refused.
"""

from __future__ import annotations

import json
import os
import shutil
import textwrap
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from copy import deepcopy
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from adapters import kept as folder
from adapters.automatic import automatic as inference
from adapters.kept import Declaration, DeclarationError, decoded, encoded, identity_of
from adapters.sealed import unsealed
from adapters.views import View
from bridge import TransformerBridge, version
from bridge.facade import facade
from bridge.version import __version__, built
from tests.conftest import tiny
from tests.tiny_models import tiny_model


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where declarations are kept while a test runs."""
    monkeypatch.setenv(folder.VARIABLE, str(tmp_path))
    return tmp_path / "declarations"


@pytest.fixture
def inferred(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The classes of the models that were inferred while a test ran."""
    seen: list[str] = []
    infer = inference.infer

    def noted(model: nn.Module, *args: Any) -> inference.Inferred:
        seen.append(type(model).__name__)
        return infer(model, *args)

    # What is inferred and what is read from a file give the same bridge, and are to: only the call
    # tells them apart.
    monkeypatch.setattr(inference, "infer", noted)
    return seen


def same_points(bridge: TransformerBridge, other: TransformerBridge) -> bool:
    return (
        list(bridge.hook_dict) == list(other.hook_dict)
        and bridge.architecture == other.architecture
    )


@pytest.mark.parametrize(
    ("model_type", "task"),
    [
        ("olmo2", "causal"),
        ("bamba", "causal"),
        ("deepseek_v3", "causal"),
        ("granite", "causal"),
        ("qwen2_moe", "causal"),
        ("roberta", "masked"),
        ("deberta", "masked"),
        ("t5", "seq2seq"),
        ("mamba2", "causal"),
        ("xlnet", "causal"),
        ("albert", "masked"),
        ("rwkv", "causal"),
        ("mpt", "causal"),
        ("bloom", "causal"),
        ("diffllama", "causal"),
    ],
)
def test_a_file_says_all_that_was_inferred(model_type: str, task: Any, tmp_path: Path) -> None:
    bridge = TransformerBridge(tiny_model(model_type, task), automatic="always")
    bridge.declaration().save(tmp_path / "it.json")
    read = Declaration.load(tmp_path / "it.json")
    assert read.architecture == bridge.architecture and repr(read.architecture) == repr(
        bridge.architecture
    )
    assert (
        read.not_offered == bridge.offered().not_offered
        and read.no_layer_runs == bridge.no_layer_runs
    )
    again = TransformerBridge(tiny_model(model_type, task), declaration=tmp_path / "it.json")
    assert same_points(again, bridge) and again.offered() == bridge.offered()


def test_the_second_time_nothing_is_inferred(cache: Path, inferred: list[str]) -> None:
    first = TransformerBridge(tiny_model("diffllama"))
    assert inferred == ["DiffLlamaForCausalLM"] and len(list(cache.iterdir())) == 1
    second = TransformerBridge(tiny_model("diffllama"))
    assert len(inferred) == 1 and same_points(first, second) and second.offered() == first.offered()
    TransformerBridge(tiny_model("diffllama"), cache_declaration=False)
    assert len(inferred) == 2
    TransformerBridge(tiny_model("diffllama", num_hidden_layers=1))  # another configuration
    TransformerBridge(tiny_model("diffllama").to(torch.bfloat16))  # another type
    assert len(inferred) == 4 and len(list(cache.iterdir())) == 3


def test_nothing_is_kept_where_the_variable_is_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inferred: list[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv(folder.VARIABLE, "")
    for _ in range(2):
        TransformerBridge(tiny_model("diffllama"))
    assert len(inferred) == 2 and not list(tmp_path.iterdir())
    monkeypatch.delenv(folder.VARIABLE)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert folder.folder() == tmp_path / ".cache" / "transformer-bridge" / "declarations"


def test_an_adapter_that_is_there_is_not_kept(cache: Path) -> None:
    TransformerBridge(tiny("llama"))
    assert not cache.exists()


SOURCE = """
import torch
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP

FACTOR = {factor}

def scaled(x):
    {comment}
    return x * FACTOR {more}

class MyMLP(LlamaMLP):
    def forward(self, x):
        return scaled(super().forward(x))

class Mine(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp = MyMLP(config)
"""


def written(
    factor: float = 2.0, comment: str = "pass", more: str = ""
) -> Callable[[], PreTrainedModel]:
    """A class whose source says something."""
    space: dict[str, Any] = {"__name__": "somebodys_code"}
    exec(textwrap.dedent(SOURCE.format(factor=factor, comment=comment, more=more)), space)
    config = LlamaConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        vocab_size=61,
    )

    def made() -> PreTrainedModel:
        torch.manual_seed(0)
        model: PreTrainedModel = space["Mine"](config).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
        return model

    return made


@pytest.mark.parametrize(
    "change", [{"factor": 3.0}, {"more": "+ x * 0.5"}, {"more": "if x.ndim else x"}]
)
def test_a_class_whose_source_changed_is_inferred_anew(
    change: dict[str, Any], cache: Path, inferred: list[str], tmp_path: Path
) -> None:
    first = TransformerBridge(written()(), automatic="always")
    TransformerBridge(written(comment="pass  # said otherwise")(), automatic="always")
    assert len(inferred) == 1  # the same code
    TransformerBridge(written(**change)(), automatic="always")
    assert len(inferred) == 2
    first.declaration().save(tmp_path / "mine.json")
    with pytest.raises(
        DeclarationError,
        match=r"mine\.json is not of this model: the source of Mine is another one",
    ):
        TransformerBridge(written(**change)(), declaration=tmp_path / "mine.json")


class Reads(nn.Module):
    def __init__(self, **said: Any) -> None:
        super().__init__()
        self.said, self.bias, self.unread = said, nn.Parameter(torch.zeros(3)), 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if self.said.get("twice", [0])[0] else x + self.bias


def test_attributes_that_a_forward_reads_are_of_the_identity() -> None:
    before = identity_of(Reads(twice=[1]), __version__)
    again = Reads(twice=[1])
    again.unread = 2
    assert identity_of(again, __version__) == before
    assert identity_of(Reads(twice=[0]), __version__) != before
    norms = [nn.Sequential(nn.LayerNorm(3, eps=eps)) for eps in (1e-5, 1e-6)]
    assert len({identity_of(model, __version__).key for model in norms}) == 2


def test_a_forward_that_was_exchanged_is_another_source() -> None:
    model = tiny("llama")
    before = identity_of(model, __version__).code
    mlp: Any = model.get_submodule("model.layers.0.mlp")
    mlp.forward = lambda x: mlp.down_proj(mlp.up_proj(x))
    assert identity_of(model, __version__).code != before


def test_what_another_commit_kept_is_not_read(
    cache: Path, inferred: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkout between two releases: the version is the same, and a file of the library
    differs.
    """
    root = Path(version.__file__).parent.parent
    for name in ("adapters", "bridge"):
        shutil.copytree(
            root / name,
            tmp_path / name,
            ignore=lambda _, names: {x for x in names if x.endswith(".pyc")},
        )
    as_it_is = built()
    assert as_it_is.startswith(f"{version.__version__}+")
    found = {name: find_spec(tmp_path / name, name) for name in ("adapters", "bridge")}
    monkeypatch.setattr(version.util, "find_spec", found.__getitem__)
    assert built.__wrapped__() == as_it_is  # wherever it lies
    TransformerBridge(tiny_model("diffllama"))
    TransformerBridge(tiny_model("diffllama"))
    assert len(inferred) == 1
    for file in (
        "adapters/proofs/slopes.py",
        "adapters/automatic/stream.py",
        "bridge/taps/attention_tap.py",
    ):
        with (tmp_path / file).open("a") as source:
            source.write("# changed\n")
        assert built.__wrapped__() != as_it_is
    monkeypatch.setattr(facade, "built", built.__wrapped__)
    TransformerBridge(tiny_model("diffllama"))
    assert len(inferred) == 2 and len(list(cache.iterdir())) == 2


def find_spec(folder: Path, name: str) -> ModuleSpec | None:
    return spec_from_file_location(name, folder / "__init__.py")


def _identities() -> list[Any]:
    return [identity_of(tiny_model(each), __version__) for each in ("bamba", "olmoe")]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The declaration of a tiny Llama."""
    path = tmp_path_factory.mktemp("kept") / "llama.json"
    TransformerBridge(tiny("llama"), automatic="always").declaration().save(path)
    return path


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is damaged"),
        ("{", "is damaged"),
        ("[]", "is damaged: it is no JSON object"),
        ('{"format": "another"}', "is no declaration"),
        ('{"format": "transformer-bridge declaration 1"}', "is damaged: 'architecture'"),
        ("\x00\x80", "is damaged"),
    ],
)
def test_a_file_that_is_no_declaration_is_refused(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "it.json").write_text(text)
    with pytest.raises(DeclarationError, match=rf"it\.json {said}"):
        TransformerBridge(tiny("llama"), declaration=tmp_path / "it.json")


def test_a_file_is_never_code(file: Path, tmp_path: Path) -> None:
    said = unsealed(
        file.read_bytes()
    )  # without its checksum: whoever writes code can write that, too
    for part in ("CallRecorder", "__import__", "os.system", "View.__init__", "Tensor"):
        changed = deepcopy(said)
        changed["architecture"]["stacks"][0]["block"]["steps"][0]["part"]["is"] = part
        (tmp_path / "it.json").write_text(json.dumps(changed))
        with pytest.raises(
            DeclarationError, match=r"is damaged: .* is nothing that declarations are made of"
        ):
            TransformerBridge(tiny("llama"), declaration=tmp_path / "it.json")


def test_a_file_of_another_model_is_refused_by_what_differs(file: Path) -> None:
    with pytest.raises(
        DeclarationError, match=r"it is of a LlamaForCausalLM, and this is a GPT2LMHeadModel"
    ):
        TransformerBridge(tiny("gpt2"), declaration=file)
    config = deepcopy(tiny("llama").config)
    config.num_attention_heads = 8
    with pytest.raises(DeclarationError, match=r"configuration says .*=4, and this one 8|head"):
        TransformerBridge(LlamaForCausalLM(config), declaration=file)
    with pytest.raises(FileNotFoundError):
        TransformerBridge(tiny("llama"), declaration="nowhere.json")


def test_what_only_a_program_can_hold_is_not_saved(tmp_path: Path) -> None:
    class Odd(View):
        identity = False

    with pytest.raises(ValueError, match=r"Odd, which no file of a declaration can hold"):
        encoded(Odd())


def test_numbers_that_json_has_not() -> None:
    for value in (float("inf"), (1, (2.5, None)), {"a": [1, 2], 3: "x"}):
        assert decoded(json.loads(json.dumps(encoded(value), allow_nan=False))) == value


def test_a_damaged_file_of_the_cache_is_replaced(cache: Path, inferred: list[str]) -> None:
    TransformerBridge(tiny_model("diffllama"))
    (kept,) = cache.iterdir()
    whole = kept.read_text()
    kept.write_text(whole[: len(whole) // 2])
    TransformerBridge(tiny_model("diffllama"))
    assert len(inferred) == 2 and kept.read_text() == whole


def test_a_wrong_file_of_the_cache_is_replaced(cache: Path, inferred: list[str]) -> None:
    TransformerBridge(tiny_model("diffllama"))
    (kept,) = cache.iterdir()
    whole = kept.read_text()
    kept.write_text(whole.replace('"mlp.up_proj"', '"mlp.x"').replace('"up_proj"', '"gate_proj"'))
    assert kept.read_text() != whole
    TransformerBridge(tiny_model("diffllama"))
    assert len(inferred) == 2 and kept.read_text() == whole


def test_a_model_without_weights_is_not_taken_for_one_that_was_proved(cache: Path) -> None:
    TransformerBridge(tiny_model("diffllama"))
    with pytest.raises(TypeError, match="it has no weights"):
        TransformerBridge(tiny_model("diffllama").to("meta"))


def test_a_folder_that_cannot_be_written_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a file").write_text("")
    monkeypatch.setenv(folder.VARIABLE, str(tmp_path / "a file"))
    assert TransformerBridge(tiny_model("diffllama")).offered().inferred


def _wrapped(path: str) -> int:
    os.environ[folder.VARIABLE] = path
    torch.set_num_threads(1)
    return len(TransformerBridge(tiny_model("diffllama")).hook_dict)


def test_processes_that_keep_the_same_declaration_find_its_identity_and_leave_one_whole_file(
    tmp_path: Path,
) -> None:
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        identities = pool.submit(_identities)  # which another process finds the same
        assert len(set(pool.map(_wrapped, [str(tmp_path)] * 4))) == 1
        assert identities.result() == _identities()
    (kept,) = (tmp_path / "declarations").iterdir()  # and nothing unfinished
    assert Declaration.load(kept).inferred


def leaves(data: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """The values in a JSON document, with where they stand."""
    items = (
        data.items()
        if isinstance(data, dict)
        else enumerate(data)
        if isinstance(data, list)
        else ()
    )
    for key, value in items:
        yield from leaves(value, (*place, key))
    if not isinstance(data, dict | list):
        yield place, data


def others(place: tuple[Any, ...], value: Any) -> list[Any]:
    """Other values in the place of one, which are not as true of the model as it is."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [other for other in (value + 1, max(0, value - 1), value * 2) if other != value]
    if isinstance(value, float):
        return [value * 1.5, -value]
    swaps = {
        "q_proj": "k_proj",
        "k_proj": "v_proj",
        "v_proj": "q_proj",
        "gate_proj": "up_proj",
        "up_proj": "gate_proj",
        "rms": "layer",
        "input_layernorm": "post_attention_layernorm",
        "post_attention_layernorm": "input_layernorm",
        "self_attn": "mlp",
        "mlp": "self_attn",
        "silu": "gelu",
        "gelu": "silu",
        "causal": "bidirectional",
    }
    return [swaps.get(value, f"{value}x")] if isinstance(value, str) else []


#: What can be said otherwise, and why that is as true: by a word in its place, or by what is said.
AS_TRUE = {
    "rotary": "where queries and keys have no norm, rotation is before it and behind it",
    "tie_word_embeddings": "it is read from the model",
    "no_layer_runs": "a reason, in words",
    "stop": "behind the last column there is none",
}


@pytest.mark.parametrize(
    ("model_type", "task", "least"),
    [
        ("llama", "causal", 70),
        ("gpt2", "causal", 80),
        ("qwen2_moe", "causal", 90),
        ("roberta", "masked", 70),
    ],
)
def test_whatever_is_changed_in_a_file_is_refused(
    model_type: str, task: Any, least: int, tmp_path: Path
) -> None:
    """Each value of a declaration in its turn: another number, another name, another word."""
    model = tiny_model(model_type, task)
    path = tmp_path / "it.json"
    TransformerBridge(model, automatic="always").declaration().save(path)
    right = unsealed(
        path.read_bytes()
    )  # without its checksum, which refuses every change by itself
    TransformerBridge(model, declaration=path)
    accepted, tried = [], 0
    for place, value in leaves(right["architecture"]):
        for other in others(place, value):
            wrong = deepcopy(right)
            at = wrong["architecture"]
            for key in place[:-1]:
                at = at[key]
            said = at[0] if isinstance(at, list) and place[-1] == 1 else place[-1]
            at[place[-1]] = other
            path.write_text(json.dumps(wrong))
            tried += 1
            try:
                TransformerBridge(model, declaration=path)
            except DeclarationError:
                continue
            if said not in AS_TRUE:
                accepted.append((place, value, other))
    assert tried >= least and not accepted
