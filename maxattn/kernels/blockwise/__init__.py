"""The parts of the blockwise kernel: chunk sizes, lists of visited chunks, scores of a chunk."""
