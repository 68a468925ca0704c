"""The ring: K and V travel round the context axis."""
