"""The reward model on megatron-core: backbone, packed attention, head and step."""
