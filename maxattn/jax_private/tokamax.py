"""Where tokamax keeps its splash attention.

In tokamax 0.0.12 to 0.0.17 the functions take the same arguments. What differs is inside: 0.0.17
leaves out tiles whose segment ids cannot meet, and with segment ids its backward sums dQ's parts in
three buffers of the queries' dtype. 0.0.18's nightlies have the same modules in another folder.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from maxattn.errors import Unsupported
from maxattn.jax_private.versions import TOKAMAX_SPLASH

FOLDERS = (
    "tokamax._src.ops.experimental.tpu.splash_attention",  # to 0.0.17
    "tokamax._src.ops.splash_attention",  # from 0.0.18
)


def library() -> Any:
    """Import the module of tokamax's splash kernels; only a call of the kernel needs it."""
    for folder in FOLDERS:
        try:
            return import_module(f"{folder}.splash_attention_kernel")
        except ModuleNotFoundError as error:
            # What tokamax itself lacks, such as a package that it imports, is its own error.
            if not f"{folder}.splash_attention_kernel".startswith(error.name or "?"):
                raise
    rule = f"its splash attention is in none of the folders of tokamax{TOKAMAX_SPLASH}"
    remedy = 'pip install "maxattn[tokamax]", or use attention: flash'
    raise Unsupported("attention", "tokamax_flash", rule, remedy)
