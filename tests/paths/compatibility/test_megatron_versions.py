"""What is written with one version of megatron-core is read with another one, to the same end."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from tests.harness import tiny
from tests.harness.environments import install, kept_environment, new_environment, python_of
from tests.paths.compatibility.test_earlier_files import EXPECTED, TOLERANCE, arguments, logged_in

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

# megatron-core 0.17 and later need Python 3.12; 0.16 runs on 3.10 to 3.12.
OTHER = "3.11" if sys.version_info >= (3, 12) else "3.12"
SCRIPT = "tests/paths/compatibility/train_and_score.py"
ARCHIVE = "run/checkpoints/megatron_gpt.nemo"
MIDDLE = "run/checkpoints/step_00000004"
LATER_STEPS = ("5", "6", "7", "8")
Run = Callable[..., object]


class Environment(NamedTuple):
    """One environment: the folder it writes to, and a function that runs a script there."""

    folder: Path
    run: Run


def needed() -> list[str]:
    """The requirements of this package, with the torch version of this environment."""
    project = tomllib.loads((tiny.ROOT / "pyproject.toml").read_text())["project"]
    requirements = [line for line in project["dependencies"] if not line.startswith("torch")]
    return [f"torch=={version('torch').partition('+')[0]}", *requirements]


@pytest.fixture(scope="module")
def other_python() -> Path:
    base, packages = python_of(OTHER), needed()

    def make(folder: Path) -> None:
        install(new_environment(folder, base), *packages)

    # Its torch is for GPUs: 5 GB, and its wheels need space during installation.
    folder = kept_environment("megatron", (base, *packages), make, gigabytes=12)
    return folder / "bin" / "python"


@pytest.fixture(scope="module")
def environments(
    other_python: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Environment, Environment]:
    """This environment and one with another megatron-core, each with a finished run."""

    def run_there(script: str, *arguments: str) -> None:
        command = [str(other_python), str(tiny.ROOT / script), *arguments]
        done = subprocess.run(
            command, env=tiny.environment(), capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr[-6000:]

    folder = tmp_path_factory.mktemp("versions")
    here = Environment(folder / "here", tiny.run_script)
    there = Environment(folder / "there", run_there)
    for python in (here, there):
        python.folder.mkdir()
        train_and_score(python.run, python.folder, python.folder / ARCHIVE)
    if found_in(here.folder)["megatron"] == found_in(there.folder)["megatron"]:
        pytest.skip(f"both environments have megatron-core {version('megatron-core')}")
    return here, there


def train_and_score(run: Run, folder: Path, archive: Path) -> None:
    texts = json.dumps(EXPECTED["texts"])
    output = str(folder / "found.json")
    run(SCRIPT, str(archive), texts, output, *arguments(folder / "run"))


def found_in(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "found.json").read_text())


@pytest.mark.parametrize("writer", [0, 1], ids=["written here", "written there"])
def test_megatron_version_scores_the_same_and_goes_on_as_another_did(
    environments: tuple[Environment, Environment], writer: int, tmp_path: Path
) -> None:
    written, reader = environments[writer].folder, environments[1 - writer]
    shutil.copytree(written / MIDDLE, tmp_path / MIDDLE)
    train_and_score(reader.run, tmp_path, written / ARCHIVE)
    expected, result = found_in(written), found_in(tmp_path)
    np.testing.assert_allclose(result["rewards"], expected["rewards"], rtol=0, atol=TOLERANCE)
    went_on, logged = logged_in(tmp_path / "run"), logged_in(written / "run")
    names = [name for name in logged if name in EXPECTED["ranking"]["logged"]]
    assert "loss" in " ".join(names)
    for name in names:
        later = {step: value for step, value in logged[name].items() if step in LATER_STEPS}
        assert later, name
        assert went_on[name] == pytest.approx(later, rel=0, abs=TOLERANCE), name
