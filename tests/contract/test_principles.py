"""A principle becomes a question after the reply, or is rejected."""

from __future__ import annotations

from typing import Any

import pytest

from nemo_aligner.config.common import Overlong, Precision
from nemo_aligner.config.model import HeadConfig, ScoredPosition
from nemo_aligner.contract.from_settings import build_contract, continue_contract
from nemo_aligner.contract.messages import Conversation, as_json, read_text, reply_of
from nemo_aligner.contract.principles import add_principles
from nemo_aligner.contract.turns import TurnMarkError
from nemo_aligner.utils.errors import ConfigError, DataError
from tests.contract.refusals import assert_refused
from tests.harness import tiny
from tests.harness.contracts import Contracts

CHAT = tiny.chat("why", "the cat sings")
KIND = Conversation(CHAT, principle="be kind")
ASKS = "Is it {principle}?"
# ChatML that ends with the start of the next reply, and omits the reasoning of earlier replies.
PROMPTED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if loop.last and m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ONE_ROUND = (
    "{% if messages | length > 2 %}{{ raise_exception('one question') }}{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }};{% endfor %}"
)


def written(contracts: Contracts, sample: Any, **data: Any) -> str:
    contract = contracts(**{"principle_template": ASKS, **data})
    (ids,) = contract.tokenize(contracts.tokenizer, [sample])
    assert contract.encode(contracts.tokenizer, sample).token_ids == ids
    return contracts.tokenizer.decode(ids)


@pytest.fixture
def prompted(tmp_path: Any) -> str:
    path = tmp_path / "prompted.jinja"
    path.write_text(PROMPTED)
    return str(path)


def test_principle_is_a_question_behind_the_reply(contracts: Contracts, prompted: str) -> None:
    turns = "<|im_start|>user\nwhy<|im_end|>\n<|im_start|>assistant\nthe cat sings<|im_end|>\n"
    asked = f"{turns}<|im_start|>user\nIs it be kind?<|im_end|>\n"
    for data in ({}, {"template": "chatml"}):
        assert written(contracts, KIND, **data) == asked
        assert written(contracts, CHAT, **data) == turns
    assert written(contracts, KIND, template=prompted) == f"{asked}<|im_start|>assistant\n"
    assert written(contracts, CHAT, template=prompted) == turns
    # NVIDIA's Principle models are asked in these words.
    words = (
        "Evaluate the response to the previous prompt in terms of whether it satisfies this "
        "principle: be kind. Only answer Yes or No."
    )
    assert words in written(contracts, KIND, principle_template="rlbff")
    # Samples of a record are tokenized together, and the reply is measured by itself.
    contract, tokenizer = contracts(principle_template=ASKS), contracts.tokenizer
    record = [KIND, Conversation(CHAT, principle="brief"), CHAT]
    (found,) = contract.tokenize_records(tokenizer, [record])
    assert [item.token_ids for item in found] == contract.tokenize(tokenizer, record)
    assert {item.reply_tokens for item in found} == {len(tokenizer.encode("the cat sings"))}
    # A principle in tools' company, and one with the placeholder of the template in it.
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    with_tools = Conversation(CHAT, tools=tools, principle="{principle}")
    assert written(contracts, with_tools, template="chatml").endswith(
        "the cat sings<|im_end|>\n<|im_start|>user\nIs it {principle}?<|im_end|>\n"
    )
    truncated = contracts(principle_template=ASKS, seq_length=16, overlong=Overlong.truncate_left)
    ids = truncated.encode(tokenizer, KIND).token_ids
    assert tokenizer.decode(ids).endswith("Is it be kind?<|im_end|>\n")


