"""Scorers for hand-made items of benchmarks: a reward that can be read off the reply."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nemo_aligner.contract.messages import Text, reply_of
from nemo_aligner.serving.protocols import StepRewards


def write(path: Path, records: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return path


def by_number(texts: Sequence[Text]) -> np.ndarray:
    """Score a reply by the number that it is; returns ``[N, 1]``."""
    return np.array([[float(reply_of(text))] for text in texts])


def by_length(texts: Sequence[Text]) -> np.ndarray:
    """Score a reply by its number of characters; returns ``[N, 1]``."""
    return np.array([[float(len(reply_of(text)))] for text in texts])


def by_last_letter(texts: Sequence[Text]) -> list[StepRewards]:
    """Score each step of a reply by the digit that it ends with."""
    contents = [text[-1]["content"] for text in texts]  # type: ignore[index]
    return [
        StepRewards(np.array([[float(step["text"][-1])] for step in steps], dtype=np.float32))
        for steps in contents
    ]
