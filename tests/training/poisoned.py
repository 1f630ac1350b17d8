"""Tiny learners whose data holds poison."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import torch

from nemo_aligner.batch.packed import Records
from nemo_aligner.config.common import Precision, RecordKind
from nemo_aligner.config.model import OptimConfig, SchedulerConfig
from nemo_aligner.data.dataset import TokenizedDataset, last_places
from nemo_aligner.data.records import Origin
from nemo_aligner.data.token_index import TokenSequences
from nemo_aligner.data.tokenize import prefix_of_all
from nemo_aligner.data.training_data import TrainingData, TrainLoader
from nemo_aligner.distributed.layout import ParallelLayout
from nemo_aligner.losses.base import PairObjective
from nemo_aligner.losses.pairwise import BradleyTerry
from nemo_aligner.models.reward_model import build_reward_model
from nemo_aligner.models.shapes.decoder import ModelShape
from nemo_aligner.models.training_wrap import wrap_for_training
from nemo_aligner.training.learner import RewardLearner
from nemo_aligner.training.optimizer import build_optimizer
from nemo_aligner.utils.errors import TrainingError
from tests.harness import tiny

SHAPE = ModelShape.from_config(tiny.SMALLEST)
RECORDS, BATCH, SEED = 12, 8, 1234
TOKENS_PER_PACK = 80
POISON = 50
PLAIN = BradleyTerry()


def dataset(poisoned_indices: tuple[int, ...] = ()) -> TokenizedDataset:
    """Pairs; those at ``poisoned_indices`` of the first global batch hold the token POISON."""
    rng = random.Random(0)
    sequences = [
        [rng.randrange(1, 40) for _ in range(rng.randint(4, 12))] for _ in range(2 * RECORDS)
    ]
    origins = [Origin("pairs.jsonl", 10 * record + 1) for record in range(RECORDS)]
    lengths = torch.tensor([*map(len, sequences)])
    clean = TokenizedDataset(
        kind=RecordKind.comparison,
        name="train",
        sequences=TokenSequences.of(sequences),
        records=Records.of(range(RECORDS), [2] * RECORDS, reply_lengths=lengths),
        places=lengths - 1,
        origins=origins,
        sources=[""] * RECORDS,
        reports=[],
        prefixes=torch.zeros(RECORDS, dtype=torch.int64),
    )
    batch = TrainLoader(clean, BATCH, TOKENS_PER_PACK, SEED, 0, 1).global_batch(0)
    for index in poisoned_indices:
        # Long, so that under sequence parallelism 4 is at the border of two ranks.
        for side in (0, 1):
            sequences[2 * batch[index] + side] = [POISON] * (15 - side)
    pairs = [sequences[2 * record : 2 * record + 2] for record in range(RECORDS)]
    prefixes = torch.tensor([prefix_of_all(pair) for pair in pairs])
    tokens = TokenSequences.of(sequences)
    return replace(clean, sequences=tokens, places=last_places(tokens), prefixes=prefixes)


def lines(data: TokenizedDataset) -> list[str]:
    """file:line of the poisoned records."""
    poisoned_records = {i // 2 for i, tokens in enumerate(data.sequences) if POISON in tokens}
    return [str(data.origins[record]) for record in sorted(poisoned_records)]


def build(
    layout: ParallelLayout,
    data: TokenizedDataset,
    precision: Precision = Precision.fp32,
    poison_rewards: bool = False,
    bucket_size: int | None = None,
    objective: PairObjective = PLAIN,
    tokens_per_pack: int = TOKENS_PER_PACK,
) -> RewardLearner:
    """A learner; with ``poison_rewards`` the weights of the token POISON are infinite."""
    torch.manual_seed(0)
    model = build_reward_model(SHAPE, layout, num_attributes=1, precision=precision)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    if poison_rewards and layout.is_first_stage:
        _poison_embedding(model)
    wrapped = wrap_for_training(model, bucket_size)
    config = OptimConfig(lr=0.01, sched=SchedulerConfig(warmup_steps=2))
    return RewardLearner(
        wrapped,
        build_optimizer(wrapped, config, 1.0, 10),
        TrainingData(data, [], None, objective),  # type: ignore[arg-type]
        TrainLoader(data, BATCH, tokens_per_pack, SEED, layout.dp_rank, layout.dp),
        layout,
        tokens_per_pack,
    )


def _poison_embedding(model: Any) -> None:
    words = model.embedding.word_embeddings
    row = POISON - words.vocab_start_index
    if 0 <= row < words.weight.size(0):
        words.weight.data[row] = torch.inf


def poison_gradients(model: Any, is_poisoned: Any = None) -> None:
    """Packs with the token POISON have finite rewards and an infinite gradient."""

    def on_forward(module: Any, arguments: tuple[Any, ...], output: torch.Tensor) -> None:
        batch = arguments[0]
        poisoned = is_poisoned(batch) if is_poisoned else bool((batch.tokens == POISON).any())
        if poisoned and output.requires_grad:
            output.register_hook(lambda gradient: gradient * torch.inf)

    model.register_forward_hook(on_forward)


def error_of(learner: RewardLearner) -> str:
    """What the first step says."""
    previous = [parameter.clone() for parameter in learner.model.parameters()]
    try:
        learner.train_step(0)
    except TrainingError as error:
        after = learner.model.parameters()
        same = all(torch.equal(a, b) for a, b in zip(previous, after, strict=True))
        return str(error) if same else "the weights were changed"
    return "nothing"
