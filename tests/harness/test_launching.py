"""Prepared processes run scripts like fresh ones; workers build things once and take turns."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.harness import launching, tiny
from tests.harness.launching import start_script
from tests.harness.once import Turns, once_per_run
from tests.harness.tiny import ROOT

SCRIPT = """
import atexit, json, os, signal, subprocess, sys, tempfile, time

atexit.register(print, "the end")
rank = int(os.environ.get("RANK", 0))
sys.stderr.write(f"rank {rank} of {os.environ.get('WORLD_SIZE', 1)}\\n")
what = sys.argv[1]
if what == "tell":
    print(json.dumps([sys.argv, sys.path[0], os.getcwd(), os.environ.get("TOLD"), __name__]))
if what == "temporary":
    print(tempfile.gettempdir())
if what == "remembered":
    ours = [module for name, module in sys.modules.items() if name.startswith("nemo_aligner")]
    caches = [(name, kept) for module in ours for name, kept in vars(module).items()
              if hasattr(kept, "cache_info") and kept.__module__ == module.__name__]
    print(len(ours), len(caches), [name for name, kept in caches if kept.cache_info().currsize])
if what == "hash":
    here = hash("a")
    below = subprocess.run([sys.executable, "-c", "print(hash('a'))"], stdout=subprocess.PIPE)
    print(f"{rank} {here} {int(below.stdout)} {os.environ.get('PYTHONHASHSEED')}\\n", end="")
if what == "exit":
    sys.exit("no more")
if what == "raise":
    raise KeyError("lost")
there = os.path.join(sys.path[0], "there")
if what == "refuse":
    signal.signal(signal.SIGTERM, lambda *_: print("not now", flush=True))
if what in ("kill", "fail", "refuse"):
    if rank == 0:
        open(there, "w").close()
    else:
        while not os.path.exists(there):
            time.sleep(0.1)
        if what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        sys.exit(3)
if what == "pid":
    with open(there, "w") as file:
        file.write(str(os.getpid()))
time.sleep(60 if what in ("kill", "fail", "refuse", "sleep", "pid") else 0)
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "folder" / "script.py"
    path.parent.mkdir()
    path.write_text(SCRIPT)
    return str(path)


@pytest.mark.parametrize("fresh", [False, True], ids=["prepared", "fresh"])
def test_script_says_ends_fails_and_takes_too_long_alike(script: str, fresh: bool) -> None:
    done = tiny.run_script(script, "tell", "a b", fresh=fresh)
    line, end = done.stdout.splitlines()
    folder, root = Path(script).parent, tiny.ROOT
    assert line == f'[["{script}", "tell", "a b"], "{folder}", "{root}", null, "__main__"]'
    assert (end, done.stderr) == ("the end", "rank 0 of 1\n")
    # A script's environment is set before its libraries are imported.
    assert '"so"' in tiny.run_script(script, "tell", env={"TOLD": "so"}, fresh=fresh).stdout
    done = tiny.run_script(script, "exit", check=False, fresh=fresh)
    assert (done.returncode, done.stderr) == (1, "rank 0 of 1\nno more\n")
    with pytest.raises(AssertionError, match="ended with 1") as caught:
        tiny.run_script(script, "raise", fresh=fresh)
    assert str(caught.value).endswith("KeyError: 'lost'\n")
    with pytest.raises(subprocess.TimeoutExpired):
        tiny.run_script(script, "sleep", timeout=1, fresh=fresh)


@pytest.mark.parametrize("fresh", [False, True], ids=["prepared", "fresh"])
def test_the_others_end_with_a_rank_that_fails(script: str, fresh: bool) -> None:
    there = Path(script).parent / "there"
    for accident in ("kill", "fail"):
        there.unlink(missing_ok=True)  # so that the failing rank waits for the other again
        done = tiny.run_script(script, accident, processes=2, check=False, timeout=50, fresh=fresh)
        assert done.returncode == 1, accident
        assert {"rank 0 of 2", "rank 1 of 2"} <= set(done.stderr.splitlines()), accident


