"""One start of a run as far as its data goes, for ``data.py``: a job on stdin, JSON on stdout."""

from __future__ import annotations

import json
import os
import re
import resource
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from nemo_aligner.config.common import Precision
from nemo_aligner.config.model import DataConfig, DataPrefixConfig, ModelConfig
from nemo_aligner.contract.from_settings import build_contract
from nemo_aligner.contract.tokenizer import load_tokenizer
from nemo_aligner.data.training_data import TrainLoader, build_training_data

_GLOBAL_BATCH, _PACK_TOKENS, _QUERY_KEY_COST = 512, 8192, 1e-4
_STEPS = 8
_QUIET_S = 0.5


def main() -> None:
    job: dict[str, Any] = json.load(sys.stdin)
    tokenizer = load_tokenizer(job["tokenizer"])
    config = ModelConfig(
        data=DataConfig(
            data_prefix=DataPrefixConfig([job["path"]]), template="tokenizer", seq_length=2048
        ),
        micro_batch_tokens=_PACK_TOKENS,
        global_batch_size=_GLOBAL_BATCH,
    )
    contract = build_contract(config, tokenizer, Precision.fp32)
    before, begun = _anonymous_bytes(), time.perf_counter()
    data = build_training_data(config, contract, tokenizer)
    data.table()
    digest = data.train.digest
    loader = _loader(data)
    loader.plan(0)
    seconds = time.perf_counter() - begun
    after = _anonymous_bytes()
    found = {
        "seconds": seconds,
        "own_bytes": after,
        "own_growth": after - before,
        "all_bytes": _most_resident(),
        "pack_ms": 1e3 * median(_pack_seconds(data, step) for step in range(1, 1 + _STEPS)),
        "digest": digest,
    }
    print(json.dumps(found))


def _loader(data: Any) -> TrainLoader:
    return TrainLoader(data.train, _GLOBAL_BATCH, _PACK_TOKENS, 1234, 0, 1, _QUERY_KEY_COST)


def _pack_seconds(data: Any, step: int) -> float:
    """Of a step for which nothing was done before."""
    loader = _loader(data)
    begun = time.perf_counter()
    loader.plan(step)
    seconds = time.perf_counter() - begun
    time.sleep(_QUIET_S)  # the next step is packed beside it
    return seconds


def _anonymous_bytes() -> int:
    found = re.search(r"^Anonymous:\s+(\d+) kB", Path("/proc/self/smaps_rollup").read_text(), re.M)
    assert found is not None
    return int(found.group(1)) * 1024


def _most_resident() -> int:
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    return 1024 * (own + len(os.sched_getaffinity(0)) * children)


if __name__ == "__main__":
    main()
