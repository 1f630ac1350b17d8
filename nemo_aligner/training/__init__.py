"""Training: the loop, its learners, and Megatron's distributed optimizer."""

import nemo_aligner.distributed  # noqa: F401 - before the first import of megatron-core
