"""How large the library is, what a reader of it has to learn, and how much of it one call goes
through.

    python tools/structure.py            # prints the tables of docs/architecture.md and FILES.md
    python tools/structure.py --write    # writes them there
    python tools/structure.py --tests studies    # the tests of one tier: `make test TIER=studies`

What a reader pays for is counted, and nothing that can be folded: syntax nodes, not lines; files,
classes and protocols; class names that mean two things; the share of imports; classes that hardly
anybody uses. What a call goes through (a journey) is counted while it runs: the functions of our
packages that are entered, the classes that they belong to, and the files that they stand in.
`tests/test_structure.py` holds each count to the one that is written down.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import io
import os
import re
import sys
import tempfile
import threading
import tokenize
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from types import CodeType, FrameType

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("adapters", "bridge", "weight_processing")
PAGE = ROOT / "docs" / "architecture.md"
#: The page of the long tables, which is not of the documentation.
FILES = ROOT / "tools" / "FILES.md"
#: What stands around each table of the page.
MARKS = {
    name: (f"<!-- {name}: written by tools/structure.py -->", f"<!-- end of {name} -->")
    for name in ("tiers", "files", "classes", "size", "journeys", "changes")
}
PAGES = {name: FILES if name in ("files", "classes") else PAGE for name in MARKS}
#: The tiers, from the lowest, with the rooms of `bridge` above the core; what is named in none is
#: of the core.
TIERS = {
    "core": (),
    "programs": ("programs", "export", "engine"),
    "studies": ("patching", "circuits", "features", "tasks", "pictures"),
    "harvest": ("harvest", "cli", "__main__"),
    "legacy": ("legacy",),
}
#: The folders of tests that are named after no room and are of no tier: of the whole house, and of
#: what is around it.
OF_THE_HOUSE = (
    "benchmarks",
    "changes",
    "clients",
    "data",
    "distribution",
    "docs",
    "every_type",
    "examples",
    "gpu",
    "real",
    "sharded",
    "versions",
)
_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}
#: A file is dense from here on: syntax nodes for each code line and for each statement.
NODES_A_LINE = 9
NODES_A_STATEMENT = 12
#: Files of fewer statements than these are not called dense.
FEW = 9
#: A class that this many files name is in the page's table of classes.
SHARED = 3
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@dataclasses.dataclass(frozen=True)
class SourceFile:
    """One file of our packages: its path from the top, its text, its syntax tree."""

    path: str
    text: str
    tree: ast.Module

    @property
    def legacy(self) -> bool:
        """Whether it is of the room whose names HookedTransformer gave."""
        return self.path.startswith("bridge/legacy/")


def source_files(root: Path = ROOT) -> list[SourceFile]:
    """All files of our packages."""
    paths = sorted(path for package in PACKAGES for path in (root / package).rglob("*.py"))
    texts = [(str(path.relative_to(root)), path.read_text(encoding="utf-8")) for path in paths]
    return [SourceFile(path, text, ast.parse(text)) for path, text in texts]


def _lines(nodes: Iterable[ast.stmt]) -> set[int]:
    return {
        line for node in nodes for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }


def purpose(file: SourceFile) -> str:
    """What a file holds: the first line of its docstring."""
    return (ast.get_docstring(file.tree) or "").partition("\n")[0].replace("|", r"\|")


def docstring_lines(tree: ast.Module) -> set[int]:
    """The lines on which docstrings stand."""
    bodies = [
        node.body
        for node in ast.walk(tree)
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node, False)
    ]
    return _lines(body[0] for body in bodies)


def code_lines(file: SourceFile) -> set[int]:
    """The lines that have code on them, without comments and docstrings."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(file.text).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return lines - docstring_lines(file.tree)


def tier_of(path: str) -> str:
    """The tier of a file, by its path from the top."""
    room = path.split("/")[1].removesuffix(".py") if path.startswith("bridge/") else ""
    return next((tier for tier, rooms in TIERS.items() if room in rooms), "core")


def above_the_core() -> tuple[str, ...]:
    """The modules of `bridge` that could be distributions of their own: the core and programs need
    none.
    """
    return tuple(
        f"bridge.{room}"
        for tier in TIERS
        if tier not in ("core", "programs")
        for room in TIERS[tier]
    )


