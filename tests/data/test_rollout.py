"""Rollouts: which tokens matter, and the errors about wrong ones."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from nemo_aligner.data.rollout import Rollout
from nemo_aligner.utils.errors import DataError
from tests.contract.refusals import assert_refused


@pytest.fixture
def rollout() -> Rollout:
    """Three sequences of five tokens, with values learned at 1 and 2, at none, and at 3."""
    mask = np.array([[0, 1, 1, 0], [0, 0, 0, 0], [0, 0, 0, 1]], dtype=np.float32)
    numbers = np.ones_like(mask)
    return Rollout(np.arange(15).reshape(3, 5), numbers, numbers, mask)


def test_rollout_tokens_after_the_last_that_is_learned_from_have_no_say(rollout: Rollout) -> None:
    assert rollout.lengths().tolist() == [3, 0, 4]
    assert [len(batch) for batch in rollout.in_batches(2)] == [2, 1]


def test_rollout_numbers_and_ids_count_where_they_have_a_say(rollout: Rollout) -> None:
    rollout.returns[1] = np.nan
    rollout.prev_values[0, 3] = np.inf
    rollout.tokens[0, 3:] = -1
    rollout.check(seq_length=4, vocab_size=14, global_batch_size=2)


REFUSED = {
    "tokens: got shape [5], wanted [N, S], S at least 2": {"tokens": np.arange(5)},
    "tokens: got shape [0, 5], wanted": {"tokens": np.zeros((0, 5))},
    "tokens: got shape [3, 1], wanted": {"tokens": np.zeros((3, 1))},
    "mask: got shape [3, 5], wanted [3, 4]": {"mask": np.ones((3, 5))},
    "prev_values: got shape [4, 4], wanted [3, 4]": {"prev_values": np.ones((4, 4))},
    "returns, row 0: got a number that is not finite at position 1": {
        "returns": np.full((3, 4), np.nan)
    },
    "mask, row 0: got nan, wanted 0 or 1": {"mask": np.full((3, 4), np.nan)},
    "mask, row 1: got 0.5, wanted 0 or 1": {
        "mask": np.array([[1, 0, 0, 0], [0, 0.5, 0, 0], [1, 0, 0, 0]])
    },
    "mask, row 1: its last 1 is at token 4; sequences have at most 3": {
        "mask": np.array([[1, 0, 0, 0], [0, 0, 0, 1], [1, 0, 0, 0]])
    },
    "tokens, row 2: got token id 999, wanted 0 to 99": {
        "tokens": np.array([[1] * 5, [1] * 5, [999] * 5]),
        "mask": np.array([[1, 0, 0, 0]] * 3),
    },
    "mask: got only zeros in rows 2 to 2. Every step": {
        "mask": np.array([[1, 0, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]])
    },
}


def test_rollout_that_cannot_be_learned_from_is_refused(rollout: Rollout) -> None:
    def check(changes: dict[str, np.ndarray]) -> None:
        replace(rollout, **changes).check(3, 100, global_batch_size=2)

    cases = [(changes, f"^{re.escape(message)}") for message, changes in REFUSED.items()]
    assert_refused(check, cases, DataError)
