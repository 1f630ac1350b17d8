"""Are a reward's bits the same in every batch, and its value at every layout and precision?

``nemo-aligner check`` asks that of a checkpoint, the benchmark and the tests of any scorer.
``python -m nemo_aligner.tools.invariance ASKED RESULT``, also under torchrun, answers what
``run_world`` asked for, file to file.
"""

from __future__ import annotations

import gc
import json
import math
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.distributed import get_world_size

from nemo_aligner.checkpoint.nemo.archive import open_nemo
from nemo_aligner.checkpoint.nemo.reward_model import (
    BaseCheckpoint,
    load_pretrained,
    load_reward_model,
)
from nemo_aligner.config.common import Precision, RecordKind
from nemo_aligner.config.model import ROWS_BY_DEVICE, Recompute
from nemo_aligner.contract.contract import NoTemplateError, OverlongError, ScoringContract
from nemo_aligner.contract.scorer import score_all
from nemo_aligner.contract.tokenizer import Tokenizer
from nemo_aligner.data.demo import build_demo_pairs
from nemo_aligner.data.packing import pack_sequences
from nemo_aligner.data.readers import ReaderConfig, parse_file
from nemo_aligner.distributed.launch import launch, run_ranks
from nemo_aligner.distributed.layout import (
    LayoutSizes,
    ParallelLayout,
    destroy_layout,
    initialize_layout,
)
from nemo_aligner.models.reward_model import make_batch_invariant, wrap_for_training
from nemo_aligner.models.shape import ModelShape
from nemo_aligner.models.step import forward_backward, gather_rewards
from nemo_aligner.serving.engine.scorer import RewardScorer, load_scorer
from nemo_aligner.serving.run import running_server
from nemo_aligner.utils.errors import CheckpointError, ConfigError, DataError, PeerError
from nemo_aligner.utils.processes import environment, is_first_rank, is_launched, report

# The server is not a layout, and a variant with this prefix is not scored.
SERVER, TRAINING = "server", "training"
_EPSILON = {"fp32": 2.0**-24, "bf16": 2.0**-8, "fp16": 2.0**-11}

# A list of N texts -> rewards [N, ...].
Score: TypeAlias = Callable[[list[Any]], np.ndarray]
# Layout -> variant -> rewards [N, A].
Rewards: TypeAlias = dict[str, dict[str, np.ndarray]]


# The verb: which texts, and where they are scored.


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
    base = BaseCheckpoint.read(check.checkpoint)
    contract = base.contract
    if contract is None:
        raise CheckpointError(
            f"{check.checkpoint}: it has no scoring contract; wanted a reward model"
        )
    texts = _choose_texts(check, base.tokenizer, contract)
    precision = check.precision or contract.dtype
    if is_launched():
        least = check.min_model_parallel
        scored = score_everywhere(check.checkpoint, texts, Precision(precision), least)
    else:
        scored = _in_new_worlds(check, texts, precision)
    for reason in dict.fromkeys(scored.reasons):
        print(f"does not fit: {reason}")
    bars = choose_bars(precision, base.shape.num_layers, scored.reference)
    rows = compare_all(scored, contract.attribute_weights, bars)
    summary = summarise(rows, bars)
    print(f"\n{render_rows(rows)}\n\n{precision}: {summary}", flush=True)
    if output is not None:
        plain = [_plain(row) for row in rows]
        content = {"precision": precision, "summary": summary, "rows": plain}
        output.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n")
    return all(row.ok for row in rows)


def _plain(row: Row) -> dict[str, Any]:
    """Plain values of a row; JSON has no NaN."""
    difference = row.difference if math.isfinite(row.difference) else None
    return {**asdict(row), "compared": row.compared.name, "difference": difference}


def _choose_texts(check: Check, tokenizer: Tokenizer, contract: ScoringContract) -> list[Any]:
    """Texts of pairs that the contract takes, as many as wanted: chosen, rejected, ..."""
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
    most = check.processes or torch.cuda.device_count() or 2
    worlds = [run_world(job, 2**power) for power in range(10) if 2**power <= most]
    rewards = {layout: found for world in worlds for layout, found in world.rewards.items()}
    if check.serve:
        rewards[SERVER] = score_over_http(check.checkpoint, precision, texts)
    reasons = [reason for world in worlds for reason in world.reasons]
    return Scored(rewards, worlds[0].reference, reasons)


