"""The reply is found by token ids alone, with every template, or the setting is refused."""

from __future__ import annotations

import dataclasses

import pytest

from nemo_aligner.config.common import Precision
from nemo_aligner.config.model import ScoredPosition
from nemo_aligner.errors import ConfigError, DataError
from nemo_aligner.text.contract import ScoringContract
from nemo_aligner.text.contract_settings import build_contract
from nemo_aligner.text.reply_marker import find_marker, make_reply_marker, reply_start
from nemo_aligner.text.templates import BUILT_IN_TEMPLATES
from nemo_aligner.text.tokenizer import Tokenizer
from tests.contracts import Contracts

CHAT = [
    {"role": "user", "content": "why"},
    {"role": "assistant", "content": "no"},
    {"role": "user", "content": "where"},
    {"role": "assistant", "content": "the cat sings"},
]


def build(contracts: Contracts, template: str) -> ScoringContract:
    config = contracts.config(template=template)
    config.head.reads = ScoredPosition.reply_mean
    return build_contract(config, contracts.tokenizer, Precision.fp32)


@pytest.mark.parametrize("template", BUILT_IN_TEMPLATES)
def test_the_last_reply_is_found_with_every_template(
    template: str, contracts: Contracts, tokenizer: Tokenizer
) -> None:
    contract = build(contracts, template)
    assert contract.reply_marker is not None
    ids = contract.encode(tokenizer, CHAT).token_ids
    reply = tokenizer.decode(ids[reply_start(ids, contract.reply_marker) :])
    assert reply.strip().startswith("the cat sings")
    assert "where" not in reply
    whole = contract.encode(tokenizer, "the bird sings").token_ids
    assert reply_start(whole, contract.reply_marker) == 0


def test_the_last_of_several_counts_and_an_empty_reply_is_the_last_token() -> None:
    assert find_marker([1, 2, 3, 1, 2, 4], (1, 2)) == 3
    assert reply_start([1, 2, 3, 1, 2, 4], (1, 2)) == 5
    assert reply_start([5, 1, 2], (1, 2)) == 2
    assert find_marker([1, 3, 2], (1, 2)) == find_marker([1], (1, 2)) == -1


def test_a_template_that_does_not_tell_a_reply_from_a_question_is_refused(
    tokenizer: Tokenizer,
) -> None:
    joined = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    with pytest.raises(ConfigError, match=r"model.head.reads: got reply_mean, wanted a chat templ"):
        make_reply_marker(joined, tokenizer)
    with pytest.raises(ConfigError, match="to know the reply by"):
        make_reply_marker("", tokenizer)


def test_a_contract_has_a_marker_for_the_mean_and_for_nothing_else(contracts: Contracts) -> None:
    plain, mean = contracts(template="chatml"), build(contracts, "chatml")
    assert "reply_marker" not in plain.to_dict()
    assert ScoringContract.from_dict(mean.to_dict()) == mean
    assert set(plain.differences(mean)) == {"scored_position", "reply_marker"}
    for contract, marker in ((plain, (1,)), (mean, None)):
        with pytest.raises(DataError, match=r"reply_marker: got .* wanted it for reply_mean, and"):
            dataclasses.replace(contract, reply_marker=marker)
