"""The PPO critic of ``nemo-aligner serve-critic``: a model that predicts a value for every token.

``CriticLearner`` computes values and takes training steps, with means over the global batch.
``open_critic`` starts it from a reward model, or resumes it from its last save. ``CriticRun``
saves it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from nemo_aligner.batch.packed import LabelColumns, PackedBatch
from nemo_aligner.checkpoint.nemo.fingerprint import check_expected_fingerprint, read_fingerprint
from nemo_aligner.checkpoint.nemo.reward_model import (
    PretrainedModel,
    check_expected_contract,
    load_pretrained,
    read_text_rules,
    save_reward_model,
)
from nemo_aligner.checkpoint.run import RunCheckpoints, check_same_run
from nemo_aligner.checkpoint.run_folder import CHECKPOINTS_NAME, MODEL_NAME
from nemo_aligner.checkpoint.run_lock import RunLock
from nemo_aligner.checkpoint.run_state import RunState
from nemo_aligner.config.common import Precision
from nemo_aligner.config.load import config_to_dict
from nemo_aligner.config.serving import ServeCriticConfig
from nemo_aligner.contract.contract import ScoringContract
from nemo_aligner.contract.from_settings import check_expected, check_plain_reading
from nemo_aligner.contract.tokenizer import Tokenizer
from nemo_aligner.data.packing import TokenPacking
from nemo_aligner.data.rollout import Rollout
from nemo_aligner.distributed.collectives import current_device
from nemo_aligner.distributed.layout import ParallelLayout
from nemo_aligner.losses.value import ClippedValueLoss
from nemo_aligner.models.shapes.decoder import ModelShape
from nemo_aligner.models.step import gather_rewards, infer_values
from nemo_aligner.models.training_wrap import set_routers
from nemo_aligner.training.build import build_optimized
from nemo_aligner.training.learner import compute_gradients
from nemo_aligner.training.loggers import MetricLoggers, build_loggers, check_loggers
from nemo_aligner.training.optimizer import Optimizer
from nemo_aligner.training.prepare import check_experts
from nemo_aligner.training.resume import check_may_resume, load_checkpoint, write_run_config
from nemo_aligner.utils.console import say
from nemo_aligner.utils.errors import CheckpointError, ConfigError, TrainingError

_ADVICE = "the weights did not change in this step. Check its returns, or lower model.optim.lr"


@dataclass(frozen=True)
class ValueStep:
    """Outcome of one training step of a critic.

    Attributes:
        step: number of the step, counted from 1.
        loss: mean loss over the ``num_tokens`` tokens, with the weights from before the update.
        num_tokens: number of tokens on all ranks that the mask selects.
        grad_norm: L2 norm of the gradient before clipping; None if fp16 overflowed, so that the
            step was skipped.
        lr: learning rate of the step.
        seconds: time that the step took.
    """

    step: int
    loss: float
    num_tokens: int
    grad_norm: float | None
    lr: float
    seconds: float


class CriticLearner:
    """A critic and its optimizer, distributed over the ranks; every rank makes the same calls.

    Attributes:
        step: number of steps done since the start of the run, including steps before a resume.
        consumed_samples: number of sequences trained on since the start of the run.
    """

    def __init__(
        self,
        model: Any,
        optimizer: Optimizer,
        layout: ParallelLayout,
        packing: TokenPacking,
        objective: ClippedValueLoss,
        global_batch_size: int,
        start: RunState,
    ) -> None:
        """Store the parts of a critic, which ``open_critic`` has built.

        Args:
            model: a model with an output for every token, in Megatron's data parallel wrapper.
            packing: makes packs of at most ``micro_batch_tokens`` tokens.
            global_batch_size: sequences of a training step.
            start: the state to continue from; model and optimizer already have its weights and
                moments.
        """
        self._ddp = model
        self._layout = layout
        self._packing = packing
        self._objective = objective
        self._global_batch_size = global_batch_size
        self.model = model.module
        self.optimizer = optimizer
        self.step = start.step
        self.consumed_samples = start.consumed_samples

    @property
    def tokens_per_call(self) -> int:
        """Number of tokens that one call of ``values`` needs to keep all ranks busy.

        The server collects waiting sequences up to this number for a call.
        """
        return self._packing.micro_batch_tokens * self._layout.dp * self._layout.pp

    def values(self, sequences: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Compute the values ``[tokens]`` float32 of each sequence of token ids, on every rank."""
        # Gather the updated weights on all ranks now. The forward pass would do it, but a rank
        # without sequences runs no forward pass, and the other ranks would wait for it. Do it here
        # and not at the end of ``train``, which is not reached if a step raises an error.
        self.optimizer.finish_update()
        lengths = [len(sequence) for sequence in sequences]
        local_indices = self._packing.share(lengths, self._layout.dp)[self._layout.dp_rank]
        packs = self._packing.pack(sequences, local_indices)
        outputs = infer_values(self._ddp, packs, self._layout)
        gathered = gather_rewards(
            torch.cat(outputs) if outputs else None,
            packs,
            (sum(lengths), len(self._objective.weights)),
            self._layout,
        )
        # ``merge`` adds the label means, and takes the weighted sum of the attributes, as the
        # reward server does.
        merged = self._objective.merge(gathered).numpy()
        return np.split(merged, np.cumsum(lengths)[:-1])

    def train(
        self, rollout: Rollout, note_step: Callable[[ValueStep], object] = lambda step: None
    ) -> list[ValueStep]:
        """Split ``rollout`` into batches of ``global_batch_size`` sequences, and train on each.

        Args:
            note_step: called after each step, so that an error in a later step does not lose it.

        Raises:
            TrainingError: the loss or the gradient of a step is not finite. That step did not
                change the weights; the steps before it did.
        """
        steps = []
        for batch in rollout.in_batches(self._global_batch_size):
            steps.append(self._train_step(batch))
            note_step(steps[-1])
        return steps

    def _train_step(self, batch: Rollout) -> ValueStep:
        """Train one step on the global batch ``batch``, and return its outcome."""
        start_time = time.perf_counter()
        packs = self._pack(batch)
        values = compute_gradients(self._ddp, packs, self._layout, self._objective.loss)
        # Check the loss before the update, so that an error leaves the weights unchanged.
        total, count = self._sum_over_ranks(values, packs)
        if not math.isfinite(total):
            raise self._error("a loss that is not finite")
        lr = self.optimizer.lr
        update = self.optimizer.step()
        if not update.applied and not update.skipped:
            raise self._error(f"a gradient norm of {update.grad_norm}")
        self.step += 1
        self.consumed_samples += len(batch)
        return ValueStep(
            step=self.step,
            loss=total / count,
            num_tokens=count,
            grad_norm=update.grad_norm if update.applied else None,
            lr=lr,
            seconds=time.perf_counter() - start_time,
        )

    def _pack(self, batch: Rollout) -> list[PackedBatch]:
        """Build the packs of this data parallel rank.

        There is at least one, because every rank must join the collectives of the backward pass.
        """
        lengths = batch.lengths()
        used = np.flatnonzero(lengths)
        shares = self._packing.share(lengths[used].tolist(), self._layout.dp)
        # Copy the tokens: those of a request are in read-only memory, about which torch warns.
        sequences = [batch.tokens[row, : lengths[row]].copy() for row in used]
        labels = _labels(batch, used, lengths)
        # A rank without a sequence computes one token with mask 0. It adds nothing to the loss or
        # to the count of tokens, but the rank joins the collectives.
        local_indices = shares[self._layout.dp_rank]
        if local_indices:
            return self._packing.pack(sequences, local_indices, labels)
        masked = LabelColumns.of(ClippedValueLoss.columns, torch.zeros(1, 3))
        return self._packing.pack([np.zeros(1, dtype=np.int64)], [0], masked)

    def _sum_over_ranks(
        self, values: Tensor | None, packs: Sequence[PackedBatch]
    ) -> tuple[float, int]:
        """Sum the loss and count the tokens that the mask selects, over all ranks.

        ``values`` are the outputs for the tokens of ``packs``; None on a pipeline stage without a
        head.

        Returns:
            The sum of the loss over tokens that the mask selects, and their number.
        """
        sums = torch.zeros(2, dtype=torch.float64, device=current_device())
        # All tensor and context parallel ranks have the same values, so only the first of them adds
        # the loss. Only the last pipeline stage has values.
        if values is not None and self._layout.tp_rank == self._layout.cp_rank == 0:
            sizes = [len(pack.records) for pack in packs]
            for pack_values, pack in zip(values.split(sizes), packs, strict=True):
                labels = pack.to(pack_values.device).records
                sums += torch.stack(self._objective.loss(pack_values.double(), labels)).double()
        if dist.get_world_size() > 1:
            dist.all_reduce(sums)
        total, count = sums.tolist()
        return total, int(count)

    def _error(self, problem: str) -> TrainingError:
        """Build the error that reports a ``problem`` of the current step, with advice."""
        return TrainingError(f"step {self.step + 1}: got {problem}; {_ADVICE}")


