"""The table of dtypes agrees with torch, and with the formats of files."""

from __future__ import annotations

import pytest
import torch

from nemo_aligner.config.common import Precision
from nemo_aligner.config.dtypes import (
    ELEMENT_BYTES,
    format_of,
    safetensors_dtypes,
    torch_dtype,
    zarr_dtypes,
)
from nemo_aligner.utils.errors import CheckpointError


def test_precision_has_a_dtype_of_its_size_and_names_in_files() -> None:
    for precision in Precision:
        dtype = torch_dtype(precision)
        assert dtype.itemsize == ELEMENT_BYTES[precision]
        assert format_of(dtype).precision is precision
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
    for other in (torch.int8, torch.float64, None):
        with pytest.raises(CheckpointError, match=f"got {other}, wanted fp32, bf16 or fp16"):
            format_of(other)
