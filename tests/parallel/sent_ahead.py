"""Two pipeline stages, of which the second receives only when the first has gone on."""

from __future__ import annotations

import torch
import torch.distributed as dist

from nemo_aligner.parallel.launch import launch
from nemo_aligner.parallel.layout import destroy_layout, initialize_layout

SHAPES = [(100_000, 1, 8), (3, 1, 8)]


def main() -> None:
    with launch(60.0):
        layout = initialize_layout(pp=2)
        from megatron.core.model_parallel_config import ModelParallelConfig

        from nemo_aligner.parallel.pipeline import PipelineMessages

        config = ModelParallelConfig(
            pipeline_model_parallel_size=2,
            pipeline_dtype=torch.float32,
            variable_seq_lengths=True,
        )
        messages = PipelineMessages(config, SHAPES, torch.float32)
        sent = [torch.arange(shape[0] * 8.0).view(shape) for shape in SHAPES]
        if layout.is_first_stage:
            for tensor in sent:
                messages.send_forward(tensor, False)
            dist.barrier()
        else:
            dist.barrier()
            got = [messages.recv_forward(shape, False) for shape in SHAPES]
            print("received:", [torch.equal(*pair) for pair in zip(got, sent, strict=True)])
        messages.finish()
        destroy_layout()


if __name__ == "__main__":
    main()
