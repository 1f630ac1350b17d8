"""Two models on the same pairs: how far apart, how surely, and where their verdicts part.

What is compared are the files that ``nemo-aligner evaluate output_rewards=...`` writes, of pairs or
of a benchmark.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from nemo_aligner.contract.messages import Text, as_json, reply_of
from nemo_aligner.data.files import BadLine, read_lines
from nemo_aligner.data.records import PAIR_COLUMNS, row_text, write_lines
from nemo_aligner.metrics.ranking import bootstrap_interval, mcnemar, wilson_interval
from nemo_aligner.utils.errors import DataError

ALL = "all"
_BENCHMARK_SIDES = ("right", "wrong")


@dataclass(frozen=True)
class PairVerdict:
    """Verdict of a model on a pair, or on an item of a benchmark.

    Attributes:
        record: file and line of it, and a number where that has several pairs.
        source: where the record says it is from; "" if it does not.
        right: of a pair 1 where the chosen reply has the higher reward, one half for a tie, else 0;
            of a benchmark's item as the benchmark has it.
        margin: the lowest reward of a right reply minus the highest of a wrong one.
        texts: of the right reply and the wrong one; lists where there are several.
        rewards: the two that the margin is of, and ``judged`` their texts.
    """

    record: str
    source: str
    right: float
    margin: float
    texts: tuple[Any, Any]
    rewards: tuple[float, float]
    judged: tuple[Text, Text]


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
        lost, gained: pairs that the second has less right than the first, and more.
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
    source: str
    first_margin: float
    second_margin: float
    chosen: Any
    rejected: Any


@dataclass(frozen=True)
class PairedComparison:
    """Rows of a comparison, ``all`` first, and flipped pairs, the surest first.

    ``left_out`` are pairs that only the first file has, and only the second.
    """

    rows: list[ComparedRow]
    flips: list[Flip]
    left_out: tuple[int, int]


def compare_files(first: str | Path, second: str | Path) -> PairedComparison:
    """Compare what two models made of the same pairs.

    Raises:
        DataError: a file cannot be read, holds no verdicts on pairs, or they share no pair.
    """
    paths = (Path(first), Path(second))
    verdicts = [{each.record: each for each in read_verdicts(path)} for path in paths]
    common = [record for record in verdicts[0] if record in verdicts[1]]
    if not common:
        raise DataError(
            f"{first} and {second}: they have no pair in common (the first has "
            f"{next(iter(verdicts[0]))}, the second {next(iter(verdicts[1]))})"
        )
    left, right = ([of[record] for record in common] for of in verdicts)
    return PairedComparison(
        rows=_rows(left, right),
        flips=_flips(left, right),
        left_out=(len(verdicts[0]) - len(common), len(verdicts[1]) - len(common)),
    )


def read_verdicts(path: Path) -> Iterator[PairVerdict]:
    """Read the verdict on every pair or benchmark item from a file of ``output_rewards``.

    Raises:
        DataError: it cannot be read, or holds something else.
    """
    lines = read_lines(path)
    if not lines:
        raise DataError(f"{path}: it is empty, wanted what evaluate's output_rewards writes")
    seen: dict[str, Iterator[int]] = {}
    for line in lines:
        if isinstance(line, BadLine):
            raise DataError(f"{path}:{line.number}: {line.reason}")
        try:
            yield _verdict(line.value, seen)
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"{path}:{line.number}: got {line.raw[:60]!r}, wanted a pair of evaluate's "
                f"output_rewards ({type(error).__name__}: {error})"
            ) from error


def verdicts_of(rows: Iterable[Mapping[str, Any]]) -> list[PairVerdict]:
    """``read_verdicts`` of lines that are in memory."""
    seen: dict[str, Iterator[int]] = {}
    return [_verdict(row, seen) for row in rows]


def _verdict(value: Mapping[str, Any], seen: dict[str, Iterator[int]]) -> PairVerdict:
    names = _BENCHMARK_SIDES if "right" in value else PAIR_COLUMNS
    good, bad = (np.array(value["rewards"][name], dtype=float) for name in names)
    lowest, highest = int(good.argmin()), int(bad.argmax())
    rewards = float(good.flat[lowest]), float(bad.flat[highest])
    margin = rewards[0] - rewards[1]
    if not np.isfinite(margin):
        raise ValueError("a reward is missing")
    sides = [row_text(value["texts"][name]) for name in names]
    # Of three or more completions a record has several pairs.
    occurrence = next(seen.setdefault(str(value["record"]), count(1)))
    return PairVerdict(
        record=f"{value['record']}, pair {occurrence}" if occurrence > 1 else str(value["record"]),
        source=value.get("source", ""),
        right=float(value["right"]) if "right" in value else (np.sign(margin) + 1) / 2,
        margin=margin,
        texts=(_lone(sides[0]), _lone(sides[1])),
        rewards=rewards,
        judged=(_at(sides[0], lowest), _at(sides[1], highest)),
    )


def _is_list_of_texts(texts: Any) -> bool:
    return isinstance(texts, list) and not isinstance(texts[0], dict)


def _at(texts: Any, index: int) -> Any:
    return texts[index] if _is_list_of_texts(texts) else texts


def _lone(texts: Any) -> Any:
    """Unwrap a list of one text; return anything else unchanged."""
    return texts[0] if _is_list_of_texts(texts) and len(texts) == 1 else texts


def _rows(first: Sequence[PairVerdict], second: Sequence[PairVerdict]) -> list[ComparedRow]:
    both = np.array([[one.right, other.right] for one, other in zip(first, second, strict=True)])
    sources = np.array([verdict.source for verdict in first])
    rows = [_row(ALL, both)]
    names = sorted(set(sources.tolist()))
    if len(names) > 1:
        rows += [_row(name or "none", both[sources == name]) for name in names]
    return rows


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


def _flips(first: Sequence[PairVerdict], second: Sequence[PairVerdict]) -> list[Flip]:
    flips = [
        Flip(one.record, one.source, one.margin, other.margin, *one.texts)
        for one, other in zip(first, second, strict=True)
        if one.right != other.right
    ]
    return sorted(flips, key=lambda flip: -min(abs(flip.first_margin), abs(flip.second_margin)))


def render_compared(compared: PairedComparison, names: Sequence[str], show: int) -> str:
    """The table, and the first ``show`` flips with their texts cut to a few lines."""
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
        where = f"{flip.record}{f' ({flip.source})' if flip.source else ''}"
        margins = f"margin of A {flip.first_margin:+.3f}, of B {flip.second_margin:+.3f}"
        lines += ["", f"{where}: {margins}"]
        lines += [f"  {side}: {_ending(getattr(flip, side))}" for side in PAIR_COLUMNS]
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


def _ending(text: Any, most: int = 200) -> str:
    line = " ".join(reply_of(_at(text, 0)).split())
    if _is_list_of_texts(text):
        line = f"(one of {len(text)}) {line}"
    return line if len(line) <= most else f"{line[: most - 3]}..."


def write_rows(path: Path, compared: PairedComparison) -> None:
    """Rows and how many flips there are as one JSON object."""
    content = {
        "rows": [asdict(row) for row in compared.rows],
        "flips": len(compared.flips),
        "left_out": list(compared.left_out),
    }
    write_lines(path, [json.dumps(content, indent=2)])


def write_flips(path: Path, compared: PairedComparison) -> None:
    """A line for every pair that flipped: both margins, and its texts whole."""
    lines = (json.dumps(vars(flip), default=as_json, ensure_ascii=False) for flip in compared.flips)
    write_lines(path, lines)
