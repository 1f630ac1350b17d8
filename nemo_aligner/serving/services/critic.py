"""The critic as a service: values are answered side by side, training and saving take turns."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from functools import partial

import numpy as np

from nemo_aligner.config.critic import ServeCriticConfig, WhileTraining
from nemo_aligner.serving.batcher import Batcher
from nemo_aligner.serving.meter import Meter
from nemo_aligner.serving.ranks import ModelRanks
from nemo_aligner.serving.service import Endpoint, Tensors
from nemo_aligner.serving.services.failures import answer_of, check_size, failure_of
from nemo_aligner.serving.services.reward import RewardService
from nemo_aligner.serving.services.reward_model import answer_request, contract_endpoint
from nemo_aligner.serving.turns import Turns
from nemo_aligner.serving.wire import critic as wire
from nemo_aligner.serving.wire import kserve
from nemo_aligner.serving.wire.types import Failure, FailureKind
from nemo_aligner.text.encoder import TextEncoder
from nemo_aligner.training.critic import ValueStep
from nemo_aligner.training.critic_run import CriticRun

# What all ranks are asked for.
VALUES, TRAIN, SAVE = "give values", "train", "save"


class CriticService:
    """The endpoints ``critic_infer``, ``critic_train`` and ``critic_save``.

    A request for values, all of it, is answered by one state of the critic: what comes while it
    trains or saves waits until it has, or is refused (``trainer.ppo.infer_while_training``).
    """

    def __init__(
        self,
        run: CriticRun,
        config: ServeCriticConfig,
        ranks: ModelRanks,
        shown: Sequence[str] = (),
        *,
        has_rewards: bool,
    ) -> None:
        self._run = run
        self._config = config
        self._ranks = ranks
        self._shown = shown
        self._has_rewards = has_rewards
        self._turns = Turns()
        self._saved_step = run.learner.step  # it is new, or goes on from what was saved
        self._meter = Meter()
        self._contract = run.contract
        values = partial(ranks.submit, VALUES)
        self._batcher = Batcher(values, run.learner.tokens_per_call, self._meter, wire.join_rows)
        self._intake = RewardService(
            TextEncoder(run.contract, run.tokenizer),
            _InTurn(self._batcher, self._turns),
            config.server,
            self._meter,
        )

    @property
    def endpoints(self) -> Sequence[Endpoint]:
        outputs = [*wire.INFER_OUTPUTS, *([wire.REWARDS_OUTPUT] if self._has_rewards else [])]
        rows = self._config.server.max_batch_size
        endpoints = [
            Endpoint(wire.INFER_NAME, wire.INFER_INPUTS, outputs, self._infer, rows),
            Endpoint(wire.TRAIN_NAME, wire.TRAIN_INPUTS, wire.TRAIN_OUTPUTS, self._train),
            Endpoint(wire.SAVE_NAME, wire.SAVE_INPUTS, wire.SAVE_OUTPUTS, self._save),
        ]
        # Where the reward model is here, too, it has an endpoint for its own.
        if self._has_rewards:
            return endpoints
        return [*endpoints, contract_endpoint(self._contract, self._meter.statistics)]

    @property
    def greeting(self) -> Sequence[str]:
        step, folder = self._run.learner.step, self._run.checkpoints.folder
        return [f"Critic at step {step}; critic_save writes to {folder}", *self._shown]

    def report(self) -> str | None:
        line = self._meter.take_line(self._batcher.waiting_rows)
        return None if line is None else f"critic: {line}"

    def close(self) -> None:
        self._intake.close()
        self._batcher.close()
        lost = _never_saved(self._run.learner.step, self._saved_step)
        if lost is not None:
            print(lost, flush=True)

    async def _infer(self, inputs: Tensors) -> Tensors | Failure:
        refuses = self._config.trainer.ppo.infer_while_training is WhileTraining.refuse
        if refuses and self._turns.is_reserved:
            self._meter.refused()
            return Failure("the critic is at training; retry after 1 s", FailureKind.busy)
        reply = await answer_request(self._intake, inputs)
        if isinstance(reply, Failure):
            return reply
        return wire.encode_values(inputs, reply.rewards, reply.exceeded, self._has_rewards)

    async def _train(self, inputs: Tensors) -> Tensors | Failure:
        return await _answered(partial(self._train_on, inputs))

    async def _train_on(self, inputs: Tensors) -> Tensors:
        _, num_bytes = kserve.size_of_request(inputs)
        check_size(num_bytes, self._config.server.max_request_bytes)
        rollout = wire.decode_rollout(inputs)
        rollout.check(
            self._contract.seq_length,
            self._run.tokenizer.vocab_size,
            self._config.model.global_batch_size,
        )
        submit = partial(self._ranks.submit, TRAIN, *vars(rollout).values())
        steps = await answer_of(self._turns.take(submit, alone=True))
        for step in steps:
            print(_shown(step), flush=True)
        total = sum(step.loss * step.num_tokens for step in steps)
        loss = total / sum(step.num_tokens for step in steps)
        return {"loss_mean": np.array([loss], dtype=np.float32)}

    async def _save(self, inputs: Tensors) -> Tensors | Failure:
        return await _answered(self._save_now)

    async def _save_now(self) -> Tensors:
        submit = partial(self._ranks.submit, SAVE)
        path = await answer_of(self._turns.take(submit, alone=True))
        self._saved_step = self._run.learner.step
        print(f"saved {path} and the state that a restart goes on from", flush=True)
        return {"status": np.zeros(1, dtype=np.int64)}


class _InTurn:
    """A batcher whose requests take turns with what must be alone with the model."""

    def __init__(self, batcher: Batcher, turns: Turns) -> None:
        self._batcher = batcher
        self._turns = turns

    def submit(self, token_lists: Sequence[Sequence[int]]) -> Future[np.ndarray]:
        return self._turns.take(partial(self._batcher.submit, token_lists), alone=False)


async def _answered(work: Callable[[], Awaitable[Tensors]]) -> Tensors | Failure:
    """What ``work`` answers, or why it does not."""
    try:
        return await work()
    except Exception as error:
        return failure_of(error)


def _never_saved(step: int, saved: int) -> str | None:
    """What a person who ends the service after ``step`` has lost; None: nothing."""
    if step <= saved:
        return None
    lost = f"step {step} was" if step == saved + 1 else f"steps {saved + 1} to {step} were"
    again = f"goes on from step {saved}" if saved else "begins at step 0"
    return f"{lost} never saved (critic_save); a restart {again}"


def _shown(step: ValueStep) -> str:
    """What a person who watches sees of a step."""
    norm = "skipped, fp16 overflowed" if step.grad_norm is None else f"{step.grad_norm:.4g}"
    return (
        f"step {step.step}: loss {step.loss:.6g}, grad norm {norm}, lr {step.lr:.4g}, "
        f"{step.num_tokens:,} values in {step.seconds:.2f} s"
    )
