"""Names, ranking and leftovers of checkpoints; tests of complete runs compare their content."""

from __future__ import annotations

import errno
import json
import logging
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from nemo_aligner.checkpoint import run
from nemo_aligner.checkpoint.run import RunCheckpoints, RunState, Saved, check_same_run
from nemo_aligner.checkpoint.safe_load import read_json
from nemo_aligner.config.training import MonitorMode
from nemo_aligner.distributed.launch import launch
from nemo_aligner.training.resume import resumed_state
from nemo_aligner.utils.errors import CheckpointError
from tests.checkpoint.refusals import refusals

NAN = float("nan")


class Model:
    """A model without weights."""

    def sharded_state_dict(self, *unused: Any, **options: Any) -> dict[str, Any]:
        return {}

    def load_state_dict(self, *unused: Any, **options: Any) -> Any:
        return [], []


class Optimizer:
    def sharded_state_dict(self, *unused: Any, **options: Any) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any], step: int) -> None:
        raise NotImplementedError

    def finish_update(self) -> None:
        pass


class Written:
    """A save that is written at once, or when the test says so."""

    is_written = True
    error: str | None = None

    def __init__(self, state: dict[str, Any], folder: Path, arrived: Any) -> None:
        self.folder = folder

    def finish(self) -> None:
        if self.error is not None:
            raise CheckpointError(self.error)
        self.folder.mkdir()
        (self.folder / "weights").write_text("")


@pytest.fixture(autouse=True)
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(run, "PendingSave", Written)
    with launch():
        yield


def save(checkpoints: RunCheckpoints, values: dict[int, float | None]) -> list[int]:
    """Save a checkpoint at every step with its metric, and list the remaining steps."""
    for step, value in values.items():
        metrics = {} if value is None else {"validation/accuracy": value}
        checkpoints.save(RunState(step, step * 8, metrics), Model(), Optimizer())
    return steps(checkpoints.list_saved())


def steps(checkpoints: Iterable[Saved]) -> list[int]:
    return [saved.state.step for saved in checkpoints]


def test_runs_keep_the_newest_and_the_best(tmp_path: Path) -> None:
    cases: list[tuple[int, MonitorMode, dict[int, float | None], list[int], int | None]] = [
        (1, MonitorMode.max, {1: 0.5, 2: 0.7, 3: 0.6}, [2, 3], 2),
        (1, MonitorMode.max, {1: 0.5, 2: 0.5, 3: 0.5}, [1, 3], 1),
        (2, MonitorMode.min, {1: 0.5, 2: 0.7, 3: 0.6, 4: 0.9}, [1, 3, 4], 1),
        (1, MonitorMode.max, {1: 0.5, 2: None, 3: NAN, 4: None}, [1, 4], 1),
        (1, MonitorMode.max, {1: None, 2: NAN}, [2], None),
        (3, MonitorMode.max, {1: 0.5, 2: 0.7}, [1, 2], 2),
        (0, MonitorMode.max, {1: 0.5, 2: 0.4}, [2], None),
    ]
    for number, (top_k, mode, values, left, expected) in enumerate(cases):
        checkpoints = RunCheckpoints(tmp_path / str(number), "validation/accuracy", mode, top_k)
        assert save(checkpoints, values) == left, cases[number]
        latest, best = checkpoints.latest(), checkpoints.best()
        assert latest is not None
        assert latest.state.step == max(values)
        assert (best.state.step if best else None) == expected, cases[number]


def test_runs_of_equals_prefer_the_lower_loss_of_that_set(tmp_path: Path) -> None:
    cases: list[tuple[dict[int, float | None], list[int], int]] = [
        ({5: 0.565, 24: 0.070, 25: 0.090}, [24, 25], 24),
        ({1: NAN, 2: 0.9, 3: None}, [2, 3], 2),
        ({1: 0.5, 2: 0.5}, [1, 2], 1),
    ]
    for number, (losses, left, best) in enumerate(cases):
        checkpoints = RunCheckpoints(tmp_path / str(number), "one/accuracy")
        for step, loss in losses.items():
            metrics = {"one/accuracy": 1.0, "other/loss": float(step)}
            metrics |= {} if loss is None else {"one/loss": loss}
            is_better = checkpoints.is_among_best(metrics)
            checkpoints.save(RunState(step, step * 8, metrics), Model(), Optimizer())
            leader = checkpoints.best()
            assert leader is not None
            assert is_better == (leader.state.step == step)
        assert steps(checkpoints.list_saved()) == left
        assert leader.state.step == best
        assert set(steps(checkpoints.candidates())) == set(losses)
        assert checkpoints.candidates()[0].state.step == best
        by_rank = sorted(left, key=lambda step: (step != best, step))
        assert steps(checkpoints.ranked()) == by_rank


