"""A file of preference data in two parts, so that no prompt is in both."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from nemo_aligner.contract.messages import first_prompt
from nemo_aligner.contract.tokenizer import Tokenizer
from nemo_aligner.data.clean import list_malformed
from nemo_aligner.data.files import Line, read_lines
from nemo_aligner.data.formats import format_named
from nemo_aligner.data.formats.prompts import count_records
from nemo_aligner.data.readers import ReaderConfig, RecordFile, read_records
from nemo_aligner.data.records import Comparison, Rating, Record, prompt_key, write_lines
from nemo_aligner.data.report import longer_chosen, measure_replies, unit_of_lengths
from nemo_aligner.utils.errors import ConfigError, DataError

_MALFORMED_SHOWN = 3
# Tolerated difference of the held-out part from what was asked for, as a share of it.
_TOLERANCE = 0.1
_WORDS_AT_ONCE = 3


@dataclass(frozen=True)
class Split:
    """Rules of a split: hold out ``heldout`` of its records, drawn by ``seed``.

    Attributes:
        by: records that share it stay in one part: the whole ``prompt``, or the ``first_prompt``,
            which is the first user turn of a conversation.
        similar: with a number, prompts whose sets of three consecutive words have at least this
            Jaccard similarity stay in one part, too.
        reading: rules by which the file is read.
        tokenizer: counts the tokens of replies, as training does, for the length baseline; without
            one that is of characters.
    """

    heldout: float = 0.2
    seed: int = 1
    by: str = "prompt"
    similar: float | None = None
    reading: ReaderConfig = field(default_factory=ReaderConfig)
    tokenizer: Tokenizer | None = None


def split_file(source: Path, folder: Path, how: Split) -> str:
    """Write ``train.jsonl`` and ``heldout.jsonl``; return a report of both for people.

    Malformed records are in neither, where they are not an error.

    Raises:
        ConfigError: an attribute has no name, a part would overwrite ``source``, or ``similar``
            needs a package that is not installed.
        DataError: the file cannot be read, or has too few prompts to hold some out.
    """
    check_names(how.reading.attributes)
    file = read_records(source, how.reading)
    keys = prompt_keys(file.records, how.by)
    if how.similar is not None:
        keys = _merge_keys(keys, _similar_keys(keys, how.similar))
    held = _held_keys(keys, how.heldout, how.seed)
    if not held or len(held) == len(set(keys)):
        raise DataError(_too_few(source, keys, how))
    counts = ", ".join(f"{count} {name}" for name, count in count_records(file.counts).items())
    lines = [f"{source}: {file.format}, {counts}"]
    if file.malformed:
        lines += ["left out as malformed:", *list_malformed(file.malformed, _MALFORMED_SHOWN)]
    sides: dict[str, list[Record]] = {"train": [], "heldout": []}
    for record, key in zip(file.records, keys, strict=True):
        sides["heldout" if key in held else "train"].append(record)
    paths = {name: folder / f"{name}.jsonl" for name in sides}
    _check_apart(source, paths.values())
    file_lines = lines_by_origin(file)
    for name, records in sides.items():
        written = write_lines(paths[name], lines_of_records(records, file_lines))
        prompts = len(held) if name == "heldout" else len(set(keys)) - len(held)
        lines.append(f"{name}: {len(records)} records, {prompts} prompts -> {written}")
    lines += _unlike_asked(keys, len(sides["heldout"]), how.heldout)
    lines += _render_length_baseline(sides["train"], sides["heldout"], how)
    return "\n".join(lines)


def _too_few(source: Path, keys: Sequence[str], how: Split) -> str:
    prompts = Counter(keys)
    advice = "; --by prompt tells them apart by their whole prompt" if how.by != "prompt" else ""
    if len(prompts) == 1:
        return (
            f"{source}: all {len(keys)} records have the same prompt, and a prompt must not be in "
            f"both parts; wanted at least 2 prompts{advice}"
        )
    return (
        f"{source}: cannot hold out {how.heldout:.0%} of its {len(keys)} records without a prompt "
        f"in both parts: it has {len(prompts)} prompts, and one of them has "
        f"{max(prompts.values())} records; wanted more prompts, or another share{advice}"
    )


def _unlike_asked(keys: Sequence[str], held: int, asked: float) -> list[str]:
    """A line that says so where much less or more is held out than was asked for."""
    wanted = asked * len(keys)
    if abs(held - wanted) <= max(1.0, _TOLERANCE * wanted):
        return []
    largest = max(Counter(keys).values())
    return [
        f"note: held out {held} of {len(keys)} records ({held / len(keys):.1%}) where {asked:.1%} "
        f"were asked for: a prompt stays in one part, and one has {largest} records"
    ]


def _check_apart(source: Path, parts: Iterable[Path]) -> None:
    for path in parts:
        if path.resolve() == Path(source).resolve():
            raise ConfigError(
                f"output: got {path.parent}, where {path.name} is the file to split; wanted "
                "another folder"
            )


def check_names(attributes: Sequence[str]) -> None:
    """Refuse what cannot be the keys of labels.

    Raises:
        ConfigError: one of them is empty.
    """
    if not all(attributes):
        raise ConfigError(f"attributes: got {list(attributes)}, wanted names that are not empty")


def lines_by_origin(file: RecordFile) -> dict[int, list[str]]:
    """Lines of each record as written, by the line on which it begins."""
    lines = [line for line in read_lines(file.path) if isinstance(line, Line)]
    count = format_named(file.format, None).lines_per_record
    return {
        first.number: [
            # An item of a JSON list may have line breaks.
            line.raw if "\n" not in line.raw else json.dumps(line.value, ensure_ascii=False)
            for line in lines[start : start + count]
        ]
        for start, first in enumerate(lines)
    }


def lines_of_records(records: Sequence[Record], file_lines: Mapping[int, list[str]]) -> list[str]:
    """The lines that ``records`` were read from, each once, also where several are of one line.

    ``file_lines`` are those of ``lines_by_origin``.
    """
    numbers = dict.fromkeys(record.origin.line for record in records)
    return [line for number in numbers for line in file_lines[number]]


def prompt_keys(records: Sequence[Record], by: str = "prompt") -> list[str]:
    """One key per record; records with the same key must stay on one side.

    Records of one line have one key, even if their prompts differ, as in a tree of messages.
    """
    if by == "first_prompt" and not isinstance(records[0].texts[0], str):
        keys = [" ".join(first_prompt(r.texts[0]).casefold().split()) for r in records]
    else:
        keys = [prompt_key(record) for record in records]
        if isinstance(records[0].texts[0], str):
            keys = _same_beginnings(keys)
    first_keys: dict[int, str] = {}
    same_line = [
        (first_keys.setdefault(record.origin.line, key), key)
        for record, key in zip(records, keys, strict=True)
    ]
    return _merge_keys(keys, same_line)


def _same_beginnings(begins: Sequence[str]) -> list[str]:
    """Merge prompts of raw texts: one that begins another counts as the same prompt."""
    group: dict[str, str] = {}
    last = None
    # In this order a text comes behind those that it begins with.
    for start in sorted(set(begins)):
        if last is None or not start.startswith(last):
            last = start
        group[start] = last
    return [group[start] for start in begins]


def _merge_keys(keys: Sequence[str], pairs: Iterable[tuple[str, str]]) -> list[str]:
    """Replace the keys of each of ``pairs``, and of chains of pairs, by one of them."""
    same_as = {key: key for key in keys}

    def find_root(key: str) -> str:
        while same_as[key] != key:
            key = same_as[key]
        return key

    for first, second in pairs:
        same_as[find_root(first)] = find_root(second)
    return [find_root(key) for key in keys]


def _similar_keys(keys: Sequence[str], similar: float) -> Iterator[tuple[str, str]]:
    """Yield the pairs of keys that are near duplicates.

    MinHash with locality-sensitive hashing (Broder, 1997) proposes pairs, and their exact Jaccard
    similarity decides.
    """
    try:
        from datasketch import MinHash, MinHashLSH
    except ImportError as error:
        raise ConfigError(
            "similar: finding near duplicates needs the package datasketch; install it, or the "
            "extra `dedup`"
        ) from error
    different = sorted(set(keys))
    shingles = {key: _shingles(key) for key in different}
    # It proposes pairs below the threshold, too, so that few above it are missed.
    index = MinHashLSH(threshold=0.8 * similar, num_perm=128, weights=(0.2, 0.8))
    sketches = MinHash.bulk([[word.encode() for word in shingles[key]] for key in different])
    for key, sketch in zip(different, sketches, strict=True):
        for other in sorted(index.query(sketch)):
            common = len(shingles[key] & shingles[other])
            if common >= similar * len(shingles[key] | shingles[other]):
                yield key, other
        index.insert(key, sketch)


def _shingles(key: str) -> set[str]:
    words = re.findall(r"\w+", key) or [key]
    count = max(1, len(words) - _WORDS_AT_ONCE + 1)
    return {" ".join(words[start : start + _WORDS_AT_ONCE]) for start in range(count)}


def _held_keys(keys: Sequence[str], heldout: float, seed: int) -> set[str]:
    """Prompts drawn until they own ``heldout`` of the records.

    A prompt whose records would overshoot that by more than the tolerance is left for training.
    """
    sizes = Counter(keys)
    # Sorted, so that what is drawn does not depend on the order of the file.
    order = sorted(sizes)
    random.Random(seed).shuffle(order)
    wanted = heldout * len(keys)
    held: set[str] = set()
    owned = 0
    for key in order:
        if owned >= wanted:
            break
        if owned + sizes[key] <= wanted + max(1.0, _TOLERANCE * wanted):
            held.add(key)
            owned += sizes[key]
    return held


# The length baseline: what the length of a reply alone would score.


def _render_length_baseline(
    train: Sequence[Record], heldout: Sequence[Record], how: Split
) -> list[str]:
    """Lines: how often the longer reply of ``heldout`` is right, or Pearson r of its labels."""
    unit = unit_of_lengths(how.tokenizer)
    lengths = measure_replies([text for each in heldout for text in each.texts], how.tokenizer)
    if isinstance(heldout[0], Comparison):
        wins = longer_chosen(heldout, lengths)
        return [f"always taking the longer reply (in {unit}) is right in {wins:.1%} of heldout"]
    train_lengths = measure_replies([text for each in train for text in each.texts], how.tokenizer)
    lines, values = [], []
    for index, name in enumerate(how.reading.attributes):
        # A line fitted to the training lengths: of its slope only the sign matters to r.
        sign = np.sign(_length_correlation(train, train_lengths, index))
        values.append(sign * _length_correlation(heldout, lengths, index))
        lines.append(
            f"{name}: Pearson r {values[-1]:.3f} in heldout for a line fitted to reply lengths "
            f"(in {unit})"
        )
    if values:
        lines.append(f"mean over attributes: {np.mean(values):.3f}")
    return lines


def _length_correlation(records: Sequence[Record], lengths: Sequence[int], index: int) -> float:
    """Pearson r of ``lengths`` of replies with one label; 0 where either does not vary."""
    points = [
        (length, record.labels[index])
        for record, length in zip(records, lengths, strict=True)
        if isinstance(record, Rating) and record.labels and record.labels[index] is not None
    ]
    known = np.array(points, dtype=np.float64).reshape(-1, 2)
    if len(known) < 2 or not known.std(axis=0).all():
        return 0.0
    return float(np.asarray(np.corrcoef(known.T))[0, 1])
