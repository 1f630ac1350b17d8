"""Ranks and processes: which rank this is, which rank reports an error, subprocesses and folders.

torch is not imported here, so that a wrong setting is reported before anything large is loaded.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import nemo_aligner
from nemo_aligner.utils.errors import AlignerError, ConfigError, PeerError, one_line

# Find out which rank this process is, and choose the rank that reports an error.

# Seconds that a rank with an error waits to be ended by the launcher, so that another rank's
# message is printed first.
HOLD_BACK_S = 5.0
# Seconds after the first signal from which another one counts as a second one.
SECOND_AFTER_S = 1.0
_DEFAULT_PORT = 29400
_PORTS_BETWEEN_STEPS = 137  # no neighbour of the job, whose number is likely to be close
_SPEAKER = "speaker"


@dataclass(frozen=True)
class Process:
    """Rank of this process among those that torchrun or srun started.

    Attributes:
        local_rank, local_world_size: rank on this node, and number of ranks on it.
        master: host and port at which the ranks meet; None without a launcher, and for the only
            task of a Slurm step.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master: tuple[str, int] | None


def find_process(env: Mapping[str, str]) -> Process:
    """Read the environment variables of torchrun or Slurm; without them this is the only process.

    Raises:
        ConfigError: a variable is missing, or is not a number.
    """
    if "RANK" in env and "WORLD_SIZE" in env:
        return _process_from_torchrun(env)
    if is_slurm_task(env):
        return _process_from_slurm(env)
    return Process(0, 1, 0, 1, None)


def is_slurm_task(env: Mapping[str, str]) -> bool:
    """Return True if srun has started this process as one of its ranks, without torchrun."""
    of_slurm = {"SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_ID"}
    return of_slurm <= env.keys() and not {"RANK", "WORLD_SIZE"} <= env.keys()


def usable_cores() -> int:
    """Count the CPU cores that this process may run on, which may be fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):  # only on Linux
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def handled_signals(numbers: Iterable[int]) -> list[int]:
    """Return the signals to install handlers for: ``numbers``, but no SIGHUP that is ignored.

    nohup starts a process that ignores SIGHUP, which it must keep ignoring. An ignored Ctrl-C is
    still handled: shell scripts ignore it for their background commands, and a run must save then.
    """
    is_hangup_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [number for number in numbers if number != signal.SIGHUP or not is_hangup_ignored]


def is_second_interrupt(number: int, first: int, seconds: float) -> bool:
    """Tell if a signal, ``seconds`` after the ``first`` one, asks to end at once without saving.

    At least one of the two must be Ctrl-C, because some schedulers repeat SIGTERM, and send it
    after SIGUSR1. The same Ctrl-C may arrive twice within milliseconds, from the terminal and from
    a launcher. SIGHUP never counts: closing the terminal does not ask to lose unsaved work.
    """
    is_from_user = signal.SIGINT in (number, first) and number != signal.SIGHUP
    return is_from_user and seconds >= SECOND_AFTER_S


def is_launched() -> bool:
    """Tell if torchrun, or srun with several tasks, started this process."""
    return find_process(os.environ).master is not None


def is_main() -> bool:
    """Tell if this is rank 0 of torch's process group; True if there is no group."""
    # If torch.distributed was never imported, there is no group.
    dist = sys.modules.get("torch.distributed")
    return dist is None or not dist.is_initialized() or dist.get_rank() == 0


def is_first_rank() -> bool:
    """Tell if this is rank 0 by the launcher's variables; True for a single process.

    Unlike ``is_main``, it works before the process group exists.
    """
    try:
        return find_process(os.environ).rank == 0
    except ConfigError:
        return True  # the rank is unknown: let all ranks report errors


def settle(error: BaseException, speaker: str) -> None:
    """Record in ``error`` that this rank is the one that reports it, as the ranks have agreed.

    Args:
        speaker: prefix of the message, such as ``rank 3: ``.
    """
    vars(error)[_SPEAKER] = speaker


def describe_error(error: BaseException) -> str:
    """Format an error as its type and its message.

    An error that is private to a module is shown as the kind that docs/troubleshooting.md explains,
    which is its base class in ``utils/errors.py``.
    """
    is_ours = isinstance(error, AlignerError)
    kinds = (kind for kind in type(error).__mro__ if kind.__module__ == AlignerError.__module__)
    return f"{next(kinds).__name__ if is_ours else type(error).__name__}: {error}"


