"""A gateway that combines a reward model, a judge and functions: arithmetic, answers, readiness."""

from __future__ import annotations

import asyncio
import json
import math
import socket
import time
from typing import Any

import numpy as np
import pytest

pytest.importorskip("fastapi")
pytest.importorskip("aiohttp")
from nemo_aligner.config.gateway import (
    CombineConfig,
    CombineKind,
    GatewayRunConfig,
    JudgeConfig,
    JudgeTask,
)
from nemo_aligner.config.load import load_config
from nemo_aligner.serving import gateway
from nemo_aligner.serving.client import RefusedError
from nemo_aligner.serving.client.causes import PROBE_S
from nemo_aligner.serving.composed import Combination
from nemo_aligner.utils.errors import SettingsError
from tests.serving.fake_judge import FakeJudge
from tests.serving.fake_server import CONTRACT, total
from tests.serving.gateway_calls import (
    LENGTH,
    Calls,
    FakeClient,
    asked,
    compare,
    conversation,
    modelled,
    verify,
)

NONE = np.zeros(3, dtype=bool)
PARTS = np.array([[1.5, 4.0, 10.0], [-2.0, 2.0, 30.0], [0.5, np.nan, 20.0]])
MODULE = "tests.serving.test_composed"


def combination(**settings: Any) -> Combination:
    return Combination.of(("model", "judge", "length"), CombineConfig(**settings), 0.0)


def test_weighted_sum_and_minimum_by_hand_with_components_that_add_up() -> None:
    settings = {
        "weights": {"model": 1.0, "judge": 0.5, "length": -0.1},
        "offsets": {"judge": -3.0},
    }
    rewards, components = combination(**settings).combine(PARTS, NONE)
    assert rewards.tolist()[:2] == pytest.approx([1.5 + 0.5 - 1.0, -2.0 - 0.5 - 3.0])
    assert np.isnan(rewards[2])
    assert components[0].tolist() == pytest.approx([1.5, 0.5, -1.0])
    assert components[:2].sum(axis=1).tolist() == rewards[:2].tolist()
    rewards, _ = combination(kind=CombineKind.minimum, **settings).combine(PARTS, NONE)
    assert rewards.tolist()[:2] == [-1.0, -3.0]
    assert np.isnan(rewards[2])
    plain, _ = combination().combine(PARTS, NONE)
    assert plain.tolist()[:2] == [15.5, 30.0]


def test_gate_opens_where_the_margin_to_the_next_response_is_small() -> None:
    gate = combination(kind=CombineKind.gate, gate_margin=0.5, weights={"model": 2.0})
    values = np.array([1.0, 3.0, 1.25, 2.5, 0.25, 0.75, np.nan, 0.0])
    keys = ["a", "a", "a", "a", "b", "c", "a", None]
    # In prompt a: 1.0 and 1.25 are close, 2.5 and 3.0 are exactly one margin apart. The responses
    # to b, c and the raw text are alone, so their distance to 0 counts.
    expected = [True, False, True, False, True, False, False, True]
    assert gate.find_close(values, keys).tolist() == expected
    assert gate.first_names == ("model",)
    decided = np.array([True, False, True])
    rewards, components = gate.combine(PARTS, decided)
    assert rewards.tolist() == [3.0, -4.0 + 2.0 + 30.0, 1.0]
    assert components.tolist() == [[3.0, 0.0, 0.0], [-4.0, 2.0, 30.0], [1.0, 0.0, 0.0]]
    boundary = Combination.of(("model", "judge"), CombineConfig(kind=CombineKind.gate), 5.0)
    assert boundary.find_close(np.array([4.5, 0.0]), ["a", "b"]).tolist() == [True, False]
    assert boundary.find_close(np.zeros(0), []).tolist() == []


# The gateway in this process, with a fake client of a model and a fake judge.


