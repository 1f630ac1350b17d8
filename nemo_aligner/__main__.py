"""``python -m nemo_aligner``: the same as ``nemo-aligner``."""

import sys

from nemo_aligner.cli.main import main

sys.exit(main())
