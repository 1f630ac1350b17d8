"""The critic as a service: values side by side, training and saving exclusively, on all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict
from functools import partial

import numpy as np
import torch

from nemo_aligner.config.serving import ServeCriticConfig, WhileTraining
from nemo_aligner.contract.contract import TextEncoder
from nemo_aligner.contract.readout import one_reward
from nemo_aligner.data.rollout import Rollout
from nemo_aligner.distributed.cpu_products import resident_bytes
from nemo_aligner.models.offload import OffloadGroup, OffloadManager, OffloadPolicy
from nemo_aligner.serving.engine.batcher import Batcher, Meter, ReadWriteLock
from nemo_aligner.serving.engine.executor import ModelRanks, Operation
from nemo_aligner.serving.engine.scorer import RewardScorer
from nemo_aligner.serving.failures import FailureKind, RequestError
from nemo_aligner.serving.protocols import critic as wire
from nemo_aligner.serving.protocols import kserve
from nemo_aligner.serving.protocols.kserve import Tensors
from nemo_aligner.serving.reward import RewardService, answer_of, check_size, contract_endpoint
from nemo_aligner.serving.service import Endpoint
from nemo_aligner.training.critic import CriticRun, ValueStep
from nemo_aligner.utils.errors import ServingError

# Operations of all ranks.
VALUES, TRAIN, SAVE = "give values", "train", "save"


class CriticService:
    """The endpoints ``critic_infer``, ``critic_train`` and ``critic_save``.

    All values of a request come from one state of the critic. A request that arrives while it
    trains or saves waits, or is refused (``trainer.ppo.infer_while_training``).
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
        self._lock = ReadWriteLock()
        self._saved_step = run.learner.step  # it is new, or goes on from what was saved
        self._meter = Meter()
        self._contract = run.contract
        values = partial(ranks.submit, VALUES)
        self._batcher = Batcher(values, run.learner.tokens_per_call, self._meter, wire.join_rows)
        # Requests for values are checked, encoded and limited as those for rewards are; what its
        # queue answers are values.
        self._intake = RewardService(
            TextEncoder(run.contract, run.tokenizer),
            self._submit_shared,
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
    def startup_log(self) -> Sequence[str]:
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

    async def _infer(self, inputs: Tensors) -> Tensors:
        refuses = self._config.trainer.ppo.infer_while_training is WhileTraining.refuse
        if refuses and self._lock.is_exclusive:
            self._meter.refused()
            # A client reads the seconds from the words, as Triton sends no Retry-After.
            raise RequestError("the critic is training; retry after 1 s", FailureKind.busy)
        reply = await self._intake.answer(inputs)
        return wire.encode_values(inputs, reply.rewards, reply.exceeded, self._has_rewards)

    def _submit_shared(self, token_lists: list[list[int]]) -> Future[np.ndarray]:
        """Queue rows that share the model, and wait for exclusive work."""
        return self._lock.submit(partial(self._batcher.submit, token_lists), exclusive=False)

    async def _train(self, inputs: Tensors) -> Tensors:
        _, num_bytes = kserve.size_of_request(inputs)
        check_size(num_bytes, self._config.server.max_request_bytes)
        # All of it here, and not on the ranks: what is unfit must not have trained some of them.
        rollout = wire.decode_rollout(inputs)
        rollout.check(
            self._contract.seq_length,
            self._run.tokenizer.vocab_size,
            self._config.model.global_batch_size,
        )
        submit = partial(self._ranks.submit, TRAIN, *vars(rollout).values())
        steps = await answer_of(self._lock.submit(submit, exclusive=True))
        for step in steps:
            print(_shown(step), flush=True)
        # The mean over values, and not over updates, which differ in how many they learn from.
        total = sum(step.loss * step.num_tokens for step in steps)
        loss = total / sum(step.num_tokens for step in steps)
        return {"loss_mean": np.array([loss], dtype=np.float32)}

    async def _save(self, inputs: Tensors) -> Tensors:
        submit = partial(self._ranks.submit, SAVE)
        path = await answer_of(self._lock.submit(submit, exclusive=True))
        self._saved_step = self._run.learner.step
        print(f"saved {path} and the state that a restart goes on from", flush=True)
        return {"status": np.zeros(1, dtype=np.int64)}


def _never_saved(step: int, saved: int) -> str | None:
    """Warning of training that was not saved when the service ends; None if all is saved."""
    if step <= saved:
        return None
    lost = f"step {step} was" if step == saved + 1 else f"steps {saved + 1} to {step} were"
    again = f"goes on from step {saved}" if saved else "begins at step 0"
    return f"{lost} never saved (critic_save); a restart {again}"


def _shown(step: ValueStep) -> str:
    """Log line of a step."""
    norm = "skipped, fp16 overflowed" if step.grad_norm is None else f"{step.grad_norm:.4g}"
    return (
        f"step {step.step}: loss {step.loss:.6g}, grad norm {norm}, lr {step.lr:.4g}, "
        f"{step.num_tokens:,} values in {step.seconds:.2f} s"
    )


# The critic on every rank, beside the reward model if there is one. Only the model at work has its
# weights on the GPU, with the optimizer if it is the critic; the rest is in host memory meanwhile
# (``models/offload.py``).

_MEMORY = "show memory"
_REWARD, _CRITIC, _OPTIMIZER = "reward model", "critic", "optimizer and gradients"
_MIB = 2**20


class CriticServable:
    """A critic's run on every rank, and a reward model's scorer on the same, if there is one."""

    def __init__(
        self,
        run: CriticRun,
        config: ServeCriticConfig,
        scorer: RewardScorer | None = None,
    ) -> None:
        self._run = run
        self._config = config
        self._scorer = scorer
        self._offloading = OffloadManager(_parts(run, None if scorer is None else scorer.model))
        wish = config.trainer.ppo.offload_idle_model
        self._swaps = scorer is not None and (torch.cuda.is_available() if wish is None else wish)
        self._offloads_optimizer = config.model.offload_adam_states

    @property
    def operations(self) -> Mapping[str, Operation]:
        return {
            VALUES: self._values,
            TRAIN: self._train,
            SAVE: self._save,
            _MEMORY: self._show_memory,
        }

    def reset_cache(self) -> None:
        """Nothing: the critic has no cache, and the reward model's servable resets its own."""

    def start(self, ranks: ModelRanks) -> CriticService:
        shown = ranks.execute(_MEMORY) if self._swaps or self._offloads_optimizer else []
        # The first forward pass is slow, and may show that the model cannot run.
        (values,) = ranks.execute(VALUES, [np.zeros(1, dtype=np.int64)])
        if not np.isfinite(values).all():
            raise ServingError(
                f"the critic: got the value {values.tolist()} for a text of one token, wanted a "
                "finite number. Start it from another reward model, or in bf16 instead of fp16 "
                "(trainer.precision)"
            )
        has_rewards = self._scorer is not None
        return CriticService(self._run, self._config, ranks, shown, has_rewards=has_rewards)

    def make_room_for_rewards(self) -> None:
        """Bring the reward model to the device; every rank calls it before scoring."""
        self._offloading.move([_REWARD], away=[_CRITIC, _OPTIMIZER] if self._swaps else [])

    def _make_room_for_values(self) -> None:
        away = [_REWARD] if self._swaps else []
        away += [_OPTIMIZER] if self._offloads_optimizer else []
        self._offloading.move([_CRITIC], away=away)

    def _make_room_for_training(self) -> None:
        away = [_REWARD] if self._swaps else []
        self._offloading.move([_CRITIC, _OPTIMIZER], away=away)

    def _values(self, sequences: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Values of each sequence; with a reward model its reward comes first."""
        if self._scorer is None:
            return self._values_alone(sequences)
        # The model that is here goes first: one of two moves is saved.
        if self._offloading.is_on_device(_CRITIC):
            values = self._values_alone(sequences)
            rewards = self._rewards_alone(sequences)
        else:
            rewards = self._rewards_alone(sequences)
            values = self._values_alone(sequences)
        return [np.append(reward, own) for reward, own in zip(rewards, values, strict=True)]

    def _values_alone(self, sequences: Sequence[np.ndarray]) -> list[np.ndarray]:
        self._make_room_for_values()
        return self._run.learner.values(sequences)

    def _rewards_alone(self, sequences: Sequence[np.ndarray]) -> np.ndarray:
        """``[N]`` float32, attributes merged by the weights of the scoring contract."""
        assert self._scorer is not None
        self.make_room_for_rewards()
        rewards = self._scorer.score_token_lists(sequences)
        return one_reward(rewards, self._scorer.contract.attribute_weights)

    def _train(self, *arrays: np.ndarray) -> list[ValueStep]:
        self._make_room_for_training()
        self._offloading.note_change(_CRITIC, _OPTIMIZER)
        steps = self._run.learner.train(Rollout(*arrays))
        for each in steps:
            numbers = {name: value for name, value in asdict(each).items() if value is not None}
            named = {f"train/{name}": float(value) for name, value in numbers.items()}
            self._run.loggers.log(named, each.step)
        return steps

    def _save(self) -> str:
        self._make_room_for_training()
        return str(self._run.save())

    def _show_memory(self) -> list[str]:
        """Lines with the memory for each kind of work, for which the models move as it needs."""
        lines = ["Memory of rank 0 in MiB: on the device, of the process on the host"]
        phases = [("scoring", self.make_room_for_rewards)] if self._scorer is not None else []
        phases += [
            ("values", self._make_room_for_values),
            ("training", self._make_room_for_training),
            ("values again", self._make_room_for_values),
        ]
        lines.append(self._memory_now("before"))
        for name, make_room in phases:
            make_room()
            lines.append(self._memory_now(name))
        return lines

    def _memory_now(self, phase: str) -> str:
        is_gpu = torch.cuda.is_available()
        device = torch.cuda.memory_allocated() if is_gpu else self._offloading.device_bytes
        return f"  {phase:<13}{device / _MIB:>10,.1f}{resident_bytes() / _MIB:>10,.1f}"


def _parts(run: CriticRun, reward_model: torch.nn.Module | None) -> dict[str, list[OffloadGroup]]:
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
