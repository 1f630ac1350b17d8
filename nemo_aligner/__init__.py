"""Reward models on Megatron: training, checkpoints and serving with one meaning of a score."""

from nemo_aligner.parallel import quiet as _quiet
from nemo_aligner.parallel.cpu import hook as _cpu

__version__ = "0.1.0"

_quiet.silence_known_warnings()
_cpu.install()
