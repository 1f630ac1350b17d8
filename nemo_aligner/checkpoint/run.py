"""Checkpoints of a training run: save them in the background, resume, and keep the best.

Each checkpoint is a folder, such as ``step_00000100/``. ``state/`` is a distributed checkpoint of
weights and optimizer that any parallel layout can read; ``run_state.json`` holds everything else.
The folder is written as ``step_00000100.partial/``, synced to disk and then renamed, so a folder
whose name does not end in ``.partial`` is complete.

``save`` copies the tensors and returns; ``publish`` renames the folder once all ranks have written.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from nemo_aligner.checkpoint.run_folder import RUN_STATE_NAME, STATE_NAME, STEP_NAME, step_folders
from nemo_aligner.checkpoint.run_lock import RunLock
from nemo_aligner.checkpoint.run_state import (
    RunState,
    Saved,
    format_state,
    metrics_by_records,
    name_by_records,
    name_of_loss,
    rank_key,
    read_saved,
    same_validation,
    with_current_names,
)
from nemo_aligner.checkpoint.weights import DamagedError, check_complete, open_checked
from nemo_aligner.checkpoint.weights.save import (
    PendingSave,
    ShardedModel,
    ShardedOptimizer,
    copy_tensors,
    in_background,
    put_weights,
    sharded_weights,
)
from nemo_aligner.checkpoint.weights.store import MeanStore, TensorStore
from nemo_aligner.config.training import MonitorMode
from nemo_aligner.distributed.collectives import on_main
from nemo_aligner.utils.errors import CheckpointError, one_line
from nemo_aligner.utils.finite import finite_or_none
from nemo_aligner.utils.host_transfer import Wait
from nemo_aligner.utils.writing import replacing, sync_to_disk, write_problem

logger = logging.getLogger(__name__)

_UNFINISHED = re.compile(rf"{STEP_NAME.pattern}\.(partial|removed)")


class RunCheckpoints:
    """The checkpoints of a run in ``folder``, which all ranks can access; methods are collective.

    Keeps the newest checkpoint, the ``save_top_k`` best ones by the metric ``monitor``, and, if the
    metric, its mode or its validation records have changed, the best one of each time. The
    lower loss on the same validation set breaks a tie: two models with an accuracy of 1 may differ
    in their margins. If the losses are equal, too, the earlier checkpoint wins, so that an equal
    later one need not be saved. Checkpoints that were validated on other records than the current
    run (see ``compare_with``) rank last. A checkpoint is written only while this job holds the
    ``lock``.
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
        self.tie_break = None if self.monitor is None else name_of_loss(self.monitor)
        self._mode = mode
        self._save_top_k = save_top_k
        self._pending: tuple[Saved, PendingSave] | None = None
        self._published: list[Saved] = []
        self._deletion: Future[None] | None = None
        self._host: list[Tensor] = []
        self._current: RunState | None = None

    def compare_with(self, current: RunState) -> None:
        """Tell this object on which records the run validates now: those of the state ``current``.

        In later rankings, checkpoints that were validated on other records come last. Sets of
        equal records get the names that they have now (see ``with_current_names``).
        """
        self._current = current

    def is_comparable(self, saved: Saved) -> bool:
        """Tell if a checkpoint was validated on the records that the run validates on now."""
        return self._current is None or same_validation(saved.state, self._current, self.monitor)

    def reserve(self, model: ShardedModel, optimizer: ShardedOptimizer) -> None:
        """Allocate the host memory for the copies of a save, before the first save needs it.

        The first write to a new page of memory can take ten times as long as later writes, and
        would delay training at the first save.
        """
        self._copy(model, optimizer)

    def _copy(
        self, model: ShardedModel, optimizer: ShardedOptimizer
    ) -> tuple[dict[str, Any], Wait]:
        """Copy weights and optimizer state to host memory.

        Returns:
            The tensors to write, and a function that waits until the copies have arrived.
        """
        optimizer.finish_update()
        weights = sharded_weights(model)
        # The optimizer looks up its state by the model's own tensors, so they are replaced by
        # copies in ``weights`` only after that.
        state = optimizer.sharded_state_dict(weights)
        arrived = copy_tensors(weights, self._host)
        return {"model": weights, "optimizer": state}, arrived

    @property
    def has_lost_lock(self) -> bool:
        """True on rank 0 if another job has taken the lock of the run's folder."""
        return self._lock is not None and self._lock.is_lost

    def check_lock(self) -> None:
        """Raise CheckpointError on every rank if another job has taken the folder's lock."""
        on_main(self._check_lock)

    def _check_lock(self) -> None:
        if self._lock is not None:
            self._lock.check()

    def _change_folder(self, change: Callable[[], None]) -> None:
        """Call ``change`` on rank 0, after checking that this job still holds the folder's lock."""

        def change_if_locked() -> None:
            self._check_lock()
            change()

        on_main(change_if_locked)

    def clean(self) -> None:
        """Delete partial checkpoints of a save or removal that was killed.

        Call it before the first save.
        """
        on_main(lambda: _delete_unfinished(self.folder))

    def list_saved(self) -> list[Saved]:
        """List the complete checkpoints, oldest first; a pending save is finished first."""
        self.publish()
        return list(map(self._with_current_names, on_main(lambda: _list_saved(self.folder))))

    def _with_current_names(self, saved: Saved) -> Saved:
        if self._current is None:
            return saved
        return replace(saved, state=with_current_names(saved.state, self._current))

    def latest(self) -> Saved | None:
        """Return the newest checkpoint; None if there is none."""
        saved = self.list_saved()
        return saved[-1] if saved else None

    def best(self) -> Saved | None:
        """Return the best checkpoint by ``monitor``; None if no checkpoint has a value of it."""
        ranked = self.ranked()
        return ranked[0] if ranked else None

    def leader(self) -> Saved | None:
        """Return the best checkpoint so far that was validated on the run's current records.

        A checkpoint that is still being written counts, without waiting for it.
        """
        ranked = self._rank_checkpoints(self._list_with_pending())
        return next(filter(self.is_comparable, ranked), None)

    def _list_with_pending(self) -> list[Saved]:
        pending = [] if self._pending is None else [self._pending[0]]
        saved = on_main(lambda: _list_saved(self.folder))
        return [*map(self._with_current_names, saved), *pending]

    def ranked(self) -> list[Saved]:
        """Return the checkpoints that have a value of ``monitor``, the best first."""
        return self._rank_checkpoints(self.list_saved())

    def candidates(self) -> list[Saved]:
        """Return the checkpoints that have a value of ``monitor``, the best first.

        Unlike ``ranked``, it includes those that this process has saved and deleted since. The log
        at the end of a run lists them.
        """
        by_path = {saved.path: saved for saved in (*self._published, *self.list_saved())}
        return self._rank_checkpoints(list(by_path.values()))

    def is_among_best(self, metrics: Mapping[str, float]) -> bool:
        """Tell if a checkpoint with these metrics would be among the ``save_top_k`` best."""
        if self._sort_key(metrics) is None:
            return False
        # Rank the new checkpoint with the largest step, so that it loses every tie, as it would if
        # it were saved now.
        state = replace(self._current or RunState(0, 0), step=2**62, metrics={**metrics})
        newcomer = Saved(self.folder, state)
        return (
            newcomer
            in self._rank_checkpoints([*self._list_with_pending(), newcomer])[: self._save_top_k]
        )

    def save(self, state: RunState, model: ShardedModel, optimizer: ShardedOptimizer) -> None:
        """Start to write a checkpoint; training may continue when this returns.

        Copies this rank's tensors to host memory, which later saves reuse. On a GPU the copies may
        not have finished yet; the optimizer's next update waits for them. A pending save is
        published first.

        Raises:
            CheckpointError: on every rank, if this checkpoint or the pending one cannot be written.
        """
        # Finish the pending save first: two saves at a time would copy into the same host memory.
        self.publish()
        path = self.folder / f"step_{state.step:08d}"
        with _as_checkpoint_error(path):
            self._change_folder(lambda: _make_empty(_partial_path(path)))
        tensors, arrived = self._copy(model, optimizer)
        pending = PendingSave(tensors, _partial_path(path) / STATE_NAME, arrived)
        self._pending = Saved(path, self._add_ranking(state)), pending

    def _add_ranking(self, state: RunState) -> RunState:
        """Add what ranks checkpoints now to ``ranked_by`` of a state."""
        name = None if self.monitor is None else name_by_records(self.monitor, state)
        if name is None:
            return state
        ranked_by = dict.fromkeys([*state.ranked_by, f"{name}:{self._mode.value}"])
        return replace(state, ranked_by=list(ranked_by))

    def _rankings_of(self, state: RunState) -> list[str]:
        """Return ``ranked_by`` of a state; in one of an earlier version, what ranks it now."""
        return state.ranked_by or self._add_ranking(state).ranked_by

    def count_on_disk(self, fresh: RunState, latest: Saved | None) -> int:
        """Return how many checkpoints may be on disk at the same time.

        These are the newest one, one that is being written, the ``save_top_k`` best ones, and the
        best one of each earlier ranking.

        Args:
            fresh: the state of a new run with the settings and the data of this run.
            latest: the checkpoint that the run resumes.
        """
        if latest is None or self._save_top_k == 0:
            return 2 + self._save_top_k
        earlier = {*self._rankings_of(latest.state)} - {*self._rankings_of(fresh)}
        return 2 + self._save_top_k + len(earlier)

    @property
    def is_written(self) -> bool:
        """True if this rank has written its file, so that ``publish`` need not wait for it."""
        return self._pending is None or self._pending[1].is_written

    def publish(self) -> Saved | None:
        """Rename the pending checkpoint once all ranks have written it; None if there is none.

        Then deletes the checkpoints that are neither the newest nor among the best.

        Raises:
            CheckpointError: on every rank, if a rank could not write its part.
        """
        if self._pending is None:
            return None
        (saved, pending), self._pending = self._pending, None
        # finish is collective, and raises on every rank or on none, so all ranks take the same
        # branch.
        try:
            pending.finish()
        except CheckpointError:
            # Delete the partial checkpoint, because the disk may be full.
            on_main(lambda: shutil.rmtree(_partial_path(saved.path), ignore_errors=True))
            raise
        with _as_checkpoint_error(saved.path):
            self._change_folder(lambda: _publish(saved))
            on_main(self._prune)
        self._published.append(saved)
        return saved

    def amend(self, state: RunState) -> None:
        """Replace the ``run_state.json`` of the checkpoint of step ``state.step`` by ``state``.

        It is called when a checkpoint is validated after it was saved. Metrics that it already has
        become ``earlier_metrics``, so that it can stay the best one on their records.

        Raises:
            CheckpointError: on every rank, if the file cannot be written.
        """
        path = self.folder / f"step_{state.step:08d}"
        with _as_checkpoint_error(path):
            self._change_folder(lambda: self._amend(path, state))
            on_main(self._prune)

    def _amend(self, path: Path, state: RunState) -> None:
        """Replace the state file of the checkpoint at ``path`` atomically, and keep its metrics."""
        with replacing(path / RUN_STATE_NAME, sync=True) as partial_file:
            replaced = read_saved(path).state
            rankings = [*self._rankings_of(replaced), *self._add_ranking(state).ranked_by]
            state = replace(
                state,
                ranked_by=list(dict.fromkeys(rankings)),
                earlier_metrics=metrics_by_records(replaced),
            )
            partial_file.write_text(format_state(state), encoding="utf-8")

    def _prune(self) -> None:
        """Delete the checkpoints that are neither the newest nor among the best.

        The folders are renamed now, and their files are deleted in the background. A failure is
        only logged, because the new checkpoint is complete.
        """
        if self._deletion is not None:
            self._deletion.result()  # run one deletion at a time
        saved = _list_saved(self.folder)
        ranked = self._rank_checkpoints(list(map(self._with_current_names, saved)))
        # Keep the newest checkpoint, whatever its metric, because a run resumes from it. If the
        # metric or the validation records have changed, also keep the best one of earlier times,
        # because its metrics do not show that a later one is better.
        best = self._list_best_of_rankings(saved)
        retained = {item.path for item in (*ranked[: self._save_top_k], *best, saved[-1])}
        # Training waits only until the folders are renamed, which is quick and atomic.
        doomed = []
        for item in saved:
            if item.path not in retained:
                with _warning_if_left(item.path):
                    doomed.append(_rename_removed(item.path))
        self._deletion = in_background(partial(_delete, doomed))

    def _list_best_of_rankings(self, saved: Sequence[Saved]) -> list[Saved]:
        """List the best checkpoint by each ranking of the run so far; ``saved`` is by step."""
        if self._save_top_k == 0:
            return []
        best: list[Saved] = []
        # Early versions wrote no digests of the records.
        without_digests = [item for item in saved if item.state.validated_on is None]
        for item in self._rank_checkpoints(without_digests):
            if not any(same_validation(item.state, leader.state, self.monitor) for leader in best):
                best.append(item)
        with_metrics = [(metrics_by_records(item.state), item) for item in saved]
        for ranking in {ranking for item in saved for ranking in self._rankings_of(item.state)}:
            monitor, _, mode = ranking.rpartition(":")
            scored = [
                (key, item)
                for metrics, item in with_metrics
                if (key := rank_key(metrics, monitor, MonitorMode(mode)))
            ]
            # Of equal ones, ``min`` returns the first, which is the earliest.
            best += [min(scored, key=lambda keyed: keyed[0])[1]] if scored else []
        return best

    def load(self, saved: Saved, model: ShardedModel, optimizer: ShardedOptimizer) -> None:
        """Restore weights and optimizer state from a checkpoint of any parallel layout."""
        weights = sharded_weights(model)
        request = {
            "model": weights,
            "optimizer": optimizer.sharded_state_dict(weights, is_loading=True),
        }
        store, common = self._open_checked(saved, with_optimizer=True)
        state = store.load(request, common)
        put_weights(model, state["model"], saved.path)
        optimizer.load_state_dict(state["optimizer"], saved.state.step)

    def load_model(self, saved: Sequence[Saved], model: ShardedModel) -> None:
        """Load the weights of a checkpoint, or the mean of several ones, without optimizer state.

        The weights of each checkpoint are those of the same run. With LoRA, the matrices A and B
        are averaged separately, so their product is not the mean of the products B A.
        """
        opened = [self._open_checked(item, with_optimizer=False) for item in saved]
        stores, commons = zip(*opened, strict=True)
        state = MeanStore(stores).load({"model": sharded_weights(model)}, commons[0])
        put_weights(model, state["model"], saved[0].path)

    def _open_checked(
        self, saved: Saved, *, with_optimizer: bool
    ) -> tuple[TensorStore, dict[str, Any]]:
        """Open a checkpoint, and compare the checksums of its weights; see ``open_checked``.

        Raises:
            CheckpointError: on every rank, if the checkpoint is damaged. The message names the
                complete checkpoints next to it.
        """
        try:
            return open_checked(saved.path / STATE_NAME, with_optimizer=with_optimizer)
        except DamagedError as error:
            advice = on_main(lambda: _advise_without(saved.path))
            raise CheckpointError(f"{error}. {advice}") from error

    def _rank_checkpoints(self, saved: list[Saved]) -> list[Saved]:
        def order(item: Saved) -> tuple[Any, ...]:
            has_other_records = not self.is_comparable(item)
            return has_other_records, self._sort_key(item.state.metrics), item.state.step

        scored = [item for item in saved if self._sort_key(item.state.metrics) is not None]
        return sorted(scored, key=order)

    def _sort_key(self, metrics: Mapping[str, float]) -> tuple[float, float] | None:
        return rank_key(metrics, self.monitor, self._mode)


