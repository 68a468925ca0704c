"""Kernels of GPU libraries: a call is cut into rectangles that the library can mask."""
