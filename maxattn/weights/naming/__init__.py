"""Names of a model's layers in other codes than diffusers': a table a family, and how they meet."""