def folders_of(tier: str) -> list[str]:
    """The folders of tests that a tier has: tests stand where what they test stands."""
    folders = sorted(
        path.name
        for path in (ROOT / "tests").iterdir()
        if path.is_dir() and path.name[0] not in "._"
    )
    return [
        f"tests/{name}"
        for name in folders
        if name not in OF_THE_HOUSE and tier_of(f"bridge/{name}") == tier
    ]


def room_of(path: str) -> str:
    """The room of a file: a package, or the part of `bridge` that it stands in; a room may be one
    file.
    """
    parts = path.removesuffix(".py").split("/")
    return parts[0] if parts[0] != "bridge" else "bridge/" + parts[1].removeprefix("__init__")


def vocabulary() -> dict[str, list[str]]:
    """The dataclasses that a declaration is made of, each with its fields."""
    from adapters.architecture import vocabulary as nouns

    return {cls.__name__: [field.name for field in dataclasses.fields(cls)] for cls in nouns()}


def is_protocol(cls: ast.ClassDef) -> bool:
    """Whether a class says what another has."""
    return any("Protocol" in ast.unparse(base) for base in cls.bases)


def doubled(files: Iterable[SourceFile]) -> dict[str, list[str]]:
    """The class names that stand for two things, with the files; what HookedTransformer named is
    left out.
    """
    homes: dict[str, list[str]] = {}
    for file in files:
        if not file.legacy:
            for node in ast.walk(file.tree):
                if isinstance(node, ast.ClassDef):
                    homes.setdefault(node.name, []).append(file.path)
    return {name: paths for name, paths in sorted(homes.items()) if len(paths) > 1}


def public_names(files: Iterable[SourceFile]) -> set[str]:
    """What users import: names in the ``__all__`` of a package, and those that an import on a page
    of docs/ shows.
    """
    packages = (
        file.path.removesuffix("/__init__.py")
        for file in files
        if file.path.endswith("/__init__.py")
    )
    modules = (importlib.import_module(package.replace("/", ".")) for package in packages)
    names = {name for module in modules for name in getattr(module, "__all__", ())}
    shown = re.compile(rf"from (?:{'|'.join(PACKAGES)})[\w.]* import ([\w, ]+|\([^)]*\))")
    for page in (ROOT / "docs").glob("*.md"):
        names.update(
            *(re.findall(r"\w+", what) for what in shown.findall(page.read_text(encoding="utf-8")))
        )
    return names


def without_annotations(tree: ast.AST) -> int:
    """Count the syntax nodes of a tree, leaving out annotations and `raise` statements."""
    total, todo = 0, [tree]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Raise):
            continue
        total += 1
        for field, value in ast.iter_fields(node):
            if field in ("annotation", "returns"):
                continue
            children = value if isinstance(value, list) else [value]
            todo += [child for child in children if isinstance(child, ast.AST)]
    return total


def count(tree: ast.AST) -> int:
    """Count the syntax nodes of a tree."""
    return sum(1 for _ in ast.walk(tree))


