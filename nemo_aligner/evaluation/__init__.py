"""Evaluation of reward models: metrics on held-out records, benchmarks, robustness and reports.

In the order in which ``nemo-aligner evaluate`` uses them:

- ``run``: the entry point; checks the settings, measures, prints the table and writes the files.
- ``sources``: opens what is evaluated, as a ``RewardSource``: a model archive, a server, or a
  transformers model.
- ``evaluate``: metrics on a file of pairs or ratings.
- ``run_task``: figures of a benchmark. The benchmarks are in ``tasks/``.
- ``predictions``: the table of rewards and verdicts that both produce, in memory and as an
  ``output_rewards`` file.
- ``robustness``: scores replies again after changes of style (``robustness_pairs``).
- ``report/``: runs and evaluations as one HTML page.

``compare`` is ``nemo-aligner compare``, which reads two ``output_rewards`` files. ``label`` is
``nemo-aligner data label``, which labels comparisons with rewards of teachers. The metrics
themselves are in ``nemo_aligner/metrics``, and training uses the same ones.
"""
