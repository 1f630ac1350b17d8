"""Weights that only score leave the device to others."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from nemo_aligner.models.aside import WeightsAside


class Tied(nn.Module):
    def __init__(self, device: str) -> None:
        super().__init__()
        self.first = nn.Linear(256, 256, bias=False, device=device)
        self.second = nn.Linear(256, 256, bias=False, device=device)
        self.second.weight = self.first.weight
        self.register_buffer("scale", torch.full((1,), 2.0, device=device))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.scale * self.second(self.first(values))


def test_a_model_computes_the_same_before_in_and_after_a_block() -> None:
    model, values = Tied("cpu"), torch.randn(3, 256)
    wanted = model(values)
    aside = WeightsAside(model, torch.device("cpu"))
    for _ in range(2):
        with aside.back():
            assert torch.equal(model(values), wanted)
            assert model.second.weight is model.first.weight
    assert torch.equal(model(values), wanted)


def test_a_block_that_fails_leaves_the_weights_aside() -> None:
    model = Tied("cpu")
    aside = WeightsAside(model, torch.device("cpu"))
    kept = model.first.weight.data_ptr()
    with pytest.raises(ValueError, match="no"), aside.back():
        raise ValueError("no")
    assert model.first.weight.data_ptr() == kept


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_only_in_a_block_a_model_takes_memory_of_the_gpu() -> None:
    model, values = Tied("cuda"), torch.randn(3, 256, device="cuda")
    wanted = model(values)
    whole = torch.cuda.memory_allocated()
    aside = WeightsAside(model, torch.device("cuda"))
    assert {tensor.device.type for tensor in (*model.parameters(), *model.buffers())} == {"cpu"}
    rest = torch.cuda.memory_allocated()
    assert rest <= whole - 256 * 256 * 4
    with aside.back():
        assert torch.equal(model(values), wanted)
    assert torch.cuda.memory_allocated() == rest