def _labels(batch: Rollout, rows: np.ndarray, lengths: np.ndarray) -> LabelColumns:
    """Collect the labels of all tokens of this rank's sequences, one sequence after the other.

    Args:
        batch: the sequences of a training step, padded to equal length.
        rows: indices in ``batch`` of the sequences that this rank trains on.
        lengths: number of tokens of each sequence of the batch, without padding.

    Returns:
        For every token its return, its previous value, and its mask, as float32 columns.
    """
    columns = [batch.returns, batch.prev_values, batch.mask]
    values = [
        np.concatenate([column[row, : lengths[row]] for row in rows]).astype(np.float32)
        for column in columns
    ]
    return LabelColumns.of(ClippedValueLoss.columns, torch.from_numpy(np.stack(values, axis=1)))


# The code below opens, saves and resumes a critic's run.

_EXPECTED = "Start from a reward model, or from a critic that the endpoint critic_save has written"
_BASE = "fingerprint of pretrained_checkpoint"


@dataclass(frozen=True)
class CriticRun:
    """A critic in training and what is needed to save it; every rank has one.

    Attributes:
        model_config: the config of the base checkpoint, which is copied to the saved ``.nemo``.
        fresh: the state of this run before its first step. Saved states differ from it only in
            their counts of steps and sequences.
    """

    learner: CriticLearner
    contract: ScoringContract
    tokenizer: Tokenizer
    checkpoints: RunCheckpoints
    loggers: MetricLoggers
    model_config: dict[str, object]
    fresh: RunState

    def save(self) -> Path:
        """Write the run's state, and the critic as a ``.nemo``; every rank calls it.

        Both are on disk when it returns. The ``.nemo`` gets the scoring contract of the base model
        but not the mean and standard deviation of its rewards, which the critic does not predict.

        Returns:
            The path of the ``.nemo``.

        Raises:
            CheckpointError: on every rank, if any rank cannot write its files.
        """
        learner, checkpoints = self.learner, self.checkpoints
        # Save the run's state before the .nemo: if the process dies in between, the run can still
        # be resumed.
        latest = checkpoints.latest()
        if latest is None or latest.state.step != learner.step:
            samples = learner.consumed_samples
            state = replace(self.fresh, step=learner.step, consumed_samples=samples)
            checkpoints.save(state, learner.model, learner.optimizer)
            checkpoints.publish()
        path = checkpoints.folder / MODEL_NAME
        checkpoints.check_lock()
        contract = replace(self.contract, reward_mean=None, reward_std=None, measured_on=None)
        save_reward_model(
            path, learner.model, self.model_config, self.tokenizer, contract, copied=True
        )
        return path


