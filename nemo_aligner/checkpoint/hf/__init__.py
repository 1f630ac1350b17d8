"""Convert Hugging Face and GGUF models to ``.nemo`` archives, and export reward models to them.

In (``convert``):

- ``source`` opens a folder, a model on the hub or a GGUF file, and compares its tensors with those
  of its family. It uses ``tensor_names`` (prefixes of training wrappers), ``multimodal`` (the text
  decoder of a larger model), and ``gguf`` with ``gguf_config`` (the GGUF format).
- ``families/`` translates settings and tensors of each supported decoder, in both directions.
- ``heads`` finds the reward head, in the layouts that are published.
- ``convert`` writes the archive, and builds or reads the scoring contract.

Out (``export``):

- ``reward_archive`` reads an archive with Hugging Face's names, and converts the head's form.
- ``export`` writes a folder; ``check`` loads it with transformers and compares its rewards.
- ``pooling``: heads that read the mean of a response, for sentence-transformers.
- ``adapter``: LoRA for peft. ``gguf_out``: a GGUF file for llama.cpp. ``card``: the model card.

Next to both: ``classifier`` scores with a published reward model by transformers, unconverted.
"""
