"""The server of a critic from its settings to its end."""

from __future__ import annotations

from nemo_aligner.config.critic import ServeCriticConfig
from nemo_aligner.config.idle import idle_notes
from nemo_aligner.console import say
from nemo_aligner.errors import ConfigError
from nemo_aligner.parallel.launch import launch
from nemo_aligner.parallel.layout import ParallelLayout, initialize_layout
from nemo_aligner.scoring.scorer import load_scorer
from nemo_aligner.serving.service import Servable
from nemo_aligner.serving.services.critic_ranks import CriticServable
from nemo_aligner.serving.services.reward_model import RewardModelServable
from nemo_aligner.serving.transports.triton.server import check_front, serve
from nemo_aligner.text.contract import ScoringContract
from nemo_aligner.training.critic_run import CriticRun, open_critic


def run_critic_server(config: ServeCriticConfig) -> int:
    """Serve a critic on all ranks, and a reward model beside it where it is asked for; exit code.

    Raises:
        AlignerError: settings, model or run are unfit.
    """
    if config.pretrained_checkpoint.restore_from_path is None:
        raise ConfigError(
            "pretrained_checkpoint.restore_from_path: it is not set, wanted a reward model's .nemo"
        )
    with launch():
        check_front(config.server)  # now, and not when a large model is loaded
        layout = initialize_layout(
            config.model.tensor_model_parallel_size,
            config.model.pipeline_model_parallel_size,
            config.model.sequence_parallel,
            config.model.seed,
        )
        for note in idle_notes(config, layout.num_ranks):
            say(note)
        run = open_critic(config, layout)
        try:
            return serve(_servables(config, run, layout), config.server)
        finally:
            run.loggers.close()


def _servables(config: ServeCriticConfig, run: CriticRun, layout: ParallelLayout) -> list[Servable]:
    if not config.trainer.ppo.combine_rm_and_critic_server:
        return [CriticServable(run, config)]
    path = str(config.rm_model_file or config.pretrained_checkpoint.restore_from_path)
    say(f"loading the reward model {path} ...")
    scorer = load_scorer(
        path,
        layout,
        micro_batch_tokens=config.model.micro_batch_tokens,
        prefix_cache_tokens=config.server.prefix_cache_tokens,
        invariant_rows=config.model.invariant_rows,
    )
    _check_reads_alike(path, scorer.contract, run.contract)
    critic = CriticServable(run, config, scorer)
    rewards = RewardModelServable(
        scorer,
        config.server,
        prepare=critic.make_room_for_rewards,
        turn_end=scorer.turn_end(),
    )
    return [critic, rewards]


def _check_reads_alike(path: str, rewards: ScoringContract, critic: ScoringContract) -> None:
    """Both read the same token ids; raises ConfigError where the reward model cannot."""
    for name in ("tokenizer_fingerprint", "seq_length"):
        got, wanted = getattr(rewards, name), getattr(critic, name)
        if got != wanted:
            raise ConfigError(
                f"rm_model_file: {path}: got {name} {got}, wanted the critic's, {wanted}"
            )
