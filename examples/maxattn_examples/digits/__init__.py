"""A small Wan-style text-to-video model of moving handwritten digits."""
