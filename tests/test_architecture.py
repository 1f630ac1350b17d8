"""What neither import-linter nor ruff can hold of the rules in CONTRIBUTING.md."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.harness.tiny import ROOT

PACKAGE = ROOT / "nemo_aligner"
MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 60
MAX_CLASS_DEPTH = 2
TREES = {
    path: ast.parse(path.read_text(encoding="utf-8"))
    for folder in ("nemo_aligner", "examples", "scripts", "benchmarks")
    for path in sorted((ROOT / folder).rglob("*.py"))
}
FILES = [path for path in TREES if PACKAGE in path.parents]
# What a benchmark may run beside ours, and what trains a policy; the rest is reached through us.
OTHERS = {"transformers", "aiohttp", "trl", "datasets"}
INNER = {
    "megatron", "apex", "transformer_engine", "nemo", "nemo_rl", "nemo_gym", "pytriton",
    "tritonclient", "fastapi", "starlette", "uvicorn", "prometheus_client", "pydantic",
    "lightning", "pyarrow", "matplotlib", "ray",
}  # fmt: skip


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imports(path: Path) -> Iterator[str]:
    """Dotted names of all that a file imports, also inside functions."""
    for node in ast.walk(TREES[path]):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def roots(path: Path) -> set[str]:
    return {name.split(".")[0] for name in imports(path)}


def test_scripts_and_examples_reach_dependencies_through_the_package() -> None:
    found = {}
    for path in TREES.keys() - set(FILES):
        may_run_others = name_of(path).startswith(("benchmarks/", "examples/rl/"))
        if wrong := roots(path) & (INNER if may_run_others else INNER | OTHERS):
            found[name_of(path)] = wrong
    assert not found, found


def test_packages_around_megatron_imports_prepare_it() -> None:
    """Some package around such a module begins with nemo_aligner.distributed, see there."""
    found = []
    for path in FILES:
        if "megatron" in roots(path) and PACKAGE / "distributed" not in path.parents:
            inits = [folder / "__init__.py" for folder in path.parents if PACKAGE in folder.parents]
            if not any("nemo_aligner.distributed" in imports(init) for init in inits):
                found.append(name_of(path))
    assert not found, found


def test_objectives_and_metrics_know_no_ranks() -> None:
    found = [
        name_of(path)
        for folder in ("metrics", "losses")
        for path in (PACKAGE / folder).rglob("*.py")
        if "distributed" in path.read_text(encoding="utf-8")
    ]
    assert not found, found


def test_files_and_functions_are_short() -> None:
    found = []
    for path, tree in TREES.items():
        length = len(path.read_text(encoding="utf-8").splitlines())
        if length > MAX_FILE_LINES:
            found.append(f"{name_of(path)}: {length} lines")
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length >= MAX_FUNCTION_LINES:
                    found.append(f"{name_of(path)}:{node.lineno}: {node.name} has {length} lines")
    assert not found, found


def test_class_hierarchies_are_flat() -> None:
    """A class of ours, one that inherits from it, and no further.

    errors.py counts as given, and so do the settings that all HTTP servers share, and Objective,
    which has the defaults of a loss and no behaviour.
    """
    parents: dict[str, set[str]] = {}
    for path in FILES:
        for node in ast.walk(TREES[path]):
            if isinstance(node, ast.ClassDef) and path.name != "errors.py":
                bases = {ast.unparse(base).split("[")[0].split(".")[-1] for base in node.bases}
                bases -= {"FrontConfig", "Objective"}
                # Where two files use one name, the deeper of both counts.
                parents.setdefault(node.name, set()).update(bases)

    def depth(name: str) -> int:
        return 1 + max((depth(base) for base in parents[name] if base in parents), default=0)

    deep = {name: depth(name) for name in parents if depth(name) > MAX_CLASS_DEPTH}
    assert not deep, deep
