"""Serve a PPO critic: ``CriticBackend`` computes on every rank, ``CriticService`` runs on rank 0.

Requests for values are computed concurrently; training and saving run exclusively.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict
from functools import partial

import numpy as np
import torch

from nemo_aligner.config.serving import ServeCriticConfig, WhileTraining
from nemo_aligner.contract.contract import ScoringContract
from nemo_aligner.contract.readout import one_reward
from nemo_aligner.contract.text_encoder import TextEncoder
from nemo_aligner.cpu.matmuls import resident_bytes
from nemo_aligner.data.rollout import Rollout
from nemo_aligner.models.offload import OffloadGroup, OffloadManager, OffloadPolicy
from nemo_aligner.serving.backpressure import BackpressureLimit
from nemo_aligner.serving.endpoints import (
    Endpoint,
    check_num_bytes,
    contract_endpoint,
    decode_request,
)
from nemo_aligner.serving.engine.batcher import Batcher
from nemo_aligner.serving.engine.executor import ModelRanks, Operation
from nemo_aligner.serving.engine.read_write_lock import ReadWriteLock
from nemo_aligner.serving.engine.rows import Row
from nemo_aligner.serving.engine.running_calls import LongOperation
from nemo_aligner.serving.engine.scorer import RewardScorer
from nemo_aligner.serving.failures import NO_ROWS, FailureKind, RequestError
from nemo_aligner.serving.intake import Intake, answer_of
from nemo_aligner.serving.protocols import ScoreRequest
from nemo_aligner.serving.protocols import critic as wire
from nemo_aligner.serving.protocols.kserve_body import Tensors
from nemo_aligner.serving.scoring import TemplateParts, check_num_rows
from nemo_aligner.training.critic import CriticRun, ValueStep
from nemo_aligner.utils.console import say
from nemo_aligner.utils.errors import CheckpointError, ServingError

# Names of the operations that run on all ranks.
VALUES, TRAIN, SAVE = "give values", "train", "save"


class CriticService:
    """The endpoints ``critic_infer``, ``critic_train`` and ``critic_save``.

    All values of a request come from the same weights. A request that arrives while the critic
    trains or saves waits, or is rejected (``trainer.ppo.infer_while_training``).
    """

    def __init__(
        self,
        run: CriticRun,
        config: ServeCriticConfig,
        ranks: ModelRanks,
        memory_lines: Sequence[str] = (),
        *,
        has_rewards: bool,
    ) -> None:
        self._run = run
        self._config = config
        self._ranks = ranks
        self._memory_lines = memory_lines
        self._has_rewards = has_rewards
        self._lock = ReadWriteLock()
        # Held while a thread decodes a rollout, so that no later request runs before its training.
        self._arrivals = asyncio.Lock()
        self._saved_step = run.learner.step  # all steps so far are in the checkpoint
        self._contract = run.contract
        self._intake = Intake(TextEncoder(run.contract, run.tokenizer), config.server)
        self._limit = BackpressureLimit(
            config.server.max_queue_rows, "server.max_queue_rows", "the critic"
        )
        self._batcher = Batcher(
            partial(ranks.submit, VALUES),
            run.learner.tokens_per_call,
            self._intake.meter,
            config.server.max_call_secs,
            ranks.clock,
        )

    @property
    def scoring(self) -> None:
        """Return None: a critic gives only values. A reward model has a separate service."""

    @property
    def endpoints(self) -> Sequence[Endpoint]:
        outputs = [*wire.INFER_OUTPUTS, *([wire.REWARDS_OUTPUT] if self._has_rewards else [])]
        rows = self._config.server.max_batch_size
        endpoints = [
            Endpoint(wire.INFER_NAME, wire.INFER_INPUTS, outputs, self._answer_infer, rows),
            Endpoint(wire.TRAIN_NAME, wire.TRAIN_INPUTS, wire.TRAIN_OUTPUTS, self._answer_train),
            Endpoint(wire.SAVE_NAME, wire.SAVE_INPUTS, wire.SAVE_OUTPUTS, self._answer_save),
        ]
        # If this server also has a reward model, the reward model's service publishes the contract.
        if self._has_rewards:
            return endpoints
        contract = contract_endpoint(self._read_contract, self._template_parts, self._read_counts)
        return [*endpoints, contract]

    @property
    def startup_log(self) -> Sequence[str]:
        step, folder = self._run.learner.step, self._run.checkpoints.folder
        return [f"Critic at step {step}; critic_save writes to {folder}", *self._memory_lines]

    def report(self) -> str | None:
        line = self._intake.meter.take_line(self._batcher.waiting_rows)
        return None if line is None else f"critic: {line}"

    def stop(self) -> None:
        # Training or saving must finish, even if the client that requested it has left. If another
        # call hangs, this waits forever, and ``server.py`` ends the process.
        self._lock.submit(_do_nothing, exclusive=True).result()
        # Print this first, because closing the batcher does not return if a call for values hangs.
        warning = _warn_of_unsaved_steps(self._run.learner.step, self._saved_step)
        if warning is not None:
            print(warning, flush=True)
        self._intake.close()
        self._batcher.close()

    async def _read_contract(self) -> ScoringContract:
        return self._contract

    async def _template_parts(self) -> TemplateParts:
        return TemplateParts()

    async def _read_counts(self) -> Mapping[str, float]:
        return {**self._intake.meter.statistics(), "waiting_rows": self._batcher.waiting_rows}

    async def probe(self) -> Mapping[str, str | None]:
        return {"local": self._ranks.running.find_delay() or self._intake.problem}

    async def statistics(self) -> Mapping[str, Mapping[str, float]]:
        return {"critic": await self._read_counts()}

    async def _answer_infer(self, inputs: Tensors) -> Tensors:
        with self._intake.counting_failures():
            refuses = self._config.trainer.ppo.infer_while_training is WhileTraining.refuse
            if refuses and self._lock.is_exclusive:
                # The message tells the client when to try again, because Triton cannot send a
                # Retry-After header.
                raise RequestError("the critic is training; retry after 1 s", FailureKind.busy)
            request = await decode_request(inputs, self._config.server)
            check_num_rows(request.num_rows, self._config.server)
            with self._limit.admit(request.num_rows):
                joined, truncated = await self._compute_values(request)
        return wire.encode_values(inputs, joined, truncated, self._has_rewards)

    async def _compute_values(self, request: ScoreRequest) -> tuple[np.ndarray, np.ndarray]:
        """Compute padded values ``[N, S]`` of N samples, and whether each was truncated ``[N]``.

        With a reward model, each row begins with its reward: ``[N, 1 + S]``.
        """
        begun = time.monotonic()
        encoded = await self._intake.encode(request, NO_ROWS)
        async with self._arrivals:
            answer = self._submit_shared(encoded.rows)
        values = await answer_of(answer)
        joined = wire.join_rows(values)
        encoded.check_finite(joined, 1 + np.arange(len(joined)))
        seconds, count = time.monotonic() - begun, len(encoded.rows)
        self._intake.meter.count_answer(seconds, count, encoded.num_tokens)
        return joined, np.array(encoded.truncated, dtype=bool)

    def _submit_shared(self, rows: list[Row]) -> Future[list[np.ndarray]]:
        """Queue rows for values; they wait while the critic trains or saves."""
        return self._lock.submit(partial(self._batcher.submit, rows), exclusive=False)

    async def _answer_train(self, inputs: Tensors) -> Tensors:
        # Rank 0 checks the rollout before any rank gets it: an error on only some ranks would leave
        # only the others trained. A thread does it, because millions of values would block the
        # event loop.
        async with self._arrivals:
            rollout = await asyncio.to_thread(self._decode_rollout, inputs)
            begin = partial(self._ranks.submit, TRAIN, *vars(rollout).values())
            answer = self._lock.submit(begin, exclusive=True)
        steps = await answer_of(answer)
        # Weighted by values, because updates differ in their number of values.
        total = sum(step.loss * step.num_tokens for step in steps)
        loss = total / sum(step.num_tokens for step in steps)
        return {"loss_mean": np.array([loss], dtype=np.float32)}

    def _begin_saving(self) -> Future[str]:
        # A callback notes the result before other work begins. The coroutine that answers the
        # request cannot do it, because it is cancelled if the client disconnects.
        saving: Future[str] = self._ranks.submit(SAVE)
        saving.add_done_callback(self._note_saving)
        return saving

    def _note_saving(self, saving: Future[str]) -> None:
        if saving.exception() is None:
            self._saved_step = self._run.learner.step
            path = saving.result()
            print(f"saved {path} and the state to resume from", flush=True)

    def _decode_rollout(self, inputs: Tensors) -> Rollout:
        check_num_bytes(inputs, self._config.server)
        rollout = wire.decode_rollout(inputs)
        rollout.check(
            self._contract.seq_length,
            self._run.tokenizer.vocab_size,
            self._config.model.global_batch_size,
        )
        return rollout

    async def _answer_save(self, inputs: Tensors) -> Tensors:
        async with self._arrivals:
            answer = self._lock.submit(self._begin_saving, exclusive=True)
        await answer_of(answer, "the critic was not saved")
        return {"status": np.zeros(1, dtype=np.int64)}


def _do_nothing() -> Future[None]:
    """Return a finished future.

    ``stop`` submits it as exclusive work: its answer then means that all earlier work has ended.
    """
    done: Future[None] = Future()
    done.set_result(None)
    return done


def _warn_of_unsaved_steps(step: int, saved_step: int) -> str | None:
    """Return a warning if training steps after the last save are lost at the end; else None."""
    if step <= saved_step:
        return None
    is_single = step == saved_step + 1
    lost = f"step {step} was" if is_single else f"steps {saved_step + 1} to {step} were"
    restart = f"continues from step {saved_step}" if saved_step else "begins at step 0"
    return f"{lost} never saved (critic_save); a restart {restart}"


def _describe_step(step: ValueStep) -> str:
    """Return the log line of a training step."""
    norm = "skipped, fp16 overflowed" if step.grad_norm is None else f"{step.grad_norm:.4g}"
    return (
        f"step {step.step}: loss {step.loss:.6g}, grad norm {norm}, lr {step.lr:.4g}, "
        f"{step.num_tokens:,} values in {step.seconds:.2f} s"
    )


# The code below runs on every rank: the critic, and the reward model if there is one. Only the
# model that computes has its weights on the GPU, and the critic's optimizer is there only during
# training. Everything else waits in host memory (``models/offload.py``).

_MEMORY = "show memory"
_REWARD, _CRITIC, _OPTIMIZER = "reward model", "critic", "optimizer and gradients"
_MIB = 2**20


class CriticBackend:
    """Computes values and trains the critic on every rank.

    With a scorer, it also computes rewards.
    """

    def __init__(
        self,
        run: CriticRun,
        config: ServeCriticConfig,
        scorer: RewardScorer | None = None,
    ) -> None:
        self._run = run
        self._config = config
        self._scorer = scorer
        self._offloading = OffloadManager(
            _offload_groups(run, None if scorer is None else scorer.model)
        )
        swaps = config.trainer.ppo.offload_idle_model
        self._swaps = scorer is not None and (torch.cuda.is_available() if swaps is None else swaps)
        self._offloads_optimizer = config.model.offload_adam_states

    @property
    def operations(self) -> Mapping[str, Operation]:
        return {
            VALUES: self._compute_values,
            TRAIN: LongOperation(self._train),
            SAVE: LongOperation(self._save),
            _MEMORY: self._show_memory,
        }

    def reset_cache(self) -> None:
        """Do nothing: ``Backend`` requires this method, but the critic has no prefix cache.

        The reward model's backend resets its own cache.
        """

    def start(self, ranks: ModelRanks) -> CriticService:
        lines = ranks.execute(_MEMORY) if self._swaps or self._offloads_optimizer else []
        # Run a first forward pass before any request: it is slow, and shows if the model works.
        (values,) = ranks.execute(VALUES, [Row.of([0])])
        if not np.isfinite(values).all():
            raise ServingError(
                f"the critic: got the value {values.tolist()} for a sample of one token, wanted a "
                "finite number. Start from another reward model, or use bf16 instead of fp16 "
                "(trainer.precision)"
            )
        has_rewards = self._scorer is not None
        return CriticService(self._run, self._config, ranks, lines, has_rewards=has_rewards)

    def make_room_for_rewards(self) -> None:
        """Move the reward model to the GPU.

        Every rank calls this before the reward model scores.
        """
        if self._swaps and self._offloading.is_on_device(_CRITIC):
            # The host gets one copy of the critic after training, so it must have the updated
            # weights of all ranks.
            self._run.learner.optimizer.finish_update()
        self._offloading.move([_REWARD], away=[_CRITIC, _OPTIMIZER] if self._swaps else [])

    def _make_room_for_values(self) -> None:
        away = [_REWARD] if self._swaps else []
        away += [_OPTIMIZER] if self._offloads_optimizer else []
        self._offloading.move([_CRITIC], away=away)

    def _make_room_for_training(self) -> None:
        away = [_REWARD] if self._swaps else []
        self._offloading.move([_CRITIC, _OPTIMIZER], away=away)

    def _compute_values(self, rows: Sequence[Row]) -> list[np.ndarray]:
        """Return the values ``[tokens]`` of each row.

        If there is a reward model, the row's reward comes before its values: ``[1 + tokens]``.
        """
        if self._scorer is None:
            return self._compute_only_values(rows)
        # The model that is on the device now computes first, which saves one of two moves between
        # host and device.
        if self._offloading.is_on_device(_CRITIC):
            values = self._compute_only_values(rows)
            rewards = self._compute_rewards(rows)
        else:
            rewards = self._compute_rewards(rows)
            values = self._compute_only_values(rows)
        return [np.append(reward, line) for reward, line in zip(rewards, values, strict=True)]

    def _compute_only_values(self, rows: Sequence[Row]) -> list[np.ndarray]:
        self._make_room_for_values()
        return self._run.learner.values([row.ids for row in rows])

    def _compute_rewards(self, rows: Sequence[Row]) -> np.ndarray:
        """Compute rewards ``[N]`` float32: sums of the attributes, with the contract's weights."""
        assert self._scorer is not None
        self.make_room_for_rewards()
        rewards, _ = self._scorer.read_outputs(np.concatenate(self._scorer.compute(rows)))
        return one_reward(rewards, self._scorer.contract.attribute_weights)

    def _train(self, *arrays: np.ndarray) -> list[ValueStep]:
        self._make_room_for_training()
        self._offloading.note_change(_CRITIC, _OPTIMIZER)
        return self._run.learner.train(Rollout(*arrays), self._note_step)

    def _note_step(self, step: ValueStep) -> None:
        """Log and print a finished step.

        It raises no error if a disk is full: the weights have changed already, and a client that
        gets an error may train on the same rollout again.
        """
        lines = [_describe_step(step)]
        numbers = {name: value for name, value in asdict(step).items() if value is not None}
        named = {f"train/{name}": float(value) for name, value in numbers.items()}
        try:
            self._run.loggers.log(named, step.step)
        except (CheckpointError, OSError) as error:
            lines.append(f"{error}; training continues")
        with suppress(OSError):  # the output may go to the same disk
            say("\n".join(lines))

    def _save(self) -> str:
        self._make_room_for_training()
        return str(self._run.save())

    def _show_memory(self) -> list[str]:
        """Return log lines with the GPU memory in use while scoring, computing values and training.

        Before each measurement, the models are moved to the GPU or the host as that work needs
        them.
        """
        lines = ["Memory of rank 0 in MiB: on the device, of the process on the host"]
        phases = [("scoring", self.make_room_for_rewards)] if self._scorer is not None else []
        phases += [
            ("values", self._make_room_for_values),
            ("training", self._make_room_for_training),
            ("values again", self._make_room_for_values),
        ]
        lines.append(self._measure_memory("before"))
        for name, make_room in phases:
            make_room()
            lines.append(self._measure_memory(name))
        return lines

    def _measure_memory(self, phase: str) -> str:
        is_gpu = torch.cuda.is_available()
        device = torch.cuda.memory_allocated() if is_gpu else self._offloading.device_bytes
        return f"  {phase:<13}{device / _MIB:>10,.1f}{resident_bytes() / _MIB:>10,.1f}"


def _offload_groups(
    run: CriticRun, reward_model: torch.nn.Module | None
) -> dict[str, list[OffloadGroup]]:
    critic = run.learner.model
    weights = OffloadGroup([*critic.parameters(), *critic.buffers()], OffloadPolicy.state)
    trained = [parameter for parameter in critic.parameters() if parameter.requires_grad]
    parts = {
        _CRITIC: [weights],
        _OPTIMIZER: [
            OffloadGroup(
                run.learner.optimizer.state_tensors(), OffloadPolicy.state, apart_from=[weights]
            ),
            OffloadGroup([parameter.main_grad for parameter in trained], OffloadPolicy.scratch),
        ],
    }
    if reward_model is not None:
        tensors = [*reward_model.parameters(), *reward_model.buffers()]
        parts[_REWARD] = [OffloadGroup(tensors, OffloadPolicy.constant)]
    return parts
