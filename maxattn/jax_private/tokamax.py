"""Import the module of tokamax's splash attention.

The module's functions take the same arguments in tokamax 0.0.12 to 0.0.17. From 0.0.17 on, tiles
whose segment ids differ are skipped, and with segment ids the backward sums partial dQ in three
buffers of the queries' dtype. Nightly builds of 0.0.18 have the same modules in another folder.
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
    """Import the module, for a call of the kernel."""
    for folder in FOLDERS:
        try:
            return import_module(f"{folder}.splash_attention_kernel")
        except ModuleNotFoundError as error:
            # If a package that tokamax imports is missing, raise that error.
            if not f"{folder}.splash_attention_kernel".startswith(error.name or "?"):
                raise
    rule = f"its splash attention was not found in the folders of tokamax{TOKAMAX_SPLASH}"
    remedy = 'pip install "maxattn[tokamax]", or use attention: flash'
    raise Unsupported("attention", "tokamax_flash", rule, remedy)
