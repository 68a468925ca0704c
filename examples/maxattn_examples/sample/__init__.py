"""Sampling from a pipeline's folder: files in and out, checks, the loop. It knows no model."""