def test_run_state_is_strict_json(tmp_path: Path) -> None:
    checkpoints = RunCheckpoints(tmp_path)
    metrics = {"one/accuracy": 0.5, "one/temperature": NAN, "one/brier": float("inf")}
    config = {"trainer": {"clip": float("inf"), "betas": [0.9, NAN]}}
    checkpoints.save(RunState(3, 24, metrics, config, config), Model(), Optimizer())
    saved = checkpoints.latest()
    assert saved is not None
    path = saved.path / "run_state.json"
    assert read_json(path, "state")["metrics"] == {
        "one/accuracy": 0.5,
        "one/temperature": None,
        "one/brier": None,
    }
    assert str(saved.state.metrics) == str({**metrics, "one/brier": NAN})
    check_same_run(saved, config)


def test_runs_leftovers_are_no_checkpoints(tmp_path: Path) -> None:
    checkpoints = RunCheckpoints(tmp_path)
    assert checkpoints.latest() is None
    save(checkpoints, {1: None})
    (tmp_path / "step_00000002.partial" / "state").mkdir(parents=True)
    (tmp_path / "step_00000000.removed").mkdir()
    (tmp_path / ".megatron_gpt.nemo.partial").write_text("of another writer")
    assert steps(checkpoints.list_saved()) == [1]
    checkpoints.clean()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".megatron_gpt.nemo.partial",
        "step_00000001",
    ]


def test_run_state_comes_back_also_of_before_runs_could_end_early(tmp_path: Path) -> None:
    checkpoints = RunCheckpoints(tmp_path)
    config = {"model": {"seed": 1}}
    state = RunState(3, 24, {"a": 1.5}, {"model.seed": 1}, config, {"hash": "x"}, 0.5, 2)
    state = replace(state, validated_on={"one": "digest"})
    checkpoints.save(state, Model(), Optimizer())
    saved = checkpoints.latest()
    assert saved == Saved(tmp_path / "step_00000003", state)
    file = saved.path / "run_state.json"
    content = json.loads(file.read_text())
    assert (content.pop("best_value"), content.pop("validations_since_best")) == (0.5, 2)
    assert content.pop("validated_on") == {"one": "digest"}
    file.write_text(json.dumps(content))
    older = replace(state, best_value=None, validations_since_best=0, validated_on=None)
    assert checkpoints.latest() == Saved(saved.path, older)


def test_runs_pending_checkpoint_has_no_name_but_counts(tmp_path: Path) -> None:
    checkpoints = RunCheckpoints(tmp_path, "validation/accuracy")
    assert checkpoints.publish() is None
    state = RunState(3, 24, {"validation/accuracy": 0.5})
    checkpoints.save(state, Model(), Optimizer())
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000003.partial"]
    assert not checkpoints.is_among_best({"validation/accuracy": 0.5})
    assert checkpoints.is_among_best({"validation/accuracy": 0.6})
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000003.partial"]
    assert checkpoints.publish() == Saved(tmp_path / "step_00000003", state)
    assert checkpoints.publish() is None
    # The next save publishes the previous one.
    for step in (4, 5):
        checkpoints.save(RunState(step, step * 8), Model(), Optimizer())
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"step_00000003", "step_00000004", "step_00000005.partial"}
    assert steps(checkpoints.list_saved()) == [3, 5]


def test_runs_tell_once_of_a_write_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = RunCheckpoints(tmp_path)
    checkpoints.save(RunState(1, 8), Model(), Optimizer())
    checkpoints.publish()
    monkeypatch.setattr(Written, "error", "disk full")
    checkpoints.save(RunState(2, 16), Model(), Optimizer())
    with pytest.raises(CheckpointError, match="disk full"):
        checkpoints.publish()
    assert checkpoints.publish() is None
    assert steps(checkpoints.list_saved()) == [1]
    # The next save replaces what this one left behind.
    monkeypatch.setattr(Written, "error", None)
    assert not (tmp_path / "step_00000002.partial").exists()
    (tmp_path / "step_00000002.partial" / "state").mkdir(parents=True)
    assert save(checkpoints, {2: None}) == [2]


