"""A gateway that combines a reward model, a judge and functions: arithmetic, answers, failures."""

from __future__ import annotations

import asyncio
import json
import math
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

pytest.importorskip("fastapi")
pytest.importorskip("aiohttp")
from nemo_aligner.config.gateway import (
    CombineConfig,
    CombineKind,
    GatewayConfig,
    GatewayRunConfig,
    JudgeConfig,
    JudgePairs,
    JudgeTask,
)
from nemo_aligner.config.load import load_config
from nemo_aligner.serving import gateway, parts
from nemo_aligner.serving.client import RefusedError, judge
from nemo_aligner.serving.client.causes import PROBE_S
from nemo_aligner.serving.composed import Combination
from nemo_aligner.serving.endpoints import reward_endpoints
from nemo_aligner.serving.engine import timed_threads
from nemo_aligner.serving.failures import ALL_ROWS, FailureKind
from nemo_aligner.serving.front.app import Front
from nemo_aligner.serving.front.models import HostedModel
from nemo_aligner.serving.protocols import ScoreRequest, kserve
from nemo_aligner.utils.errors import ConfigError, SettingsError
from tests.serving.fake_judge import FakeJudge
from tests.serving.fake_server import CONTRACT, total
from tests.serving.gateway_calls import Answer, FakeClient, call_async

NONE = np.zeros(3, dtype=bool)
PARTS = np.array([[1.5, 4.0, 10.0], [-2.0, 2.0, 30.0], [0.5, np.nan, 20.0]])
USER = {"role": "user", "content": "a"}
MODULE = "tests.serving.test_composed"
CAN_RETURN = threading.Event()


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge, "_FIRST_PAUSE_S", 0.01)


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


def count_characters(samples: list[dict[str, Any]]) -> list[float]:
    return [len(json.dumps(sample)) for sample in samples]


def reward_of_x(samples: list[dict[str, Any]]) -> list[float | None]:
    """No score for a reply without x; it may change its arguments."""
    replies = [sample["messages"].pop()["content"] for sample in samples]
    return [None if "x" not in text else float(text.count("x")) for text in replies]


def fail(samples: list[dict[str, Any]]) -> list[float]:
    raise KeyError("a bug")


def stall(samples: list[dict[str, Any]]) -> list[float]:
    while True:
        time.sleep(0.01)


def wait_in_c(samples: list[dict[str, Any]]) -> list[float]:
    CAN_RETURN.wait()
    return [1.0] * len(samples)


def overflow(samples: list[dict[str, Any]]) -> list[float]:
    """Too large for float32 after the reply "big"."""
    replies = [sample["messages"][-1]["content"] for sample in samples]
    return [1e39 if reply == "big" else 1.0 for reply in replies]


def return_one(samples: list[dict[str, Any]]) -> list[float]:
    return [1.0]


def length_of_text(samples: list[dict[str, Any]]) -> list[float | None]:
    """No score for a text with y."""
    return [None if "y" in sample["text"] else len(sample["text"]) for sample in samples]


async def coroutine(samples: list[dict[str, Any]]) -> list[float]:
    return []


def conversation(reply: str, prompt: dict[str, str] = USER) -> list[dict[str, str]]:
    return [prompt, {"role": "assistant", "content": reply}]


def modelled(reply: str) -> float:
    """The model's merged reward: CONTRACT weighs a total and its negative by 1 and 0.5."""
    return total(f"a{reply}") / 2


def verify(reply: str) -> dict[str, Any]:
    output = [{"role": "assistant", "content": reply}]
    return {"responses_create_params": {"input": "a"}, "response": {"output": output}}


def compare(*replies: str, **fields: Any) -> dict[str, Any]:
    outputs = [{"output": [{"role": "assistant", "content": reply}]} for reply in replies]
    return {"conversation_history": [USER], "response_objs": outputs, **fields}


Calls = Sequence[tuple[str, Any]]


