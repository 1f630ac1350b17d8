"""Training: from settings to a reward model's archive, and the critic of PPO.

A run goes through the files in this order:

- ``run.py`` builds the parts, runs the trainer, and exports the best model. ``describe.py`` has the
  texts that it prints. ``dry_run.py`` does all that needs no weights and prints what would happen.
- ``prepare.py`` reads the base checkpoint, resolves and checks the settings, and tokenizes the data
  with ``nemo_aligner/data``.
- ``build.py`` loads the model, freezes and wraps it, and builds optimizer and learner.
- ``resume.py`` compares the newest checkpoint with the run and loads it; it also writes the facts
  of the run for its report.
- ``trainer.py`` is the loop: step, validation, save, early stopping. ``signals.py`` says when the
  run has to stop (Ctrl-C, SIGTERM, SIGUSR1, time limit).
- ``learner.py`` is one training step and one validation on all ranks. ``nonfinite.py`` finds the
  records behind a NaN, and ``heldout.py`` keeps the rewards of the last validation.
- ``optimizer.py`` clips gradients, scales the loss and sets the learning rate. ``adamw.py`` updates
  the weights, and ``optimizer_state.py`` shards, saves and loads moments.
- ``loggers.py`` sends metrics to files, services and the terminal; ``tracking.py`` opens W&B and
  MLflow and writes ``metrics.jsonl``.

``critic.py`` trains a critic for ``nemo-aligner serve-critic``, outside of this path.
"""

import nemo_aligner.distributed  # noqa: F401 - before the first import of megatron-core
