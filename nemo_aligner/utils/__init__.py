"""Small tools for all other subpackages of ``nemo_aligner``; they import none of these.

- ``errors.py``: the error classes for users (``AlignerError``), and ``shown`` and ``short``, which
  format values in messages.
- ``processes.py``: which rank this is, which rank reports an error, how to start a
  ``nemo-aligner`` command as a subprocess, and temporary folders.
- ``console.py``: output of rank 0: wrapped lines, numbers, durations, progress bars.
- ``writing.py``: atomic writing of files, and messages about a full disk.
- ``finite.py``: NaN and infinity as null in JSON.
- ``cache.py``: the cache of converted models and downloaded data sets.
- ``host_transfer.py``: copies between host memory and GPU that do not block the calling thread.
- ``explicit_scores.py``, ``sinks.py``: attention with soft caps or sinks, in plain torch.
- ``missing.py``: messages about files that cannot be read, with the likely correction.
- ``dotted.py``: objects of a user's code, named as ``package.module:NAME``.

Only ``host_transfer.py``, ``explicit_scores.py`` and ``sinks.py`` import torch, so the others load
quickly.
"""
