"""FlashAttention-4 on NVIDIA GPUs, through fa4-jax."""
