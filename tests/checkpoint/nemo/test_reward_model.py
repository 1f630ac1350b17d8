"""Reward models that were opened to train."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from nemo_aligner.errors import CheckpointError
from tests import tiny
from tests.checkpoint import foreign
from tests.checkpoint.loading import (
    Tensors,
    head_of,
    load,
)


def test_a_bias_is_not_dropped_on_the_way_to_training(
    tensors: Tensors, tokenizer_folder: Path, layout: Any, tmp_path: Path
) -> None:
    foreign.write_nemo1(tmp_path / "theirs", {**tensors, **head_of(1)}, tokenizer_folder)
    with pytest.raises(CheckpointError, match=r"has a bias.*import_nemo\.py"):
        load(tmp_path / "theirs", layout)


@pytest.mark.parametrize("has_checksums", [True, False])
def test_a_checkpoint_that_is_opened_has_its_index_read_once(
    has_checksums: bool, index_reads: list[str], layout: Any, tmp_path: Path
) -> None:
    """To train and to score; without checksums every piece is read to be checked, too."""
    from nemo_aligner.checkpoint.nemo.reward_model import load_reward_model

    archive = tiny.ROOT / "tests" / "compatibility" / "files" / "regression.nemo"
    shutil.unpack_archive(archive, tmp_path / "folder", "tar")
    if not has_checksums:
        (tmp_path / "folder" / "checksums.json").unlink()
    for use in (lambda path: load(path, layout, 2), lambda path: load_reward_model(path, layout)):
        index_reads.clear()
        use(tmp_path / "folder")
        assert index_reads == [str(tmp_path / "folder" / "model_weights" / ".metadata")]
