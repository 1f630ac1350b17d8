"""Linear attention in a pack: nothing of one sample reaches another one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from nemo_aligner.batch.packed import Group, PackedBatch
from nemo_aligner.checkpoint.hf.convert import convert_hf_to_nemo
from nemo_aligner.checkpoint.hf.families import find_family
from nemo_aligner.checkpoint.nemo.reward_model import load_pretrained
from nemo_aligner.config.common import Precision
from nemo_aligner.config.model import Recompute
from nemo_aligner.cpu.products import BATCH_INVARIANT_ROWS
from nemo_aligner.distributed.layout import ParallelLayout
from nemo_aligner.models.backbone import transformer_config
from nemo_aligner.models.batch_invariance import make_batch_invariant
from nemo_aligner.models.shapes.decoder import ModelShape
from nemo_aligner.models.step import infer
from nemo_aligner.utils.errors import ConfigError
from tests.checkpoint.hf.exporting import edit_tensors
from tests.harness import families
from tests.models import layouts

# Lengths of shared prefixes around the ends of chunks.
SHARED = (1, 2, 31, 62, 63, 64, 65, 66, 100, 127, 128, 129, 150, 191, 192, 193, 199, 200)


def sequences_with(shared: int) -> tuple[list[list[int]], list[Group]]:
    """Eight samples: three with a prefix of ``shared`` tokens, two pairs, and one alone."""
    generator = torch.Generator().manual_seed(shared)

    def draw(count: int) -> list[int]:
        return torch.randint(3, 300, (count,), generator=generator).tolist()

    samples, groups = [], []
    for size, prefix in ((3, shared), (2, 201 - shared), (2, 1 + shared // 2), (1, 0)):
        start = draw(prefix)
        samples += [[*start, *draw(count)] for count in (1, 70, 40)[:size]]
        groups.append(Group(size, prefix))
    return samples, groups


@pytest.mark.parametrize("precision", [Precision.fp32, Precision.bf16])
@pytest.mark.parametrize("case", layouts.HYBRIDS)
def test_linear_attention_rewards_are_bit_identical_in_any_pack(
    case: str, precision: Precision, layout: ParallelLayout, tmp_path: Path
) -> None:
    path = families.write_base_nemo(tmp_path / "base.nemo", case)
    model = load_pretrained(path, layout, num_attributes=2, precision=precision).model
    make_batch_invariant(model, BATCH_INVARIANT_ROWS)
    different = []
    for shared in SHARED:
        samples, groups = sequences_with(shared)
        alone = infer(model, [PackedBatch.pack([sample]) for sample in samples], layout)
        for pack in (PackedBatch.pack(samples, groups=groups), PackedBatch.pack(samples[::-1])):
            rewards = infer(model, [pack], layout)
            assert rewards is not None
            assert alone is not None
            rewards = rewards if pack.prefixes.max() >= 0 else rewards.flip(0)
            if not torch.equal(rewards, alone):
                different.append((shared, float((rewards - alone).abs().max())))
    assert not different


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
