"""Price a TPU's kernels by the schedule that its compiler made; nothing runs."""
