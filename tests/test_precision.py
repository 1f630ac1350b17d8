"""The table of dtypes agrees with torch, and with what reads the files."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from nemo_aligner.config.common import Precision
from nemo_aligner.errors import CheckpointError
from nemo_aligner.precision import (
    ELEMENT_BYTES,
    format_of,
    safetensors_dtypes,
    torch_dtype,
    zarr_dtypes,
)


@pytest.mark.parametrize("precision", Precision)
def test_every_setting_has_a_dtype_of_its_size(precision: Precision) -> None:
    dtype = torch_dtype(precision)
    assert dtype.itemsize == ELEMENT_BYTES[precision]
    assert format_of(dtype).precision is precision


def test_files_call_the_dtypes_by_their_own_names() -> None:
    assert safetensors_dtypes() == {
        "F32": torch.float32,
        "F16": torch.float16,
        "BF16": torch.bfloat16,
    }
    assert zarr_dtypes() == {
        "<f4": torch.float32,
        "<f2": torch.float16,
        "bfloat16": torch.bfloat16,
    }
    nemo = {format_of(dtype).nemo for dtype in zarr_dtypes().values()}
    assert nemo == {32, 16, "bf16"}


@pytest.mark.parametrize("dtype", [torch.int8, torch.float64, None])
def test_other_numbers_are_refused(dtype: torch.dtype | None) -> None:
    with pytest.raises(CheckpointError, match=f"got {dtype}, wanted fp32, bf16 or fp16"):
        format_of(dtype)


def test_the_table_is_read_without_torch() -> None:
    program = "import sys, nemo_aligner.precision; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)
