"""SDXL: the image UNet at its real size, with maxattn inside."""
