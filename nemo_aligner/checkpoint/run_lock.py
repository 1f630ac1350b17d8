"""The lock on a run's folder, so that only one job at a time trains in that folder.

``run.lock`` names the job that holds it: host, process and time. Rank 0 takes the lock for all
ranks, and updates the file's modification time every few seconds while the job lives. A killed job
leaves the file behind. The next job has to distinguish such a leftover from a running job:

- On the same machine it looks for the process.
- On another machine, or in another container, it watches the file. A changed modification time
  means that the holder lives; after a minute without a change the holder counts as dead, and the
  new job takes over the lock.

So a job that Slurm or Kubernetes restarts needs no manual step. The file is created with
``O_EXCL``, which is atomic on local disks and on NFS since version 3.

A job that was suspended for a minute, e.g. by Slurm, may have lost its lock. It notices this within
seconds, and at its next save at the latest, and ends: the file names another job, or is missing,
because the other job has already ended. A lost lock stays lost. If the file of a job that was not
suspended is missing, somebody has deleted it; the job then creates it again at its next save.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import BinaryIO

from nemo_aligner.distributed.collectives import on_main
from nemo_aligner.utils.console import say, show_duration
from nemo_aligner.utils.errors import CheckpointError, ConfigError
from nemo_aligner.utils.writing import explaining_full_disk, write_problem

LOCK_NAME = "run.lock"
BEAT_S = 10.0
# Seconds without an update after which a job counts as dead: the time of six updates, because a
# file server may stall for a few of them.
DEAD_AFTER_S = 60.0
_POLL_S = 1.0


@dataclass(frozen=True)
class Holder:
    """The process that holds a lock.

    Attributes:
        host: host name.
        pid: process id.
        system: boot id and process namespace in which ``pid`` is valid; empty if unknown.
        started: start time of the process, in ticks since boot. It tells the process from a later
            one that gets the same pid.
        since: time at which the process took the lock, in UTC.
        job: Slurm job id; empty outside Slurm.
        token: random id of this lock.
    """

    host: str
    pid: int
    system: str
    started: str
    since: str
    job: str
    token: str

    @classmethod
    def of_this_process(cls) -> Holder:
        """Describe this process as the holder of a lock, with a new token."""
        return cls(
            host=socket.gethostname(),
            pid=os.getpid(),
            system=_name_system(),
            started=_read_start_time(os.getpid()) or "",
            since=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC"),
            job=os.environ.get("SLURM_JOB_ID", ""),
            token=uuid.uuid4().hex,
        )

    def is_alive(self) -> bool | None:
        """Tell if the process that holds the lock lives.

        None if it runs on another machine or container.
        """
        if not self.system or self.system != _name_system():
            return None
        try:
            os.kill(self.pid, 0)  # signal 0 only tests whether the process exists
        except ProcessLookupError:
            return False
        except PermissionError:
            pass  # no permission: the process exists, but belongs to another user
        start = _read_start_time(self.pid)
        # If the start time cannot be read (some systems hide processes of other users), a process
        # with this pid counts as the holder.
        return start is None or start == self.started

    def __str__(self) -> str:
        job_text = f", Slurm job {self.job}" if self.job else ""
        return f"process {self.pid} on {self.host}{job_text}, since {self.since}"


def _name_system() -> str:
    """Return the boot id of this machine and its process namespace; empty if unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _read_start_time(pid: int) -> str | None:
    """Read the start time of a process, in ticks since boot.

    Returns:
        Empty if the process has ended; None if the time cannot be read.
    """
    try:
        # The process name, in parentheses, may contain spaces and parentheses itself.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    state, start = fields[0], fields[19]
    return "" if state in "ZX" else start


