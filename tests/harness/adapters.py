"""Tiny reward models that are LoRA adapters of one base."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch

from nemo_aligner.checkpoint.nemo.reward_model import load_pretrained, save_reward_model
from nemo_aligner.config.common import Precision, RewardModelType
from nemo_aligner.config.model import DataConfig, ModelConfig, RegressionConfig
from nemo_aligner.contract.from_settings import build_contract
from nemo_aligner.distributed.launch import launch
from nemo_aligner.distributed.layout import ParallelLayout, destroy_layout, initialize_layout
from nemo_aligner.models.shapes.lora import LoraShape, is_of_adapter
from tests.harness import tiny

ALL = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")


def write_adapter_nemo(
    path: Path,
    base: Path,
    layout: ParallelLayout,
    lora: LoraShape | None,
    attributes: tuple[str, ...] = ("helpfulness",),
    seed: int = 0,
    **data: Any,
) -> Path:
    """Write a reward model of ``base``, whose adapters and head are drawn by ``seed``.

    Without ``lora`` it has only a head; ``data`` are fields of its DataConfig.
    """
    settings = ModelConfig(
        reward_model_type=RewardModelType.regression,
        regression=RegressionConfig(attributes=list(attributes)),
        data=DataConfig(seq_length=128, **data),
    )
    count, precision = len(attributes), Precision.fp32
    loaded = load_pretrained(base, layout, num_attributes=count, precision=precision, lora=lora)
    torch.manual_seed(seed)
    for name, parameter in loaded.model.named_parameters():
        if is_of_adapter(name) or name == "rm_head.weight":
            torch.nn.init.normal_(parameter, std=0.05)
    contract = build_contract(settings, loaded.tokenizer, precision)
    contract = contract.with_label_means([0.5] * count)
    save_reward_model(path, loaded.model, loaded.config, loaded.tokenizer, contract)
    return path


def write_adapters(folder: Path) -> None:
    """Write three models of one base, with other ranks, targets, attributes and templates."""
    base = tiny.write_base_nemo(folder / "base.nemo")
    with launch():
        write = partial(write_adapter_nemo, base=base, layout=initialize_layout())
        names = ("helpfulness", "verbosity")
        write(folder / "reward_model.nemo", lora=LoraShape(4, 8.0, ALL), attributes=names)
        lora = LoraShape(8, 4.0, ("linear_qkv", "linear_fc2"))
        write(folder / "harmless.nemo", lora=lora, seed=1)
        lora = LoraShape(2, 8.0, ALL)
        write(folder / "plain-1.5.nemo", lora=lora, seed=2, template="plain")
        destroy_layout()
