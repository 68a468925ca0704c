"""The estimated times of TPU tiles, by the schedules that libtpu compiles; the fastest tiles."""
