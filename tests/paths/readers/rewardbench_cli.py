"""Run in an environment with rewardbench: its own command, on a machine without a GPU.

``rewardbench_cli.py ARGUMENTS`` is ``rewardbench ARGUMENTS``, whose pipeline sends tokens to "cuda"
whatever the model's device is; here they stay where they are.
"""

from __future__ import annotations

from rewardbench.rewardbench import main
from transformers import BatchEncoding

if __name__ == "__main__":
    BatchEncoding.to = lambda self, device: self
    main()
