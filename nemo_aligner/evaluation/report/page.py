"""The report as one HTML file, which has no scripts, sends no requests, and can be printed.

All contents come from data files, so they are untrusted. The template escapes them. In addition, a
content security policy forbids the browser to run or load anything, in case an escape is missing.

The file also builds the first screen of the page: how good the model is, compared with what, and
where it is wrong.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from nemo_aligner.contract.messages import (
    Text,
    flatten_message,
    messages_of,
    principle_of,
    prompt_of,
    question_of,
    reply_of,
)
from nemo_aligner.evaluation.report import heldout_sections, training_sections
from nemo_aligner.evaluation.report.figures import (
    Headline,
    Heldout,
    PageSection,
    heldout_sets,
)
from nemo_aligner.evaluation.report.run_report import (
    Mistake,
    RunReport,
    compute_shares,
    list_mistakes,
    number_equal_names,
    read_report,
)
from nemo_aligner.evaluation.report.svg import COLOURS, DARK_COLOURS
from nemo_aligner.metrics.ranking import correlation, nanmean
from nemo_aligner.utils.errors import ConfigError, DataError
from nemo_aligner.utils.writing import write_output

MAX_REPORTS = len(COLOURS)
# Limit for the samples of all mistakes together. With it the page stays below 3 MB, even if every
# character is escaped.
_MAX_CHARACTERS = 400_000
_MAX_CHARACTERS_OF_A_TEXT = 20_000
# Characters that are invisible, or change the direction of the text around them.
_UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]")


@dataclass(frozen=True)
class ShownTurn:
    """A turn of a conversation as the page shows it.

    Attributes:
        role: role of its author, or the side of a reply, such as ``chosen``.
        text: its text, without the end if it was too long.
        is_cut: True if the text was too long.
    """

    role: str
    text: str
    is_cut: bool


@dataclass(frozen=True)
class ShownMistake:
    """A mistake as the page shows it.

    Attributes:
        mistake: the record that the model got wrong.
        prompt: turns of the prompt that all replies share; empty if the prompts differ.
        replies: the replies; if the prompts differ, each with its own prompt.
    """

    mistake: Mistake
    prompt: Sequence[ShownTurn]
    replies: Sequence[ShownTurn]


def write_page(paths: Sequence[Path], output: Path) -> str:
    """Write one report on some runs and evaluations, whose curves share the figures.

    Args:
        paths: folders of runs, or files that evaluate wrote.
        output: the HTML file to write.

    Returns:
        ``output``, and whether another file was replaced, for a message.

    Raises:
        DataError: one of ``paths`` is neither a run nor an evaluation.
        ConfigError: there are too many paths, or ``output`` cannot be written.
    """
    return save_page([read_report(path) for path in paths], output)


def save_page(reports: Sequence[RunReport], output: Path, setting: str = "output") -> str:
    """Write the page for reports that were read already.

    Args:
        setting: name of the setting that chose ``output``, for the error.

    Returns:
        ``output``, and whether another file was replaced, for a message.

    Raises:
        ConfigError: there are too many reports, or ``output`` cannot be written.
    """
    # "replace", because a text may contain half of a surrogate pair, which UTF-8 cannot encode.
    return write_output(output, render_page(reports).encode("utf-8", "replace"), setting)


def render_page(reports: Sequence[RunReport]) -> str:
    """Render the page as HTML.

    Raises:
        ConfigError: there are no reports, or more than there are colours.
    """
    if not 1 <= len(reports) <= MAX_REPORTS:
        raise ConfigError(
            f"runs: got {len(reports)}, but a report can show 1 to {MAX_REPORTS} runs"
        )
    reports = number_equal_names(reports)
    sections = build_sections(reports)
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "svg": Markup,
        "escape_invisible": escape_invisible,
        "allow_breaks": allow_breaks,
    }
    names = " and ".join(report.name for report in reports)
    num_mistakes = sum(len(mistakes) for section in sections for _, mistakes in section.mistakes)
    return environment.get_template("page.html.jinja").render(
        title=f"Report of {names}",
        colours=COLOURS,
        dark_colours=DARK_COLOURS,
        sections=[section for section in sections if not section.is_empty],
        left_out=[section for section in sections if section.is_empty],
        show=lambda mistake: show_mistake(mistake, num_mistakes),
    )


def build_sections(reports: Sequence[RunReport]) -> list[PageSection]:
    """Build all sections in the order of the page.

    The page leaves out sections without content, and lists them with the reason at its end.

    Raises:
        DataError: a held-out set has no record.
    """
    sets = heldout_sets(reports)
    for heldout in sets:
        if not heldout.predictions.rows:
            raise DataError(f"{heldout.key.name}: it has no record; wanted at least one")
    return [
        build_overview(reports, sets),
        training_sections.build_summary(reports, sets),
        training_sections.build_learning_curves(reports),
        heldout_sections.build_accuracy(sets, reports),
        heldout_sections.build_rewards(sets),
        heldout_sections.build_calibration(sets),
        heldout_sections.build_reward_and_length(sets),
        heldout_sections.build_robustness(reports),
        heldout_sections.build_mistakes(sets),
        training_sections.build_data(reports),
        training_sections.build_contract(reports),
        training_sections.build_settings(reports),
        training_sections.build_throughput(reports),
    ]


def show_mistake(mistake: Mistake, num_mistakes: int) -> ShownMistake:
    """Prepare a mistake for the page, and cut texts that are too long.

    The limit of a text depends on ``num_mistakes``, the number of mistakes on the page, because the
    page must stay small.
    """
    limit = min(_MAX_CHARACTERS_OF_A_TEXT, _MAX_CHARACTERS // (4 * max(1, num_mistakes)))
    prompts = [prompt_of(text) for _, text in mistake.texts]
    # A principle belongs to the whole sample, so that a reply with one is shown with its prompt.
    has_principle = any(principle_of(text) is not None for _, text in mistake.texts)
    is_shared = not has_principle and all(prompt == prompts[0] for prompt in prompts)
    prompt = [
        _cut_turn(turn["role"], flatten_message(turn), limit) for turn in prompts[0] * is_shared
    ]
    # If the prompts differ, each reply is shown together with its prompt.
    render = reply_of if is_shared else _render_conversation
    replies = [_cut_turn(side, render(text), limit) for side, text in mistake.texts]
    return ShownMistake(mistake, prompt, replies)


def _cut_turn(role: str, text: str, limit: int) -> ShownTurn:
    return ShownTurn(role, text[:limit], len(text) > limit)


def _render_conversation(text: Text) -> str:
    if isinstance(text, str):
        return text
    turns = [f"{turn['role']}: {flatten_message(turn)}" for turn in messages_of(text)]
    principle = principle_of(text)
    return "\n\n".join([*turns, *([] if principle is None else [f"principle: {principle}"])])


def escape_invisible(text: str) -> str:
    """Write characters that are invisible or change the text's direction as ``\\u202e``."""
    return _UNSEEN.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def allow_breaks(name: str) -> Markup:
    """Escape a name, and allow line breaks after ``_``, ``/`` and ``.`` for narrow screens."""
    return Markup(re.sub("([_/.])", r"\1<wbr>", str(escape(escape_invisible(name)))))


