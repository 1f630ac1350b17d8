"""The lock on a run's folder: one job at a time trains there.

``run.lock`` names the job that holds it: host, process, since when. Rank 0 takes it for all ranks,
and sets the file's time every few seconds while it lives. A job that is killed leaves the file
behind, and the next one has to tell such a leftover from a job at work:

- On the same machine it asks the system whether that process lives.
- On another one, or in another container, it watches the file. A new time is a sign of life; after
  a minute without any the holder counts as dead, and the lock is taken over.

So a job that Slurm or Kubernetes starts again needs no help. The file is created by ``O_EXCL``,
which is atomic on local disks and on NFS since version 3. Where a holder only slept for a minute,
as when Slurm suspends a job, it finds its lost lock at its next step, and ends.
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
# Six signs of life that did not come: a file server may stall for some of them.
DEAD_AFTER_S = 60.0
_POLL_S = 1.0


@dataclass(frozen=True)
class Holder:
    """The process that holds a lock.

    Attributes:
        system: boot and process namespace, in which ``pid`` has a meaning; empty if unknown.
        started: when the process began, in ticks since boot; a pid is used again, this is not.
        since: when it took the lock, in UTC.
        job: Slurm's number of it; empty without.
        token: of this lock alone.
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
        return cls(
            host=socket.gethostname(),
            pid=os.getpid(),
            system=_system(),
            started=_start_of(os.getpid()) or "",
            since=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC"),
            job=os.environ.get("SLURM_JOB_ID", ""),
            token=uuid.uuid4().hex,
        )

    def is_alive(self) -> bool | None:
        """Whether the process lives; None if this machine cannot know."""
        if not self.system or self.system != _system():
            return None
        try:
            os.kill(self.pid, 0)  # sends nothing
        except ProcessLookupError:
            return False
        except PermissionError:
            pass  # it is another user's
        start = _start_of(self.pid)
        # Where others' processes are hidden, that there is one of this number has to do.
        return start is None or start == self.started

    def __str__(self) -> str:
        of_job = f", Slurm job {self.job}" if self.job else ""
        return f"process {self.pid} on {self.host}{of_job}, since {self.since}"


def _system() -> str:
    """Name this boot of this machine, and the namespace of its process numbers."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _start_of(pid: int) -> str | None:
    """When a process began, empty if it has ended; None if that cannot be read."""
    try:
        # The name, in parentheses, may hold anything.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    state, start = fields[0], fields[19]
    return "" if state in "ZX" else start


class RunLock:
    """A lock that this job holds; ranks other than the first have one without a ``holder``."""

    def __init__(self, path: Path, holder: Holder | None) -> None:
        self.path = path
        self.is_lost = False
        self._holder = holder
        self._over = threading.Event()
        # A daemon, so that a process which ends by an error does not wait for it.
        self._heart = threading.Thread(target=self._beat, name="run lock", daemon=True)
        if holder is not None:
            self._heart.start()

    def check(self) -> None:
        """Check that this job still holds the lock; a file that somebody deleted is made again.

        Raises:
            CheckpointError: another job has taken it.
        """
        if self._holder is None:
            return
        holder = _read(self.path)
        if holder is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            holder = self._holder if _create(self.path, self._holder) else _read(self.path)
        if holder is None or holder.token != self._holder.token:
            raise CheckpointError(
                f"{self.path}: this run has lost its folder to {holder or 'another job'}, which "
                f"had no sign of life from this one for {DEAD_AFTER_S:.0f} s. This one ends, and "
                "its checkpoints are the other's to go on from"
            )

    def release(self) -> None:
        """Remove the file, unless it is another job's by now."""
        if self._holder is None:
            return
        self._over.set()
        self._heart.join()
        holder = _read(self.path)
        if holder is not None and holder.token == self._holder.token:
            self.path.unlink(missing_ok=True)

    def _beat(self) -> None:
        assert self._holder is not None
        while not self._over.wait(BEAT_S):
            holder = _read(self.path)
            self.is_lost = holder is not None and holder.token != self._holder.token
            if holder is not None and not self.is_lost:
                with suppress(OSError):  # the next one may reach the file server again
                    os.utime(self.path)


