"""The table of a decoder's weights is what the model itself would save."""

from __future__ import annotations

from typing import Any

import pytest

from nemo_aligner.config.common import Precision
from tests import families


@pytest.mark.parametrize("case", families.CASES)
def test_the_table_is_the_model(case: str, layout: Any) -> None:
    from nemo_aligner.checkpoint.decoder_tensors import (
        EMBEDDING,
        HEAD,
        LAYERS,
        layer_tensors,
        model_tensors,
    )
    from nemo_aligner.checkpoint.hf.families import find_family
    from nemo_aligner.models.reward_model import build_reward_model
    from nemo_aligner.models.shape import ModelShape

    config = families.hf_config(case).to_dict()
    shape = ModelShape.from_config(find_family(config["model_type"]).to_nemo(config))
    model = build_reward_model(shape, layout, num_attributes=1, precision=Precision.fp32)
    metadata = {"non_homogeneous_layers": True}
    wanted = {
        entry.key: tuple(entry.data.shape)
        for entry in model.sharded_state_dict(metadata=metadata).values()
        if entry.key != HEAD and "_extra_state" not in entry.key
    }
    wanted[EMBEDDING] = (shape.vocab_size, shape.hidden_size)  # without the padding
    layers = {
        f"{LAYERS}{layer}.{name}": size
        for layer in range(shape.num_layers)
        for name, size in layer_tensors(shape).items()
    }
    assert model_tensors(shape) | layers == wanted
