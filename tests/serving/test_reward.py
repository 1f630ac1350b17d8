"""The reward model's service without a server: each request gets its own answer."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest

from nemo_aligner.config.serving import (
    EnsembleConfig,
    ServerConfig,
    ShapingConfig,
    Standardize,
)
from nemo_aligner.contract.contract import EncodedText
from nemo_aligner.contract.templates import BUILT_IN_TEMPLATES
from nemo_aligner.serving import intake
from nemo_aligner.serving.engine import timed_threads
from nemo_aligner.serving.engine.pace import CallClock
from nemo_aligner.serving.engine.rows import Row
from nemo_aligner.serving.engine.running_calls import RunningCalls
from nemo_aligner.serving.engine.shaping import build_shaper
from nemo_aligner.serving.failures import (
    ALL_ROWS,
    FINAL_ROWS,
    NO_ROWS,
    REJECTED_ROWS,
    FailureKind,
    RequestError,
)
from nemo_aligner.serving.protocols import ScoredRows, ScoreRequest, kserve
from nemo_aligner.serving.reward import RewardBackend
from nemo_aligner.utils.errors import CheckpointError, DataError, ServingError
from tests.serving.answers import Failure, answered
from tests.serving.fake_server import CONTRACT, SEQ_LENGTH, FakeScorer

GOOD = kserve.encode_sentences(["ab", "c"])


class Immediate:
    """Ranks that compute every call at once, in this process."""

    def __init__(self, compute: Callable[[list[Row]], list[np.ndarray]]) -> None:
        self._compute, self.clock = compute, CallClock()
        self.running = RunningCalls(1.0)
        self.rows: list[Row] = []

    def execute(self, operation: str, rows: list[Row]) -> None:
        """Run the first call, which shows that the model works."""

    def submit(self, operation: str, rows: list[Row]) -> Future[list[np.ndarray]]:
        self.rows += rows
        answer: Future[list[np.ndarray]] = Future()
        try:
            answer.set_result(self._compute(rows))
        except Exception as error:
            answer.set_exception(error)
        return answer


class Service:
    """A service with a scorer without a model, which records what the ranks compute."""

    def __init__(
        self,
        scorer: FakeScorer | None = None,
        compute: Callable[[list[Row]], list[np.ndarray]] | None = None,
        **settings: Any,
    ) -> None:
        fake: Any = scorer or FakeScorer(0, 1)
        self.ranks: Any = Immediate(compute or fake.compute)
        self.service = RewardBackend(fake, ServerConfig(**settings)).start(self.ranks)

    def ask(
        self,
        *requests: dict[str, np.ndarray] | ScoreRequest,
        aside: frozenset[FailureKind] = NO_ROWS,
    ) -> list[ScoredRows | Failure]:
        async def answer_all() -> list[ScoredRows | Failure]:
            decoded = [
                request if isinstance(request, ScoreRequest) else kserve.decode_request(request)
                for request in requests
            ]
            answers = [self.service.answer(request, aside) for request in decoded]
            return await asyncio.gather(*map(answered, answers))

        return asyncio.run(answer_all())


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
        kserve.encode_tokens([[666]]),
        kserve.encode_tokens([[3, 0], [3, 1], [3, 2]]),
    )
    assert rewards(answers[0]) == [195, 99]
    assert answers[1] == bad("row 1: the text is empty")
    assert rewards(answers[2]) == [6, 4]
    assert answers[3] == bad("row 0: got 65 tokens, wanted at most 64")
    assert answers[4] == internal("internal error: TypeError: a bug in the tokenizer")
    assert answers[5] == internal("the model failed: token 666 cannot be scored")
    whole = answers[6]
    assert isinstance(whole, ScoredRows)
    assert whole.rewards.tolist() == [[3, -3], [4, -4], [5, -5]]
    assert (whole.exceeded.dtype, whole.exceeded.tolist()) == (bool, [False] * 3)
    assert whole.contract_hash == CONTRACT.hash


def test_service_sets_rows_aside_and_scores_the_others(service: Service) -> None:
    texts: list[Any] = ["ab", "", "x" * 100, "", "c"]
    refused = {1: "not a text", 4: "nor this"}
    scored, none = service.ask(
        ScoreRequest(texts=texts, refused=refused),
        ScoreRequest(texts=["", ""], refused={0: "not a text"}),
        aside=ALL_ROWS,
    )
    assert rewards(scored)[::3] == [195, SEQ_LENGTH * ord("x"), 99]
    assert isinstance(scored, ScoredRows)
    empty = "the text is empty"
    # Samples are numbered in the whole request, including earlier rejected ones.
    assert scored.errors == {1: "not a text", 2: empty, 4: "nor this", 5: empty}
    assert np.isnan(scored.rewards[[*scored.errors]]).all()
    assert scored.exceeded.tolist() == [False] * 3 + [True] + [False] * 3
    assert isinstance(none, ScoredRows)
    assert (none.rewards.shape, none.contract_hash) == ((3, 2), CONTRACT.hash)
    assert np.isnan(none.rewards).all()
    assert none.errors == {0: "not a text", 1: empty, 2: empty}


def test_service_names_the_row_in_the_whole_request(service: Service) -> None:
    request = ScoreRequest(texts=["a", ""], refused={0: "not a text"})
    with pytest.raises(RequestError, match=r"^row 2: the text is empty$") as refusal:
        asyncio.run(service.service.answer(request, aside=NO_ROWS))
    assert (refusal.value.row, refusal.value.kind) == (2, FailureKind.bad_request)
    flags = ScoreRequest(token_lists=[[1], [1]], add_eos=[False, True], refused={0: "no ids"})
    (answer,) = service.ask(flags)
    assert isinstance(answer, Failure)
    assert answer.message.startswith("add_EOS, row 2: got True, wanted False")


def test_service_refuses_a_request_of_too_many_tokens_or_rows() -> None:
    service = Service(max_request_tokens=5, max_queue_rows=3)
    large = FailureKind.too_large
    answers = service.ask(
        kserve.encode_tokens([[1, 2], [3, 4], [5, 6]]),
        kserve.encode_sentences(["123", "456"]),
        kserve.encode_tokens([[1]] * 4),
    )
    tokens = "wanted at most 5 (server.max_request_tokens). Send fewer rows per request"
    assert answers == [
        Failure(f"got a request of 6 tokens or more, {tokens}", large),
        Failure(f"got a request of 6 tokens or more, {tokens}", large),
        Failure(
            "got 4 rows in a request, wanted at most 3 (server.max_queue_rows). Send fewer rows "
            "per request",
            large,
        ),
    ]
    assert service.ranks.rows == []
    assert rewards(service.ask(kserve.encode_sentences(["12345"]))[0]) == [255]


def test_sample_that_never_ends_may_be_sent_again_and_others_are_answered_meanwhile() -> None:
    """The server may also be suspended or overloaded: then no sample is at fault."""

    class Hanging(FakeScorer):
        def encode(self, text: Any) -> EncodedText:
            while text[0]["content"] == "hang" if isinstance(text, list) else False:
                pass
            return super().encode(text)

    service = Service(Hanging(0, 1), encode_timeout_secs=0.6)
    hang, chat = ([{"role": "user", "content": content}] for content in ("hang", "ab"))

    async def answer_all() -> tuple[list[float], list[ScoredRows | Failure]]:
        hanging = [
            asyncio.ensure_future(answered(service.service.answer(request, aside)))
            for request, aside in (
                (ScoreRequest(texts=[chat, hang, ""]), REJECTED_ROWS),
                (ScoreRequest(texts=[chat, hang, chat]), ALL_ROWS),
                (ScoreRequest(texts=[hang] * 5), FINAL_ROWS),  # as a client of this package asks
            )
        ]
        await asyncio.sleep(0.05)
        live = await service.service.answer(ScoreRequest(texts=["ab", chat]), NO_ROWS)
        assert not hanging[-1].done()
        return rewards(live), await asyncio.gather(*hanging)

    live, (failed, aside, attack) = asyncio.run(answer_all())
    assert live == [195, 195]
    slow = (
        "it took more than 0.6 s to tokenize (server.encode_timeout_secs). If it does so again "
        "while the server is idle, leave the sample out: it is very long, or the model's chat "
        "template runs forever for it"
    )
    assert failed == Failure(f"row 1: {slow}", FailureKind.slow)
    assert isinstance(aside, ScoredRows)
    assert isinstance(attack, ScoredRows)
    assert (rewards(aside)[::2], aside.errors, aside.rejected) == ([195, 195], {1: slow}, {})
    untried = "not tried, because 3 earlier samples took too long to tokenize"
    assert [*attack.errors.values()] == [slow] * 3 + [untried] * 2
    assert attack.rejected == {}
    assert (aside.temporary, attack.temporary) == ({1}, {*range(5)})
    service.service.stop()


def test_sample_that_code_in_c_holds_is_an_error_of_its_row_alone() -> None:
    release = threading.Event()

    class Hanging(FakeScorer):
        def encode(self, text: Any) -> EncodedText:
            if text[0]["content"] == "hang":
                release.wait()  # no exception can interrupt the thread meanwhile
            return super().encode(text)

    service = Service(Hanging(0, 1), encode_timeout_secs=0.3)
    hang, chat = ([{"role": "user", "content": content}] for content in ("hang", "ab"))
    request = ScoreRequest(texts=[chat, hang, chat, hang], refused={0: "bad"})
    (aside,) = service.ask(request, aside=ALL_ROWS)
    (refused,) = service.ask(ScoreRequest(texts=[chat, hang]))
    release.set()
    assert isinstance(aside, ScoredRows)
    assert rewards(aside)[1::2] == [195, 195]
    assert {number: error[:26] for number, error in aside.errors.items()} == {
        0: "bad",
        2: "it took more than 0.3 s to",
        4: "it took more than 0.3 s to",
    }
    assert isinstance(refused, Failure)
    assert refused.message.startswith("row 1: it took more than 0.3 s to")
    service.service.stop()


def test_service_is_unready_while_its_model_or_too_many_of_its_samples_hang(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(timed_threads, "_GRACE_SECS", 0.1)
    monkeypatch.setattr(intake, "_MORE_ENCODERS", 1)
    release = threading.Event()

    class Hanging(FakeScorer):
        def encode(self, text: Any) -> EncodedText:
            if text[0]["content"] == "hang":
                release.wait()
            return super().encode(text)

    service = Service(Hanging(0, 1), encode_timeout_secs=0.1)

    def probe() -> str | None:
        (reason,) = asyncio.run(service.service.probe()).values()
        return reason

    assert probe() is None
    call = Future[Any]()
    service.ranks.running.begin(call, "compute rewards", is_long=False)
    time.sleep(0.25)
    assert probe() == (
        "the model may hang: a call has not ended (compute rewards, for 0 s); the server ends "
        "after 1 s (server.max_stuck_secs)"
    )
    service.ranks.running.end(call)
    assert probe() is None
    hang, chat = ([{"role": "user", "content": content}] for content in ("hang", "ab"))
    (refused,) = service.ask(ScoreRequest(texts=[hang]))
    assert isinstance(refused, Failure)
    assert refused.kind is FailureKind.slow
    reason = "samples cannot be tokenized: 1 earlier calls still hang, so no more are made"
    assert service.ask(ScoreRequest(texts=[chat])) == [Failure(reason, FailureKind.busy)]
    assert probe() == reason
    release.set()
    while probe() is not None:
        time.sleep(0.02)
    assert rewards(service.ask(ScoreRequest(texts=[chat]))[0]) == [195]
    service.service.stop()


def test_requests_of_many_turns_or_rows_are_encoded_in_a_thread_even_if_they_are_empty() -> None:
    threads: list[str] = []

    class Naming(FakeScorer):
        def encode(self, text: Any) -> EncodedText:
            threads.append(threading.current_thread().name)
            return EncodedText([1], False)

    scorer = Naming(0, 1)
    scorer.contract = replace(CONTRACT, template=BUILT_IN_TEMPLATES["chatml"])
    service = Service(scorer)
    turns = [{"role": "user", "content": ""}, {"role": "assistant", "content": ""}]
    for texts, has_thread in (
        ([turns * 2], False),
        (["a short text"], False),
        ([turns * 10] * 2, False),
        ([turns * 100], True),
        ([turns] * 100, True),
        ([""] * 100, True),
    ):
        threads.clear()
        (answer,) = service.ask(ScoreRequest(texts=texts))
        assert isinstance(answer, ScoredRows)
        assert {*threads} == {"encoder" if has_thread else "MainThread"}, len(texts)
    service.service.stop()


def test_service_whose_queue_is_full_says_when_to_come_again() -> None:
    service = Service(max_queue_rows=3)
    answers = service.ask(GOOD, kserve.encode_tokens([[1]]), GOOD)
    assert rewards(answers[0]) == [195, 99]
    assert rewards(answers[1]) == [1]
    wanted = (
        "the queue of reward_model is full: 3 rows are in flight, this request has 2 more, and "
        "server.max_queue_rows allows 3; retry after 1 s"
    )
    assert isinstance(answers[2], Failure)
    assert (answers[2].kind, answers[2].message) == (FailureKind.busy, wanted)
    assert rewards(service.ask(GOOD)[0]) == [195, 99]


def test_service_counts_what_was_answered_and_refused(service: Service) -> None:
    assert service.service.report() is None
    service.ask(GOOD, kserve.encode_sentences([""]), kserve.encode_tokens([[1, 2, 3]]))
    line = service.service.report()
    assert line is not None
    for part in ("0 in the queue", "1 refused", "p50"):
        assert part in line
    assert service.service.report() is None
    counts = asyncio.run(service.service.statistics())["local"]
    names = ("requests", "rows", "tokens", "refused_requests", "tokens_per_call", "waiting_rows")
    assert [counts[name] for name in names] == [2, 3, 6, 1, 256, 0]


def test_probes_are_not_counted(service: Service) -> None:
    """They count neither as scored nor as rejected; only the model's calls are counted."""

    async def probe_all() -> list[ScoredRows | Failure]:
        requests = [ScoreRequest(texts=["ab", "c"]), ScoreRequest(texts=[""])]
        answers = [service.service.answer(request, NO_ROWS, is_probe=True) for request in requests]
        return [await answered(answer) for answer in answers]

    scored, refused = asyncio.run(probe_all())
    assert (rewards(scored), refused.kind) == ([195, 99], FailureKind.bad_request)
    counts = asyncio.run(service.service.statistics())["local"]
    names = ("requests", "rows", "tokens", "refused_requests", "calls")
    assert [counts[name] for name in names] == [0, 0, 0, 0, 1]
    assert service.service.report() is None
    assert not service.service.recent.drift(None)


