"""Weights as arrays of zarr."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_aligner.errors import CheckpointError
from tests.checkpoint import foreign
from tests.checkpoint.foreign import (
    zarr_folder,
)
from tests.checkpoint.loading import (
    Tensors,
    check,
    import_nemo,
    load,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_zarr(
    dtype: torch.dtype, tensors: Tensors, tokenizer_folder: Path, layout: Any, tmp_path: Path
) -> None:
    pytest.importorskip("zarr")
    pytest.importorskip("ml_dtypes")
    cast = {key: tensor.to(dtype) for key, tensor in tensors.items()}
    path = zarr_folder(tmp_path / "theirs", cast, tokenizer_folder)
    check(load(path, layout).model, {key: tensor.float() for key, tensor in cast.items()})
    archive = foreign.pack(path, tmp_path / "theirs.nemo", "w")
    import_nemo(archive, tmp_path / "ours.nemo")
    check(
        load(tmp_path / "ours.nemo", layout).model,
        {key: tensor.float() for key, tensor in cast.items()},
    )


def test_zarr_without_its_package_says_what_to_install(
    tensors: Tensors,
    tokenizer_folder: Path,
    layout: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "zarr", None)
    path = zarr_folder(tmp_path / "theirs", tensors, tokenizer_folder)
    with pytest.raises(CheckpointError, match=r"packages zarr and ml_dtypes \(extra \[zarr\]\)"):
        load(path, layout)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda array: (array / "1.0").unlink(), "pieces|no such file"),
        (lambda array: (array / "1.0").write_bytes(b"x"), "got 1 bytes"),
        (lambda array: edit_header(array, dtype="|O"), "wanted a plain array"),
        (lambda array: edit_header(array, filters=[{"id": "pickle"}]), "wanted a plain array"),
        (lambda array: edit_header(array, compressor={"id": "pickle"}), "wanted a plain array"),
        (lambda array: edit_header(array, shape=[10**9, 64]), "pieces"),
    ],
    ids=["missing", "cut", "objects", "filter", "codec", "shape"],
)
def test_damaged_zarr_is_refused(
    damage: Callable[[Path], None],
    message: str,
    tensors: Tensors,
    tokenizer_folder: Path,
    layout: Any,
    tmp_path: Path,
) -> None:
    path = zarr_folder(tmp_path / "theirs", tensors, tokenizer_folder)
    array = path / "model_weights" / "model.decoder.layers.mlp.linear_fc1.layer_norm_weight"
    damage(array)
    with pytest.raises(CheckpointError, match=message):
        load(path, layout)


def edit_header(array: Path, **changes: Any) -> None:
    import json

    header = json.loads((array / ".zarray").read_text())
    (array / ".zarray").write_text(json.dumps({**header, **changes}))
