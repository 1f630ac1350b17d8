"""Settings: one dataclass per section, and how a key gets from YAML or ``key=value`` to its field.

1. ``load.py`` reads a YAML file, and then the ``key=value`` overrides; ``yaml_text.py`` keeps it
   from reading settings of type str as numbers or bools.
2. ``compat.py`` translates the keys of NeMo-Aligner 0.7 with a table, and collects notes.
3. ``load.py`` merges all updates, resolves references such as ``${model.seed}``, and builds the
   dataclass of the verb. Each section checks its values in ``__post_init__`` with ``Checks``
   (``common.py``). All problems are raised in one ``SettingsError``.
4. For an unknown key, ``describe.py`` suggests a similar one. ``ineffective.py`` finds settings
   that do nothing because of others.

The fields of the dataclasses have the defaults and help texts of all settings. The dataclasses are
in ``model.py`` (data, LoRA, layout, optimizer, head), ``training.py`` (``train``, ``probe``),
``evaluation.py`` (``evaluate`` and reward environments), ``serving.py`` (``serve``,
``serve-critic``) and ``gateway.py`` (``gateway``). To add a setting, add a field there, and
run ``scripts/reference.py``.

``describe.py`` also renders ``--help`` and describes the installed package. ``dtypes.py`` has the
names of dtypes in files. No module here imports torch at the top level.
"""
