"""Everything that runs megatron-core on a CPU, and makes it fast; of no use where there is a GPU.

``backend.py`` retargets megatron-core to the CPU as its modules are imported, with gloo for NCCL.
``products.py`` gives large matmuls to oneDNN, keeps batch-invariant ones in a fixed order, and
manages the memory that malloc keeps. ``kernels.py`` compiles ``kernels.c``: attention, norms, RoPE
and SwiGLU for scoring. The attention of training and of scoring in ``models/attention`` calls them.
"""
