"""Clients of the servers: ``from nemo_aligner.serving.client import RewardClient``."""

from nemo_aligner.serving.client.critic import RewardCriticClient
from nemo_aligner.serving.client.reward import RewardClient
from nemo_aligner.serving.failures import RefusedError
from nemo_aligner.serving.protocols import ScoredRows
from nemo_aligner.serving.protocols.critic import Valued

__all__ = [
    "RefusedError",
    "RewardClient",
    "RewardCriticClient",
    "ScoredRows",
    "Valued",
]
