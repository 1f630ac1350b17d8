"""The critic on every rank, and the reward model beside it: what they compute, and where they lie.

Of two models that share the ranks only the one at work has its weights on the GPU; the optimizer
goes with the critic. They lie in host memory meanwhile (``models/residence.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict

import numpy as np
import torch

from nemo_aligner.config.critic import ServeCriticConfig
from nemo_aligner.data.rollout import Rollout
from nemo_aligner.models.residence import Holds, Residence, ResidentPart
from nemo_aligner.parallel.cpu.malloc import resident_bytes
from nemo_aligner.scoring.scorer import RewardScorer
from nemo_aligner.serving.ranks import ModelRanks, Operation
from nemo_aligner.serving.services.critic import SAVE, TRAIN, VALUES, CriticService
from nemo_aligner.text.one_reward import one_reward
from nemo_aligner.training.critic import ValueStep
from nemo_aligner.training.critic_run import CriticRun

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
        self._residence = Residence(_parts(run, None if scorer is None else scorer.model))
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

    def forget(self) -> None:
        """The critic keeps nothing; the reward model's cache is forgotten by who offers it."""

    def start(self, ranks: ModelRanks) -> CriticService:
        shown = ranks.execute(_MEMORY) if self._swaps or self._offloads_optimizer else []
        # The first forward pass is slow, and may show that the model cannot run.
        ranks.execute(VALUES, [np.zeros(1, dtype=np.int64)])
        has_rewards = self._scorer is not None
        return CriticService(self._run, self._config, ranks, shown, has_rewards=has_rewards)

    def make_room_for_rewards(self) -> None:
        """Every rank calls it before it scores."""
        self._residence.move([_REWARD], away=[_CRITIC, _OPTIMIZER] if self._swaps else [])

    def _make_room_for_values(self) -> None:
        away = [_REWARD] if self._swaps else []
        away += [_OPTIMIZER] if self._offloads_optimizer else []
        self._residence.move([_CRITIC], away=away)

    def _make_room_for_training(self) -> None:
        away = [_REWARD] if self._swaps else []
        self._residence.move([_CRITIC, _OPTIMIZER], away=away)

    def _values(self, sequences: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Of each sequence its values; with a reward model its reward stands before them."""
        if self._scorer is None:
            return self._values_alone(sequences)
        # The model that is here goes first: one of two moves is saved.
        if self._residence.is_here(_CRITIC):
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
        self._residence.note_change(_CRITIC, _OPTIMIZER)
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
        """What lies where before, during and after each kind of work; it moves as the work does."""
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
        device = torch.cuda.memory_allocated() if is_gpu else self._residence.device_bytes
        return f"  {phase:<13}{device / _MIB:>10,.1f}{resident_bytes() / _MIB:>10,.1f}"


def _parts(run: CriticRun, reward_model: torch.nn.Module | None) -> dict[str, list[ResidentPart]]:
    critic = run.learner.model
    weights = ResidentPart([*critic.parameters(), *critic.buffers()], Holds.state)
    trained = [parameter for parameter in critic.parameters() if parameter.requires_grad]
    parts = {
        _CRITIC: [weights],
        _OPTIMIZER: [
            ResidentPart(run.learner.optimizer.state_tensors(), Holds.state, apart_from=[weights]),
            ResidentPart([parameter.main_grad for parameter in trained], Holds.scratch),
        ],
    }
    if reward_model is not None:
        tensors = [*reward_model.parameters(), *reward_model.buffers()]
        parts[_REWARD] = [ResidentPart(tensors, Holds.constant)]
    return parts
