"""The reward model on megatron-core: its architecture, layers, and training and scoring steps.

The modules, in the order in which a model is built and a pack (a batch of sequences laid out one
after the other) goes through it:

- ``shapes/`` reads the architecture from ``model_config.yaml``, without importing torch.
- ``reward_model.py`` has ``GPTRewardModel``, ``reward_head.py`` its head, and ``readout.py`` the
  mean over a reply's tokens, which a head may read instead of the last token. ``training_wrap.py``
  freezes layers and wraps the model for training, ``batch_invariance.py`` makes rewards independent
  of their batch.
- ``backbone.py`` has megatron-core's config and layer spec, ``decoder_layer.py`` the layers. Their
  parts are in ``layers.py`` (linear layers, norms), ``activations.py``, ``rotary.py`` (RoPE),
  ``experts.py``, ``expert_rows.py`` and ``router.py`` (mixture-of-experts), and ``lora.py``.
- ``attention/`` computes attention over packs, ``pointwise/`` the operations between the matmuls.
- ``pack_context.py`` defines ``PackContext``, which tells each layer what it needs to know about a
  pack.
- ``step.py`` runs packs through Megatron's schedules: training, scoring, a critic's values.

Modules for optional features and for compatibility: ``cuda_graphs.py`` with ``fixed_sizes.py``
(CUDA graphs of the decoder), ``activation_offload.py`` (activations in host memory), ``offload.py``
(an idle model in host memory), ``shared_body.py`` (one body shared by several models), and
``internals.py`` (private names of torch and megatron-core).
"""

import nemo_aligner.distributed  # noqa: F401 - before the first import of megatron-core
