"""Attention over packed sequences, with shared and cached prefixes.

``packed.py`` is the core attention of a layer. It applies RoPE to queries and keys, and computes
attention by the fastest backend that fits, which ``backends.py`` chooses from its table.
``segments.py`` describes a pack to the backends: its segments, their prefixes, the pool of cached
keys and values, and what ranks of a context parallel group send each other.

The backends, in the order of the table:

- ``ring.py`` splits a pack over ranks, which pass keys and values around (with
  ``model.cp_comm_type=p2p``).
- ``nemo_aligner/cpu`` has the backends for a CPU: ``kernel_attention.py`` and
  ``block_attention.py`` for scoring, ``training_attention.py`` for training.
- ``varlen.py`` computes a whole pack at once on a GPU, with torch's kernel for sequences of
  variable length; ``flash_packages.py`` does so with the kernels of other packages, two of which
  only ``model.attention_kernels`` chooses (``choice.py``). ``key_copies.py`` copies the keys of
  shared prefixes for them.
- ``one_by_one.py`` computes one segment at a time, with SDPA or explicit scores, in every case that
  no other backend supports.
"""
