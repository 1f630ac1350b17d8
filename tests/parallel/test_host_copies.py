"""Copies to host memory: at once on a CPU, in their time on a GPU."""

from __future__ import annotations

import pytest
import torch

from nemo_aligner.parallel.host_copies import before_writing, copy_beside
from tests.parallel.late_copies import play_late_copies


def test_on_a_cpu_all_is_copied_at_once() -> None:
    host, source = torch.zeros(3), torch.ones(3)
    arrived = copy_beside([(host, source)])
    assert host.tolist() == [1, 1, 1]
    source.zero_()
    before_writing()
    arrived()
    assert host.tolist() == [1, 1, 1]


def test_a_copy_is_there_when_it_was_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = play_late_copies(monkeypatch.setattr)
    hosts, source = [torch.zeros(3) for _ in range(2)], torch.ones(3)
    copy_beside([(hosts[0], source)])
    arrived = copy_beside([(hosts[1], source)])
    assert stream.num_left == 2
    arrived()
    # What began before is there, too.
    assert [host.tolist() for host in hosts] == [[1, 1, 1]] * 2


def test_what_is_written_afterwards_is_not_in_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    play_late_copies(monkeypatch.setattr)
    hosts, source = [torch.zeros(3) for _ in range(2)], torch.ones(3)
    arrived = copy_beside([(hosts[0], source)])
    before_writing()
    source.fill_(2)
    arrived()
    assert hosts[0].tolist() == [1, 1, 1]
    arrived = copy_beside([(hosts[1], source)])
    source.fill_(3)  # who does not ask spoils it
    arrived()
    assert hosts[1].tolist() == [3, 3, 3]
