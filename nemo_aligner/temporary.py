"""Temporary folders that are gone when their process is, however that ends."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

# It waits for the end of its input, which this process holds open. What a terminal, a launcher or
# Slurm sends to all at once, and even SIGKILL here, leaves it time to remove the folder.
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
