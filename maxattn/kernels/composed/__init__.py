"""Kernels that are made of kernels: two as one, and one over padded heads."""
