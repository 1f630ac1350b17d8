"""Reward models on Megatron: training, checkpoints and serving with one meaning of a score."""

from nemo_aligner.parallel import cpu as _cpu

__version__ = "0.1.0"

_cpu.install()
