"""Show that training sees its labels, with your model and settings. See ``--help``."""

from __future__ import annotations

import sys

from nemo_aligner.cli.common import run_verb
from nemo_aligner.cli.probe import main

if __name__ == "__main__":
    sys.exit(run_verb(main))
