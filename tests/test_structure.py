"""How the house is built: which room may use which, what crosses their borders, how large
they are.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.structure import OF_THE_HOUSE, TIERS, folders_of, tier_of
from tools.structure import room_of as source_room

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("adapters", "bridge", "weight_processing")
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))

#: Hook points, and the three small rooms that they stand on.
HOOKS = ("bridge.hooks", "bridge.rows", "bridge.arguments", "bridge.modules")

#: For each room the rooms that it may use besides itself; what those may use is not its own
#: business.
MAY_USE = {
    "adapters": set(),
    "weight_processing": {"adapters"},
    "bridge.rows": {"adapters"},
    "bridge.arguments": {"adapters"},
    "bridge.modules": {"adapters"},
    "bridge.hooks": {"adapters", "bridge.rows", "bridge.arguments", "bridge.modules"},
    "bridge.sharing": {"adapters", *HOOKS},
    "bridge.taps": {"adapters", *HOOKS, "bridge.sharing"},
    "bridge.weights": {"adapters", *HOOKS},
    "bridge.analysis": {"adapters", *HOOKS, "bridge.weights"},
    "bridge.cache": {"adapters", *HOOKS, "bridge.analysis"},
    "bridge.wiring": {"adapters", *HOOKS, "bridge.sharing", "bridge.taps"},
    "bridge.interventions": {"adapters", *HOOKS},
    "bridge.run": {"adapters", *HOOKS, "bridge.taps", "bridge.wiring"},
    "bridge.generation": {
        "adapters",
        *HOOKS,
        "bridge.interventions",
        "bridge.wiring",
        "bridge.run",
        "bridge.analysis",
        "bridge.cache",
        "bridge.bases",
    },
    "bridge.trace": {
        "adapters",
        *HOOKS,
        "bridge.interventions",
        "bridge.wiring",
        "bridge.run",
        "bridge.generation",
    },
    "bridge.export": {"adapters", "bridge.taps", "bridge.version"},
    "bridge.programs": {
        "adapters",
        *HOOKS,
        "bridge.interventions",
        "bridge.taps",
        "bridge.wiring",
        "bridge.run",
        "bridge.trace",
        "bridge.export",
    },
    "bridge.engine": {
        "adapters",
        "bridge.bridge",
        *HOOKS,
        "bridge.interventions",
        "bridge.generation",
        "bridge.run",
        "bridge.bases",
        "bridge.taps",
        "bridge.version",
    },
    "bridge.native": {"adapters", *HOOKS},
    "bridge.embedded": set(),
    "bridge.loading": {"adapters", "bridge.native", *HOOKS},
    "bridge.bases": {"adapters", *HOOKS},
    "bridge.lens": {"adapters", *HOOKS, "bridge.analysis", "bridge.run"},
    "bridge.facade": {
        "adapters",
        "weight_processing",
        *HOOKS,
        "bridge.wiring",
        "bridge.run",
        "bridge.weights",
        "bridge.analysis",
        "bridge.cache",
        "bridge.generation",
        "bridge.trace",
        "bridge.programs",
        "bridge.native",
        "bridge.lens",
        "bridge.version",
        "bridge.bases",
        "bridge.interventions",
    },
    "bridge.bridge": {
        "adapters",
        "bridge.facade",
        "bridge.run",
        "bridge.embedded",
        "bridge.loading",
    },
    "bridge.patching": {
        "adapters",
        "bridge.bridge",
        *HOOKS,
        "bridge.interventions",
        "bridge.run",
        "bridge.bases",
    },
    "bridge": {"bridge.version", "bridge.cli"},
    "bridge.version": set(),
}
#: What stands on top, and may use every room but these.
ON_TOP = (
    "bridge.cli",
    "bridge.legacy",
    "bridge.harvest",
    "bridge.pictures",
    "bridge.circuits",
    "bridge.tasks",
    "bridge.features",
)

#: The same inside of `adapters`, whose own files, and `mixers`, are the vocabulary of declarations.
INSIDE_ADAPTERS = {
    "imports": set(),
    "views": set(),
    "vocabulary": {"imports", "views"},
    "families.__init__": set(),
    "registry": {"imports", "vocabulary", "families.__init__"},
    "families": {"imports", "views", "vocabulary", "registry"},
    "inputs": {"views", "vocabulary"},
    "building": {"views", "vocabulary"},
    "observe": {"imports", "views", "vocabulary", "inputs"},
    "automatic": {"imports", "views", "vocabulary", "inputs", "observe"},
    "proofs": {"imports", "views", "vocabulary", "inputs", "observe", "building"},
    "plain_model": {"vocabulary", "inputs", "observe", "registry"},
    "model": {"views", "vocabulary", "inputs", "registry", "building", "automatic", "plain_model"},
    "kept": {"views", "vocabulary", "inputs", "observe", "registry", "model"},
    "__init__": {"imports", "vocabulary", "registry", "model", "proofs", "kept"},
}
#: Imports inside functions, with the reason. Optional dependencies that are no packages of ours
#: need none.
INSIDE_FUNCTIONS = {
    "bridge/cli/main.py": "`python -m bridge --help` need not load torch",
    "bridge/cli/commands.py": "likewise, and harvest is an extra",
}
#: Mutable things at module level, with the reason.
MUTABLE = {
    ("adapters/registry.py", "_REGISTRY"): "the registry of families",
    ("adapters/registry.py", "_CHECKS"): "the same: what looks at a model of theirs",
    ("adapters/registry.py", "_loaded"): "whether other packages' families are in the registry",
    ("adapters/registry.py", "_LOADING"): "held while they are imported",
    (
        "bridge/generation/batch.py",
        "_PROVED",
    ): "what was found of each model that is there, and goes with it",
    (
        "bridge/generation/options.py",
        "_WARNINGS",
    ): "what was found of each model's rows, and goes with it",
    ("bridge/generation/batch.py", "_OWNERS"): "which models have a batch now, and in which thread",
    (
        "bridge/generation/batch.py",
        "_TURN",
    ): "held while a pass is under way that has a configuration say other things",
    (
        "bridge/programs/compiled.py",
        "_CODES",
    ): "what torch compiled, for like programs to come; let go of with the bridge",
    (
        "bridge/run/layer_range.py",
        "_LOCK",
    ): "held while a model's module is changed for a run, or changed back",
    (
        "bridge/taps/taps.py",
        "LOCK",
    ): "held while a function that models look up is exchanged, or put back",
    (
        "bridge/trace/coroutine.py",
        "_IDLE",
    ): "each thread's greenlet that waits for the next trace; it holds nothing then",
    (
        "bridge/loading/patches.py",
        "_LOCK",
    ): "held while transformers' registries hold what one load alone is to see",
}


def room_of(module: str) -> str:
    """The room that a module belongs to: a package, or a file that stands in `bridge` itself."""
    parts = module.split(".")
    return parts[0] if parts[0] != "bridge" or len(parts) == 1 else ".".join(parts[:2])


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] in ("__init__", "__main__") else parts)


def ours(name: str | None) -> bool:
    return (name or "").split(".")[0] in PACKAGES


def imports(tree: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """Our own modules that are imported anywhere in a file; of a package, the module inside
    of it.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and ours(node.module):
            inside = ROOT.joinpath(*node.module.split("."))
            for alias in node.names:
                found = (inside / f"{alias.name}.py").exists() or (
                    inside / alias.name / "__init__.py"
                ).exists()
                yield node, f"{node.module}.{alias.name}" if found else node.module
        elif isinstance(node, ast.Import):
            yield from ((node, alias.name) for alias in node.names if ours(alias.name))


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def where(path: Path, node: ast.AST) -> str:
    return f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', '?')}"


