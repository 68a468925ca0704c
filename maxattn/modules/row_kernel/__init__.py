"""One kernel, written in CuTe, that norms rows: read a row, add, take moments, scale and shift,
rotate, write. `norm_rope.py` and `adaptive_layer_norm.py` call it.

Files in reading order: `work.py` (what is done to a row, which thread takes what), `kernel.py` (the
kernel), `thread.py` (loads, stores, numbers and sums), `call.py` (calls from jax).
"""
