"""``nemo-aligner check``: a checkpoint's rewards at every layout and in every batch."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from torch.cuda import device_count

from nemo_aligner.checkpoint.nemo.open import open_nemo
from nemo_aligner.checkpoint.nemo.reward_model import read_text_rules
from nemo_aligner.config.common import Precision, RecordKind
from nemo_aligner.contract.contract import NoTemplateError, OverlongError, ScoringContract
from nemo_aligner.data.demo import build_demo_pairs
from nemo_aligner.data.readers import ReaderConfig, parse_file
from nemo_aligner.models.shape import ModelShape
from nemo_aligner.tools.invariance import (
    SERVER,
    Row,
    Scored,
    choose_bars,
    compare_all,
    render_rows,
    run_world,
    score_everywhere,
    score_over_http,
    summarise,
)
from nemo_aligner.utils.errors import CheckpointError, DataError
from nemo_aligner.utils.processes import is_launched


@dataclass(frozen=True)
class Check:
    """Check of ``pairs`` pairs of ``data`` (None: the demo set) by ``checkpoint``.

    ``processes`` is the most to start at once; None is one per GPU, or 2. ``serve`` also scores
    over HTTP. Under torchrun, layouts with fewer than ``min_model_parallel`` ranks per model
    replica are skipped. ``precision`` None is the model's own.
    """

    checkpoint: str
    data: str | None = None
    pairs: int = 32
    processes: int | None = None
    min_model_parallel: int = 1
    precision: str | None = None
    serve: bool = False


def run_check(check: Check, output: Path | None) -> bool:
    """Score, compare, print, and write the table to ``output``; True if the bar holds.

    Raises:
        AlignerError: the checkpoint is not a reward model, or can score none of the pairs.
    """
    shape, contract = _read_model(check.checkpoint)
    texts = _choose_texts(check)
    precision = check.precision or contract.dtype
    scored = (_in_this_world if is_launched() else _in_new_worlds)(check, texts, precision)
    for reason in dict.fromkeys(scored.reasons):
        print(f"does not fit: {reason}")
    rows, summary = _compare_all(scored, shape, contract, precision)
    if output is not None:
        content = {
            "precision": precision,
            "summary": summary,
            "rows": [_plain(row) for row in rows],
        }
        output.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n")
    return all(row.ok for row in rows)


def _plain(row: Row) -> dict[str, Any]:
    """Plain values of a row; JSON has no NaN."""
    difference = row.difference if isfinite(row.difference) else None
    return {**asdict(row), "compared": row.compared.name, "difference": difference}


def _read_model(checkpoint: str) -> tuple[ModelShape, ScoringContract]:
    """Read a reward model's facts without its weights."""
    with open_nemo(checkpoint, with_weights=False) as folder:
        if folder.contract is None:
            raise CheckpointError(
                f"{checkpoint}: it has no scoring contract; wanted a reward model"
            )
        return (
            ModelShape.from_config(folder.config),
            ScoringContract.from_dict(folder.contract),
        )


def _choose_texts(check: Check) -> list[Any]:
    """Texts of pairs that the contract takes, as many as wanted: chosen, rejected, ..."""
    tokenizer, contract = read_text_rules(check.checkpoint)
    assert contract is not None, "_read_model has seen to it"
    texts: list[Any] = []
    left_out: Counter[str] = Counter()
    for pair in _pairs(check.data, left_out):
        if len(texts) == 2 * check.pairs:
            break
        try:
            for text in pair:
                contract.encode(tokenizer, text)
        except OverlongError:
            left_out["too long"] += 1
            continue
        except NoTemplateError:
            raise
        except DataError:
            left_out["malformed"] += 1
            continue
        texts += pair
    if not texts:
        raise DataError(
            f"{check.data or 'demo set'}: no pair can be scored, left out: {dict(left_out)}"
        )
    others = "".join(f", {count} left out as {why}" for why, count in left_out.items())
    print(f"{len(texts) // 2} pairs{others}; scoring contract {contract.hash}")
    return texts


def _pairs(path: str | None, left_out: Counter[str]) -> Iterator[tuple[Any, ...]]:
    if path is not None:
        file = parse_file(path, ReaderConfig(RecordKind.comparison))
        # Any pairs will do, as nothing is learned from them: malformed ones are only counted.
        if file.malformed:
            left_out["malformed"] += len(file.malformed)
        # Of a ranking, the best and the worst completion.
        yield from ((record.texts[0], record.texts[-1]) for record in file.records)
        return
    for pair in build_demo_pairs(2400, 0.1, 1)[1]:
        prompt = {"role": "user", "content": pair.prompt}
        yield tuple(
            [prompt, {"role": "assistant", "content": reply}]
            for reply in (pair.chosen, pair.rejected)
        )


def _in_new_worlds(check: Check, texts: list[Any], precision: str) -> Scored:
    """Worlds of 1, 2, 4, ... processes and the server; the reference is of one process."""
    job = {"checkpoint": check.checkpoint, "texts": texts, "precision": precision}
    most = check.processes or device_count() or 2
    worlds = [run_world(job, 2**power) for power in range(10) if 2**power <= most]
    rewards = {layout: found for world in worlds for layout, found in world.rewards.items()}
    if check.serve:
        rewards[SERVER] = score_over_http(check.checkpoint, precision, texts)
    reasons = [reason for world in worlds for reason in world.reasons]
    return Scored(rewards, worlds[0].reference, reasons)


def _in_this_world(check: Check, texts: list[Any], precision: str) -> Scored:
    """The layouts of a world that stands already, the first of them as the reference."""
    return score_everywhere(check.checkpoint, texts, Precision(precision), check.min_model_parallel)


def _compare_all(
    scored: Scored, shape: ModelShape, contract: ScoringContract, precision: str
) -> tuple[list[Row], str]:
    """The tables' rows, and the summary; both are printed."""
    bars = choose_bars(precision, shape.num_layers, scored.reference)
    rows = compare_all(scored, contract.attribute_weights, bars)
    summary = summarise(rows, bars)
    print(f"\n{render_rows(rows)}\n\n{precision}: {summary}", flush=True)
    return rows, summary
