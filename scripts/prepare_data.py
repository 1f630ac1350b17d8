"""Make training files: a demo set, or a split by prompt. See ``--help``."""

from __future__ import annotations

import sys

from nemo_aligner.cli.common import run_verb
from nemo_aligner.cli.data import main

if __name__ == "__main__":
    sys.exit(run_verb(main, name="prepare_data.py"))
