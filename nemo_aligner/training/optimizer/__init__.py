"""Megatron's distributed optimizer: construction, steps, state, and offloading."""

import nemo_aligner.distributed  # noqa: F401 - before the first import of megatron-core