def check_same_run(
    saved: Saved,
    fingerprint: Mapping[str, Any],
    contract_changes: Mapping[str, tuple[str, str]] | None = None,
) -> None:
    """Raise CheckpointError if a run would resume with another model or other data.

    Args:
        fingerprint: the settings of this run that decide model and data, including the order of the
            data. They must be equal to those in the state of ``saved``.
        contract_changes: the settings in which the two scoring contracts differ, with the value of
            the checkpoint and that of this run, as texts.

    Raises:
        CheckpointError: something differs; the message lists every difference, with both values.
    """
    previous = saved.state.fingerprint
    changes = {
        key: (repr(previous.get(key)), repr(fingerprint.get(key)))
        for key in dict.fromkeys([*previous, *fingerprint])
        if finite_or_none(previous.get(key)) != finite_or_none(fingerprint.get(key))
    }
    differences = [
        f"{key}: the checkpoint has {first}, this run {second}"
        for key, (first, second) in {**changes, **(contract_changes or {})}.items()
    ]
    if differences:
        raise CheckpointError(
            f"{saved.path}: it belongs to another run and cannot be resumed: "
            f"{'; '.join(differences)}. Set exp_manager.explicit_log_dir to a new folder to start "
            "a new run"
        )


@contextmanager
def _as_checkpoint_error(path: Path) -> Iterator[None]:
    """Turn an OSError in the block into a CheckpointError that names ``path``."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path}: not saved: {write_problem(path, error)}") from error


def _delete_unfinished(folder: Path) -> None:
    if folder.is_dir():
        _delete([path for path in folder.iterdir() if _UNFINISHED.fullmatch(path.name)])


def _list_saved(folder: Path) -> list[Saved]:
    return sorted(map(_read_or_advise, step_folders(folder)), key=lambda saved: saved.state.step)


def _read_or_advise(path: Path) -> Saved:
    try:
        return read_saved(path)
    except CheckpointError as error:
        raise CheckpointError(f"{error}. {_advise_without(path)}") from error


def _advise_without(damaged: Path) -> str:
    """Return an error's advice: how to resume without the checkpoint ``damaged``."""
    other_folders = sorted(set(step_folders(damaged.parent)) - {damaged}, reverse=True)
    names = [path.name for path in other_folders if _is_complete(path)]
    if not names:
        return (
            "The run has no other complete checkpoint: restore this one from a copy, or set "
            "exp_manager.explicit_log_dir to a new folder to start a new run"
        )
    are_complete = "is complete" if len(names) == 1 else "are complete"
    # A run reads the states of all its checkpoints, so a folder without a state would stop it, too.
    in_the_way = [damaged, *(path for path in other_folders if not _has_state(path))]
    return (
        f"The run can resume from another checkpoint, as {', '.join(names)} {are_complete}: move "
        f"{', '.join(map(str, in_the_way))} to another folder, and start the same command again; "
        f"it resumes from {names[0]}"
    )


