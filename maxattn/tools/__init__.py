"""The command line and the tools that it runs: measuring, tuning, compiling, estimating."""
