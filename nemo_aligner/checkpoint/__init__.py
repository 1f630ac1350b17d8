"""Checkpoints: of training runs, of NeMo and Megatron, and of Hugging Face, read and written.

Files may be anyone's. Whatever is missing, damaged, unsafe or not supported is a CheckpointError
that names the file and the place in it, from every function here; docstrings name other errors.
"""