def _has_state(path: Path) -> bool:
    try:
        read_saved(path)
    except CheckpointError:
        return False
    return True


def _is_complete(path: Path) -> bool:
    try:
        check_complete(path / STATE_NAME)
    except CheckpointError:
        return False
    return _has_state(path)


def _make_empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _partial_path(path: Path) -> Path:
    """Return the name that a checkpoint has while it is being written."""
    return path.with_name(path.name + ".partial")


def _publish(saved: Saved) -> None:
    """Write the state, sync all files to disk, and give the folder its final name."""
    path, partial_path = saved.path, _partial_path(saved.path)
    (partial_path / RUN_STATE_NAME).write_text(format_state(saved.state), encoding="utf-8")
    # Sync the small files; the ranks have synced the tensors already.
    for folder, _, names in os.walk(partial_path):
        for name in names:
            sync_to_disk(Path(folder) / name)
        sync_to_disk(Path(folder))
    # The folder exists if the run was resumed from an earlier step, and has trained this step
    # again.
    if path.exists():
        _delete([_rename_removed(path)])
    partial_path.rename(path)
    sync_to_disk(path.parent)


def _rename_removed(path: Path) -> Path:
    """Rename a checkpoint before it is deleted, and return the new path.

    If the deletion is interrupted, the rest of the checkpoint does not look like a complete one.
    """
    doomed = path.with_name(path.name + ".removed")
    shutil.rmtree(doomed, ignore_errors=True)
    path.rename(doomed)
    return doomed


def _delete(folders: list[Path]) -> None:
    """Delete folders of checkpoints; a folder that cannot be deleted is logged."""
    for folder in folders:
        with _warning_if_left(folder):
            shutil.rmtree(folder)


@contextmanager
def _warning_if_left(folder: Path) -> Iterator[None]:
    """Log an OSError in the block, which deletes ``folder``.

    For example, NFS keeps a file that a process still reads, as ``.nfs...``, and so its folder.
    """
    try:
        yield
    except OSError as error:
        logger.warning("%s: cannot be deleted: %s", folder, one_line(error))
