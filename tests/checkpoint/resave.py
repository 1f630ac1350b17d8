"""``resave.py ARCHIVE FOLDER``: load an archive at TP=2 and at PP=2, and save it from there.

It prints the sums of the weights that it saves.

The second rank has no C compiler.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

LAYOUTS = {"tp2": (2, 1), "pp2": (1, 2)}


def say_line(text: str) -> None:
    """Write a line in one piece: ``print`` writes its end apart, and lines of two ranks mix."""
    sys.stdout.write(f"{text}\n")


def main(archive: str, folder: str) -> None:
    import torch

    from nemo_aligner.checkpoint.nemo.reward_model import load_pretrained
    from nemo_aligner.checkpoint.weights.save import save_weights
    from nemo_aligner.config.common import Precision
    from nemo_aligner.cpu import kernels
    from nemo_aligner.distributed.launch import launch
    from nemo_aligner.distributed.layout import destroy_layout, initialize_layout
    from nemo_aligner.utils.errors import CheckpointError

    if os.environ["RANK"] == "1":
        os.environ["CC"] = "no-such-compiler"
    with launch(timeout_seconds=60):
        for name, (tp, pp) in LAYOUTS.items():
            layout = initialize_layout(tp, pp)
            loaded = load_pretrained(archive, layout, num_attributes=1, precision=Precision.fp32)
            with torch.no_grad():
                say_line(f"kernels are used: {kernels.supports(torch.zeros(4, 16))}")
            weights = loaded.model.sharded_state_dict(prefix="model.")
            sums = save_weights(weights, Path(folder, name))
            say_line(f"sums: {json.dumps(sums, sort_keys=True)}")
            try:
                load_pretrained("missing.nemo", layout, num_attributes=1, precision=Precision.fp32)
            except CheckpointError as error:
                say_line(f"all ranks know: {error}")
            destroy_layout()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
