"""A parameter of a module by its path, and a tensor of any library as numpy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from flax import nnx

from maxattn.config.errors import printable
from maxattn.errors import WeightsError


def variable_at(module: nnx.Module, path: tuple[Any, ...]) -> Any:
    """Return the variable at a path of attributes and list indices."""
    here: Any = module
    for part in path:
        here = here[part] if isinstance(part, int) else getattr(here, part)
    return here


def dtype_name(dtype: Any) -> str:
    """Return the name of a dtype of numpy, jax or torch."""
    return str(dtype).removeprefix("torch.")


def read_slice(held: Mapping[str, Any], name: str, index: tuple[slice, ...]) -> np.ndarray:
    """Return a slice of a tensor of numpy, jax, safetensors or torch as numpy.

    Raises:
        WeightsError: it cannot be read, such as an array that was donated.
    """
    try:
        piece = held[name][index]
        if hasattr(piece, "detach"):
            import ml_dtypes
            import torch  # type: ignore[import-not-found]

            piece = piece.detach().cpu().contiguous()
            if piece.dtype == torch.bfloat16:  # which numpy lacks: read by its bits
                return piece.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        return np.asarray(piece)
    except (WeightsError, MemoryError):
        raise
    except Exception as error:  # of whichever library made it
        said = printable(f"{type(error).__name__}: {error}", 200)
        rule = f"its numbers are read, and reading them says: {said}"
        remedy = "give arrays that hold numbers, or fetch the files again"
        raise WeightsError("tensors", name, rule, remedy) from error
