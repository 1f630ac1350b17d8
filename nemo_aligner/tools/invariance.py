"""Is a reward the same in any company, at every layout, in every precision? And the bars."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np

from nemo_aligner.distributed.launch import run_ranks
from nemo_aligner.distributed.layout import LayoutSizes
from nemo_aligner.models.shape import ModelShape
from nemo_aligner.serving.run import served
from nemo_aligner.utils.errors import ConfigError, PeerError
from nemo_aligner.utils.processes import environment

FP32_BAR = 1e-5
# The server is not a layout, and a variant with this prefix is not scored.
SERVER, TRAINING = "server", "training"
_EPSILON = {"bf16": 2.0**-8, "fp16": 2.0**-11}


# Layout -> variant -> rewards [N, A].
Rewards = dict[str, dict[str, np.ndarray]]


@dataclass(frozen=True)
class Scored:
    """Rewards by layout and variant, those to compare with, and why some layouts do not fit."""

    rewards: Rewards
    reference: np.ndarray
    reasons: list[str]

    def to_dict(self) -> dict[str, Any]:
        """Plain lists and numbers, for JSON."""
        rewards = {
            layout: {name: rows.tolist() for name, rows in variants.items()}
            for layout, variants in self.rewards.items()
        }
        reference = self.reference.tolist()
        return {"rewards": rewards, "reference": reference, "reasons": self.reasons}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Scored:
        """Read what ``to_dict`` made, in float64."""
        rewards = {
            layout: {name: np.array(rows) for name, rows in variants.items()}
            for layout, variants in content["rewards"].items()
        }
        return cls(rewards, np.array(content["reference"]), content["reasons"])


class Compared(Enum):
    """Reference of a row's rewards."""

    company = "the same layout, other company"
    layout = "another layout"
    training = "training's forward pass"
    precision = "fp32"


@dataclass(frozen=True)
class Row:
    """One layout and variant against what it is ``compared`` with.

    ``changed`` counts rewards whose bits are other ones, ``difference`` is the largest
    |difference| of a reward; ``flips`` counts pairs whose verdict turned although the margin that
    it is compared with was above the bar's tolerance.
    """

    compared: Compared
    layout: str
    variant: str
    texts: int
    changed: int
    difference: float
    flips: int
    ok: bool


@dataclass(frozen=True)
class Bar:
    """Largest allowed difference from the reference: of a reward, and of a margin."""

    reward: float
    margin: float


# Of 64 texts the largest was 1.7 to 5 such steps; training rounds its residual stream as well, and
# moved rewards 1.7 times as far.
_WALKS = {Compared.layout: 6.0, Compared.training: 10.0, Compared.precision: 6.0}


