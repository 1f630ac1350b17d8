"""``resave.py ARCHIVE FOLDER TP PP``: load an archive at a layout, and save its weights."""

from __future__ import annotations

import sys
from pathlib import Path


def main(archive: str, folder: str, tp: int, pp: int) -> None:
    from nemo_aligner.checkpoint.nemo import save_weights
    from nemo_aligner.checkpoint.reward_model import load_pretrained
    from nemo_aligner.config.schema import Precision
    from nemo_aligner.errors import CheckpointError
    from nemo_aligner.parallel.launch import launch
    from nemo_aligner.parallel.layout import initialize_layout

    with launch(timeout_seconds=60):
        layout = initialize_layout(tp, pp)
        loaded = load_pretrained(archive, layout, num_attributes=1, precision=Precision.fp32)
        save_weights(loaded.model.sharded_state_dict(prefix="model."), Path(folder))
        try:
            load_pretrained("missing.nemo", layout, num_attributes=1, precision=Precision.fp32)
        except CheckpointError as error:
            print(f"all ranks know: {error}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
