"""For every kind of head, a server's rewards equal those of an evaluation."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import nemo_aligner as na
from nemo_aligner.api.reward_model import release_models
from tests.harness import tiny
from tests.harness.heads import KINDS, NAMES, served, write_archive

RATINGS = [
    {"prompt": prompt, "response": response, **dict.fromkeys(("reward", *NAMES), 1)}
    for prompt, response in (
        ("why", "thank you"),
        ("who sings", "the bird sings in the tree"),
        ("what is the river", "no"),
    )
]


SERVED = (
    "one output and a bias",
    "two layers of several attributes",
    "quantiles",
    "several heads",
    "bins with a bias",
    "probabilities",
    "the mean of a reply",
)


@pytest.mark.parametrize("name", SERVED)
def test_served_rewards_are_the_evaluated_ones(name: str, tmp_path: Path) -> None:
    archive = write_archive(tmp_path / "rm.nemo", KINDS[name])
    evaluated = na.RewardModel.from_pretrained(archive)
    told = tmp_path / "rewards.jsonl"
    evaluated.evaluate(RATINGS, output_rewards=str(told))
    release_models()
    lines = [json.loads(line) for line in told.read_text().splitlines()]
    texts = [tiny.chat(each["prompt"], each["response"]) for each in RATINGS]
    answer = served(archive, texts)
    wanted = np.array([list(line["rewards"].values()) for line in lines])
    np.testing.assert_array_equal(answer["rewards"], wanted.astype(np.float32))
    assert wanted.std(axis=0).min() > 0.01
    assert ("spread" in answer) == (KINDS[name].readout is not None)
