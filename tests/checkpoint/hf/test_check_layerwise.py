"""A model that loads its layers on demand computes the same, and holds one layer at a time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_aligner.batch.packed import PackedBatch
from nemo_aligner.checkpoint.hf.check import compute_in_fp32, load_layers_on_demand
from nemo_aligner.checkpoint.nemo.reward_model import load_pretrained
from nemo_aligner.config.common import Precision
from nemo_aligner.models.reward_model import build_reward_model
from nemo_aligner.models.shapes.decoder import ModelShape
from nemo_aligner.models.step import infer
from tests.harness import families

DTYPES = (torch.bfloat16, torch.float32)
pytestmark = pytest.mark.usefixtures("layout")


@pytest.mark.parametrize("case", ["llama", "gemma2", "nemotron_untied", "qwen3_untied"])
def test_layerwise_model_has_each_layer_while_it_runs(
    case: str, layout: Any, tmp_path: Path
) -> None:
    path = families.write_base_nemo(tmp_path / "base.nemo", case)
    precision = Precision.fp32
    loaded = load_pretrained(path, layout, num_attributes=2, precision=precision)
    batches = [PackedBatch.pack(families.SEQUENCES)]
    expected = infer(loaded.model, batches, layout)

    metadata = {"non_homogeneous_layers": True}
    entries = loaded.model.sharded_state_dict(metadata=metadata).values()
    weights = {
        entry.key: entry.data.detach() for entry in entries if "_extra_state" not in entry.key
    }
    shape = ModelShape.from_config(loaded.config)
    model = build_reward_model(shape, layout, num_attributes=2, precision=precision, seed=7)
    filled: list[tuple[int, set[int]]] = []

    def read(name: str, layer: int | None) -> torch.Tensor:
        if layer is not None:
            filled.append((layer, set(not_empty(model))))
            name = f"decoder.layers.{layer}.{name}"
        return weights[name].clone()

    load_layers_on_demand(model, read)
    assert not set(not_empty(model))
    for _ in range(2):
        torch.testing.assert_close(infer(model, batches, layout), expected, rtol=0, atol=0)
    assert not set(not_empty(model))
    assert {layer for layer, _ in filled} == set(range(shape.num_layers))
    assert all(filled_layers <= {layer} for layer, filled_layers in filled)


def not_empty(model: Any) -> Iterator[int]:
    for number, layer in enumerate(model.decoder.layers):
        if any(parameter.numel() for parameter in layer.parameters()):
            yield number


@pytest.mark.parametrize("case", families.CASES)
def test_layerwise_model_computes_in_fp32_as_the_whole_would(case: str) -> None:
    config = families.hf_config(case)
    config.num_labels, config.pad_token_id = 2, 0
    config.problem_type = "regression"
    torch.manual_seed(0)
    # Not with .to(), which would round the RoPE frequencies, too.
    made = families.classifier(config)
    model, reference = (made._from_config(config, dtype=dtype).eval() for dtype in DTYPES)
    reference.load_state_dict(model.state_dict())
    ids = torch.tensor([families.SEQUENCES[0]])
    with torch.no_grad():
        rounded = model(input_ids=ids).logits
        # transformers keeps the weights of some routers in fp32.
        dtypes = [parameter.dtype for parameter in model.parameters()]
        compute_in_fp32(model)
        actual, expected = model(input_ids=ids).logits, reference(input_ids=ids).logits
    assert rounded.dtype is torch.bfloat16
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    assert [parameter.dtype for parameter in model.parameters()] == dtypes
    assert torch.bfloat16 in dtypes
