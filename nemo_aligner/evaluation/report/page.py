"""A report for people: one HTML file without scripts or requests, which can also be printed.

Everything shown is untrusted. The template escapes it, and a content security policy forbids the
browser to run or load anything, should an escape ever be missing.
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
    prompt_of,
    question_of,
    reply_of,
)
from nemo_aligner.evaluation.report import of_heldout, of_training, page
from nemo_aligner.evaluation.report.figures import (
    COLOURS,
    Headline,
    Heldout,
    PageSection,
    heldout_sets,
)
from nemo_aligner.evaluation.report.of_training import main_curve
from nemo_aligner.evaluation.report.run_report import (
    Mistake,
    RunReport,
    mistakes,
    name_apart,
    read_report,
    shares,
)
from nemo_aligner.metrics.ranking import correlation, nanmean
from nemo_aligner.utils.errors import ConfigError, DataError
from nemo_aligner.utils.writing import write_problem, write_whole

MOST_REPORTED = len(COLOURS)
# For the texts of all mistakes together: escaped and in UTF-8, the page stays below 3 MB.
_MOST_CHARACTERS = 400_000
_MOST_OF_A_TEXT = 20_000
# Characters that are invisible, or change the direction of the text around them.
_UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]")


@dataclass(frozen=True)
class ShownTurn:
    """Turn of a conversation; ``is_cut`` if it is longer than the page has room for."""

    role: str
    text: str
    is_cut: bool


@dataclass(frozen=True)
class ShownMistake:
    """Mistake as the page shows it: the prompt once, and the replies below."""

    mistake: Mistake
    prompt: Sequence[ShownTurn]
    replies: Sequence[ShownTurn]


def write_page(paths: Sequence[Path], output: Path) -> Path:
    """Write the report of runs and evaluations; several are overlaid.

    Raises:
        DataError: one of them is neither.
        ConfigError: there are too many, or ``output`` cannot be written.
    """
    return save_page([read_report(path) for path in paths], output)


def save_page(reported: Sequence[RunReport], output: Path) -> Path:
    """Write the page of reports in memory, and return its path."""
    content = render_page(reported)
    try:
        # A text may contain half of a surrogate pair, which UTF-8 cannot encode.
        write_whole(output, content.encode("utf-8", "replace"))
    except OSError as error:
        problem = write_problem(output, error)
        raise ConfigError(f"output: got {output}, wanted a file to write: {problem}") from error
    return output


def render_page(reported: Sequence[RunReport]) -> str:
    """The HTML.

    Raises:
        ConfigError: there are more than colours can tell apart.
    """
    if not 1 <= len(reported) <= MOST_REPORTED:
        raise ConfigError(f"runs: got {len(reported)}, wanted 1 to {MOST_REPORTED} in a report")
    reported = name_apart(reported)
    parts = build_sections(reported)
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"svg": Markup, "seen": seen, "breakable": breakable}
    names = " and ".join(each.name for each in reported)
    how_many = sum(len(some) for part in parts for _, some in part.mistakes)
    return environment.get_template("page.html.jinja").render(
        title=f"Report of {names}",
        parts=parts,
        show=lambda mistake: show_mistake(mistake, how_many),
    )


def build_sections(reported: Sequence[RunReport]) -> list[PageSection]:
    """Build all sections in order; those without content say why."""
    sets = heldout_sets(reported)
    for each in sets:
        if not each.predictions.rows:
            raise DataError(f"{each.key.name}: it has no record, wanted at least one")
    return [
        page.overview(reported, sets),
        of_training.summary(reported, sets),
        of_training.learning_curves(reported),
        of_heldout.accuracy(sets, reported),
        of_heldout.rewards(sets),
        of_heldout.reliability(sets),
        of_heldout.reward_and_length(sets),
        of_heldout.robustness(reported),
        of_heldout.mistakes(sets),
        of_training.data(reported),
        of_training.contract(reported),
        of_training.settings(reported),
        of_training.versions(reported),
        of_training.throughput(reported),
    ]


def show_mistake(mistake: Mistake, how_many: int) -> ShownMistake:
    """Texts of one of ``how_many`` mistakes, each in full unless it is very long."""
    most = min(_MOST_OF_A_TEXT, _MOST_CHARACTERS // (4 * max(1, how_many)))
    prompts = [prompt_of(text) for _, text in mistake.texts]
    is_common = all(prompt == prompts[0] for prompt in prompts)
    prompt = [_turn(each["role"], flatten_message(each), most) for each in prompts[0] * is_common]
    # Without a common prompt each text is shown in full.
    shown = reply_of if is_common else _whole
    replies = [_turn(side, shown(text), most) for side, text in mistake.texts]
    return ShownMistake(mistake, prompt, replies)


def _turn(role: str, text: str, most: int) -> ShownTurn:
    return ShownTurn(role, text[:most], len(text) > most)


def _whole(text: Text) -> str:
    if isinstance(text, str):
        return text
    return "\n\n".join(f"{turn['role']}: {flatten_message(turn)}" for turn in messages_of(text))


def seen(text: str) -> str:
    """Escape characters that are invisible or turn the text around, as ``\\u202e``."""
    return _UNSEEN.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def breakable(name: str) -> Markup:
    """Escape a name that a narrow screen may break behind ``_``, ``/`` and ``.``."""
    return Markup(re.sub("([_/.])", r"\1<wbr>", str(escape(seen(name)))))


# The first screen: how good the model is, compared with what, and where it is wrong.

_WORST = 5
_MOST_OF_A_LINE = 90


def overview(reported: Sequence[RunReport], sets: Sequence[Heldout]) -> PageSection:
    """Build the headline of every held-out set, and the curve that a run is judged by."""
    headlines = [_headline(each, each.key.name * (len(sets) > 1)) for each in sets]
    curve = main_curve(reported)
    return PageSection(
        "overview",
        "Overview",
        headlines=headlines,
        drawings=[] if curve is None else [curve],
        nothing="Nothing has been validated or evaluated yet.",
    )


def _headline(each: Heldout, name: str) -> Headline:
    worst = [_on_one_line(mistake) for mistake in mistakes(each.predictions, _WORST)]
    figures, verdict = (_of_ratings if each.predictions.is_rated else _of_pairs)(each)
    return Headline(name, figures, verdict, worst)


def _of_pairs(each: Heldout) -> tuple[list[tuple[str, str]], str]:
    """Compare accuracy with the length baseline; the interval is Wilson's (1927), of 95%."""
    share, baseline = shares(each.predictions)[0], each.longer_baseline()
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
        verdict = f"The model beats the longer reply by {points:.1f} points, beyond chance at 95%."
    elif share.high < longer:
        verdict = f"Always taking the longer reply is better by {-points:.1f} points."
    elif share.low <= 0.5 <= share.high:
        verdict = "On these pairs the model cannot be told from a coin."
    else:
        verdict = (
            f"The model is {abs(points):.1f} points {'above' if points >= 0 else 'below'} the "
            "longer reply; so few pairs cannot tell the two apart."
        )
    return figures, verdict


