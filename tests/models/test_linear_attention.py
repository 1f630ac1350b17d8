"""Linear attention: its layouts, recomputation, and tensors that conversion drops."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from nemo_aligner.checkpoint.hf.convert import convert_hf_to_nemo
from nemo_aligner.checkpoint.hf.families.qwen import QWEN3_5
from nemo_aligner.config.common import Precision
from nemo_aligner.config.model import Recompute
from nemo_aligner.distributed.layout import ParallelLayout
from nemo_aligner.models.backbone import transformer_config
from nemo_aligner.models.shapes.decoder import ModelShape
from nemo_aligner.utils.errors import ConfigError
from tests.checkpoint.hf.exporting import edit_tensors
from tests.harness import families
from tests.models import layouts


def test_linear_attention_rejects_layouts_that_cannot_split_it(layout: ParallelLayout) -> None:
    config = QWEN3_5.to_nemo(families.hf_config("qwen3_5").to_dict())
    shape = ModelShape.from_config(config)
    with pytest.raises(ConfigError, match="2 key heads of the model's linear attention"):
        shape.check_fits(4, 1)
    with pytest.raises(ConfigError, match="parallel_size: got 2, which is not"):
        transformer_config(shape, replace(layout, cp=2), Precision.fp32, Recompute.none)


@pytest.mark.parametrize("recompute", [Recompute.selective, Recompute.full])
def test_linear_attention_that_is_recomputed_trains_alike(
    recompute: Recompute, layout: ParallelLayout, tmp_path: Path
) -> None:
    path = families.write_base_nemo(tmp_path / "base.nemo", "qwen3_5")
    kept, recomputed = (layouts.step(path, layout, kind) for kind in (Recompute.none, recompute))
    assert recomputed == {key: pytest.approx(kept[key], rel=1e-6) for key in kept}


@pytest.mark.parametrize("case", ["qwen3_5", "qwen3_5_moe", "qwen3_next"])
def test_linear_attention_checkpoint_may_have_mtp_tensors(case: str, tmp_path: Path) -> None:
    families.write_hf_checkpoint(tmp_path / "hf", case)
    edit_tensors(tmp_path / "hf", {"mtp.fc.weight": torch.ones(2, 2)})
    summary = convert_hf_to_nemo(tmp_path / "hf", tmp_path / "base.nemo")
    assert "dropped: 1 tensors mtp.*" in str(summary)
