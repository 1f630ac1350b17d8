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
    foreign.nemo1(tmp_path / "theirs", {**tensors, **head_of(1)}, tokenizer_folder)
    with pytest.raises(CheckpointError, match=r"has a bias.*nemo-aligner import"):
        load(tmp_path / "theirs", layout)


@pytest.mark.parametrize("is_unpacked", [False, True])
def test_a_checkpoint_that_is_opened_has_its_index_read_once(
    is_unpacked: bool, index_reads: list[str], layout: Any, tmp_path: Path
) -> None:
    """To train and to score; without checksums every piece is read to be checked, too."""
    from nemo_aligner.checkpoint.nemo.reward_model import load_reward_model

    path = tiny.ROOT / "tests" / "compatibility" / "files" / "regression.nemo"
    if is_unpacked:
        shutil.unpack_archive(path, tmp_path / "folder", "tar")
        path = tmp_path / "folder"
        (path / "checksums.json").unlink()
    for use in (lambda: load(path, layout, 2), lambda: load_reward_model(path, layout)):
        index_reads.clear()
        use()
        assert len(index_reads) == 1
        assert index_reads[0].endswith("model_weights/.metadata")
