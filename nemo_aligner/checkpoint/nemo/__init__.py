"""NeMo's archives: reading, writing, and into a model."""

import nemo_aligner.distributed  # noqa: F401 - before the first import of megatron-core
