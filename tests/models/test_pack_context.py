"""PackContext: layers get a pack's context as an argument, and no module is written to for it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from nemo_aligner.batch.packed import Group, PackedBatch, Records
from nemo_aligner.checkpoint.nemo.reward_model import load_pretrained
from nemo_aligner.config.common import Precision
from nemo_aligner.distributed.layout import ParallelLayout
from nemo_aligner.models.attention.segments import PackedSegments
from nemo_aligner.models.lora import LoraDropout, draw_adapters
from nemo_aligner.models.pack_context import PackContext
from nemo_aligner.models.shapes.lora import LoraShape
from tests.harness import families

ATTENTION = LoraShape(4, 8.0, ("linear_qkv", "linear_proj"))
FIRST = PackedBatch.pack(
    [list(range(3, 40)), [*range(3, 28), 50, 51], [7] * 9],
    Records.of([0, 1], [2, 1]),
    groups=[Group(2, 25), Group(1, 0)],
)
SECOND = PackedBatch.pack([[9] * 20, [8] * 30], Records.of([2], [2]))


@pytest.fixture(scope="module")
def model(layout: ParallelLayout, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A mixture-of-experts model with LoRA and dropout, in training."""
    path = tmp_path_factory.mktemp("context") / "base.nemo"
    families.write_base_nemo(path, "qwen3_moe")
    options = {"num_attributes": 1, "precision": Precision.fp32}
    loaded = load_pretrained(
        path, layout, **options, lora=ATTENTION, lora_dropout=LoraDropout(0.2, 1)
    ).model
    draw_adapters(loaded, 1)
    return loaded.train()


def attributes(model: torch.nn.Module) -> dict[str, dict[str, Any]]:
    """Every module's attributes that are no tensors or modules; tensors by their version."""
    return {
        name: {
            key: (id(value), value._version if isinstance(value, Tensor) else None)
            for key, value in [*vars(module).items(), *vars(module)["_buffers"].items()]
        }
        for name, module in model.named_modules()
    }


def test_forward_writes_to_no_module_but_counts_the_load(model: Any) -> None:
    model(SECOND)  # what megatron-core notes once
    before = attributes(model)
    model(FIRST)
    after = attributes(model)
    changed = {
        f"{name}.{key}"
        for name, values in before.items()
        for key, value in values.items()
        if after[name].get(key) != value
    }
    assert after.keys() == before.keys()
    assert {name.rpartition(".")[2] for name in changed} == {"load"}


def test_context_is_frozen_and_a_copy_computes_its_properties_anew() -> None:
    segments = PackedSegments.of(FIRST, "cpu")
    context = PackContext(segments, torch.tensor([1, 2]), dropout_keys=torch.arange(70))
    assert context.dropout_keys_of_read_rows is context.dropout_keys_of_read_rows
    with pytest.raises(dataclasses.FrozenInstanceError):
        context.read_rows = torch.tensor([3])  # type: ignore[misc]
    copy = dataclasses.replace(context, read_rows=torch.tensor([3]))
    assert copy.dropout_keys_of_read_rows is not None
    assert copy.dropout_keys_of_read_rows.tolist() == [3]