@contextmanager
def lock_run(folder: Path) -> Iterator[RunLock]:
    """Hold the lock of a run's folder during the block; every rank calls it.

    A folder that it made and that is still empty at the end is removed.

    Raises:
        CheckpointError: on every rank, if another job holds it.
        ConfigError: on every rank, if the folder cannot be written to.
    """
    path = folder / LOCK_NAME
    made: list[Path] = []
    holders: list[Holder] = []

    def take() -> None:
        try:
            made.extend(_make_folder(folder))
            holders.append(_take(path))
        except OSError as error:
            raise ConfigError(
                f"exp_manager.explicit_log_dir: {folder} cannot be written to: "
                f"{write_problem(folder, error)}"
            ) from error

    try:
        on_main(take)
        lock = RunLock(path, holders[0] if holders else None)
        try:
            with explaining_full_disk(folder):
                yield lock
        finally:
            lock.release()
    finally:
        with suppress(OSError):  # it is not empty
            for part in made:
                part.rmdir()


def _make_folder(folder: Path) -> list[Path]:
    """Make a folder with its parents; returns those that were missing, the innermost first."""
    missing = [part for part in (folder, *folder.parents) if not part.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    return missing


def _take(path: Path) -> Holder:
    """Create the lock, after removing that of a dead job.

    Raises:
        CheckpointError: a living job holds it.
        OSError: the folder cannot be written to.
    """
    ours = Holder.of_this_process()
    while not _create(path, ours):
        holder = _read(path)
        is_alive = None if holder is None else holder.is_alive()
        if is_alive is None:
            is_alive = _shows_life(path, holder)
        if is_alive is None:  # it was released meanwhile
            continue
        if is_alive:
            raise CheckpointError(
                f"{path}: another job trains in this folder: {holder or 'it has left no name'}. "
                "Wait until it ends, or set exp_manager.explicit_log_dir to another folder. If "
                f"that job is certainly gone, delete {path}"
            )
        if _remove(path, holder):
            say(f"{path}: taken over from a job that has ended: {holder or 'it left no name'}")
    return ours


def _create(path: Path, holder: Holder) -> bool:
    """Create the lock's file; False if there is one."""
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


def _read(path: Path) -> Holder | None:
    """Who holds the lock; None if there is no file, or nothing in it yet."""
    try:
        return Holder(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def _shows_life(path: Path, holder: Holder | None) -> bool | None:
    """Watch the lock of a job elsewhere until it is touched, or long enough untouched.

    Returns:
        None if it is removed meanwhile.
    """
    first = _time_of(path)
    if first is None:
        return None
    # The file server's clock has set it, so that its clock says how old it is.
    left_s = min(DEAD_AFTER_S, DEAD_AFTER_S - (_now_of(path.parent) - first))
    if left_s > 0:
        say(
            f"{path}: held by {holder or 'a job without a name'}; "
            f"waiting up to {show_duration(left_s)} for a sign of life"
        )
    end = time.monotonic() + left_s
    while time.monotonic() < end:
        time.sleep(_POLL_S)
        latest = _time_of(path)
        if latest != first:
            return None if latest is None else True
    return False


def _time_of(path: Path) -> float | None:
    """When the file was touched; None if it is gone."""
    try:
        # Opened, as NFS may answer from its cache for a file that is not.
        with path.open("rb") as file:
            return os.fstat(file.fileno()).st_mtime
    except FileNotFoundError:
        return None


def _now_of(folder: Path) -> float:
    """The time by the clock of the folder's file server."""
    probe = folder / f".{LOCK_NAME}.{uuid.uuid4().hex}"
    probe.touch()
    try:
        return probe.stat().st_mtime
    finally:
        probe.unlink(missing_ok=True)


def _remove(path: Path, holder: Holder | None) -> bool:
    """Remove the lock of a dead job; False if another job has removed it.

    Several jobs may find the same dead lock. Each locks that very file by ``flock`` before it looks
    at the path again, so none can remove the new file of a job that was faster.
    """
    try:
        # NFS grants an exclusive lock only on a file that is open for writing.
        stale = path.open("r+b" if os.access(path, os.W_OK) else "rb")
    except FileNotFoundError:
        return False
    with stale:
        with suppress(OSError):  # a file server without locks; two jobs would have to meet here
            fcntl.flock(stale, fcntl.LOCK_EX)
        if not _is_at(path, stale) or _read(path) != holder:
            return False
        path.unlink()
    return True


def _is_at(path: Path, file: BinaryIO) -> bool:
    """Tell if ``path`` still names an open file."""
    try:
        # Opened, as in ``_time_of``.
        with path.open("rb") as current:
            return os.path.samestat(os.fstat(current.fileno()), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False
