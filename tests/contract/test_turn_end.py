"""What a chat template writes behind an end of turn, and texts that lack it."""

from __future__ import annotations

from nemo_aligner.contract.templates import BUILT_IN_TEMPLATES, render
from nemo_aligner.contract.tokenizer import Tokenizer
from nemo_aligner.contract.turns import TurnEnd

CONVERSATION = [
    {"role": "user", "content": "What is red?"},
    {"role": "assistant", "content": "A rose."},
]


def test_turn_end_makes_of_a_policys_text_what_the_template_writes(tokenizer: Tokenizer) -> None:
    """As text, and as ids; for each template, and for text that has a part of it already."""
    wrong = {}
    for name, template in BUILT_IN_TEMPLATES.items():
        whole = render(template, CONVERSATION, tokenizer.bos_token, tokenizer.eos_token)
        turn = TurnEnd.of(template, tokenizer)
        assert (turn is None) == (whole == whole.strip()), name
        if turn is None:
            continue
        assert TurnEnd.from_dict(turn.to_dict()) == turn
        ids, cut = tokenizer.encode(whole), tokenizer.encode(whole.rstrip())
        cases = {
            "cut": (turn.complete(whole.rstrip()), whole),
            "whole": (turn.complete(whole), whole),
            "without an end": (turn.complete("A rose."), "A rose."),
            "empty": (turn.complete(""), ""),
            "ids cut": (turn.complete_ids(cut), ids),
            "ids whole": (turn.complete_ids(ids), ids),
            "ids without an end": (turn.complete_ids(cut[:-1]), cut[:-1]),
            "no ids": (turn.complete_ids([]), []),
        }
        wrong |= {(name, case): got for case, (got, wanted) in cases.items() if got != wanted}
    assert not wrong, wrong


def test_turn_end_may_have_several_parts() -> None:
    turn = TurnEnd("</s>", "\n\n", (2,), (5, 5))
    assert [turn.complete(text) for text in ("a</s>", "a</s>\n", "a</s>\n\n", "a\n")] == [
        "a</s>\n\n", "a</s>\n\n", "a</s>\n\n", "a\n",
    ]  # fmt: skip
    assert [turn.complete_ids(ids) for ids in ([1, 2], [1, 2, 5], [1, 2, 5, 5], [2], [1])] == [
        [1, 2, 5, 5], [1, 2, 5, 5], [1, 2, 5, 5], [2, 5, 5], [1],
    ]  # fmt: skip
    assert TurnEnd("</s>", "\n").complete_ids([1, 2]) == [1, 2]


def test_turn_end_of_no_template_is_none(tokenizer: Tokenizer) -> None:
    assert TurnEnd.of("", tokenizer) is None
