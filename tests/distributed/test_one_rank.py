"""Every function of torch.distributed that is called on groups of one rank."""

from __future__ import annotations

from tests.harness import tiny


def test_collectives_of_one_rank_return_what_it_gave() -> None:
    done = tiny.run_script("tests/distributed/one_rank.py", fresh=True)
    assert done.stdout == "all collectives ran\n"
