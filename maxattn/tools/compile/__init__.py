"""Compile for TPUs without having one, and read the compiled programs."""
