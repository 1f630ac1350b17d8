"""How a run is laid out over processes, and megatron-core on machines without CUDA."""
