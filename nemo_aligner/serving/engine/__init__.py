"""The engine: from token ids in a queue to rewards, on all ranks.

A row (one sample) passes through these files in this order:

``rows.py``           ``Row``: token ids of one sample, and the positions to read
``batcher.py``        merges rows of waiting requests into calls of the model, oldest first
``pace.py``           limits the tokens of a call, so that it ends within ``max_call_secs``
``executor.py``       runs a call on all ranks, and notices ranks that die
``running_calls.py``  measures the running call, so that a model that hangs is noticed
``token_scorer.py``   ``TokenScorer``: the interface of a model or an ensemble
``scorer.py``         ``RewardScorer``: packs the rows, computes them, and gathers the outputs
``ensemble.py``       ``RewardEnsemble``: several scorers, one after another
``prefix_cache.py``   plans which prefixes of samples are in the cache and need no computing
``shaping.py``        ``RewardShaper``: standardizes, merges, penalizes and clips rewards

``meter.py`` counts requests and calls. ``read_write_lock.py`` gives a critic's training and saving
exclusive use of the model.

Before the queue, ``serving/intake.py`` encodes samples in the threads of ``timed_threads.py``,
which can stop a chat template that never ends. Evaluation and the Python API use ``scorer.py``
without the queue.
"""
