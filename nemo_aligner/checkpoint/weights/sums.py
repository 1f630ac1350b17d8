"""Checksums of a model's weights that do not depend on how the weights are sharded.

``PendingSave`` adds every shard while writing it, so the sums need no second read. The sum of a
tensor is ``sum(word[i, j, ...] * factor_0[i] * factor_1[j] * ...)`` modulo 2^64, with a fixed
pseudo-random odd factor for each index of each axis. The sums of a tensor's shards add up to the
sum of the whole tensor, whatever the layout. All factors are odd, so a change of one word always
changes the sum; a change of several words leaves it equal only by chance. So the sums identify a
model. They are not a cryptographic hash: an attacker could construct other weights with the same
sums.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

# Weights are read as words of 4 bytes. In words of 8 bytes, flipping the sign of the element in the
# highest bytes changes the product with any odd factor by exactly 2^63, so two such flips would
# cancel.
_WORD = torch.int32
_WORD_BYTES = 4
# Number of words that are multiplied at once: on a CPU a block that fits into the cache, on a GPU a
# larger one, which needs fewer kernels.
_BLOCK_WORDS = {"cpu": 2**18}
_BLOCK_WORDS_ON_GPU = 2**22
_MODULUS = 2**64


# The checksums of a model: stored name of each tensor -> (name of the dtype, sum).
WeightSums: TypeAlias = dict[str, tuple[str, int]]


def add_shard(sums: WeightSums, name: str, shard: Tensor, offsets: Sequence[int]) -> None:
    """Add the checksum of a shard to its tensor's entry in ``sums``.

    Args:
        name: stored name of the tensor.
        shard: a part of the tensor, of any shape and dtype.
        offsets: indices of the shard's first element in the whole tensor, one for each axis.
    """
    dtype = str(shard.dtype).removeprefix("torch.")
    _add(sums, name, dtype, _sum_of(shard.detach(), offsets))


def merge_sums(parts: Iterable[WeightSums]) -> WeightSums:
    """Add up the sums of all ranks; each rank has summed the shards that it wrote."""
    merged: WeightSums = {}
    for part in parts:
        for name, (dtype, number) in part.items():
            _add(merged, name, dtype, number)
    return merged


def _add(sums: WeightSums, name: str, dtype: str, number: int) -> None:
    _, previous = sums.get(name, (dtype, 0))
    sums[name] = dtype, (previous + number) % _MODULUS


def _sum_of(shard: Tensor, offsets: Sequence[int]) -> int:
    if shard.numel() == 0:
        return 0
    if shard.dim() == 0:
        shard, offsets = shard.view(1), (0,)
    words, first = _as_words(shard, offsets[-1])
    outer_factors = np.ones((), dtype=np.uint64)
    for axis, (offset, size) in enumerate(zip(offsets[:-1], shard.shape, strict=False)):
        outer_factors = np.multiply.outer(outer_factors, _index_factors(axis, offset, size))
    row_factors = _to_device(outer_factors.reshape(-1), words.device)
    column_factors = _to_device(
        _index_factors(len(offsets) - 1, first, words.size(1)), words.device
    )
    block_words = _BLOCK_WORDS.get(words.device.type, _BLOCK_WORDS_ON_GPU)
    step = max(1, block_words // words.size(1))
    # int64 arithmetic wraps around, which is arithmetic modulo 2^64.
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for block, factors in zip(words.split(step), row_factors.split(step), strict=True):
        total += ((block * column_factors).sum(1) * factors).sum()
    return int(total)


def _as_words(shard: Tensor, offset: int) -> tuple[Tensor, int]:
    """View the bytes of a shard as int32 words ``[rows, words]``.

    A shard that begins or ends within a word is padded with zeros, so that the partial words of two
    shards add up to the word of the whole row.

    Args:
        offset: index of the shard's first column in the whole tensor.

    Returns:
        The words, and the index of the first word in a row of the whole tensor.
    """
    content = shard.reshape(-1, shard.size(-1)).contiguous().view(torch.uint8)
    start = offset * shard.element_size()
    left_padding = start % _WORD_BYTES
    right_padding = -(left_padding + content.size(1)) % _WORD_BYTES
    if left_padding or right_padding:
        content = pad(content, (left_padding, right_padding))
    elif content.storage_offset() % _WORD_BYTES:
        content = content.clone()
    return content.view(_WORD), start // _WORD_BYTES


def _index_factors(axis: int, start: int, count: int) -> np.ndarray:
    """Return odd pseudo-random uint64 factors for ``count`` indices of an axis, from ``start`` on.

    Each factor is a hash (splitmix64) of the axis and the index, so it is the same on every rank.
    """
    numbers = np.arange(start, start + count, dtype=np.uint64)
    numbers += np.uint64((axis + 1) << 48)
    numbers *= np.uint64(0x9E3779B97F4A7C15)
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (numbers ^ (numbers >> np.uint64(31))) | np.uint64(1)


def _to_device(factors: np.ndarray, device: torch.device) -> Tensor:
    """Move uint64 factors to a device as int64, because torch cannot multiply uint64."""
    return torch.from_numpy(factors.view(np.int64)).to(device)
