"""Export a reward model's .nemo as a Hugging Face folder. See ``--help``."""

from __future__ import annotations

import sys

from nemo_aligner.cli.common import run_verb
from nemo_aligner.cli.export import main

if __name__ == "__main__":
    sys.exit(run_verb(main, name="error"))
