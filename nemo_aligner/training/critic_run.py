"""The run of a critic: from a reward model, or from where it was saved, to what is saved."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path

from nemo_aligner.checkpoint.nemo.reward_model import (
    PretrainedModel,
    load_pretrained,
    read_text_rules,
    save_reward_model,
)
from nemo_aligner.checkpoint.run_folder import CHECKPOINTS_NAME, MODEL_NAME
from nemo_aligner.checkpoint.runs import RunCheckpoints, RunState, check_same_run
from nemo_aligner.config.common import Precision
from nemo_aligner.config.critic import ServeCriticConfig
from nemo_aligner.config.load import config_to_dict
from nemo_aligner.console import say
from nemo_aligner.data.token_packing import TokenPacking
from nemo_aligner.errors import CheckpointError, ConfigError
from nemo_aligner.models.batch_invariant import make_batch_invariant
from nemo_aligner.models.shape import ModelShape
from nemo_aligner.models.trainable import freeze_lower_layers, wrap_for_training
from nemo_aligner.objectives.clipped_value import ClippedValueLoss
from nemo_aligner.parallel.layout import ParallelLayout
from nemo_aligner.text.contract import ScoringContract
from nemo_aligner.text.contract_changes import check_expected
from nemo_aligner.text.one_reward import check_plain_reading
from nemo_aligner.text.tokenizer import Tokenizer
from nemo_aligner.training.critic import CriticLearner
from nemo_aligner.training.loggers import MetricLoggers, build_loggers, check_loggers
from nemo_aligner.training.optimizer.build import build_optimizer
from nemo_aligner.training.resume import changed_settings, newest, write_run_config

_WANTED = "wanted a reward model, or a critic that critic_save has written"


@dataclass(frozen=True)
class CriticRun:
    """A critic that learns, and where it is kept; every rank has one."""

    learner: CriticLearner
    contract: ScoringContract
    tokenizer: Tokenizer
    checkpoints: RunCheckpoints
    loggers: MetricLoggers
    model_config: dict[str, object]
    fresh: RunState

    def save(self) -> Path:
        """Write the run's state, and the critic as a ``.nemo``, which it returns; every rank.

        When it returns both are on the disk. The ``.nemo`` has the scoring contract that it came
        with, without the mean and deviation of the rewards, which were another model's.

        Raises:
            CheckpointError: on every rank, if any cannot write.
        """
        learner, checkpoints = self.learner, self.checkpoints
        latest = checkpoints.latest()
        if latest is None or latest.state.step != learner.step:
            samples = learner.consumed_samples
            state = replace(self.fresh, step=learner.step, consumed_samples=samples)
            checkpoints.save(state, learner.model, learner.optimizer)
            checkpoints.publish()
        path = checkpoints.folder / MODEL_NAME
        contract = replace(self.contract, reward_mean=None, reward_std=None, measured_on=None)
        save_reward_model(
            path, learner.model, self.model_config, self.tokenizer, contract, copied=True
        )
        return path


def open_critic(config: ServeCriticConfig, layout: ParallelLayout) -> CriticRun:
    """The critic of ``pretrained_checkpoint``, or of the run in ``exp_manager.explicit_log_dir``.

    Every rank calls it.

    Raises:
        CheckpointError: the checkpoint is no reward model, or the run is another one.
        ConfigError: ``model.micro_batch_tokens`` is below the contract's ``seq_length``, or there
            is a run, and ``exp_manager.resume_if_exists`` is false.
    """
    check_loggers(config.exp_manager)
    path = str(config.pretrained_checkpoint.restore_from_path)
    tokenizer, contract = read_text_rules(path)
    if contract is None:
        raise CheckpointError(f"{path}: it has no scoring contract; {_WANTED}")
    check_plain_reading(contract, path, "a critic")
    check_expected(contract, config.expect_contract, "expect_contract")
    contract = contract.with_dtype(config.trainer.precision)
    if config.model.micro_batch_tokens < contract.seq_length:
        raise ConfigError(
            f"model.micro_batch_tokens: got {config.model.micro_batch_tokens}, wanted at least "
            f"the scoring contract's seq_length, {contract.seq_length}"
        )
    pretrained = _load(config, contract, layout)
    learner = _build_learner(config, contract, pretrained, layout)
    folder = Path(config.exp_manager.explicit_log_dir) / CHECKPOINTS_NAME
    checkpoints = RunCheckpoints(folder, save_top_k=0)
    fresh = _new_state(config, contract, pretrained)
    _resume(config, checkpoints, fresh, learner)
    loggers = build_loggers(config.exp_manager, fresh.config, learner.step)
    return CriticRun(learner, contract, tokenizer, checkpoints, loggers, pretrained.config, fresh)


def _load(
    config: ServeCriticConfig, contract: ScoringContract, layout: ParallelLayout
) -> PretrainedModel:
    path = str(config.pretrained_checkpoint.restore_from_path)
    say(f"loading the critic {path} ...")
    pretrained = load_pretrained(
        path,
        layout,
        num_attributes=len(contract.attributes),
        precision=Precision(contract.dtype),
        recompute=config.model.activations_checkpoint_granularity,
        seed=config.model.seed,
    )
    if pretrained.head_is_new:
        raise CheckpointError(f"{path}: it has no reward head; {_WANTED}")
    pretrained.model.reads_every_token = True
    return pretrained


def _build_learner(
    config: ServeCriticConfig,
    contract: ScoringContract,
    pretrained: PretrainedModel,
    layout: ParallelLayout,
) -> CriticLearner:
    options, ppo = config.model, config.trainer.ppo
    shape = ModelShape.from_config(pretrained.config)
    make_batch_invariant(pretrained.model, options.invariant_rows)
    freeze_lower_layers(pretrained.model, options.freeze_layers, shape.num_layers)
    model = wrap_for_training(pretrained.model)
    return CriticLearner(
        model,
        build_optimizer(model, options.optim, ppo.gradient_clip_val, ppo.max_steps),
        layout,
        TokenPacking(options.micro_batch_tokens, shape.query_key_cost()),
        ClippedValueLoss(options.loss_clip_val, contract.attribute_weights, contract.label_means),
        options.global_batch_size,
    )


def _new_state(
    config: ServeCriticConfig, contract: ScoringContract, pretrained: PretrainedModel
) -> RunState:
    shape = asdict(ModelShape.from_config(pretrained.config))
    return RunState(
        step=0,
        consumed_samples=0,
        # Layout, learning rate and clipping may change when a run goes on.
        fingerprint={
            **{f"model.{name}": value for name, value in shape.items()},
            "critic": True,
            "model.freeze_layers": config.model.freeze_layers,
            "trainer.precision": contract.dtype,
            "scoring contract": contract.hash,
        },
        config=config_to_dict(config),
        contract=contract.to_dict(),
    )


def _resume(
    config: ServeCriticConfig,
    checkpoints: RunCheckpoints,
    fresh: RunState,
    learner: CriticLearner,
) -> None:
    checkpoints.clean()
    latest = newest(checkpoints, config.exp_manager)
    if latest is not None:
        check_same_run(latest, fresh.fingerprint)
        checkpoints.load(latest, learner.model, learner.optimizer)
        learner.step = latest.state.step
        learner.consumed_samples = latest.state.consumed_samples
        say(f"resumed from {latest.path}, after {learner.consumed_samples} sequences")
        for change in changed_settings(latest.state.config, fresh.config):
            say(f"  changed since: {change}")
    write_run_config(config, config.exp_manager)
