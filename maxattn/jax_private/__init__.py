"""What maxattn uses from inside jax and other packages, and the versions that were tested."""
