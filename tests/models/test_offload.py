"""Tensors leave the device and come back with the same bits; on a CPU this is a rehearsal."""

from __future__ import annotations

import torch

from nemo_aligner.models.offload import OffloadGroup, OffloadManager, OffloadPolicy


def test_views_of_what_left_have_the_same_bits_when_it_is_back() -> None:
    buffer = torch.randn(1000)
    views = [buffer[:600].view(20, 30), buffer[600:]]
    before = buffer.clone()
    without_storage = torch.zeros(2, 2).to_mkldnn()
    part = OffloadGroup([*views, without_storage], OffloadPolicy.state)
    assert part.num_bytes == 4000
    part.offload()
    assert (buffer.untyped_storage().nbytes(), part.host_bytes) == (0, 4000)
    part.offload()
    part.reload()
    assert all(map(torch.equal, views, [before[:600].view(20, 30), before[600:]]))
    assert torch.equal(buffer, before)


def test_state_that_has_changed_is_copied_again_and_what_is_constant_never_is() -> None:
    state, constant = torch.zeros(8), torch.zeros(8)
    parts = [
        OffloadGroup([state], OffloadPolicy.state),
        OffloadGroup([constant], OffloadPolicy.constant),
    ]
    manager = OffloadManager({"both": parts})
    manager.move([], away=["both"])
    manager.move(["both"], away=[])
    state += 1
    manager.note_change("both")
    manager.move([], away=["both"])
    manager.move(["both"], away=[])
    assert state.tolist() == [1.0] * 8
    assert constant.tolist() == [0.0] * 8


def test_scratch_comes_back_as_zeros_and_takes_no_host_memory() -> None:
    gradients = torch.ones(8)
    part = OffloadGroup([gradients], OffloadPolicy.scratch)
    part.offload()
    part.reload()
    assert gradients.tolist() == [0.0] * 8
    assert part.host_bytes == 0


def test_a_storage_of_two_parts_is_moved_by_the_first() -> None:
    shared, own = torch.zeros(10), torch.zeros(20)
    first = OffloadGroup([shared], OffloadPolicy.state)
    second = OffloadGroup([shared[5:], own], OffloadPolicy.state, apart_from=[first])
    assert (first.num_bytes, second.num_bytes) == (40, 80)


def test_what_goes_leaves_before_what_is_wanted_comes() -> None:
    order = []

    class Noted(OffloadGroup):
        def offload(self) -> None:
            order.append(("offload", self.num_bytes))
            super().offload()

        def reload(self) -> None:
            order.append(("reload", self.num_bytes))
            super().reload()

    small, large = (Noted([torch.zeros(size)], OffloadPolicy.state) for size in (1, 2))
    manager = OffloadManager({"small": [small], "large": [large]})
    assert manager.device_bytes == 12
    manager.move(["small"], away=["large"])
    manager.move(["large"], away=["small"])
    assert order == [("offload", 8), ("reload", 4), ("offload", 4), ("reload", 8)]
    assert (manager.is_on_device("small"), manager.is_on_device("large")) == (False, True)
    assert (manager.device_bytes, manager.host_bytes) == (8, 12)
