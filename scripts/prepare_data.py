"""Make training files: a demo set of preference pairs, or a split by prompt of a file you have.

prepare_data.py demo --output DIR
prepare_data.py split FILE --output DIR --heldout 0.2

Both write ``train.jsonl`` and ``heldout.jsonl``. ``split`` takes every format that training takes
and keeps the lines as they are; all records of a prompt land on the same side, and records that
training would drop (see nemo_aligner/data/records.py) are left out and counted.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from demo_pairs import REASONS, build_demo_pairs

from nemo_aligner.data.reading import RecordFile, read_records
from nemo_aligner.data.records import (
    Comparison,
    Rating,
    Record,
    prompt_key,
)
from nemo_aligner.data.sources import read_lines
from nemo_aligner.errors import AlignerError, DataError
from nemo_aligner.text.messages import first_prompt, reply_of


def _demo(arguments: argparse.Namespace) -> None:
    train, heldout = build_demo_pairs(arguments.pairs, arguments.heldout, arguments.seed)
    sides = {"train": train, "heldout": heldout}
    for name, pairs in sides.items():
        lines = [
            json.dumps(
                {"prompt": p.prompt, "chosen": p.chosen, "rejected": p.rejected, "kind": p.kind},
                ensure_ascii=False,
            )
            for p in pairs
        ]
        _write(arguments.output / f"{name}.jsonl", lines)
    kinds = {name: Counter(pair.kind for pair in pairs) for name, pairs in sides.items()}
    print(f"{'kind':<12}{'train':>7}{'heldout':>9}  the better reply is better because")
    for kind, reason in REASONS.items():
        print(f"{kind:<12}{kinds['train'][kind]:>7}{kinds['heldout'][kind]:>9}  {reason}")
    lengths = [(len(pair.chosen), len(pair.rejected)) for pair in heldout]
    print(f"always taking the longer reply is right in {_longer_wins(lengths):.1%} of heldout")


def _split(arguments: argparse.Namespace) -> None:
    attributes = [name for name in arguments.attributes.split(",") if name]
    file = read_records(
        arguments.input, arguments.kind, arguments.format, attributes, arguments.loss_mask_val
    )
    keys = _prompt_keys(file.records, arguments.by)
    held = _held_keys(keys, arguments.heldout, arguments.seed)
    if len(held) == len(set(keys)):
        raise DataError(
            f"{arguments.input}: got {len(held)} different prompts, too few to split them with "
            f"--heldout {arguments.heldout}"
        )
    print(f"{arguments.input}: {file.format}, " + _listed(file.counts))
    sides: dict[str, list[Record]] = {"train": [], "heldout": []}
    for record, key in zip(file.records, keys, strict=True):
        sides["heldout" if key in held else "train"].append(record)
    for name, records in sides.items():
        path = arguments.output / f"{name}.jsonl"
        _write(path, _lines_of(records, file))
        prompts = len(held) if name == "heldout" else len(set(keys)) - len(held)
        print(f"{name}: {len(records)} records, {prompts} prompts -> {path}")
    _print_length_baseline(sides["train"], sides["heldout"], attributes)


def _lines_of(records: Sequence[Record], file: RecordFile) -> list[str]:
    """The lines of the records as they were written; a pretty-printed one is put on one line."""
    lines = read_lines(file.path)
    position = {line.number: index for index, line in enumerate(lines)}
    count = 2 if file.format == "comparison_text" else 1
    written = []
    for record in records:
        start = position[record.origin.line]
        for line in lines[start : start + count]:
            whole = "\n" not in line.raw
            written.append(line.raw if whole else json.dumps(line.value, ensure_ascii=False))
    return written


# --- Prompts ---------------------------------------------------------------


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


# --- What length alone would score -----------------------------------------


def _print_length_baseline(
    train: Sequence[Record], heldout: Sequence[Record], attributes: Sequence[str]
) -> None:
    if isinstance(heldout[0], Comparison):
        share = _longer_wins([_lengths(record) for record in heldout])
        print(f"always taking the longer reply is right in {share:.1%} of heldout")
        return
    values = []
    for place, name in enumerate(attributes):
        # A line fitted to the training lengths: of its slope only the sign matters to r.
        sign = np.sign(_length_correlation(train, place))
        values.append(sign * _length_correlation(heldout, place))
        print(f"{name}: Pearson r {values[-1]:.3f} in heldout for a line fitted to reply lengths")
    if values:
        print(f"mean over attributes: {np.mean(values):.3f}")


def _lengths(record: Record) -> tuple[int, ...]:
    return tuple(len(reply_of(text)) for text in record.texts)


def _longer_wins(lengths: Sequence[tuple[int, ...]]) -> float:
    return float(np.mean([0.5 if a == b else float(a > b) for a, b in lengths]))


def _length_correlation(records: Sequence[Record], place: int) -> float:
    """Pearson r of the reply's characters with one label; 0 where either does not vary."""
    points = [
        (_lengths(record)[0], record.labels[place])
        for record in records
        if isinstance(record, Rating) and record.labels[place] is not None
    ]
    known = np.array(points, dtype=np.float64).reshape(-1, 2)
    if len(known) < 2 or not known.std(axis=0).all():
        return 0.0
    return float(np.corrcoef(known.T)[0, 1])


# --- Command line ----------------------------------------------------------


def _write(path: Path, lines: Sequence[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def _listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items())


def _fraction(text: str) -> float:
    value = float(text)
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"got {text}, wanted a number between 0 and 1")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    demo = commands.add_parser("demo", help="make the demo set")
    demo.set_defaults(run=_demo)
    demo.add_argument("--pairs", type=int, default=2400)
    demo.add_argument("--heldout", type=_fraction, default=0.1, help="their share (default 0.1)")
    split = commands.add_parser("split", help="split a file by prompt")
    split.set_defaults(run=_split)
    split.add_argument("input", type=Path)
    split.add_argument("--heldout", type=_fraction, default=0.2, help="their share (default 0.2)")
    split.add_argument("--by", choices=["first_prompt", "prompt"], default="first_prompt")
    split.add_argument(
        "--kind", choices=["comparison", "rating"], help="default: seen from the file"
    )
    split.add_argument("--format", default="auto", help="a name of nemo_aligner/data/formats.py")
    split.add_argument("--attributes", default="", help="of ratings: names, separated by commas")
    split.add_argument("--loss-mask-val", type=float, default=-100.0, help="a missing label")
    for command in (demo, split):
        command.add_argument("--output", type=Path, required=True, help="a folder")
        command.add_argument("--seed", type=int, default=1)
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    arguments = _parser().parse_args(argv)
    try:
        arguments.run(arguments)
    except (AlignerError, ValueError) as error:
        sys.exit(f"prepare_data.py: {error}")


if __name__ == "__main__":
    main()