# Rewards, and what counts as the same.


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
    """Largest allowed difference of a reward, and largest margin whose verdict may flip."""

    reward: float
    margin: float


# Bars in units of the random walk of ``choose_bars``. Measured on 64 texts, the largest difference
# was 1.7 to 5 units; training also rounds the residual stream, and moved rewards 1.7 times as far.
_WALKS = {Compared.layout: 6.0, Compared.training: 10.0, Compared.precision: 6.0}
_FP32_UNITS = 100.0  # the sums inside a product round, too; docs/scoring_contract.md has figures


def fitting_layouts(world_size: int, shape: ModelShape) -> tuple[list[LayoutSizes], list[str]]:
    """Layouts of ``world_size`` ranks that split the model evenly, and why the others do not.

    Those that split it into the most pieces come first, because the first one also computes the
    fp32 reference, which takes the most memory.
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
    for sizes in [each for each in fitting if each.dp > 1 and shape.experts is not None]:
        shared = replace(sizes, ep=sizes.dp)
        try:
            shape.check_fits(sizes.tp, sizes.pp, sizes.dp)
            fitting.append(shared)
        except ConfigError as error:
            reasons.append(f"{shared}: {error}")
    if world_size > 1:
        fitting.append(LayoutSizes(cp=world_size))  # fits any model
    return sorted(fitting, key=lambda sizes: -sizes.tp * sizes.pp * sizes.ep), reasons


def choose_bars(precision: str, num_layers: int, reference: np.ndarray) -> dict[Compared, Bar]:
    """Choose the bars for a model whose rewards in fp32 are ``reference [N, A]``.

    In other batches nothing may change. Otherwise every layer rounds twice; independent rounding
    errors of one size add up like a random walk, so a bar is a multiple of
    ``epsilon * sqrt(2 * (num_layers + 4))``. Rounding the weights and whatever stands around the
    layers counts as four more. In 16 bits it is in units of the rewards' spread, in fp32 of the
    largest |reward|, or of 1 if that is more. A verdict may flip where its margin is below twice
    the bar. ``docs/performance.md`` has the measurements.
    """
    exact = {Compared.company: Bar(0.0, 0.0)}
    walk = _EPSILON[precision] * math.sqrt(2 * (num_layers + 4))
    if precision == "fp32":
        bar = _FP32_UNITS * walk * max(1.0, float(np.abs(reference).max()))
        return exact | dict.fromkeys((Compared.layout, Compared.training), Bar(bar, 2 * bar))
    walk *= float(reference.std(axis=0).max())
    return exact | {
        compared: Bar(steps * walk, 2 * steps * walk) for compared, steps in _WALKS.items()
    }


def compare_all(
    scored: Scored, weights: Sequence[float], bars: Mapping[Compared, Bar]
) -> list[Row]:
    """Compare each layout's variants with its texts alone, and those with the first layout.

    Only what ``bars`` names is compared: in fp32 there is no comparison with fp32.
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
    """Compare ``[N, A]`` rewards of pairs (chosen, rejected, chosen, ...) with a reference."""
    difference = float(np.abs(rewards - reference).max())
    margins, wanted = _margins(rewards, weights), _margins(reference, weights)
    turned = (np.sign(margins) != np.sign(wanted)) & (np.abs(wanted) > bar.margin)
    flips = int(turned.sum())
    return Row(
        compared=compared,
        layout=layout,
        variant=variant,
        texts=len(rewards),
        changed=count_changed(rewards, reference),
        difference=difference,
        flips=flips,
        # Not ``difference > bar``: a NaN has to fail.
        ok=difference <= bar.reward and not flips,
    )


def _margins(rewards: np.ndarray, weights: Sequence[float]) -> np.ndarray:
    merged = rewards.astype(np.float64) @ np.asarray(weights, dtype=np.float64)
    return merged[::2] - merged[1::2]


