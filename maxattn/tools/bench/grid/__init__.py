"""A drawn grid of calls: what every kernel takes on them, and what `auto` makes of that."""
