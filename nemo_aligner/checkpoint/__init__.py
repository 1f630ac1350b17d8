"""Read and write checkpoints of training runs, NeMo, Megatron and Hugging Face.

The modules, in the order in which a model passes through them:

- ``hf/`` converts a Hugging Face or GGUF model into a ``.nemo`` archive; ``importing`` does the
  same for checkpoints of NeMo and Megatron.
- ``conversion_cache`` runs these conversions for commands that take a model in any format.
- ``nemo/`` opens, checks and writes ``.nemo`` archives, and loads them into a reward model.
- ``weights/`` reads and writes tensors in every stored format: distributed checkpoints, zarr.
- ``run`` saves, resumes and ranks the checkpoints of a training run, each with a ``run_state``;
  ``run_folder`` names a run's files, and ``run_lock`` keeps a second job out of its folder.
- ``merge`` averages finished reward models, or extrapolates from a finished model.
- ``hf/`` exports a finished model to Hugging Face or GGUF.

All of these modules use ``decoder_tensors`` (names and shapes of a decoder's tensors) and
``safe_load`` (YAML, JSON and pickles, read without running code and at a bounded cost).

Files are not trusted. Every function here raises CheckpointError for anything in a file that is
missing, damaged, unsafe or not supported, even where its docstring does not list the error. The
message names the file and the place in it.
"""
