"""A file of preference data in two parts, so that no prompt is in both."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nemo_aligner.config.common import RecordKind
from nemo_aligner.data.length_baseline import render_length_baseline
from nemo_aligner.data.reading import RecordFile, read_records
from nemo_aligner.data.records import Record, prompt_key
from nemo_aligner.data.sources import read_lines
from nemo_aligner.data.write import write_lines
from nemo_aligner.errors import ConfigError, DataError
from nemo_aligner.text.messages import first_prompt


@dataclass(frozen=True)
class Split:
    """How a file is split: ``heldout`` of its records, drawn by ``seed``.

    ``by`` is what must not be in both parts: a conversation's ``first_prompt``, or the whole
    ``prompt``. The others are as ``read_records`` takes them.
    """

    heldout: float = 0.2
    seed: int = 1
    by: str = "first_prompt"
    kind: RecordKind | None = None
    format: str = "auto"
    attributes: Sequence[str] = ()
    loss_mask_val: float | None = -100.0


def split_file(source: Path, folder: Path, how: Split) -> str:
    """Write ``train.jsonl`` and ``heldout.jsonl``; what is in them, and what length would score.

    Raises:
        ConfigError: an attribute has no name.
        DataError: the file cannot be read, or has too few prompts to hold some out.
    """
    check_names(how.attributes)
    file = read_records(source, how.kind, how.format, how.attributes, how.loss_mask_val)
    keys = _prompt_keys(file.records, how.by)
    held = _held_keys(keys, how.heldout, how.seed)
    if len(held) == len(set(keys)):
        raise DataError(
            f"{source}: got {len(held)} different prompts, too few to hold out "
            f"{how.heldout} of the records"
        )
    counts = ", ".join(f"{count} {name}" for name, count in file.counts.items())
    lines = [f"{source}: {file.format}, {counts}"]
    sides: dict[str, list[Record]] = {"train": [], "heldout": []}
    for record, key in zip(file.records, keys, strict=True):
        sides["heldout" if key in held else "train"].append(record)
    for name, records in sides.items():
        path = folder / f"{name}.jsonl"
        write_lines(path, _lines_of(records, file))
        prompts = len(held) if name == "heldout" else len(set(keys)) - len(held)
        lines.append(f"{name}: {len(records)} records, {prompts} prompts -> {path}")
    lines += render_length_baseline(sides["train"], sides["heldout"], how.attributes)
    return "\n".join(lines)


def check_names(attributes: Sequence[str]) -> None:
    """Refuse what cannot be the keys of labels.

    Raises:
        ConfigError: one of them is empty.
    """
    if not all(attributes):
        raise ConfigError(f"attributes: got {list(attributes)}, wanted names that are not empty")


def _lines_of(records: Sequence[Record], file: RecordFile) -> list[str]:
    """The lines of the records as they were written; a pretty-printed one is put on one line."""
    lines = read_lines(file.path)
    start_of = {line.number: index for index, line in enumerate(lines)}
    count = 2 if file.format == "comparison_text" else 1
    written = []
    for record in records:
        start = start_of[record.origin.line]
        for line in lines[start : start + count]:
            whole = "\n" not in line.raw
            written.append(line.raw if whole else json.dumps(line.value, ensure_ascii=False))
    return written


def _prompt_keys(records: Sequence[Record], by: str) -> list[str]:
    """One key per record; records with the same key must stay on one side."""
    if by == "first_prompt" and not isinstance(records[0].texts[0], str):
        return [" ".join(first_prompt(r.texts[0]).casefold().split()) for r in records]
    keys = [prompt_key(record) for record in records]
    return _same_beginnings(keys) if isinstance(records[0].texts[0], str) else keys


def _same_beginnings(begins: Sequence[str]) -> list[str]:
    """Where one raw text's prompt begins another's, the two are taken for the same prompt."""
    group: dict[str, str] = {}
    last = None
    for start in sorted(set(begins)):
        if last is None or not start.startswith(last):
            last = start
        group[start] = last
    return [group[start] for start in begins]


def _held_keys(keys: Sequence[str], heldout: float, seed: int) -> set[str]:
    """Prompts drawn until they own ``heldout`` of the records."""
    sizes = Counter(keys)
    order = sorted(sizes)
    random.Random(seed).shuffle(order)
    held: set[str] = set()
    owned = 0
    for key in order:
        if owned >= heldout * len(keys):
            break
        held.add(key)
        owned += sizes[key]
    return held
