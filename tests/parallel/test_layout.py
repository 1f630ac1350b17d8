"""Which layouts fit a world, and what a wrong one is told."""

from __future__ import annotations

import pytest

from nemo_aligner.errors import ConfigError
from nemo_aligner.parallel.layout import check_sizes


@pytest.mark.parametrize(
    ("world_size", "tp", "pp", "dp"), [(1, 1, 1, 1), (8, 2, 2, 2), (8, 8, 1, 1), (6, 1, 3, 2)]
)
def test_data_parallel_takes_the_rest(world_size: int, tp: int, pp: int, dp: int) -> None:
    assert check_sizes(world_size, tp, pp, sequence_parallel=tp > 1) == dp


def test_a_world_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ConfigError, match="got 6 processes, wanted a multiple of 4"):
        check_sizes(6, 2, 2, False)


def test_sequence_parallel_needs_tensor_parallel() -> None:
    with pytest.raises(ConfigError, match=r"model\.sequence_parallel: got true"):
        check_sizes(2, 1, 2, True)
