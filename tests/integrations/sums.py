"""A client that scores as the fake server does, in this process; an empty text is refused."""

from __future__ import annotations

from typing import Any

import numpy as np

from nemo_aligner.serving.client import ScoredRows
from nemo_aligner.text.contract import ScoringContract
from tests.serving.fake_server import CONTRACT, total


class Sums:
    """Keeps what it was asked, and how often for its contract."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.contracts = self.closed = 0

    def contract(self) -> ScoringContract:
        self.contracts += 1
        return CONTRACT

    def score_rows(self, texts: Any) -> ScoredRows:
        self.asked += texts
        wholes = [
            text if isinstance(text, str) else "".join(turn["content"] for turn in text)
            for text in texts
        ]
        errors = {row: "the text is empty" for row, text in enumerate(wholes) if not text}
        sums = np.outer([total(text) for text in wholes], [1, -1]).astype(np.float32)
        sums[list(errors)] = np.nan
        return ScoredRows(sums, errors, np.zeros(len(texts), dtype=bool), CONTRACT.hash)

    def close(self) -> None:
        self.closed += 1
