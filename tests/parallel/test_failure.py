"""Several ranks fail, and one error is shown, once: the first."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests import tiny
from tests.launching import ROOT, free_port, rank_environment

SCRIPT = "tests/parallel/failing.py"
START = (
    "import sys; from nemo_aligner.parallel.local import run_ranks; "
    "sys.exit(run_ranks(sys.argv[2:], int(sys.argv[1])))"
)


def fail(who: str, what: str) -> tuple[int, str]:
    """What two local ranks end with, and say."""
    command = [sys.executable, "-c", START, "2", SCRIPT, who, what]
    done = subprocess.run(
        command, capture_output=True, text=True, env=tiny.environment(), cwd=ROOT, timeout=120
    )
    assert done.stdout == ""
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("who", "what", "line"),
    [
        ("1", "data", "rank 1: DataError: a.jsonl:3: got 3\n"),
        ("01", "data", "DataError: a.jsonl:3: got 3\n"),
        ("01", "early", "ConfigError: model.x: got 3\n"),
        ("1", "early", "rank 1: ConfigError: model.x: got 3\n"),
    ],
)
def test_failing_ranks_say_one_line(who: str, what: str, line: str) -> None:
    """That rank 0 alone does so, too, is tried without a launcher, below."""
    assert fail(who, what) == (1, line)


def test_failing_ranks_with_different_errors_say_one_of_them() -> None:
    code, said = fail("01", "different")
    assert code == 1
    assert re.fullmatch(r"rank ([01]): DataError: \1\.jsonl:3: got 3\n", said)


def test_failing_rank_says_one_screen_of_a_bug() -> None:
    code, said = fail("1", "bug")
    assert code == 1
    assert said.startswith("rank 1: unexpected ZeroDivisionError: a bug\n")
    assert said.count("\n") == 2
    assert "[rank0]" not in said


def test_rank_that_exits_keeps_its_code_and_the_others_are_silent() -> None:
    assert fail("1", "exit") == (3, "")


def fail_unattended(who: str, what: str) -> list[tuple[int, str]]:
    """What each of two ranks ends with, and says, where rank 0 keeps the store, as under srun.

    Nobody ends the other one.
    """
    port = free_port()
    ranks = [
        subprocess.Popen(
            [sys.executable, SCRIPT, who, what],
            stderr=subprocess.PIPE,
            text=True,
            env=tiny.environment(**rank_environment(rank, 2, port)),
            cwd=ROOT,
        )
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=120)[1] for rank in ranks]
    return [(rank.returncode, words) for rank, words in zip(ranks, said, strict=True)]


@pytest.mark.parametrize("who", [0, 1])
def test_failing_rank_says_one_line_without_a_launcher_that_ends_the_others(who: int) -> None:
    ends = [(1, ""), (1, "")]
    ends[who] = (1, f"rank {who}: DataError: a.jsonl:3: got 3\n")
    assert fail_unattended(str(who), "data") == ends


def test_lost_rank_is_an_error_where_nobody_else_says_so() -> None:
    """What started it would say that, see test_local."""
    (code, said), (killed, _) = fail_unattended("1", "killed")
    wanted = "rank 0: LostRankError: another rank ended without a word, as if it was killed: Conn"
    assert said.startswith(wanted)
    assert (code, killed, said.count("\n")) == (1, -9, 1)


def test_failing_rank_is_in_the_last_lines_of_torchrun() -> None:
    done = tiny.run_script(SCRIPT, "1", "data", processes=2, check=False, fresh=True)
    line = "rank 1: DataError: a.jsonl:3: got 3"
    assert done.stderr.splitlines()[0] == line
    assert line in "\n".join(done.stderr.splitlines()[-2:])
    assert done.stderr.count(line) == 2
    assert done.stderr.count("Traceback") == 1  # torchrun's own