def functions(file: SourceFile) -> dict[str, int]:
    """Return the syntax nodes of each function and method, by path, line and name."""
    return {
        f"{file.path}:{node.lineno} {node.name}": count(node)
        for node in ast.walk(file.tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


def statements(file: SourceFile) -> int:
    """Count the statements of a file."""
    return sum(isinstance(node, ast.stmt) for node in ast.walk(file.tree))


def dense(file: SourceFile) -> bool:
    """Tell whether a file has more syntax nodes a line or a statement than is easily read.

    Files of fewer statements than `FEW` are not measured: one table of names would decide.
    """
    if statements(file) < FEW:
        return False
    nodes = count(file.tree)
    lines = len(code_lines(file))
    return nodes > NODES_A_LINE * lines or nodes > NODES_A_STATEMENT * statements(file)


def undocumented(files: Iterable[SourceFile]) -> list[str]:
    """List the classes without an underscore that no page of docs/, nor `FILES`, names."""
    paths = (*(ROOT / "docs").glob("*.md"), FILES)
    pages = (page.read_text(encoding="utf-8") for page in paths)
    words = {word for page in pages for word in re.findall(r"\w+", page)}
    classes = (
        node for file in files for node in ast.walk(file.tree) if isinstance(node, ast.ClassDef)
    )
    return [cls.name for cls in classes if cls.name[0] != "_" and cls.name not in words]


def rarely_used(files: list[SourceFile]) -> list[str]:
    """List the classes whose name is read at most once in our packages."""
    nodes = [node for file in files for node in ast.walk(file.tree)]
    reads = [node for node in nodes if isinstance(getattr(node, "ctx", None), ast.Load)]
    uses = Counter(node.id for node in reads if isinstance(node, ast.Name))
    uses += Counter(node.attr for node in reads if isinstance(node, ast.Attribute))
    return [node.name for node in nodes if isinstance(node, ast.ClassDef) and uses[node.name] <= 1]


def import_lines(file: SourceFile) -> int:
    """Count the lines that imports take."""
    nodes = ast.walk(file.tree)
    return len(_lines(node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)))


def sizes(files: list[SourceFile]) -> dict[str, float]:
    """Measure what a reader pays for, each by its name."""
    classes = [
        node for file in files for node in ast.walk(file.tree) if isinstance(node, ast.ClassDef)
    ]
    nodes = sum(count(file.tree) for file in files)
    lines = sum(len(code_lines(file)) for file in files)
    lengths = [length for file in files for length in functions(file).values()]
    rare, public = rarely_used(files), public_names(files)
    return {
        "syntax nodes": nodes,
        "syntax nodes without annotations and `raise`": sum(
            without_annotations(file.tree) for file in files
        ),
        "syntax nodes a code line": round(nodes / lines, 2),
        "syntax nodes a statement": round(nodes / sum(map(statements, files)), 2),
        f"files over {NODES_A_LINE} nodes a line or {NODES_A_STATEMENT} a statement": sum(
            map(dense, files)
        ),
        "functions over 400 nodes": sum(length > 400 for length in lengths),
        "functions over 300 nodes": sum(length > 300 for length in lengths),
        "files": len(files),
        "classes": len(classes),
        "classes without an underscore that no page names": len(undocumented(files)),
        "protocols": sum(map(is_protocol, classes)),
        "class names that mean two things": len(doubled(files)),
        "share of imports, per cent": round(100 * sum(map(import_lines, files)) / lines, 1),
        "classes used at most once, not public": sum(name not in public for name in rare),
        "classes used at most once, with public ones": len(rare),
    }


def files_touched() -> dict[str, int]:
    """How many files each of the recorded changes touches."""
    patches = sorted((ROOT / "tests" / "changes").glob("*.patch"))
    return {path.stem: path.read_text(encoding="utf-8").count("diff --git ") for path in patches}


def crossed(job: Callable[[], object]) -> tuple[int, int, int]:
    """How many of our functions a call enters, of how many classes, in how many files."""
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
    ours = [
        code
        for code in seen
        if code.co_filename.startswith(inside) and not code.co_name.startswith("<")
    ]
    owners = {(code.co_filename, code.co_qualname.rpartition(".")[0]) for code in ours}
    classes = {owner for owner in owners if owner[1] and "<locals>" not in owner[1]}
    return len(ours), len(classes), len({code.co_filename for code in ours})


def journeys(kept: str) -> dict[str, Callable[[], object]]:
    """The calls whose way through the library is counted. Each was made once before: what is made
    once is not in it.

    Args:
        kept: a folder for declarations: one that was inferred before is read there, and proved
            anew.
    """
    import torch
    import transformers

    from adapters import verify
    from bridge import TransformerBridge
    from bridge.bases import Directions
    from bridge.harvest import harvest

    bridge = TransformerBridge.boot_embedded()
    tokens = bridge.to_tokens("Mary and John")
    featured = TransformerBridge.boot_embedded()
    feature = featured.add_basis(
        "blocks.1.hook_resid_post", "some", Directions(torch.eye(featured.cfg.d_model)[:, :4])
    )

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

    def shard() -> None:
        with tempfile.TemporaryDirectory() as folder:
            points = ["blocks.1.hook_resid_post"]
            harvest(bridge, ["Mary and John"] * 4, hook_points=points, out=Path(folder) / "rows")

    os.environ["TRANSFORMER_BRIDGE_CACHE"] = kept
    jobs: dict[str, Callable[[], object]] = {
        "a run with a cache": lambda: bridge.run_with_cache(tokens),
        "an edit of a pattern": lambda: bridge.run_with_hooks(
            tokens, fwd_hooks=[("blocks.1.attn.hook_pattern", halve)]
        ),
        "a trace": trace,
        "an inferred adapter": wrap,
        "an edit of a feature": lambda: featured.run_with_hooks(
            tokens, fwd_hooks=[(feature.name, halve)]
        ),
        "a request of a batch": lambda: bridge.generate_batch(
            ["Mary and John"], max_new_tokens=2, verbose=False
        ),
        "a harvested shard": shard,
        "verify": lambda: verify(bridge),
    }
    for job in jobs.values():
        job()
    return jobs


def counted() -> dict[str, tuple[int, int, int]]:
    """The functions, classes and files that each of the calls enters."""
    with tempfile.TemporaryDirectory() as kept:
        return {name: crossed(job) for name, job in journeys(kept).items()}


def table(head: str, rows: Iterable[tuple[object, ...]]) -> str:
    """Rows as a table in Markdown."""
    columns = head.count("|") + 1
    lines = [f"| {head} |", "|" + " --- |" * columns]
    shown = (
        [format(value, ",") if isinstance(value, int | float) else str(value) for value in row]
        for row in rows
    )
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in shown)])


