"""The robustness check with scorers of known preferences, and the transformations of replies."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from nemo_aligner.contract.contract import OverlongError
from nemo_aligner.contract.messages import Text, reply_of
from nemo_aligner.evaluation.predictions import Prediction, Predictions
from nemo_aligner.evaluation.robustness import (
    BOTH,
    REJECTED,
    TRANSFORMATIONS,
    Robustness,
    RobustnessRow,
    add_markdown,
    change_reply,
    check_pairwise,
    check_robustness,
    double_sentence,
    read_robustness,
    render_robustness,
    robustness_json,
    say_twice,
    shorten,
    strip_markdown,
)
from nemo_aligner.evaluation.run_task import run_task
from nemo_aligner.evaluation.tasks import TASKS
from nemo_aligner.metrics.ranking import wilson_interval
from nemo_aligner.utils.errors import ConfigError, DataError
from tests.evaluation.refusals import NOT_REFUSED, refusal
from tests.harness import tiny
from tests.harness.scorers import source_of

Score = Callable[[Sequence[Text]], np.ndarray]


def by_length(texts: Sequence[Text]) -> np.ndarray:
    return np.array([float(len(reply_of(text))) for text in texts])


def by_first_word(texts: Sequence[Text]) -> np.ndarray:
    """Score whether the word "right" occurs, which no change of style affects."""
    return np.array([float("right" in reply_of(text)) for text in texts])


def pairs_of(score: Score, *replies: tuple[str, str]) -> Predictions:
    texts = [tuple(tiny.chat("Why?", reply) for reply in pair) for pair in replies]
    return Predictions([Prediction.of_pair("x:1", "", pair, score(pair)) for pair in texts])


def check(
    score: Score,
    pairs: Predictions,
    count: int = 100,
    longest: int = 10_000,
    error: type[DataError] = OverlongError,
) -> Robustness:
    def encode(text: Text) -> None:
        if len(reply_of(text)) > longest:
            raise error("refused")

    source = source_of(lambda texts: score(texts)[:, None], encoding=encode)
    return check_robustness(pairs, source, count)


def row_of(robustness: Robustness, change: str, changed: str) -> RobustnessRow:
    (row,) = [row for row in robustness.rows if (row.change, row.changed) == (change, changed)]
    return row


LONG, SHORT = "It is right. That is all there is to say of it.", "It is wrong. Indeed."


def test_robustness_of_a_scorer_blind_to_style_is_of_the_same_pairs_every_time() -> None:
    robustness = check(by_first_word, pairs_of(by_first_word, *[(LONG, SHORT)] * 5))
    assert [row.turned for row in robustness.rows] == [0] * 2 * len(TRANSFORMATIONS)
    assert {row.shift for row in robustness.rows} == {0.0, None}
    assert robustness.margin_std == 0
    assert row_of(robustness, "flattery", BOTH).shift_in_std is None
    pairs = pairs_of(by_length, *[(LONG + "!" * n, SHORT) for n in range(20)])
    drawn = [check(by_length, pairs, count=7) for _ in range(2)]
    assert drawn[0] == drawn[1]
    assert (drawn[0].pairs, drawn[0].pairs_read) == (7, 20)
    rows = pairs.draw(7).rewards[:, 0].tolist()
    assert rows == sorted(rows)


def test_robustness_of_a_taste_for_length() -> None:
    """A rejected reply of 20 characters has 59 if it is said twice, more than the chosen 47."""
    robustness = check(by_length, pairs_of(by_length, (LONG, SHORT), (f"{LONG} {LONG}", SHORT)))
    row = row_of(robustness, "said_twice", REJECTED)
    grown = len("\n\nTo say it again:\n\n") + len(SHORT)
    assert (row.pairs, row.turned, row.share) == (2, 1, 0.5)
    assert (row.low, row.high) == wilson_interval(1, 2)
    assert row.shift == row.absolute_shift == grown
    # Margins are 27 and 75.
    assert robustness.margin_std == pytest.approx(24)
    assert row.shift_in_std == pytest.approx(grown / 24)
    assert row_of(robustness, "said_twice", BOTH).turned == 0
    assert row_of(robustness, "flattery", BOTH).turned == 0
    assert [one.n for one in robustness.best_of] == [1, 2]
    assert robustness.best_of[0].characters == pytest.approx((47 + 20 + 95 + 20) / 4)
    assert (
        robustness.best_of[1].characters
        == robustness.best_of[1].reward
        == pytest.approx((47 + 95) / 2)
    )
    # A tie that becomes a loss is a flip.
    tied = check(by_length, pairs_of(by_length, ("right", "wrong")))
    assert [row_of(tied, "flattery", side).turned for side in (BOTH, REJECTED)] == [0, 1]


@pytest.mark.parametrize("error", [OverlongError, DataError])
def test_robustness_counts_what_cannot_be_changed_and_what_grows_too_long(
    error: type[DataError],
) -> None:
    """A changed reply that the chat template refuses, a DataError, counts as too long."""
    pairs = pairs_of(by_length, (LONG, SHORT), ("## Right", "wrong"))
    robustness = check(by_length, pairs, longest=60, error=error)
    stripped = row_of(robustness, "markdown_stripped", BOTH)
    assert (stripped.pairs, stripped.unchanged, stripped.too_long) == (1, 1, 0)
    assert stripped.shift == -3
    assert row_of(robustness, "markdown_stripped", REJECTED).pairs == 0
    twice = row_of(robustness, "said_twice", BOTH)
    assert (twice.pairs, twice.unchanged, twice.too_long) == (1, 0, 1)
    assert row_of(robustness, "said_twice", REJECTED).too_long == 0

    # A sample without a reward counts as too long.
    def reject_long(texts: Sequence[Text]) -> np.ndarray:
        rewards = by_length(texts)
        return np.where(rewards > 90, np.nan, rewards)

    robustness = check(reject_long, pairs_of(by_length, (LONG, SHORT), ("Right.", "wrong")))
    assert row_of(robustness, "said_twice", BOTH).too_long == 1
    assert row_of(robustness, "said_twice", BOTH).shift == pytest.approx(20 + (6 + 5) / 2)


def test_changed_reply_whose_reward_is_not_finite_is_an_error_of_its_pair() -> None:
    def overflow(texts: Sequence[Text]) -> np.ndarray:
        rewards = by_length(texts)
        return np.where([reply_of(text).count(LONG) == 2 for text in texts], np.inf, rewards)

    rows = [*pairs_of(by_length, ("Right.", "wrong"), (LONG, SHORT)).rows]
    rows[1] = replace(rows[1], record="x:2")
    error = refusal(DataError, check, overflow, Predictions(rows))
    assert error.startswith("x:2: the model's reward is not finite (1 of 4 rewards")


def test_robustness_of_what_are_no_pairs_of_prose_is_refused() -> None:
    assert change_reply("a", str.upper) == "a"
    refused = {name: refusal(ConfigError, check_pairwise, TASKS[name]) for name in TASKS}
    not_pairs = ("rewardbench2", "rm_bench", "humanevalpack", "ppe_correctness", "best_of_n")
    others = ("rmb", "fc_rewardbench", "if_rewardbench")
    for name in (*not_pairs, "processbench", "prmbench", *others):
        error = refused.pop(name)
        assert error.startswith("robustness_pairs: ")
        assert f"task={name}" in error
    assert set(refused.values()) == {NOT_REFUSED}


def test_robustness_leaves_out_code_of_a_benchmark(tmp_path: Path) -> None:
    task, path = TASKS["rewardbench"], tmp_path / "task.jsonl"
    code = {**task.sample, "subset": "hep-python"}
    path.write_text("".join(f"{json.dumps(record)}\n" for record in (code, task.sample, code)))
    report = run_task(task, path, source_of(lambda texts: by_length(texts)[:, None]))
    robustness = check(by_length, report.predictions)
    assert (robustness.pairs, robustness.pairs_read, robustness.pairs_of_code) == (1, 1, 2)
    assert "1 of 1 pairs, 2 of code left out" in render_robustness(robustness)
    path.write_text(json.dumps(code))
    report = run_task(task, path, source_of(lambda texts: by_length(texts)[:, None]))
    with pytest.raises(DataError, match="all replies are code"):
        check(by_length, report.predictions)


def test_robustness_is_a_table_and_json_that_is_read_again() -> None:
    robustness = check(by_length, pairs_of(by_length, (LONG, SHORT), ("## Right", "wrong")))
    written = json.loads(json.dumps(robustness_json(robustness)))
    assert read_robustness(written) == robustness
    for change in ({"pairs": "x"}, {"rows": [{"pairs": 1}]}, {"rows": [{"low": "1"}]}):
        with pytest.raises((TypeError, ValueError)):
            read_robustness({**written, **change})
    shown = render_robustness(robustness)
    assert "2 of 2 pairs" in shown
    assert max(map(len, shown.splitlines())) <= 100
    for transformation in TRANSFORMATIONS:
        assert shown.count(f"  {transformation.name} ") == 2
    rows = [replace(row, shift=-8.7934e-05, shift_in_std=-0.08793) for row in robustness.rows]
    assert " -8.793e-05 " in render_robustness(replace(robustness, rows=rows))
    assert " -0.08793 " in render_robustness(replace(robustness, rows=rows))


CODE = "```python\n# one\n\n**two** = 2 * 3 * 4\n```"


def test_transformations_keep_what_was_said_and_have_names_of_their_own() -> None:
    assert len({change.name for change in TRANSFORMATIONS}) == len(TRANSFORMATIONS) == 7
    reply = "Roses are red. Violets are blue.\n\nSugar is sweet."
    for change in TRANSFORMATIONS:
        changed = change.apply(reply)
        assert (changed == reply) == (change.name == "markdown_stripped"), change.name
        assert "Roses are red." in changed, change.name


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