def open_critic(
    config: ServeCriticConfig, layout: ParallelLayout, lock: RunLock | None = None
) -> CriticRun:
    """Start a critic from ``pretrained_checkpoint``, or resume the run in ``explicit_log_dir``.

    Every rank calls it. ``lock`` is the lock of the folder ``explicit_log_dir``.

    Raises:
        CheckpointError: the checkpoint is no reward model, or the folder holds another run.
        ConfigError: ``model.micro_batch_tokens`` is below the contract's ``seq_length``;
            ``exp_manager.resume_if_exists`` is false but the folder holds a run; a logger is not
            installed; a mixture-of-experts model would be trained in fp16; or the server would
            publish another contract or fingerprint than ``expect_contract`` and
            ``expect_fingerprint``.
    """
    check_loggers(config.exp_manager)
    path = str(config.pretrained_checkpoint.restore_from_path)
    tokenizer, contract = read_text_rules(path)
    if contract is None:
        raise CheckpointError(f"{path}: it has no scoring contract. {_EXPECTED}")
    check_plain_reading(contract, path, "a critic")
    # The critic's weights are dense: adapters on a quantized base are folded into it.
    contract = replace(contract.with_dtype(config.trainer.precision), base_precision=None)
    _check_expected(config, contract)
    if config.model.micro_batch_tokens < contract.seq_length:
        raise ConfigError(
            f"model.micro_batch_tokens: got {config.model.micro_batch_tokens}, wanted at least "
            f"the scoring contract's seq_length, {contract.seq_length}"
        )
    pretrained = _load_base(config, contract, layout)
    options, ppo = config.model, config.trainer.ppo
    shape = ModelShape.from_config(pretrained.config)
    check_experts(shape, Precision(contract.dtype))
    set_routers(pretrained.model, trained=False, aux_loss_coeff=0.0)
    options.optim.sched.check_decay(ppo.max_steps)
    model, optimizer = build_optimized(
        pretrained.model, shape, options, ppo.gradient_clip_val, ppo.max_steps
    )
    folder = Path(config.exp_manager.explicit_log_dir) / CHECKPOINTS_NAME
    checkpoints = RunCheckpoints(folder, save_top_k=0, lock=lock)
    fresh = _new_state(config, contract, shape, _find_base(path, checkpoints))
    learner = CriticLearner(
        model,
        optimizer,
        layout,
        TokenPacking(options.micro_batch_tokens, shape.query_key_cost()),
        ClippedValueLoss(options.loss_clip_val, contract.attribute_weights, contract.label_means),
        options.global_batch_size,
        _resume(config, checkpoints, fresh, pretrained.model, optimizer),
    )
    loggers = build_loggers(config.exp_manager, fresh.config, learner.step)
    return CriticRun(learner, contract, tokenizer, checkpoints, loggers, pretrained.config, fresh)


