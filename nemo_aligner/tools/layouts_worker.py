"""Score the same samples at every parallel layout of a process group, in different batches.

``score_everywhere`` does this on the ranks of the current job. ``run_world`` starts new processes
that do it: ``python -m nemo_aligner.tools.layouts_worker JOB RESULT`` reads the job from one JSON
file and writes the rewards to another one. ``nemo-aligner check`` uses both.
"""

from __future__ import annotations

import gc
import json
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed import get_world_size

from nemo_aligner.checkpoint.nemo.archive import open_nemo
from nemo_aligner.checkpoint.nemo.reward_model import (
    CheckpointDescription,
    load_pretrained,
    load_reward_model,
)
from nemo_aligner.config.common import Precision
from nemo_aligner.config.model import ROWS_BY_DEVICE, Recompute
from nemo_aligner.contract.messages import as_json, read_text
from nemo_aligner.contract.scorer import score_all
from nemo_aligner.contract.steps import aggregate_texts
from nemo_aligner.data.packing import SequenceReads, pack_sequences
from nemo_aligner.distributed.launch import launch, run_ranks
from nemo_aligner.distributed.layout import (
    LayoutSizes,
    ParallelLayout,
    destroy_layout,
    initialize_layout,
)
from nemo_aligner.models.batch_invariance import make_batch_invariant
from nemo_aligner.models.shapes.decoder import ModelShape
from nemo_aligner.models.step import forward_backward, gather_rewards
from nemo_aligner.models.training_wrap import wrap_for_training
from nemo_aligner.serving.engine.scorer import RewardScorer, load_scorer
from nemo_aligner.tools.invariance import Score, Scored, score_alone, score_calls
from nemo_aligner.utils.errors import ConfigError, PeerError
from nemo_aligner.utils.processes import environment, is_first_rank, report


