"""Pairs whose labels are contradicted by models that never saw them: cross-fitted over folds."""

from __future__ import annotations

import copy
import hashlib
import json
import math
import random
import shutil
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nemo_aligner.api.training import train_by
from nemo_aligner.checkpoint.nemo.reward_model import read_tokenizer
from nemo_aligner.config.common import Checks, RecordKind
from nemo_aligner.config.load import config_to_dict
from nemo_aligner.config.training import TrainConfig
from nemo_aligner.contract.messages import Text, as_json, reply_of
from nemo_aligner.data.readers import ReaderConfig, RecordFile, read_records
from nemo_aligner.data.records import Comparison, write_lines
from nemo_aligner.data.report import longer_chosen, measure_replies, unit_of_lengths
from nemo_aligner.data.split import lines_by_origin, lines_of_records, prompt_keys
from nemo_aligner.losses.pairwise import LABEL_MARGIN
from nemo_aligner.metrics.ranking import fit_temperature, share_right, wilson_interval
from nemo_aligner.utils.errors import ConfigError, DataError

_SHOWN = 10
_WIDTH = 70


@dataclass(frozen=True)
class Filter:
    """Rules of a filter.

    Attributes:
        folds: parts of the file, by prompt; each is judged by a model of the others.
        confidence: probability of a wrong label from which on a pair is doubted.
        weigh: keep doubted pairs, with their probability of a right label as ``label_margin``.
        seed: of the folds.
    """

    folds: int = 3
    confidence: float = 0.8
    weigh: bool = False
    seed: int = 1

    def __post_init__(self) -> None:
        with Checks("", self) as checks:
            checks.require(self.folds >= 2, "folds", "at least 2")
            checks.require(0.5 < self.confidence < 1, "confidence", "above 0.5 and below 1")


@dataclass(frozen=True)
class _Judged:
    """A pair with the margin that the other folds' model gives it; NaN if it could not judge."""

    record: Comparison
    margin: float
    p_wrong: float


def filter_file(source: Path, folder: Path, how: Filter, config: TrainConfig) -> str:
    """Write ``kept.jsonl`` and ``doubted.jsonl``, the most doubtful pair first; return a report.

    A pair's label is wrong with probability ``sigmoid(-m / T)``: m is its margin by the model that
    was trained on the other folds with ``config``, T the temperature fitted to all those margins.
    It is confident learning (Northcutt et al. 2021, "Confident learning: Estimating uncertainty in
    dataset labels") by out-of-sample probabilities. Lines are kept as they stand; records that
    training would drop are left out.

    Raises:
        ConfigError: the settings train no model of pairs, or name files of their own.
        DataError: the file cannot be read, or has fewer prompts than folds.
        StoppedError: a training was stopped; the same call goes on from there.
    """
    _check(config)
    file = read_records(
        source, ReaderConfig.of(config.model.data, "model.data", kind=RecordKind.comparison)
    )
    _check_lines_are_apart(file)
    lines = lines_by_origin(file)
    margins = _cross_fit(file, lines, folder, how, config)
    known = torch.from_numpy(margins[~np.isnan(margins)])
    temperature = fit_temperature(known)
    if not temperature > 0:
        # No better than by chance, or none wrong: every label is as good as any other.
        temperature = math.inf
    p_wrong = 1 / (1 + np.exp(margins / temperature))
    judged = [_Judged(*each) for each in zip(file.records, margins, p_wrong, strict=True)]
    doubted = [each for each in judged if each.p_wrong >= how.confidence]
    doubted.sort(key=lambda each: -each.p_wrong)
    kept = [each for each in judged if how.weigh or not each.p_wrong >= how.confidence]
    written = [
        line for each in kept for line in _written(lines[each.record.origin.line], each, how)
    ]
    with_weights = f", doubted ones with a {LABEL_MARGIN} below 1" if how.weigh else ""
    return "\n".join(
        [
            f"{source}: {file.format}, {len(judged)} pairs, {len(known)} judged",
            _accuracy(known, temperature),
            f"kept: {len(kept)} -> {write_lines(folder / 'kept.jsonl', written)}{with_weights}",
            f"doubted: {len(doubted)} ({len(doubted) / len(judged):.1%}) -> "
            + write_lines(folder / "doubted.jsonl", map(_doubted_line, doubted)),
            *_by_length(judged, doubted, config),
            *(["most likely mislabelled:"] * bool(doubted)),
            *map(_shown, doubted[:_SHOWN]),
        ]
    )


def _cross_fit(
    file: RecordFile,
    lines: Mapping[int, list[str]],
    folder: Path,
    how: Filter,
    config: TrainConfig,
) -> np.ndarray:
    """Margin of each record ``[N]`` by the model of the other folds."""
    folds = _folds(prompt_keys(file.records), how, file.path)
    margins = np.full(len(file.records), np.nan)
    for fold in range(how.folds):
        outside, inside = (np.flatnonzero(mask) for mask in (folds != fold, folds == fold))
        train = lines_of_records([file.records[i] for i in outside], lines)
        held = [file.records[i] for i in inside]
        margins[inside] = _judge(folder / f"fold_{fold + 1}", train, held, config)
    return margins


def _check(config: TrainConfig) -> None:
    if config.model.reward_model_type.record_kind is not RecordKind.comparison:
        raise ConfigError(
            f"model.reward_model_type: got {config.model.reward_model_type.value}, wanted "
            "binary_ranking: a filter judges pairs"
        )
    if config.model.data.data_prefix.all_files:
        raise ConfigError(
            f"model.data.data_prefix: got {', '.join(config.model.data.data_prefix.all_files)}, "
            "wanted none: the folds of the file are what is trained on"
        )