def overflow(samples: list[dict[str, Any]]) -> list[float]:
    """Too large for float32 after the reply "big"."""
    replies = [sample["messages"][-1]["content"] for sample in samples]
    return [1e39 if reply == "big" else 1.0 for reply in replies]


def length_of_text(samples: list[dict[str, Any]]) -> list[float | None]:
    """No score for a text with y."""
    return [None if "y" in sample["text"] else len(sample["text"]) for sample in samples]


def test_answers_have_the_reward_and_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    replies = ("b 4", "c 2", "d 2")
    combine = {"weights": {"model": 0.01, "judge": 2.0, "x": 1.0}, "offsets": {"judge": -3.0}}
    fake, functions = FakeJudge(), {"x": LENGTH}
    calls: Calls = [
        ("/compare", compare(*replies)),
        ("/v1/rewards", {"conversations": [conversation(reply) for reply in replies]}),
    ]
    compared, listed = (
        answer.json
        for answer in asked(monkeypatch, calls, fake, functions=functions, combine=combine)
    )
    # Circular pairs: b > c, c = d (c is better), d < b. A tie moves both scores by half a point.
    judged = [4.0, (2 + 2.5) / 2, (1.5 + 2) / 2]
    lengths = [len(json.dumps({"messages": conversation(reply)})) for reply in replies]
    parts = [
        {"model": modelled(reply), "judge": score, "x": float(length)}
        for reply, score, length in zip(replies, judged, lengths, strict=True)
    ]
    assert compared["parts"] == listed["parts"] == parts
    rewards = [0.01 * p["model"] + 2 * (p["judge"] - 3) + p["x"] for p in parts]
    assert compared["rewards"] == pytest.approx(rewards, rel=1e-6)
    assert [row[0] for row in listed["rewards"]] == compared["rewards"]
    pairs = [(each["response_i"], each["response_j"]) for each in compared["comparison_results"]]
    assert pairs == [(0, 1), (1, 2), (2, 0)]
    first = compared["comparison_results"][0]
    assert [first[name] for name in ("judge_idx", "score_1", "score_2", "ranking")] == [0, 4, 2, 2]
    assert compared["metrics"]["tiebreak_usage_rate"] == pytest.approx(1 / 3)
    assert compared["metrics"]["mean_individual_score"] == pytest.approx(16 / 6)
    assert listed["attributes"] == ["reward"]
    assert listed["contract_hash"] not in (None, CONTRACT.hash)


