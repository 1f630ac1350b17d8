"""Find the pairs of a file whose labels are probably wrong, with models not trained on them.

    python examples/data/filter_labels.py --input pairs.jsonl --output filtered \\
        pretrained_checkpoint.restore_from_path=base.nemo model.optim.lr=1e-5

A line of the input has ``chosen``, ``rejected`` and possibly ``prompt``, as text or messages. The
file is split by prompt into folds. For each fold, ``nemo_aligner.train`` trains a model on all
other folds, with the settings of ``nemo-aligner train``, and the model scores the fold. A label is
wrong with probability ``sigmoid(-m / T)``: m is the pair's margin by the model of the other folds,
and T the temperature fitted to all margins. This is confident learning (Northcutt et al. 2021,
"Confident learning: Estimating uncertainty in dataset labels") with out-of-sample probabilities.

The output folder gets ``kept.jsonl``, whose lines are unchanged, and ``doubted.jsonl``, which
begins with the most doubtful pair. A pair that the model cannot score, such as an overlong one, is
kept. If the program is stopped, the same command resumes it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import random
import shutil
import sys
import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
import yaml

try:
    import nemo_aligner as na
    from nemo_aligner.config.evaluation import EvaluateDataConfig
    from nemo_aligner.data.formats.base import LABEL_MARGIN, WantedLabels
    from nemo_aligner.data.formats.pairs import has_margin, read_margin_labels
    from nemo_aligner.metrics.ranking import fit_temperature, share_right, wilson_interval
    from nemo_aligner.utils.errors import AlignerError, DataError
except ModuleNotFoundError as missing:
    sys.exit(f"{missing}: activate its environment (source .venv/bin/activate) or pip install -e .")

SHOWN_PAIRS = 10
SHOWN_CHARACTERS = 70


@dataclass
class Pair:
    """A line of the input, and how the model of the other folds scores it.

    Attributes:
        record: file and line number, from 1.
        line: the line, unchanged.
        prompt: identifies the prompt; all its pairs go to one fold.
        margin: reward of the chosen minus that of the rejected reply; NaN if the model cannot score
            the pair.
        p_wrong: probability that the label is wrong; NaN if ``margin`` is NaN.
    """

    record: str
    line: str
    prompt: str
    margin: float = math.nan
    p_wrong: float = math.nan


def read_pairs(path: Path) -> list[Pair]:
    """Read a file of JSON lines; blank ones are skipped.

    Raises:
        SystemExit: a line is not a pair.
    """
    pairs = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                prompt = find_prompt(json.loads(line))
            except (ValueError, TypeError, KeyError):
                sys.exit(f"{path}:{number}: wanted a JSON object with 'chosen' and 'rejected'")
            pairs.append(Pair(f"{path}:{number}", line.rstrip("\n"), prompt))
    return pairs


def find_prompt(row: dict[str, Any]) -> str:
    """Return the prompt of a pair, with case and white space normalized.

    Without the key ``prompt`` it is what both sides begin with: equal lines, or equal messages.
    """
    sides = [row["chosen"], row["rejected"]]
    parts = [side.splitlines() if isinstance(side, str) else side for side in sides]
    equal_parts = takewhile(lambda pair: pair[0] == pair[1], zip(*parts, strict=False))
    prompt = row.get("prompt") or [part for part, _ in equal_parts] or row["chosen"]
    return " ".join(json.dumps(prompt).casefold().split())


def assign_folds(pairs: Sequence[Pair], folds: int, seed: int) -> list[int]:
    """Return the fold of each pair. In shuffled order, each prompt goes to the smallest fold.

    Raises:
        SystemExit: there are fewer prompts than folds.
    """
    sizes = Counter(pair.prompt for pair in pairs)
    if len(sizes) < folds:
        sys.exit(f"got {len(sizes)} prompts, wanted at least {folds}, one for each fold")
    prompts = sorted(sizes)
    random.Random(seed).shuffle(prompts)
    filled = [0] * folds
    fold_of_prompt = {}
    for prompt in prompts:
        fold_of_prompt[prompt] = filled.index(min(filled))
        filled[fold_of_prompt[prompt]] += sizes[prompt]
    return [fold_of_prompt[pair.prompt] for pair in pairs]


def judge(
    folder: Path, train: Sequence[Pair], heldout: Sequence[Pair], settings: dict[str, Any]
) -> None:
    """Set the margins of ``heldout`` with a model that is trained on ``train``.

    The margins are stored in ``folder.json`` and read from there if the inputs are unchanged.
    """
    lines = [[pair.line for pair in pairs] for pairs in (train, heldout)]
    digest = hashlib.sha256(json.dumps([settings, *lines]).encode()).hexdigest()
    result = folder.with_suffix(".json")
    judged = json.loads(result.read_text()) if result.exists() else {}
    if judged.get("digest") != digest:
        folder.mkdir(parents=True, exist_ok=True)
        files = folder / "train.jsonl", folder / "heldout.jsonl"
        for path, lines_of_file in zip(files, lines, strict=True):
            path.write_text("".join(f"{line}\n" for line in lines_of_file), encoding="utf-8")
        with na.train(records=files[0], output=folder, **settings) as model:
            try:
                rows = model.evaluate(files[1], **reading_settings(settings)).rows
            except DataError as error:  # the model cannot score any pair of the fold
                print(
                    f"{folder.name}: no pair of this fold can be scored, all are kept: {error}",
                    file=sys.stderr,
                )
                rows = []
        margins = {
            row["record"].rpartition(":")[2]: row["rewards"]["chosen"] - row["rewards"]["rejected"]
            for row in rows
        }
        judged = {"digest": digest, "margins": margins}
        result.write_text(json.dumps(judged), encoding="utf-8")
        shutil.rmtree(folder)  # delete the checkpoints, which take gigabytes
    for number, pair in enumerate(heldout, start=1):
        pair.margin = judged["margins"].get(str(number), math.nan)


def reading_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Select the settings of training that also say how ``evaluate`` reads pairs.

    ``model.data.NAME`` becomes ``data.NAME``, as ``evaluate`` calls it.
    """
    shared = {field.name for field in fields(EvaluateDataConfig)}
    names = {key: key.removeprefix("model.data.") for key in settings if "model.data." in key}
    return {f"data.{name}": settings[key] for key, name in names.items() if name in shared}


