"""Training of a reward model, from the settings to a ``.nemo`` file, and of a PPO critic.

A training run uses the files in this order:

- ``run.py`` builds the parts, runs the trainer, and exports the best model. ``describe.py`` writes
  the text that a run prints. ``dry_run.py`` runs every check that needs no weights, and describes
  what the run would do.
- ``prepare.py`` reads the base checkpoint, resolves and checks the settings, and tokenizes the data
  with ``nemo_aligner/data``.
- ``build.py`` loads the model, freezes and wraps it, and builds the optimizer and the learner.
- ``resume.py`` checks that the newest checkpoint belongs to the run, and loads it.
  ``run_facts.py`` writes the facts about the run that ``nemo-aligner report`` shows.
- ``trainer.py`` is the loop: step, validation, save. ``early_stopping.py`` ends a run that no
  longer improves, and ``signals.py`` stops one early (Ctrl-C, SIGTERM, SIGHUP, SIGUSR1, or the
  time limit).
- ``learner.py`` computes one training step or one validation on all ranks. ``nonfinite.py`` finds
  the records that caused a NaN, and ``heldout.py`` writes the rewards of the last validation.
- ``optimizer.py`` clips gradients, scales the loss and sets the learning rate. ``adamw.py`` updates
  the weights. ``optimizer_state.py`` shards, saves and loads Adam's moments.
- ``loggers.py`` sends metrics to ``metric_files.py`` (``metrics.jsonl``, CSV, TensorBoard) and
  ``tracking.py`` (W&B, MLflow). ``progress.py`` writes the lines in the terminal, and ``gauges.py``
  measures GPU and time. An error in any of these outputs, except in ``metrics.jsonl``, does not end
  a run (``side_outputs.py``).

``critic.py`` trains the PPO critic of ``nemo-aligner serve-critic``. It uses some of these files,
but not the loop of ``trainer.py``, because an RL trainer sends it each batch.
"""

import nemo_aligner.distributed  # noqa: F401 - before the first import of megatron-core
