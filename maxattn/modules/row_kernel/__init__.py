"""A CuTe kernel on rows: read a row, add, normalise, scale and shift, rotate, write.

`norm_rope.py` and `adaptive_layer_norm.py` call it. Files in reading order: `work.py` (the work on
a row, and the channels of each thread), `kernel.py` (the kernel), `thread.py` (loads, stores and
sums), `call.py` (calls from jax).
"""
