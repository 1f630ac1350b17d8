"""Is a reward the same at every layout and in every batch? See ``--help``."""

from __future__ import annotations

import sys

from nemo_aligner.cli.check import main
from nemo_aligner.cli.common import run_verb

if __name__ == "__main__":
    sys.exit(run_verb(main, name="check_invariance.py"))