def set_probabilities(pairs: Sequence[Pair]) -> str:
    """Set ``p_wrong`` of every pair that has a margin.

    Returns:
        A line to print: the number of these pairs, and the models' accuracy on them.
    """
    margins = torch.tensor([pair.margin for pair in pairs], dtype=torch.float64)
    margins = margins[~margins.isnan()]
    # NaN if the models are no better than chance, or never wrong; then no label is doubted.
    temperature = fit_temperature(margins)
    is_useful = temperature > 0
    for pair in pairs:
        scaled = pair.margin / temperature if is_useful else 0 * pair.margin
        pair.p_wrong = (1 - math.tanh(scaled / 2)) / 2  # sigmoid(-scaled)
    right = share_right(margins)
    low, high = wilson_interval(float(right.sum()), len(right))
    return (
        f"{len(margins)} judged; held-out accuracy over the folds: {float(right.mean()):.3f} "
        f"(95% {low:.3f} to {high:.3f})"
        + ", no better than chance or none wrong: no label is doubted"
        * (not is_useful)
    )


def read_margin(pair: Pair, missing: float | None) -> float:
    """Return the margin that training reads from a pair's fields, or 1 if it is not known.

    ``missing`` is the number that stands for a margin that is not known. A margin of 0 or less, as
    of tied or inverted scores, says nothing about the label's weight, and counts as not known.

    Raises:
        DataError: the margin, or a score that it is computed from, is not a number.
    """
    row = json.loads(pair.line)
    if not has_margin(row):
        return 1.0
    try:
        (margin,) = read_margin_labels(row, WantedLabels((LABEL_MARGIN,), missing))
    except DataError as error:
        raise DataError(f"{pair.record}: {error}") from error
    return 1.0 if margin is None or margin <= 0 else margin


def weigh(pair: Pair, margin: float, confidence: float) -> str:
    """Return the line of a pair, with ``label_margin`` as the weight of its label.

    It is the pair's margin. If ``p_wrong`` is at least ``confidence``, the margin is multiplied by
    ``1 - p_wrong``, so that a doubted label counts less.
    """
    weight = 1 - pair.p_wrong if pair.p_wrong >= confidence else 1.0
    row = {**json.loads(pair.line), LABEL_MARGIN: round(weight * margin, 6)}
    return json.dumps(row, ensure_ascii=False)


def describe_doubted(pair: Pair) -> dict[str, Any]:
    # With a prefix, so that no field of the pair is lost, and training does not read the margin.
    about = {
        "filter_record": pair.record,
        "filter_p_wrong": round(pair.p_wrong, 4),
        "filter_margin": round(pair.margin, 4),
    }
    # ``about`` is first, and replaces the fields of an earlier run.
    return {**about, **json.loads(pair.line), **about}


def reply_of(side: Any) -> str:
    """Return the reply of a side (``chosen`` or ``rejected``).

    This is the content of the last message or, if the side is a text, the whole text.
    """
    return side if isinstance(side, str) else str(side[-1]["content"])


