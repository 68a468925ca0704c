"""Wan 2.1 and 2.2: the text- and image-to-video transformer at full size, training and sampling."""
