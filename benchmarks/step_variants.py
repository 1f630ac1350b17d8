"""Speed of a training step at one hidden size, by kernels, graphs and micro-batch.

gpu_first_hour.py runs this measurement. All variants run in one process, each on a
new learner with the same random weights and the same pairs, whose lengths vary as those of chats.
Not all combinations are run: pointwise kernels are compared first, then attention kernels, and then
CUDA graphs and micro-batch sizes with the fastest kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from common import now, peak_gib
from step_settings import UP_TO, Variant, fastest
from synthetic import time_steps

from nemo_aligner.models.attention.flash_packages import available_packages
from nemo_aligner.models.pointwise.choice import available_kernels
from nemo_aligner.training.learner import RewardLearner

Row = dict[str, Any]
Point = dict[str, Any]
_WARM_UP = 2
_GRAPHS_WARM_UP = 5  # a graph is captured when a pack's size occurs for the second time
# These kernels compile for up to half a minute at their first use, so they are measured last.
_SLOW_TO_START = ("compile", "liger")


@dataclass(frozen=True)
class Experiment:
    """How the variants of a training step at one hidden size are measured.

    Attributes:
        base: the point (model and step size, see synthetic.py) that all variants change.
        sizes: the values of ``micro_batch_tokens``, the usual one first, the smallest last.
        fixed: (length, number of pairs) of further measurements, which come last. In each, all
            texts have the same length.
        run: measures ``time_variant`` at a point; its row has a ``note`` if it failed.
        seconds_left: returns how much of the part's time is left.
    """

    base: Point
    sizes: Sequence[int]
    fixed: Sequence[tuple[int, int]]
    run: Callable[[Point], Row]
    seconds_left: Callable[[], float]

    def rows(self) -> Iterator[Row]:
        """Yield a row for each variant once it is measured; the most informative come first."""
        rows: list[Row] = []
        usual = Variant(micro_batch_tokens=self.sizes[0])
        choices = [choice.value for choice in available_kernels()]
        slow = [choice for choice in _SLOW_TO_START if choice in choices]
        for choice in choices:
            if choice not in slow:
                yield from self._add(rows, replace(usual, pointwise_kernels=choice))
        for package in available_packages():
            best = fastest(rows) or usual
            yield from self._add(rows, replace(best, attention_kernels=package.value))
        if torch.cuda.is_available():
            yield from self._add(rows, replace(fastest(rows) or usual, cuda_graphs=True))
        larger, smaller = self.sizes[1:2], self.sizes[2:]
        for size in larger:
            yield from self._add(rows, replace(fastest(rows) or usual, micro_batch_tokens=size))
        for length, pairs in self.fixed:
            # A micro-batch must hold at least one pair.
            size = max(self.sizes[-1], 2 * length)
            variant = replace(fastest(rows) or usual, micro_batch_tokens=size)
            texts = {"sequence_length": length, "pairs": pairs, "spread": False}
            yield from self._add(rows, variant, **texts)
        # Leave out the slow kernels on a CPU: they would invoke a C++ compiler, which takes longer
        # than all other variants.
        for choice in slow if torch.cuda.is_available() else ():
            yield from self._add(rows, replace(usual, pointwise_kernels=choice))
        for size in smaller:
            yield from self._add(rows, replace(fastest(rows) or usual, micro_batch_tokens=size))

    def _add(self, rows: list[Row], variant: Variant, **changes: Any) -> Iterator[Row]:
        point = {**self.base, **asdict(variant), **changes}
        length = f"{point['sequence_length']:,} tokens"
        about = {
            "width": point["model"]["hidden_size"],
            "texts": f"{UP_TO} {length}" if point["spread"] else length,
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


def time_variant(learner: RewardLearner, steps: int, peak_flops: float) -> Row:
    """Measure the speed of ``steps`` training steps after untimed warm-up steps."""
    warm_up = _WARM_UP if learner.model.graphs is None else _GRAPHS_WARM_UP
    (first,), first_seconds = time_steps(learner, 0, 1)
    time_steps(learner, 1, warm_up - 1)
    graphs = learner.model.graphs
    counts_before = graphs and (graphs.replayed, graphs.eager)
    metrics, seconds = time_steps(learner, warm_up, steps)
    by_graphs = (
        graphs
        and f"{graphs.replayed - counts_before[0]}, {graphs.eager - counts_before[1]} without"
    )
    tokens, flops = (
        sum(step_metrics[name] for step_metrics in metrics) for name in ("tokens", "flops")
    )
    return {
        "tokens/s": tokens / steps / seconds,
        "MFU": flops / steps / seconds / peak_flops,
        "s/step": seconds,
        "tokens a step": tokens / steps,
        "peak GiB": peak_gib(),
        "packs by graphs": by_graphs,
        "first step, s": first_seconds,
        "first loss": first["loss"],
        "last loss": metrics[-1]["loss"],
    }
