"""Worker of training.py: some steps of nemo_aligner, timed."""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path

import numpy as np
import torch


def main() -> None:
    from nemo_aligner.config.load import load_config
    from nemo_aligner.config.training import TrainConfig
    from nemo_aligner.data.training_data import TrainLoader
    from nemo_aligner.distributed.launch import launch
    from nemo_aligner.distributed.layout import initialize_layout
    from nemo_aligner.training.build import build_data, build_learner

    job = json.loads(sys.stdin.read())
    config = load_config(TrainConfig, job["settings"])
    size, options = job["global_batch_size"], config.model
    with launch() as world:
        layout = initialize_layout()
        data = build_data(config)
        loader = TrainLoader(data.train, size, options.micro_batch_tokens, options.seed, 0, 1)
        warm_up = job["warm_up"]
        batches = [loader.global_batch(step) for step in range(warm_up + job["steps"])]
        records = [record for batch in batches for record in batch]
        if "ids" in job:
            pairs = [[_ids(side) for side in data.train.record(record)] for record in records]
            Path(job["ids"]).write_text(json.dumps(pairs))
        learner, _, _ = build_learner(config, data, layout)
        head = learner.model.rm_head.weight
        with torch.no_grad():
            head.copy_(torch.from_numpy(np.load(job["head"])))
        learner.optimizer._optimizer.reload_model_params()
        seconds, losses = [], []
        for step in range(len(batches)):
            start = time.perf_counter()
            losses.append(learner.train_step(step)["loss"])
            if world.device.type == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
    timed = [record for batch in batches[warm_up:] for record in batch]
    found = {
        "seconds": seconds[warm_up:],
        "losses": losses,
        "tokens": sum(data.train.num_tokens(record) for record in timed),
        **_peak(),
    }
    print(json.dumps(found))


def _ids(sequence: object) -> list[int]:
    return torch.as_tensor(sequence).tolist()


def _peak() -> dict[str, float]:
    if torch.cuda.is_available():
        return {"peak_gib": torch.cuda.max_memory_allocated() / 2**30}
    return {"peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}


if __name__ == "__main__":
    main()
