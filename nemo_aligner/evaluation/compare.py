"""Comparison of two models on the same pairs: difference in accuracy, significance, and flips.

This is ``nemo-aligner compare``. It reads two files that ``nemo-aligner evaluate
output_rewards=...`` wrote for pairs or for a benchmark. Both models see the same pairs, so the
statistics are paired: a bootstrap over the differences by pair, and McNemar's test on the differing
verdicts. Both detect much smaller differences than a comparison of two separate intervals.
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
from nemo_aligner.data.records import PAIR_COLUMNS
from nemo_aligner.evaluation.predictions import Prediction, Predictions, read_pairs
from nemo_aligner.metrics.ranking import mcnemar, paired_interval, wilson_interval
from nemo_aligner.utils.errors import DataError
from nemo_aligner.utils.writing import write_lines


@dataclass(frozen=True)
class Share:
    """Accuracy of a model on some pairs.

    Attributes:
        accuracy: mean over the pairs of 1 if the model is right, 0.5 for a tie, and 0 if it is
            wrong.
        low, high: its 95% Wilson interval.
    """

    accuracy: float
    low: float
    high: float


@dataclass(frozen=True)
class ComparedRow:
    """Two models compared on the pairs of one source, or on all pairs.

    Attributes:
        source: name of the source, or ``all``.
        pairs: number of pairs.
        first, second: accuracy of the two models.
        difference: accuracy of the second model minus that of the first.
        low, high: 95% interval of the difference (Bonett and Price).
        lost: number of pairs that the first model judges better than the second: it is right where
            the second is wrong, or one of the two has a tie.
        gained: number of pairs that the second model judges better than the first.
        p_value: exact two-sided p-value of McNemar's test.
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
    """A pair on which the two models disagree.

    Attributes:
        record: file and line of the pair, as the first file names them.
        first, second: predictions of the two models.
    """

    record: str
    first: Prediction
    second: Prediction


@dataclass(frozen=True)
class PairedComparison:
    """Result of a comparison.

    Attributes:
        rows: one row for ``all``, then one for each source.
        flips: pairs on which the models disagree, the most confident disagreements first.
        left_out: number of pairs that only the first file has, and that only the second has.
    """

    rows: list[ComparedRow]
    flips: list[Flip]
    left_out: tuple[int, int]


def compare_files(first: str | Path, second: str | Path) -> PairedComparison:
    """Compare two models on the pairs that both files have.

    Raises:
        DataError: a file cannot be read or holds no verdicts on pairs, or the files share no pair.
    """
    tables = [read_pairs(Path(path)) for path in (first, second)]
    matched = _match_rows(*tables)
    if not matched:
        records = " and ".join(table.names[0] for table in tables)
        raise DataError(
            f"{first} and {second}: the files have no pair with the same replies (their first "
            f"pairs are {records}). Evaluate both models on the same data file."
        )
    first_matched, second_matched = (
        Predictions([table.rows[index] for index in indices])
        for table, indices in zip(tables, zip(*matched, strict=True), strict=True)
    )
    verdicts = np.stack([first_matched.right, second_matched.right], axis=1)
    names = tables[0].names
    return PairedComparison(
        rows=[
            _compare_verdicts(source, verdicts[rows]) for source, rows in first_matched.by_source()
        ],
        flips=_list_flips([names[index] for index, _ in matched], first_matched, second_matched),
        left_out=(len(tables[0].rows) - len(matched), len(tables[1].rows) - len(matched)),
    )


def _match_rows(first: Predictions, second: Predictions) -> list[tuple[int, int]]:
    """Match the rows of two tables that are about the same pair.

    Rows with the same samples match, even if they come from different files. But samples of the
    same pair differ if one model was evaluated on raw strings, or with a system prompt or
    instructions around the prompt. Such rows match if their file name, line and replies are the
    same.

    Returns:
        For each match, the index in ``first`` and the index in ``second``.
    """
    by_content: dict[str, deque[int]] = {}
    for index, row in enumerate(second.rows):
        by_content.setdefault(_content_key(row), deque()).append(index)
    partners: dict[int, int] = {}
    for index, row in enumerate(first.rows):
        if candidates := by_content.get(_content_key(row)):
            partners[index] = candidates.popleft()
    # Compare names without folders: the Python API writes records to a new folder each time.
    remaining = {index for indices in by_content.values() for index in indices}
    by_name = {Path(second.names[index]).name: index for index in sorted(remaining)}
    for index, row in enumerate(first.rows):
        candidate = by_name.get(Path(first.names[index]).name) if index not in partners else None
        if candidate is not None and _is_reworded(row, second.rows[candidate]):
            partners[index] = candidate
            # A row has only one partner, so remove it: it must not match a second time.
            del by_name[Path(first.names[index]).name]
    return sorted(partners.items())


def _content_key(row: Prediction) -> str:
    return json.dumps(row.sides, default=as_json, sort_keys=True)


def _is_reworded(first: Prediction, second: Prediction) -> bool:
    """True if two rows are about the same pair, with different text around its question.

    This happens if one model was evaluated with a system prompt or instructions around its prompts.
    Replies must be equal, and one question must contain the other.
    """
    first_samples, second_samples = first.item.texts, second.item.texts
    has_same_sides = first.item.num_right == second.item.num_right and len(first_samples) == len(
        second_samples
    )
    return has_same_sides and all(map(_have_same_words, first_samples, second_samples))


