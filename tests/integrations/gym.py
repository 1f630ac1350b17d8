"""NeMo Gym 0.7 in a separate environment, with this project's resources server in it."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nemo_aligner.integrations.nemo_gym import drop_in
from tests.harness.environments import install, kept_environment, new_environment, python_of
from tests.harness.launching import ROOT, free_port

GYM = "nemo-gym==0.7.0"
START_SECS = 120


def gym_python() -> Path:
    """It requires Python 3.13.14, but runs on any 3.13."""
    base = python_of("3.13")

    def make(folder: Path) -> None:
        python = new_environment(folder, base)
        install(python, "--ignore-requires-python", GYM, "pytest", "httpx")

    return kept_environment("gym", (base, GYM), make) / "bin" / "python"


def gym_folder(folder: Path) -> Path:
    """A folder in which a user of the package runs Gym, with the resources server."""
    drop_in(folder)
    return folder


def run(
    python: Path, folder: Path, *arguments: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(python), *arguments],
        cwd=folder,
        env={**_environment(folder), **variables},
        capture_output=True,
        text=True,
        timeout=300,
    )


@contextlib.contextmanager
def environment_server(python: Path, folder: Path, **options: Any) -> Iterator[str]:
    """The URL of the resources server, started like Gym does: ``app.py`` and a config.

    Like ``gym env start`` of the package (``run_command`` in ``nemo_gym/cli/setup_command.py``), it
    puts only the server's own folder on the path.
    """
    port, head = free_port(), {"host": "127.0.0.1", "port": free_port()}
    served = {"entrypoint": "app.py", "domain": "rlhf", "host": "127.0.0.1", "port": port}
    config = {
        "head_server": head,
        "dry_run": False,
        "reward_model": {"resources_servers": {"reward_model": {**served, **options}}},
    }
    server = folder / "resources_servers" / "reward_model"
    environment = {
        **_environment(server),
        "NEMO_GYM_CONFIG_DICT": json.dumps(config),
        "NEMO_GYM_CONFIG_PATH": "reward_model",
    }
    log = folder / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [str(python), "app.py"],
            cwd=server,
            env=environment,
            stdout=output,
            stderr=output,
        )
    try:
        url = f"http://127.0.0.1:{port}"
        _wait(process, url, log)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def verify(url: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(
        f"{url}/verify", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)


def _environment(python_path: Path) -> dict[str, str]:
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    return {
        **kept,
        "PYTHONPATH": str(python_path),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }


def serve_command(folder: Path) -> list[str]:
    """The command ``nemo-aligner`` of this Python, for a process that runs another Python."""
    script = folder / "nemo-aligner"
    script.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m nemo_aligner "$@"\n')
    script.chmod(0o755)
    return [str(script)]


def _wait(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    end = time.monotonic() + START_SECS
    while time.monotonic() < end and process.poll() is None:
        with (
            contextlib.suppress(OSError, urllib.error.URLError),
            urllib.request.urlopen(f"{url}/livez", timeout=5),
        ):
            return
        time.sleep(0.2)
    raise AssertionError(f"Gym's server did not start:\n{log.read_text()[-4000:]}")
