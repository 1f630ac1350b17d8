"""Ask a reward model server: ``python examples/score.py "some text" "another text"``.

``--conversation '[{"role": "user", "content": "Hi"}, ...]'`` gets the model's chat template;
``--file`` reads a JSONL of ``{"text": ...}``, ``{"messages": [...]}`` or pairs
(``prompt``/``chosen``/``rejected``), one reward per reply.
"""

from __future__ import annotations

import sys

from nemo_aligner.cli.common import run_verb
from nemo_aligner.cli.score import main

if __name__ == "__main__":
    sys.exit(run_verb(main))
