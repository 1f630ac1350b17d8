"""Processes: the launcher's environment, subprocesses of our own verbs, temporary folders."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import nemo_aligner
from nemo_aligner.utils.errors import ConfigError, PeerError

# This process among those of a launcher, and which of them reports an error.
#
# torch is not imported: a wrong setting must be reported before anything large is loaded.

HOLD_BACK_S = 5.0
_DEFAULT_PORT = 29400
_SPEAKER = "speaker"


@dataclass(frozen=True)
class Process:
    """One of several that a launcher started; ``master`` is None for one without a launcher."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master: tuple[str, int] | None


def find_process(env: Mapping[str, str]) -> Process:
    """This process as torchrun's or Slurm's variables have it; without them the only one.

    Raises:
        ConfigError: a variable is missing or no number.
    """
    if "RANK" in env and "WORLD_SIZE" in env:
        return _process_from_torchrun(env)
    if "SLURM_PROCID" in env and "SLURM_STEP_NUM_TASKS" in env and "SLURM_STEP_ID" in env:
        return _process_from_slurm(env)
    return Process(0, 1, 0, 1, None)


def is_launched() -> bool:
    """Return True if torchrun or srun started this process as one of several."""
    return find_process(os.environ).master is not None


def is_main() -> bool:
    """Return True on rank 0 of torch's process group, or if there is no group."""
    dist = sys.modules.get("torch.distributed")  # not imported: then there is no group
    return dist is None or not dist.is_initialized() or dist.get_rank() == 0


def is_first_rank() -> bool:
    """Return True on rank 0, or in the only process."""
    try:
        return find_process(os.environ).rank == 0
    except ConfigError:
        return True  # whoever it is, it has to say so


def settle(error: BaseException, speaker: str) -> None:
    """Note that the ranks agree that this one says ``error``, with ``speaker`` before it."""
    vars(error)[_SPEAKER] = speaker


def describe_error(error: Exception) -> str:
    """Its kind and its message."""
    return f"{type(error).__name__}: {error}"


def report(error: Exception, describe: Callable[[Exception], str] = describe_error) -> int:
    """Say on stderr what ends this process, where no other rank says it; exit code 1.

    A rank that nobody has asked yet leaves it to the first, and speaks only if the launcher does
    not end it meanwhile.
    """
    if isinstance(error, PeerError):
        _wait_to_be_ended()
        return 1
    speaker = vars(error).get(_SPEAKER)
    if speaker is None:
        speaker = _speaker_of_many()
    text = f"{speaker}{describe(error)}"
    _tell_torchrun(text)
    print(text, file=sys.stderr, flush=True)
    return 1


def leave_together(code: int) -> int:
    """The exit code of this rank where all have succeeded, and ``code`` is that of the whole.

    The first rank alone has it, and leaves last: launchers end all ranks with the first whose code
    is not 0, and the code of one that they ended would count.
    """
    if code == 0 or not is_first_rank():
        return 0
    _wait_to_be_ended()
    return code


def _speaker_of_many() -> str:
    """Before the ranks know each other: most likely all have met the same."""
    if is_first_rank():
        return ""
    _wait_to_be_ended()
    return f"rank {find_process(os.environ).rank}: "


def _wait_to_be_ended() -> None:
    """Stay until the launcher has seen how others ended."""
    if is_launched():
        with suppress(KeyboardInterrupt):
            time.sleep(HOLD_BACK_S)


