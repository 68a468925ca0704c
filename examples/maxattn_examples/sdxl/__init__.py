"""SDXL: its UNet at full size with maxattn's attention, its training and its sampling."""
