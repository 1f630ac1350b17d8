"""Everything that runs megatron-core on a CPU, and makes it fast.

Someone who reads for GPUs may skip it: they use only what ``products.py`` has for malloc, for exact
products that cancel, and to install weight gradients in megatron-core. It knows nothing of the rest
of the package: its functions take tensors and numbers.

``backend.py`` retargets megatron-core to the CPU as its modules are imported, with gloo for NCCL.
``products.py`` gives large matmuls to oneDNN, keeps batch-invariant ones in a fixed order, and
manages the memory that malloc keeps. ``kernels.py`` compiles ``kernels.c``: attention, norms, RoPE
and SwiGLU for scoring, which ``models`` calls.

Attention of packs, which ``models/attention/backends.py`` chooses among:

- ``kernel_attention.py`` scores by ``kernels.c``, a sequence's keys in one pass.
- ``block_attention.py`` scores by torch, in blocks at fixed positions, where ``kernels.c`` does not
  compile and for soft caps.
- ``training_attention.py`` trains by torch's flash attention, whose operators, and the merging of
  their partial results, are in ``flash_attention.py``.
"""
