"""Reward models on Megatron: training, checkpoints and serving with one meaning of a score."""

from nemo_aligner.parallel import cpu as _cpu
from nemo_aligner.parallel import quiet as _quiet

__version__ = "0.1.0"

_quiet.silence_known_warnings()
_cpu.install()