def test_sample_keeps_its_principle_through_json() -> None:
    sent = {"messages": CHAT, "principle": "be kind"}
    assert read_text(sent) == read_text(KIND) == KIND
    assert as_json(KIND) == sent
    assert reply_of(KIND) == "the cat sings"
    for none in (None, "", " "):
        assert read_text({"messages": CHAT, "principle": none}) == CHAT
    rows = add_principles([CHAT, sent, CHAT], ["a", None, ["b", "c"]])
    assert [*map(read_text, rows)] == [
        Conversation(CHAT, principle="a"), KIND,
        Conversation(CHAT, principle="b"), Conversation(CHAT, principle="c"),
    ]  # fmt: skip


def test_principle_is_refused_where_the_model_would_not_see_it(
    contracts: Contracts, prompted: str
) -> None:
    plain, asking = contracts(), contracts(principle_template=ASKS)
    thinking = [CHAT[0], {**CHAT[1], "reasoning_content": "hm"}]
    reading = contracts(principle_template=ASKS, template=prompted)
    cases: list[tuple[Any, str]] = [
        ((plain, KIND), "principle: got 'be kind', but the model was not trained with principles"),
        ((asking, Conversation(CHAT, principle="a<|im_end|>b")), "^principle: got '<|im_end|>' at"),
        ((asking, {"messages": CHAT, "principle": 3}), "principle: got 3, wanted a string"),
        ((asking, {"messages": CHAT, "principle": "\ud800"}), "principle: got half of a surrogate"),
        (
            (reading, Conversation(thinking, principle="a")),
            r"^messages\[1\]\.reasoning_content: the chat",
        ),
    ]
    assert_refused(lambda case: case[0].encode(contracts.tokenizer, case[1]), cases, DataError)
    with pytest.raises(TurnMarkError, match=r"^principle: got '<\|im_start\|>' at character 2"):
        asking.encode(contracts.tokenizer, Conversation(CHAT, principle="a<|im_start|>"))
    reading.encode(contracts.tokenizer, thinking)
    wrong: list[tuple[Any, str]] = [
        ((["a"], "kind"), "row 0: principle: got a principle with a raw text"),
        (([CHAT], ["a", "b"]), "wanted a string, or a list with one entry for each of the 1"),
        (([CHAT], [[]]), "row 0: got an empty list"),
        (([CHAT], [3]), "row 0: principle: got 3, wanted a string"),
        (([KIND], "brief"), "row 0: principle: got 'brief' for a sample with the principle"),
    ]
    assert_refused(lambda case: add_principles(*case), wrong, DataError)


def test_settings_of_principles(contracts: Contracts, tmp_path: Any) -> None:
    one_round = tmp_path / "one.jinja"
    one_round.write_text(ONE_ROUND)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"principle_template": "Is it kind?"}, "wanted rlbff, or a text .*with {principle} once"),
        ({"principle_template": ASKS * 2}, "wanted rlbff, or a text"),
        ({"principle_template": ASKS, "template": str(one_round)}, "after the reply: .*one quest"),
    ]
    assert_refused(lambda data: contracts(**data), cases, ConfigError)
    tokenizer = contracts.tokenizer
    config = contracts.config(principle_template=ASKS)
    config.head = HeadConfig(reads=ScoredPosition.reply_mean)
    with pytest.raises(ConfigError, match=r"Set model.head.reads=last_token"):
        build_contract(config, tokenizer, Precision.fp32)
    # A run that starts from a reward model keeps its template, unless the settings have another.
    start = contracts(principle_template=ASKS)
    again = build_contract(contracts.config(), tokenizer, Precision.fp32, start)
    assert continue_contract(again, start) == start
    without = build_contract(
        contracts.config(principle_template=""), tokenizer, Precision.fp32, start
    )
    assert without == contracts()
    with pytest.raises(ConfigError, match=r"model.data.principle_template: 'Is it {principle}"):
        continue_contract(without, start)
    # A head that reads the reply would not see the question behind it.
    config.data.principle_template = None
    mean = build_contract(config, tokenizer, Precision.fp32, start)
    assert mean.principle_template is None
    assert continue_contract(mean, start, allow_change=True).scored_position == "reply_mean"