def fitting_layouts(world_size: int, shape: ModelShape) -> tuple[list[LayoutSizes], list[str]]:
    """The layouts of ``world_size`` ranks that split the model evenly, and why others do not.

    Those that split it into the most pieces come first: where one fits into memory, it does.
    """
    fitting: list[LayoutSizes] = []
    reasons = []
    divisors = [size for size in range(1, world_size + 1) if world_size % size == 0]
    for tp in divisors:
        for pp in (size for size in divisors if world_size % (tp * size) == 0):
            sizes = LayoutSizes(tp=tp, pp=pp, dp=world_size // (tp * pp))
            try:
                shape.check_fits(tp, pp)
            except ConfigError as error:
                reasons.append(f"{sizes}: {error}")
                continue
            fitting += [sizes, replace(sizes, sequence_parallel=True)][: 1 + (tp > 1)]
    return sorted(fitting, key=lambda sizes: -sizes.tp * sizes.pp), reasons


def choose_bars(precision: str, num_layers: int, reference: np.ndarray) -> dict[Compared, Bar]:
    """Choose the bars for a model whose rewards in fp32 are ``reference [N, A]``.

    In other company, nothing. Else in fp32 1e-5, times the largest |reward| where that is above 1,
    and no verdict may turn. In 16 bits every layer rounds: as rounding errors of one size add up
    like a random walk, a bar is so many times ``epsilon * sqrt(2 * (num_layers + 4))``, in units of
    the rewards' own spread. What the weights, and what stands around the layers, are rounded by
    counts as four more. (``docs/performance.md`` has what was measured.)
    """
    exact = {Compared.company: Bar(0.0, 0.0)}
    if precision == "fp32":
        bar = Bar(FP32_BAR * max(1.0, float(np.abs(reference).max())), 0.0)
        return exact | dict.fromkeys((Compared.layout, Compared.training), bar)
    spread = float(reference.std(axis=0).max())
    walk = _EPSILON[precision] * math.sqrt(2 * (num_layers + 4)) * spread
    return exact | {
        compared: Bar(steps * walk, 2 * steps * walk) for compared, steps in _WALKS.items()
    }


def compare_all(
    scored: Scored, weights: Sequence[float], bars: Mapping[Compared, Bar]
) -> list[Row]:
    """Compare every layout's variants with its texts alone, and those with the first layout.

    ``bars`` say what is compared.
    """
    first = next(iter(scored.rewards.values()))["alone"]
    rows = []
    for layout, variants in scored.rewards.items():
        for variant, rewards in variants.items():
            if layout == SERVER:
                others = [(Compared.company, first)]
            elif variant.startswith(TRAINING):
                others = [(Compared.training, first)]
            elif variant == "alone":
                others = [(Compared.layout, first), (Compared.precision, scored.reference)]
            else:
                others = [(Compared.company, variants["alone"])]
            rows += [
                compare(compared, layout, variant, rewards, reference, weights, bars[compared])
                for compared, reference in others
                if compared in bars
            ]
    return rows


def compare(
    compared: Compared,
    layout: str,
    variant: str,
    rewards: np.ndarray,
    reference: np.ndarray,
    weights: Sequence[float],
    bar: Bar,
) -> Row:
    """``[N, A]`` rewards of pairs (chosen, rejected, chosen, ...) against others'."""
    difference = float(np.abs(rewards - reference).max())
    margins, wanted = _margins(rewards, weights), _margins(reference, weights)
    turned = (np.sign(margins) != np.sign(wanted)) & (np.abs(wanted) > bar.margin)
    flips = int(turned.sum())
    return Row(
        compared=compared,
        layout=layout,
        variant=variant,
        texts=len(rewards),
        changed=int((rewards != reference).sum()),
        difference=difference,
        flips=flips,
        # A NaN is no number that is small enough.
        ok=difference <= bar.reward and not flips,
    )


def _margins(rewards: np.ndarray, weights: Sequence[float]) -> np.ndarray:
    merged = rewards.astype(np.float64) @ np.asarray(weights, dtype=np.float64)
    return merged[::2] - merged[1::2]


def render_rows(rows: Sequence[Row]) -> str:
    """The tables for people, one for each thing that is compared."""
    layout = max(len("layout"), *(len(row.layout) for row in rows)) + 2
    variant = max(len("variant"), *(len(row.variant) for row in rows)) + 2
    tables = []
    for compared in Compared:
        head = f"{'layout':<{layout}}{'variant':<{variant}}{'texts':>6}{'other bits':>12}"
        lines = [f"against {compared.value}", f"{head}{'largest |difference|':>22}{'flips':>7}"]
        lines += [
            f"{row.layout:<{layout}}{row.variant:<{variant}}{row.texts:>6}{row.changed:>12}"
            f"{row.difference:>22.2e}{row.flips:>7}" + ("" if row.ok else "   MISSED")
            for row in rows
            if row.compared is compared
        ]
        if len(lines) > 2:
            tables.append("\n".join(lines))
    return "\n\n".join(tables)


def summarise(rows: Sequence[Row], bars: Mapping[Compared, Bar]) -> str:
    """A line in all, and one for each thing that is compared: its worst, and what was wanted."""
    missed = sum(not row.ok for row in rows)
    lines = ["the same everywhere" if not missed else f"MISSED in {missed} of {len(rows)} rows"]
    for compared, bar in bars.items():
        some = [row for row in rows if row.compared is compared]
        if not some:
            continue
        # max() would pass over a NaN.
        worst = max(math.inf if math.isnan(row.difference) else row.difference for row in some)
        found = f"against {compared.value}: largest |difference| {worst:.2e}"
        flips = f"{sum(row.flips for row in some)} verdicts turned"
        wanted = "wanted 0: the same bits" if not bar.reward else f"wanted {bar.reward:.2g} or less"
        beyond = f" where the margin is above {bar.margin:.2g}" if bar.margin else ""
        lines.append(f"{found} ({wanted}), {flips}{beyond}")
    return "\n  ".join(lines)


# Process groups and a server that score texts beside this process.


def run_world(job: Mapping[str, Any], size: int) -> Scored:
    """``score_everywhere`` in a world of ``size`` processes of its own.

    Raises:
        PeerError: the world failed; it has said why on stderr.
    """
    print(f"scoring in {job['precision']} at {size} process{'es' * (size > 1)}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        asked, result = Path(folder, "asked.json"), Path(folder, "result.json")
        asked.write_text(json.dumps(job))
        arguments = ["-m", "nemo_aligner.tools.invariance_worker", str(asked), str(result)]
        if run_ranks(arguments, size, environment()):
            raise PeerError(f"the run of {size} processes failed, and has said why")
        return Scored.from_dict(json.loads(result.read_text()))


def score_over_http(checkpoint: str, precision: str, texts: list[Any]) -> dict[str, np.ndarray]:
    """Rewards by variant, of a server with its settings.

    Raises:
        ServingError: the server does not start, or does not answer.
    """
    # Imported here: whoever leaves the server out needs no pytriton.
    from nemo_aligner.serving.client.reward import RewardClient

    print(f"scoring in {precision} over HTTP", flush=True)
    settings = [f"rm_model_file={checkpoint}", f"precision={precision}"]
    with (
        tempfile.TemporaryDirectory() as folder,
        served(settings, Path(folder, "log")) as url,
        RewardClient(url) as client,
    ):
        alone = np.concatenate([client.score([text]) for text in texts])
        return {"alone": alone, "all together": client.score(texts)}
