"""Diffusion models on maxattn: models, training, samplers, sampling and comparisons."""
