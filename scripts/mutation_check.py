"""Put small faults into the running code, and count those that the tests find.

A mutant is one change inside a function: another operator or number, a condition the other way
round, nothing returned, a statement left out. The package and the tests are imported once; each
mutant has a fork of that process, which exchanges the function's code and runs the tests that cover
the line until one fails. Tests that reach the line only in another process do not count.
"""

from __future__ import annotations

import argparse
import ast
import copy
import gc
import hashlib
import importlib
import json
import math
import os
import resource
import shlex
import shutil
import signal
import sys
import tempfile
import time
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import coverage
import pytest

SWAPS: dict[type[ast.AST], type[Any]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.And: ast.Or, ast.Or: ast.And, ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div,
    ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult,
    ast.Break: ast.Continue, ast.Continue: ast.Break,
}  # fmt: skip
OUTCOMES = ("killed", "survived", "uncovered", "not judged")
MOST_BYTES = 8 << 30  # of a fork's memory: some mutants would take all
POLL_SECS = 0.02
MEASURE_SECS = 1200.0  # the tests of one file
Report = dict[str, Any]  # what a fork says of its run
Body = Callable[[Callable[[Report], None]], None]


@dataclass(frozen=True)
class Mutant:
    path: str
    lines: tuple[int, int]  # its own and its statement's first
    number: int  # of the node inside functions, in the order of the file
    key: str  # the same in each version of the file where the function has this line


def nodes_in_functions(node: ast.AST, name: str, statement: int) -> Iterator[tuple[Any, str, int]]:
    """Yield the nodes that a call of a function runs, with its name and the statement's line.

    What stands in f-strings is for people to read, and left out.
    """
    children: Iterable[ast.AST] = ast.iter_child_nodes(node)
    if statement:
        statement = node.lineno if isinstance(node, ast.stmt) else statement
        yield node, name, statement
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        children, name = node.body, f"{name}.{node.name}".lstrip(".")
        statement = statement if isinstance(node, ast.ClassDef) else node.lineno
    elif isinstance(node, ast.JoinedStr):
        children = ()
    elif isinstance(node, ast.AnnAssign):
        children = (node.value,) if node.value else ()
    for child in children:
        yield from nodes_in_functions(child, name, statement)


def change(node: Any) -> Any | None:
    """The node with a fault, None where there is nothing to change."""
    new = copy.copy(node)
    match node:
        case ast.Compare(ops=[operator]):
            new.ops = [SWAPS[type(operator)]()]
        case ast.BinOp() | ast.AugAssign() | ast.BoolOp() if type(node.op) in SWAPS:
            new.op = SWAPS[type(node.op)]()
        case ast.UnaryOp(op=ast.Not()):
            new = node.operand
        case ast.Constant(value=bool() as value):
            new.value = not value
        case ast.Constant(value=int() | float() as value) if value + 1 != value:
            new.value = value + 1
        case ast.If() | ast.IfExp() | ast.While():
            new.test = ast.UnaryOp(ast.Not(), node.test)
        case ast.comprehension(ifs=[first, *others]):
            new.ifs = [ast.UnaryOp(ast.Not(), first), *others]
        case ast.Break() | ast.Continue():
            new = SWAPS[type(node)]()
        case _:
            return leave_out(node)
    return new


def leave_out(node: ast.stmt) -> ast.stmt | None:
    match node:
        case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):
            return ast.Return()
        case ast.Raise() | ast.Delete() | ast.Expr(value=ast.Call()):
            return ast.Pass()
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            return ast.Pass()
    return None


def first_line(node: ast.AST) -> str:
    return ast.unparse(node).strip().partition("\n")[0]


def mutants_of(path: str) -> list[Mutant]:
    source = Path(path).read_text(encoding="utf-8")
    lines, seen, found = source.splitlines(), Counter[str](), []
    nodes = nodes_in_functions(ast.parse(source), "", 0)
    for number, (node, name, statement) in enumerate(nodes):
        if new := change(node):
            line = getattr(node, "lineno", statement)
            fault = f"{first_line(node)} -> {first_line(new)}"
            key = f"{path}::{name} | {lines[line - 1].strip()} | {fault}"
            seen[key] += 1
            key = key if seen[key] == 1 else f"{key} #{seen[key]}"
            found.append(Mutant(path, (line, statement), number, key))
    return found


