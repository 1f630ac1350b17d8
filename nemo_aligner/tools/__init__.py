"""Commands that check an installation, a checkpoint or a trainer, and the quickstart.

- ``doctor``: ``nemo-aligner doctor`` examines this machine: packages, GPUs, memory, disk, compiler.
  The command works without torch, and without any other package.
- ``quickstart``: ``nemo-aligner quickstart`` runs the other commands one after another: convert a
  base model, get data, train, evaluate, serve and score.
- ``overfit_test``: ``nemo-aligner probe`` checks that training learns a few records, and also the
  same records with swapped labels.
- ``check``: ``nemo-aligner check`` scores the same samples in different batches and layouts.
  ``layouts_worker`` scores them at every layout of a process group, and ``invariance`` compares the
  rewards and judges the differences.

The commands' options are in ``nemo_aligner/cli``. This module imports nothing, because ``doctor``
has to run where imports fail.
"""
