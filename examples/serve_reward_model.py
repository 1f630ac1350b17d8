"""Serve a reward model: ``python examples/serve_reward_model.py rm_model_file=megatron_gpt.nemo``.

With several ranks: ``torchrun --nproc-per-node 2 examples/serve_reward_model.py
rm_model_file=megatron_gpt.nemo model.tensor_model_parallel_size=2``. SIGTERM to the process whose
pid it prints drains and stops all ranks.
"""

from __future__ import annotations

import sys

from nemo_aligner.cli.common import run_verb
from nemo_aligner.cli.serve import main

if __name__ == "__main__":
    sys.exit(run_verb(main))