def test_arrows_between_rooms_go_one_way():
    wrong = []
    for path in FILES:
        room = room_of(module_of(path))
        for node, module in imports(parsed(path)):
            used = room_of(module)
            if used == room or room in ON_TOP or (used == "bridge" and room == "bridge"):
                continue
            if path == ROOT / "bridge" / "__init__.py":
                continue  # the public surface, which names what is asked for by its first use
            if used not in MAY_USE[room]:
                wrong.append(f"{where(path, node)}: {room} uses {used}")
    assert not wrong


#: Imports of a higher tier, with the reason.
UPWARDS = {
    (
        "bridge/facade/generation.py",
        "programs",
    ): "what `program` returns and `generate` runs: methods of the bridge"
}


def test_a_tier_imports_no_higher_one():
    order, found = list(TIERS), set()
    for path in FILES:
        own = str(path.relative_to(ROOT))
        for _, module in imports(parsed(path)):
            used = tier_of(f"{module.replace('.', '/')}.py")
            if order.index(used) > order.index(tier_of(own)):
                found.add((own, used))
    assert found == set(UPWARDS)


def test_tests_stand_where_what_they_test_stands():
    """Each folder is named after a room, which has a tier, or is of the whole house."""
    rooms = {
        source_room(str(path.relative_to(ROOT))).removeprefix("bridge/").split("/")[0]
        for path in FILES
    }
    folders = {
        path.name
        for path in (ROOT / "tests").iterdir()
        if path.is_dir() and path.name != "__pycache__"
    }
    assert folders - set(OF_THE_HOUSE) <= rooms and set(OF_THE_HOUSE) <= folders
    assert set().union(*TIERS.values()) <= rooms
    assert {f"tests/{name}" for name in folders - set(OF_THE_HOUSE)} == {
        each for tier in TIERS for each in folders_of(tier)
    }


