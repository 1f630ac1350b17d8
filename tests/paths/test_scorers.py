"""One model by every scorer: the same rows of the same samples, one of which is rejected."""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from nemo_aligner.checkpoint.hf.classifier import load_hf_reward_model
from nemo_aligner.checkpoint.nemo.reward_model import load_reward_model, save_reward_model
from nemo_aligner.config.common import Aggregate
from nemo_aligner.contract.scorer import SampleEncoder, Scorer
from nemo_aligner.distributed.layout import ParallelLayout
from nemo_aligner.evaluation.sources import RewardSource
from nemo_aligner.integrations.in_process import InProcessScorer
from nemo_aligner.serving.client import RewardClient
from nemo_aligner.serving.client.posting import PostingAddress
from nemo_aligner.serving.client.scorers import QueryScorer, ServedScorer, VllmScorer
from nemo_aligner.serving.engine.ensemble import RewardEnsemble
from nemo_aligner.serving.engine.scorer import RewardScorer, load_scorer
from nemo_aligner.utils.errors import AlignerError, ConfigError
from tests.checkpoint.hf.exporting import export
from tests.harness import tiny
from tests.serving.client.misbehaving import Answer, Answering, Misbehaving, output

SAMPLES = ["thank you", "a red dog sings", "", "the river"]
REJECTED = 2


class ServerWithRewards(Misbehaving):
    """A server of ours that answers with the rewards of a scorer, and rejects the empty text."""

    def __init__(self, scorer: RewardScorer) -> None:
        scored = scorer.score_rows(SAMPLES)
        self.rewards = dict(zip(SAMPLES, scored.rewards.tolist(), strict=True))
        super().__init__(self.rejected)
        self.contract = scorer.contract

    def rejected(self, texts: list[str]) -> Answer | None:
        return (400, {"error": f"row {texts.index('')}: it is empty"}) if "" in texts else None

    def _rewards(self, texts: list[str]) -> object:
        numbers = [number for text in texts for number in self.rewards[text]]
        hashes = [self.contract.hash] * len(texts)
        rewards = output("rewards", "FP32", [len(texts), 2], numbers)
        return {"outputs": [rewards, output("contract_hash", "BYTES", [len(texts), 1], hashes)]}


@contextmanager
def posted(served: ServerWithRewards) -> Iterator[str]:
    """Serve the same rewards with the protocols of vLLM and OpenRLHF; yields the URL."""

    class Handler(Answering):
        def do_POST(self) -> None:
            body = json.loads(self.body())
            texts = body["query"] if "query" in body else [body["input"]]
            refusal = served.rejected(texts)
            rewards = [] if refusal else [served.rewards[text] for text in texts]
            content = {
                "rewards": [row[0] for row in rewards],
                "data": [{"probs": row} for row in rewards],
            }
            self.answer(*(refusal or (200, content)))

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_reward_nemo(tmp_path_factory.mktemp("model") / "rm.nemo", seq_length=64)


def test_every_scorer_gives_the_same_rows(
    archive: Path, layout: ParallelLayout, tmp_path: Path
) -> None:
    plain = load_scorer(archive, layout)
    expected = plain.score_rows(SAMPLES).rewards
    export(archive, tmp_path / "hf", layout)
    served = ServerWithRewards(plain).come()
    with ExitStack() as stack:
        stack.callback(served.go)
        client = stack.enter_context(RewardClient(served.url))
        url = stack.enter_context(posted(served))
        vllm, openrlhf = (PostingAddress(f"{url}/{path}") for path in ("classify", "get_reward"))
        scorers: list[Scorer] = [
            plain,
            RewardEnsemble([plain, plain]),
            InProcessScorer(plain),
            load_hf_reward_model(str(tmp_path / "hf"), None, 8192),
            ServedScorer(client),
            VllmScorer(vllm, plain.attributes),
            QueryScorer(openrlhf, plain.attributes[:1]),
        ]
        for scorer in scorers:
            check_rows(scorer, expected, plain.contract.hash)
    has_tokenizer = [isinstance(scorer, SampleEncoder) for scorer in scorers]
    assert has_tokenizer == [True, True, False, True, False, False, False]


def check_rows(scorer: Scorer, expected: np.ndarray, contract_hash: str) -> None:
    name = type(scorer).__name__
    columns = len(scorer.attributes)
    scored = scorer.score_rows(SAMPLES).check_finite()
    assert [*scored.errors] == [REJECTED], name
    assert "empty" in scored.errors[REJECTED], name
    assert scored.rewards.dtype == np.float32, name
    repeated = np.concatenate([expected, expected], axis=1)[:, :columns]
    np.testing.assert_allclose(scored.rewards, repeated, atol=1e-5, err_msg=name)
    assert scored.exceeded.tolist() == [False] * len(SAMPLES), name
    assert scored.steps is None, name
    # The rows have the hash of the contract that the scorer knows.
    assert scorer.contract is None or scorer.contract.hash == contract_hash, name
    assert scored.contract_hash in (None, contract_hash), name
    assert scorer.score_rows([]).rewards.shape == (0, columns), name
    assert scorer.score_rows([""]).rewards.shape == (1, columns), name
    with pytest.raises(AlignerError, match=f"(text|row) {REJECTED}: .*empty"):
        scorer.score_rows(SAMPLES, on_error="raise")


def test_every_scorer_of_steps_has_their_rewards_and_any_rule_for_them(
    archive: Path, layout: ParallelLayout, tmp_path: Path
) -> None:
    loaded = load_reward_model(archive, layout)
    contract = dataclasses.replace(loaded.contract, scored_position="turns")
    save_reward_model(
        tmp_path / "turns.nemo", loaded.model, loaded.config, loaded.tokenizer, contract
    )
    stepped = load_scorer(tmp_path / "turns.nemo", layout)
    dialogue = [*tiny.chat("who", "the bird"), *tiny.chat("why", "thank you")]
    samples = [dialogue, "", dialogue[:2]]
    for scorer in (stepped, RewardEnsemble([stepped, stepped]), InProcessScorer(stepped)):
        name = type(scorer).__name__
        scored = scorer.score_rows(samples)
        assert scored.steps is not None, name
        both, none, one = scored.steps
        assert none is None, name
        assert (len(both.rewards), len(one.rewards)) == (2, 1), name
        assert np.array_equal(one.rewards[0], both.rewards[0]), name
        assert np.array_equal(scored.rewards[0], both.rewards[-1]), name
    source = RewardSource.of(stepped).with_aggregate(Aggregate.min)
    scored = stepped.score_rows(samples)
    least = source.rewards_of(scored)
    assert np.array_equal(least[0], scored.steps[0].rewards.min(axis=0))
    assert np.isnan(least[1]).all()
    assert RewardSource.of(stepped).with_aggregate(Aggregate.last) == RewardSource.of(stepped)
    with pytest.raises(ConfigError, match="aggregate: got min, but a scorer has one reward"):
        RewardSource.of(load_scorer(archive, layout)).with_aggregate(Aggregate.min)
