"""Worker of scoring.py: times rewards of AutoModelForSequenceClassification in padded batches.

The first line on stdin is the job; each further line is a request for the rewards of token lists.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch


def main() -> None:
    # Answers go to the real stdout; whatever libraries print goes to stderr.
    answers, sys.stdout = sys.stdout, sys.stderr
    job = json.loads(sys.stdin.readline())
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    model = _load_model(job["hf"], job["head"])
    for line in sys.stdin:
        request = json.loads(line)
        start = time.perf_counter()
        rewards = _score_in_batches(
            model, request["token_lists"], request["batch"], request["is_sorted"]
        )
        seconds = time.perf_counter() - start
        print(json.dumps({"seconds": seconds, "rewards": rewards}), file=answers, flush=True)


def _load_model(hf: str, head: str) -> Any:
    from transformers import AutoModelForSequenceClassification

    gpu = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if gpu else ("cpu", torch.float32)
    model = AutoModelForSequenceClassification.from_pretrained(hf, num_labels=1, dtype=dtype)
    model = model.to(device).eval()
    model.config.pad_token_id = 0
    with torch.no_grad():
        model.score.weight.copy_(torch.from_numpy(np.load(head)))
    return model


def _score_in_batches(
    model: Any, token_lists: Sequence[list[int]], batch: int, is_sorted: bool
) -> list[float]:
    order = list(range(len(token_lists)))
    if is_sorted:
        order.sort(key=lambda index: len(token_lists[index]))
    rewards = [0.0] * len(order)
    for start in range(0, len(order), batch):
        part = order[start : start + batch]
        for index, reward in zip(
            part, _score_batch(model, [token_lists[index] for index in part]), strict=True
        ):
            rewards[index] = reward
    return rewards


@torch.no_grad()
def _score_batch(model: Any, token_lists: Sequence[list[int]]) -> list[float]:
    longest = max(map(len, token_lists))
    ids = torch.zeros(len(token_lists), longest, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    # Padding on the left, so that the last column is the last token of every sequence.
    for row, tokens in enumerate(token_lists):
        ids[row, longest - len(tokens) :] = torch.tensor(tokens)
        mask[row, longest - len(tokens) :] = 1
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    hidden = model.model(
        ids.to(model.device),
        attention_mask=mask.to(model.device),
        position_ids=positions.to(model.device),
    ).last_hidden_state[:, -1]
    return model.score(hidden).float()[:, 0].tolist()


if __name__ == "__main__":
    main()