def room_inside_adapters(module: str) -> str:
    """The room inside of `adapters`: a folder, the vocabulary, or a file that stands above it."""
    if module in ("adapters", "adapters.families"):
        return f"{module}.__init__".removeprefix("adapters.")
    name = module.split(".")[1]
    return name if name in INSIDE_ADAPTERS else "vocabulary"


def test_arrows_inside_adapters_go_one_way():
    """Vocabulary <- families; vocabulary <- building <- observing <- inferring, proving."""
    wrong = []
    for path in FILES:
        room = (
            room_inside_adapters(module_of(path))
            if room_of(module_of(path)) == "adapters"
            else None
        )
        for node, module in imports(parsed(path)) if room else ():
            used = room_inside_adapters(module) if room_of(module) == "adapters" else room
            if used != room and used not in INSIDE_ADAPTERS[room]:
                wrong.append(f"{where(path, node)}: {room} uses {used}")
    assert not wrong


@pytest.mark.parametrize("arrows", [MAY_USE, INSIDE_ADAPTERS], ids=["rooms", "adapters"])
def test_no_circle_of_rooms(arrows: dict[str, set[str]]):
    todo = {room: set(used) for room, used in arrows.items()}
    while todo:
        free = [room for room, used in todo.items() if not used & todo.keys()]
        assert free, f"these rooms use each other in a circle: {sorted(todo)}"
        for room in free:
            del todo[room]


def test_no_circle_of_files():
    """What is imported for annotations alone (`TYPE_CHECKING`) counts: who reads one file needs the
    other.
    """
    graph: dict[str, set[str]] = {}
    for path in FILES:
        top = [
            node
            for node in parsed(path).body
            if isinstance(node, ast.Import | ast.ImportFrom | ast.If)
        ]
        used = {module for _, module in imports(ast.Module(body=list(top), type_ignores=[]))}
        graph[module_of(path)] = used - {module_of(path)}
    done: set[str] = set()

    def visit(module: str, above: tuple[str, ...]) -> None:
        assert module not in above, " -> ".join([*above[above.index(module) :], module])
        if module not in done:
            for used in graph.get(module, ()):
                visit(used, (*above, module))
            done.add(module)

    for module in graph:
        visit(module, ())


def test_no_import_inside_a_function_hides_a_circle():
    found = set()
    for path in FILES:
        for function in ast.walk(parsed(path)):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef) and list(
                imports(function)
            ):
                found.add(str(path.relative_to(ROOT)))
    assert found - {"bridge/legacy/__init__.py"} == set(INSIDE_FUNCTIONS)


#: Underscore names of other people's classes that have no public way, by attribute: torch,
#: transformers, the standard library. What is ours and begins with an underscore belongs to the
#: file that it stands in.
THEIRS = {
    "_forward_pre_hooks_with_kwargs",
    "_global_mapping",
    "_sequence_nr",
    "_modules",
    "_parameters",
    "_buffers",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_attn_implementation_internal",
    "_original_attn_impl",
    "_current_frames",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_version",
    "_base",
    "_compiled_call_impl",
    "_call_impl",
    "_asdict",
    "_replace",
    "_schema",
    "_attn_implementation",
    "_orig_mod",
    "_C",
    "_hf_hook",
    "_len_torch_function_stack",
    "_len_torch_dispatch_stack",
    "_get_function_stack_at",
    "_pop_torch_function_stack",
    "_push_on_torch_function_stack",
    "_get_current_dispatch_mode_stack",
    "_pop_mode",
    "_push_mode",
    "_InferenceMode",
    "_set_grad_enabled",
    "_autograd",
    "_getframe",
    "_experts_implementation_internal",
    "_top_saved_tensors_default_hooks",
    "_pop_saved_tensors_default_hooks",
    "_push_saved_tensors_default_hooks",
    "_is_any_autocast_enabled",
    "_stash_obj_in_tls",
    "_get_obj_in_tls",
    "_is_key_in_tls",
    "_from_config",
    "_no_split_modules",
    "_fields",
    "_current_graph_task_id",
    "_forward_cls",
    "_are_functorch_transforms_active",
    "_remove_final_layer_norm",
    "_local_mapping",
    "_apply_gate",
    "_can_set_experts_implementation",
    "_model_mapping",
    "_model_forward",
    "_zero_block_ids",
    "_keys_to_ignore_on_load_unexpected",
    "_compiled_varlen",
    "_create_batch_processor",
}


