"""The parts of a combined reward, a judge and functions: their requests, answers and failures."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("aiohttp")
from nemo_aligner.config.gateway import (
    CombineKind,
    GatewayRunConfig,
    JudgePairs,
    JudgeTask,
)
from nemo_aligner.serving import gateway, parts
from nemo_aligner.serving.client import judge
from nemo_aligner.serving.engine import timed_threads
from nemo_aligner.serving.failures import ALL_ROWS, FailureKind
from nemo_aligner.serving.protocols import ScoreRequest
from nemo_aligner.serving.protocols.responses_api import turns_of
from nemo_aligner.utils.errors import ConfigError
from tests.serving.fake_judge import FakeJudge
from tests.serving.gateway_calls import (
    LENGTH,
    USER,
    Calls,
    FakeClient,
    asked,
    compare,
    conversation,
    modelled,
    verify,
)

MODULE = "tests.serving.test_parts"
CAN_RETURN = threading.Event()
MISBEHAVIORS = ("slow", "malformed", "outside", "refuses", "dies", "broken", "forbidden", "html")


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge, "_FIRST_PAUSE_S", 0.01)


# The judge.


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


def test_reply_that_has_no_other_to_compare_is_not_rejected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only if the others were rejected, it gets the middle score, else its sender has to know."""
    empty = {"role": "user", "content": ""}
    rows = [conversation("", empty), conversation("b 4", empty), conversation("b 4")]
    unread = compare("b 4", "c 2", "d 1")
    unread["response_objs"][1:] = [{"output": []}] * 2
    settings = {"refused_reward": -5.0}
    calls: Calls = [
        ("/compare", compare("b 4")),
        ("/verify", verify("b 4")),
        ("/v1/rewards", {"conversations": rows}),
        ("/compare", unread),
    ]
    compared, rollout, listed, rest = asked(monkeypatch, calls, FakeJudge(), settings=settings)
    assert rest.json["rewards"] == [modelled("b 4") + 3, -5.0, -5.0]
    assert [part["judge"] for part in listed.json["parts"]] == [None, 3.0, None]
    reason = (
        "judge: a pairwise judge needs at least two replies to one prompt in a request, and this "
        "is the only one that can be scored. Set judge.task=rating, or send the replies to a "
        "prompt together"
    )
    assert (compared.status, compared.json) == (400, {"detail": f"row 0: {reason}"})
    assert (rollout.json["mask_sample"], rollout.json["failure_kind"]) == (True, "judge_failed")
    assert listed.json["errors"][1:] == [{"row": 2, "message": reason}]
    # A reply whose part failed may be scored later, so the others are not all rejected.
    functions = {"fails": f"{MODULE}:reward_of_x"}
    combine = {"kind": CombineKind.gate, "gate_part": "fails", "gate_margin": 9.0}
    body = {"conversations": [conversation("b 4"), conversation("x 4")]}
    rules: dict[str, Any] = {"functions": functions, "combine": combine}
    (listed,) = asked(monkeypatch, [("/v1/rewards", body)], FakeJudge(), **rules)
    assert listed.json["errors"][1:] == [{"row": 1, "message": reason}]


def rollout(city: str, reply: str) -> list[dict[str, Any]]:
    """Build the output of a policy that calls a tool, in the form of the Responses API."""
    arguments = json.dumps({"city": city})
    return [
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": arguments},
        {"type": "function_call_output", "call_id": "c", "output": f"dry in {city}"},
        {"type": "message", "role": "assistant", "content": reply},
    ]


def test_replies_with_tool_calls_are_compared_with_all_that_follows_the_prompt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In /compare that is all after the history, elsewhere all after the user's last turn."""
    outputs = [rollout("Bonn", "b 4"), rollout("Rome", "c 2")]
    asks = {"type": "message", "role": "user", "content": "sure?"}
    body = compare("d 1")
    longer = [*outputs[0], asks, {"type": "message", "role": "assistant", "content": "e 3"}]
    body["response_objs"] += [{"output": output} for output in (*outputs, longer)]
    fake, pair = FakeJudge(), {"pairs": JudgePairs.all_pairs}
    (answer,) = asked(monkeypatch, [("/compare", body)], fake, client=False, **pair)
    assert answer.json["rewards"] == [1.0, 4.0, 2.0, 3.0]
    call = '{"name": "f", "arguments": {"city": "Bonn"}}'
    text = f'{{"turn": 1, "role": "assistant", "content": "", "tool_calls": [{call}]}}\n'
    text += '{"turn": 2, "role": "tool", "content": "dry in Bonn"}\n'
    text += '{"turn": 3, "role": "assistant", "content": "b 4"}'
    further = '{"turn": 4, "role": "user", "content": "sure?"}\n'
    further += '{"turn": 5, "role": "assistant", "content": "e 3"}'
    assert [
        USER,
        {"role": "response_1", "content": text},
        {"role": "response_2", "content": f"{text}\n{further}"},
    ] in [request["messages"] for request in fake.requests]
    samples = [[USER, *turns_of(output, "")] for output in outputs]
    calls: Calls = [("/v1/rewards", {"conversations": samples})]
    (answer,) = asked(monkeypatch, calls, FakeJudge(), client=False)
    assert answer.json["rewards"] == [[4.0], [2.0]]


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


