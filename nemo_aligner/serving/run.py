"""A server from its settings until it is told to stop."""

from __future__ import annotations

from nemo_aligner.config.serving import ServeConfig
from nemo_aligner.console import say
from nemo_aligner.errors import ConfigError
from nemo_aligner.parallel.launch import launch
from nemo_aligner.parallel.layout import initialize_layout
from nemo_aligner.scoring.scorer import load_scorer
from nemo_aligner.serving.services.reward_model import RewardModelServable
from nemo_aligner.serving.transports.triton.server import check_port, serve
from nemo_aligner.text.contract import check_expected


def run_server(config: ServeConfig) -> int:
    """Serve the reward model on all ranks; the exit code.

    Raises:
        AlignerError: settings or model are unfit.
    """
    if config.rm_model_file is None:
        raise ConfigError("rm_model_file: it is not set, wanted a reward model's .nemo")
    with launch():
        check_port(config.server)  # now, and not when a large model is loaded
        layout = initialize_layout(
            config.model.tensor_model_parallel_size,
            config.model.pipeline_model_parallel_size,
            config.model.sequence_parallel,
        )
        say(f"loading {config.rm_model_file} ...")
        scorer = load_scorer(
            config.rm_model_file,
            layout,
            precision=config.precision,
            micro_batch_tokens=config.model.micro_batch_tokens,
            prefix_cache_tokens=config.server.prefix_cache_tokens,
        )
        check_expected(scorer.contract, config.expect_contract, "expect_contract")
        return serve([RewardModelServable(scorer, config.server)], config.server)
