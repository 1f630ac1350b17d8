"""If several ranks fail, only the first error is shown, and only once."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.harness import tiny
from tests.harness.launching import ROOT, free_port, rank_environment, run_local_ranks

SCRIPT = "tests/distributed/failing.py"


@pytest.mark.parametrize(
    ("who", "what", "code", "said"),
    [
        ("1", "data", 1, r"rank 1: DataError: a\.jsonl:3: got 3\n"),
        ("01", "data", 1, r"DataError: a\.jsonl:3: got 3\n"),
        ("01", "early", 1, r"ConfigError: model\.x: got 3\n"),
        ("1", "early", 1, r"rank 1: ConfigError: model\.x: got 3\n"),
        ("01", "different", 1, r"rank ([01]): DataError: \1\.jsonl:3: got 3\n"),
        # A bug takes one screen: what happened, and where the traceback is.
        ("1", "bug", 1, r"rank 1: unexpected ZeroDivisionError: a bug\n  in .*\n"),
        # All ranks get the error of ``raise_everywhere``, so it names none.
        ("1", "bug for all", 1, r"unexpected ZeroDivisionError: a bug\n  in .*\n"),
        ("1", "exit", 3, ""),
        ("1", "exit in thread", 3, ""),
    ],
    ids=lambda value: "" if isinstance(value, int) or ":" in value else None,
)
def test_failing_ranks_say_one_error_once(who: str, what: str, code: int, said: str) -> None:
    """A failure of only rank 0 is tested below, without a launcher."""
    done = run_local_ranks([SCRIPT, who, what], tiny.environment())
    assert (done.returncode, done.stdout) == (code, "")
    assert re.fullmatch(said, done.stderr), done.stderr


def fail_unattended(who: str, what: str) -> list[tuple[int, str]]:
    """How two ranks end and what they print if rank 0 hosts the store, like under srun.

    No launcher ends the other rank.
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
    # Where rank 0 and its store end first, torch may print a warning of the other, with its stack.
    said = [words.partition("[W")[0].removesuffix("[rank1]:") for words in said]
    return [(rank.returncode, words) for rank, words in zip(ranks, said, strict=True)]


@pytest.mark.parametrize("who", [0, 1])
def test_failing_rank_says_one_line_without_a_launcher_that_ends_the_others(who: int) -> None:
    ends = [(1, ""), (1, "")]
    ends[who] = (1, f"rank {who}: DataError: a.jsonl:3: got 3\n")
    assert fail_unattended(str(who), "data") == ends


def test_lost_rank_is_an_error_where_nobody_else_says_so() -> None:
    """A launcher would report it, too; see test_local_ranks.py."""
    (code, said), (killed, _) = fail_unattended("1", "killed")
    wanted = "rank 0: LostRankError: another rank died without an error"
    assert said.startswith(wanted)
    assert (code, killed, said.count("\n")) == (1, -9, 1)


def test_failing_rank_is_in_the_last_lines_of_torchrun() -> None:
    done = tiny.run_script(SCRIPT, "1", "data", processes=2, check=False, fresh=True)
    line = "rank 1: DataError: a.jsonl:3: got 3"
    assert done.stderr.splitlines()[0] == line
    assert line in "\n".join(done.stderr.splitlines()[-2:])
    assert done.stderr.count(line) == 2
    assert done.stderr.count("Traceback") == 1  # the one of torchrun
