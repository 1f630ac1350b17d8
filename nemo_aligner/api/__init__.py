"""The Python API: commands of ``nemo-aligner`` as functions that run in the caller's process.

- ``training.py``: ``nemo_aligner.train`` writes records to files, runs training, and returns the
  trained model. The command ``train`` shares ``run_training`` with it.
- ``reward_model.py``: ``nemo_aligner.RewardModel`` loads a model at its first use, and scores,
  evaluates and exports. All loaded models share one process group and one parallel layout
  (``_Session``). The command ``export`` shares ``export_archive`` with it.

Settings have the same keys and errors as in the commands. These modules import torch only when a
model is trained or loaded, so that the command line, which imports them, starts quickly.
``nemo_aligner/__init__.py`` exports the public names.
"""
