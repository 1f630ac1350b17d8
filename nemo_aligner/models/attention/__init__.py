"""Attention over packed sequences, with shared and cached prefixes.

``packed.py`` is the layer's core attention: it rotates queries and keys and asks ``backends.py``,
the table of backends, for the fastest one that fits. ``segments.py`` describes a pack to them.

- ``cpu_inference.py`` scores on a CPU, by the C file ``cpu/kernels.c`` or in blocks by torch.
- ``cpu_training.py`` trains on a CPU, by torch's flash attention.
- ``varlen.py`` takes whole packs on a GPU, by torch's variable-length kernel or by flash-attn's.
- ``one_by_one.py`` takes one segment at a time, by SDPA or by explicit scores.
- ``ring.py`` splits a pack over ranks, which pass keys and values around.
"""
