"""What `generate_wan.py` and `generate_sdxl.py` share: files in and out, guidance, the loop,
torch's part.
"""
