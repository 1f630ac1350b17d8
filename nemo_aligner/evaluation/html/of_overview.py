"""The first screen of a report: how good the model is, against what, and where it is wrong."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from nemo_aligner.console import show_number
from nemo_aligner.evaluation.html.judged import JudgedPairs, JudgedRatings, Mistake
from nemo_aligner.evaluation.html.of_training import main_curve
from nemo_aligner.evaluation.html.reported import Reported
from nemo_aligner.evaluation.html.sections import Headline, Heldout, PageSection
from nemo_aligner.metrics.statistics import correlation
from nemo_aligner.text.messages import prompt_of, reply_of, said

_WORST = 5
_MOST_OF_A_TEXT = 90


def overview(reported: Sequence[Reported], sets: Sequence[Heldout]) -> PageSection:
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
    worst = [_on_one_line(mistake) for mistake in each.judged.mistakes(_WORST)]
    if isinstance(each.judged, JudgedPairs):
        return Headline(name, *_of_pairs(each, each.judged), worst)
    return Headline(name, *_of_ratings(each.judged), worst)


def _of_pairs(each: Heldout, judged: JudgedPairs) -> tuple[list[tuple[str, str]], str]:
    """Compare accuracy with the length baseline; the interval is Wilson's (1927), of 95%."""
    share, baseline = judged.shares()[0], each.longer_baseline()
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


def _of_ratings(judged: JudgedRatings) -> tuple[list[tuple[str, str]], str]:
    """Correlate rewards and labels (Pearson), as a mean over attributes."""
    found = {
        name: _correlation(judged.rewards[:, column], judged.labels[:, column])
        for column, name in enumerate(judged.attributes)
    }
    known = {name: value for name, value in found.items() if not np.isnan(value)}
    if not known:
        return [(str(len(judged.records)), "rated replies")], "No attribute has labels that vary."
    mean = float(np.mean(list(known.values())))
    figures = [
        (show_number(mean), f"Pearson's r of reward and label, mean of {len(known)} attributes"),
        (str(len(judged.records)), "rated replies"),
    ]
    best, worst = max(known, key=lambda name: known[name]), min(known, key=lambda name: known[name])
    verdict = f"Best known is {best} (r {known[best]:.3f})"
    if worst != best:
        verdict += f", least {worst} (r {known[worst]:.3f})"
    return figures, f"{verdict}."


def _correlation(rewards: np.ndarray, labels: np.ndarray) -> float:
    present = ~np.isnan(labels) & ~np.isnan(rewards)
    own = (torch.from_numpy(each[present]) for each in (rewards, labels))
    return correlation(*own)


def _on_one_line(mistake: Mistake) -> str:
    prompt = prompt_of(mistake.texts[0][1])
    asked = f"\u201c{_short(said(prompt[-1]))}\u201d: " if prompt else ""
    replies = [f"{side} \u201c{_short(reply_of(text))}\u201d" for side, text in mistake.texts]
    return f"{asked}{', '.join(replies)} ({mistake.about})"


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _MOST_OF_A_TEXT else f"{line[: _MOST_OF_A_TEXT - 1]}\u2026"