def sample(path: str, share: float, most: int, seed: int) -> list[Mutant]:
    """A share of a file's mutants: the lowest hashes of their keys, so that a change of one
    function moves no other's, and a file has the same ones whatever else is judged.
    """
    mutants = mutants_of(path)
    mutants.sort(key=lambda m: hashlib.sha256(f"{seed}{m.key}".encode()).digest())
    chosen = mutants[: min(most, math.ceil(share * len(mutants)))]
    return sorted(chosen, key=lambda m: m.number)


def full(path: str) -> str:
    return str(Path(path).resolve())


def codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes(constant)


def exchange(mutant: Mutant, source: bytes, functions: Iterable[FunctionType]) -> bool:
    """Give a file's functions the code with the fault; False where none that lives has it."""
    tree = ast.parse(source)
    node = [found for found, _, _ in nodes_in_functions(tree, "", 0)][mutant.number]
    new: Any = change(node)
    ast.copy_location(new, node)

    class Put(ast.NodeTransformer):
        def visit(self, visited: ast.AST) -> ast.AST:
            return new if visited is node else self.generic_visit(visited)

    whole: Any = ast.fix_missing_locations(Put().visit(tree))
    compiled = compile(whole, full(mutant.path), "exec", dont_inherit=True)
    by_place = {(code.co_name, code.co_firstlineno): code for code in codes(compiled)}
    is_changed = False
    for function in functions:
        code = by_place.get((function.__code__.co_name, function.__code__.co_firstlineno))
        if code is not None and code != function.__code__:
            function.__code__, is_changed = code, True
    return is_changed


@dataclass(frozen=True)
class Job:
    name: str
    body: Body  # in a fork; it is given what writes the report
    limit: float  # seconds


def run_forks(jobs: Iterable[Job], workers: int) -> Iterator[tuple[str, Report | None]]:
    """The name of each job and its report, None of one that ran too long or died."""
    waiting = list(jobs)[::-1]
    running: dict[int, tuple[str, Path, float]] = {}
    while waiting or running:
        while waiting and len(running) < workers:
            job, folder = waiting.pop(), Path(tempfile.mkdtemp(prefix="mutant_"))
            if (pid := os.fork()) == 0:
                run_in_fork(job, folder)
            running[pid] = job.name, folder, time.monotonic() + job.limit
        time.sleep(POLL_SECS)
        for pid, (name, folder, deadline) in list(running.items()):
            is_over = os.waitpid(pid, os.WNOHANG)[0] != 0
            if is_over or time.monotonic() > deadline:
                del running[pid]
                with suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)  # also what its tests have started
                if not is_over:
                    os.waitpid(pid, 0)
                report = folder / "report.json"
                yield name, json.loads(report.read_text()) if report.exists() else None
                shutil.rmtree(folder, ignore_errors=True)


def run_in_fork(job: Job, folder: Path) -> None:
    def write(report: Report) -> None:
        (folder / "unfinished").write_text(json.dumps(report))
        (folder / "unfinished").rename(folder / "report.json")

    try:
        os.setsid()
        nothing = os.open(os.devnull, os.O_RDWR)
        for descriptor in range(3):
            os.dup2(nothing, descriptor)
        resource.setrlimit(resource.RLIMIT_DATA, (MOST_BYTES, MOST_BYTES))
        os.environ["PYTEST_DEBUG_TEMPROOT"] = os.environ["TMPDIR"] = str(folder)
        tempfile.tempdir = None
        job.body(write)
    except Exception as error:
        write({"outcome": "not judged", "by": repr(error)})
    finally:
        os._exit(0)


