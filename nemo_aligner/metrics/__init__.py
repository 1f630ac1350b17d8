"""Metrics of reward models, computed over whole data sets from rewards and labels.

The flow: a validation or an evaluation gathers rewards from all ranks into one table, and calls
``measure_pairs``, ``measure_ratings`` or ``measure_steps``, which evaluate every row of the table
of metrics.

- ``ranking``: pairs. ``PairRewards`` and one function for each metric: accuracy, margins,
  calibration (ECE, Brier score, temperature) and length bias. It also has statistics that other
  modules use: Wilson and bootstrap intervals, McNemar's test, correlation, ranks.
- ``regression``: rated replies (``RatedRewards``), and scored turns or steps (``StepVerdicts``).
- ``table``: the registry. It has one row for each metric, with its name, meaning, function, better
  direction, and the places that show it; it also computes metrics by source of the records.

To add a metric, write a function in ``ranking`` or ``regression``, add its row in ``table``, and
add it to docs/metrics.md. The loss is not computed here but in ``nemo_aligner/losses``.
"""
