"""RoPE of families that compute it in fp32, in 16 bits: the bits are those of transformers."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModel

from nemo_aligner.checkpoint.hf.families import find_family
from nemo_aligner.config.common import Precision
from nemo_aligner.distributed.layout import ParallelLayout
from nemo_aligner.models.reward_model import build_reward_model
from nemo_aligner.models.rotary import rotate
from nemo_aligner.models.shapes.decoder import ModelShape
from tests.harness import families
from tests.harness.families import CASES

IN_FP32 = ("olmo2", "olmo3", "ernie4_5", "ernie4_5_moe", "deepseek_v2")
PRODUCTS = ("cohere", "cohere2")  # by tables that are rounded to 16 bits
LONGEST = 100_000  # positions at which the angles of 16 bits are far off


def shape_of(case: str) -> ModelShape:
    config = families.hf_config(case).to_dict()
    return ModelShape.from_config(find_family(CASES[case]["model_type"]).to_nemo(config))


def their_rotation(case: str, heads: Tensor, positions: Tensor) -> Tensor:
    """transformers' rotation of ``heads [T, heads, c]``, whose channels i and i + r are a pair."""
    model = AutoModel.from_config(families.hf_config(case))
    module = import_module(type(model).__module__)
    kinds = ("full_attention",) if case == "olmo3" else ()
    tables = model.rotary_emb(heads, positions[None], *kinds)
    is_paired = not case.startswith("olmo")  # neighbouring channels are rotated together
    given = heads.unflatten(-1, (2, -1)).mT.flatten(-2) if is_paired else heads
    given = given.transpose(0, 1)[None]
    if case == "deepseek_v2":
        rotated, _ = module.apply_rotary_emb(given, given, tables)
    else:
        rotated, _ = module.apply_rotary_pos_emb(given, given, *tables)
    rotated = rotated[0].transpose(0, 1)
    return rotated.unflatten(-1, (-1, 2)).mT.flatten(-2) if is_paired else rotated


@pytest.mark.parametrize("case", [*IN_FP32, *PRODUCTS])
def test_rotation_in_bf16_has_the_bits_of_transformers(case: str, layout: ParallelLayout) -> None:
    shape = shape_of(case)
    model: Any = build_reward_model(shape, layout, num_attributes=1, precision=Precision.bf16)
    generator = torch.Generator().manual_seed(0)
    positions = torch.randint(LONGEST, (50,), generator=generator)
    tables = model._rotations[0].tables(positions, torch.bfloat16)
    assert {table.dtype for table in tables} == {torch.float32}
    channels = 2 * tables[0].size(-1)
    heads = torch.randn(50, 3, channels, generator=generator).bfloat16()
    wanted = their_rotation(case, heads, positions)
    for tail in (0, 4):  # latent attention rotates the first channels of queries only
        wide = torch.nn.functional.pad(heads, (0, tail), value=1.5).unsqueeze(1).requires_grad_()
        with torch.no_grad():
            found = rotate(wide, *tables)
        assert found.dtype is wanted.dtype is torch.bfloat16
        assert torch.equal(found[:, 0, :, :channels], wanted)
        assert (found[..., channels:] == 1.5).all()
        # A rotation back is the gradient.
        trained = rotate(wide, *tables)
        assert torch.equal(trained, found)
        (gradient,) = torch.autograd.grad(trained, wide, found)
        assert torch.equal(gradient, rotate(found, tables[0], -tables[1]))
    rounded = rotate(heads.unsqueeze(1), *(table.bfloat16() for table in tables)).squeeze(1)
    assert not torch.equal(rounded, wanted)


def test_rope_of_other_families_and_of_older_archives_has_tables_of_16_bits(
    layout: ParallelLayout,
) -> None:
    older = {"num_layers": 1, "hidden_size": 16, "ffn_hidden_size": 16, "num_attention_heads": 2}
    older |= {"vocab_size": 8, "max_position_embeddings": 8}
    assert ModelShape.from_config(older).rope_fp32 is None
    assert "rope_fp32" not in ModelShape.from_config(older).as_fingerprint()
    for case in CASES.keys() - {*IN_FP32, *PRODUCTS}:
        is_variant = CASES[case]["model_type"] in (*IN_FP32, *PRODUCTS)
        assert (shape_of(case).rope_fp32 is not None) == is_variant, case
    shape = shape_of("llama")
    model: Any = build_reward_model(shape, layout, num_attributes=1, precision=Precision.bf16)
    tables = model._rotations[0].tables(torch.arange(3), torch.bfloat16)
    assert {table.dtype for table in tables} == {torch.bfloat16}
