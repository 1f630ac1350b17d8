"""Gauges, by a stand-in for a GPU: no test of a real one is here."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from nemo_aligner.config.common import Precision
from nemo_aligner.parallel.launch import launch
from nemo_aligner.training.gauges import Gauges


@pytest.fixture(autouse=True)
def world() -> Iterator[None]:
    with launch():
        yield


def pretend(monkeypatch: pytest.MonkeyPatch, name: str, power: int | Exception) -> None:
    def power_draw(device: torch.device) -> int:
        if isinstance(power, Exception):
            raise power
        return power

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (60e9, 141e9))
    monkeypatch.setattr(torch.cuda, "power_draw", power_draw)


def test_gauges_of_a_known_gpu_an_unknown_one_and_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Gauges.of("cpu", Precision.fp32).read(1e12, 1.0) == {}
    pretend(monkeypatch, "NVIDIA H200", 652_000)
    assert Gauges.of("cuda:0", Precision.bf16).read(989e12, 4.0) == {
        "mfu": pytest.approx(0.25),
        "gpu_memory_gb": 81.0,
        "gpu_power_watts": 652.0,
    }
    # What it does not say is left out.
    pretend(monkeypatch, "NVIDIA something new", ModuleNotFoundError("pynvml"))
    assert Gauges.of("cuda:0", Precision.bf16).read(1e12, 1.0) == {"gpu_memory_gb": 81.0}