def _tell_torchrun(line: str) -> None:
    """Have torchrun's closing report say it; its own ``record`` would put the traceback there."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file:
        told = {"message": line, "extraInfo": {"timestamp": str(int(time.time()))}}
        with suppress(OSError):
            Path(file).write_text(json.dumps({"message": told}), encoding="utf-8")


def _process_from_torchrun(env: Mapping[str, str]) -> Process:
    world_size = _read_int(env, "WORLD_SIZE")
    return Process(
        rank=_read_int(env, "RANK"),
        world_size=world_size,
        local_rank=_read_int(env, "LOCAL_RANK"),
        local_world_size=_read_int(env, "LOCAL_WORLD_SIZE", default=world_size),
        master=(_read(env, "MASTER_ADDR"), _read_int(env, "MASTER_PORT")),
    )


def _process_from_slurm(env: Mapping[str, str]) -> Process:
    world_size = _read_int(env, "SLURM_STEP_NUM_TASKS")
    # One port per job, so that jobs on one node do not meet.
    port = _DEFAULT_PORT + _read_int(env, "SLURM_JOB_ID", default=0) % 1000
    return Process(
        rank=_read_int(env, "SLURM_PROCID"),
        world_size=world_size,
        local_rank=_read_int(env, "SLURM_LOCALID"),
        local_world_size=_first_number(env.get("SLURM_STEP_TASKS_PER_NODE"), default=world_size),
        master=(
            env.get("MASTER_ADDR") or first_host(_read(env, "SLURM_STEP_NODELIST")),
            _read_int(env, "MASTER_PORT", default=port),
        ),
    )


def _first_number(text: str | None, default: int) -> int:
    match = re.match(r"\d+", text or "")
    return int(match.group()) if match else default


def first_host(nodelist: str) -> str:
    """The first host of a Slurm node list: ``gpu[003-005,9],cpu1`` -> ``gpu003``."""
    match = re.match(r"([^,\[]+)(?:\[(\d+)[^\]]*\])?([^,]*)", nodelist)
    if match is None:
        raise ConfigError(f"SLURM_STEP_NODELIST: got {nodelist!r}, wanted a list of hosts")
    prefix, number, suffix = match.groups()
    return prefix + (number or "") + suffix


def _read(env: Mapping[str, str], key: str) -> str:
    value = env.get(key)
    if value is None:
        raise ConfigError(f"environment variable {key}: it is missing, the launcher has to set it")
    return value


def _read_int(env: Mapping[str, str], key: str, default: int | None = None) -> int:
    if default is not None and key not in env:
        return default
    value = _read(env, key)
    try:
        return int(value)
    except ValueError:
        raise ConfigError(f"environment variable {key}: got {value!r}, wanted a number") from None


# Commands of this package, to show and to start.

_WIDTH = 78


def show_command(verb: str, arguments: Sequence[str], first: str = "") -> str:
    """Render a command as typed, after ``first``: on one line or, if long, one per argument."""
    fields: list[str] = []
    for argument in map(shlex.quote, arguments):
        # An option and its value stay together.
        if fields and fields[-1].startswith("--") and " " not in fields[-1]:
            fields[-1] += f" {argument}"
        else:
            fields.append(argument)
    whole = " ".join([f"{first}nemo-aligner {verb}", *fields])
    if len(whole) <= _WIDTH:
        return whole
    return f" \\\n{' ' * (len(first) + 4)}".join([f"{first}nemo-aligner {verb}", *fields])


def verb_command(verb: str, *arguments: str) -> list[str]:
    """The command of a verb, by this Python."""
    return [sys.executable, "-m", "nemo_aligner", *verb.split(), *arguments]


def environment() -> dict[str, str]:
    """This process's, in which the package is found wherever it lies."""
    package = str(Path(nemo_aligner.__file__).resolve().parent.parent)
    path = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path}


# Temporary folders that are removed when their process ends, however it ends.

# It waits for the end of its input, which this process holds open. So it survives signals that a
# terminal, a launcher or Slurm sends to all processes, and a SIGKILL of this one.
_REMOVER = 'trap "" INT TERM HUP QUIT; read -r _; rm -rf -- "$0"'
_REMOVERS: dict[Path, subprocess.Popen[bytes]] = {}


def make_temporary(prefix: str, parent: Path | None = None) -> Path:
    """A new folder in ``parent``, or in the system's; ``remove_temporary`` is for when it can go.

    Raises:
        OSError: nothing can be written there.
    """
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent)).absolute()
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
    """Remove a folder of ``make_temporary`` now; any other stays as it is."""
    remover = _REMOVERS.pop(folder, None)
    if remover is not None:
        shutil.rmtree(folder, ignore_errors=True)
        remover.communicate()
