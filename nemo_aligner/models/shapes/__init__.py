"""Architecture of a model as dataclasses, read from ``model_config.yaml`` without importing torch.

- ``decoder.py`` has ``ModelShape``, the whole model. ``ModelShape.of_layer`` returns the shape of
  one layer, where the layers of a model differ.
- ``layer.py`` reads a layer's norms, activation and windows, and rejects unsupported values;
  ``frequency.py`` reads which layers a setting applies to.
- ``hybrid.py`` reads the kinds of layers that have either a mixer or an MLP.
- ``rope.py``, ``experts.py``, ``linear_attention.py`` and ``latent_attention.py`` read these parts
  of a layer.
- ``head.py`` has the reward head, and ``lora.py`` the adapters.
"""
