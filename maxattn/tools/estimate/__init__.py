"""Estimate times of TPU kernels from the compiler's schedules; nothing runs."""