# The first screen: how good the model is, compared with what, and where it is wrong.

_NUM_MISTAKES = 5
_MAX_QUOTE_LENGTH = 90


def build_overview(reports: Sequence[RunReport], sets: Sequence[Heldout]) -> PageSection:
    """Build the first section: the headline of every held-out set, and the main curve."""
    headlines = [_build_headline(heldout, heldout.key.name * (len(sets) > 1)) for heldout in sets]
    curve = training_sections.draw_main_curve(reports)
    return PageSection(
        "overview",
        "Overview",
        headlines=headlines,
        drawings=[] if curve is None else [curve],
        nothing="nothing has been validated or evaluated yet",
    )


def _build_headline(heldout: Heldout, name: str) -> Headline:
    worst = list_mistakes(heldout.predictions, _NUM_MISTAKES)
    judge = _judge_ratings if heldout.predictions.is_rated else _judge_pairs
    figures, verdict = judge(heldout)
    return Headline(name, figures, verdict, [_describe_in_one_line(mistake) for mistake in worst])


def _judge_pairs(heldout: Heldout) -> tuple[list[tuple[str, str]], str]:
    """Compare the accuracy on pairs with the accuracy of always preferring the longer reply.

    Returns:
        The figures, as (number, what it is), and a verdict in one sentence. The interval of the
        accuracy is Wilson's (1927) 95% interval.
    """
    share, baseline = compute_shares(heldout.predictions)[0], heldout.longer_baseline()
    longer, unit = baseline or (0.5, "")
    figures = [
        (
            f"{share.accuracy:.1%}",
            f"accuracy on {share.pairs} held-out pairs (95%: {share.low:.1%} to {share.high:.1%})",
        ),
        (f"{longer:.1%}", f"always the longer reply, in {unit}"),
    ]
    points = 100 * (share.accuracy - longer)
    if share.low > max(longer, 0.5):
        verdict = (
            f"The model beats the longer reply by {points:.1f} points, and the 95% interval "
            "excludes chance."
        )
    elif share.high < 0.5:
        verdict = (
            "The model is worse than random guessing, and the 95% interval excludes chance: check "
            "that the labels are not swapped."
        )
    elif share.high < longer:
        verdict = f"Always taking the longer reply is better by {-points:.1f} points."
    elif share.low <= 0.5 <= share.high:
        verdict = "On these pairs the model cannot be distinguished from random guessing."
    else:  # the baseline is in the interval
        verdict = (
            f"The model is {abs(points):.1f} points {'above' if points >= 0 else 'below'} the "
            "longer reply, but there are too few pairs to distinguish the two."
        )
    return figures, verdict