class Measured:
    """A plugin of pytest: which lines each test runs, how long it takes, and whether it passes.

    A fixture that several tests share counts for all of them, in the context without a name.
    """

    def __init__(self, paths: Iterable[str]) -> None:
        self.paths = list(paths)
        self.seconds: dict[str, float] = defaultdict(float)
        self.not_passed: set[str] = set()
        self._test, self._shared = "", 0
        self._coverage = coverage.Coverage(data_file=None, include=[*map(full, self.paths)])
        self._coverage.start()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._test = nodeid
        self._coverage.switch_context(nodeid)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Iterator[Any]:
        is_shared = fixturedef.scope != "function"
        self._shared += is_shared
        self._coverage.switch_context("" if self._shared else self._test)
        try:
            return (yield)
        finally:
            self._shared -= is_shared
            self._coverage.switch_context("" if self._shared else self._test)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] += report.duration
        if not report.passed:
            self.not_passed.add(report.nodeid)

    def report(self) -> Report:
        self._coverage.stop()
        data = self._coverage.get_data()
        return {
            "seconds": {t: took for t, took in self.seconds.items() if t not in self.not_passed},
            "not passed": sorted(self.not_passed),
            "lines": {path: data.contexts_by_lineno(full(path)) for path in self.paths},
        }


class FirstFailure:
    """A plugin of pytest: reports a failure at once, for what ends the test may hang."""

    def __init__(self, write: Callable[[Report], None]) -> None:
        self.write, self.found = write, False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not self.found:
            self.found = True
            crash = getattr(report.longrepr, "reprcrash", None)
            why = str(crash.message if crash else report.longrepr)[:200]
            self.write({"outcome": "killed", "by": report.nodeid, "why": why})


class Check:
    """A plugin of pytest: instead of running the tests once, judges the mutants by them."""

    def __init__(self, mutants: list[Mutant], workers: int, budget: float) -> None:
        self.mutants, self.workers, self.budget = mutants, workers, budget
        self.paths = sorted({mutant.path for mutant in mutants})
        self.sources = {path: Path(path).read_bytes() for path in self.paths}
        self.results: dict[str, Report] = {}
        self.seconds: dict[str, float] = {}
        self.covering: dict[tuple[str, int], set[str]] = defaultdict(set)
        self.functions: dict[str, list[FunctionType]] = defaultdict(list)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        for path in self.paths:
            importlib.import_module(".".join(Path(path).with_suffix("").parts))
        for found in gc.get_objects():
            if type(found) is FunctionType:
                self.functions[found.__code__.co_filename].append(found)
        gc.freeze()
        self.measure(session.items)
        items = {item.nodeid: item for item in session.items}
        jobs = []
        for mutant in self.mutants:
            if tests := self.tests_of(mutant):
                chosen = self.within_budget(tests)
                jobs.append(self.job(mutant, [items[test] for test in chosen], len(tests)))
            else:
                self.results[mutant.key] = {"outcome": "uncovered"}
        self.judge(jobs)
        late = [Job(j.name, j.body, 4 * j.limit) for j in jobs if j.name not in self.results]
        self.judge(late)
        for job in late:
            self.results.setdefault(
                job.name, {"outcome": "killed", "by": "its end, or time limit, twice"}
            )
        return True

    def measure(self, items: list[pytest.Item]) -> None:
        by_file: dict[str, list[pytest.Item]] = defaultdict(list)
        for item in items:
            by_file[item.nodeid.partition("::")[0]].append(item)

        def job(file: str) -> Job:
            def body(write: Callable[[Report], None]) -> None:
                plugin = Measured(self.paths)
                run(by_file[file], plugin, lambda: False)
                write(plugin.report())

            return Job(file, body, MEASURE_SECS)

        for file, report in run_forks(map(job, by_file), self.workers):
            if report is None or "seconds" not in report:
                report = {"seconds": {}, "not passed": [report or "ran too long"], "lines": {}}
            print("measured", file, *report["not passed"], flush=True)
            self.seconds |= report["seconds"]
            for path, lines in report["lines"].items():
                for line, contexts in lines.items():
                    tests = report["seconds"] if "" in contexts else contexts
                    self.covering[path, int(line)] |= report["seconds"].keys() & tests

    def tests_of(self, mutant: Mutant) -> list[str]:
        """List the tests that cover the line, those of the module's own folder first."""
        own, statement = mutant.lines
        found = self.covering[mutant.path, own] or self.covering[mutant.path, statement]
        beside = tests_beside(mutant.path)
        return sorted(found, key=lambda t: (not t.startswith(beside), self.seconds[t], t))

    def within_budget(self, tests: list[str]) -> list[str]:
        """The first ``budget`` seconds of them, at least one, file by file."""
        spent = list(accumulate(self.seconds[test] for test in tests))
        chosen = tests[: max(1, bisect_right(spent, self.budget))]
        files = list(dict.fromkeys(test.partition("::")[0] for test in chosen))
        return sorted(chosen, key=lambda test: files.index(test.partition("::")[0]))

    def job(self, mutant: Mutant, items: list[pytest.Item], covering: int) -> Job:
        def body(write: Callable[[Report], None]) -> None:
            functions = self.functions[full(mutant.path)]
            if not exchange(mutant, self.sources[mutant.path], functions):
                write({"outcome": "not judged"})
                return
            first = FirstFailure(write)
            run(items, first, lambda: first.found)
            if not first.found:
                write({"outcome": "survived", "by": f"{len(items)} of {covering} tests"})

        return Job(mutant.key, body, 30 + 10 * sum(self.seconds[item.nodeid] for item in items))

    def judge(self, jobs: list[Job]) -> None:
        for done, (key, report) in enumerate(run_forks(jobs, self.workers), start=1):
            if report is not None:
                self.results[key] = report
            outcome = report["outcome"] if report else "ran too long, or died"
            print(f"{done}/{len(jobs)}: {outcome}: {key}", flush=True)