def report(error: Exception, describe: Callable[[Exception], str] = describe_error) -> int:
    """Print the error that ends this process to stderr, and return exit code 1.

    Usually only one rank prints. If the ranks have not agreed which one (``settle``), rank 0 prints
    at once. Every other rank prints only if the launcher does not end it within ``HOLD_BACK_S``.
    """
    if isinstance(error, PeerError):
        _wait_to_be_ended()
        return 1
    speaker = vars(error).get(_SPEAKER)
    if speaker is None:
        speaker = _wait_as_speaker()
    text = f"{speaker}{describe(error)}"
    _write_torchrun_error(text)
    print(text, file=sys.stderr, flush=True)
    return 1


def leave_together(code: int) -> int:
    """Return the code with which this rank must exit, so that the launcher reports ``code``.

    Only rank 0 exits with ``code``; the others exit with 0, and rank 0 waits for them. If several
    ranks exited with ``code``, the launcher would kill the rest after the first, and could report
    the exit code of a killed rank.
    """
    if code == 0 or not is_first_rank():
        return 0
    _wait_to_be_ended()
    return code


def _wait_as_speaker() -> str:
    """Wait until this rank may report an error, and return the prefix of its message.

    It is for errors for which the ranks have not agreed which rank reports them. Such errors occur
    before the process group exists. Most likely all ranks have the same error, so all but rank 0
    first wait for the launcher to end them.
    """
    if is_first_rank():
        return ""
    _wait_to_be_ended()
    return f"rank {find_process(os.environ).rank}: "


def _wait_to_be_ended() -> None:
    """Sleep, so that the launcher has time to end this process.

    The launcher does so when another rank, which reports the error, exits first.
    """
    if is_launched():
        with suppress(KeyboardInterrupt):
            time.sleep(HOLD_BACK_S)


def _write_torchrun_error(message: str) -> None:
    """Write the message to the file whose content torchrun shows in its final report.

    torch's decorator ``record`` also does this, but writes the whole traceback.
    """
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file:
        entry = {"message": message, "extraInfo": {"timestamp": str(int(time.time()))}}
        with suppress(OSError):
            Path(file).write_text(json.dumps({"message": entry}), encoding="utf-8")


def _process_from_torchrun(env: Mapping[str, str]) -> Process:
    world_size = _read_int(env, "WORLD_SIZE")
    return Process(
        rank=_read_int(env, "RANK"),
        world_size=world_size,
        local_rank=_read_int(env, "LOCAL_RANK"),
        local_world_size=_read_int(env, "LOCAL_WORLD_SIZE", default=world_size),
        master=(_read_variable(env, "MASTER_ADDR"), _read_int(env, "MASTER_PORT")),
    )


def _process_from_slurm(env: Mapping[str, str]) -> Process:
    world_size = _read_int(env, "SLURM_STEP_NUM_TASKS")
    return Process(
        rank=_read_int(env, "SLURM_PROCID"),
        world_size=world_size,
        local_rank=_read_int(env, "SLURM_LOCALID"),
        local_world_size=_first_number(env.get("SLURM_STEP_TASKS_PER_NODE"), default=world_size),
        # All commands of an interactive shell (``srun --pty bash``) are the only task of the same
        # step. They meet nobody, and would all open the same port.
        master=_slurm_master(env) if world_size > 1 else None,
    )


def _slurm_master(env: Mapping[str, str]) -> tuple[str, int]:
    host = env.get("MASTER_ADDR") or first_host(_read_variable(env, "SLURM_STEP_NODELIST"))
    # Two jobs on the same node use different ports, and so do two steps that one job runs at once.
    job, step = (_read_int(env, f"SLURM_{name}_ID", default=0) for name in ("JOB", "STEP"))
    port = _DEFAULT_PORT + (job + _PORTS_BETWEEN_STEPS * step) % 1000
    return host, _read_int(env, "MASTER_PORT", default=port)


def _first_number(text: str | None, default: int) -> int:
    match = re.match(r"\d+", text or "")
    return int(match.group()) if match else default


def first_host(nodelist: str) -> str:
    """Return the first host of a Slurm node list: ``gpu[003-005,9],cpu1`` -> ``gpu003``."""
    match = re.match(r"([^,\[]+)(?:\[(\d+)[^\]]*\])?([^,]*)", nodelist)
    if match is None:
        raise ConfigError(f"SLURM_STEP_NODELIST: got {nodelist!r}, wanted a list of hosts")
    prefix, number, suffix = match.groups()
    return prefix + (number or "") + suffix


def _read_variable(env: Mapping[str, str], key: str) -> str:
    value = env.get(key)
    if value is None:
        raise ConfigError(
            f"environment variable {key}: it is not set, but torchrun or srun must set it"
        )
    return value


