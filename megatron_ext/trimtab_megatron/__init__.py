"""The ranks: Megatron-core training that times its own pipeline stages."""
