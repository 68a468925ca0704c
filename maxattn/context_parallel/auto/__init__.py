"""`context_parallel: auto`: which strategy, by arithmetic."""
