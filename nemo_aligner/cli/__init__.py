"""The command line ``nemo-aligner VERB``: from the arguments to an exit code.

A verb is a subcommand, such as ``train``.

1. ``main.py`` finds the verb and imports its module (``VERBS``, ``_MODULES``). It turns exceptions
   into one-line messages and exit codes. It also has the verbs ``quickstart``, ``doctor`` and
   ``completion``.
2. ``parser.py`` parses options, and settings as ``key=value``. For an unknown option it suggests a
   similar one. It also starts several ranks for ``--processes``.
3. The modules of the verbs have two functions per verb, ``VERB_parser`` and ``run_VERB``:
   ``train.py`` (``plan``, ``train``, ``probe``), ``evaluate.py`` (``evaluate``, ``compare``,
   ``report``, ``check``), ``serve.py`` (``serve``, ``serve-critic``, ``gateway``, ``score``),
   ``checkpoint.py`` (``convert``, ``import``, ``export``, ``merge``, ``cache``), ``data.py``
   (``data ...``).

``run_VERB`` imports what it needs, so that ``--help`` and errors in settings need no torch.
``scripts/reference.py`` generates docs/settings.md from the parsers.
"""
