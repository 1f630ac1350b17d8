"""The package as it is installed: its distribution, what its extras bring, its settings files.

PyPI's ``nemo_aligner`` is NVIDIA's NeMo-Aligner, so the distribution has a name of its own, while
the import package keeps its name. Only the standard library is imported: this words the errors
about packages that are missing.
"""

from __future__ import annotations

import importlib.metadata
import re
from importlib.metadata import PackageNotFoundError
from os import PathLike
from pathlib import Path

from nemo_aligner import __version__

DISTRIBUTION = "megatron-reward"
_NVIDIAS = "nemo_aligner"
_PACKAGE = Path(__file__).resolve().parent.parent
_ENDING = ".yaml"


def checkout() -> Path | None:
    """The repository that this process runs the package from; None when it is out of a wheel."""
    root = _PACKAGE.parent
    return root if (root / "pyproject.toml").is_file() and (root / "conf").is_dir() else None


def install_command(extra: str = "") -> str:
    """The pip command that brings an extra, or for "" this package with what it requires.

    There is no index to name: it installs from the checkout, and where the package came out of a
    wheel it names the packages of the extra.
    """
    root = checkout()
    if root is not None:
        return f"pip install -e '{root}{f'[{extra}]' * bool(extra)}'"
    wheel = f"{DISTRIBUTION.replace('-', '_')}-{__version__}-py3-none-any.whl"
    brought = _requirements_of(extra) if extra else []
    return f"pip install {' '.join(brought) or wheel}"


def _requirements_of(extra: str) -> list[str]:
    """Quoted for a shell; none where the metadata is not there."""
    try:
        lines = importlib.metadata.requires(DISTRIBUTION) or []
    except PackageNotFoundError:
        return []
    split = (line.partition(";") for line in lines)
    of_extra = re.compile(rf"""extra == ['"]{re.escape(extra)}['"]""")
    return [f"'{what.strip()}'" for what, _, marker in split if of_extra.search(marker)]


def find_conflict() -> str | None:
    """What is wrong where NVIDIA's NeMo-Aligner is installed beside this package; else None."""
    try:
        found = importlib.metadata.metadata(_NVIDIAS)
    except PackageNotFoundError:
        return None
    if not any("NVIDIA" in found[key] for key in ("Author", "Home-page") if key in found):
        return None
    return (
        f"NVIDIA's nemo_aligner {found['Version']} is installed beside {DISTRIBUTION}, and both "
        "bring the import package nemo_aligner: each overwrites files of the other. Use an "
        f"environment of its own, or: pip uninstall nemo_aligner, then {install_command()} "
        "--force-reinstall --no-deps"
    )


def settings_folder() -> Path:
    """Where the YAML files of settings lie: in a wheel inside the package, else ``conf/``."""
    inside = _PACKAGE / "conf"
    return inside if inside.is_dir() else _PACKAGE.parent / "conf"


def settings_names() -> list[str]:
    """What ``--config`` takes beside paths: ``train_reward_model``, ``recipes/skywork_8b``, ..."""
    folder = settings_folder()
    found = (path.relative_to(folder).with_suffix("") for path in folder.rglob(f"*{_ENDING}"))
    return sorted(path.as_posix() for path in found)


def find_settings(given: str | PathLike[str]) -> Path:
    """The file of that path or, where there is none, the package's own of that name."""
    path = Path(given)
    if not path.is_file() and path.as_posix() in settings_names():
        return settings_folder() / f"{path.as_posix()}{_ENDING}"
    return path
