"""Splash attention on TPUs, JAX's and tokamax's."""
