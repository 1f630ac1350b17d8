"""rewardbench's own command on a machine without a GPU; run in an environment with rewardbench.

``rewardbench_cli.py ARGUMENTS`` is ``rewardbench ARGUMENTS``. Its pipeline moves tokens to "cuda"
whatever the model's device is; here they stay on the CPU.
"""

from __future__ import annotations

from rewardbench.rewardbench import main
from transformers import BatchEncoding

if __name__ == "__main__":
    BatchEncoding.to = lambda self, device: self
    main()