def test_runs_go_on_if_an_old_checkpoint_cannot_be_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints = RunCheckpoints(tmp_path)

    def refuse(path: Path, ignore_errors: bool = False) -> None:
        if not ignore_errors:
            raise OSError(errno.ENOTEMPTY, "Directory not empty", f"{path}/state")

    with monkeypatch.context() as patched, caplog.at_level(logging.WARNING):
        patched.setattr(shutil, "rmtree", refuse)
        assert save(checkpoints, {1: None, 2: None, 3: None}) == [3]
        assert checkpoints._deletion is not None
        checkpoints._deletion.result()
        left = [tmp_path / f"step_0000000{step}.removed" for step in (1, 2)]
        problem = "cannot be deleted: [Errno 39] Directory not empty: "
        assert caplog.messages == [f"{path}: {problem}'{path}/state'" for path in left]
        caplog.clear()
        checkpoints.clean()  # as at the next start
        assert len(caplog.messages) == 2
        caplog.clear()
        # A checkpoint that cannot be renamed stays.
        patched.setattr(run, "_rename_removed", refuse)
        assert save(checkpoints, {4: None}) == [3, 4]
        assert caplog.messages == [
            f"{tmp_path}/step_00000003: {problem}'{tmp_path}/step_00000003/state'"
        ]
    checkpoints.clean()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000003", "step_00000004"]


def test_run_state_that_is_spoilt_is_named(tmp_path: Path) -> None:
    checkpoints = RunCheckpoints(tmp_path)
    checkpoints.save(RunState(3, 24), Model(), Optimizer())
    checkpoints.publish()
    with refusals() as refused:
        for text in ("", "[]", "{}", '{"version": 9}', '{"version": 1, "step": 3}'):
            (tmp_path / "step_00000003" / "run_state.json").write_text(text)
            with refused(text, r"step_00000003/run_state\.json"):
                checkpoints.latest()


def test_resume_of_another_run_is_refused_with_both_values(tmp_path: Path) -> None:
    fingerprint = {"model.seed": 1, "training records": 37, "model.rope_scaling": None}
    saved = Saved(tmp_path, RunState(3, 24, fingerprint=json.loads(json.dumps(fingerprint))))
    check_same_run(saved, fingerprint)
    with pytest.raises(CheckpointError) as caught:
        check_same_run(saved, {**fingerprint, "model.seed": 2, "training records": 36})
    assert "model.seed: the checkpoint has 1, this run 2" in str(caught.value)
    assert "training records: the checkpoint has 37, this run 36" in str(caught.value)
    assert "rope" not in str(caught.value)


def test_runs_rank_what_was_validated_on_other_records_behind(tmp_path: Path) -> None:
    """Metrics on other validation records rank last: 0.9 on 10 records is not better than 0.6."""
    ten, all_of_them = ({"trainer": {"rm": {"limit_val_records": count}}} for count in (10, None))

    def judged(step: int, value: float, config: dict[str, Any]) -> RunState:
        return RunState(step, 8 * step, {"validation/accuracy": value}, config=config)

    checkpoints = RunCheckpoints(tmp_path, "validation/accuracy", save_top_k=2)
    checkpoints.save(judged(1, 0.9, ten), Model(), Optimizer())
    assert steps(checkpoints.ranked()) == [1]
    checkpoints.compare_with(RunState(0, 0, config=all_of_them))
    assert steps(checkpoints.ranked()) == [1]  # there is no other checkpoint yet
    assert checkpoints.is_among_best({"validation/accuracy": 0.1})
    for step, value in ((2, 0.5), (3, 0.6)):
        checkpoints.save(judged(step, value, all_of_them), Model(), Optimizer())
    assert steps(checkpoints.ranked()) == [3, 2, 1]
    values = {0.55: True, 0.5: False, 0.4: False, NAN: False}
    are_best = {
        value: checkpoints.is_among_best({"validation/accuracy": value}) for value in values
    }
    assert are_best == values
    assert not checkpoints.is_among_best({})


def test_runs_rank_by_the_digests_of_what_was_validated(tmp_path: Path) -> None:
    """Digests decide: files with equal names may differ, files with other names may be equal."""

    def judged(step: int, value: float, digest: str | None, file: str = "a") -> RunState:
        config = {"model": {"data": {"data_prefix": {"validation": [file]}}}}
        digests = None if digest is None else {"validation": digest}
        metrics = {"validation/accuracy": value}
        return RunState(step, 8 * step, metrics, config=config, validated_on=digests)

    checkpoints = RunCheckpoints(tmp_path, "validation/accuracy", save_top_k=4)
    states = [
        judged(1, 0.9, "old"),
        judged(2, 0.6, "new", file="moved"),
        judged(3, 0.7, None),  # a state of an earlier version
        judged(4, 0.8, None, file="b"),
    ]
    for state in states:
        checkpoints.save(state, Model(), Optimizer())
    checkpoints.compare_with(judged(0, 0.0, "new"))
    assert steps(checkpoints.ranked()) == [3, 2, 1, 4]
    comparable = filter(checkpoints.is_comparable, checkpoints.list_saved())
    assert steps(comparable) == [2, 3]
    leader = checkpoints.leader()
    assert leader is not None
    assert leader.state.step == 3
    checkpoints.compare_with(judged(0, 0.0, "newer"))
    shutil.rmtree(tmp_path / "step_00000003")
    assert checkpoints.leader() is None