class RunLock:
    """A lock on a run's folder that this job holds.

    Only rank 0 has a ``holder``, and updates the file.

    Attributes:
        path: the lock file.
        is_lost: on rank 0, whether another job has taken the lock since; it stays True if that job
            releases the lock.
    """

    def __init__(self, path: Path, holder: Holder | None) -> None:
        self.path = path
        self.is_lost = False
        self._holder = holder
        # The time of the last update. It is by the wall clock, because the monotonic clock stops
        # while the machine is suspended.
        self._updated = time.time()
        self._over = threading.Event()
        # A daemon thread, because a process that ends with an error must not wait for it.
        self._heart = threading.Thread(target=self._beat, name="run lock", daemon=True)
        if holder is not None:
            self._heart.start()

    def check(self) -> None:
        """Check that this job still holds the lock; create the file again if it was deleted.

        Raises:
            CheckpointError: another job has taken the lock, or may have had it while this job was
                suspended.
        """
        if self._holder is None:
            return
        holder = self._find_holder()
        if holder is None and not self.is_lost:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            is_created = _create_lock(self.path, self._holder)
            holder = self._holder if is_created else self._find_holder()
        if holder is None or self.is_lost:
            raise CheckpointError(
                f"{self.path}: this run has lost its folder to {holder or 'another job'}, because "
                f"this job did not update the file for {DEAD_AFTER_S:.0f} s. This job ends; the "
                "other job continues from its checkpoints"
            )

    def release(self) -> None:
        """Remove the lock file, unless another job has taken the lock since."""
        if self._holder is None:
            return
        self._over.set()
        self._heart.join()
        holder = _read_holder(self.path)
        if holder is not None and holder.token == self._holder.token:
            self.path.unlink(missing_ok=True)

    def _find_holder(self) -> Holder | None:
        """Read who holds the lock, and set ``is_lost`` if this job does not hold it any more.

        A missing file usually means that somebody deleted it. But if this job has not updated it
        for ``DEAD_AFTER_S``, another job may have taken over the lock and released it at its end.
        """
        assert self._holder is not None
        holder = _read_holder(self.path)
        if holder is not None:
            is_lost = holder.token != self._holder.token
        else:
            is_lost = time.time() - self._updated > DEAD_AFTER_S and _is_missing(self.path)
        # Never set it back to False: the other job may have saved checkpoints and ended.
        if is_lost:
            self.is_lost = True
        return holder

    def _beat(self) -> None:
        while not self._over.wait(BEAT_S):
            # Read the time first, because the job may be suspended before the update.
            start = time.time()
            self._find_holder()
            if self.is_lost:
                return
            try:
                os.utime(self.path)
            except FileNotFoundError:
                pass  # somebody deleted the file; ``check`` creates it again
            except OSError:
                continue  # the file server may be back at the next update
            self._updated = start


@contextmanager
def lock_run(folder: Path) -> Iterator[RunLock]:
    """Hold the lock of a run's folder during the block; every rank calls it.

    Creates the folder if needed, and removes it at the end if it is still empty.

    Raises:
        CheckpointError: on every rank, if another job holds the lock.
        ConfigError: on every rank, if the folder cannot be written to.
    """
    path = folder / LOCK_NAME
    created_folders: list[Path] = []
    holders: list[Holder] = []

    def acquire() -> None:
        try:
            created_folders.extend(_make_folder(folder))
            holders.append(_acquire_lock(path))
        except OSError as error:
            raise ConfigError(
                f"exp_manager.explicit_log_dir: {folder} cannot be written to: "
                f"{write_problem(folder, error)}"
            ) from error

    try:
        on_main(acquire)
        lock = RunLock(path, holders[0] if holders else None)
        try:
            with explaining_full_disk(folder):
                yield lock
        finally:
            lock.release()
    finally:
        # rmdir fails if a folder is not empty, and such a folder must stay.
        with suppress(OSError):
            for created_folder in created_folders:
                created_folder.rmdir()