def _read_int(env: Mapping[str, str], key: str, default: int | None = None) -> int:
    if default is not None and key not in env:
        return default
    value = _read_variable(env, key)
    try:
        return int(value)
    except ValueError:
        raise ConfigError(f"environment variable {key}: got {value!r}, wanted a number") from None


# Format ``nemo-aligner`` commands for messages, and prepare to start them as subprocesses.

_WIDTH = 78
_PACKAGE_FOLDERS = ("site-packages", "dist-packages")


def show_command(verb: str, arguments: Sequence[str], first: str = "") -> str:
    """Format a ``nemo-aligner`` command as a user would type it.

    A long command gets a line per argument.

    Args:
        first: text before the command, such as ``$ ``.
    """
    fields: list[str] = []
    for argument in map(shlex.quote, arguments):
        # Put an option and its value on the same line.
        if fields and fields[-1].startswith("--") and " " not in fields[-1]:
            fields[-1] += f" {argument}"
        else:
            fields.append(argument)
    one_line = " ".join([f"{first}nemo-aligner {verb}", *fields])
    if len(one_line) <= _WIDTH:
        return one_line
    return f" \\\n{' ' * (len(first) + 4)}".join([f"{first}nemo-aligner {verb}", *fields])


def verb_command(verb: str, *arguments: str) -> list[str]:
    """Return the arguments for ``subprocess`` that run ``nemo-aligner VERB`` with this Python."""
    return [sys.executable, "-m", "nemo_aligner", *verb.split(), *arguments]


def environment() -> dict[str, str]:
    """Return a copy of the environment in which subprocesses can import this package.

    They also find the modules that this process finds outside of its Python's folders, such as
    those next to the user's script, which settings may name as ``package.module:NAME``.
    """
    package = str(Path(nemo_aligner.__file__).resolve().parent.parent)
    named = (os.environ.get("PYTHONPATH") or "").split(os.pathsep)
    paths = dict.fromkeys([package, *named, *filter(_is_users_folder, sys.path)])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def _is_users_folder(path: str) -> bool:
    """Tell if an entry of ``sys.path`` is a folder outside of Python's installation."""
    folder = Path(path).resolve()
    # The folder of this package is on the path of ``python nemo_aligner/__main__.py``; its modules
    # must not be importable without the package's name.
    prefixes = (sys.prefix, sys.base_prefix, Path(nemo_aligner.__file__).parent)
    installed = [Path(prefix).resolve() for prefix in prefixes]
    is_installed = any(folder.is_relative_to(prefix) for prefix in installed)
    return folder.is_dir() and not is_installed and folder.name not in _PACKAGE_FOLDERS


def environment_of_one_process() -> dict[str, str]:
    """Return ``environment()`` without the variables that make a process one of several ranks.

    A rank's subprocess then runs on its own, and not as another rank of the run.
    """
    prefixes = ("TORCHELASTIC_", "SLURM_STEP_")
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "SLURM_PROCID")
    return {
        name: value
        for name, value in environment().items()
        if name not in names and not name.startswith(prefixes)
    }


# Make temporary folders that are removed when their process ends, even if it is killed.

# A shell script that removes the folder when its stdin ends. Its stdin is a pipe that this process
# holds open until it ends, even by SIGKILL. The script ignores the signals that a terminal, a
# launcher or Slurm sends to all processes, so that it outlives this process.
_REMOVER = 'trap "" INT TERM HUP QUIT; read -r _; rm -rf -- "$0"'
_REMOVERS: dict[Path, subprocess.Popen[bytes]] = {}


def make_temporary(prefix: str, parent: Path | None = None) -> Path:
    """Make a temporary folder that is removed when this process ends, or by ``remove_temporary``.

    Args:
        parent: the folder in which to make it; None means the system's folder for temporary files.

    Raises:
        ConfigError: the folder cannot be made in the system's folder for temporary files.
        OSError: the folder cannot be made in ``parent``.
    """
    try:
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent)).absolute()
    except OSError as error:
        if parent is not None:
            raise
        raise ConfigError(
            f"TMPDIR: no temporary folder can be made: {one_line(error)}. Set it to a folder that "
            "you may write to, on a disk with free space"
        ) from error
    _REMOVERS[folder] = subprocess.Popen(
        ["/bin/sh", "-c", _REMOVER, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        cwd="/",
    )
    return folder


def remove_temporary(folder: Path) -> None:
    """Remove a folder that ``make_temporary`` has made; do nothing for any other folder."""
    remover = _REMOVERS.pop(folder, None)
    if remover is not None:
        shutil.rmtree(folder, ignore_errors=True)
        remover.communicate()
