"""Settings: one dataclass per section, and how a key gets from YAML or ``key=value`` to it.

1. ``load.py`` reads a YAML file (text stays text), and then the ``key=value`` overrides.
2. ``compat.py`` translates the keys of NeMo-Aligner 0.7 by a table, and collects notes.
3. ``load.py`` merges all updates, resolves references such as ``${model.seed}``, and builds the
   dataclass of the verb. Each section checks its values in ``__post_init__`` by ``Checks``
   (``common.py``). All problems are raised in one ``SettingsError``.
4. ``describe.py`` suggests what an unknown key was meant to be.

The dataclasses, whose fields have their defaults and help texts:
``model.py`` (data, LoRA, layout, optimizer, head), ``training.py`` (``train``, ``probe``),
``evaluation.py`` (``evaluate`` and reward environments), ``serving.py`` (``serve``, ``gateway``,
``serve-critic``). A field is added there and nowhere else; ``docs/settings.md`` is generated.

Next to the path: ``describe.py`` renders ``--help`` and knows the installed package, ``dtypes.py``
has the names of dtypes in files. Nothing here imports torch at the top level.
"""
