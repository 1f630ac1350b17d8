"""Scripts forked from a prepared process end, fail and are stopped as those that start fresh."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests import tiny

SCRIPT = """
import atexit, json, os, signal, sys, time

atexit.register(print, "the end")
rank = int(os.environ.get("RANK", 0))
sys.stderr.write(f"rank {rank} of {os.environ.get('WORLD_SIZE', 1)}\\n")
what = sys.argv[1]
if what == "tell":
    print(json.dumps([sys.argv, sys.path[0], os.getcwd(), os.environ.get("TOLD"), __name__]))
if what == "ours":
    print([name for name in sys.modules if name.startswith(("nemo_aligner", "megatron"))])
if what == "exit":
    sys.exit("no more")
if what == "raise":
    raise KeyError("lost")
there = os.path.join(sys.path[0], "there")
if what == "kill" and rank == 0:
    open(there, "w").close()
if what == "kill" and rank == 1:
    while not os.path.exists(there):
        time.sleep(0.1)
    os.kill(os.getpid(), signal.SIGKILL)
if what in ("kill", "sleep"):
    time.sleep(60)
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "folder" / "script.py"
    path.parent.mkdir()
    path.write_text(SCRIPT)
    return str(path)


@pytest.mark.parametrize("fresh", [False, True], ids=["prepared", "fresh"])
class TestBoth:
    def test_output_and_end(self, script: str, fresh: bool) -> None:
        done = tiny.run_script(script, "tell", "a b", fresh=fresh)
        line, end = done.stdout.splitlines()
        folder = str(Path(script).parent)
        root = str(tiny.ROOT)
        assert line == f'[["{script}", "tell", "a b"], "{folder}", "{root}", null, "__main__"]'
        assert end == "the end"
        assert done.stderr == "rank 0 of 1\n"

    def test_failures(self, script: str, fresh: bool) -> None:
        done = tiny.run_script(script, "exit", check=False, fresh=fresh)
        assert (done.returncode, done.stderr) == (1, "rank 0 of 1\nno more\n")
        done = tiny.run_script(script, "raise", check=False, fresh=fresh)
        assert done.returncode == 1
        assert done.stderr.endswith("KeyError: 'lost'\n")
        with pytest.raises(AssertionError, match="ended with 1"):
            tiny.run_script(script, "raise", fresh=fresh)

    def test_too_long(self, script: str, fresh: bool) -> None:
        with pytest.raises(subprocess.TimeoutExpired):
            tiny.run_script(script, "sleep", timeout=1, fresh=fresh)


@pytest.mark.parametrize(
    "fresh", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["prepared", "fresh"]
)
def test_the_others_end_with_a_rank_that_is_killed(script: str, fresh: bool) -> None:
    done = tiny.run_script(script, "kill", processes=2, check=False, timeout=50, fresh=fresh)
    assert done.returncode == 1
    assert "rank 0 of 2" in done.stderr
    assert "rank 1 of 2" in done.stderr


def test_nothing_of_ours_is_imported_before_a_script_is(script: str) -> None:
    assert tiny.run_script(script, "ours").stdout.splitlines()[0] == "[]"


def test_what_the_libraries_may_read_is_set_before_they_are_imported(script: str) -> None:
    """By a fresh start, where a test wants another environment than others had."""
    done = tiny.run_script(script, "tell", env={"TOLD": "so"})
    assert '"so"' in done.stdout
