"""Flux.1, dev and schnell: its transformer, its training and its sampling."""
