"""What docs/architecture.md promises: floors, who imports what, names, and sizes."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

import pytest

from tests.tiny import ROOT

PACKAGE = ROOT / "nemo_aligner"
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MEDIAN_FUNCTION_LINES = 8
P95_FUNCTION_LINES = 28
MAX_CLASS_DEPTH = 2

# A part imports parts of lower floors, and itself.
FLOORS = {
    "errors": 0,
    "processes": 0,
    "temporary": 0,
    "pairs": 0,
    "readout": 0,
    "prefix": 0,
    "config": 0,
    "parallel": 1,
    "batch": 1,
    "cache_use": 0,
    "transfer": 0,
    "metrics": 1,
    "precision": 1,
    "subcommand": 1,
    "console": 2,
    "text": 2,
    "objectives": 2,
    "data": 3,
    "models": 3,
    "planning": 4,
    "checkpoint": 4,
    "training": 5,
    "scoring": 5,
    "serving": 6,
    "evaluation": 7,
    "diagnostics": 7,
    "integrations": 7,
    "quickstart": 8,
    "cli": 9,
    "__main__": 10,
}
# Who may import one on its own floor: settings and launchers need theirs.
SAME_FLOOR = {
    ("config", "errors"),
    ("processes", "errors"),
    ("cache_use", "transfer"),
    ("pairs", "transfer"),
    ("readout", "errors"),
}
# The only files, or folders, that import a large dependency.
IMPORTERS = {
    "megatron": ["parallel/", "models/", "checkpoint/", "training/optimizer/"],
    "apex": ["models/"],
    "transformer_engine": ["models/"],
    "nemo": [],
    "pytriton": ["serving/transports/triton/"],
    "tritonclient": ["serving/transports/triton/"],
    "aiohttp": ["serving/", "integrations/nemo_gym/"],
    "fastapi": ["serving/transports/http", "integrations/nemo_gym/"],
    "starlette": ["serving/transports/http"],
    "uvicorn": ["serving/transports/http"],
    "prometheus_client": ["serving/transports/http"],
    "pydantic": ["serving/wire/", "integrations/nemo_gym/"],
    "lightning": ["training/loggers.py", "training/tracking.py"],
    "transformers": ["checkpoint/hf/"],
    "pyarrow": ["data/tables.py"],
    "matplotlib": ["evaluation/html/"],
    "datasets": ["data/hub.py"],
    "trl": [],
    "nemo_rl": ["integrations/"],
    "nemo_gym": ["integrations/nemo_gym/"],
    "ray": ["integrations/"],
}
# The only files, or folders, that touch a private name of another package, each by functions that
# say why.
PRIVATE_NAMES = [
    "checkpoint/weights/",
    "config/load.py",
    "config/written.py",
    "models/internals.py",
    "parallel/cpu/",
    "parallel/pipeline.py",
    "serving/transports/triton/internals.py",
    "training/optimizer/megatron_internals.py",
]
# Python's own: documented, or the only name that a type has.
DOCUMENTED = {"os._exit", "argparse._ArgumentGroup"}

FILES = sorted(PACKAGE.rglob("*.py"))
OUTSIDE = sorted(
    path for name in ("examples", "scripts", "benchmarks") for path in (ROOT / name).rglob("*.py")
)


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


all_files = pytest.mark.parametrize("path", FILES + OUTSIDE, ids=name_of)
package_files = pytest.mark.parametrize("path", FILES, ids=name_of)


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Line and dotted name of everything imported, also inside functions and by its name."""
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(path)}:{node.lineno}: write imports in full"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            yield node.lineno, ast.unparse(node.args[0]).strip("'\"")


def part_of(path: Path) -> str:
    """The folder or file of the package, as FLOORS calls it."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def may_import(part: str, other: str) -> bool:
    return part == other or (part, other) in SAME_FLOOR or FLOORS[other] < FLOORS[part]


def test_every_part_has_a_floor() -> None:
    assert {part_of(path) for path in FILES} - {"__init__"} == set(FLOORS)


@package_files
def test_imports_go_down(path: Path) -> None:
    part = part_of(path)
    if part == "__init__":
        return
    for line, name in imports(path):
        first, *rest = name.split(".")
        if first == "nemo_aligner" and rest and rest[0] in FLOORS:
            assert may_import(part, rest[0]), (
                f"{name_of(path)}:{line}: {part} (floor {FLOORS[part]}) imports {name} "
                f"(floor {FLOORS[rest[0]]})"
            )


@package_files
def test_large_dependencies_are_imported_in_few_files(path: Path) -> None:
    inside = path.relative_to(PACKAGE).as_posix()
    for line, name in imports(path):
        importers = IMPORTERS.get(name.split(".")[0])
        if importers is not None:
            assert inside.startswith(tuple(importers)), (
                f"{name_of(path)}:{line}: imports {name}, which is for {importers}"
            )


@pytest.mark.parametrize("path", OUTSIDE, ids=name_of)
def test_what_stands_outside_is_wiring(path: Path) -> None:
    """Scripts and examples reach them through the package.

    A benchmark may run another library, or ask another's server; what trains a policy has one.
    """
    has_others = name_of(path).startswith(("benchmarks/", "examples/rl/"))
    allowed = {"transformers", "aiohttp", "trl", "datasets"} if has_others else set()
    for line, name in imports(path):
        first = name.split(".")[0]
        assert first not in IMPORTERS or first in allowed, f"{name_of(path)}:{line}: imports {name}"


def test_what_imports_megatron_stands_where_it_is_made_ready() -> None:
    """Some package around such a module begins with nemo_aligner.parallel, see there."""
    for path in FILES:
        if any(name.split(".")[0] == "megatron" for _, name in imports(path)):
            inits = [folder / "__init__.py" for folder in path.parents if PACKAGE in folder.parents]
            assert PACKAGE / "parallel" in path.parents or any(
                "nemo_aligner.parallel" in [name for _, name in imports(init)] for init in inits
            ), f"{name_of(path)}: no package around it imports nemo_aligner.parallel"


def module_of(path: Path) -> str:
    """``nemo_aligner.folder.file``; a folder's for its ``__init__``."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_at_load(body: Sequence[ast.stmt]) -> Iterator[str]:
    """Dotted names that are imported when a module is; not inside functions or for types alone."""
    for node in body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield str(node.module)
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from imported_at_load(node.orelse)
        elif isinstance(node, ast.If | ast.Try | ast.With | ast.ClassDef):
            for field in ("body", "orelse", "finalbody"):
                yield from imported_at_load(getattr(node, field, []))


