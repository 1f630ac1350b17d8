"""RMSNorm, SwiGLU, RoPE and the sum of experts' outputs, each with several implementations.

- ``operations.py`` declares the operations, and puts an implementation into a model.
- ``choice.py`` chooses one as ``model.pointwise_kernels`` says, and tests it where it is the
  default.
- ``eager.py`` is the reference: torch's operations, as autograd functions that save few tensors.
- ``fused.py`` makes autograd functions from forward and backward kernels: those of
  ``triton_kernels.py`` and ``triton_experts.py`` (default on a GPU), or formulas for
  ``torch.compile`` in ``compiled.py``.
- ``liger.py`` calls the package liger-kernel.
- ``triton_dequantize.py`` dequantizes weights on a GPU, whatever is chosen: its bits are torch's.

Scoring on a CPU uses ``nemo_aligner/cpu/kernels.py`` instead where it can.
"""
