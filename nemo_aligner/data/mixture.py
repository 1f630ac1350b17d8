"""In which order an epoch takes the records: all of them once, or each file by its weight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from nemo_aligner.errors import ConfigError


@dataclass(frozen=True)
class EpochOrder:
    """The order of every epoch, a function of its number alone.

    An epoch is as long as all files together. Without weights it has every record once. With them
    a file has its share of it, to the record: its records come in passes through the file, each
    pass in an order of its own, and an epoch goes on in them where the one before ended.

    Attributes:
        sizes: records of every file, which follow on each other.
        seed: of all orders.
        weights: of every file, in any unit; none are as if every record had the same one.
    """

    sizes: tuple[int, ...]
    seed: int
    weights: tuple[float, ...] = ()

    @property
    def size(self) -> int:
        """Records of an epoch."""
        return sum(self.sizes)

    def record(self, position: int) -> int:
        """The record at ``position`` of the endless stream of epochs, from 0."""
        epoch, place = divmod(position, self.size)
        return int(_order(self, epoch)[place])

    def shares(self) -> list[int]:
        """How many of an epoch's records are of every file."""
        if not self.weights:
            return list(self.sizes)
        exact = np.array(self.weights) * (self.size / sum(self.weights))
        shares = np.floor(exact).astype(int)
        # What is left over goes to those that lost most by the rounding.
        most = np.argsort(shares - exact, kind="stable")[: self.size - shares.sum()]
        shares[most] += 1
        return shares.tolist()


def weighted_order(sizes: Sequence[int], seed: int, weights: Sequence[float]) -> EpochOrder:
    """That of files of so many records, checked.

    Raises:
        ConfigError: there is not one weight for every file, or a file gets no record.
    """
    order = EpochOrder(tuple(sizes), seed, tuple(weights))
    if weights and len(weights) != len(sizes):
        raise ConfigError(
            f"model.data.data_prefix.train_weights: got {len(weights)} weights, wanted one for "
            f"each of the {len(sizes)} training files"
        )
    for number, share in enumerate(order.shares(), start=1):
        if share == 0:
            raise ConfigError(
                f"model.data.data_prefix.train_weights: got {list(weights)}, which gives file "
                f"{number} none of an epoch's {order.size} records; wanted at least one for each"
            )
    return order


@lru_cache(maxsize=4)
def _order(order: EpochOrder, epoch: int) -> np.ndarray:
    if not order.weights:
        return _permutation(order.size, order.seed, epoch)
    first = np.cumsum([0, *order.sizes[:-1]])
    of_files = [
        start + _from_passes(size, share, order.seed + number, epoch)
        for number, (start, size, share) in enumerate(
            zip(first, order.sizes, order.shares(), strict=True), start=1
        )
    ]
    return np.concatenate(of_files)[_permutation(order.size, order.seed, epoch)]


def _from_passes(size: int, share: int, seed: int, epoch: int) -> np.ndarray:
    """The records of a file that an epoch takes, by the file's own numbers."""
    begin, end = epoch * share, (epoch + 1) * share
    passes = range(begin // size, -(-end // size))
    records = np.concatenate([_permutation(size, seed, number) for number in passes])
    return records[begin - passes.start * size :][:share]


def _permutation(size: int, seed: int, number: int) -> np.ndarray:
    # RandomState and not default_rng: numpy promises that its stream never changes.
    return np.random.RandomState([seed % 2**32, seed // 2**32, number]).permutation(size)
