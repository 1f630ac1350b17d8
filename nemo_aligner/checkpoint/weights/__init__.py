"""Tensors of a checkpoint, on disk and in memory."""

import nemo_aligner.parallel  # noqa: F401 - before the first import of megatron-core
