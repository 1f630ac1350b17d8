"""Layers with and without a window."""

from __future__ import annotations

from nemo_aligner.checkpoint.hf.families import find_family
from nemo_aligner.models.shape import ModelShape
from tests.checkpoint.hf.families.models import SIZES
from tests.families import WINDOW


def test_layers_may_alternate_in_any_family_that_names_them() -> None:
    kinds = ["sliding_attention", "full_attention"] * 2
    config = {**SIZES, "use_sliding_window": True, "sliding_window": WINDOW, "layer_types": kinds}
    shape = ModelShape.from_config(find_family("qwen3").to_nemo(config))
    assert [shape.window_of(layer) for layer in (1, 2, 3, 4)] == [WINDOW, None, WINDOW, None]
