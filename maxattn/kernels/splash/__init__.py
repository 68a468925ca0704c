"""Splash attention on TPUs, with the kernels of JAX or of tokamax."""
