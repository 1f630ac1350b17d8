"""Worker of scoring.py: rewards by AutoModelForSequenceClassification, in padded batches, timed.

The first line on stdin is the job; each further one asks for the rewards of token lists.
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
    # What libraries print must not be taken for an answer.
    answers, sys.stdout = sys.stdout, sys.stderr
    job = json.loads(sys.stdin.readline())
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    model = _load(job["hf"], job["head"])
    for line in sys.stdin:
        asked = json.loads(line)
        start = time.perf_counter()
        rewards = _score(model, asked["token_lists"], asked["batch"], asked["is_sorted"])
        seconds = time.perf_counter() - start
        print(json.dumps({"seconds": seconds, "rewards": rewards}), file=answers, flush=True)


def _load(hf: str, head: str) -> Any:
    from transformers import AutoModelForSequenceClassification

    gpu = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if gpu else ("cpu", torch.float32)
    model = AutoModelForSequenceClassification.from_pretrained(hf, num_labels=1, dtype=dtype)
    model = model.to(device).eval()
    model.config.pad_token_id = 0
    with torch.no_grad():
        model.score.weight.copy_(torch.from_numpy(np.load(head)))
    return model


def _score(
    model: Any, token_lists: Sequence[list[int]], batch: int, is_sorted: bool
) -> list[float]:
    order = list(range(len(token_lists)))
    if is_sorted:
        order.sort(key=lambda index: len(token_lists[index]))
    found = [0.0] * len(order)
    for start in range(0, len(order), batch):
        part = order[start : start + batch]
        for index, reward in zip(
            part, _rewards(model, [token_lists[index] for index in part]), strict=True
        ):
            found[index] = reward
    return found


@torch.no_grad()
def _rewards(model: Any, token_lists: Sequence[list[int]]) -> list[float]:
    longest = max(map(len, token_lists))
    ids = torch.zeros(len(token_lists), longest, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    # On the left, so that the last column is every text's last token.
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
