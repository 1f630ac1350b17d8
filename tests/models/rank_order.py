"""Partial sums of every rank, summed in rank order; under torchrun. Rank 0 prints what differs."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F

from nemo_aligner.distributed.launch import launch
from nemo_aligner.distributed.layout import initialize_layout
from nemo_aligner.models.backbone import AcrossHeadsRMSNorm
from nemo_aligner.models.layers import sum_in_rank_order


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
        of_ranks = [""] * ranks
        dist.all_gather_object(of_ranks, norm_across_heads(rank, ranks))
        wrong += filter(None, of_ranks)
        if world.is_main:
            print("differs:", wrong)


def norm_across_heads(rank: int, ranks: int) -> str:
    """How a norm of two heads a rank, the last two of zeros, is not that of the others."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    initialize_layout(ranks, 1, False)
    heads, channels, generator = 2 * ranks, 24, torch.Generator().manual_seed(1)
    config = TransformerConfig(
        num_layers=1, hidden_size=48, num_attention_heads=heads, tensor_model_parallel_size=ranks
    )
    sizes = {"heads": heads, "zero_heads": 2}
    norm = type("Norm", (AcrossHeadsRMSNorm,), sizes)(config, channels).eval()
    x = torch.randn(70, 1, heads, channels, generator=generator)
    x[:, :, -2:] = 0
    real = (heads - 2) * channels
    mine = x[:, :, 2 * rank : 2 * rank + 2]
    with torch.no_grad():
        norm.weight.copy_(torch.randn(heads * channels, generator=generator))
        norm.weight[real:] = 0
        found = norm(mine)
        some = norm(mine[3:4])
    wanted = F.rms_norm(x.flatten(1)[:, :real], (real,), norm.weight[:real], 1e-5)
    wanted = F.pad(wanted, (0, 2 * channels)).view(x.shape)[:, :, 2 * rank : 2 * rank + 2]
    if not torch.allclose(found, wanted, atol=1e-5):
        return f"rank {rank}: a norm"
    return "" if torch.equal(some, found[3:4]) else f"rank {rank}: a row's bits"


if __name__ == "__main__":
    main()
