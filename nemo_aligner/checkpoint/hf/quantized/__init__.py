"""Read quantized weights of Hugging Face folders: each becomes a lazy tensor in full precision.

``methods`` reads ``quantization_config`` of a ``config.json``, and chooses the module of its
format: ``bitsandbytes`` (nf4, fp4, int8), ``integers`` (GPTQ, AWQ), ``compressed_tensors``,
``block_fp8`` (DeepSeek) or ``mxfp4`` (gpt-oss). ``stored`` holds what they share.
"""