def test_tensors_that_are_too_large_or_no_request_are_refused_and_counted() -> None:
    service = Service(max_request_bytes=10)
    (endpoint,) = [each for each in service.service.endpoints if each.name == kserve.MODEL_NAME]

    async def ask_all() -> list[Any]:
        sent = [GOOD, kserve.encode_sentences(["x" * 11]), {}]
        return [await answered(endpoint.answer(inputs)) for inputs in sent]

    scored, large, empty = asyncio.run(ask_all())
    assert scored["rewards"][:, 0].tolist() == [195, 99]
    text = "got a request of 11 bytes, wanted at most 10 (server.max_request_bytes)"
    assert large == Failure(f"{text}. Send fewer rows per request", FailureKind.too_large)
    assert empty.kind is FailureKind.bad_request
    counts = asyncio.run(service.service.statistics())["local"]
    assert (counts["requests"], counts["refused_requests"]) == (1, 2)


def test_rewards_of_a_probe_are_not_in_the_running_statistics() -> None:
    """A route sends probes to find out who is at fault; no trainer uses their rewards."""

    def score(*probes: bool) -> list[list[float]]:
        shaping, fake = ShapingConfig(standardize=Standardize.running), FakeScorer(0, 1)
        shaper = build_shaper(shaping, EnsembleConfig(), [CONTRACT])
        scorer, ranks = cast(Any, fake), cast(Any, Immediate(fake.compute))
        service = RewardBackend(scorer, ServerConfig(), shaper).start(ranks)
        request = ScoreRequest(texts=["a", "b", "z"])

        async def answer_all() -> list[list[float]]:
            return [rewards(await service.answer(request, NO_ROWS, probe)) for probe in probes]

        return asyncio.run(answer_all())

    (first,) = score(False)
    assert np.mean(first) == pytest.approx(0, abs=1e-6)
    # There are no statistics before the first reward, so a probe's rewards are raw.
    assert score(True, False, True) == [[97, 98, 122], first, first]


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


