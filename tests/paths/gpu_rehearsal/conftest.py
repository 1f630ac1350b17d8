"""Runs rehearsals, as many as possible in one process, once for all tests and workers of a run."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness import tiny
from tests.harness.once import Once

HERE = Path(__file__).parent
_LONGEST_S = 900.0  # on a busy machine; on an idle one it takes less than a tenth of this
Task = dict[str, Any]
Rehearse = Callable[..., list[dict[str, Any]]]

# A backward pass asks every device for its streams, also CUDA, which a CPU build does not have.
_NO_STREAMS = "int _ZN2at11accelerator13isAcceleratorEN3c1010DeviceTypeE(signed char t){return 0;}"


def why_not() -> str | None:
    if sys.platform != "linux" or shutil.which("gcc") is None:
        return "a rehearsal needs gcc, and Linux"
    if torch.version.cuda is not None:
        return "a rehearsal needs torch's CPU build"
    return None


@pytest.fixture(scope="session")
def rehearse(once: Once) -> Rehearse:
    """``rehearse(name, tasks, stubs, **environment)`` returns what was recorded for each task."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)

    def compile_shim(folder: Path) -> None:
        command = ["gcc", "-x", "c", "-", "-shared", "-fPIC", "-o", str(folder / "shim.so")]
        subprocess.run(command, input=_NO_STREAMS, check=True, text=True)

    shim = once("rehearsal_shim", compile_shim) / "shim.so"

    def run(
        name: str, tasks: list[Task], stubs: tuple[str, ...] = (), **environment: str
    ) -> list[dict[str, Any]]:
        paths = ":".join([str(tiny.ROOT), *(str(HERE / f"stubs_{stub}") for stub in stubs)])

        def begin(folder: Path) -> None:
            """Cache a failed output, too: the process is not started again for each test."""
            results = folder / "results.json"
            done = tiny.run_script(
                "tests/paths/gpu_rehearsal/rehearse.py",
                json.dumps(tasks),
                str(results),
                env={"PYTHONPATH": paths, "LD_PRELOAD": str(shim), **environment},
                fresh=True,
                check=False,
                timeout=_LONGEST_S,
            )
            if not results.exists():
                results.write_text(json.dumps([{"error": done.stderr[-6000:]}] * len(tasks)))

        return json.loads((once(f"rehearsal_{name}", begin) / "results.json").read_text())

    return run
