"""What is written with one version of megatron-core is read with another one, to the same end."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from tests.harness import tiny
from tests.harness.environments import (
    install,
    kept_environment,
    make_environment,
    triton_environment,
)
from tests.paths.compatibility.test_earlier_files import EXPECTED, TOLERANCE, arguments, logged_in

# 0.17 and later are published for Python 3.12, but the package megatron.core also runs on 3.11.
OTHER, ITS_PYTHON = (
    ("0.16.1", "3.11") if version("megatron-core") != "0.16.1" else ("0.19.2", "3.12")
)
SCRIPT = "tests/paths/compatibility/train_and_score.py"
ARCHIVE = "run/checkpoints/megatron_gpt.nemo"
MIDDLE = "run/checkpoints/step_00000004"
LATER_STEPS = ("5", "6", "7", "8")
Run = Callable[..., object]


class Environment(NamedTuple):
    """One environment: the folder it writes to, and a function that runs a script there."""

    folder: Path
    run: Run


@pytest.fixture(scope="module")
def other_python() -> Path:
    """A Python with the packages of this one, but another megatron-core."""
    requirement = f"megatron-core=={OTHER}"

    def make(folder: Path) -> None:
        python = make_environment(folder)
        packages, its_packages = (
            next(path.glob("lib/python*/site-packages")) for path in (folder, triton_environment())
        )
        (packages / "triton.pth").write_text(f"{its_packages}\n")  # 0.18 and later import it
        of_python = ("--ignore-requires-python", "--python-version", ITS_PYTHON)
        wheel = ("--no-deps", "--only-binary", ":all:", "--target", str(packages))
        install(python, *of_python, *wheel, requirement)

    folder = kept_environment("megatron", (requirement, ITS_PYTHON), make)
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
    versions = [found_in(python.folder)["megatron"] for python in (here, there)]
    assert versions == [version("megatron-core"), OTHER]
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