def render_rows(rows: Sequence[Row]) -> str:
    """Render a table for each kind of comparison."""
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
    """Summarise in a line, and one for each kind of comparison: its worst, and its bar."""
    missed = sum(not row.ok for row in rows)
    lines = ["the same everywhere" if not missed else f"MISSED in {missed} of {len(rows)} rows"]
    for compared, bar in bars.items():
        some = [row for row in rows if row.compared is compared]
        if not some:
            continue
        # max() skips a NaN unless it comes first.
        worst = max(math.inf if math.isnan(row.difference) else row.difference for row in some)
        found = f"against {compared.value}: largest |difference| {worst:.2e}"
        flips = f"{sum(row.flips for row in some)} verdicts turned"
        wanted = "wanted 0: the same bits" if not bar.reward else f"wanted {bar.reward:.2g} or less"
        beyond = f" where the margin is above {bar.margin:.2g}" if bar.margin else ""
        lines.append(f"{found} ({wanted}), {flips}{beyond}")
    return "\n  ".join(lines)


# Any scorer, in any order of calls.


def score_alone(score: Score, texts: Sequence[Any]) -> np.ndarray:
    """Rewards of texts, each in a call of its own."""
    return score_calls(score, texts, [[index] for index in range(len(texts))])


def score_calls(
    score: Score, texts: Sequence[Any], calls: Iterable[Sequence[int] | np.ndarray]
) -> np.ndarray:
    """Rewards of texts, in their order, from calls that have each index once among them."""
    calls = [np.asarray(call) for call in calls]
    rewards = np.concatenate([score([texts[index] for index in call]) for call in calls])
    return rewards[np.argsort(np.concatenate(calls))]


def count_changed(rewards: np.ndarray, reference: np.ndarray) -> int:
    """Rewards whose bits are not those of the reference."""
    same = (rewards == reference) & (np.signbit(rewards) == np.signbit(reference))
    return int((~same).sum())


# The rewards at every layout of this process group.


def score_everywhere(
    checkpoint: str, texts: list[Any], precision: Precision, min_model_parallel: int = 1
) -> Scored:
    """Score every variant; the reference is fp32 at the first layout. Every rank calls it once.

    Raises:
        ConfigError: no layout of so many processes fits.
    """
    with launch(), open_nemo(checkpoint) as folder:
        layouts, reasons = fitting_layouts(get_world_size(), ModelShape.from_config(folder.config))
        layouts = [each for each in layouts if each.tp * each.pp * each.ep >= min_model_parallel]
        if not layouts:
            raise ConfigError(
                f"no layout of {get_world_size()} processes fits: " + "; ".join(reasons)
            )
        found = {str(sizes): _at_layout(folder.root, texts, precision, sizes) for sizes in layouts}
        if precision is Precision.fp32:
            reference = found[str(layouts[0])]["alone"]
        else:
            reference = _alone(folder.root, texts, Precision.fp32, layouts[0])
    return Scored(found, reference, reasons)


def _at_layout(
    checkpoint: Path, texts: list[Any], precision: Precision, sizes: LayoutSizes
) -> dict[str, np.ndarray]:
    layout = initialize_layout(**sizes.arguments)
    found = _scored(checkpoint, texts, precision, layout)
    for name, recompute in (("training", Recompute.none), ("training, recompute", Recompute.full)):
        _free()
        found[name] = _trained_on(checkpoint, texts, precision, layout, recompute)
    destroy_layout()
    _free()
    return found


def _alone(
    checkpoint: Path, texts: list[Any], precision: Precision, sizes: LayoutSizes
) -> np.ndarray:
    layout = initialize_layout(**sizes.arguments)
    scorer = load_scorer(checkpoint, layout, precision=precision, micro_batch_tokens=2**30)
    rewards = score_alone(partial(score_all, scorer), texts)
    destroy_layout()
    return rewards


