"""The Python API: the verbs of the command line as functions, in the caller's process.

- ``training.py``: ``nemo_aligner.train`` writes records to files, runs training, and returns the
  trained model. ``run_training`` is what it shares with the verb ``train``.
- ``reward_model.py``: ``nemo_aligner.RewardModel`` loads a model at its first use, and scores,
  evaluates and exports. All loaded models share one process group and parallel layout
  (``_Session``). ``export_archive`` is what it shares with the verb ``export``.

Both take settings by the same keys as the command line, and raise its errors. The modules import
torch only when a model is trained or loaded, because the command line imports them for its options.
``nemo_aligner/__init__.py`` exports the public names.
"""
