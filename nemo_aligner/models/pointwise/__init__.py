"""RMSNorm, SwiGLU and RoPE of a decoder layer, each by one of several implementations."""
