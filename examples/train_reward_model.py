"""Train a reward model: the same as ``nemo-aligner train``.

    python examples/train_reward_model.py pretrained_checkpoint.restore_from_path=base.nemo \\
        model.data.data_prefix.train=pairs.jsonl exp_manager.explicit_log_dir=results/first

The code is in ``nemo_aligner/training/run.py``.
"""

from __future__ import annotations

import sys

try:
    from nemo_aligner.cli.main import main
except ModuleNotFoundError as missing:
    sys.exit(f"{missing}: activate its environment (source .venv/bin/activate) or pip install -e .")

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
