"""A GGUF file's header is not believed."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from nemo_aligner.errors import CheckpointError
from tests.checkpoint.hf.conversion import (
    convert,
)


@pytest.mark.parametrize(
    ("counts", "field", "message"),
    [
        ((0, 1), struct.pack("<IIQ", 9, 4, 2**62), "an array of 4611686018427387904 items"),
        ((0, 1), struct.pack("<IIQ", 9, 4, 2**20), "4194304 bytes more"),
        ((0, 1), struct.pack("<IQ", 8, 2**62), "4611686018427387904 bytes more"),
        ((0, 1), struct.pack("<IIQ", 9, 9, 1), "a value of type 9"),
        ((2**62, 0), b"", "4611686018427387904 tensors"),
        ((0, 2**62), b"", "4611686018427387904 fields"),
    ],
    ids=["items", "past_the_end", "string", "arrays_in_arrays", "tensors", "fields"],
)
def test_a_header_is_not_believed(
    counts: tuple[int, int], field: bytes, message: str, tmp_path: Path
) -> None:
    """The gguf package would go on past the file's end, without one."""
    name = struct.pack("<Q", 1) + b"x" if field else b""
    path = tmp_path / "tiny.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, *counts) + name + field + bytes(64))
    with pytest.raises(CheckpointError, match=f"not a readable GGUF file: .*{message}"):
        convert(path, tmp_path / "out.nemo")
