"""The log of the highest-rewarded samples, off by default (``top_rewards_file``).

A policy that exploits a flaw of the reward model shows it first in the samples with the highest
rewards. The log is a file of JSON lines, highest reward first, with the best samples of a window of
rewards. After each window the file gets the suffix ``.1`` (older ones ``.2`` and so on), so that
windows early and late in a training can be compared.
"""

from __future__ import annotations

import heapq
import json
import logging
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np

from nemo_aligner.config.serving import FrontConfig
from nemo_aligner.contract.messages import as_json
from nemo_aligner.serving.protocols import ScoredRows
from nemo_aligner.utils.errors import ConfigError, short, writable
from nemo_aligner.utils.writing import replacing

logger = logging.getLogger(__name__)

# Seconds between writes of the log before its rewards are complete; a killed server loses these.
_WRITE_SECS = 30.0


class RewardLog:
    """Keeps the highest-rewarded samples of the current window, and writes them to a file.

    ``add`` and ``close`` must be called from one thread at a time.
    """

    def __init__(self, file: Path, num_samples: int, window: int, num_old_files: int) -> None:
        """Start a new log; an existing file of that name becomes the first earlier one.

        Args:
            file: path of the log.
            num_samples: number of samples that are logged per window.
            window: number of rewards after which a new log begins.
            num_old_files: number of earlier logs; older ones are deleted.

        Raises:
            ConfigError: the file cannot be written.
        """
        self._file, self._num_samples = file, num_samples
        self._window, self._num_old_files = window, num_old_files
        # A heap of (reward, number, entry), lowest reward first. The number breaks ties, because
        # entries cannot be compared.
        self._highest: list[tuple[float, int, dict[str, Any]]] = []
        self._num_rewards = self._number = 0
        self._written = time.monotonic()
        # One thread, so that files are written in order.
        self._writer = ThreadPoolExecutor(1, "reward log")
        try:
            if file.exists() and file.stat().st_size:
                self._rotate()
            file.touch()
        except OSError as error:
            raise ConfigError(
                f"top_rewards_file: {file}: it cannot be written: {error.strerror}. Choose "
                "another file"
            ) from error

    @classmethod
    def of(cls, config: FrontConfig) -> RewardLog | None:
        """Start the log that the settings of a server describe; None without a file."""
        if config.top_rewards_file is None:
            return None
        return cls(
            Path(config.top_rewards_file),
            config.top_rewards_kept,
            config.top_rewards_window,
            config.top_rewards_files,
        )

    def add(self, samples: Sequence[Any], rewards: np.ndarray, scored: ScoredRows) -> None:
        """Add the rewards of N samples; a sample without a reward (NaN) is skipped.

        Args:
            samples: raw texts, conversations, or lists of token ids.
            rewards: ``[N]``, one reward for each sample.
            scored: the N rows, for their parts.
        """
        for row, reward in enumerate(rewards.tolist()):
            if np.isnan(reward):
                continue
            self._number += 1
            self._num_rewards += 1
            is_full = len(self._highest) == self._num_samples
            if not is_full or reward > self._highest[0][0]:
                item = (reward, self._number, _describe(samples[row], reward, row, scored))
                (heapq.heapreplace if is_full else heapq.heappush)(self._highest, item)
            if self._num_rewards == self._window:
                self._submit(ends_window=True)
        if time.monotonic() - self._written > _WRITE_SECS:
            self._submit(ends_window=False)

    def close(self) -> None:
        """Write the current window, and wait until all files are written."""
        if self._highest:
            self._submit(ends_window=False)
        self._writer.shutdown()

    def _submit(self, ends_window: bool) -> None:
        entries = [entry for *_, entry in sorted(self._highest, key=lambda item: -item[0])]
        if ends_window:
            self._highest, self._num_rewards = [], 0
        self._written = time.monotonic()
        self._writer.submit(self._write, entries, ends_window)

    def _write(self, entries: Sequence[dict[str, Any]], ends_window: bool) -> None:
        lines = [json.dumps(entry, ensure_ascii=False) for entry in entries]
        content = "".join(f"{writable(line)}\n" for line in lines)
        try:
            # Replace the file, so that a reader never sees half of it.
            with replacing(self._file) as partial:
                partial.write_text(content, encoding="utf-8")
            if ends_window:
                self._rotate()
        except OSError as error:
            logger.warning("top_rewards_file: %s: not written: %s", self._file, short(error))

    def _rotate(self) -> None:
        """Rename the log to ``.1``, an earlier one to the next number, and drop the oldest."""
        if not self._num_old_files:
            self._file.unlink()
            return
        for number in range(self._num_old_files - 1, 0, -1):
            if self._old_file(number).exists():
                self._old_file(number).replace(self._old_file(number + 1))
        self._file.replace(self._old_file(1))

    def _old_file(self, number: int) -> Path:
        return self._file.with_name(f"{self._file.name}.{number}")


def _describe(sample: Any, reward: float, row: int, scored: ScoredRows) -> dict[str, Any]:
    """Return the line of a sample: its reward, time, attributes or parts, and content."""
    values = scored.rewards[row] if scored.parts is None else scored.parts[row]
    numbers = [None if np.isnan(value) else value for value in values.tolist()]
    content: dict[str, Any]
    if isinstance(sample, str):
        content = {"text": sample}
    elif isinstance(sample, list) and sample and not isinstance(sample[0], dict):
        content = {"tokens": sample}
    else:
        value = as_json(sample)
        content = value if isinstance(value, dict) else {"messages": value}
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    if scored.parts is not None:
        return {
            "reward": reward,
            "time": now,
            "parts": dict(zip(scored.part_names, numbers, strict=True)),
            **content,
        }
    return {"reward": reward, "time": now, "rewards": numbers, **content}
