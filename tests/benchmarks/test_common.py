"""If a benchmark's other side lacks a module or dies, one line says so."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.harness.tiny import ROOT

DIES = "import os, sys; print('a word before', file=sys.stderr); os.kill(os.getpid(), 9)"
ENDS = "import sys; sys.exit('no memory left')"
ECHOES = """
import json, sys
sys.stdin.readline()
for line in sys.stdin:
    if "die" in line:
        raise SystemExit(3)
    print(json.dumps({"heard": json.loads(line)}), flush=True)
"""


@pytest.fixture(scope="module")
def common() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")
        return importlib.import_module("common")


def script(folder: Path, text: str) -> str:
    """An absolute path outside benchmarks/."""
    path = folder / "worker.py"
    path.write_text(text)
    return str(path)


def test_how_a_worker_ended_is_said(common: ModuleType, tmp_path: Path) -> None:
    killed = "it was ended by SIGKILL, .* memory is short\na word before"
    for program, message in (
        (DIES, killed),
        (ENDS, "it ended with exit status 1\nno memory left"),
        ("", "it ended with exit status 0"),
    ):
        with pytest.raises(common.WorkerFailed, match=f"^{message}$"):
            common.run_worker(script(tmp_path, program), "role", {}, 1)


def test_a_worker_of_several_ranks_has_one_result(common: ModuleType, tmp_path: Path) -> None:
    program = "import json, os; r = os.environ; print(json.dumps([r['RANK'], r['WORLD_SIZE']]))"
    only_first = f"import os\nif os.environ['RANK'] == '0':\n    {program}"
    assert common.run_worker(script(tmp_path, only_first), "role", {}, 1, ranks=2) == ["0", "2"]


def test_a_worker_answers_until_it_ends(common: ModuleType, tmp_path: Path) -> None:
    worker = common.Worker(sys.executable, script(tmp_path, ECHOES), {"job": 1}, 1)
    assert worker.ask({"a": 1}) == {"heard": {"a": 1}}
    assert worker.ask({"b": 2}) == {"heard": {"b": 2}}
    for _ in range(2):
        with pytest.raises(common.WorkerFailed, match=r"^it ended with exit status 3"):
            worker.ask({"die": True})
    worker.close()


def test_what_is_missing_is_one_line_with_the_command(common: ModuleType) -> None:
    common.require("json", "torch")
    with pytest.raises(SystemExit) as end:
        common.require("json", "no_such_module", "nor_this")
    assert end.value.code == (
        f"{sys.executable} lacks no_such_module, nor_this, which this benchmark needs: "
        f"{sys.executable} -m pip install -e '{ROOT}[bench]'"
    )
    with pytest.raises(SystemExit, match=r"^nowhere/python: cannot be run: No such file"):
        common.require("json", python="nowhere/python")


def test_a_dash_stands_for_what_there_is_not(common: ModuleType) -> None:
    shown = common.render([{"who": "ours", "speed": 1.25}, {"who": "theirs", "speed": None}])
    assert shown.splitlines() == ["who     speed", "ours     1.25", "theirs      -"]
