"""Ranks that are launched on this machine: their output is all output, and they end together."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path

import pytest

from nemo_aligner.utils.processes import SECOND_AFTER_S
from tests.harness import tiny
from tests.harness.launching import run_code, run_local_ranks, start_local_ranks

# A signal file: it ends with a program for each rank, which prints that it has begun.
RANKS = """
import os, pathlib, signal, sys, time
rank = int(os.environ["RANK"])
folder = pathlib.Path(sys.argv[1])

def begin():
    (folder / f"begun{rank}").touch()
    while len(list(folder.glob("begun*"))) < 2:
        time.sleep(0.01)

"""


def start(program: str, folder: Path, **told: str) -> subprocess.Popen[str]:
    return start_local_ranks(["-c", RANKS + program, str(folder)], tiny.environment(**told))


def run(program: str, folder: Path) -> tuple[int, str, str]:
    done = run_local_ranks(["-c", RANKS + program, str(folder)], tiny.environment())
    return done.returncode, done.stdout, done.stderr


def wait_for_two(folder: Path) -> None:
    end = time.monotonic() + 60
    while len(list(folder.glob("begun*"))) < 2:
        assert time.monotonic() < end
        time.sleep(0.02)


def test_local_ranks_meet_and_succeed(tmp_path: Path) -> None:
    program = """
import torch.distributed as dist
from nemo_aligner.utils.console import say
from nemo_aligner.distributed.collectives import gather_objects
from nemo_aligner.distributed.launch import launch
for _ in range(2):
    with launch() as world:
        say(str(gather_objects((world.rank, world.local_rank, world.world_size))))
"""
    once = "[(0, 0, 2), (1, 1, 2)]\n"
    assert run(program, tmp_path) == (0, 2 * once, "")


def test_rank_that_is_ahead_meets_the_others_again_if_rank_0_hosts_the_store(
    tmp_path: Path,
) -> None:
    """Under srun no launcher hosts it, so rank 0 must not end it with its first process group."""
    program = """
import time
from nemo_aligner.distributed import launch as launching
from nemo_aligner.distributed.collectives import gather_objects
from nemo_aligner.utils.console import say
from nemo_aligner.utils.processes import is_first_rank

if is_first_rank():
    destroy = launching.destroy_layout
    launching.destroy_layout = lambda: (time.sleep(1), destroy())
for _ in range(3):
    with launching.launch() as world:
        say(str(gather_objects(world.rank)))
"""
    script = tmp_path / "thrice.py"
    script.write_text(program)
    done = tiny.run_script(str(script), processes=2)
    assert (done.stdout, done.stderr) == (3 * "[0, 1]\n", "")


@pytest.mark.parametrize(
    ("end", "code", "said"),
    [
        ("sys.exit(7)", 7, ""),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "rank 1: it was ended by SIGKILL\n"),
    ],
)
def test_local_rank_that_ends_first_gives_the_exit_code_and_ends_the_others(
    end: str, code: int, said: str, tmp_path: Path
) -> None:
    assert run(f"begin()\nif rank: {end}\ntime.sleep(100)", tmp_path) == (code, "", said)


def test_local_ranks_are_asked_to_stop_once_and_waited_for(tmp_path: Path) -> None:
    """Even if one of them exits at once, with a code other than 0."""
    program = """
asked = []
for order in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
    signal.signal(order, lambda number, frame: asked.append(number))
begin()
while not asked:
    time.sleep(0.01)
if rank == 0:
    sys.exit(9)
time.sleep(0.5)
print("saved after", asked)
"""
    orders = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    started = {}
    hangup = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # these tests may run under nohup
    for order in orders:
        folder = tmp_path / order.name
        folder.mkdir()
        started[order] = start(program, folder)
    signal.signal(signal.SIGHUP, hangup)
    for order, process in started.items():
        wait_for_two(tmp_path / order.name)
        process.send_signal(order)
    # A terminal that is closed sends it twice.
    time.sleep(0.1)
    started[signal.SIGHUP].send_signal(signal.SIGHUP)
    for order, process in started.items():
        out, err = process.communicate(timeout=60)
        assert (process.returncode, out, err) == (9, f"saved after [{int(order)}]\n", "")


def test_local_ranks_asked_twice_to_stop_end_at_once(tmp_path: Path) -> None:
    program = """
signal.signal(signal.SIGINT, lambda number, frame: (folder / f"asked{rank}").touch())
begin()
while True:
    time.sleep(0.1)
"""
    process = start(program, tmp_path)
    wait_for_two(tmp_path)
    process.send_signal(signal.SIGINT)
    while len(list(tmp_path.glob("asked*"))) < 2:
        time.sleep(0.02)
    time.sleep(SECOND_AFTER_S)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (137, "")


def test_local_ranks_are_ended_where_one_cannot_be_started(tmp_path: Path) -> None:
    program = """
from nemo_aligner.distributed import launch
plain, started = launch._start_rank, []
def start(*given):
    if started:
        raise OSError("no more processes")
    started.append(plain(*given))
    return started[0]
launch._start_rank = start
try:
    launch.run_ranks(["-c", "import time; time.sleep(100)"], 2)
except OSError as error:
    print(error, started[0].returncode)
"""
    done = run_code(program)
    assert done.stdout == f"no more processes {-signal.SIGKILL}\n", done.stderr


def test_local_ranks_are_not_told_what_a_launcher_told_this_process(tmp_path: Path) -> None:
    program = """
import json
seen = {key: value for key, value in os.environ.items() if key.startswith("TORCHELASTIC")}
print(json.dumps(seen)) if rank == 0 else None
"""
    told = {"TORCHELASTIC_ERROR_FILE": "error.json", "RANK": "3", "WORLD_SIZE": "4"}
    out, err = start(program, tmp_path, **told).communicate(timeout=120)
    assert out == '{"TORCHELASTIC_USE_AGENT_STORE": "True"}\n', err