def _check_lines_are_apart(file: RecordFile) -> None:
    """Refuse lines of several pairs: one of them could not be taken out of its line."""
    counts = Counter(record.origin for record in file.records)
    for origin, count in counts.items():
        if count > 1:
            raise DataError(
                f"{origin}: {count} pairs are made of this line ({file.format}), and a filter "
                "keeps or drops whole lines. Write each pair on a line of its own first."
            )


def _folds(keys: Sequence[str], how: Filter, source: str) -> np.ndarray:
    """Fold of each record ``[N]``: prompts go to the smallest fold, in an order by the seed."""
    sizes = Counter(keys)
    if len(sizes) < how.folds:
        raise DataError(f"{source}: got {len(sizes)} prompts, wanted at least {how.folds}, a fold")
    order = sorted(sizes)
    random.Random(how.seed).shuffle(order)
    filled = [0] * how.folds
    fold_of = {}
    for key in order:
        fold_of[key] = filled.index(min(filled))
        filled[fold_of[key]] += sizes[key]
    return np.array([fold_of[key] for key in keys])


def _judge(
    folder: Path, train: Sequence[str], held: Sequence[Comparison], config: TrainConfig
) -> np.ndarray:
    """Margins ``[n]`` of ``held`` by a model of ``train``; those of before, if nothing changed."""
    own = copy.deepcopy(config)
    own.exp_manager.explicit_log_dir = str(folder)
    own.model.data.data_prefix.train = [str(folder / "train.jsonl")]
    texts = [text for record in held for text in record.texts]
    given = json.dumps([config_to_dict(own), list(train), texts], default=repr)
    digest = hashlib.sha256(given.encode(errors="surrogatepass")).hexdigest()
    result = folder.with_suffix(".json")
    if result.exists() and (found := json.loads(result.read_text()))["digest"] == digest:
        rewards = np.array(found["rewards"], dtype=np.float64)
    else:
        write_lines(folder / "train.jsonl", train)
        with train_by(own) as model:
            rewards = model.score(texts, on_error="nan")[:, 0].astype(np.float64)
        write_lines(result, [json.dumps({"digest": digest, "rewards": rewards.tolist()})])
        shutil.rmtree(folder)  # gigabytes of checkpoints
    bounds = np.cumsum([0, *(len(record.texts) for record in held)])
    return np.array(
        [_margin(*each) for each in zip(held, np.split(rewards, bounds[1:-1]), strict=True)]
    )


def _margin(record: Comparison, rewards: np.ndarray) -> float:
    """Better minus worse reward of two replies; NaN of ties and of more replies."""
    if len(rewards) != 2 or record.is_tied:
        return float("nan")
    better, worse = rewards[list(_order(record))]
    return float(better - worse)


def _order(record: Comparison) -> tuple[int, int]:
    """Which of a pair's texts is the chosen one, and which the rejected."""
    return (0, 1) if record.ranks[0] < record.ranks[1] else (1, 0)


def _ordered(record: Comparison) -> tuple[Text, Text]:
    """Chosen and rejected text of a pair."""
    better, worse = _order(record)
    return record.texts[better], record.texts[worse]


def _written(lines: Sequence[str], judged: _Judged, how: Filter) -> list[str]:
    if not how.weigh:
        return list(lines)
    value = json.loads(lines[0])
    weight = 1 - judged.p_wrong if judged.p_wrong >= how.confidence else 1.0
    value[LABEL_MARGIN] = round(weight * value.get(LABEL_MARGIN, 1.0), 6)
    return [json.dumps(value, ensure_ascii=False), *lines[1:]]


def _accuracy(margins: torch.Tensor, temperature: float) -> str:
    right = share_right(margins)
    low, high = wilson_interval(float(right.sum()), len(right))
    return (
        f"held-out accuracy over the folds: {float(right.mean()):.3f} (95% {low:.3f} to {high:.3f})"
        + (", no better than chance or none wrong: no label is doubted" * math.isinf(temperature))
    )


def _by_length(
    judged: Sequence[_Judged], doubted: Sequence[_Judged], config: TrainConfig
) -> list[str]:
    """Say how often the longer reply was chosen: a model that judges by length doubts the rest."""
    base = config.pretrained_checkpoint.restore_from_path
    tokenizer = None if base is None else read_tokenizer(Path(base))

    def show_share(pairs: Sequence[_Judged]) -> str:
        records = [each.record for each in pairs if len(each.record.texts) == 2]
        texts = [text for record in records for text in record.texts]
        share = longer_chosen(records, measure_replies(texts, tokenizer))
        return "none" if share is None else f"{share:.1%}"

    return [
        f"the longer reply (in {unit_of_lengths(tokenizer)}) was chosen in {show_share(judged)} of "
        f"the pairs and in {show_share(doubted)} of the doubted ones"
    ]


def _doubted_line(judged: _Judged) -> str:
    record, value = judged.record, dict[str, Any]()
    value["record"], value["p_wrong"] = str(record.origin), round(judged.p_wrong, 4)
    value["margin"] = round(judged.margin, 4)
    for name, text in zip(("chosen", "rejected"), _ordered(record), strict=True):
        value[name] = text if isinstance(text, str) else as_json(text)
    return json.dumps(value, ensure_ascii=False)


def _shown(judged: _Judged) -> str:
    chosen, rejected = (
        textwrap.shorten(reply_of(text), _WIDTH, placeholder="...")
        for text in _ordered(judged.record)
    )
    return (
        f"  {judged.record.origin}  {judged.p_wrong:.2f}\n    chosen:   {chosen}\n"
        f"    rejected: {rejected}"
    )
