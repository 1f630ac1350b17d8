"""Which parallel layouts fit on so many GPUs? See ``--help``."""

from __future__ import annotations

import sys

from nemo_aligner.cli.common import run_verb
from nemo_aligner.cli.plan import main

if __name__ == "__main__":
    sys.exit(run_verb(main, name="plan_layout.py"))
