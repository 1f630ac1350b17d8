"""Linear attention: its layouts, recomputation, and tensors that conversion drops."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from nemo_aligner.batch.cache_use import StateUse
from nemo_aligner.checkpoint.hf.convert import convert_hf_to_nemo
from nemo_aligner.checkpoint.hf.families import find_family
from nemo_aligner.config.common import Precision
from nemo_aligner.config.model import Recompute
from nemo_aligner.distributed.layout import ParallelLayout
from nemo_aligner.models import linear_attention
from nemo_aligner.models.backbone import transformer_config
from nemo_aligner.models.chunk_tree import ChunkTree
from nemo_aligner.models.layers import ColumnLinear, RowLinear
from nemo_aligner.models.linear_attention import GatedDeltaNet
from nemo_aligner.models.shapes.decoder import ModelShape
from nemo_aligner.models.shapes.linear_attention import LinearAttentionShape
from nemo_aligner.models.state_pool import StatePool
from nemo_aligner.utils.errors import ConfigError
from tests.checkpoint.hf.exporting import edit_tensors
from tests.harness import families
from tests.models import layouts


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
@pytest.mark.parametrize(
    ("channels", "taps", "dtype"),
    [
        ((128, 128), 4, torch.float32),
        ((256, 48), 3, torch.float32),
        ((16, 256), 8, torch.float32),
        ((128, 128), 4, torch.bfloat16),
    ],
)
@torch.no_grad()
def test_compiled_linear_attention_is_that_of_torch(
    channels: tuple[int, int],
    taps: int,
    dtype: torch.dtype,
    layout: ParallelLayout,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Outputs and states behind whole chunks, in a pack that reads and stores states."""
    torch.manual_seed(0)
    shape = LinearAttentionShape(2, 6, *channels, taps)
    settings = {"hidden_size": 96, "num_layers": 1, "num_attention_heads": 2}
    config = TransformerConfig(**settings, params_dtype=dtype, layernorm_epsilon=1e-6)
    linears = (ColumnLinear, RowLinear)
    layer = GatedDeltaNet(config, layer_number=1, shape=shape, linears=linears).eval()
    for weight in (layer.conv_weight, layer.a_log, layer.dt_bias, layer.norm_weight):
        torch.nn.init.normal_(weight)
    layer.a_log.data.sub_(3)  # else states would be forgotten within a few tokens
    states = StateUse(read_slots=(1,), stored=(63, 255), slots=(0, 2))
    lengths, prefixes = (130, 70, 100, 1, 20), (-1, 1, 2, 1, 0)
    tree = ChunkTree.of(lengths, prefixes, taps - 1, "cpu", states)
    mixed = torch.randn(sum(lengths), 1, shape.projection_width).to(dtype)
    found = []
    for is_compiled in (True, False):
        if not is_compiled:
            monkeypatch.setattr(linear_attention, "can_advance", lambda *unused: False)
        assert linear_attention.can_advance(dtype, *channels, taps) == is_compiled
        pool = StatePool([1], 3, shape, 1, dtype, "cpu")
        pool.touch()
        generator = torch.Generator().manual_seed(1)
        before, inputs = pool.read(1, torch.tensor([1]))
        before.normal_(generator=generator)
        pool.write(1, torch.tensor([1]), before, inputs.normal_(generator=generator))
        segments = SimpleNamespace(pool=SimpleNamespace(states=pool))
        context: Any = SimpleNamespace(chunks=tree, segments=segments)
        output = layer.attend(mixed, context)
        found.append((output, *pool.read(1, torch.tensor([0, 2]))))
    assert all(float(tensor.float().abs().mean()) > 0.01 for tensor in found[0])
    tolerance = {"atol": 1e-5, "rtol": 1e-4 if dtype is torch.float32 else 1e-2}
    for compiled, expected in zip(*found, strict=True):
        torch.testing.assert_close(compiled, expected, **tolerance)


@pytest.mark.parametrize("case", ["qwen3_5", "nemotron_h"])
def test_linear_attention_rejects_layouts_that_cannot_split_it(
    case: str, layout: ParallelLayout
) -> None:
    family = find_family(families.CASES[case]["model_type"])
    config = family.to_nemo(families.hf_config(case).to_dict())
    shape = ModelShape.from_config(config)
    with pytest.raises(ConfigError, match=r"2 (key heads|groups) of the model's"):
        shape.check_fits(4, 1)
    with pytest.raises(ConfigError, match="parallel_size: got 2, which is not"):
        transformer_config(shape, replace(layout, cp=2), Precision.fp32, Recompute.none)


@pytest.mark.parametrize("case", ["qwen3_5", "nemotron_h_moe"])
@pytest.mark.parametrize("recompute", [Recompute.selective, Recompute.full])
def test_linear_attention_that_is_recomputed_trains_alike(
    recompute: Recompute, case: str, layout: ParallelLayout, tmp_path: Path
) -> None:
    path = families.write_base_nemo(tmp_path / "base.nemo", case)
    kept, recomputed = (layouts.step(path, layout, kind) for kind in (Recompute.none, recompute))
    assert recomputed == {key: pytest.approx(kept[key], rel=1e-6) for key in kept}


@pytest.mark.parametrize("case", ["qwen3_5", "qwen3_5_moe", "qwen3_next", "nemotron_h"])
def test_linear_attention_checkpoint_may_have_mtp_tensors(case: str, tmp_path: Path) -> None:
    families.write_hf_checkpoint(tmp_path / "hf", case)
    edit_tensors(tmp_path / "hf", {"mtp.fc.weight": torch.ones(2, 2)})
    summary = convert_hf_to_nemo(tmp_path / "hf", tmp_path / "base.nemo")
    assert "dropped: 1 tensors mtp.*" in str(summary)
