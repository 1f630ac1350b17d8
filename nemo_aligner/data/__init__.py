"""From data files to packs of tokens.

Data flows through these modules in this order:

- ``files.py`` reads JSON lines, JSON lists and tables as objects with line numbers; ``tables.py``
  reads the tables that are text.
- ``formats/`` defines the public data formats; ``readers.py`` reads a file's records by its format,
  and ``prompt_template.py`` puts text around their prompts.
- ``records.py`` defines ``Comparison`` and ``Rating``; ``clean.py`` decides which are dropped.
- ``tokenize.py`` turns a block of records into arrays of tokens, and finds the prefix that the
  samples of a record share; ``token_workers.py`` does so in several processes.
- ``token_index.py`` holds the arrays of a whole file; ``token_cache.py`` keeps them on disk for
  later runs.
- ``dataset.py`` joins the files of a data set, and orders the records in an epoch.
- ``packing.py`` decides which records share a pack, and groups sequences to score by their shared
  prefixes.
- ``training_data.py`` builds all data sets of a run, and the packs of each training step.

Other modules serve the subcommands of ``nemo-aligner data``: ``report.py`` (the table of a file)
with ``label_summary.py``, ``inspect.py``, ``split.py``, ``augment.py``, ``demo.py`` and ``hub.py``
(download a data set). ``texts.py`` reads samples to score from a file, and ``rollout.py`` defines
what a critic learns from.
"""
