"""The reward model on megatron-core: backbone, packed attention, head and step."""

import nemo_aligner.distributed  # noqa: F401 - before the first import of megatron-core
