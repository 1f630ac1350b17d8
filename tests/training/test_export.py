"""What a run says of the model that comes out of it."""

from __future__ import annotations

from pathlib import Path

from nemo_aligner.checkpoint.runs import RunCheckpoints, RunState, Saved
from nemo_aligner.training.export import render_candidates


def saved(step: int, **metrics: float) -> Saved:
    named = {f"validation-pairs/{name}": value for name, value in metrics.items()}
    return Saved(Path(f"step_{step:08d}"), RunState(step, step * 8, named))


def test_the_candidates_are_listed_with_what_decided() -> None:
    checkpoints = RunCheckpoints("checkpoints", "validation-pairs/accuracy", save_top_k=2)
    ranked = [saved(24, accuracy=1.0, loss=0.07), saved(5, accuracy=1.0, loss=0.565)]
    assert render_candidates(checkpoints, ranked, saved(30)).splitlines() == [
        "checkpoints, by validation-pairs/accuracy,",
        "  equals by validation-pairs/loss:",
        "  step 24      accuracy 1  loss 0.07  (chosen)",
        "  step 5       accuracy 1  loss 0.565",
        "  step 30      not validated",
    ]


def test_a_loss_is_listed_once() -> None:
    checkpoints = RunCheckpoints("checkpoints", "validation-pairs/loss")
    newest = saved(9, loss=0.25, accuracy=0.5)
    assert render_candidates(checkpoints, [newest], newest).splitlines() == [
        "checkpoints, by validation-pairs/loss:",
        "  step 9       loss 0.25  (chosen)",
    ]


def test_without_a_validation_the_newest_is_chosen() -> None:
    shown = render_candidates(RunCheckpoints("checkpoints"), [], saved(9))
    assert shown.splitlines() == [
        "checkpoints:",
        "  step 9       not validated  (chosen)",
    ]


def test_few_of_many_are_listed() -> None:
    checkpoints = RunCheckpoints("checkpoints", "validation-pairs/accuracy")
    ranked = [saved(step, accuracy=1 / step, loss=0.5) for step in range(1, 31)]
    lines = render_candidates(checkpoints, ranked, ranked[29]).splitlines()
    assert len(lines) == 11
    assert lines[-1] == "  and 22 that are not as good"
