"""Tensors of a checkpoint, on disk and in memory."""

import nemo_aligner.distributed  # noqa: F401 - before the first import of megatron-core
