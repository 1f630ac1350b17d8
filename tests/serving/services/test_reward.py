"""A batch of requests, without a server: each gets its own answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace

import numpy as np
import pytest

from nemo_aligner.config.serving import ServerConfig
from nemo_aligner.serving.engine.batcher import Meter
from nemo_aligner.serving.failures import FailureKind
from nemo_aligner.serving.protocols import ScoredRows, kserve
from nemo_aligner.serving.reward import RewardService
from nemo_aligner.utils.errors import CheckpointError, DataError, ServingError
from tests.serving.fake_server import CONTRACT, SEQ_LENGTH, FakeScorer
from tests.serving.services.answers import Failure, answered

GOOD = kserve.encode_sentences(["ab", "c"])


class Immediate:
    """A batcher that scores every request alone, at once."""

    def __init__(self, score: Callable[[list[list[int]]], np.ndarray]) -> None:
        self._score = score
        self.calls: list[int] = []

    def submit(self, token_lists: list[list[int]]) -> Future[np.ndarray]:
        self.calls.append(len(token_lists))
        answer: Future[np.ndarray] = Future()
        try:
            answer.set_result(self._score(token_lists))
        except Exception as error:
            answer.set_exception(error)
        return answer


class Service:
    """A service of a scorer without a model, and what it asks its batcher for."""

    def __init__(
        self,
        scorer: FakeScorer | None = None,
        score: Callable[[list[list[int]]], np.ndarray] | None = None,
        **settings: int,
    ) -> None:
        scorer = scorer or FakeScorer(0, 1)
        self.batcher = Immediate(score or scorer.score_token_lists)
        self.meter = Meter()
        config = ServerConfig(**settings)
        self.service = RewardService(scorer, self.batcher.submit, config, self.meter)

    def ask(self, *requests: dict[str, np.ndarray]) -> list[ScoredRows | Failure]:
        async def everyone() -> list[ScoredRows | Failure]:
            answers = (answered(self.service.answer(each)) for each in requests)
            return await asyncio.gather(*answers)

        return asyncio.run(everyone())


@pytest.fixture
def service() -> Service:
    return Service()


def bad(message: str) -> Failure:
    return Failure(message, FailureKind.bad_request)


def internal(message: str) -> Failure:
    return Failure(message, FailureKind.internal)


def rewards(answer: ScoredRows | Failure) -> list[float]:
    assert isinstance(answer, ScoredRows), answer
    return answer.rewards[:, 0].tolist()


def test_service_gives_every_request_its_own_answer(service: Service) -> None:
    answers = service.ask(
        GOOD,
        kserve.encode_sentences(["fine", ""]),
        kserve.encode_tokens([[1, 2, 3], [4]]),
        kserve.encode_tokens([[1] * (SEQ_LENGTH + 1)]),
        kserve.encode_sentences(["explode"]),
        {},
        kserve.encode_tokens([[666]]),
        kserve.encode_tokens([[3, 0], [3, 1], [3, 2]]),
    )
    assert sorted(service.batcher.calls) == [1, 2, 2, 3]
    assert rewards(answers[0]) == [195, 99]
    assert answers[1] == bad("row 1: the text is empty")
    assert rewards(answers[2]) == [6, 4]
    assert answers[3] == bad("row 0: got 65 tokens, wanted at most 64")
    assert answers[4] == internal("internal error: KeyError: 'a bug in the tokenizer'")
    assert isinstance(answers[5], Failure)
    assert answers[5].kind is FailureKind.bad_request
    assert answers[6] == internal("the model failed: token 666 cannot be scored")
    whole = answers[7]
    assert isinstance(whole, ScoredRows)
    assert whole.rewards.tolist() == [[3, -3], [4, -4], [5, -5]]
    assert (whole.exceeded.dtype, whole.exceeded.tolist()) == (bool, [False] * 3)
    assert whole.contract_hash == CONTRACT.hash


def test_service_refuses_a_request_of_more_bytes_than_may_be_before_it_is_read() -> None:
    service = Service(max_request_bytes=10)
    (answer,) = service.ask(kserve.encode_sentences(["12345", "678901"]))
    assert answer == Failure(
        "got a request of 11 bytes, wanted at most 10 (server.max_request_bytes)",
        FailureKind.too_large,
    )
    assert rewards(service.ask(kserve.encode_sentences(["12345"]))[0]) == [255]


def test_service_whose_queue_is_full_says_when_to_come_again() -> None:
    service = Service(max_queue_rows=3)
    answers = service.ask(GOOD, kserve.encode_tokens([[1]]), GOOD)
    assert rewards(answers[0]) == [195, 99]
    assert rewards(answers[1]) == [1]
    wanted = "the queue is full (3 rows wait of 3, server.max_queue_rows); retry after 1 s"
    assert isinstance(answers[2], Failure)
    assert (answers[2].kind, answers[2].message) == (FailureKind.busy, wanted)
    assert rewards(service.ask(GOOD)[0]) == [195, 99]
    # More rows than may wait are scored where nothing waits.
    assert rewards(Service(max_queue_rows=1).ask(GOOD)[0]) == [195, 99]


def test_service_counts_what_was_answered_and_refused(service: Service) -> None:
    assert service.meter.take_line(0) is None
    service.ask(GOOD, {}, kserve.encode_tokens([[1, 2, 3]]))
    line = service.meter.take_line(7)
    assert line is not None
    assert "7 in the queue" in line
    assert "1 refused" in line
    assert "p50" in line
    assert service.meter.take_line(0) is None


def test_service_reports_a_cut_text(service: Service) -> None:
    (answer,) = service.ask(kserve.encode_sentences(["x" * 100, "x"]))
    assert isinstance(answer, ScoredRows)
    assert answer.exceeded.tolist() == [True, False]
    assert answer.rewards[0, 0] == SEQ_LENGTH * ord("x")


def test_service_wants_add_eos_to_agree_with_the_contract(service: Service) -> None:
    tokens = kserve.encode_tokens([[1], [2]])
    chats = kserve.encode_conversations([[{"role": "assistant", "content": "a"}]] * 2)
    scored, ours = "the model's scoring contract", "conversations and tokens"
    for inputs, wanted, why in ((GOOD, True, scored), (tokens, False, ours), (chats, False, ours)):
        (answer,) = service.ask({**inputs, "add_EOS": np.array([[wanted], [wanted]])})
        assert isinstance(answer, ScoredRows), why
        (answer,) = service.ask({**inputs, "add_EOS": np.array([[wanted], [not wanted]])})
        assert answer == bad(
            f"add_EOS, row 1: got {not wanted}, wanted {wanted} ({why}) or no add_EOS at all"
        )
    scorer = FakeScorer(0, 1)
    scorer.contract = replace(CONTRACT, add_eos=False)
    for flag in (False, True):
        (answer,) = Service(scorer).ask({**GOOD, "add_EOS": np.array([[flag], [flag]])})
        assert isinstance(answer, Failure) == flag


def test_service_wants_every_attribute_of_every_row_to_be_a_number() -> None:
    for value in (np.nan, np.inf, -np.inf):

        def execute(token_lists: list[list[int]], value: float = value) -> np.ndarray:
            found = np.ones((len(token_lists), 2), dtype=np.float32)
            found[[ids[0] == 5 for ids in token_lists], 1] = value
            return found

        service = Service(score=execute)
        answers = service.ask(kserve.encode_tokens([[1], [5], [2], [5]]), GOOD)
        assert answers[0] == internal("row 1: the model's reward is not a finite number")
        assert rewards(answers[1]) == [1, 1]


def test_service_bounds_what_a_model_says_of_its_failure_to_one_line() -> None:
    def execute(token_lists: list[list[int]]) -> np.ndarray:
        raise RuntimeError("out of\n  memory\t" + "x" * 1000)

    service = Service(score=execute)
    (answer,) = service.ask(GOOD)
    begin = "out of memory "
    assert answer == internal(f"the model failed: {begin}{'x' * (500 - len(begin))}")


def test_service_names_the_row_that_its_scorer_refuses_for_whatever_reason(
    service: Service,
) -> None:
    (answer,) = service.ask(kserve.encode_tokens([[1], [2], [3, -1]]))
    assert answer == bad("row 2: got token id -1, wanted 0 or more")
    assert service.batcher.calls == []
    for kind in (ServingError, CheckpointError, DataError):

        class Refusing(FakeScorer):
            def check_tokens(self, token_ids: Sequence[int], kind: type = kind) -> None:
                raise kind("not these")

        (answer,) = Service(Refusing(0, 1)).ask(kserve.encode_tokens([[1]]))
        assert answer == bad("row 0: not these"), kind
