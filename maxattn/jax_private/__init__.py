"""All that maxattn uses from inside jax and the packages that it calls, with tested versions."""
