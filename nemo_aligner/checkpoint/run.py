"""Checkpoints of a training run: saving in the background, resuming, and keeping the best.

Each has a folder, ``step_00000100/``: ``state/`` is a distributed checkpoint of weights and
optimizer that any layout can read, ``run_state.json`` the rest. It is written under another name,
synced to disk and then renamed, so it exists whole or not at all.

``save`` copies the tensors and returns; ``publish`` renames the folder once all ranks have written.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from nemo_aligner.checkpoint.nemo.archive import sync_to_disk
from nemo_aligner.checkpoint.run_folder import RUN_STATE_NAME, STATE_NAME, STEP_NAME, step_folders
from nemo_aligner.checkpoint.run_lock import RunLock
from nemo_aligner.checkpoint.weights import DamagedError, check_complete, load_weights
from nemo_aligner.checkpoint.weights.save import (
    PendingSave,
    ShardedModel,
    copy_tensors,
    in_background,
    put_weights,
    sharded_weights,
)
from nemo_aligner.config.load import flatten
from nemo_aligner.config.training import MonitorMode
from nemo_aligner.distributed.collectives import on_main
from nemo_aligner.utils.errors import CheckpointError
from nemo_aligner.utils.host_transfer import Wait
from nemo_aligner.utils.writing import write_problem

_VERSION = 1
_UNFINISHED = re.compile(rf"{STEP_NAME.pattern}\.(partial|removed)")
# Metrics on other validation records are not comparable. These settings tell for states that have
# no digests of them.
_VALIDATED_ON = ("model.data.data_prefix.validation", "trainer.rm.limit_val_records")


class ShardedOptimizer(Protocol):
    """An optimizer that saves its state beside the model's.

    ``sharded_state_dict`` returns copies made by ``start_host_copies``, which may still be in
    flight and are overwritten by its next call. The next update waits for them
    (``wait_for_host_copies``).
    ``finish_update`` waits until the last update has reached the model's weights.
    """

    def sharded_state_dict(
        self, model_state: dict[str, Any], is_loading: bool = ...
    ) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any], step: int) -> None: ...

    def finish_update(self) -> None: ...


@dataclass(frozen=True)
class RunState:
    """Everything of a run but its tensors; NaN and infinity are null in JSON.

    Attributes:
        step: steps done.
        consumed_samples: records trained on.
        metrics: of a validation after this very step; empty without one.
        fingerprint: settings that must not change when the run is resumed.
        config: resolved settings, for readers.
        contract: scoring contract, for readers.
        best_value: best value so far of the metric for early stopping.
        validations_since_best: validations after it.
        validated_on: digest of each validation set's records by its name; None in states of
            earlier versions.
    """

    step: int
    consumed_samples: int
    metrics: dict[str, float] = field(default_factory=dict)
    fingerprint: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    contract: dict[str, Any] = field(default_factory=dict)
    best_value: float | None = None
    validations_since_best: int = 0
    validated_on: dict[str, str] | None = None


# Fields that states of earlier versions lack.
_ADDED = ("best_value", "validations_since_best", "validated_on")


@dataclass(frozen=True)
class Saved:
    """A checkpoint on disk."""

    path: Path
    state: RunState


class RunCheckpoints:
    """Checkpoints of a run in ``folder``, which all ranks share; all methods are collective.

    Keeps the newest, and the ``save_top_k`` best by the metric ``monitor``. Ties are broken by the
    loss on the same set, since an accuracy of 1 does not tell how clear the margins are, and then
    in favour of the earlier one, which spares a save. Checkpoints validated on other records than
    ``compare_with`` names rank last. A checkpoint is written only while the ``lock`` is held.
    """

    def __init__(
        self,
        folder: str | Path,
        monitor: str | None = None,
        mode: MonitorMode = MonitorMode.max,
        save_top_k: int = 1,
        lock: RunLock | None = None,
    ) -> None:
        self.folder = Path(folder)
        self._lock = lock
        self.monitor = monitor if save_top_k > 0 else None
        self.tie_break = None if self.monitor is None else f"{self.monitor.partition('/')[0]}/loss"
        self._mode = mode
        self._save_top_k = save_top_k
        self._pending: tuple[Saved, PendingSave] | None = None
        self._published: list[Saved] = []
        self._deletion: Future[None] | None = None
        self._host: list[Tensor] = []
        self._current: RunState | None = None

    def compare_with(self, current: RunState) -> None:
        """Rank first what was validated on the same records as this state's run."""
        self._current = current

    def is_comparable(self, saved: Saved) -> bool:
        """Tell if a checkpoint was validated on the records that the run validates on now."""
        return self._current is None or same_validation(saved.state, self._current)

    def reserve(self, model: ShardedModel, optimizer: ShardedOptimizer) -> None:
        """Allocate the host memory for copies ahead of the first save.

        Writing to fresh pages can take ten times as long, and would hold up training.
        """
        self._copy(model, optimizer)

    def _copy(
        self, model: ShardedModel, optimizer: ShardedOptimizer
    ) -> tuple[dict[str, Any], Wait]:
        """Copy to host; returns the tensors to write, and a function that waits for the copies."""
        optimizer.finish_update()
        weights = sharded_weights(model)
        # The optimizer finds its state by the model's own tensors, so those are replaced last.
        state = optimizer.sharded_state_dict(weights)
        arrived = copy_tensors(weights, self._host)
        return {"model": weights, "optimizer": state}, arrived

    @property
    def has_lost_lock(self) -> bool:
        """True on the first rank if another job has taken the run's folder."""
        return self._lock is not None and self._lock.is_lost

    def check_lock(self) -> None:
        """Raise CheckpointError on every rank if another job has taken the run's folder."""
        on_main(self._check_lock)

    def _check_lock(self) -> None:
        if self._lock is not None:
            self._lock.check()

    def _change_folder(self, change: Callable[[], None]) -> None:
        """Have rank 0 change the folder, if this job still holds its lock; collective."""

        def change_if_locked() -> None:
            self._check_lock()
            change()

        on_main(change_if_locked)

    def clean(self) -> None:
        """Delete leftovers of a killed save or removal; call it before the first save."""
        on_main(lambda: _delete_unfinished(self.folder))

    def list_saved(self) -> list[Saved]:
        """List the complete checkpoints, oldest first, after publishing a pending one."""
        self.publish()
        return on_main(lambda: _list_saved(self.folder))

    def latest(self) -> Saved | None:
        """Newest checkpoint."""
        saved = self.list_saved()
        return saved[-1] if saved else None

    def best(self) -> Saved | None:
        """Best checkpoint."""
        ranked = self.ranked()
        return ranked[0] if ranked else None

    def leader(self) -> Saved | None:
        """Best so far on these records, with one that is being written; does not wait for it."""
        ranked = self._ranked(self._with_pending())
        return next(filter(self.is_comparable, ranked), None)

    def _with_pending(self) -> list[Saved]:
        pending = [] if self._pending is None else [self._pending[0]]
        return [*on_main(lambda: _list_saved(self.folder)), *pending]

    def ranked(self) -> list[Saved]:
        """Checkpoints with a value of ``monitor``, the best first."""
        return self._ranked(self.list_saved())

    def candidates(self) -> list[Saved]:
        """Like ``ranked``, including this process's checkpoints that better ones replaced."""
        known = {item.path: item for item in (*self._published, *self.list_saved())}
        return self._ranked(list(known.values()))

    def is_among_best(self, metrics: Mapping[str, float]) -> bool:
        """Tell if a checkpoint with these metrics would be among the best kept."""
        if self._sort_key(metrics) is None:
            return False
        # A step past all others: it loses every tie, as a checkpoint that is saved now does.
        state = replace(self._current or RunState(0, 0), step=2**62, metrics={**metrics})
        newcomer = Saved(self.folder, state)
        return newcomer in self._ranked([*self._with_pending(), newcomer])[: self._save_top_k]

    def save(self, state: RunState, model: ShardedModel, optimizer: ShardedOptimizer) -> None:
        """Start a checkpoint; training may go on when it returns.

        Copies all tensors of this rank's part of the checkpoint to host memory, which later saves
        reuse. On a GPU the copies may still be in flight; the optimizer's next update waits for
        them. A pending save is published first.

        Raises:
            CheckpointError: on every rank, if this checkpoint or the pending one cannot be written.
        """
        # One save at a time: both would write into the same host memory.
        self.publish()
        path = self.folder / f"step_{state.step:08d}"
        with _as_checkpoint_error(path):
            self._change_folder(lambda: _make_empty(_unnamed(path)))
        tensors, arrived = self._copy(model, optimizer)
        pending = PendingSave(tensors, _unnamed(path) / STATE_NAME, arrived)
        self._pending = Saved(path, state), pending

    @property
    def is_written(self) -> bool:
        """True if ``publish`` would not have to wait for this rank."""
        return self._pending is None or self._pending[1].is_written

    def publish(self) -> Saved | None:
        """Rename a pending checkpoint once all ranks have written it; None if there is none.

        Then deletes those that are neither the newest nor among the best.

        Raises:
            CheckpointError: on every rank, if any could not write it.
        """
        if self._pending is None:
            return None
        (saved, pending), self._pending = self._pending, None
        # Collective, and raises on every rank or on none.
        try:
            pending.finish()
        except CheckpointError:
            # The partial checkpoint may hold the very space that the disk lacks.
            on_main(lambda: shutil.rmtree(_unnamed(saved.path), ignore_errors=True))
            raise
        with _as_checkpoint_error(saved.path):
            self._change_folder(lambda: _publish(saved))
            on_main(self._prune)
        self._published.append(saved)
        return saved

    def amend(self, state: RunState) -> None:
        """Replace the state of the checkpoint of ``state.step``, after a later validation.

        Raises:
            CheckpointError: on every rank, if it cannot be written.
        """
        path = self.folder / f"step_{state.step:08d}"
        with _as_checkpoint_error(path):
            self._change_folder(lambda: _amend(path, state))
            on_main(self._prune)

    def _prune(self) -> None:
        """Delete the checkpoints that are not kept: rename now, remove files in the background.

        Errors of the previous deletion are raised here.
        """
        if self._deletion is not None:
            self._deletion.result()
        saved = _list_saved(self.folder)
        # The newest is kept whatever its metric: it is where a run goes on.
        kept = {item.path for item in (*self._ranked(saved)[: self._save_top_k], saved[-1])}
        # A rename is quick and atomic, and training waits for it; the files go in the background.
        doomed = [_take_name(item.path) for item in saved if item.path not in kept]
        self._deletion = in_background(partial(_delete, doomed))

    def load(self, saved: Saved, model: ShardedModel, optimizer: ShardedOptimizer) -> None:
        """Restore weights and optimizer, whatever layout saved them."""
        weights = sharded_weights(model)
        request = {
            "model": weights,
            "optimizer": optimizer.sharded_state_dict(weights, is_loading=True),
        }
        state = self._read_checked(saved, request)
        put_weights(model, state["model"], saved.path)
        optimizer.load_state_dict(state["optimizer"], saved.state.step)

    def load_model(self, saved: Saved, model: ShardedModel) -> None:
        """Restore the weights only."""
        state = self._read_checked(saved, {"model": sharded_weights(model)})
        put_weights(model, state["model"], saved.path)

    def _read_checked(self, saved: Saved, request: dict[str, Any]) -> dict[str, Any]:
        """Load what is requested of a checkpoint, after comparing it with its checksums.

        Raises:
            CheckpointError: on every rank, if it is damaged; it names the other checkpoints.
        """
        try:
            has_optimizer = "optimizer" in request
            return load_weights(request, saved.path / STATE_NAME, with_optimizer=has_optimizer)
        except DamagedError as error:
            advice = on_main(lambda: _how_to_go_on_without(saved.path))
            raise CheckpointError(f"{error}. {advice}") from error

    def _ranked(self, saved: list[Saved]) -> list[Saved]:
        def order(item: Saved) -> tuple[Any, ...]:
            is_of_other_records = not self.is_comparable(item)
            return is_of_other_records, self._sort_key(item.state.metrics), item.state.step

        scored = [item for item in saved if self._sort_key(item.state.metrics) is not None]
        return sorted(scored, key=order)

    def _sort_key(self, metrics: Mapping[str, float]) -> tuple[float, float] | None:
        """Key by which smaller is better; None if ``monitor`` has no value."""
        value = metrics.get(str(self.monitor), math.nan)
        if math.isnan(value):
            return None
        loss = metrics.get(str(self.tie_break), math.nan)
        signed = -value if self._mode is MonitorMode.max else value
        return signed, math.inf if math.isnan(loss) else loss


