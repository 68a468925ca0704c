"""Which kernels `auto` tries, in order."""