@pytest.mark.parametrize("kind", [*CombineKind])
def test_components_of_verify_add_up_or_are_left_out(
    kind: CombineKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    combine: dict[str, Any] = {"kind": kind, "weights": {"model": 0.37, "judge": 1.7}}
    if kind is CombineKind.gate:
        combine["gate_margin"] = modelled("b 4") + 0.1  # the only response is judged below it
    rejected = {**verify(""), "responses_create_params": {"input": ""}}
    calls: Calls = [("/verify", body) for body in (verify("b 4"), verify("z 4"), rejected)]
    closer, farther, refused = asked(
        monkeypatch, calls, FakeJudge(), combine=combine, task=JudgeTask.rating
    )
    assert refused.json["failure_kind"] == "reward_model:refused_text"
    assert refused.json["reward_components"] == dict.fromkeys(closer.json["reward_components"], 0.0)
    for answer, reply in ((closer.json, "b 4"), (farther.json, "z 4")):
        model, is_decided = modelled(reply), kind is CombineKind.gate and reply == "z 4"
        terms = {"model": 0.37 * model, "judge": 0.0 if is_decided else 6.8}
        assert (answer["part/model"], answer.get("part/judge")) == (
            model,
            None if is_decided else 4.0,
        )
        if kind is CombineKind.minimum:
            assert answer["reward_components"] == {}
            assert answer["reward"] == pytest.approx(min(terms.values()), rel=1e-6)
            continue
        assert answer["reward_components"] == pytest.approx(terms, rel=1e-6)
        total_of = sum(answer["reward_components"].values())
        assert math.isclose(total_of, answer["reward"], rel_tol=1e-9)
        assert answer["attribute/reward"] == answer["reward"]


def test_gate_asks_the_judge_only_about_close_responses(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeJudge()
    combine = {"kind": CombineKind.gate, "gate_margin": 3.0, "offsets": {"judge": -3.0}}
    # "b 4" and "c 2" are half a point and a letter apart, "zz 1" is far away.
    (answer,) = asked(
        monkeypatch, [("/compare", compare("zz 1", "b 4", "c 2"))], fake, combine=combine
    )
    assert [part["judge"] for part in answer.json["parts"]] == [None, 4.0, 2.0]
    assert answer.json["rewards"] == [modelled("zz 1"), modelled("b 4") + 1, modelled("c 2") - 1]
    assert len(fake.requests) == 2
    pairs = answer.json["comparison_results"]
    assert [(pair["response_i"], pair["response_j"]) for pair in pairs] == [(1, 2), (2, 1)]


def test_reward_that_float32_cannot_hold_is_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    body = {"conversations": [conversation("x"), conversation("big")]}
    calls: Calls = [("/v1/rewards", body), ("/verify", verify("big"))]
    functions = {"rule": f"{MODULE}:overflow"}
    listed, rollout = asked(monkeypatch, calls, functions=functions)
    reason = (
        "the combined reward is inf, wanted a finite number in float32. Check the values of the "
        "parts, combine.weights and combine.offsets"
    )
    assert listed.json["rewards"] == [[modelled("x") + 1], None]
    assert listed.json["errors"] == [{"row": 1, "message": reason}]
    assert listed.json["parts"][1] == {"model": modelled("big"), "rule": 1e39}
    assert (rollout.json["mask_sample"], rollout.json["failure_kind"]) == (True, "judge_failed")
    assert "Infinity" not in listed.body.decode() + rollout.body.decode()


def test_model_that_gives_no_number_and_no_error_fails_the_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client = FakeClient()
    give = client.score_rows_async

    async def give_nan(*arguments: Any, **options: Any) -> Any:
        scored = await give(*arguments, **options)
        scored.rewards[1] = np.nan
        return scored

    client.score_rows_async = give_nan  # type: ignore[method-assign]
    body = {"conversations": [conversation("x"), conversation("y")]}
    functions = {"rule": LENGTH}
    (answer,) = asked(monkeypatch, [("/v1/rewards", body)], client=client, functions=functions)
    reason = "row 1: the reward model gave a reward that is not finite, and no error"
    assert (answer.status, reason in answer.body.decode()) == (500, True)


def test_error_of_the_model_has_the_number_of_the_row_in_the_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client = FakeClient()
    client.failure = RefusedError("s", 500, "row 0: not finite")
    body = compare("x", "y")
    body["response_objs"][0] = {"output": []}  # rejected before the model gets the others
    functions = {"rule": LENGTH}
    (answer,) = asked(monkeypatch, [("/compare", body)], client=client, functions=functions)
    assert (answer.status, answer.json["detail"]) == (500, "row 1: not finite")


def test_model_alone_scores_token_ids_also_with_a_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: Calls = [("/v1/rewards", {"tokens": [[1, 2], [0], [7]]})]
    combine = {"weights": {"model": 0.5}, "offsets": {"model": 4.0}}
    (answer,) = asked(monkeypatch, calls, combine=combine)
    assert answer.json["rewards"] == [[(3 / 2 + 4) / 2], None, [(7 / 2 + 4) / 2]]
    assert answer.json["parts"] == [{"model": 1.5}, {"model": None}, {"model": 3.5}]


def test_only_a_rejected_sample_gets_the_reward_that_is_set_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A sample that a part does not score fails the request, also next to a rejected one."""
    calls: Calls = [("/get_reward", {"query": query}) for query in (["xx", ""], ["", "xx", "xy"])]
    functions = {"length": f"{MODULE}:length_of_text"}
    settings = {"refused_reward": -5.0}
    rejected, failed = asked(monkeypatch, calls, functions=functions, settings=settings)
    assert rejected.json["rewards"] == [total("xx") / 2 + 2, -5.0]
    assert failed.status == 400
    assert "row 2: length: the function returned no number" in json.dumps(failed.json)


def test_readiness_needs_each_part_that_every_sample_gets(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = {"url": "http://127.0.0.1:9/v1", "model": "j"}
    client = FakeClient()
    monkeypatch.setattr(gateway, "_build_client", lambda config, token: client)
    for kind, missing in ((CombineKind.weighted, ["http://one"]), (CombineKind.gate, [])):
        config = GatewayRunConfig(judge=JudgeConfig(**gone), combine=CombineConfig(kind=kind))

        async def probe(config: GatewayRunConfig = config) -> dict[str, str | None]:
            service = gateway.build_service(config, None)
            states = await service.probe()
            await service._parts["judge"].close()  # type: ignore[attr-defined]
            return states

        states = asyncio.run(probe())
        assert "connection refused" in str(states[gone["url"]])
        reason = "it answers, but there are no rewards without judge"
        assert states["http://one"] == (reason if missing else None)


def test_readiness_of_all_parts_is_asked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A judge and a model that both hang take no longer than the probe of one."""
    client = FakeClient()

    async def probe_slowly() -> dict[str, str | None]:
        await asyncio.sleep(PROBE_S)
        return {"http://one": "no answer"}

    monkeypatch.setattr(client, "probe_async", probe_slowly)
    monkeypatch.setattr(gateway, "_build_client", lambda config, token: client)

    async def probe(url: str) -> tuple[float, dict[str, str | None]]:
        config = GatewayRunConfig(judge=JudgeConfig(url=url, model="j"))
        service = gateway.build_service(config, None)
        started_at = time.monotonic()
        states = await service.probe()
        took = time.monotonic() - started_at
        await service._parts["judge"].close()  # type: ignore[attr-defined]
        return took, states

    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        took, states = asyncio.run(probe(url))
    assert took < 1.8 * PROBE_S
    assert states == {"http://one": "no answer", url: "no answer within 1 s"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["backends=[]"], "backends: got [], wanted the URL of a server, or several, or a judge"),
        (["combine.weights={judge: 1}"], "wanted a weight for each of the parts: model"),
        (["combine.offsets={model: .nan}"], "combine.weights: got {}, wanted finite weights"),
        (["combine.offsets={x: 1}"], "combine.offsets: got {'x': 1.0}, wanted names of parts: mod"),
        (["combine.kind=gate"], "combine.kind: got 'gate', wanted gate with two or more parts"),
        (["functions={judge: a:b}"], "functions: got {'judge': 'a:b'}, wanted name=package.mod"),
        (["functions={x: a.b}"], "functions: got {'x': 'a.b'}, wanted name=package.module:func"),
        (["judge.url=a", "judge.model=a"], "judge.url: got 'a', wanted an http:// or https:// U"),
        (["judge.url=http://a:b@c", "judge.model=a"], "https:// URL without a password"),
        (["judge.url=http://a", "judge.model=a", "judge.fields={n: 2}"],
         "judge.fields: got {'n': 2}, wanted other fields than max_tokens, messages, model"),
        (["judge.url=http://a"], "judge.model: got None, wanted a name with judge.url, or nei"),
        (["combine.kind=gate", f"functions={{x: {LENGTH}}}", "combine.gate_part=y"],
         "combine.gate_part: got 'y', wanted the name of a part: model, x"),
    ],
)  # fmt: skip
def test_settings_that_do_not_fit_are_refused_by_name(settings: list[str], message: str) -> None:
    with pytest.raises(SettingsError) as refused:
        load_config(GatewayRunConfig, settings)
    assert message in str(refused.value)
