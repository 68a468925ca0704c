"""A tensor of torch, or an imitation if torch is not installed."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any


@dataclass(frozen=True)
class TorchDtype:
    """Imitate torch's dtype, which has no `name`."""

    text: str

    def __repr__(self) -> str:
        return f"torch.{self.text}"


@dataclass(frozen=True)
class TorchTensor:
    """Imitate torch's tensor: its shape is a tuple, its dtype torch's own."""

    shape: tuple[int, ...]
    dtype: TorchDtype


def torch_tensor(shape: tuple[int, ...], dtype: str = "float32") -> Any:
    """Make a tensor of zeros."""
    if find_spec("torch") is None:
        return TorchTensor(shape, TorchDtype(dtype))
    import torch

    return torch.zeros(shape, dtype=getattr(torch, dtype))
