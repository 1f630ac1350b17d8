"""From data files to packs of tokens.

Data flows through these files in this order:

- ``files.py``: lines of JSON lines, JSON lists and tables, with their numbers.
- ``formats/``: the public data formats; ``readers.py``: the records of a file, by its format.
- ``records.py``: ``Comparison`` and ``Rating``. ``clean.py``: which records are dropped, and why.
- ``tokenize.py``: a block of records to arrays of tokens; ``token_workers.py``: in several
  processes.
- ``token_index.py``: the arrays of a whole file; ``token_cache.py``: the same arrays on the disk,
  for later runs.
- ``dataset.py``: the files of a data set together, and the order of the records in an epoch.
- ``packing.py``: which records, or sequences to score, share a pack.
- ``training_data.py``: all data sets of a run, and the packs of each training step.

Other files serve the subcommands of ``nemo-aligner data``: ``report.py`` (the table of a file),
``inspect.py``, ``split.py``, ``augment.py``, ``demo.py`` and ``hub.py`` (download a data set).
``texts.py`` reads samples to score from a file, and ``rollout.py`` defines what a critic learns
from.
"""
