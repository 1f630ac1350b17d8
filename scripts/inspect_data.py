"""Look at preference data as training will see it, without a model. See ``--help``."""

from __future__ import annotations

import sys

from nemo_aligner.cli.common import run_verb
from nemo_aligner.cli.inspect_data import main

if __name__ == "__main__":
    sys.exit(run_verb(main, name="inspect_data.py"))
