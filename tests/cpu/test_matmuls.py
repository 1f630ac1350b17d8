"""Products by oneDNN: the same numbers, in chunks of a few sizes."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from nemo_aligner.cpu import matmuls
from nemo_aligner.cpu.matmuls import (
    ChunkedLinear,
    add_weight_gradient,
    linear_in_chunks,
    training_row_multiple,
)


def test_matmuls_are_those_of_torch() -> None:
    generator = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(40, 96, generator=generator), torch.randn(40, generator=generator)
    for rows in (1, 31, 32, 33, 511, 512, 513, 1100):
        x = torch.randn(rows, 1, 96, generator=generator)
        for added in (None, bias):
            found = linear_in_chunks(x, weight, added)
            assert found.shape == (rows, 1, 40)
            wanted = torch.nn.functional.linear(x, weight, added)
            torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-5)


def test_matmuls_are_of_few_sizes(monkeypatch):
    """oneDNN keeps what it has made for each."""
    sizes = set()
    product = matmuls._matmul

    def noting(rows, *others):
        sizes.add(len(rows))
        return product(rows, *others)

    monkeypatch.setattr(matmuls, "_matmul", noting)
    weight = torch.ones(8, 8)
    for rows in range(1, 1200, 7):
        assert linear_in_chunks(torch.ones(rows, 8), weight).shape == (rows, 8)
    assert sizes == {16 * n for n in range(1, 33)}


@pytest.fixture
def slow_mkl(monkeypatch):
    """A processor on which all products go to oneDNN, also in training."""
    monkeypatch.setattr(matmuls, "is_slow_with_mkl", lambda: True)
    monkeypatch.setattr(matmuls, "_LARGE", 0)


@pytest.mark.parametrize("rows", [9, 64, 1100])
def test_product_gradients_are_those_of_torch(rows, slow_mkl):
    generator = torch.Generator().manual_seed(rows)
    draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    x, weight, bias, grad = draw(rows, 1, 96), draw(40, 96), draw(40), draw(rows, 1, 40)
    for fused, with_bias in product((False, True), (False, True)):
        found, wanted = (
            [each.clone().requires_grad_() for each in (x, weight, bias)[: 2 + with_bias]]
            for _ in range(2)
        )
        found[1].main_grad = torch.ones(40, 96)
        found[1].grad_added_to_main_grad = False
        ChunkedLinear.apply(*found[:2], *(found[2:] or [None]), fused, None).backward(grad)
        torch.nn.functional.linear(*wanted).backward(grad)
        own = found[1].main_grad - 1 if fused else found[1].grad
        assert found[1].grad_added_to_main_grad is fused
        for ours, theirs in [(own, wanted[1].grad)] + [
            (found[n].grad, wanted[n].grad) for n in (0, 2)[: 1 + with_bias]
        ]:
            torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=1e-4)


def test_product_with_a_frozen_weight_has_a_gradient_of_its_input(slow_mkl):
    x, weight = torch.randn(20, 8, requires_grad=True), torch.randn(4, 8)
    ChunkedLinear.apply(x, weight, None, True, None).sum().backward()
    torch.testing.assert_close(x.grad, weight.sum(0).expand(20, 8))
    assert weight.grad is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_product_s_weight_gradient_is_added(dtype, slow_mkl):
    x, grad = torch.randn(70, 1, 8).to(dtype), torch.randn(70, 1, 4).to(dtype)
    found = torch.ones(4, 8)
    add_weight_gradient(found, x, grad)
    wanted = 1 + grad[:, 0].float().t() @ x[:, 0].float()
    torch.testing.assert_close(found, wanted, atol=0.3 if dtype is torch.bfloat16 else 1e-4, rtol=0)


def test_packs_in_training_have_few_sizes_with_little_padding() -> None:
    sizes = {count: count + -count % training_row_multiple(count) for count in range(1, 5000)}
    assert all(size - count <= count / 16 for count, size in sizes.items())
    assert len({size for size in sizes.values() if 1024 <= size <= 2048}) == 17


def test_mkl_is_slow_on_avx512_of_others(monkeypatch, tmp_path):
    info = tmp_path / "cpuinfo"
    monkeypatch.setattr(matmuls, "_CPUINFO", info)
    wanted = {
        ("AVX512", "AuthenticAMD"): True,
        ("AVX512", "GenuineIntel"): False,
        ("AVX2", "AuthenticAMD"): False,
    }
    found = {}
    for capability, vendor in wanted:
        info.write_text(f"vendor_id : {vendor}\n")
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda it=capability: it)
        found[capability, vendor] = matmuls.is_slow_with_mkl.__wrapped__()
    assert found == wanted
