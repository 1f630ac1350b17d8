"""Convert Hugging Face and GGUF models to ``.nemo`` archives, and export reward models.

Conversion to ``.nemo`` (entry point: ``convert``):

- ``source`` opens a folder, a model on the hub or a GGUF file, and compares its tensors with those
  of its family. It uses ``tensor_names`` (prefixes of training wrappers), ``multimodal`` (the text
  decoder of a larger model), ``quantized/`` (quantized weights), and ``gguf`` with ``gguf_config``
  (the GGUF format).
- ``families/`` translates settings and tensors of each supported decoder, in both directions.
- ``heads`` finds the reward head, in the layouts of published models, and ``labels`` the names of
  its rewards.
- ``convert`` writes the archive, and builds or reads the scoring contract.

Export from ``.nemo`` (entry point: ``export``):

- ``reward_archive`` reads an archive with Hugging Face's names, and converts the head's form.
- ``export`` writes a folder; ``check`` loads it with transformers and compares its rewards.
- ``pooling`` exports heads that read the mean of a response, for sentence-transformers.
- ``push`` uploads the result to the hub.
- ``adapter`` exports LoRA for peft, and ``gguf_out`` a GGUF file for llama.cpp. ``card`` writes the
  model card.

Without conversion, ``classifier`` scores samples with a published reward model in transformers.
"""
