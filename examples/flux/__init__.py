"""A block of Flux: text and picture side by side, in one attention."""
