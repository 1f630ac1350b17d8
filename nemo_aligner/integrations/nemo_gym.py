"""Copy the reward model environment into a folder where NeMo Gym finds it.

Usage: ``python -m nemo_aligner.integrations.nemo_gym PATH``; PATH is a checkout of Gym, or any
folder in which the command ``gym`` of the package ``nemo-gym`` is run.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from nemo_aligner.utils.errors import ConfigError

# The files to copy. The folder is not a package here: Gym imports the copy in its checkout as
# ``resources_servers.reward_model``.
_FILES = Path(__file__).parent / "resources_servers" / "reward_model"


def drop_in(gym: Path) -> Path:
    """Copy this package's environment into ``resources_servers`` of a folder; return its folder.

    Raises:
        ConfigError: there is no folder ``gym``, or it has the environment already.
    """
    if not gym.is_dir():
        raise ConfigError(
            f"{gym}: there is no such folder; wanted a checkout of NeMo Gym, or the folder in "
            "which you run gym"
        )
    target = gym / "resources_servers" / _FILES.name
    if target.exists():
        raise ConfigError(f"{target} exists already; remove it to copy it again")
    shutil.copytree(_FILES, target, ignore=shutil.ignore_patterns("__pycache__"))
    return target


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        prog="python -m nemo_aligner.integrations.nemo_gym",
        description="Copy the environment of a reward model to where NeMo Gym finds it.",
    )
    parser.add_argument("gym", type=Path, help="a checkout of NeMo Gym, or where you run gym")
    try:
        folder = drop_in(parser.parse_args().gym)
    except ConfigError as error:
        sys.exit(str(error))
    print(f"copied to {folder}; see README.md there for the configuration")
