"""/v1/rewards: principles of conversations."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("pydantic")
from nemo_aligner.contract.messages import messages_of, principle_of
from nemo_aligner.serving.failures import RequestError
from nemo_aligner.serving.protocols.rewards import ROUTES
from tests.harness import tiny
from tests.serving.protocols.bodies import not_refused, parsed

(ROUTE,) = ROUTES
FIRST, SECOND = tiny.chat("why", "the cat"), tiny.chat("who", "a dog")


def principles(conversations: list[Any], principle: Any = None) -> list[tuple[str, str | None]]:
    body = {"conversations": conversations, "principle": principle}
    texts = ROUTE.read(parsed(ROUTE, body)).texts or []
    messages = [text if isinstance(text, list) else text.messages for text in texts]
    return [
        (turns[-1]["content"], principle_of(text))
        for turns, text in zip(messages, texts, strict=True)
    ]


def test_principle_is_of_all_or_of_each_conversation_and_several_make_several_rows() -> None:
    cat, dog = "the cat", "a dog"
    assert principles([FIRST, SECOND]) == [(cat, None), (dog, None)]
    assert principles([FIRST, SECOND], "kind") == [(cat, "kind"), (dog, "kind")]
    assert principles([FIRST, SECOND], ["kind", None]) == [(cat, "kind"), (dog, None)]
    several = principles([FIRST, SECOND], [["kind", "true"], "brief"])
    assert several == [(cat, "kind"), (cat, "true"), (dog, "brief")]
    with_own = {"messages": FIRST, "principle": "kind"}
    assert principles([with_own, SECOND]) == [(cat, "kind"), (dog, None)]
    assert principles([with_own, SECOND], [None, "true"]) == [(cat, "kind"), (dog, "true")]
    # A bad conversation is an error of its own row, also where rows before it were added.
    body = {"conversations": [FIRST, [{}], SECOND], "principle": [["a", "b"], "c", None]}
    request = ROUTE.read(parsed(ROUTE, body))
    assert (len(request.texts or ()), [*request.refused]) == (3, [2])
    body = {"conversations": [FIRST, "a", SECOND], "principle": [None, ["a", "b"], "c"]}
    request = ROUTE.read(parsed(ROUTE, body))
    assert (len(request.texts or ()), [*request.refused]) == (2, [1, 2])


def test_rows_of_a_conversation_share_its_messages() -> None:
    parts = [{"type": "text", "text": "why"}]
    conversation = [{"role": "user", "content": parts}, *FIRST[1:]]
    body = {"conversations": [conversation], "principle": [["a", "b", None]]}
    texts = ROUTE.read(parsed(ROUTE, body)).texts or []
    assert len({id(messages_of(text)) for text in texts}) == 1


def test_principle_that_does_not_fit_the_request_is_refused() -> None:
    two = {"conversations": [FIRST, SECOND]}
    own = {"conversations": [{"messages": FIRST, "principle": "kind"}]}
    wrong: list[tuple[Any, str]] = [
        ({**two, "principle": ["kind"]}, "principle: got .*one entry for each of the 2 samples"),
        ({**two, "principle": ["kind", []]}, "principle, row 1: got an empty list"),
        ({**two, "principle": 1}, "principle: got 1, wanted a string, or a list"),
        ({"texts": ["a"], "principle": "kind"}, "principle: got a principle with texts"),
        ({"tokens": [[1]], "principle": "kind"}, "principle: got a principle with tokens"),
        ({**own, "principle": "true"}, "row 0: principle: got 'true' for a sample with the"),
    ]
    assert not not_refused(lambda body: ROUTE.read(parsed(ROUTE, body)), wrong)
    flat = "conversations is a list of conversations, each a list of messages"
    assert not not_refused(
        lambda body: ROUTE.read(parsed(ROUTE, body)), [({"conversations": FIRST}, flat)]
    )
    many = {**two, "principle": [["a"] * 40_000, ["b"] * 40_000]}
    with pytest.raises(RequestError, match="more than 65536 samples"):
        ROUTE.read(parsed(ROUTE, many))
