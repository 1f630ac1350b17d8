"""What the length of a reply alone would score."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np

from nemo_aligner.data.records import Comparison, Rating, Record
from nemo_aligner.text.messages import reply_of


def render_length_baseline(
    train: Sequence[Record], heldout: Sequence[Record], attributes: Sequence[str]
) -> list[str]:
    """Lines: how often the longer reply of ``heldout`` is right, or Pearson r of its labels."""
    if isinstance(heldout[0], Comparison):
        lengths = [length for record in heldout for length in _lengths(record)]
        wins = longer_chosen(heldout, lengths)
        return [f"always taking the longer reply (in characters) is right in {wins:.1%} of heldout"]
    lines, values = [], []
    for index, name in enumerate(attributes):
        # A line fitted to the training lengths: of its slope only the sign matters to r.
        sign = np.sign(_length_correlation(train, index))
        values.append(sign * _length_correlation(heldout, index))
        lines.append(
            f"{name}: Pearson r {values[-1]:.3f} in heldout for a line fitted to reply lengths"
        )
    if values:
        lines.append(f"mean over attributes: {np.mean(values):.3f}")
    return lines


def longer_chosen(records: Sequence[Record], lengths: Sequence[int]) -> float | None:
    """How often the better one of two completions is the longer; None where there are none.

    ``lengths`` are of the replies of all texts of ``records``.
    """
    pairs = better_and_worse(records, lengths)
    return longer_wins(pairs) if pairs else None


def better_and_worse(records: Sequence[Record], lengths: Sequence[int]) -> list[tuple[int, int]]:
    """The lengths of the better and of the worse one of any two completions; ties are left out.

    ``lengths`` are as in ``longer_chosen``.
    """
    rest = iter(lengths)
    pairs = []
    for record in records:
        ranked = sorted(zip(record.ranks, rest, strict=False))
        pairs += [
            (better, worse)
            for (rank, better), (other, worse) in combinations(ranked, 2)
            if rank < other
        ]
    return pairs


def longer_wins(lengths: Sequence[tuple[int, ...]]) -> float:
    """How often the first of two is the longer one; a tie counts one half."""
    return float(np.mean([0.5 if a == b else float(a > b) for a, b in lengths]))


def _lengths(record: Record) -> tuple[int, ...]:
    return tuple(len(reply_of(text)) for text in record.texts)


def _length_correlation(records: Sequence[Record], index: int) -> float:
    """Pearson r of the reply's characters with one label; 0 where either does not vary."""
    points = [
        (_lengths(record)[0], record.labels[index])
        for record in records
        if isinstance(record, Rating) and record.labels[index] is not None
    ]
    known = np.array(points, dtype=np.float64).reshape(-1, 2)
    if len(known) < 2 or not known.std(axis=0).all():
        return 0.0
    return float(np.corrcoef(known.T)[0, 1])
