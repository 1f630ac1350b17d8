"""fp8 weights with a scale for each block, as DeepSeek-V3 is published: converted to bf16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from nemo_aligner.checkpoint.hf.convert import convert_hf_to_nemo
from nemo_aligner.checkpoint.hf.quantized.block_fp8 import dequantize
from nemo_aligner.checkpoint.nemo.archive import open_nemo
from nemo_aligner.utils.errors import CheckpointError
from tests.checkpoint.hf.exporting import edit
from tests.harness import families

CONFIG = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
BLOCK = (128, 128)


def quantize(weight: torch.Tensor, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """The weight in fp8 and its scales, block by block."""
    rows, columns = weight.shape
    scales = torch.empty(-(-rows // block[0]), -(-columns // block[1]))
    stored = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    for i in range(scales.size(0)):
        for j in range(scales.size(1)):
            place = (
                slice(i * block[0], (i + 1) * block[0]),
                slice(j * block[1], (j + 1) * block[1]),
            )
            scales[i, j] = weight[place].float().abs().max() / 448
            stored[place] = (weight[place].float() / scales[i, j]).to(torch.float8_e4m3fn)
    return stored, scales


def write(folder: Path, block: tuple[int, int]) -> dict[str, torch.Tensor]:
    """Quantise a tiny DeepSeek-V3's projections; returns what they are in bf16."""
    families.write_hf_checkpoint(folder, "deepseek_v3_untied")
    tensors = load_file(folder / "model.safetensors")
    expected = {}
    for name in [name for name in tensors if "_proj" in name]:
        stored, scales = quantize(tensors[name], block)
        tensors[name], tensors[f"{name}_scale_inv"] = stored, scales
        rows, columns = (torch.arange(size) for size in stored.shape)
        # The formula, element by element.
        factors = scales[rows[:, None] // block[0], columns[None] // block[1]]
        expected[name] = (stored.float() * factors).bfloat16()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    edit(folder, quantization_config={**CONFIG, "weight_block_size": [*block]})
    return expected


def test_block_is_multiplied_by_its_scale() -> None:
    torch.manual_seed(0)
    weight = torch.randn(300, 130)
    stored, scales = quantize(weight, BLOCK)
    assert scales.shape == (3, 2)
    found = dequantize(stored, scales, BLOCK)
    for row, column in ((0, 0), (127, 129), (128, 127), (299, 128)):
        value = stored[row, column].float() * scales[row // 128, column // 128]
        assert found[row, column] == value
    assert (found - weight).abs().max() < weight.abs().max() / 16


def test_checkpoint_of_fp8_blocks_is_converted_in_bf16(tmp_path: Path) -> None:
    # Blocks that divide some of the matrices, and end early in others.
    expected = write(tmp_path / "hf", (24, 48))
    summary = str(convert_hf_to_nemo(tmp_path / "hf", tmp_path / "fp8.nemo"))
    assert f"dequantised: {len(expected)} tensors of fp8, to bf16" in summary
    tensors = load_file(tmp_path / "hf/model.safetensors")
    plain = {name: tensors[name] for name in tensors if not name.endswith("_scale_inv")}
    save_file(plain | expected, tmp_path / "hf/model.safetensors", metadata={"format": "pt"})
    edit(tmp_path / "hf", quantization_config=None)
    convert_hf_to_nemo(tmp_path / "hf", tmp_path / "bf16.nemo")
    with open_nemo(tmp_path / "fp8.nemo") as fp8, open_nemo(tmp_path / "bf16.nemo") as bf16:
        assert fp8.store.tensors == bf16.store.tensors
        for name in fp8.store.tensors:
            assert torch.equal(fp8.store.read(name), bf16.store.read(name)), name


BAD: list[tuple[dict[str, Any], str]] = [
    ({"weight_block_size": None}, "got fp8 with weight_block_size=None and fmt='e4m3'; only"),
    ({"weight_block_size": [0, 128]}, r"weight_block_size=\[0, 128\]"),
    ({"weight_block_size": [128, 128], "fmt": "e5m2"}, "fmt='e5m2'"),
    ({"weight_block_size": [128, 128]}, "wanted a matrix with a scale for each block of 128 x 128"),
    ({"quant_method": "hqq"}, "supported with the quant_method bitsandbytes, gptq, awq"),
]


def test_checkpoint_of_other_fp8_is_rejected(tmp_path: Path) -> None:
    write(tmp_path / "hf", (24, 48))
    for number, (changes, message) in enumerate(BAD):
        edit(tmp_path / "hf", quantization_config={**CONFIG, **changes})
        with pytest.raises(CheckpointError, match=message):
            convert_hf_to_nemo(tmp_path / "hf", tmp_path / f"{number}.nemo")
