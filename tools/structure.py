"""How large the library is, and how much of it one call goes through: one row of figures.

    python tools/structure.py

Lines are lines with code on them, without comments and docstrings. What a call goes through is counted while it runs:
the functions of our packages that are entered, and the files that they stand in.
"""

from __future__ import annotations

import ast
import dataclasses
import io
import json
import subprocess
import sys
import threading
import tokenize
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType

import torch
import transformers

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("adapters", "bridge", "weight_processing")
_NO_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING,
    tokenize.ENDMARKER,
}  # fmt: skip


def docstring_lines(tree: ast.Module) -> set[int]:
    """The lines on which docstrings stand."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) or not node.body:
            continue
        first = node.body[0]
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
            lines.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return lines


def lines_of_code(text: str) -> int:
    """How many lines have code on them."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - docstring_lines(ast.parse(text)))


def vocabulary() -> dict[str, list[str]]:
    """The dataclasses that a declaration is made of, each with its fields."""
    from adapters.architecture import vocabulary as nouns

    return {cls.__name__: [field.name for field in dataclasses.fields(cls)] for cls in nouns()}


def branches(function: ast.AST) -> int:
    """How many decisions a function takes: conditions, each `and` and `or` in them, loops, exceptions, cases."""
    number, todo = 0, list(ast.iter_child_nodes(function))
    while todo:
        node = todo.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue  # counted by itself
        if isinstance(node, ast.If | ast.IfExp | ast.For | ast.While | ast.ExceptHandler | ast.match_case):
            number += 1
        elif isinstance(node, ast.comprehension):
            number += 1 + len(node.ifs)
        elif isinstance(node, ast.BoolOp):
            number += len(node.values) - 1
        todo.extend(ast.iter_child_nodes(node))
    return number


def complex_functions() -> int:
    """The functions that ruff finds too complex at its own limit, which counts statements alone."""
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "C901", "--exit-zero"]
    command += ["--config", "lint.mccabe.max-complexity=10", "--output-format", "json", *PACKAGES]
    return len(json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout))


def glossary() -> int:
    """The rows of the glossary in CONTRIBUTING."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split("## Glossary")[1].split("\n## ")[0]
    return sum(line.startswith("| ") for line in text.splitlines()) - 1


def crossed(job: Callable[[], object]) -> tuple[int, int]:
    """How many of our functions a call enters, in how many files."""
    seen: set[CodeType] = set()

    def note(frame: FrameType, event: str, arg: object) -> None:
        if event == "call":
            seen.add(frame.f_code)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        job()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    inside = tuple(str(ROOT / package) + "/" for package in PACKAGES)
    ours = [code for code in seen if code.co_filename.startswith(inside) and not code.co_name.startswith("<")]
    return len(ours), len({code.co_filename for code in ours})


def calls() -> dict[str, Callable[[], object]]:
    """The calls whose way through the library is counted. Each was made once before: what is made once is not in it."""
    from bridge import TransformerBridge

    bridge = TransformerBridge.boot_embedded()
    tokens = bridge.to_tokens("Mary and John")

    def halve(activation: torch.Tensor, hook: object) -> torch.Tensor:
        return activation * 0.5

    def trace() -> None:
        with bridge.trace(tokens) as run:
            run["blocks.1.hook_resid_post"] *= 0.5
            assert run.logits is not None

    def wrap() -> object:
        config = transformers.BitNetConfig(
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            intermediate_size=48,
            vocab_size=61,
        )
        return TransformerBridge(transformers.BitNetForCausalLM(config).eval())

    jobs: dict[str, Callable[[], object]] = {
        "run_with_cache": lambda: bridge.run_with_cache(tokens),
        "an edit of a pattern": lambda: bridge.run_with_hooks(
            tokens, fwd_hooks=[("blocks.1.attn.hook_pattern", halve)]
        ),
        "a trace": trace,
        "an inferred adapter": wrap,
    }
    for job in jobs.values():
        job()
    return jobs


def main() -> None:
    """Prints the figures."""
    texts = [path.read_text(encoding="utf-8") for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    nodes = [node for text in texts for node in ast.walk(ast.parse(text))]
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    fields = vocabulary()
    rows: dict[str, object] = {
        "files": len(texts),
        "lines of code": sum(map(lines_of_code, texts)),
        "classes": sum(isinstance(node, ast.ClassDef) for node in nodes),
        "functions": len(functions),
        "fields of the vocabulary": f"{sum(map(len, fields.values()))} in {len(fields)} dataclasses",
        "functions over 10 branches": sum(branches(function) > 10 for function in functions),
        "complexity over 10 (ruff)": complex_functions(),
        "concepts in the glossary": glossary(),
    }
    for name, job in calls().items():
        entered, files = crossed(job)
        rows[name] = f"{entered} functions in {files} files"
    for name, value in rows.items():
        print(f"{name:<28} {value if isinstance(value, str) else format(value, ',')}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
