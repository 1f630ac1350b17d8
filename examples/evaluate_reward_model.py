"""Evaluate a reward model on held-out pairs or ratings: the same as ``nemo-aligner evaluate``.

    python examples/evaluate_reward_model.py rm_model_file=megatron_gpt.nemo data.path=heldout.jsonl

The code is in ``nemo_aligner/evaluation/run.py``.
"""

from __future__ import annotations

import sys

try:
    from nemo_aligner.cli.main import main
except ModuleNotFoundError as missing:
    sys.exit(f"{missing}: activate its environment (source .venv/bin/activate) or pip install -e .")

if __name__ == "__main__":
    sys.exit(main(["evaluate", *sys.argv[1:]]))
