"""What is said to package indices and to other people's tools agrees."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import yaml
from packaging.requirements import Requirement

from adapters import imports as versions
from bridge import TransformerBridge, __version__

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT, BUILT_WITH = PYPROJECT["project"], PYPROJECT["build-system"]["requires"]


def test_the_version_is_said_alike() -> None:
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == __version__
    assert (
        yaml.safe_load((ROOT / "recipe" / "recipe.yaml").read_text())["context"]["version"]
        == __version__
    )


def test_the_recipe_asks_for_what_the_package_asks_for() -> None:
    recipe = yaml.safe_load((ROOT / "recipe" / "recipe.yaml").read_text())
    asked = {line.split()[0]: line.split()[-1] for line in recipe["requirements"]["run"]}
    asked["torch"] = asked.pop("pytorch")
    del asked["python"]
    needs = [Requirement(each) for each in PROJECT["dependencies"]]
    assert {need.name: set(str(need.specifier).split(",")) for need in needs} == {
        name: set(bounds.split(",")) for name, bounds in asked.items()
    }
    lowest = recipe["context"]["python_min"]
    assert (
        PROJECT["requires-python"] == f">={lowest}"
        and recipe["about"]["license"] == PROJECT["license"]
    )
    host = {line.replace(" ", "") for line in recipe["requirements"]["host"]}
    assert set(BUILT_WITH) <= host and recipe["about"]["summary"] == PROJECT["description"]
    assert recipe["build"]["python"]["entry_points"] == [
        f"{name} = {where}" for name, where in PROJECT["scripts"].items()
    ]


def test_the_lower_bounds_are_those_of_the_table() -> None:
    # Bounds are what one process needs: the page says by name what several cannot do with an older
    # torch.
    row = re.compile(r"^\| (\d[\d.]+) \| (\d[\d.]+)\S* \| (\d[\d.]+) \| (\d.*)\|[^|]*\|$")
    found = [each.groups() for line in _table().splitlines() if (each := row.match(line))]
    rows = [each for each in found if "fail" not in each[3]]
    lowest = [min(tuple(map(int, row[i].split("."))) for row in rows) for i in range(3)]
    for name, found in zip(("transformers", "torch"), lowest, strict=False):
        assert f"{name}>={found[0]}.{found[1]}" == _of(name).split(",")[0]
    assert PROJECT["requires-python"] == f">={lowest[2][0]}.{lowest[2][1]}"
    measured = {
        f"Programming Language :: Python :: {'.'.join(row[2].split('.')[:2])}" for row in rows
    }
    said = {each for each in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", each)}
    assert said == measured


def _of(name: str) -> str:
    return next(each for each in PROJECT["dependencies"] if re.match(rf"{name}\W", each))


def _table() -> str:
    return (ROOT / "benchmarks" / "VERSIONS.md").read_text()


def test_a_report_says_what_a_bug_report_needs(embedded: TransformerBridge) -> None:
    text = embedded.report()
    own = versions.transformers.__version__
    assert all(
        said in text
        for said in (__version__, "Python", "torch", own, "LlamaForCausalLM", "135 hook points")
    )
    assert re.search(r"processed +no\n", text)


def test_the_template_of_an_issue_asks_for_that_report() -> None:
    (template,) = (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.md")
    _, head, text = template.read_text().split("---\n", 2)
    assert set(yaml.safe_load(head)) == {"name", "about"} and "print(bridge.report())" in text
