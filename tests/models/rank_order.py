"""Partial sums of every rank, summed in rank order; under torchrun. Rank 0 prints what differs."""

from __future__ import annotations

import torch
import torch.distributed as dist

from nemo_aligner.distributed.launch import launch
from nemo_aligner.models.linear import sum_in_rank_order


def main() -> None:
    with launch(60.0) as world:
        group, rank, ranks = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
        generator = torch.Generator().manual_seed(0)
        # Of sizes so far apart that every order has other bits.
        partials = torch.randn(ranks, 70, 1, 48, generator=generator)
        partials *= 10.0 ** torch.arange(ranks).view(-1, 1, 1, 1)
        wrong = []
        for dtype in (torch.float32, torch.bfloat16):
            mine = partials.to(dtype)
            wanted = mine[0].float()
            for other in mine[1:]:
                wanted = wanted + other.float()
            wanted = wanted.to(dtype)
            for rows in (70, 33, 1):
                found = sum_in_rank_order(mine[rank, :rows], group, is_scattered=False)
                if not torch.equal(found, wanted[:rows]):
                    wrong.append(f"{dtype}, {rows} rows")
            share = sum_in_rank_order(mine[rank, :66], group, is_scattered=True)
            if not torch.equal(share, wanted[:66].chunk(ranks)[rank]):
                wrong.append(f"{dtype}, scattered")
        if world.is_main:
            print("differs:", wrong)


if __name__ == "__main__":
    main()
