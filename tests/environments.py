"""Environments of other projects' packages, that this one's own must not hold."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def make_environment(folder: Path, *requirements: str, alone: tuple[str, ...] = ()) -> Path:
    """The python of a new environment, that sees what this one has and adds what it lacks.

    ``alone`` are installed without what they ask for.
    """
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    ours = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "ours.pth").write_text("\n".join(ours) + "\n")
    python = folder / "bin" / "python"
    for options, wanted in (([], requirements), (["--no-deps"], alone)):
        if wanted:
            command = [str(python), "-m", "pip", "install", "--quiet", *options, *wanted]
            done = subprocess.run(command, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr[-2000:]
    return python
