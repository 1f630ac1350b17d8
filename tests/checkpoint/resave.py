"""``resave.py ARCHIVE FOLDER``: load an archive at TP=2 and at PP=2, and save it from there.

It prints the sums of the weights that it saves, and what a rank waited for in one collective, which
would time out: what takes long goes on until the other rank has asked twice whether it has ended.

The second rank has no C compiler.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

LAYOUTS = {"tp2": (2, 1), "pp2": (1, 2)}


def say_line(text: str) -> None:
    """Write a line in one piece: ``print`` writes its end apart, and lines of two ranks mix."""
    sys.stdout.write(f"{text}\n")


def prolong(folder: Path, rank: int) -> None:
    """Prolong what may take long with a large model."""
    from torch.distributed.checkpoint import FileSystemWriter

    from nemo_aligner.checkpoint.nemo import archive, reward_model
    from nemo_aligner.distributed import collectives

    gather = collectives.gather_objects

    def gather_and_count(value: Any) -> Any:
        with (folder / f"asked{rank}").open("a") as counts:
            counts.write(".")
        return gather(value)

    def until_asked(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            counts = folder / f"asked{1 - rank}"
            counts.touch()
            start, end = counts.stat().st_size, time.monotonic() + 20
            while counts.stat().st_size < start + 2:
                if time.monotonic() > end:
                    say_line(f"in one collective: {function.__name__}")
                    break
                time.sleep(0.005)
            return function(*arguments)

        return run

    collectives.gather_objects = gather_and_count
    slow: Any = (archive, "_prepare"), (reward_model, "write_nemo")
    for owner, name in slow if rank == 0 else [(FileSystemWriter, "write_data")]:
        setattr(owner, name, until_asked(getattr(owner, name)))


def main(archive: str, folder: str) -> None:
    import torch

    from nemo_aligner.checkpoint.nemo.reward_model import load_pretrained, save_reward_model
    from nemo_aligner.checkpoint.weights.save import save_weights
    from nemo_aligner.config.common import Precision
    from nemo_aligner.cpu import kernels
    from nemo_aligner.distributed.launch import launch
    from nemo_aligner.distributed.layout import destroy_layout, initialize_layout
    from nemo_aligner.utils.errors import CheckpointError

    if os.environ["RANK"] == "1":
        os.environ["CC"] = "no-such-compiler"
    with launch(timeout_seconds=60) as world:
        prolong(Path(folder), world.rank)
        for name, (tp, pp) in LAYOUTS.items():
            layout = initialize_layout(tp, pp)
            loaded = load_pretrained(archive, layout, num_attributes=1, precision=Precision.fp32)
            with torch.no_grad():
                say_line(f"kernels are used: {kernels.supports(torch.zeros(4, 16))}")
            weights = loaded.model.sharded_state_dict(prefix="model.")
            sums = save_weights(weights, Path(folder, name))
            say_line(f"sums: {json.dumps(sums, sort_keys=True)}")
            output = Path(folder, f"{name}.nemo")
            save_reward_model(output, loaded.model, loaded.config, loaded.tokenizer, None)
            try:
                load_pretrained("missing.nemo", layout, num_attributes=1, precision=Precision.fp32)
            except CheckpointError as error:
                say_line(f"all ranks know: {error}")
            destroy_layout()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
