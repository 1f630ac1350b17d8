"""A server from its settings until it is told to stop."""

from __future__ import annotations

from pathlib import Path

from nemo_aligner.checkpoint.nemo.archive import no_such_archive
from nemo_aligner.config.idle import idle_notes
from nemo_aligner.config.serving import ServeConfig
from nemo_aligner.console import say
from nemo_aligner.errors import CheckpointError, ConfigError
from nemo_aligner.parallel.launch import launch
from nemo_aligner.parallel.layout import ParallelLayout, initialize_layout
from nemo_aligner.scoring.ensemble import RewardEnsemble
from nemo_aligner.scoring.scorer import RewardScorer, load_scorer
from nemo_aligner.scoring.shaping import build_shaper
from nemo_aligner.serving.services.reward_model import RewardModelServable
from nemo_aligner.serving.transports.triton.server import check_front, serve
from nemo_aligner.text.contract_changes import check_expected


def run_server(config: ServeConfig) -> int:
    """Serve the reward model on all ranks; the exit code.

    Raises:
        AlignerError: settings or model are unfit.
    """
    if config.rm_model_file is None:
        raise ConfigError("rm_model_file: it is not set, wanted a reward model's .nemo")
    files = [config.rm_model_file, *config.ensemble.files]
    for file in files:
        if not Path(file).exists():
            raise CheckpointError(no_such_archive(Path(file)))
    with launch():
        check_front(config.server)  # now, and not when a large model is loaded
        layout = initialize_layout(
            config.model.tensor_model_parallel_size,
            config.model.pipeline_model_parallel_size,
            config.model.sequence_parallel,
        )
        for note in idle_notes(config, layout.num_ranks):
            say(note)
        models = [_load(file, config, layout) for file in files]
        check_expected(models[0].contract, config.expect_contract, "expect_contract")
        scorer = RewardEnsemble(models) if len(models) > 1 else models[0]
        contracts = [model.contract for model in models]
        shaper = build_shaper(config.shaping, config.ensemble, contracts)
        servable = RewardModelServable(scorer, config.server, shaper, turn_end=models[0].turn_end())
        return serve([servable], config.server)


def _load(file: str, config: ServeConfig, layout: ParallelLayout) -> RewardScorer:
    say(f"loading {file} ...")
    return load_scorer(
        file,
        layout,
        precision=config.precision,
        micro_batch_tokens=config.model.micro_batch_tokens,
        invariant_rows=config.model.invariant_rows,
        prefix_cache_tokens=config.server.prefix_cache_tokens,
    )
