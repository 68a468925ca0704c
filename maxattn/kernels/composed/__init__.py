"""Kernels made of other kernels: a pair, blocks as batch rows, padded head dims."""
