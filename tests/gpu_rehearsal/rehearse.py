"""``rehearse.py TASKS RESULTS``: what the tests of this folder run, on a GPU that has no data.

TASKS is a JSON list of ``{"run": a function of this file, "with": its arguments, "given": what to
set of the GPU}``; RESULTS gets of each what was seen, or the error that it ended with.
"""

from __future__ import annotations

import json
import sys
import traceback
from dataclasses import asdict
from functools import wraps
from pathlib import Path
from typing import Any

from tests.gpu_rehearsal.fake_gpu import fake_gpu
from tests.gpu_rehearsal.watch import CUDA, Watch

# Llama 3 8B's proportions.
SHAPE = {
    "num_layers": 4,
    "hidden_size": 256,
    "ffn_hidden_size": 896,
    "num_attention_heads": 4,
    "num_query_groups": 1,
    "kv_channels": 64,
    "vocab_size": 500,
    "max_position_embeddings": 2048,
}
TOKENS = [3, 4, 5, 6] * 32
Found = dict[str, Any]


def train(watch: Watch, settings: list[str]) -> Found:
    from nemo_aligner.config.load import load_config
    from nemo_aligner.config.training import TrainConfig
    from nemo_aligner.training.run import train

    train(load_config(TrainConfig, settings))
    return {}


def evaluate(watch: Watch, settings: list[str]) -> Found:
    from nemo_aligner.config.evaluation import EvaluateConfig
    from nemo_aligner.config.load import load_config
    from nemo_aligner.evaluation.run import evaluate

    evaluate(load_config(EvaluateConfig, settings))
    return {}


def score(watch: Watch, archive: str, precision: str, cached_tokens: int) -> Found:
    """Texts that begin with others', twice."""
    from nemo_aligner.config.common import Precision
    from nemo_aligner.parallel.launch import launch
    from nemo_aligner.parallel.layout import initialize_layout
    from nemo_aligner.scoring.scorer import load_scorer

    texts = [TOKENS[:64], TOKENS[:80], [*TOKENS[:70], 7, 8], [9] * 20]
    with launch():
        scorer = load_scorer(
            archive,
            initialize_layout(),
            precision=Precision(precision),
            micro_batch_tokens=256,
            prefix_cache_tokens=cached_tokens,
        )
        for _ in range(2):
            scorer.score_token_lists(texts)
    return asdict(scorer.counts)


def critic(watch: Watch, settings: list[str]) -> Found:
    """A critic's values, steps and values again; its optimizer is away before and after."""
    import numpy as np

    from nemo_aligner.config.critic import ServeCriticConfig
    from nemo_aligner.config.load import load_config
    from nemo_aligner.parallel.launch import launch
    from nemo_aligner.parallel.layout import initialize_layout
    from nemo_aligner.serving.services.critic import TRAIN, VALUES
    from nemo_aligner.serving.services.critic_ranks import CriticServable
    from nemo_aligner.training.critic_run import open_critic
    from tests.training.critic_steps import make_rollout

    config = load_config(ServeCriticConfig, settings)
    probes = [np.arange(3, 3 + length) for length in (1, 17, 9)]
    rollout = make_rollout(0)
    arrays = (rollout.tokens, rollout.returns, rollout.prev_values, rollout.mask)
    allocated = []
    with launch():
        run = open_critic(config, initialize_layout())
        run_operation = CriticServable(run, config).operations
        for name, given in ((VALUES, [probes]), (TRAIN, arrays), (VALUES, [probes])):
            run_operation[name](*given)
            allocated.append(watch.allocated())
        trained = sum(each.nbytes for each in run.learner.optimizer.state_tensors())
        run.save()
    return {"allocated": allocated, "optimizer": trained}


def steps(watch: Watch, sizes: dict[str, Any], shape: Found, **options: Any) -> Found:
    """Two steps, a forward pass, an inference and a state to save, of each rank of a layout."""
    import torch.distributed as dist

    from nemo_aligner.models.shape import ModelShape
    from nemo_aligner.parallel.layout import LayoutSizes, destroy_layout, initialize_layout

    layout = LayoutSizes(**sizes)
    found: Found = {"collectives": [], "ranks": []}
    for rank in range(layout.num_ranks):
        dist.init_process_group("nccl", rank=rank, world_size=layout.num_ranks)
        own = initialize_layout(layout.tp, layout.pp, layout.sequence_parallel)
        model_shape = ModelShape.from_config({**SHAPE, **shape})
        found["ranks"].append(one_rank(watch, own, model_shape, **options))
        found["collectives"].append(dict(watch.collectives))
        destroy_layout()
        dist.destroy_process_group()
    return found


