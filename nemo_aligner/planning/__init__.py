"""What a training step costs, by arithmetic alone, and the parallel layouts that fit a machine.

``cost.py`` counts the parameters, FLOPs and bytes sent of one step; ``memory.py`` the bytes that a
rank holds; ``step_time.py`` makes seconds of both with the speeds of a machine. ``planner.py``
searches layouts with them, for ``nemo-aligner plan``. Training uses the first three to report MFU
and for ``dry_run``. Nothing here imports torch.
"""
