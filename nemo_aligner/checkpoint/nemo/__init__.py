"""NeMo's archives: reading, writing, and into a model."""

import nemo_aligner.parallel  # noqa: F401 - before the first import of megatron-core
