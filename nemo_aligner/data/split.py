"""Split a file of preference data into training and held-out data, so that no prompt is in both.

``nemo-aligner data split`` writes the two files. Its report has the length baseline: the accuracy
of always taking the longer reply.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from nemo_aligner.contract.messages import first_prompt
from nemo_aligner.contract.tokenizer import Tokenizer
from nemo_aligner.data.clean import list_malformed
from nemo_aligner.data.formats import format_named
from nemo_aligner.data.formats.prompts import count_records
from nemo_aligner.data.readers import ReaderConfig, RecordFile, read_records
from nemo_aligner.data.records import (
    Comparison,
    Rating,
    Record,
    as_json,
    is_prompt_guessed,
    prompt_key,
    write_parts,
)
from nemo_aligner.data.report import longer_chosen, measure_replies, unit_of_lengths
from nemo_aligner.utils.errors import ConfigError, DataError

_MALFORMED_SHOWN = 3
# The held-out file may differ from its requested size by this fraction of the size.
_TOLERANCE = 0.1
_SHINGLE_WORDS = 3


@dataclass(frozen=True)
class Split:
    """Settings of a split.

    Attributes:
        heldout: fraction of the records to hold out.
        seed: seed of the draw.
        by: ``prompt`` keeps records with the same whole prompt together, in one of the two files;
            ``first_prompt`` keeps conversations with the same first user turn together.
        similar: prompts whose sets of three consecutive words have at least this Jaccard
            similarity also stay together; None does not compare prompts.
        reading: rules by which the file is read.
        tokenizer: counts the tokens of replies for the length baseline; None counts characters.
    """

    heldout: float = 0.2
    seed: int = 1
    by: str = "prompt"
    similar: float | None = None
    reading: ReaderConfig = field(default_factory=ReaderConfig)
    tokenizer: Tokenizer | None = None


def split_file(source: Path, folder: Path, settings: Split) -> str:
    """Write ``train.jsonl`` and ``heldout.jsonl`` to ``folder``; return a report on both.

    Ties are kept, whatever ``settings.reading`` says. Malformed records are written to neither
    file; by default they are an error.

    Raises:
        ConfigError: an attribute has no name, a file would overwrite ``source`` or another file
            with other lines, or ``similar`` needs a package that is not installed.
        DataError: the file cannot be read, or has too few prompts to hold some out.
    """
    check_names(settings.reading.attributes)
    # Some objectives learn from ties; for the others training drops them itself.
    reading = replace(settings.reading, ties=True)
    file = read_records(source, reading, with_lines=True)
    keys = prompt_keys(file.records, settings.by)
    if settings.similar is not None:
        keys = _merge_keys(keys, _similar_keys(keys, settings.similar))
    heldout_keys = _draw_keys(keys, settings.heldout, settings.seed)
    if not heldout_keys or len(heldout_keys) == len(set(keys)):
        raise DataError(_describe_too_few(source, keys, settings))
    counts = ", ".join(f"{count} {name}" for name, count in count_records(file.counts).items())
    lines = [f"{source}: {file.format}, {counts}"]
    if file.malformed:
        lines += ["dropped as malformed:", *list_malformed(file.malformed, _MALFORMED_SHOWN)]
    sides: dict[str, list[Record]] = {"train": [], "heldout": []}
    for record, key in zip(file.records, keys, strict=True):
        sides["heldout" if key in heldout_keys else "train"].append(record)
    paths = {name: folder / f"{name}.jsonl" for name in sides}
    _check_apart(source, paths.values())
    file_lines = lines_by_origin(file)
    side_lines = {name: lines_of_records(sides[name], file_lines) for name in sides}
    write_parts(folder, side_lines)
    for name, records in sides.items():
        prompts = len({key for key in keys if (key in heldout_keys) == (name == "heldout")})
        lines.append(f"{name}: {len(records)} records, {prompts} prompts -> {paths[name]}")
    lines += _note_difference(keys, len(sides["heldout"]), settings.heldout)
    lines += _render_length_baseline(sides["train"], sides["heldout"], settings)
    return "\n".join(lines)


def _describe_too_few(source: Path, keys: Sequence[str], settings: Split) -> str:
    prompts = Counter(keys)
    advice = ". --by prompt compares whole prompts" if settings.by != "prompt" else ""
    if len(prompts) == 1:
        return (
            f"{source}: all {len(keys)} records have the same prompt, and a prompt must not be in "
            f"both parts. At least 2 prompts are needed{advice}"
        )
    return (
        f"{source}: cannot hold out {settings.heldout:.0%} of its {len(keys)} records without a "
        f"prompt in both parts: it has {len(prompts)} prompts, and one of them has "
        f"{max(prompts.values())} records. Add prompts, or hold out another fraction{advice}"
    )


def _note_difference(keys: Sequence[str], count: int, requested: float) -> list[str]:
    """Return a note if the number of held-out records differs much from the requested fraction.

    ``count`` is the number of held-out records, and ``keys`` has the prompt key of every record.
    """
    expected = requested * len(keys)
    if abs(count - expected) <= max(1.0, _TOLERANCE * expected):
        return []
    largest = max(Counter(keys).values())
    return [
        f"note: {count} of {len(keys)} records ({count / len(keys):.1%}) are held out, and not "
        f"{requested:.1%}: all records of a prompt stay in one part, and one has {largest}"
    ]


def _check_apart(source: Path, parts: Iterable[Path]) -> None:
    for path in parts:
        if path.resolve() == Path(source).resolve():
            raise ConfigError(
                f"output: {path.parent} is the folder of the file to split, {path.name}, which "
                "would be overwritten. Name another folder"
            )


def check_names(attributes: Sequence[str]) -> None:
    """Check that no name of a label column is empty.

    Raises:
        ConfigError: a name is empty.
    """
    if not all(attributes):
        raise ConfigError(f"attributes: got {list(attributes)}, wanted names that are not empty")


def lines_by_origin(file: RecordFile) -> dict[int, list[str]]:
    """Map the number of each record's first line to all its lines, as they are in the file.

    ``file`` was read with its lines.
    """
    lines = file.lines
    count = format_named(file.format, None).lines_per_record
    return {
        first.number: [
            # Write an item of a JSON list that spans several lines on one line.
            line.raw if "\n" not in line.raw else as_json(line.value)
            for line in lines[start : start + count]
        ]
        for start, first in enumerate(lines)
    }


def lines_of_records(records: Sequence[Record], file_lines: Mapping[int, list[str]]) -> list[str]:
    """List the lines that ``records`` were read from; a line with several records occurs once.

    ``file_lines`` is the result of ``lines_by_origin``.
    """
    numbers = dict.fromkeys(record.origin.line for record in records)
    return [line for number in numbers for line in file_lines[number]]


def prompt_keys(records: Sequence[Record], by: str = "prompt") -> list[str]:
    """Return a key for each record; records with the same key must go to the same file.

    Records of the same line have the same key, even if their prompts differ, as in a message tree.
    """
    if by == "first_prompt" and not isinstance(records[0].texts[0], str):
        keys = [" ".join(first_prompt(r.texts[0]).casefold().split()) for r in records]
    else:
        keys = [prompt_key(record) for record in records]
        guessed = [number for number, record in enumerate(records) if is_prompt_guessed(record)]
        merged = _merge_prefixes([keys[number] for number in guessed])
        for number, key in zip(guessed, merged, strict=True):
            keys[number] = key
    first_keys: dict[int, str] = {}
    same_line = [
        (first_keys.setdefault(record.origin.line, key), key)
        for record, key in zip(records, keys, strict=True)
    ]
    return _merge_keys(keys, same_line)


def _merge_prefixes(prompts: Sequence[str]) -> list[str]:
    """Return a key for each prompt of raw text: the shortest of ``prompts`` with which it begins.

    A prompt that begins with another prompt thus has the same key as that prompt.
    """
    merged: dict[str, str] = {}
    last = None
    # In sorted order, a prompt comes after its prefixes, and all prompts with one prefix are
    # neighbours.
    for prompt in sorted(set(prompts)):
        if last is None or not prompt.startswith(last):
            last = prompt
        merged[prompt] = last
    return [merged[prompt] for prompt in prompts]


def _merge_keys(keys: Sequence[str], pairs: Iterable[tuple[str, str]]) -> list[str]:
    """Return ``keys``, where keys that ``pairs`` connect are replaced by one of them.

    Keys are connected if they are a pair, or if pairs lead from one to the other.
    """
    same_as = {key: key for key in keys}

    def find_root(key: str) -> str:
        while same_as[key] != key:
            key = same_as[key]
        return key

    for first, second in pairs:
        same_as[find_root(first)] = find_root(second)
    return [find_root(key) for key in keys]


def _similar_keys(keys: Sequence[str], similar: float) -> Iterator[tuple[str, str]]:
    """Yield the pairs of prompts whose Jaccard similarity is at least ``similar``.

    The similarity is that of their sets of three consecutive words. MinHash with locality-sensitive
    hashing (Broder 1997) proposes pairs, whose similarity is then computed exactly.
    """
    try:
        from datasketch import MinHash, MinHashLSH
    except ImportError as error:
        raise ConfigError(
            "similar: finding near duplicates needs the package datasketch. Install it, or the "
            "extra `dedup`"
        ) from error
    different = sorted(set(keys))
    shingles = {key: _make_shingles(key) for key in different}
    # The index is approximate: a lower threshold makes it miss few pairs above ``similar``.
    index = MinHashLSH(threshold=0.8 * similar, num_perm=128, weights=(0.2, 0.8))
    sketches = MinHash.bulk([[word.encode() for word in shingles[key]] for key in different])
    for key, sketch in zip(different, sketches, strict=True):
        for similar_key in sorted(index.query(sketch)):
            common = len(shingles[key] & shingles[similar_key])
            if common >= similar * len(shingles[key] | shingles[similar_key]):
                yield key, similar_key
        index.insert(key, sketch)


def _make_shingles(key: str) -> set[str]:
    words = re.findall(r"\w+", key) or [key]
    count = max(1, len(words) - _SHINGLE_WORDS + 1)
    return {" ".join(words[start : start + _SHINGLE_WORDS]) for start in range(count)}


def _draw_keys(keys: Sequence[str], heldout: float, seed: int) -> set[str]:
    """Draw the prompts to hold out, until they have the fraction ``heldout`` of all records.

    ``keys`` has the prompt key of every record. A key is skipped if its records would exceed the
    fraction by more than ``_TOLERANCE``. Returns the drawn keys.
    """
    sizes = Counter(keys)
    # Sort the keys, so that the draw does not depend on the order of the file.
    order = sorted(sizes)
    random.Random(seed).shuffle(order)
    expected = heldout * len(keys)
    drawn: set[str] = set()
    count = 0
    for key in order:
        if count >= expected:
            break
        if count + sizes[key] <= expected + max(1.0, _TOLERANCE * expected):
            drawn.add(key)
            count += sizes[key]
    return drawn


# The length baseline: how well the length of a reply alone predicts the labels.


def _render_length_baseline(
    train: Sequence[Record], heldout: Sequence[Record], settings: Split
) -> list[str]:
    """Report how often the longer reply is better; for ratings, Pearson's r of labels and lengths.

    Both are measured on the held-out records.
    """
    tokenizer = settings.tokenizer
    unit = unit_of_lengths(tokenizer)
    lengths = measure_replies([text for record in heldout for text in record.texts], tokenizer)
    if isinstance(heldout[0], Comparison):
        wins = longer_chosen(heldout, lengths)
        if wins is None:
            return ["heldout has only ties, so the length of replies predicts nothing"]
        return [f"always taking the longer reply (in {unit}) is right in {wins:.1%} of heldout"]
    train_lengths = measure_replies([text for record in train for text in record.texts], tokenizer)
    lines, values = [], []
    for index, name in enumerate(settings.reading.attributes):
        # The prediction is a line fitted to the training lengths. Only the sign of its slope
        # changes r.
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
    """Compute Pearson's r of the replies' ``lengths`` and the label number ``index``.

    The result is 0 if all lengths or all labels are equal.
    """
    points = [
        (length, record.labels[index])
        for record, length in zip(records, lengths, strict=True)
        if isinstance(record, Rating) and record.labels and record.labels[index] is not None
    ]
    columns = np.array(points, dtype=np.float64).reshape(-1, 2)
    if len(columns) < 2 or not columns.std(axis=0).all():
        return 0.0
    return float(np.asarray(np.corrcoef(columns.T))[0, 1])
