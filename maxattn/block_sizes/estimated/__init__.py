"""What TPU tiles cost by the schedule that libtpu makes of a kernel, and which are the fastest."""
