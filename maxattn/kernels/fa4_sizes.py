"""Where FlashAttention-4 is given lists of tiles, and how large the tiles are."""

from __future__ import annotations

from typing import NamedTuple

HOPPER_GPUS = ("H100", "H200", "H800", "H20", "GH200")
VERSIONS = "0.1."  # of fa4-jax: the launch uses what it keeps to itself


def takes_lists(version: str, device_kind: str) -> bool:
    """Tell whether this fa4-jax can be launched with lists on this GPU."""
    return version.startswith(VERSIONS) and any(name in device_kind for name in HOPPER_GPUS)


class Tile(NamedTuple):
    """The queries and keys of a tile."""

    queries: int
    keys: int


def forward_tile(head_dim: int) -> Tile:
    """Return the tile of the forward."""
    if head_dim <= 64:
        return Tile(192, 128)
    if head_dim <= 96:
        return Tile(192, 144)
    if head_dim <= 128:
        return Tile(128, 128)
    return Tile(128, 112) if head_dim <= 192 else Tile(128, 80)


def backward_tile(head_dim: int) -> Tile:
    """Return the tile of the backward, as fa4-jax's own table has it for masks that are no band."""
    if head_dim <= 64:
        return Tile(128, 128)
    if head_dim <= 96:
        return Tile(64, 128)
    if head_dim <= 128:
        return Tile(80, 128)
    return Tile(64, 96) if head_dim <= 192 else Tile(64, 64)
