"""What a run shows, in a log file of 80 columns."""

from __future__ import annotations

from pathlib import Path

import pytest

from nemo_aligner.checkpoint.runs import RunState, Saved
from nemo_aligner.training.console import StepProgress, render_best, render_validation

STEP = {
    "train/loss": 0.693147,
    "train/accuracy": 0.875,
    "train/grad_norm": 12.3456,
    "train/lr": 1.97e-05,
    "train/tokens_per_second": 123456.7,
}


def steps_shown(total: int, output: str) -> list[int]:
    lines = [line for line in output.splitlines() if line.startswith("step ")]
    assert all(f"/{total}" in line for line in lines)
    return [int(line.split()[1].partition("/")[0]) for line in lines]


def test_steps_of_a_short_run_are_shown_each(capsys: pytest.CaptureFixture[str]) -> None:
    for total, start, shown in (
        (5, 0, [1, 2, 3, 4, 5]),
        (100, 95, [96, 97, 98, 99, 100]),
        (100, 0, [1, 100]),
        (100, 40, [41, 100]),
    ):
        progress = StepProgress(total, start, 10)
        for step in range(start + 1, total + 1):
            progress.show(step, STEP)
        progress.close()
        assert steps_shown(total, capsys.readouterr().out) == shown


def test_line_of_a_step_wraps_and_loses_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    progress = StepProgress(1000, 0, 10)
    progress.show(1, STEP)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[1].startswith("  ")
    assert lines[0].startswith("step 1/1000  ")
    shown = " ".join(" ".join(lines).split())
    assert shown.endswith(
        "left loss 0.6931 accuracy 0.875 grad_norm 12.35 lr 1.97e-05 123457 tokens/s"
    )


def test_line_of_a_step_has_speed_device_and_the_best_checkpoint(
    capsys: pytest.CaptureFixture[str],
) -> None:
    saved = Saved(Path("step_00000500"), RunState(500, 4000, {"validation-heldout/accuracy": 0.71}))
    best = render_best(saved, "validation-heldout/accuracy")
    gauges = {"train/mfu": 0.4123, "train/gpu_memory_gb": 61.23, "train/gpu_power_watts": 652.4}
    StepProgress(1000, 0, 10).show(1, {**STEP, **gauges}, best)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    shown = " ".join(" ".join(lines).split())
    ending = "123457 tokens/s MFU 41.2% GPU 61.2 GB 652 W best accuracy 0.71 at step 500"
    assert shown.endswith(ending)
    assert render_best(None, "validation-heldout/accuracy") is None


def test_time_left_counts_steps_and_validations() -> None:
    now = 100.0
    progress = StepProgress(10, 0, 4)
    progress._now = lambda: now
    progress.begin()
    now += 4.0
    assert progress.seconds_left(2) == 16.0
    now += 4.0 + 30.0  # two steps, and a validation
    progress.add_validation(30.0)
    assert progress.seconds_left(4) == 6 * 2.0 + 2 * 30.0


def test_time_left_knows_of_a_validation_before_the_first_step() -> None:
    now = 100.0
    progress = StepProgress(10, 0, None)
    progress._now = lambda: now
    now += 30.0
    progress.add_validation(30.0)
    progress.begin()
    now += 5.0
    assert progress.seconds_left(5) == 5.0 + 30.0


def test_validation_is_told_set_by_set() -> None:
    names = ("loss", "accuracy", "ties", "reward_margin", "ece", "brier")
    lengths = ("accuracy_longer_chosen", "accuracy_shorter_chosen")
    metrics = {f"validation-pairs/{name}": 0.25 for name in (*names, *lengths)}
    metrics |= {f"validation-pairs/by_source/source {n}/accuracy": 0.5 for n in range(5)}
    metrics |= {"validation-pairs/by_source/source 1/loss": 0.1, "validation-more/loss": 0.75}
    assert render_validation(24, metrics).splitlines() == [
        "step 24: validation-pairs",
        "  loss 0.25  accuracy 0.25  ties 0.25  reward_margin 0.25  ece 0.25",
        "  accuracy_longer_chosen 0.25  accuracy_shorter_chosen 0.25",
        "  accuracy by source:  source 0 0.500  source 1 0.500  source 2 0.500",
        "    source 3 0.500  source 4 0.500",
        "step 24: validation-more",
        "  loss 0.75",
    ]
