"""Sums of a model's weights that do not depend on how the weights are sharded.

``PendingSave`` adds every shard while it writes it, so the sums cost no second read. The sum of a
tensor is ``sum(word[i, j, ...] * weight_0[i] * weight_1[j] * ...)`` modulo 2^64, with a fixed
pseudo-random odd factor for each index of each axis. Partial sums of shards add up to that of the
whole tensor, whatever the layout. All factors are odd, so a change of one word always changes the
sum, and any other change keeps it by chance only. A sum recognises a model; it is no protection
against somebody who constructs weights for it, as a cryptographic hash would be.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

# Weights are read as words of 4 bytes. With words of 8, a flipped sign in the last element of a
# word would move the product by 2^63 whatever the odd factor, and two flips would cancel.
_WORD = torch.int32
_WORD_BYTES = 4
# Words multiplied at once: on a CPU the products stay in the cache, on a GPU there are few kernels.
_BLOCK_WORDS = {"cpu": 2**18}
_BLOCK_WORDS_ON_GPU = 2**22
_MODULUS = 2**64


# Dtype and sum of each tensor, by its stored name.
WeightSums: TypeAlias = dict[str, tuple[str, int]]


def add_shard(sums: WeightSums, name: str, shard: Tensor, offsets: Sequence[int]) -> None:
    """Add a shard of the tensor ``name``, which begins at ``offsets`` in the whole tensor."""
    dtype = str(shard.dtype).removeprefix("torch.")
    _add(sums, name, dtype, _sum_of(shard.detach(), offsets))


def merge_sums(parts: Iterable[WeightSums]) -> WeightSums:
    """Merge the sums of all ranks, each of the shards that it wrote."""
    merged: WeightSums = {}
    for part in parts:
        for name, (dtype, number) in part.items():
            _add(merged, name, dtype, number)
    return merged


def _add(sums: WeightSums, name: str, dtype: str, number: int) -> None:
    _, before = sums.get(name, (dtype, 0))
    sums[name] = dtype, (before + number) % _MODULUS


def _sum_of(shard: Tensor, offsets: Sequence[int]) -> int:
    if shard.numel() == 0:
        return 0
    if shard.dim() == 0:
        shard, offsets = shard.view(1), (0,)
    words, first = _as_words(shard, offsets[-1])
    rows = np.ones((), dtype=np.uint64)
    for axis, (offset, size) in enumerate(zip(offsets[:-1], shard.shape, strict=False)):
        rows = np.multiply.outer(rows, _factors(axis, offset, size))
    of_rows = _on(rows.reshape(-1), words.device)
    of_columns = _on(_factors(len(offsets) - 1, first, words.size(1)), words.device)
    most = _BLOCK_WORDS.get(words.device.type, _BLOCK_WORDS_ON_GPU)
    step = max(1, most // words.size(1))
    # Products and sums of int64 wrap around: that is the arithmetic modulo 2^64.
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for block, factors in zip(words.split(step), of_rows.split(step), strict=True):
        total += ((block * of_columns).sum(1) * factors).sum()
    return int(total)


def _as_words(shard: Tensor, offset: int) -> tuple[Tensor, int]:
    """View a shard as ``[rows, words]``; also the number of its first word in a whole row.

    A shard that begins or ends within a word is padded with zeros, so that the words of two shards
    add up to the word of the whole row.
    """
    content = shard.reshape(-1, shard.size(-1)).contiguous().view(torch.uint8)
    start = offset * shard.element_size()
    before = start % _WORD_BYTES
    behind = -(before + content.size(1)) % _WORD_BYTES
    if before or behind:
        content = pad(content, (before, behind))
    elif content.storage_offset() % _WORD_BYTES:
        content = content.clone()
    return content.view(_WORD), start // _WORD_BYTES


def _factors(axis: int, start: int, count: int) -> np.ndarray:
    """Odd pseudo-random factors of ``count`` indices of an axis (splitmix64 of the index)."""
    numbers = np.arange(start, start + count, dtype=np.uint64)
    numbers += np.uint64((axis + 1) << 48)
    numbers *= np.uint64(0x9E3779B97F4A7C15)
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (numbers ^ (numbers >> np.uint64(31))) | np.uint64(1)


def _on(factors: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(factors.view(np.int64)).to(device)
