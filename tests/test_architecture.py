"""Rules of CONTRIBUTING.md that neither import-linter nor ruff can check."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.harness.tiny import ROOT

PACKAGE = ROOT / "nemo_aligner"
MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 60
MAX_CLASS_DEPTH = 2
# Words that say which value is meant instead of what it is. None may name a variable, a parameter
# or a caught exception; the text says what to write instead.
VAGUE_NAMES = {
    **dict.fromkeys(("each", "others", "some", "rest", "whole", "most"), "what an element is"),
    **dict.fromkeys(("found", "got", "kept", "held", "take", "asked"), "what the value contains"),
    **dict.fromkeys(("said", "told", "how", "why"), "message, output, options or reason"),
    **dict.fromkeys(("own", "mine"), "local_ and what it is, such as local_rows"),
    "everyone": "gathered_ and what it is, such as gathered_rows",
    "given": "settings, arguments or what else was passed",
    "wanted": "expected",
    "known": "cached, or what is known",
    "where": "location, path or condition",
    "before": "previous, or the time, such as bytes_before",
    "beside": "what is next to it",
}
MAX_VAGUE_NAMES = 5
# Functions whose name is one of these words, or one participle: they need a verb and its object.
VAGUE_FUNCTIONS = {
    "read",
    "row",
    "rows",
    "shown",
    "written",
    "said",
    "told",
    "kept",
    "made",
    "taken",
}
MAX_VAGUE_FUNCTIONS = 35
# Test files outside tests/paths and tests/harness that are not named for a module.
MAX_TESTS_WITHOUT_MODULE = 25
PATHS = [
    path
    for folder in ("nemo_aligner", "examples", "scripts", "benchmarks")
    for path in sorted((ROOT / folder).rglob("*.py"))
]
FILES = [path for path in PATHS if PACKAGE in path.parents]
# Benchmarks and examples/rl may import these: they compare with other packages or train a policy.
OTHERS = {"transformers", "aiohttp", "trl", "datasets"}
# Scripts, benchmarks and examples use these only through the package.
INNER = {
    "megatron", "apex", "transformer_engine", "nemo", "nemo_rl", "nemo_gym", "pytriton",
    "tritonclient", "fastapi", "starlette", "uvicorn", "prometheus_client", "pydantic",
    "lightning", "pyarrow", "matplotlib", "ray",
}  # fmt: skip


@cache
def parse(path: Path) -> ast.Module:
    """Parse a file, once and only in the worker that runs these tests."""
    return ast.parse(path.read_text(encoding="utf-8"))


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imports(path: Path) -> Iterator[str]:
    """Dotted names of everything that a file imports, also inside functions."""
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def bound_names(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Names of the variables, parameters and caught exceptions of a file, with their lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.ExceptHandler) and node.name:
            yield node.name, node.lineno


def is_named_for_module(test: Path) -> bool:
    """Whether ``tests/FOLDER/test_NAME.py`` names a module or package in FOLDER of the package.

    ``test_NAME_ASPECT.py`` does, too, and ``tests/FOLDER/test_FOLDER.py`` names the package itself.
    tests/benchmarks, tests/docs and tests/examples name files in these folders of the repository.
    """
    folder = test.parent.relative_to(ROOT / "tests")
    outside = folder.parts[:1] in (("benchmarks",), ("docs",), ("examples",))
    files = (ROOT / folder).rglob("*") if outside else (PACKAGE / folder).glob("*")
    stem = test.stem.removeprefix("test_")
    names = {path.stem for path in files} - {"__init__", "__pycache__"}
    return stem == folder.name or any(stem == n or stem.startswith(f"{n}_") for n in names)


def roots(path: Path) -> set[str]:
    return {name.split(".")[0] for name in imports(path)}


def test_scripts_and_examples_reach_dependencies_through_the_package() -> None:
    forbidden = {}
    for path in set(PATHS) - set(FILES):
        may_run_others = name_of(path).startswith(("benchmarks/", "examples/rl/"))
        if wrong := roots(path) & (INNER if may_run_others else INNER | OTHERS):
            forbidden[name_of(path)] = wrong
    assert not forbidden, forbidden


def test_packages_around_megatron_imports_prepare_it() -> None:
    """A module that imports megatron-core is in a package that imports nemo_aligner.distributed.

    That import adapts megatron-core to a machine without a GPU, so it must come first.
    """
    unprepared = []
    for path in FILES:
        if "megatron" in roots(path) and PACKAGE / "distributed" not in path.parents:
            inits = [folder / "__init__.py" for folder in path.parents if PACKAGE in folder.parents]
            if not any("nemo_aligner.distributed" in imports(init) for init in inits):
                unprepared.append(name_of(path))
    assert not unprepared, unprepared


def test_code_in_checkpoints_is_never_run() -> None:
    """transformers asks on stdin whether to run a checkpoint's code, unless the call forbids it."""
    unsafe = [
        f"{name_of(path)}:{node.lineno}"
        for path in FILES
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "from_pretrained"
        if "trust_remote_code=False" not in map(ast.unparse, node.keywords)
    ]
    assert not unsafe, unsafe


