"""Small tools that every other package may use; nothing here imports another package of ours.

- ``errors.py``: the error classes for users (``AlignerError``), and ``shown`` and ``short``, which
  format values in messages.
- ``processes.py``: which rank this is, which rank reports an error, how to start our own verbs, and
  temporary folders.
- ``console.py``: output of rank 0: wrapped lines, numbers, durations, progress bars.
- ``writing.py``: atomic writing of files, and messages about a full disk.
- ``host_transfer.py``: copies between host memory and GPU that do not block. The only file here
  that imports torch.
"""
