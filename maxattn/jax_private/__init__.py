"""All that maxattn takes from inside jax and from inside the packages that it calls, and for which
versions.
"""