def run(items: list[pytest.Item], plugin: object, is_over: Callable[[], bool]) -> None:
    items[0].config.pluginmanager.register(plugin)
    for item, following in zip(items, [*items[1:], None], strict=True):
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if is_over():
            return


def tests_beside(path: str) -> str:
    """``tests/contract`` for ``nemo_aligner/contract/contract.py``: the deepest folder there is."""
    below = Path(path).relative_to("nemo_aligner")
    if below.parent == Path():
        return f"tests/test_{below.stem}.py"
    return next(str(f) for p in below.parents if (f := Path("tests", p)).is_dir())


def table(results: dict[str, Report]) -> str:
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for key, report in sorted(results.items()):
        for row in (key.partition(":")[0], "together"):
            counts[row][report["outcome"]] += 1
    counts["together"] = counts.pop("together")
    rows = [("module", "mutants", *OUTCOMES), ("---",) * (2 + len(OUTCOMES))]
    for name, found in counts.items():
        rows.append((name, str(found.total()), *(str(found[outcome]) for outcome in OUTCOMES)))
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("modules", nargs="+", type=Path, help="files or folders of nemo_aligner")
    parser.add_argument("--tests", nargs="+", help="files or folders (default: the modules' own)")
    parser.add_argument("--share", type=float, default=0.3, help="of the mutants (default: 0.3)")
    parser.add_argument("--most", type=int, default=60, help="of one file (default: 60)")
    parser.add_argument("--seed", type=int, default=20261124)
    parser.add_argument("--missed", type=Path, help="instead, what is not killed in such an --out")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--budget", type=float, default=40.0, help="seconds of tests of a mutant")
    parser.add_argument("--pytest", default="--quick", help="its options (default: --quick)")
    parser.add_argument("--out", type=Path, default=Path("results/mutants.json"))
    told = parser.parse_args()
    files = (m.rglob("*.py") if m.is_dir() else [m] for m in told.modules)
    paths = sorted({str(path) for found in files for path in found})
    if told.missed:
        results = json.loads(told.missed.read_text())
        missed = {key for key, report in results.items() if report["outcome"] != "killed"}
        mutants = [m for path in paths for m in mutants_of(path) if m.key in missed]
        print("not in this tree:", *missed - {m.key for m in mutants}, sep="\n")
    else:
        mutants = [m for path in paths for m in sample(path, told.share, told.most, told.seed)]
    check = Check(mutants, told.workers, told.budget)
    tests = told.tests or sorted({tests_beside(mutant.path) for mutant in mutants})
    options = ["-qq", "-s", "-p", "no:cacheprovider", *shlex.split(told.pytest)]
    code = pytest.main([*options, *tests], plugins=[check])
    told.out.parent.mkdir(parents=True, exist_ok=True)
    told.out.write_text(json.dumps(check.results, indent=1))
    for mutant in mutants:
        if (result := check.results[mutant.key])["outcome"] != "killed":
            by = f" {result['by']}" if "by" in result else ""
            print(f"{result['outcome']}{by}: line {mutant.lines[0]}: {mutant.key}")
    print(table(check.results))
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
