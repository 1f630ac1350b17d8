"""The form in which data reaches a model and a loss.

Training, evaluation, a server and a critic all hand packs of this form to ``models/``:

- ``packed.py``: ``PackedBatch``, sequences of token ids laid end to end, and which tokens the head
  reads; ``Records``, which says which samples belong to a record, which rewards belong to a
  sample, and how annotators ranked or labelled them.
- ``cache_use.py``: ``CachedPrefix``, ``Stored`` and ``CacheUse``, by which a pack reuses keys,
  values and states that an earlier pack computed.
- ``pairs.py``: ``PairRows``, the pairs of samples that a loss on comparisons is computed over.
- ``context.py``: ``ContextShare``, the part of a pack that one rank of a context parallel group
  computes.
- ``outputs.py``: ``HeadOutputs`` and ``OutputColumns``, the columns of a head's outputs by name.

``data/packing.py`` decides which sequences share a pack. ``models/step.py`` runs packs.
"""
