"""Flux.1, dev and schnell: its transformer, what it learns, and how it is sampled."""