def asked(
    monkeypatch: pytest.MonkeyPatch,
    calls: Calls,
    fake: FakeJudge | None = None,
    *,
    client: Any = None,
    functions: dict[str, str] | None = None,
    combine: dict[str, Any] | None = None,
    settings: dict[str, Any] | None = None,
    before: Callable[[FakeClient], None] | None = None,
    **rules: Any,
) -> list[Answer]:
    """Return the answers to all calls, which are sent at once; ``client`` False: no model."""
    model = FakeClient() if client is None else client
    if model:
        model.aclose = _nothing
        monkeypatch.setattr(gateway, "_build_client", lambda config, token: model)

    async def run() -> list[Answer]:
        judge_config = JudgeConfig()
        if fake is not None:
            rules.setdefault("timeout_s", 0.3)
            rules.setdefault("retries", 1)
            judge_config = JudgeConfig(url=fake.url, model="j", **rules)
        config = GatewayRunConfig(
            backends=["http://one"] if model else [],
            judge=judge_config,
            functions=functions or {},
            function_timeout_s=0.3,
            combine=CombineConfig(**(combine or {})),
            gateway=GatewayConfig(**(settings or {})),
        )
        service = gateway.build_service(config, None)
        endpoints = reward_endpoints(service, 16, kserve.OPTIONAL_NAMES)
        front = Front(
            [HostedModel(service, endpoints)], endpoints, config.gateway, None, service.statistics
        )
        await service.start()
        posts = [call_async(front, path, body) for path, body in calls if body is not None]
        answers = list(await asyncio.gather(*posts))
        for path, body in calls:
            if body is None:
                answers.append(await call_async(front, path))
        await service.close()
        return answers

    async def with_judge() -> list[Answer]:
        if fake is None:
            return await run()
        async with fake.running():
            return await run()

    return asyncio.run(with_judge())


async def _nothing() -> None:
    return


def test_answers_have_the_reward_and_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    replies = ("b 4", "c 2", "d 2")
    combine = {"weights": {"model": 0.01, "judge": 2.0, "x": 1.0}, "offsets": {"judge": -3.0}}
    fake, functions = FakeJudge(), {"x": f"{MODULE}:count_characters"}
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
    calls: Calls = [("/verify", verify("b 4")), ("/verify", verify("z 4"))]
    closer, farther = asked(monkeypatch, calls, FakeJudge(), combine=combine, task=JudgeTask.rating)
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


MISBEHAVIORS = ("slow", "malformed", "outside", "refuses", "dies", "broken", "forbidden", "html")


def test_every_answer_is_right_or_masked_whatever_the_judge_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """60 rollouts at once: of each bad kind some, that fail always; the others are right."""
    fake = FakeJudge()
    fake.pause_s = 0.01
    replies = [
        f"{name} {n % 5 + 1}" for n in range(60) for name in [(*MISBEHAVIORS, "good")[n % 9]]
    ]
    begun = time.monotonic()
    calls: Calls = [*(("/verify", verify(reply)) for reply in replies), ("/metrics", None)]
    *answers, metrics = asked(
        monkeypatch,
        calls,
        fake,
        task=JudgeTask.rating,
        max_connections=8,
        combine={"offsets": {"judge": 1}},
    )
    assert time.monotonic() - begun < 20
    assert fake.most_open <= 8 + 8  # an aborted request may still be open at the fake judge
    for reply, answer in zip(replies, answers, strict=True):
        body = answer.json
        assert answer.status == 200
        if reply.startswith("good"):
            assert body["reward"] == pytest.approx(modelled(reply) + int(reply[-1]) + 1)
            assert not body["mask_sample"]
        else:
            assert (body["reward"], body["mask_sample"]) == (0.0, True), reply
            # Only what may work later is a failure that a trainer tries again.
            is_temporary = reply.split()[0] in ("slow", "dies", "broken")
            kind = "transport_unreachable" if is_temporary else "judge_failed"
            assert body["failure_kind"] == kind, reply
            assert body["failure_reason"].startswith("row 0: judge: ")
    bad = sum(not reply.startswith("good") for reply in replies)
    values = dict(line.rsplit(" ", 1) for line in metrics.body.decode().splitlines())
    name = f'{{backend="{fake.url}"}}'
    counts = {
        count: float(values[f"nemo_aligner_server_{count}_total{name}"])
        for count in (
            "judge_calls",
            "judge_prompt_tokens",
            "judge_completion_tokens",
            "masked_rows",
        )
    }
    forbidden = sum(reply.startswith("forbidden") for reply in replies)
    calls_sent = 60 + bad - forbidden  # one retry, except of a rejected request
    assert (counts["judge_calls"], counts["masked_rows"]) == (calls_sent, bad)
    with_usage = (
        60 - bad + 2 * sum(r.split()[0] in ("malformed", "outside", "refuses") for r in replies)
    )
    assert counts["judge_prompt_tokens"] == 10 * with_usage
    assert counts["judge_completion_tokens"] == 3 * with_usage
    failures = ("slow", "malformed", "refusals", "unreachable", "rejected")
    failed = {
        failure: float(values[f"nemo_aligner_server_judge_{failure}_total{name}"])
        for failure in failures
    }
    assert sum(failed.values()) == 2 * bad - forbidden
    assert failed["rejected"] == forbidden


