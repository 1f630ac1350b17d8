"""Everything that runs megatron-core on a CPU, and makes it fast.

A reader who is interested only in GPUs may skip this package. Runs on GPUs use only three parts of
``matmuls.py``: its malloc settings, its test matrices whose products cancel, and the installation
of weight gradients in megatron-core. The functions here take tensors and numbers, and do not depend
on the rest of ``nemo_aligner``'s model code.

``backend.py`` makes megatron-core use the CPU when its modules are imported, with gloo in place of
NCCL. ``matmuls.py`` gives large matmuls to oneDNN, keeps batch-invariant ones in a fixed order, and
manages the memory that malloc keeps. ``kernels.py`` compiles ``kernels.c``: attention, norms, RoPE
and SwiGLU for scoring, which ``models`` calls. ``kernel_delta.py`` does the same for linear
attention with ``gated_delta.c``; both C files share ``vectors.h``.

Attention over packs, in three modules that ``models/attention/backends.py`` chooses among:

- ``kernel_attention.py`` scores with ``kernels.c``, in one pass over a sequence's keys.
- ``block_attention.py`` scores with torch, in blocks at fixed positions. It is used for soft caps,
  and where ``kernels.c`` does not compile.
- ``training_attention.py`` trains with torch's flash attention; ``flash_attention.py`` has its
  operators and merges their partial results.
"""
