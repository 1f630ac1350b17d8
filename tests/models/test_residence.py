"""Tensors leave the device and come back with the same bits; on a CPU this is a rehearsal."""

from __future__ import annotations

import torch

from nemo_aligner.models.offload import Holds, Residence, ResidentPart


def test_views_of_what_left_have_the_same_bits_when_it_is_back() -> None:
    buffer = torch.randn(1000)
    views = [buffer[:600].view(20, 30), buffer[600:]]
    before = buffer.clone()
    part = ResidentPart(views, Holds.state)
    assert part.num_bytes == 4000
    part.leave()
    assert (buffer.untyped_storage().nbytes(), part.host_bytes) == (0, 4000)
    part.leave()
    part.come()
    assert all(map(torch.equal, views, [before[:600].view(20, 30), before[600:]]))
    assert torch.equal(buffer, before)


def test_state_that_has_changed_is_copied_again_and_what_is_constant_never_is() -> None:
    state, constant = torch.zeros(8), torch.zeros(8)
    parts = [ResidentPart([state], Holds.state), ResidentPart([constant], Holds.constant)]
    residence = Residence({"both": parts})
    residence.move([], away=["both"])
    residence.move(["both"], away=[])
    state += 1
    residence.note_change("both")
    residence.move([], away=["both"])
    residence.move(["both"], away=[])
    assert state.tolist() == [1.0] * 8
    assert constant.tolist() == [0.0] * 8


def test_scratch_comes_back_as_zeros_and_takes_no_host_memory() -> None:
    gradients = torch.ones(8)
    part = ResidentPart([gradients], Holds.scratch)
    part.leave()
    part.come()
    assert gradients.tolist() == [0.0] * 8
    assert part.host_bytes == 0


def test_a_storage_of_two_parts_is_moved_by_the_first() -> None:
    shared, own = torch.zeros(10), torch.zeros(20)
    first = ResidentPart([shared], Holds.state)
    second = ResidentPart([shared[5:], own], Holds.state, apart_from=[first])
    assert (first.num_bytes, second.num_bytes) == (40, 80)


def test_what_goes_leaves_before_what_is_wanted_comes() -> None:
    order = []

    class Noted(ResidentPart):
        def leave(self) -> None:
            order.append(("leave", self.num_bytes))
            super().leave()

        def come(self) -> None:
            order.append(("come", self.num_bytes))
            super().come()

    small, large = (Noted([torch.zeros(size)], Holds.state) for size in (1, 2))
    residence = Residence({"small": [small], "large": [large]})
    assert residence.device_bytes == 12
    residence.move(["small"], away=["large"])
    residence.move(["large"], away=["small"])
    assert order == [("leave", 8), ("come", 4), ("leave", 4), ("come", 8)]
    assert (residence.is_here("small"), residence.is_here("large")) == (False, True)
    assert (residence.device_bytes, residence.host_bytes) == (8, 12)
