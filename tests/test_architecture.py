"""What docs/architecture.md promises about the house: floors, doors, and sizes."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.tiny import ROOT

PACKAGE = ROOT / "nemo_aligner"
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_CLASS_DEPTH = 2

# A part imports parts of lower floors, and itself.
FLOORS = {
    "errors": 0,
    "config": 0,
    "parallel": 1,
    "batch": 1,
    "losses": 1,
    "metrics": 1,
    "text": 2,
    "data": 3,
    "models": 3,
    "planning": 4,
    "checkpoint": 4,
    "training": 5,
    "scoring": 5,
    "serving": 6,
    "evaluation": 6,
    "diagnostics": 7,
    "cli": 8,
}
# Who may import one on its own floor: arithmetic needs the loss, settings need their error.
NEIGHBOURS = {("metrics", "losses"), ("config", "errors")}
# The only files, or folders, that import a giant.
DOORS = {
    "megatron": ["parallel/", "models/", "checkpoint/", "training/optimizer/"],
    "apex": ["models/"],
    "transformer_engine": ["models/"],
    "nemo": [],
    "pytriton": ["serving/transports/triton/", "serving/client/"],
    "tritonclient": ["serving/transports/triton/", "serving/client/"],
    "lightning": ["training/loggers.py"],
    "transformers": ["checkpoint/hf/"],
}

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
    return part == other or (part, other) in NEIGHBOURS or FLOORS[other] < FLOORS[part]


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
def test_giants_come_in_by_their_doors(path: Path) -> None:
    inside = path.relative_to(PACKAGE).as_posix()
    for line, name in imports(path):
        doors = DOORS.get(name.split(".")[0])
        if doors is not None:
            assert any(inside == door or inside.startswith(door) for door in doors), (
                f"{name_of(path)}:{line}: imports {name}; its doors are {doors}"
            )


@pytest.mark.parametrize("path", OUTSIDE, ids=name_of)
def test_what_stands_outside_is_wiring(path: Path) -> None:
    """Scripts and examples reach the giants through the package; a benchmark may run a rival."""
    rivals = {"transformers"} if name_of(path).startswith("benchmarks/") else set()
    for line, name in imports(path):
        giant = name.split(".")[0]
        assert giant not in DOORS or giant in rivals, f"{name_of(path)}:{line}: imports {name}"


ARITHMETIC = [path for path in FILES if part_of(path) in ("losses", "metrics")]


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
