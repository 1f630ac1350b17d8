"""Saves that are written in the background."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nemo_aligner.errors import CheckpointError
from tests.checkpoint.weights.tensors import check_loaded, request

pytestmark = pytest.mark.usefixtures("layout")


def test_a_pending_save_writes_its_copies(tmp_path: Path) -> None:
    from nemo_aligner.checkpoint.weights.save import copy_tensors, start_saving
    from nemo_aligner.checkpoint.weights.store import load_weights

    state, host = request(), []
    live = [entry.data for entry in state.values() if entry.data is not None]
    copy_tensors(state, host)
    pending = start_saving(state, tmp_path / "weights")
    for tensor in live:
        tensor.zero_()
    pending.finish()
    assert pending.is_written
    check_loaded(load_weights(request(fill=0.0), tmp_path / "weights"))
    memory = [tensor.data_ptr() for tensor in host]
    copy_tensors(request(fill=2.0), host)
    assert [tensor.data_ptr() for tensor in host] == memory
    assert all(bool((tensor == 2.0).all()) for tensor in host)


def test_a_failed_write_is_told_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.checkpoint import FileSystemWriter

    from nemo_aligner.checkpoint.weights.save import start_saving

    def fail(*unused: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(FileSystemWriter, "write_data", fail)
    pending = start_saving(request(), tmp_path / "weights")
    with pytest.raises(CheckpointError, match=r"weights: rank 0: \[Errno 28\] No space left"):
        pending.finish()
    assert pending.is_written
    assert not (tmp_path / "weights" / "metadata.json").exists()