def test_failed_comparison_masks_both_responses_in_each_protocol(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    groups = [conversation(reply, {"role": "user", "content": prompt}) for prompt, reply in (
        ("a", "slow 4"), ("a", "b 3"), ("c", "x 5"), ("c", "y 1"))]  # fmt: skip
    calls: Calls = [
        ("/v1/rewards", {"conversations": groups}),
        ("/v1/rewards", {"conversations": [*groups[2:], ["no message"]]}),
        ("/compare", compare("slow 4", "b 3")),
        ("/get_reward", {"query": ["raw"]}),
        ("/verify", verify("b 3")),
    ]
    listed, fine, compared, raw, alone = asked(monkeypatch, calls, FakeJudge())
    assert [row is None for row in listed.json["rewards"]] == [True, True, False, False]
    assert listed.json["parts"][0]["judge"] is None
    assert [part["judge"] for part in listed.json["parts"][2:]] == [5.0, 1.0]
    reason = "judge: no answer within 0.3 s (judge.timeout_s)"
    assert listed.json["errors"] == [{"row": row, "message": reason} for row in (0, 1)]
    assert [row is None for row in fine.json["rewards"]] == [False, False, True]
    assert (compared.status, compared.json["detail"]) == (503, f"row 0: {reason}")
    assert compared.headers["retry-after"] == "1"
    assert raw.status == 400
    assert "judge: it is a raw text" in json.dumps(raw.json)
    assert alone.json["mask_sample"]
    assert "Set judge.task=rating" in alone.json["failure_reason"]
    strict = {"fail_requests": True}
    (failed,) = asked(monkeypatch, calls[:1], FakeJudge(), combine=strict)
    assert (failed.status, failed.json["error"]["message"]) == (503, f"row 0: {reason}")
    # What the judge cannot grade would be the same again, so a client must not send it again.
    bad = [("/compare", compare("long 4", "b 3")), ("/v1/rewards", {"conversations": [
        conversation("long 4"), conversation("b 3")]})]  # fmt: skip
    for failed in asked(monkeypatch, bad, FakeJudge(), combine=strict):
        assert (failed.status, "retry-after" in failed.headers) == (400, False)
        assert "row 0: judge: it answers HTTP 400: 'The prompt is too long.'" in str(failed.json)


def test_all_pairs_and_repeats_are_averaged(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeJudge()
    rules = {"pairs": JudgePairs.all_pairs, "repeats": 2, "principle": "Be kind."}
    calls: Calls = [("/compare", compare("b 4", "c 2", "d 1", "e 5")), ("/ready", None)]
    answer, ready = asked(monkeypatch, calls, fake, client=False, **rules)
    assert answer.json["rewards"] == [4.0, 2.0, 1.0, 5.0]
    assert answer.json["parts"] == [{"judge": score} for score in (4, 2, 1, 5)]
    assert len(fake.requests) == 12
    judges = [pair["judge_idx"] for pair in answer.json["comparison_results"]]
    assert judges == [0, 1] * 6
    assert (ready.status, ready.json["backends"]) == (200, {fake.url: "ready"})
    assert principles_in(fake) == {"Be kind."}
    fake = FakeJudge()
    calls = [("/compare", compare("b 4", "c 2", principle="Be brief."))]
    asked(monkeypatch, calls, fake, client=False, **rules)
    assert principles_in(fake) == {"Be brief."}  # the request's own


def principles_in(fake: FakeJudge) -> set[str]:
    turns = [turn for body in fake.requests for turn in body["messages"]]
    return {turn["content"] for turn in turns if turn["role"] == "principle"}


def test_request_of_too_many_pairs_is_rejected_before_they_are_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    body = {"conversations": [conversation("a 1")] * 400}
    rules = {"pairs": JudgePairs.all_pairs}
    (answer,) = asked(monkeypatch, [("/v1/rewards", body)], FakeJudge(), client=False, **rules)
    assert answer.status == 413
    assert "needs 79800 judgments, wanted at most 65536" in answer.json["error"]["message"]


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        ("fail", "rule: KeyError('a bug')"),
        ("stall", "rule: no answer within 0.3 s (function_timeout_s)"),
        ("return_one", "rule: the function returned 1 numbers, wanted one for each of 2 samples"),
    ],
)
def test_failed_function_masks_its_samples(
    function: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {"conversations": [conversation("x"), conversation("y")]}
    calls: Calls = [("/v1/rewards", body), ("/metrics", None)]
    functions = {"rule": f"{MODULE}:{function}"}
    answer, metrics = asked(monkeypatch, calls, functions=functions)
    assert answer.json["rewards"] == [None, None]
    assert answer.json["errors"] == [{"row": row, "message": reason} for row in (0, 1)]
    assert answer.json["parts"][0] == {"model": modelled("x"), "rule": None}
    failures = f'nemo_aligner_server_function_failures_total{{backend="{functions["rule"]}"}} 1.0'
    assert failures in metrics.body.decode()


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
    functions = {"rule": f"{MODULE}:count_characters"}
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
    functions = {"rule": f"{MODULE}:count_characters"}
    (answer,) = asked(monkeypatch, [("/compare", body)], client=client, functions=functions)
    assert (answer.status, answer.json["detail"]) == (500, "row 1: not finite")


def test_samples_of_a_request_are_copied_and_compared_outside_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Hundreds of thousands of messages would block all other requests for seconds."""
    threads: dict[str, set[int]] = {}

    def note_thread(name: str) -> Callable[[Any], Any]:
        function = getattr(parts, name)

        def call(sample: Any) -> Any:
            threads.setdefault(name, set()).add(threading.get_ident())
            return function(sample)

        return call

    for name in ("_prompt_key", "_as_record"):
        monkeypatch.setattr(parts, name, note_thread(name))
    asked(
        monkeypatch,
        [("/compare", compare("b 4", "c 2"))],
        FakeJudge(),
        functions={"rule": f"{MODULE}:count_characters"},
        combine={"kind": CombineKind.gate, "gate_margin": 99.0},
    )
    assert set(threads) == {"_prompt_key", "_as_record"}
    assert threading.get_ident() not in set.union(*threads.values())


def test_function_whose_calls_hang_is_refused_and_unready_until_they_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(timed_threads, "_GRACE_SECS", 0.1)
    functions = {"rule": f"{MODULE}:wait_in_c"}
    settings = {"function_timeout_s": 0.1, "function_threads": 3}

    async def scenario() -> None:
        service = gateway.build_service(
            GatewayRunConfig(backends=[], functions=functions, **settings), None
        )

        async def call() -> tuple[float, str]:
            scored = await service.answer(ScoreRequest(texts=["a"]), ALL_ROWS)
            return float(scored.rewards[0, 0]), scored.errors.get(0, "")

        answers = await asyncio.gather(*(call() for _ in range(3)))
        slow = "rule: no answer within 0.1 s (function_timeout_s)"
        assert {reason for _, reason in answers} == {slow}
        hang = (
            "3 earlier calls still hang, so no more are made; set a timeout for whatever the "
            "function waits for, and restart the gateway"
        )
        assert (await call())[1] == f"rule: {hang}"
        (part,) = service._parts.values()  # type: ignore[attr-defined]
        (failure,) = (await part.score(["a"])).failures.values()
        assert failure.kind is FailureKind.unreachable
        assert await service.probe() == {functions["rule"]: hang}
        CAN_RETURN.set()
        while (await service.probe())[functions["rule"]] is not None:
            await asyncio.sleep(0.02)
        assert await call() == (1.0, "")
        await service.close()

    try:
        asyncio.run(scenario())
    finally:
        CAN_RETURN.set()


def test_functions_alone_score_texts_and_may_skip_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: Calls = [
        ("/v1/rewards", {"texts": ["abc"]}),
        ("/v1/rewards", {"conversations": [conversation("xx"), conversation("y")]}),
        ("/v1/rewards", {"tokens": [[1, 2]]}),
        ("/v1/contract", None),
        ("/ready", None),
    ]
    functions = {"length": f"{MODULE}:count_characters"}
    text, chats, tokens, contract, ready = asked(
        monkeypatch, calls, client=False, functions=functions
    )
    assert text.json["rewards"] == [[float(len('{"text": "abc"}'))]]
    assert text.json["contract_hash"] is None
    assert tokens.status == 400
    assert "a judge and functions read texts" in json.dumps(tokens.json)
    assert (contract.status, ready.status) == (400, 200)
    functions = {"x": f"{MODULE}:reward_of_x"}
    (_, chats, *_) = asked(monkeypatch, calls[:2], client=False, functions=functions)
    assert chats.json["rewards"] == [[2.0], None]
    assert chats.json["errors"] == [{"row": 1, "message": "x: the function returned no number"}]


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


def test_one_answer_has_all_rows_that_the_judge_cannot_score(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A client of KServe would send the others again, and each time they would be judged."""
    replies = ("b 4", "long 1", "c 2", "forbidden 1", "")
    prompts = (USER, USER, USER, USER, {"role": "user", "content": ""})
    rows = [json.dumps(conversation(*row)) for row in zip(replies, prompts, strict=True)]
    tensor = {"name": "conversations", "datatype": "BYTES", "shape": [5, 1], "data": rows}
    path, body = "/v2/models/reward_model/infer", {"inputs": [tensor]}
    calls: Calls = [(path, {**body, "parameters": {"row_errors": True}})]
    fake, client = FakeJudge(), FakeClient()
    (answer,) = asked(monkeypatch, calls, fake, client=client, task=JudgeTask.rating)
    outputs = {entry["name"]: entry["data"] for entry in answer.json["outputs"]}
    rewards = [modelled("b 4") + 4, None, modelled("c 2") + 2, None, None]
    assert outputs["rewards"] == rewards
    too_long = "judge: it answers HTTP 400: 'The prompt is too long.'"
    reasons = ["", too_long, "", "judge: it answers HTTP 401: 'no'", "the text is empty"]
    assert outputs["errors"] == reasons
    assert outputs["unscored"] == [0, 1, 0, 1, 0]
    assert (len(fake.requests), len(client.asked)) == (4, 1)
    combine = {"fail_requests": True}
    (answer,) = asked(monkeypatch, calls, fake, combine=combine, task=JudgeTask.rating)
    assert answer.json == {"error": f"row 1: {too_long}", "kind": "unscored"}
    # Without the parameter, or if the judge is gone for a row, the request fails as a whole.
    rows[1:] = [json.dumps(conversation("dies 1"))]
    tensor["shape"] = [2, 1]
    for answer in asked(monkeypatch, [*calls, (path, body)], fake, task=JudgeTask.rating):
        assert (answer.status, answer.json["error"][:14]) == (503, "row 1: judge: ")


def test_rejected_samples_are_not_judged_and_a_bad_prompt_is_still_blamed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake, client = FakeJudge(), FakeClient()
    empty = [{"role": "user", "content": ""}, {"role": "assistant", "content": ""}]
    calls: Calls = [("/v1/rewards", {"conversations": [conversation("b 3"), empty]})]
    (answer,) = asked(monkeypatch, calls, fake, client=client, task=JudgeTask.rating)
    assert answer.json["errors"] == [{"row": 1, "message": "the text is empty"}]
    assert answer.json["parts"][1] == {"model": None, "judge": None}
    assert len(fake.requests) == 1
    rollout = verify("")
    rollout["responses_create_params"]["input"] = ""
    (answer,) = asked(monkeypatch, [("/verify", rollout)], fake, client=client)
    assert answer.json["mask_sample"]
    assert "rejects the policy's reply: the text is empty" in answer.json["failure_reason"]
    assert (len(fake.requests), client.probes) == (1, 1)


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
        (["combine.kind=gate", f"functions={{x: {MODULE}:fail}}", "combine.gate_part=y"],
         "combine.gate_part: got 'y', wanted the name of a part: model, x"),
    ],
)  # fmt: skip
def test_settings_that_do_not_fit_are_refused_by_name(settings: list[str], message: str) -> None:
    with pytest.raises(SettingsError) as refused:
        load_config(GatewayRunConfig, settings)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("no.such.module:f", "it cannot be imported: No module named 'no'"),
        (f"{MODULE}:nothing", "it cannot be imported"),
        (f"{MODULE}:MODULE", "wanted a function that is not async"),
        (f"{MODULE}:coroutine", "wanted a function that is not async"),
    ],
)
def test_function_that_cannot_be_called_is_refused_at_the_start(function: str, words: str) -> None:
    config = GatewayRunConfig(backends=[], functions={"rule": function})
    with pytest.raises(ConfigError) as refused:
        gateway.build_service(config, None)
    assert f"functions.rule: {function}: " in str(refused.value)
    assert words in str(refused.value)