def same_validation(one: RunState, other: RunState) -> bool:
    """Tell if the runs of these states validate on the same records."""
    if one.validated_on is not None and other.validated_on is not None:
        # In this order: the first set's metric decides.
        return [*one.validated_on.items()] == [*other.validated_on.items()]
    first, second = flatten(one.config), flatten(other.config)
    return all(first.get(key) == second.get(key) for key in _VALIDATED_ON)


def check_same_run(saved: Saved, fingerprint: Mapping[str, Any]) -> None:
    """Refuse to resume with another model, other data, or another order of it.

    Raises:
        CheckpointError: it names every difference, with both values.
    """
    before = saved.state.fingerprint
    differences = [
        f"{key}: the checkpoint has {before.get(key)!r}, this run {fingerprint.get(key)!r}"
        for key in dict.fromkeys([*before, *fingerprint])
        if _as_json(before.get(key)) != _as_json(fingerprint.get(key))
    ]
    if differences:
        raise CheckpointError(
            f"{saved.path}: it belongs to another run and cannot be resumed: "
            f"{'; '.join(differences)}. Set exp_manager.explicit_log_dir to a new folder to start "
            "a new run"
        )


@contextmanager
def _as_checkpoint_error(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path}: not saved: {write_problem(path, error)}") from error


