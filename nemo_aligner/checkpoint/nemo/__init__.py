"""NeMo archives: opening, writing, and loading into a model."""

import nemo_aligner.distributed  # noqa: F401 - before the first import of megatron-core
