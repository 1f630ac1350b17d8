"""Get rewards from a reward model server: the same as ``nemo-aligner score``.

    python examples/score.py "some text" "another text"

The client is ``nemo_aligner/serving/client/reward.py``.
"""

from __future__ import annotations

import sys

try:
    from nemo_aligner.cli.main import main
except ModuleNotFoundError as missing:
    sys.exit(f"{missing}: activate its environment (source .venv/bin/activate) or pip install -e .")

if __name__ == "__main__":
    sys.exit(main(["score", *sys.argv[1:]]))
