"""Lines that fit the terminal, durations, and progress in a log file."""

from __future__ import annotations

import io
import sys
import threading
import time

import pytest

from nemo_aligner.utils import console
from nemo_aligner.utils.console import (
    Counter,
    Progress,
    fit,
    fit_row,
    join_fields,
    say,
    show_bytes,
    show_duration,
    show_number,
    unfold,
    waiting_for,
    width,
)


def test_a_log_file_has_80_columns_and_a_terminal_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert width() == 80
    monkeypatch.setenv("COLUMNS", "120")
    assert width() == 120
    monkeypatch.setenv("COLUMNS", "7")
    assert width() == 40


def test_lines_break_between_words_and_keep_their_indent() -> None:
    path = "/a/very/long/path/that/no/terminal/has/the/columns/for/" + "x" * 60
    text = f"  wrote {path} with the weights of step 24\nshort, in two-part words"
    assert fit(text).splitlines() == [
        "  wrote",
        f"    {path}",
        "    with the weights of step 24",
        "short, in two-part words",
    ]


def test_a_long_row_of_a_table_goes_on_below_its_text() -> None:
    sources = ", ".join(f"source_{number} {number}" for number in range(12))
    lines = fit_row("  many sources", sources, 28).splitlines()
    assert lines[0].startswith("  many sources".ljust(28) + "source_0 0, ")
    assert all(line.startswith(" " * 28) and line[28] != " " for line in lines[1:])
    assert max(map(len, lines)) <= 80
    assert " ".join(line[28:] for line in lines) == sources
    assert fit_row("  a name of more than its column", 3, 10) == "  a name of more than its column3"


def test_fields_are_never_broken() -> None:
    fields = [f"metric_{number} 0.25" for number in range(8)]
    lines = join_fields(fields, "> ", "    ").splitlines()
    assert [line[:4] for line in lines] == ["> me", "    "]
    assert max(map(len, lines)) <= 80
    assert "  ".join(line.lstrip("> ") for line in lines) == "  ".join(fields)
    assert unfold(f"before\n{join_fields(fields)}\nafter") == ["before", "  ".join(fields), "after"]


def test_durations_numbers_and_sizes_are_short() -> None:
    durations = {
        0.2: "0 s", 89.4: "89 s", 90: "2 min", 3540: "59 min", 3590: "1 h 0 min",
        7260: "2 h 1 min", 172000: "47 h 47 min", 180000: "2 d 2 h",
    }  # fmt: skip
    assert {seconds: show_duration(seconds) for seconds in durations} == durations
    values = (0.6931472, 1.97e-05, 65536.0, 123456.7, 3e12, 1.0, float("nan"))
    assert [show_number(value) for value in values] == [
        *("0.6931", "1.97e-05", "65536", "123457", "3e+12", "1", "nan"),
    ]
    assert [show_bytes(count) for count in (95.2e6, 1.6e10)] == ["95.2 MB", "16.0 GB"]


def test_long_work_says_how_far_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    now = 50.0
    counter = Counter("validation", "pairs", clock=lambda: now)
    counter.show(0, 423)
    for done in range(10, 423, 10):
        now += 4.0
        counter.show(done, 423)
    counter.show(423, 423)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "validation: 30 of 423 pairs, 3 min left"
    assert lines[-1] == "validation: 420 of 423 pairs, 1 s left"
    assert len(lines) == 14
    assert console.LINE_SECONDS == 10
    quick = Counter("validation", "pairs")
    for done in range(100):
        quick.show(done, 99)
    quick.close()
    assert capsys.readouterr().out == ""


def test_bar_is_there_from_the_start_and_says_what_is_at_work_beside(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", terminal)

    def shown() -> str:
        return terminal.getvalue().rpartition("\r")[2]

    counter = Counter("validation", "records")
    counter.show(0, 20)
    assert shown().startswith("validation   0%|")
    assert shown().endswith("| 0/20")
    counter.show(20, 20)
    assert shown().strip() == ""
    counter.show(0, 0)
    progress = Progress("train", 4, clock=lambda: 0.0)
    progress.move(2)
    assert shown().endswith("| 2/4, 0 s left")
    progress.mention("saving")
    assert shown().endswith("| 2/4, 0 s left, saving")
    progress.move(4)
    assert shown().rstrip().endswith("| 4/4, saving")
    progress.mention(None)
    assert shown().rstrip().endswith("| 4/4")
    progress.close()


def test_work_without_a_measure_says_how_long_it_takes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines: list[str] = []
    enough = threading.Event()

    def tell(text: str) -> None:
        lines.append(text)
        if len(lines) == 2:
            enough.set()

    with waiting_for("loading", tell, first=0.01):
        assert enough.wait(10)
    count = len(lines)
    assert lines[:2] == ["loading (0 s)", "loading (0 s)"]
    time.sleep(0.1)
    assert len(lines) == count
    # Work that ends soon prints nothing, and a log file gets lines unwrapped.
    lines.clear()
    with pytest.raises(KeyError), waiting_for("loading", lines.append):
        raise KeyError
    assert lines == []
    say("word " * 40)
    assert capsys.readouterr().out == "word " * 40 + "\n"
