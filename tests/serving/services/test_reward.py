"""A batch of requests, without a server: each gets its own answer."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from nemo_aligner.errors import CheckpointError, DataError, ServingError
from nemo_aligner.serving.services.reward import RewardEndpoint
from nemo_aligner.serving.transports.triton.model import answer_requests
from nemo_aligner.serving.wire import kserve
from nemo_aligner.serving.wire.types import Failure, ScoreReply
from tests.serving.fake_server import CONTRACT, SEQ_LENGTH, FakeScorer

GOOD = kserve.encode_sentences(["ab", "c"])


@pytest.fixture
def calls() -> list[int]:
    return []


@pytest.fixture
def endpoint(calls) -> RewardEndpoint:
    scorer = FakeScorer(0, 1)

    def execute(token_lists: list[list[int]]) -> np.ndarray:
        calls.append(len(token_lists))
        return scorer.score_token_lists(token_lists)

    return RewardEndpoint(scorer, execute)


def rewards(answer: ScoreReply | Failure) -> list[float]:
    assert isinstance(answer, ScoreReply), answer
    return answer.rewards[:, 0].tolist()


def test_all_requests_are_one_call_and_bad_ones_are_not_in_it(endpoint, calls):
    answers = answer_requests(
        endpoint,
        [
            GOOD,
            kserve.encode_sentences(["fine", ""]),
            kserve.encode_tokens([[1, 2, 3], [4]]),
            kserve.encode_tokens([[1] * (SEQ_LENGTH + 1)]),
            kserve.encode_sentences(["explode"]),
            {},
        ],
    )
    assert calls == [4]
    assert rewards(answers[0]) == [195, 99]
    assert answers[1] == Failure("row 1: the text is empty", bad_request=True)
    assert rewards(answers[2]) == [6, 4]
    assert answers[3] == Failure("row 0: got 65 tokens, wanted at most 64", bad_request=True)
    assert answers[4] == Failure(
        "internal error: KeyError: 'a bug in the tokenizer'", bad_request=False
    )
    assert isinstance(answers[5], Failure)
    assert answers[5].bad_request


def test_nothing_to_score_makes_no_call(endpoint, calls):
    assert isinstance(answer_requests(endpoint, [{}])[0], Failure)
    assert calls == []


def test_a_request_that_the_model_fails_on_fails_alone(endpoint, calls):
    answers = answer_requests(endpoint, [GOOD, kserve.encode_tokens([[666]]), GOOD])
    assert calls == [5, 2, 1, 2]
    assert rewards(answers[0]) == rewards(answers[2]) == [195, 99]
    assert answers[1] == Failure("the model failed: token 666 cannot be scored", bad_request=False)


def test_a_reward_that_is_no_number_is_an_error_of_its_request(endpoint):
    answers = answer_requests(endpoint, [kserve.encode_tokens([[1], [701]]), GOOD])
    assert answers[0] == Failure("row 1: the model's reward is not a finite number", False)
    assert rewards(answers[1]) == [195, 99]


def test_a_cut_text_is_reported(endpoint):
    (answer,) = answer_requests(endpoint, [kserve.encode_sentences(["x" * 100, "x"])])
    assert isinstance(answer, ScoreReply)
    assert answer.exceeded.tolist() == [True, False]
    assert answer.rewards[0, 0] == SEQ_LENGTH * ord("x")


@pytest.mark.parametrize(
    ("inputs", "flag", "accepted"),
    [
        (GOOD, True, True),
        (GOOD, False, False),
        (kserve.encode_tokens([[1], [2]]), False, True),
        (kserve.encode_tokens([[1], [2]]), True, False),
        (kserve.encode_conversations([[{"role": "user", "content": "a"}]] * 2), True, False),
    ],
)
def test_add_eos_has_to_agree_with_the_contract(endpoint, inputs, flag, accepted):
    (answer,) = answer_requests(endpoint, [{**inputs, "add_EOS": np.array([[flag], [flag]])}])
    assert isinstance(answer, ScoreReply) == accepted
    if isinstance(answer, Failure):
        assert f"add_EOS, row 0: got {flag}, wanted {not flag}" in answer.message


def test_one_request_that_fails_is_tried_once(endpoint, calls):
    (answer,) = answer_requests(endpoint, [kserve.encode_tokens([[666], [1]])])
    assert calls == [2]
    assert answer == Failure("the model failed: token 666 cannot be scored", bad_request=False)


def test_a_bad_request_leaves_the_only_other_one_to_be_tried_once(endpoint, calls):
    answers = answer_requests(endpoint, [{}, kserve.encode_tokens([[666]])])
    assert calls == [1]
    assert [answer.bad_request for answer in answers] == [True, False]


def test_every_answer_names_the_contract_and_has_rows_for_its_own_texts(endpoint):
    sizes = [1, 3, 2]
    requests = [kserve.encode_tokens([[size, row] for row in range(size)]) for size in sizes]
    for size, answer in zip(sizes, answer_requests(endpoint, requests), strict=True):
        assert isinstance(answer, ScoreReply)
        assert answer.rewards.tolist() == [[size + row, -size - row] for row in range(size)]
        assert (answer.exceeded.dtype, answer.exceeded.tolist()) == (bool, [False] * size)
        assert answer.contract_hash == CONTRACT.hash


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_every_attribute_of_every_row_has_to_be_a_number(value):
    def execute(token_lists: list[list[int]]) -> np.ndarray:
        found = np.ones((len(token_lists), 2), dtype=np.float32)
        found[[ids[0] == 5 for ids in token_lists], 1] = value
        return found

    endpoint = RewardEndpoint(FakeScorer(0, 1), execute)
    (answer,) = answer_requests(endpoint, [kserve.encode_tokens([[1], [5], [2], [5]])])
    assert answer == Failure("row 1: the model's reward is not a finite number", False)


def test_what_a_model_says_of_its_failure_is_one_line_of_bounded_length():
    def execute(token_lists: list[list[int]]) -> np.ndarray:
        raise RuntimeError("out of\n  memory\t" + "x" * 1000)

    endpoint = RewardEndpoint(FakeScorer(0, 1), execute)
    (answer,) = answer_requests(endpoint, [GOOD])
    begin = "out of memory "
    assert answer == Failure(f"the model failed: {begin}{'x' * (500 - len(begin))}", False)


def test_the_row_of_a_flag_that_disagrees_is_named_with_the_reason(endpoint):
    for inputs, wanted, why in (
        (GOOD, True, "the model's scoring contract"),
        (kserve.encode_tokens([[1], [2]]), False, "conversations and tokens"),
    ):
        flags = np.array([[wanted], [not wanted]])
        (answer,) = answer_requests(endpoint, [{**inputs, "add_EOS": flags}])
        assert answer == Failure(
            f"add_EOS, row 1: got {not wanted}, wanted {wanted} ({why}) or no add_EOS at all", True
        )


def test_tokens_that_cannot_be_scored_are_named_by_their_row(endpoint, calls):
    (answer,) = answer_requests(endpoint, [kserve.encode_tokens([[1], [2], [3, -1]])])
    assert answer == Failure("row 2: got token id -1, wanted 0 or more", bad_request=True)
    assert calls == []


def test_of_two_requests_the_one_that_is_right_is_answered(endpoint, calls):
    answers = answer_requests(endpoint, [kserve.encode_tokens([[666]]), GOOD])
    assert calls == [3, 1, 2]
    assert isinstance(answers[0], Failure)
    assert rewards(answers[1]) == [195, 99]


@pytest.mark.parametrize("flag", [False, True])
def test_a_contract_without_eos_takes_no_flag_for_it(flag):
    scorer = FakeScorer(0, 1)
    scorer.contract = replace(CONTRACT, add_eos=False)
    endpoint = RewardEndpoint(scorer, scorer.score_token_lists)
    (answer,) = answer_requests(endpoint, [{**GOOD, "add_EOS": np.array([[flag], [flag]])}])
    assert isinstance(answer, Failure) == flag


@pytest.mark.parametrize("kind", [ServingError, CheckpointError, DataError])
def test_whatever_a_scorer_refuses_a_row_for_names_the_row(kind):
    class Refusing(FakeScorer):
        def check_tokens(self, token_ids):
            raise kind("not these")

    scorer = Refusing(0, 1)
    endpoint = RewardEndpoint(scorer, scorer.score_token_lists)
    (answer,) = answer_requests(endpoint, [kserve.encode_tokens([[1]])])
    assert answer == Failure("row 0: not these", bad_request=True)
