"""Copy the environment into NeMo Gym: ``python -m nemo_aligner.integrations.nemo_gym GYM``."""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from nemo_aligner.utils.errors import ConfigError

# Not a package of this one: Gym imports it as ``resources_servers.reward_model``, from a checkout.
_FILES = Path(__file__).parent / "resources_servers" / "reward_model"


def drop_in(gym: Path) -> Path:
    """The folder of the environment in a checkout of NeMo Gym, made anew.

    Raises:
        ConfigError: ``gym`` is no such checkout, or has the environment already.
    """
    servers = gym / "resources_servers"
    if not servers.is_dir():
        raise ConfigError(
            f"{gym}: got no folder resources_servers there, wanted NeMo Gym's checkout"
        )
    target = servers / _FILES.name
    if target.exists():
        raise ConfigError(f"{target} is there already; remove it to have it made anew")
    shutil.copytree(_FILES, target, ignore=shutil.ignore_patterns("__pycache__"))
    return target


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        prog="python -m nemo_aligner.integrations.nemo_gym",
        description="Copy the environment of a reward model into NeMo Gym.",
    )
    parser.add_argument("gym", type=Path, help="a checkout of NeMo Gym")
    try:
        made = drop_in(parser.parse_args().gym)
    except ConfigError as error:
        sys.exit(str(error))
    print(f"written to {made}; its README.md says what to set")
