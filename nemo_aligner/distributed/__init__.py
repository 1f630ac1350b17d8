"""Process groups and layouts, and megatron-core on machines without CUDA.

Importing this package prepares the process for megatron-core. Every package whose modules import
megatron-core imports it first, so that the order of a program's own imports does not matter.
Packages that do not (the client, the contract, settings, data) leave the process as it is.
"""

from nemo_aligner.distributed import cpu_backend
from nemo_aligner.distributed.environment import set_before_cuda_starts, silence_known_warnings

set_before_cuda_starts()
silence_known_warnings()
cpu_backend.install()
