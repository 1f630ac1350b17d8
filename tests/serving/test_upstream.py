"""The gateway's service: upstream servers score, and recent rewards drift from the contract's."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from typing import Any
from unittest.mock import AsyncMock

import numpy as np
import pytest

from nemo_aligner.config.gateway import CombineConfig, GatewayConfig, GatewayRunConfig
from nemo_aligner.serving.client import RefusedError, RewardClient, ScoredRows
from nemo_aligner.serving.composed import ComposedService
from nemo_aligner.serving.drift import AttributeDrift, RecentRewards
from nemo_aligner.serving.failures import (
    ALL_ROWS,
    FINAL_ROWS,
    NO_ROWS,
    NO_TOKEN,
    REJECTED_ROWS,
    FailureKind,
)
from nemo_aligner.serving.protocols import ScoreRequest
from nemo_aligner.serving.upstream import UpstreamService
from nemo_aligner.utils.errors import ServingError
from tests.serving.answers import Failure, answered
from tests.serving.client.misbehaving import Misbehaving
from tests.serving.fake_server import CONTRACT, total
from tests.serving.gateway_calls import FakeClient

TWO = ScoreRequest(texts=["ab", "c"])


def service(client: FakeClient, most_rows: int = 100) -> UpstreamService:
    return UpstreamService(client, GatewayConfig(max_queue_rows=most_rows, drift_rows=100))


def ask(upstream: UpstreamService, request: ScoreRequest, aside: Any = NO_ROWS) -> Any:
    return asyncio.run(answered(upstream.answer(request, aside)))


def test_upstream_has_the_backends_rewards_of_texts_and_tokens_and_its_newest_contract() -> None:
    client = FakeClient()
    upstream = service(client)
    scored = ask(upstream, TWO)
    assert scored.rewards.tolist() == [[total("ab"), -total("ab")], [total("c"), -total("c")]]
    assert (scored.contract_hash, scored.errors) == (CONTRACT.hash, {})
    assert scored.exceeded.tolist() == [False, False]
    scored = ask(upstream, ScoreRequest(token_lists=[[1, 2], [3]]))
    assert scored.rewards[:, 0].tolist() == [3.0, 3.0]
    assert upstream.contract == CONTRACT
    client.contract = replace(CONTRACT, attributes=("other", "names"))
    ask(upstream, TWO)
    assert upstream.contract == client.contract


def test_upstream_sets_a_refused_row_aside_or_fails_the_request() -> None:
    upstream = service(FakeClient())
    request = ScoreRequest(texts=["ab", ""])
    scored = ask(upstream, request, aside=ALL_ROWS)
    assert scored.errors == {1: "the text is empty"}
    assert np.isnan(scored.rewards[1]).all()
    assert ask(upstream, request) == Failure("row 1: the text is empty", FailureKind.bad_request)
    assert upstream.recent.drift(None)[0].rows == 1


def test_upstream_rejects_no_row_that_the_judge_of_a_backend_failed_on() -> None:
    """The backend is a gateway, too."""
    client, errors = FakeClient(), {0: "the text is empty", 1: "judge: no"}
    scored = ScoredRows(np.full((2, 2), np.nan), errors, np.zeros(2, bool), unscored=frozenset({1}))
    client.score_rows_async = AsyncMock(return_value=scored)  # type: ignore[method-assign]
    request = ScoreRequest(texts=["", "b"], refused={1: "an image"})
    scored = ask(service(client), request, aside=ALL_ROWS)
    assert scored.rejected == {0: "the text is empty", 1: "an image"}
    failed = ask(service(client), request, aside=REJECTED_ROWS)
    assert failed == Failure("row 2: judge: no", FailureKind.unscored)
    slow = replace(client.score_rows_async.return_value, temporary=frozenset({1}))
    client.score_rows_async.return_value = slow
    failed = ask(service(client), request, aside=REJECTED_ROWS)
    assert failed == Failure("row 2: judge: no", FailureKind.slow, 1)
    weighted = CombineConfig(weights={"model": 2.0})
    config = GatewayRunConfig(backends=["http://one"], combine=weighted)
    composed = ComposedService(service(client), [], config)
    # If the text is slow, the backend has left it out, although it has scored no other one.
    scored = asyncio.run(composed.answer(request, FINAL_ROWS))
    assert scored.rejected == {0: "the text is empty", 1: "an image"}
    assert (scored.unscored, scored.temporary) == ({2}, {2})


@pytest.mark.parametrize("number", [1, 2])
def test_upstream_tells_that_its_token_is_wrong(lone: Misbehaving, number: int) -> None:
    """Readiness is open to everyone, so a probe also fetches something that needs the token."""
    lone._post = lambda *unused: (401, {"error": NO_TOKEN})  # type: ignore[method-assign]
    urls = [lone.url, f"http://localhost:{lone.port}"][:number]

    async def answer_all() -> tuple[Any, ...]:
        client = RewardClient(urls, in_callers_loop=True)
        upstream = UpstreamService(client, GatewayConfig())
        states = await upstream.probe()
        scored = [await answered(upstream.answer(TWO, aside)) for aside in (NO_ROWS, ALL_ROWS)]
        reads = [upstream.read_contract(), upstream.find_contract(), upstream.template_parts()]
        others = [await answered(read) for read in reads]
        states_again, counts = await upstream.probe(), await upstream.statistics()
        await upstream.close()
        return states, states_again, counts, [*scored, *others]

    states, states_again, counts, failures = asyncio.run(answer_all())
    assert all(NO_TOKEN in reason for reason in [*states.values(), *states_again.values()])
    assert counts == dict.fromkeys(urls)
    advice = "Set backend_token_file or backend_token_variable of the gateway"
    for failed in failures:
        assert failed.kind is FailureKind.internal
        expected = f"{lone.url}, reward_model: {NO_TOKEN}; no token was sent. {advice}"
        assert failed.message == expected


def test_upstream_puts_rows_that_were_refused_before_among_the_others() -> None:
    request = ScoreRequest(texts=["ab", "", "c"], refused={0: "an image", 3: "no text"})
    scored = ask(service(FakeClient()), request, aside=ALL_ROWS)
    assert scored.errors == {0: "an image", 2: "the text is empty", 3: "no text"}
    assert list(scored.errors) == [0, 2, 3]
    assert scored.rewards[[1, 4], 0].tolist() == [total("ab"), total("c")]
    assert np.isnan(scored.rewards[[0, 2, 3]]).all()
    assert scored.exceeded.tolist() == [False] * 5
    # The errors of the client number only the texts that it gets.
    client = FakeClient()
    assert ask(service(client), request) == Failure(
        "row 2: the text is empty", FailureKind.bad_request
    )
    client.failure = RefusedError("s", 500, "row 0: not finite")
    assert ask(service(client), request) == Failure("row 1: not finite", FailureKind.internal)
    scored = ask(service(FakeClient()), ScoreRequest(texts=[], refused={0: "an image"}))
    assert (np.isnan(scored.rewards).tolist(), scored.errors) == ([[True, True]], {0: "an image"})


def test_upstream_rejects_texts_that_its_servers_may_complete_against_their_senders_will() -> None:
    unchanged = replace(CONTRACT, add_bos=False, add_eos=False)
    request = ScoreRequest(texts=["ab"], adds_special_tokens=False)
    for contract, is_scored in ((unchanged, True), (CONTRACT, False), (None, False)):
        upstream = service(FakeClient(contract))
        for _ in range(2):
            answer = ask(upstream, request)
            assert isinstance(answer, Failure) != is_scored
            if isinstance(answer, Failure):
                assert answer.kind is FailureKind.bad_request
                assert answer.message.startswith("add_special_tokens: got false, wanted true")


def test_upstream_says_whose_fault_each_way_to_fail_is() -> None:
    ways: list[tuple[Exception, Failure]] = [
        (RefusedError("s", 400, "row 0: no"), Failure("row 0: no", FailureKind.bad_request)),
        (RefusedError("s", 413, "too many"), Failure("too many", FailureKind.too_large)),
        (RefusedError("s", 500, "model failed"), Failure("model failed", FailureKind.internal)),
        (ServingError("nobody"), Failure("nobody", FailureKind.unreachable, 1)),
    ]
    client = FakeClient()
    for client.failure, wanted in ways:
        assert ask(service(client), TWO) == wanted


def test_upstream_says_of_a_fault_of_the_code_what_number_it_has_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    client = FakeClient()
    client.failure = KeyError("secret words")
    failed = ask(service(client), TWO)
    assert failed.kind is FailureKind.internal
    said = re.fullmatch(r"internal error (\w{8}): KeyError; .* log .*", failed.message)
    assert said is not None, failed.message
    assert f"internal error {said[1]}" in caplog.text
    assert "secret words" in caplog.text


def test_upstream_tells_more_rows_than_may_wait_when_to_come_again() -> None:
    async def both() -> tuple[Any, Any, int]:
        client = FakeClient()
        client.gate = asyncio.Event()
        upstream = service(client, most_rows=3)
        first = asyncio.ensure_future(upstream.answer(TWO, NO_ROWS))
        await asyncio.sleep(0)
        inside = upstream.rows_in_flight
        second = await answered(upstream.answer(TWO, NO_ROWS))
        client.gate.set()
        return await first, second, inside

    first, second, inside = asyncio.run(both())
    assert inside == 2
    assert first.rewards.shape == (2, 2)
    assert second.kind is FailureKind.busy
    assert second.retry_after_s == 1
    assert "2 rows are in flight" in second.message
    assert "gateway.max_queue_rows allows 3" in second.message


def test_upstream_asks_a_server_without_a_contract_for_it_once() -> None:
    client = FakeClient(contract=None, columns=1)
    refused = RefusedError("http://one", 404, "no such model")
    client.contract_async = AsyncMock(side_effect=refused)  # type: ignore[method-assign]
    upstream = service(client)
    for _ in range(3):
        scored = ask(upstream, TWO)
        assert scored.contract_hash is None
    assert (upstream.contract, client.contract_async.await_count) == (None, 1)


def test_upstream_takes_a_failure_of_the_contracts_model_for_no_missing_contract() -> None:
    client = FakeClient(contract=None, columns=1)
    failed = RefusedError("http://one", 500, "it failed")
    client.contract_async = AsyncMock(side_effect=[failed, CONTRACT])  # type: ignore[method-assign]
    upstream = service(client)
    assert ask(upstream, TWO) == Failure("it failed", FailureKind.internal)
    assert ask(upstream, TWO).errors == {}
    assert upstream.contract == CONTRACT


MEASURED = CONTRACT.with_statistics([1.0, 0.0], [2.0, 0.5], "held-out pairs")


def rows(*values: float) -> np.ndarray:
    return np.array([[value, 2 * value] for value in values], dtype=np.float32)


def test_drift_has_mean_and_deviation_of_the_last_rows_that_have_a_reward() -> None:
    recent = RecentRewards(3)
    recent.add(rows(np.nan))
    assert recent.drift(None) == []
    for values in ((100, 1), (np.nan, 2, 3)):
        recent.add(rows(*values))
    first, second = recent.drift(None)
    assert first == AttributeDrift(3, 2.0, pytest.approx(np.std([1, 2, 3])), None, None)
    assert (second.mean, second.rows) == (4.0, 3)


def test_drift_is_in_the_contracts_deviations_where_it_has_any() -> None:
    recent = RecentRewards(10)
    recent.add(rows(4, 6))
    first, second = recent.drift(MEASURED)
    assert (first.mean_drift, first.std_ratio) == (2.0, 0.5)
    assert (second.mean_drift, second.std_ratio) == (20.0, 4.0)
    flat = CONTRACT.with_statistics([1.0, 0.0], [0.0, 0.0], "one text")
    for contract in (flat, CONTRACT):
        assert [each.mean_drift for each in recent.drift(contract)] == [None, None]
