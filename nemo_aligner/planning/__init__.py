"""What a training step costs, computed without running it, and the layouts that fit a cluster.

All numbers come from formulas in the model's shape, the size of a batch and the parallel layout.
Data flows through the files in this order:

- ``cost.py`` describes the work of a step (``Packs``, ``Plan``) and counts its parameters, its
  FLOPs and the bytes that ranks send to each other.
- ``memory.py`` counts the bytes that each rank holds at the peak of a step.
- ``step_time.py`` converts both into seconds with the speeds of a machine (``Machine``), and holds
  a table of the peak speeds of GPUs.
- ``planner.py`` enumerates parallel layouts, keeps those that fit into memory, and ranks them by
  the time of a step. ``nemo-aligner plan`` prints its tables.

Training uses the first three files to report MFU and for ``dry_run``. Nothing here imports torch,
so a plan takes a second on a laptop. ``tests/planning/test_cost.py`` compares the formulas with
real training steps.
"""
