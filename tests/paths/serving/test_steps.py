"""Rewards of turns over HTTP are bit-identical with those of the scorer in process."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nemo_aligner.checkpoint.nemo.reward_model import load_reward_model, save_reward_model
from nemo_aligner.cli.serve import run_score, score_parser
from nemo_aligner.config.serving import (
    Combine,
    EnsembleConfig,
    ServerConfig,
    ShapingConfig,
)
from nemo_aligner.contract.scorer import score_all
from nemo_aligner.contract.steps import StepSpan
from nemo_aligner.distributed.layout import ParallelLayout
from nemo_aligner.serving.client import RewardClient
from nemo_aligner.serving.engine.ensemble import RewardEnsemble
from nemo_aligner.serving.engine.rows import Row
from nemo_aligner.serving.engine.scorer import load_scorer
from nemo_aligner.serving.engine.shaping import RewardShaper
from nemo_aligner.serving.protocols import StepRewards, kserve
from nemo_aligner.serving.reward import RewardBackend
from nemo_aligner.utils.errors import ConfigError, ServingError
from tests.harness.heads import OneRank
from tests.serving.gateway_calls import FakeClient, call, gateway_front
from tests.serving.servers import SERVE, running

QUESTION = {"role": "user", "content": "why"}
ANSWER = {"role": "assistant", "content": "the cat sings"}
CHAT = [QUESTION, ANSWER, QUESTION, {"role": "assistant", "content": "no"}]
TEXTS: list[Any] = [CHAT, "a raw text", CHAT[:2]]


@pytest.fixture(scope="module")
def stepped(
    archive: Path, layout: ParallelLayout, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The tiny reward model, with a reward at every turn."""
    path = tmp_path_factory.mktemp("stepped") / "steps.nemo"
    return rewritten(archive, path, layout, scored_position="turns")


def test_rewards_of_steps_are_the_same_after_json() -> None:
    values = np.array([[0.1, -3e-42], [1 / 3, 1e30]], dtype=np.float32)
    decoded = StepRewards.from_json(StepRewards(values, (StepSpan(1, 0, 3),)).to_json())
    assert decoded.rewards.tobytes() == values.tobytes()
    assert decoded.spans == (StepSpan(1, 0, 3),)


def test_row_is_read_at_its_positions_or_at_its_last_id(
    stepped: Path, layout: ParallelLayout
) -> None:
    scorer = load_scorer(stepped, layout, micro_batch_tokens=512)
    ids = scorer.encode(CHAT).token_ids
    rows = [Row.of(ids, [3, len(ids) - 1]), Row.of(ids), Row.of(ids[:4])]
    both, last, first = scorer.compute(rows)
    np.testing.assert_array_equal(both, np.concatenate([first, last]))
    twice = RewardEnsemble([scorer, scorer]).compute(rows)
    assert [array.shape for array in twice] == [(2, 4), (1, 4), (1, 4)]
    np.testing.assert_array_equal(twice[0], np.concatenate([both, both], axis=1))