def _have_same_words(first: Text, second: Text) -> bool:
    if isinstance(first, str) and isinstance(second, str):
        return False  # nothing in a raw string marks where the reply begins
    for raw, conversation in ((first, second), (second, first)):
        if isinstance(raw, str):
            has_question = _find_last_question(conversation) in raw
            return has_question and raw.endswith(reply_of(conversation))
    questions = sorted(map(_find_last_question, (first, second)), key=len)
    return reply_of(first) == reply_of(second) and questions[0] in questions[1]


def _find_last_question(text: Text) -> str:
    users = [flatten_message(turn) for turn in prompt_of(text) if turn["role"] == "user"]
    return users[-1] if users else ""


def _compare_verdicts(source: str, verdicts: np.ndarray) -> ComparedRow:
    """Compare two models on the N pairs of ``source``.

    ``verdicts [N, 2]`` has a column for each model: 1 if it is right on a pair, 0.5 for a tie, 0 if
    it is wrong.
    """
    shares = [
        Share(float(right.mean()), *wilson_interval(float(right.sum()), right.size))
        for right in verdicts.T
    ]
    differences = verdicts[:, 1] - verdicts[:, 0]
    lost, gained = int((differences < 0).sum()), int((differences > 0).sum())
    low, high = paired_interval(differences)
    return ComparedRow(
        source=source,
        pairs=len(verdicts),
        first=shares[0],
        second=shares[1],
        difference=float(differences.mean()),
        low=low,
        high=high,
        lost=lost,
        gained=gained,
        p_value=mcnemar(lost, gained),
    )


def _list_flips(names: Sequence[str], first: Predictions, second: Predictions) -> list[Flip]:
    flips = [
        Flip(name, first_row, second_row)
        for name, first_row, second_row in zip(names, first.rows, second.rows, strict=True)
        if first_row.right != second_row.right
    ]
    # Sort by the smaller of the two |margins|: first come the pairs on which both models are sure.
    return sorted(flips, key=lambda flip: -min(abs(flip.first.margin), abs(flip.second.margin)))


def render_compared(compared: PairedComparison, names: Sequence[str], show: int) -> str:
    """Render the comparison as a table, and the first ``show`` flips with shortened replies.

    Args:
        names: what to call the two models, in the order of ``compare_files``.
    """
    lines = [f"{letter}: {name}" for letter, name in zip("AB", names, strict=True)]
    for letter, missing in zip("AB", compared.left_out, strict=True):
        if missing:
            lines.append(f"{missing} pairs are only in {letter}: left out")
    width = max(len(row.source) for row in compared.rows)
    head = f"{'':<{width}}  pairs  A               B               B - A"
    lines += ["", f"{head:<{width + 65}}A only  B only  p"]
    lines += [_render_row(row, width) for row in compared.rows]
    flips = compared.flips[:show]
    if flips:
        lines += ["", _head_flips(len(compared.flips), len(flips))]
    for flip in flips:
        source = flip.first.item.source
        margins = f"margin of A {flip.first.margin:+.3f}, of B {flip.second.margin:+.3f}"
        lines += ["", f"{flip.record}{f' ({source})' if source else ''}: {margins}"]
        sides = zip(PAIR_COLUMNS, flip.first.sides, strict=True)
        lines += [f"  {name}: {_shorten_reply(samples)}" for name, samples in sides]
    return "\n".join(lines)


def _head_flips(total: int, num_shown: int) -> str:
    heading = "1 verdict differs" if total == 1 else f"{total} verdicts differ"
    if total > num_shown:
        heading += f"; the first {num_shown}" if num_shown > 1 else "; the first one"
    return f"{heading}:"


def _render_row(row: ComparedRow, width: int) -> str:
    first, second = (
        f"{share.accuracy:.3f} {share.low:.2f}-{share.high:.2f}"
        for share in (row.first, row.second)
    )
    difference = f"{row.difference:+.3f} ({row.low:+.3f} to {row.high:+.3f})"
    return (
        f"{row.source:<{width}}{row.pairs:>7}  {first:<16}{second:<16}{difference:<26}"
        f"{row.lost:>6}{row.gained:>8}  {row.p_value:.3g}"
    )


def _shorten_reply(samples: Sequence[Text], limit: int = 200) -> str:
    line = " ".join(reply_of(samples[0]).split())
    if len(samples) > 1:
        line = f"(one of {len(samples)}) {line}"
    return line if len(line) <= limit else f"{line[: limit - 3]}..."


def write_rows(path: Path, compared: PairedComparison) -> str:
    """Write the compared rows, and the numbers of flips and unmatched pairs, as one JSON object.

    Returns:
        The path, and whether another file was replaced, for a message.
    """
    content = {
        "rows": [asdict(row) for row in compared.rows],
        "flips": len(compared.flips),
        "left_out": list(compared.left_out),
    }
    return write_lines(path, [json.dumps(content, indent=2)])


def write_flips(path: Path, compared: PairedComparison) -> str:
    """Write one JSON line for each flip: its record, both margins, and the complete samples.

    Returns:
        The path, and whether another file was replaced, for a message.
    """
    lines = (
        json.dumps(_flip_to_dict(flip), default=as_json, ensure_ascii=False)
        for flip in compared.flips
    )
    return write_lines(path, lines, "flips")


def _flip_to_dict(flip: Flip) -> dict[str, Any]:
    samples = (list(side) if len(side) > 1 else side[0] for side in flip.first.sides)
    return {
        "record": flip.record,
        "source": flip.first.item.source,
        "first_margin": flip.first.margin,
        "second_margin": flip.second.margin,
        **dict(zip(PAIR_COLUMNS, samples, strict=True)),
    }
