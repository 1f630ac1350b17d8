"""Reward models on Megatron: training, checkpoints and serving with one meaning of a score."""

__version__ = "0.1.0"
