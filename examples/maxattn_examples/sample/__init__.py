"""Sampling from a pipeline's folder, for any model: input and output files, checks, the loop."""