def _judge_ratings(heldout: Heldout) -> tuple[list[tuple[str, str]], str]:
    """Compare Pearson's r of rewards and labels with |r| of length and labels.

    Both are means over attributes.

    Returns:
        The figures, as (number, what it is), and a verdict in one sentence.
    """
    predictions = heldout.predictions
    count = len(predictions.rows)
    correlations = {
        name: _correlate(predictions.rewards[:, column], predictions.labels[:, column])
        for column, name in enumerate(predictions.attributes)
    }
    defined = {name: value for name, value in correlations.items() if not np.isnan(value)}
    if not defined:
        return [(str(count), "rated replies")], "No attribute has labels that vary."
    mean = float(np.mean(list(defined.values())))
    length, unit = _measure_length_baseline(heldout)
    mean_of = f", mean of {len(defined)} attributes" if len(defined) > 1 else ""
    figures = [
        (f"{mean:.3f}", f"Pearson's r of reward and label on {count} rated replies{mean_of}")
    ]
    sentences = []
    if not np.isnan(length):
        meaning = f"|r| of length and label: the length of the reply alone, in {unit}"
        figures.append((f"{length:.3f}", meaning))
        comparison = "above" if mean > length else "not above"
        sentences.append(f"The model is {comparison} length alone.")
    if len(defined) > 1:
        best = max(defined, key=lambda name: defined[name])
        worst = min(defined, key=lambda name: defined[name])
        sentences.append(
            f"It follows the labels of {best} most closely (r {defined[best]:.3f}) and those of "
            f"{worst} least (r {defined[worst]:.3f})."
        )
    return figures, " ".join(sentences)


def _measure_length_baseline(heldout: Heldout) -> tuple[float, str]:
    """Return the mean |r| of labels and length, and the unit of length.

    If the value was logged, it is returned; the logged one usually measures length in tokens.
    Otherwise it is computed from lengths in characters.
    """
    logged = heldout.metric("length_only_pearson_mean")
    if logged is not None:
        return logged, heldout.length_unit("length_only_pearson_mean")
    lengths = heldout.predictions.lengths.astype(float).ravel()
    columns = heldout.predictions.labels.T
    return nanmean(abs(_correlate(lengths, labels)) for labels in columns), "characters"


def _correlate(values: np.ndarray, labels: np.ndarray) -> float:
    """Compute Pearson's r of ``values [N]`` and ``labels [N]``; NaN if it is undefined.

    Entries with a missing value or label (NaN) are left out.
    """
    present = ~np.isnan(labels) & ~np.isnan(values)
    return correlation(torch.from_numpy(values[present]), torch.from_numpy(labels[present]))


def _describe_in_one_line(mistake: Mistake) -> str:
    prompt = question_of(mistake.texts[0][1])
    question = f"\u201c{_shorten(flatten_message(prompt[-1]))}\u201d: " if prompt else ""
    replies = [f"{side} \u201c{_shorten(reply_of(text))}\u201d" for side, text in mistake.texts]
    return f"{question}{', '.join(replies)} ({mistake.numbers})"


def _shorten(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _MAX_QUOTE_LENGTH else f"{line[: _MAX_QUOTE_LENGTH - 1]}\u2026"