def _delete_unfinished(folder: Path) -> None:
    if folder.is_dir():
        for path in folder.iterdir():
            if _UNFINISHED.fullmatch(path.name):
                shutil.rmtree(path)


def _list_saved(folder: Path) -> list[Saved]:
    return sorted(map(_read_or_advise, step_folders(folder)), key=lambda saved: saved.state.step)


def _read_or_advise(path: Path) -> Saved:
    try:
        return _read_saved(path)
    except CheckpointError as error:
        raise CheckpointError(f"{error}. {_how_to_go_on_without(path)}") from error


def _how_to_go_on_without(damaged: Path) -> str:
    """Say which other checkpoints of a run are complete, and how to resume from them."""
    other_folders = sorted(set(step_folders(damaged.parent)) - {damaged}, reverse=True)
    names = [path.name for path in other_folders if _is_complete(path)]
    if not names:
        return (
            "The run has no other complete checkpoint: restore this one from a copy, or set "
            "exp_manager.explicit_log_dir to a new folder to start a new run"
        )
    are_complete = "is complete" if len(names) == 1 else "are complete"
    # A run reads the state of all its checkpoints, so each that has none would stop it again.
    in_the_way = [damaged, *(path for path in other_folders if not _has_state(path))]
    return (
        f"Next to it {', '.join(names)} {are_complete}: move {', '.join(map(str, in_the_way))} to "
        f"another folder, and the same command goes on from {names[0]}"
    )


