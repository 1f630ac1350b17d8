"""A converted checkpoint holds the same weights whatever the layout that read and wrote it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests import tiny
from tests.checkpoint.resave import LAYOUTS


@pytest.fixture
def group() -> Iterator[None]:
    from nemo_aligner.parallel.launch import launch

    with launch():
        yield


def test_weights_survive_another_layout(group: None, tmp_path: Path) -> None:
    from megatron.core import dist_checkpointing

    from nemo_aligner.checkpoint.nemo.open import open_nemo

    base = tiny.write_base_nemo(tmp_path / "base.nemo")
    done = tiny.run_script("tests/checkpoint/resave.py", str(base), str(tmp_path), processes=2)
    assert done.stdout.count("all ranks know: missing.nemo: no such") == 2 * len(LAYOUTS)
    with open_nemo(base) as folder:
        wanted = dist_checkpointing.load_plain_tensors(str(folder.weights))
    for layout in LAYOUTS:
        got = dist_checkpointing.load_plain_tensors(str(tmp_path / layout))
        assert got.keys() == wanted.keys() | {"model.rm_head.weight"}
        for key, tensor in wanted.items():
            rows = slice(tiny.SHAPE["vocab_size"]) if "embedding" in key else slice(None)
            torch.testing.assert_close(got[key][rows], tensor, rtol=0, atol=0)
