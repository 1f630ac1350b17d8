"""How a run is laid out over processes, and megatron-core on machines without CUDA.

Importing this package makes the process ready for megatron-core. Every package whose modules import
megatron-core begins with this import, so that the order of a program's own imports does not matter;
what imports none of them (the client, the contract, settings, data) leaves the process as it is.
"""

from nemo_aligner.distributed import cpu_backend
from nemo_aligner.distributed.environment import set_before_cuda_starts, silence_known_warnings

set_before_cuda_starts()
silence_known_warnings()
cpu_backend.install()
