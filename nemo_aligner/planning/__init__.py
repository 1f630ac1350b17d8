"""Estimate the cost of a training step without running it, and find layouts that fit a cluster.

All estimates are formulas of the model's shape, the size of a batch and the parallel layout:

- ``cost.py`` describes the work of a step (``Packs``, ``Plan``). It counts the model's parameters,
  the FLOPs of a step, and the bytes that ranks send to each other.
- ``memory.py`` counts the bytes that each rank holds at the peak of a step; ``attention.py``,
  ``gemma4.py`` and ``quantized.py`` do so for kernels of attention, Gemma 4 and a quantized base.
- ``step_time.py`` converts FLOPs and bytes to seconds with the speeds of a machine (``Machine``).
  It also has a table of the peak speeds of GPUs.
- ``planner.py`` enumerates parallel layouts, keeps the layouts that fit into memory, and ranks them
  by the time of a step. ``render.py`` renders the tables of ``nemo-aligner plan``, and
  ``presets.py`` has shapes of well-known models for it.

Training uses the first three modules to report MFU and for ``dry_run``. Nothing here imports torch,
so a plan takes a second on a laptop. ``tests/planning/test_cost.py`` compares the formulas with
real training steps.
"""
