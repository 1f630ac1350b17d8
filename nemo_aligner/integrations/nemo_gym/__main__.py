"""Copy the environment into NeMo Gym: ``python -m nemo_aligner.integrations.nemo_gym GYM``."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

_NAME = "reward_model"


def drop_in(gym: Path) -> Path:
    """The folder of the environment in a checkout of NeMo Gym, made anew.

    Raises:
        FileExistsError: there is one.
    """
    target = gym / "resources_servers" / _NAME
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(Path(__file__).parent / _NAME, target, ignore=ignored)
    return target


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("gym", type=Path, help="a checkout of NeMo Gym")
    print(drop_in(parser.parse_args().gym))
