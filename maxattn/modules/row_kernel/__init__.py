"""A CuTe kernel on rows, each the channels of one token: add, normalise, scale, shift, rotate.

`norm_rope.py` and `adaptive_layer_norm.py` call the kernel. Files in reading order: `work.py` (the
work on a row, and the channels of each thread), `kernel.py` (the kernel), `thread.py` (loads,
stores and sums), `call.py` (calls from jax).
"""