@pytest.mark.parametrize("python", [None, sys.executable], ids=["prepared", "fresh"])
def test_started_script_runs_while_others_do_and_is_found_by_its_command_and_environment(
    script: str, tmp_path: Path, python: str | None
) -> None:
    output = tmp_path / "output"
    environment = tiny.environment(TEST_MARK="a mark", TMPDIR=str(tmp_path))
    command = [script, "sleep", "a b"]
    (slow,) = start_script(command, environment, [{"RANK": "0"}], output, python=python)
    (quick,) = start_script([script, "temporary"], environment, [{}], output, python=python)
    assert quick.wait(timeout=50) == 0
    assert f"{tmp_path}\n" in output.read_text()
    with pytest.raises(subprocess.TimeoutExpired):
        slow.wait(timeout=0.1)
    assert slow.poll() is None
    shown = [Path(f"/proc/{slow.pid}/{name}").read_bytes() for name in ("cmdline", "environ")]
    words, variables = (content.rstrip(b"\0").split(b"\0") for content in shown)
    assert words == [os.fsencode(word) for word in (sys.executable, *command)]
    assert {b"TEST_MARK=a mark", b"RANK=0", f"TMPDIR={tmp_path}".encode()} <= set(variables)
    slow.kill()
    assert slow.wait(timeout=50) == slow.poll() == -signal.SIGKILL


def test_a_rank_that_will_not_end_is_killed(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "GRACE_SECS", 1)
    done = tiny.run_script(script, "refuse", processes=2, check=False, timeout=50)
    assert done.returncode == 1
    assert done.stdout.splitlines() == ["the end", "not now"]


def test_each_rank_hashes_strings_in_its_own_way(
    script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its child processes do, too: no hash seed is passed on."""
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    output = tiny.run_script(script, "hash", processes=2).stdout
    # The last lines of two ranks may share a line, or leave an empty one.
    lines = sorted(line.split() for line in output.splitlines() if line[:1].isdigit())
    assert [(rank, seed) for rank, _, _, seed in lines] == [("0", "None"), ("1", "None")]
    assert len({number for line in lines for number in line[1:3]}) == 4


def test_a_run_that_is_interrupted_leaves_nothing_behind(script: str) -> None:
    there = Path(script).parent / "there"

    def interrupt() -> None:
        while not (there.exists() and there.read_text()):
            time.sleep(0.1)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    thread = threading.Thread(target=interrupt, daemon=True)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        tiny.run_script(script, "pid", timeout=50)
    thread.join()
    with pytest.raises(ProcessLookupError):
        os.kill(int(there.read_text()), 0)
    assert "the end" in tiny.run_script(script, "tell").stdout


def test_our_modules_are_imported_before_a_script_is_and_have_cached_only_what_no_script_changes(
    script: str,
) -> None:
    modules, caches, *filled = tiny.run_script(script, "remembered").stdout.split(maxsplit=2)
    assert int(modules) > 150
    assert int(caches) > 20
    found = set(ast.literal_eval(filled[0].splitlines()[0]))
    of_settings = {"_read_defaults", "list_keys", "types_of_fields"}
    assert found == {"check_terminates", *of_settings}


def test_what_a_launch_puts_into_this_process_reaches_no_script(
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


WORKER = """
import sys, time
from pathlib import Path
from tests.harness.launching import start_script
from tests.harness.once import Turns, once_per_run

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


def test_workers_build_a_thing_once_and_take_turns(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WORKER, str(tmp_path)]
    workers = [
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(4)
    ]
    outputs = [worker.communicate()[0] for worker in workers]
    assert [worker.returncode for worker in workers] == [0] * 4
    assert sorted(outputs) == ["", "", "", "built\n"]


def test_what_failed_is_built_again_in_an_empty_folder(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "half").write_text("")
        raise ValueError

    with pytest.raises(ValueError):  # noqa: PT011
        once_per_run(tmp_path, "thing", fail)
    folder = once_per_run(tmp_path, "thing", lambda folder: (folder / "whole").write_text(""))
    assert [path.name for path in folder.iterdir()] == ["whole"]
    assert once_per_run(tmp_path, "thing", fail) == folder


def test_outside_of_a_run_nobody_waits() -> None:
    with Turns().one():
        pass