def _has_state(path: Path) -> bool:
    try:
        _read_saved(path)
    except CheckpointError:
        return False
    return True


def _is_complete(path: Path) -> bool:
    try:
        check_complete(path / STATE_NAME)
    except CheckpointError:
        return False
    return _has_state(path)


def _read_saved(path: Path) -> Saved:
    file = path / RUN_STATE_NAME
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        version = content.pop("version")
        if version != _VERSION:
            raise CheckpointError(f"{file}: got version {version}, wanted {_VERSION}")
        known = {item.name for item in fields(RunState)} - (set(_ADDED) - set(content))
        state = RunState(**{key: content[key] for key in known})
        numbers = {
            name: math.nan if value is None else value for name, value in state.metrics.items()
        }
        return Saved(path, replace(state, metrics=numbers))
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{file}: there is no such file, so the checkpoint is not complete"
        ) from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file}: wanted the state of a run: {error!r}") from error


def _as_json(value: Any) -> Any:
    """Replace NaN and infinity, which JSON lacks, by null."""
    if isinstance(value, Mapping):
        return {key: _as_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_as_json(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _make_empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _unnamed(path: Path) -> Path:
    """Path of a checkpoint while it is being written."""
    return path.with_name(path.name + ".partial")


def _publish(saved: Saved) -> None:
    """Rename a finished folder once all of it is on disk."""
    path, unnamed = saved.path, _unnamed(saved.path)
    (unnamed / RUN_STATE_NAME).write_text(_as_text(saved.state), encoding="utf-8")
    # The ranks have synced the tensors already; this is for the small files.
    for folder, _, names in os.walk(unnamed):
        for name in names:
            sync_to_disk(Path(folder) / name)
        sync_to_disk(Path(folder))
    # A step that is trained again after a resume from an earlier one.
    if path.exists():
        _delete([_take_name(path)])
    unnamed.rename(path)
    sync_to_disk(path.parent)


def _as_text(state: RunState) -> str:
    content = _as_json({"version": _VERSION, **asdict(state)})
    return json.dumps(content, indent=2, allow_nan=False)


def _amend(path: Path, state: RunState) -> None:
    file = path / RUN_STATE_NAME
    unnamed = _unnamed(file)
    unnamed.write_text(_as_text(state), encoding="utf-8")
    sync_to_disk(unnamed)
    unnamed.replace(file)
    sync_to_disk(path)


def _take_name(path: Path) -> Path:
    """Rename a checkpoint before deleting it, so that a half-deleted one is not listed."""
    doomed = path.with_name(path.name + ".removed")
    shutil.rmtree(doomed, ignore_errors=True)
    path.rename(doomed)
    return doomed


def _delete(folders: list[Path]) -> None:
    for folder in folders:
        shutil.rmtree(folder)
