"""A process group of one, with a launcher and without."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from nemo_aligner.errors import ConfigError
from nemo_aligner.parallel.launch import launch, single_process
from tests.launching import TORCHRUN


def test_one_process_needs_no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for key in TORCHRUN:
        monkeypatch.delenv(key, raising=False)
    with launch() as launched:
        assert launched.is_main
        assert launched.world_size == dist.get_world_size() == 1
        assert launched.backend == ("nccl" if torch.cuda.is_available() else "gloo")
    assert not dist.is_initialized()


def test_a_conversion_is_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for key in TORCHRUN:
        monkeypatch.delenv(key, raising=False)
    with single_process():
        assert dist.get_world_size() == 1
        with single_process():
            assert dist.is_initialized()
        assert dist.is_initialized()
    assert not dist.is_initialized()
    for key, value in TORCHRUN.items():
        monkeypatch.setenv(key, value)
    with (
        pytest.raises(ConfigError, match=f"got {TORCHRUN['WORLD_SIZE']} processes, wanted one"),
        single_process(),
    ):
        pass
