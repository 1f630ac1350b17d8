"""Serve a reward model: ``python examples/serve_reward_model.py rm_model_file=megatron_gpt.nemo``.

With several ranks: ``torchrun --nproc-per-node 2 examples/serve_reward_model.py
rm_model_file=megatron_gpt.nemo model.tensor_model_parallel_size=2``. SIGTERM to the process whose
pid it prints drains and stops all ranks.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nemo_aligner.config.serving import ServeConfig


def main() -> int:
    from nemo_aligner.config.load import load_config
    from nemo_aligner.config.serving import ServeConfig
    from nemo_aligner.errors import AlignerError

    try:
        return run(load_config(ServeConfig, sys.argv[1:]))
    except AlignerError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1


def run(config: ServeConfig) -> int:
    from nemo_aligner.errors import ConfigError
    from nemo_aligner.parallel.launch import launch
    from nemo_aligner.parallel.layout import initialize_layout
    from nemo_aligner.scoring.scorer import load_scorer
    from nemo_aligner.serving.transports.triton.server import serve
    from nemo_aligner.text.contract import check_expected

    if config.rm_model_file is None:
        raise ConfigError("rm_model_file: it is not set, wanted a reward model's .nemo")
    with launch() as world:
        layout = initialize_layout(
            config.model.tensor_model_parallel_size,
            config.model.pipeline_model_parallel_size,
            config.model.sequence_parallel,
        )
        scorer = load_scorer(
            config.rm_model_file,
            layout,
            precision=config.precision,
            micro_batch_tokens=config.model.micro_batch_tokens,
        )
        check_expected(scorer.contract, config.expect_contract, "expect_contract")
        return serve(scorer, config.server, world.device)


if __name__ == "__main__":
    sys.exit(main())
