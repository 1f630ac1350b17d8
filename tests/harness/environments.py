"""Environments of other projects' packages, that this one's own must not hold."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from filelock import FileLock

from tests.harness.launching import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

# Where environments are kept from one run to the next; they may be deleted at any time.
FOLDER_VARIABLE = "NEMO_ALIGNER_TEST_ENVIRONMENTS"
_INSTALL_S = 600
# A Python that has vLLM: its package is too large to install for a test.
VLLM_VARIABLE = "NEMO_ALIGNER_TEST_VLLM_PYTHON"


def kept_environments() -> Path:
    given = os.environ.get(FOLDER_VARIABLE)
    return Path(given) if given else Path.home() / ".cache" / "nemo_aligner" / "test_environments"


def make_environment(folder: Path, *requirements: str, alone: tuple[str, ...] = ()) -> Path:
    """The python of a new environment, that sees what this one has and adds what it lacks.

    ``alone`` are installed without what they ask for.
    """
    python = new_environment(folder, sys.executable)
    (packages,) = folder.glob("lib/python*/site-packages")
    ours = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "ours.pth").write_text("\n".join(ours) + "\n")
    for options, wanted in (([], requirements), (["--no-deps"], alone)):
        if wanted:
            install(python, *options, *wanted)
    return python


def new_environment(folder: Path, base: str) -> Path:
    """The python of a new environment of ``base``, without packages."""
    # Nor pip: to install that takes longer than most of what is installed then.
    subprocess.run([base, "-m", "venv", "--without-pip", str(folder)], check=True)
    return folder / "bin" / "python"


def install(python: Path, *wanted: str) -> None:
    """By this environment's pip; the test is skipped, saying why, where that cannot be.

    What is imported of it compiles itself, once: a fraction of all.
    """
    pip = [sys.executable, "-m", "pip", "--python", str(python)]
    command = [*pip, "install", "--quiet", "--no-compile", *wanted]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_INSTALL_S)
    except subprocess.TimeoutExpired:
        pytest.skip(f"{' '.join(wanted)}: not installed within {_INSTALL_S} s")
    if done.returncode != 0:
        pytest.skip(f"{' '.join(wanted)}: cannot be installed: {done.stderr[-300:]}")


def kept_environment(
    name: str, made_of: tuple[str, ...], make: Callable[[Path], object], *, gigabytes: int = 2
) -> Path:
    """The folder of an environment that ``make`` fills once, for this run and those to come.

    ``made_of`` is all that it depends on beside this Python: with another one it is made anew.
    Making it takes up to so many ``gigabytes`` of the disk: the test is skipped where fewer are
    free, as on a full disk all that run beside it would fail.
    """
    parent = kept_environments()
    parent.mkdir(parents=True, exist_ok=True)
    key = hashlib.sha256("\n".join((sys.prefix, sys.version, *made_of)).encode()).hexdigest()
    folder = parent / f"{name}-{key[:12]}"
    built = parent / f"{folder.name}.built"
    with FileLock(parent / f"{folder.name}.lock"):
        if not built.exists():
            shutil.rmtree(folder, ignore_errors=True)
            free = shutil.disk_usage(parent).free / 1e9
            if free < gigabytes:
                pytest.skip(f"{parent}: {free:.1f} GB are free, {name} wants {gigabytes}")
            make(folder)
            built.touch()
    return folder


def python_of(version: str) -> str:
    """A Python of this version, as ``3.13``; the test is skipped where there is none."""
    named = shutil.which(f"python{version}")
    kept = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"), reverse=True)
    for python in [*([named] if named else []), *map(str, kept)]:
        # A name on the path may be pyenv's, which does not run.
        if subprocess.run([python, "--version"], capture_output=True).returncode == 0:
            return python
    pytest.skip(f"there is no Python {version}")


def package(name: str) -> Path:
    """A folder with a package's files, not installed.

    It is taken from the wheel, without what it asks for; the test is skipped where it is not there.
    """

    def make(folder: Path) -> None:
        folder.mkdir()
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        options = ["--only-binary", ":all:", "--dest", str(folder), name]
        done = subprocess.run([*command, *options], capture_output=True, text=True)
        wheels = list(folder.glob("*.whl"))
        if not wheels:
            pytest.skip(f"the package {name} cannot be had: {done.stderr.strip()[-300:]}")
        shutil.unpack_archive(wheels[0], folder, format="zip")
        wheels[0].unlink()

    return kept_environment(name.partition("=")[0], (name,), make)


def vllm_python() -> str:
    """A Python with vLLM; the test is skipped where none is named."""
    if importlib.util.find_spec("vllm") is not None:
        return sys.executable
    if VLLM_VARIABLE not in os.environ:
        pytest.skip(f"vLLM is not installed, and {VLLM_VARIABLE} names no Python that has it")
    return os.environ[VLLM_VARIABLE]


def triton_python() -> str:
    """A Python with the extra ``triton`` before this environment's packages, whose numpy may be 2.

    It is this one if that has the extra.
    """
    if importlib.util.find_spec("pytriton") is not None and np.__version__.startswith("1."):
        return sys.executable
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extra = tuple(project["optional-dependencies"]["triton"])
    folder = kept_environment("triton", extra, lambda folder: make_environment(folder, *extra))
    return str(folder / "bin" / "python")