def own_underscores(tree: ast.Module) -> set[str]:
    """Underscore names that a file defines: functions, attributes of `self`, slots, fields."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id in ("self", "cls")
        ):
            names.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.add(node.value)
    return names


def test_nobody_touches_what_begins_with_an_underscore_elsewhere():
    wrong = []
    for path in FILES:
        tree = parsed(path)
        known = own_underscores(tree) | THEIRS
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and ours(node.module):
                wrong += [
                    f"{where(path, node)}: {a.name}"
                    for a in node.names
                    if re.match(r"_[a-z]", a.name)
                ]
            if (
                not isinstance(node, ast.Attribute)
                or not re.match(r"_[a-z]", node.attr)
                or node.attr in known
            ):
                continue
            if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                continue
            if isinstance(node.value, ast.Call) and ast.unparse(node.value.func) == "super":
                continue
            wrong.append(f"{where(path, node)}: {ast.unparse(node)}")
    assert not wrong


def anys(path: Path) -> int:
    """How often `Any` is said in annotations and elsewhere, imports aside."""
    return sum(isinstance(node, ast.Name) and node.id == "Any" for node in ast.walk(parsed(path)))


def test_any_is_rare():
    counted = [path for path in FILES if path.relative_to(ROOT).parts[0] != "weight_processing"]
    counted = [path for path in counted if "legacy" not in path.relative_to(ROOT).parts]
    lines = sum(len(path.read_text().splitlines()) for path in counted)
    rate = 1000 * sum(map(anys, counted)) / lines
    most = sorted(((anys(path), str(path.relative_to(ROOT))) for path in counted), reverse=True)[
        :12
    ]
    assert rate < 15, f"{rate:.1f} in 1,000 lines; the most are in {most}"


def test_no_attribute_is_called_that_mypy_does_not_find():
    assert not [str(path) for path in FILES if "ignore[attr-defined]" in path.read_text()]


def is_mutable(value: ast.expr | None) -> bool:
    if isinstance(value, ast.Dict | ast.List | ast.Set | ast.DictComp | ast.ListComp | ast.SetComp):
        return True
    made = ast.unparse(value.func) if isinstance(value, ast.Call) else ""
    return bool(
        re.search(r"(^|\.)(dict|list|set|defaultdict|local|deque|Weak\w+|count|Lock|RLock)$", made)
    )


def written_tables(tree: ast.Module) -> set[str]:
    """The tables at module level that something writes to, and the names that are made global."""
    tables = {
        target.id
        for node in tree.body
        if isinstance(node, ast.Assign | ast.AnnAssign) and is_mutable(node.value)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name)
    }
    found = set()
    for node in ast.walk(tree):
        name = None
        if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
            name = node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr in (
                "append",
                "add",
                "update",
                "setdefault",
                "pop",
                "clear",
                "extend",
                "remove",
            ):
                name = node.func.value
        elif isinstance(node, ast.Global):
            found |= set(node.names)
        if isinstance(name, ast.Name) and name.id in tables:
            found.add(name.id)
    return found


def stateful_objects(tree: ast.Module) -> set[str]:
    """Objects of classes with state of their own: thread-local, locks, and what is made of a class
    of ours.
    """
    local, found = set(), set()
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and any(
            ast.unparse(base).endswith("local") for base in node.bases
        ):
            local.add(node.name)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            made = ast.unparse(node.value.func)
            if made in local or re.search(
                r"(^|\.)(ThreadState|local|Lock|RLock|WeakKeyDictionary|WeakSet)$", made
            ):
                found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return found


def test_no_state_at_module_level():
    """Constants are read only: a table that a function writes to is state."""
    found = set()
    for path in FILES:
        tree = parsed(path)
        names = written_tables(tree) | stateful_objects(tree)
        found |= {(str(path.relative_to(ROOT)), name) for name in names}
    assert found == set(MUTABLE)


@pytest.mark.parametrize("package", PACKAGES)
def test_every_folder_says_what_it_holds(package: str):
    for path in (ROOT / package).rglob("__init__.py"):
        if path.parent.name != "families":
            assert ast.get_docstring(parsed(path)), path