def test_service_rejects_a_text_that_it_would_complete_against_its_senders_will(
    service: Service,
) -> None:
    conversation = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    request = ScoreRequest(texts=["a$", conversation, "b"], adds_special_tokens=False)
    reason = (
        "add_special_tokens: got false, wanted true: the model's scoring contract adds BOS or EOS "
        "to this text"
    )
    assert service.ask(request) == [bad(f"row 2: {reason}")]
    (scored,) = service.ask(request, aside=ALL_ROWS)
    assert isinstance(scored, ScoredRows)
    assert scored.errors == {2: reason}
    (answer,) = service.ask(replace(request, texts=["a$", conversation]))
    assert rewards(answer) == [ord("a") + ord("$"), ord("a") + ord("b")]
    assert not request.without_rows({2: "no"}).adds_special_tokens


def test_service_wants_every_attribute_of_every_row_to_be_a_number() -> None:
    for value in (np.nan, np.inf, -np.inf):

        def compute(rows: list[Row], value: float = value) -> list[np.ndarray]:
            return [np.array([[1, value if row.ids[0] == 5 else 1]]) for row in rows]

        service = Service(compute=compute)
        answers = service.ask(kserve.encode_tokens([[1], [5], [2], [5]]), GOOD)
        assert answers[0] == internal("row 1: the model's reward is not a finite number")
        assert rewards(answers[1]) == [1, 1]


def test_service_bounds_what_a_model_says_of_its_failure_to_one_line() -> None:
    def compute(rows: list[Row]) -> list[np.ndarray]:
        raise RuntimeError("out of\n  memory\t" + "x" * 1000)

    service = Service(compute=compute)
    (answer,) = service.ask(GOOD)
    begin = "out of memory "
    assert answer == internal(f"the model failed: {begin}{'x' * (500 - len(begin))}")


def test_service_names_the_row_that_its_scorer_refuses_for_whatever_reason(
    service: Service,
) -> None:
    (answer,) = service.ask(kserve.encode_tokens([[1], [2], [3, -1]]))
    assert answer == bad("row 2: got token id -1, wanted 0 or more")
    assert service.ranks.rows == []
    for kind in (ServingError, CheckpointError, DataError):

        class Refusing(FakeScorer):
            def encode_tokens(self, token_ids: Sequence[int], kind: type = kind) -> EncodedText:
                raise kind("not these")

        (answer,) = Service(Refusing(0, 1)).ask(kserve.encode_tokens([[1]]))
        assert answer == bad("row 0: not these"), kind
