"""What the blockwise kernel is made of: chunk sizes, which chunks are visited, one chunk."""
