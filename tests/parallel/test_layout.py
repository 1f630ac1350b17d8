"""Which layouts fit a world, and what a wrong one is told."""

from __future__ import annotations

import pytest

from nemo_aligner.errors import ConfigError
from nemo_aligner.parallel.layout import LayoutSizes, ParallelLayout, check_sizes


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


def test_a_layout_is_written_in_one_way() -> None:
    sizes = {"tp": 2, "pp": 3, "dp": 4, "sequence_parallel": True}
    ranks = {"tp_rank": 1, "pp_rank": 2, "dp_rank": 0}
    layout = ParallelLayout(**sizes, **ranks)  # type: ignore[arg-type]
    assert str(layout) == str(LayoutSizes(**sizes)) == "TP=2+SP PP=3 DP=4"  # type: ignore[arg-type]
    assert layout.num_ranks == 24
    assert str(LayoutSizes()) == "TP=1 PP=1 DP=1"
