"""A small Wan-style text-to-video model on handwritten digits: what `train_wan.py` and
`generate_wan.py` share.
"""