def test_request_of_too_many_pairs_is_rejected_before_the_model_scores_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    body, client = {"conversations": [conversation("a 1")] * 400}, FakeClient()
    rules = {"pairs": JudgePairs.all_pairs}
    (answer,) = asked(monkeypatch, [("/v1/rewards", body)], FakeJudge(), client=client, **rules)
    assert (answer.status, client.asked) == (413, [])
    assert "needs 79800 judgments, wanted at most 65536" in answer.json["error"]["message"]


def infer(rows: Sequence[Any], by_row: bool = True) -> tuple[str, Any]:
    data = [*map(json.dumps, rows)]
    tensor = {"name": "conversations", "datatype": "BYTES", "shape": [len(data), 1], "data": data}
    body = {"inputs": [tensor], "parameters": {"row_errors": by_row}}
    return "/v2/models/reward_model/infer", body


def test_one_answer_has_all_rows_that_the_judge_cannot_score(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A client of KServe would send the others again, and each time they would be judged."""
    replies = ("b 4", "long 1", "c 2", "forbidden 1")
    rows = [*map(conversation, replies), conversation("", {"role": "user", "content": ""})]
    calls = [infer(rows)]
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


def test_request_is_repeated_unless_the_judge_was_only_slow_for_some_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A judge that restarts or is full soon gives all scores, but a slow one is slow again."""
    good, slow = conversation("b 4"), conversation("slow 1")
    calls = [infer([good, slow]), infer([good, slow], by_row=False), infer([slow, slow])]
    calls += [infer([good, conversation(f"{mode} 1")]) for mode in ("dies", "broken", "busy")]
    rules: dict[str, Any] = {"task": JudgeTask.rating}
    aside, *failed = asked(monkeypatch, calls, FakeJudge(), **rules)
    short = {"settings": {"timeout_s": 1.0}, "timeout_s": 30.0}  # of the gateway, and of an attempt
    (late,) = asked(monkeypatch, calls[:1], FakeJudge(), **rules, **short)
    for answer in (aside, late):
        assert answer.json["outputs"][0]["data"] == [modelled("b 4") + 4, None]
        assert answer.json["outputs"][-1]["data"] == [0, 2]  # unscored, but temporarily
    strict = {"fail_requests": True}
    failed += asked(monkeypatch, calls[:1], FakeJudge(), combine=strict, **rules)
    for answer, row in zip(failed, (1, 0, 1, 1, 1, 1), strict=True):
        assert (answer.status, answer.json["error"][:14]) == (503, f"row {row}: judge: ")


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


# Functions.


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


def yield_slowly(samples: list[dict[str, Any]]) -> Iterator[float]:
    for _ in samples:
        time.sleep(0.4)
        yield 1.0


def yield_and_fail(samples: list[dict[str, Any]]) -> Iterator[float]:
    yield 1.0
    raise ValueError("a bug")


def return_one(samples: list[dict[str, Any]]) -> list[float]:
    return [1.0]


async def coroutine(samples: list[dict[str, Any]]) -> list[float]:
    return []


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        ("fail", "rule: KeyError('a bug')"),
        ("stall", "rule: no answer within 0.3 s (function_timeout_s)"),
        ("yield_slowly", "rule: no answer within 0.3 s (function_timeout_s)"),
        ("yield_and_fail", "rule: ValueError('a bug')"),
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


def test_samples_of_a_request_are_copied_and_compared_outside_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Hundreds of thousands of messages would block all other requests for seconds."""
    threads: dict[str, set[int]] = {}

    def note_thread(name: str) -> Callable[[Any], Any]:
        function = getattr(parts, name)

        def call(*arguments: Any) -> Any:
            threads.setdefault(name, set()).add(threading.get_ident())
            return function(*arguments)

        return call

    for name in ("_prompt_key", "_as_record"):
        monkeypatch.setattr(parts, name, note_thread(name))
    asked(
        monkeypatch,
        [("/compare", compare("b 4", "c 2"))],
        FakeJudge(),
        functions={"rule": LENGTH},
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
        (failure,) = (await part.score(["a"], parts.Prompts([None]))).failures.values()
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
    functions = {"length": LENGTH}
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
