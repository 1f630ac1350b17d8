"""Copy the reward model environment into a checkout of NeMo Gym.

Usage: ``python -m nemo_aligner.integrations.nemo_gym GYM``; GYM is the folder of the checkout.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from nemo_aligner.utils.errors import ConfigError

# The files to copy. The folder is no package here: Gym imports the copy in its checkout as
# ``resources_servers.reward_model``.
_FILES = Path(__file__).parent / "resources_servers" / "reward_model"


def drop_in(gym: Path) -> Path:
    """Copy this package's environment into a checkout of NeMo Gym, and return its folder there.

    Raises:
        ConfigError: ``gym`` is not a checkout, or has the environment already.
    """
    servers = gym / "resources_servers"
    if not servers.is_dir():
        raise ConfigError(
            f"{gym}: it has no folder resources_servers; wanted a checkout of NeMo Gym"
        )
    target = servers / _FILES.name
    if target.exists():
        raise ConfigError(f"{target} exists already; remove it to copy it again")
    shutil.copytree(_FILES, target, ignore=shutil.ignore_patterns("__pycache__"))
    return target


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        prog="python -m nemo_aligner.integrations.nemo_gym",
        description="Copy the environment of a reward model into NeMo Gym.",
    )
    parser.add_argument("gym", type=Path, help="a checkout of NeMo Gym")
    try:
        folder = drop_in(parser.parse_args().gym)
    except ConfigError as error:
        sys.exit(str(error))
    print(f"copied to {folder}; see README.md there for the configuration")