def test_rewards_of_turns_have_the_same_bits_by_every_door(
    stepped: Path, layout: ParallelLayout, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("fastapi")

    scorer = load_scorer(stepped, layout, micro_batch_tokens=512)
    wanted = scorer.score_rows(TEXTS).steps
    assert [len(each.rewards) for each in wanted] == [2, 1, 1]
    ids = scorer.encode(CHAT).token_ids
    settings = [
        f"rm_model_file={stepped}",
        "server.port=0",
        "model.micro_batch_tokens=512",
        "server.prefix_cache_tokens=4096",
    ]
    with running(tmp_path, SERVE, *settings) as server, RewardClient(server.url) as client:
        for _ in range(2):  # the second time from the cache
            scored = client.score_rows([*TEXTS, ""])
            assert [*scored.errors] == [3]
            assert scored.steps is not None
            for found, own in zip(scored.steps, [*wanted, None], strict=True):
                if own is None:
                    assert found is None
                    continue
                assert found.rewards.tobytes() == own.rewards.tobytes()
                assert found.spans == own.spans
            last = np.stack([own.rewards[-1] for own in wanted])
            assert scored.rewards[:3].tobytes() == last.tobytes()
        options = ["a raw text", "--conversation", json.dumps(CHAT), "--steps"]
        assert run_score(score_parser().parse([*options, "--url", server.url])) == 0
        lines = capsys.readouterr().out.splitlines()
        assert [line.rpartition("      step ")[2] for line in lines if "step " in line] == [
            "1: a raw text",
            "1: the cat sings",
            "2: no",
        ]
        assert client.score_tokens([ids]).tobytes() == last[:1].tobytes()
        app = gateway_front(client)
        rows = call(app, "/v1/rewards", {"conversations": [CHAT, "no"], "steps": True}).json
        assert rows["steps"][1] is None
        both = [np.float32(step.pop("rewards")) for step in rows["steps"][0]]
        assert np.stack(both).tobytes() == wanted[0].rewards.tobytes()
        assert rows["steps"][0] == [
            {"message": 1, "start": 0, "end": 13},
            {"message": 3, "start": 0, "end": 2},
        ]
        plain = call(app, "/v1/rewards", {"tokens": [ids], "steps": True}).json
        assert [*map(len, plain["steps"])] == [1]
        assert "steps" not in call(app, "/v1/rewards", {"conversations": [CHAT]}).json
        asked = {"messages": CHAT, "task": "token_classify"}
        pooled = call(app, "/pooling", asked).json["data"][0]["data"]
        assert np.float32(pooled).tobytes() == wanted[0].rewards.tobytes()
        # As in vLLM, steps are the default of a model that has them.
        assert call(app, "/pooling", {"messages": CHAT}).json["data"][0]["data"] == pooled
        whole = call(app, "/pooling", {"messages": CHAT, "task": "classify"}).json["data"][0][
            "data"
        ]
        assert np.float32(whole).tobytes() == last[:1].tobytes()
        refused = call(app, "/classify", asked)
        assert (refused.status, "post to /pooling" in refused.json["error"]["message"]) == (
            400,
            True,
        )


def test_steps_are_shaped_one_by_one_and_those_of_an_ensemble_combined(
    stepped: Path, layout: ParallelLayout, tmp_path: Path
) -> None:
    """Shaping equals the same arithmetic by hand; rules for whole replies keep only the last."""
    second = tmp_path / "second.nemo"
    made = load_reward_model(stepped, layout)
    made.model.rm_head.weight.data.mul_(-3)
    contract = made.contract.with_label_means([0.0, 1.0])
    save_reward_model(second, made.model, made.config, made.tokenizer, contract)
    models = [load_scorer(path, layout, micro_batch_tokens=512) for path in (stepped, second)]
    weights = {"helpfulness": 2.0, "verbosity": -1.0}
    chats = [CHAT, CHAT[:2]]
    raw = [np.concatenate([each.rewards for each in own.score_rows(chats).steps]) for own in models]
    merged = np.stack([own.astype(np.float64) @ [2.0, -1.0] for own in raw])
    lower = merged.mean(axis=0) - 0.5 * merged.std(axis=0)
    wanted = lower.clip(lower.min() + 0.01).astype(np.float32)
    rules: dict[str, Any] = {"attribute_weights": weights, "clip": [lower.min() + 0.01, 1e9]}
    last = [1, 2]
    for more, has_steps in (({"threshold": 0.0}, True), ({"length_penalty": 1.0}, False)):
        shaper = RewardShaper(
            ShapingConfig(**rules, **more),
            EnsembleConfig(files=["second"], combine=Combine.lower_bound, k=0.5),
            [model.contract for model in models],
        )
        backend = RewardBackend(RewardEnsemble(models), ServerConfig(), shaper)
        started = backend.start(OneRank(backend))
        rows = asyncio.run(asked(started, chats))
        started.stop()
        assert ("steps" in rows) == has_steps
        if has_steps:
            found = [StepRewards.from_json(row.decode()).rewards for row in rows["steps"][:, 0]]
            assert [*map(len, found)] == [2, 1]
            np.testing.assert_array_equal(np.concatenate(found)[:, 0], wanted)
            np.testing.assert_array_equal(rows["rewards"][:, 0], wanted[last])
            both = np.concatenate(raw, axis=1)[last]
            np.testing.assert_array_equal(rows["raw_rewards"], both)
            assert rows["passed"][:, 0].tolist() == (wanted[last] >= 0).tolist()
    for fields, setting in (
        ({"scored_position": "last_token"}, "model.head.reads"),
        ({"aggregate": "min"}, "model.objective_kwargs.aggregate"),
    ):
        path = rewritten(second, tmp_path / f"{setting}.nemo", layout, **fields)
        other = load_scorer(path, layout, micro_batch_tokens=512)
        with pytest.raises(
            ConfigError, match=f"model 1 has another scoring contract than .*{setting}"
        ):
            RewardEnsemble([models[0], other])


@pytest.mark.parametrize("how", ["min", "mean", "product"])
def test_text_is_served_the_reward_that_the_contract_makes_of_its_steps(
    how: str, stepped: Path, layout: ParallelLayout, tmp_path: Path
) -> None:
    """It is bit-identical with the scorer's, and shaped like any other reward of a sample."""
    merged = rewritten(stepped, tmp_path / "merged.nemo", layout, aggregate=how)
    scorer = load_scorer(merged, layout, micro_batch_tokens=512, prefix_cache_tokens=4096)
    chats = [CHAT, CHAT[:2], [*CHAT, QUESTION, ANSWER]]
    raw, steps = score_all(scorer, chats), scorer.score_rows(chats).steps
    assert not np.array_equal(raw, np.stack([text.rewards[-1] for text in steps]))
    weights = {"helpfulness": 2.0, "verbosity": -1.0}
    shaped = (raw.astype(np.float64) @ [2.0, -1.0]).astype(np.float32)
    half = ShapingConfig(attribute_weights=weights, threshold=float(np.median(shaped)))
    long = ShapingConfig(attribute_weights=weights, length_penalty=1.0)
    lengths = scorer.count_reply_tokens(chats)
    for rules, expected, has_steps in (
        (None, raw, True),
        (half, shaped[:, None], True),
        (long, (shaped - np.array(lengths))[:, None], False),
    ):
        shaper = None
        if rules is not None:
            shaper = RewardShaper(rules, EnsembleConfig(), [scorer.contract])
        backend = RewardBackend(scorer, ServerConfig(), shaper)
        started = backend.start(OneRank(backend))
        for _ in range(2):  # the second time from the cache
            rows = asyncio.run(asked(started, chats))
            np.testing.assert_allclose(rows["rewards"], expected, rtol=2e-6, atol=1e-6)
            assert rows["rewards"].tobytes() == expected.tobytes() or rules is not None
            assert ("steps" in rows) == has_steps
            if rules is not None:
                assert rows["raw_rewards"].tobytes() == raw.tobytes()
            if rules is half:
                assert rows["passed"][:, 0].tolist() == (expected[:, 0] >= half.threshold).tolist()
            if rules is None:
                served = [StepRewards.from_json(row.decode()) for row in rows["steps"][:, 0]]
                for answered, scored in zip(served, steps, strict=True):
                    assert answered.rewards.tobytes() == scored.rewards.tobytes()
        with pytest.raises(
            ServingError, match=f"row 0: got token ids, .* the {how} over its steps"
        ):
            asyncio.run(started.endpoints[1].answer(kserve.encode_tokens([[5, 6]])))
        started.stop()


def rewritten(path: Path, other: Path, layout: ParallelLayout, **fields: Any) -> Path:
    """Write the same model with other fields of its contract."""
    made = load_reward_model(path, layout)
    contract = dataclasses.replace(made.contract, **fields)
    save_reward_model(other, made.model, made.config, made.tokenizer, contract)
    return other


async def asked(model: Any, texts: list[Any]) -> dict[str, np.ndarray]:
    """Return the answer of a server's service, without its sockets."""
    given = [[json.dumps(text).encode()] for text in texts]
    answer = await model.endpoints[1].answer({"conversations": np.array(given, dtype=object)})
    return dict(answer)


def test_model_with_one_reward_of_a_text_says_that_it_has_no_steps(archive: Path) -> None:
    pytest.importorskip("fastapi")

    app = gateway_front(FakeClient())
    for path, body in {
        "/v1/rewards": {"texts": ["ab"], "steps": True},
        "/pooling": {"input": "ab", "task": "token_classify"},
    }.items():
        answer = call(app, path, body)
        assert (answer.status, "one reward per sample" in answer.body.decode()) == (400, True)
