"""What each change makes of a reply, and what it leaves alone."""

from __future__ import annotations

from nemo_aligner.evaluation.transformations import (
    TRANSFORMATIONS,
    add_markdown,
    double_sentence,
    say_twice,
    shorten,
    strip_markdown,
)

CODE = "```python\n# one\n\n**two** = 2 * 3 * 4\n```"


def test_transformations_keep_what_was_said_and_have_names_of_their_own() -> None:
    assert len({each.name for each in TRANSFORMATIONS}) == len(TRANSFORMATIONS) == 7
    reply = "Roses are red. Violets are blue.\n\nSugar is sweet."
    for each in TRANSFORMATIONS:
        changed = each.apply(reply)
        assert (changed == reply) == (each.name == "markdown_stripped"), each.name
        assert "Roses are red." in changed, each.name


def test_strip_markdown_outside_code() -> None:
    plain = {
        "# Title\n\n- one\n* two\n\n> said": "Title\n\none\ntwo\n\nsaid",
        "**bold**, ***both*** and *slanted*": "bold, both and slanted",
        "see [here](http://x.org) and `x = 1`": "see here and x = 1",
        "above\n\n---\n\nbelow": "above\n\n\nbelow",
        ">>> double(2)\n4": ">>> double(2)\n4",
        f"Run\n\n{CODE}\n\n**now**": f"Run\n\n{CODE}\n\nnow",
    }
    unchanged = "2 * 3 * 4, 2*3*4, snake_case_name, #1, a - b"
    plain[unchanged] = unchanged
    assert {reply: strip_markdown(reply) for reply in plain} == plain


def test_add_markdown_where_there_is_none() -> None:
    added = add_markdown("Yes, it is. I think.\n\n第一。第二。")
    assert added == "## Answer\n\n**Yes, it is.** I think.\n\n**第一。**第二。"
    assert strip_markdown(added) == "Answer\n\nYes, it is. I think.\n\n第一。第二。"
    assert add_markdown(added) == added
    assert add_markdown(CODE) == CODE


def test_double_sentence_doubles_the_longest_and_say_twice_the_reply() -> None:
    assert double_sentence("Yes. It is so. E.g. 1. here") == "Yes. It is so. It is so. E.g. 1. here"
    assert double_sentence("Go on!\n\nThe end.\n") == "Go on!\n\nThe end.\n The end."
    assert double_sentence("no end") == "no end"
    assert double_sentence(CODE) == CODE
    assert say_twice("Four.").count("Four.") == 2


def test_shorten_leaves_half() -> None:
    halves = {
        "One.\n\nTwo.\n\nThree.": "One.\n\nTwo.",
        "The first. The second. The third.": "The first. The second.",
        f"{CODE}\n\nThat is it.": CODE,
        **{reply: reply for reply in ("One sentence.", CODE, "")},
    }
    assert {reply: shorten(reply) for reply in halves} == halves