def share_longer_chosen(pairs: Sequence[Pair]) -> str:
    """Render the share of pairs whose longer reply was chosen.

    If this share differs much between kept and doubted pairs, the models have a length bias.
    """
    rows = [json.loads(pair.line) for pair in pairs]
    longer = [len(reply_of(row["chosen"])) > len(reply_of(row["rejected"])) for row in rows]
    return f"{sum(longer) / len(longer):.1%}" if longer else "none"


def render_pair(pair: Pair) -> str:
    row = json.loads(pair.line)
    chosen, rejected = (
        textwrap.shorten(reply_of(row[side]), SHOWN_CHARACTERS, placeholder="...")
        for side in ("chosen", "rejected")
    )
    return f"  {pair.record}  {pair.p_wrong:.2f}\n    chosen:   {chosen}\n    rejected: {rejected}"


def write_lines(path: Path, lines: Sequence[str]) -> str:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return str(path)


def filter_pairs(options: argparse.Namespace) -> str:
    """Judge every pair, write both files, and return the report.

    Raises:
        AlignerError: a model cannot be trained, see ``nemo_aligner.train``.
    """
    settings = dict(setting.split("=", 1) for setting in options.settings)
    settings = {key: yaml.safe_load(value) for key, value in settings.items()}
    pairs = read_pairs(options.input)
    missing = settings.get("model.regression.loss_mask_val", EvaluateDataConfig.loss_mask_val)
    # Before the training, so that a margin that cannot be read is an error at once.
    margins = [read_margin(pair, missing) for pair in pairs] if options.weigh else []
    folds = assign_folds(pairs, options.folds, options.seed)
    for fold in range(options.folds):
        heldout = [pair for pair, number in zip(pairs, folds, strict=True) if number == fold]
        train = [pair for pair, number in zip(pairs, folds, strict=True) if number != fold]
        judge(options.output / f"fold_{fold + 1}", train, heldout, settings)
    accuracy = set_probabilities(pairs)
    doubted = [pair for pair in pairs if pair.p_wrong >= options.confidence]
    doubted.sort(key=lambda pair: -pair.p_wrong)
    if options.weigh:
        kept_lines = [
            weigh(pair, margin, options.confidence)
            for pair, margin in zip(pairs, margins, strict=True)
        ]
    else:
        kept_lines = [pair.line for pair in pairs if not pair.p_wrong >= options.confidence]
    doubted_lines = [json.dumps(describe_doubted(pair), ensure_ascii=False) for pair in doubted]
    weights = ", doubted ones with a lower label_margin" * options.weigh
    return "\n".join(
        [
            f"{options.input}: {len(pairs)} pairs, {accuracy}",
            f"kept: {len(kept_lines)} -> "
            + write_lines(options.output / "kept.jsonl", kept_lines)
            + weights,
            f"doubted: {len(doubted)} ({len(doubted) / len(pairs):.1%}) -> "
            + write_lines(options.output / "doubted.jsonl", doubted_lines),
            f"the longer reply (in characters) was chosen in {share_longer_chosen(pairs)} of the "
            f"pairs and in {share_longer_chosen(doubted)} of the doubted ones",
            *(["most likely mislabelled:"] * bool(doubted)),
            *map(render_pair, doubted[:SHOWN_PAIRS]),
        ]
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--input", type=Path, required=True, help="pairs, as JSON lines")
    parser.add_argument("--output", type=Path, required=True, help="folder to make")
    parser.add_argument(
        "--folds", type=int, default=3, help="parts, and models to train (default: 3)"
    )
    parser.add_argument(
        "--confidence", type=float, default=0.8,
        help="doubt a label that is wrong with at least this probability (default: 0.8)",
    )  # fmt: skip
    parser.add_argument(
        "--weigh", action="store_true",
        help="keep doubted pairs, with their margin (or 1) times the probability of a right label "
        "as label_margin: for model.objective_kwargs.label_margin=scale",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=1, help="of the folds (default: 1)")
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="those of training")
    options = parser.parse_intermixed_args(argv)
    if options.folds < 2:
        parser.error(f"--folds: got {options.folds}, wanted at least 2")
    if not 0.5 < options.confidence < 1:
        parser.error(f"--confidence: got {options.confidence}, wanted above 0.5 and below 1")
    if wrong := [setting for setting in options.settings if "=" not in setting]:
        parser.error(f"got {wrong[0]}, wanted KEY=VALUE")
    try:
        print(filter_pairs(options))
    except AlignerError as error:
        sys.exit(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
