"""How a run is laid out over processes: launch, layout, collectives, and megatron-core without CUDA."""