def test_objectives_and_metrics_know_no_ranks() -> None:
    dependent = [
        name_of(path)
        for folder in ("metrics", "losses")
        for path in (PACKAGE / folder).rglob("*.py")
        if "distributed" in path.read_text(encoding="utf-8")
    ]
    assert not dependent, dependent


def test_files_and_functions_are_short() -> None:
    too_long = []
    for path in PATHS:
        length = len(path.read_text(encoding="utf-8").splitlines())
        if length > MAX_FILE_LINES:
            too_long.append(f"{name_of(path)}: {length} lines")
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length >= MAX_FUNCTION_LINES:
                    too_long.append(
                        f"{name_of(path)}:{node.lineno}: {node.name} has {length} lines"
                    )
    assert not too_long, too_long


def test_names_say_what_a_value_is() -> None:
    vague = [
        f"{name_of(path)}:{line}: {name}: write {VAGUE_NAMES[name.strip('_')]}"
        for path in FILES
        for name, line in bound_names(parse(path))
        if name.strip("_") in VAGUE_NAMES
    ]
    listed = "\n".join(vague)
    assert len(vague) <= MAX_VAGUE_NAMES, f"{listed}\n{len(vague)} names, {MAX_VAGUE_NAMES} allowed"


def test_functions_are_named_by_a_verb_and_its_object() -> None:
    """Properties are not functions: they may be adjectives."""
    vague = [
        f"{name_of(path)}:{node.lineno}: {node.name}: write a verb and its object"
        for path in FILES
        for node in ast.walk(parse(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and not any("property" in ast.unparse(decorator) for decorator in node.decorator_list)
        and (node.name.strip("_") in VAGUE_FUNCTIONS or re.fullmatch(r"_?[a-z]+ed", node.name))
    ]
    listed, allowed = "\n".join(vague), MAX_VAGUE_FUNCTIONS
    assert len(vague) <= allowed, f"{listed}\n{len(vague)} functions, {allowed} allowed"


def test_tests_are_named_for_modules() -> None:
    """A test of one module is tests/FOLDER/test_MODULE.py; a whole path's is in tests/paths."""
    nameless = [
        name_of(path)
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        if path.relative_to(ROOT / "tests").parts[0] not in ("paths", "harness")
        and not is_named_for_module(path)
    ]
    listed = "\n".join(nameless)
    allowed = MAX_TESTS_WITHOUT_MODULE
    assert len(nameless) <= allowed, f"{listed}\n{len(nameless)} files, {allowed} allowed"


def test_class_hierarchies_are_flat() -> None:
    """A class may inherit from a class of the package that inherits from none.

    Not counted are errors.py, the settings that all HTTP servers share, and Objective, which has
    only the defaults of a loss.
    """
    parents: dict[str, set[str]] = {}
    for path in FILES:
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.ClassDef) and path.name != "errors.py":
                bases = {ast.unparse(base).split("[")[0].split(".")[-1] for base in node.bases}
                bases -= {"FrontConfig", "Objective"}
                # Where two files use one name, the deeper of both counts.
                parents.setdefault(node.name, set()).update(bases)

    def depth(name: str) -> int:
        return 1 + max((depth(base) for base in parents[name] if base in parents), default=0)

    deep = {name: depth(name) for name in parents if depth(name) > MAX_CLASS_DEPTH}
    assert not deep, deep
