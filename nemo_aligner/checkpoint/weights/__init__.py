"""Weights of a checkpoint: reading every stored format, safely, and saving."""

import nemo_aligner.distributed  # noqa: F401 - before the first import of megatron-core