def _make_folder(folder: Path) -> list[Path]:
    """Make a folder with its parents; return the new folders, the innermost first."""
    missing = [part for part in (folder, *folder.parents) if not part.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    return missing


def _acquire_lock(path: Path) -> Holder:
    """Create the lock file for this process, after removing the lock of a dead job.

    Raises:
        CheckpointError: a living job holds the lock.
        OSError: the folder cannot be written to.
    """
    local_holder = Holder.of_this_process()
    while not _create_lock(path, local_holder):
        holder = _read_holder(path)
        is_alive = None if holder is None else holder.is_alive()
        if is_alive is None:
            is_alive = _watch_lock(path, holder)
        if is_alive is None:  # None: the holder has released the lock meanwhile
            continue
        if is_alive:
            raise CheckpointError(
                f"{path}: another job trains in this folder: {holder or 'it has left no name'}. "
                "Wait until it ends, or set exp_manager.explicit_log_dir to another folder. If "
                f"that job is certainly gone, delete {path}"
            )
        if _remove_stale_lock(path, holder):
            say(f"{path}: taken over from a job that has ended: {holder or 'it left no name'}")
    return local_holder


def _create_lock(path: Path, holder: Holder) -> bool:
    """Create the lock file for ``holder``; return False if the file exists already."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    except FileExistsError:
        return False
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(asdict(holder), file, indent=1)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        path.unlink(missing_ok=True)
        raise
    return True


def _read_holder(path: Path) -> Holder | None:
    """Read who holds the lock; None if there is no lock file, or if the file is still empty."""
    try:
        return Holder(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def _watch_lock(path: Path, holder: Holder | None) -> bool | None:
    """Wait until a holder on another machine updates the lock file, or counts as dead.

    Returns:
        True if the holder updated the file, False if it counts as dead, None if the file was
        removed meanwhile.
    """
    first = _read_modification_time(path)
    if first is None:
        return None
    # The modification time is by the file server's clock, so use that clock to compute how old it
    # is.
    left_s = min(DEAD_AFTER_S, DEAD_AFTER_S - (_read_server_clock(path.parent) - first))
    if left_s > 0:
        say(
            f"{path}: held by {holder or 'a job without a name'}; "
            f"waiting up to {show_duration(left_s)} for a sign of life"
        )
    end = time.monotonic() + left_s
    while time.monotonic() < end:
        time.sleep(_POLL_S)
        latest = _read_modification_time(path)
        if latest != first:
            return None if latest is None else True
    return False


def _read_modification_time(path: Path) -> float | None:
    """Read when a file was last modified, in seconds since 1970; None if the file is gone."""
    try:
        # Open the file before reading its time: for a file that is not open, NFS may answer from
        # its cache.
        with path.open("rb") as file:
            return os.fstat(file.fileno()).st_mtime
    except FileNotFoundError:
        return None


def _is_missing(path: Path) -> bool:
    """Tell if there is no file; False if the file server does not answer."""
    try:
        return _read_modification_time(path) is None
    except OSError:
        return False


def _read_server_clock(folder: Path) -> float:
    """Return the time by the file server's clock, in seconds since 1970.

    The clocks of the server and of this machine may differ.
    """
    probe = folder / f".{LOCK_NAME}.{uuid.uuid4().hex}"
    probe.touch()
    try:
        return probe.stat().st_mtime
    finally:
        probe.unlink(missing_ok=True)


def _remove_stale_lock(path: Path, holder: Holder | None) -> bool:
    """Remove the lock of a dead job; return False if another job has removed it already.

    Several jobs may find the same stale lock. Each one takes ``flock`` on the stale file, and then
    checks that the path still names this file, so it cannot remove the new lock of a faster job.
    """
    try:
        # Open for writing if possible, because NFS grants an exclusive lock only on such a file.
        stale = path.open("r+b" if os.access(path, os.W_OK) else "rb")
    except FileNotFoundError:
        return False
    with stale:
        # Some file servers do not support flock. Two jobs can then both take over the lock, but
        # only if they reach this line at the same moment.
        with suppress(OSError):
            fcntl.flock(stale, fcntl.LOCK_EX)
        if not _is_same_file(path, stale) or _read_holder(path) != holder:
            return False
        path.unlink()
    return True


def _is_same_file(path: Path, file: BinaryIO) -> bool:
    """Tell if ``path`` still names the open file ``file``."""
    try:
        # Open the file first: for a file that is not open, NFS may answer from its cache.
        with path.open("rb") as current:
            return os.path.samestat(os.fstat(current.fileno()), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False
