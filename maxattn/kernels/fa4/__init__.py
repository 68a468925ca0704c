"""FlashAttention-4 on NVIDIA GPUs: kernel.py is what others import."""
