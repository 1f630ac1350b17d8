"""Everything but attention that runs megatron-core on a CPU, and makes it fast.

Someone who reads for GPUs may skip it: they use only what ``products.py`` has for malloc, for exact
products that cancel, and to install weight gradients in megatron-core.

``backend.py`` retargets megatron-core to the CPU as its modules are imported, with gloo for NCCL.
``products.py`` gives large matmuls to oneDNN, keeps batch-invariant ones in a fixed order, and
manages the memory that malloc keeps. ``kernels.py`` compiles ``kernels.c``: attention, norms, RoPE
and SwiGLU for scoring, which ``models`` calls.
"""
