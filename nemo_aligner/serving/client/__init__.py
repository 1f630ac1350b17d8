"""Clients of the reward server: ``from nemo_aligner.serving.client import RewardClient``."""

from nemo_aligner.serving.client.reward import RewardClient

__all__ = ["RewardClient"]