def shared_classes(files: list[SourceFile]) -> list[tuple[str, str, str]]:
    """List the classes without an underscore that at least three files name: the class, its file
    and the first line of its docstring.
    """
    words = [set(re.findall(r"\w+", file.text)) for file in files]
    rows = []
    for file in files:
        for node in file.tree.body:
            if not isinstance(node, ast.ClassDef) or node.name[0] == "_":
                continue
            if sum(node.name in inside for inside in words) >= SHARED:
                summary = (ast.get_docstring(node) or "").split("\n\n")[0]
                summary = " ".join(summary.split()).replace("|", r"\|")
                rows.append((f"`{node.name}`", f"`{file.path}`", summary))
    return sorted(rows)


def written(name: str, page: str | None = None) -> dict[str, list[float]]:
    """What one table of the page says: for each row its numbers."""
    begin, end = MARKS[name]
    text = (
        (PAGES[name].read_text(encoding="utf-8") if page is None else page)
        .split(begin)[1]
        .split(end)[0]
    )
    rows = [
        [cell.strip() for cell in line.strip("| ").split("|")]
        for line in text.strip().splitlines()[2:]
    ]
    return {
        row[0]: [float(cell.replace(",", "")) for cell in row[1:] if re.fullmatch(r"[\d,.]+", cell)]
        for row in rows
    }


def tables() -> dict[str, str]:
    """The tables of the page."""
    files = source_files()
    in_tier = {tier: [file for file in files if tier_of(file.path) == tier] for tier in TIERS}
    ways = [(name, *way) for name, way in counted().items()]
    return {
        "tiers": table(
            "tier | rooms | files | syntax nodes",
            (
                (
                    f"**{tier}**",
                    ", ".join(
                        f"`{room}`"
                        for room in sorted({room_of(file.path).rstrip("/") for file in inside})
                    ),
                    len(inside),
                    sum(sum(1 for _ in ast.walk(file.tree)) for file in inside),
                )
                for tier, inside in in_tier.items()
            ),
        ),
        "files": table(
            "file | what it holds",
            ((f"`{file.path}`", purpose(file)) for tier in TIERS for file in in_tier[tier]),
        ),
        "classes": table("class | file | what it is", shared_classes(files)),
        "size": table("what a reader pays for | now", sizes(files).items()),
        "journeys": table("a call | functions | classes | files", ways),
        "changes": table(
            "a change | files", ((f"`{name}`", files) for name, files in files_touched().items())
        ),
    }


def main() -> None:
    """Prints the tables, or writes them; or where the tests of a tier are."""
    if "--tests" in sys.argv:
        tier = sys.argv[sys.argv.index("--tests") + 1]
        if tier not in TIERS:
            sys.exit(f"{tier!r} is no tier; they are {', '.join(TIERS)}")
        print(*folders_of(tier))
        return
    import torch

    torch.set_num_threads(1)
    found = tables()
    if "--write" not in sys.argv:
        print("\n\n".join(found.values()))
        return
    for name, text in found.items():
        begin, end = MARKS[name]
        page = PAGES[name].read_text(encoding="utf-8")
        before, after = page.split(begin)[0], page.split(end)[1]
        PAGES[name].write_text(f"{before}{begin}\n{text}\n{end}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