def find_circle(graph: Mapping[str, Iterable[str]]) -> list[str]:
    """The modules of a circle, from the first to itself; empty if there is none."""
    done: set[str] = set()

    def visit(module: str, trail: list[str]) -> list[str]:
        if module in trail:
            return [*trail[trail.index(module) :], module]
        if module in done:
            return []
        for other in graph[module]:
            circle = visit(other, [*trail, module])
            if circle:
                return circle
        done.add(module)
        return []

    return next(filter(None, (visit(module, []) for module in graph)), [])


def test_a_circle_is_found() -> None:
    assert find_circle({"a": ["b", "c"], "b": ["c"], "c": []}) == []
    assert find_circle({"a": ["b"], "b": ["c"], "c": ["b"]}) == ["b", "c", "b"]


def test_no_imports_are_circular() -> None:
    modules = {module_of(path): path for path in FILES}
    graph = {
        module: sorted(set(imported_at_load(parse(path).body)) & set(modules) - {module})
        for module, path in modules.items()
    }
    assert find_circle(graph) == []


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def private_names(path: Path) -> Iterator[tuple[int, str]]:
    """Line and text of every private name that a file takes from somewhere else.

    As far as a file shows it: a private part of an imported name, and an attribute of anything but
    ``self`` and ``cls`` that no function, class or assignment to ``self`` in this file is called;
    what a method adds to its parent's, it takes from there.
    """
    nodes = list(ast.walk(parse(path)))
    own = {
        node.name
        for node in nodes
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    }
    attributes = [
        node for node in nodes if isinstance(node, ast.Attribute) and is_private(node.attr)
    ]
    of_self = [node for node in attributes if ast.unparse(node.value) in ("self", "cls")]
    own |= {node.attr for node in of_self if isinstance(node.ctx, ast.Store)}
    for line, name in imports(path):
        if any(map(is_private, name.split("."))):
            yield line, name
    for node in set(attributes) - set(of_self):
        text = ast.unparse(node)
        if (node.attr not in own or text.startswith("super()")) and text not in DOCUMENTED:
            yield node.lineno, text


@package_files
def test_private_names_of_others_are_touched_in_few_files(path: Path) -> None:
    if not path.relative_to(PACKAGE).as_posix().startswith(tuple(PRIVATE_NAMES)):
        found = [f"{name_of(path)}:{line}: {name}" for line, name in private_names(path)]
        assert not found, found


def test_the_files_with_private_names_have_some() -> None:
    """So that the list shrinks when they are mended."""
    for inside in PRIVATE_NAMES:
        files = [p for p in FILES if p.relative_to(PACKAGE).as_posix().startswith(inside)]
        assert any(list(private_names(path)) for path in files), inside


def test_a_class_name_occurs_once() -> None:
    nodes = [node for path in FILES for node in ast.walk(parse(path))]
    names = Counter(node.name for node in nodes if isinstance(node, ast.ClassDef))
    assert not {name for name, count in names.items() if count > 1}


ARITHMETIC = [path for path in FILES if part_of(path) in ("metrics", "objectives")]


@pytest.mark.parametrize("path", ARITHMETIC, ids=name_of)
def test_arithmetic_knows_no_ranks(path: Path) -> None:
    for line, name in imports(path):
        assert not name.startswith("torch.distributed"), f"{name_of(path)}:{line}: imports {name}"
    assert "distributed" not in path.read_text(encoding="utf-8")


@all_files
def test_files_are_short(path: Path) -> None:
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines < MAX_FILE_LINES, f"{name_of(path)}: {lines} lines"


@all_files
def test_functions_are_short(path: Path) -> None:
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            assert lines < MAX_FUNCTION_LINES, (
                f"{name_of(path)}:{node.lineno}: {node.name} has {lines} lines"
            )


def test_most_functions_are_short() -> None:
    lengths = sorted(
        (node.end_lineno or node.lineno) - node.lineno + 1
        for path in FILES
        for node in ast.walk(parse(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    assert lengths[len(lengths) // 2] <= MEDIAN_FUNCTION_LINES
    assert lengths[int(0.95 * len(lengths))] <= P95_FUNCTION_LINES


def test_no_class_hierarchy_is_deep() -> None:
    """A class of ours, one that inherits from it, and no further; errors.py counts as given."""
    parents: dict[str, set[str]] = {}
    for path in FILES:
        if path.name == "errors.py":
            continue
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.ClassDef):
                bases = {ast.unparse(base).split("[")[0].split(".")[-1] for base in node.bases}
                # Where two files use one name, the deeper of both counts.
                parents.setdefault(node.name, set()).update(bases)

    def depth(name: str) -> int:
        return 1 + max((depth(base) for base in parents[name] if base in parents), default=0)

    deep = {name: depth(name) for name in parents if depth(name) > MAX_CLASS_DEPTH}
    assert not deep, deep
