"""Wan 2.1: the video transformer at its real sizes, with maxattn inside. Text- and
image-to-video.
"""
