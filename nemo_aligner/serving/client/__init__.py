"""Clients of the reward server: ``from nemo_aligner.serving.client import RewardClient``."""

from nemo_aligner.serving.client.reward import LoopRewardClient, RewardClient
from nemo_aligner.serving.client.rows import ScoredRows
from nemo_aligner.serving.client.server import RefusedError

__all__ = ["LoopRewardClient", "RefusedError", "RewardClient", "ScoredRows"]
