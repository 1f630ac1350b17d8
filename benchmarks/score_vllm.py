"""Worker of scoring.py in an environment with vLLM: times rewards from its classification API.

The first line on stdin is the job; each further line is a request for the rewards of token lists.
transformers writes the folder that vLLM loads, with the head of the job. The prefix cache is
emptied before every request, so that no turn benefits from the previous one.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

MAX_LENGTH = 2048
GPU_SHARE = 0.4  # share of the GPU's memory that vLLM may use: our scorer is on the same GPU


def main() -> None:
    # Answers go to the real stdout. File descriptor 1 becomes stderr, also for child processes.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    job = json.loads(sys.stdin.readline())
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    os.environ.update(VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1")
    with tempfile.TemporaryDirectory() as folder:
        _write_classifier(job["hf"], job["head"], Path(folder))
        model = _load_model(folder)
        for line in sys.stdin:
            request = json.loads(line)
            model.reset_prefix_cache()
            start = time.perf_counter()
            rewards = _score_by_vllm(model, request["token_lists"])
            seconds = time.perf_counter() - start
            print(json.dumps({"seconds": seconds, "rewards": rewards}), file=answers, flush=True)


def _dtype() -> torch.dtype:
    return torch.bfloat16 if torch.cuda.is_available() else torch.float32


def _write_classifier(hf: str, head: str, folder: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(hf, num_labels=1, dtype=_dtype())
    model.config.pad_token_id = 0
    with torch.no_grad():
        model.score.weight.copy_(torch.from_numpy(np.load(head)))
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(hf) / name, folder)


def _load_model(folder: str) -> Any:
    from vllm import LLM

    return LLM(
        model=folder,
        runner="pooling",
        dtype=str(_dtype()).removeprefix("torch."),
        max_model_len=MAX_LENGTH,
        enforce_eager=True,
        enable_prefix_caching=True,
        enable_chunked_prefill=True,
        gpu_memory_utilization=GPU_SHARE,
    )


def _score_by_vllm(model: Any, token_lists: Sequence[list[int]]) -> list[float]:
    from vllm import PoolingParams

    prompts = [{"prompt_token_ids": tokens} for tokens in token_lists]
    raw = PoolingParams(use_activation=False)
    outputs = model.classify(prompts, pooling_params=raw, use_tqdm=False)
    return [float(output.outputs.probs[0]) for output in outputs]


if __name__ == "__main__":
    main()
