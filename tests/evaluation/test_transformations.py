"""What each change makes of a reply, and what it leaves alone."""

from __future__ import annotations

import pytest

from nemo_aligner.evaluation.transformations import (
    TRANSFORMATIONS,
    add_markdown,
    double_sentence,
    say_twice,
    shorten,
    strip_markdown,
)

CODE = "```python\n# one\n\n**two** = 2 * 3 * 4\n```"


def test_names_are_told_apart() -> None:
    assert len({each.name for each in TRANSFORMATIONS}) == len(TRANSFORMATIONS) == 7


@pytest.mark.parametrize("each", TRANSFORMATIONS, ids=lambda each: each.name)
def test_a_change_keeps_what_was_said(each) -> None:
    reply = "Roses are red. Violets are blue.\n\nSugar is sweet."
    changed = each.apply(reply)
    if each.name == "markdown_stripped":
        assert changed == reply
    else:
        assert changed != reply
        assert "Roses are red." in changed


@pytest.mark.parametrize(
    ("reply", "plain"),
    [
        ("# Title\n\n- one\n* two\n\n> said", "Title\n\none\ntwo\n\nsaid"),
        ("**bold**, ***both*** and *slanted*", "bold, both and slanted"),
        ("see [here](http://x.org) and `x = 1`", "see here and x = 1"),
        ("above\n\n---\n\nbelow", "above\n\n\nbelow"),
        (">>> double(2)\n4", None),
        ("2 * 3 * 4, 2*3*4, snake_case_name, #1, a - b", None),
        (f"Run\n\n{CODE}\n\n**now**", f"Run\n\n{CODE}\n\nnow"),
    ],
)
def test_markdown_is_taken_away_outside_code(reply: str, plain: str | None) -> None:
    assert strip_markdown(reply) == (reply if plain is None else plain)


def test_markdown_is_added_where_there_is_none() -> None:
    added = add_markdown("Yes, it is. I think.\n\n第一。第二。")
    assert added == "## Answer\n\n**Yes, it is.** I think.\n\n**第一。**第二。"
    assert strip_markdown(added) == "Answer\n\nYes, it is. I think.\n\n第一。第二。"
    assert add_markdown(added) == added
    assert add_markdown(CODE) == CODE


def test_the_longest_sentence_is_doubled() -> None:
    assert double_sentence("Yes. It is so. E.g. 1. here") == "Yes. It is so. It is so. E.g. 1. here"
    assert double_sentence("Go on!\n\nThe end.\n") == "Go on!\n\nThe end.\n The end."
    assert double_sentence("no end") == "no end"
    assert double_sentence(CODE) == CODE


@pytest.mark.parametrize(
    ("reply", "half"),
    [
        ("One.\n\nTwo.\n\nThree.", "One.\n\nTwo."),
        ("The first. The second. The third.", "The first. The second."),
        (f"{CODE}\n\nThat is it.", CODE),
        ("One sentence.", "One sentence."),
        (CODE, CODE),
        ("", ""),
    ],
)
def test_half_is_left(reply: str, half: str) -> None:
    assert shorten(reply) == half


def test_said_twice_is_twice_as_long() -> None:
    assert say_twice("Four.").count("Four.") == 2
