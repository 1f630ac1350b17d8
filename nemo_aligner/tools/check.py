"""``nemo-aligner check``: does a checkpoint give the same rewards in every batch and layout?

The command scores the same samples in different batches, at every parallel layout that fits, in a
training forward pass, and over HTTP. It compares the rewards with those of a reference (fp32, or a
batch of one), and prints a table. Under torchrun the ranks of this job score; otherwise the command
starts new processes.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nemo_aligner.checkpoint.nemo.reward_model import CheckpointDescription
from nemo_aligner.config.common import Precision, RecordKind
from nemo_aligner.contract.contract import NoTemplateError, OverlongError, ScoringContract
from nemo_aligner.contract.tokenizer import Tokenizer
from nemo_aligner.data.demo import build_demo_pairs
from nemo_aligner.data.readers import ReaderConfig, parse_file
from nemo_aligner.serving.run import running_server
from nemo_aligner.tools.invariance import (
    SERVER,
    Row,
    Scored,
    choose_limits,
    compare_all,
    render_rows,
    score_alone,
    summarise,
)
from nemo_aligner.tools.layouts_worker import run_world, score_everywhere
from nemo_aligner.utils.errors import CheckpointError, DataError
from nemo_aligner.utils.processes import find_process
from nemo_aligner.utils.writing import check_outputs, write_lines

_BATCH_TOKENS = 8192  # least micro_batch_tokens of the server that scores over HTTP


@dataclass(frozen=True)
class Check:
    """Options of the command.

    Attributes:
        checkpoint: path of the reward model.
        data: file of pairs; None for the demo set.
        pairs: number of pairs to score.
        processes: largest number of processes to start at once; None for one for each GPU, or 2.
        min_model_parallel: under torchrun, skip layouts with fewer ranks for each model replica.
        precision: precision to score in; None for that of the model.
        serve: True to also score over HTTP.
    """

    checkpoint: str
    data: str | None = None
    pairs: int = 32
    processes: int | None = None
    min_model_parallel: int = 1
    precision: str | None = None
    serve: bool = False


def run_check(check: Check, output: Path | None) -> bool:
    """Score, compare and print the table; write it as JSON to ``output`` unless that is None.

    Returns:
        True if every row of the table passes.

    Raises:
        AlignerError: the checkpoint is not a reward model, none of the pairs can be scored, or
            ``output`` is a file that is read.
        OSError: the folder of ``output`` cannot be made.
    """
    if output is not None:  # an error must not come only after the work
        read = {"the checkpoint": check.checkpoint, "the file of --data": check.data}
        inputs = {name: Path(path) for name, path in read.items() if path is not None}
        check_outputs({"output": output}, inputs)
        output.parent.mkdir(parents=True, exist_ok=True)
    base = CheckpointDescription.read(check.checkpoint)
    contract = base.contract
    if contract is None:
        raise CheckpointError(
            f"{check.checkpoint}: it has no scoring contract, so it is not a reward model. Pass "
            "the .nemo file of a reward model."
        )
    texts = choose_samples(check, base.tokenizer, contract)
    precision = check.precision or contract.dtype
    # A shell of Slurm (srun --pty bash) is a launch of one task, which may start ranks.
    if find_process(os.environ).world_size > 1:
        scored = score_everywhere(
            check.checkpoint, texts, Precision(precision), check.min_model_parallel
        )
    else:
        scored = _score_in_new_processes(check, texts, precision, contract.seq_length)
    for reason in dict.fromkeys(scored.reasons):
        print(f"skipped a layout that does not fit the model: {reason}")
    limits = choose_limits(precision, base.shape.num_layers, scored.reference)
    rows = compare_all(scored, contract.attribute_weights, limits)
    summary = summarise(rows, limits)
    print(f"\n{render_rows(rows)}\n\n{precision}: {summary}", flush=True)
    if output is not None:
        content = {
            "precision": precision,
            "summary": summary,
            "rows": [_row_to_dict(row) for row in rows],
        }
        write_lines(output, [json.dumps(content, indent=2, allow_nan=False)])
    return all(row.ok for row in rows)


def _row_to_dict(row: Row) -> dict[str, Any]:
    """Convert a row of the table to plain JSON values.

    A NaN or infinite difference becomes null.
    """
    difference = row.difference if math.isfinite(row.difference) else None
    return {**asdict(row), "compared": row.compared.value, "difference": difference}


def choose_samples(check: Check, tokenizer: Tokenizer, contract: ScoringContract) -> list[Any]:
    """Choose the first ``check.pairs`` pairs of the data that the model can score.

    Returns:
        The samples of the pairs: chosen, rejected, chosen, ...

    Raises:
        DataError: no pair can be scored.
    """
    samples: list[Any] = []
    left_out: Counter[str] = Counter()
    for pair in _read_pairs(check.data, left_out):
        if len(samples) == 2 * check.pairs:
            break
        try:
            for sample in pair:
                contract.encode(tokenizer, sample)
        except OverlongError:
            left_out["too long"] += 1
            continue
        except NoTemplateError:
            raise
        except DataError:
            left_out["malformed"] += 1
            continue
        samples += pair
    if not samples:
        raise DataError(
            f"{check.data or 'demo set'}: no pair can be scored; skipped: {dict(left_out)}"
        )
    left_out_note = "".join(f", {count} left out as {reason}" for reason, count in left_out.items())
    print(f"{len(samples) // 2} pairs{left_out_note}; scoring contract {contract.hash}")
    return samples


def _read_pairs(path: str | None, left_out: Counter[str]) -> Iterator[tuple[Any, ...]]:
    """Yield (chosen, rejected) samples of a file, or of the demo set if ``path`` is None.

    Malformed lines of the file are counted in ``left_out``.
    """
    if path is not None:
        file = parse_file(path, ReaderConfig(RecordKind.comparison))
        # Count malformed lines and continue: any pairs will do, because nothing is learned from
        # them.
        if file.malformed:
            left_out["malformed"] += len(file.malformed)
        # Use the best and the worst completion of a ranking as a pair.
        yield from ((record.texts[0], record.texts[-1]) for record in file.records)
        return
    for pair in build_demo_pairs(2400, 0.1, 1)[1]:
        prompt = {"role": "user", "content": pair.prompt}
        yield tuple(
            [prompt, {"role": "assistant", "content": reply}]
            for reply in (pair.chosen, pair.rejected)
        )


def _score_in_new_processes(
    check: Check, texts: list[Any], precision: str, seq_length: int
) -> Scored:
    """Score in jobs of 1, 2, 4, ... processes and, if ``check.serve``, over HTTP.

    The job of one process also computes the fp32 reference. ``seq_length`` is the contract's.
    """
    job = {"checkpoint": check.checkpoint, "texts": texts, "precision": precision}
    max_processes = check.processes or torch.cuda.device_count() or 2
    worlds = [run_world(job, 2**power) for power in range(10) if 2**power <= max_processes]
    rewards = {layout: variants for world in worlds for layout, variants in world.rewards.items()}
    if check.serve:
        rewards[SERVER] = score_over_http(check.checkpoint, precision, texts, seq_length)
    reasons = [reason for world in worlds for reason in world.reasons]
    return Scored(rewards, worlds[0].reference, reasons)


def score_over_http(
    checkpoint: str, precision: str, texts: list[Any], seq_length: int
) -> dict[str, np.ndarray]:
    """Start a server and score over HTTP, in batches of one and all together.

    ``seq_length`` is that of the scoring contract; a server's forward pass must take such a sample.

    Returns:
        Rewards ``[N, A]`` by variant: ``alone`` (a request for each sample) and ``all together``.

    Raises:
        ServingError: the server does not start, or does not answer.
    """
    # Imported here, because a check without a server does not need the client's dependencies.
    from nemo_aligner.serving.client.reward import RewardClient

    print(f"scoring in {precision} over HTTP", flush=True)
    settings = [
        f"rm_model_file={checkpoint}",
        f"precision={precision}",
        f"model.micro_batch_tokens={max(_BATCH_TOKENS, seq_length)}",
    ]
    with (
        tempfile.TemporaryDirectory() as folder,
        running_server(settings, Path(folder, "log")) as url,
        RewardClient(url, timeout_s=None) as client,  # a set of any size is one call
    ):
        return {"alone": score_alone(client.score, texts), "all together": client.score(texts)}