def fitting_layouts(world_size: int, shape: ModelShape) -> tuple[list[LayoutSizes], list[str]]:
    """List the layouts of ``world_size`` ranks that split the model evenly.

    Layouts that split the model into the most pieces come first, because the first one also
    computes the fp32 reference, which takes the most memory.

    Returns:
        The layouts, and for each other layout the reason why it does not fit.
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
            fitting.append(sizes)
            # Sequence parallelism splits sequences over the tensor parallel ranks, so it needs at
            # least two.
            if tp > 1:
                fitting.append(replace(sizes, sequence_parallel=True))
    for sizes in [sizes for sizes in fitting if sizes.dp > 1 and shape.experts is not None]:
        expert_parallel = replace(sizes, ep=sizes.dp)
        try:
            shape.check_fits(sizes.tp, sizes.pp, sizes.dp)
            fitting.append(expert_parallel)
        except ConfigError as error:
            reasons.append(f"{expert_parallel}: {error}")
    if world_size > 1:
        context_parallel = LayoutSizes(cp=world_size)
        try:
            shape.check_fits(1, 1, cp=world_size)
            fitting.append(context_parallel)
        except ConfigError as error:
            reasons.append(f"{context_parallel}: {error}")
    return sorted(fitting, key=lambda sizes: -sizes.tp * sizes.pp * sizes.ep), reasons


def score_everywhere(
    checkpoint: str, texts: list[Any], precision: Precision, min_model_parallel: int = 1
) -> Scored:
    """Score ``texts`` at every layout of this process group; every rank calls this once.

    The reference is scored in fp32 at the first layout. Layouts with fewer than
    ``min_model_parallel`` ranks for each model replica are skipped.

    Raises:
        ConfigError: no layout of this many processes fits the model.
    """
    with launch(), open_nemo(checkpoint) as folder:
        shape = ModelShape.from_config(folder.config)
        layouts, reasons = fitting_layouts(get_world_size(), shape)
        layouts = [
            sizes for sizes in layouts if sizes.tp * sizes.pp * sizes.ep >= min_model_parallel
        ]
        if not layouts:
            raise ConfigError(
                f"no layout of {get_world_size()} processes fits the model: " + "; ".join(reasons)
            )
        rewards = {
            str(sizes): _score_at_layout(folder.root, texts, precision, sizes, shape)
            for sizes in layouts
        }
        if precision is Precision.fp32:
            reference = rewards[str(layouts[0])]["alone"]
        else:
            reference = _score_reference(folder.root, texts, layouts[0])
    return Scored(rewards, reference, reasons)


def _score_at_layout(
    checkpoint: Path,
    texts: list[Any],
    precision: Precision,
    sizes: LayoutSizes,
    shape: ModelShape,
) -> dict[str, np.ndarray]:
    """Compute the rewards ``[N, A]`` at one layout: kind of batches, or training -> rewards."""
    layout = initialize_layout(**sizes.arguments)
    _announce(f"{sizes}: in different batches")
    rewards = _score_in_batches(checkpoint, texts, precision, layout)
    variants = {"training": Recompute.none, "training, recompute": most_recomputation(shape)}
    for name, recompute in variants.items():
        _announce(f"{sizes}: {name}")
        _free_memory()
        rewards[name] = _score_in_training(checkpoint, texts, precision, layout, recompute)
    destroy_layout()
    _free_memory()
    return rewards


def most_recomputation(shape: ModelShape) -> Recompute:
    """Return the kind that recomputes the most activations of those that the model supports."""
    return Recompute.full if shape.can_recompute_fully else Recompute.selective


def _score_reference(checkpoint: Path, texts: list[Any], sizes: LayoutSizes) -> np.ndarray:
    """Compute the rewards ``[N, A]`` in fp32, each sample in a batch of one."""
    layout = initialize_layout(**sizes.arguments)
    _announce(f"{sizes}: the reference in fp32, in batches of one")
    scorer = load_scorer(checkpoint, layout, precision=Precision.fp32, micro_batch_tokens=2**30)
    rewards = score_alone(partial(score_all, scorer), texts)
    destroy_layout()
    return rewards


def _score_in_batches(
    checkpoint: Path, texts: list[Any], precision: Precision, layout: ParallelLayout
) -> dict[str, np.ndarray]:
    """Compute the rewards ``[N, A]`` in four kinds of batches, by the kind's name.

    The kinds are batches of one, one batch, small packs, and small packs with a prefix cache.
    """
    model = load_reward_model(checkpoint, layout, precision)
    make_batch_invariant(model.model, ROWS_BY_DEVICE)
    small_budget = model.contract.seq_length

    def build_score(token_budget: int, cache_tokens: int = 0) -> Score:
        scorer = RewardScorer(
            model.model,
            model.contract,
            model.tokenizer,
            layout,
            token_budget,
            prefix_cache_tokens=cache_tokens,
        )
        return partial(score_all, scorer)

    score = build_score(small_budget)
    rewards = {
        "alone": score_alone(score, texts),
        "all together": build_score(max(8192, 4 * small_budget))(texts),
    }
    for seed in (1, 2):
        order = np.random.RandomState(seed).permutation(len(texts))
        rewards[f"small packs, order {seed}"] = score_calls(score, texts, [order])
    # Score twice, in opposite orders: the second call takes prefixes from the cache.
    score_with_cache = build_score(small_budget, cache_tokens=4 * small_budget)
    score_with_cache(texts[::-1])
    return {**rewards, "from a prefix cache": score_with_cache(texts)}


def _score_in_training(
    checkpoint: Path,
    texts: list[Any],
    precision: Precision,
    layout: ParallelLayout,
    recompute: Recompute,
) -> np.ndarray:
    """Compute the rewards ``[N, A]`` in the forward pass of a training step."""
    base = CheckpointDescription.read(checkpoint)
    contract = base.contract
    assert contract is not None, "scoring before has read it"
    encoded = [contract.encode(base.tokenizer, text) for text in texts]
    positions = [sample.reads or (len(sample.token_ids) - 1,) for sample in encoded]
    bounds = [*accumulate(map(len, positions), initial=0)]
    local = slice(layout.dp_rank, None, layout.dp)
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
    by_length = pretrained.model.length_dependent_rope
    packs = pack_sequences(
        [sample.token_ids for sample in encoded[local]],
        contract.seq_length,
        SequenceReads.number(positions)[local],
        by_length,
    )
    ddp = wrap_for_training(pretrained.model)
    ddp.train()
    rewards = forward_backward(ddp, packs, layout, _sum_and_count)
    shape = (bounds[-1], contract.num_outputs)
    outputs = gather_rewards(rewards, packs, shape, layout).numpy()
    return aggregate_texts(contract.rewards_of(outputs), bounds, contract.aggregation)


def _sum_and_count(rewards: Any, _: Any) -> tuple[Any, Any]:
    """Serve as a loss function: return the sum and the number of the rewards.

    A training step needs a loss function, but here only the rewards of its forward pass are used.
    """
    return rewards.sum(), torch.tensor(len(rewards), device=rewards.device)


def _announce(step: str) -> None:
    """Print on the first rank what is scored next: for a real model each step takes minutes."""
    if is_first_rank():
        print(f"  {step}", flush=True)


def _free_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# The code below starts new processes that run ``score_everywhere``.


def run_world(job: Mapping[str, Any], size: int) -> Scored:
    """Run ``score_everywhere`` in ``size`` new processes, and return its result.

    Args:
        job: ``checkpoint``, ``texts`` and ``precision``.
        size: number of processes.

    Raises:
        PeerError: a process failed; it has printed its error.
    """
    print(f"scoring in {job['precision']} at {size} process{'es' * (size > 1)}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        job_path, result_path = Path(folder, "job.json"), Path(folder, "result.json")
        texts = [text if isinstance(text, str) else as_json(text) for text in job["texts"]]
        job_path.write_text(json.dumps({**job, "texts": texts}))
        arguments = ["-m", "nemo_aligner.tools.layouts_worker", str(job_path), str(result_path)]
        if run_ranks(arguments, size, environment()):
            raise PeerError(f"the run of {size} processes failed; see its error above")
        return Scored.from_dict(json.loads(result_path.read_text()))


def main(job_path: str, result_path: str) -> int:
    """Run one rank of ``run_world``; return its exit code.

    Args:
        job_path: JSON file with the job.
        result_path: file to which the first rank writes the rewards.
    """
    job = json.loads(Path(job_path).read_text())
    # Otherwise every collection scans the million objects of the imported modules, which stay.
    gc.freeze()
    try:
        texts = [read_text(text) for text in job["texts"]]
        scored = score_everywhere(job["checkpoint"], texts, Precision(job["precision"]))
    except Exception as error:
        return report(error)
    if is_first_rank():
        Path(result_path).write_text(json.dumps(scored.to_dict()))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
