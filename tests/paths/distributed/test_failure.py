"""If several ranks fail, only the first error is shown, and only once."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.harness import tiny
from tests.harness.launching import free_port, rank_environment, run_local_ranks, start_script

SCRIPT = "tests/distributed/failing.py"


@pytest.mark.parametrize(
    ("who", "what", "said"),
    [
        ("1", "data", r"rank 1: DataError: a\.jsonl:3: got 3\n"),
        ("01", "data", r"DataError: a\.jsonl:3: got 3\n"),
        ("01", "early", r"ConfigError: model\.x: got 3\n"),
        ("1", "early", r"rank 1: ConfigError: model\.x: got 3\n"),
        ("01", "different", r"rank ([01]): DataError: \1\.jsonl:3: got 3\n"),
        # A bug takes one screen: what happened, and where the traceback is.
        ("1", "bug", r"rank 1: unexpected ZeroDivisionError: a bug\n  in .*\n"),
        # All ranks get the error of ``raise_everywhere``, so it names none.
        ("1", "bug for all", r"unexpected ZeroDivisionError: a bug\n  in .*\n"),
    ],
    ids=lambda value: None if ":" not in value else "",
)
def test_failing_ranks_say_one_error_once(who: str, what: str, said: str) -> None:
    """A failure of only rank 0 is tested below, without a launcher."""
    done = tiny.run_script(SCRIPT, who, what, processes=2, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(said, done.stderr), done.stderr


@pytest.mark.parametrize(
    ("what", "code", "said"),
    [
        ("data", 1, "rank 1: DataError: a.jsonl:3: got 3\n"),
        ("exit", 3, ""),
    ],
    ids=["data", "exit"],
)
def test_own_launcher_adds_nothing_to_the_error_and_has_its_exit_code(
    what: str, code: int, said: str
) -> None:
    done = run_local_ranks([SCRIPT, "1", what], tiny.environment())
    assert (done.returncode, done.stdout, done.stderr) == (code, "", said)


def fail_unattended(who: str, what: str, folder: Path) -> list[tuple[int, str]]:
    """How two ranks end and what they print if rank 0 hosts the store, like under srun.

    No launcher ends the other rank.
    """
    port = free_port()
    outputs = [folder / f"rank{rank}" for rank in range(2)]
    ranks = [
        start_script(
            [str(tiny.ROOT / SCRIPT), who, what],
            tiny.environment(),
            [rank_environment(rank, 2, port)],
            output,
        )[0]
        for rank, output in enumerate(outputs)
    ]
    codes = [rank.wait(timeout=120) for rank in ranks]
    # Where rank 0 and its store end first, torch may print a warning of the other, with its stack.
    said = [output.read_text().partition("[W")[0].removesuffix("[rank1]:") for output in outputs]
    return list(zip(codes, said, strict=True))


@pytest.mark.parametrize("who", [0, 1])
def test_failing_rank_says_one_line_without_a_launcher_that_ends_the_others(
    who: int, tmp_path: Path
) -> None:
    ends = [(1, ""), (1, "")]
    ends[who] = (1, f"rank {who}: DataError: a.jsonl:3: got 3\n")
    assert fail_unattended(str(who), "data", tmp_path) == ends


def test_exit_in_a_thread_is_the_exit_of_all_ranks(tmp_path: Path) -> None:
    assert fail_unattended("1", "exit in thread", tmp_path) == [(3, ""), (3, "")]


def test_lost_rank_is_an_error_where_nobody_else_says_so(tmp_path: Path) -> None:
    """A launcher would report it, too; see test_local_ranks.py."""
    (code, said), (killed, _) = fail_unattended("1", "killed", tmp_path)
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
