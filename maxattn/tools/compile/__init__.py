"""Compile for TPUs that are not here, and read what the compiler made."""
