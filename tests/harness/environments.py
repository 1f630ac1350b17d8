"""Virtual environments with packages of other projects, which this one must not contain."""

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

# Names the folder that keeps environments from run to run; it may be deleted at any time.
FOLDER_VARIABLE = "NEMO_ALIGNER_TEST_ENVIRONMENTS"
# Names a folder with checkouts of projects that are on no package index: RL (NeMo RL) and slime.
CHECKOUTS_VARIABLE = "NEMO_ALIGNER_TEST_CHECKOUTS"
_INSTALL_S = 600
_FREE_GB = 2
# The interpreter of this Triton needs an older numpy than 2.4.
TRITON = ("triton==3.6.0", "numpy<2.4")
# Names a Python interpreter with vLLM, which is too large to install for a test.
VLLM_VARIABLE = "NEMO_ALIGNER_TEST_VLLM_PYTHON"


def kept_environments() -> Path:
    named = os.environ.get(FOLDER_VARIABLE)
    return Path(named) if named else Path.home() / ".cache" / "nemo_aligner" / "test_environments"


def write_bytecode() -> None:
    """Let this process and those that tests start write bytecode.

    With PYTHONDONTWRITEBYTECODE every process compiles 200 modules at its start.
    """
    sys.dont_write_bytecode = False
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


def make_environment(folder: Path, *requirements: str, alone: tuple[str, ...] = ()) -> Path:
    """Make an environment that also sees this environment's packages; return its interpreter.

    ``requirements`` are installed with their dependencies, ``alone`` without.
    """
    python = new_environment(folder, sys.executable)
    (packages,) = folder.glob("lib/python*/site-packages")
    ours = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "ours.pth").write_text("\n".join(ours) + "\n")
    for options, packages_to_add in (([], requirements), (["--no-deps"], alone)):
        if packages_to_add:
            install(python, *options, *packages_to_add)
    return python


def new_environment(folder: Path, base: str) -> Path:
    """Make an environment of the interpreter ``base`` without packages; return its interpreter."""
    # Without pip, which takes longer to install than most packages do.
    subprocess.run([base, "-m", "venv", "--without-pip", str(folder)], check=True)
    return folder / "bin" / "python"


def install(python: Path, *requirements: str) -> None:
    """Install packages by this environment's pip; where that fails, the test is skipped.

    Modules are not compiled: those that are imported compile themselves.
    """
    pip = [sys.executable, "-m", "pip", "--python", str(python)]
    command = [*pip, "install", "--quiet", "--no-compile", *requirements]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_INSTALL_S)
    except subprocess.TimeoutExpired:
        pytest.skip(f"{' '.join(requirements)}: not installed within {_INSTALL_S} s")
    if done.returncode != 0:
        pytest.skip(f"{' '.join(requirements)}: cannot be installed: {done.stderr[-300:]}")


def kept_environment(name: str, made_of: tuple[str, ...], make: Callable[[Path], object]) -> Path:
    """The folder of an environment that ``make`` fills once, for this run and later ones.

    A change of ``made_of`` or of this Python makes a new one. Without space for it, the test is
    skipped.
    """
    parent = kept_environments()
    parent.mkdir(parents=True, exist_ok=True)
    key = hashlib.sha256("\n".join((sys.prefix, sys.version, *made_of)).encode()).hexdigest()
    folder = parent / f"{name}-{key[:12]}"
    built = parent / f"{folder.name}.built"
    with FileLock(parent / f"{folder.name}.lock"):
        if not built.exists():
            shutil.rmtree(folder, ignore_errors=True)
            skip_on_full_disk(parent, name)
            make(folder)
            built.touch()
    return folder


def skip_on_full_disk(folder: Path, what: str) -> None:
    """Skip the test if fewer than 2 GB are free, since a full disk would fail all other tests.

    ``what`` is what will be written to ``folder``.
    """
    free = shutil.disk_usage(folder).free / 1e9
    if free < _FREE_GB:
        pytest.skip(f"{folder}: {free:.1f} GB are free, {what} needs {_FREE_GB}")


def python_of(version: str) -> str:
    """Path of a Python of this version, such as "3.13"; without one, the test is skipped."""
    named = shutil.which(f"python{version}")
    pyenv_pythons = sorted(
        Path.home().glob(f".pyenv/versions/{version}.*/bin/python"), reverse=True
    )
    for python in [*([named] if named else []), *map(str, pyenv_pythons)]:
        # A name on the path may be a shim of pyenv that does not run.
        if subprocess.run([python, "--version"], capture_output=True).returncode == 0:
            return python
    pytest.skip(f"there is no Python {version}")


def package(name: str) -> Path:
    """A folder with the files of a package's wheel, without its dependencies.

    The test is skipped if the wheel cannot be downloaded.
    """

    def make(folder: Path) -> None:
        folder.mkdir()
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        options = ["--only-binary", ":all:", "--dest", str(folder), name]
        done = subprocess.run([*command, *options], capture_output=True, text=True)
        wheels = list(folder.glob("*.whl"))
        if not wheels:
            pytest.skip(f"the package {name} cannot be downloaded: {done.stderr.strip()[-300:]}")
        shutil.unpack_archive(wheels[0], folder, format="zip")
        wheels[0].unlink()

    return kept_environment(name.partition("=")[0], (name,), make)


def checkout(name: str) -> Path:
    """The checkout of a project that is on no package index; without one, the test is skipped."""
    folder = Path(os.environ.get(CHECKOUTS_VARIABLE, "")) / name
    if CHECKOUTS_VARIABLE not in os.environ or not folder.is_dir():
        pytest.skip(f"{CHECKOUTS_VARIABLE} names no folder with a checkout of {name}")
    return folder


def vllm_python() -> str:
    """Path of a Python with vLLM; without one, the test is skipped."""
    if importlib.util.find_spec("vllm") is not None:
        return sys.executable
    if VLLM_VARIABLE not in os.environ:
        pytest.skip(f"vLLM is not installed, and {VLLM_VARIABLE} names no Python that has it")
    return os.environ[VLLM_VARIABLE]


def triton_environment() -> Path:
    """The folder of an environment with the compiler Triton, for its interpreter on a CPU."""
    return kept_environment("triton", TRITON, lambda folder: make_environment(folder, *TRITON))


def triton_python() -> str:
    """Path of a Python with the extra ``triton``, which needs numpy 1: this one if it has both."""
    if importlib.util.find_spec("pytriton") is not None and np.__version__.startswith("1."):
        return sys.executable
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extra = tuple(project["optional-dependencies"]["triton"])
    folder = kept_environment("triton", extra, lambda folder: make_environment(folder, *extra))
    return str(folder / "bin" / "python")
