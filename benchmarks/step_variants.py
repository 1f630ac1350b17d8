"""A training step at one width, by the settings that decide its speed: one after the other.

A part of the first hour, see gpu_first_hour.py. All variants run in one process, each on a learner
of its own, with the same random weights and the same pairs, whose lengths differ as those of chats
do. The settings are not crossed: pointwise kernels are compared first, and the fastest are then run
with CUDA graphs and with other sizes of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from common import now, peak_gib

from nemo_aligner.models.pointwise.choice import available_kernels
from nemo_aligner.training.learner import RewardLearner

Row = dict[str, Any]
Point = dict[str, Any]
_WARM_UP = 2
_GRAPHS_WARM_UP = 5  # a graph is captured where a size comes a second time
_UP_TO = "up to"
# Safest first: a kernel that reads outside its memory ends the process. torch.compile comes last,
# because it compiles for half a minute.
_ORDER = ("eager", "liger", "triton", "compile")
_SLOW_TO_START = "compile"


@dataclass(frozen=True)
class Variant:
    """Values of the settings ``model.*`` of these names."""

    pointwise_kernels: str = "eager"
    cuda_graphs: bool = False
    micro_batch_tokens: int = 16384


@dataclass(frozen=True)
class Experiment:
    """How the points of one width are measured.

    Attributes:
        base: the point that all variants change.
        sizes: the values of ``micro_batch_tokens``, the usual one first, the smallest last.
        fixed: lengths and numbers of pairs of texts that have all one length, which come last.
        run: measures ``time_variant`` at a point; its row has a ``note`` if it failed.
        seconds_left: of this part's time.
    """

    base: Point
    sizes: Sequence[int]
    fixed: Sequence[tuple[int, int]]
    run: Callable[[Point], Row]
    seconds_left: Callable[[], float]

    def rows(self) -> Iterator[Row]:
        """A row for each variant, as it is measured; the most telling come first."""
        rows: list[Row] = []
        usual = Variant(micro_batch_tokens=self.sizes[0])
        choices = sorted((choice.value for choice in available_kernels()), key=_ORDER.index)
        for choice in choices:
            if choice != _SLOW_TO_START:
                yield from self._add(rows, replace(usual, pointwise_kernels=choice))
        if torch.cuda.is_available():
            yield from self._add(rows, replace(fastest(rows) or usual, cuda_graphs=True))
        for size in self.sizes[1:]:
            yield from self._add(rows, replace(fastest(rows) or usual, micro_batch_tokens=size))
        for length, pairs in self.fixed:
            # A pair has to fit.
            size = max(self.sizes[-1], 2 * length)
            variant = replace(fastest(rows) or usual, micro_batch_tokens=size)
            texts = {"sequence_length": length, "pairs": pairs, "spread": False}
            yield from self._add(rows, variant, **texts)
        # A compiler of C++ takes longer than the rest of a rehearsal.
        if _SLOW_TO_START in choices and torch.cuda.is_available():
            yield from self._add(rows, replace(usual, pointwise_kernels=_SLOW_TO_START))

    def _add(self, rows: list[Row], variant: Variant, **changes: Any) -> Iterator[Row]:
        point = {**self.base, **asdict(variant), **changes}
        length = f"{point['sequence_length']:,} tokens"
        about = {
            "width": point["model"]["hidden_size"],
            "texts": f"{_UP_TO} {length}" if point["spread"] else length,
            **asdict(variant),
        }
        if rows and self.seconds_left() < rows[0]["seconds in all"]:
            yield {**about, "note": "no time was left"}
            return
        started = now()
        row = {**about, **self.run(point)}
        row["seconds in all"] = now() - started
        rows.append(row)
        yield row


def fastest(rows: Sequence[Mapping[str, Any]]) -> Variant | None:
    """The variant of most tokens/s on texts of different lengths; None if none was measured."""
    measured = [row for row in rows if row.get("tokens/s") and row["texts"].startswith(_UP_TO)]
    if not measured:
        return None
    best = max(measured, key=lambda row: row["tokens/s"])
    return Variant(**{name: best[name] for name in Variant.__dataclass_fields__})


def time_variant(learner: RewardLearner, steps: int, peak_flops: float) -> Row:
    """Speed of ``steps`` steps after some that are not timed, by the tokens that they have."""
    warm_up = _WARM_UP if learner.model.graphs is None else _GRAPHS_WARM_UP
    started = now()
    first = learner.train_step(0)
    first_seconds = now() - started
    for step in range(1, warm_up):
        learner.train_step(step)
    started = now()
    metrics = [learner.train_step(warm_up + step) for step in range(steps)]
    seconds = now() - started
    tokens, flops = (sum(each[name] for each in metrics) for name in ("tokens", "flops"))
    return {
        "tokens/s": tokens / seconds,
        "MFU": flops / seconds / peak_flops,
        "s/step": seconds / steps,
        "tokens a step": tokens / steps,
        "peak GiB": peak_gib(),
        "first step, s": first_seconds,
        "first loss": first["loss"],
        "last loss": metrics[-1]["loss"],
    }
