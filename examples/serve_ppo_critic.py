"""Serve the critic of PPO over HTTP: the same as ``nemo-aligner serve-critic``.

    python examples/serve_ppo_critic.py \
        pretrained_checkpoint.restore_from_path=megatron_gpt.nemo server.port=5556

The code is in ``nemo_aligner/serving/run.py``.
"""

from __future__ import annotations

import sys

try:
    from nemo_aligner.cli.main import main
except ModuleNotFoundError as missing:
    sys.exit(f"{missing}: activate its environment (source .venv/bin/activate) or pip install -e .")

if __name__ == "__main__":
    sys.exit(main(["serve-critic", *sys.argv[1:]]))