def test_runs_compare_the_records_of_the_monitored_set_and_keep_the_best_on_each(
    tmp_path: Path,
) -> None:
    def judged(step: int, value: float, **digests: str) -> RunState:
        return RunState(step, 8 * step, {"one/accuracy": value}, validated_on=digests)

    checkpoints = RunCheckpoints(tmp_path, "one/accuracy")

    def save_all(*states: RunState) -> list[int]:
        checkpoints.compare_with(states[0])
        for state in states:
            checkpoints.save(state, Model(), Optimizer())
        return steps(checkpoints.list_saved())

    assert save_all(judged(1, 0.9, one="a"), judged(2, 0.5, one="a")) == [1, 2]
    # A set that is added, and is even the first, changes nothing.
    assert save_all(judged(3, 0.8, two="b", one="a")) == [1, 3]
    assert steps(filter(checkpoints.is_comparable, checkpoints.ranked())) == [1, 3]
    # On other records, the best one before is neither the best nor deleted.
    assert save_all(judged(4, 0.3, one="c"), judged(5, 0.4, one="c")) == [1, 5]
    assert steps(checkpoints.ranked()) == [5, 1]


def test_runs_know_a_set_by_its_records_and_delete_no_best_one_of_an_earlier_time(
    tmp_path: Path,
) -> None:
    """Another file may rename a set, and a run may be ranked by another metric, or by none."""

    def resume(
        monitor: str | None, digests: dict[str, str], values: dict[int, float]
    ) -> RunCheckpoints:
        checkpoints = RunCheckpoints(tmp_path, monitor)
        checkpoints.compare_with(RunState(0, 0, validated_on=digests))
        for step, value in values.items():
            pair = {"accuracy": value, "margin": -value}
            metrics = {f"{name}/{key}": pair[key] for name in digests for key in pair}
            state = RunState(step, 8 * step, metrics, validated_on=digests)
            checkpoints.save(state, Model(), Optimizer())
        return checkpoints

    resume("test/accuracy", {"test": "a"}, {1: 0.9, 2: 0.5})
    # The names move by one, so that an old name is now that of other records.
    moved = {"first": "b", "test_1": "a", "test": "c"}
    checkpoints = resume("test_1/accuracy", moved, {3: 0.8})
    ranked = checkpoints.ranked()
    assert steps(ranked) == [1, 3]
    assert ranked[0].state.metrics == {"test_1/accuracy": 0.9, "test_1/margin": -0.9}
    assert all(map(checkpoints.is_comparable, ranked))
    assert not checkpoints.is_among_best({"test_1/accuracy": 0.85})
    # A metric of a new set only, no validation at all, and another metric of a known set.
    assert steps(resume("more/accuracy", {"more": "d"}, {4: 0.1, 5: 0.2}).list_saved()) == [1, 5]
    assert steps(resume(None, {}, {6: 0.0, 7: 0.0}).list_saved()) == [1, 5, 7]
    checkpoints = resume("more/margin", {"more": "d"}, {8: 0.1, 9: 0.15})
    assert steps(checkpoints.list_saved()) == [1, 5, 8, 9]
    assert steps(checkpoints.ranked()) == [8, 9, 5]


def test_runs_take_the_metrics_of_a_validation_that_came_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = RunCheckpoints(tmp_path, "validation/accuracy")
    assert save(checkpoints, {2: 0.5, 4: None}) == [2, 4]
    state = RunState(4, 32, {"validation/accuracy": 0.7}, best_value=0.7)
    checkpoints.amend(state)
    latest = RunCheckpoints(tmp_path, "validation/accuracy").latest()
    assert latest is not None
    assert latest.state == state
    assert steps(checkpoints.list_saved()) == [4]  # the other one was deleted
    assert sorted(path.name for path in latest.path.iterdir()) == ["run_state.json", "state"]
    with pytest.raises(CheckpointError, match=r"step_00000005.*: there is no such file"):
        checkpoints.amend(RunState(5, 40))
    full = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    monkeypatch.setattr(run, "format_state", full)
    with pytest.raises(CheckpointError, match="step_00000004: not saved: the disk is full"):
        checkpoints.amend(state)


