"""Evaluate a reward model on held-out pairs or ratings.

    python examples/evaluate_reward_model.py rm_model_file=megatron_gpt.nemo \\
        data.path=held_out.jsonl

On several ranks: ``torchrun --nproc-per-node 2 examples/evaluate_reward_model.py
model.tensor_model_parallel_size=2 ...``; the numbers are the same.
"""

from __future__ import annotations

import sys

from nemo_aligner.cli.common import run_verb
from nemo_aligner.cli.evaluate import main

if __name__ == "__main__":
    sys.exit(run_verb(main))
