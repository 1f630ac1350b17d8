"""Train a reward model: from a base ``.nemo`` and preference data to ``megatron_gpt.nemo``.

    python examples/train_reward_model.py pretrained_checkpoint.restore_from_path=base.nemo \\
        'model.data.data_prefix.train=[pairs.jsonl]' exp_manager.explicit_log_dir=results/first

On several ranks: ``torchrun --nproc-per-node 2 examples/train_reward_model.py
model.tensor_model_parallel_size=2 ...``. The same command again goes on where a run stopped.
``nemo_aligner/training/run.py`` is what runs.
"""

from __future__ import annotations

import sys

from nemo_aligner.cli.common import run_verb
from nemo_aligner.cli.train import main

if __name__ == "__main__":
    sys.exit(run_verb(main))
