"""Convert a Hugging Face model or a .gguf file into a .nemo archive. See ``--help``."""

from __future__ import annotations

import sys

from nemo_aligner.cli.common import run_verb
from nemo_aligner.cli.convert import main

if __name__ == "__main__":
    sys.exit(run_verb(main, name="error"))