def find_published_model(config: ServeCriticConfig) -> str:
    """Return the path of the archive whose scoring contract and fingerprint the server publishes.

    It is the reward model if the server also has one, else the model from which the critic starts.
    """
    start = str(config.pretrained_checkpoint.restore_from_path)
    is_combined = config.trainer.ppo.combine_rm_and_critic_server
    return str(config.rm_model_file or start) if is_combined else start


def _check_expected(config: ServeCriticConfig, contract: ScoringContract) -> None:
    """Raise ConfigError if the server would publish another contract or other weights.

    It publishes the critic's ``contract``, unless it also has a reward model.
    """
    path = find_published_model(config)
    if config.trainer.ppo.combine_rm_and_critic_server:
        check_expected_contract(path, None, config.expect_contract, "expect_contract")
    else:
        check_expected(contract, config.expect_contract, "expect_contract")
    check_expected_fingerprint(
        read_fingerprint(path), config.expect_fingerprint, "expect_fingerprint", path
    )


def _load_base(
    config: ServeCriticConfig, contract: ScoringContract, layout: ParallelLayout
) -> PretrainedModel:
    """Load the model of ``pretrained_checkpoint``, with a head that reads every token.

    Raises:
        CheckpointError: the checkpoint has no reward head.
    """
    path = str(config.pretrained_checkpoint.restore_from_path)
    say(f"loading the critic {path} ...")
    pretrained = load_pretrained(
        path,
        layout,
        num_attributes=len(contract.attributes),
        precision=Precision(contract.dtype),
        recompute=config.model.activations_checkpoint_granularity,
        seed=config.model.seed,
        reads_every_token=True,
        kernels=config.model.kernels,
    )
    if pretrained.head_is_new:
        raise CheckpointError(f"{path}: it has no reward head. {_EXPECTED}")
    return pretrained


def _find_base(path: str, checkpoints: RunCheckpoints) -> str | None:
    """Return the model fingerprint of the reward model from which a critic's run starts.

    Normally, this is the fingerprint of ``path``. A run can then not resume from another reward
    model, because the fingerprint must be the one in the run's newest checkpoint. The fingerprint
    in the checkpoint is returned instead if the two cannot be compared: an earlier version wrote
    the checkpoint, the model has no fingerprint, or ``path`` is the archive that this run saved.
    """
    latest, current = checkpoints.latest(), read_fingerprint(path)
    if latest is None:
        return current
    saved: str | None = latest.state.fingerprint.get(_BASE)
    is_own = Path(path).resolve() == (checkpoints.folder / MODEL_NAME).resolve()
    return saved if is_own or saved is None or current is None else current


def _new_state(
    config: ServeCriticConfig, contract: ScoringContract, shape: ModelShape, base: str | None
) -> RunState:
    """Build the state before the first step of a run from the model with fingerprint ``base``."""
    return RunState(
        step=0,
        consumed_samples=0,
        # Values that must be the same when the run resumes. The parallel layout, the learning rate
        # and gradient clipping are not among them, because they may change.
        fingerprint={
            **{f"model.{name}": value for name, value in shape.as_fingerprint().items()},
            "critic": True,
            "model.freeze_layers": config.model.freeze_layers,
            "trainer.precision": contract.dtype,
            "scoring contract": contract.hash,
            _BASE: base,
        },
        config=config_to_dict(config),
        contract=contract.to_dict(),
    )


def _resume(
    config: ServeCriticConfig,
    checkpoints: RunCheckpoints,
    fresh: RunState,
    model: Any,
    optimizer: Optimizer,
) -> RunState:
    """Load the newest checkpoint into ``model`` and ``optimizer``, and return its state.

    If the run has no checkpoint, load nothing, and return ``fresh``, the state before the first
    step.
    """
    checkpoints.clean()
    latest = checkpoints.latest()
    check_may_resume(latest, config.exp_manager)
    if latest is not None:
        check_same_run(latest, fresh.fingerprint)
        load_checkpoint(checkpoints, latest, fresh, model, optimizer, "sequences")
    write_run_config(config, config.exp_manager)
    return fresh if latest is None else latest.state
