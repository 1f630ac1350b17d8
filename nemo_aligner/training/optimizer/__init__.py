"""Megatron's distributed optimizer, its learning rate and its state."""

import nemo_aligner.distributed  # noqa: F401 - before the first import of megatron-core
