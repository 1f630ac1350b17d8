"""Comparison of two models on the same pairs: difference, significance, and differing verdicts.

It reads two files of ``nemo-aligner evaluate output_rewards=...``, of pairs or of a benchmark. Both
models see the same pairs, so the tests are paired: a bootstrap over the pairs' differences, and
McNemar's test on the verdicts that changed. Both are much sharper than comparing two intervals.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nemo_aligner.contract.messages import Text, as_json, flatten_message, prompt_of, reply_of
from nemo_aligner.data.records import PAIR_COLUMNS, write_lines
from nemo_aligner.evaluation.predictions import Prediction, Predictions, read_pairs
from nemo_aligner.metrics.ranking import bootstrap_interval, mcnemar, wilson_interval
from nemo_aligner.utils.errors import DataError


@dataclass(frozen=True)
class Share:
    """Share of pairs that a model has right, with its 95% interval."""

    accuracy: float
    low: float
    high: float


@dataclass(frozen=True)
class ComparedRow:
    """Two models on the pairs of one source, or on all.

    Attributes:
        difference: the second's accuracy minus the first's, and its 95% interval (bootstrap).
        lost, gained: pairs with less credit from the second model than from the first, and with
            more.
        p_value: McNemar's.
    """

    source: str
    pairs: int
    first: Share
    second: Share
    difference: float
    low: float
    high: float
    lost: int
    gained: int
    p_value: float


@dataclass(frozen=True)
class Flip:
    """A pair on which the models disagree."""

    record: str
    first: Prediction
    second: Prediction


@dataclass(frozen=True)
class PairedComparison:
    """Rows of a comparison, ``all`` first, and flips, the most confident first.

    ``left_out`` counts pairs that are only in the first file, and only in the second.
    """

    rows: list[ComparedRow]
    flips: list[Flip]
    left_out: tuple[int, int]


def compare_files(first: str | Path, second: str | Path) -> PairedComparison:
    """Compare two models on the pairs that both files have.

    Raises:
        DataError: a file cannot be read, holds no verdicts on pairs, or they share no pair.
    """
    tables = [read_pairs(Path(path)) for path in (first, second)]
    matched = _match(*tables)
    if not matched:
        records = " and ".join(table.names[0] for table in tables)
        raise DataError(
            f"{first} and {second}: they have no pair in common, by what its replies say (the "
            f"first ones are {records}). Evaluate both models on the same file."
        )
    left, right = (
        Predictions([table.rows[index] for index in indices])
        for table, indices in zip(tables, zip(*matched, strict=True), strict=True)
    )
    both = np.stack([left.right, right.right], axis=1)
    names = tables[0].names
    return PairedComparison(
        rows=[_row(source, both[indices]) for source, indices in left.by_source()],
        flips=_flips([names[index] for index, _ in matched], left, right),
        left_out=(len(tables[0].rows) - len(matched), len(tables[1].rows) - len(matched)),
    )


def _match(first: Predictions, second: Predictions) -> list[tuple[int, int]]:
    """Indices of the rows that are one pair: of the same texts, wherever their file is.

    A model that was evaluated with other words around its prompts, or on raw texts, has other texts
    of the same pair. Such rows are matched by file name and line, if their replies are the same.
    """
    by_content: dict[str, deque[int]] = {}
    for index, row in enumerate(second.rows):
        by_content.setdefault(_content(row), deque()).append(index)
    partners: dict[int, int] = {}
    for index, row in enumerate(first.rows):
        if same := by_content.get(_content(row)):
            partners[index] = same.popleft()
    # Without its folder: records from Python lie in a new one each time.
    remaining = {index for indices in by_content.values() for index in indices}
    by_place = {Path(second.names[index]).name: index for index in sorted(remaining)}
    for index, row in enumerate(first.rows):
        other = by_place.get(Path(first.names[index]).name) if index not in partners else None
        if other is not None and _is_reworded(row, second.rows[other]):
            partners[index] = other
            del by_place[Path(first.names[index]).name]  # each row has one partner
    return sorted(partners.items())


def _content(row: Prediction) -> str:
    return json.dumps(row.sides, default=as_json, sort_keys=True)


def _is_reworded(first: Prediction, second: Prediction) -> bool:
    """True if the texts differ in no more than what stands around the last question."""
    texts, others = first.item.texts, second.item.texts
    has_same_sides = first.item.num_right == second.item.num_right and len(texts) == len(others)
    return has_same_sides and all(map(_have_same_words, texts, others))


def _have_same_words(first: Text, second: Text) -> bool:
    if isinstance(first, str) and isinstance(second, str):
        return False  # nothing says which part of it is the reply
    for raw, conversation in ((first, second), (second, first)):
        if isinstance(raw, str):
            has_question = _last_question(conversation) in raw
            return has_question and raw.endswith(reply_of(conversation))
    questions = sorted(map(_last_question, (first, second)), key=len)
    return reply_of(first) == reply_of(second) and questions[0] in questions[1]


def _last_question(text: Text) -> str:
    users = [flatten_message(turn) for turn in prompt_of(text) if turn["role"] == "user"]
    return users[-1] if users else ""


def _row(source: str, both: np.ndarray) -> ComparedRow:
    """Compare ``[N, 2]`` verdicts of the first model and the second."""
    shares = [
        Share(float(right.mean()), *wilson_interval(float(right.sum()), right.size))
        for right in both.T
    ]
    differences = both[:, 1] - both[:, 0]
    lost, gained = int((differences < 0).sum()), int((differences > 0).sum())
    low, high = bootstrap_interval(differences)
    return ComparedRow(
        source=source,
        pairs=len(both),
        first=shares[0],
        second=shares[1],
        difference=float(differences.mean()),
        low=low,
        high=high,
        lost=lost,
        gained=gained,
        p_value=mcnemar(lost, gained),
    )


def _flips(names: Sequence[str], first: Predictions, second: Predictions) -> list[Flip]:
    flips = [
        Flip(name, one, other)
        for name, one, other in zip(names, first.rows, second.rows, strict=True)
        if one.right != other.right
    ]
    # As sure as the less sure of the two models.
    return sorted(flips, key=lambda flip: -min(abs(flip.first.margin), abs(flip.second.margin)))


def render_compared(compared: PairedComparison, names: Sequence[str], show: int) -> str:
    """Render the table, and the first ``show`` flips with shortened texts."""
    lines = [f"{letter}: {name}" for letter, name in zip("AB", names, strict=True)]
    for letter, missing in zip("AB", compared.left_out, strict=True):
        if missing:
            lines.append(f"{missing} pairs are in {letter} alone: left out")
    width = max(len(row.source) for row in compared.rows)
    head = f"{'':<{width}}  pairs  A               B               B - A"
    lines += ["", f"{head:<{width + 65}}A only  B only  p"]
    lines += [_table_line(row, width) for row in compared.rows]
    flips = compared.flips[:show]
    if flips:
        lines += ["", f"{len(compared.flips)} verdicts differ; the first {len(flips)}:"]
    for flip in flips:
        source = flip.first.item.source
        margins = f"margin of A {flip.first.margin:+.3f}, of B {flip.second.margin:+.3f}"
        lines += ["", f"{flip.record}{f' ({source})' if source else ''}: {margins}"]
        sides = zip(PAIR_COLUMNS, flip.first.sides, strict=True)
        lines += [f"  {name}: {_ending(texts)}" for name, texts in sides]
    return "\n".join(lines)


def _table_line(row: ComparedRow, width: int) -> str:
    first, second = (
        f"{share.accuracy:.3f} {share.low:.2f}-{share.high:.2f}"
        for share in (row.first, row.second)
    )
    difference = f"{row.difference:+.3f} ({row.low:+.3f} to {row.high:+.3f})"
    return (
        f"{row.source:<{width}}{row.pairs:>7}  {first:<16}{second:<16}{difference:<26}"
        f"{row.lost:>6}{row.gained:>8}  {row.p_value:.3g}"
    )


def _ending(texts: Sequence[Text], most: int = 200) -> str:
    line = " ".join(reply_of(texts[0]).split())
    if len(texts) > 1:
        line = f"(one of {len(texts)}) {line}"
    return line if len(line) <= most else f"{line[: most - 3]}..."


def write_rows(path: Path, compared: PairedComparison) -> None:
    """Write the rows and the number of flips as one JSON object."""
    content = {
        "rows": [asdict(row) for row in compared.rows],
        "flips": len(compared.flips),
        "left_out": list(compared.left_out),
    }
    write_lines(path, [json.dumps(content, indent=2)])


def write_flips(path: Path, compared: PairedComparison) -> None:
    """Write a line for every flip: both margins, and the texts in full."""
    lines = (
        json.dumps(_flip_row(flip), default=as_json, ensure_ascii=False) for flip in compared.flips
    )
    write_lines(path, lines)


def _flip_row(flip: Flip) -> dict[str, Any]:
    texts = (list(side) if len(side) > 1 else side[0] for side in flip.first.sides)
    return {
        "record": flip.record,
        "source": flip.first.item.source,
        "first_margin": flip.first.margin,
        "second_margin": flip.second.margin,
        **dict(zip(PAIR_COLUMNS, texts, strict=True)),
    }
