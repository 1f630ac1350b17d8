"""Megatron's distributed optimizer, its learning rate and its state."""

import nemo_aligner.parallel  # noqa: F401 - before the first import of megatron-core