def _of_ratings(each: Heldout) -> tuple[list[tuple[str, str]], str]:
    """Compare the mean Pearson correlation of rewards and labels with that of length alone."""
    predictions = each.predictions
    found = {
        name: _correlation(predictions.rewards[:, column], predictions.labels[:, column])
        for column, name in enumerate(predictions.attributes)
    }
    known = {name: value for name, value in found.items() if not np.isnan(value)}
    if not known:
        return [(str(len(predictions.rows)), "rated replies")], "No attribute has labels that vary."
    mean = float(np.mean(list(known.values())))
    length, unit = _length_alone(each)
    how_many = f"{len(predictions.rows)} rated replies"
    over = f", mean of {len(known)} attributes" if len(known) > 1 else ""
    figures = [(f"{mean:.3f}", f"Pearson's r of reward and label on {how_many}{over}")]
    said = []
    if not np.isnan(length):
        what = f"|r| of length and label: the length of the reply alone, in {unit}"
        figures.append((f"{length:.3f}", what))
        said.append(f"The model is {'above' if mean > length else 'not above'} length alone.")
    if len(known) > 1:
        best, worst = max(known, key=lambda n: known[n]), min(known, key=lambda n: known[n])
        said.append(
            f"It follows the labels of {best} most closely (r {known[best]:.3f}) and those of "
            f"{worst} least (r {known[worst]:.3f})."
        )
    return figures, " ".join(said)


def _length_alone(each: Heldout) -> tuple[float, str]:
    """Return the mean |r| of labels and length, and the unit of length: tokens where recorded."""
    recorded = each.metric("length_only_pearson_mean")
    if recorded is not None:
        return recorded, each.length_unit()
    lengths = each.predictions.lengths.astype(float).ravel()
    labels = each.predictions.labels.T
    return nanmean(abs(_correlation(lengths, own)) for own in labels), "characters"


def _correlation(values: np.ndarray, labels: np.ndarray) -> float:
    present = ~np.isnan(labels) & ~np.isnan(values)
    own = (torch.from_numpy(each[present]) for each in (values, labels))
    return correlation(*own)


def _on_one_line(mistake: Mistake) -> str:
    prompt = question_of(mistake.texts[0][1])
    asked = f"\u201c{_short(flatten_message(prompt[-1]))}\u201d: " if prompt else ""
    replies = [f"{side} \u201c{_short(reply_of(text))}\u201d" for side, text in mistake.texts]
    return f"{asked}{', '.join(replies)} ({mistake.about})"


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _MOST_OF_A_LINE else f"{line[: _MOST_OF_A_LINE - 1]}\u2026"
