"""What tests have in common: scripts on ranks of prepared processes, and what is built once."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests import tiny
from tests.once import once_per_run

SCRIPT = """
import atexit, json, os, signal, subprocess, sys, time

atexit.register(print, "the end")
rank = int(os.environ.get("RANK", 0))
sys.stderr.write(f"rank {rank} of {os.environ.get('WORLD_SIZE', 1)}\\n")
what = sys.argv[1]
if what == "tell":
    ours = [name for name in sys.modules if name.startswith(("nemo_aligner", "megatron"))]
    told = os.environ.get("TOLD")
    print(json.dumps([sys.argv, sys.path[0], os.getcwd(), told, __name__, ours]))
if what == "hash":
    here = hash("a")
    below = subprocess.run([sys.executable, "-c", "print(hash('a'))"], stdout=subprocess.PIPE)
    print(f"{rank} {here} {int(below.stdout)} {os.environ.get('PYTHONHASHSEED')}\\n", end="")
if what == "exit":
    sys.exit("no more")
if what == "raise":
    raise KeyError("lost")
there = os.path.join(sys.path[0], "there")
if what == "kill" and rank == 0:
    open(there, "w").close()
elif what == "kill":
    while not os.path.exists(there):
        time.sleep(0.1)
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(60 if what in ("kill", "sleep") else 0)
"""
WORKER = """
import sys, time
from pathlib import Path
from tests.once import Turns, once_per_run

def build(folder):
    time.sleep(0.5)
    (folder / "made").write_text("")
    print("built")

run = Path(sys.argv[1])
assert (once_per_run(run, "thing", build) / "made").exists()
turns = Turns()
turns.begin(run)
turns.count = 1
with turns.one(), turns.one():
    (run / "inside").mkdir()  # no other worker is
    time.sleep(0.2)
    (run / "inside").rmdir()
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "folder" / "script.py"
    path.parent.mkdir()
    path.write_text(SCRIPT)
    return str(path)


def test_script_of_a_prepared_process_is_as_one_that_starts_fresh(script: str) -> None:
    done = tiny.run_script(script, "tell", "a b")
    (told, end), folder = done.stdout.splitlines(), str(Path(script).parent)
    here = [[script, "tell", "a b"], folder, str(tiny.ROOT), None, "__main__", []]
    assert json.loads(told) == here
    assert (end, done.stderr) == ("the end", "rank 0 of 1\n")
    # What the libraries may read is set before they are imported: by a fresh start.
    done = tiny.run_script(script, "tell", "a b", env={"TOLD": "so"})
    assert json.loads(done.stdout.splitlines()[0]) == [*here[:3], "so", *here[4:]]


def test_script_that_fails_is_an_error(script: str) -> None:
    done = tiny.run_script(script, "exit", check=False)
    assert (done.returncode, done.stderr) == (1, "rank 0 of 1\nno more\n")
    with pytest.raises(AssertionError, match=r"ended with 1(.|\n)*KeyError: 'lost'"):
        tiny.run_script(script, "raise")
    with pytest.raises(subprocess.TimeoutExpired):
        tiny.run_script(script, "sleep", timeout=1)


def test_ranks_end_with_one_that_fails(script: str) -> None:
    done = tiny.run_script(script, "kill", processes=2, check=False, timeout=50)
    assert done.returncode == 1
    assert "rank 0 of 2" in done.stderr
    assert "rank 1 of 2" in done.stderr


def test_ranks_hash_strings_each_in_its_own_way(
    script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And so do the processes that it starts: no seed is passed on."""
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    output = tiny.run_script(script, "hash", processes=2).stdout
    lines = sorted(line.split() for line in output.splitlines() if line != "the end")
    assert [(rank, seed) for rank, _, _, seed in lines] == [("0", "None"), ("1", "None")]
    assert len({number for line in lines for number in line[1:3]}) == 4


def test_script_gets_nothing_that_a_launch_put_into_this_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    seen: list[dict[str, str]] = []

    def launch(
        command: list[str], environment: dict[str, str], *unused: object
    ) -> subprocess.CompletedProcess[str]:
        seen.append(environment)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(tiny, "launch_script", launch)
    tiny.run_verb("plan")
    added = {"OMP_NUM_THREADS", "PYTHONPATH", "CUDA_VISIBLE_DEVICES"}
    assert seen[0].keys() <= tiny.GIVEN.keys() | added


def test_once_builds_for_all_workers_who_take_turns(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WORKER, str(tmp_path)]
    workers = [
        subprocess.Popen(command, cwd=tiny.ROOT, stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    said = [worker.communicate()[0] for worker in workers]
    assert [worker.returncode for worker in workers] == [0] * 4
    assert sorted(said) == ["", "", "", "built\n"]


def test_once_builds_again_in_an_empty_folder_what_failed(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "half").write_text("")
        raise ValueError

    with pytest.raises(ValueError):  # noqa: PT011
        once_per_run(tmp_path, "thing", fail)
    folder = once_per_run(tmp_path, "thing", lambda folder: (folder / "whole").write_text(""))
    assert [path.name for path in folder.iterdir()] == ["whole"]
    assert once_per_run(tmp_path, "thing", fail) == folder
