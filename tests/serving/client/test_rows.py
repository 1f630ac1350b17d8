"""Rows that a server refuses: an error, or NaN with the reason."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from nemo_aligner.errors import ConfigError
from nemo_aligner.serving.client import RefusedError, RewardClient
from tests.serving.client.misbehaving import Answer, Misbehaving, refuse, seconds

# As a server has it: Triton knows no 413.
TOO_LARGE = (
    400,
    {"error": "got a request of 9 bytes, wanted at most 8 (server.max_request_bytes)"},
)


class TestRefusedRows:
    TEXTS = ("a", "!one", "b", "!two", "c")

    @pytest.mark.parametrize("numbered", [True, False])
    def test_are_nan_with_their_reasons(
        self, lone: Misbehaving, numbered: bool, caplog: pytest.LogCaptureFixture
    ) -> None:
        lone.answer = lambda texts: refuse(texts, numbered)
        with RewardClient(lone.url) as client:
            scored = client.score_rows(self.TEXTS)
            assert scored.errors == {1: "no one", 3: "no two"}
            assert [str(row[0]) for row in scored.rewards] == ["97.0", "nan", "98.0", "nan", "99.0"]
            assert caplog.messages == ["2 of 5 rows have no reward; row 1: no one"]
            same = client.score(self.TEXTS, on_error="nan")
            assert str(same.tolist()) == str(scored.rewards.tolist())

    def test_cost_a_request_each(self, lone: Misbehaving) -> None:
        texts = ["a"] * 30
        texts[3] = texts[17] = "!bad"
        with RewardClient(lone.url) as client:
            assert list(client.score_rows(texts).errors) == [3, 17]
        assert len(lone.asked) == 3

    def test_are_found_by_halves(self, lone: Misbehaving) -> None:
        lone.answer = lambda texts: refuse(texts, numbered=False)
        texts = ["a"] * 32
        texts[17] = "!bad"
        with RewardClient(lone.url) as client:
            assert list(client.score_rows(texts).errors) == [17]
        assert len(lone.asked) == 1 + 2 * 5

    def test_are_an_error_with_the_callers_number(self, lone: Misbehaving) -> None:
        lone.limit = 2
        with RewardClient(lone.url) as client, pytest.raises(RefusedError) as caught:
            client.score(["a", "b", "c", "!d"])
        assert str(caught.value) == f"{lone.url}, reward_model: row 3: no d"
        assert caught.value.status == 400

    def test_may_be_all(self, lone: Misbehaving) -> None:
        with RewardClient(lone.url) as client:
            assert str(client.score(["!a", "!b"], on_error="nan").tolist()) == "[[nan], [nan]]"
            client.score(["a"])
            assert client.score(["!a"], on_error="nan").shape == (1, 2)

    def test_are_none_where_the_request_is_refused(self, lone: Misbehaving) -> None:
        lone.answer = lambda texts: (400, {"error": "unexpected inference input"})
        with RewardClient(lone.url) as client:
            assert "unexpected" in seconds(client.score_rows, ["a", "b", "c"])[1]

    def test_are_not_those_that_the_model_fails_on(self, lone: Misbehaving) -> None:
        def answer(texts: list[str]) -> Any:
            return (500, {"error": f"row {texts.index('b')}: not finite"}) if "b" in texts else None

        lone.answer, lone.limit = answer, 2
        with RewardClient(lone.url) as client:
            for ask in (client.score_rows, partial(client.score, on_error="nan")):
                with pytest.raises(RefusedError, match="row 2: not finite") as caught:
                    ask(["a", "a", "b"])
                assert caught.value.status == 500
            assert client.score_rows(["a"]).errors == {}

    def test_that_cannot_be_sent(self, lone: Misbehaving) -> None:
        with RewardClient(lone.url) as client:
            scored = client.score_rows(["a", "half \ud83d", "b"])
            assert scored.errors[1].startswith("it cannot be sent: 'utf-8' codec")
            assert scored.rewards[:, 0].tolist()[::2] == [97, 98]
            assert "row 1: it cannot be sent" in seconds(client.score, ["a", "\ud83d"])[1]

    def test_that_have_no_tokens(self, lone: Misbehaving) -> None:
        with RewardClient(lone.url) as client:
            assert str(client.score_tokens([[]], on_error="nan").tolist()) == "[[nan]]"
            with pytest.raises(RefusedError, match="row 1: it has no tokens") as caught:
                client.score_tokens([[5], []])
            assert caught.value.status == 400
            with pytest.raises(TypeError, match="token_lists, row 0: got 5, wanted a list of"):
                client.score_tokens([5, 6])  # type: ignore[list-item]
        assert lone.asked == []

    @pytest.mark.parametrize("refusal", [(413, b"<html>too large"), TOO_LARGE])
    def test_too_much_at_once_is_sent_in_parts(self, lone: Misbehaving, refusal: Answer) -> None:
        lone.answer = lambda texts: refusal if len(texts) > 2 else None
        with RewardClient(lone.url) as client:
            assert client.score(list("abcde"))[:, 0].tolist() == [97, 98, 99, 100, 101]
        lone.answer = lambda texts: refusal if "".join(texts) != "a" else None
        with RewardClient(lone.url) as client:
            seconds(client.score, ["a", "b"])
            assert list(client.score_rows(["a", "b"]).errors) == [1]

    def test_another_way_is_an_error(self, lone: Misbehaving) -> None:
        wanted = "on_error: got 'none', wanted 'raise' or 'nan'"
        with RewardClient(lone.url) as client, pytest.raises(ConfigError, match=wanted):
            client.score(["a"], on_error="none")  # type: ignore[arg-type]
