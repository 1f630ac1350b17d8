"""Every kind of head: the rewards that a server answers with are those that are evaluated."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nemo_aligner as na
from nemo_aligner.api.reward_model import release_models
from nemo_aligner.config.serving import ServerConfig
from nemo_aligner.distributed.launch import launch
from nemo_aligner.distributed.layout import destroy_layout, initialize_layout
from nemo_aligner.serving.engine.scorer import load_scorer
from nemo_aligner.serving.protocols import kserve
from nemo_aligner.serving.reward import RewardModelServable
from tests import tiny
from tests.heads import KINDS, NAMES, write_archive

RATINGS = [
    {"prompt": prompt, "response": response, **dict.fromkeys(("reward", *NAMES), 1)}
    for prompt, response in (
        ("why", "thank you"),
        ("who sings", "the bird sings in the tree"),
        ("what is the river", "no"),
    )
]


class OneRank:
    """The model of this process, which is called at once."""

    def __init__(self, servable: RewardModelServable) -> None:
        self._servable = servable

    def execute(self, operation: str, data: Any) -> Any:
        return self._servable.operations[operation](data)

    def submit(self, operation: str, data: Any) -> Future[Any]:
        answer: Future[Any] = Future()
        answer.set_result(self.execute(operation, data))
        return answer


def served(archive: Path, texts: Sequence[list[dict[str, str]]]) -> dict[str, np.ndarray]:
    """The outputs of the server's endpoint, without its sockets."""

    async def answered() -> dict[str, np.ndarray]:
        conversations = [[json.dumps(text).encode()] for text in texts]
        return await endpoint.answer({"conversations": np.array(conversations, dtype=object)})

    with launch():
        scorer = load_scorer(archive, initialize_layout())
        servable = RewardModelServable(scorer, ServerConfig())
        started = servable.start(OneRank(servable))
        endpoint = started.endpoints[0]
        assert endpoint.name == kserve.MODEL_NAME
        try:
            return dict(asyncio.run(answered()))
        finally:
            started.close()
            destroy_layout()


SERVED = (
    "one output and a bias",
    "two layers of several attributes",
    "quantiles",
    "bins with a bias",
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
