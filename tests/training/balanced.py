"""A learner of a mixture of experts whose whole gradient is that of the auxiliary loss."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from nemo_aligner.batch.packed import LabelColumns, PackedBatch
from nemo_aligner.checkpoint.nemo.reward_model import load_pretrained
from nemo_aligner.config.common import Precision, RecordKind
from nemo_aligner.config.model import OptimConfig
from nemo_aligner.data.token_index import TokenSequences
from nemo_aligner.data.training_data import TrainingData, TrainLoader
from nemo_aligner.distributed.layout import ParallelLayout
from nemo_aligner.losses.regression import MaskedMse
from nemo_aligner.models.experts import routers
from nemo_aligner.models.training_wrap import wrap_for_training
from nemo_aligner.training.learner import RewardLearner
from nemo_aligner.training.optimizer import build_optimizer
from tests.data.test_packing import dataset
from tests.harness.family_cases import EXPERTS

RECORDS, TOKENS, COEFF = 6, 16, 0.5
NAMES = ("a", "b", "c", "d", "e")


def sequences() -> list[list[int]]:
    """A text of each record, all of one length."""
    generator = torch.Generator().manual_seed(3)
    return torch.randint(3, 300, (RECORDS, TOKENS), generator=generator).tolist()


def load(archive: Path, layout: ParallelLayout) -> Any:
    """The model, its head of zeros, of which the first layer's router alone is trained."""
    loaded = load_pretrained(archive, layout, num_attributes=len(NAMES), precision=Precision.fp32)
    model: Any = loaded.model
    if model.post_process:
        model.rm_head.weight.data.zero_()
    model.requires_grad_(False)
    router = routers(model)[1]
    router.aux_loss_coeff = COEFF
    router.weight.requires_grad_(True)
    return model


def build(archive: Path, layout: ParallelLayout) -> RewardLearner:
    """A learner of ratings; every record has a pack of its own.

    Labels and rewards are all 0, so the squared errors have no gradient. 23 of 30 labels are there.
    """
    labels = torch.zeros(RECORDS, len(NAMES))
    labels[0, 1:] = labels[3, 2:] = torch.nan
    data = dataset([TOKENS] * RECORDS, RecordKind.rating)
    records = replace(data.records, labels=LabelColumns.of(NAMES, labels))
    data = replace(data, sequences=TokenSequences.of(sequences()), records=records)
    model = wrap_for_training(load(archive, layout))
    return RewardLearner(
        model,
        build_optimizer(model, OptimConfig(lr=1e-3), 1.0, 10),
        TrainingData(data, [], None, MaskedMse(NAMES)),  # type: ignore[arg-type]
        TrainLoader(data, RECORDS, TOKENS, 1, layout.dp_rank, layout.dp),
        layout,
        TOKENS,
        load_size=(4, EXPERTS["num_experts"]),
    )


def gradient_norm_by_hand(archive: Path, layout: ParallelLayout) -> float:
    """Of the mean over records of ``COEFF * E * sum(f_e * P_e)`` of each, written out."""
    model = load(archive, layout)
    router = routers(model)[1]
    seen: list[torch.Tensor] = []
    hook = router.register_forward_pre_hook(
        lambda module, arguments: seen.append(arguments[0].detach())
    )
    with torch.no_grad():
        for sequence in sequences():
            model.train()(PackedBatch.pack([sequence]))
    hook.remove()
    weight = router.weight.detach().requires_grad_()
    count, top_k = router._shape.count, router._shape.top_k
    total = torch.zeros(())
    for tokens in seen:
        shares = (tokens @ weight.t()).softmax(-1)
        chosen = torch.zeros_like(shares).scatter_(1, shares.topk(top_k).indices, 1.0)
        total = total + COEFF * count * (chosen.mean(0) / top_k * shares.mean(0)).sum()
    (total / RECORDS).backward()
    assert weight.grad is not None
    return float(weight.grad.norm())
