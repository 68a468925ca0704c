"""Parts of the blockwise kernel: chunk sizes, lists of visited chunks, scores of two chunks."""
