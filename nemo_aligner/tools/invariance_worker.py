"""The rewards of some texts at every layout of this world of processes.

``python -m nemo_aligner.tools.invariance_worker ASKED RESULT``, also under torchrun, answers what
``worlds.run_world`` asked for, file to file.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed import get_world_size

from nemo_aligner.checkpoint.nemo.open import open_nemo, read_model_config
from nemo_aligner.checkpoint.nemo.reward_model import (
    load_pretrained,
    load_reward_model,
    read_text_rules,
)
from nemo_aligner.config.common import Precision
from nemo_aligner.config.model import BATCH_INVARIANT_ROWS, Recompute
from nemo_aligner.data.packing import pack_sequences
from nemo_aligner.distributed.launch import launch
from nemo_aligner.distributed.layout import (
    LayoutSizes,
    ParallelLayout,
    destroy_layout,
    initialize_layout,
)
from nemo_aligner.models.reward_model import make_batch_invariant, wrap_for_training
from nemo_aligner.models.shape import ModelShape, read_lora
from nemo_aligner.models.step import forward_backward, gather_rewards
from nemo_aligner.serving.engine.scorer import RewardScorer, load_scorer
from nemo_aligner.tools.invariance import Scored, fitting_layouts
from nemo_aligner.utils.errors import ConfigError
from nemo_aligner.utils.processes import is_first_rank, report


def score_everywhere(
    checkpoint: str, texts: list[Any], precision: Precision, min_model_parallel: int = 1
) -> Scored:
    """Score every variant; the reference is fp32 at the first layout. Every rank calls it once.

    Raises:
        ConfigError: no layout of so many processes fits.
    """
    with launch(), open_nemo(checkpoint) as folder:
        layouts, reasons = fitting_layouts(get_world_size(), ModelShape.from_config(folder.config))
        layouts = [sizes for sizes in layouts if sizes.tp * sizes.pp >= min_model_parallel]
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
    layout = initialize_layout(sizes.tp, sizes.pp, sizes.sequence_parallel)
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
    layout = initialize_layout(sizes.tp, sizes.pp, sizes.sequence_parallel)
    budget = 2**30
    scorer = load_scorer(checkpoint, layout, precision=precision, micro_batch_tokens=budget)
    rewards = np.concatenate([scorer.score([text]) for text in texts])
    destroy_layout()
    return rewards


def _scored(
    checkpoint: Path, texts: list[Any], precision: Precision, layout: ParallelLayout
) -> dict[str, np.ndarray]:
    model = load_reward_model(checkpoint, layout, precision)
    make_batch_invariant(model.model, BATCH_INVARIANT_ROWS)
    small = model.contract.seq_length

    def scorer(budget: int, cached: int = 0) -> RewardScorer:
        given = (model.model, model.contract, model.tokenizer, layout, budget)
        return RewardScorer(*given, prefix_cache_tokens=cached)

    def score(chosen: Sequence[Any], budget: int) -> np.ndarray:
        return scorer(budget).score(chosen)

    found = {
        "alone": np.concatenate([score([text], small) for text in texts]),
        "all together": score(texts, max(8192, 4 * small)),
    }
    for seed in (1, 2):
        order = np.random.RandomState(seed).permutation(len(texts))
        shuffled = score([texts[index] for index in order], small)
        found[f"small packs, order {seed}"] = shuffled[np.argsort(order)]
    cached = scorer(small, cached=4 * small)
    cached.score(texts[::-1])
    found["from a prefix cache"] = cached.score(texts)
    return found


def _trained_on(
    checkpoint: Path,
    texts: list[Any],
    precision: Precision,
    layout: ParallelLayout,
    recompute: Recompute,
) -> np.ndarray:
    """The rewards of a training step's forward pass."""
    tokenizer, contract = read_text_rules(checkpoint)
    assert contract is not None, "its rewards were scored before"
    indices = torch.arange(layout.dp_rank, len(texts), layout.dp)
    sequences = [contract.encode(tokenizer, texts[index]).token_ids for index in indices]
    packs = [
        replace(pack, rows=indices[pack.rows])
        for pack in pack_sequences(sequences, contract.seq_length)
    ]
    pretrained = load_pretrained(
        checkpoint,
        layout,
        num_attributes=len(contract.attributes),
        outputs_per_attribute=contract.outputs_per_attribute,
        precision=precision,
        recompute=recompute,
        lora=read_lora(read_model_config(checkpoint)),
        reply_marker=contract.reply_marker,
    )
    ddp = wrap_for_training(pretrained.model)
    ddp.train()
    rewards = forward_backward(ddp, packs, layout, _sum_and_count)
    shape = (len(texts), len(contract.attributes) * contract.outputs_per_attribute)
    outputs = gather_rewards(rewards, packs, shape, layout).numpy()
    return contract.rewards_of(outputs)


def _sum_and_count(rewards: Any, _: Any) -> tuple[Any, Any]:
    return rewards.sum(), torch.tensor(len(rewards), device=rewards.device)


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def main(asked: str, result: str) -> int:
    """One world's part: what ``run_world`` asked for, into a file."""
    job = json.loads(Path(asked).read_text())
    try:
        scored = score_everywhere(job["checkpoint"], job["texts"], Precision(job["precision"]))
    except Exception as error:
        return report(error)
    if is_first_rank():
        Path(result).write_text(json.dumps(scored.to_dict()))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
