"""GPU kernels that a library carries whole: calls cut into pieces that the library can mask."""