def _scored(
    checkpoint: Path, texts: list[Any], precision: Precision, layout: ParallelLayout
) -> dict[str, np.ndarray]:
    model = load_reward_model(checkpoint, layout, precision)
    make_batch_invariant(model.model, ROWS_BY_DEVICE)
    small = model.contract.seq_length

    def scoring(budget: int, cached: int = 0) -> Score:
        given = (model.model, model.contract, model.tokenizer, layout, budget)
        return partial(score_all, RewardScorer(*given, prefix_cache_tokens=cached))

    plain = scoring(small)
    found = {
        "alone": score_alone(plain, texts),
        "all together": scoring(max(8192, 4 * small))(texts),
    }
    for number in (1, 2):
        order = np.random.RandomState(number).permutation(len(texts))
        found[f"small packs, order {number}"] = score_calls(plain, texts, [order])
    cached = scoring(small, cached=4 * small)
    cached(texts[::-1])
    return {**found, "from a prefix cache": cached(texts)}


def _trained_on(
    checkpoint: Path,
    texts: list[Any],
    precision: Precision,
    layout: ParallelLayout,
    recompute: Recompute,
) -> np.ndarray:
    """The rewards of a training step's forward pass."""
    base = BaseCheckpoint.read(checkpoint)
    contract = base.contract
    assert contract is not None, "its rewards were scored before"
    indices = torch.arange(layout.dp_rank, len(texts), layout.dp)
    sequences = [contract.encode(base.tokenizer, texts[index]).token_ids for index in indices]
    pretrained = load_pretrained(
        checkpoint,
        layout,
        num_attributes=len(contract.attributes),
        outputs_per_attribute=contract.outputs_per_attribute,
        precision=precision,
        recompute=recompute,
        lora=base.shape.lora,
        reply_marker=contract.reply_marker,
    )
    by_length = pretrained.model.rotation_by_length
    packs = [
        replace(pack, rows=indices[pack.rows])
        for pack in pack_sequences(sequences, contract.seq_length, None, by_length)
    ]
    ddp = wrap_for_training(pretrained.model)
    ddp.train()
    rewards = forward_backward(ddp, packs, layout, _sum_and_count)
    shape = (len(texts), contract.num_outputs)
    outputs = gather_rewards(rewards, packs, shape, layout).numpy()
    return contract.rewards_of(outputs)


def _sum_and_count(rewards: Any, _: Any) -> tuple[Any, Any]:
    return rewards.sum(), torch.tensor(len(rewards), device=rewards.device)


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def main(asked: str, result: str) -> int:
    """Score what ``run_world`` asked for, from file to file, on one rank."""
    job = json.loads(Path(asked).read_text())
    try:
        scored = score_everywhere(job["checkpoint"], job["texts"], Precision(job["precision"]))
    except Exception as error:
        return report(error)
    if is_first_rank():
        Path(result).write_text(json.dumps(scored.to_dict()))
    return 0


# Process groups and a server that score texts beside this process.


def run_world(job: Mapping[str, Any], size: int) -> Scored:
    """Run ``score_everywhere`` on ``size`` new processes.

    Raises:
        PeerError: they failed, and have printed why.
    """
    print(f"scoring in {job['precision']} at {size} process{'es' * (size > 1)}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        asked, result = Path(folder, "asked.json"), Path(folder, "result.json")
        asked.write_text(json.dumps(job))
        arguments = ["-m", "nemo_aligner.tools.invariance", str(asked), str(result)]
        if run_ranks(arguments, size, environment()):
            raise PeerError(f"the run of {size} processes failed, and has said why")
        return Scored.from_dict(json.loads(result.read_text()))


def score_over_http(checkpoint: str, precision: str, texts: list[Any]) -> dict[str, np.ndarray]:
    """Score over HTTP on a server that is started for it, alone and all together.

    Raises:
        ServingError: the server does not start, or does not answer.
    """
    # Imported here, because check without a server needs no pytriton.
    from nemo_aligner.serving.client.reward import RewardClient

    print(f"scoring in {precision} over HTTP", flush=True)
    settings = [f"rm_model_file={checkpoint}", f"precision={precision}"]
    with (
        tempfile.TemporaryDirectory() as folder,
        running_server(settings, Path(folder, "log")) as url,
        RewardClient(url) as client,
    ):
        return {"alone": score_alone(client.score, texts), "all together": client.score(texts)}


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
