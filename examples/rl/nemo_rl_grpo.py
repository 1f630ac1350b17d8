"""Register the reward model's environment, and run NeMo RL's own run_grpo.py next to it.

nemo_rl_grpo.yaml has the commands.
"""

import runpy
from pathlib import Path

from nemo_aligner.integrations import nemo_rl

if __name__ == "__main__":
    nemo_rl.register()
    runpy.run_path(str(Path(__file__).with_name("run_grpo.py")), run_name="__main__")
