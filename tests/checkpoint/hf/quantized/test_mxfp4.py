"""Weights in MXFP4, as gpt-oss is published."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from nemo_aligner.checkpoint.hf.convert import convert_hf_to_nemo
from nemo_aligner.checkpoint.hf.quantized.mxfp4 import dequantize
from nemo_aligner.checkpoint.nemo.archive import open_nemo
from nemo_aligner.utils.errors import CheckpointError
from tests.checkpoint.hf.exporting import edit, edit_tensors
from tests.harness import families

SIZES = {"intermediate_size": 64}  # MXFP4 has blocks of 32 values


def draw(count: int, rows: int, columns: int, scales: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Random blocks, with every code, and scales from the first one of ``scales`` to the second."""
    blocks = torch.randint(0, 256, (count, rows, columns // 32, 16), dtype=torch.uint8)
    return blocks, torch.randint(*scales, (count, rows, columns // 32), dtype=torch.uint8)


def test_mxfp4_has_the_bits_of_transformers() -> None:
    torch.manual_seed(0)
    # Also values below bf16's range and above it. A scale of 255 is NaN.
    blocks, scales = draw(4, 96, 256, (0, 255))
    ours = torch.stack([dequantize(*expert).t() for expert in zip(blocks, scales, strict=True)])
    expected = convert_moe_packed_tensors(blocks, scales)
    assert expected.isinf().any()
    assert torch.equal(ours.contiguous().view(torch.int16), expected.view(torch.int16))


@pytest.fixture
def quantized(tmp_path: Path) -> Path:
    """A folder in MXFP4, and one ``plain`` with the same weights in bf16."""
    torch.manual_seed(0)
    for name in ("mxfp4", "plain"):
        families.write_hf_checkpoint(tmp_path / name, "gpt_oss", **SIZES)
    file = tmp_path / "mxfp4/model.safetensors"
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(file).items()}
    plain = dict(tensors)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        count, columns, rows = tensors.pop(name).shape
        blocks, scales = draw(count, rows, columns, (120, 124))
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        plain[name] = convert_moe_packed_tensors(blocks, scales)
    save_file(tensors, file, metadata={"format": "pt"})
    save_file(plain, tmp_path / "plain/model.safetensors", metadata={"format": "pt"})
    edit(tmp_path / "mxfp4", quantization_config={"quant_method": "mxfp4"})
    return tmp_path / "mxfp4"


def test_checkpoint_in_mxfp4_is_converted_to_bf16(quantized: Path) -> None:
    folder = quantized.parent
    for name in ("mxfp4", "plain"):
        summary = str(convert_hf_to_nemo(folder / name, folder / f"{name}.nemo"))
        assert "bf16" in summary
    with open_nemo(folder / "mxfp4.nemo") as ours, open_nemo(folder / "plain.nemo") as plain:
        stored = plain.store.tensors
        assert ours.store.tensors == stored
        assert all(torch.equal(ours.store.read(key), plain.store.read(key)) for key in stored)


def test_checkpoint_in_mxfp4_that_is_damaged_is_one_clear_error(quantized: Path) -> None:
    name = "model.layers.1.mlp.experts.down_proj"
    scales = load_file(quantized / "model.safetensors")[f"{name}_scales"]
    output = quantized.parent / "x.nemo"
    edit_tensors(quantized, {f"{name}_scales": scales[:, :-1].clone()})
    with pytest.raises(CheckpointError, match=f"{name}_scales: got shape .* has shape"):
        convert_hf_to_nemo(quantized, output)
    edit_tensors(quantized, {f"{name}_scales": torch.full_like(scales, 255)})
    with pytest.raises(CheckpointError, match=r"NaN|not finite|infinite"):
        convert_hf_to_nemo(quantized, output)
    edit(quantized, model_type="llama")
    with pytest.raises(CheckpointError, match="quantization_config: got"):
        convert_hf_to_nemo(quantized, output)
