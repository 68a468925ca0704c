"""The private names of jax and other packages that maxattn uses, and the tested versions."""
