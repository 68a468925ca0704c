"""What fa4-jax's kernels take for granted of the addresses of their operands.

It promises 256 bytes to the compiler of its kernels, and its calls refuse other addresses. XLA
hands over a slice of a larger array where it lies: of one example's tokens that is a multiple of a
token's bytes, such as 128 of two heads of 32 channels.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from importlib import import_module
from typing import Any, Final

from maxattn.kernels.fa4.cute_packages import import_cute

# The widest load of these kernels is 16 bytes, and so is what the bulk copies ask of an address; a
# row's LSE is read number by number.
ALIGNED: Final = {"_QKV_SPEC": 16, "_QKV3_SPEC": 16, "_F32_SPEC": 16, "_LSE_SPEC": 4}


@cache
def library() -> Any:
    """Return fa4-jax's own module of launches, which promises no more than XLA keeps."""
    import_cute()
    found = import_module("fa4_jax.kernels")  # an extra: it may be missing when this file is read
    for name, size in ALIGNED.items():
        setattr(found, name, replace(getattr(found, name), assumed_align=size))
    return found
