"""Wan 2.1: the text- and image-to-video transformer at its real sizes, with maxattn inside."""