@pytest.mark.parametrize(("mode", "sign"), [(MonitorMode.max, 1), (MonitorMode.min, -1)])
def test_runs_keep_the_best_one_although_it_is_validated_again_on_other_records(
    mode: MonitorMode, sign: int, tmp_path: Path
) -> None:
    """The best one is often the newest, which a resumed run validates again."""

    def resume(
        digest: str, values: dict[int, float], top_k: int = 1, mode: MonitorMode = mode
    ) -> tuple[RunCheckpoints, int]:
        checkpoints = RunCheckpoints(tmp_path, "v/accuracy", mode, top_k)
        fresh, latest = RunState(0, 0, validated_on={"v": digest}), checkpoints.latest()
        start = fresh if latest is None else resumed_state(fresh, latest.state, "v/accuracy")
        checkpoints.compare_with(fresh)
        for step, value in values.items():
            state = replace(start, step=step, metrics={"v/accuracy": sign * value, "v/loss": NAN})
            if step == start.step:
                checkpoints.amend(state)
            else:
                checkpoints.save(state, Model(), Optimizer())
        checkpoints.publish()
        return checkpoints, checkpoints.count_on_disk(fresh, latest)

    def left(*arguments: Any, **options: Any) -> list[int]:
        saved = resume(*arguments, **options)[0].list_saved()
        assert {name for item in saved for name in item.state.metrics} == {"v/accuracy", "v/loss"}
        return steps(saved)

    assert left("a", {1: 0.7, 2: 0.9}) == [2]
    assert left("b", {2: 0.5, 3: 0.6, 4: 0.6, 5: 0.4}, top_k=2) == [2, 3, 4, 5]
    checkpoints, count = resume("a", {})
    leader = checkpoints.leader()
    assert leader is not None
    assert leader.state.step == 2
    metrics = {name: value for name, value in leader.state.metrics.items() if value == value}
    assert metrics == {"v/accuracy": sign * 0.9}
    assert count == 4  # the newest, one being written, and the best on a and on b
    # Of the best two on b, which are equal, the earlier one stays.
    assert left("a", {6: 0.1}) == [2, 3, 6]
    # The newest one is the best on c, and stays although no step is saved while c is in use.
    assert left("c", {6: 0.5}) == [2, 3, 6]
    assert left("d", {6: 0.1, 7: 0.2}) == [2, 3, 6, 7]
    (other,) = {*MonitorMode} - {mode}
    assert left("a", {8: 0.05, 9: 0.2}, mode=other) == [2, 3, 6, 7, 8, 9]
    assert resume("a", {}, top_k=0)[1] == 2
    assert left("a", {10: 0.3}, top_k=0) == [10]


@pytest.mark.parametrize(
    ("later_sets", "later_values", "kept"),
    [
        ({"x": "b"}, {4: 0.6}, [1, 4]),  # another name of the set w
        ({"x": "a", "w": "b"}, {4: 0.95, 5: 0.2}, [4, 5]),
        ({"x": "c"}, {3: 0.1, 4: 0.6, 5: 0.2}, [1, 4, 5]),
    ],
)
def test_runs_rank_the_checkpoints_of_an_earlier_version_on_the_same_records(
    later_sets: dict[str, str], later_values: dict[int, float], kept: list[int], tmp_path: Path
) -> None:
    """Its states do not tell what ranked them."""
    earlier = ({"x": "a", "w": "b"}, {1: 0.9, 2: 0.5, 3: 0.5})
    for sets, values in (earlier, (later_sets, later_values)):
        checkpoints = RunCheckpoints(tmp_path, "x/accuracy")
        checkpoints.compare_with(RunState(0, 0, validated_on=sets))
        for step, value in values.items():
            metrics = {f"{name}/accuracy": value if name == "x" else 0.1 * step for name in sets}
            state = RunState(step, 0, metrics, validated_on=sets)
            if (tmp_path / f"step_{step:08d}").exists():
                checkpoints.amend(state)
            else:
                checkpoints.save(state, Model(), Optimizer())
        left = steps(checkpoints.list_saved())
        for file in tmp_path.glob("step_*/run_state.json"):
            file.write_text(json.dumps({**json.loads(file.read_text()), "ranked_by": []}))
    assert left == kept
