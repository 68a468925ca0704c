"""How long a step of a model takes at its real size, how much memory, and where the time goes."""
