"""Times of TPU tiles, estimated from the schedules that libtpu compiles; the fastest tiles."""
