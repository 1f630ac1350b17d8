"""Worlds of processes, and a server, that score some texts beside this process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

import nemo_aligner
from nemo_aligner.diagnostics.invariance import Scored
from nemo_aligner.errors import ServingError

SERVER_START_S = 300
SERVER_STOP_S = 60


def run_world(job: Mapping[str, Any], size: int) -> Scored:
    """``score_everywhere`` in a world of ``size`` processes of its own.

    Raises:
        ServingError: the world failed; what it said of it stands on stderr.
    """
    print(f"scoring in {job['precision']} at {size} process{'es' * (size > 1)}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        asked, result = Path(folder, "asked.json"), Path(folder, "result.json")
        asked.write_text(json.dumps(job))
        command = [sys.executable]
        if size > 1:
            command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
        command += ["-m", "nemo_aligner.diagnostics.everywhere", str(asked), str(result)]
        if subprocess.run(command, env=_environment(), check=False).returncode:
            raise ServingError(f"the run of {size} processes failed, see above")
        return Scored.from_dict(json.loads(result.read_text()))


def score_over_http(
    serve: Sequence[str], checkpoint: str, precision: str, texts: list[Any]
) -> dict[str, np.ndarray]:
    """Rewards by variant, of the server that the command ``serve`` starts with its settings.

    Raises:
        ServingError: the server does not start, or does not answer.
    """
    # Imported here: whoever leaves the server out needs no pytriton.
    from nemo_aligner.serving.client.reward import RewardClient

    print(f"scoring in {precision} over HTTP", flush=True)
    settings = [f"rm_model_file={checkpoint}", f"precision={precision}"]
    with _served([*serve, *settings]) as url, RewardClient(url) as client:
        alone = np.concatenate([client.score([text]) for text in texts])
        return {"alone": alone, "all together": client.score(texts)}


@contextmanager
def _served(command: Sequence[str]) -> Iterator[str]:
    """The URL of a server, on a free port of this machine."""
    with tempfile.TemporaryDirectory() as folder:
        ready, log = Path(folder, "ready"), Path(folder, "log")
        command = [*command, "server.port=0", f"server.ready_file={ready}"]
        with log.open("wb") as output:
            server = subprocess.Popen(command, stdout=output, stderr=output, env=_environment())
        try:
            end = time.monotonic() + SERVER_START_S
            while not ready.exists():
                if server.poll() is not None or time.monotonic() > end:
                    raise ServingError(f"the server did not start:\n{log.read_text()[-3000:]}")
                time.sleep(0.2)
            yield ready.read_text().strip()
        finally:
            server.terminate()
            try:
                server.wait(SERVER_STOP_S)
            except subprocess.TimeoutExpired:
                server.kill()


def _environment() -> dict[str, str]:
    """This process's, in which the package is found wherever it lies."""
    package = str(Path(nemo_aligner.__file__).resolve().parent.parent)
    path = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path}