def one_rank(
    watch: Watch,
    layout: Any,
    shape: Any,
    precision: str = "bf16",
    recompute: str = "none",
    freeze_layers: int = 0,
    prefix: int = 0,
) -> Found:
    from nemo_aligner.batch import Group, PackedBatch, Records
    from nemo_aligner.checkpoint.weights.save import copy_tensors
    from nemo_aligner.config.common import Precision
    from nemo_aligner.config.model import OptimConfig, Recompute
    from nemo_aligner.models.reward_model import build_reward_model
    from nemo_aligner.models.step import forward_backward, gather_rewards, infer
    from nemo_aligner.models.trainable import freeze_lower_layers, wrap_for_training
    from nemo_aligner.objectives.bradley_terry import BradleyTerry
    from nemo_aligner.planning.cost import Packs, Plan
    from nemo_aligner.planning.memory import pack_activations
    from nemo_aligner.training.optimizer.build import build_optimizer

    kinds = {"precision": Precision(precision), "recompute": Recompute(recompute)}
    model = build_reward_model(shape, layout, num_attributes=1, **kinds)
    freeze_lower_layers(model, freeze_layers, shape.num_layers)
    wrapped = wrap_for_training(model)
    optimizer = build_optimizer(wrapped, OptimConfig(), 1.0, 10)
    length = len(TOKENS) - 2 * layout.dp_rank  # of other data parallel ranks, other packs
    batches = [
        PackedBatch.pack(
            [TOKENS[:length]] * 8,
            Records.of(range(4), [2] * 4),
            rows=range(8 * number, 8 * number + 8),
            groups=[Group(2, prefix)] * 4 if prefix else None,
        )
        for number in range(layout.dp_rank, 3 * layout.dp, layout.dp)
    ]
    for _ in range(2):
        with watch.during("step"):
            wrapped.train()
            wrapped.zero_grad_buffer()
            optimizer.zero_grad()
            rewards = forward_backward(wrapped, batches, layout, BradleyTerry().loss)
            gather_rewards(rewards, batches, (24 * layout.dp, 1), layout)
            assert optimizer.step().applied
    found: Found = {
        "waits": watch.phases["step"].waits,
        "operations": dict(watch.phases["step"].operations),
    }
    if layout.pp == 1:
        packs = Packs(batches[0].num_tokens, 8, length / 2)
        sizes = {"tp": layout.tp, "sequence_parallel": layout.sequence_parallel}
        plan = Plan(packs, freeze_layers=freeze_layers, **sizes, **kinds)
        found["planned"] = pack_activations(shape, plan, 0)
        found["kept"] = kept_bytes(wrapped, batches[0].to(CUDA))
    optimizer.finish_update()
    infer(wrapped, batches, layout)
    weights = model.sharded_state_dict()
    optimizer.sharded_state_dict(weights)
    copy_tensors(weights, {})
    return found


def kept_bytes(wrapped: Any, batch: Any) -> int:
    """Of all that a forward pass keeps for the backward, but for weights."""
    import torch

    weights = {each.untyped_storage()._cdata for each in wrapped.module.parameters()}
    kept = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if tensor.device == CUDA and storage._cdata not in weights:
            kept[storage._cdata] = storage
        return tensor

    wrapped.train()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        wrapped(batch)
    return sum(storage.nbytes() for storage in kept.values())


def mark_phases(watch: Watch) -> None:
    from nemo_aligner.checkpoint.runs import RunCheckpoints
    from nemo_aligner.models.residence import Residence
    from nemo_aligner.scoring.scorer import RewardScorer
    from nemo_aligner.training.critic import CriticLearner
    from nemo_aligner.training.learner import RewardLearner

    def mark(owner: type, method: str, phase: str) -> None:
        function = getattr(owner, method)

        @wraps(function)
        def marked(*args: Any, **named: Any) -> Any:
            with watch.during(phase):
                return function(*args, **named)

        setattr(owner, method, marked)

    mark(RewardLearner, "train_step", "step")
    mark(RewardLearner, "validate", "validation")
    mark(RunCheckpoints, "save", "save")
    mark(RunCheckpoints, "load", "load")
    mark(RewardScorer, "score_token_lists", "score")
    mark(CriticLearner, "values", "values")
    mark(CriticLearner, "_train_step", "critic step")
    mark(Residence, "move", "move")


def run(watch: Watch, task: Found) -> Found:
    """What was seen of ``task``: by phase, of its last call."""
    import torch

    from nemo_aligner.parallel.layout import destroy_layout

    watch.phases.clear()
    for name, value in task.get("given", {}).items():
        setattr(watch, name, tuple(value) if isinstance(value, list) else value)
    try:
        found = globals()[task["run"]](watch, **task["with"])
    except Exception:
        return {"error": traceback.format_exc()}
    finally:
        destroy_layout()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    phases = {name: asdict(seen) for name, seen in watch.phases.items()}
    return {"phases": phases, "settings": watch.settings, **found}


def main(tasks: str, results: str) -> None:
    with fake_gpu() as watch:
        mark_phases(watch)
        found = [run(watch, task) for task in json.loads(tasks)]
    Path(results).write_text(json.dumps(found, default=str))


if __name__ == "__main__":
    main(*sys.argv[1:])
