"""Open ``.nemo`` archives, load them into a reward model, and write them.

The modules, in the order in which an archive is read:

- ``archive``: ``open_nemo`` unpacks an archive once per host, compares its files with its
  ``checksums``, and yields a ``NemoFolder``. ``write`` writes archives, complete or not at all.
- ``folder``: ``NemoFolder`` finds settings, weights, tokenizer and scoring contract in a checkpoint
  of this package, NeMo 1 or 2, Megatron-Bridge or Megatron-LM; ``settings`` translates their
  settings.
- ``load_weights``: compares the stored tensors with the model's shape, and loads them into a model,
  or offers them one at a time to conversions.
- ``reward_model``: loads a model to train or to score, saves a reward model, and reads tokenizer
  and contract without the weights. ``initial_head`` copies a head from another model.

Two more modules: ``fingerprint`` identifies the weights of an archive, and of its body alone;
``training_data`` names the data that a model was trained on.
"""

import nemo_aligner.distributed  # noqa: F401 - before the first import of megatron-core
